//! Blocks of a type of files, packed for a device: several blocks together, the same field of all of them side by side, so
//! that every field begins at a multiple of sixteen bytes and is read in wide loads. Where the bits of neighbouring
//! elements lie apart they are put in order first: the codes of 32 elements are one piece of each field.

use rayon::prelude::*;

use super::QuantError;
use crate::TensorType;

/// Bytes that one task of [`pack`] should at least have, so that handing it out costs nothing.
const TASK_BYTES: usize = 1 << 16;
/// The largest block that is packed.
const MOST_BYTES: usize = 256;

/// How a type is packed.
struct Layout {
    ty: TensorType,
    /// The fields of a block in the order in which they are packed: first byte, number of bytes.
    fields: &'static [(usize, usize)],
    /// Puts the bits of a block in order.
    order: fn(&mut [u8]),
    /// Puts them back.
    restore: fn(&mut [u8]),
}

fn keep(_: &mut [u8]) {}

/// Every packed type. What the bytes are is told in `glsl/formats` of the kernels.
static LAYOUTS: &[Layout] = &[
    Layout { ty: TensorType::Q4_0x8, fields: &[(2, 16), (0, 2)], order: keep, restore: keep },
    // Two fields of codes: neighbouring blocks are read by neighbouring threads, sixteen bytes each.
    Layout { ty: TensorType::Q8_0x8, fields: &[(2, 16), (18, 16), (0, 2)], order: keep, restore: keep },
    Layout {
        ty: TensorType::Q6_Kx8,
        fields: &[(0, 128), (128, 64), (192, 16), (208, 2)],
        order: order_q6_k,
        restore: restore_q6_k,
    },
];

fn layout(ty: TensorType) -> &'static Layout {
    LAYOUTS.iter().find(|layout| layout.ty == ty).expect("every packed type should have its layout: a test checks it")
}

impl Layout {
    /// Bytes of as many base blocks as a packed one holds, and of one of them.
    fn base_bytes(&self) -> (usize, usize) {
        let base = self.ty.base();
        (self.ty.block_len() / base.block_len() * base.block_bytes(), base.block_bytes())
    }

    /// Calls `each(base bytes of a field, packed bytes of the same)` for all fields of block `i` of `blocks`.
    fn for_fields(
        &self,
        i: usize,
        blocks: usize,
        mut each: impl FnMut(std::ops::Range<usize>, std::ops::Range<usize>),
    ) {
        let mut plane = 0;
        for &(first, len) in self.fields {
            each(first..first + len, plane + i * len..plane + (i + 1) * len);
            plane += blocks * len;
        }
    }

    fn pack(&self, from: &[u8], to: &mut [u8], size: usize) {
        let blocks = from.len() / size;
        for (i, from) in from.chunks_exact(size).enumerate() {
            let mut block = [0; MOST_BYTES];
            let block = &mut block[..size];
            block.copy_from_slice(from);
            (self.order)(block);
            self.for_fields(i, blocks, |field, at| to[at].copy_from_slice(&block[field]));
        }
        to[from.len()..].fill(0);
    }

    fn unpack(&self, from: &[u8], to: &mut [u8], size: usize) {
        let blocks = to.len() / size;
        for (i, block) in to.chunks_exact_mut(size).enumerate() {
            self.for_fields(i, blocks, |field, at| block[field].copy_from_slice(&from[at]));
            (self.restore)(block);
        }
    }
}

/// The packed type that holds values of `ty` on a device in rows of `len` elements, if there is one.
pub fn packed_type(ty: TensorType, len: usize) -> Option<TensorType> {
    TensorType::PACKED.iter().copied().find(|packed| packed.base() == ty && len.is_multiple_of(packed.block_len()))
}

/// Packs blocks of `ty.base()` into blocks of `ty`, on all threads of the current rayon pool.
///
/// ```
/// use kiln_gguf::{TensorType, quant};
///
/// let blocks: Vec<u8> = (0..8 * 34).map(|i| (i % 251) as u8).collect();
/// let mut packed = vec![0; 272];
/// quant::pack(TensorType::Q8_0x8, &blocks, &mut packed)?;
/// assert_eq!(packed[..2], blocks[2..4], "codes first");
/// assert_eq!(packed[256..258], blocks[..2], "scales last");
/// # Ok::<(), quant::QuantError>(())
/// ```
pub fn pack(ty: TensorType, blocks: &[u8], out: &mut [u8]) -> Result<(), QuantError> {
    let layout = layout(ty);
    let (group, size) = layout.base_bytes();
    check(ty, blocks.len(), group, out.len())?;
    let many = TASK_BYTES.div_ceil(group);
    blocks.par_chunks(many * group).zip(out.par_chunks_mut(many * ty.block_bytes())).for_each(|(from, to)| {
        for (from, to) in from.chunks_exact(group).zip(to.chunks_exact_mut(ty.block_bytes())) {
            layout.pack(from, to, size);
        }
    });
    Ok(())
}

