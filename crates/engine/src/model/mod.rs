//! A model file, read: its sizes, the keys and tensors its architecture asks for, and the check that nothing is left over.

pub(crate) mod adapter;
mod config;
mod keys;
mod loader;
pub mod names;
pub mod overlay;
pub mod parts;
pub(crate) mod turned;

use std::path::Path;
use std::sync::Arc;

use kiln_gguf::{Gguf, Metadata};
use sha2::Sha256;

pub use adapter::Adapter;
pub use config::Config;
pub use keys::{Keys, MOST_LAYERS};
pub use loader::{Cached, Facts, Loader};
pub use overlay::{KeyValue, Overlay, RopeOptions, RopeScaling};

use crate::Error;
use crate::arch::{BatchShape, Graph, Room, graph, graph_with};
use crate::state;
use crate::tokenizer::{LISTS, Tokenizer};

/// An open model.
#[derive(Clone)]
pub struct Model {
    /// The file, without the lists of its vocabulary, which are in the tokenizer.
    pub gguf: Arc<Gguf>,
    /// Its sizes, checked.
    pub config: Config,
    /// What it asks of the rest of the engine.
    pub facts: Facts,
    /// Its tokenizer.
    pub tokenizer: Arc<Tokenizer>,
    adapters: Vec<Adapter>,
    wants_head: bool,
    keys_hash: Sha256,
}

impl Model {
    /// Opens a GGUF file and reads everything but the weights.
    pub fn open(path: impl AsRef<Path>) -> Result<Model, Error> {
        Model::new(Gguf::open(path)?)
    }

    /// The same from a file that is already open.
    pub fn new(gguf: Gguf) -> Result<Model, Error> {
        Model::with_tokenizer(gguf, |metadata, _| Ok(Tokenizer::from_gguf(metadata)?))
    }

    /// The same for callers that give ids of tokens alone: a vocabulary that cannot be read is no obstacle.
    pub fn of_ids(gguf: Gguf) -> Result<Model, Error> {
        Model::with_tokenizer(gguf, |metadata, tokens| {
            Ok(Tokenizer::from_gguf(metadata).or_else(|_| Tokenizer::of_ids(tokens))?)
        })
    }

    /// `tokenizer` makes it of the keys and of the number of tokens.
    fn with_tokenizer(
        mut gguf: Gguf,
        tokenizer: impl FnOnce(&Metadata, usize) -> Result<Tokenizer, Error>,
    ) -> Result<Model, Error> {
        let config = Config::read(&gguf)?;
        // Every key and the shape of every tensor is looked at now, so that what does not fit is said before anything is
        // loaded.
        let facts = graph(&config, &gguf, &Room::one(1))?.facts();
        let tokenizer = Arc::new(tokenizer(gguf.metadata(), config.vocab)?);
        let keys_hash = state::keys_hash(gguf.metadata());
        LISTS.iter().for_each(|list| drop(gguf.take(list)));
        Ok(Model { gguf: Arc::new(gguf), config, facts, tokenizer, adapters: Vec::new(), wants_head: false, keys_hash })
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

    /// The same model with the head of its file that drafts tokens, where it has one that Kiln runs ([`Facts::drafts`]).
    pub fn with_head(&self) -> Result<Model, Error> {
        let model = Model { wants_head: true, ..self.clone() };
        let facts = model.graph(&Room::one(1))?.facts();
        Ok(Model { facts, ..model })
    }

    /// Tokens of context that it is good for: as many as it was trained with, or as options stretch it to. Where only distances count, longer texts are as good.
    pub fn usual_context(&self) -> usize {
        let trained = self.facts.stretched.unwrap_or(self.config.context).max(1);
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

    /// A hash of all keys of the file, to go on from.
    pub(crate) fn keys_hash(&self) -> &Sha256 {
        &self.keys_hash
    }

    /// What is built of it, with this much room in its caches.
    pub fn graph(&self, room: &Room) -> Result<Graph, Error> {
        let graph = graph_with(&self.config, &self.gguf, room, self.wants_head)?;
        Ok(graph.with_adapters(&self.adapters))
    }
}

#[cfg(test)]
mod tests {
    use sha2::Digest as _;

    use super::*;
    use crate::quantise_recipe::Recipe;
    use crate::synth::{Preset, Synth};

    #[test]
    fn lists_of_the_vocabulary_are_hashed_and_not_kept() {
        for name in ["tiny-llama", "tiny-gemma2", "tiny-rwkv7"] {
            let synth = Synth::new(Preset::from_name(name).unwrap(), Recipe::from_name("F32").unwrap(), 1);
            let file = Gguf::from_bytes(synth.to_bytes().unwrap()).unwrap();
            let all = file.metadata().clone();
            let model = Model::new(file).unwrap();
            let kept = model.gguf.metadata();
            assert!(LISTS.iter().all(|list| !kept.contains(list)) && all.contains("tokenizer.ggml.tokens"));
            assert_eq!(all.len() - kept.len(), LISTS.iter().filter(|list| all.contains(list)).count());
            assert_eq!(model.tokenizer.n_tokens(), all.get_str_array("tokenizer.ggml.tokens").unwrap().len());
            let hash = |keys: &Sha256| keys.clone().finalize();
            assert_eq!(hash(model.keys_hash()), hash(&state::keys_hash(&all)));
            assert_ne!(hash(model.keys_hash()), hash(&state::keys_hash(kept)));
        }
    }
}
