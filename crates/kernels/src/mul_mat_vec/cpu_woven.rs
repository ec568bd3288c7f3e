//! Rows of a matrix woven together, sixteen at a time, for machines with AVX-512: a vector holds four elements of each of sixteen
//! rows, so that products need no sums across a vector and scales of sixteen rows are read at once. Made when a model is loaded, of
//! the same size as before. How they meet columns is in `cpu_woven_dots.rs`, and in `cpu_tiles.rs` where there are tiles.

use std::ops::Range;
use std::sync::Arc;

use bytemuck::{Pod, Zeroable};
use kiln_gguf::TensorType;
use kiln_system::pages::Pages;
use rayon::prelude::*;

use super::cpu_codes::BLOCK;
use super::cpu_woven_dots::weave_of;

pub(super) use super::cpu_tiles::{TiledColumns, has_tiles};

/// Rows that are woven together.
pub(super) const ROWS: usize = 16;
/// Bytes of a row that a vector of heads has.
const HEAD_LINE: usize = 64 / ROWS;

/// A vector. All of them lie where the machine reads them in one piece.
#[derive(Clone, Copy, Debug, Pod, Zeroable)]
#[repr(C, align(64))]
pub(super) struct Line(pub [u8; 64]);

/// Rows of `k` elements, woven together. Whoever reads sixteen rows reads on and on: a vector of scales and the like of a few blocks lies
/// before the codes of these blocks. Scales that lay behind the codes of all blocks were fetched by nobody ahead of their use, and a
/// token took twice as long so (Zen 4).
#[derive(Debug)]
pub(crate) struct Woven {
    ty: TensorType,
    k: usize,
    /// Where they lie, and which bytes of that are theirs.
    pages: Arc<Pages>,
    range: Range<usize>,
}

/// How blocks of a type are woven: in a file they are heads first, then codes.
#[derive(Clone, Copy)]
pub(super) struct Weave {
    /// Scales and the like of a block.
    pub heads: usize,
    /// Bytes of each.
    pub head_bytes: usize,
    /// Vectors of codes.
    pub lines: usize,
    /// What is changed in every four bytes of codes.
    pub flip: u32,
}

impl Weave {
    /// Bytes of a block that are no codes.
    pub(super) const fn head(self) -> usize {
        self.heads * self.head_bytes
    }

    /// Blocks that share a vector of heads.
    pub(super) const fn beside(self) -> usize {
        HEAD_LINE / self.head()
    }

    /// Vectors of sixteen rows of so many blocks.
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

/// Woven rows from a row on.
#[derive(Clone, Copy)]
pub(crate) struct WovenRows<'a> {
    woven: &'a Woven,
    /// Of sixteen.
    first: usize,
}

impl Woven {
    /// Bytes that dense rows of `k` elements take when they are woven, so many bytes of them, if that is done with their type and
    /// number and the machine gains by it.
    pub(crate) fn room(ty: TensorType, k: usize, bytes: usize) -> Option<usize> {
        crate::simd::level().as_avx512()?;
        let (weave, row_bytes) = (weave_of(ty)?, ty.row_bytes(k)?);
        let whole = k > 0 && bytes > 0 && bytes.is_multiple_of(ROWS * row_bytes);
        whole.then(|| bytes / (ROWS * row_bytes) * weave.lines_of(k / BLOCK) * size_of::<Line>())
    }

    /// Weaves dense rows into as much room as they take, which begins where a vector may.
    pub(crate) fn weave(ty: TensorType, k: usize, bytes: &[u8], to: &mut [u8]) {
        let (weave, row_bytes) = weave_of(ty).zip(ty.row_bytes(k)).expect("a type that is woven, and whole blocks");
        let each = weave.lines_of(k / BLOCK);
        let lines: &mut [Line] = bytemuck::cast_slice_mut(to);
        let parts = lines.par_chunks_exact_mut(each).zip(bytes.par_chunks_exact(ROWS * row_bytes));
        parts.for_each(|(lines, rows)| {
            for (r, row) in rows.chunks_exact(row_bytes).enumerate() {
                for (b, block) in row.chunks_exact(ty.block_bytes()).enumerate() {
                    let (heads, codes) = block.split_at(weave.head());
                    for (h, head) in heads.chunks_exact(weave.head_bytes).enumerate() {
                        let at = weave.place_of_head(b, h) + weave.head_bytes * r;
                        lines[weave.line_of_heads(b)].0[at..][..head.len()].copy_from_slice(head);
                    }
                    for (line, four) in lines[weave.line_of_codes(b)..].iter_mut().zip(codes.as_chunks::<4>().0) {
                        let four = (u32::from_le_bytes(*four) ^ weave.flip).to_le_bytes();
                        line.0[4 * r..][..4].copy_from_slice(&four);
                    }
                }
            }
        });
    }

