//! `sinkhorn`: small square matrices whose rows and columns sum up to 1 nearly, by dividing by the sums of both in turn: how residual streams
//! are mixed.

pub mod cases;
mod reference;

use kiln_gguf::TensorType;
use kiln_gpu::{Address, Caps, Shader};

use crate::host::HostMemory;
use crate::operation::{
    Choice, Invalid, Operation, Path, Unsupported, Work, grid, only_scalar, require, within_32_bits, word,
};
use crate::tensor::Tensor;

const NAME: &str = "sinkhorn";

/// One line for the registry.
pub const SUMMARY: &str =
    "y = softmax(x) divided by the sums of its columns and rows in turn, for small square matrices";

/// Largest matrix: a thread holds one in its registers, of which some GPUs have 256.
pub const MOST: usize = 12;

/// Operands of `sinkhorn`.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Call {
    /// F32 `[n * n, rows]`, dense rows: of each matrix n rows of n. Each such row becomes its softmax, plus `eps`.
    pub x: Tensor,
    /// Result F32 `[n, n, rows]`, dense: the columns of the matrices.
    pub y: Tensor,
    /// Added to the softmax, and to every sum that is divided by.
    pub eps: f32,
    /// How often columns are divided by their sums; rows are between two times.
    pub times: usize,
}

kiln_gpu::params! {
    struct Params {
        x: Address,
        y: Address,
        x_stride: u32,
        rows: u32,
        times: u32,
        eps: f32,
    }
}

impl Operation for Call {
    fn name(&self) -> &'static str {
        NAME
    }

    fn reads(&self) -> Vec<Tensor> {
        vec![self.x]
    }

    fn writes(&self) -> Vec<Tensor> {
        vec![self.y]
    }

    fn check(&self) -> Result<(), Invalid> {
        let Call { x, y, times, .. } = *self;
        let [n, _, rows, _] = y.shape;
        let fits = x.shape == [n * n, rows, 1, 1] && y.shape == [n, n, rows, 1] && !y.is_empty();
        require(fits, NAME, || format!("x is {x}, y is {y}: want [n * n, rows] and [n, n, rows]"))?;
        let floats = x.ty == TensorType::F32 && y.ty == TensorType::F32 && x.has_dense_rows() && y.is_dense();
        require(floats && x.stride[1].is_multiple_of(4), NAME, || {
            format!("x is {x}, y is {y}, want F32 and dense rows")
        })?;
        require(times > 0, NAME, || "columns are divided by their sums at least once".into())
    }

    fn pick(&self, caps: &Caps, want: Option<Path>) -> Result<Choice, Unsupported> {
        only_scalar(NAME, want)?;
        let [n, _, rows, _] = self.y.shape;
        if n > MOST {
            return Err(Unsupported { operation: NAME, reason: format!("matrices of {n} rows, at most {MOST}") });
        }
        within_32_bits(NAME, [self.x.stride[1], self.y.len(), rows, self.times])?;
        // Few of them, and each takes some time: small workgroups spread better.
        let threads = 32.min(caps.limits.max_workgroup_invocations as usize);
        let shader = Shader::new(format!("{NAME}.f32"), "sinkhorn/sinkhorn.comp", Params::glsl());
        let shader = shader.define("WG", threads).define("N", n);
        Ok(Choice::one(Path::Scalar, shader, grid(rows.div_ceil(threads), caps)))
    }

    fn params(&self, _: &Choice, _: usize, at: &dyn Fn(&Tensor) -> Address) -> Vec<u8> {
        let x_stride = if self.x.shape[1] > 1 { word(self.x.stride[1]) } else { 0 };
        let (rows, times) = (word(self.x.shape[1]), word(self.times));
        Params { x: at(&self.x), y: at(&self.y), x_stride, rows, times, eps: self.eps }.bytes()
    }

    fn reference(&self, memory: &mut HostMemory) {
        reference::reference(self, memory);
    }

    fn work(&self) -> Work {
        let elements = self.x.len() as f64;
        Work { bytes: 8.0 * elements, flops: elements * (4 * self.times + 4) as f64 }
    }

    fn parts(&self) -> Vec<crate::Call> {
        let part = |i: usize| Call { x: self.x.narrow(1, i, 1), y: self.y.narrow(2, i, 1), ..*self }.into();
        (0..self.x.shape[1]).map(part).collect()
    }
}
