//! Which size a picture gets, and into which grid of tiles it is cut. All in F32, as encoders were judged with; halves are rounded away
//! from zero unless a name says otherwise.

use std::fmt;

/// Width and height in pixels.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Size {
    /// Pixels of a row.
    pub width: usize,
    /// Rows.
    pub height: usize,
}

impl fmt::Display for Size {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{} x {}", self.width, self.height)
    }
}

impl Size {
    /// The same length on both sides.
    pub fn square(side: usize) -> Size {
        Size { width: side, height: side }
    }

    /// Pixels in all.
    pub fn pixels(self) -> usize {
        self.width.saturating_mul(self.height)
    }

    /// Both sides changed in the same way.
    pub(crate) fn map(self, f: impl Fn(usize) -> usize) -> Size {
        Size { width: f(self.width), height: f(self.height) }
    }

    pub(crate) fn ratio(self) -> f32 {
        self.width as f32 / self.height as f32
    }
}

/// Bounds of the pixels that a network takes; 0 where there is none.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct PixelLimits {
    /// At least so many.
    pub least: usize,
    /// At most so many.
    pub most: usize,
}

/// How numbers halfway between two are rounded.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Halves {
    /// Away from zero.
    Away,
    /// To the even one.
    Even,
}

/// The nearest multiple, at least one.
pub(crate) fn nearest(length: usize, of: usize, halves: Halves) -> usize {
    let quotient = length as f32 / of as f32;
    let whole = match halves {
        Halves::Away => quotient.round(),
        Halves::Even => quotient.round_ties_even(),
    };
    (whole as usize * of).max(of)
}

/// Multiples of `align` near the picture's own size and within the limits.
pub(crate) fn dynamic(size: Size, align: usize, limits: PixelLimits) -> Size {
    within(size, size.map(|side| nearest(side, align, Halves::Away)), align, limits)
}

/// The longer side as long as `edge`, both raised to multiples of `align`.
pub(crate) fn longest(size: Size, align: usize, edge: usize) -> Size {
    let scale = (edge as f32 / size.width as f32).min(edge as f32 / size.height as f32);
    size.map(|side| (side as f32 * scale / align as f32).ceil() as usize * align)
}

fn within(size: Size, aligned: Size, align: usize, limits: PixelLimits) -> Size {
    let pixels = size.height as f32 * size.width as f32;
    if limits.most > 0 && aligned.pixels() > limits.most {
        let by = (pixels / limits.most as f32).sqrt();
        size.map(|side| ((side as f32 / by / align as f32).floor() as usize * align).max(align))
    } else if limits.least > 0 && aligned.pixels() < limits.least {
        let by = (limits.least as f32 / pixels).sqrt();
        size.map(|side| (side as f32 * by / align as f32).ceil() as usize * align)
    } else {
        aligned
    }
}

/// The candidate that keeps the most pixels of the picture, then the one that wastes the fewest; the first of equals.
pub(crate) fn best_candidate(size: Size, candidates: &[Size]) -> Option<Size> {
    let mut best: Option<(usize, usize, Size)> = None;
    for &candidate in candidates {
        let scale = (candidate.width as f32 / size.width as f32).min(candidate.height as f32 / size.height as f32);
        let scaled = size.map(|side| (side as f32 * scale) as usize);
        let used = scaled.pixels().min(size.pixels());
        let wasted = candidate.pixels() - used.min(candidate.pixels());
        if best.is_none_or(|(most, waste, _)| used > most || (used == most && wasted < waste)) {
            best = Some((used, wasted, candidate));
        }
    }
    best.map(|(.., candidate)| candidate)
}

/// Slices of MiniCPM-V: the size of one that has about as many pixels as a square of `side`.
pub(crate) fn slice_size(size: Size, side: usize, align: usize, raise: bool, halves: Halves) -> Size {
    let mut size = size;
    if size.pixels() > side * side || raise {
        let ratio = size.ratio();
        let height = (side as f32 / ratio.sqrt()) as usize;
        size = Size { width: (height as f32 * ratio) as usize, height };
    }
    size.map(|length| nearest(length, align, halves))
}

/// The grid of at most so many slices whose ratio is nearest to the picture's.
pub(crate) fn slice_grid(size: Size, side: usize, most: usize) -> Size {
    let log_ratio = f64::from(size.ratio()).ln() as f32;
    let ratio = size.width as f32 * size.height as f32 / (side * side) as f32;
    let wanted = (ratio.ceil() as usize).min(most);
    let counts = [wanted.saturating_sub(1), wanted, wanted + 1].into_iter().filter(|n| *n > 1 && *n <= most);
    let grids = counts.flat_map(|n| (1..=n).filter(move |m| n % m == 0).map(move |m| [m, n / m]));
    let (mut best, mut error) = ([1, 1], f32::INFINITY);
    for [columns, rows] in grids {
        let off = (f64::from(log_ratio) - (columns as f64 / rows as f64).ln()).abs() as f32;
        if off < error {
            (best, error) = ([columns, rows], off);
        }
    }
    Size { width: best[0], height: best[1] }
}

/// The grid of `least` to `most` tiles whose ratio is nearest to the picture's; of equals the larger one where the picture is large enough
/// for it.
pub(crate) fn tile_grid(size: Size, [least, most]: [usize; 2], tile: usize) -> Size {
    let mut grids: Vec<Size> = Vec::new();
    for n in least..=most {
        for width in 1..=n {
            for height in (1..=n).filter(|height| (least..=most).contains(&(width * height))) {
                let grid = Size { width, height };
                if !grids.contains(&grid) {
                    grids.push(grid);
                }
            }
        }
    }
    grids.sort_by_key(|grid| grid.pixels());
    let (ratio, area) = (size.ratio(), size.pixels() as f32);
    let (mut best, mut error) = (Size::square(1), f32::MAX);
    for grid in grids {
        let off = (ratio - grid.ratio()).abs();
        if off < error {
            (best, error) = (grid, off);
        } else if off == error && area > 0.5 * (tile * tile * grid.pixels()) as f32 {
            best = grid;
        }
    }
    best
}
