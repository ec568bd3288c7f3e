//! Rows of a matrix woven together, sixteen at a time, for machines with AVX-512: a vector holds four elements of each of sixteen
//! rows, so that products need no sums across a vector and scales of sixteen rows are read at once. Made when a model is loaded, of
//! the same size as before. Many columns meet woven rows in `cpu_tiles.rs`.

use std::arch::x86_64::__m512i;
use std::array::from_fn;

use fearless_simd::prelude::*;
use fearless_simd::{Avx512, f32x16, u8x32, u8x64};
use kiln_gguf::TensorType;
use kiln_system::instructions::fetch;
use rayon::prelude::*;

use super::cpu_codes::BLOCK;
use super::cpu_runs::{ColumnRun, RUN, RunColumns};
use super::cpu_wide::{and, bits, by_128, dot, four_everywhere, halves_of, sum, take, to_floats, zeros};

pub(super) use super::cpu_tiles::{TiledColumns, has_tiles};

/// Rows that are woven together.
pub(super) const ROWS: usize = 16;
/// Bytes ahead of which memory is fetched. The machine's own guesses end with every page, and come late where so little is done with
/// every byte (Sapphire Rapids: a quarter faster from the last cache).
const AHEAD: usize = 2048;

/// A vector. All of them lie where the machine reads them in one piece.
#[derive(Clone, Copy, Debug)]
#[repr(align(64))]
struct Line([u8; 64]);

/// Rows of `k` elements, woven together. Of each sixteen rows first the codes of every block, then their half floats.
#[derive(Debug)]
pub(crate) struct Woven {
    ty: TensorType,
    k: usize,
    lines: Vec<Line>,
}

/// How blocks of a type are woven.
#[derive(Clone, Copy)]
pub(super) struct Weave {
    /// Half floats of a block; its bytes follow.
    heads: usize,
    /// Vectors of codes.
    lines: usize,
    /// What is changed in every four bytes of codes.
    flip: u32,
}

impl Weave {
    fn of(ty: TensorType) -> Option<Weave> {
        match ty {
            TensorType::Q4_0 => Some(Nibbles::<8>::WEAVE),
            TensorType::Q4_1 => Some(LeastNibbles::WEAVE),
            TensorType::Q8_0 => Some(Bytes::WEAVE),
            _ => None,
        }
    }

    /// Vectors of sixteen rows of so many blocks.
    fn lines_of(self, blocks: usize) -> usize {
        blocks * self.lines + (blocks * self.heads).div_ceil(2)
    }

