//! Tiny models with a head that drafts. `scripts/goldens/heads` made `goldens/heads`.

#![allow(dead_code, clippy::unwrap_used, reason = "each test takes what it needs of it, and stops if it cannot go on")]

use std::path::PathBuf;

use kiln_engine::model::Model;
use kiln_gguf::Gguf;

use super::tiny::{changed, drawn_by};

/// What ends a half of a layer.
const ENDS: [&str; 5] =
    ["attn_output.weight", "ssm_out.weight", "ffn_down.weight", "ffn_down_exps.weight", "ffn_down_shexp.weight"];

/// Every golden with its name.
pub(crate) fn goldens() -> Vec<(String, Gguf)> {
    let folder: PathBuf = [env!("CARGO_MANIFEST_DIR"), "tests", "goldens", "heads"].iter().collect();
    let mut files: Vec<PathBuf> = std::fs::read_dir(folder).unwrap().map(|entry| entry.unwrap().path()).collect();
    files.sort();
    let name = |path: &PathBuf| path.file_stem().unwrap().to_string_lossy().into_owned();
    files.iter().map(|path| (name(path), Gguf::open(path).unwrap())).collect()
}

/// A golden by its name.
pub(crate) fn golden(name: &str) -> Gguf {
    goldens().into_iter().find(|(known, _)| known == name).unwrap().1
}

/// How weights are drawn.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Weights {
    seed: u32,
    /// What layers add, against what they would.
    layers: f32,
    /// Whether the head gives the logits of a model whose layers add nothing.
    is_right: bool,
}

impl Weights {
    /// As the golden of this name has them.
    pub(crate) fn of_file(name: &str) -> Weights {
        Weights { seed: name.rsplit_once('-').unwrap().1.parse().unwrap(), layers: 1.0, is_right: false }
    }

    /// Layers of the model add nothing.
    pub(crate) fn without_layers(self) -> Weights {
        Weights { layers: 0.0, ..self }
    }

    /// Layers of the model add little, and the head leaves them out: it is right for the most part.
    pub(crate) fn nearly_right(self) -> Weights {
        Weights { layers: 0.15, is_right: true, ..self }
    }

    /// The values of a tensor. The head is block 2.
    pub(crate) fn of(&self, name: &str, shape: &[usize]) -> Vec<u8> {
        let ends = ENDS.iter().any(|end| name.ends_with(end));
        let is_head = name.starts_with("blk.2.");
        if self.is_right && is_head && name.ends_with("eh_proj.weight") {
            // The embedding passes, the state does not.
            let one = |i: usize| if i % shape[0] == i / shape[0] { 1.0f32 } else { 0.0 };
            return (0..shape[0] * shape[1]).flat_map(|i| one(i).to_le_bytes()).collect();
        }
        if self.is_right && is_head && name.ends_with("nextn.enorm.weight") {
            return 1f32.to_le_bytes().repeat(shape[0]);
        }
        let name_of_noise = match name {
            "blk.2.nextn.shared_head_norm.weight" if self.is_right => "output_norm.weight",
            name => name,
        };
        let factor = match (ends, is_head) {
            (true, false) => self.layers,
            (true, true) if self.is_right => 0.0,
            _ => 1.0,
        };
        let values = drawn_by(name_of_noise, &format!("{}/{name_of_noise}", self.seed), shape);
        let scaled = values.chunks_exact(4).map(|b| f32::from_le_bytes([b[0], b[1], b[2], b[3]]) * factor);
        scaled.flat_map(f32::to_le_bytes).collect()
    }
}

/// The model that a golden describes, with its head.
pub(crate) fn model(golden: &Gguf, weights: &Weights) -> Model {
    plain(golden, weights).with_head().unwrap()
}

/// The same without its head.
pub(crate) fn plain(golden: &Gguf, weights: &Weights) -> Model {
    changed(golden, |name, shape| weights.of(name, shape), |_, _| {}).unwrap()
}
