//! Models with random weights in real shapes, for tests and benches. Scales are sane, so that activations stay finite,
//! and the files hold everything other programs need to load and run them.
//!
//! ```
//! use kiln_engine::quantise_recipe::Recipe;
//! use kiln_engine::synth::{Preset, Synth};
//!
//! let preset = Preset::from_name("tiny-llama").unwrap();
//! let bytes = Synth::new(preset, Recipe::from_name("Q8_0").unwrap(), 1).to_bytes()?;
//! let model = kiln_gguf::Gguf::from_bytes(bytes)?;
//! assert_eq!(model.metadata().get_u32("llama.block_count")?, 2);
//! # Ok::<(), kiln_engine::synth::SynthError>(())
//! ```

mod gemma4;
mod presets;
mod tensors;
mod values;
mod vocab;

use std::collections::HashMap;
use std::sync::Arc;

use kiln_gguf::{Metadata, TensorType, Writer, quant};
use kiln_system::files::Output;
use rayon::prelude::*;

use crate::quantise_recipe::{ModelFacts, Recipe, TensorFacts};
pub use gemma4::Gemma4;
pub use presets::{Experts, Family, PRESETS, Preset};
use tensors::Spec;
use values::{Fill, Values};

/// Why a model could not be made.
#[derive(Debug, thiserror::Error)]
pub enum SynthError {
    /// The file could not be written.
    #[error(transparent)]
    Gguf(#[from] kiln_gguf::Error),
    /// The weights could not be packed.
    #[error("cannot make tensor `{tensor}`: {why}")]
    Quant {
        /// The tensor.
        tensor: String,
        /// Why not.
        why: quant::QuantError,
    },
}

/// Values that a stretch of a large tensor is drawn from at once.
const UNIT: usize = 256;
/// Different stretches there are of each kind.
const POOL_UNITS: usize = 4096;
/// Tensors with at most this many values are made value by value; larger ones are drawn from a pool of packed
/// stretches, because quantising billions of random numbers would take minutes and serve nobody.
const SMALL: usize = POOL_UNITS * UNIT;
/// Values of a piece that is made and written at once.
const PIECE: usize = 32 << 20;

/// A model to be made.
#[derive(Clone, Debug)]
pub struct Synth {
    metadata: Metadata,
    specs: Vec<Spec>,
    types: Vec<TensorType>,
    seed: u64,
}

/// Packed stretches by type and spread.
type Pools = HashMap<(TensorType, u32), Arc<Vec<u8>>>;

impl Synth {
    /// Decides everything but the numbers.
    pub fn new(preset: &Preset, recipe: Recipe, seed: u64) -> Synth {
        let mut tokenizer = Metadata::new();
        let vocab = vocab::set(preset, &mut tokenizer);
        let mut metadata = Metadata::new();
        tensors::describe(preset, vocab, &mut metadata);
        metadata.set("general.file_type", recipe.file_type);
        metadata.set("general.quantization_version", 2u32);
        tokenizer.iter().for_each(|(key, value)| metadata.set(key, value.clone()));
        let specs = tensors::specs(preset, vocab);
        let facts = ModelFacts::of(&metadata).expect("the keys were just written with their types");
        let given: Vec<TensorFacts<'_>> =
            specs.iter().map(|s| TensorFacts { name: &s.name, dims: &s.dims, ty: TensorType::F32 }).collect();
        let types = recipe.types(&facts, &given);
        Synth { metadata, specs, types, seed }
    }

    /// The keys of the file.
    pub fn metadata(&self) -> &Metadata {
        &self.metadata
    }

    /// Bytes of all tensors.
    pub fn data_bytes(&self) -> u64 {
        let bytes = |(spec, ty): (&Spec, &TensorType)| {
            let values: usize = spec.dims.iter().product();
            (values / ty.block_len() * ty.block_bytes()) as u64
        };
        self.specs.iter().zip(&self.types).map(bytes).sum()
    }

    /// The whole file in memory.
    pub fn to_bytes(&self) -> Result<Vec<u8>, SynthError> {
        let mut writer = Writer::new(self.metadata.clone());
        let mut pools = Pools::new();
        for (spec, &ty) in self.specs.iter().zip(&self.types) {
            let mut data = Vec::new();
            self.make(spec, ty, &mut pools, &mut |piece| {
                data.extend_from_slice(piece);
                Ok(())
            })?;
            writer.add(&spec.name, &spec.dims, ty, data)?;
        }
        Ok(writer.to_bytes()?)
    }

    /// Writes the file, which appears under its name when it is complete. `done` is told the bytes of each piece.
    pub fn save(&self, output: Output, done: &dyn Fn(u64)) -> Result<(), SynthError> {
        let mut writer = Writer::new(self.metadata.clone());
        for (spec, &ty) in self.specs.iter().zip(&self.types) {
            writer.declare(&spec.name, &spec.dims, ty)?;
        }
        let mut stream = writer.start_on(output)?;
        let mut pools = Pools::new();
        for (spec, &ty) in self.specs.iter().zip(&self.types) {
            self.make(spec, ty, &mut pools, &mut |piece| {
                stream.write_piece(&spec.name, piece)?;
                done(piece.len() as u64);
                Ok(())
            })?;
        }
        Ok(stream.finish()?)
    }

