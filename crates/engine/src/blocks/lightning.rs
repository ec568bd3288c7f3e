//! Lightning attention: no softmax; what a head remembers decays by a constant, which follows from the numbers of the head and the layer.

use kiln_gguf::TensorType;
use kiln_kernels::recurrence::Form;
use kiln_kernels::tensor::Tensor;
use kiln_kernels::unary::Function;
use kiln_kernels::{copy, gla};

use super::mixer::Mixer;
use crate::Error;
use crate::arch::Batch;
use crate::model::Loader;
use crate::plan::{Builder, Linear, Norm};

/// Sizes of lightning attention.
#[derive(Clone, Copy, Debug)]
pub struct LightningSizes {
    /// Width of the tokens.
    pub hidden: usize,
    /// Heads.
    pub heads: usize,
    /// Width of a head.
    pub head_dim: usize,
    /// Layers of the model.
    pub layers: usize,
    /// What norms add.
    pub eps: f32,
}

/// Lightning attention of one layer.
pub struct Lightning {
    sizes: LightningSizes,
    qkv: Linear,
    gate: Linear,
    norm: Norm,
    output: Linear,
    /// `[head_dim, heads]`: what is left of a state after a token.
    decays: Tensor,
    state: Tensor,
}

impl Lightning {
    /// Reads it; `layer` names its state.
    pub fn load(l: &mut Loader<'_>, sizes: LightningSizes, layer: usize) -> Result<Lightning, Error> {
        let LightningSizes { hidden, heads, head_dim, layers, eps } = sizes;
        let width = heads * head_dim;
        let of_layer = 1.0 - layer as f64 / (layers.max(2) - 1) as f64 + 1e-5;
        let slope = |head: usize| (-8.0 * (head + 1) as f64 / heads as f64).exp2();
        let decay = |at: usize| (-slope(at / head_dim) * of_layer).exp() as f32;
        let decays: Vec<f32> = (0..width).map(decay).collect();
        let norm = Norm::Rms { weight: Some(l.vector("attn_norm_2.weight", &[width])?), eps };
        Ok(Lightning {
            sizes,
            qkv: l.unscaled("attn_qkv", &[hidden, 3 * width])?,
            gate: l.unscaled("attn_gate", &[hidden, width])?,
            norm,
            output: l.unscaled("attn_output", &[width, hidden])?,
            decays: l.constant(&format!("{layer}.lightning.decays"), &decays, [head_dim, heads, 1, 1]),
            state: l.state(&format!("{layer}.lightning.state"), &[head_dim, head_dim, heads]),
        })
    }
}

impl Mixer for Lightning {
    fn build(&self, b: &mut Builder, batch: &Batch, x: Tensor) -> Tensor {
        let LightningSizes { heads, head_dim, .. } = self.sizes;
        let tokens = x.shape[1];
        // Of each head queries, keys, values.
        let all = b.linear("qkv", x, &self.qkv).heads(0, 3 * head_dim, heads);
        let part = |n: usize| all.narrow(0, n * head_dim, head_dim);
        let [r, k, v] = [("q", 0), ("k", 1), ("v", 2)].map(|(name, n)| b.function(name, part(n), Function::Silu));
        // A view that does not advance in dimension 2 repeats.
        let src = Tensor { shape: r.shape, stride: [4, 4 * head_dim, 0, 0], ..self.decays };
        let td = b.like("decays", r);
        b.step("decays", copy::Call { src, dst: td });
        let y = b.fresh("", TensorType::F32, r.shape);
        let (sequences, slots) = batch.recurrence();
        let (state_in, state_out) = (self.state, self.state);
        let (scratch, form, scale) = (None, Form::Auto, 1.0);
        b.step("", gla::Call { k, v, r, td, state_in, y, state_out, scratch, sequences, slots, form, scale });
        let y = b.norm("norm.heads", y.reshape([heads * head_dim, tokens, 1, 1]), &self.norm);
        let gate = b.linear("gate", x, &self.gate);
        let gate = b.function("gate.sigmoid", gate, Function::Sigmoid);
        let y = b.multiply("gated", y, gate);
        b.linear("output", y, &self.output)
    }
}
