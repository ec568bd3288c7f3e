//! The search for the formats that take their magnitudes from a grid: IQ2 and IQ3. Groups of 8 or 4 values share an entry of a
//! codebook, 16 or 32 values a scale of four bits, 256 values an f16. Where the bits lie is in the files of the formats.

use std::sync::OnceLock;

use half::f16;

use super::blocks::{LARGEST_HALF, saturate};
use super::search::{Normalised, mean_square, normalise, square_weights, weigh};

/// Values of a block.
pub(super) const LEN: usize = 256;
/// Entries of the codebook that are tried for a group: those next to where its values would be rounded to.
const NEAR: usize = 24;
/// Where the largest value of a scale's reach is put, over the largest level: beyond 1 it is cut.
const TRIALS: [f32; 13] = [0.80, 0.85, 0.90, 0.95, 1.0, 1.05, 1.10, 1.15, 1.20, 1.25, 1.30, 1.36, 1.44];

/// A codebook with what is near each point of the lattice that its levels span.
pub(super) struct Grid<const N: usize> {
    entries: &'static [[i8; N]],
    levels: &'static [i8],
    /// [`NEAR`] entries for each point, the nearest first.
    near: Vec<u16>,
}

impl<const N: usize> Grid<N> {
    fn new(entries: &'static [[i8; N]], levels: &'static [i8]) -> Grid<N> {
        let points = levels.len().pow(N as u32);
        let mut near = Vec::with_capacity(points * NEAR);
        let mut order: Vec<(i32, u16)> = Vec::with_capacity(entries.len());
        for point in 0..points {
            order.clear();
            let mut rest = point;
            let at: [i32; N] = std::array::from_fn(|_| {
                let level = levels[rest % levels.len()];
                rest /= levels.len();
                i32::from(level)
            });
            let distance = |entry: &[i8; N]| (0..N).map(|j| (i32::from(entry[j]) - at[j]).pow(2)).sum::<i32>();
            order.extend(entries.iter().zip(0..).map(|(entry, index)| (distance(entry), index)));
            order.select_nth_unstable(NEAR - 1);
            order[..NEAR].sort_unstable();
            near.extend(order[..NEAR].iter().map(|(_, index)| *index));
        }
        Grid { entries, levels, near }
    }

    /// The values of an entry.
    #[inline]
    pub(super) fn entry(&self, index: u16) -> &'static [i8; N] {
        &self.entries[usize::from(index)]
    }

    /// The entry that misses least by weight, for values in levels, and by how much it does.
    #[inline]
    pub(super) fn nearest(&self, levels: &[f32; N], weights: &[f32; N]) -> (u16, f32) {
        let mut point = 0;
        for j in (0..N).rev() {
            point = point * self.levels.len() + self.round(levels[j]);
        }
        let (mut best, mut least) = (0, f32::INFINITY);
        for &index in &self.near[point * NEAR..(point + 1) * NEAR] {
            let entry = &self.entries[usize::from(index)];
            let mut miss = 0.0;
            for j in 0..N {
                let off = levels[j] - f32::from(entry[j]);
                miss += weights[j] * off * off;
            }
            if miss < least {
                (best, least) = (index, miss);
            }
        }
        (best, least)
    }

    /// The number of the nearest level.
    #[inline]
    fn round(&self, value: f32) -> usize {
        let above = |pair: &[i8]| value > 0.5 * (f32::from(pair[0]) + f32::from(pair[1]));
        self.levels.windows(2).map(|pair| usize::from(above(pair))).sum()
    }

    fn top(&self) -> f32 {
        self.levels.last().map_or(1.0, |level| f32::from(*level))
    }
}

/// A grid that is made at first use.
pub(super) fn grid<const N: usize>(
    cell: &'static OnceLock<Grid<N>>,
    entries: &'static [[i8; N]],
    levels: &'static [i8],
) -> &'static Grid<N> {
    cell.get_or_init(|| Grid::new(entries, levels))
}

/// How signs are stored.
#[derive(Clone, Copy, PartialEq, Eq)]
pub(super) enum Signs {
    /// A bit for each value.
    Free,
    /// Seven bits for eight values: the number of minus signs is even.
    Even,
}

/// A block that was fitted: `value = d * unit * (2 * scale + 1) * entry`, with sign.
pub(super) struct Fitted {
    pub(super) d: f16,
    /// One code for each scale.
    pub(super) scales: [u8; 16],
    /// One entry for each group.
    pub(super) entries: [u16; 64],
    /// One byte for eight values.
    pub(super) signs: [u8; 32],
}

/// Fits a block whose scales reach over `sub` values; `unit` is what the file's d is multiplied by at the smallest scale.
pub(super) fn fit<const N: usize>(
    grid: &Grid<N>,
    values: &[f32; LEN],
    importance: Option<&[f32; LEN]>,
    sub: usize,
    unit: f32,
    signs: Signs,
) -> Fitted {
    let mut fitted = Fitted { d: f16::ZERO, scales: [0; 16], entries: [0; 64], signs: [0; 32] };
    let limit = LARGEST_HALF * unit * 31.0 * grid.top();
    let Some(Normalised { x, unit: power }) = normalise(values, limit) else { return fitted };
    let weights = match importance {
        Some(importance) => weigh(&x, importance, mean_square(&x)),
        None => square_weights(&x, 0.5),
    };
    let mut magnitudes = x.map(f32::abs);
    for (eight, byte) in fitted.signs.iter_mut().enumerate() {
        let range = 8 * eight..8 * eight + 8;
        *byte = range.clone().fold(0, |bits, i| bits | u8::from(x[i] < 0.0) << (i - 8 * eight));
        if signs == Signs::Even && byte.count_ones() % 2 == 1 {
            // The one that costs least gets the wrong sign. Values beyond the limit are told apart as they came.
            let cost =
                |i: &usize| weights[*i].sqrt() * if values[*i].is_finite() { values[*i].abs() } else { f32::MAX };
            let flipped = range.min_by(|a, b| cost(a).total_cmp(&cost(b))).unwrap_or(0);
            *byte ^= 1 << (flipped - 8 * eight);
            magnitudes[flipped] = -magnitudes[flipped];
        }
    }
    let mut block = Block { grid, magnitudes, weights, sub };
    block.search(unit, power, &mut fitted);
    fitted
}

