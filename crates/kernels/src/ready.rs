//! Columns that leave their producer as matrix units take them: halves in the order in which lanes hold matrices, so that no pass
//! stands between who makes a column and the product that multiplies it. `store_quad` of `mul_mm/order.glsl` is the other half.
//!
//! A half is an element divided by its column's factor, a power of two. The largest element of a column is known when all of it is, and then it
//! is too late for a factor by it; so who makes the columns of a layer goes by those of the layer before ([`factor`]). Halves have 30 binary orders of
//! magnitude, of which columns use few.
//!
//! Where a norm stands between the two, halves are of elements times the norm's weights. Its factor is multiplied behind the product: who makes the
//! columns adds up their squares, in whole numbers, so that the sum is the same in whatever order workgroups come.
//!
//! The references write such columns as they are defined here, and read the floats.

use kiln_gguf::TensorType;
use kiln_gpu::MatrixOrder;

use crate::host::HostMemory;
use crate::operation::{Invalid, require};
use crate::order;
use crate::tensor::Tensor;

/// Columns have whole chunks of this many elements.
pub const CHUNK: usize = 256;
/// Columns of the widest matrices.
const WIDEST: usize = 16;
/// Steps of a chunk, whatever the order.
const STEPS: usize = 16;
/// Elements 0 to 3 of four in the order in which they lie.
const QUAD: [usize; 4] = [0, 2, 1, 3];
/// Most tiles of rows whose magnitudes stand for those of all.
const MOST_SAMPLES: usize = 8;
/// Powers of two of a factor above the mean magnitude of the layer before, of gated columns: elements may be 2^24 times as large as that before a half
/// is full, and those of 2^-5 of it still have eleven bits.
pub(crate) const GATED_ABOVE: u32 = 9;
/// The same of columns that a norm follows, whose weights have yet to be multiplied.
pub(crate) const NORMED_ABOVE: u32 = 6;
/// The most that one tile adds to a sum of squares: that of an element 2^20 times as large as the mean was. Some tiles have such elements, in first
/// tokens of texts; many together would leave the 32 bits of a sum.
pub(crate) const MOST_SQUARES: f64 = 536_870_912.0;
/// Bits of the fraction of a sum of squares.
pub(crate) const FRACTION: u32 = 22;

/// Columns in their memory.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Ready {
    /// F16, dense, [`len`] of them, at a multiple of 16 bytes.
    pub halves: Tensor,
    /// How lanes of the device hold matrices.
    pub order: MatrixOrder,
    /// Elements of a column that one lane takes together: those of the format of the weights.
    pub piece: usize,
    /// F32 `[columns]`: what the halves of each column were divided by; none where that is 1.
    pub factors: Option<Tensor>,
    /// I32 `[columns, 2]`: sums of the squares of elements over factors, whole parts and then fractions of 2^-22, for the norm that follows.
    pub squares: Option<Tensor>,
}

/// Rows of the matrices of an order.
pub fn rows(order: MatrixOrder) -> usize {
    order::extents(order)[0] as usize
}

/// Halves of so many columns of `k` elements.
pub fn len(k: usize, columns: usize) -> usize {
    k * columns.next_multiple_of(WIDEST)
}

/// Magnitudes of some of the rows of columns, which stand for those of all. Of the tiles that are looked at the one in the middle counts: models have
/// single elements that are thousands of times larger than all others, in the first token of a text.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Samples {
    /// F32 `[columns, tiles]`, dense: for each column sums over the rows of some tiles.
    pub sums: Tensor,
    /// Rows of a tile.
    pub rows: usize,
}

impl Samples {
    /// Tiles of rows from one that is looked at to the next, and how many are, for columns of `m` elements.
    pub fn tiles(m: usize, rows: usize) -> (usize, usize) {
        let tiles = m.div_ceil(rows);
        let apart = tiles.div_ceil(MOST_SAMPLES).max(1);
        (apart, tiles.div_ceil(apart))
    }

