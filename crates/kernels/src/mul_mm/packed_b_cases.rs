//! Cases of gates, of results that are emitted packed for matrix units, and of activations that come so.

use kiln_gguf::TensorType::{self, F16, F32, I32, Q4_K, Q6_K, Q8_0};
use kiln_gpu::FragmentLayout::{self, Mma16x8, Row8};

use super::cases::{weights, with_scratch};
use super::{Call, Gated, Prologue, piece};
use crate::case::{Case, Data, Tolerance};
use crate::glu::Gate;
use crate::mul_mat::{Epilogue, FusedProduct, Norm, Product};
use crate::packed_b::{MagnitudeProbe, PackedB, len, rows, words_of_squares};
use crate::tensor::Tensor;

/// The errors of both products, and of halves one more rounding; large results, of which there are few, weigh most. Every activation vector is judged by itself:
/// their magnitudes differ.
const OF_BOTH: Tolerance = Tolerance::NmsePerRow(4e-6);
/// The same of one product without a gate. An activation vector has few results, so that errors average out less than over a whole tensor.
const OF_ONE: Tolerance = Tolerance::NmsePerRow(1e-6);

/// A gate between two matrices; `left`: for weights of which type its activations are left, where they are.
fn gated(ty: TensorType, kind: Gate, order: FragmentLayout, sizes: [usize; 3], left: Option<TensorType>) -> Case {
    let [k, m, n] = sizes;
    let name = format!("mul_mm {ty} k={k} m={m} n={n}, {} left for {left:?} of {order:?}", kind.name());
    Case::new(name, move |data| {
        let a = weights(data, ty, [k, m, 1, 1]);
        let product = Product { a, b: data.input(F32, [k, n, 1, 1]), d: data.output(F32, [m, n, 1, 1]) };
        let up = weights(data, ty, [k, m, 1, 1]);
        let norm = Norm { weight: Some(data.input(F32, [k, 1, 1, 1])), eps: 1e-5 };
        let rows = rows(order);
        let magnitude_probe = |sums| Some(MagnitudeProbe { sums, rows });
        let call = Call {
            gate: Some(Gated { kind, up }),
            prologue: Some(Prologue::Norm(norm)),
            magnitude_probe: magnitude_probe(data.output(F32, [n, MagnitudeProbe::tiles(m, rows).1, 1, 1])),
            ..Call::plain(product)
        };
        let call = match left {
            Some(ty) => {
                // Activations of very different magnitudes, as far as halves have all their bits, and one of zeros. Another one is so much larger than its
                // reference that some of it is beyond halves.
                let sums = data.input_with(F32, [n, 3, 1, 1], |random, i| match (i, i % n) {
                    (6, _) | (_, 5) => 0.0,
                    (_, 9) => random.uniform(0.5, 4.0) * 4f64.powi(-8),
                    (_, column) => random.uniform(0.5, 4.0) * 4f64.powi(column as i32 % 8 - 4),
                });
                let (halves, factors) = (data.output(F16, [len(m, n), 1, 1, 1]), Some(data.output(F32, [n, 1, 1, 1])));
                let emit_packed_b = Some(PackedB { halves, layout: order, piece: piece(ty), factors, squares: None });
                Call { emit_packed_b, scale_hint: magnitude_probe(sums), overflow: Some(flag(data)), ..call }
            }
            None => call,
        };
        (with_scratch(data, call).into(), OF_BOTH)
    })
}

/// The flag for what is out of range, not set.
fn flag(data: &mut Data) -> Tensor {
    data.input_with(I32, [1; 4], |_, _| 0.0)
}

