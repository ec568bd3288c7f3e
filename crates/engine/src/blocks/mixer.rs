//! What mixes the tokens of a sequence in a layer.

use kiln_kernels::tensor::Tensor;

use crate::arch::Batch;
use crate::plan::{Builder, Linear};

/// A half of a layer, read from a file.
pub trait Mixer: Send + Sync {
    /// Adds the steps; gives what is added to the residual stream.
    fn build(&self, b: &mut Builder, batch: &Batch, x: Tensor) -> Tensor;
}

/// A matrix in the place of attention.
impl Mixer for Linear {
    fn build(&self, b: &mut Builder, _: &Batch, x: Tensor) -> Tensor {
        b.linear("output", x, self)
    }
}