    /// Whether they are samples of columns of these extents.
    pub(crate) fn check(&self, columns: usize, operation: &'static str) -> Result<(), Invalid> {
        let Samples { sums, rows } = self;
        let fits =
            sums.ty == TensorType::F32 && sums.is_dense() && sums.shape[0] == columns && sums.shape[1] > 0 && *rows > 0;
        require(fits, operation, || format!("samples are {sums} of {rows} rows, want F32[{columns}, tiles]"))
    }

    /// The factor of each column that they speak for.
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

    /// Writes those of these columns, one after the other.
    pub(crate) fn write(&self, floats: &[f64], memory: &mut HostMemory) {
        let columns = self.sums.shape[0];
        let m = floats.len() / columns.max(1);
        let (apart, tiles) = Samples::tiles(m, self.rows);
        let sum = |tile: usize, column: usize| -> f64 {
            let first = tile * apart * self.rows;
            floats[column * m..(column + 1) * m][first..(first + self.rows).min(m)].iter().map(|x| x.abs()).sum()
        };
        let all = (0..tiles).flat_map(|tile| (0..columns).map(move |column| (tile, column)));
        memory.write(&self.sums, &all.map(|(tile, column)| sum(tile, column)).collect::<Vec<_>>());
    }
}

/// The factor of a column by the mean magnitude of the elements of an earlier one, so many powers of two above it.
pub fn factor(mean: f32, above: u32) -> f32 {
    let exponent = mean.to_bits() >> 23;
    // Neither zero nor infinite, and a factor whose inverse is a float as well.
    if exponent > 0 && exponent + above <= 253 { f32::from_bits((exponent + above) << 23) } else { 1.0 }
}

impl Ready {
    /// Whether columns of these extents lie there, as kernels write and read them.
    pub(crate) fn check(&self, [k, columns]: [usize; 2], operation: &'static str) -> Result<(), Invalid> {
        let whole = k.is_multiple_of(CHUNK) && k > 0;
        require(whole, operation, || format!("ready columns have {k} elements, want whole chunks of {CHUNK}"))?;
        let (halves, want) = (self.halves, len(k, columns));
        let fits = halves.ty == TensorType::F16
            && halves.is_dense()
            && halves.len() == want
            && halves.offset.is_multiple_of(16);
        require(fits, operation, || format!("ready columns are {halves}, want F16[{want}], aligned to 16"))?;
        let known = [8, 64].contains(&self.piece);
        require(known, operation, || format!("pieces of {} elements, want 8 or 64", self.piece))?;
        let Some(factors) = self.factors else { return Ok(()) };
        let fits = factors.ty == TensorType::F32 && factors.is_dense() && factors.len() == columns;
        require(fits, operation, || format!("factors of ready columns are {factors}, want F32[{columns}]"))?;
        let Some(squares) = self.squares else { return Ok(()) };
        let fits = squares.ty == TensorType::I32 && squares.is_dense() && squares.shape == [columns, 2, 1, 1];
        require(fits, operation, || format!("squares of ready columns are {squares}, want I32[{columns}, 2]"))
    }

    /// Halves, factors and squares.
    pub(crate) fn all(&self) -> impl Iterator<Item = Tensor> {
        [Some(self.halves), self.factors, self.squares].into_iter().flatten()
    }

    /// Where element `e` of a column of `k` elements lies.
    fn place(&self, k: usize, column: usize, e: usize) -> usize {
        let [side, lanes, _] = order::extents(self.order).map(|n| n as usize);
        let (quads, piece) = (side / 4, self.piece);
        let chunk = 4 * STEPS * quads;
        let (quad, of_tile) = (e / piece % quads, column % side);
        let step = e % chunk / (quads * piece) * (piece / 4) + e % piece / 4;
        let at = ((column / side * (k / chunk) + e / chunk) * STEPS + step) * lanes;
        let element = QUAD[e % 4];
        match self.order {
            MatrixOrder::Quads => (at + of_tile % 8 * 4 + quad) * 8 + of_tile / 8 * 4 + element,
            MatrixOrder::Slices => (at + 4 * quad + element) * 8 + of_tile,
        }
    }

    /// The number of every element of so many columns, and where it lies.
    pub(crate) fn places(&self, k: usize, columns: usize) -> impl Iterator<Item = (usize, usize)> {
        (0..k * columns).map(move |i| (i, self.place(k, i / k, i % k)))
    }

