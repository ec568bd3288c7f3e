//! Cases of `dequantise`: every format, with the scales and codes that go wrong first.

use kiln_gguf::TensorType::{self, F16, F32, Q4_K, Q6_K};

use super::Call;
use crate::case::{Case, Level, Tolerance};
use crate::formats::{FORMATS, random_blocks};
use crate::tensor::Tensor;

/// Every value is defined to the bit; only how floats are rounded to f16, the driver chooses.
fn tolerance(to: TensorType) -> Tolerance {
    // 11 bits: relative error up to 2^-11, squared 2e-7.
    if to == F16 { Tolerance::Nmse(3e-7) } else { Tolerance::Exact }
}

fn case(from: TensorType, to: TensorType, blocks: usize, outer: [usize; 3]) -> Case {
    let shape = [blocks * from.block_len(), outer[0], outer[1], outer[2]];
    Case::new(format!("dequantise {from} to {to} {shape:?}"), move |data| {
        let src = random_blocks(data, from, shape, to == F32);
        let dst = data.output(to, shape);
        (Call { src, dst }.into(), tolerance(to))
    })
}

/// Result rows at odd places, which the wide form cannot write.
fn unaligned(from: TensorType) -> Case {
    let shape = [from.block_len(), 3, 2, 1];
    Case::new(format!("dequantise {from} to unaligned F32 {shape:?}"), move |data| {
        let src = random_blocks(data, from, shape, true);
        let dst = data.output(F32, [shape[0] + 3, 3, 2, 1]).narrow(0, 1, shape[0]);
        (Call { src, dst }.into(), Tolerance::Exact)
    })
}

/// Rows with gaps between them on both sides, which no kernel may take for one long row.
fn gaps(from: TensorType, to: TensorType) -> Case {
    let len = from.block_len().max(32);
    let shape = [2 * len, 3, 2, 2];
    Case::new(format!("dequantise {from} to {to} with gaps {shape:?}"), move |data| {
        let src = random_blocks(data, from, [3 * len, 4, 3, 2], to == F32).narrow(0, len, 2 * len);
        let dst = data.output(to, [2 * len + 8, 4, 3, 2]).narrow(0, 8, 2 * len);
        let inner = |t: Tensor| t.narrow(1, 1, 3).narrow(2, 1, 2);
        (Call { src: inner(src), dst: inner(dst) }.into(), tolerance(to))
    })
}

/// The cases of a level.
pub fn cases(level: Level) -> Vec<Case> {
    let mut cases = Vec::new();
    for ty in FORMATS.iter().map(|format| format.ty) {
        if level == Level::Bench {
            cases.push(case(ty, F16, 4096 / ty.block_len(), [4096, 1, 1]));
            continue;
        }
        cases.push(case(ty, F32, 1, [1, 1, 1]));
        cases.push(case(ty, F32, 1, [8, 1, 1]));
        cases.push(case(ty, F32, 3, [5, 2, 2]));
        cases.push(case(ty, F16, 3, [2, 3, 1]));
        cases.push(unaligned(ty));
        if level == Level::Full {
            // Enough for a thread to take several units.
            cases.push(case(ty, F32, 8192 / ty.block_len(), [511, 1, 1]));
            cases.push(case(ty, F16, 8192 / ty.block_len(), [2047, 1, 1]));
        }
    }
    if level != Level::Bench {
        cases.extend([gaps(F32, F16), gaps(Q4_K, F32), gaps(Q4_K, F16), gaps(Q6_K, F16)]);
    }
    cases
}
