//! Products of bytes on 64-bit ARM, where the machine and the compiler know the instructions for them (`build.rs` asks the compiler).
//! A rounded element of an activation vector is two bytes with signs, 128 high + low, and codes are bytes as they are. Dot products add four
//! products to each of four sums; i8mm multiplies small matrices (`cpu_matrices.rs`).

use std::arch::aarch64::{
    int8x16_t, int16x8_t, int32x4_t, vcombine_s8, vcvtq_f32_s32, vdotq_laneq_s32, vdotq_s32, vdupq_n_f32, vdupq_n_s8,
    vdupq_n_s32, vfmaq_n_f32, vmovn_s16, vmulq_f32, vrshrn_n_s16, vshll_n_s8, vshlq_n_s32, vsubq_s16,
};
use std::arch::is_aarch64_feature_detected;
use std::array::from_fn;
use std::ops::Range;

use fearless_simd::prelude::*;
use fearless_simd::{Neon, dispatch, i8x16, i16x8};
use multiversion::multiversion;
use multiversion::target::match_target;

use super::cpu_ints::{DEPTH, Ints, LONG, Panels, add_products};
#[cfg(arm_i8mm)]
use super::cpu_matrices::meet_by_matrices;
use super::cpu_neon::{floats, store};
use super::cpu_quants::{BLOCK, BytePiece, Coder};
use super::cpu_rows::Rows;
use crate::simd::{Layout, level, load, multiply};

/// Activations of a panel.
pub(super) const WIDTH: usize = 8;
/// Bytes of a block of a panel: high and low ones of thirty-two elements of each activation vector.
const BLOCK_BYTES: usize = 2 * BLOCK * WIDTH;

/// Whether the machine has dot products.
pub(super) fn has_dots() -> bool {
    is_aarch64_feature_detected!("dotprod")
}

/// Whether products of small matrices can be used.
fn has_matrices() -> bool {
    cfg!(arm_i8mm) && is_aarch64_feature_detected!("i8mm")
}

/// A block of an activation vector: its high bytes, then its low ones.
type Block = [[i8; BLOCK]; 2];

fearless_simd::kernel!(
    /// High and low bytes of eight rounded elements.
    #[inline(always)]
    fn split(neon: Neon, codes: &[i16; 8]) -> [i8x16<Neon>; 2] {
        let codes: int16x8_t = i16x8::load_array_ref(neon, codes).into();
        let highs = vrshrn_n_s16::<7>(codes);
        let lows = vmovn_s16(vsubq_s16(codes, vshll_n_s8::<7>(highs)));
        [vcombine_s8(highs, highs).simd_into(neon), vcombine_s8(lows, lows).simd_into(neon)]
    }
);

/// Rounded elements as blocks.
fn split_blocks(codes: &[i16], blocks: &mut [Block]) {
    let neon = level().as_neon().expect("every 64-bit ARM machine has NEON");
    for (codes, block) in codes.as_chunks::<BLOCK>().0.iter().zip(blocks) {
        for (i, codes) in codes.as_chunks::<8>().0.iter().enumerate() {
            for (part, bytes) in block.iter_mut().zip(split(neon, codes)) {
                part[8 * i..][..8].copy_from_slice(&bytes.to_array()[..8]);
            }
        }
    }
}

/// A few rounded activations, one after the other.
pub(super) struct ByteColumns {
    blocks: Vec<Block>,
    ints: Ints,
}

impl ByteColumns {
    /// Activations of `k` elements, whole blocks.
    pub(super) fn new(k: usize, columns: &[f32]) -> ByteColumns {
        let mut ints = Ints::new(k, columns.chunks_exact(k));
        let mut blocks = vec![[[0; BLOCK]; 2]; ints.codes.len() / BLOCK];
        split_blocks(&ints.codes, &mut blocks);
        ints.codes = Vec::new();
        ByteColumns { blocks, ints }
    }

    /// Activations whose products should be made by floats.
    pub(super) fn unfit(&self) -> &[usize] {
        &self.ints.unfit
    }

