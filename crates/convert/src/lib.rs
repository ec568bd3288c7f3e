//! From a folder as Hugging Face has it (`config.json`, safetensors, a tokenizer) to one GGUF file.
//!
//! `families.rs` is the table: which classes of models there are, what their keys and tensors are called in GGUF, and what must
//! be done to the numbers. A tensor or a setting that the table does not know is an error: a model that is converted is whole.

mod config;
mod encoders;
mod error;
mod families;
mod names;
mod safetensors;
mod sentencepiece;
mod settings;
mod tensors;
mod vocabulary;

use std::path::{Path, PathBuf};

use kiln_gguf::{Metadata, TensorType, Writer};
use kiln_system::files::Output;

use config::Config;
pub use error::{Error, Result};
pub use families::families;
use safetensors::Weights;
use tensors::Made;

/// What may be said beside the folder.
#[derive(Clone, Debug)]
pub struct Options {
    /// The type of the matrices.
    pub ty: TensorType,
    /// The number of `general.file_type` that goes with it.
    pub file_type: u32,
    /// How texts are cut before merging (`tokenizer.ggml.pre`), where the folder does not tell.
    pub pre: Option<String>,
    /// The model's name, where it should not be the folder's.
    pub name: Option<String>,
}

/// A folder that was read, and what will become of it.
pub struct Conversion {
    weights: Weights,
    metadata: Metadata,
    tensors: Vec<Made>,
    notes: Vec<String>,
    /// The architecture's name in GGUF.
    pub architecture: &'static str,
}

impl Conversion {
    /// Reads a folder and decides what becomes of it; nothing is written.
    pub fn open(folder: &Path, options: &Options) -> Result<Conversion> {
        let config = Config::read(folder)?;
        let family = families::of(&config)?;
        let weights = Weights::open(folder)?;
        let mut metadata = Metadata::new();
        metadata.set("general.architecture", family.architecture);
        metadata.set("general.type", "model");
        let name = options.name.clone().or_else(|| folder_name(folder)).unwrap_or_else(|| "model".into());
        metadata.set("general.name", name);
        metadata.set("general.file_type", options.file_type);
        metadata.set("general.quantization_version", 2u32);
        let extra = family.keys(&config, &mut metadata)?;
        if family.encoder {
            encoders::pooling(folder, &config, &mut metadata)?;
        }
        let embedding = match family.encoder {
            true => {
                weights.rows(encoders::EMBEDDING).or_else(|| weights.rows(&format!("bert.{}", encoders::EMBEDDING)))
            }
            false => weights.rows(names::EMBEDDING),
        };
        let embedding = embedding.unwrap_or(0);
        vocabulary::read(folder, &config, embedding, family, options.pre.as_deref(), &mut metadata)?;
        let tensors = tensors::plan(&weights, &config, family, options.ty, extra)?;
        let mut notes = settings::check(&config, family)?;
        notes.extend(tensors::fallbacks(&tensors, options.ty));
        Ok(Conversion { weights, metadata, tensors, notes, architecture: family.architecture })
    }

    /// What the user should know of the result.
    pub fn notes(&self) -> &[String] {
        &self.notes
    }

    /// Tensors: name, extents (innermost first) and type.
    pub fn tensors(&self) -> impl ExactSizeIterator<Item = (&str, &[usize], TensorType)> {
        self.tensors.iter().map(|made| (made.name.as_str(), made.dims.as_slice(), made.ty))
    }

    /// The keys of the file.
    pub fn metadata(&self) -> &Metadata {
        &self.metadata
    }

    /// Files that are read.
    pub fn paths(&self) -> Vec<PathBuf> {
        self.weights.paths()
    }

    /// Bytes of tensors in the new file.
    pub fn data_bytes(&self) -> u64 {
        self.tensors.iter().map(Made::bytes).sum()
    }

    /// Writes the file, which appears under its name when it is complete. `done` is told the bytes of each piece.
    pub fn save(&self, output: Output, done: &dyn Fn(u64)) -> Result<()> {
        let mut writer = Writer::new(self.metadata.clone());
        for made in &self.tensors {
            writer.declare(&made.name, &made.dims, made.ty)?;
        }
        let mut stream = writer.start_on(output)?;
        for made in &self.tensors {
            made.write(&self.weights, &mut |piece| {
                stream.write_piece(&made.name, piece)?;
                done(piece.len() as u64);
                Ok(())
            })?;
        }
        Ok(stream.finish()?)
    }
}

fn folder_name(folder: &Path) -> Option<String> {
    let whole = std::fs::canonicalize(folder).ok()?;
    Some(whole.file_name()?.to_string_lossy().into_owned())
}
