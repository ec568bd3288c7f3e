//! What `mul_mat_vec` and `mul_mm` share: the operands of a matrix product, what may follow it in the same pass, the
//! check, and the definition. Their kernels differ, their meaning does not.

use kiln_gguf::{TensorType, quant};
use rayon::prelude::*;

use crate::binary;
use crate::host::HostMemory;
use crate::operation::{Invalid, Work, require, rows_apart};
use crate::tensor::Tensor;

/// Largest N that `mul_mat_vec` takes; more go to `mul_mm`.
pub const MAX_GEMV_N: usize = 16;

/// A matrix product: d\[m, n\] = sum over k of a\[k, m\] * b\[k, n\].
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Product {
    /// Weights `[K, M, A2, A3]`, any format, dense rows.
    pub a: Tensor,
    /// Activations `[K, N, B2, B3]`, dense rows; batches B2 and B3 are multiples of A2 and A3, neighbours share `a`.
    pub b: Tensor,
    /// Result `[M, N, B2, B3]`, dense rows.
    pub d: Tensor,
}

/// What follows the product in the same pass: d = scale * product + bias + residual.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Epilogue {
    /// Factor of the product.
    pub scale: f32,
    /// `[M]`, F32, added to every activation vector.
    pub bias: Option<Tensor>,
    /// F32 with the extents of `d`, added; may be `d` itself.
    pub residual: Option<Tensor>,
}

impl Default for Epilogue {
    fn default() -> Epilogue {
        Epilogue { scale: 1.0, bias: None, residual: None }
    }
}

/// The activations are normed first: b\[k\] * weight\[k\] / sqrt(mean of b^2 + eps).
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Norm {
    /// `[K]`, F32.
    pub weight: Option<Tensor>,
    /// Added to the mean of squares.
    pub eps: f32,
}

/// Another matrix that multiplies the same activations.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct FusedProduct {
    /// `[K, M']`, any format.
    pub a: Tensor,
    /// `[M', N]`: F32, or for `mul_mm` also F16.
    pub d: Tensor,
    /// `[M']`, F32.
    pub bias: Option<Tensor>,
}

/// What a sum adds to `d`, where `d` is one of its two summands and both have the same extents.
pub(crate) fn other_summand(sum: &binary::Call, d: &Tensor) -> Option<Tensor> {
    let other = match (sum.a == *d, sum.b == *d) {
        (true, false) => sum.b,
        (false, true) => sum.a,
        _ => return None,
    };
    (other.shape == d.shape).then_some(other)
}

impl Product {
    /// Whether the operands fit together.
    pub fn check(&self, name: &'static str, epilogue: &Epilogue) -> Result<(), Invalid> {
        let Product { a, b, d } = self;
        require(a.shape[0] == b.shape[0], name, || format!("a is {a} but b is {b}: rows differ in length"))?;
        let want = [a.shape[1], b.shape[1], b.shape[2], b.shape[3]];
        require(d.shape == want, name, || format!("d is {d}, want {want:?}"))?;
        let spread = b.shape[2].is_multiple_of(a.shape[2]) && b.shape[3].is_multiple_of(a.shape[3]);
        require(spread, name, || format!("batches of {b} are no multiples of those of {a}"))?;
        let dense = a.has_dense_rows() && b.has_dense_rows() && d.has_dense_rows();
        require(dense, name, || "rows must be dense".into())?;
        if let Some(bias) = epilogue.bias {
            let fits = bias.ty == TensorType::F32 && bias.is_dense() && bias.len() == a.shape[1];
            require(fits, name, || format!("bias is {bias}, want F32[{}]", a.shape[1]))?;
        }
        if let Some(residual) = epilogue.residual {
            let fits = residual.ty == TensorType::F32 && residual.has_dense_rows() && residual.shape == d.shape;
            require(fits, name, || format!("residual is {residual}, want the extents of {d}"))?;
        }
        Ok(())
    }

    /// Tensors read.
    pub fn reads(&self, epilogue: &Epilogue) -> Vec<Tensor> {
        [Some(self.a), Some(self.b), epilogue.bias, epilogue.residual].into_iter().flatten().collect()
    }

    /// Arithmetic and traffic: weights once, whatever N.
    pub fn work(&self) -> Work {
        let bytes = |t: &Tensor| (t.rows() * t.row_bytes()) as f64;
        let flops = 2.0 * self.a.shape[0] as f64 * self.d.len() as f64;
        Work { bytes: bytes(&self.a) + bytes(&self.b) + bytes(&self.d), flops }
    }

    /// The batch of `a` that serves batch (i2, i3) of `b`.
    pub fn a_batch(&self, i2: usize, i3: usize) -> [usize; 2] {
        [i2 * self.a.shape[2] / self.b.shape[2], i3 * self.a.shape[3] / self.b.shape[3]]
    }

    /// The definition. Rows of `a` are spread over threads: every result is still one plain sum in f64.
    pub fn reference(&self, epilogue: &Epilogue, memory: &mut HostMemory) {
        let Product { a, b, d } = self;
        let (k, m, n) = (a.shape[0], a.shape[1], b.shape[1]);
        let columns = memory.read(b);
        let bias = epilogue.bias.map(|t| memory.read(&t));
        let residual = epilogue.residual.map(|t| memory.read(&t));
        let mut result = vec![0.0; d.len()];
        for (batch, [_, i2, i3]) in rows_apart([1, 1, b.shape[2], b.shape[3]]).enumerate() {
            let [a2, a3] = self.a_batch(i2, i3);
            let weights = memory.bytes(a.slot);
            let row_of = |row: usize| {
                let at = a.row_offset([row, a2, a3]);
                dequantised_row(a, &weights[at..])
            };
            let columns = &columns[batch * n * k..(batch + 1) * n * k];
            let rows: Vec<Vec<f64>> = (0..m)
                .into_par_iter()
                .map(|row| {
                    let weights = row_of(row);
                    let dot = |column: &[f64]| weights.iter().zip(column).map(|(w, x)| f64::from(*w) * x).sum();
                    columns.chunks_exact(k).map(dot).collect()
                })
                .collect();
            for (row, sums) in rows.iter().enumerate() {
                for (column, sum) in sums.iter().enumerate() {
                    let at = (batch * n + column) * m + row;
                    let extra = bias.as_ref().map_or(0.0, |b| b[row]) + residual.as_ref().map_or(0.0, |r| r[at]);
                    result[at] = f64::from(epilogue.scale) * sum + extra;
                }
            }
        }
        memory.write(d, &result);
    }
}

/// One row of weights as f32: exact for every format.
pub(crate) fn dequantised_row(tensor: &Tensor, bytes: &[u8]) -> Vec<f32> {
    let mut row = vec![0.0; tensor.shape[0]];
    quant::dequantise(tensor.ty, &bytes[..tensor.row_bytes()], &mut row).expect("rows are whole blocks");
    row
}
