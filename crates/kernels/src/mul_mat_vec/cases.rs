//! Cases of `mul_mat_vec`.

use kiln_gguf::TensorType::{
    self, F16, F32, I8, I32, MXFP4, MXFP4x30, Q3_Kx1, Q4_0, Q4_0x8, Q4_1, Q4_K, Q6_K, Q6_Kx2, Q6_Kx8, Q8_0, Q8_0x8,
};

use super::tuning::{RowGroup, Slice, Tuning};
use super::{Call, Experts, Factor, FusedProduct, Gated, Norm};
use crate::case::{Case, Data, Level, Tolerance};
use crate::formats::FORMATS;
use crate::glu::Gate;
use crate::mul_mat::{Epilogue, Product};
use crate::tensor::Tensor;
use crate::unary::Function;

/// Exact activations: what is left is rounding of a few thousand terms in f32.
const EXACT: Tolerance = Tolerance::Nmse(1e-9);
/// Activations of 16 bits, where products are of integers: 1e-9 for normal values, 3e-8 was seen where two results nearly
/// cancel; floats are far better.
pub(super) const WIDE: Tolerance = Tolerance::Nmse(1e-7);
/// Activations rounded to 8 bits: 1.6e-5 for even and 2.6e-5 for normal values, on average; few results spread around it.
const ROUNDED: Tolerance = Tolerance::Nmse(1e-4);

/// Judged with exact activations, or on every path.
#[derive(Clone, Copy, PartialEq)]
enum Columns {
    Exact,
    Any,
}
use Columns::{Any, Exact};

fn judged(mut call: Call, columns: Columns) -> (crate::Call, Tolerance) {
    call.exact = columns == Exact;
    let tolerance = match (call.product.a.ty.is_quantised(), columns) {
        (false, _) => EXACT,
        (true, Exact) => WIDE,
        (true, Any) => ROUNDED,
    };
    (call.into(), tolerance)
}

/// Rows that large matrices repeat: quantising all of theirs would take minutes. A prime, so that a wrong row shows.
const DISTINCT_ROWS: usize = 61;

/// Weights in [-1, 1) by the format's own quantiser, or random blocks where it has none.
pub(super) fn weights(data: &mut Data, ty: TensorType, shape: [usize; 4]) -> Tensor {
    if data.is_blank() {
        return data.output(ty, shape);
    }
    if shape.iter().product::<usize>() > 1 << 20 {
        let few = weights(data, ty, [shape[0], DISTINCT_ROWS, 1, 1]);
        let rows = data.memory.bytes(few.slot).to_vec();
        let tensor = data.output(ty, shape);
        for part in data.memory.bytes_mut(tensor.slot).chunks_mut(rows.len()) {
            part.copy_from_slice(&rows[..part.len()]);
        }
        return tensor;
    }
    if kiln_gguf::quant::can_quantise(ty) && !kiln_gguf::quant::searches_a_grid(ty) {
        data.input(ty, shape)
    } else {
        crate::formats::random_blocks(data, ty, shape, false)
    }
}

pub(super) fn plain(data: &mut Data, ty: TensorType, [k, m, n]: [usize; 3]) -> Call {
    let a = weights(data, ty, [k, m, 1, 1]);
    let b = data.input(F32, [k, n, 1, 1]);
    let d = data.output(F32, [m, n, 1, 1]);
    Call::plain(Product { a, b, d })
}

pub(super) fn scratch_for(data: &mut Data, b: &Tensor) -> Option<Tensor> {
    Some(data.output(I8, [Call::scratch_bytes(b), 1, 1, 1]))
}

fn case(ty: TensorType, shape: [usize; 3], columns: Columns) -> Case {
    let [k, m, n] = shape;
    let how = if columns == Exact { " exact" } else { "" };
    Case::new(format!("mul_mat_vec {ty} k={k} m={m} n={n}{how}"), move |data| {
        let mut call = plain(data, ty, shape);
        // Without scratch memory the activations are rounded in shared memory.
        let before = if columns == Any { n > 1 || k <= 256 } else { n > 3 };
        if before {
            call.scratch = scratch_for(data, &call.product.b);
        }
        judged(call, columns)
    })
}

