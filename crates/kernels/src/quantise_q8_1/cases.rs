//! Cases of `quantise_q8_1`. The result is judged bit by bit, so values keep away from the middle between two codes,
//! where a device's division decides.

use kiln_gguf::TensorType::{self, F16, F32, I32};

use super::{Call, words};
use crate::case::{Case, Data, Level, Tolerance};
use crate::tensor::Tensor;

/// Groups of 32 with a scale of few bits: one value is 127 times the scale, the others up to 0.4 beside a code.
fn input(data: &mut Data, ty: TensorType, shape: [usize; 4]) -> Tensor {
    let mut group = (1.0, 0);
    data.input_with(ty, shape, move |random, i| {
        let at = i % shape[0] % 32;
        if at == 0 {
            let room = (shape[0] - i % shape[0]).min(32);
            // In f16 the values themselves are rounded, too coarsely for fractions.
            let power = if ty == F16 { random.below(6) as i32 - 3 } else { random.below(24) as i32 - 20 };
            group = ((1 + random.below(4)) as f64 * 2f64.powi(power), random.below(room));
        }
        let (d, extreme) = group;
        let sign = [-1.0, 1.0][random.below(2)];
        let aside = if ty == F16 { 0.0 } else { random.uniform(-0.4, 0.4) };
        if at == extreme { sign * 127.0 * d } else { d * (random.below(253) as f64 - 126.0 + aside) }
    })
}

fn case(ty: TensorType, shape: [usize; 4]) -> Case {
    Case::new(format!("quantise_q8_1 {ty} {shape:?}"), move |data| {
        let x = input(data, ty, shape);
        let y = data.output(I32, [words(shape[0]), shape[1], shape[2], shape[3]]);
        (Call { x, y }.into(), Tolerance::Exact)
    })
}

/// The cases of a level.
pub fn cases(level: Level) -> Vec<Case> {
    if level == Level::Bench {
        return [1, 512].map(|rows| case(F32, [4096, rows, 1, 1])).into();
    }
    let mut cases = Vec::new();
    for cols in [1, 3, 4, 31, 32, 33, 128, 129, 200, 256, 1024] {
        cases.push(case(F32, [cols, 3, 2, 1]));
    }
    cases.push(case(F16, [256, 3, 1, 2]));
    cases.push(case(F16, [130, 2, 1, 1]));
    cases.push(Case::new("quantise_q8_1 strided rows", |data| {
        let x = input(data, F32, [160, 4, 3, 1]).narrow(0, 32, 128).narrow(1, 1, 3);
        let y = data.strided_output(I32, [36, 3, 3, 1], [40, 4, 3, 1]);
        (Call { x, y }.into(), Tolerance::Exact)
    }));
    cases.push(Case::new("quantise_q8_1 zeros, tiny and huge values", |data| {
        const VALUES: [f64; 4] = [0.0, 1e-8, 127e4, 1e38];
        let x = data.input_with(F32, [128, 1, 1, 1], |_, i| if i % 2 == 0 { VALUES[i / 32] } else { 0.0 });
        let y = data.output(I32, [36, 1, 1, 1]);
        (Call { x, y }.into(), Tolerance::Exact)
    }));
    if level == Level::Full {
        cases.push(case(F32, [8192, 700, 1, 1]));
    }
    cases
}
