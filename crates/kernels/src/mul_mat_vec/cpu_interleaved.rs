//! Rows of a matrix interleaved, sixteen at a time, for machines with AVX-512: a vector holds four elements of each of sixteen
//! rows, so that products need no sums across a vector and scales of sixteen rows are read at once. Made when a model is loaded, of
//! the same size as before. How they meet activations is in `cpu_interleaved_dots.rs`, and in `cpu_tiles.rs` where there are tiles.

use std::ops::Range;
use std::sync::Arc;

use bytemuck::{Pod, Zeroable};
use kiln_gguf::TensorType;
use kiln_system::pages::Pages;
use rayon::prelude::*;

use super::cpu_interleaved_dots::interleave_of;
use super::cpu_quants::BLOCK;

pub(super) use super::cpu_tiles::{TiledActivations, has_tiles};

/// Rows that are interleaved.
pub(super) const ROWS: usize = 16;
/// Bytes of a row that a vector of heads has.
const HEAD_LINE: usize = 64 / ROWS;

/// A vector. All of them lie where the machine reads them in one piece.
#[derive(Clone, Copy, Debug, Pod, Zeroable)]
#[repr(C, align(64))]
pub(super) struct Line(pub [u8; 64]);

/// Rows of `k` elements, interleaved. Sixteen rows are one sequential stream: a vector of scales and the like of a few blocks lies
/// before the quants of these blocks. Scales behind the quants of all blocks were not prefetched, and a
/// token took twice as long so (Zen 4).
#[derive(Debug)]
pub(crate) struct Interleaved {
    ty: TensorType,
    k: usize,
    /// Where they lie, and which bytes of that are theirs.
    pages: Arc<Pages>,
    range: Range<usize>,
}

/// How blocks of a type are interleaved: in a file they are heads first, then codes.
#[derive(Clone, Copy)]
pub(super) struct Interleave {
    /// Scales and the like of a block.
    pub heads: usize,
    /// Bytes of each.
    pub head_bytes: usize,
    /// Vectors of codes.
    pub lines: usize,
    /// What is changed in every four bytes of codes.
    pub flip: u32,
}

impl Interleave {
    /// Bytes of a block that are no codes.
    pub(super) const fn head(self) -> usize {
        self.heads * self.head_bytes
    }

    /// Blocks that share a vector of heads.
    pub(super) const fn beside(self) -> usize {
        HEAD_LINE / self.head()
    }

    /// Vectors of sixteen rows of this many blocks.
    fn lines_of(self, blocks: usize) -> usize {
        blocks * self.lines + blocks.div_ceil(self.beside())
    }

    /// The vector of heads of a block.
    #[inline(always)]
    pub(super) const fn line_of_heads(self, block: usize) -> usize {
        block / self.beside() * (self.beside() * self.lines + 1)
    }

    /// The first vector of codes of a block.
    #[inline(always)]
    pub(super) const fn line_of_codes(self, block: usize) -> usize {
        self.line_of_heads(block) + 1 + block % self.beside() * self.lines
    }

    /// Where a head of a block lies in its vector, those of sixteen rows side by side.
    #[inline(always)]
    pub(super) const fn place_of_head(self, block: usize, head: usize) -> usize {
        ROWS * (block % self.beside() * self.head() + head * self.head_bytes)
    }
}

/// Interleaved rows from a row on.
#[derive(Clone, Copy)]
pub(crate) struct InterleavedRows<'a> {
    interleaved: &'a Interleaved,
    /// Of sixteen.
    first: usize,
}

impl Interleaved {
    /// Bytes that dense rows of `k` elements take when they are interleaved, this many bytes of them, if that is done with their type and
    /// number and the machine gains by it.
    pub(crate) fn room(ty: TensorType, k: usize, bytes: usize) -> Option<usize> {
        crate::simd::level().as_avx512()?;
        let (interleave, row_bytes) = (interleave_of(ty)?, ty.row_bytes(k)?);
        let whole = k > 0 && bytes > 0 && bytes.is_multiple_of(ROWS * row_bytes);
        whole.then(|| bytes / (ROWS * row_bytes) * interleave.lines_of(k / BLOCK) * size_of::<Line>())
    }

    /// Interleaves dense rows into as much room as they take, which begins where a vector may.
    pub(crate) fn interleave(ty: TensorType, k: usize, bytes: &[u8], to: &mut [u8]) {
        let (interleave, row_bytes) =
            interleave_of(ty).zip(ty.row_bytes(k)).expect("a type that is interleaved, and whole blocks");
        let each = interleave.lines_of(k / BLOCK);
        let lines: &mut [Line] = bytemuck::cast_slice_mut(to);
        let parts = lines.par_chunks_exact_mut(each).zip(bytes.par_chunks_exact(ROWS * row_bytes));
        parts.for_each(|(lines, rows)| {
            for (r, row) in rows.chunks_exact(row_bytes).enumerate() {
                for (b, block) in row.chunks_exact(ty.block_bytes()).enumerate() {
                    let (heads, codes) = block.split_at(interleave.head());
                    for (h, head) in heads.chunks_exact(interleave.head_bytes).enumerate() {
                        let at = interleave.place_of_head(b, h) + interleave.head_bytes * r;
                        lines[interleave.line_of_heads(b)].0[at..][..head.len()].copy_from_slice(head);
                    }
                    for (line, four) in lines[interleave.line_of_codes(b)..].iter_mut().zip(codes.as_chunks::<4>().0) {
                        let four = (u32::from_le_bytes(*four) ^ interleave.flip).to_le_bytes();
                        line.0[4 * r..][..4].copy_from_slice(&four);
                    }
                }
            }
        });
    }