/// A case of a plain product with `extra` put on.
fn with(
    what: &str,
    (ty, shape, columns): (TensorType, [usize; 3], Columns),
    extra: impl Fn(&mut Data, &mut Call) + Send + Sync + 'static,
) -> Case {
    let how = if columns == Exact { " exact" } else { "" };
    Case::new(format!("mul_mat_vec {what} {ty} {shape:?}{how}"), move |data| {
        let mut call = plain(data, ty, shape);
        extra(data, &mut call);
        judged(call, columns)
    })
}

/// Columns of magnitudes that half floats do not have, judged one by one; `columns` says whether they may be rounded to 8 bits.
fn far_from_one(ty: TensorType, columns: Columns) -> Case {
    const POWERS: [i32; 5] = [0, 40, -40, 20, -20];
    let n = POWERS.len();
    let how = if columns == Exact { " exact" } else { "" };
    Case::new(format!("mul_mat_vec {ty} columns far from 1{how}"), move |data| {
        let call = plain(data, ty, [512, 33, n]);
        let b =
            data.input_with(F32, [512, n, 1, 1], |random, i| random.uniform(-1.0, 1.0) * 2f64.powi(POWERS[i / 512]));
        let call = Call { product: Product { b, ..call.product }, scratch: scratch_for(data, &b), ..call };
        let (call, tolerance) = judged(call, columns);
        let limit = if tolerance == ROUNDED { 2e-4 } else { 1e-6 };
        (call, Tolerance::NmsePerRow(limit))
    })
}

/// Few pipelines: a software GPU spends its time compiling them, and each N is one.
fn small() -> Vec<Case> {
    let mut cases = Vec::new();
    for format in FORMATS {
        // Plain types have no blocks; K is odd in other cases.
        let block = format.ty.block_len().max(32);
        cases.push(case(format.ty, [3 * block, 17, 1], Exact));
        cases.push(case(format.ty, [block, 33, 1], Any));
    }
    for n in 1..=16 {
        cases.push(case(Q8_0, [96, 7, n], Exact));
    }
    for n in [2, 5, 16] {
        cases.push(case(Q8_0, [96, 33, n], Any));
    }
    for columns in [Any, Exact] {
        cases.extend([Q8_0, Q4_K].map(|ty| far_from_one(ty, columns)));
    }
    for m in [1, 2, 3, 15, 16, 17, 1057] {
        cases.push(case(Q4_0, [64, m, 1], if m > 16 { Any } else { Exact }));
    }
    for k in [1, 65, 67, 193] {
        cases.push(case(F32, [k, 5, 1], Exact));
        cases.push(case(F16, [k, 5, 3], Exact));
    }
    // Rows for parts of a subgroup, of one to four threads here, with teams and rows to spare.
    for (k, m) in [(3, 9), (8, 37), (12, 130), (16, 5)] {
        cases.push(case(F32, [k, m, 1], Exact));
    }
    cases.push(case(F16, [16, 21, 5], Exact));
    cases.push(with("parts of a subgroup, normed, with a residual,", (F32, [16, 19, 3], Exact), |data, call| {
        call.norm = Some(Norm { weight: Some(data.input(F32, [16, 1, 1, 1])), eps: 1e-5 });
        call.epilogue.residual = Some(data.input(F32, [19, 3, 1, 1]));
    }));
    cases.push(case(Q4_K, [768, 5, 2], Exact));
    cases.push(case(Q4_K, [768, 5, 4], Exact));
    cases.push(case(Q6_Kx2, [512, 9, 5], Exact));
    for ty in [Q4_0, Q6_K, F16] {
        cases.push(case(ty, [4096, 3, 1], Any));
    }
    // Packed codes with activations in shared memory, for groups of 32 and of 16 elements, and several activations.
    cases.push(case(Q4_0x8, [512, 9, 1], Any));
    cases.push(case(Q3_Kx1, [512, 9, 1], Any));
    cases.push(case(Q6_Kx2, [512, 9, 3], Any));
    cases.extend(layouts());
    cases.extend(splits());
    cases.extend(fusions());
    cases.extend(experts());
    cases.extend(batch_invariant());
    cases
}