/// A product of activations that come packed. What they are is no chance: halves and floats are made apart.
fn taken(ty: TensorType, order: FragmentLayout, [k, m, n]: [usize; 3], divided: bool) -> Case {
    Case::new(
        format!("mul_mm {ty} k={k} m={m} n={n}, packed activations of {order:?}, factors: {divided}"),
        move |data| {
            let value = |i: usize| ((i * 7919 + i / k * 13) % 127) as f64 / 16.0 - 4.0;
            let factor = |column: usize| if divided { 2f64.powi(column as i32 % 5 - 2) } else { 1.0 };
            let a = weights(data, ty, [k, m, 1, 1]);
            let b = data.input_with(F32, [k, n, 1, 1], |_, i| value(i));
            let factors = divided.then(|| data.input_with(F32, [n, 1, 1, 1], |_, i| factor(i)));
            let packed_b = PackedB { halves: b, layout: order, piece: piece(ty), factors, squares: None };
            // Padding past N holds values that must not be read.
            let mut halves = vec![12345.0; len(k, n)];
            for (i, half) in packed_b.places(k, n) {
                halves[half] = value(i) / factor(i / k);
            }
            let halves = data.input_with(F16, [len(k, n), 1, 1, 1], |_, i| halves[i]);
            let call = Call {
                packed_b: Some(PackedB { halves, ..packed_b }),
                epilogue: Epilogue { residual: Some(data.input(F32, [m, n, 1, 1])), ..Epilogue::default() },
                ..Call::plain(Product { a, b, d: data.output(F32, [m, n, 1, 1]) })
            };
            (with_scratch(data, call).into(), OF_ONE)
        },
    )
}

/// A product whose activations a norm follows: left with its weights, and their squares added up; or, as the first of a plan, with nothing to go by.
fn before_a_norm(ty: TensorType, order: FragmentLayout, [k, m, n]: [usize; 3], first: bool) -> Case {
    let name = format!("mul_mm {ty} k={k} m={m} n={n}, left for a norm of {order:?}, first: {first}");
    before_a_norm_with(name, ty, order, [k, m, n], first, |_| 1.0)
}

/// Elements of activation vectors that are other than their prediction.
#[derive(Clone, Copy, Debug)]
enum Outliers {
    /// 2^10 and 2^16 times the mean, as models have them in the first token of a sequence: within the range of an f16. A vector below its prediction.
    Held,
    /// One that neither an f16 nor a sum of squares holds.
    Beyond,
    /// A vector whose tiles are each within a sum of squares and all together are not.
    BeyondTogether,
    /// One that is infinite.
    Infinite,
}

/// The same with single elements that are far larger than all others.
fn with_outliers(order: FragmentLayout, outliers: Outliers) -> Case {
    let [k, m, n] = [256, 256, 16];
    let name = format!("mul_mm k={k} m={m} n={n}, left for a norm of {order:?}, outliers {outliers:?}");
    // Half as much again as a sum of squares holds. Its scale follows from a tile, which has as many rows as a matrix.
    let together = 1.1e6 * 16.0 / rows(order) as f64;
    before_a_norm_with(name, Q4_K, order, [k, m, n], false, move |i| match (outliers, i / m, i % m) {
        (_, 1, 7) => 1e4,
        (_, 4, 100 | 101) => -6e5,
        (_, 11, _) => 2f64.powi(-3),
        (Outliers::Beyond, 9, 33) => 1e9,
        (Outliers::BeyondTogether, 9, _) => together,
        (Outliers::Infinite, 9, 33) => f64::INFINITY,
        _ => 1.0,
    })
}

fn before_a_norm_with(
    name: String,
    ty: TensorType,
    order: FragmentLayout,
    [k, m, n]: [usize; 3],
    first: bool,
    times: impl Fn(usize) -> f64 + Send + Sync + 'static,
) -> Case {
    Case::new(name, move |data| {
        let residual = data.input_with(F32, [m, n, 1, 1], |random, i| random.uniform(-1.0, 1.0) * times(i));
        let (a, b) = (weights(data, ty, [k, m, 1, 1]), data.input(F32, [k, n, 1, 1]));
        let magnitude_probe = |sums| Some(MagnitudeProbe { sums, rows: rows(order) });
        let call = Call {
            // In place, as models have it.
            epilogue: Epilogue { residual: Some(residual), ..Epilogue::default() },
            magnitude_probe: magnitude_probe(data.output(F32, [n, MagnitudeProbe::tiles(m, rows(order)).1, 1, 1])),
            sums: Some(data.input_with(I32, [n, 2, 2, 1], |_, i| if i < 2 * n { 0.0 } else { 77.0 })),
            ..Call::plain(Product { a, b, d: residual })
        };
        if first {
            return (with_scratch(data, call).into(), OF_BOTH);
        }
        let hints = data.input_with(F32, [n, 3, 1, 1], |random, i| match i % n {
            9 => 250.0,
            _ => random.uniform(100.0, 400.0),
        });
        let scale_hint = magnitude_probe(hints);
        let (halves, factors) = (data.output(F16, [len(m, n), 1, 1, 1]), Some(data.output(F32, [n, 1, 1, 1])));
        let emit_packed_b = Some(PackedB { halves, layout: order, piece: piece(Q4_K), factors, squares: None });
        let emit_weight = Some(data.input(F32, [m, 1, 1, 1]));
        let overflow = Some(flag(data));
        (with_scratch(data, Call { emit_packed_b, scale_hint, emit_weight, overflow, ..call }).into(), OF_BOTH)
    })
}

