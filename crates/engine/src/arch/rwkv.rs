//! What RWKV-6 and RWKV-7 share: the frame around the layers, the state that takes the place of a cache, the shift by one
//! token, and the channel mix. The time mix, in which they differ, is in their own files.

use kiln_gguf::TensorType;
use kiln_kernels::binary::{self, Operator};
use kiln_kernels::tensor::Tensor;
use kiln_kernels::unary::{self, Function};
use kiln_kernels::{Call, copy, get_rows, group_norm, mul_mat, norm, scale};

use super::{BatchShape, WeightTable};
use crate::Error;
use crate::model::{Config, Rwkv, names};
use crate::plan::{Builder, Fixed, Plan, Ports, SlotKind};

/// Added to the variance in the norm of each head.
const HEAD_EPS: f32 = 64e-5;

/// Weight and bias of a norm.
#[derive(Clone, Copy)]
pub(super) struct Norm {
    weight: Tensor,
    bias: Tensor,
}

/// The tensors of one layer, asked for by their names.
pub(super) struct LayerTable<'t, 'g> {
    table: &'t mut WeightTable<'g>,
    layer: usize,
}

impl LayerTable<'_, '_> {
    /// A weight that must be there; `name` is without `.weight`.
    pub(super) fn weight(&mut self, name: &str, want: &[usize]) -> Result<Tensor, Error> {
        self.table.weight(&names::layer(&format!("{name}.weight"), self.layer), want)
    }

    /// A norm with weight and bias.
    pub(super) fn norm(&mut self, name: &str, width: usize) -> Result<Norm, Error> {
        let bias = self.table.weight(&names::layer(&format!("{name}.bias"), self.layer), &[width])?;
        Ok(Norm { weight: self.weight(name, &[width])?, bias })
    }

    /// A vector for the last token's input of a mix.
    pub(super) fn shift_state(&mut self, name: &str, config: &Config) -> Tensor {
        self.state(name, [config.hidden, 1, 1, 1])
    }

    /// The matrix of each head.
    pub(super) fn wkv_state(&mut self, config: &Config) -> Tensor {
        self.state("wkv_state", [config.head_dim, config.head_dim, config.heads, 1])
    }

    fn state(&mut self, name: &str, shape: [usize; 4]) -> Tensor {
        self.table.fixed.add(format!("{}.{name}", self.layer), SlotKind::State, TensorType::F32, shape)
    }
}

/// A model without its layers.
pub(super) struct Frame {
    pub(super) config: Config,
    pub(super) rwkv: Rwkv,
    embedding: Tensor,
    embedding_norm: Norm,
    output_norm: Norm,
    output: Tensor,
}

impl Frame {
    pub(super) fn new(config: &Config, table: &mut WeightTable<'_>) -> Result<Frame, Error> {
        let Config { hidden, vocab, .. } = *config;
        let embedding = table.weight(names::TOKEN_EMBEDDING, &[hidden, vocab])?;
        let embedding_norm = Norm {
            weight: table.weight(names::TOKEN_EMBEDDING_NORM, &[hidden])?,
            bias: table.weight(names::TOKEN_EMBEDDING_NORM_BIAS, &[hidden])?,
        };
        let output_norm = Norm {
            weight: table.weight(names::OUTPUT_NORM, &[hidden])?,
            bias: table.weight(names::OUTPUT_NORM_BIAS, &[hidden])?,
        };
        let output = table.optional(names::OUTPUT, &[hidden, vocab])?.unwrap_or(embedding);
        let rwkv = config.rwkv.expect("the configuration of an RWKV model should hold its own part");
        Ok(Frame { config: config.clone(), rwkv, embedding, embedding_norm, output_norm, output })
    }

    /// Every layer of the file, as `make` reads it.
    pub(super) fn layers<L>(
        &self,
        table: &mut WeightTable<'_>,
        make: impl Fn(usize, &mut LayerTable<'_, '_>) -> Result<L, Error>,
    ) -> Result<Vec<L>, Error> {
        (0..self.config.layers).map(|layer| make(layer, &mut LayerTable { table, layer })).collect()
    }

    /// The plan: embeddings, what `layers` adds on the residual stream it is given, logits.
    pub(super) fn plan(
        &self,
        fixed: &Fixed,
        shape: BatchShape,
        layers: impl FnOnce(&mut Builder, Tensor),
    ) -> Result<Plan, Error> {
        let Config { hidden, vocab, .. } = self.config;
        let mut builder = Builder::new(fixed);
        let b = &mut builder;
        let input =
            |b: &mut Builder, name: &str, n: usize| b.slot(name, SlotKind::Input, TensorType::I32, [n, 1, 1, 1]);
        let tokens = input(b, "tokens", shape.tokens);
        let wanted = input(b, "wanted", shape.outputs);
        // No step reads these: a recurrence knows no positions.
        let positions = input(b, "positions", shape.tokens);
        let length = input(b, "length", 1);
        let x = scratch(b, "x", hidden, shape.tokens);
        b.step("embedding", get_rows::Call { src: self.embedding, ids: tokens, dst: x });
        self.norm(b, "embedding.norm".into(), x, self.embedding_norm, x);
        layers(b, x);
        // Only the wanted tokens go through the output matrix, the largest of all.
        let last = scratch(b, "last", hidden, shape.outputs);
        let logits = b.slot("logits", SlotKind::Output, TensorType::F32, [vocab, shape.outputs, 1, 1]);
        b.step("output.rows", get_rows::Call { src: x, ids: wanted, dst: last });
        self.norm(b, "output.norm".into(), last, self.output_norm, last);
        linear(b, "output".into(), self.output, last, logits);
        builder.finish(Ports { tokens, positions, length, wanted, logits })
    }

