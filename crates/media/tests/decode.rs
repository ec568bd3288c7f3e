//! Files to pixels: every format, what cameras and editors put into them, and what attackers do.

use std::io::Cursor;

use image::{DynamicImage, ImageFormat, Rgb, RgbImage, Rgba, RgbaImage};
use kiln_media::{Error, Limits, Size, decode};
use proptest::prelude::*;

fn encoded(picture: &DynamicImage, format: ImageFormat) -> Vec<u8> {
    let mut bytes = Cursor::new(Vec::new());
    picture.write_to(&mut bytes, format).expect("the picture should be encoded");
    bytes.into_inner()
}

fn coloured(width: u32, height: u32) -> RgbImage {
    RgbImage::from_fn(width, height, |x, y| Rgb([(x * 40) as u8, (y * 60) as u8, (x * y * 9) as u8]))
}

fn decoded(bytes: &[u8]) -> kiln_media::Picture {
    decode(bytes, &Limits::default()).expect("the picture should be decoded")
}

fn refused(bytes: &[u8]) -> String {
    decode(bytes, &Limits::default()).expect_err("the bytes should be refused").to_string()
}

#[test]
fn formats_without_loss_give_their_pixels() {
    let picture = coloured(5, 3);
    for format in [ImageFormat::Png, ImageFormat::Bmp, ImageFormat::Tiff, ImageFormat::WebP] {
        let got = decoded(&encoded(&picture.clone().into(), format));
        assert_eq!(got.size(), Size { width: 5, height: 3 }, "{format:?}");
        assert_eq!(got.rgb(), picture.as_raw(), "{format:?}");
    }
}

#[test]
fn jpeg_is_near_and_gif_gives_its_first_frame() {
    let flat = RgbImage::from_pixel(16, 16, Rgb([200, 30, 90]));
    let got = decoded(&encoded(&flat.clone().into(), ImageFormat::Jpeg));
    let far = got.rgb().iter().zip(flat.as_raw()).map(|(a, b)| a.abs_diff(*b)).max().unwrap();
    assert!(far <= 8, "a JPEG of one colour is {far} levels off");
    let mut bytes = Vec::new();
    let mut encoder = image::codecs::gif::GifEncoder::new(&mut bytes);
    let frame = |colour: [u8; 4]| image::Frame::new(RgbaImage::from_pixel(4, 2, Rgba(colour)));
    encoder.encode_frames([frame([255, 0, 0, 255]), frame([0, 0, 255, 255])]).unwrap();
    drop(encoder);
    assert_eq!(decoded(&bytes).rgb(), [255, 0, 0].repeat(8));
}

#[test]
fn alpha_is_dropped_grey_repeated_and_the_high_byte_of_sixteen_bits_taken() {
    let clear = RgbaImage::from_pixel(2, 1, Rgba([10, 20, 30, 0]));
    assert_eq!(decoded(&encoded(&clear.into(), ImageFormat::Png)).rgb(), [10, 20, 30].repeat(2));
    let grey = image::GrayImage::from_pixel(2, 1, image::Luma([77]));
    assert_eq!(decoded(&encoded(&grey.into(), ImageFormat::Png)).rgb(), [77; 6]);
    let deep = DynamicImage::ImageRgb16(image::ImageBuffer::from_pixel(1, 1, Rgb([0x12ff_u16, 0x80ff, 0xffff])));
    assert_eq!(decoded(&encoded(&deep, ImageFormat::Png)).rgb(), [0x12, 0x80, 0xff]);
    let deep = DynamicImage::ImageLuma16(image::ImageBuffer::from_pixel(1, 1, image::Luma([0x34ff_u16])));
    assert_eq!(decoded(&encoded(&deep, ImageFormat::Png)).rgb(), [0x34; 3]);
}

/// A JPEG whose EXIF data says how the camera was held.
fn held(picture: &RgbImage, orientation: u8) -> Vec<u8> {
    let jpeg = encoded(&picture.clone().into(), ImageFormat::Jpeg);
    let tiff =
        [&b"Exif\0\0MM\0*\0\0\0\x08\0\x01\x01\x12\0\x03\0\0\0\x01\0"[..], &[orientation, 0, 0, 0, 0, 0, 0]].concat();
    let length = (tiff.len() as u16 + 2).to_be_bytes();
    [&jpeg[..2], &[0xff, 0xe1], &length, &tiff, &jpeg[2..]].concat()
}

