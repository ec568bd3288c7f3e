//! A picture to what a network takes: one input, or an overview with tiles.

use crate::error::Error;
use crate::filters::Filter;
use crate::fit::Fit;
use crate::picture::{Picture, Pixels};
use crate::sizes::{self, Halves, PixelLimits, Size};

/// Which inputs become of a picture.
#[derive(Clone, Debug, PartialEq)]
pub enum Layout {
    /// One square.
    Fixed {
        /// Its side.
        side: usize,
    },
    /// One input near the picture's own size.
    Dynamic {
        /// Sides are multiples of this.
        align: usize,
        /// Bounds of its pixels.
        limits: PixelLimits,
    },
    /// One input whose longer side is given.
    Longest {
        /// Sides are multiples of this.
        align: usize,
        /// The longer side.
        edge: usize,
    },
    /// One input, shrunk in steps until its patches fit (Youtu-VL).
    Steps {
        /// Sides are multiples of this.
        align: usize,
        /// Side of a patch.
        patch: usize,
        /// Patches at most.
        most: usize,
    },
    /// Tiles of the candidate that fits best, and an overview; the overview alone for a picture that is no larger.
    Candidates {
        /// Side of a tile and of the overview.
        side: usize,
        /// Sizes that tiles make up.
        sizes: Vec<Size>,
    },
    /// An overview of about a square's pixels, and slices of the same (MiniCPM-V).
    Slices {
        /// Side of the square.
        side: usize,
        /// Sides are multiples of this.
        align: usize,
        /// Slices at most.
        most: usize,
        /// How sides are rounded.
        halves: Halves,
    },
    /// Square tiles of the picture with its longer side at `edge`, and an overview of all of them (Idefics 3).
    LongestTiles {
        /// Side of a tile and of the overview.
        side: usize,
        /// The longer side.
        edge: usize,
    },
    /// One input for a small picture, else tiles of 512 pixels and an overview (LFM2).
    LargeTiles {
        /// Sides of the overview are multiples of this.
        align: usize,
        /// Side of a patch.
        patch: usize,
        /// Bounds of the overview's pixels.
        limits: PixelLimits,
    },
    /// An overview, and windows of 504 pixels over the picture (Step 3).
    Windows {
        /// Side of the overview.
        side: usize,
        /// Longest side that is not shrunk first.
        edge: usize,
    },
    /// The whole view of 1024 pixels, and rows of tiles of 640 (DeepSeek OCR).
    Rows {
        /// Fewest and most tiles.
        tiles: [usize; 2],
    },
}

/// How pictures are made ready for an encoder.
#[derive(Clone, Debug, PartialEq)]
pub struct Preprocessing {
    /// Which inputs become of a picture.
    pub layout: Layout,
    /// How the only input comes to its size.
    pub single: Fit,
    /// How the picture that is cut into tiles comes to its size.
    pub tiles: Fit,
    /// The same for the overview.
    pub overview: Fit,
    /// Subtracted from each channel of 0 to 1.
    pub mean: [f32; 3],
    /// Divides the difference.
    pub std: [f32; 3],
}

/// The inputs that a picture becomes.
#[derive(Clone, Debug, PartialEq)]
pub struct Prepared {
    /// The whole picture in one input, where there are tiles or could be.
    pub overview: Option<Pixels>,
    /// The tiles in raster order, or the only input.
    pub tiles: Vec<Pixels>,
    /// Columns and rows of the tiles, 0 where there are none.
    pub grid: Size,
}

/// Side of LFM2's tiles.
const LARGE_TILE: usize = 512;
/// Side of Step 3's windows.
const WINDOW: usize = 504;
/// Sides of DeepSeek OCR's whole view and of its tiles.
const VIEW: [usize; 2] = [1024, 640];
/// Pixels that a picture may be brought to: what a model file asks for is bounded as well as what a user brings.
const MOST_PIXELS: usize = 1 << 26;