    /// Layer norm of every token.
    pub(super) fn norm(&self, b: &mut Builder, label: String, x: Tensor, norm: Norm, y: Tensor) {
        let Norm { weight, bias } = norm;
        b.step(label, norm::Call { x, weight: Some(weight), bias: Some(bias), y, eps: self.rwkv.norm_eps });
    }

    /// Norm of every head of every token, in place, with a weight and a bias for each channel.
    pub(super) fn head_norm(&self, b: &mut Builder, label: String, x: Tensor, norm: Norm) {
        let x = self.by_head(x);
        let (weight, bias) = (Some(norm.weight), Some(norm.bias));
        b.step(label, group_norm::Call { x, weight, bias, y: x, eps: HEAD_EPS });
    }

    /// `[hidden, tokens]` as `[head_dim, heads, tokens]`.
    pub(super) fn by_head(&self, t: Tensor) -> Tensor {
        t.reshape([self.config.head_dim, self.config.heads, t.len() / self.config.hidden, 1])
    }

    /// Halves the residual stream after the layers where the model was trained so: keeps it inside the range of F16.
    pub(super) fn rescale(&self, b: &mut Builder, layer: usize, x: Tensor) {
        let every = self.rwkv.rescale_every;
        if every != 0 && (layer + 1).is_multiple_of(every) {
            b.step(format!("{layer}.rescale"), scale::Call { x, dst: x, factor: 0.5, bias: 0.0 });
        }
    }

    /// Memory for the chunked form of the recurrence.
    pub(super) fn recurrence_scratch(&self, b: &mut Builder, tokens: usize, bytes: usize) -> Option<Tensor> {
        (tokens > 1).then(|| b.slot("wkv.scratch", SlotKind::Scratch, TensorType::F32, [bytes.div_ceil(4), 1, 1, 1]))
    }
}

/// The channel mix of a layer: a feed-forward layer on a blend of each token with the one before.
pub(super) struct ChannelMix {
    norm: Norm,
    last: Tensor,
    lerp_k: Tensor,
    key: Tensor,
    value: Tensor,
    /// The blend and the matrix of the gate, which RWKV-7 has not.
    receptance: Option<(Tensor, Tensor)>,
}

impl ChannelMix {
    pub(super) fn read(table: &mut LayerTable<'_, '_>, config: &Config, gated: bool) -> Result<ChannelMix, Error> {
        let Config { hidden, feed_forward, .. } = *config;
        let receptance = if gated {
            let lerp = table.weight("channel_mix_lerp_r", &[hidden])?;
            Some((lerp, table.weight("channel_mix_receptance", &[hidden, hidden])?))
        } else {
            None
        };
        Ok(ChannelMix {
            norm: table.norm("attn_norm_2", hidden)?,
            last: table.shift_state("channel_shift", config),
            lerp_k: table.weight("channel_mix_lerp_k", &[hidden])?,
            key: table.weight("channel_mix_key", &[hidden, feed_forward])?,
            value: table.weight("channel_mix_value", &[feed_forward, hidden])?,
            receptance,
        })
    }

    /// Adds the layer's steps: x += sigmoid(R xr) * (V relu(K xk)^2), without the gate where there is none.
    pub(super) fn steps(&self, b: &mut Builder, frame: &Frame, i: usize, x: Tensor, work: &MixWork) {
        let at = |part: &str| format!("{i}.channel_mix.{part}");
        let MixWork { normed, shift, blend, key, gate, branch } = *work;
        frame.norm(b, at("norm"), x, self.norm, normed);
        token_shift(b, &at("shift"), normed, self.last, shift);
        lean(b, &at("k"), [normed, shift], self.lerp_k, blend);
        linear(b, at("k"), self.key, blend, key);
        function(b, at("k.relu2"), Function::Relu2, key, key);
        let Some((lerp_r, receptance)) = self.receptance else {
            return linear_onto(b, at("value"), self.value, key, x);
        };
        lean(b, &at("r"), [normed, shift], lerp_r, blend);
        linear(b, at("r"), receptance, blend, gate);
        function(b, at("r.sigmoid"), Function::Sigmoid, gate, gate);
        linear(b, at("value"), self.value, key, branch);
        multiply(b, at("gate"), branch, gate, branch);
        add(b, at("residual"), x, branch, x);
    }
}