    /// What was interleaved into some bytes of pages.
    pub(crate) fn new(ty: TensorType, k: usize, pages: Arc<Pages>, range: Range<usize>) -> Interleaved {
        Interleaved { ty, k, pages, range }
    }

    fn lines(&self) -> &[Line] {
        bytemuck::cast_slice(&self.pages.bytes()[self.range.clone()])
    }

    /// Whether rows of this type and length were interleaved.
    pub(crate) fn is_of(&self, ty: TensorType, k: usize) -> bool {
        (ty, k) == (self.ty, self.k)
    }

    /// The rows from number `first` on, a multiple of sixteen.
    pub(crate) fn rows(&self, first: usize) -> InterleavedRows<'_> {
        assert!(first.is_multiple_of(ROWS), "row {first} is not the first of sixteen");
        InterleavedRows { interleaved: self, first: first / ROWS }
    }

    /// One row as it lies in a file.
    pub(crate) fn row(&self, i: usize) -> Vec<u8> {
        let mut row = vec![0; self.k / BLOCK * self.ty.block_bytes()];
        let interleave = interleave_of(self.ty).expect("it was interleaved");
        let (lines, r) = (self.rows(i / ROWS * ROWS).sixteen(0), i % ROWS);
        for (b, block) in row.chunks_exact_mut(self.ty.block_bytes()).enumerate() {
            let (heads, codes) = block.split_at_mut(interleave.head());
            for (h, head) in heads.chunks_exact_mut(interleave.head_bytes).enumerate() {
                let at = interleave.place_of_head(b, h) + interleave.head_bytes * r;
                head.copy_from_slice(&lines[interleave.line_of_heads(b)].0[at..][..interleave.head_bytes]);
            }
            for (four, line) in codes.as_chunks_mut::<4>().0.iter_mut().zip(&lines[interleave.line_of_codes(b)..]) {
                let interleaved = line.0[4 * r..].first_chunk().expect("four bytes of each row");
                *four = (u32::from_le_bytes(*interleaved) ^ interleave.flip).to_le_bytes();
            }
        }
        row
    }
}

impl<'a> InterleavedRows<'a> {
    /// Their type.
    pub(super) fn ty(&self) -> TensorType {
        self.interleaved.ty
    }

    /// Blocks of a row.
    pub(super) fn blocks(&self) -> usize {
        self.interleaved.k / BLOCK
    }

    /// The vectors of the i-th sixteen rows.
    pub(super) fn sixteen(&self, i: usize) -> &'a [Line] {
        let each = interleave_of(self.interleaved.ty).expect("it was interleaved").lines_of(self.blocks());
        &self.interleaved.lines()[(self.first + i) * each..][..each]
    }
}

#[cfg(test)]
mod tests {
    use super::super::cpu_interleaved_dots::Spread;
    use super::*;
    use crate::host::HostMemory;
    use crate::mul_mat::Product;
    use crate::mul_mat_vec::Call;
    use crate::mul_mat_vec::cpu_quants::tests::blocks;
    use crate::operation::Operation as _;
    use crate::tensor::{Slot, Tensor};

    const TYPES: [TensorType; 7] = [
        TensorType::Q4_0,
        TensorType::Q4_1,
        TensorType::Q5_0,
        TensorType::Q5_1,
        TensorType::Q8_0,
        TensorType::IQ4_NL,
        TensorType::MXFP4,
    ];

    /// Rows interleaved into pages of their own, behind others.
    fn interleaved(ty: TensorType, k: usize, bytes: &[u8]) -> Option<Interleaved> {
        let range = 128..128 + Interleaved::room(ty, k, bytes.len())?;
        let mut pages = Pages::new(range.end).expect("some memory");
        Interleaved::interleave(ty, k, bytes, &mut pages.bytes_mut()[range.clone()]);
        Some(Interleaved::new(ty, k, Arc::new(pages), range))
    }

