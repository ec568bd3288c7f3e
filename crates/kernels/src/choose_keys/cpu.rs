//! `choose_keys` at the speed of the CPU: queries side by side, keys read once for all heads.

use rayon::prelude::*;

use super::Call;
use super::reference::{Places, chosen, write};
use crate::host::HostMemory;

/// Sums that run side by side in a product.
const LANES: usize = 16;

/// Computes the result of the call.
pub(super) fn compute(call: &Call, memory: &mut HostMemory) {
    let [width, heads, rows, _] = call.q.shape;
    let (q, positions, table) = (memory.floats(&call.q), memory.read(&call.positions), memory.read(&call.pages.table));
    let weights = call.weights.map(|w| memory.floats(&w));
    let sequences = call.sequences.map(|s| memory.read(&s));
    let from = &*memory;
    let of_row = |row: usize| -> Vec<Vec<usize>> {
        let seen = (positions[row] as i64 + 1).max(0) as usize;
        let place = Places::of(call, &table, call.sequence(sequences.as_deref(), row));
        let keys = seen / call.rule.per_key;
        let mut scores = vec![vec![0.0f64; keys]; call.groups()];
        let mut k = vec![0.0f32; width];
        for key in 0..keys {
            from.float_row(&call.k, [place.key(key), 0, 0], &mut k);
            let mut sum = 0.0f32;
            for (head, q) in q[row * heads * width..][..heads * width].chunks_exact(width).enumerate() {
                let product = product(q, &k);
                match call.each {
                    true => scores[head][key] = f64::from(product),
                    false => sum += weights.as_ref().map_or(1.0, |w| w[row * heads + head]) * product.max(0.0),
                }
            }
            if !call.each {
                scores[0][key] = f64::from(sum);
            }
        }
        let list = |(group, scores): (usize, &Vec<f64>)| -> Vec<usize> {
            let tokens = chosen(&call.rule, scores, seen);
            tokens.into_iter().map(|token| place.token(token) * call.groups() + group).collect()
        };
        scores.iter().enumerate().map(list).collect()
    };
    let lists: Vec<Vec<usize>> = (0..rows).into_par_iter().flat_map_iter(of_row).collect();
    write(call, &lists, memory);
}

fn product(a: &[f32], b: &[f32]) -> f32 {
    let ((a, a_rest), (b, b_rest)) = (a.as_chunks::<LANES>(), b.as_chunks::<LANES>());
    let mut sums = [0.0f32; LANES];
    for (a, b) in a.iter().zip(b) {
        for (sum, (a, b)) in sums.iter_mut().zip(a.iter().zip(b)) {
            *sum += a * b;
        }
    }
    sums.iter().sum::<f32>() + a_rest.iter().zip(b_rest).map(|(a, b)| a * b).sum::<f32>()
}
