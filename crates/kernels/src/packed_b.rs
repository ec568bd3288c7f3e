//! Activations emitted as f16 in cooperative-matrix B-fragment order, so that the next GEMM needs no repack pass. `store_quad` of
//! `mul_mm/fragment_order.glsl` is the GLSL side.
//!
//! Each activation vector is divided by a power of two, its scale. The maximum of a vector is unknown until the last tile finishes, so the
//! producer predicts the scale from the magnitudes of the same token one layer earlier ([`factor`]). An f16 spans 30 binary orders of
//! magnitude, of which activations use few.
//!
//! For GEMM -> RMSNorm -> GEMM the first kernel writes x * gamma and accumulates sum(x^2); the second applies 1/rms in its epilogue. The sum is
//! a 64-bit fixed-point number, so that it does not depend on the order of workgroups.
//!
//! A prediction can be wrong. Kernels then set a flag (`is_beyond`, `adds_too_much`, `is_too_small`), and the caller computes the step again
//! without packed activations.
//!
//! References write packed activations as defined here, but read the floats.

use kiln_gguf::TensorType;
use kiln_gpu::FragmentLayout;

use crate::fragment_layout;
use crate::host::HostMemory;
use crate::operation::{Invalid, require};
use crate::tensor::Tensor;

/// Activations have whole chunks of this many elements.
pub const CHUNK: usize = 256;
/// Activations of the widest matrices.
const WIDEST: usize = 16;
/// Steps of a chunk, whatever the layout.
const STEPS: usize = 16;
/// Elements 0 to 3 of four in the order in which they lie.
const QUAD: [usize; 4] = [0, 2, 1, 3];
/// Most tiles of rows whose magnitudes stand for those of all.
const MOST_PROBES: usize = 8;
/// Exponent of the scale of gated activations above that of the previous layer's mean magnitude: elements up to 2^24 times the mean fit an
/// f16, and elements down to 2^-5 of it keep all eleven bits.
pub(crate) const GATED_ABOVE: u32 = 9;
/// The same for activations that a norm follows, before they are multiplied by its weights.
pub(crate) const NORMED_ABOVE: u32 = 6;
/// Bits of the fraction of a sum of squares, as `mul_mm/fragment.comp` and `mul_mm/finish.glsl` have it. The other 28 hold that of an element 2^20 times as large as the mean was.
pub(crate) const FRACTION: u32 = 36;
/// One tile adds less than this to a sum of squares.
pub(crate) const MOST_SQUARES: f64 = ((1_u32 << (64 - FRACTION)) - 16) as f64;
/// Each tile rounds to a unit of the fraction. Smaller sums than this have lost too many bits by it: activations fell to less than a hundredth of
/// their prediction.
pub(crate) const LEAST_SQUARES: f64 = 1.0 / (1 << 14) as f64;
/// The largest f16.
const MOST_HALF: f64 = 65504.0;

/// Activations in their memory.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct PackedB {
    /// F16, dense, [`len`] of them, at a multiple of 16 bytes.
    pub halves: Tensor,
    /// The device's fragment layout.
    pub layout: FragmentLayout,
    /// Consecutive elements of k that one lane loads, as the weight format asks for.
    pub piece: usize,
    /// F32 `[n]`: the scale of each activation vector; none if all are 1.
    pub factors: Option<Tensor>,
    /// I32 `[n, 2]`: sum of squares of each scaled vector for the norm that follows, a fixed-point number with 36 bits of fraction: low words, then
    /// high words.
    pub squares: Option<Tensor>,
}

/// Rows of the matrices of a layout.
pub fn rows(layout: FragmentLayout) -> usize {
    fragment_layout::extents(layout)[0] as usize
}

/// Number of f16 elements of N packed activations of `k` elements.
pub fn len(k: usize, columns: usize) -> usize {
    k * columns.next_multiple_of(WIDEST)
}

/// Sums of magnitudes over some row tiles of each activation vector: the scale hint for the next layer. The median tile counts, because models
/// have single elements that are thousands of times larger than all others, in the first token of a sequence.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct MagnitudeProbe {
    /// F32 `[n, tiles]`, dense: for each activation vector the sum of magnitudes over each probed tile.
    pub sums: Tensor,
    /// Rows of a tile.
    pub rows: usize,
}

impl MagnitudeProbe {
    /// Distance between probed tiles and their number, for activations of `m` elements.
    pub fn tiles(m: usize, rows: usize) -> (usize, usize) {
        let tiles = m.div_ceil(rows);
        let apart = tiles.div_ceil(MOST_PROBES).max(1);
        (apart, tiles.div_ceil(apart))
    }