/// Activations that must have the bits that each has alone: parts are the first activation vector and the others.
fn batch_invariant() -> Vec<Case> {
    let shapes =
        [(Q4_K, [768, 5, 5], Any), (Q8_0, [96, 33, 3], Exact), (F16, [1096, 19, 16], Exact), (F32, [133, 7, 4], Exact)];
    let case = |(ty, [k, m, n], columns): (TensorType, [usize; 3], Columns)| {
        with("batch_invariant", (ty, [k, m, n], columns), move |data, call| {
            call.norm = Some(Norm { weight: Some(data.input(F32, [k, 1, 1, 1])), eps: 1e-5 });
            call.epilogue.residual = Some(data.input(F32, [m, n, 1, 1]));
            call.scratch = scratch_for(data, &call.product.b);
            call.batch_invariant = true;
        })
    };
    shapes.into_iter().map(case).collect()
}

/// Batches, strides, alignments.
fn layouts() -> Vec<Case> {
    let mut cases = Vec::new();
    for (a_batch, b_batch) in [([1, 1], [3, 2]), ([2, 1], [4, 1]), ([2, 3], [4, 6])] {
        for (ty, columns) in [(F16, Exact), (Q8_0, Any)] {
            cases.push(Case::new(format!("mul_mat_vec {ty} batches {a_batch:?} {b_batch:?}"), move |data| {
                let a = data.input(ty, [64, 9, a_batch[0], a_batch[1]]);
                let b = data.input(F32, [64, 2, b_batch[0], b_batch[1]]);
                let d = data.output(F32, [9, 2, b_batch[0], b_batch[1]]);
                let scratch = scratch_for(data, &b);
                judged(Call { scratch, ..Call::plain(Product { a, b, d }) }, columns)
            }));
        }
    }
    for (what, outer) in [("16", 72), ("8", 76), ("2", 65)] {
        cases.push(Case::new(format!("mul_mat_vec F16 columns, rows at multiples of {what} bytes"), move |data| {
            let a = data.strided_input(F16, [64, 9, 2, 1], [outer, 10, 2, 1]);
            let b = data.strided_input(F16, [64, 2, 2, 1], [80, 3, 2, 1]);
            let d = data.strided_output(F32, [9, 2, 2, 1], [11, 3, 2, 1]);
            judged(Call::plain(Product { a, b, d }), Exact)
        }));
    }
    cases.push(Case::new("mul_mat_vec Q8_0, strided rows, columns and results", |data| {
        let a = data.strided_input(Q8_0, [64, 9, 2, 1], [96, 10, 2, 1]);
        let b = data.strided_input(F16, [64, 2, 2, 1], [80, 3, 2, 1]);
        let d = data.strided_output(F32, [9, 2, 2, 1], [11, 3, 2, 1]);
        let scratch = scratch_for(data, &b);
        judged(Call { scratch, ..Call::plain(Product { a, b, d }) }, Any)
    }));
    cases
}

