//! Cases of `copy`.

use kiln_gguf::TensorType::{self, BF16, F16, F32, I32};

use super::Call;
use crate::case::{Case, Data, Level, Tolerance};
use crate::elementwise;
use crate::formats::{FORMATS, random_blocks};
use crate::set_rows::{self, BLOCK_TYPES};
use crate::tensor::Tensor;

const TYPES: [TensorType; 4] = [F32, F16, BF16, I32];

/// Bits that are only moved, integers and widened floats are exact. How a float is rounded to f16, the driver chooses.
fn tolerance(from: TensorType, to: TensorType) -> Tolerance {
    let exact = from == to || to == I32 || (to == F32 && from != I32);
    if exact { Tolerance::Exact } else { elementwise::tolerance(to) }
}

/// Values of both signs with fractions, large enough to be different integers.
fn input(data: &mut Data, ty: TensorType, shape: [usize; 4]) -> Tensor {
    data.input_with(ty, shape, |random, _| random.uniform(-3000.0, 3000.0))
}

fn case(from: TensorType, to: TensorType, shape: [usize; 4]) -> Case {
    Case::new(format!("copy {from} to {to} {shape:?}"), move |data| {
        let src = input(data, from, shape);
        let dst = data.output(to, shape);
        (Call { src, dst }.into(), tolerance(from, to))
    })
}

fn permuted(from: TensorType, to: TensorType, shape: [usize; 4], order: [usize; 4]) -> Case {
    Case::new(format!("copy {from} to {to} {shape:?} permuted {order:?}"), move |data| {
        let src = input(data, from, shape).permute(order);
        let dst = data.output(to, src.shape);
        (Call { src, dst }.into(), tolerance(from, to))
    })
}

/// Floats to blocks and back, and blocks of every type as they are.
fn block_cases() -> Vec<Case> {
    let mut cases = Vec::new();
    for ty in BLOCK_TYPES {
        for plain in [F32, F16] {
            cases.push(Case::new(format!("copy {plain} to {ty} from strided to strided rows"), move |data| {
                let src = data.strided_input(plain, [64, 3, 2, 2], [72, 4, 2, 2]);
                let dst = data.strided_output(ty, [64, 3, 2, 2], [128, 3, 3, 2]);
                (Call { src, dst }.into(), set_rows::cases::tolerance(plain, ty))
            }));
            cases.push(Case::new(format!("copy {ty} to {plain}, rows permuted"), move |data| {
                let src = random_blocks(data, ty, [96, 3, 2, 2], plain == F32).permute([0, 3, 1, 2]);
                let dst = data.output(plain, src.shape);
                (Call { src, dst }.into(), tolerance(F32, plain))
            }));
        }
    }
    for ty in FORMATS.iter().map(|format| format.ty).filter(|ty| ty.block_len() > 1) {
        cases.push(Case::new(format!("copy {ty} to {ty}"), move |data| {
            let n = ty.block_len();
            let src = random_blocks(data, ty, [4 * n, 3, 2, 1], true).narrow(0, 2 * n, 2 * n).permute([0, 2, 1, 3]);
            let dst = data.output(ty, src.shape);
            (Call { src, dst }.into(), Tolerance::Exact)
        }));
    }
    cases
}

/// The cases of a level.
pub fn cases(level: Level) -> Vec<Case> {
    if level == Level::Bench {
        return vec![
            case(F32, F32, [4096, 4096, 1, 1]),
            case(F32, F16, [4096, 4096, 1, 1]),
            permuted(F32, F32, [4096, 4096, 1, 1], [1, 0, 2, 3]),
            permuted(F32, F32, [128, 32, 4096, 1], [0, 2, 1, 3]),
        ];
    }
    let mut cases = Vec::new();
    for from in TYPES {
        for to in TYPES {
            cases.push(case(from, to, [64, 3, 2, 1]));
            cases.push(case(from, to, [7, 5, 1, 1]));
            cases.push(permuted(from, to, [5, 4, 3, 2], [3, 1, 0, 2]));
            cases.push(permuted(from, to, [33, 20, 1, 2], [1, 0, 2, 3]));
        }
        cases.push(case(from, from, [1, 1, 1, 1]));
        cases.push(permuted(from, from, [65, 3, 70, 1], [2, 1, 0, 3]));
        cases.push(permuted(from, from, [16, 2, 3, 20], [3, 2, 1, 0]));
        cases.push(permuted(from, from, [12, 5, 3, 2], [0, 2, 1, 3]));
        cases.push(Case::new(format!("copy {from} from strided to strided rows"), move |data| {
            let src = data.strided_input(from, [48, 3, 2, 1], [64, 4, 2, 1]);
            let dst = data.strided_output(from, [48, 3, 2, 1], [52, 3, 5, 2]);
            (Call { src, dst }.into(), Tolerance::Exact)
        }));
        cases.push(Case::new(format!("copy {from} between odd columns"), move |data| {
            let src = input(data, from, [20, 3, 1, 1]).narrow(0, 3, 8);
            let dst = data.output(from, [30, 3, 1, 1]).narrow(0, 5, 8);
            (Call { src, dst }.into(), Tolerance::Exact)
        }));
    }
    cases.extend(block_cases());
    cases.push(case(F32, F16, [5, 0, 1, 1]));
    cases.push(Case::new("copy F32 to I32 saturates", |data| {
        const VALUES: [f64; 8] = [2147483648.0, -2147483648.0, 3e38, -3e38, -0.9, 0.9, 2147483520.0, -2147483904.0];
        let src = data.input_with(F32, [8, 1, 1, 1], |_, i| VALUES[i]);
        let dst = data.output(I32, [8, 1, 1, 1]);
        (Call { src, dst }.into(), Tolerance::Exact)
    }));
    cases.push(Case::new("copy I32 keeps every bit", |data| {
        let src = data.input_with(I32, [64, 1, 1, 1], |random, _| f64::from(random.bits() as i32));
        let dst = data.output(I32, [64, 1, 1, 1]);
        (Call { src, dst }.into(), Tolerance::Exact)
    }));
    cases.push(Case::new("copy F16 keeps subnormals", |data| {
        let src = data.input_with(F16, [63, 1, 1, 1], |_, i| (i as f64 - 31.0) * 2f64.powi(-24));
        let dst = data.output(F16, [63, 1, 1, 1]);
        (Call { src, dst }.into(), Tolerance::Exact)
    }));
    if level == Level::Full {
        cases.push(case(F32, F16, [8193, 1001, 1, 1]));
        cases.push(permuted(F32, F32, [2051, 2049, 3, 1], [1, 0, 2, 3]));
        cases.push(permuted(F16, F16, [128, 33, 1250, 2], [2, 1, 0, 3]));
    }
    cases
}