impl Preprocessing {
    /// The inputs for a picture.
    pub fn prepare(&self, picture: &Picture) -> Result<Prepared, Error> {
        let size = picture.size();
        match &self.layout {
            Layout::Fixed { side } => self.one(picture, Size::square(*side)),
            Layout::Dynamic { align, limits } => self.one(picture, sizes::dynamic(size, *align, *limits)),
            Layout::Longest { align, edge } => self.one(picture, sizes::longest(size, *align, *edge)),
            Layout::Steps { align, patch, most } => self.one(picture, stepped(size, *align, *patch, *most)),
            Layout::Candidates { side, sizes } => self.candidates(picture, *side, sizes),
            Layout::Slices { side, align, most, halves } => self.slices(picture, *side, *align, *most, *halves),
            Layout::LongestTiles { side, edge } => self.longest_tiles(picture, *side, *edge),
            Layout::LargeTiles { align, patch, limits } => self.large_tiles(picture, *align, *patch, *limits),
            Layout::Windows { side, edge } => self.windows(picture, *side, *edge),
            Layout::Rows { tiles } => self.rows(picture, *tiles),
        }
    }

    fn normalised(&self, picture: &Picture) -> Pixels {
        Pixels::normalised(picture, self.mean, self.std)
    }

    fn one(&self, picture: &Picture, size: Size) -> Result<Prepared, Error> {
        let picture = self.single.to(picture, checked(size)?);
        Ok(Prepared { overview: None, tiles: vec![self.normalised(&picture)], grid: Size::square(0) })
    }

    /// An overview, and a picture of `refined` cut into tiles of one size.
    fn cut(&self, picture: &Picture, overview: Size, refined: Option<Size>, tile: Size) -> Result<Prepared, Error> {
        let whole = self.overview.to(picture, checked(overview)?);
        let mut prepared =
            Prepared { overview: Some(self.normalised(&whole)), tiles: Vec::new(), grid: Size::square(0) };
        if let Some(refined) = refined {
            let large = self.tiles.to(picture, checked(refined)?);
            (prepared.tiles, prepared.grid) = self.raster(&large, tile);
        }
        Ok(prepared)
    }

    /// A picture cut into tiles row by row; those at the edges may be smaller.
    fn raster(&self, large: &Picture, tile: Size) -> (Vec<Pixels>, Size) {
        let size = large.size();
        let mut tiles = Vec::new();
        for y in (0..size.height).step_by(tile.height) {
            for x in (0..size.width).step_by(tile.width) {
                let part = Size { width: tile.width.min(size.width - x), height: tile.height.min(size.height - y) };
                tiles.push(self.normalised(&large.cut([x, y], part)));
            }
        }
        (tiles, Size { width: size.width / tile.width, height: size.height / tile.height })
    }

    fn candidates(&self, picture: &Picture, side: usize, candidates: &[Size]) -> Result<Prepared, Error> {
        let size = picture.size();
        let small = size.width <= side && size.height <= side;
        let refined = if small { None } else { sizes::best_candidate(size, candidates) };
        self.cut(picture, Size::square(side), refined, Size::square(side))
    }

    fn slices(
        &self,
        picture: &Picture,
        side: usize,
        align: usize,
        most: usize,
        halves: Halves,
    ) -> Result<Prepared, Error> {
        let size = picture.size();
        // The newer rule, which rounds to even, brings small pictures to about the square's pixels; the older one to the square itself.
        match halves {
            Halves::Even if size.width as f32 * size.height as f32 / (side * side) as f32 <= 1.0 => {
                let whole = sizes::slice_size(size, side, align, true, halves);
                return self.cut(picture, whole, None, whole);
            }
            _ if size.width <= side && size.height <= side => {
                return self.cut(picture, Size::square(side), None, Size::square(side));
            }
            _ => {}
        }
        let overview = sizes::slice_size(size, side, align, false, halves);
        let grid = sizes::slice_grid(size, side, most);
        let part = |length: usize, by: usize| sizes::nearest(length, by, halves) / by;
        let part = Size { width: part(size.width, grid.width), height: part(size.height, grid.height) };
        let tile = sizes::slice_size(part, side, align, true, halves);
        let refined = Size { width: tile.width * grid.width, height: tile.height * grid.height };
        self.cut(picture, overview, Some(refined), tile)
    }

