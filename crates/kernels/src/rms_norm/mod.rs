//! `rms_norm`: divides each row by its root mean square, then multiplies by a weight row if there is one.

pub mod cases;
mod cpu;
mod reference;

use crate::row_norm::{Channels, Operands, RowNorm};
use crate::tensor::Tensor;

pub(crate) use cpu::norm_row;

/// One line for the registry.
pub const SUMMARY: &str = "y = x / sqrt(mean(x^2) + eps) * weight, per row";

/// Operands of `rms_norm`.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Call {
    /// Input `[cols, ..]`, F32, F16 or BF16, dense rows.
    pub x: Tensor,
    /// Weight `[cols]`, F32.
    pub weight: Option<Tensor>,
    /// Result, same extents as `x`, F32, F16 or BF16; may be `x` itself.
    pub y: Tensor,
    /// Added to the mean square.
    pub eps: f32,
}

impl RowNorm for Call {
    fn operands(&self) -> Operands {
        Operands {
            name: "rms_norm",
            file: "rms_norm/rms_norm.comp",
            x: self.x,
            y: self.y,
            weight: self.weight,
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
