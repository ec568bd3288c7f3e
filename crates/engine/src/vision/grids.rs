//! Learnt positions brought to the grid of a picture, on the host and once for each size.

use super::sheet::Grid;

/// How a table of positions becomes one of another size.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Between {
    /// A triangle whose radius grows where the new grid is smaller; centres at half patches.
    Antialias,
    /// Linear, corners on corners.
    Corners,
    /// Cubic with a = -0.75; centres at half patches, edges repeated.
    Cubic,
}

/// A table of vectors, one for each place of a grid.
#[derive(Clone, Debug)]
pub(super) struct Table {
    /// Its grid.
    pub grid: Grid,
    /// `[width, places]`.
    pub values: Vec<f32>,
}

/// What one place takes: numbers of old places with their weights.
type Taps = Vec<(usize, f64)>;

impl Table {
    /// The table for another grid.
    pub(super) fn resized(&self, to: Grid, between: Between) -> Vec<f32> {
        if to == self.grid {
            return self.values.clone();
        }
        let width = self.values.len() / self.grid.patches();
        let along = match between {
            Between::Antialias => antialias,
            Between::Corners => corners,
            Between::Cubic => cubic,
        };
        let columns: Vec<Taps> = (0..to.columns).map(|i| along(self.grid.columns, to.columns, i)).collect();
        let mut out = Vec::with_capacity(width * to.patches());
        let mut sums = vec![0.0_f64; width];
        for row in (0..to.rows).map(|i| along(self.grid.rows, to.rows, i)) {
            for column in &columns {
                sums.fill(0.0);
                for &(y, by_y) in &row {
                    for &(x, by_x) in column {
                        let old = &self.values[(y * self.grid.columns + x) * width..][..width];
                        sums.iter_mut().zip(old).for_each(|(sum, v)| *sum += by_y * by_x * f64::from(*v));
                    }
                }
                out.extend(sums.iter().map(|sum| *sum as f32));
            }
        }
        out
    }
}

fn antialias(old: usize, new: usize, i: usize) -> Taps {
    let scale = new as f32 / old as f32;
    let support = 1.0_f32.max(1.0 / scale);
    let inverse = 1.0 / support;
    let centre = (i as f32 + 0.5) / scale;
    // Casts of negative numbers give 0, where the table begins.
    let (first, end) = ((centre - support + 0.5) as usize, ((centre + support + 0.5) as usize).min(old));
    let weight = |j: usize| (1.0 - f64::from(((j as f32 - centre + 0.5) * inverse).abs())).max(0.0);
    let taps: Taps = (first..end).map(|j| (j, weight(j))).collect();
    let total: f64 = taps.iter().map(|(_, w)| w).sum();
    taps.into_iter().map(|(j, w)| (j, w / total)).collect()
}

fn corners(old: usize, new: usize, i: usize) -> Taps {
    let ends = new > 1 && old > 1;
    let scale = if ends { (new - 1) as f32 / (old - 1) as f32 } else { new as f32 / old as f32 };
    let at = i as f32 / scale;
    let low = at.floor();
    let by = (f64::from(at) - f64::from(low)).clamp(0.0, 1.0);
    let place = |p: f32| (p.max(0.0) as usize).min(old - 1);
    vec![(place(low), 1.0 - by), (place(low + 1.0), by)]
}

fn cubic(old: usize, new: usize, i: usize) -> Taps {
    const A: f64 = -0.75;
    let near = |x: f64| ((A + 2.0) * x - (A + 3.0)) * x * x + 1.0;
    let far = |x: f64| ((A * x - 5.0 * A) * x + 8.0 * A) * x - 4.0 * A;
    let scale = new as f32 / old as f32;
    let at = (i as f32 + 0.5) / scale - 0.5;
    let low = at.floor();
    let d = f64::from(at) - f64::from(low);
    let place = |p: f32| (p.max(0.0) as usize).min(old - 1);
    let weights = [far(d + 1.0), near(d), near(1.0 - d), far(2.0 - d)];
    weights.into_iter().enumerate().map(|(k, w)| (place(low - 1.0 + k as f32), w)).collect()
}
