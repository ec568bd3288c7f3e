//! Every architecture against llama.cpp, on a tiny model of its kind. `scripts/judge-archs --goldens` made
//! `goldens/architectures`: keys and names of tensors of a model, tokens, and llama.cpp's logits of some of them. Weights are
//! drawn here from names and places alone, as the script draws them.

#![allow(clippy::unwrap_used, reason = "a test that cannot go on should stop")]

use std::path::PathBuf;

use kiln_engine::arch::{BatchShape, Room, TABLE, graph};
use kiln_engine::compare;
use kiln_engine::executor::{Arithmetic, CpuExecutor};
use kiln_engine::lower::{Target, lower};
use kiln_engine::model::Model;
use kiln_gguf::{Gguf, Strings, TensorType, Writer};

/// Architectures whose goldens are elsewhere (`rwkv.rs`).
const ELSEWHERE: [&str; 4] = ["rwkv6", "rwkv7", "rwkv6qwen2", "arwkv7"];

fn goldens() -> Vec<(String, Gguf)> {
    let folder: PathBuf = [env!("CARGO_MANIFEST_DIR"), "tests", "goldens", "architectures"].iter().collect();
    let mut files: Vec<PathBuf> = std::fs::read_dir(folder).unwrap().map(|entry| entry.unwrap().path()).collect();
    files.sort();
    let name = |path: &PathBuf| path.file_stem().unwrap().to_string_lossy().into_owned();
    files.iter().map(|path| (name(path), Gguf::open(path).unwrap())).collect()
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

fn drawn(name: &str, shape: &[usize]) -> Vec<u8> {
    let width = (shape[0] as f64).sqrt();
    let value = |x: f64| match name {
        _ if name.ends_with(".bias") => x * 0.3,
        _ if name.contains("norm") || name.ends_with("scale") => x * 0.2 + 1.0,
        _ if name.contains("rope_f") => x * 0.25 + 1.5,
        "token_embd.weight" => x,
        _ => x / width,
    };
    let values = noise(name).take(shape.iter().product());
    values.flat_map(|x| (value(x) as f32).to_le_bytes()).collect()
}

/// The model that a golden describes.
fn model(golden: &Gguf) -> Model {
    let mut metadata = golden.metadata().clone();
    let tensors: Vec<String> =
        metadata.get_str_array("golden.tensors").unwrap().iter().map(|t| String::from_utf8_lossy(t).into()).collect();
    metadata.remove("golden.tensors");
    let shape = |line: &str| -> Vec<usize> { line.split(' ').skip(1).map(|n| n.parse().unwrap()).collect() };
    let vocab = tensors.iter().find(|line| line.starts_with("token_embd.weight ")).map(|line| shape(line)[1]).unwrap();
    metadata.set("tokenizer.ggml.model", "llama");
    metadata.set("tokenizer.ggml.tokens", (0..vocab).map(|i| format!("tok_{i}")).collect::<Strings>());
    metadata.set("tokenizer.ggml.scores", vec![0.0f32; vocab]);
    metadata.set("tokenizer.ggml.add_bos_token", false);
    let mut writer = Writer::new(metadata);
    for line in &tensors {
        let (name, shape) = (line.split(' ').next().unwrap(), shape(line));
        writer.add(name, &shape, TensorType::F32, drawn(name, &shape)).unwrap();
    }
    Model::new(Gguf::from_bytes(writer.to_bytes().unwrap()).unwrap()).unwrap()
}

fn words(golden: &Gguf, name: &str) -> Vec<u32> {
    let bytes = golden.data(golden.tensor(name).unwrap());
    bytes.chunks_exact(4).map(|b| u32::from_le_bytes([b[0], b[1], b[2], b[3]])).collect()
}

#[test]
fn logits_are_those_of_llama_cpp() {
    let mut wrong = Vec::new();
    for (name, golden) in goldens() {
        let model = model(&golden);
        let (tokens, positions) = (words(&golden, "tokens"), words(&golden, "positions"));
        let want: Vec<f32> = words(&golden, "logits").into_iter().map(f32::from_bits).collect();
        let room = Room { k_type: TensorType::F32, v_type: TensorType::F32, ..Room::one(tokens.len()) };
        let graph = graph(&model.config, &model.gguf, &room).unwrap();
        let shape = BatchShape::new(tokens.len(), tokens.len());
        let plan = lower(graph.plan(shape).unwrap(), &Target::cpu()).unwrap();
        let mut executor = CpuExecutor::new(Arithmetic::Fast);
        let all = compare::logits(&model, &graph, &plan, (shape, &tokens), &mut executor).unwrap();
        let vocab = model.config.vocab;
        let got = positions.iter().flat_map(|p| &all[*p as usize * vocab..][..vocab]);
        let squared = |a: f32, b: f32| f64::from(a - b).powi(2);
        let sum: f64 = got.zip(&want).map(|(g, w)| squared(*g, *w)).sum();
        let error = sum / want.iter().map(|w| squared(*w, 0.0)).sum::<f64>();
        // llama.cpp takes GELU from a table of 16-bit floats.
        if error.is_nan() || error > 1e-6 {
            wrong.push(format!("{name}: {error:.1e}"));
        }
    }
    assert!(wrong.is_empty(), "{wrong:#?}");
}

#[test]
fn every_architecture_has_a_golden() {
    let goldens = goldens();
    let has = |name: &str| goldens.iter().any(|(file, _)| file.rsplit_once('-').is_some_and(|(of, _)| of == name));
    let without: Vec<&str> =
        TABLE.iter().map(|row| row.name).filter(|name| !ELSEWHERE.contains(name) && !has(name)).collect();
    assert!(without.is_empty(), "{without:?}");
}
