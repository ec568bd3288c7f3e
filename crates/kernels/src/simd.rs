//! Vector arithmetic of the CPU executor: the widest instructions the machine has, found when the program runs. Functions
//! that take a token of `fearless_simd` are compiled once for each instruction set; callers enter through `dispatch!`.

use std::sync::OnceLock;

use fearless_simd::prelude::*;
use fearless_simd::{Level, Simd, f32x4, f32x16, i32x16, u32x16};

/// The instructions of this machine.
pub(crate) fn level() -> Level {
    static LEVEL: OnceLock<Level> = OnceLock::new();
    *LEVEL.get_or_init(Level::new)
}

/// A half float that is finite: scales of blocks and weights, which are looked at when a model is loaded. Infinities
/// would become large numbers.
#[inline(always)]
pub(crate) fn finite_half(bits: u16) -> f32 {
    // The exponent is shifted into place and rebiased by a multiplication, which gets subnormals right as well.
    let magnitude = f32::from_bits(u32::from(bits & 0x7fff) << 13) * f32::from_bits(0x7780_0000);
    f32::from_bits(magnitude.to_bits() | u32::from(bits & 0x8000) << 16)
}

/// Any half float.
#[inline(always)]
pub(crate) fn half(bits: u16) -> f32 {
    let special = if bits & 0x7c00 == 0x7c00 { 0x7f80_0000 } else { 0 };
    f32::from_bits(finite_half(bits).to_bits() | special)
}

/// Sixteen half floats, whatever they are, where the machine has an instruction for that.
#[inline(always)]
pub(crate) fn native_halves<S: Simd>(simd: S, halves: &[u8; 32]) -> Option<f32x16<S>> {
    #[cfg(target_arch = "x86_64")]
    {
        if let Some(avx512) = simd.level().as_avx512() {
            return Some(f32x16::load_array(simd, x86::halves_512(avx512, halves).to_array()));
        }
        if let Some(avx2) = simd.level().as_avx2() {
            let (low, high) = halves.split_at(16);
            let [low, high] = [low, high].map(|half| x86::halves_256(avx2, half.first_chunk().expect("sixteen bytes")));
            return Some(f32x16::load_array(simd, low.combine(high).to_array()));
        }
    }
    let _ = (simd, halves);
    None
}

#[cfg(target_arch = "x86_64")]
mod x86 {
    use std::arch::x86_64::{_mm256_cvtph_ps, _mm512_cvtph_ps};

    use fearless_simd::prelude::*;
    use fearless_simd::{Avx2, Avx512, f32x8, f32x16, u8x16, u8x32};

    fearless_simd::kernel!(
        /// Sixteen half floats.
        #[inline(always)]
        pub(super) fn halves_512(simd: Avx512, halves: &[u8; 32]) -> f32x16<Avx512> {
            _mm512_cvtph_ps(u8x32::load_array_ref(simd, halves).into()).simd_into(simd)
        }
    );

    fearless_simd::kernel!(
        /// Eight half floats.
        #[inline(always)]
        pub(super) fn halves_256(simd: Avx2, halves: &[u8; 16]) -> f32x8<Avx2> {
            _mm256_cvtph_ps(u8x16::load_array_ref(simd, halves).into()).simd_into(simd)
        }
    );
}

/// Sixteen floats from a slice of at least as many.
#[inline(always)]
pub(crate) fn load<S: Simd>(simd: S, x: &[f32]) -> f32x16<S> {
    f32x16::load_array_ref(simd, x.first_chunk().expect("sixteen floats"))
}

/// e^x to the last bits of f32, from zero to infinity.
#[inline(always)]
pub(crate) fn exp<S: Simd>(simd: S, x: f32x16<S>) -> f32x16<S> {
    let splat = |v: f32| f32x16::splat(simd, v);
    let x = x.max(splat(-105.0)).min(splat(89.0));
    let n = (x * splat(std::f32::consts::LOG2_E)).round_ties_even();
    // ln 2 in two parts, of which the first has few bits: the product with n is exact.
    let r = n.mul_add(splat(-0.693_359_4), x);
    let r = n.mul_add(splat(2.121_944_4e-4), r);
    let terms = [1.0 / 720.0, 1.0 / 120.0, 1.0 / 24.0, 1.0 / 6.0, 0.5, 1.0, 1.0];
    let value = terms.into_iter().skip(1).fold(splat(terms[0]), |sum, term| sum.mul_add(r, splat(term)));
    // The power of two comes in two factors: one alone cannot lead below the normal numbers.
    let n: i32x16<S> = n.to_int();
    let power = |n: i32x16<S>| {
        let bits: u32x16<S> = ((n + 127) << 23).bitcast();
        f32x16::from_bits(bits)
    };
    let most = n >> 1;
    value * power(most) * power(n - most)
}

/// 1 / (1 + e^-x), to the last bits where it is small as well.
#[inline(always)]
pub(crate) fn sigmoid<S: Simd>(simd: S, x: f32x16<S>) -> f32x16<S> {
    let one = f32x16::splat(simd, 1.0);
    let small = exp(simd, -x.abs());
    x.simd_lt(0.0).select(small, one) / (one + small)
}

