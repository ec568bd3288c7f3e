//! `quantise_q8_1`: activations as 8-bit integers with a scale per 32 values, for the integer-dot kernels.

pub mod cases;
mod reference;

use kiln_gguf::TensorType;
use kiln_gpu::{Address, Caps, Shader};

use crate::formats;
use crate::host::HostMemory;
use crate::operation::{Choice, Invalid, Operation, Path, Unsupported, grid, only_scalar, require, rows_apart};
use crate::tensor::Tensor;

const NAME: &str = "quantise_q8_1";

/// Values of a block of the result.
pub const BLOCK: usize = 128;
/// Bytes of a block: four pairs of f16, scale d and d times the sum of the codes, then 128 signed codes.
pub const BLOCK_BYTES: usize = 144;

/// One line for the registry.
pub const SUMMARY: &str = "y = x as int8 with a scale and a sum per 32 values, in blocks of 128";

/// Elements of a row of the result, which is counted in I32, for a row of `cols` values: whole blocks.
pub fn words(cols: usize) -> usize {
    cols.div_ceil(BLOCK) * (BLOCK_BYTES / 4)
}

/// Operands of `quantise_q8_1`.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Call {
    /// Activations `[cols, ..]`, F32 or F16, rows without gaps.
    pub x: Tensor,
    /// Result `[words(cols), ..]`, counted in I32, rows without gaps; the last block of a row is padded with zeros.
    /// Scales and sums saturate at 65504, sums where magnitudes reach about 2000.
    pub y: Tensor,
}

kiln_gpu::params! {
    struct Params {
        x: Address,
        y: Address,
        shape: [u32; 3],
        x_stride: [u32; 3],
        y_stride: [u32; 3],
        cols: u32,
        row_units: u32,
        units: u32,
    }
}

impl Call {
    fn fours(&self) -> bool {
        formats::is_aligned(&self.x) && self.x.shape[0].is_multiple_of(4)
    }

    /// Threads of a row: four values each.
    fn row_units(&self) -> usize {
        self.x.shape[0].div_ceil(BLOCK) * (BLOCK / 4)
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
        let Call { x, y } = self;
        let fits = y.shape[0] == words(x.shape[0]) && y.shape[1..] == x.shape[1..];
        require(fits, NAME, || format!("x is {x}, so a row of y has {} words, but y is {y}", words(x.shape[0])))?;
        let types = matches!(x.ty, TensorType::F32 | TensorType::F16) && y.ty == TensorType::I32;
        require(types, NAME, || format!("x is {x}, not F32 or F16, or y is {y}, not I32"))?;
        require(x.has_dense_rows() && y.has_dense_rows(), NAME, || "rows of x and y must be dense".into())
    }

    fn pick(&self, caps: &Caps, want: Option<Path>) -> Result<Choice, Unsupported> {
        only_scalar(NAME, want)?;
        formats::rows_reachable(NAME, &[self.x, self.y])?;
        let limit = caps.limits.max_workgroup_invocations.min(caps.limits.max_workgroup_size[0]);
        let threads = limit.min(if caps.is_cpu { 64 } else { 128 }) & !7;
        let name = format!("{NAME}.{}", self.x.ty).to_lowercase();
        let shader = Shader::new(name, "quantise_q8_1/quantise_q8_1.comp", Params::glsl())
            .define("WG", threads)
            .define("FOURS", u32::from(self.fours()));
        let shader = formats::define(shader, "A", self.x.ty)?;
        let groups = (self.row_units() * self.x.rows()).div_ceil(threads as usize);
        Ok(Choice::one(Path::Scalar, shader, grid(groups, caps)))
    }

    fn params(&self, _: &Choice, _: usize, at: &dyn Fn(&Tensor) -> Address) -> Vec<u8> {
        let [cols, shape @ ..] = self.x.extents();
        let row_units = self.row_units() as u32;
        Params {
            x: at(&self.x),
            y: at(&self.y),
            shape,
            x_stride: formats::row_strides(&self.x),
            y_stride: formats::row_strides(&self.y),
            cols,
            row_units,
            units: row_units * self.x.rows() as u32,
        }
        .bytes()
    }

    fn reference(&self, memory: &mut HostMemory) {
        reference::reference(self, memory);
    }

    fn parts(&self) -> Vec<crate::Call> {
        let row = crate::elementwise::row;
        rows_apart(self.x.shape).map(|i| Call { x: row(self.x, i), y: row(self.y, i) }.into()).collect()
    }
}
