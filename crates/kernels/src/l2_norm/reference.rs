//! The definition of `l2_norm`.

/// Divides a row by its length, or by `eps` where it is shorter.
pub(crate) fn normalise(row: &mut [f64], eps: f64) {
    let length = row.iter().map(|v| v * v).sum::<f64>().sqrt().max(eps);
    row.iter_mut().for_each(|v| *v /= length);
}