    /// Whether the probe fits N activations.
    pub(crate) fn check(&self, columns: usize, operation: &'static str) -> Result<(), Invalid> {
        let MagnitudeProbe { sums, rows } = self;
        let fits =
            sums.ty == TensorType::F32 && sums.is_dense() && sums.shape[0] == columns && sums.shape[1] > 0 && *rows > 0;
        require(fits, operation, || format!("magnitude probes are {sums} of {rows} rows, want F32[{columns}, tiles]"))
    }

    /// The scale of each activation vector.
    pub(crate) fn factors(&self, above: u32, memory: &HostMemory) -> Vec<f32> {
        let (sums, [columns, tiles, ..]) = (memory.read(&self.sums), self.sums.shape);
        let mean = |column: usize| {
            let mut sums: Vec<f32> = (0..tiles).map(|tile| sums[tile * columns + column] as f32).collect();
            let all: f32 = sums.iter().sum();
            sums.sort_by(f32::total_cmp);
            // The sum that as many are below as above: a tile with an element that is far larger than all others does not count.
            let middle = sums[(tiles - 1) / 2];
            (if middle > 0.0 { middle } else { all / tiles as f32 }) / self.rows as f32
        };
        (0..columns).map(|column| factor(mean(column), above)).collect()
    }

    /// The sums of each activation vector.
    pub(crate) fn by_column(&self, values: &[f64]) -> Vec<Vec<f64>> {
        let columns = self.sums.shape[0];
        (0..columns).map(|column| values.iter().skip(column).step_by(columns).copied().collect()).collect()
    }

    /// Writes those of these activations, one after the other.
    pub(crate) fn write(&self, floats: &[f64], memory: &mut HostMemory) {
        let columns = self.sums.shape[0];
        let m = floats.len() / columns.max(1);
        let (apart, tiles) = MagnitudeProbe::tiles(m, self.rows);
        let sum = |tile: usize, column: usize| -> f64 {
            let first = tile * apart * self.rows;
            floats[column * m..(column + 1) * m][first..(first + self.rows).min(m)].iter().map(|x| x.abs()).sum()
        };
        let all = (0..tiles).flat_map(|tile| (0..columns).map(move |column| (tile, column)));
        memory.write(&self.sums, &all.map(|(tile, column)| sum(tile, column)).collect::<Vec<_>>());
    }
}

/// The scale of an activation vector: a power of two, `above` binary orders above the mean magnitude of an earlier one.
pub fn factor(mean: f32, above: u32) -> f32 {
    let exponent = mean.to_bits() >> 23;
    // Neither zero nor infinite, and a factor whose inverse is a float as well.
    if exponent > 0 && exponent + above <= 253 { f32::from_bits((exponent + above) << 23) } else { 1.0 }
}

impl PackedB {
    /// Whether the tensors fit N activations of k elements.
    pub(crate) fn check(&self, [k, columns]: [usize; 2], operation: &'static str) -> Result<(), Invalid> {
        let whole = k.is_multiple_of(CHUNK) && k > 0;
        require(whole, operation, || format!("packed activations have {k} elements, want whole chunks of {CHUNK}"))?;
        let (halves, want) = (self.halves, len(k, columns));
        let fits = halves.ty == TensorType::F16
            && halves.is_dense()
            && halves.len() == want
            && halves.offset.is_multiple_of(16);
        require(fits, operation, || format!("packed activations are {halves}, want F16[{want}], aligned to 16"))?;
        let known = [8, 64].contains(&self.piece);
        require(known, operation, || format!("pieces of {} elements, want 8 or 64", self.piece))?;
        let Some(factors) = self.factors else { return Ok(()) };
        let fits = factors.ty == TensorType::F32 && factors.is_dense() && factors.len() == columns;
        require(fits, operation, || format!("factors of packed activations are {factors}, want F32[{columns}]"))?;
        let Some(squares) = self.squares else { return Ok(()) };
        let fits = squares.ty == TensorType::I32 && squares.is_dense() && squares.shape == [columns, 2, 1, 1];
        require(fits, operation, || format!("squares of packed activations are {squares}, want I32[{columns}, 2]"))
    }

    /// Halves, factors and squares.
    pub(crate) fn all(&self) -> impl Iterator<Item = Tensor> {
        [Some(self.halves), self.factors, self.squares].into_iter().flatten()
    }

