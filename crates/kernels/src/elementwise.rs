//! How elementwise kernels walk their operands: four elements at a time where memory allows it, and without decoding
//! indices where everything is dense. `glsl/elementwise.glsl` is the other half.

use kiln_gguf::TensorType;
use kiln_gpu::{Caps, Shader};

use crate::operation::{Choice, Path, Unsupported, grid};
use crate::tensor::Tensor;

/// The way through a set of operands. A unit is what a thread takes at once.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct Walk {
    /// Units of four elements.
    vector: bool,
    /// Units lie side by side in every operand.
    dense: bool,
}

impl Walk {
    /// One element at a time, by its indices.
    pub(crate) const SINGLE: Walk = Walk { vector: false, dense: false };

    /// The best walk over operands of the same extents.
    pub(crate) fn new(operands: &[Tensor]) -> Walk {
        let dense = operands.iter().all(Tensor::is_dense);
        Walk { vector: operands.iter().all(|t| takes_vectors(t, dense)), dense }
    }

    /// The best walk where `repeated` is repeated to the extents of the other operands.
    pub(crate) fn with_repeated(operands: &[Tensor], repeated: &Tensor) -> Walk {
        let shape = operands[0].shape;
        // Where all repeated dimensions are outermost, a flat index modulo the length finds the element.
        let inner = (0..4).take_while(|&d| repeated.shape[d] == shape[d]).count();
        let is_prefix = (inner + 1..4).all(|d| repeated.shape[d] == 1);
        let dense = is_prefix && repeated.is_dense() && operands.iter().all(Tensor::is_dense);
        let vector = operands.iter().chain([repeated]).all(|t| takes_vectors(t, dense));
        Walk { vector, dense }
    }

    /// The same walk with index decoding, for kernels that need the indices.
    pub(crate) fn strided(operands: &[Tensor]) -> Walk {
        Walk { vector: operands.iter().all(|t| takes_vectors(t, false)), dense: false }
    }

    /// Elements of a unit.
    fn width(self) -> usize {
        if self.vector { 4 } else { 1 }
    }

    /// Number of units of a tensor.
    pub(crate) fn units(self, tensor: &Tensor) -> u32 {
        u32::try_from(tensor.len() / self.width()).expect("`addressable` should have refused longer tensors")
    }

    /// Extents in units.
    pub(crate) fn shape(self, tensor: &Tensor) -> [u32; 4] {
        let [n0, n1, n2, n3] = tensor.extents();
        if self.vector && !self.dense { [n0 / 4, n1, n2, n3] } else { [n0, n1, n2, n3] }
    }

    /// Elements from unit to unit in each dimension.
    pub(crate) fn stride(self, tensor: &Tensor) -> [u32; 4] {
        let [s0, s1, s2, s3] = strides(tensor);
        if self.vector { [4, s1, s2, s3] } else { [s0, s1, s2, s3] }
    }

    /// The access functions of operand `letter`, as float values.
    pub(crate) fn operand(
        self,
        operation: &'static str,
        shader: Shader,
        letter: &str,
        ty: TensorType,
    ) -> Result<Shader, Unsupported> {
        let name = match ty {
            TensorType::F32 => "f32",
            TensorType::F16 => "f16",
            TensorType::BF16 => "bf16",
            TensorType::I32 => "i32",
            _ => {
                let reason = format!("no element access for {ty} (F32, F16, BF16, I32 have)");
                return Err(Unsupported { operation, reason });
            }
        };
        Ok(self.access(shader, letter, name, ty))
    }

    /// As [`Walk::operand`] where only floats make sense.
    pub(crate) fn float_operand(
        self,
        operation: &'static str,
        shader: Shader,
        letter: &str,
        ty: TensorType,
    ) -> Result<Shader, Unsupported> {
        if ty == TensorType::I32 {
            return Err(Unsupported { operation, reason: "I32 operands (F32, F16 and BF16 are supported)".into() });
        }
        self.operand(operation, shader, letter, ty)
    }

