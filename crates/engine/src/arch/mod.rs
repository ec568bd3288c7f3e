//! Architectures: each file builds the plan of one kind of model and reads like its paper. No device and no tensor
//! format is named here.

mod llama;
mod rwkv;
mod rwkv6;
mod rwkv7;

use kiln_gguf::{Gguf, TensorType};
use kiln_kernels::mul_mat::MOST_COLUMNS;
use kiln_kernels::tensor::Tensor;

use crate::Error;
use crate::model::{Architecture, Config};
use crate::plan::{Fixed, Plan, SlotKind};

/// Rows of a page of the key-value caches.
pub const PAGE: usize = 64;

/// Sizes of one plan. A batch holds `decode` rows of one token each, row i of sequence i, and behind them `prompt` rows: pieces
/// of the prompts of `pieces` more sequences, one after the other.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub struct BatchShape {
    /// Sequences that go on by one token.
    pub decode: usize,
    /// Tokens of prompts.
    pub prompt: usize,
    /// Sequences whose prompts these are.
    pub pieces: usize,
    /// Tokens whose logits are wanted. If all are, logits come in the order of the rows.
    pub outputs: usize,
    /// Most columns of a product that are few ([`crate::executor::Executor::few_columns`]).
    pub few: usize,
}

impl BatchShape {
    /// So many tokens of one sequence, for an executor without matrix units.
    pub fn new(tokens: usize, outputs: usize) -> BatchShape {
        let (decode, prompt, pieces) = if tokens == 1 { (1, 0, 0) } else { (0, tokens, 1) };
        BatchShape { decode, prompt, pieces, outputs, few: MOST_COLUMNS }
    }

    /// Tokens of the batch.
    pub fn rows(&self) -> usize {
        self.decode + self.prompt
    }

    /// Sequences of the batch: those that go on, then those whose prompts are read.
    pub fn sequences(&self) -> usize {
        self.decode + self.pieces
    }
}

/// What a model has to remember with: all sequences share it.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Room {
    /// Most tokens of one sequence.
    pub context: usize,
    /// Pages of the key-value caches, [`PAGE`] rows each.
    pub pages: usize,
    /// States of recurrent layers, one for each sequence.
    pub states: usize,
    /// Most sequences that go on at once.
    pub sequences: usize,
    /// Type of cached keys.
    pub k_type: TensorType,
    /// Type of cached values.
    pub v_type: TensorType,
}

impl Room {
    /// Room for one sequence.
    pub fn one(context: usize) -> Room {
        let pages = context.div_ceil(PAGE);
        Room { context, pages, states: 1, sequences: 1, k_type: TensorType::F16, v_type: TensorType::F16 }
    }

    /// Room for so many sequences, each as long as the context.
    pub fn for_sequences(sequences: usize, context: usize) -> Room {
        let one = Room::one(context);
        Room { pages: one.pages * sequences, states: sequences, sequences, ..one }
    }

    /// Pages of a sequence that is as long as it may be.
    pub fn pages_of_a_sequence(&self) -> usize {
        self.context.div_ceil(PAGE)
    }
}

/// What an architecture makes of a model file: shared slots, and plans on them.
pub trait Graph: Send + Sync {
    /// Weights, constants and state.
    fn fixed(&self) -> &Fixed;

    /// The plan for a batch shape.
    fn plan(&self, shape: BatchShape) -> Result<Plan, Error>;
}

/// The graph of a model with this much room in its caches, where it has some.
pub fn graph(config: &Config, gguf: &Gguf, room: &Room) -> Result<Box<dyn Graph>, Error> {
    match config.architecture {
        Architecture::Llama => Ok(Box::new(llama::Llama::new(config, gguf, room)?)),
        Architecture::Rwkv6 | Architecture::Rwkv6Qwen2 => Ok(Box::new(rwkv6::Rwkv6::new(config, gguf, room)?)),
        Architecture::Rwkv7 | Architecture::Arwkv7 => Ok(Box::new(rwkv7::Rwkv7::new(config, gguf, room)?)),
    }
}

/// Declares weights as they are asked for, checking names and shapes against the file.
struct WeightTable<'a> {
    gguf: &'a Gguf,
    fixed: Fixed,
}

impl WeightTable<'_> {
    /// A tensor that must be there with exactly these extents.
    fn weight(&mut self, name: &str, want: &[usize]) -> Result<Tensor, Error> {
        self.optional(name, want)?.ok_or_else(|| Error::MissingTensor { name: name.to_owned() })
    }

    /// A tensor that may be there.
    fn optional(&mut self, name: &str, want: &[usize]) -> Result<Option<Tensor>, Error> {
        let Some(info) = self.gguf.find(name) else { return Ok(None) };
        let mut padded = [1; 4];
        padded[..want.len()].copy_from_slice(want);
        if info.shape != padded {
            let (name, got, want) = (name.to_owned(), info.dims().to_vec(), want.to_vec());
            return Err(Error::TensorShape { name, got, want });
        }
        Ok(Some(self.fixed.add(name, SlotKind::Weight, info.ty, info.shape)))
    }

    /// Bytes computed at load, as I32.
    fn constant(&mut self, name: &str, values: &[i32], shape: [usize; 4]) -> Tensor {
        let bytes = values.iter().flat_map(|v| v.to_le_bytes()).collect();
        self.fixed.add(name, SlotKind::Constant(bytes), TensorType::I32, shape)
    }
}
