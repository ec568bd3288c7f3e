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

/// Sizes of one plan.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub struct BatchShape {
    /// Tokens that enter.
    pub tokens: usize,
    /// Tokens whose logits are wanted.
    pub outputs: usize,
    /// Most columns of a product that are few ([`crate::executor::Executor::few_columns`]).
    pub few: usize,
}

impl BatchShape {
    /// The shape for an executor without matrix units.
    pub fn new(tokens: usize, outputs: usize) -> BatchShape {
        BatchShape { tokens, outputs, few: MOST_COLUMNS }
    }
}

/// What an architecture makes of a model file: shared slots, and plans on them.
pub trait Graph: Send + Sync {
    /// Weights, constants and state.
    fn fixed(&self) -> &Fixed;

    /// The plan for a batch shape.
    fn plan(&self, shape: BatchShape) -> Result<Plan, Error>;
}

/// The graph of a model with room for `context` tokens in its cache, where it has one.
pub fn graph(config: &Config, gguf: &Gguf, context: usize) -> Result<Box<dyn Graph>, Error> {
    match config.architecture {
        Architecture::Llama => Ok(Box::new(llama::Llama::new(config, gguf, context)?)),
        Architecture::Rwkv6 | Architecture::Rwkv6Qwen2 => Ok(Box::new(rwkv6::Rwkv6::new(config, gguf)?)),
        Architecture::Rwkv7 | Architecture::Arwkv7 => Ok(Box::new(rwkv7::Rwkv7::new(config, gguf)?)),
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
