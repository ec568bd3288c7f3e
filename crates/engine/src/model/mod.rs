//! A model file, read: its configuration, the names of its tensors, and the check that they are all there.

mod config;
pub mod names;

use std::path::Path;
use std::sync::Arc;

use kiln_gguf::Gguf;

pub use config::{Architecture, Config, Rwkv};

use crate::Error;
use crate::tokenizer::Tokenizer;

/// An open model.
pub struct Model {
    /// The file.
    pub gguf: Arc<Gguf>,
    /// Its hyper-parameters, checked.
    pub config: Config,
    /// Its tokenizer.
    pub tokenizer: Arc<Tokenizer>,
}

impl Model {
    /// Opens a GGUF file and reads everything but the weights.
    pub fn open(path: impl AsRef<Path>) -> Result<Model, Error> {
        Model::new(Gguf::open(path)?)
    }

    /// The same from a file that is already open.
    pub fn new(gguf: Gguf) -> Result<Model, Error> {
        let config = Config::read(&gguf)?;
        let tokenizer = Arc::new(Tokenizer::from_gguf(gguf.metadata())?);
        Ok(Model { gguf: Arc::new(gguf), config, tokenizer })
    }
}