#[test]
fn photographs_come_upright() {
    // The left half is dark.
    let picture = RgbImage::from_fn(32, 16, |x, _| Rgb([if x < 16 { 0 } else { 255 }; 3]));
    let dark = |bytes: &[u8], x: usize, y: usize| {
        let got = decoded(bytes);
        got.row(y)[3 * x] < 128
    };
    assert!(dark(&held(&picture, 1), 0, 8) && !dark(&held(&picture, 1), 31, 8));
    assert!(!dark(&held(&picture, 3), 0, 8) && dark(&held(&picture, 3), 31, 8));
    let turned = held(&picture, 6);
    assert_eq!(decoded(&turned).size(), Size { width: 16, height: 32 });
    assert!(dark(&turned, 8, 0) && !dark(&turned, 8, 31));
    assert!(dark(&held(&picture, 99), 0, 8), "an orientation that does not exist means nothing");
}

/// A PNG that says it has this size, and has no pixels.
fn claiming(width: u32, height: u32) -> Vec<u8> {
    let head = [&b"IHDR"[..], &width.to_be_bytes(), &height.to_be_bytes(), &[8, 2, 0, 0, 0]].concat();
    let crc = crc32fast::hash(&head).to_be_bytes();
    let end = [&[0, 0, 0, 0][..], b"IEND", &crc32fast::hash(b"IEND").to_be_bytes()].concat();
    let empty = [&[0, 0, 0, 0][..], b"IDAT", &crc32fast::hash(b"IDAT").to_be_bytes()].concat();
    [&b"\x89PNG\r\n\x1a\n"[..], &13_u32.to_be_bytes(), &head, &crc, &empty, &end].concat()
}

#[test]
fn what_is_no_picture_is_refused_in_one_sentence() {
    assert!(matches!(decode(&[], &Limits::default()), Err(Error::Empty)));
    for bytes in [&b"hello"[..], &[0; 100], b"RIFF\x24\0\0\0WAVEfmt ", b"%PDF-1.7", b"<svg/>"] {
        assert!(refused(bytes).contains("PNG, JPEG, WebP, GIF, BMP or TIFF"), "{}", refused(bytes));
    }
    let png = encoded(&coloured(20, 20).into(), ImageFormat::Png);
    assert!(refused(&png[..png.len() / 2]).contains("the PNG picture cannot be decoded"), "{}", refused(&png[..40]));
    assert!(refused(&claiming(4, 4)).contains("cannot be decoded"));
}

#[test]
fn sizes_are_looked_at_before_pixels() {
    assert!(
        refused(&claiming(100_000, 100_000)).contains("100000 x 100000 pixels"),
        "{}",
        refused(&claiming(100_000, 100_000))
    );
    assert!(refused(&claiming(1, 100_000)).contains("200 times the other"), "{}", refused(&claiming(1, 100_000)));
    assert!(refused(&claiming(0, 4)).len() < 300);
    let small = Limits { pixels: 100, ..Limits::default() };
    let bytes = encoded(&coloured(11, 10).into(), ImageFormat::Png);
    assert!(matches!(decode(&bytes, &small), Err(Error::Pixels { .. })));
    let little = Limits { bytes: 200, ..Limits::default() };
    let error = decode(&bytes, &little).unwrap_err();
    assert!(matches!(error, Error::Memory { bytes: 330, most: 200, .. } | Error::Decode { .. }), "{error}");
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(200))]

    /// Files that are nearly right end in a picture within the limits or an error, and never in a panic.
    #[test]
    fn broken_files_are_no_harm(which in 0..6_usize, changes in prop::collection::vec((any::<u16>(), any::<u8>()), 1..8), cut in any::<u16>()) {
        let formats = [ImageFormat::Png, ImageFormat::Jpeg, ImageFormat::WebP, ImageFormat::Gif, ImageFormat::Bmp, ImageFormat::Tiff];
        let mut bytes = encoded(&coloured(12, 9).into(), formats[which]);
        for (at, value) in changes {
            let at = usize::from(at) % bytes.len();
            bytes[at] = value;
        }
        bytes.truncate(bytes.len() - usize::from(cut) % (bytes.len() / 4));
        let limits = Limits { pixels: 1 << 16, ratio: 50, bytes: 1 << 20 };
        if let Ok(picture) = decode(&bytes, &limits) {
            prop_assert!(picture.size().pixels() <= limits.pixels);
        }
    }
}