/// Every reduction, every kind of slice.
fn splits() -> Vec<Case> {
    let mut cases = Vec::new();
    let base = Tuning {
        threads: 64,
        row_group: RowGroup::Subgroup,
        rows: 3,
        prefetch: 2,
        slice: Slice::Groups(1),
        persistent: 0,
        ring: false,
    };
    for (name, row_group, threads) in [
        ("subgroups", RowGroup::Subgroup, 64),
        ("a workgroup's subgroups", RowGroup::Workgroup, 64),
        ("shared memory", RowGroup::Shared, 32),
        ("one thread", RowGroup::Shared, 1),
        ("every thread for itself", RowGroup::Thread, 32),
    ] {
        for (ty, shape) in [(Q4_1, [32 * 75, 23, 2]), (F32, [133, 23, 1])] {
            cases.push(with(&format!("by {name}"), (ty, shape, Any), move |data, call| {
                call.split = Some(Tuning { row_group, threads, ..base });
                call.norm = Some(Norm { weight: None, eps: 1e-5 });
                call.scratch = scratch_for(data, &call.product.b);
            }));
        }
    }
    // More units than workgroups at once, on a device that does not tell its cores: teams go on to a second and third.
    for (ty, shape, row_group, slice, prefetch) in [
        (Q4_K, [768, 1057, 1], RowGroup::Subgroup, Slice::Groups(2), 3),
        (Q8_0x8, [1536, 1057, 2], RowGroup::Subgroup, Slice::Groups(1), 2),
        // Passes that are no whole blocks.
        (MXFP4x30, [2880, 211, 1], RowGroup::Subgroup, Slice::Groups(1), 3),
        (Q4_0, [96, 211, 1], RowGroup::Workgroup, Slice::Groups(1), 2),
        (F16, [1096, 157, 1], RowGroup::Workgroup, Slice::Groups(1), 1),
        (Q4_1, [576, 1057, 1], RowGroup::Thread, Slice::Groups(1), 1),
    ] {
        cases.push(with("rows in a loop", (ty, shape, Any), move |data, call| {
            call.split = Some(Tuning { row_group, slice, prefetch, rows: 2, persistent: 1, ..base });
            call.norm = Some(Norm { weight: None, eps: 1e-5 });
            let fused = |data: &mut Data, m| {
                let (a, d) = (data.input(ty, [shape[0], m, 1, 1]), data.output(F32, [m, shape[2], 1, 1]));
                FusedProduct { a, d, bias: None }
            };
            call.others = vec![fused(data, 67), fused(data, 3)];
        }));
    }
    let quads = |count, step| Slice::Quads { count, step };
    // Every thread has a slice in every pass, and every round is full; quads of 16-bit floats.
    for (ty, [k, m, n], slice, prefetch) in [
        (F16, [1024, 37, 1], quads(1, 4), 4),
        (TensorType::BF16, [1024, 37, 2], quads(1, 4), 2),
        (F16, [1092, 19, 1], quads(1, 4), 2),
        (F32, [2048, 19, 1], Slice::Groups(1), 4),
        (Q4_0, [4096, 19, 1], Slice::Groups(1), 2),
    ] {
        cases.push(with(&format!("even rounds, {slice:?}"), (ty, [k, m, n], Any), move |_, call| {
            call.split = Some(Tuning { slice, rows: 2, prefetch, ..base });
        }));
    }
    for (ty, slice, n) in [
        (Q4_K, Slice::Groups(2), 1),
        (Q4_K, quads(2, 32), 2),
        (Q6_K, quads(4, 32), 1),
        (Q6_K, quads(2, 16), 2),
        (Q4_0, quads(2, 16), 1),
    ] {
        let k = 3 * ty.block_len();
        cases.push(with(&format!("{slice:?}"), (ty, [k, 19, n], Any), move |_, call| {
            call.split = Some(Tuning { slice, rows: 2, prefetch: if n == 1 { 2 } else { 1 }, ..base });
        }));
    }
    cases
}

