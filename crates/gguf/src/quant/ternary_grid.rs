//! The search for IQ1_S and IQ1_M: eight values share an entry of a codebook of -1, 0 and 1, which is moved up or down by an eighth;
//! 32 or 16 values share a scale of three bits, 256 an f16. Where the bits lie is in the files of the formats.

use std::sync::OnceLock;

use half::f16;

use super::blocks::{LARGEST_HALF, saturate};
use super::codebook::iq1;
use super::grid::{Grid, LEN, Sums, grid};
use super::search::{Normalised, mean_square, normalise, square_weights, weigh};

/// Values of a group: each has an entry.
const GROUP: usize = 8;
const GROUPS: usize = LEN / GROUP;
/// By how much entries are moved.
const SHIFT: f32 = 0.125;
/// The largest factor of a scale: codes stand for 1, 3 .. 15.
const LARGEST_FACTOR: f32 = 15.0;
/// Scales that are tried, over the root of the mean square of what they reach over.
const TRIALS: [f32; 14] = [0.6, 0.75, 0.85, 0.95, 1.05, 1.12, 1.19, 1.26, 1.34, 1.43, 1.55, 1.7, 1.9, 2.2];

/// A block that was fitted: `value = d * (2 * scale + 1) * (entry + 1/8, or - 1/8 where it is moved down)`.
pub(super) struct Fitted {
    pub(super) d: f16,
    /// One code for each scale.
    pub(super) scales: [u8; 16],
    /// One entry for each group.
    pub(super) entries: [u16; GROUPS],
    /// Whether a group is moved down.
    pub(super) down: [bool; GROUPS],
}

/// Which values share what.
#[derive(Clone, Copy)]
pub(super) struct Reach {
    /// Groups of a scale.
    pub(super) scale: usize,
    /// Groups that are moved together; they share a scale.
    pub(super) shift: usize,
}

/// Fits a block.
pub(super) fn fit(values: &[f32; LEN], importance: Option<&[f32; LEN]>, reach: Reach) -> Fitted {
    static GRID: OnceLock<Grid<GROUP>> = OnceLock::new();
    let mut fitted = Fitted { d: f16::ZERO, scales: [0; 16], entries: [0; GROUPS], down: [false; GROUPS] };
    let limit = LARGEST_HALF * LARGEST_FACTOR * (1.0 + SHIFT);
    let Some(Normalised { x, unit }) = normalise(values, limit) else { return fitted };
    let weights = match importance {
        Some(importance) => weigh(&x, importance, mean_square(&x)),
        None => square_weights(&x, 0.5),
    };
    Block { grid: grid(&GRID, iq1(), &[-1, 0, 1]), x, weights, reach }.search(unit, &mut fitted);
    fitted
}

struct Block {
    grid: &'static Grid<GROUP>,
    x: [f32; LEN],
    weights: [f32; LEN],
    reach: Reach,
}

/// What is chosen for the groups of a block.
#[derive(Clone, Copy)]
struct Choice {
    entries: [u16; GROUPS],
    down: [bool; GROUPS],
}

fn shift(down: bool) -> f32 {
    if down { -SHIFT } else { SHIFT }
}

impl Block {
    fn search(&self, unit: f32, fitted: &mut Fitted) {
        let subs = GROUPS / self.reach.scale;
        let mut scales = [0f32; 16];
        for (at, scale) in scales[..subs].iter_mut().enumerate() {
            *scale = self.fit_scale(at);
        }
        let largest = scales.iter().fold(0.0, |most: f32, scale| most.max(*scale));
        if largest <= 0.0 {
            return;
        }
        // The largest scale has the largest code, and d what is left. Several times: what was fitted moves d a little.
        fitted.d = saturate(largest / LARGEST_FACTOR * unit);
        let mut choice = Choice { entries: fitted.entries, down: fitted.down };
        for _ in 0..3 {
            let d = fitted.d.to_f32() / unit;
            if d == 0.0 {
                return;
            }
            let mut all = Sums::default();
            for (at, scale) in scales[..subs].iter().enumerate() {
                let code = self.choose_code(at, *scale, d, &mut choice);
                fitted.scales[at] = code;
                let factor = f32::from(2 * code + 1);
                let sums = self.sums(at, &choice);
                all.xq += sums.xq * factor;
                all.qq += sums.qq * factor * factor;
            }
            (fitted.entries, fitted.down) = (choice.entries, choice.down);
            if all.xq > 0.0 && all.qq > 0.0 {
                fitted.d = saturate(all.xq / all.qq * unit);
            }
        }
    }

