//! Cases of `mul_mat_vec`.

use kiln_gguf::TensorType::{self, F16, F32};

use super::Call;
use crate::case::{Case, Data, Level, Tolerance};
use crate::formats::FORMATS;
use crate::mul_mat::{Epilogue, Product};
use crate::tensor::Tensor;

/// Weights are exact and sums are in f32: what is left is rounding of a few thousand terms.
const TOLERANCE: Tolerance = Tolerance::Nmse(1e-9);

/// Weights in [-1, 1) by the format's own quantiser, or random blocks where it has none.
fn weights(data: &mut Data, ty: TensorType, shape: [usize; 4]) -> Tensor {
    if kiln_gguf::quant::can_quantise(ty) {
        data.input(ty, shape)
    } else {
        crate::formats::random_blocks(data, ty, shape, false)
    }
}

fn case(ty: TensorType, k: usize, m: usize, n: usize) -> Case {
    Case::new(format!("mul_mat_vec {ty} k={k} m={m} n={n}"), move |data| {
        let a = weights(data, ty, [k, m, 1, 1]);
        let b = data.input(F32, [k, n, 1, 1]);
        let d = data.output(F32, [m, n, 1, 1]);
        (Call::plain(Product { a, b, d }).into(), TOLERANCE)
    })
}

fn extras(data: &mut Data, ty: TensorType, m: usize, n: usize) -> Call {
    let k = 2 * ty.block_len().max(32);
    let a = weights(data, ty, [k, m, 1, 1]);
    let b = data.input(F32, [k, n, 1, 1]);
    let d = data.output(F32, [m, n, 1, 1]);
    Call::plain(Product { a, b, d })
}

/// The cases of a level.
pub fn cases(level: Level) -> Vec<Case> {
    if level == Level::Bench {
        return bench();
    }
    let mut cases = Vec::new();
    for format in FORMATS {
        let block = format.ty.block_len().max(32);
        cases.push(case(format.ty, block, 3, 1));
        cases.push(case(format.ty, 3 * block, 17, 2));
        cases.push(case(format.ty, 3 * block, 5, 9));
    }
    for n in 1..=16 {
        cases.push(case(TensorType::Q8_0, 96, 7, n));
    }
    for m in [1, 2, 15, 16, 1057] {
        cases.push(case(TensorType::Q4_0, 64, m, 1));
    }
    for k in [1, 65, 67, 193] {
        cases.push(case(F32, k, 5, 1));
        cases.push(case(F16, k, 5, 3));
    }
    cases.push(case(TensorType::Q4_0, 4096, 3, 1));
    for (a_batch, b_batch) in [([1, 1], [3, 2]), ([2, 1], [4, 1]), ([2, 3], [4, 6])] {
        cases.push(Case::new(format!("mul_mat_vec batches {a_batch:?} {b_batch:?}"), move |data| {
            let a = data.input(F16, [64, 9, a_batch[0], a_batch[1]]);
            let b = data.input(F32, [64, 2, b_batch[0], b_batch[1]]);
            let d = data.output(F32, [9, 2, b_batch[0], b_batch[1]]);
            (Call::plain(Product { a, b, d }).into(), TOLERANCE)
        }));
    }
    cases.push(Case::new("mul_mat_vec F16 columns, strided rows and results", |data| {
        let a = data.strided_input(F16, [64, 9, 2, 1], [72, 10, 2, 1]);
        let b = data.strided_input(F16, [64, 2, 2, 1], [80, 3, 2, 1]);
        let d = data.strided_output(F32, [9, 2, 2, 1], [11, 3, 2, 1]);
        (Call::plain(Product { a, b, d }).into(), TOLERANCE)
    }));
    cases.push(Case::new("mul_mat_vec scale and bias", |data| {
        let call = extras(data, TensorType::Q8_0, 19, 3);
        let bias = Some(data.input(F32, [19, 1, 1, 1]));
        (Call { epilogue: Epilogue { scale: 0.25, bias, residual: None }, ..call }.into(), TOLERANCE)
    }));
    cases.push(Case::new("mul_mat_vec residual in place", |data| {
        let call = extras(data, TensorType::Q4_K, 19, 2);
        let residual = data.input(F32, [19, 2, 1, 1]);
        let product = Product { d: residual, ..call.product };
        let epilogue = Epilogue { residual: Some(residual), ..Epilogue::default() };
        (Call { product, epilogue }.into(), TOLERANCE)
    }));
    if level == Level::Full {
        for ty in [F16, TensorType::Q4_0, TensorType::Q4_K, TensorType::Q6_K, TensorType::Q8_0] {
            for (k, m) in [(4096, 4096), (14336, 1057), (4096, 128_256)] {
                for n in [1, 5, 16] {
                    cases.push(case(ty, k, m, n));
                }
            }
        }
    }
    cases
}

fn bench() -> Vec<Case> {
    let mut cases = Vec::new();
    for format in FORMATS {
        cases.push(case(format.ty, 4096, 14336, 1));
    }
    for ty in [F16, TensorType::Q4_0, TensorType::Q4_K, TensorType::Q6_K, TensorType::Q8_0] {
        for (k, m) in [(4096, 4096), (14336, 4096), (4096, 128_256)] {
            cases.push(case(ty, k, m, 1));
        }
        for n in [2, 3, 4, 5, 8, 16] {
            cases.push(case(ty, 4096, 14336, n));
        }
    }
    cases
}