fn fusions() -> Vec<Case> {
    let mut cases = Vec::new();
    for (ty, columns) in [(Q8_0, Any), (F16, Exact)] {
        cases.push(with("scale and bias", (ty, [64, 19, 3], columns), |data, call| {
            call.epilogue = Epilogue { scale: 0.25, bias: Some(data.input(F32, [19, 1, 1, 1])), residual: None };
        }));
        cases.push(with("residual in place", (ty, [64, 19, 2], columns), |data, call| {
            let residual = data.input(F32, [19, 2, 1, 1]);
            call.product.d = residual;
            call.epilogue.residual = Some(residual);
        }));
        for (n, staged) in [(1, true), (3, false)] {
            cases.push(with("rms_norm", (ty, [160, 33, n], columns), move |data, call| {
                // Small activations show the factor, and that eps is under the root.
                call.product.b =
                    data.input_with(F32, [160, n, 1, 1], |r, i| r.uniform(-0.01, 0.01) * (1 + i / 160) as f64);
                let weight = Some(data.input_with(F32, [160, 1, 1, 1], |r, _| r.uniform(0.5, 2.0)));
                call.norm = Some(Norm { weight, eps: 1e-5 });
                call.scratch = scratch_for(data, &call.product.b).filter(|_| !staged);
            }));
        }
        cases.push(with("fused products", (ty, [96, 19, 2], columns), |data, call| {
            let eight = if call.product.a.ty.is_quantised() { Q4_0 } else { F32 };
            for (ty, m) in [(call.product.a.ty, 5), (call.product.a.ty, 33), (eight, 6), (call.product.a.ty, 7)] {
                let a = weights(data, ty, [96, m, 1, 1]);
                call.others.push(FusedProduct { a, d: data.output(F32, [m, 2, 1, 1]), bias: None });
            }
            call.norm = Some(Norm { weight: None, eps: 1e-6 });
            call.scratch = scratch_for(data, &call.product.b);
        }));
        cases.push(with("fused products with biases", (ty, [64, 19, 1], columns), |data, call| {
            call.epilogue.bias = Some(data.input(F32, [19, 1, 1, 1]));
            for m in [40, 3] {
                let a = weights(data, call.product.a.ty, [64, m, 1, 1]);
                let bias = Some(data.input(F32, [m, 1, 1, 1]));
                call.others.push(FusedProduct { a, d: data.output(F32, [m, 1, 1, 1]), bias });
            }
        }));
    }
    for (ty, function) in [(F32, Function::Tanh), (F16, Function::ExpNegExp), (Q4_0, Function::Relu2)] {
        cases.push(with(function.name(), (ty, [64, 19, 1], Any), move |data, call| {
            call.epilogue.bias = Some(data.input(F32, [19, 1, 1, 1]));
            call.epilogue.residual = Some(data.input(F32, [19, 1, 1, 1]));
            call.function = Some(function);
        }));
    }
    for (ty, shape, in_place) in [(Q4_K, [768, 35, 1], true), (Q8_0, [96, 19, 3], false), (F16, [64, 19, 2], true)] {
        cases.push(with("factor", (ty, shape, Any), move |data, call| {
            let like_d = call.product.d.shape;
            call.factor = Some(Factor { function: Function::Sigmoid, gate: data.input(F32, like_d) });
            call.epilogue.bias = Some(data.input(F32, [shape[1], 1, 1, 1])).filter(|_| !in_place);
            let residual = data.input(F32, like_d);
            call.epilogue.residual = Some(residual);
            if in_place {
                call.product.d = residual;
            }
        }));
    }
    let oai = Gate::SwigluOai { alpha: 1.702, limit: 3.0 };
    for kind in [Gate::Swiglu, Gate::Geglu, Gate::Reglu, oai] {
        for (ty, n, columns) in [(Q4_K, 1, Any), (F16, 3, Exact)] {
            if n > 1 && kind != Gate::Swiglu {
                continue;
            }
            let name = format!("{} n={n}", kind.name());
            cases.push(with(&name, (ty, [256, 35, n], columns), move |data, call| {
                let up = weights(data, ty, [256, 35, 1, 1]);
                // Without a bias each result is one activation vector's; with one, a wrong order of bias and gate shows.
                let bias = (n == 1).then(|| data.input(F32, [35, 1, 1, 1]));
                call.epilogue.bias = bias.map(|_| data.input(F32, [35, 1, 1, 1]));
                call.gate = Some(Gated { kind, up, bias });
                call.norm = (n > 1).then_some(Norm { weight: None, eps: 1e-5 });
            }));
        }
    }
    cases
}

