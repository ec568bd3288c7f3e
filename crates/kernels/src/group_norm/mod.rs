//! `group_norm`: brings each group of elements to mean 0 and variance 1, then applies weight and bias by channel.
//!
//! A group is a row of `x: [group_len, groups, ..]`; dimensions 2 and 3 are batches. With n weights, the
//! `group_len * groups` elements of a batch in a line fall into n channels of equal length: element i of group g uses
//! weight `(g * group_len + i) / (group_len * groups / n)`. So an image `[w, h, channels]` in G groups is
//! `[w * h * channels / G, G]` with one weight per channel, and RWKV's norm over each head is `[head_dim, heads, tokens]`
//! with `head_dim * heads` weights.

pub mod cases;
mod reference;

use crate::row_norm::{Channels, Operands, RowNorm};
use crate::tensor::Tensor;

/// One line for the registry.
pub const SUMMARY: &str = "y = (x - mean(x)) / sqrt(variance(x) + eps) * weight[channel] + bias[channel], per group";

/// Operands of `group_norm`.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Call {
    /// Input `[group_len, groups, ..]`, F32, F16 or BF16, dense rows.
    pub x: Tensor,
    /// Weight `[channels]`, F32.
    pub weight: Option<Tensor>,
    /// Bias `[channels]`, F32.
    pub bias: Option<Tensor>,
    /// Result, same extents as `x`, F32, F16 or BF16; may be `x` itself.
    pub y: Tensor,
    /// Added to the variance.
    pub eps: f32,
}

impl RowNorm for Call {
    fn operands(&self) -> Operands {
        Operands {
            name: "group_norm",
            file: "group_norm/group_norm.comp",
            x: self.x,
            y: self.y,
            weight: self.weight,
            bias: self.bias,
            eps: self.eps,
            channels: Channels::PerBatch,
        }
    }

    fn normalise(&self, row: &mut [f64]) {
        reference::standardise(row, f64::from(self.eps));
    }

    fn with_rows(&self, x: Tensor, y: Tensor) -> crate::Call {
        Call { x, y, ..*self }.into()
    }
}