    /// The access functions of operand `letter`, as bits that are only moved.
    pub(crate) fn raw_operand(self, shader: Shader, letter: &str, ty: TensorType) -> Shader {
        self.access(shader, letter, if ty.block_bytes() == 4 { "raw32" } else { "raw16" }, ty)
    }

    fn access(self, shader: Shader, letter: &str, name: &str, ty: TensorType) -> Shader {
        let width = if self.vector { "4" } else { "" };
        shader
            .define(&format!("LOAD_{letter}"), format!("fetch{width}_{name}"))
            .define(&format!("STORE_{letter}"), format!("put{width}_{name}"))
            .define(&format!("SHIFT_{letter}"), ty.block_bytes().ilog2())
    }

    /// The type of a unit of float values in GLSL.
    pub(crate) fn float_value(self) -> &'static str {
        if self.vector { "vec4" } else { "float" }
    }

    /// The type of a unit of raw bits in GLSL.
    pub(crate) fn raw_value(self, ty: TensorType) -> &'static str {
        match (self.vector, ty.block_bytes()) {
            (false, _) => "uint",
            (true, 4) => "uvec4",
            (true, _) => "uvec2",
        }
    }

    /// Completes the shader and spreads the units of `result` over the device.
    pub(crate) fn choice(self, shader: Shader, value: &str, result: &Tensor, caps: &Caps) -> Choice {
        let limit = caps.limits.max_workgroup_invocations.min(caps.limits.max_workgroup_size[0]);
        let threads = limit.min(if caps.is_cpu { 64 } else { 256 });
        let units = self.units(result);
        // Few units are spread over as many threads as there are; of many, a thread keeps several loads in flight.
        let per_thread = if units <= 1 << 16 { 1 } else { 4 };
        let shader = shader
            .define("VALUE", value)
            .define("VEC", self.width())
            .define("DENSE", u32::from(self.dense))
            .define("WG", threads)
            .define("PER", per_thread);
        Choice::one(Path::Scalar, shader, grid(units.div_ceil(threads * per_thread) as usize, caps))
    }
}

/// Whether units of four elements of this tensor can be loaded at once. Slots begin at multiples of 16 bytes or more.
fn takes_vectors(tensor: &Tensor, dense: bool) -> bool {
    let unit = 4 * tensor.ty.block_bytes();
    let aligned = tensor.offset.is_multiple_of(unit);
    if dense {
        return aligned && tensor.len().is_multiple_of(4);
    }
    let rows_aligned = (1..4).all(|d| tensor.shape[d] == 1 || tensor.stride[d].is_multiple_of(unit));
    aligned && rows_aligned && tensor.has_dense_rows() && tensor.shape[0].is_multiple_of(4)
}

/// Byte strides; 0 where a dimension has one element, as its stride means nothing then and may be anything.
fn used_strides(tensor: &Tensor) -> [usize; 4] {
    std::array::from_fn(|d| if tensor.shape[d] > 1 { tensor.stride[d] } else { 0 })
}

/// Strides in elements of a tensor that [`addressable`] has let pass.
pub(crate) fn strides(tensor: &Tensor) -> [u32; 4] {
    let bytes = used_strides(tensor);
    bytes.map(|s| u32::try_from(s / tensor.ty.block_bytes()).expect("`addressable` should have refused longer strides"))
}

/// Refuses tensors whose elements cannot be numbered with 32 bits, or do not lie at multiples of their size.
pub(crate) fn addressable(operation: &'static str, tensors: &[Tensor]) -> Result<(), Unsupported> {
    let refuse = |reason| Err(Unsupported { operation, reason });
    for t in tensors {
        let size = t.ty.block_bytes();
        if t.ty.block_len() != 1 {
            return refuse(format!("blocks of {} (plain types are supported)", t.ty));
        }
        if !t.offset.is_multiple_of(size) || used_strides(t).iter().any(|s| !s.is_multiple_of(size)) {
            return refuse(format!("{t}: offset {} and strides {:?} must be multiples of {size}", t.offset, t.stride));
        }
        let last = t.span().1 / size;
        let numbers = t.shape.iter().copied().chain(used_strides(t).map(|s| s / size)).chain([t.len(), last]);
        if let Some(n) = numbers.max().filter(|&n| u32::try_from(n).is_err()) {
            return refuse(format!("{t} needs the number {n}, beyond 32 bits: split the tensor"));
        }
    }
    Ok(())
}

