//! Which calls of `mul_mat_vec` make sense, and how one falls into smaller ones that must give the same bits.

use kiln_gguf::TensorType;

use super::{Call, Experts, Factor, FusedProduct, Gated, NAME};
use crate::mul_mat::{Epilogue, Product};
use crate::operation::{Invalid, require};
use crate::rounded::Rounded;
use crate::tensor::Tensor;

fn is_f32(t: &Tensor) -> bool {
    t.ty == TensorType::F32
}

fn vector(t: &Tensor, len: usize, what: &str) -> Result<(), Invalid> {
    let fits = is_f32(t) && t.is_dense() && t.len() == len;
    require(fits, NAME, || format!("{what} is {t}, want F32[{len}]"))
}

pub(super) fn check(call: &Call) -> Result<(), Invalid> {
    let Product { a, b, d } = call.product;
    require(is_f32(&d), NAME, || format!("d is {d}, want F32"))?;
    match &call.experts {
        Some(experts) => check_experts(call, experts)?,
        None => call.product.check(NAME, &call.epilogue)?,
    }
    if let Some(weight) = call.norm.and_then(|norm| norm.weight) {
        vector(&weight, a.shape[0], "the norm's weight")?;
    }
    let one = call.function.is_none() || (call.gate.is_none() && call.others.is_empty());
    require(one, NAME, || "a function goes with neither a gate nor more matrices".into())?;
    if let Some(Gated { kind, up, bias }) = call.gate {
        require(kind.joins_products(), NAME, || format!("a gate of {} is a step of its own", kind.name()))?;
        let same = up.ty == a.ty && up.shape == a.shape && up.stride == a.stride;
        require(same, NAME, || format!("up is {up}, want the type, extents and strides of {a}"))?;
        if let Some(bias) = bias {
            let experts = if call.experts.is_some() { a.shape[2] } else { 1 };
            vector(&bias, a.shape[1] * experts, "the bias of up")?;
        }
    }
    if let Some(Factor { gate, .. }) = call.factor {
        let fits = is_f32(&gate) && gate.has_dense_rows() && gate.shape == d.shape;
        require(fits, NAME, || format!("the factor's gate is {gate}, want the extents of {d}"))?;
        let alone = call.experts.is_none() && call.others.is_empty() && d.shape[2..] == [1, 1];
        require(alone, NAME, || format!("a factor goes with neither batches, experts nor more matrices, d is {d}"))?;
    }
    for fused in &call.others {
        check_sibling(call, fused)?;
    }
    let bytes = Call::scratch_bytes(&b);
    if let Some(scratch) = &call.scratch {
        let fits = scratch.ty == TensorType::I8 && scratch.is_dense() && scratch.len() >= bytes;
        require(fits, NAME, || format!("rounded columns take I8[{bytes}], not {scratch}"))?;
    }
    check_rounded(call)
}

/// Activations that were rounded by who made them, and results that are rounded for who reads them.
fn check_rounded(call: &Call) -> Result<(), Invalid> {
    let Product { b, d, .. } = call.product;
    let alone = call.experts.is_none() && !call.batch_invariant;
    if let Some(memory) = &call.rounded {
        let one = alone && call.exact && b.rows() == 1;
        require(one, NAME, || {
            format!("b is {b}: one exact column is taken rounded, neither with experts nor batch-invariant")
        })?;
        Rounded::check(memory, b.shape[0], NAME)?;
    }
    if let Some(rounding) = &call.rounding {
        let one = alone && call.others.is_empty() && d.rows() == 1;
        require(one, NAME, || {
            format!("d is {d}: one column is left rounded, neither with experts, more matrices nor batch-invariant")
        })?;
        rounding.check(&d, NAME)?;
    }
    Ok(())
}

fn check_sibling(call: &Call, fused: &FusedProduct) -> Result<(), Invalid> {
    let b = call.product.b;
    let alone = call.gate.is_none() && call.experts.is_none() && call.epilogue.residual.is_none();
    require(alone, NAME, || "more matrices go with a bias and a norm only".into())?;
    require(b.shape[2] == 1 && b.shape[3] == 1, NAME, || format!("more matrices want no batches, b is {b}"))?;
    require(is_f32(&fused.d), NAME, || format!("d is {}, want F32", fused.d))?;
    let epilogue = Epilogue { bias: fused.bias, residual: None, ..call.epilogue };
    Product { a: fused.a, b, d: fused.d }.check(NAME, &epilogue)
}

