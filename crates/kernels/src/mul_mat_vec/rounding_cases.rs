//! Cases of `mul_mat_vec` whose activation vector was rounded by who made it, and of results that are left rounded.

use kiln_gguf::TensorType::{self, F16, F32, I8, MXFP4, Q4_0, Q4_0x8, Q4_1, Q4_K, Q6_K, Q6_Kx2, Q8_0, Q8_0x8};

use super::cases::{WIDE, plain, weights};
use super::tuning::{RowGroup, Slice, Tuning};
use super::{Call, Factor, FusedProduct, Gated, Norm};
use crate::case::{Case, Data, Level};
use crate::glu::Gate;
use crate::mul_mat::Epilogue;
use crate::rounded::{Rounded, Rounding, bytes};
use crate::unary::Function;

/// Puts more on a call.
type Extra = fn(&mut Data, &mut Call);

/// Teams of every device's subgroups make whole groups with this split.
const LARGE: Tuning = Tuning {
    threads: 1024,
    row_group: RowGroup::Subgroup,
    rows: 1,
    prefetch: 1,
    slice: Slice::Groups(1),
    persistent: 0,
    ring: false,
};
/// Those of a software GPU with this one.
const SMALL: Tuning = Tuning { threads: 64, rows: 4, ..LARGE };

fn case(
    what: &str,
    ty: TensorType,
    [k, m]: [usize; 2],
    extra: impl Fn(&mut Data, &mut Call) + Send + Sync + 'static,
) -> Case {
    Case::new(format!("mul_mat_vec {what} {ty} k={k} m={m}"), move |data| {
        let mut call = plain(data, ty, [k, m, 1]);
        extra(data, &mut call);
        (call.into(), WIDE)
    })
}

/// The call's activation vector as a producer leaves it. The floats beside it are what the reference reads.
fn given(data: &mut Data, call: &mut Call) {
    let b = call.product.b;
    let memory = data.output(I8, [bytes(b.len()), 1, 1, 1]);
    call.rounded = Some(memory);
    if !data.is_blank() {
        let weight = call.norm.and_then(|norm| norm.weight).map(|weight| data.memory.read(&weight));
        let floats = data.memory.read(&b);
        Rounded::new(&memory, b.len()).write(&floats, weight.as_deref(), &mut data.memory);
    }
}

fn left(data: &mut Data, call: &mut Call) {
    call.rounding = Some(Rounding { to: data.output(I8, [bytes(call.product.d.len()), 1, 1, 1]), weight: None });
}

fn left_weighed(data: &mut Data, call: &mut Call) {
    left(data, call);
    let weight = data.input_with(F32, [call.product.d.len(), 1, 1, 1], |r, _| r.uniform(0.25, 2.0));
    call.rounding = call.rounding.map(|rounding| Rounding { weight: Some(weight), ..rounding });
}

/// Small numbers show the norm's factor, and that eps is under the root.
fn normed(data: &mut Data, call: &mut Call) {
    let k = call.product.b.len();
    call.product.b = data.input_with(F32, [k, 1, 1, 1], |r, i| r.uniform(-0.01, 0.01) * (1 + i / 32) as f64);
    let weight = Some(data.input_with(F32, [k, 1, 1, 1], |r, _| r.uniform(0.5, 2.0)));
    call.norm = Some(Norm { weight, eps: 1e-5 });
}

fn gated(data: &mut Data, call: &mut Call) {
    let up = weights(data, call.product.a.ty, call.product.a.shape);
    call.gate = Some(Gated { kind: Gate::Swiglu, up, bias: None });
}

fn with_residual(data: &mut Data, call: &mut Call) {
    let residual = data.input(F32, call.product.d.shape);
    call.product.d = residual;
    call.epilogue.residual = Some(residual);
}