/// What [`pack`] made `packed` of.
pub fn unpack(ty: TensorType, packed: &[u8], out: &mut [u8]) -> Result<(), QuantError> {
    let layout = layout(ty);
    let (group, size) = layout.base_bytes();
    check(ty, out.len(), group, packed.len())?;
    for (from, to) in packed.chunks_exact(ty.block_bytes()).zip(out.chunks_exact_mut(group)) {
        layout.unpack(from, to, size);
    }
    Ok(())
}

/// Checks that base blocks of so many bytes fill `got` bytes of packed ones.
fn check(ty: TensorType, base_bytes: usize, group: usize, got: usize) -> Result<(), QuantError> {
    let values = base_bytes / ty.base().block_bytes() * ty.base().block_len();
    if !base_bytes.is_multiple_of(group) {
        return Err(QuantError::PartialBlock { ty, len: values, block_len: ty.block_len() });
    }
    let expected = base_bytes / group * ty.block_bytes();
    if expected != got {
        return Err(QuantError::ByteCount { ty, values, expected, got });
    }
    Ok(())
}

/// Where sixteen elements of a block of Q6_K lie: element 16 i, for i of 0 .. 16. Of the file: byte of the low nibbles,
/// their shift, byte of the upper bits, their shift. Packed: byte and shift of the low nibbles, byte of the upper bits.
fn q6_k_places(i: usize) -> ([usize; 4], [usize; 3]) {
    let (n, g, half) = (i / 8, i / 2 % 4, i % 2);
    (
        [64 * n + 32 * (g % 2) + 16 * half, 4 * (g / 2), 128 + 32 * n + 16 * half, 2 * g],
        [i / 2 * 16, 4 * half, 128 + 4 * i],
    )
}

/// 32 elements take 16 bytes of low nibbles, element e with e + 16 above it, and 8 bytes of upper bits: of 16 elements
/// the bits of element l are at 2 (l / 4) of byte l % 4.
fn order_q6_k(block: &mut [u8]) {
    let mut out = [0; 192];
    for i in 0..16 {
        let ([low, low_shift, high, high_shift], [nibbles, shift, upper]) = q6_k_places(i);
        for l in 0..16 {
            out[nibbles + l] |= (block[low + l] >> low_shift & 15) << shift;
            out[upper + l % 4] |= (block[high + l] >> high_shift & 3) << (l / 4 * 2);
        }
    }
    block[..192].copy_from_slice(&out);
}

fn restore_q6_k(block: &mut [u8]) {
    let mut out = [0; 192];
    for i in 0..16 {
        let ([low, low_shift, high, high_shift], [nibbles, shift, upper]) = q6_k_places(i);
        for l in 0..16 {
            out[low + l] |= (block[nibbles + l] >> shift & 15) << low_shift;
            out[high + l] |= (block[upper + l % 4] >> (l / 4 * 2) & 3) << high_shift;
        }
    }
    block[..192].copy_from_slice(&out);
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn packing_loses_nothing_and_fields_lie_at_multiples_of_sixteen() {
        assert_eq!(LAYOUTS.len(), TensorType::PACKED.len());
        for &ty in TensorType::PACKED {
            let (layout, blocks) = (layout(ty), ty.block_len() / ty.base().block_len());
            let (group, size) = layout.base_bytes();
            assert!(size <= MOST_BYTES && ty.block_bytes() >= group && ty.block_bytes().is_multiple_of(16), "{ty}");
            let mut seen = vec![false; size];
            layout.for_fields(0, blocks, |field, at| {
                assert!(at.start.is_multiple_of(16), "{ty}: a field at {}", at.start);
                seen[field].fill(true);
            });
            assert!(seen.iter().all(|s| *s), "{ty}: a field is missing");
            let mut state = 1u32;
            let mut byte = || {
                state = state.wrapping_mul(1_664_525).wrapping_add(1_013_904_223);
                (state >> 24) as u8
            };
            let from: Vec<u8> = (0..3 * group).map(|_| byte()).collect();
            let (mut packed, mut back) = (vec![0xaa; 3 * ty.block_bytes()], vec![0xaa; from.len()]);
            pack(ty, &from, &mut packed).unwrap();
            unpack(ty, &packed, &mut back).unwrap();
            assert!(from == back && packed != from, "{ty}");
        }
    }

    #[test]
    fn rows_that_are_no_whole_groups_stay_as_they_are() {
        assert_eq!(packed_type(TensorType::Q8_0, 512), Some(TensorType::Q8_0x8));
        assert_eq!(packed_type(TensorType::Q8_0, 288), None);
        assert_eq!(packed_type(TensorType::F16, 256), None);
        let error = pack(TensorType::Q8_0x8, &[0; 34], &mut [0; 272]).unwrap_err();
        assert_eq!(error, QuantError::PartialBlock { ty: TensorType::Q8_0x8, len: 32, block_len: 256 });
    }
}