/// As [`addressable`], for kernels that give rows to workgroups: rows and the elements of a row stay below 2^31.
pub(crate) fn rows_addressable(operation: &'static str, tensors: &[Tensor]) -> Result<(), Unsupported> {
    addressable(operation, tensors)?;
    let most = i32::MAX as usize;
    match tensors.iter().find(|t| t.rows() > most || t.shape[0].saturating_mul(used_strides(t)[0]) > most) {
        Some(t) => Err(Unsupported { operation, reason: format!("{t}: rows and their bytes must stay below 2^31") }),
        None => Ok(()),
    }
}

/// Row (i1, i2, i3) of a tensor, as a tensor.
pub(crate) fn row(tensor: Tensor, [i1, i2, i3]: [usize; 3]) -> Tensor {
    tensor.narrow(1, i1, 1).narrow(2, i2, 1).narrow(3, i3, 1)
}

/// Tolerance of one rounding to this type: f32 arithmetic of a few operations stays below 1e-12.
pub(crate) fn tolerance(ty: TensorType) -> crate::case::Tolerance {
    crate::case::Tolerance::Nmse(match ty {
        // 11 bits: relative error up to 2^-11, squared 2e-7.
        TensorType::F16 => 3e-7,
        // 8 bits: relative error up to 2^-8 should a driver round towards zero, squared 1.5e-5.
        TensorType::BF16 => 1.6e-5,
        _ => 1e-11,
    })
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::tensor::Slot;

    fn dense(ty: TensorType, shape: [usize; 4]) -> Tensor {
        Tensor::dense(Slot(0), ty, shape)
    }

    #[test]
    fn walks_follow_alignment_and_density() {
        let walk = |vector, dense| Walk { vector, dense };
        let t = dense(TensorType::F32, [8, 3, 1, 1]);
        assert_eq!(Walk::new(&[t, t]), walk(true, true));
        assert_eq!(Walk::new(&[t.at(4), t]), walk(false, true));
        assert_eq!(Walk::new(&[t.narrow(0, 4, 4)]), walk(true, false));
        assert_eq!(Walk::new(&[t.narrow(0, 2, 4)]), walk(false, false));
        assert_eq!(Walk::new(&[t.permute([1, 0, 2, 3])]), walk(false, false));
        let odd = dense(TensorType::F16, [5, 4, 1, 1]);
        assert_eq!(Walk::new(&[odd]), walk(true, true));
        assert_eq!(Walk::strided(&[odd]), walk(false, false));
    }

    #[test]
    fn repeated_operands_are_flat_only_if_outer_dimensions_repeat() {
        let a = dense(TensorType::F32, [8, 6, 2, 1]);
        let dense_with = |shape| Walk::with_repeated(&[a], &dense(TensorType::F32, shape)).dense;
        assert!(dense_with([8, 6, 2, 1]) && dense_with([8, 1, 1, 1]) && dense_with([8, 3, 1, 1]));
        assert!(dense_with([4, 1, 1, 1]) && dense_with([1, 1, 1, 1]));
        assert!(!dense_with([1, 6, 1, 1]) && !dense_with([8, 1, 2, 1]) && !dense_with([8, 3, 2, 1]));
    }

    #[test]
    fn what_32_bits_cannot_number_is_refused() {
        let long = dense(TensorType::F32, [1 << 20, 4096, 1, 1]);
        assert!(addressable("test", &[long]).is_err());
        assert!(addressable("test", &[long.narrow(1, 0, 4095)]).is_ok());
        assert!(rows_addressable("test", &[dense(TensorType::F32, [1 << 30, 1, 1, 1])]).is_err());
        assert!(addressable("test", &[dense(TensorType::F32, [4, 1, 1, 1]).at(2)]).is_err());
        assert!(addressable("test", &[dense(TensorType::Q8_0, [32, 1, 1, 1])]).is_err());
    }
}