    /// Products of a matrix whose slot was interleaved, against plain sums.
    fn judge(ty: TensorType, [k, m, n]: [usize; 3], first: usize, bad: Option<usize>) {
        let (bytes, weights) = blocks(ty, (first + m) * k, 5);
        let mut columns: Vec<f32> = (0..n * k).map(|i| ((i * 7919 % 10007) as f32 / 5003.5 - 1.0).powi(3)).collect();
        if let Some(c) = bad {
            columns[c * k + 3] = 1e35;
        }
        let dense = |slot, ty, shape| Tensor::dense(Slot(slot), ty, shape);
        let a = dense(0, ty, [k, first + m, 1, 1]).narrow(1, first, m);
        let (b, d) = (dense(1, TensorType::F32, [k, n, 1, 1]), dense(2, TensorType::F32, [m, n, 1, 1]));
        let slots = vec![bytes, bytemuck::cast_slice(&columns).to_vec(), vec![0; 4 * m * n]];
        let mut memory = HostMemory { slots, ..HostMemory::default() };
        let interleaved = memory.interleave(Slot(0), ty, k);
        if crate::simd::level().as_avx512().is_none() {
            return assert!(!interleaved);
        }
        assert!(interleaved && memory.interleaved(&a).is_some());
        // The original rows are read again only for activations that cannot be quantised.
        if bad.is_none() {
            memory.slots[0].fill(0xff);
        }
        Call::plain(Product { a, b, d }).cpu(&mut memory);
        for (i, got) in memory.floats(&d).iter().enumerate() {
            let terms = weights[(first + i % m) * k..][..k].iter().zip(&columns[i / m * k..]);
            let terms: Vec<f64> = terms.map(|(a, b)| f64::from(*a) * f64::from(*b)).collect();
            let (want, size) = (terms.iter().sum::<f64>(), terms.iter().map(|x| x * x).sum::<f64>().sqrt());
            // Scales of MXFP4 may be so large that no float is.
            let near = (f64::from(*got) - want).abs() <= 1e-3 * size || (*got == want as f32 && got.is_infinite());
            assert!(near, "{ty} {k} {m} {n}: {got}, not {want}, at {i}");
        }
    }

    #[test]
    fn interleaved_rows_are_the_same_matrix_for_few_columns_and_many() {
        for ty in TYPES {
            for n in [1, 2, 6, 8, 9, 16, 17, 50] {
                judge(ty, [96, 80, n], 0, None);
                judge(ty, [576, 16, n], 32, None);
            }
            judge(ty, [32, 16, 40], 16, None);
        }
    }

    #[test]
    fn columns_that_cannot_be_rounded_are_multiplied_as_floats() {
        for ty in TYPES {
            judge(ty, [64, 32, 1], 0, Some(0));
            judge(ty, [64, 32, 40], 16, Some(37));
        }
    }

    #[test]
    fn rows_can_be_had_back_as_they_were() {
        for ty in TYPES {
            let (bytes, _) = blocks(ty, 48 * 96, 3);
            let row = ty.row_bytes(96).unwrap();
            assert!(Interleaved::room(ty, 96, bytes.len() - row).is_none());
            let Some(interleaved) = interleaved(ty, 96, &bytes) else { return };
            for i in [0, 15, 16, 39, 47] {
                assert_eq!(interleaved.row(i), bytes[i * row..][..row], "{ty} {i}");
            }
        }
    }

    /// Machines without tiles go another way, so this holds what tiles would multiply against the format itself.
    #[test]
    fn rows_that_are_spread_for_tiles_are_the_same_matrix() {
        let Some(simd) = crate::simd::level().as_avx512() else { return };
        const K: usize = 160;
        for ty in TYPES {
            let (bytes, weights) = blocks(ty, 48 * K, 7);
            let interleaved = interleaved(ty, K, &bytes).expect("a type that is interleaved");
            let rows = interleaved.rows(16);
            let mut spread = Spread {
                codes: vec![[0; ROWS * BLOCK]; K / BLOCK],
                scales: vec![[0.0; ROWS]; K / BLOCK],
                offsets: vec![[0.0; ROWS]; K / BLOCK],
            };
            rows.spread(simd, 1, &mut spread);
            for (r, row) in weights[32 * K..].chunks_exact(K).enumerate() {
                for (e, want) in row.iter().enumerate() {
                    let (b, e) = (e / BLOCK, e % BLOCK);
                    let code = spread.codes[b][64 * (e / 4) + 4 * r + e % 4] as i8;
                    let got = f32::from(code).mul_add(spread.scales[b][r], spread.offsets[b][r]);
                    let size = (f32::from(code) * spread.scales[b][r]).abs() + spread.offsets[b][r].abs();
                    assert!((got - want).abs() <= 1e-6 * size, "{ty} {r} {b} {e}: {got}, not {want}");
                }
            }
        }
    }

    #[test]
    fn parts_that_begin_between_interleaved_rows_are_read_as_they_lie() {
        let (bytes, _) = blocks(TensorType::Q4_0, 48 * 64, 3);
        let a = Tensor::dense(Slot(0), TensorType::Q4_0, [64, 48, 1, 1]);
        let mut memory = HostMemory { slots: vec![bytes], ..HostMemory::default() };
        if memory.interleave(Slot(0), TensorType::Q4_0, 64) {
            assert!(memory.interleaved(&a.narrow(1, 16, 32)).is_some());
            assert!(memory.interleaved(&a.narrow(1, 8, 32)).is_none());
            assert!(memory.interleaved(&a.narrow(1, 16, 8)).is_none());
            assert!(memory.interleaved(&a.narrow(0, 0, 32)).is_none());
        }
    }
}
