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
        // Of each key the scores of all columns.
        let mut scores = Vec::with_capacity(keys * call.groups());
        let mut k = vec![0.0f32; width];
        for key in 0..keys {
            from.float_row(&call.k, [place.key(key), 0, 0], &mut k);
            let products = q[row * heads * width..][..heads * width].chunks_exact(width).map(|q| product(q, &k));
            if call.each {
                scores.extend(products.map(f64::from));
                continue;
            }
            let weight = |head: usize| weights.as_ref().map_or(1.0, |w| w[row * heads + head]);
            let sum: f32 = products.enumerate().map(|(head, product)| weight(head) * product.max(0.0)).sum();
            scores.push(f64::from(sum));
        }
        let list = |group: usize| -> Vec<usize> {
            let own: Vec<f64> = scores.iter().skip(group).step_by(call.groups()).copied().collect();
            let tokens = chosen(&call.rule, &own, seen);
            tokens.into_iter().map(|token| place.token(token) * call.groups() + group).collect()
        };
        (0..call.groups()).map(list).collect()
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
