//! `norm`: brings each row to mean 0 and variance 1 (layer norm), then applies a weight and a bias row if there are any.

pub mod cases;
pub(crate) mod reference;

use crate::row_norm::{Channels, Operands, RowNorm};
use crate::tensor::Tensor;

/// One line for the registry.
pub const SUMMARY: &str = "y = (x - mean(x)) / sqrt(variance(x) + eps) * weight + bias, per row";

/// Operands of `norm`.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Call {
    /// Input `[cols, ..]`, F32, F16 or BF16, dense rows.
    pub x: Tensor,
    /// Weight `[cols]`, F32.
    pub weight: Option<Tensor>,
    /// Bias `[cols]`, F32.
    pub bias: Option<Tensor>,
    /// Result, same extents as `x`, F32, F16 or BF16; may be `x` itself.
    pub y: Tensor,
    /// Added to the variance.
    pub eps: f32,
}

impl RowNorm for Call {
    fn operands(&self) -> Operands {
        Operands {
            name: "norm",
            file: "norm/norm.comp",
            x: self.x,
            y: self.y,
            weight: self.weight,
            bias: self.bias,
            eps: self.eps,
            channels: Channels::PerColumn,
        }
    }

    fn normalise(&self, row: &mut [f64]) {
        reference::standardise(row, f64::from(self.eps));
    }

    fn with_rows(&self, x: Tensor, y: Tensor) -> crate::Call {
        Call { x, y, ..*self }.into()
    }
}
