//! The definition of `soft_max`.

use super::Call;
use crate::host::HostMemory;
use crate::operation::rows_apart;

/// The softmax of every row of x * scale + slope * mask; a row of minus infinities gives zeros.
pub(crate) fn reference(call: &Call, memory: &mut HostMemory) {
    let cols = call.x.shape[0];
    let sinks = call.sinks.map(|s| memory.read(&s));
    let mask = call.mask.map(|m| (m.shape, memory.read(&m)));
    let mut y = memory.read(&call.x);
    for (row, [i1, i2, i3]) in y.chunks_exact_mut(cols).zip(rows_apart(call.x.shape)) {
        row.iter_mut().for_each(|v| *v *= f64::from(call.scale));
        if let Some(([_, n1, n2, n3], mask)) = &mask {
            let first = (((i3 % n3) * n2 + i2 % n2) * n1 + i1) * cols;
            let slope = slope(i2, call.x.shape[2], f64::from(call.max_bias));
            row.iter_mut().zip(&mask[first..]).for_each(|(v, m)| *v += slope * m);
        }
        let sink = sinks.as_ref().map_or(f64::NEG_INFINITY, |s| s[i2]);
        let top = row.iter().copied().fold(sink, f64::max);
        if top == f64::NEG_INFINITY {
            row.fill(0.0);
            continue;
        }
        let sum = row.iter().map(|v| (v - top).exp()).sum::<f64>() + (sink - top).exp();
        row.iter_mut().for_each(|v| *v = (*v - top).exp() / sum);
    }
    memory.write(&call.y, &y);
}

/// The slope of ALiBi for a head: a geometric series, with the heads past a power of two in between.
fn slope(head: usize, heads: usize, max_bias: f64) -> f64 {
    if max_bias == 0.0 {
        return 1.0;
    }
    let n = super::heads_pow2(heads);
    if head < n {
        2f64.powf(-max_bias / n as f64).powi(head as i32 + 1)
    } else {
        2f64.powf(-max_bias / (2 * n) as f64).powi(2 * (head - n) as i32 + 1)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn slopes_of_twelve_heads() {
        assert_eq!(slope(0, 8, 8.0), 0.5);
        assert_eq!(slope(7, 8, 8.0), 1.0 / 256.0);
        assert_eq!(slope(7, 12, 8.0), 1.0 / 256.0);
        assert!((slope(8, 12, 8.0) - 0.5f64.sqrt()).abs() < 1e-15);
        assert!((slope(11, 12, 8.0) - 0.5f64.powf(3.5)).abs() < 1e-15);
        assert_eq!(slope(3, 12, 0.0), 1.0);
    }
}
