//! Cases of gates, of results that are left ready for matrix units, and of columns that come so.

use kiln_gguf::TensorType::{self, F16, F32, I32, Q4_K, Q6_K, Q8_0};
use kiln_gpu::MatrixOrder::{self, Quads, Slices};

use super::cases::{TOLERANCE, weights, with_scratch};
use super::{Before, Call, Gated, piece};
use crate::case::{Case, Data, Tolerance};
use crate::glu::Gate;
use crate::mul_mat::{Epilogue, Norm, Product, Sibling};
use crate::ready::{FRACTION, Ready, Samples, len, rows};

/// The errors of both products, and of halves one more rounding; large results, of which there are few, weigh most.
const OF_BOTH: Tolerance = Tolerance::Nmse(2e-6);

/// A gate between two matrices; `left`: for weights of which type its columns are left, where they are.
fn gated(ty: TensorType, kind: Gate, order: MatrixOrder, sizes: [usize; 3], left: Option<TensorType>) -> Case {
    let [k, m, n] = sizes;
    let name = format!("mul_mm {ty} k={k} m={m} n={n}, {} left for {left:?} of {order:?}", kind.name());
    Case::new(name, move |data| {
        let a = weights(data, ty, [k, m, 1, 1]);
        let product = Product { a, b: data.input(F32, [k, n, 1, 1]), d: data.output(F32, [m, n, 1, 1]) };
        let up = weights(data, ty, [k, m, 1, 1]);
        let norm = Norm { weight: Some(data.input(F32, [k, 1, 1, 1])), eps: 1e-5 };
        let rows = rows(order);
        let samples = |sums| Some(Samples { sums, rows });
        let call = Call {
            gate: Some(Gated { kind, up }),
            before: Some(Before::Norm(norm)),
            samples: samples(data.output(F32, [n, Samples::tiles(m, rows).1, 1, 1])),
            ..Call::plain(product)
        };
        let call = match left {
            Some(ty) => {
                // Columns of very different magnitudes, and one of zeros.
                let sums = data.input_with(F32, [n, 3, 1, 1], |random, i| if i % n == 5 || i == 6 { 0.0 } else { random.uniform(0.5, 4.0) * 4f64.powi((i % n) as i32 - 8) });
                let (halves, factors) = (data.output(F16, [len(m, n), 1, 1, 1]), Some(data.output(F32, [n, 1, 1, 1])));
                let leaving = Some(Ready { halves, order, piece: piece(ty), factors, squares: None });
                Call { leaving, reference: samples(sums), ..call }
            }
            None => call,
        };
        (with_scratch(data, call).into(), OF_BOTH)
    })
}

/// A product of columns that come ready. What they are is no chance: halves and floats are made apart.
fn taken(ty: TensorType, order: MatrixOrder, [k, m, n]: [usize; 3], divided: bool) -> Case {
    Case::new(format!("mul_mm {ty} k={k} m={m} n={n}, ready columns of {order:?}, factors: {divided}"), move |data| {
        let value = |i: usize| ((i * 7919 + i / k * 13) % 127) as f64 / 16.0 - 4.0;
        let factor = |column: usize| if divided { 2f64.powi(column as i32 % 5 - 2) } else { 1.0 };
        let a = weights(data, ty, [k, m, 1, 1]);
        let b = data.input_with(F32, [k, n, 1, 1], |_, i| value(i));
        let factors = divided.then(|| data.input_with(F32, [n, 1, 1, 1], |_, i| factor(i)));
        let ready = Ready { halves: b, order, piece: piece(ty), factors, squares: None };
        // Columns that are not there hold what nobody must look at.
        let mut halves = vec![12345.0; len(k, n)];
        for (i, half) in ready.places(k, n) {
            halves[half] = value(i) / factor(i / k);
        }
        let halves = data.input_with(F16, [len(k, n), 1, 1, 1], |_, i| halves[i]);
        let call = Call {
            ready: Some(Ready { halves, ..ready }),
            epilogue: Epilogue { residual: Some(data.input(F32, [m, n, 1, 1])), ..Epilogue::default() },
            ..Call::plain(Product { a, b, d: data.output(F32, [m, n, 1, 1]) })
        };
        (with_scratch(data, call).into(), TOLERANCE)
    })
}

