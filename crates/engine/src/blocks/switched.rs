//! Matrices with small changes (`lora_a`, `lora_b`) of which each token has one, and what says which: tokens that switch, and the mean of those before.

use kiln_gguf::TensorType;
use kiln_kernels::tensor::Tensor;

use super::attend::{Attended, Extras};
use crate::Error;
use crate::arch::Batch;
use crate::model::{Cached, Loader};
use crate::plan::{Builder, Linear};

/// Width of the rows of the switch's caches, of which one element counts: the narrowest that attention knows everywhere.
const WIDTH: usize = 64;
/// Added before means become whole numbers: halves go up, also where a mean was rounded a little below.
const HALF: f32 = 0.5 + 1e-5;

/// Which change each token has: the mean of the numbers of all tokens so far that switch.
#[derive(Clone, Debug)]
pub struct Switch {
    /// F32 `[1, vocab]`: numbers of tokens.
    numbers: Tensor,
    /// F32 `[1, vocab]`: how much tokens count, as a logarithm.
    weights: Tensor,
    /// F32 `[1, vocab]`: the tokens whose embeddings these have.
    tokens: Tensor,
    /// F32 `[WIDTH]`: 1 and zeros.
    unit: Tensor,
    caches: [Tensor; 2],
}

impl Switch {
    /// Token i of `activate` switches to change i + 1 and has the embedding of token i of `substitute`.
    pub fn load(
        l: &mut Loader<'_>,
        [activate, substitute]: [&[usize]; 2],
        gain: f32,
        vocab: usize,
    ) -> Result<Switch, Error> {
        let (mut numbers, mut weights) = (vec![0f32; vocab], vec![-gain; vocab]);
        let mut tokens: Vec<f32> = (0..vocab).map(|token| token as f32).collect();
        for (i, (from, to)) in activate.iter().zip(substitute).enumerate() {
            (numbers[*from], weights[*from], tokens[*from]) = ((i + 1) as f32, gain, *to as f32);
        }
        let unit: Vec<f32> = (0..WIDTH).map(|i| if i == 0 { 1.0 } else { 0.0 }).collect();
        let mut table = |name: &str, values: &[f32]| l.constant(name, values, [1, vocab, 1, 1]);
        let [numbers, weights, tokens] =
            [table("switch.numbers", &numbers), table("switch.weights", &weights), table("switch.tokens", &tokens)];
        let unit = l.constant("switch.unit", &unit, [WIDTH, 1, 1, 1]);
        let mut cache = |name: &str, which| l.heads_cache(name, which, [WIDTH, 1], None);
        let caches = [cache("switch.k_cache", Cached::Keys)?, cache("switch.v_cache", Cached::Values)?];
        Ok(Switch { numbers, weights, tokens, unit, caches })
    }

    /// The tokens whose embeddings are taken, I32 `[rows]`.
    pub fn tokens(&self, b: &mut Builder, batch: &Batch) -> Tensor {
        b.at("switch");
        let tokens = b.rows("tokens", self.tokens, batch.ports.tokens);
        let ids = b.fresh("token_ids", TensorType::I32, tokens.shape);
        b.copy("token_ids", tokens, ids);
        ids.reshape([ids.shape[1], 1, 1, 1])
    }

    /// The change of each token, I32 `[1, rows]`.
    pub fn build(&self, b: &mut Builder, batch: &Batch) -> Tensor {
        b.at("switch");
        let rows = batch.shape.rows();
        // The same for every row: a stride of 0.
        let units = Tensor { shape: [WIDTH, rows, 1, 1], stride: [4, 0, 0, 0], ..self.unit };
        let ids = batch.places(None).rows;
        for (name, table, cache) in [("k", self.weights, self.caches[0]), ("v", self.numbers, self.caches[1])] {
            let numbers = b.rows(name, table, batch.ports.tokens);
            let wide = b.multiply(&format!("{name}_wide"), units, numbers);
            b.store(&format!("{name}_write"), wide, ids, cache);
        }
        let q = b.fresh("q", TensorType::F32, [WIDTH, rows, 1, 1]);
        b.copy("q", units, q);
        let how = Attended {
            heads: 1,
            kv_heads: 1,
            head_dim: WIDTH,
            value_dim: WIDTH,
            scale: 1.0,
            softcap: 0.0,
            max_bias: 0.0,
            window: None,
            chunk: None,
            causal: true,
        };
        let mean = how.build(b, batch, q.reshape([WIDTH, 1, rows, 1]), self.caches, Extras::default());
        let near = b.affine("near", mean.narrow(0, 0, 1), 1.0, HALF);
        let change = b.fresh("change", TensorType::I32, [1, rows, 1, 1]);
        b.copy("change", near, change);
        change
    }
}

/// A matrix with its changes.
#[derive(Clone, Debug)]
pub struct Switched {
    linear: Linear,
    a: Linear,
    b: Linear,
}

impl Switched {
    /// The `count` changes of `NAME`, each of this rank, with its matrix `[in, out]`.
    pub fn load(l: &mut Loader<'_>, name: &str, linear: Linear, [rank, count]: [usize; 2]) -> Result<Switched, Error> {
        let [from, to, ..] = linear.weight.shape;
        let a = Linear::plain(l.tensor(&format!("{name}.lora_a"), &[from, rank, count])?);
        let b = Linear::plain(l.tensor(&format!("{name}.lora_b"), &[rank, to, count])?);
        Ok(Switched { linear, a, b })
    }

    /// The product with `x [in, rows]`, each row with its change.
    pub fn build(&self, b: &mut Builder, name: &str, x: Tensor, change: Tensor) -> Tensor {
        let y = b.linear(name, x, &self.linear);
        let [width, rows, ..] = x.shape;
        let low = b.experts(&format!("{name}.lora_a"), x.reshape([width, 1, rows, 1]), &self.a, change);
        let high = b.experts(&format!("{name}.lora_b"), low, &self.b, change);
        b.add(&format!("{name}.changed"), y, high.reshape(y.shape))
    }
}