    /// Where half float `head` of a block lies: which vector of the sixteen rows, and which half of it.
    #[inline(always)]
    fn head(self, blocks: usize, block: usize, head: usize) -> (usize, usize) {
        let at = block * self.heads + head;
        (blocks * self.lines + at / 2, at % 2)
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
    /// Weaves dense rows of `k` elements, if that is done with their type and number and the machine gains by it.
    pub(crate) fn new(ty: TensorType, k: usize, bytes: &[u8]) -> Option<Woven> {
        crate::simd::level().as_avx512()?;
        let (weave, row_bytes) = (Weave::of(ty)?, ty.row_bytes(k)?);
        if k == 0 || bytes.is_empty() || !bytes.len().is_multiple_of(ROWS * row_bytes) {
            return None;
        }
        let (blocks, block_bytes) = (k / BLOCK, ty.block_bytes());
        let each = weave.lines_of(blocks);
        let mut lines = vec![Line([0; 64]); bytes.len() / (ROWS * row_bytes) * each];
        let parts = lines.par_chunks_exact_mut(each).zip(bytes.par_chunks_exact(ROWS * row_bytes));
        parts.for_each(|(lines, rows)| {
            for (r, row) in rows.chunks_exact(row_bytes).enumerate() {
                for (b, block) in row.chunks_exact(block_bytes).enumerate() {
                    let (heads, codes) = block.split_at(2 * weave.heads);
                    for (h, head) in heads.as_chunks::<2>().0.iter().enumerate() {
                        let (line, half) = weave.head(blocks, b, h);
                        lines[line].0[32 * half + 2 * r..][..2].copy_from_slice(head);
                    }
                    for (line, four) in lines[b * weave.lines..].iter_mut().zip(codes.as_chunks::<4>().0) {
                        let four = (u32::from_le_bytes(*four) ^ weave.flip).to_le_bytes();
                        line.0[4 * r..][..4].copy_from_slice(&four);
                    }
                }
            }
        });
        Some(Woven { ty, k, lines })
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
}

impl Woven {
    /// One row as it lies in a file.
    pub(crate) fn row(&self, i: usize) -> Vec<u8> {
        let mut row = vec![0; self.k / BLOCK * self.ty.block_bytes()];
        self.rows(i / ROWS * ROWS).unweave(i % ROWS, &mut row);
        row
    }
}

impl<'a> WovenRows<'a> {
    fn weave(&self) -> Weave {
        Weave::of(self.woven.ty).expect("it was woven")
    }

    /// Blocks of a row.
    pub(super) fn blocks(&self) -> usize {
        self.woven.k / BLOCK
    }

    /// The vectors of the i-th sixteen rows.
    fn sixteen(&self, i: usize) -> &'a [Line] {
        let each = self.weave().lines_of(self.blocks());
        &self.woven.lines[(self.first + i) * each..][..each]
    }

    /// So many rows as they lie in a file.
    pub(super) fn unwoven(&self, rows: usize) -> Vec<u8> {
        let row_bytes = self.blocks() * self.woven.ty.block_bytes();
        let mut bytes = vec![0; rows * row_bytes];
        bytes.chunks_exact_mut(row_bytes).enumerate().for_each(|(r, row)| self.unweave(r, row));
        bytes
    }

    /// Row number `r` of these as it lies in a file.
    fn unweave(&self, r: usize, row: &mut [u8]) {
        let (weave, blocks) = (self.weave(), self.blocks());
        let (lines, r) = (self.sixteen(r / ROWS), r % ROWS);
        for (b, block) in row.chunks_exact_mut(self.woven.ty.block_bytes()).enumerate() {
            let (heads, codes) = block.split_at_mut(2 * weave.heads);
            for (h, head) in heads.as_chunks_mut::<2>().0.iter_mut().enumerate() {
                let (line, half) = weave.head(blocks, b, h);
                head.copy_from_slice(&lines[line].0[32 * half + 2 * r..][..2]);
            }
            for (four, line) in codes.as_chunks_mut::<4>().0.iter_mut().zip(&lines[b * weave.lines..]) {
                let woven = line.0[4 * r..].first_chunk().expect("four bytes of each row");
                *four = (u32::from_le_bytes(*woven) ^ weave.flip).to_le_bytes();
            }
        }
    }

    /// Rows times all columns: the results of a row lie side by side.
    pub(super) fn dots(self, simd: Avx512, columns: &RunColumns, out: &mut [f32]) {
        match self.woven.ty {
            TensorType::Q4_0 => dots::<Nibbles<8>>(simd, self, columns, out),
            TensorType::Q4_1 => dots::<LeastNibbles>(simd, self, columns, out),
            _ => dots::<Bytes>(simd, self, columns, out),
        }
    }

    /// Codes of the i-th sixteen rows as bytes with a sign, scales and offsets: of one block after the other.
    pub(super) fn spread(&self, simd: Avx512, i: usize, to: &mut Spread) {
        match self.woven.ty {
            TensorType::Q4_0 => spread::<Nibbles<8>>(simd, self.sixteen(i), to),
            TensorType::Q4_1 => spread::<LeastNibbles>(simd, self.sixteen(i), to),
            _ => spread::<Bytes>(simd, self.sixteen(i), to),
        }
    }

    /// Whether blocks have offsets.
    pub(super) fn has_offsets(&self) -> bool {
        self.weave().heads == 2
    }
}

/// What [`WovenRows::spread`] makes of sixteen rows, for each block.
pub(super) struct Spread {
    /// The first four elements of each row, then the next four.
    pub codes: Vec<[u8; ROWS * BLOCK]>,
    pub scales: Vec<[f32; ROWS]>,
    pub offsets: Vec<[f32; ROWS]>,
}

/// A woven type: element e of a block is `scale (code(e) - ZERO) + offset`.
trait Format {
    const WEAVE: Weave;
    const ZERO: u8;

