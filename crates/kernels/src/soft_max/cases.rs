//! Cases of `soft_max`.

use kiln_gguf::TensorType::{self, F16, F32};

use super::Call;
use crate::case::{Case, Data, Level, Tolerance};
use crate::tensor::Tensor;

/// The exponential may be wrong by 3 + 2 |v| ulp, and v is large only where the result is small.
const CLOSE: Tolerance = Tolerance::Nmse(1e-10);
/// Logits of some hundred have an f32 ulp of 3e-5, which is the relative error of their exponentials.
const LARGE_LOGITS: Tolerance = Tolerance::Nmse(1e-8);

#[derive(Clone, Copy, Debug)]
struct Kind {
    mask: Option<TensorType>,
    /// Extents 2 and 3 of the mask.
    repeats: [usize; 2],
    sinks: bool,
    scale: f32,
    max_bias: f32,
}

const PLAIN: Kind = Kind { mask: None, repeats: [1, 1], sinks: false, scale: 1.0, max_bias: 0.0 };

/// Values of a mask: a quarter of them minus infinity.
fn mask(data: &mut Data, ty: TensorType, shape: [usize; 4]) -> Tensor {
    data.input_with(
        ty,
        shape,
        |random, _| {
            if random.below(4) == 0 { f64::NEG_INFINITY } else { random.uniform(-4.0, 0.0) }
        },
    )
}

fn call(data: &mut Data, (x, y): (Tensor, Tensor), kind: Kind) -> Call {
    let Kind { mask: mask_ty, repeats, sinks, scale, max_bias } = kind;
    let [cols, rows, heads, _] = x.shape;
    // Masks often have more rows than there are tokens.
    let mask = mask_ty.map(|ty| mask(data, ty, [cols, rows + 1, repeats[0], repeats[1]]));
    let sinks = sinks.then(|| data.input_with(F32, [heads, 1, 1, 1], |random, _| random.uniform(-2.0, 2.0)));
    Call { x, mask, sinks, y, scale, max_bias }
}

fn case(shape: [usize; 4], kind: Kind) -> Case {
    Case::new(format!("soft_max {shape:?} {kind:?}"), move |data| {
        let operands = (data.input_with(F32, shape, |random, _| random.uniform(-5.0, 5.0)), data.output(F32, shape));
        (call(data, operands, kind).into(), CLOSE)
    })
}

/// Rows with infinities: one all masked, one with a single element left, one without a mask.
fn masked_rows(cols: usize, sinks: bool) -> Case {
    Case::new(format!("soft_max masked rows [{cols}, 3, 2] sinks={sinks}"), move |data| {
        let x = data.input(F32, [cols, 3, 2, 1]);
        let y = data.output(F32, [cols, 3, 2, 1]);
        let mask = data.input_with(F16, [cols, 3, 1, 1], |_, i| match i / cols {
            0 => f64::NEG_INFINITY,
            1 if i % cols != cols / 2 => f64::NEG_INFINITY,
            _ => 0.0,
        });
        (Call { mask: Some(mask), ..call(data, (x, y), Kind { sinks, ..PLAIN }) }.into(), CLOSE)
    })
}

/// The cases of a level.
pub fn cases(level: Level) -> Vec<Case> {
    let masked = Kind { mask: Some(F16), scale: 0.125, ..PLAIN };
    if level == Level::Bench {
        return vec![case([4096, 32, 32, 1], masked), case([128_256, 1, 1, 1], PLAIN)];
    }
    let mut cases: Vec<Case> = [1, 2, 31, 64, 129, 512, 1025].map(|cols| case([cols, 3, 2, 1], PLAIN)).into();
    cases.push(case([200, 3, 4, 2], Kind { repeats: [1, 1], ..masked }));
    cases.push(case([200, 3, 4, 2], Kind { mask: Some(F32), repeats: [2, 2], ..masked }));
    cases.push(case([700, 2, 2, 2], Kind { repeats: [1, 2], ..masked }));
    for heads in [1, 8, 12, 7] {
        cases.push(case([33, 2, heads, 1], Kind { max_bias: 8.0, ..masked }));
    }
    cases.push(case([33, 2, 5, 2], Kind { sinks: true, ..PLAIN }));
    cases.push(case([600, 2, 5, 1], Kind { sinks: true, max_bias: 4.0, ..masked }));
    for cols in [17, 640] {
        cases.extend([false, true].map(|sinks| masked_rows(cols, sinks)));
    }
    cases.push(Case::new("soft_max strided, in place", move |data| {
        let x = data.strided_input(F32, [48, 3, 2, 2], [50, 4, 2, 2]);
        (call(data, (x, x), masked).into(), CLOSE)
    }));
    cases.push(Case::new("soft_max long rows, in place", move |data| {
        let x = data.strided_input(F32, [9000, 2, 1, 1], [9001, 2, 1, 1]);
        (call(data, (x, x), masked).into(), CLOSE)
    }));
    cases.push(Case::new("soft_max sinks above all logits", |data| {
        let x = data.input(F32, [70, 2, 3, 1]);
        let y = data.output(F32, [70, 2, 3, 1]);
        let sinks = data.input_with(F32, [3, 1, 1, 1], |random, _| random.uniform(20.0, 30.0));
        (Call { sinks: Some(sinks), ..call(data, (x, y), PLAIN) }.into(), CLOSE)
    }));
    cases.push(Case::new("soft_max large and equal logits", |data| {
        let x = data.input_with(F32, [300, 3, 1, 1], |random, i| match i / 300 {
            0 => random.uniform(-300.0, 300.0),
            1 => -3.402823466e38,
            _ => 1e30,
        });
        let y = data.output(F32, [300, 3, 1, 1]);
        (call(data, (x, y), PLAIN).into(), LARGE_LOGITS)
    }));
    if level == Level::Full {
        cases.push(case([643_251, 3, 1, 1], PLAIN));
        cases.push(case([1_000_000, 1, 2, 1], Kind { sinks: true, ..masked }));
        cases.push(case([1024, 128, 32, 2], Kind { repeats: [1, 2], ..masked }));
    }
    cases
}
