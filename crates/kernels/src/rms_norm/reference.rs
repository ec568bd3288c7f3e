//! The definition of `rms_norm`.

/// Divides a row by its root mean square.
pub(crate) fn normalise(row: &mut [f64], eps: f64) {
    let mean = row.iter().map(|v| v * v).sum::<f64>() / row.len() as f64;
    let length = (mean + eps).sqrt();
    row.iter_mut().for_each(|v| *v /= length);
}
