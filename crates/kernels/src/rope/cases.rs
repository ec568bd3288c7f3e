//! Cases of `rope`.

use kiln_gguf::TensorType::{self, BF16, F16, F32, I32};

use super::{Call, RopeParams, RopeStyle};
use crate::case::{Case, Data, Level, Tolerance};
use crate::tensor::Tensor;

/// The kernel's sine and cosine are right to an ulp or two of f32 at any position; f16 results are rounded to 11 bits,
/// bf16 results to 8.
fn tolerance(ty: TensorType) -> Tolerance {
    Tolerance::Nmse(match ty {
        F16 => 1e-6,
        BF16 => 1e-4,
        _ => 1e-12,
    })
}

/// A call on `x` and `y` with random positions in `from .. from + 4096`.
fn call(data: &mut Data, params: &RopeParams, (x, y): (Tensor, Tensor), from: i32) -> Call {
    let factors: Vec<f32> = (0..params.pairs()).map(|_| data.random.uniform(0.5, 8.0) as f32).collect();
    let table = params.freqs(Some(&factors)).expect("a factor for each pair");
    let freqs = data.input_with(I32, [2, params.pairs(), 1, 1], |_, i| f64::from(table[i]));
    let positions = data.input_with(I32, [x.shape[2], params.style.position_rows(), 1, 1], |random, _| {
        f64::from(from) + random.below(4096) as f64
    });
    Call {
        x,
        positions,
        freqs,
        y,
        style: params.style,
        n_dims: params.n_dims,
        offset: 0,
        sections: params.sections,
        magnitude: params.magnitude(),
        backward: false,
    }
}

fn case(params: RopeParams, ty: TensorType, shape: [usize; 4], from: i32) -> Case {
    let RopeParams { style, n_dims, sections, ext_factor, .. } = params;
    let name =
        format!("rope {style:?} {ty} {shape:?} dims={n_dims} sections={sections:?} yarn={ext_factor} from {from}");
    Case::new(name, move |data| {
        let operands = (data.input(ty, shape), data.output(ty, shape));
        (call(data, &params, operands, from).into(), tolerance(ty))
    })
}

fn sectioned(style: RopeStyle, n_dims: usize, sections: [usize; 4]) -> RopeParams {
    RopeParams { sections, ..RopeParams::plain(style, n_dims, 10000.0) }
}

/// The cases of a level.
pub fn cases(level: Level) -> Vec<Case> {
    use RopeStyle::{Imrope, Mrope, Neox, Normal, Vision};
    if level == Level::Bench {
        return [1, 512]
            .map(|tokens| case(RopeParams::plain(Neox, 128, 500_000.0), F32, [128, 32, tokens, 1], 0))
            .into();
    }
    let mut cases = Vec::new();
    for style in [Normal, Neox] {
        let plain = |n_dims| RopeParams::plain(style, n_dims, 10000.0);
        cases.push(case(plain(64), F32, [64, 3, 5, 1], 0));
        cases.push(case(plain(2), F32, [2, 1, 1, 1], 0));
        cases.push(case(plain(20), F32, [81, 3, 2, 2], 0));
        cases.push(case(plain(64), F16, [80, 3, 2, 1], 0));
        cases.push(case(RopeParams::plain(style, 128, 500_000.0), F32, [128, 2, 7, 1], 131_072));
        cases.push(case(RopeParams::plain(style, 128, 1e7), F32, [128, 2, 3, 1], i32::MAX - 4096));
        // Shifts of a cache turn back.
        cases.push(case(plain(64), F32, [64, 2, 3, 1], -3000));
        let yarn = RopeParams { freq_scale: 0.25, ext_factor: 1.0, attn_factor: 1.2, n_ctx_orig: 4096, ..plain(64) };
        cases.push(case(yarn, F32, [64, 3, 5, 1], 10000));
    }
    cases.push(case(RopeParams::plain(Neox, 32, 10000.0), BF16, [32, 3, 2, 1], 0));
    cases.push(case(sectioned(Mrope, 128, [16, 24, 24, 0]), F32, [128, 3, 5, 1], 0));
    cases.push(case(sectioned(Mrope, 32, [2, 1, 1, 1]), F32, [40, 2, 3, 2], 0));
    cases.push(case(sectioned(Imrope, 128, [24, 20, 20, 0]), F32, [128, 3, 5, 1], 0));
    cases.push(case(sectioned(Imrope, 32, [3, 2, 1, 2]), F32, [40, 2, 3, 1], 0));
    cases.push(case(sectioned(Vision, 40, [20, 20, 20, 20]), F32, [80, 3, 5, 1], 0));
    cases.push(case(sectioned(Vision, 12, [3, 2, 0, 0]), F16, [30, 2, 3, 1], 0));
    cases.push(Case::new("rope backward, offset, strided", |data| {
        let params = RopeParams::plain(Normal, 16, 10000.0);
        let x = data.strided_input(F32, [48, 3, 4, 2], [49, 5, 4, 2]);
        let y = data.strided_output(F32, [48, 3, 4, 2], [50, 3, 6, 2]);
        (Call { offset: 20, backward: true, ..call(data, &params, (x, y), 0) }.into(), tolerance(F32))
    }));
    cases.push(Case::new("rope tail of each head, in place in rows of q, k and v", |data| {
        let params = RopeParams::plain(Neox, 32, 10000.0);
        let x = data.strided_input(F32, [48, 3, 4, 1], [48, 9, 4, 1]);
        (Call { offset: 16, ..call(data, &params, (x, x), 0) }.into(), tolerance(F32))
    }));
    cases.push(Case::new("rope heads and tokens swapped, F32 to F16", |data| {
        let params = RopeParams::plain(Neox, 32, 10000.0);
        let x = data.input(F32, [32, 5, 3, 1]).permute([0, 2, 1, 3]);
        let y = data.output(F16, [32, 3, 5, 1]);
        (call(data, &params, (x, y), 0).into(), tolerance(F16))
    }));
    if level == Level::Full {
        cases.push(case(RopeParams::plain(Neox, 128, 500_000.0), F32, [128, 64, 1024, 1], 1_000_000));
        cases.push(case(RopeParams::plain(Normal, 64, 10000.0), F16, [80, 40, 2048, 1], 0));
    }
    cases
}