    /// Makes the data of a tensor, piece by piece.
    fn make(
        &self,
        spec: &Spec,
        ty: TensorType,
        pools: &mut Pools,
        put: &mut dyn FnMut(&[u8]) -> Result<(), SynthError>,
    ) -> Result<(), SynthError> {
        let count: usize = spec.dims.iter().product();
        let cols = spec.dims[0];
        let values = Values::new(self.seed, &spec.name);
        let failed = |why| SynthError::Quant { tensor: spec.name.clone(), why };
        if count <= SMALL || !cols.is_multiple_of(UNIT) {
            let rows = (PIECE / cols).max(1);
            for first in (0..count / cols).step_by(rows) {
                let rows = rows.min(count / cols - first);
                let mut plain = vec![0.0; rows * cols];
                plain.par_chunks_mut(cols).enumerate().for_each(|(row, out)| {
                    values.fill(&spec.fill, ((first + row) * cols) as u64, out);
                });
                let mut packed = vec![0; rows * cols / ty.block_len() * ty.block_bytes()];
                quant::quantise_rows_parallel(ty, &plain, cols, None, &mut packed).map_err(failed)?;
                put(&packed)?;
            }
            return Ok(());
        }
        let pool = self.pool(&spec.fill, ty, pools).map_err(failed)?;
        let unit = UNIT / ty.block_len() * ty.block_bytes();
        let units = count / UNIT;
        let mut piece = vec![0; (PIECE / UNIT).min(units) * unit];
        for first in (0..units).step_by(PIECE / UNIT) {
            let n = (PIECE / UNIT).min(units - first);
            // Tasks of a fixed size, so that the draw of a stretch depends on its place alone.
            const TASK: usize = 1024;
            piece[..n * unit].par_chunks_mut(TASK * unit).enumerate().for_each(|(task, out)| {
                for (i, stretch) in out.chunks_exact_mut(unit).enumerate() {
                    let drawn = values.bits((first + task * TASK + i) as u64) as usize % POOL_UNITS;
                    stretch.copy_from_slice(&pool[drawn * unit..(drawn + 1) * unit]);
                }
            });
            put(&piece[..n * unit])?;
        }
        Ok(())
    }

    /// The packed stretches for a type and a spread; made when first needed.
    fn pool(&self, fill: &Fill, ty: TensorType, pools: &mut Pools) -> Result<Arc<Vec<u8>>, quant::QuantError> {
        let spread = if let Fill::Normal(_, deviation) = fill { deviation.to_bits() } else { 0 };
        if let Some(pool) = pools.get(&(ty, spread)) {
            return Ok(Arc::clone(pool));
        }
        let values = Values::new(self.seed, &format!("pool {ty} {spread}"));
        let mut plain = vec![0.0; POOL_UNITS * UNIT];
        plain.par_chunks_mut(UNIT).enumerate().for_each(|(i, out)| values.fill(fill, (i * UNIT) as u64, out));
        let mut packed = vec![0; plain.len() / ty.block_len() * ty.block_bytes()];
        quant::quantise_rows_parallel(ty, &plain, UNIT, None, &mut packed)?;
        let pool = Arc::new(packed);
        pools.insert((ty, spread), Arc::clone(&pool));
        Ok(pool)
    }
}

#[cfg(test)]
mod tests {
    use kiln_gguf::Gguf;

    use super::*;
    use crate::tokenizer::{AddSpecial, ParseSpecial, ShowSpecial, Tokenizer};

    fn tiny(preset: &str, recipe: &str, seed: u64) -> Vec<u8> {
        Synth::new(Preset::from_name(preset).unwrap(), Recipe::from_name(recipe).unwrap(), seed).to_bytes().unwrap()
    }

    #[test]
    fn the_same_seed_gives_the_same_bytes_on_any_number_of_threads() {
        let one = rayon::ThreadPoolBuilder::new().num_threads(1).build().unwrap();
        let several = rayon::ThreadPoolBuilder::new().num_threads(5).build().unwrap();
        let make = |seed| move || tiny("tiny-llama-256", "Q4_K_M", seed);
        assert!(one.install(make(1)) == several.install(make(1)));
        assert!(one.install(make(1)) != one.install(make(2)));
    }

    #[test]
    fn every_tiny_preset_opens_and_its_tokenizer_gives_text_back() {
        for preset in PRESETS.iter().filter(|p| p.name.starts_with("tiny")) {
            let model = Gguf::from_bytes(tiny(preset.name, "F32", 3)).unwrap();
            assert!(model.find("blk.1.attn_norm.weight").is_some(), "{}", preset.name);
            let tokenizer = Tokenizer::from_gguf(model.metadata()).unwrap();
            for text in ["hello world and the thing", "é\n\n∂ 1234 <>\\"] {
                let ids = tokenizer.encode(text, AddSpecial::No, ParseSpecial::No).unwrap();
                assert!(!ids.is_empty());
                assert_eq!(tokenizer.decode(&ids, ShowSpecial::No).unwrap().trim_start(), text, "{}", preset.name);
            }
        }
    }

    #[test]
    fn large_presets_have_the_sizes_of_their_namesakes() {
        for (name, billions) in [
            ("smollm2-135m", 0.1345),
            ("llama-1b", 1.24),
            ("llama-8b", 8.03),
            ("qwen3-30b-a3b", 30.5),
            ("mixtral-8x7b", 46.7),
            ("gemma2-9b", 9.24),
            ("gemma4-12b", 11.9),
            ("gemma4-26b-a4b", 25.2),
            ("gemma4-31b", 30.7),
            ("rwkv6-1.6b", 1.6),
            ("rwkv6-7b", 7.6),
            ("rwkv7-2.9b", 2.95),
            ("mamba2-7b", 7.28),
            ("qwen3next-7b", 7.19),
            ("qwen3.5-35b-a3b", 34.7),
        ] {
            let synth = Synth::new(Preset::from_name(name).unwrap(), Recipe::from_name("F32").unwrap(), 0);
            let got = synth.data_bytes() as f64 / 4e9;
            assert!((got / billions - 1.0).abs() < 0.01, "{name}: {got}");
        }
    }
}