/// Fused products of activations that come packed for a norm. One vector may be far below its prediction: as far as its sum of squares has all its
/// bits, or farther.
fn normed(order: FragmentLayout, [k, n]: [usize; 2], fallen: i32) -> Case {
    let name =
        format!("mul_mm fused products k={k} n={n}, packed activations of {order:?}, normed, one fallen by 2^{fallen}");
    Case::new(name, move |data| {
        let fall = |column: usize| if column == 2 { 2f64.powi(-fallen) } else { 1.0 };
        let value = move |i: usize| {
            (((i * 7919 + i / k * 13) % 127) as f64 / 16.0 - 4.0) * 3f64.powi((i / k) as i32 % 7) * fall(i / k)
        };
        // Sums of squares are below 2^28, the most that their words hold, and halves of the fallen vector keep enough bits.
        let factor = |column: usize| 2f64.powi((3 * column % 11) as i32 - if column == 2 { 3 } else { 1 });
        let weight = |e: usize| 0.5 + (e % 7) as f64 / 8.0;
        let b = data.input_with(F32, [k, n, 1, 1], |_, i| value(i));
        let factors = Some(data.input_with(F32, [n, 1, 1, 1], |_, i| factor(i)));
        let sum = |column: usize| (0..k).map(|e| (value(column * k + e) / factor(column)).powi(2)).sum::<f64>();
        let words = words_of_squares(&(0..n).map(sum).collect::<Vec<_>>());
        let squares = data.input_with(I32, [n, 2, 1, 1], |_, i| words[i]);
        let packed_b = PackedB { halves: b, layout: order, piece: piece(Q4_K), factors, squares: Some(squares) };
        let mut halves = vec![0.0; len(k, n)];
        for (i, half) in packed_b.places(k, n) {
            halves[half] = value(i) * weight(i % k) / factor(i / k);
        }
        let halves = data.input_with(F16, [len(k, n), 1, 1, 1], |_, i| halves[i]);
        let norm = Norm { weight: Some(data.input_with(F32, [k, 1, 1, 1], |_, i| weight(i))), eps: 0.5 };
        let fused = |data: &mut Data, ty, m| (weights(data, ty, [k, m, 1, 1]), data.output(F32, [m, n, 1, 1]));
        let ((a, d), (other, of_other)) = (fused(data, Q4_K, 19), fused(data, Q6_K, 9));
        let call = Call {
            packed_b: Some(PackedB { halves, ..packed_b }),
            prologue: Some(Prologue::Norm(norm)),
            others: vec![FusedProduct { a: other, d: of_other, bias: Some(data.input(F32, [9, 1, 1, 1])) }],
            overflow: Some(flag(data)),
            ..Call::plain(Product { a, b, d })
        };
        (with_scratch(data, call).into(), OF_ONE)
    })
}

pub(super) fn cases() -> Vec<Case> {
    let mut cases = Vec::new();
    for order in [Mma16x8, Row8] {
        // Rows that end inside a tile and a four, tiles of activations that are not full, and several of them.
        cases.push(gated(Q4_K, Gate::Swiglu, order, [512, 43, 11], None));
        cases.push(gated(Q8_0, Gate::Geglu, order, [192, 256, 16], Some(Q4_K)));
        cases.push(gated(Q4_K, Gate::Swiglu, order, [1280, 256, 32], Some(F16)));
        cases.push(taken(Q4_K, order, [512, 35, 16], true));
        cases.push(taken(Q6_K, order, [256, 20, 21], true));
        cases.push(taken(F16, order, [256, 16, 3], false));
        cases.push(before_a_norm(Q4_K, order, [256, 256, 16], false));
        cases.push(before_a_norm(Q8_0, order, [192, 77, 13], true));
        for outliers in [Outliers::Held, Outliers::Beyond, Outliers::BeyondTogether, Outliers::Infinite] {
            cases.push(with_outliers(order, outliers));
        }
        cases.extend([0, 12, 16].map(|fallen| normed(order, [512, 21], fallen)));
    }
    cases
}
