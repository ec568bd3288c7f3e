//! Cases of `mul_mat_vec` whose loads stand behind no condition (`Tuning::ring`), with several rows that share each read of the activations:
//! rows that end before the ring or the team does, teams with nothing to do, last units with fewer rows, and all that is put on a product.

use kiln_gguf::TensorType::{
    self, BF16, F16, F32, I32, IQ4_XS, MXFP4x16, MXFP4x30, NVFP4x4, Q4_0x8, Q4_1x4, Q4_K, Q5_K, Q6_K, Q6_Kx2, Q6_Kx8,
    Q8_0, Q8_0x8,
};

use super::cases::{plain, scratch_for, weights};
use super::tuning::{RowGroup, Slice, Tuning};
use super::{Call, Experts, Factor, FusedProduct, Gated, Norm};
use crate::case::{Case, Data, Level, Tolerance};
use crate::glu::Gate;
use crate::mul_mat::{Epilogue, Product};
use crate::unary::Function;

const RING: Tuning = Tuning {
    threads: 64,
    row_group: RowGroup::Subgroup,
    rows: 2,
    prefetch: 2,
    slice: Slice::Groups(1),
    persistent: 1,
    ring: true,
};

/// A case with exact activations; `extra` comes last.
fn case(
    what: &str,
    (ty, [k, m, n]): (TensorType, [usize; 3]),
    split: Tuning,
    extra: impl Fn(&mut Data, &mut Call) + Send + Sync + 'static,
) -> Case {
    let Tuning { rows, prefetch, persistent, slice, .. } = split;
    let name = format!(
        "mul_mat_vec ring {what} {ty} k={k} m={m} n={n}, {rows} rows, {prefetch} ahead, {slice:?}, persistent={persistent}"
    );
    Case::new(name, move |data| {
        let mut call = plain(data, ty, [k, m, n]);
        call.split = Some(split);
        extra(data, &mut call);
        (call.into(), tolerance(ty))
    })
}

fn tolerance(ty: TensorType) -> Tolerance {
    if ty.is_quantised() { super::cases::WIDE } else { Tolerance::Nmse(1e-9) }
}

fn nothing(_: &mut Data, _: &mut Call) {}

/// Everything but what excludes another.
fn everything(data: &mut Data, call: &mut Call) {
    let [m, n, ..] = call.product.d.shape;
    normed(data, call);
    let [bias, residual] = [[m, 1, 1, 1], [m, n, 1, 1]].map(|shape| Some(data.input(F32, shape)));
    call.epilogue = Epilogue { scale: 0.5, bias, residual };
    call.factor = Some(Factor { function: Function::Sigmoid, gate: data.input(F32, [m, n, 1, 1]) });
}

/// Three matrices of odd numbers of rows: units of two rows end inside each of them.
fn fused(data: &mut Data, call: &mut Call) {
    let ([k, ..], n) = (call.product.a.shape, call.product.b.shape[1]);
    call.others = [67, 3]
        .map(|m| {
            let a = weights(data, call.product.a.ty, [k, m, 1, 1]);
            FusedProduct { a, d: data.output(F32, [m, n, 1, 1]), bias: None }
        })
        .into();
    call.norm = Some(Norm { weight: None, eps: 1e-5 });
}

fn gated(data: &mut Data, call: &mut Call) {
    let shape = call.product.a.shape;
    let up = weights(data, call.product.a.ty, shape);
    call.gate = Some(Gated { kind: Gate::Swiglu, up, bias: Some(data.input(F32, [shape[1], 1, 1, 1])) });
    normed(data, call);
}

/// Experts, of which a token has `used`.
fn experts(what: &str, (ty, [k, m]): (TensorType, [usize; 2]), [used, tokens]: [usize; 2], summed: bool) -> Case {
    const EXPERTS: usize = 5;
    Case::new(format!("mul_mat_vec ring {what} {ty} k={k} m={m} used={used} tokens={tokens}"), move |data| {
        let a = weights(data, ty, [k, m, EXPERTS, 1]);
        let b = data.input(F32, [k, if summed { used } else { 1 }, tokens, 1]);
        let d = data.output(F32, if summed { [m, tokens, 1, 1] } else { [m, used, tokens, 1] });
        let ids = data.input_with(I32, [used, tokens, 1, 1], |r, _| r.below(EXPERTS) as f64);
        let shares = summed.then(|| data.input(F32, [used, tokens, 1, 1]));
        let residual = summed.then(|| data.input(F32, [m, tokens, 1, 1]));
        let bias = Some(data.input(F32, [m, EXPERTS, 1, 1]));
        let call = Call {
            experts: Some(Experts { ids, weights: shares, summed }),
            epilogue: Epilogue { scale: 0.5, bias, residual },
            split: Some(Tuning { rows: 2, ..RING }),
            ..Call::plain(Product { a, b, d })
        };
        (call.into(), tolerance(ty))
    })
}