/// Activations that are given, of formats with and without minimums, groups of 16 and 32, codes that are too large by a number.
fn taken() -> Vec<Case> {
    let mut cases = Vec::new();
    for (ty, k) in
        [(Q8_0, 96), (Q4_0, 64), (Q4_1, 160), (Q4_K, 768), (Q6_K, 512), (Q6_Kx2, 1024), (Q4_0x8, 512), (MXFP4, 32)]
    {
        cases.push(case("a rounded column", ty, [k, 37], given));
        cases.push(case("a rounded column, normed,", ty, [k, 19], |data, call| {
            normed(data, call);
            given(data, call);
        }));
    }
    // More than one round of the threads, and more than one turn of the loads in it.
    cases.push(case("a rounded column of several rounds", Q4_K, [10240, 9], given));
    for (slice, prefetch) in [(Slice::Groups(2), 1), (Slice::Quads { count: 2, step: 16 }, 2)] {
        cases.push(case(&format!("a rounded column in {slice:?}"), Q8_0x8, [1536, 67], move |data, call| {
            call.split = Some(Tuning { slice, prefetch, persistent: 1, ..LARGE });
            normed(data, call);
            given(data, call);
        }));
    }
    cases.push(case("a rounded column for several formats", Q4_K, [512, 40], |data, call| {
        normed(data, call);
        for (ty, m) in [(Q4_K, 7), (Q6_K, 35)] {
            let (a, d) = (weights(data, ty, [512, m, 1, 1]), data.output(F32, [m, 1, 1, 1]));
            call.others.push(FusedProduct { a, d, bias: None });
        }
        given(data, call);
    }));
    cases
}

/// Results that are left rounded.
fn made() -> Vec<Case> {
    const EXTRAS: [(&str, Extra); 5] = [
        ("left rounded", left),
        ("left rounded, weighed,", left_weighed),
        ("left rounded, in place,", |data, call| {
            with_residual(data, call);
            left_weighed(data, call);
        }),
        ("left rounded, gated and normed,", |data, call| {
            normed(data, call);
            gated(data, call);
            left(data, call);
        }),
        ("left rounded, with everything,", |data, call| {
            let like_d = call.product.d.shape;
            call.epilogue = Epilogue { scale: 0.5, bias: Some(data.input(F32, [like_d[0], 1, 1, 1])), residual: None };
            call.factor = Some(Factor { function: Function::Sigmoid, gate: data.input(F32, like_d) });
            with_residual(data, call);
            left_weighed(data, call);
        }),
    ];
    let mut cases = Vec::new();
    for (what, extra) in EXTRAS {
        cases.push(case(what, Q8_0, [96, 96], extra));
        for (split, name) in [(SMALL, "small"), (LARGE, "large")] {
            cases.push(case(&format!("{what} in {name} workgroups"), F16, [64, 160], move |data, call| {
                call.split = Some(split);
                extra(data, call);
            }));
        }
    }
    // Several turns of a workgroup, the last of which only some have; then with an activation vector that is given, too.
    for (ty, k, m) in [(Q4_K, 256, 1120), (Q8_0x8, 512, 2144)] {
        cases.push(case("left rounded in turns", ty, [k, m], |data, call| {
            call.split = Some(Tuning { persistent: 1, ..SMALL });
            left_weighed(data, call);
        }));
        cases.push(case("from rounded to rounded", ty, [k, m], |data, call| {
            call.split = Some(Tuning { persistent: 1, prefetch: 2, ..SMALL });
            normed(data, call);
            gated(data, call);
            given(data, call);
            left(data, call);
        }));
    }
    // A group of zeros, and one whose numbers lie far apart.
    cases.push(case("left rounded, nothing and extremes,", F32, [32, 64], |data, call| {
        call.split = Some(SMALL);
        call.product.a = data.input_with(F32, [32, 64, 1, 1], |r, i| match i / 32 {
            0..32 => 0.0,
            row => r.uniform(-1.0, 1.0) * 10f64.powi(row as i32 % 13 - 6),
        });
        left(data, call);
    }));
    cases
}

/// The cases of a level.
pub(super) fn cases(level: Level) -> Vec<Case> {
    let both: Extra = |data, call| {
        normed(data, call);
        gated(data, call);
        given(data, call);
        left(data, call);
    };
    if level == Level::Bench {
        // As an 8B model has them, with and without.
        let mut cases = Vec::new();
        for ty in [Q4_K, Q4_0x8, Q8_0x8] {
            cases.push(case("a rounded column", ty, [14336, 4096], given));
            cases.push(case("a rounded column", ty, [4096, 14336], given));
            cases.push(case("left rounded", ty, [4096, 14336], left));
            cases.push(case("left rounded", ty, [14336, 4096], left_weighed));
        }
        return cases;
    }
    let mut cases = taken();
    cases.extend(made());
    if level == Level::Full {
        for ty in [Q4_K, Q6_Kx2, Q8_0x8] {
            cases.push(case("from rounded to rounded", ty, [4096, 14336], both));
            cases.push(case("a rounded column", ty, [14336, 333], given));
            cases.push(case("left rounded, weighed,", ty, [4096, 4096], left_weighed));
        }
    }
    cases
}
