//! Encoders of pictures: what comes out of a tiny one of every family, on the CPU and on a device, against `scripts/goldens/vision`.

#![allow(clippy::unwrap_used, clippy::print_stdout, reason = "a test that cannot go on should stop")]

mod device;
mod tiny;

use std::collections::HashSet;
use std::path::PathBuf;
use std::sync::Arc;

use kiln_engine::executor::{Arithmetic, CpuExecutor, Executor};
use kiln_engine::vision::prompt::PicturePart;
use kiln_engine::vision::{Encoder, TABLE, Vision};
use kiln_gguf::{Gguf, Metadata, TensorType, Writer};
use kiln_media::{Picture, Pixels, Size};
use serde_json::Value as Json;

/// Every golden with its name.
fn goldens() -> Vec<(String, Json)> {
    let folder = PathBuf::from(env!("CARGO_MANIFEST_DIR")).join("tests/goldens/vision");
    let mut all: Vec<(String, Json)> = std::fs::read_dir(folder)
        .unwrap()
        .map(|entry| {
            let path = entry.unwrap().path();
            let name = path.file_stem().unwrap().to_str().unwrap().to_owned();
            (name, serde_json::from_str(&std::fs::read_to_string(&path).unwrap()).unwrap())
        })
        .collect();
    all.sort_by(|a, b| a.0.cmp(&b.0));
    assert!(all.len() > 20, "there should be a golden for every family");
    all
}

/// The numbers that `noise` of the script makes.
fn noise(name: &str, count: usize) -> impl Iterator<Item = f64> {
    let seed = u64::from(crc32fast::hash(name.as_bytes())) << 32;
    (0..count as u64).map(move |i| {
        let mut z = (seed + i).wrapping_mul(0x9E37_79B9_7F4A_7C15);
        z = (z ^ (z >> 30)).wrapping_mul(0xBF58_476D_1CE4_E5B9);
        z = (z ^ (z >> 27)).wrapping_mul(0x94D0_49BB_1331_11EB);
        z ^= z >> 31;
        ((z >> 40) as f64 / f64::from(1 << 24) * 2.0 - 1.0) * 1.732_050_807_568_877_2
    })
}

fn number(value: &Json) -> usize {
    value.as_u64().unwrap() as usize
}

fn set(metadata: &mut Metadata, key: &str, value: &Json) {
    match value {
        Json::Bool(flag) => metadata.set(key, *flag),
        Json::String(text) => metadata.set(key, text.as_str()),
        Json::Number(n) if n.is_u64() && key == "clip.minicpmv_version" => metadata.set(key, number(value) as i32),
        Json::Number(n) if n.is_u64() => metadata.set(key, number(value) as u32),
        Json::Number(n) => metadata.set(key, n.as_f64().unwrap() as f32),
        Json::Array(all) if all.iter().all(Json::is_u64) => {
            metadata.set(key, all.iter().map(|v| number(v) as i32).collect::<Vec<i32>>());
        }
        Json::Array(all) => metadata.set(key, all.iter().map(|v| v.as_f64().unwrap() as f32).collect::<Vec<f32>>()),
        other => panic!("{key}: {other}"),
    }
}

/// The file that a golden describes, with tensors of this name left out and keys changed.
fn file(golden: &Json, without: Option<&str>, changed: &[(&str, Json)]) -> Gguf {
    let mut metadata = Metadata::new();
    metadata.set("general.architecture", "clip");
    let keys = golden["keys"].as_object().unwrap();
    keys.iter().for_each(|(key, value)| set(&mut metadata, key, value));
    changed.iter().for_each(|(key, value)| set(&mut metadata, key, value));
    let mut writer = Writer::new(metadata);
    let mut add = |name: &str, shape: &[usize], values: Vec<f32>| {
        if without != Some(name) {
            let bytes: Vec<u8> = values.iter().flat_map(|v| v.to_le_bytes()).collect();
            writer.add(name, shape, TensorType::F32, bytes).unwrap();
        }
    };
    for tensor in golden["tensors"].as_array().unwrap() {
        let name = tensor[0].as_str().unwrap();
        let shape: Vec<usize> = tensor[1].as_array().unwrap().iter().map(number).collect();
        let (deviation, mean) = (tensor[2].as_f64().unwrap(), tensor[3].as_f64().unwrap());
        let values = noise(name, shape.iter().product()).map(|v| (mean + v * deviation) as f32);
        add(name, &shape, values.collect());
    }
    for (name, values) in golden["fixed"].as_object().unwrap() {
        let values: Vec<f32> = values.as_array().unwrap().iter().map(|v| v.as_f64().unwrap() as f32).collect();
        add(name, &[values.len()], values);
    }
    Gguf::from_bytes(writer.to_bytes().unwrap()).unwrap()
}

