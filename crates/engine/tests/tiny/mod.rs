//! Tiny models of every architecture. `scripts/oracle/archs --goldens` made `goldens/architectures`: keys and names of tensors of a model,
//! tokens, and llama.cpp's logits of some of them. Weights are drawn here from names and places alone, as the script draws them.

#![allow(dead_code, clippy::unwrap_used, reason = "each test takes what it needs of it, and stops if it cannot go on")]

use std::path::PathBuf;

use kiln_engine::Error;
use kiln_engine::model::Model;
use kiln_gguf::{Gguf, Metadata, Strings, TensorType, Writer};

/// Every golden with its name.
pub(crate) fn goldens() -> Vec<(String, Gguf)> {
    let folder: PathBuf = [env!("CARGO_MANIFEST_DIR"), "tests", "goldens", "architectures"].iter().collect();
    let mut files: Vec<PathBuf> = std::fs::read_dir(folder).unwrap().map(|entry| entry.unwrap().path()).collect();
    files.sort();
    let name = |path: &PathBuf| path.file_stem().unwrap().to_string_lossy().into_owned();
    files.iter().map(|path| (name(path), Gguf::open(path).unwrap())).collect()
}

/// A golden of a prompt of thousands of tokens.
pub(crate) fn long(name: &str) -> Gguf {
    let file = format!("{name}.gguf");
    let path: PathBuf = [env!("CARGO_MANIFEST_DIR"), "tests", "goldens", "long", &file].iter().collect();
    Gguf::open(path).unwrap()
}

/// Numbers of mean 0 and variance 1 that depend on the name and the place alone.
fn noise(name: &str) -> impl Iterator<Item = f64> {
    let seed = name.bytes().fold(0xcbf2_9ce4_8422_2325u64, |s, b| (s ^ u64::from(b)).wrapping_mul(0x0100_0000_01b3));
    (1u64..).map(move |i| {
        let mut z = seed.wrapping_add(i.wrapping_mul(0x9e37_79b9_7f4a_7c15));
        z = (z ^ (z >> 30)).wrapping_mul(0xbf58_476d_1ce4_e5b9);
        z = (z ^ (z >> 27)).wrapping_mul(0x94d0_49bb_1331_11eb);
        z ^= z >> 31;
        ((z >> 11) as f64 * 2f64.powi(-53) * 2.0 - 1.0) * 3f64.sqrt()
    })
}

/// The values of a tensor, such that every part of a model counts.
pub(crate) fn drawn(name: &str, shape: &[usize]) -> Vec<u8> {
    drawn_by(name, name, shape)
}

/// The same with the noise of another name.
pub(crate) fn drawn_by(name: &str, noise_of: &str, shape: &[usize]) -> Vec<u8> {
    if name.ends_with("tid2eid.weight") {
        // Neighbouring experts from any of eight on.
        let first = noise(name).map(|x| ((x / 3f64.sqrt() + 1.0) * 4.0) as usize).step_by(shape[0]);
        let ids = first.take(shape[1]).flat_map(|first| (0..shape[0]).map(move |i| ((first + i) % 8) as f32));
        return ids.flat_map(f32::to_le_bytes).collect();
    }
    let width = (shape[0] as f64).sqrt();
    let value = |x: f64| match name {
        _ if name.ends_with(".bias") => x * 0.3,
        // Decays: what is remembered fades.
        _ if name.ends_with("ssm_a") => x * -0.4 - 1.0,
        _ if name.contains("norm") || name.ends_with("scale") || name.ends_with("ssm_d") => x * 0.2 + 1.0,
        _ if name.contains("rope_f") => x * 0.25 + 1.5,
        "token_embd.weight" => x,
        _ => x / width,
    };
    let values = noise(noise_of).take(shape.iter().product());
    values.flat_map(|x| (value(x) as f32).to_le_bytes()).collect()
}

/// The model that a golden describes.
pub(crate) fn model(golden: &Gguf) -> Model {
    model_of(golden, drawn)
}

/// The same with weights from elsewhere.
pub(crate) fn model_of(golden: &Gguf, values: impl Fn(&str, &[usize]) -> Vec<u8>) -> Model {
    changed(golden, values, |_, _| {}).unwrap()
}

/// The same with other keys and tensors, each a line of its name and extents; an error where they do not make a model.
pub(crate) fn changed(
    golden: &Gguf,
    values: impl Fn(&str, &[usize]) -> Vec<u8>,
    change: impl Fn(&mut Metadata, &mut Vec<String>),
) -> Result<Model, Error> {
    let mut metadata = golden.metadata().clone();
    let mut tensors: Vec<String> =
        metadata.get_str_array("golden.tensors").unwrap().iter().map(|t| String::from_utf8_lossy(t).into()).collect();
    metadata.remove("golden.tensors");
    let gains = gains(&metadata);
    metadata.remove("golden.gains");
    let shape = |line: &str| -> Vec<usize> { line.split(' ').skip(1).map(|n| n.parse().unwrap()).collect() };
    let vocab = tensors.iter().find(|line| line.starts_with("token_embd.weight ")).map(|line| shape(line)[1]).unwrap();
    metadata.set("tokenizer.ggml.model", "llama");
    metadata.set("tokenizer.ggml.tokens", (0..vocab).map(|i| format!("tok_{i}")).collect::<Strings>());
    metadata.set("tokenizer.ggml.scores", vec![0.0f32; vocab]);
    metadata.set("tokenizer.ggml.add_bos_token", false);
    change(&mut metadata, &mut tensors);
    let mut writer = Writer::new(metadata);
    for line in &tensors {
        let (name, shape) = (line.split(' ').next().unwrap(), shape(line));
        let factor: f32 = gains.iter().filter(|(end, _)| name.ends_with(&**end)).map(|(_, factor)| factor).product();
        let mut bytes = values(name, &shape);
        for value in bytes.chunks_exact_mut(4).filter(|_| factor != 1.0) {
            let scaled = f32::from_le_bytes([value[0], value[1], value[2], value[3]]) * factor;
            value.copy_from_slice(&scaled.to_le_bytes());
        }
        writer.add(name, &shape, TensorType::F32, bytes).unwrap();
    }
    Model::new(Gguf::from_bytes(writer.to_bytes().unwrap()).unwrap())
}

/// How names end and how much larger these weights are.
fn gains(metadata: &Metadata) -> Vec<(String, f32)> {
    let Ok(lines) = metadata.get_str_array("golden.gains") else { return Vec::new() };
    let parse = |line: &[u8]| {
        let line = String::from_utf8_lossy(line);
        let (end, factor) = line.split_once(' ').unwrap();
        (end.to_owned(), factor.parse().unwrap())
    };
    lines.iter().map(parse).collect()
}

/// A tensor of a golden, word by word.
pub(crate) fn words(golden: &Gguf, name: &str) -> Vec<u32> {
    let bytes = golden.data(golden.tensor(name).unwrap());
    bytes.chunks_exact(4).map(|b| u32::from_le_bytes([b[0], b[1], b[2], b[3]])).collect()
}

/// A golden by its name.
pub(crate) fn golden(name: &str) -> Gguf {
    goldens().into_iter().find(|(known, _)| known == name).unwrap().1
}