/// A product whose columns a norm follows: left with its weights, and their squares added up; or, as the first of a plan, with nothing to go by.
fn before_a_norm(ty: TensorType, order: MatrixOrder, [k, m, n]: [usize; 3], first: bool) -> Case {
    Case::new(format!("mul_mm {ty} k={k} m={m} n={n}, left for a norm of {order:?}, first: {first}"), move |data| {
        let residual = data.input(F32, [m, n, 1, 1]);
        let (a, b) = (weights(data, ty, [k, m, 1, 1]), data.input(F32, [k, n, 1, 1]));
        let samples = |sums| Some(Samples { sums, rows: rows(order) });
        let call = Call {
            // In place, as models have it.
            epilogue: Epilogue { residual: Some(residual), ..Epilogue::default() },
            samples: samples(data.output(F32, [n, Samples::tiles(m, rows(order)).1, 1, 1])),
            sums: Some(data.input_with(I32, [n, 2, 2, 1], |_, i| if i < 2 * n { 0.0 } else { 77.0 })),
            ..Call::plain(Product { a, b, d: residual })
        };
        if first {
            return (with_scratch(data, call).into(), OF_BOTH);
        }
        let reference = samples(data.input_with(F32, [n, 3, 1, 1], |random, _| random.uniform(100.0, 400.0)));
        let (halves, factors) = (data.output(F16, [len(m, n), 1, 1, 1]), Some(data.output(F32, [n, 1, 1, 1])));
        let leaving = Some(Ready { halves, order, piece: piece(Q4_K), factors, squares: None });
        let left_weight = Some(data.input(F32, [m, 1, 1, 1]));
        (with_scratch(data, Call { leaving, reference, left_weight, ..call }).into(), OF_BOTH)
    })
}

/// Siblings of columns that come ready for a norm.
fn normed(order: MatrixOrder, [k, n]: [usize; 2]) -> Case {
    Case::new(format!("mul_mm siblings k={k} n={n}, ready columns of {order:?}, normed"), move |data| {
        let value = |i: usize| (((i * 7919 + i / k * 13) % 127) as f64 / 16.0 - 4.0) * 3f64.powi((i / k) as i32 % 7);
        let factor = |column: usize| 2f64.powi((3 * column % 11) as i32 - 3);
        let weight = |e: usize| 0.5 + (e % 7) as f64 / 8.0;
        let b = data.input_with(F32, [k, n, 1, 1], |_, i| value(i));
        let factors = Some(data.input_with(F32, [n, 1, 1, 1], |_, i| factor(i)));
        let sum = |column: usize| (0..k).map(|e| (value(column * k + e) / factor(column)).powi(2)).sum::<f64>();
        let squares = data.input_with(I32, [n, 2, 1, 1], |_, i| {
            if i < n { sum(i).floor() } else { (sum(i - n).fract() * f64::from(1 << FRACTION)).floor() }
        });
        let ready = Ready { halves: b, order, piece: piece(Q4_K), factors, squares: Some(squares) };
        let mut halves = vec![0.0; len(k, n)];
        for (i, half) in ready.places(k, n) {
            halves[half] = value(i) * weight(i % k) / factor(i / k);
        }
        let halves = data.input_with(F16, [len(k, n), 1, 1, 1], |_, i| halves[i]);
        let norm = Norm { weight: Some(data.input_with(F32, [k, 1, 1, 1], |_, i| weight(i))), eps: 0.5 };
        let sibling = |data: &mut Data, ty, m| (weights(data, ty, [k, m, 1, 1]), data.output(F32, [m, n, 1, 1]));
        let ((a, d), (other, of_other)) = (sibling(data, Q4_K, 19), sibling(data, Q6_K, 9));
        let call = Call {
            ready: Some(Ready { halves, ..ready }),
            before: Some(Before::Norm(norm)),
            others: vec![Sibling { a: other, d: of_other, bias: Some(data.input(F32, [9, 1, 1, 1])) }],
            ..Call::plain(Product { a, b, d })
        };
        (with_scratch(data, call).into(), TOLERANCE)
    })
}

pub(super) fn cases() -> Vec<Case> {
    let mut cases = Vec::new();
    for order in [Quads, Slices] {
        // Rows that end inside a tile and a four, tiles of columns that are not full, and several of them.
        cases.push(gated(Q4_K, Gate::Swiglu, order, [512, 43, 11], None));
        cases.push(gated(Q8_0, Gate::Geglu, order, [192, 256, 16], Some(Q4_K)));
        cases.push(gated(Q4_K, Gate::Swiglu, order, [1280, 256, 32], Some(F16)));
        cases.push(taken(Q4_K, order, [512, 35, 16], true));
        cases.push(taken(Q6_K, order, [256, 20, 21], true));
        cases.push(taken(F16, order, [256, 16, 3], false));
        cases.push(before_a_norm(Q4_K, order, [256, 256, 16], false));
        cases.push(before_a_norm(Q8_0, order, [192, 77, 13], true));
        cases.push(normed(order, [512, 21]));
    }
    cases
}