    /// Rows times all activations: the results of a row lie side by side.
    pub(super) fn dots(&self, coder: Coder, rows: Rows<'_>, out: &mut [f32]) {
        let k = self.ints.k;
        let n = self.blocks.len() * BLOCK / k;
        let (mut codes, mut scales, mut offsets) = ([0; LONG], [0.0; LONG / 16], [0.0; LONG / 16]);
        // Short rows that lie side by side become codes together.
        let most = if rows.stride == rows.row_bytes { (LONG / k).max(1) } else { 1 };
        let mut sums = vec![[0.0; 16]; most * n];
        for (chunk, out) in out.chunks_mut(most * n).enumerate() {
            let count = out.len() / n;
            sums.fill([0.0; 16]);
            for start in (0..k).step_by(LONG) {
                let depth = LONG.min(k - start);
                let codes = &mut codes[..count * depth];
                let (scales, offsets) = (&mut scales[..codes.len() / 16], &mut offsets[..codes.len() / 16]);
                let bytes = rows.pieces(chunk * most, count, start, depth);
                (coder.fill_bytes)(bytes, BytePiece { codes, scales, offsets });
                for (i, sums) in sums.iter_mut().take(count * n).enumerate() {
                    let (from, at) = (i / n * depth, i % n * k + start);
                    let blocks = at / BLOCK..(at + depth) / BLOCK;
                    let a = (&codes[from..][..depth], &scales[from / 16..][..depth / 16]);
                    let x = (&self.blocks[blocks.clone()], &self.ints.scales[blocks.clone()]);
                    add_dots(a, x, coder.two_scales, sums);
                    if coder.offsets > 0 {
                        let (offsets, x_sums) =
                            (&offsets[from / 16..][..depth / 16], &self.ints.sums[at / 16..][..depth / 16]);
                        dispatch!(level(), simd => add_products(simd, offsets, x_sums, sums));
                    }
                }
            }
            dispatch!(level(), simd => {
                out.iter_mut().zip(&sums).for_each(|(out, sums)| *out = load(simd, sums).reduce_sum());
            });
        }
    }
}

/// Adds the products of a piece of a row, codes and scales, and of an activation vector to the first four of sixteen partial sums.
#[multiversion(targets("aarch64+neon+dotprod"))]
fn add_dots(a: (&[i8], &[f32]), x: (&[Block], &[f32]), two_scales: bool, sums: &mut [f32; 16]) {
    match_target! {
        "aarch64+neon+dotprod" => match two_scales {
            true => add_dots_of::<true>(a, x, sums),
            false => add_dots_of::<false>(a, x, sums),
        },
        _ => unreachable!("bytes are multiplied only where there are instructions for that: {two_scales} {a:?} {x:?} {sums:?}"),
    }
}

#[inline]
#[target_feature(enable = "neon,dotprod")]
fn add_dots_of<const TWO: bool>(
    (codes, scales): (&[i8], &[f32]),
    (blocks, x_scales): (&[Block], &[f32]),
    sums: &mut [f32; 16],
) {
    let neon = Neon::assume_supported();
    let (mut sum, none) = (floats(neon, sums), vdupq_n_s32(0));
    let a = codes.as_chunks::<BLOCK>().0.iter().zip(scales.as_chunks::<2>().0);
    for ((codes, scales), (block, x_scale)) in a.zip(blocks.iter().zip(x_scales)) {
        let [a, b] = [bytes(neon, codes), bytes(neon, &codes[16..])];
        let [[high_a, high_b], [low_a, low_b]] = [
            [bytes(neon, &block[0]), bytes(neon, &block[0][16..])],
            [bytes(neon, &block[1]), bytes(neon, &block[1][16..])],
        ];
        if TWO {
            let first = vdotq_s32(vshlq_n_s32::<7>(vdotq_s32(none, a, high_a)), a, low_a);
            let second = vdotq_s32(vshlq_n_s32::<7>(vdotq_s32(none, b, high_b)), b, low_b);
            sum = vfmaq_n_f32(sum, vcvtq_f32_s32(first), scales[0] * x_scale);
            sum = vfmaq_n_f32(sum, vcvtq_f32_s32(second), scales[1] * x_scale);
        } else {
            let highs = vshlq_n_s32::<7>(vdotq_s32(vdotq_s32(none, a, high_a), b, high_b));
            let whole = vdotq_s32(vdotq_s32(highs, a, low_a), b, low_b);
            sum = vfmaq_n_f32(sum, vcvtq_f32_s32(whole), scales[0] * x_scale);
        }
    }
    store(neon, sum, sums);
}

#[inline(always)]
pub(super) fn bytes(neon: Neon, x: &[i8]) -> int8x16_t {
    i8x16::load_array_ref(neon, x.first_chunk().expect("sixteen bytes")).into()
}

/// A rounded activation vector as it becomes an activation vector of a panel: pieces of four bytes, held as the floats that have their bits. The eight high
/// pieces of each block come before the low ones.
pub(super) fn pieces(codes: &[i16]) -> Vec<f32> {
    let mut pieces = vec![0.0f32; codes.len() / 2];
    let bytes: &mut [i8] = bytemuck::cast_slice_mut(&mut pieces);
    split_blocks(codes, bytes.as_chunks_mut().0.as_chunks_mut().0);
    pieces
}

