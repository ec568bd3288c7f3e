//! A decoded picture, and one that is normalised for a network.

use crate::sizes::Size;

/// RGB bytes, row by row.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Picture {
    size: Size,
    rgb: Vec<u8>,
}

impl Picture {
    /// A picture of these bytes: three for each pixel, row by row.
    ///
    /// # Panics
    /// If there are not three bytes for each pixel.
    pub fn new(size: Size, rgb: Vec<u8>) -> Picture {
        assert_eq!(rgb.len(), 3 * size.pixels(), "a picture should have three bytes for each of its {size} pixels");
        Picture { size, rgb }
    }

    /// A picture of one colour.
    pub fn filled(size: Size, colour: [u8; 3]) -> Picture {
        Picture { size, rgb: colour.repeat(size.pixels()) }
    }

    /// Width and height.
    pub fn size(&self) -> Size {
        self.size
    }

    /// Its bytes.
    pub fn rgb(&self) -> &[u8] {
        &self.rgb
    }

    /// The bytes of one row.
    pub fn row(&self, y: usize) -> &[u8] {
        &self.rgb[3 * y * self.size.width..][..3 * self.size.width]
    }

    /// Puts another picture here, its upper left corner at (x, y). What would lie outside is left out.
    pub fn paste(&mut self, other: &Picture, [x, y]: [usize; 2]) {
        let width = other.size.width.min(self.size.width.saturating_sub(x));
        let height = other.size.height.min(self.size.height.saturating_sub(y));
        for row in 0..height {
            let at = 3 * ((y + row) * self.size.width + x);
            self.rgb[at..at + 3 * width].copy_from_slice(&other.row(row)[..3 * width]);
        }
    }

    /// The part of this size at (x, y); black where there is nothing.
    pub fn cut(&self, [x, y]: [usize; 2], size: Size) -> Picture {
        let mut part = Picture::filled(size, [0; 3]);
        let width = size.width.min(self.size.width.saturating_sub(x));
        let height = size.height.min(self.size.height.saturating_sub(y));
        for row in 0..height {
            let to = 3 * row * size.width;
            part.rgb[to..to + 3 * width].copy_from_slice(&self.row(y + row)[3 * x..3 * (x + width)]);
        }
        part
    }
}

/// What a network takes: a plane of floats for red, green and blue, each row by row.
#[derive(Clone, Debug, PartialEq)]
pub struct Pixels {
    /// Width and height.
    pub size: Size,
    /// The three planes.
    pub values: Vec<f32>,
}

impl Pixels {
    /// (byte / 255 - mean) / std of every channel, each operation rounded to F32.
    pub fn normalised(picture: &Picture, mean: [f32; 3], std: [f32; 3]) -> Pixels {
        let tables = [0, 1, 2]
            .map(|c| -> Vec<f32> { (0..=u8::MAX).map(|byte| (f32::from(byte) / 255.0 - mean[c]) / std[c]).collect() });
        let plane = |c: usize| picture.rgb.iter().skip(c).step_by(3).map(move |byte| (c, *byte));
        let values = (0..3).flat_map(plane).map(|(c, byte)| tables[c][usize::from(byte)]).collect();
        Pixels { size: picture.size, values }
    }

    /// The value of a channel at (x, y).
    pub fn at(&self, channel: usize, x: usize, y: usize) -> f32 {
        self.values[(channel * self.size.height + y) * self.size.width + x]
    }
}