    /// Elements `4 i .. 4 i + 4` of every row for each i.
    fn codes(simd: Avx512, lines: &[Line]) -> [__m512i; 8];
}

#[inline(always)]
fn vector(simd: Avx512, line: &Line) -> __m512i {
    u8x64::load_array_ref(simd, &line.0).into()
}

#[inline(always)]
fn nibbles(simd: Avx512, lines: &[Line]) -> [__m512i; 8] {
    let [a, b, c, d] = lines.first_chunk().expect("four vectors of a block");
    let [a, b, c, d] = [vector(simd, a), vector(simd, b), vector(simd, c), vector(simd, d)];
    let [e, f, g, h] = [high(simd, a), high(simd, b), high(simd, c), high(simd, d)];
    [and(simd, a, 15), and(simd, b, 15), and(simd, c, 15), and(simd, d, 15), e, f, g, h]
}

#[inline(always)]
fn high(simd: Avx512, bytes: __m512i) -> __m512i {
    const HIGH: [u64; 8] = [take(4, 4, 0); 8];
    bits(simd, bytes, &HIGH)
}

struct Nibbles<const ZERO: u8>;

impl<const ZERO: u8> Format for Nibbles<ZERO> {
    const WEAVE: Weave = Weave { heads: 1, lines: 4, flip: 0 };
    const ZERO: u8 = ZERO;

    #[inline(always)]
    fn codes(simd: Avx512, lines: &[Line]) -> [__m512i; 8] {
        nibbles(simd, lines)
    }
}

struct LeastNibbles;

impl Format for LeastNibbles {
    const WEAVE: Weave = Weave { heads: 2, lines: 4, flip: 0 };
    const ZERO: u8 = 0;

    #[inline(always)]
    fn codes(simd: Avx512, lines: &[Line]) -> [__m512i; 8] {
        nibbles(simd, lines)
    }
}

struct Bytes;

impl Format for Bytes {
    const WEAVE: Weave = Weave { heads: 1, lines: 8, flip: 0x8080_8080 };
    const ZERO: u8 = 128;