fn small() -> Vec<Case> {
    let mut cases = Vec::new();
    let two = Slice::Groups(2);
    // One round and several, rounds that are full and not, teams of which a part is idle. With 4 rows the last unit has one.
    for (k, rows, prefetch) in [(256, 1, 1), (768, 2, 2), (1536, 2, 2), (2048, 4, 1), (6144, 2, 2), (1536, 4, 3)] {
        cases.push(case("rows", (Q4_K, [k, 1041, 1]), Tuning { rows, prefetch, slice: two, ..RING }, nothing));
    }
    // More rounds than are written out.
    cases.push(case("many rounds", (Q8_0x8, [7424, 37, 1]), Tuning { prefetch: 1, ..RING }, nothing));
    // Fewer units than teams, and a matrix of one row.
    for m in [1, 2, 3, 17] {
        cases.push(case("few rows", (Q4_0x8, [512, m, 1]), RING, everything));
    }
    for (ty, k) in [
        (Q8_0, 96),
        (Q8_0x8, 1280),
        (Q4_0x8, 1024),
        (Q4_1x4, 640),
        (Q5_K, 1536),
        (Q6_Kx2, 1536),
        (Q6_Kx8, 2048),
        (MXFP4x16, 1536),
        (MXFP4x30, 2880),
        (NVFP4x4, 768),
        (IQ4_XS, 768),
    ] {
        let slice = if ty == Q5_K { two } else { Slice::Groups(1) };
        cases.push(case("fused products", (ty, [k, 533, 1]), Tuning { slice, ..RING }, fused));
    }
    cases.push(case(
        "quads",
        (Q6_K, [768, 35, 1]),
        Tuning { slice: Slice::Quads { count: 4, step: 32 }, ..RING },
        everything,
    ));
    for (ty, k, prefetch) in [(F16, 1152, 4), (F16, 1024, 4), (BF16, 1092, 2), (F32, 133, 2)] {
        let slice = Slice::Quads { count: 1, step: 4 };
        cases.push(case("plain types", (ty, [k, 157, 1]), Tuning { slice, prefetch, ..RING }, fused));
        cases.push(case(
            "plain types",
            (ty, [k, 37, 3]),
            Tuning { slice, prefetch, persistent: 0, ..RING },
            everything,
        ));
    }
    for (ty, k, m, rows) in [(Q4_K, 768, 35, 1), (Q4_K, 1536, 1057, 2), (Q8_0x8, 512, 33, 4), (F16, 256, 35, 4)] {
        let slice = if ty == Q4_K { two } else { Slice::Groups(1) };
        cases.push(case("gated", (ty, [k, m, 1]), Tuning { slice, rows, ..RING }, gated));
    }
    for n in [2, 3] {
        cases.push(case("columns", (Q4_K, [768, 533, n]), Tuning { slice: two, ..RING }, everything));
    }
    // Each activation vector has the bits that it has alone.
    for (ty, k, slice) in [(Q4_K, 768, two), (Q8_0x8, 512, Slice::Groups(1)), (F16, 1096, Slice::Groups(1))] {
        cases.push(case("batch invariant", (ty, [k, 35, 5]), Tuning { slice, ..RING }, |data, call| {
            everything(data, call);
            call.scratch = scratch_for(data, &call.product.b);
            call.batch_invariant = true;
        }));
    }
    // Teams of more than a subgroup, and of one thread.
    for row_group in [RowGroup::Workgroup, RowGroup::Shared, RowGroup::Thread] {
        cases.push(case(&format!("{row_group:?}"), (Q4_0x8, [768, 211, 1]), Tuning { row_group, ..RING }, fused));
    }
    for (ty, k) in [(Q4_K, 768), (Q8_0x8, 512), (F16, 96)] {
        cases.push(experts("experts of a token", (ty, [k, 37]), [3, 1], false));
        cases.push(experts("experts of tokens", (ty, [k, 37]), [3, 4], false));
        cases.push(experts("sum of experts", (ty, [k, 37]), [3, 1], true));
        cases.push(experts("sum of experts", (ty, [k, 533]), [2, 2], true));
    }
    cases
}

fn normed(data: &mut Data, call: &mut Call) {
    call.norm = Some(Norm { weight: Some(data.input(F32, [call.product.a.shape[0], 1, 1, 1])), eps: 1e-5 });
}

fn with_residual(data: &mut Data, call: &mut Call) {
    call.epilogue.residual = Some(data.input(F32, call.product.d.shape));
}

/// The products of a layer of an 8B model, one activation vector, as the table splits them.
fn layer() -> Vec<Case> {
    let case = |part: &str, ty: TensorType, [k, m]: [usize; 2], extra: fn(&mut Data, &mut Call)| {
        Case::new(format!("mul_mat_vec layer {part} {ty} k={k} m={m}"), move |data| {
            let mut call = plain(data, ty, [k, m, 1]);
            extra(data, &mut call);
            (call.into(), tolerance(ty))
        })
    };
    let mut cases = Vec::new();
    for ty in [Q4_K, Q4_0x8, Q6_Kx8, Q8_0x8, F16] {
        cases.push(case("q, k and v", ty, [4096, 4096], |data, call| {
            normed(data, call);
            call.others = [1024, 1024]
                .map(|m| {
                    let a = weights(data, call.product.a.ty, [4096, m, 1, 1]);
                    FusedProduct { a, d: data.output(F32, [m, 1, 1, 1]), bias: None }
                })
                .into();
        }));
        cases.push(case("output", ty, [4096, 4096], with_residual));
        cases.push(case("gate and up", ty, [4096, 14336], |data, call| {
            normed(data, call);
            let up = weights(data, call.product.a.ty, call.product.a.shape);
            call.gate = Some(Gated { kind: Gate::Swiglu, up, bias: None });
        }));
        cases.push(case("down", ty, [14336, 4096], with_residual));
    }
    cases
}

/// The cases of a level.
pub(super) fn cases(level: Level) -> Vec<Case> {
    if level == Level::Bench { layer() } else { small() }
}
