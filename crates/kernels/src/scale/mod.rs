//! `scale`: multiplies by a number and adds another.

pub mod cases;
mod cpu;
mod reference;

use kiln_gpu::{Address, Caps, Shader};

use crate::elementwise::{Walk, addressable, row};
use crate::host::HostMemory;
use crate::operation::{Choice, Invalid, Operation, Path, Unsupported, only_scalar, require, rows_apart};
use crate::tensor::Tensor;

const NAME: &str = "scale";

/// One line for the registry.
pub const SUMMARY: &str = "dst = factor * x + bias";

/// Operands of `scale`.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Call {
    /// Input, F32, F16 or BF16, any strides.
    pub x: Tensor,
    /// Result, extents of `x`, F32, F16 or BF16; may be `x` itself.
    pub dst: Tensor,
    /// Multiplied with every element.
    pub factor: f32,
    /// Added to every product.
    pub bias: f32,
}

kiln_gpu::params! {
    struct Params {
        x: Address,
        dst: Address,
        shape: [u32; 4],
        x_stride: [u32; 4],
        dst_stride: [u32; 4],
        units: u32,
        factor: f32,
        bias: f32,
    }
}

impl Call {
    fn walk(&self) -> Walk {
        Walk::new(&[self.x, self.dst])
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
        vec![self.dst]
    }

    fn check(&self) -> Result<(), Invalid> {
        let Call { x, dst, .. } = self;
        require(x.shape == dst.shape, NAME, || format!("x is {x} but dst is {dst}"))
    }

    fn pick(&self, caps: &Caps, want: Option<Path>) -> Result<Choice, Unsupported> {
        only_scalar(NAME, want)?;
        addressable(NAME, &[self.x, self.dst])?;
        let walk = self.walk();
        let name = format!("{NAME}.{}", self.x.ty.name().to_lowercase());
        let shader = Shader::new(name, "scale/scale.comp", Params::glsl());
        let shader = walk.float_operand(NAME, shader, "X", self.x.ty)?;
        let shader = walk.float_operand(NAME, shader, "D", self.dst.ty)?;
        Ok(walk.choice(shader, walk.float_value(), &self.dst, caps))
    }

    fn params(&self, _: &Choice, _: usize, at: &dyn Fn(&Tensor) -> Address) -> Vec<u8> {
        let walk = self.walk();
        Params {
            x: at(&self.x),
            dst: at(&self.dst),
            shape: walk.shape(&self.dst),
            x_stride: walk.stride(&self.x),
            dst_stride: walk.stride(&self.dst),
            units: walk.units(&self.dst),
            factor: self.factor,
            bias: self.bias,
        }
        .bytes()
    }

    fn reference(&self, memory: &mut HostMemory) {
        reference::reference(self, memory);
    }

    fn cpu(&self, memory: &mut HostMemory) {
        cpu::compute(self, memory);
    }

    fn parts(&self) -> Vec<crate::Call> {
        let part = |i| Call { x: row(self.x, i), dst: row(self.dst, i), ..*self }.into();
        rows_apart(self.dst.shape).map(part).collect()
    }
}
