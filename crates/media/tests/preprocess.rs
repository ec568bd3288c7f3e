//! Pictures as networks take them, bit for bit what `scripts/goldens/media` has written for every family.

use kiln_media::{Keys, Picture, Pixels, Size};

/// The picture that `drawn` of the script makes.
fn drawn(size: Size) -> Picture {
    let mut rgb = Vec::with_capacity(3 * size.pixels());
    for y in 0..size.height as u32 {
        for x in 0..size.width as u32 {
            for c in 0..3_u32 {
                let noise = (x.wrapping_mul(73_856_093) ^ y.wrapping_mul(19_349_663) ^ c.wrapping_mul(83_492_791)) >> 9;
                let wave = x * 3 + y * 5 + c * 40 + ((x * y) >> 6);
                rgb.push(((wave + ((noise & 255) >> 1)) & 255) as u8);
            }
        }
    }
    Picture::new(size, rgb)
}

fn size(text: &str) -> Size {
    let (width, height) = text.split_once('x').expect("a size should read WxH");
    let side = |text: &str| text.parse().expect("a side should be a number");
    Size { width: side(width), height: side(height) }
}

fn keys(text: &str) -> Keys {
    let mut keys = Keys { mean: [0.48, 0.45, 0.41], std: [0.27, 0.26, 0.28], ..Keys::default() };
    for pair in text.split(';') {
        let (name, value) = pair.split_once('=').expect("a key should have a value");
        let numbers: Vec<usize> = value.split(',').filter_map(|n| n.parse().ok()).collect();
        let number = numbers.first().copied();
        match name {
            "image_size" => keys.image_size = numbers[0],
            "patch_size" => keys.patch = numbers[0],
            "spatial_merge_size" => keys.spatial_merge = number,
            "projector.scale_factor" => keys.scale_factor = number,
            "image_min_pixels" => keys.min_pixels = number,
            "image_max_pixels" => keys.max_pixels = number,
            "preproc_image_size" => keys.longest = number,
            "preproc_min_tiles" => keys.min_tiles = number,
            "preproc_max_tiles" => keys.max_tiles = number,
            "max_slice_nums" => keys.max_slices = number,
            "image_resize_algo" => keys.filter = Some(value.to_owned()),
            "image_grid_pinpoints" => {
                keys.candidates = numbers.chunks_exact(2).map(|n| Size { width: n[0], height: n[1] }).collect();
            }
            other => panic!("{other}: the test does not know the key"),
        }
    }
    keys
}

fn shown(pixels: &Pixels) -> String {
    let bytes: Vec<u8> = pixels.values.iter().flat_map(|v| v.to_le_bytes()).collect();
    format!("{}x{}:{:08x}", pixels.size.width, pixels.size.height, crc32fast::hash(&bytes))
}

#[test]
fn every_family_gets_the_expected_bits() {
    let mut wrong = Vec::new();
    for line in include_str!("expected.txt").lines() {
        let mut words = line.split(' ');
        let mut next = || words.next().unwrap();
        let (projector, listed, picture) = (next(), next(), size(next()));
        let preprocessing = keys(listed).preprocessing(projector).unwrap_or_else(|| panic!("{projector}: not known"));
        let prepared = preprocessing.prepare(&drawn(picture)).unwrap();
        let overview = prepared.overview.as_ref().map_or("-".to_owned(), shown);
        let tiles: Vec<String> = prepared.tiles.iter().map(shown).collect();
        let grid = format!("{}x{}", prepared.grid.width, prepared.grid.height);
        let got = [projector, listed, &format!("{}x{}", picture.width, picture.height), &grid, &overview].join(" ");
        let got = [vec![got], tiles].concat().join(" ");
        if got != line {
            wrong.push(format!("want {line}\n got {got}"));
        }
    }
    assert!(wrong.is_empty(), "{} pictures differ:\n{}", wrong.len(), wrong.join("\n"));
}

#[test]
fn keys_that_are_not_there_give_no_preprocessing() {
    let tiny = Keys { image_size: 32, patch: 4, std: [1.0; 3], ..Keys::default() };
    for projector in ["idefics3", "phi4", "paddleocr", "nothing"] {
        assert_eq!(tiny.preprocessing(projector), None, "{projector}");
    }
    for zero in [Keys { patch: 0, ..tiny.clone() }, Keys { spatial_merge: Some(0), ..tiny.clone() }] {
        assert_eq!(zero.preprocessing("qwen2vl_merger"), None);
    }
}

#[test]
fn a_model_cannot_ask_for_endless_pictures() {
    let keys = Keys { image_size: 1 << 20, patch: 4, std: [1.0; 3], longest: Some(1 << 30), ..Keys::default() };
    for projector in ["mlp", "idefics3", "lightonocr", "internvl", "step3vl"] {
        let preprocessing = keys.preprocessing(projector).unwrap();
        let error = preprocessing.prepare(&drawn(Size { width: 7, height: 5 })).unwrap_err();
        assert!(error.to_string().contains("the model wants pictures of"), "{projector}: {error}");
    }
}
