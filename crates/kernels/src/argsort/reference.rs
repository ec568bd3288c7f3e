//! The definition of `argsort`.

use super::{Call, Order};
use crate::elementwise::row;
use crate::host::HostMemory;
use crate::operation::rows_apart;

/// The indices of a row in order; NaN is smaller than everything else, equal elements keep their order.
pub(crate) fn sorted(row: &[f64], order: Order) -> Vec<usize> {
    let compare = |a: f64, b: f64| a.partial_cmp(&b).unwrap_or_else(|| b.is_nan().cmp(&a.is_nan()));
    let mut indices: Vec<usize> = (0..row.len()).collect();
    match order {
        Order::Ascending => indices.sort_by(|&a, &b| compare(row[a], row[b])),
        Order::Descending => indices.sort_by(|&a, &b| compare(row[b], row[a])),
    }
    indices
}

/// dst = the first indices of each row in order.
pub(super) fn reference(call: &Call, memory: &mut HostMemory) {
    let keep = call.dst.shape[0];
    if keep == 0 {
        return;
    }
    for i in rows_apart(call.x.shape) {
        let indices = sorted(&memory.read(&row(call.x, i)), call.order);
        let indices: Vec<f64> = indices[..keep].iter().map(|&i| i as f64).collect();
        memory.write(&row(call.dst, i), &indices);
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn equal_elements_keep_their_order_and_nan_is_smallest() {
        let row = [1.0, f64::NAN, -0.0, 1.0, 0.0, f64::NEG_INFINITY, f64::NAN];
        assert_eq!(sorted(&row, Order::Ascending), [1, 6, 5, 2, 4, 0, 3]);
        assert_eq!(sorted(&row, Order::Descending), [0, 3, 2, 4, 5, 1, 6]);
    }
}
