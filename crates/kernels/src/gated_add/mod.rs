//! `gated_add`: adds a branch to a stream through a gate.

pub mod cases;
mod reference;

use kiln_gpu::{Address, Caps, Shader};

use crate::elementwise::{Walk, addressable, row};
use crate::host::HostMemory;
use crate::operation::{Choice, Invalid, Operation, Path, Unsupported, only_scalar, require, rows_apart};
use crate::tensor::Tensor;
use crate::unary::Function;

const NAME: &str = "gated_add";

/// One line for the registry.
pub const SUMMARY: &str = "dst = x + f(gate) * y";

/// Operands of `gated_add`. All have the same extents; F32, F16 or BF16, any strides.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Call {
    /// The function of the gate.
    pub function: Function,
    /// The gate.
    pub gate: Tensor,
    /// What is gated.
    pub y: Tensor,
    /// What it is added to.
    pub x: Tensor,
    /// Result; may be any of the others.
    pub dst: Tensor,
}

kiln_gpu::params! {
    struct Params {
        gate: Address,
        y: Address,
        x: Address,
        dst: Address,
        shape: [u32; 4],
        gate_stride: [u32; 4],
        y_stride: [u32; 4],
        x_stride: [u32; 4],
        dst_stride: [u32; 4],
        units: u32,
    }
}

impl Call {
    fn operands(&self) -> [(&'static str, Tensor); 4] {
        [("gate", self.gate), ("y", self.y), ("x", self.x), ("dst", self.dst)]
    }

    fn walk(&self) -> Walk {
        Walk::new(&self.operands().map(|(_, t)| t))
    }
}

impl Operation for Call {
    fn name(&self) -> &'static str {
        NAME
    }

    fn reads(&self) -> Vec<Tensor> {
        vec![self.gate, self.y, self.x]
    }

    fn writes(&self) -> Vec<Tensor> {
        vec![self.dst]
    }

    fn check(&self) -> Result<(), Invalid> {
        self.operands().into_iter().try_for_each(|(name, t)| {
            require(t.shape == self.dst.shape, NAME, || format!("{name} is {t} but dst is {}", self.dst))
        })
    }

    fn pick(&self, caps: &Caps, want: Option<Path>) -> Result<Choice, Unsupported> {
        only_scalar(NAME, want)?;
        addressable(NAME, &self.operands().map(|(_, t)| t))?;
        let walk = self.walk();
        let name = format!("{NAME}.{}.{}", self.function.name(), self.dst.ty.name().to_lowercase());
        let mut shader =
            Shader::new(name, "gated_add/gated_add.comp", Params::glsl()).define("FUNCTION", self.function.glsl());
        for (letter, t) in [("G", self.gate), ("Y", self.y), ("X", self.x), ("D", self.dst)] {
            shader = walk.float_operand(NAME, shader, letter, t.ty)?;
        }
        Ok(walk.choice(shader, walk.float_value(), &self.dst, caps))
    }

    fn params(&self, _: &Choice, _: usize, at: &dyn Fn(&Tensor) -> Address) -> Vec<u8> {
        let walk = self.walk();
        Params {
            gate: at(&self.gate),
            y: at(&self.y),
            x: at(&self.x),
            dst: at(&self.dst),
            shape: walk.shape(&self.dst),
            gate_stride: walk.stride(&self.gate),
            y_stride: walk.stride(&self.y),
            x_stride: walk.stride(&self.x),
            dst_stride: walk.stride(&self.dst),
            units: walk.units(&self.dst),
        }
        .bytes()
    }

    fn reference(&self, memory: &mut HostMemory) {
        reference::reference(self, memory);
    }

    fn parts(&self) -> Vec<crate::Call> {
        let part = |i| {
            let [gate, y, x, dst] = self.operands().map(|(_, t)| row(t, i));
            Call { gate, y, x, dst, ..*self }.into()
        };
        rows_apart(self.dst.shape).map(part).collect()
    }
}

#[cfg(test)]
mod tests {
    use kiln_gguf::TensorType;

    use super::*;
    use crate::tensor::Slot;

    #[test]
    fn the_parameter_block_fits_every_device() {
        let x = Tensor::dense(Slot(0), TensorType::F32, [8, 2, 1, 1]);
        let call = Call { function: Function::Sigmoid, gate: x, y: x, x, dst: x };
        assert_eq!(call.check(), Ok(()));
        let choice = call.pick(&Caps::least(), None).unwrap();
        assert!(call.params(&choice, 0, &|_| Address(0)).len() <= 128);
        let wrong = Call { gate: x.narrow(0, 0, 4), ..call };
        assert!(wrong.check().unwrap_err().reason.contains("gate is F32[4, 2]"));
    }
}