    fn groups(&self, at: usize) -> std::ops::Range<usize> {
        at * self.reach.scale..(at + 1) * self.reach.scale
    }

    fn group(&self, group: usize) -> (&[f32; GROUP], &[f32; GROUP]) {
        (&self.x.as_chunks().0[group], &self.weights.as_chunks().0[group])
    }

    /// The scale that fits best, whatever can be stored.
    fn fit_scale(&self, at: usize) -> f32 {
        let (mut squares, mut all) = (0.0, 1e-30);
        for group in self.groups(at) {
            let (x, weights) = self.group(group);
            squares += (0..GROUP).map(|j| weights[j] * x[j] * x[j]).sum::<f32>();
            all += weights.iter().sum::<f32>();
        }
        let spread = (squares / all).sqrt();
        if spread < 1e-15 {
            return 0.0;
        }
        let (mut best, mut scale) = (0.0, spread);
        let mut choice = Choice { entries: [0; GROUPS], down: [false; GROUPS] };
        let mut look = |trial: f32, best: &mut f32, scale: &mut f32| {
            self.assign(at, trial, &mut choice);
            let Sums { xq, qq } = self.sums(at, &choice);
            if xq > 0.0 && qq > 0.0 && xq * xq / qq > *best {
                (*best, *scale) = (xq * xq / qq, xq / qq);
            }
        };
        for trial in TRIALS {
            look(trial * spread, &mut best, &mut scale);
        }
        // Once more from the best: entries may change when the scale was fitted to them.
        look(scale, &mut best, &mut scale);
        scale
    }

    /// Chooses the entries and the ways they are moved at this scale.
    fn assign(&self, at: usize, scale: f32, choice: &mut Choice) {
        let inverse = 1.0 / scale;
        let groups = self.groups(at);
        for first in groups.step_by(self.reach.shift) {
            let together = first..first + self.reach.shift;
            let mut least = f32::INFINITY;
            for down in [false, true] {
                let mut entries = [0; GROUPS];
                let mut miss = 0.0;
                for group in together.clone() {
                    let (x, weights) = self.group(group);
                    let (entry, off) = self.grid.nearest(&x.map(|value| value * inverse - shift(down)), weights);
                    entries[group] = entry;
                    miss += off;
                }
                if miss < least {
                    least = miss;
                    choice.entries[together.clone()].copy_from_slice(&entries[together.clone()]);
                    choice.down[together.clone()].fill(down);
                }
            }
        }
    }

    fn sums(&self, at: usize, choice: &Choice) -> Sums {
        let mut sums = Sums::default();
        for group in self.groups(at) {
            let (x, weights) = self.group(group);
            let entry = self.grid.entry(choice.entries[group]);
            for j in 0..GROUP {
                let q = f32::from(entry[j]) + shift(choice.down[group]);
                sums.xq += weights[j] * x[j] * q;
                sums.qq += weights[j] * q * q;
            }
        }
        sums
    }

    /// The code whose scale, as stored, misses least; what it chooses stays.
    fn choose_code(&self, at: usize, scale: f32, d: f32, choice: &mut Choice) -> u8 {
        let nearest = (0.5 * (scale / d - 1.0)).round().clamp(0.0, 7.0) as i32;
        let (mut best, mut least) = (0, f32::INFINITY);
        let mut trial = *choice;
        let groups = self.groups(at);
        for code in (nearest - 1).max(0)..=(nearest + 1).min(7) {
            let stored = d * (2 * code + 1) as f32;
            self.assign(at, stored, &mut trial);
            let Sums { xq, qq } = self.sums(at, &trial);
            // What is missed, but for the part that no choice changes.
            let miss = stored * (stored * qq - 2.0 * xq);
            if miss < least {
                (best, least) = (code as u8, miss);
                choice.entries[groups.clone()].copy_from_slice(&trial.entries[groups.clone()]);
                choice.down[groups.clone()].copy_from_slice(&trial.down[groups.clone()]);
            }
        }
        best
    }
}
