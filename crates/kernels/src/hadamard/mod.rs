//! `hadamard`: turns blocks of rows by the normalised Sylvester matrix, with a sign for each element before or behind the turn. Weights that
//! were turned before they were rounded want their inputs turned the same way.

pub mod cases;
mod cpu;
mod reference;

use kiln_gguf::TensorType;
use kiln_gpu::{Address, Caps, Shader};

use crate::host::HostMemory;
use crate::operation::{Choice, Invalid, Operation, Path, Unsupported, Work, grid, only_scalar, require, rows_apart};
use crate::rows::{outer, reachable, require_whole_strides};
use crate::tensor::Tensor;

const NAME: &str = "hadamard";

/// One line for the registry.
pub const SUMMARY: &str =
    "y = H (signs x) or signs (H x), block by block of each row; H[i, j] = (-1)^popcount(i & j) / sqrt(block)";

/// Largest block: a workgroup holds one in its shared memory, of which every device has 16 KiB.
pub const MOST: usize = 4096;

/// On which side of the turn the signs stand.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum Direction {
    /// The elements get their signs, then blocks are turned.
    Turn,
    /// Blocks are turned, then the elements get their signs: undoes the other one.
    Back,
}

/// Operands of `hadamard`.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Call {
    /// Input F32 `[cols, ..]`, dense rows.
    pub x: Tensor,
    /// 1 or -1 for each column, dense F32 `[cols]`; all 1 where there are none.
    pub signs: Option<Tensor>,
    /// Result, F32 with the extents of `x`, dense rows; may be `x` itself.
    pub y: Tensor,
    /// Elements of a block: a power of two that divides the columns.
    pub block: usize,
    /// Which comes first.
    pub direction: Direction,
}

kiln_gpu::params! {
    struct Params {
        x: Address,
        y: Address,
        signs: Address,
        shape: [u32; 3],
        x_stride: [u32; 3],
        y_stride: [u32; 3],
        per_row: u32,
        blocks: u32,
    }
}

impl Call {
    fn blocks(&self) -> usize {
        self.x.len() / self.block
    }
}

impl Operation for Call {
    fn name(&self) -> &'static str {
        NAME
    }

    fn reads(&self) -> Vec<Tensor> {
        [Some(self.x), self.signs].into_iter().flatten().collect()
    }

    fn writes(&self) -> Vec<Tensor> {
        vec![self.y]
    }

    fn check(&self) -> Result<(), Invalid> {
        let Call { x, signs, y, block, .. } = *self;
        require(x.shape == y.shape && !x.is_empty(), NAME, || format!("x is {x} but y is {y}"))?;
        let floats = x.ty == TensorType::F32 && y.ty == TensorType::F32 && x.has_dense_rows() && y.has_dense_rows();
        require(floats, NAME, || format!("x is {x}, y is {y}, want F32 and dense rows"))?;
        require_whole_strides(NAME, &x)?;
        require_whole_strides(NAME, &y)?;
        require(block.is_power_of_two() && x.shape[0].is_multiple_of(block), NAME, || {
            format!("blocks of {block} in rows of {}, want a power of two that divides them", x.shape[0])
        })?;
        signs.iter().try_for_each(|signs| {
            let fits = signs.ty == TensorType::F32 && signs.is_dense() && signs.len() == x.shape[0];
            require(fits, NAME, || format!("signs are {signs}, want dense F32[{}]", x.shape[0]))
        })
    }

    fn pick(&self, caps: &Caps, want: Option<Path>) -> Result<Choice, Unsupported> {
        only_scalar(NAME, want)?;
        [self.x, self.y].iter().try_for_each(|tensor| reachable(NAME, tensor))?;
        if self.block > MOST {
            let reason = format!("blocks of {}, at most {MOST} fit shared memory", self.block);
            return Err(Unsupported { operation: NAME, reason });
        }
        // A thread for each pair of a step, as far as workgroups go.
        let most = (caps.limits.max_workgroup_invocations as usize).min(256);
        let threads = (self.block / 2).clamp(32.min(most), most);
        let shader = Shader::new(format!("{NAME}.f32"), "hadamard/hadamard.comp", Params::glsl())
            .define("WG", threads)
            .define("BLOCK", self.block)
            .define("SIGNS", u32::from(self.signs.is_some()))
            .define("BACK", u32::from(self.direction == Direction::Back));
        Ok(Choice::one(Path::Scalar, shader, grid(self.blocks(), caps)))
    }

    fn params(&self, _: &Choice, _: usize, at: &dyn Fn(&Tensor) -> Address) -> Vec<u8> {
        let Call { x, signs, y, block, .. } = self;
        let narrow = |n: usize| u32::try_from(n).expect("pick refuses tensors past 32 bits");
        Params {
            x: at(x),
            y: at(y),
            signs: signs.as_ref().map_or(Address::default(), at),
            shape: outer(x.extents()),
            x_stride: outer(x.element_strides()),
            y_stride: outer(y.element_strides()),
            per_row: narrow(x.shape[0] / block),
            blocks: narrow(self.blocks()),
        }
        .bytes()
    }

    fn reference(&self, memory: &mut HostMemory) {
        reference::reference(self, memory);
    }

    fn cpu(&self, memory: &mut HostMemory) {
        cpu::compute(self, memory);
    }

    fn work(&self) -> Work {
        let elements = self.x.len() as f64;
        Work { bytes: 8.0 * elements, flops: elements * f64::from(self.block.max(1).ilog2() + 1) }
    }

    fn parts(&self) -> Vec<crate::Call> {
        let part = |[i1, i2, i3]: [usize; 3]| {
            let row = |t: Tensor| t.narrow(1, i1, 1).narrow(2, i2, 1).narrow(3, i3, 1);
            Call { x: row(self.x), y: row(self.y), ..*self }.into()
        };
        rows_apart(self.x.shape).map(part).collect()
    }
}
