//! One row of the tensor table, and what shapes a tensor may have. The numbers inside live in [`crate::quant`].

use crate::TensorType;
use crate::error::ShapeError;

/// Most dimensions of a tensor.
pub const MAX_DIMS: usize = 4;

/// A tensor of a file: everything but its data.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct TensorInfo {
    /// Its name.
    pub name: String,
    /// Elements per dimension, the innermost (contiguous) first, padded with 1.
    pub shape: [usize; MAX_DIMS],
    /// How many entries of `shape` the file names.
    pub n_dims: usize,
    /// How its elements are stored.
    pub ty: TensorType,
    /// Which part of a split model holds it; 0 in a single file.
    pub part: usize,
    /// Where its data starts, from the start of that file.
    pub offset: u64,
    /// Bytes of its data.
    pub bytes: usize,
}

impl TensorInfo {
    /// The dimensions the file names, the innermost first.
    pub fn dims(&self) -> &[usize] {
        &self.shape[..self.n_dims]
    }

    /// Elements in the tensor.
    pub fn n_elements(&self) -> usize {
        self.shape.iter().product()
    }

    /// Elements in a row, the contiguous dimension.
    pub fn cols(&self) -> usize {
        self.shape[0]
    }

    /// Rows of all outer dimensions together.
    pub fn rows(&self) -> usize {
        self.shape[1..].iter().product()
    }
}

/// The shape padded with 1 and the bytes of a tensor, or why there can be no such tensor.
pub(crate) fn layout(ty: TensorType, dims: &[u64]) -> Result<([usize; MAX_DIMS], usize), ShapeError> {
    if ty.is_packed() {
        return Err(ShapeError::Packed { ty });
    }
    if dims.is_empty() || dims.len() > MAX_DIMS {
        return Err(ShapeError::Dims { n_dims: dims.len() as u64 });
    }
    if let Some(dim) = dims.iter().position(|&len| len == 0) {
        return Err(ShapeError::Zero { dim });
    }
    let too_large = || ShapeError::TooLarge { shape: dims.to_vec() };
    let mut shape = [1; MAX_DIMS];
    for (padded, &len) in shape.iter_mut().zip(dims) {
        *padded = usize::try_from(len).map_err(|_| too_large())?;
    }
    if shape[0] % ty.block_len() != 0 {
        return Err(ShapeError::Block { ty, len: dims[0], block: ty.block_len() });
    }
    // The count of elements is bounded as well as the bytes: a block format needs fewer bytes than it has elements.
    let fits = |total: usize| (total <= isize::MAX as usize).then_some(total);
    let elements = shape.iter().try_fold(1_usize, |total, &len| total.checked_mul(len)).and_then(fits);
    let bytes = elements.and_then(|elements| ty.row_bytes(elements)).and_then(fits).ok_or_else(too_large)?;
    Ok((shape, bytes))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn layout_counts_blocks_and_refuses_what_cannot_be() {
        assert_eq!(layout(TensorType::Q4_0, &[64, 3]), Ok(([64, 3, 1, 1], 2 * 18 * 3)));
        assert_eq!(layout(TensorType::F32, &[5]), Ok(([5, 1, 1, 1], 20)));
        assert_eq!(layout(TensorType::Q8_0x8, &[256]), Err(ShapeError::Packed { ty: TensorType::Q8_0x8 }));
        assert_eq!(layout(TensorType::F32, &[]), Err(ShapeError::Dims { n_dims: 0 }));
        assert_eq!(layout(TensorType::F32, &[1; 5]), Err(ShapeError::Dims { n_dims: 5 }));
        assert_eq!(layout(TensorType::F32, &[4, 0]), Err(ShapeError::Zero { dim: 1 }));
        assert_eq!(
            layout(TensorType::Q6_K, &[128]),
            Err(ShapeError::Block { ty: TensorType::Q6_K, len: 128, block: 256 })
        );
        for dims in [vec![1 << 62], vec![1 << 32, 1 << 32], vec![u64::MAX], vec![1 << 16; 4], vec![1 << 31, 1 << 30, 2]]
        {
            assert_eq!(layout(TensorType::F32, &dims), Err(ShapeError::TooLarge { shape: dims.clone() }));
        }
        // Fewer bytes than elements, and the elements overflow.
        assert!(matches!(layout(TensorType::TQ1_0, &[1 << 62, 2]), Err(ShapeError::TooLarge { .. })));
    }
}
