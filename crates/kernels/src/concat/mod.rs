//! `concat`: two tensors one after the other along a dimension.

pub mod cases;
mod reference;

use kiln_gguf::TensorType::{BF16, F16, F32, I32};
use kiln_gpu::{Address, Caps, Shader};

use crate::elementwise::{Walk, addressable};
use crate::host::HostMemory;
use crate::operation::{Choice, Invalid, Operation, Path, Unsupported, only_scalar, require};
use crate::tensor::Tensor;

const NAME: &str = "concat";

/// One line for the registry.
pub const SUMMARY: &str = "dst = a, then b along one dimension";

/// Operands of `concat`.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Call {
    /// Comes first; F32, F16, BF16 or I32, any strides.
    pub a: Tensor,
    /// Comes second; the type of `a`, and its extents but for `dim`.
    pub b: Tensor,
    /// Result, the type of `a`; its extent of `dim` is the sum of both.
    pub dst: Tensor,
    /// The dimension, 0 to 3.
    pub dim: usize,
}

kiln_gpu::params! {
    struct Params {
        a: Address,
        b: Address,
        dst: Address,
        shape: [u32; 4],
        a_stride: [u32; 4],
        b_stride: [u32; 4],
        dst_stride: [u32; 4],
        units: u32,
        dim: u32,
        split: u32,
    }
}

impl Call {
    fn walk(&self) -> Walk {
        Walk::strided(&[self.a, self.b, self.dst])
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
        let Call { a, b, dst, dim } = self;
        require(*dim < 4, NAME, || format!("dimension {dim} (there are 0 to 3)"))?;
        require(a.ty == b.ty && a.ty == dst.ty, NAME, || format!("types differ: {a}, {b} and {dst}"))?;
        let mut shape = a.shape;
        shape[*dim] += b.shape[*dim];
        let fits = shape == dst.shape && (0..4).all(|d| d == *dim || a.shape[d] == b.shape[d]);
        require(fits, NAME, || format!("{a} and {b} along dimension {dim} do not make {dst}"))
    }

    fn pick(&self, caps: &Caps, want: Option<Path>) -> Result<Choice, Unsupported> {
        only_scalar(NAME, want)?;
        addressable(NAME, &[self.a, self.b, self.dst])?;
        let ty = self.dst.ty;
        if ![F32, F16, BF16, I32].contains(&ty) {
            return Err(Unsupported { operation: NAME, reason: format!("{ty} (F32, F16, BF16, I32 are supported)") });
        }
        let walk = self.walk();
        let shader = Shader::new(format!("{NAME}.{}bit", 8 * ty.block_bytes()), "concat/concat.comp", Params::glsl());
        let shader = walk.raw_operand(shader, "D", ty);
        Ok(walk.choice(shader, walk.raw_value(ty), &self.dst, caps))
    }

    fn params(&self, _: &Choice, _: usize, at: &dyn Fn(&Tensor) -> Address) -> Vec<u8> {
        let walk = self.walk();
        Params {
            a: at(&self.a),
            b: at(&self.b),
            dst: at(&self.dst),
            shape: walk.shape(&self.dst),
            a_stride: walk.stride(&self.a),
            b_stride: walk.stride(&self.b),
            dst_stride: walk.stride(&self.dst),
            units: walk.units(&self.dst),
            dim: u32::try_from(self.dim).expect("there are four dimensions"),
            split: walk.shape(&self.a)[self.dim],
        }
        .bytes()
    }

    fn reference(&self, memory: &mut HostMemory) {
        reference::reference(self, memory);
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::tensor::Slot;

    #[test]
    fn operands_that_do_not_fit_are_invalid() {
        let t = |ty, shape| Tensor::dense(Slot(0), ty, shape);
        let call = Call { a: t(F32, [4, 2, 1, 1]), b: t(F32, [4, 3, 1, 1]), dst: t(F32, [4, 5, 1, 1]), dim: 1 };
        assert_eq!(call.check(), Ok(()));
        assert!(Call { dim: 0, ..call }.check().is_err());
        assert!(Call { dim: 4, ..call }.check().is_err());
        assert!(Call { b: t(F16, [4, 3, 1, 1]), ..call }.check().is_err());
        assert!(Call { dst: t(F32, [4, 6, 1, 1]), ..call }.check().is_err());
    }
}