/// Mixtures of experts. `shared`: all slots of a token multiply one activation vector.
fn expert_case(
    ty: TensorType,
    [k, m]: [usize; 2],
    [experts, used, tokens]: [usize; 3],
    shared: bool,
    columns: Columns,
) -> Case {
    let how = if columns == Exact { " exact" } else { "" };
    let name =
        format!("mul_mat_vec {ty} experts={experts} used={used} tokens={tokens} shared={shared} k={k} m={m}{how}");
    Case::new(name, move |data| {
        let a = weights(data, ty, [k, m, experts, 1]);
        let b = data.input(F32, [k, if shared { 1 } else { used }, tokens, 1]);
        let d = data.output(F32, [m, used, tokens, 1]);
        // Random numbers repeat experts within a token and between tokens.
        let ids = data.input_with(I32, [used, tokens, 1, 1], |r, _| r.below(experts) as f64);
        let scratch = scratch_for(data, &b);
        let experts = Some(Experts { ids, weights: None, summed: false });
        judged(Call { experts, scratch, ..Call::plain(Product { a, b, d }) }, columns)
    })
}

/// Mixtures of experts whose results are summed; `weighed`: with shares, biases and a residual.
fn summed_case(
    ty: TensorType,
    [k, m]: [usize; 2],
    [experts, used, tokens]: [usize; 3],
    weighed: bool,
    columns: Columns,
) -> Case {
    let how = if columns == Exact { " exact" } else { "" };
    let name = format!(
        "mul_mat_vec {ty} sum of {used} of {experts} experts, tokens={tokens} weighed={weighed} k={k} m={m}{how}"
    );
    Case::new(name, move |data| {
        let a = weights(data, ty, [k, m, experts, 1]);
        let b = data.input(F32, [k, used, tokens, 1]);
        let d = data.output(F32, [m, tokens, 1, 1]);
        let ids = data.input_with(I32, [used, tokens, 1, 1], |r, _| r.below(experts) as f64);
        let shares = weighed.then(|| data.strided_input(F32, [used, tokens, 1, 1], [used + 3, tokens, 1, 1]));
        let bias = weighed.then(|| data.input(F32, [m, experts, 1, 1]));
        let residual = weighed.then(|| data.input(F32, [m, tokens, 1, 1]));
        let epilogue = Epilogue { scale: 0.5, bias, residual };
        let scratch = scratch_for(data, &b);
        let experts = Some(Experts { ids, weights: shares, summed: true });
        judged(Call { experts, epilogue, scratch, ..Call::plain(Product { a, b, d }) }, columns)
    })
}

fn experts() -> Vec<Case> {
    let mut cases = Vec::new();
    for (ty, columns) in [
        (Q4_K, Exact),
        (Q6_K, Exact),
        (Q8_0, Any),
        (Q8_0, Exact),
        (Q8_0x8, Exact),
        (MXFP4, Exact),
        (F16, Exact),
        (F32, Exact),
    ] {
        let k = ty.block_len().max(96);
        for (weighed, tokens, used) in [(true, 1, 3), (false, 3, 3), (true, 2, 5), (true, 2, 1)] {
            cases.push(summed_case(ty, [k, 37], [5, used, tokens], weighed, columns));
        }
    }
    for (ty, columns) in [(Q8_0, Any), (F16, Exact)] {
        let k = ty.block_len().max(64);
        for (shared, tokens) in [(true, 1), (false, 3), (true, 20)] {
            cases.push(expert_case(ty, [k, 9], [5, 3, tokens], shared, columns));
        }
        cases.push(Case::new(format!("mul_mat_vec {ty} experts with everything"), move |data| {
            let (m, used, tokens, experts) = (9, 4, 2, 3);
            let a = weights(data, ty, [k, m, experts, 1]);
            let up = weights(data, ty, [k, m, experts, 1]);
            let b = data.input(F32, [k, 1, tokens, 1]);
            let d = data.output(F32, [m, used, tokens, 1]);
            // Rows of ids and weights lie apart, as a view of a larger table does.
            let wide = data.input_with(I32, [6, tokens, 1, 1], |r, _| r.below(experts) as f64);
            let ids = wide.narrow(0, 0, used);
            let weights = Some(data.strided_input(F32, [used, tokens, 1, 1], [5, tokens, 1, 1]));
            let bias = |data: &mut Data| Some(data.input(F32, [m, experts, 1, 1]));
            let gate = Some(Gated { kind: Gate::Swiglu, up, bias: bias(data) });
            let epilogue = Epilogue { scale: 0.5, bias: bias(data), residual: None };
            let norm = Some(Norm { weight: None, eps: 1e-5 });
            let scratch = scratch_for(data, &b);
            let experts = Some(Experts { ids, weights, summed: false });
            judged(Call { experts, gate, epilogue, norm, scratch, ..Call::plain(Product { a, b, d }) }, columns)
        }));
    }
    cases
}

