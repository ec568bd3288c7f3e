//! Cases of `set_rows`.

use kiln_gguf::TensorType::{self, BF16, F16, F32, I32, I64, IQ4_NL, Q4_0, Q4_1, Q5_0, Q5_1, Q8_0};

use super::{BLOCK_TYPES, Call};
use crate::case::{Case, Data, Level, Tolerance};
use crate::formats::random_blocks;
use crate::tensor::Tensor;

/// Devices divide with an error of some ulps, which shows where a value lies halfway between two codes: one element of
/// a few hundred may be one code off, and the scale one step of f16. Values are uniform in [-1, 1), a mean square of 1/3.
pub(crate) fn tolerance(from: TensorType, to: TensorType) -> Tolerance {
    let step: f64 = match to {
        F32 => return Tolerance::Exact,
        F16 if from == F16 => return Tolerance::Exact,
        F16 => return Tolerance::Nmse(3e-7),
        BF16 => return Tolerance::Nmse(1.6e-5),
        Q8_0 => 1.0 / 127.0,
        Q4_0 => 1.0 / 8.0,
        Q4_1 => 2.0 / 15.0,
        Q5_0 => 1.0 / 16.0,
        Q5_1 => 2.0 / 31.0,
        _ => 1.0 / 5.0,
    };
    Tolerance::Nmse(step * step * 3.0 / 256.0)
}

/// Distinct row numbers in each batch; `rows` is no multiple of 3.
fn distinct(data: &mut Data, ty: TensorType, shape: [usize; 4], rows: usize) -> Tensor {
    assert!(rows >= shape[0] && !rows.is_multiple_of(3));
    let (start, n) = (data.random.below(rows), shape[0]);
    data.input_with(ty, shape, move |_, i| ((start + i / n + 3 * (i % n)) % rows) as f64)
}

struct Shape {
    cols: usize,
    n: [usize; 3],
    repeat: [usize; 2],
    rows: usize,
}

fn case(from: TensorType, to: TensorType, ids: TensorType, shape: Shape) -> Case {
    let Shape { cols, n, repeat, rows } = shape;
    Case::new(format!("set_rows {from} to {to} {ids} {n:?}/{repeat:?} of [{cols}, {rows}]"), move |data| {
        let src = data.input(from, [cols, n[0], n[1], n[2]]);
        let ids = distinct(data, ids, [n[0], n[1] / repeat[0], n[2] / repeat[1], 1], rows);
        // What no row replaces must stay, so there must be something to compare.
        let dst = random_blocks(data, to, [cols, rows, n[1], n[2]], false);
        (Call { src, ids, dst }.into(), tolerance(from, to))
    })
}

/// Blocks of zeros, of one value, of the largest and the smallest, of one sign, of ties for the largest magnitude.
fn special(to: TensorType, kind: usize) -> Case {
    Case::new(format!("set_rows F32 to {to} special block {kind}"), move |data| {
        let src = data.input_with(F32, [32, 1, 1, 1], |_, i| {
            let l = i as f64;
            match kind {
                0 => 0.0,
                1 => -3.0,
                2 => 60000.0 - 100.0 * l,
                // The scale is subnormal in f16, and in the next one vanishes.
                3 => (l - 16.0) * 3e-6,
                4 => (l - 15.5) * 1e-12,
                5 => [1.0, -1.0][i % 2],
                6 => -(l + 1.0) / 32.0,
                _ => l / 32.0,
            }
        });
        let ids = data.input_with(I32, [1; 4], |_, _| 1.0);
        let dst = data.input_with(to, [32, 2, 1, 1], |_, _| 0.0);
        (Call { src, ids, dst }.into(), Tolerance::Nmse(1e-6))
    })
}

/// Values that F16 cannot hold, beside some that it can.
fn beyond_halves(from: TensorType, cols: usize) -> Case {
    const VALUES: [f64; 7] = [65504.0, 65519.0, -65536.0, 1e6, f64::NEG_INFINITY, f64::NAN, -3.0];
    Case::new(format!("set_rows {from} to F16 [{cols}] beyond half floats"), move |data| {
        let src = data.input_with(from, [cols, 3, 1, 1], |_, i| VALUES[i % VALUES.len()]);
        let ids = data.input_with(I32, [3, 1, 1, 1], |_, i| 2.0 - i as f64);
        let dst = data.output(F16, [cols, 3, 1, 1]);
        (Call { src, ids, dst }.into(), Tolerance::Exact)
    })
}

/// The cases of a level.
pub fn cases(level: Level) -> Vec<Case> {
    if level == Level::Bench {
        let shape = || Shape { cols: 1024, n: [512, 1, 1], repeat: [1, 1], rows: 8192 };
        return [F16, Q8_0, Q4_0].map(|to| case(F32, to, I64, shape())).into();
    }
    let mut cases = Vec::new();
    for to in [F32, F16, BF16].into_iter().chain(BLOCK_TYPES) {
        for from in [F32, F16] {
            cases.push(case(from, to, I64, Shape { cols: 96, n: [5, 2, 3], repeat: [1, 3], rows: 7 }));
            cases.push(case(from, to, I32, Shape { cols: 256, n: [3, 4, 1], repeat: [2, 1], rows: 4 }));
        }
        cases.extend((0..8).map(|kind| special(to, kind)));
        cases.push(Case::new(format!("set_rows F32 to {to} ids out of range, odd rows"), move |data| {
            const IDS: [f64; 6] = [1.0, -1.0, 4.0, 3.0, 4294967297.0, 0.0];
            let src = data.input(F32, [33, 6, 1, 1]).narrow(0, 1, 32);
            let ids = data.input_with(I64, [6, 1, 1, 1], |_, i| IDS[i]);
            let dst = random_blocks(data, to, [64, 4, 1, 1], false).narrow(0, 32, 32);
            (Call { src, ids, dst }.into(), tolerance(F32, to))
        }));
    }
    cases.push(case(F32, F16, I32, Shape { cols: 7, n: [3, 1, 1], repeat: [1, 1], rows: 4 }));
    // By single elements and by four, and infinities that are in half floats already.
    cases.extend([(F32, 9), (F32, 64), (F16, 8)].map(|(from, cols)| beyond_halves(from, cols)));
    cases.push(Case::new("set_rows negative I32", |data| {
        const IDS: [f64; 4] = [2.0, -2147483648.0, -1.0, 2147483647.0];
        let src = data.input(F32, [8, 4, 1, 1]);
        let ids = data.input_with(I32, [4, 1, 1, 1], |_, i| IDS[i]);
        let dst = data.output(F32, [8, 3, 1, 1]);
        (Call { src, ids, dst }.into(), Tolerance::Exact)
    }));
    if level == Level::Full {
        for to in [F16, Q8_0, IQ4_NL, Q5_1] {
            cases.push(case(F32, to, I64, Shape { cols: 4096, n: [513, 1, 1], repeat: [1, 1], rows: 1024 }));
        }
    }
    cases
}
