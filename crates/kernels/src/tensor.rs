//! A tensor as a kernel sees it: a typed, strided view of a slot. No memory here, only where it lies and how.

use kiln_gguf::TensorType;

/// A piece of memory with a name in a plan. What it is on a device, the executor knows.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub struct Slot(pub u32);

/// A view of a slot: element (i0, i1, i2, i3) lies at byte `offset + sum(i_d * stride[d])`, dimension 0 innermost.
/// For block types dimension 0 is counted in blocks: `stride[0]` is the size of a block.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Tensor {
    /// The memory it lies in.
    pub slot: Slot,
    /// Byte offset of the first element in the slot.
    pub offset: usize,
    /// Element type.
    pub ty: TensorType,
    /// Extents in elements; unused dimensions are 1.
    pub shape: [usize; 4],
    /// Byte strides.
    pub stride: [usize; 4],
}

impl Tensor {
    /// A dense tensor at the start of a slot.
    ///
    /// Panics where the row is no whole number of blocks: a caller's bug, formats are checked when files are read.
    pub fn dense(slot: Slot, ty: TensorType, shape: [usize; 4]) -> Tensor {
        let row =
            ty.row_bytes(shape[0]).unwrap_or_else(|| panic!("a row of {} {ty} is no whole number of blocks", shape[0]));
        let stride = [ty.block_bytes(), row, row * shape[1], row * shape[1] * shape[2]];
        Tensor { slot, offset: 0, ty, shape, stride }
    }

    /// The same tensor `bytes` further into its slot.
    pub fn at(mut self, bytes: usize) -> Tensor {
        self.offset += bytes;
        self
    }

    /// The indices `start .. start + len` of dimension `dim` (in elements; whole blocks for dimension 0).
    pub fn narrow(mut self, dim: usize, start: usize, len: usize) -> Tensor {
        assert!(
            start + len <= self.shape[dim],
            "narrow: {start} + {len} exceeds extent {} of dimension {dim}",
            self.shape[dim]
        );
        let per_stride = if dim == 0 { self.ty.block_len() } else { 1 };
        assert!(start.is_multiple_of(per_stride), "narrow: {start} is inside a block of {}", self.ty);
        self.offset += start / per_stride * self.stride[dim];
        self.shape[dim] = len;
        self
    }

    /// Dimensions in another order: new dimension `d` is old dimension `order[d]`.
    pub fn permute(mut self, order: [usize; 4]) -> Tensor {
        let (shape, stride) = (self.shape, self.stride);
        self.shape = order.map(|d| shape[d]);
        self.stride = order.map(|d| stride[d]);
        self
    }

    /// The same dense memory with other extents.
    pub fn reshape(self, shape: [usize; 4]) -> Tensor {
        assert!(self.is_dense(), "reshape needs a dense tensor");
        assert_eq!(shape.iter().product::<usize>(), self.len(), "reshape keeps the number of elements");
        Tensor { offset: self.offset, ..Tensor::dense(self.slot, self.ty, shape) }
    }

    /// Of rows of plain elements `[.., rows]` the `width * heads` from `start` on, as `[width, heads, rows]`.
    pub fn heads(self, start: usize, width: usize, heads: usize) -> Tensor {
        let part = self.narrow(0, start, width * heads);
        let [one, row, ..] = part.stride;
        let stride = [one, one * width, row, row * part.shape[1]];
        Tensor { shape: [width, heads, part.shape[1], 1], stride, ..part }
    }

    /// Number of elements.
    pub fn len(&self) -> usize {
        self.shape.iter().product()
    }

    /// Whether there is no element.
    pub fn is_empty(&self) -> bool {
        self.len() == 0
    }

    /// Number of rows: everything but dimension 0.
    pub fn rows(&self) -> usize {
        self.shape[1] * self.shape[2] * self.shape[3]
    }

    /// Whether elements lie without gaps in index order.
    pub fn is_dense(&self) -> bool {
        let dense = Tensor::dense(self.slot, self.ty, self.shape);
        (0..4).all(|d| self.shape[d] == 1 || self.stride[d] == dense.stride[d])
    }

    /// Whether each row lies without gaps.
    pub fn has_dense_rows(&self) -> bool {
        self.shape[0] == 1 || self.stride[0] == self.ty.block_bytes()
    }

    /// Bytes of one row.
    pub fn row_bytes(&self) -> usize {
        self.shape[0] / self.ty.block_len() * self.ty.block_bytes()
    }

    /// First byte and number of bytes from the first to the last element, both in the slot.
    pub fn span(&self) -> (usize, usize) {
        if self.is_empty() {
            return (self.offset, 0);
        }
        let blocks = [self.shape[0] / self.ty.block_len(), self.shape[1], self.shape[2], self.shape[3]];
        let last: usize = (0..4).map(|d| (blocks[d] - 1) * self.stride[d]).sum();
        (self.offset, last + self.ty.block_bytes())
    }

    /// Byte offset in the slot of row (i1, i2, i3).
    pub fn row_offset(&self, i: [usize; 3]) -> usize {
        self.offset + i[0] * self.stride[1] + i[1] * self.stride[2] + i[2] * self.stride[3]
    }

    /// Strides in elements of a plain type, as kernels take them.
    ///
    /// Panics where a stride is no whole number of elements; `check` functions refuse such tensors first.
    pub fn element_strides(&self) -> [u32; 4] {
        self.stride.map(|s| {
            assert!(s % self.ty.block_bytes() == 0, "stride of {s} bytes is no whole number of {} elements", self.ty);
            u32::try_from(s / self.ty.block_bytes()).expect("strides of kernels' operands should fit 32 bits")
        })
    }

    /// Extents as kernels take them.
    pub fn extents(&self) -> [u32; 4] {
        self.shape.map(|n| u32::try_from(n).expect("extents of kernels' operands should fit 32 bits"))
    }
}

/// `F32[64, 3]`-like form for messages and printed plans.
impl std::fmt::Display for Tensor {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        let used = (1..4).rev().find(|&d| self.shape[d] != 1).map_or(1, |d| d + 1);
        write!(f, "{}{:?}", self.ty, &self.shape[..used])
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn views_keep_to_their_slot() {
        let t = Tensor::dense(Slot(0), TensorType::Q8_0, [64, 3, 2, 1]);
        assert_eq!((t.rows(), t.row_bytes(), t.span()), (6, 68, (0, 408)));
        let row = t.narrow(1, 1, 1).narrow(2, 1, 1);
        assert_eq!(row.span(), (68 + 204, 68));
        let swapped = Tensor::dense(Slot(0), TensorType::F32, [4, 3, 2, 1]).permute([0, 2, 1, 3]);
        assert_eq!((swapped.shape, swapped.is_dense(), swapped.has_dense_rows()), ([4, 2, 3, 1], false, true));
        assert_eq!(swapped.to_string(), "F32[4, 2, 3]");
    }
}