/// The cases of a level.
pub fn cases(level: Level) -> Vec<Case> {
    let mut cases = match level {
        Level::Bench => return bench(),
        _ => small(),
    };
    if level == Level::Full {
        for ty in [F16, Q4_0, Q4_K, Q6_K, Q8_0] {
            // Many rows are short: the reference computes them all.
            for (k, m) in [(4096, 1057), (14336, 333), (256, 128_256)] {
                for n in [1, 5, 16] {
                    cases.push(case(ty, [k, m, n], Any));
                }
            }
            cases.push(case(ty, [14336, 333, 2], Exact));
            cases.push(expert_case(ty, [2048, 768], [128, 8, 4], true, Any));
            cases.push(summed_case(ty, [768, 2048], [128, 8, 1], true, Exact));
        }
        cases.push(case(Q4_K, [4096, 128_256, 1], Any));
    }
    cases.extend(super::rounding_cases::cases(level));
    cases.extend(super::ring_cases::cases(level));
    cases
}

fn bench() -> Vec<Case> {
    let mut cases = Vec::new();
    for ty in FORMATS.iter().map(|format| format.ty) {
        let whole = [[4096, 14336, 1], [14336, 4096, 1]].into_iter().filter(|shape| ty.row_bytes(shape[0]).is_some());
        cases.extend(whole.map(|shape| case(ty, shape, Any)));
    }
    // The experts of gpt-oss, whose rows few blocks divide.
    for ty in [MXFP4, MXFP4x30] {
        cases.push(case(ty, [2880, 5760, 1], Exact));
        cases.push(expert_case(ty, [2880, 2880], [32, 4, 1], true, Exact));
    }
    for ty in [Q4_0x8, Q8_0x8, Q6_Kx8, Q4_K] {
        cases.push(case(ty, [4096, 14336, 1], Exact));
        cases.push(case(ty, [14336, 4096, 1], Exact));
        cases.extend([2, 3, 4, 5, 8, 16].map(|n| case(ty, [4096, 14336, n], Exact)));
    }
    // Every format as models have it on a GPU.
    for ty in crate::formats::on_a_gpu(4096) {
        cases.extend([1, 2, 3, 4, 5].map(|n| case(ty, [4096, 4096, n], Exact)));
    }
    // As they have it on a software GPU, and small enough for others' tools there.
    for ty in crate::formats::of_files() {
        cases.extend([1, 2, 4, 8].map(|n| case(ty, [2048, 2048, n], Exact)));
    }
    // The low ranks of RWKV.
    cases.push(Case::new("mul_mat_vec F32 k=32 m=4096, 5 batches", |data| {
        let (a, b) = (data.input(F32, [32, 4096, 5, 1]), data.input(F32, [32, 1, 5, 1]));
        judged(Call::plain(Product { a, b, d: data.output(F32, [4096, 1, 5, 1]) }), Exact)
    }));
    cases.extend([[4096, 160, 1], [64, 4096, 1]].map(|shape| case(F32, shape, Exact)));
    for ty in [F16, Q4_0, Q4_K, Q6_K, Q8_0] {
        for (k, m) in [(4096, 4096), (4096, 128_256)] {
            cases.push(case(ty, [k, m, 1], Any));
        }
        cases.push(case(kiln_gguf::quant::packed_type(ty, 4096).unwrap_or(ty), [4096, 128_256, 1], Exact));
        for n in [2, 3, 4, 5, 8, 16] {
            cases.push(case(ty, [4096, 14336, n], Any));
            cases.push(case(ty, [14336, 4096, n], Any));
        }
    }
    cases.extend(super::rounding_cases::cases(Level::Bench));
    cases.extend(super::ring_cases::cases(Level::Bench));
    cases
}
