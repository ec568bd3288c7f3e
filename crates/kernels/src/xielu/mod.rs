//! `xielu`: an activation that grows with the square of positive arguments and bends towards a line below 0.

pub mod cases;
mod cpu;
mod reference;

use kiln_gpu::{Address, Caps, Shader};

use crate::elementwise::{Walk, addressable, row};
use crate::host::HostMemory;
use crate::operation::{Choice, Invalid, Operation, Path, Unsupported, only_scalar, require, rows_apart};
use crate::tensor::Tensor;

const NAME: &str = "xielu";

/// One line for the registry.
pub const SUMMARY: &str = "dst = beta x + positive x^2, or beta x + negative (e^x - 1 - x) below 0";

/// The numbers of the function.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Curve {
    /// Factor of the square of positive arguments.
    pub positive: f32,
    /// Factor of e^x - 1 - x of all others.
    pub negative: f32,
    /// Factor of the argument itself.
    pub beta: f32,
    /// Exponents stay at or below this.
    pub eps: f32,
}

impl Curve {
    /// Of numbers as files hold them: factors before their softplus, the one of negative arguments without `beta`.
    pub fn from_raw(alpha_n: f32, alpha_p: f32, beta: f32, eps: f32) -> Curve {
        let softplus = |x: f32| if x > 20.0 { x } else { x.exp().ln_1p() };
        Curve { positive: softplus(alpha_p), negative: beta + softplus(alpha_n), beta, eps }
    }
}

/// Operands of `xielu`.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Call {
    /// The function.
    pub curve: Curve,
    /// Input, F32, F16 or BF16, any strides.
    pub x: Tensor,
    /// Result, extents of `x`, F32, F16 or BF16; may be `x` itself.
    pub dst: Tensor,
}

kiln_gpu::params! {
    struct Params {
        x: Address,
        dst: Address,
        shape: [u32; 4],
        x_stride: [u32; 4],
        dst_stride: [u32; 4],
        units: u32,
        positive: f32,
        negative: f32,
        beta: f32,
        eps: f32,
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
        let shader = Shader::new(name, "xielu/xielu.comp", Params::glsl());
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
            positive: self.curve.positive,
            negative: self.curve.negative,
            beta: self.curve.beta,
            eps: self.curve.eps,
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