/// The picture that `drawn` of the script makes.
fn drawn(golden: &Json) -> Picture {
    let size = Size { width: number(&golden["picture"][0]), height: number(&golden["picture"][1]) };
    let mut rgb = Vec::new();
    for y in 0..size.height as u32 {
        for x in 0..size.width as u32 {
            for c in 0..3_u32 {
                let grain = (x.wrapping_mul(73_856_093) ^ y.wrapping_mul(19_349_663) ^ c.wrapping_mul(83_492_791)) >> 9;
                let wave = x * 3 + y * 5 + c * 40 + ((x * y) >> 6);
                rgb.push(((wave + ((grain & 255) >> 1)) & 255) as u8);
            }
        }
    }
    Picture::new(size, rgb)
}

fn nmse(got: &[f32], want: &[f32]) -> f64 {
    assert_eq!(got.len(), want.len());
    let (mut off, mut all) = (0.0, 0.0);
    for (a, b) in got.iter().zip(want) {
        off += (f64::from(*a) - f64::from(*b)).powi(2);
        all += f64::from(*b).powi(2);
    }
    off / all
}

/// How far the rows of each golden are off, at worst.
fn judge(executor: impl Fn() -> Box<dyn Executor>) -> Vec<String> {
    let mut wrong = Vec::new();
    for (name, golden) in goldens() {
        let vision = Arc::new(Vision::new(file(&golden, None, &[])).unwrap_or_else(|e| panic!("{name}: {e}")));
        let prepared = vision.prepare(&drawn(&golden)).unwrap();
        let inputs: Vec<&Pixels> = prepared.tiles.iter().chain(&prepared.overview).collect();
        assert_eq!(inputs.len(), number(&golden["inputs"]), "{name}");
        let mut encoder = Encoder::new(vision.clone(), executor(), &mut |_, _| {}).unwrap();
        for chunk in golden["chunks"].as_array().unwrap() {
            let input = inputs[number(&chunk["input"])];
            let rows = encoder.encode(input).unwrap_or_else(|e| panic!("{name}: {e}"));
            let sums: Vec<f32> = chunk["sums"].as_array().unwrap().iter().map(|v| v.as_f64().unwrap() as f32).collect();
            assert_eq!(rows.values.len(), sums.len() * vision.width(), "{name}: rows");
            assert_eq!(vision.rows(vision.grid(input.size)), sums.len(), "{name}: rows that are counted");
            let got: Vec<f32> = rows.values.chunks_exact(rows.width).map(|row| row.iter().sum()).collect();
            let by_sums = nmse(&got, &sums);
            let kept = chunk["rows"].as_array().unwrap().iter().map(number);
            let got: Vec<f32> = kept.flat_map(|row| rows.values[row * rows.width..][..rows.width].to_vec()).collect();
            let want = chunk["values"].as_array().unwrap().iter().flat_map(|row| row.as_array().unwrap());
            let want: Vec<f32> = want.map(|v| v.as_f64().unwrap() as f32).collect();
            let off = nmse(&got, &want);
            println!("{name} input {}: {off:.1e}, sums {by_sums:.1e}", chunk["input"]);
            if off.is_nan() || off > 1e-6 || by_sums.is_nan() || by_sums > 1e-6 {
                wrong.push(format!("{name}: {off:.1e}, sums {by_sums:.1e}"));
            }
        }
    }
    wrong
}