/// What the mixes of one plan compute in.
#[derive(Clone, Copy)]
pub(super) struct MixWork {
    /// The normed residual stream.
    pub(super) normed: Tensor,
    /// The token before minus the token.
    pub(super) shift: Tensor,
    /// A blend of both.
    pub(super) blend: Tensor,
    /// Keys of the channel mix.
    pub(super) key: Tensor,
    /// Gate of the channel mix.
    pub(super) gate: Tensor,
    /// What is added to the residual stream.
    pub(super) branch: Tensor,
}

impl MixWork {
    pub(super) fn new(b: &mut Builder, config: &Config, tokens: usize) -> MixWork {
        let Config { hidden, feed_forward, .. } = *config;
        MixWork {
            normed: scratch(b, "normed", hidden, tokens),
            shift: scratch(b, "shift", hidden, tokens),
            blend: scratch(b, "blend", hidden, tokens),
            key: scratch(b, "channel_key", feed_forward, tokens),
            gate: scratch(b, "channel_gate", hidden, tokens),
            branch: scratch(b, "branch", hidden, tokens),
        }
    }
}

/// F32 `[width, tokens]` of one plan.
pub(super) fn scratch(b: &mut Builder, name: &str, width: usize, tokens: usize) -> Tensor {
    b.slot(name, SlotKind::Scratch, TensorType::F32, [width, tokens, 1, 1])
}

/// shift = the token before minus the token; `stored` stands before the first one and becomes the last one.
pub(super) fn token_shift(b: &mut Builder, label: &str, x: Tensor, stored: Tensor, shift: Tensor) {
    let tokens = x.shape[1];
    let rows = |t: Tensor, start: usize, len: usize| t.narrow(1, start, len);
    subtract(b, format!("{label}.first"), stored, rows(x, 0, 1), rows(shift, 0, 1));
    if tokens > 1 {
        let (before, after) = (rows(x, 0, tokens - 1), rows(x, 1, tokens - 1));
        subtract(b, label.into(), before, after, rows(shift, 1, tokens - 1));
    }
    b.step(format!("{label}.store"), copy::Call { src: rows(x, tokens - 1, 1), dst: stored });
}

/// blend = x + shift * lerp: the token, leaning by `lerp` to the one before.
pub(super) fn lean(b: &mut Builder, label: &str, [x, shift]: [Tensor; 2], lerp: Tensor, blend: Tensor) {
    let lerp = lerp.reshape([lerp.len(), 1, 1, 1]);
    multiply(b, format!("{label}.lean"), shift, lerp, blend);
    add(b, format!("{label}.blend"), blend, x, blend);
}

/// The group `i` of `[hidden, tokens, groups]`.
pub(super) fn group(mixed: Tensor, i: usize) -> Tensor {
    mixed.narrow(2, i, 1)
}

/// dst = x + y, with y repeated.
pub(super) fn add(b: &mut Builder, label: String, x: Tensor, y: Tensor, dst: Tensor) {
    b.step(label, binary::Call { operator: Operator::Add, a: x, b: y, dst });
}

/// dst = x - y, with y repeated.
pub(super) fn subtract(b: &mut Builder, label: String, x: Tensor, y: Tensor, dst: Tensor) {
    b.step(label, binary::Call { operator: Operator::Sub, a: x, b: y, dst });
}

/// dst = x * y, element by element, with y repeated.
pub(super) fn multiply(b: &mut Builder, label: String, x: Tensor, y: Tensor, dst: Tensor) {
    b.step(label, binary::Call { operator: Operator::Mul, a: x, b: y, dst });
}

/// dst = f(x).
pub(super) fn function(b: &mut Builder, label: String, function: Function, x: Tensor, dst: Tensor) {
    b.step(label, unary::Call { function, x, dst });
}

/// y = weight x.
pub(super) fn linear(b: &mut Builder, label: String, weight: Tensor, x: Tensor, y: Tensor) {
    b.step(label, mul_mat::call(weight, x, y));
}

/// y = weight x + bias.
pub(super) fn affine(b: &mut Builder, label: String, [weight, bias]: [Tensor; 2], x: Tensor, y: Tensor) {
    let bias = bias.reshape([bias.len(), 1, 1, 1]);
    let mut call = mul_mat::call(weight, x, y);
    epilogue(&mut call).bias = Some(bias);
    b.step(label, call);
}

/// y += weight x.
pub(super) fn linear_onto(b: &mut Builder, label: String, weight: Tensor, x: Tensor, y: Tensor) {
    let mut call = mul_mat::call(weight, x, y);
    epilogue(&mut call).residual = Some(y);
    b.step(label, call);
}

fn epilogue(call: &mut Call) -> &mut mul_mat::Epilogue {
    match call {
        Call::MulMatVec(call) => &mut call.epilogue,
        Call::MulMm(call) => &mut call.epilogue,
        other => unreachable!("a product should not be a {}", other.operation().name()),
    }
}
