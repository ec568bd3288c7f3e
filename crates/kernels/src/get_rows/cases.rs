//! Cases of `get_rows`: every format, batches, strides and ids that point nowhere.

use kiln_gguf::TensorType::{self, F16, F32, I32};

use super::Call;
use crate::case::{Case, Data, Level, Tolerance};
use crate::formats::{FORMATS, random_blocks};
use crate::tensor::Tensor;

fn ids(data: &mut Data, shape: [usize; 4], rows: usize) -> Tensor {
    data.input_with(I32, shape, |random, _| random.below(rows) as f64)
}

fn case(ty: TensorType, to: TensorType, cols: usize, rows: usize, n: [usize; 3]) -> Case {
    Case::new(format!("get_rows {ty} to {to} {n:?} of [{cols}, {rows}]"), move |data| {
        let src = random_blocks(data, ty, [cols, rows, n[1], n[2]], to == F32);
        let ids = ids(data, [n[0], n[1], n[2], 1], rows);
        let dst = data.output(to, [cols, n[0], n[1], n[2]]);
        // How floats are rounded to f16, the driver chooses: 11 bits, relative error up to 2^-11, squared 2e-7.
        let tolerance = if to == F16 { Tolerance::Nmse(3e-7) } else { Tolerance::Exact };
        (Call { src, ids, dst }.into(), tolerance)
    })
}

/// The cases of a level.
pub fn cases(level: Level) -> Vec<Case> {
    if level == Level::Bench {
        return [F32, F16, TensorType::Q4_0, TensorType::Q4_K, TensorType::Q6_K, TensorType::IQ2_S]
            .map(|ty| case(ty, F32, 4096, 32000, [512, 1, 1]))
            .into();
    }
    let mut cases = Vec::new();
    for ty in FORMATS.iter().map(|format| format.ty) {
        cases.push(case(ty, F32, 3 * ty.block_len().max(4), 9, [5, 1, 1]));
        cases.push(case(ty, F32, ty.block_len(), 3, [2, 3, 2]));
        if level == Level::Full {
            cases.push(case(ty, F32, 4096 / ty.block_len() * ty.block_len(), 1000, [513, 1, 1]));
        }
    }
    cases.push(case(I32, F32, 7, 5, [4, 1, 1]));
    cases.push(case(TensorType::Q4_0, F16, 96, 9, [5, 2, 1]));
    cases.push(case(F32, F16, 64, 9, [5, 2, 1]));
    cases.push(case(F32, F32, 64, 2, [5, 0, 1]));
    cases.push(Case::new("get_rows ids out of range give zeros", |data| {
        const IDS: [f64; 6] = [0.0, -1.0, 4.0, 3.0, 2147483647.0, -2147483648.0];
        let src = data.input(F32, [8, 4, 1, 1]);
        let ids = data.input_with(I32, [6, 1, 1, 1], |_, i| IDS[i]);
        let dst = data.output(F32, [8, 6, 1, 1]);
        (Call { src, ids, dst }.into(), Tolerance::Exact)
    }));
    cases.push(Case::new("get_rows strided rows of Q8_0", |data| {
        let src = random_blocks(data, TensorType::Q8_0, [128, 6, 1, 1], true).narrow(0, 32, 64).narrow(1, 1, 5);
        let ids = ids(data, [4, 3, 1, 1], 5).narrow(1, 1, 1);
        let dst = data.strided_output(F32, [64, 4, 1, 1], [70, 5, 1, 1]);
        (Call { src, ids, dst }.into(), Tolerance::Exact)
    }));
    cases
}