fn check_experts(call: &Call, experts: &Experts) -> Result<(), Invalid> {
    let Product { a, b, d } = call.product;
    let ids = experts.ids;
    let [used, tokens, ..] = ids.shape;
    let plain = ids.ty == TensorType::I32 && ids.has_dense_rows() && ids.len() == used * tokens;
    require(plain, NAME, || format!("ids are {ids}, want I32 [used, tokens] with dense rows"))?;
    require(a.shape[0] == b.shape[0], NAME, || format!("a is {a} but b is {b}: rows differ in length"))?;
    require(a.shape[3] == 1, NAME, || format!("a is {a}, want [K, M, experts]"))?;
    let shared = b.shape[1] == 1 || b.shape[1] == used;
    let fits = shared && b.shape[2] == tokens && b.shape[3] == 1;
    require(fits, NAME, || format!("b is {b}, want [K, 1 or {used}, {tokens}]"))?;
    let want = if experts.summed { [a.shape[1], tokens, 1, 1] } else { [a.shape[1], used, tokens, 1] };
    require(d.shape == want, NAME, || format!("d is {d}, want {want:?}"))?;
    let dense = a.has_dense_rows() && b.has_dense_rows() && d.has_dense_rows();
    require(dense, NAME, || "rows must be dense".into())?;
    if let Some(bias) = call.epilogue.bias {
        vector(&bias, a.shape[1] * a.shape[2], "the bias")?;
    }
    if let Some(residual) = call.epilogue.residual {
        let fits = is_f32(&residual) && residual.has_dense_rows() && residual.shape == d.shape;
        require(fits, NAME, || format!("residual is {residual}, want the extents of {d}"))?;
    }
    if experts.summed {
        let beside = b.shape[1] == used && (used == 1 || b.stride[1] == b.row_bytes());
        require(beside, NAME, || format!("b is {b}, want the columns of {used} experts side by side"))?;
        let plain = call.gate.is_none() && call.function.is_none() && call.norm.is_none();
        require(plain, NAME, || "a sum over experts goes with neither a norm, a function nor a gate".into())?;
    }
    if let Some(weights) = experts.weights {
        let fits = is_f32(&weights) && weights.has_dense_rows() && weights.shape == ids.shape;
        require(fits, NAME, || format!("weights are {weights}, want the extents of {ids}"))?;
    }
    Ok(())
}

/// The call in two, at a row that is no multiple of anything: a row's bits do not depend on the others. Calls with
/// fused products are split into their matrices instead, batch-invariant ones into the first activation vector and the rest.
///
/// A result that is left rounded is one whole.
pub(super) fn parts(call: &Call) -> Vec<Call> {
    if call.rounding.is_some() {
        return Vec::new();
    }
    let columns = call.product.b.shape[1];
    if call.batch_invariant && columns > 1 && call.experts.is_none() {
        return vec![call.columns(0, 1), call.columns(1, columns - 1)];
    }
    if !call.others.is_empty() {
        let alone = |s: FusedProduct| Call {
            product: Product { a: s.a, b: call.product.b, d: s.d },
            epilogue: Epilogue { bias: s.bias, ..call.epilogue },
            others: Vec::new(),
            ..call.clone()
        };
        return call.matrices().into_iter().map(alone).collect();
    }
    let rows = call.product.a.shape[1];
    let biased = call.epilogue.bias.is_some() || call.gate.is_some_and(|gate| gate.bias.is_some());
    if rows < 2 || (call.experts.is_some() && biased) {
        // The biases of experts lie M apart: a part of the rows would need its own.
        return Vec::new();
    }
    let cut = (rows / 3).max(1);
    [(0, cut), (cut, rows - cut)].into_iter().map(|(start, len)| narrow(call, start, len)).collect()
}

fn narrow(call: &Call, start: usize, len: usize) -> Call {
    let Product { a, b, d } = call.product;
    let cut = |t: Tensor| t.narrow(0, start, len);
    let product = Product { a: a.narrow(1, start, len), b, d: cut(d) };
    let epilogue =
        Epilogue { bias: call.epilogue.bias.map(cut), residual: call.epilogue.residual.map(cut), ..call.epilogue };
    let gate = call.gate.map(|gate| Gated { up: gate.up.narrow(1, start, len), bias: gate.bias.map(cut), ..gate });
    let factor = call.factor.map(|factor| Factor { gate: cut(factor.gate), ..factor });
    Call { product, epilogue, gate, factor, ..call.clone() }
}
