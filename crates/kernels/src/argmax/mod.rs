//! `argmax`: the index of the largest element of each row.

pub mod cases;
mod reference;

use kiln_gguf::TensorType;
use kiln_gpu::{Address, Caps, Shader};

use crate::elementwise::{row, rows_addressable, strides};
use crate::host::HostMemory;
use crate::operation::{
    Choice, Invalid, Operation, Path, Unsupported, grid, only_scalar, reduce_defines, require, rows_apart,
};
use crate::tensor::Tensor;

const NAME: &str = "argmax";

/// One line for the registry.
pub const SUMMARY: &str = "dst = index of the largest element of each row of x, the first of equal ones";

/// Operands of `argmax`.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Call {
    /// Input `[cols, ..]`, F32, any strides.
    pub x: Tensor,
    /// Result `[1, ..]`, I32. NaN is smaller than everything else.
    pub dst: Tensor,
}

kiln_gpu::params! {
    struct Params {
        x: Address,
        dst: Address,
        outer: [u32; 3],
        x_stride: [u32; 4],
        dst_stride: [u32; 4],
        cols: u32,
        rows: u32,
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
        let Call { x, dst } = self;
        require(x.shape[0] > 0, NAME, || format!("x is {x}: an empty row has no largest element"))?;
        let fits = dst.shape[0] == 1 && dst.shape[1..] == x.shape[1..];
        require(fits, NAME, || format!("x is {x} but dst is {dst}, want one element for each row"))
    }

    fn pick(&self, caps: &Caps, want: Option<Path>) -> Result<Choice, Unsupported> {
        only_scalar(NAME, want)?;
        rows_addressable(NAME, &[self.x, self.dst])?;
        if self.x.ty != TensorType::F32 || self.dst.ty != TensorType::I32 {
            return Err(Unsupported {
                operation: NAME,
                reason: format!("{} to {} (F32 to I32 only)", self.x, self.dst),
            });
        }
        let shader = Shader::new(format!("{NAME}.f32"), "argmax/argmax.comp", Params::glsl());
        Ok(Choice::one(Path::Scalar, reduce_defines(shader, self.x.shape[0], caps), grid(self.x.rows(), caps)))
    }

    fn params(&self, _: &Choice, _: usize, at: &dyn Fn(&Tensor) -> Address) -> Vec<u8> {
        let [cols, n1, n2, n3] = self.x.extents();
        Params {
            x: at(&self.x),
            dst: at(&self.dst),
            outer: [n1, n2, n3],
            x_stride: strides(&self.x),
            dst_stride: strides(&self.dst),
            cols,
            rows: u32::try_from(self.x.rows()).expect("`rows_addressable` should have refused more rows"),
        }
        .bytes()
    }

    fn reference(&self, memory: &mut HostMemory) {
        reference::reference(self, memory);
    }

    fn parts(&self) -> Vec<crate::Call> {
        let part = |i| Call { x: row(self.x, i), dst: row(self.dst, i) }.into();
        rows_apart(self.x.shape).map(part).collect()
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::tensor::Slot;

    #[test]
    fn one_index_for_each_row() {
        let t = |ty, shape| Tensor::dense(Slot(0), ty, shape);
        let call = Call { x: t(TensorType::F32, [8, 3, 2, 1]), dst: t(TensorType::I32, [1, 3, 2, 1]) };
        assert_eq!(call.check(), Ok(()));
        assert!(Call { dst: t(TensorType::I32, [8, 3, 2, 1]), ..call }.check().is_err());
        assert!(Call { dst: t(TensorType::I32, [1, 6, 1, 1]), ..call }.check().is_err());
        assert!(Call { x: t(TensorType::F32, [0, 3, 2, 1]), ..call }.check().is_err());
        assert!(Call { x: t(TensorType::F16, [8, 3, 2, 1]), ..call }.pick(&Caps::least(), None).is_err());
    }
}
