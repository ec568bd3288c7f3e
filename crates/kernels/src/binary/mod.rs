//! `binary`: adds, subtracts, multiplies or divides two tensors, the second one repeated as needed (bias, scales).

pub mod cases;
mod cpu;
mod reference;

use kiln_gpu::{Address, Caps, Shader};

use crate::elementwise::{Walk, addressable, row};
use crate::host::HostMemory;
use crate::operation::{Choice, Invalid, Operation, Path, Unsupported, only_scalar, require, rows_apart};
use crate::tensor::Tensor;

const NAME: &str = "binary";

/// One line for the registry.
pub const SUMMARY: &str = "dst = a op b (add, sub, mul, div), b repeated in every dimension";

/// What is done with two elements.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Operator {
    /// a + b
    Add,
    /// a - b
    Sub,
    /// a * b
    Mul,
    /// a / b
    Div,
}

impl Operator {
    /// Every operator.
    pub const ALL: [Operator; 4] = [Operator::Add, Operator::Sub, Operator::Mul, Operator::Div];

    /// The name in variant ids.
    pub fn name(self) -> &'static str {
        match self {
            Operator::Add => "add",
            Operator::Sub => "sub",
            Operator::Mul => "mul",
            Operator::Div => "div",
        }
    }

    fn symbol(self) -> &'static str {
        match self {
            Operator::Add => "+",
            Operator::Sub => "-",
            Operator::Mul => "*",
            Operator::Div => "/",
        }
    }
}

/// Operands of `binary`.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Call {
    /// What is done.
    pub operator: Operator,
    /// First operand, F32, F16 or BF16.
    pub a: Tensor,
    /// Second operand, F32, F16 or BF16; each of its extents divides that of `a`.
    pub b: Tensor,
    /// Result, extents of `a`, F32, F16 or BF16; may be `a` itself.
    pub dst: Tensor,
}

kiln_gpu::params! {
    struct Params {
        a: Address,
        b: Address,
        dst: Address,
        shape: [u32; 4],
        b_shape: [u32; 4],
        a_stride: [u32; 4],
        b_stride: [u32; 4],
        dst_stride: [u32; 4],
        units: u32,
        b_units: u32,
    }
}

impl Call {
    fn walk(&self) -> Walk {
        Walk::with_repeated(&[self.a, self.dst], &self.b)
    }
}

impl Operation for Call {
    fn name(&self) -> &'static str {
        NAME
    }

    fn reads(&self) -> Vec<Tensor> {
        vec![self.a, self.b]
    }

    fn writes(&self) -> Vec<Tensor> {
        vec![self.dst]
    }

    fn check(&self) -> Result<(), Invalid> {
        let Call { a, b, dst, .. } = self;
        require(a.shape == dst.shape, NAME, || format!("a is {a} but dst is {dst}"))?;
        let repeats = (0..4).all(|d| b.shape[d] != 0 && a.shape[d].is_multiple_of(b.shape[d]));
        require(repeats || a.is_empty(), NAME, || format!("b is {b}, which cannot be repeated to {a}"))
    }

    fn pick(&self, caps: &Caps, want: Option<Path>) -> Result<Choice, Unsupported> {
        only_scalar(NAME, want)?;
        addressable(NAME, &[self.a, self.b, self.dst])?;
        let walk = self.walk();
        let name = format!("{NAME}.{}.{}", self.operator.name(), self.a.ty.name().to_lowercase());
        let shader = Shader::new(name, "binary/binary.comp", Params::glsl()).define("OP", self.operator.symbol());
        let shader = walk.float_operand(NAME, shader, "A", self.a.ty)?;
        let shader = walk.float_operand(NAME, shader, "B", self.b.ty)?;
        let shader = walk.float_operand(NAME, shader, "D", self.dst.ty)?;
        Ok(walk.choice(shader, walk.float_value(), &self.dst, caps))
    }

    fn params(&self, _: &Choice, _: usize, at: &dyn Fn(&Tensor) -> Address) -> Vec<u8> {
        let walk = self.walk();
        Params {
            a: at(&self.a),
            b: at(&self.b),
            dst: at(&self.dst),
            shape: walk.shape(&self.dst),
            b_shape: walk.shape(&self.b),
            a_stride: walk.stride(&self.a),
            b_stride: walk.stride(&self.b),
            dst_stride: walk.stride(&self.dst),
            units: walk.units(&self.dst),
            b_units: walk.units(&self.b),
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
        rows_apart(self.dst.shape)
            .map(|i| {
                let repeated = [1, 2, 3].map(|d| i[d - 1] % self.b.shape[d]);
                Call { a: row(self.a, i), b: row(self.b, repeated), dst: row(self.dst, i), ..*self }.into()
            })
            .collect()
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::tensor::Slot;
    use kiln_gguf::TensorType::{F32, I32};

    #[test]
    fn shapes_that_do_not_repeat_are_invalid_and_integers_unsupported() {
        let t = |ty, shape| Tensor::dense(Slot(0), ty, shape);
        let call = Call {
            operator: Operator::Add,
            a: t(F32, [8, 6, 1, 1]),
            b: t(F32, [8, 3, 1, 1]),
            dst: t(F32, [8, 6, 1, 1]),
        };
        assert_eq!(call.check(), Ok(()));
        assert!(Call { b: t(F32, [8, 4, 1, 1]), ..call }.check().is_err());
        assert!(Call { dst: t(F32, [6, 8, 1, 1]), ..call }.check().is_err());
        assert!(Call { b: t(I32, [8, 3, 1, 1]), ..call }.pick(&Caps::least(), None).is_err());
        assert!(call.pick(&Caps::least(), Some(Path::Coopmat)).is_err());
    }
}
