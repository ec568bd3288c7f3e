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

/// Moves bits within a block.
type Reorder = fn(block: &mut [u8]);

/// How a type is packed.
struct Layout {
    ty: TensorType,
    /// The fields of a block in the order in which they are packed: first byte, number of bytes.
    fields: &'static [(usize, usize)],
    /// Puts the bits of a block in order, and puts them back; nothing where they are.
    order: Option<[Reorder; 2]>,
}

const fn plain(ty: TensorType, fields: &'static [(usize, usize)]) -> Layout {
    Layout { ty, fields, order: None }
}

const fn ordered<B: Bits>(ty: TensorType, fields: &'static [(usize, usize)]) -> Layout {
    Layout { ty, fields, order: Some([order::<B>, restore::<B>]) }
}

const fn q6_k(ty: TensorType) -> Layout {
    let fields = &[(0, 128), (128, 64), (192, 16), (208, 2)];
    Layout { ty, fields, order: Some([order_q6_k, restore::<Q6K>]) }
}

/// Every packed type. What the bytes are is told in `glsl/formats` of the kernels.
static LAYOUTS: &[Layout] = &[
    plain(TensorType::Q4_0x8, &[(2, 16), (0, 2)]),
    // Two fields of codes: neighbouring blocks are read by neighbouring threads, sixteen bytes each.
    plain(TensorType::Q8_0x8, &[(2, 16), (18, 16), (0, 2)]),
    plain(TensorType::Q4_1x4, &[(4, 16), (0, 4)]),
    ordered::<FifthBits<2>>(TensorType::Q5_0x8, &[(6, 16), (2, 4), (0, 2)]),
    ordered::<FifthBits<4>>(TensorType::Q5_1x4, &[(8, 16), (4, 4), (0, 4)]),
    plain(TensorType::IQ4_NLx8, &[(2, 16), (0, 2)]),
    ordered::<Q3K>(TensorType::Q3_Kx1, &[(32, 64), (0, 32), (96, 14)]),
    q6_k(TensorType::Q6_Kx8),
    q6_k(TensorType::Q6_Kx2),
    q6_k(TensorType::Q6_Kx1),
    plain(TensorType::MXFP4x16, &[(1, 16), (0, 1)]),
    plain(TensorType::MXFP4x30, &[(1, 16), (0, 1)]),
    plain(TensorType::NVFP4x4, &[(4, 32), (0, 4)]),
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
        let mut ordered = [0; MOST_BYTES];
        for (i, mut block) in from.chunks_exact(size).enumerate() {
            if let Some([order, _]) = self.order {
                ordered[..size].copy_from_slice(block);
                order(&mut ordered[..size]);
                block = &ordered[..size];
            }
            self.for_fields(i, blocks, |field, at| to[at].copy_from_slice(&block[field]));
        }
        to[from.len()..].fill(0);
    }

    fn unpack(&self, from: &[u8], to: &mut [u8], size: usize) {
        let blocks = to.len() / size;
        for (i, block) in to.chunks_exact_mut(size).enumerate() {
            self.for_fields(i, blocks, |field, at| block[field].copy_from_slice(&from[at]));
            if let Some([_, restore]) = self.order {
                restore(block);
            }
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

/// Checks that base blocks of `bytes` bytes fill `got` bytes of packed ones.
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

/// Bits of a block that are put in order.
trait Bits {
    /// The bytes they are in.
    const BYTES: std::ops::Range<usize>;

    /// Calls `each(bit in the file's block, bit in the ordered one, how many)`; bits are counted from the block's start,
    /// lowest first, and stay within a byte.
    fn each(each: impl FnMut(usize, usize, usize));
}

fn order<B: Bits>(block: &mut [u8]) {
    let mut out = [0; MOST_BYTES];
    B::each(|from, to, n| out[to / 8] |= (block[from / 8] >> (from % 8) & ((1 << n) - 1)) << (to % 8));
    block[B::BYTES].copy_from_slice(&out[B::BYTES]);
}

fn restore<B: Bits>(block: &mut [u8]) {
    let mut out = [0; MOST_BYTES];
    B::each(|to, from, n| out[to / 8] |= (block[from / 8] >> (from % 8) & ((1 << n) - 1)) << (to % 8));
    block[B::BYTES].copy_from_slice(&out[B::BYTES]);
}

/// Four bytes at `AT` with a bit for each of 32 elements: that of element e becomes bit e / 4 of byte e % 4.
struct FifthBits<const AT: usize>;

impl<const AT: usize> Bits for FifthBits<AT> {
    const BYTES: std::ops::Range<usize> = AT..AT + 4;

    fn each(mut each: impl FnMut(usize, usize, usize)) {
        (0..32).for_each(|e| each(8 * AT + e, 8 * (AT + e % 4) + e / 4, 1));
    }
}

/// 32 elements take 16 bytes of low nibbles, element e with e + 16 above it, and 8 bytes of upper bits: of 16 elements the
/// bits of element l are at 2 (l / 4) of byte l % 4.
struct Q6K;

impl Bits for Q6K {
    const BYTES: std::ops::Range<usize> = 0..192;

    fn each(mut each: impl FnMut(usize, usize, usize)) {
        for i in 0..16 {
            let (n, g, half) = (i / 8, i / 2 % 4, i % 2);
            for l in 0..16 {
                let nibble = 8 * (64 * n + 32 * (g % 2) + 16 * half + l) + 4 * (g / 2);
                each(nibble, 8 * (16 * (i / 2) + l) + 4 * half, 4);
                each(8 * (128 + 32 * n + 16 * half + l) + 2 * g, 8 * (128 + 4 * i + l % 4) + l / 4 * 2, 2);
            }
        }
    }
}

/// What [`order`] does for [`Q6K`], many bytes at a time: a fourth of the weights of usual files go this way whenever a model is loaded, and bit
/// by bit it took longer than all else of loading.
fn order_q6_k(block: &mut [u8]) {
    let mut from = [0; 192];
    from.copy_from_slice(&block[..192]);
    let (low, high) = from.split_at(128);
    for (group, to) in block[..128].chunks_exact_mut(16).enumerate() {
        let (n, g) = (group / 4, group % 4);
        let (first, second) = low[64 * n + 32 * (g % 2)..][..32].split_at(16);
        let shift = 4 * (g / 2);
        for ((to, a), b) in to.iter_mut().zip(first).zip(second) {
            *to = (a >> shift & 15) | (b >> shift & 15) << 4;
        }
    }
    for (i, to) in block[128..192].chunks_exact_mut(4).enumerate() {
        let (n, g, half) = (i / 8, i / 2 % 4, i % 2);
        let words = high[32 * n + 16 * half..][..16].chunks_exact(4).enumerate();
        let pairs = words.map(|(at, word)| {
            let word = u32::from_le_bytes([word[0], word[1], word[2], word[3]]);
            (word >> (2 * g) & 0x0303_0303) << (2 * at)
        });
        to.copy_from_slice(&pairs.fold(0, |all, pair| all | pair).to_le_bytes());
    }
}

/// 32 elements take 8 bytes of low bits, as the upper bits of Q6_K, and 4 bytes of high bits, as those of Q5_0. The scales
/// of 32 elements are the nibbles of byte g and two pairs of bits, at 4 g of the four bytes behind.
struct Q3K;

impl Bits for Q3K {
    const BYTES: std::ops::Range<usize> = 0..108;

    fn each(mut each: impl FnMut(usize, usize, usize)) {
        for i in 0..16 {
            let (plane, half) = (i / 2, i % 2);
            for l in 0..16 {
                let low = 8 * (32 + 32 * (i / 8) + 16 * half + l) + 2 * (plane % 4);
                each(low, 8 * (32 + 4 * i + l % 4) + l / 4 * 2, 2);
                each(8 * (16 * half + l) + plane, 8 * (4 * plane + l % 4) + 4 * half + l / 4, 1);
            }
            each(8 * (96 + i % 8) + 4 * (i / 8), 8 * 96 + 4 * i, 4);
            each(8 * (104 + i % 4) + 2 * (i / 4), 8 * 104 + 2 * i, 2);
        }
    }
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

    /// What is quantised, packed and read gives the bits of the type of files.
    #[test]
    fn packed_values_are_those_of_files() {
        for &ty in TensorType::PACKED {
            let (base, n) = (ty.base(), 2 * ty.block_len());
            let values: Vec<f32> = (0..n).map(|i| (i * 37 % 101) as f32 * 0.07 - 3.0 + i as f32 * 1e-3).collect();
            let (mut file, mut packed) = (vec![0; base.row_bytes(n).unwrap()], vec![0; ty.row_bytes(n).unwrap()]);
            crate::quant::quantise(base, &values, n, None, &mut file).unwrap();
            pack(ty, &file, &mut packed).unwrap();
            let (mut want, mut got) = (vec![0.0f32; n], vec![1.0f32; n]);
            crate::quant::dequantise(base, &file, &mut want).unwrap();
            crate::quant::dequantise(ty, &packed, &mut got).unwrap();
            assert!(want.iter().zip(&got).all(|(a, b)| a.to_bits() == b.to_bits()), "{ty}");
            assert!(want.iter().any(|x| *x != 0.0), "{ty}: nothing to compare");
        }
    }

    #[test]
    fn q6_k_in_words_is_what_it_is_bit_by_bit() {
        let block: Vec<u8> = (0..210u32).map(|i| (i.wrapping_mul(0x9e37_79b1) >> 13) as u8).collect();
        let (mut words, mut bits) = (block.clone(), block.clone());
        order_q6_k(&mut words);
        order::<Q6K>(&mut bits);
        assert!(words == bits && words != block);
    }

    #[test]
    fn rows_that_are_no_whole_groups_stay_as_they_are() {
        assert_eq!(packed_type(TensorType::Q8_0, 512), Some(TensorType::Q8_0x8));
        assert_eq!(packed_type(TensorType::Q8_0, 288), None);
        assert_eq!(packed_type(TensorType::F16, 256), None);
        let six = [4096, 2560, 768].map(|len| packed_type(TensorType::Q6_K, len));
        assert_eq!(six, [TensorType::Q6_Kx8, TensorType::Q6_Kx2, TensorType::Q6_Kx1].map(Some));
        let four = [4096, 2880, 768].map(|len| packed_type(TensorType::MXFP4, len));
        assert_eq!(four, [Some(TensorType::MXFP4x16), Some(TensorType::MXFP4x30), None]);
        assert_eq!(packed_type(TensorType::NVFP4, 768), Some(TensorType::NVFP4x4));
        let error = pack(TensorType::Q8_0x8, &[0; 34], &mut [0; 272]).unwrap_err();
        assert_eq!(error, QuantError::PartialBlock { ty: TensorType::Q8_0x8, len: 32, block_len: 256 });
    }
}