    /// Where element `e` of an activation vector of `k` elements lies.
    fn place(&self, k: usize, column: usize, e: usize) -> usize {
        let [side, lanes, _] = fragment_layout::extents(self.layout).map(|n| n as usize);
        let (quads, piece) = (side / 4, self.piece);
        let chunk = 4 * STEPS * quads;
        let (quad, of_tile) = (e / piece % quads, column % side);
        let step = e % chunk / (quads * piece) * (piece / 4) + e % piece / 4;
        let at = ((column / side * (k / chunk) + e / chunk) * STEPS + step) * lanes;
        let element = QUAD[e % 4];
        match self.layout {
            FragmentLayout::Mma16x8 => (at + of_tile % 8 * 4 + quad) * 8 + of_tile / 8 * 4 + element,
            FragmentLayout::Row8 => (at + 4 * quad + element) * 8 + of_tile,
        }
    }

    /// The number of every element of N activations, and where it lies.
    pub(crate) fn places(&self, k: usize, columns: usize) -> impl Iterator<Item = (usize, usize)> {
        (0..k * columns).map(move |i| (i, self.place(k, i / k, i % k)))
    }

    /// The elements of one of these tensors, grouped by activation vector, for judging: a vector with another scale is
    /// of another magnitude. Both parts of a sum of squares are one number.
    pub(crate) fn by_column(&self, [k, columns]: [usize; 2], of: &Tensor, values: &[f64]) -> Option<Vec<Vec<f64>>> {
        if *of == self.halves {
            let mut rows = vec![vec![0.0; k]; columns];
            self.places(k, columns).for_each(|(i, at)| rows[i / k][i % k] = values[at]);
            return Some(rows);
        }
        (Some(*of) == self.factors).then(|| values.iter().map(|&factor| vec![factor]).collect())
    }

    /// Whether the neighbour that a lane loads together with this vector is past N and so is written as zeros.
    fn fills(&self, column: usize, columns: usize) -> bool {
        self.layout == FragmentLayout::Mma16x8 && column % WIDEST < 8 && column + 8 >= columns
    }

    /// Which elements are written for N activations of k elements: those of padding are undefined.
    pub fn written(&self, [k, columns]: [usize; 2]) -> Vec<bool> {
        let mut written = vec![false; len(k, columns)];
        for column in 0..columns {
            for e in 0..k {
                written[self.place(k, column, e)] = true;
                if self.fills(column, columns) {
                    written[self.place(k, column + 8, e)] = true;
                }
            }
        }
        written
    }

    /// Writes activations as kernels emit them, divided by their scales. Whether all of them are within the range of an f16.
    pub(crate) fn write(&self, floats: &[f64], factors: &[f32], memory: &mut HostMemory) -> bool {
        let columns = factors.len();
        let k = floats.len() / columns.max(1);
        let (mut halves, mut holds) = (memory.read(&self.halves), true);
        for (column, &factor) in factors.iter().enumerate() {
            for e in 0..k {
                let x = floats[column * k + e] / f64::from(factor);
                holds &= !is_beyond(x);
                halves[self.place(k, column, e)] = if x.is_nan() { x } else { x.clamp(-MOST_HALF, MOST_HALF) };
                if self.fills(column, columns) {
                    halves[self.place(k, column + 8, e)] = 0.0;
                }
            }
        }
        memory.write(&self.halves, &halves);
        if let Some(at) = self.factors {
            memory.write(&at, &factors.iter().map(|&factor| f64::from(factor)).collect::<Vec<_>>());
        }
        holds
    }
}

/// Whether a scaled activation is beyond the range of an f16, or no number.
pub(crate) fn is_beyond(x: f64) -> bool {
    x.is_nan() || x.abs() > MOST_HALF
}

/// Whether one tile's squares are too many for a sum, or no number.
pub(crate) fn adds_too_much(tile: f64) -> bool {
    tile.is_nan() || tile >= MOST_SQUARES
}

/// Whether a sum of squares has lost too many bits. One of zero is that of zeros, because each tile adds at least a unit.
pub(crate) fn is_too_small(sum: f64) -> bool {
    sum > 0.0 && sum < LEAST_SQUARES
}

/// Units of the fraction of a sum of squares in 1.
const UNITS: f64 = (1_u64 << FRACTION) as f64;

/// Fixed-point numbers from the low and high words that a tensor of I32 holds.
fn fixed(values: &[f64]) -> Vec<u64> {
    let word = |value: &f64| u64::from((*value as i32).cast_unsigned());
    let (low, high) = values.split_at(values.len() / 2);
    low.iter().zip(high).map(|(low, high)| word(high) << 32 | word(low)).collect()
}

/// Low and high words of fixed-point numbers, as a tensor of I32 holds them.
fn words(fixed: &[u64]) -> Vec<f64> {
    let words = |shift: u32| fixed.iter().map(move |sum| f64::from(((sum >> shift) as u32).cast_signed()));
    words(0).chain(words(32)).collect()
}