/// Brings a panel into the form that the machine multiplies: small matrices take eight bytes of an activation vector, not four.
pub(super) fn arrange(panel: &mut [f32]) {
    if has_matrices() {
        for rows in panel.as_chunks_mut::<{ 2 * WIDTH }>().0 {
            *rows = from_fn(|i| rows[i % 2 * WIDTH + i / 2]);
        }
    }
}

/// Pieces of rows: codes, [`DEPTH`] apart, and two scales for each block, 16 apart.
#[derive(Clone, Copy)]
pub(super) struct Weights<'a> {
    pub codes: &'a [i8],
    pub scales: &'a [f32],
    /// Whether the two scales of a block may differ.
    pub two_scales: bool,
}

/// The same piece of a panel, and how many of its activations there are.
#[derive(Clone, Copy)]
pub(super) struct Panel<'a> {
    pub blocks: &'a [[i8; BLOCK_BYTES]],
    pub scales: &'a [[f32; WIDTH]],
    pub used: usize,
}

/// Where results go.
pub(super) struct Results<'a> {
    pub out: &'a mut [f32],
    pub stride: usize,
    pub rows: usize,
    /// Whether they are added to what is there.
    pub add: bool,
}

/// See [`Panels::tiles`].
pub(super) fn tiles(
    all: &Panels,
    panels: Range<usize>,
    n: usize,
    coder: Coder,
    rows: Rows<'_>,
    (out, stride): (&mut [f32], usize),
) {
    let (k, n_rows, blocks) = (all.k, out.len() / stride, all.k / BLOCK);
    let mut codes = vec![0i8; n_rows * DEPTH];
    let (mut scales, mut offsets) = (vec![0.0f32; n_rows * 16], vec![0.0f32; n_rows * 16]);
    for start in (0..k).step_by(DEPTH) {
        let depth = DEPTH.min(k - start);
        let parts = codes.chunks_exact_mut(DEPTH).zip(scales.chunks_exact_mut(16));
        for (i, ((codes, scales), offsets)) in parts.zip(offsets.chunks_exact_mut(16)).enumerate() {
            let (codes, scales, offsets) = (&mut codes[..depth], &mut scales[..depth / 16], &mut offsets[..depth / 16]);
            (coder.fill_bytes)(rows.piece(i, start, depth), BytePiece { codes, scales, offsets });
        }
        let a = Weights { codes: &codes, scales: &scales, two_scales: coder.two_scales };
        for (i, p) in panels.clone().enumerate() {
            let piece = p * blocks + start / BLOCK..p * blocks + (start + depth) / BLOCK;
            let x = Panel {
                blocks: &bytemuck::cast_slice(&all.codes).as_chunks().0[piece.clone()],
                scales: &all.scales.as_chunks().0[piece.clone()],
                used: n - i * WIDTH,
            };
            let out = &mut out[i * WIDTH..];
            let results = Results { out, stride, rows: n_rows, add: start > 0 };
            #[cfg(arm_i8mm)]
            if has_matrices() {
                meet_by_matrices(a, x, results);
            } else {
                meet_by_dots(a, x, results);
            }
            #[cfg(not(arm_i8mm))]
            meet_by_dots(a, x, results);
        }
        if coder.offsets == 1 {
            // Both of a pair are the same.
            for offsets in offsets.chunks_exact_mut(16) {
                (0..8).for_each(|b| offsets[b] = offsets[2 * b]);
            }
        }
        let each = coder.offsets;
        for (i, p) in panels.clone().enumerate().take(if each > 0 { panels.len() } else { 0 }) {
            let layout =
                Layout { depth: each * depth / BLOCK, a_stride: 16, b_stride: WIDTH, c_stride: stride, add: true };
            let sums = &all.sums[2 - each][(p * blocks + start / BLOCK) * each * WIDTH..];
            let cols = if n - i * WIDTH > 4 { WIDTH } else { WIDTH / 2 };
            dispatch!(level(), simd => multiply(simd, [n_rows, cols], layout, &offsets, sums, &mut out[i * WIDTH..]));
        }
    }
}