    fn longest_tiles(&self, picture: &Picture, side: usize, edge: usize) -> Result<Prepared, Error> {
        let size = picture.size();
        let ratio = size.width as f64 / size.height as f64;
        let even = |length: f64| (length as usize).next_multiple_of(2).max(1);
        let middle = if size.width >= size.height {
            Size { width: edge, height: even(edge as f64 / ratio) }
        } else {
            Size { width: even(edge as f64 * ratio), height: edge }
        };
        let ratio = middle.width as f64 / middle.height as f64;
        let refined = if middle.width >= middle.height {
            let width = middle.width.next_multiple_of(side);
            Size { width, height: ((width as f64 / ratio) as usize).next_multiple_of(side) }
        } else {
            let height = middle.height.next_multiple_of(side);
            Size { width: ((height as f64 * ratio) as usize).next_multiple_of(side), height }
        };
        let middle = self.tiles.to(picture, checked(middle)?);
        let large = self.tiles.to(&middle, checked(refined)?);
        let overview = self.overview.to(&large, checked(Size::square(side))?);
        let (tiles, grid) = self.raster(&large, Size::square(side));
        Ok(Prepared { overview: Some(self.normalised(&overview)), tiles, grid })
    }

    fn large_tiles(
        &self,
        picture: &Picture,
        align: usize,
        patch: usize,
        limits: PixelLimits,
    ) -> Result<Prepared, Error> {
        let size = picture.size();
        let overview = sizes::dynamic(size, align, limits);
        let even = |side: usize| ((side as f64 / align as f64).round_ties_even() as usize * align).max(patch);
        if size.map(even).pixels() <= 2 * limits.most {
            let whole = self.overview.to(picture, checked(overview)?);
            return Ok(Prepared { overview: None, tiles: vec![self.normalised(&whole)], grid: Size::square(0) });
        }
        let refined = sizes::tile_grid(size, [2, 10], LARGE_TILE).map(|tiles| tiles * LARGE_TILE);
        self.cut(picture, overview, Some(refined), Size::square(LARGE_TILE))
    }

    fn rows(&self, picture: &Picture, tiles: [usize; 2]) -> Result<Prepared, Error> {
        let size = picture.size();
        let [view, tile] = VIEW;
        let whole = self.normalised(&self.overview.to(picture, Size::square(view)));
        let mut prepared = Prepared { overview: Some(whole), tiles: Vec::new(), grid: Size::square(0) };
        if size.width <= tile && size.height <= tile {
            return Ok(prepared);
        }
        let grid = sizes::tile_grid(size, tiles, tile);
        let large = self.tiles.to(picture, checked(grid.map(|tiles| tiles * tile))?);
        for row in 0..grid.height {
            // The tiles of a row lie one below the other.
            let mut column = Picture::filled(Size { width: tile, height: tile * grid.width }, [0; 3]);
            for x in 0..grid.width {
                column.paste(&large.cut([x * tile, row * tile], Size::square(tile)), [0, x * tile]);
            }
            prepared.tiles.push(self.normalised(&column));
        }
        prepared.grid = Size { width: 1, height: grid.height };
        Ok(prepared)
    }