    #[inline(always)]
    fn codes(simd: Avx512, lines: &[Line]) -> [__m512i; 8] {
        let [a, b, c, d, e, f, g, h] = lines.first_chunk().expect("eight vectors of a block");
        let [a, b, c, d] = [vector(simd, a), vector(simd, b), vector(simd, c), vector(simd, d)];
        [a, b, c, d, vector(simd, e), vector(simd, f), vector(simd, g), vector(simd, h)]
    }
}

/// A half float of each row.
#[inline(always)]
fn head<F: Format>(simd: Avx512, lines: &[Line], blocks: usize, block: usize, head: usize) -> f32x16<Avx512> {
    let (line, half) = F::WEAVE.head(blocks, block, head);
    let words = &lines[line].0[32 * half..];
    halves_of(simd, u8x32::load_array_ref(simd, words.first_chunk().expect("half a vector")))
}

#[inline(never)]
fn dots<F: Format>(simd: Avx512, rows: WovenRows<'_>, columns: &RunColumns, out: &mut [f32]) {
    simd.vectorize(
        #[inline(always)]
        || {
            let n = columns.count();
            for (i, out) in out.chunks_exact_mut(ROWS * n).enumerate() {
                let lines = rows.sixteen(i);
                if n == 1 {
                    let [sums] = meet::<F, 1>(simd, lines, rows.blocks(), [columns.column(0)]);
                    sums.store_slice(out);
                    continue;
                }
                let mut c = 0;
                while c < n {
                    if n - c >= 4 {
                        let sums = meet::<F, 4>(simd, lines, rows.blocks(), from_fn(|i| columns.column(c + i)));
                        sums.iter().enumerate().for_each(|(i, sums)| put(&sums.to_array(), out, n, c + i));
                        c += 4;
                    } else {
                        let [sums] = meet::<F, 1>(simd, lines, rows.blocks(), [columns.column(c)]);
                        put(&sums.to_array(), out, n, c);
                        c += 1;
                    }
                }
            }
        },
    );
}

/// The results of column `c` for sixteen rows.
fn put(sums: &[f32; ROWS], out: &mut [f32], n: usize, c: usize) {
    sums.iter().zip(out.chunks_exact_mut(n)).for_each(|(sum, out)| out[c] = *sum);
}

/// Sixteen rows times `N` columns. A result's bits do not depend on the columns beside it.
#[inline(always)]
#[allow(clippy::needless_range_loop, reason = "codes and bytes of columns go together")]
fn meet<F: Format, const N: usize>(
    simd: Avx512,
    lines: &[Line],
    blocks: usize,
    columns: [&[ColumnRun]; N],
) -> [f32x16<Avx512>; N] {
    let nothing = [f32x16::splat(simd, 0.0); N];
    let (mut sums, mut zero_sums, mut offset_sums) = (nothing, nothing, nothing);
    let each = F::WEAVE.lines;
    for b in 0..blocks {
        let (run, at) = (b / (RUN / BLOCK), b % (RUN / BLOCK));
        let own = &lines[b * each..][..each];
        for line in own {
            fetch(&line.0, AHEAD);
        }
        let codes = F::codes(simd, own);
        let scales = head::<F>(simd, lines, blocks, b, 0);
        fetch(&lines[F::WEAVE.head(blocks, b, 0).0].0, AHEAD);
        for c in 0..N {
            let x = &columns[c][run];
            let (highs, lows) = (x.block_of_highs(at), x.block_of_lows(at));
            let (mut high, mut low) = (zeros(simd), zeros(simd));
            for i in 0..8 {
                high = dot(simd, high, codes[i], four_everywhere(simd, four(highs, i)));
                low = dot(simd, low, codes[i], four_everywhere(simd, four(lows, i)));
            }
            let whole = to_floats(simd, sum(simd, by_128(simd, high), low));
            let factors = scales * f32x16::splat(simd, x.scales[2 * at]);
            sums[c] = whole.mul_add(factors, sums[c]);
            if F::ZERO > 0 {
                zero_sums[c] = scales.mul_add(f32x16::splat(simd, x.wholes_of_blocks[at]), zero_sums[c]);
            }
            if F::WEAVE.heads == 2 {
                let offsets = head::<F>(simd, lines, blocks, b, 1);
                offset_sums[c] = offsets.mul_add(f32x16::splat(simd, x.sums_of_blocks[at]), offset_sums[c]);
            }
        }
    }
    for c in 0..N {
        if F::ZERO > 0 {
            sums[c] = zero_sums[c].mul_add(f32x16::splat(simd, -f32::from(F::ZERO)), sums[c]);
        }
        if F::WEAVE.heads == 2 {
            sums[c] += offset_sums[c];
        }
    }
    sums
}

/// Four bytes as one number.
#[inline(always)]
fn four(bytes: &[u8; BLOCK], i: usize) -> i32 {
    i32::from_le_bytes([bytes[4 * i], bytes[4 * i + 1], bytes[4 * i + 2], bytes[4 * i + 3]])
}

#[inline(never)]
fn spread<F: Format>(simd: Avx512, lines: &[Line], to: &mut Spread) {
    simd.vectorize(
        #[inline(always)]
        || {
            let blocks = to.codes.len();
            for b in 0..blocks {
                let own = &lines[b * F::WEAVE.lines..];
                own[..F::WEAVE.lines].iter().for_each(|line| fetch(&line.0, AHEAD));
                let codes = F::codes(simd, own);
                for (codes, to) in codes.into_iter().zip(to.codes[b].as_chunks_mut::<64>().0) {
                    let codes: u8x64<Avx512> = codes.simd_into(simd);
                    (codes - u8x64::splat(simd, F::ZERO)).store_array(to);
                }
                head::<F>(simd, lines, blocks, b, 0).store_array(&mut to.scales[b]);
                if F::WEAVE.heads == 2 {
                    head::<F>(simd, lines, blocks, b, 1).store_array(&mut to.offsets[b]);
                }
            }
        },
    );
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::host::HostMemory;
    use crate::mul_mat::Product;
    use crate::mul_mat_vec::Call;
    use crate::mul_mat_vec::cpu_codes::tests::blocks;
    use crate::operation::Operation as _;
    use crate::tensor::{Slot, Tensor};

    const TYPES: [TensorType; 3] = [TensorType::Q4_0, TensorType::Q4_1, TensorType::Q8_0];

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
            assert!((f64::from(*got) - want).abs() <= 1e-3 * size, "{ty} {k} {m} {n}: {got}, not {want}, at {i}");
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
            let Some(woven) = Woven::new(ty, 96, &bytes) else { return };
            let row = ty.row_bytes(96).unwrap();
            assert_eq!(woven.rows(16).unwoven(20), bytes[16 * row..][..20 * row], "{ty}");
            assert_eq!(woven.row(39), bytes[39 * row..][..row], "{ty}");
            assert!(Woven::new(ty, 96, &bytes[row..]).is_none());
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
