//! The definition of `norm`.

/// Brings a row to mean 0 and variance 1.
pub(crate) fn standardise(row: &mut [f64], eps: f64) {
    let n = row.len() as f64;
    let mean = row.iter().sum::<f64>() / n;
    let variance = row.iter().map(|v| (v - mean) * (v - mean)).sum::<f64>() / n;
    let deviation = (variance + eps).sqrt();
    row.iter_mut().for_each(|v| *v = (*v - mean) / deviation);
}
