//! What `scripts/goldens/models` made: llama.cpp's logits and greedy tokens for models with random weights.

#![allow(dead_code, clippy::unwrap_used, reason = "each test takes what it needs of it, and stops if it cannot go on")]

use std::path::PathBuf;
use std::sync::Arc;

use kiln_engine::model::Model;
use kiln_engine::quantise_recipe::Recipe;
use kiln_engine::synth::{Preset, Synth};
use kiln_gguf::Gguf;

/// Of `scripts/goldens/models`.
pub(crate) const SEED: u64 = 7;

pub(crate) fn synth(preset: &str, seed: u64) -> Arc<Model> {
    let synth = Synth::new(Preset::from_name(preset).unwrap(), Recipe::from_name("F32").unwrap(), seed);
    Arc::new(Model::new(Gguf::from_bytes(synth.to_bytes().unwrap()).unwrap()).unwrap())
}

pub(crate) fn path(name: &str) -> PathBuf {
    [env!("CARGO_MANIFEST_DIR"), "tests", name].iter().collect()
}

/// What a golden file holds.
pub(crate) struct Golden {
    pub(crate) tokens: Vec<u32>,
    pub(crate) positions: Vec<u32>,
    /// A row after each of `positions`.
    pub(crate) logits: Vec<f32>,
    pub(crate) prompt: Vec<u32>,
    /// What follows the prompt.
    pub(crate) greedy: Vec<u32>,
}

impl Golden {
    pub(crate) fn read(name: &str) -> Golden {
        let gguf = Gguf::open(path(&format!("goldens/{name}.gguf"))).unwrap();
        let words = |name: &str| -> Vec<u32> {
            let bytes = gguf.find(name).map_or(&[][..], |info| gguf.data(info));
            bytes.chunks_exact(4).map(|b| u32::from_le_bytes([b[0], b[1], b[2], b[3]])).collect()
        };
        Golden {
            tokens: words("tokens"),
            positions: words("positions"),
            logits: words("logits").into_iter().map(f32::from_bits).collect(),
            prompt: words("prompt"),
            greedy: words("greedy"),
        }
    }
}
