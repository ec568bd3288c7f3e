//! What every model has, whatever its architecture. The rest is read by the architecture itself (`crate::arch`).

use kiln_gguf::Gguf;

use super::Keys;
use super::keys::MOST_LAYERS;
use crate::Error;
use crate::arch::{self, ArchEntry};
use crate::model::names;

/// The sizes that the rest of the engine looks at.
#[derive(Clone, Debug)]
pub struct Config {
    /// How the model is built.
    pub architecture: &'static ArchEntry,
    /// Number of layers.
    pub layers: usize,
    /// Width of the residual stream.
    pub hidden: usize,
    /// Tokens in the vocabulary.
    pub vocab: usize,
    /// Context length the model was trained with.
    pub context: usize,
}

impl Config {
    /// Reads and checks the sizes of a file.
    pub fn read(gguf: &Gguf) -> Result<Config, Error> {
        let architecture = arch::find(gguf.metadata().get_str("general.architecture")?)?;
        let keys = Keys::new(gguf, architecture.name);
        let embedding = gguf.find(names::TOKEN_EMBEDDING);
        let embedding = embedding.ok_or_else(|| Error::MissingTensor { name: names::TOKEN_EMBEDDING.into() })?;
        Ok(Config {
            architecture,
            layers: keys.count("block_count", MOST_LAYERS)?,
            hidden: keys.count("embedding_length", 1 << 17)?,
            vocab: embedding.shape[1],
            context: keys.count("context_length", 1 << 24)?,
        })
    }
}
