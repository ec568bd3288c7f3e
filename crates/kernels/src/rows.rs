//! What operations on rows of floats ask of their operands before they launch.

use kiln_gguf::TensorType;

use crate::operation::{Invalid, Unsupported, element_functions, require};
use crate::tensor::Tensor;

/// The load and store functions of a tensor of floats that kernels may reach with 32-bit element indices.
pub fn float_functions(operation: &'static str, tensor: &Tensor) -> Result<(&'static str, &'static str), Unsupported> {
    if !matches!(tensor.ty, TensorType::F32 | TensorType::F16 | TensorType::BF16) {
        return Err(Unsupported { operation, reason: format!("{tensor} is not of floats (F32, F16, BF16)") });
    }
    reachable(operation, tensor)?;
    element_functions(operation, tensor.ty)
}

/// Whether 32-bit element indices reach every element.
pub fn reachable(operation: &'static str, tensor: &Tensor) -> Result<(), Unsupported> {
    let elements = tensor.span().1 / tensor.ty.block_bytes();
    // A dimension of extent 1 may have any stride, and it is passed on too.
    let strides = tensor.stride.iter().map(|s| s / tensor.ty.block_bytes());
    match strides.chain([elements]).max() {
        Some(most) if u32::try_from(most).is_err() => Err(Unsupported {
            operation,
            reason: format!("{tensor} spans {most} elements, 32-bit indices reach {}", u32::MAX),
        }),
        _ => Ok(()),
    }
}

/// `Err(Invalid)` unless every stride is a whole number of elements.
pub fn require_whole_strides(operation: &'static str, tensor: &Tensor) -> Result<(), Invalid> {
    let whole = tensor.stride.iter().all(|s| s % tensor.ty.block_bytes() == 0);
    require(whole, operation, || format!("strides {:?} of {tensor} are no whole number of elements", tensor.stride))
}

/// COLS_BOUND of `glsl/row_share.glsl`: powers of two keep the number of pipelines small, and past the largest one no
/// workgroup keeps its row in registers.
pub fn cols_bound(cols: usize) -> usize {
    cols.next_power_of_two().min(1 << 16)
}

/// Dimensions 1 to 3.
pub fn outer(all: [u32; 4]) -> [u32; 3] {
    [all[1], all[2], all[3]]
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::tensor::Slot;

    #[test]
    fn tensors_past_32_bits_are_refused() {
        let at_most = Tensor::dense(Slot(0), TensorType::F16, [65535, 65537, 1, 1]);
        assert!(float_functions("x", &at_most).is_ok());
        let beyond = Tensor::dense(Slot(0), TensorType::F16, [65536, 65536, 1, 1]);
        assert!(float_functions("x", &beyond).unwrap_err().reason.contains("4294967296"));
        assert!(float_functions("x", &Tensor::dense(Slot(0), TensorType::I32, [1; 4])).is_err());
    }
}
