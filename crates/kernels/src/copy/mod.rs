//! `copy`: the same elements at other strides and in another type. Conversions from blocks are done by the shader of
//! `dequantise`, those to blocks by that of `set_rows`, and blocks that stay what they are move as plain words.

pub mod cases;
mod cpu;
mod reference;

use kiln_gguf::TensorType;
use kiln_gpu::{Address, Caps, Shader};

use crate::dequantise;
use crate::elementwise::{Walk, addressable, row};
use crate::host::HostMemory;
use crate::operation::{Choice, Invalid, Operation, Path, Unsupported, grid, only_scalar, require, rows_apart};
use crate::set_rows::{BLOCK_TYPES, Conversion};
use crate::tensor::Tensor;

const NAME: &str = "copy";

/// Elements of a side of a tile of `transpose.comp`.
const TILE: usize = 32;

/// One line for the registry.
pub const SUMMARY: &str = "dst = src, any strides: F32, F16, BF16, I32; rows of blocks from and to floats";

/// Operands of `copy`.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Call {
    /// Source, F32, F16, BF16 or I32, any strides; or of a block type.
    pub src: Tensor,
    /// Result, extents of `src`, F32, F16, BF16 or I32, any strides. Floats become integers by dropping the fraction.
    /// Blocks of any type become F32 or F16 or stay as they are; F32 and F16 become Q8_0, Q4_0, Q4_1, Q5_0, Q5_1 or
    /// IQ4_NL. Where either has blocks, rows of both are dense.
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

/// How a call is carried out.
enum Way {
    /// As it stands.
    Plain,
    /// Blocks moved as the words they are made of.
    Words(Call),
    /// Blocks to floats.
    FromBlocks(dequantise::Call),
    /// Floats to blocks.
    ToBlocks(Conversion),
}

impl Call {
    fn way(&self) -> Way {
        let Call { src, dst } = *self;
        match (src.ty.block_len() > 1, dst.ty.block_len() > 1) {
            (false, false) => Way::Plain,
            (true, false) => Way::FromBlocks(dequantise::Call { src, dst }),
            (false, true) => Way::ToBlocks(Conversion { operation: NAME, src, ids: None, dst }),
            (true, true) => Way::Words(Call { src: as_words(src, &[src, dst]), dst: as_words(dst, &[src, dst]) }),
        }
    }

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

/// Rows of blocks as rows of words, the widest at whose multiples all `operands` lie.
fn as_words(tensor: Tensor, operands: &[Tensor]) -> Tensor {
    let fits = |bytes: usize| {
        let whole = |t: &Tensor| {
            let strides = (1..4).filter(|&d| t.shape[d] > 1).map(|d| t.stride[d]);
            strides.chain([t.offset, t.row_bytes()]).all(|n| n.is_multiple_of(bytes))
        };
        operands.iter().all(whole)
    };
    let ty = if fits(4) { TensorType::I32 } else { TensorType::F16 };
    let [_, s1, s2, s3] = tensor.stride;
    let [_, n1, n2, n3] = tensor.shape;
    let words = tensor.row_bytes() / ty.block_bytes();
    Tensor { ty, shape: [words, n1, n2, n3], stride: [ty.block_bytes(), s1, s2, s3], ..tensor }
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
        require(src.shape == dst.shape, NAME, || format!("src is {src} but dst is {dst}"))?;
        let plain = src.ty.block_len() == 1 && dst.ty.block_len() == 1;
        let dense = src.has_dense_rows() && dst.has_dense_rows();
        require(plain || dense, NAME, || format!("rows must be dense to copy {} to {}", src.ty, dst.ty))
    }

    fn pick(&self, caps: &Caps, want: Option<Path>) -> Result<Choice, Unsupported> {
        only_scalar(NAME, want)?;
        match self.way() {
            Way::Plain => {}
            Way::FromBlocks(call) if matches!(self.dst.ty, TensorType::F32 | TensorType::F16) => {
                return call.pick(caps, want);
            }
            Way::ToBlocks(conversion) if BLOCK_TYPES.contains(&self.dst.ty) => return conversion.pick(caps, want),
            Way::Words(call) if self.src.ty == self.dst.ty && self.src.row_bytes().is_multiple_of(2) => {
                return call.pick(caps, want);
            }
            _ => {
                let reason = format!("no way from {} to {}", self.src, self.dst);
                return Err(Unsupported { operation: NAME, reason });
            }
        }
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

    fn params(&self, choice: &Choice, launch: usize, at: &dyn Fn(&Tensor) -> Address) -> Vec<u8> {
        match self.way() {
            Way::Plain => {}
            Way::Words(call) => return call.params(choice, launch, at),
            Way::FromBlocks(call) => return call.params(choice, launch, at),
            Way::ToBlocks(conversion) => return conversion.params(at),
        }
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

    fn cpu(&self, memory: &mut HostMemory) {
        cpu::compute(self, memory);
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
    use kiln_gguf::TensorType::{BF16, F32, Q6_K, Q8_0};

    #[test]
    fn transpositions_go_through_tiles_and_blocks_through_their_own_shaders() {
        let file = |call: Call| call.pick(&Caps::least(), None).unwrap().launches[0].shader.file;
        let t = Tensor::dense(Slot(0), F32, [64, 48, 40, 1]);
        let to = |src: Tensor| Call { src, dst: Tensor::dense(Slot(1), F32, src.shape) };
        assert_eq!(file(to(t.permute([1, 0, 2, 3]))), "copy/transpose.comp");
        assert_eq!(file(to(t.permute([2, 1, 0, 3]))), "copy/transpose.comp");
        assert_eq!(file(to(t.permute([0, 2, 1, 3]))), "copy/copy.comp");
        assert_eq!(file(to(t.narrow(1, 0, 3).permute([1, 0, 2, 3]))), "copy/copy.comp");
        let blocks = Tensor::dense(Slot(0), Q8_0, [64, 2, 1, 1]);
        let plain = |ty| Tensor::dense(Slot(1), ty, [64, 2, 1, 1]);
        assert_eq!(file(Call { src: blocks, dst: blocks }), "copy/copy.comp");
        assert_eq!(file(Call { src: blocks, dst: plain(F32) }), "dequantise/dequantise.comp");
        assert_eq!(file(Call { src: plain(F32), dst: blocks }), "set_rows/set_rows.comp");
        let refused = |src, dst| Call { src, dst }.pick(&Caps::least(), None).is_err();
        assert!(refused(blocks, plain(BF16)) && refused(plain(BF16), blocks));
        let six = Tensor::dense(Slot(0), Q6_K, [256, 2, 1, 1]);
        assert!(refused(Tensor { slot: Slot(1), ..six }, Tensor::dense(Slot(0), Q8_0, [256, 2, 1, 1])));
        assert!(refused(Tensor::dense(Slot(1), F32, [256, 2, 1, 1]), six));
    }
}