    fn windows(&self, picture: &Picture, side: usize, edge: usize) -> Result<Prepared, Error> {
        let mut picture = picture.clone();
        let size = picture.size();
        let (longer, shorter) = (size.width.max(size.height), size.width.min(size.height));
        if shorter < 32 && (size.ratio() > 4.0 || size.ratio() < 0.25) {
            let mut square = Picture::filled(checked(Size::square(longer))?, [0; 3]);
            square.paste(&picture, [0, 0]);
            picture = square;
        }
        let size = picture.size();
        if size.width.max(size.height) > edge {
            let by = edge as f32 / size.width.max(size.height) as f32;
            let smaller = size.map(|length| ((length as f32 * by) as usize).max(1));
            picture = Fit::stretch(Filter::Bilinear).to(&picture, smaller);
        }
        let size = picture.size();
        let overview = half_pixel(&self.normalised(&picture), checked(Size::square(side))?);
        let mut prepared = Prepared { overview: Some(overview), tiles: Vec::new(), grid: Size::square(0) };
        let (longer, shorter) = (size.width.max(size.height), size.width.min(size.height));
        let ratio = longer as f32 / shorter as f32;
        let window = match (longer <= side, ratio) {
            (true, ratio) if ratio > 1.5 => shorter,
            (true, _) => return Ok(prepared),
            (false, ratio) if ratio > 4.0 => shorter.min(WINDOW),
            (false, _) => WINDOW,
        };
        let large = Fit::stretch(Filter::Bilinear).to(&picture, checked(size.map(|n| window_extent(n, window)))?);
        let [xs, ys] = [large.size().width, large.size().height].map(|length| window_starts(length, window));
        for &y in &ys {
            for &x in &xs {
                let tile = self.normalised(&large.cut([x, y], Size::square(window)));
                prepared.tiles.push(half_pixel(&tile, Size::square(WINDOW)));
            }
        }
        prepared.grid = Size { width: xs.len(), height: ys.len() };
        Ok(prepared)
    }
}

fn checked(size: Size) -> Result<Size, Error> {
    if (1..=MOST_PIXELS).contains(&size.pixels()) { Ok(size) } else { Err(Error::Target { size, most: MOST_PIXELS }) }
}

/// The size shrunk in steps of 0.02 until its patches fit.
fn stepped(size: Size, align: usize, patch: usize, most: usize) -> Size {
    let mut scale = 1.0_f32;
    loop {
        let now = size.map(|side| ((side as f32 * scale / align as f32).ceil() as usize * align).max(align));
        if now.map(|side| side / patch).pixels() <= most || now == Size::square(align) {
            return now;
        }
        scale -= 0.02;
    }
}

/// The length to which a side is brought so that windows cover it.
fn window_extent(length: usize, window: usize) -> usize {
    let ratio = length as f32 / window as f32;
    let more = usize::from(ratio - ratio.floor() > 0.2);
    if ratio < 1.0 { length } else { window * (ratio as usize + more) }
}

/// Where windows begin; the last one is moved back inside.
fn window_starts(length: usize, window: usize) -> Vec<usize> {
    let count = if length <= window { 1 } else { ((length - window) as f32 / window as f32 + 1.0).ceil() as usize };
    let mut starts: Vec<usize> = (0..count).map(|i| i * window).collect();
    if let Some(last) = starts.last_mut().filter(|last| count > 1 && **last + window > length) {
        *last = length - window;
    }
    starts
}

/// Bilinear on floats with centres at half pixels, without a wider filter for smaller results.
fn half_pixel(pixels: &Pixels, size: Size) -> Pixels {
    if pixels.size == size {
        return pixels.clone();
    }
    let along = |old: usize, new: usize| -> Vec<(usize, usize, f32)> {
        let last = old as isize - 1;
        let one = |i: usize| {
            let p = (i as f32 + 0.5) * (old as f32 / new as f32) - 0.5;
            let low = p.floor();
            let clamped = |at: isize| at.clamp(0, last) as usize;
            (clamped(low as isize), clamped(low as isize + 1), p - low)
        };
        (0..new).map(one).collect()
    };
    let (xs, ys) = (along(pixels.size.width, size.width), along(pixels.size.height, size.height));
    let mut values = Vec::with_capacity(3 * size.pixels());
    for channel in 0..3 {
        for &(y0, y1, by_y) in &ys {
            for &(x0, x1, by_x) in &xs {
                let lerp = |a: f32, b: f32, by: f32| a + (b - a) * by;
                let top = lerp(pixels.at(channel, x0, y0), pixels.at(channel, x1, y0), by_x);
                let low = lerp(pixels.at(channel, x0, y1), pixels.at(channel, x1, y1), by_x);
                values.push(lerp(top, low, by_y));
            }
        }
    }
    Pixels { size, values }
}
