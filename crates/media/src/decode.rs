//! Bytes of a file to RGB. Sizes are looked at before anything is allocated for pixels; the decoders are Rust throughout.

use std::io::Cursor;

use image::metadata::Orientation;
use image::{DynamicImage, ImageDecoder, ImageFormat, ImageReader};
use kiln_system::text::shown;

use crate::error::Error;
use crate::picture::Picture;
use crate::sizes::Size;

/// What a picture may be at most.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Limits {
    /// Pixels in all.
    pub pixels: usize,
    /// How many times one side may be the other.
    pub ratio: usize,
    /// Bytes that decoding may take.
    pub bytes: u64,
}

impl Default for Limits {
    /// Twice the pixels of a large photograph; the longest strips that models have been trained with.
    fn default() -> Limits {
        Limits { pixels: 1 << 26, ratio: 200, bytes: 1 << 29 }
    }
}

impl Limits {
    fn check(&self, size: Size) -> Result<(), Error> {
        let Size { width, height } = size;
        let pixels = width.checked_mul(height).filter(|pixels| (1..=self.pixels).contains(pixels));
        if pixels.is_none() {
            return Err(Error::Pixels { size, most: self.pixels });
        }
        if width.max(height) > self.ratio * width.min(height) {
            return Err(Error::Ratio { size, most: self.ratio });
        }
        Ok(())
    }
}

const FORMATS: [(ImageFormat, &str); 6] = [
    (ImageFormat::Png, "PNG"),
    (ImageFormat::Jpeg, "JPEG"),
    (ImageFormat::WebP, "WebP"),
    (ImageFormat::Gif, "GIF"),
    (ImageFormat::Bmp, "BMP"),
    (ImageFormat::Tiff, "TIFF"),
];

/// Whether these bytes begin as those of a picture do and are no text, which may begin so by chance.
pub fn is_picture(bytes: &[u8]) -> bool {
    let known = image::guess_format(bytes).is_ok_and(|format| FORMATS.iter().any(|(known, _)| *known == format));
    known && (bytes.contains(&0) || std::str::from_utf8(bytes).is_err())
}

/// The picture in these bytes: the first frame where there are several, upright where the camera said how it was held, without its
/// alpha channel, which is dropped and not blended.
pub fn decode(bytes: &[u8], limits: &Limits) -> Result<Picture, Error> {
    if bytes.is_empty() {
        return Err(Error::Empty);
    }
    let guessed = image::guess_format(bytes).ok();
    let known = guessed.and_then(|format| FORMATS.into_iter().find(|(known, _)| *known == format));
    let Some((format, name)) = known else { return Err(Error::Format { bytes: bytes.len() }) };
    // Decoders echo what stands in a file.
    let failed = |error: image::ImageError| Error::Decode { format: name, why: shown(&error.to_string()) };
    let mut reader = ImageReader::with_format(Cursor::new(bytes), format);
    let mut allowed = image::Limits::default();
    allowed.max_alloc = Some(limits.bytes);
    reader.limits(allowed);
    let mut decoder = reader.into_decoder().map_err(failed)?;
    let (width, height) = decoder.dimensions();
    let size = Size { width: width as usize, height: height as usize };
    limits.check(size)?;
    let needed = decoder.total_bytes();
    if needed > limits.bytes {
        return Err(Error::Memory { format: name, size, bytes: needed, most: limits.bytes });
    }
    // A camera that says nothing sensible about how it was held has held it upright.
    let orientation = decoder.orientation().unwrap_or(Orientation::NoTransforms);
    let mut picture = DynamicImage::from_decoder(decoder).map_err(failed)?;
    picture.apply_orientation(orientation);
    let size = Size { width: picture.width() as usize, height: picture.height() as usize };
    Ok(Picture::new(size, rgb(picture)))
}

/// Three bytes for each pixel: grey is repeated, alpha left out, and of 16 bits the high byte is taken.
fn rgb(picture: DynamicImage) -> Vec<u8> {
    let high = |values: &[u16], channels: usize| -> Vec<u8> {
        let pixel = |p: &[u16]| if channels < 3 { [p[0]; 3] } else { [p[0], p[1], p[2]] };
        values.chunks_exact(channels).flat_map(pixel).map(|v| v.to_be_bytes()[0]).collect()
    };
    match picture {
        DynamicImage::ImageLuma16(p) => high(p.as_raw(), 1),
        DynamicImage::ImageLumaA16(p) => high(p.as_raw(), 2),
        DynamicImage::ImageRgb16(p) => high(p.as_raw(), 3),
        DynamicImage::ImageRgba16(p) => high(p.as_raw(), 4),
        other => other.into_rgb8().into_raw(),
    }
}