/// x(i) = f(x(i), y(i)) for two slices of the same length.
#[inline(always)]
pub(crate) fn combine<S: Simd>(simd: S, x: &mut [f32], y: &[f32], f: impl Fn(f32x16<S>, f32x16<S>) -> f32x16<S>) {
    let (xs, x_rest) = x.as_chunks_mut::<16>();
    let (ys, y_rest) = y.as_chunks::<16>();
    for (x, y) in xs.iter_mut().zip(ys) {
        f(f32x16::load_array_ref(simd, x), f32x16::load_array_ref(simd, y)).store_array(x);
    }
    if !x_rest.is_empty() {
        let (mut a, mut b) = ([0.0; 16], [0.0; 16]);
        a[..x_rest.len()].copy_from_slice(x_rest);
        b[..y_rest.len()].copy_from_slice(y_rest);
        let result = f(f32x16::load_array(simd, a), f32x16::load_array(simd, b)).to_array();
        x_rest.copy_from_slice(&result[..x_rest.len()]);
    }
}

/// Rows of `width`: to(i, c) = columns(c)(i). Places of columns that are not there keep what they hold.
#[inline(always)]
pub(crate) fn transpose<S: Simd>(simd: S, columns: &[&[f32]], width: usize, to: &mut [f32]) {
    for (four, group) in columns.chunks(4).enumerate() {
        let mut done = 0;
        if let [a, b, c, d] = group {
            let quads = a.as_chunks::<4>().0.iter().zip(b.as_chunks::<4>().0);
            let quads = quads.zip(c.as_chunks::<4>().0.iter().zip(d.as_chunks::<4>().0));
            for ((a, b), (c, d)) in quads {
                let [a, b, c, d] = [a, b, c, d].map(|quad| f32x4::load_array_ref(simd, quad));
                let (even, odd) = (a.interleave(c), b.interleave(d));
                let (first, second) = (even.0.interleave(odd.0), even.1.interleave(odd.1));
                for (i, row) in [first.0, first.1, second.0, second.1].iter().enumerate() {
                    row.store_slice(&mut to[(done + i) * width + 4 * four..][..4]);
                }
                done += 4;
            }
        }
        for (c, column) in group.iter().enumerate() {
            for (i, value) in column.iter().enumerate().skip(done) {
                to[i * width + 4 * four + c] = *value;
            }
        }
    }
}

/// How the operands of a small matrix product lie: rows of `depth` in a, `depth` rows in b, and rows of results.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Layout {
    /// Products of a sum.
    pub depth: usize,
    /// From row to row of a.
    pub a_stride: usize,
    /// From row to row of b.
    pub b_stride: usize,
    /// From row to row of c.
    pub c_stride: usize,
    /// Whether sums begin with what c holds.
    pub add: bool,
}

/// c(r, n) = sum over d of a(r, d) b(d, n): `rows` rows, and `cols` columns, whole vectors. Tiles of c stay in registers.
#[inline(always)]
pub(crate) fn multiply<S: Simd>(
    simd: S,
    [rows, cols]: [usize; 2],
    layout: Layout,
    a: &[f32],
    b: &[f32],
    c: &mut [f32],
) {
    let lanes = S::f32s::LEN;
    let mut col = 0;
    while col < cols {
        let wide = cols - col >= 2 * lanes;
        let mut row = 0;
        while row < rows {
            let (a, b) = (&a[row * layout.a_stride..], &b[col..]);
            let c = &mut c[row * layout.c_stride + col..];
            // Machines with vectors of 16 floats have 32 registers for them, others may have 16.
            row += match (wide, rows - row) {
                (true, 12..) if lanes == 16 => tile::<S, 12, 2>(simd, layout, a, b, c),
                (true, 6..) => tile::<S, 6, 2>(simd, layout, a, b, c),
                (true, 3..) => tile::<S, 3, 2>(simd, layout, a, b, c),
                (true, _) => tile::<S, 1, 2>(simd, layout, a, b, c),
                (false, 6..) => tile::<S, 6, 1>(simd, layout, a, b, c),
                (false, 3..) => tile::<S, 3, 1>(simd, layout, a, b, c),
                (false, _) => tile::<S, 1, 1>(simd, layout, a, b, c),
            };
        }
        col += if wide { 2 * lanes } else { lanes };
    }
}

