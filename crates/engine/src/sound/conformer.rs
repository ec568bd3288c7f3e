//! What conformers share: layers of attention with a convolution over time beside it, between two halves of a feed-forward network.

use kiln_kernels::tensor::Tensor;
use kiln_kernels::unary::Function;

use super::unfold::depthwise;
use crate::vision::sheet::Sheet;

/// The first half of each row times the sigmoid of the second.
pub(super) fn gated_halves(s: &mut Sheet, x: Tensor) -> Tensor {
    let half = x.shape[0] / 2;
    let gate = s.b.function("gate", x.narrow(0, half, half), Function::Sigmoid);
    s.b.multiply("gated", gate, x.narrow(0, 0, half))
}

/// Each channel summed over the moments around its own, so many before it; `factors [width, taps]`.
pub(super) fn over_time(s: &mut Sheet, x: Tensor, before: usize, factors: Tensor) -> Tensor {
    let (rows, taps) = (x.shape[1], factors.shape[1]);
    let read = (0..rows)
        .flat_map(move |at| (0..taps).map(move |tap| (at + tap).checked_sub(before).filter(|source| *source < rows)));
    depthwise(s, x, read, factors)
}

/// x + half of y.
pub(super) fn half_step(s: &mut Sheet, x: Tensor, y: Tensor) -> Tensor {
    let half = s.b.scale("half", y, 0.5);
    s.b.add("residual", x, half)
}
