//! A model file, read: its sizes, the keys and tensors its architecture asks for, and the check that nothing is left over.

pub(crate) mod adapter;
mod config;
mod keys;
mod loader;
pub mod names;
pub mod parts;

use std::path::Path;
use std::sync::Arc;

use kiln_gguf::Gguf;

pub use adapter::Adapter;
pub use config::Config;
pub use keys::{Keys, MOST_LAYERS};
pub use loader::{Cached, Facts, Loader};

use crate::Error;
use crate::arch::{BatchShape, Graph, Room, graph};
use crate::tokenizer::Tokenizer;

/// An open model.
pub struct Model {
    /// The file.
    pub gguf: Arc<Gguf>,
    /// Its sizes, checked.
    pub config: Config,
    /// What it asks of the rest of the engine.
    pub facts: Facts,
    /// Its tokenizer.
    pub tokenizer: Arc<Tokenizer>,
    adapters: Vec<Adapter>,
}

impl Model {
    /// Opens a GGUF file and reads everything but the weights.
    pub fn open(path: impl AsRef<Path>) -> Result<Model, Error> {
        Model::new(Gguf::open(path)?)
    }

    /// The same from a file that is already open.
    pub fn new(gguf: Gguf) -> Result<Model, Error> {
        let config = Config::read(&gguf)?;
        // Every key and the shape of every tensor is looked at now, so that what does not fit is said before anything is
        // loaded.
        let facts = graph(&config, &gguf, &Room::one(1))?.facts();
        let tokenizer = Arc::new(Tokenizer::from_gguf(gguf.metadata())?);
        Ok(Model { gguf: Arc::new(gguf), config, facts, tokenizer, adapters: Vec::new() })
    }

    /// The same model with adapters of it. One that changes a tensor in a way that Kiln does not compute is an error.
    pub fn with_adapters(mut self, adapters: Vec<Adapter>) -> Result<Model, Error> {
        self.adapters = adapters;
        if !self.adapters.is_empty() {
            let graph = self.graph(&Room::one(2))?;
            graph.check_adapters(BatchShape::new(2, 1), &self.adapters)?;
        }
        Ok(self)
    }

    /// Tokens of context that it is good for: as many as it was trained with. Where only distances count, longer texts are as good.
    pub fn usual_context(&self) -> usize {
        let trained = self.config.context.max(1);
        if self.facts.any_length { trained.saturating_mul(4) } else { trained }
    }

    /// Its adapters, in the order in which they were given.
    pub fn adapters(&self) -> &[Adapter] {
        &self.adapters
    }

    /// How strongly each adapter counts where nobody says otherwise.
    pub fn scales(&self) -> Vec<f32> {
        self.adapters.iter().map(|adapter| adapter.scale).collect()
    }

    /// What is built of it, with this much room in its caches.
    pub fn graph(&self, room: &Room) -> Result<Graph, Error> {
        Ok(graph(&self.config, &self.gguf, room)?.with_adapters(&self.adapters))
    }
}