/// The sums of squares of each activation vector, from their words.
pub(crate) fn sums_of_squares(values: &[f64]) -> Vec<Vec<f64>> {
    fixed(values).into_iter().map(|sum| vec![sum as f64 / UNITS]).collect()
}

/// The words of sums of squares.
pub(crate) fn words_of_squares(sums: &[f64]) -> Vec<f64> {
    words(&sums.iter().map(|sum| (sum * UNITS) as u64).collect::<Vec<_>>())
}

/// Adds the squares of these activations over their factors, tile by tile of this many rows, to the sums that are there. Whether they are within
/// the range of a sum.
pub(crate) fn add_squares(
    sums: &Tensor,
    rows: usize,
    floats: &[f64],
    factors: &[f32],
    memory: &mut HostMemory,
) -> bool {
    let mut all = fixed(&memory.read(sums));
    let mut holds = true;
    for (column, &factor) in factors.iter().enumerate() {
        let m = floats.len() / factors.len();
        for tile in floats[column * m..(column + 1) * m].chunks(rows) {
            let sum: f64 = tile.iter().map(|x| (x / f64::from(factor)).powi(2)).sum();
            holds &= !adds_too_much(sum);
            // One that is not zero adds at least a unit.
            let added = (sum.min(MOST_SQUARES) * UNITS) as u64;
            let (total, is_beyond) = all[column].overflowing_add(added.max(u64::from(sum > 0.0)));
            all[column] = total;
            holds &= !is_beyond;
        }
    }
    memory.write(sums, &words(&all));
    holds
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::tensor::Slot;

    #[test]
    fn every_element_has_a_place_of_its_own() {
        for (layout, piece) in [
            (FragmentLayout::Mma16x8, 64),
            (FragmentLayout::Mma16x8, 8),
            (FragmentLayout::Row8, 64),
            (FragmentLayout::Row8, 8),
        ] {
            let (k, columns) = (512, 32);
            let halves = Tensor::dense(Slot(0), TensorType::F16, [len(k, columns), 1, 1, 1]);
            let packed_b = PackedB { halves, layout, piece, factors: None, squares: None };
            let mut places: Vec<usize> =
                (0..columns).flat_map(|c| (0..k).map(move |e| packed_b.place(k, c, e))).collect();
            places.sort_unstable();
            assert!(places.iter().copied().eq(0..k * columns), "{layout:?} {piece}");
            let written = |columns| packed_b.written([k, columns]).into_iter().filter(|written| *written).count() / k;
            let with_zeros = if layout == FragmentLayout::Mma16x8 { 6 } else { 3 };
            assert_eq!([written(3), written(32)], [with_zeros, 32]);
        }
    }

    #[test]
    fn factors_bring_the_mean_to_the_same_power_and_leave_what_is_no_number_alone() {
        for mean in [1e-30_f32, 3.7e-4, 1.0, 1.99, 5e8] {
            let scaled = mean / factor(mean, GATED_ABOVE);
            assert!(((1.0 / 512.0)..(1.0 / 256.0)).contains(&scaled), "{mean}: {scaled}");
        }
        assert_eq!([0.0, f32::INFINITY, f32::NAN, 1e-45, 3e38].map(|mean| factor(mean, GATED_ABOVE)), [1.0; 5]);
        assert_eq!(
            [(14336, 16), (128, 16), (1, 16), (72, 8)].map(|(m, rows)| MagnitudeProbe::tiles(m, rows)),
            [(112, 8), (1, 8), (1, 1), (2, 5)]
        );
    }

    #[test]
    fn columns_that_do_not_fit_are_named() {
        let halves = Tensor::dense(Slot(0), TensorType::F16, [len(256, 3), 1, 1, 1]);
        let packed_b = PackedB { halves, layout: FragmentLayout::Mma16x8, piece: 64, factors: None, squares: None };
        assert_eq!(packed_b.check([256, 3], "op"), Ok(()));
        let reason = |packed_b: PackedB, size| packed_b.check(size, "op").unwrap_err().reason;
        assert!(reason(packed_b, [300, 3]).contains("300 elements"));
        assert!(reason(packed_b, [512, 3]).contains("want F16[8192]"));
        assert!(reason(PackedB { piece: 16, ..packed_b }, [256, 3]).contains("pieces of 16"));
        let factors = Some(Tensor::dense(Slot(1), TensorType::F32, [4, 1, 1, 1]));
        assert!(reason(PackedB { factors, ..packed_b }, [256, 3]).contains("want F32[3]"));
    }
}