/// `ROWS` rows times `WIDE` vectors of columns; gives the number of rows.
#[inline(always)]
fn tile<S: Simd, const ROWS: usize, const WIDE: usize>(
    simd: S,
    layout: Layout,
    a: &[f32],
    b: &[f32],
    c: &mut [f32],
) -> usize {
    let lanes = S::f32s::LEN;
    let rows: [&[f32]; ROWS] = std::array::from_fn(|r| &a[r * layout.a_stride..][..layout.depth]);
    let mut sums = [[S::f32s::splat(simd, 0.0); WIDE]; ROWS];
    if layout.add {
        for (r, sums) in sums.iter_mut().enumerate() {
            for (w, sum) in sums.iter_mut().enumerate() {
                *sum = S::f32s::from_slice(simd, &c[r * layout.c_stride + w * lanes..][..lanes]);
            }
        }
    }
    for d in 0..layout.depth {
        let b = &b[d * layout.b_stride..][..WIDE * lanes];
        let mut vectors = [S::f32s::splat(simd, 0.0); WIDE];
        for (w, vector) in vectors.iter_mut().enumerate() {
            *vector = S::f32s::from_slice(simd, &b[w * lanes..][..lanes]);
        }
        for r in 0..ROWS {
            let a = S::f32s::splat(simd, rows[r][d]);
            for w in 0..WIDE {
                sums[r][w] = a.mul_add(vectors[w], sums[r][w]);
            }
        }
    }
    for (r, sums) in sums.iter().enumerate() {
        for (w, sum) in sums.iter().enumerate() {
            sum.store_slice(&mut c[r * layout.c_stride + w * lanes..][..lanes]);
        }
    }
    ROWS
}

#[cfg(test)]
mod tests {
    use fearless_simd::dispatch;

    use super::*;

    #[test]
    fn exponentials_keep_the_digits_of_f32() {
        let mut worst = 0.0f64;
        for i in -8700..8870 {
            let x = i as f32 / 100.0;
            let mut got = [x];
            dispatch!(level(), simd => combine(simd, &mut got, &[0.0], |x, _| exp(simd, x)));
            let want = f64::from(x).exp();
            worst = worst.max((f64::from(got[0]) / want - 1.0).abs());
        }
        assert!(worst < 3e-7, "{worst:e}");
    }

    #[test]
    fn half_floats_are_those_of_the_half_crate() {
        for bits in 0..=u16::MAX {
            let (got, want) = (half(bits), half::f16::from_bits(bits).to_f32());
            assert!(got.to_bits() == want.to_bits() || (got.is_nan() && want.is_nan()), "{bits:#x}: {got} {want}");
        }
    }

    #[test]
    fn instructions_for_half_floats_know_all_of_them() {
        let all: Vec<u8> = (0..=u16::MAX).flat_map(u16::to_le_bytes).collect();
        for halves in all.as_chunks::<32>().0 {
            let Some(got) = dispatch!(level(), simd => native_halves(simd, halves).map(|got| got.to_array())) else {
                return;
            };
            for (got, bits) in got.iter().zip(halves.as_chunks::<2>().0) {
                let want = half(u16::from_le_bytes(*bits));
                assert!(got.to_bits() == want.to_bits() || (got.is_nan() && want.is_nan()), "{bits:?}: {got} {want}");
            }
        }
    }

    #[test]
    fn products_of_every_shape_are_plain_sums() {
        for (rows, depth, cols) in [(1, 1, 16), (13, 5, 48), (31, 33, 32), (4, 7, 16), (25, 1, 80)] {
            let layout =
                Layout { depth, a_stride: depth + 1, b_stride: cols + 3, c_stride: cols + 5, add: rows % 2 == 1 };
            let number = |i: usize| ((i * 37 % 101) as f32 - 50.0) / 50.0;
            let a: Vec<f32> = (0..rows * layout.a_stride).map(number).collect();
            let b: Vec<f32> = (0..depth * layout.b_stride).map(|i| number(i + 17)).collect();
            let mut c: Vec<f32> = (0..rows * layout.c_stride).map(|i| number(i + 5)).collect();
            let before = c.clone();
            dispatch!(level(), simd => multiply(simd, [rows, cols], layout, &a, &b, &mut c));
            for (i, (got, before)) in c.iter().zip(before).enumerate() {
                let (r, n) = (i / layout.c_stride, i % layout.c_stride);
                let terms =
                    (0..depth).map(|d| f64::from(a[r * layout.a_stride + d] * b[d * layout.b_stride + n.min(cols)]));
                let sum = terms.sum::<f64>() + if layout.add { f64::from(before) } else { 0.0 };
                let want = if n < cols { sum as f32 } else { before };
                assert!((got - want).abs() < 1e-4, "{rows} {depth} {cols}: {got} {want} at {r} {n}");
            }
        }
    }

    #[test]
    fn transposed_rows_hold_each_column() {
        let columns: Vec<Vec<f32>> = (0..7).map(|c| (0..9).map(|i| (10 * c + i) as f32).collect()).collect();
        let views: Vec<&[f32]> = columns.iter().map(Vec::as_slice).collect();
        let mut to = vec![-1.0; 9 * 8];
        dispatch!(level(), simd => transpose(simd, &views, 8, &mut to));
        for (i, row) in to.chunks_exact(8).enumerate() {
            let want: Vec<f32> = (0..7).map(|c| (10 * c + i) as f32).chain([-1.0]).collect();
            assert_eq!(row, want);
        }
    }
}