#[test]
fn rows_are_those_of_the_reference_on_the_cpu() {
    let wrong = judge(|| Box::new(CpuExecutor::new(Arithmetic::Fast)));
    assert!(wrong.is_empty(), "{wrong:#?}");
}

#[test]
fn rows_are_those_of_the_reference_on_a_device() {
    let Some((_, _instance)) = device::gpu() else { return };
    let wrong = judge(|| device::gpu().unwrap().0);
    assert!(wrong.is_empty(), "{wrong:#?}");
}

#[test]
fn the_words_around_pictures_are_those_of_the_reference() {
    /// Words that follow each other are one text.
    fn shown(pieces: impl Iterator<Item = PicturePart<usize>>) -> String {
        pieces
            .map(|piece| match piece {
                PicturePart::Words(text) => text,
                PicturePart::Input(input) => format!("\u{1}{input}\u{1}"),
            })
            .collect()
    }
    for (name, golden) in goldens() {
        let vision = Vision::new(file(&golden, None, &[])).unwrap();
        let prepared = vision.prepare(&drawn(&golden)).unwrap();
        let want = golden["layout"].as_array().unwrap().iter().map(|piece| match piece.as_str() {
            Some(text) => PicturePart::Words(text.to_owned()),
            None => PicturePart::Input(number(piece)),
        });
        assert_eq!(shown(vision.pieces(&prepared, 0).into_iter()), shown(want), "{name}");
    }
}

#[test]
fn models_that_pictures_cannot_be_put_before_are_refused() {
    let vision = |name: &str| {
        let (_, golden) = goldens().into_iter().find(|(known, _)| known == name).unwrap();
        Vision::new(file(&golden, None, &[])).unwrap()
    };
    for (encoder, model, part) in [
        ("llava", "llama-dense", "belongs to another model"),
        ("llava", "granite-dense", "factor of its embeddings"),
        ("llava", "qwen2vl-dense", "several positions"),
        ("qwen2vl", "qwen2vl-dense", "several positions"),
        ("gemma3", "llama-dense", "both directions"),
        ("llava", "bert-dense", "does not continue a text"),
    ] {
        let refused = vision(encoder).check_model(&tiny::model(&tiny::golden(model))).unwrap_err().to_string();
        assert!(refused.contains(part), "{encoder} before {model}: {refused}");
    }
}

#[test]
fn every_family_has_a_golden() {
    let judged: HashSet<String> = goldens()
        .iter()
        .map(|(_, golden)| Vision::new(file(golden, None, &[])).unwrap().row.projector.to_owned())
        .collect();
    let missing: Vec<&str> = TABLE.iter().map(|row| row.projector).filter(|name| !judged.contains(*name)).collect();
    assert!(missing.is_empty(), "{missing:?}");
}

#[test]
fn files_that_do_not_fit_are_refused_by_name() {
    for (name, golden) in goldens() {
        // Every tensor that a family needs is missed by name; those that may be missing change the plan and break nothing.
        for tensor in golden["tensors"].as_array().unwrap() {
            let without = tensor[0].as_str().unwrap();
            if let Err(error) = Vision::new(file(&golden, Some(without), &[])) {
                let message = error.to_string();
                assert!(message.contains('`') || message.contains("keys of"), "{name} without {without}: {message}");
            }
        }
        for (key, value, part) in [
            ("clip.vision.patch_size", Json::from(0), "clip.vision.patch_size"),
            ("clip.vision.embedding_length", Json::from(60), "`"),
            ("clip.vision.image_size", Json::from(9000), "clip.vision.image_size"),
            ("clip.vision.attention.head_count", Json::from(7), "clip.vision.attention.head_count"),
            ("clip.projector_type", Json::from("hologram"), "hologram"),
            ("general.architecture", Json::from("llama"), "llama"),
            ("clip.has_vision_encoder", Json::from(false), "no pictures"),
        ] {
            let error = Vision::new(file(&golden, None, &[(key, value)])).unwrap_err().to_string();
            assert!(error.contains(part), "{name} with {key}: {error}");
        }
    }
}
