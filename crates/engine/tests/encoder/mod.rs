//! Tiny encoders of pictures and text models as `scripts/goldens/vision` describes them, and the pictures that they are shown.

#![allow(dead_code, clippy::unwrap_used, reason = "each test takes what it needs of it, and stops if it cannot go on")]

use std::path::PathBuf;

use kiln_engine::model::Model;
use kiln_gguf::{Gguf, Metadata, Strings, TensorType, Writer};
use kiln_media::{Picture, Size};
use serde_json::Value as Json;

/// Every golden of a folder with its name.
pub(crate) fn goldens(folder: &str) -> Vec<(String, Json)> {
    let folder = PathBuf::from(env!("CARGO_MANIFEST_DIR")).join("tests/goldens").join(folder);
    let mut all: Vec<(String, Json)> = std::fs::read_dir(folder)
        .unwrap()
        .map(|entry| {
            let path = entry.unwrap().path();
            let name = path.file_stem().unwrap().to_str().unwrap().to_owned();
            (name, serde_json::from_str(&std::fs::read_to_string(&path).unwrap()).unwrap())
        })
        .collect();
    all.sort_by(|a, b| a.0.cmp(&b.0));
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

pub(crate) fn number(value: &Json) -> usize {
    value.as_u64().unwrap() as usize
}

fn set(metadata: &mut Metadata, key: &str, value: &Json) {
    match value {
        Json::Bool(flag) => metadata.set(key, *flag),
        Json::String(text) => metadata.set(key, text.as_str()),
        Json::Number(n) if n.is_u64() && key == "clip.minicpmv_version" => metadata.set(key, number(value) as i32),
        Json::Number(n) if n.is_u64() => metadata.set(key, number(value) as u32),
        Json::Number(n) => metadata.set(key, n.as_f64().unwrap() as f32),
        Json::Array(all) if all.iter().all(Json::is_boolean) => {
            metadata.set(key, all.iter().filter_map(Json::as_bool).collect::<Vec<bool>>());
        }
        Json::Array(all) if all.iter().all(Json::is_u64) => {
            metadata.set(key, all.iter().map(|v| number(v) as i32).collect::<Vec<i32>>());
        }
        Json::Array(all) => metadata.set(key, all.iter().map(|v| v.as_f64().unwrap() as f32).collect::<Vec<f32>>()),
        other => panic!("{key}: {other}"),
    }
}

/// The file that a golden describes, with tensors of this name left out and keys changed.
pub(crate) fn file(golden: &Json, without: Option<&str>, changed: &[(&str, Json)]) -> Gguf {
    let mut metadata = Metadata::new();
    metadata.set("general.architecture", "clip");
    file_with(metadata, golden, without, changed)
}

/// The text model that a golden describes, with a vocabulary of bytes.
pub(crate) fn text(golden: &Json) -> Model {
    let mut metadata = Metadata::new();
    metadata.set("general.architecture", golden["architecture"].as_str().unwrap());
    let bytes = (0..256).map(|byte| format!("<0x{byte:02X}>"));
    let tokens: Strings = ["<unk>", "<s>", "</s>"].map(String::from).into_iter().chain(bytes).collect();
    let kinds: Vec<i32> = [2, 3, 3].into_iter().chain(std::iter::repeat_n(6, 256)).collect();
    metadata.set("tokenizer.ggml.model", "llama");
    metadata.set("tokenizer.ggml.scores", (0..tokens.len()).map(|at| -(at as f32)).collect::<Vec<f32>>());
    metadata.set("tokenizer.ggml.tokens", tokens);
    metadata.set("tokenizer.ggml.token_type", kinds);
    Model::new(file_with(metadata, golden, None, &[])).unwrap()
}

fn file_with(mut metadata: Metadata, golden: &Json, without: Option<&str>, changed: &[(&str, Json)]) -> Gguf {
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
    for (name, values) in golden["fixed"].as_object().into_iter().flatten() {
        let values: Vec<f32> = values.as_array().unwrap().iter().map(|v| v.as_f64().unwrap() as f32).collect();
        add(name, &[values.len()], values);
    }
    Gguf::from_bytes(writer.to_bytes().unwrap()).unwrap()
}

/// The picture that `drawn` of the script makes.
pub(crate) fn drawn(golden: &Json) -> Picture {
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

/// A file of sound: one channel of 16 bits.
pub(crate) fn wav(rate: u32, samples: &[i16]) -> Vec<u8> {
    let bytes = 2 * samples.len() as u32;
    let mut out = b"RIFF".to_vec();
    out.extend((36 + bytes).to_le_bytes());
    out.extend(b"WAVEfmt \x10\0\0\0\x01\0\x01\0");
    out.extend(rate.to_le_bytes());
    out.extend((2 * rate).to_le_bytes());
    out.extend(b"\x02\0\x10\0data");
    out.extend(bytes.to_le_bytes());
    out.extend(samples.iter().flat_map(|v| v.to_le_bytes()));
    out
}

pub(crate) fn nmse(got: &[f32], want: &[f32]) -> f64 {
    assert_eq!(got.len(), want.len());
    let (mut off, mut all) = (0.0, 0.0);
    for (a, b) in got.iter().zip(want) {
        off += (f64::from(*a) - f64::from(*b)).powi(2);
        all += f64::from(*b).powi(2);
    }
    off / all
}