    /// What was woven into some bytes of pages.
    pub(crate) fn new(ty: TensorType, k: usize, pages: Arc<Pages>, range: Range<usize>) -> Woven {
        Woven { ty, k, pages, range }
    }

    fn lines(&self) -> &[Line] {
        bytemuck::cast_slice(&self.pages.bytes()[self.range.clone()])
    }

    /// Whether rows of this type and length were woven.
    pub(crate) fn is_of(&self, ty: TensorType, k: usize) -> bool {
        (ty, k) == (self.ty, self.k)
    }

    /// The rows from number `first` on, a multiple of sixteen.
    pub(crate) fn rows(&self, first: usize) -> WovenRows<'_> {
        assert!(first.is_multiple_of(ROWS), "row {first} is not the first of sixteen");
        WovenRows { woven: self, first: first / ROWS }
    }

    /// One row as it lies in a file.
    pub(crate) fn row(&self, i: usize) -> Vec<u8> {
        let mut row = vec![0; self.k / BLOCK * self.ty.block_bytes()];
        let weave = weave_of(self.ty).expect("it was woven");
        let (lines, r) = (self.rows(i / ROWS * ROWS).sixteen(0), i % ROWS);
        for (b, block) in row.chunks_exact_mut(self.ty.block_bytes()).enumerate() {
            let (heads, codes) = block.split_at_mut(weave.head());
            for (h, head) in heads.chunks_exact_mut(weave.head_bytes).enumerate() {
                let at = weave.place_of_head(b, h) + weave.head_bytes * r;
                head.copy_from_slice(&lines[weave.line_of_heads(b)].0[at..][..weave.head_bytes]);
            }
            for (four, line) in codes.as_chunks_mut::<4>().0.iter_mut().zip(&lines[weave.line_of_codes(b)..]) {
                let woven = line.0[4 * r..].first_chunk().expect("four bytes of each row");
                *four = (u32::from_le_bytes(*woven) ^ weave.flip).to_le_bytes();
            }
        }
        row
    }
}

impl<'a> WovenRows<'a> {
    /// Their type.
    pub(super) fn ty(&self) -> TensorType {
        self.woven.ty
    }

    /// Blocks of a row.
    pub(super) fn blocks(&self) -> usize {
        self.woven.k / BLOCK
    }

    /// The vectors of the i-th sixteen rows.
    pub(super) fn sixteen(&self, i: usize) -> &'a [Line] {
        let each = weave_of(self.woven.ty).expect("it was woven").lines_of(self.blocks());
        &self.woven.lines()[(self.first + i) * each..][..each]
    }
}

#[cfg(test)]
mod tests {
    use super::super::cpu_woven_dots::Spread;
    use super::*;
    use crate::host::HostMemory;
    use crate::mul_mat::Product;
    use crate::mul_mat_vec::Call;
    use crate::mul_mat_vec::cpu_codes::tests::blocks;
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

    /// Rows woven into pages of their own, behind others.
    fn woven(ty: TensorType, k: usize, bytes: &[u8]) -> Option<Woven> {
        let range = 128..128 + Woven::room(ty, k, bytes.len())?;
        let mut pages = Pages::new(range.end).expect("some memory");
        Woven::weave(ty, k, bytes, &mut pages.bytes_mut()[range.clone()]);
        Some(Woven::new(ty, k, Arc::new(pages), range))
    }

    /// Products of a matrix whose slot was woven, against plain sums.
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
        let woven = memory.weave(Slot(0), ty, k);
        if crate::simd::level().as_avx512().is_none() {
            return assert!(!woven);
        }
        assert!(woven && memory.woven(&a).is_some());
        // Who reads what was woven reads no more of what it was made of, but for columns that are no columns of integers.
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
    fn woven_rows_are_the_same_matrix_for_few_columns_and_many() {
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
            assert!(Woven::room(ty, 96, bytes.len() - row).is_none());
            let Some(woven) = woven(ty, 96, &bytes) else { return };
            for i in [0, 15, 16, 39, 47] {
                assert_eq!(woven.row(i), bytes[i * row..][..row], "{ty} {i}");
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
            let woven = woven(ty, K, &bytes).expect("a type that is woven");
            let rows = woven.rows(16);
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
    fn parts_that_begin_between_woven_rows_are_read_as_they_lie() {
        let (bytes, _) = blocks(TensorType::Q4_0, 48 * 64, 3);
        let a = Tensor::dense(Slot(0), TensorType::Q4_0, [64, 48, 1, 1]);
        let mut memory = HostMemory { slots: vec![bytes], ..HostMemory::default() };
        if memory.weave(Slot(0), TensorType::Q4_0, 64) {
            assert!(memory.woven(&a.narrow(1, 16, 32)).is_some());
            assert!(memory.woven(&a.narrow(1, 8, 32)).is_none());
            assert!(memory.woven(&a.narrow(1, 16, 8)).is_none());
            assert!(memory.woven(&a.narrow(0, 0, 32)).is_none());
        }
    }
}