/// Rows times a panel by dot products.
#[multiversion(targets("aarch64+neon+dotprod"))]
fn meet_by_dots(a: Weights<'_>, x: Panel<'_>, results: Results<'_>) {
    match_target! {
        "aarch64+neon+dotprod" => match (a.two_scales, x.used > 4) {
            (false, false) => dot_tiles::<1, false>(a, x, results),
            (false, true) => dot_tiles::<2, false>(a, x, results),
            (true, false) => dot_tiles::<1, true>(a, x, results),
            (true, true) => dot_tiles::<2, true>(a, x, results),
        },
        _ => unreachable!("bytes are multiplied only where there are instructions for that: {} {} {}", a.two_scales, x.used, results.rows),
    }
}

#[inline]
#[target_feature(enable = "neon,dotprod")]
fn dot_tiles<const WIDE: usize, const TWO: bool>(a: Weights<'_>, x: Panel<'_>, results: Results<'_>) {
    let Results { out, stride, rows, add } = results;
    let mut row = 0;
    while row < rows {
        let a = Weights { codes: &a.codes[row * DEPTH..], scales: &a.scales[row * 16..], ..a };
        let results = Results { out: &mut out[row * stride..], stride, rows: rows - row, add };
        row += match rows - row {
            4.. => dot_tile::<4, WIDE, TWO>(a, x, results),
            _ => dot_tile::<1, WIDE, TWO>(a, x, results),
        };
    }
}

/// `ROWS` rows times `WIDE` times four activations; gives the number of rows.
#[inline]
#[target_feature(enable = "neon,dotprod")]
fn dot_tile<const ROWS: usize, const WIDE: usize, const TWO: bool>(
    a: Weights<'_>,
    x: Panel<'_>,
    results: Results<'_>,
) -> usize {
    let neon = Neon::assume_supported();
    let Results { out, stride, add, .. } = results;
    let mut sums = [[vdupq_n_f32(0.0); WIDE]; ROWS];
    if add {
        for r in 0..ROWS {
            for w in 0..WIDE {
                sums[r][w] = floats(neon, &out[r * stride + 4 * w..]);
            }
        }
    }
    for (b, (block, x_scales)) in x.blocks.iter().zip(x.scales).enumerate() {
        // Not by a closure: such are not compiled into the function that has the instructions.
        let mut codes = [[vdupq_n_s8(0); 2]; ROWS];
        for (r, codes) in codes.iter_mut().enumerate() {
            let row = &a.codes[r * DEPTH + b * BLOCK..][..BLOCK];
            *codes = [bytes(neon, row), bytes(neon, &row[16..])];
        }
        let mut whole = [[vdupq_n_s32(0); WIDE]; ROWS];
        // Adds the products of four elements of a half, the high or the low bytes.
        macro_rules! add_four {
            ($part:literal, $half:literal, $lane:literal) => {
                for w in 0..WIDE {
                    let x = bytes(neon, &block[(8 * $part + 4 * $half + $lane) * 4 * WIDTH + 16 * w..]);
                    for r in 0..ROWS {
                        whole[r][w] = vdotq_laneq_s32::<$lane>(whole[r][w], x, codes[r][$half]);
                    }
                }
            };
        }
        macro_rules! add_half {
            ($part:literal, $half:literal) => {
                add_four!($part, $half, 0);
                add_four!($part, $half, 1);
                add_four!($part, $half, 2);
                add_four!($part, $half, 3);
            };
        }
        macro_rules! end {
            ($scale:literal) => {
                for r in 0..ROWS {
                    for w in 0..WIDE {
                        let product = vmulq_f32(vcvtq_f32_s32(whole[r][w]), floats(neon, &x_scales[4 * w..]));
                        sums[r][w] = vfmaq_n_f32(sums[r][w], product, a.scales[r * 16 + 2 * b + $scale]);
                    }
                }
            };
        }
        if TWO {
            add_half!(0, 0);
            whole = raised(whole);
            add_half!(1, 0);
            end!(0);
            whole = [[vdupq_n_s32(0); WIDE]; ROWS];
            add_half!(0, 1);
            whole = raised(whole);
            add_half!(1, 1);
            end!(1);
        } else {
            add_half!(0, 0);
            add_half!(0, 1);
            whole = raised(whole);
            add_half!(1, 0);
            add_half!(1, 1);
            end!(0);
        }
    }
    for r in 0..ROWS {
        for w in 0..WIDE {
            store(neon, sums[r][w], &mut out[r * stride + 4 * w..]);
        }
    }
    ROWS
}

/// 128 times each number.
#[inline]
#[target_feature(enable = "neon")]
pub(super) fn raised<const N: usize, const M: usize>(mut whole: [[int32x4_t; N]; M]) -> [[int32x4_t; N]; M] {
    for row in &mut whole {
        for x in row {
            *x = vshlq_n_s32::<7>(*x);
        }
    }
    whole
}