struct Block<'a, const N: usize> {
    grid: &'a Grid<N>,
    magnitudes: [f32; LEN],
    weights: [f32; LEN],
    sub: usize,
}

/// Weighted sums of a choice of entries.
#[derive(Clone, Copy, Default)]
pub(super) struct Sums {
    pub(super) xq: f32,
    pub(super) qq: f32,
}

impl<const N: usize> Block<'_, N> {
    fn search(&mut self, unit: f32, power: f32, fitted: &mut Fitted) {
        let subs = LEN / self.sub;
        let mut scales = [0f32; 16];
        for (at, scale) in scales[..subs].iter_mut().enumerate() {
            *scale = self.fit_scale(at);
        }
        let largest = scales.iter().fold(0.0, |most: f32, scale| most.max(*scale));
        if largest <= 0.0 {
            return;
        }
        // The largest scale has the largest code, and d what is left. Twice: what was fitted moves d a little.
        fitted.d = saturate(largest / 31.0 / unit * power);
        for _ in 0..2 {
            let d = fitted.d.to_f32() / power * unit;
            if d == 0.0 {
                return;
            }
            let mut all = Sums::default();
            for (at, scale) in scales[..subs].iter().enumerate() {
                let code = self.choose_code(at, *scale, d, &mut fitted.entries);
                fitted.scales[at] = code;
                let factor = f32::from(2 * code + 1);
                let sums = self.sums(at, &fitted.entries);
                all.xq += sums.xq * factor;
                all.qq += sums.qq * factor * factor;
            }
            if all.xq > 0.0 && all.qq > 0.0 {
                fitted.d = saturate(all.xq / all.qq / unit * power);
            }
        }
    }

    fn groups(&self, at: usize) -> std::ops::Range<usize> {
        at * self.sub / N..(at + 1) * self.sub / N
    }

    fn group(&self, group: usize) -> (&[f32; N], &[f32; N]) {
        (&self.magnitudes.as_chunks::<N>().0[group], &self.weights.as_chunks::<N>().0[group])
    }

    /// The scale that fits a sub-block best, whatever can be stored.
    fn fit_scale(&self, at: usize) -> f32 {
        let range = at * self.sub..(at + 1) * self.sub;
        let largest = self.magnitudes[range].iter().fold(0.0, |most: f32, value| most.max(value.abs()));
        if largest < 1e-15 {
            return 0.0;
        }
        let (mut best, mut scale) = (0.0, largest / self.grid.top());
        let mut entries = [0; 64];
        let mut look = |trial: f32, best: &mut f32, scale: &mut f32| {
            self.assign(at, trial, &mut entries);
            let Sums { xq, qq } = self.sums(at, &entries);
            if xq > 0.0 && qq > 0.0 && xq * xq / qq > *best {
                (*best, *scale) = (xq * xq / qq, xq / qq);
            }
        };
        for trial in TRIALS {
            look(largest / (trial * self.grid.top()), &mut best, &mut scale);
        }
        // Once more from the best: entries may change when the scale was fitted to them.
        look(scale, &mut best, &mut scale);
        scale
    }

    /// Chooses an entry for each group of a sub-block at this scale.
    fn assign(&self, at: usize, scale: f32, entries: &mut [u16; 64]) {
        let inverse = 1.0 / scale;
        for group in self.groups(at) {
            let (magnitudes, weights) = self.group(group);
            (entries[group], _) = self.grid.nearest(&magnitudes.map(|value| value * inverse), weights);
        }
    }

    fn sums(&self, at: usize, entries: &[u16; 64]) -> Sums {
        let mut sums = Sums::default();
        for group in self.groups(at) {
            let (magnitudes, weights) = self.group(group);
            let entry = &self.grid.entries[usize::from(entries[group])];
            for j in 0..N {
                let (q, w) = (f32::from(entry[j]), weights[j]);
                sums.xq += w * magnitudes[j] * q;
                sums.qq += w * q * q;
            }
        }
        sums
    }

    /// The code whose scale, as stored, misses least; its entries stay.
    fn choose_code(&self, at: usize, scale: f32, d: f32, entries: &mut [u16; 64]) -> u8 {
        let nearest = (0.5 * (scale / d - 1.0)).round().clamp(0.0, 15.0) as i32;
        let (mut best, mut least) = (0, f32::INFINITY);
        let mut trial = *entries;
        for code in (nearest - 1).max(0)..=(nearest + 1).min(15) {
            let stored = d * (2 * code + 1) as f32;
            self.assign(at, stored, &mut trial);
            let Sums { xq, qq } = self.sums(at, &trial);
            // What is missed, but for the part that no choice changes.
            let miss = stored * (stored * qq - 2.0 * xq);
            if miss < least {
                (best, least) = (code as u8, miss);
                entries[self.groups(at)].copy_from_slice(&trial[self.groups(at)]);
            }
        }
        best
    }
}
