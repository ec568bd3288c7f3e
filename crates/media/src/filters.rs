//! Resampling of bytes as Pillow does it, bit for bit: coefficients of 22 bits, the horizontal pass first, bytes between the passes.
//! No crate has these coefficients, and networks notice a level here and there.

use crate::picture::Picture;
use crate::sizes::Size;

/// How pixels between pixels are found.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Filter {
    /// A triangle.
    Bilinear,
    /// A cubic with a = -0.5.
    Bicubic,
    /// A sinc with three lobes.
    Lanczos,
}

/// Bits behind the point of a coefficient.
const BITS: u32 = 22;

impl Filter {
    /// The filter of this name in model files.
    pub fn from_name(name: &str) -> Option<Filter> {
        match name {
            "bilinear" => Some(Filter::Bilinear),
            "bicubic" => Some(Filter::Bicubic),
            "lanczos" => Some(Filter::Lanczos),
            _ => None,
        }
    }

    fn radius(self) -> f64 {
        match self {
            Filter::Bilinear => 1.0,
            Filter::Bicubic => 2.0,
            Filter::Lanczos => 3.0,
        }
    }

    fn weight(self, x: f64) -> f64 {
        let near = x.abs();
        match self {
            Filter::Bilinear => (1.0 - near).max(0.0),
            Filter::Bicubic if near < 1.0 => (1.5 * near - 2.5) * near * near + 1.0,
            Filter::Bicubic if near < 2.0 => (((near - 5.0) * near + 8.0) * near - 4.0) * -0.5,
            Filter::Lanczos if (-3.0..3.0).contains(&x) => sinc(x) * sinc(x / 3.0),
            Filter::Bicubic | Filter::Lanczos => 0.0,
        }
    }
}

fn sinc(x: f64) -> f64 {
    if x == 0.0 {
        return 1.0;
    }
    let x = x * std::f64::consts::PI;
    x.sin() / x
}

/// What one pixel is made of: so many old ones from `first` on, each with a coefficient.
struct Taps {
    first: usize,
    coefficients: Vec<i64>,
}

fn taps(filter: Filter, old: usize, new: usize) -> Vec<Taps> {
    let scale = old as f64 / new as f64;
    let wide = scale.max(1.0);
    let support = filter.radius() * wide;
    let one = |i: usize| {
        let centre = (i as f64 + 0.5) * scale;
        // Casts of negative numbers give 0, which is where a picture begins.
        let first = (centre - support + 0.5) as usize;
        let end = ((centre + support + 0.5) as usize).min(old);
        let weights: Vec<f64> = (first..end).map(|j| filter.weight((j as f64 - centre + 0.5) * (1.0 / wide))).collect();
        let total: f64 = weights.iter().sum();
        let fixed = |w: f64| {
            let w = if total == 0.0 { w } else { w / total } * f64::from(1_u32 << BITS);
            (w + if w < 0.0 { -0.5 } else { 0.5 }) as i64
        };
        Taps { first, coefficients: weights.into_iter().map(fixed).collect() }
    };
    (0..new).map(one).collect()
}

fn byte(sum: i64) -> u8 {
    (sum >> BITS).clamp(0, 255) as u8
}

const HALF: i64 = 1 << (BITS - 1);

fn horizontal(picture: &Picture, filter: Filter, width: usize) -> Picture {
    let old = picture.size();
    let taps = taps(filter, old.width, width);
    let mut rgb = Vec::with_capacity(3 * width * old.height);
    for y in 0..old.height {
        let row = picture.row(y);
        for tap in &taps {
            let mut sums = [HALF; 3];
            let pixels = row[3 * tap.first..].chunks_exact(3);
            for (pixel, coefficient) in pixels.zip(&tap.coefficients) {
                for (sum, byte) in sums.iter_mut().zip(pixel) {
                    *sum += coefficient * i64::from(*byte);
                }
            }
            rgb.extend(sums.map(byte));
        }
    }
    Picture::new(Size { width, height: old.height }, rgb)
}

fn vertical(picture: &Picture, filter: Filter, height: usize) -> Picture {
    let old = picture.size();
    let mut rgb = Vec::with_capacity(3 * old.width * height);
    let mut sums = vec![HALF; 3 * old.width];
    for tap in taps(filter, old.height, height) {
        sums.fill(HALF);
        for (k, coefficient) in tap.coefficients.iter().enumerate() {
            for (sum, byte) in sums.iter_mut().zip(picture.row(tap.first + k)) {
                *sum += coefficient * i64::from(*byte);
            }
        }
        rgb.extend(sums.iter().map(|sum| byte(*sum)));
    }
    Picture::new(Size { width: old.width, height }, rgb)
}

/// The picture stretched to this size. A side that has its length already is left alone.
pub(crate) fn stretched(picture: &Picture, filter: Filter, size: Size) -> Picture {
    let wide =
        if size.width == picture.size().width { picture.clone() } else { horizontal(picture, filter, size.width) };
    if size.height == wide.size().height { wide } else { vertical(&wide, filter, size.height) }
}
