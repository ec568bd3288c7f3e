//! `copy`: the same elements at other strides and in another type. Block types are not here yet: they need a shader of
//! their own, chosen in `shader` by the pair of types.

pub mod cases;
mod reference;

use kiln_gguf::TensorType;
use kiln_gpu::{Address, Caps, Shader};

use crate::elementwise::{Walk, addressable, row};
use crate::host::HostMemory;
use crate::operation::{Choice, Invalid, Operation, Path, Unsupported, grid, only_scalar, require, rows_apart};
use crate::tensor::Tensor;

const NAME: &str = "copy";

/// Elements of a side of a tile of `transpose.comp`.
const TILE: usize = 32;

/// One line for the registry.
pub const SUMMARY: &str = "dst = src, any strides, between F32, F16, BF16 and I32";

/// Operands of `copy`.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Call {
    /// Source, F32, F16, BF16 or I32, any strides.
    pub src: Tensor,
    /// Result, extents of `src`, F32, F16, BF16 or I32, any strides. Floats become integers by dropping the fraction.
    pub dst: Tensor,
}

kiln_gpu::params! {
    struct Params {
        src: Address,
        dst: Address,
        shape: [u32; 4],
        src_stride: [u32; 4],
        dst_stride: [u32; 4],
        units: u32,
        groups: u32,
    }
}

impl Call {
    fn walk(&self) -> Walk {
        Walk::new(&[self.src, self.dst])
    }

    /// The same copy with dimension 1 such that `src` is dense along it and `dst` along dimension 0, if there is one
    /// and both are long enough for tiles.
    fn as_transposition(&self) -> Option<Call> {
        let dense = self.src.ty.block_bytes();
        let outer = (1..4).find(|&d| self.src.stride[d] == dense && self.src.shape[d] >= TILE / 2)?;
        let fits = self.dst.has_dense_rows() && self.src.stride[0] != dense && self.src.shape[0] >= TILE / 2;
        let mut order = [0, 1, 2, 3];
        order.swap(1, outer);
        fits.then(|| Call { src: self.src.permute(order), dst: self.dst.permute(order) })
    }

    /// Workgroups of `transpose.comp`.
    fn tiles(&self) -> usize {
        let [n0, n1, n2, n3] = self.dst.shape;
        n0.div_ceil(TILE) * n1.div_ceil(TILE) * n2 * n3
    }

    /// The access functions and the type between load and store: bits where the types agree, else floats.
    fn shader(&self, walk: Walk, file: &'static str) -> Result<(Shader, &'static str), Unsupported> {
        let [from, to] = [self.src.ty, self.dst.ty];
        let name = format!("{NAME}.{}.{}", from.name().to_lowercase(), to.name().to_lowercase());
        let shader = Shader::new(name, file, Params::glsl());
        if from == to && [TensorType::F32, TensorType::F16, TensorType::BF16, TensorType::I32].contains(&from) {
            let shader = walk.raw_operand(shader, "S", from);
            return Ok((walk.raw_operand(shader, "D", to), walk.raw_value(to)));
        }
        let shader = walk.operand(NAME, shader, "S", from)?;
        Ok((walk.operand(NAME, shader, "D", to)?, walk.float_value()))
    }
}

impl Operation for Call {
    fn name(&self) -> &'static str {
        NAME
    }

    fn reads(&self) -> Vec<Tensor> {
        vec![self.src]
    }

    fn writes(&self) -> Vec<Tensor> {
        vec![self.dst]
    }

    fn check(&self) -> Result<(), Invalid> {
        let Call { src, dst } = self;
        require(src.shape == dst.shape, NAME, || format!("src is {src} but dst is {dst}"))
    }

    fn pick(&self, caps: &Caps, want: Option<Path>) -> Result<Choice, Unsupported> {
        only_scalar(NAME, want)?;
        addressable(NAME, &[self.src, self.dst])?;
        if let Some(transposition) = self.as_transposition() {
            let (shader, value) = transposition.shader(Walk::SINGLE, "copy/transpose.comp")?;
            let limit = caps.limits.max_workgroup_invocations.min(caps.limits.max_workgroup_size[0]);
            let shader = shader.define("VALUE", value).define("ROWS", (limit / 32).clamp(1, 8));
            return Ok(Choice::one(Path::Scalar, shader, grid(transposition.tiles(), caps)));
        }
        let (shader, value) = self.shader(self.walk(), "copy/copy.comp")?;
        Ok(self.walk().choice(shader, value, &self.dst, caps))
    }

    fn params(&self, _: &Choice, _: usize, at: &dyn Fn(&Tensor) -> Address) -> Vec<u8> {
        let transposition = self.as_transposition();
        let walk = if transposition.is_some() { Walk::SINGLE } else { self.walk() };
        let call = transposition.unwrap_or(*self);
        Params {
            src: at(&call.src),
            dst: at(&call.dst),
            shape: walk.shape(&call.dst),
            src_stride: walk.stride(&call.src),
            dst_stride: walk.stride(&call.dst),
            units: walk.units(&call.dst),
            groups: u32::try_from(call.tiles()).expect("there are fewer tiles than elements"),
        }
        .bytes()
    }

    fn reference(&self, memory: &mut HostMemory) {
        reference::reference(self, memory);
    }

    fn parts(&self) -> Vec<crate::Call> {
        let part = |i| Call { src: row(self.src, i), dst: row(self.dst, i) }.into();
        rows_apart(self.dst.shape).map(part).collect()
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::tensor::Slot;
    use kiln_gguf::TensorType::{F32, Q8_0};

    #[test]
    fn transpositions_go_through_tiles_and_blocks_are_unsupported() {
        let file = |call: Call| call.pick(&Caps::least(), None).unwrap().launches[0].shader.file;
        let t = Tensor::dense(Slot(0), F32, [64, 48, 40, 1]);
        let to = |src: Tensor| Call { src, dst: Tensor::dense(Slot(1), F32, src.shape) };
        assert_eq!(file(to(t.permute([1, 0, 2, 3]))), "copy/transpose.comp");
        assert_eq!(file(to(t.permute([2, 1, 0, 3]))), "copy/transpose.comp");
        assert_eq!(file(to(t.permute([0, 2, 1, 3]))), "copy/copy.comp");
        assert_eq!(file(to(t.narrow(1, 0, 3).permute([1, 0, 2, 3]))), "copy/copy.comp");
        let blocks = Tensor::dense(Slot(0), Q8_0, [64, 2, 1, 1]);
        assert!(Call { src: blocks, dst: blocks }.pick(&Caps::least(), None).is_err());
    }
}
