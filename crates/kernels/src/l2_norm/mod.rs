//! `l2_norm`: divides each row by its Euclidean length.

pub mod cases;
mod reference;

use crate::row_norm::{Channels, Operands, RowNorm};
use crate::tensor::Tensor;

/// One line for the registry.
pub const SUMMARY: &str = "y = x / max(sqrt(sum(x^2)), eps), per row";

/// Operands of `l2_norm`.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Call {
    /// Input `[cols, ..]`, F32, F16 or BF16, dense rows.
    pub x: Tensor,
    /// Result, same extents as `x`, F32, F16 or BF16; may be `x` itself.
    pub y: Tensor,
    /// The least length a row is divided by.
    pub eps: f32,
}

impl RowNorm for Call {
    fn operands(&self) -> Operands {
        Operands {
            name: "l2_norm",
            file: "l2_norm/l2_norm.comp",
            x: self.x,
            y: self.y,
            weight: None,
            bias: None,
            eps: self.eps,
            channels: Channels::PerColumn,
        }
    }

    fn normalise(&self, row: &mut [f64]) {
        reference::normalise(row, f64::from(self.eps));
    }

    fn with_rows(&self, x: Tensor, y: Tensor) -> crate::Call {
        Call { x, y, ..*self }.into()
    }
}