    /// Whether what a lane loads beside a column, of so many, is written as zeros with it.
    fn fills(&self, column: usize, columns: usize) -> bool {
        self.order == MatrixOrder::Quads && column % WIDEST < 8 && column + 8 >= columns
    }

    /// Which halves are written of so many columns of k elements: places of columns that are not there mean nothing.
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

    /// Writes these columns, one after the other, as kernels leave them, divided by these factors.
    pub(crate) fn write(&self, floats: &[f64], factors: &[f32], memory: &mut HostMemory) {
        let columns = factors.len();
        let k = floats.len() / columns.max(1);
        let mut halves = memory.read(&self.halves);
        for (column, &factor) in factors.iter().enumerate() {
            for e in 0..k {
                let x = floats[column * k + e] / f64::from(factor);
                halves[self.place(k, column, e)] = if x.is_nan() { x } else { x.clamp(-65504.0, 65504.0) };
                if self.fills(column, columns) {
                    halves[self.place(k, column + 8, e)] = 0.0;
                }
            }
        }
        memory.write(&self.halves, &halves);
        if let Some(at) = self.factors {
            memory.write(&at, &factors.iter().map(|&factor| f64::from(factor)).collect::<Vec<_>>());
        }
    }
}

/// Adds the squares of these columns over their factors, tile by tile of so many rows, to the sums that are there.
pub(crate) fn add_squares(sums: &Tensor, rows: usize, floats: &[f64], factors: &[f32], memory: &mut HostMemory) {
    let (columns, mut all) = (factors.len(), memory.read(sums));
    for (column, &factor) in factors.iter().enumerate() {
        let m = floats.len() / columns;
        for tile in floats[column * m..(column + 1) * m].chunks(rows) {
            let sum: f64 = tile.iter().map(|x| (x / f64::from(factor)).powi(2)).sum::<f64>().min(MOST_SQUARES);
            all[column] += sum.floor();
            all[columns + column] += (sum.fract() * f64::from(1 << FRACTION) + 0.5).floor();
        }
    }
    memory.write(sums, &all);
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::tensor::Slot;

    #[test]
    fn every_element_has_a_place_of_its_own() {
        for (order, piece) in
            [(MatrixOrder::Quads, 64), (MatrixOrder::Quads, 8), (MatrixOrder::Slices, 64), (MatrixOrder::Slices, 8)]
        {
            let (k, columns) = (512, 32);
            let halves = Tensor::dense(Slot(0), TensorType::F16, [len(k, columns), 1, 1, 1]);
            let ready = Ready { halves, order, piece, factors: None, squares: None };
            let mut places: Vec<usize> = (0..columns).flat_map(|c| (0..k).map(move |e| ready.place(k, c, e))).collect();
            places.sort_unstable();
            assert!(places.iter().copied().eq(0..k * columns), "{order:?} {piece}");
            let written = |columns| ready.written([k, columns]).into_iter().filter(|written| *written).count() / k;
            let with_zeros = if order == MatrixOrder::Quads { 6 } else { 3 };
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
            [(14336, 16), (128, 16), (1, 16), (72, 8)].map(|(m, rows)| Samples::tiles(m, rows)),
            [(112, 8), (1, 8), (1, 1), (2, 5)]
        );
    }

    #[test]
    fn columns_that_do_not_fit_are_named() {
        let halves = Tensor::dense(Slot(0), TensorType::F16, [len(256, 3), 1, 1, 1]);
        let ready = Ready { halves, order: MatrixOrder::Quads, piece: 64, factors: None, squares: None };
        assert_eq!(ready.check([256, 3], "op"), Ok(()));
        let reason = |ready: Ready, size| ready.check(size, "op").unwrap_err().reason;
        assert!(reason(ready, [300, 3]).contains("300 elements"));
        assert!(reason(ready, [512, 3]).contains("want F16[8192]"));
        assert!(reason(Ready { piece: 16, ..ready }, [256, 3]).contains("pieces of 16"));
        let factors = Some(Tensor::dense(Slot(1), TensorType::F32, [4, 1, 1, 1]));
        assert!(reason(Ready { factors, ..ready }, [256, 3]).contains("want F32[3]"));
    }
}
