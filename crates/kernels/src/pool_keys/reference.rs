//! The definition of `pool_keys`.

use super::Call;
use crate::host::HostMemory;

/// Of each row whose token finishes a block the weighed mean of the block's tokens, zeros of all others.
pub(super) fn reference(call: &Call, memory: &mut HostMemory) {
    let [width, rows, ..] = call.y.shape;
    let (positions, table) = (memory.read(&call.positions), memory.read(&call.pages.table));
    let sequences = call.sequences.map(|s| memory.read(&s));
    let places = call.places.map(|t| memory.floats(&t).into_owned());
    let wide = call.values.shape[0];
    let mut y = vec![0.0; rows * width];
    let (mut values, mut weights) = (vec![0.0f32; wide], vec![0.0f32; wide]);
    for (row, y) in y.chunks_exact_mut(width).enumerate() {
        let seen = (positions[row] as i64 + 1).max(0) as usize;
        if seen == 0 || !seen.is_multiple_of(call.size) {
            continue;
        }
        let pages = &table[call.sequence(sequences.as_deref(), row) * call.pages.table.shape[0]..];
        let first = seen - call.size;
        let from = if call.overlaps { first.saturating_sub(call.size) } else { first };
        let mut all: Vec<(Vec<f64>, Vec<f64>)> = Vec::with_capacity(seen - from);
        for token in from..seen {
            let at = pages[token / call.pages.size] as usize * call.pages.size + token % call.pages.size;
            memory.float_row(&call.values, [at, 0, 0], &mut values);
            if let Some(t) = &call.weights {
                memory.float_row(t, [at, 0, 0], &mut weights);
            }
            let half = if call.overlaps && token >= first { width } else { 0 };
            let place = |i: usize| places.as_ref().map_or(0.0, |p| f64::from(p[token % call.size * wide + half + i]));
            let lean = (0..width).map(|i| f64::from(weights[half + i]) + place(i)).collect();
            all.push((values[half..half + width].iter().map(|v| f64::from(*v)).collect(), lean));
        }
        for (i, y) in y.iter_mut().enumerate() {
            let top = all.iter().map(|(_, lean)| lean[i]).fold(f64::NEG_INFINITY, f64::max);
            let parts = all.iter().map(|(values, lean)| ((lean[i] - top).exp(), values[i]));
            let (sum, weighed) = parts.fold((0.0, 0.0), |(sum, all), (weight, v)| (sum + weight, all + weight * v));
            *y = weighed / sum;
        }
    }
    memory.write(&call.y, &y);
}
