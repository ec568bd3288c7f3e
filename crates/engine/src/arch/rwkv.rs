//! What RWKV-6, RWKV-7 and their hybrids with transformers share: the frame around the layers, the state that takes the
//! place of a cache, the shift by one token, and the second half of a layer. The time mix is in files of its own.

use kiln_gguf::TensorType;
use kiln_kernels::binary::{self, Operator};
use kiln_kernels::glu::{self, Gate};
use kiln_kernels::mul_mat_vec::{self, Factor, Gated};
use kiln_kernels::recurrence::Sequences;
use kiln_kernels::tensor::Tensor;
use kiln_kernels::unary::{self, Function};
use kiln_kernels::{Call, gated_add, get_rows, head_mix, mul_mat, norm, rms_norm, scale, token_mix};

use super::{BatchShape, Room, WeightTable};
use crate::Error;
use crate::model::{Config, Rwkv, names};
use crate::plan::{Builder, Fixed, Plan, Ports, SlotKind};

/// The name of the norm of each head.
const HEAD_NORM: &str = "time_mix_ln";
/// Added to the variance in the norm of each head.
const HEAD_EPS: f32 = 64e-5;

/// A norm of every token.
#[derive(Clone, Copy)]
pub(super) enum Norm {
    /// Weight and bias of a layer norm.
    Layer(Tensor, Tensor),
    /// Weight of a norm by the mean square, as hybrids have them.
    MeanSquare(Tensor),
}

/// Weight and bias of the norm of every head.
#[derive(Clone, Copy)]
pub(super) struct HeadNorm {
    weight: Tensor,
    bias: Tensor,
}

/// The tensors of one layer, asked for by their names.
pub(super) struct LayerTable<'t, 'g> {
    table: &'t mut WeightTable<'g>,
    layer: usize,
    hybrid: bool,
}

impl LayerTable<'_, '_> {
    /// A weight that must be there; `name` is without `.weight`.
    pub(super) fn weight(&mut self, name: &str, want: &[usize]) -> Result<Tensor, Error> {
        self.table.weight(&names::layer(&format!("{name}.weight"), self.layer), want)
    }

    /// The bias of a matrix that may have one.
    pub(super) fn bias(&mut self, name: &str, width: usize) -> Result<Option<Tensor>, Error> {
        self.table.optional(&names::layer(&format!("{name}.bias"), self.layer), &[width])
    }

    /// A norm of the model's kind.
    pub(super) fn norm(&mut self, name: &str, width: usize) -> Result<Norm, Error> {
        let weight = self.weight(name, &[width])?;
        if self.hybrid {
            return Ok(Norm::MeanSquare(weight));
        }
        Ok(Norm::Layer(weight, self.required_bias(name, width)?))
    }

    /// The norm of every head.
    pub(super) fn head_norm(&mut self, width: usize) -> Result<HeadNorm, Error> {
        let weight = self.weight(HEAD_NORM, &[width])?;
        Ok(HeadNorm { weight, bias: self.required_bias(HEAD_NORM, width)? })
    }

    /// The norm of every head, which hybrids may not have.
    pub(super) fn optional_head_norm(&mut self, width: usize) -> Result<Option<HeadNorm>, Error> {
        if self.hybrid && self.extent(HEAD_NORM, 0).is_none() { Ok(None) } else { self.head_norm(width).map(Some) }
    }

    /// An extent of a weight, where the file has it.
    pub(super) fn extent(&self, name: &str, dim: usize) -> Option<usize> {
        self.table.gguf.find(&names::layer(&format!("{name}.weight"), self.layer)).map(|info| info.shape[dim])
    }

    fn required_bias(&mut self, name: &str, width: usize) -> Result<Tensor, Error> {
        self.table.weight(&names::layer(&format!("{name}.bias"), self.layer), &[width])
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
    room: Room,
    pub(super) rwkv: Rwkv,
    embedding: Tensor,
    embedding_norm: Option<Norm>,
    output_norm: Norm,
    output: Tensor,
}

impl Frame {
    pub(super) fn new(config: &Config, table: &mut WeightTable<'_>, room: &Room) -> Result<Frame, Error> {
        let Config { hidden, vocab, .. } = *config;
        let embedding = table.weight(names::TOKEN_EMBEDDING, &[hidden, vocab])?;
        let (embedding_norm, output_norm) = if config.architecture.is_hybrid() {
            (None, Norm::MeanSquare(table.weight(names::OUTPUT_NORM, &[hidden])?))
        } else {
            let mut norm = |weight: &str, bias: &str| -> Result<Norm, Error> {
                Ok(Norm::Layer(table.weight(weight, &[hidden])?, table.weight(bias, &[hidden])?))
            };
            let embedding_norm = norm(names::TOKEN_EMBEDDING_NORM, names::TOKEN_EMBEDDING_NORM_BIAS)?;
            (Some(embedding_norm), norm(names::OUTPUT_NORM, names::OUTPUT_NORM_BIAS)?)
        };
        let output = table.optional(names::OUTPUT, &[hidden, vocab])?.unwrap_or(embedding);
        let rwkv = config.rwkv.expect("the configuration of an RWKV model should hold its own part");
        Ok(Frame { config: config.clone(), room: *room, rwkv, embedding, embedding_norm, output_norm, output })
    }

    /// Every layer of the file, as `make` reads it.
    pub(super) fn layers<L>(
        &self,
        table: &mut WeightTable<'_>,
        make: impl Fn(usize, &mut LayerTable<'_, '_>) -> Result<L, Error>,
    ) -> Result<Vec<L>, Error> {
        let hybrid = self.config.architecture.is_hybrid();
        (0..self.config.layers).map(|layer| make(layer, &mut LayerTable { table, layer, hybrid })).collect()
    }

    /// The plan: embeddings, what `layers` adds on the residual stream it is given, logits.
    pub(super) fn plan(
        &self,
        fixed: &Fixed,
        shape: BatchShape,
        layers: impl FnOnce(&mut Builder, Tensor),
    ) -> Result<Plan, Error> {
        let Config { hidden, vocab, .. } = self.config;
        let mut builder = Builder::new(fixed, shape.few);
        let b = &mut builder;
        let ports = Ports::new(b, &shape, &self.room, vocab);
        let x = scratch(b, "x", hidden, shape.rows());
        b.step("embedding", get_rows::Call { src: self.embedding, ids: ports.tokens, dst: x });
        if let Some(norm) = self.embedding_norm {
            self.norm(b, "embedding.norm".into(), x, norm, x);
        }
        layers(b, x);
        // Only the wanted tokens go through the output matrix, the largest of all.
        let last = scratch(b, "last", hidden, shape.outputs);
        b.step("output.rows", get_rows::Call { src: x, ids: ports.wanted, dst: last });
        self.norm(b, "output.norm".into(), last, self.output_norm, last);
        linear(b, "output".into(), self.output, last, ports.logits);
        builder.share_product_memory();
        builder.share_column_memory();
        builder.finish(ports)
    }

    /// A norm of every token.
    pub(super) fn norm(&self, b: &mut Builder, label: String, x: Tensor, norm: Norm, y: Tensor) {
        match norm {
            Norm::Layer(weight, bias) => {
                let eps = self.rwkv.norm_eps;
                b.step(label, norm::Call { x, weight: Some(weight), bias: Some(bias), y, eps });
            }
            Norm::MeanSquare(weight) => {
                b.step(label, rms_norm::Call { x, weight: Some(weight), y, eps: self.config.rms_eps });
            }
        }
    }

    /// Blends of normed tokens with the ones before: `mix` is of the normed columns in `mix.x`, here they are computed from
    /// `x`. A layer norm is part of the same pass, which leaves its columns in memory only if they are `read` again.
    pub(super) fn normed_mix(
        &self,
        b: &mut Builder,
        [norm_label, label]: [String; 2],
        x: Tensor,
        norm: Norm,
        mix: token_mix::Call,
        read: bool,
    ) {
        match norm {
            Norm::Layer(weight, bias) => {
                let norm = token_mix::Norm { weight, bias, eps: self.rwkv.norm_eps, y: read.then_some(mix.x) };
                b.step(label, token_mix::Call { x, norm: Some(norm), ..mix });
            }
            Norm::MeanSquare(_) => {
                self.norm(b, norm_label, x, norm, mix.x);
                b.step(label, mix);
            }
        }
    }

    /// `[hidden, tokens]` as `[head_dim, heads, tokens]`.
    pub(super) fn by_head(&self, t: Tensor) -> Tensor {
        t.reshape([self.config.head_dim, self.config.heads, t.len() / self.config.hidden, 1])
    }

    /// The norm of every head of every token and the gate: what becomes of the result of a recurrence.
    pub(super) fn head_mix(&self, norm: HeadNorm, gate: Option<(Tensor, Option<Function>)>) -> head_mix::Mix {
        let gate = gate.map(|(gate, function)| (self.by_head(gate), function));
        let HeadNorm { weight, bias } = norm;
        head_mix::Mix { weight, bias, eps: HEAD_EPS, gate }
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

/// The second half of a layer.
pub(super) struct FeedForward {
    norm: Norm,
    kind: Kind,
}

#[derive(Clone, Copy)]
#[expect(clippy::large_enum_variant, reason = "one for each layer of a model: the bytes do not matter, `Copy` does")]
enum Kind {
    /// RWKV: a blend of each token with the one before, widened, squared where positive, and gated in RWKV-6.
    ChannelMix { last: Tensor, lerp: Tensor, key: Tensor, value: Tensor, receptance: Option<(Tensor, Tensor)> },
    /// Hybrids: the gated layer of transformers.
    Swiglu { gate: Tensor, up: Tensor, down: Tensor },
}

impl FeedForward {
    /// Reads it; `gated` says whether a channel mix has a receptance.
    pub(super) fn read(table: &mut LayerTable<'_, '_>, config: &Config, gated: bool) -> Result<FeedForward, Error> {
        let Config { hidden, feed_forward, .. } = *config;
        if table.hybrid {
            let kind = Kind::Swiglu {
                gate: table.weight("ffn_gate", &[hidden, feed_forward])?,
                up: table.weight("ffn_up", &[hidden, feed_forward])?,
                down: table.weight("ffn_down", &[feed_forward, hidden])?,
            };
            return Ok(FeedForward { norm: table.norm("ffn_norm", hidden)?, kind });
        }
        let receptance = if gated {
            let lerp = table.weight("channel_mix_lerp_r", &[hidden])?;
            Some((lerp, table.weight("channel_mix_receptance", &[hidden, hidden])?))
        } else {
            None
        };
        let kind = Kind::ChannelMix {
            last: table.shift_state("channel_shift", config),
            lerp: table.weight("channel_mix_lerp_k", &[hidden])?,
            key: table.weight("channel_mix_key", &[hidden, feed_forward])?,
            value: table.weight("channel_mix_value", &[feed_forward, hidden])?,
            receptance,
        };
        Ok(FeedForward { norm: table.norm("attn_norm_2", hidden)?, kind })
    }

    /// Adds the steps to the residual stream `x`.
    pub(super) fn steps(&self, b: &mut Builder, frame: &Frame, i: usize, x: Tensor, work: &MixWork) {
        let MixWork { normed, blends, wide, gate: r, branch } = *work;
        match self.kind {
            Kind::Swiglu { gate, up, down } => {
                // x += D (silu(G x) * U x)
                let at = |part: &str| format!("{i}.feed_forward.{part}");
                frame.norm(b, at("norm"), x, self.norm, normed);
                match b.product(gate, normed, wide) {
                    // Few columns: both matrices in one pass.
                    Call::MulMatVec(call) => {
                        let gate = Some(Gated { kind: Gate::Swiglu, up, bias: None });
                        b.step(at("gated"), mul_mat_vec::Call { gate, ..call });
                    }
                    call => {
                        b.step(at("gate"), call);
                        linear(b, at("up"), up, normed, r);
                        b.step(at("swiglu"), glu::Call { kind: Gate::Swiglu, gate: wide, up: r, dst: wide });
                    }
                }
                linear_onto(b, at("down"), down, wide, x);
            }
            Kind::ChannelMix { last, lerp, key, value, receptance } => {
                // x += sigmoid(R xr) * (V relu(K xk)^2), without the gate in RWKV-7.
                let at = |part: &str| format!("{i}.channel_mix.{part}");
                let y = blends.narrow(2, 0, 1 + usize::from(receptance.is_some()));
                let another = receptance.map(|(lerp, _)| lerp);
                let mix = token_mix::Call {
                    x: normed,
                    norm: None,
                    before: last,
                    lerp,
                    another,
                    extra: None,
                    y,
                    keep: true,
                    sequences: Sequences::Equal(1),
                    slots: None,
                };
                frame.normed_mix(b, [at("norm"), at("mix")], x, self.norm, mix, false);
                // Products of different blends do not wait for each other.
                linear_function(b, at("k"), (key, None), Function::Relu2, group(blends, 0), wide);
                let Some((_, receptance)) = receptance else {
                    return linear_onto(b, at("value"), value, wide, x);
                };
                linear(b, at("r"), receptance, group(blends, 1), r);
                let function = Function::Sigmoid;
                match b.product(value, wide, x) {
                    // Few columns: in the same pass.
                    Call::MulMatVec(mut call) => {
                        call.factor = Some(Factor { function, gate: r });
                        call.epilogue.residual = Some(x);
                        b.step(at("value"), call);
                    }
                    _ => {
                        linear(b, at("value"), value, wide, branch);
                        b.step(at("gate"), gated_add::Call { function, gate: r, y: branch, x, dst: x });
                    }
                }
            }
        }
    }
}

/// What both halves of the layers of one plan compute in.
#[derive(Clone, Copy)]
pub(super) struct MixWork {
    /// The normed residual stream.
    pub(super) normed: Tensor,
    /// Two blends of each token with the one before, `[hidden, tokens, 2]`.
    pub(super) blends: Tensor,
    /// The wide inner side of the feed-forward layer.
    wide: Tensor,
    /// What it is gated with, or what is gated.
    gate: Tensor,
    /// What is added to the residual stream.
    branch: Tensor,
}

impl MixWork {
    pub(super) fn new(b: &mut Builder, config: &Config, tokens: usize) -> MixWork {
        let Config { hidden, feed_forward, .. } = *config;
        let gate_width = if config.architecture.is_hybrid() { feed_forward } else { hidden };
        MixWork {
            normed: scratch(b, "normed", hidden, tokens),
            blends: scratch(b, "blends", hidden, 2 * tokens).reshape([hidden, tokens, 2, 1]),
            wide: scratch(b, "wide", feed_forward, tokens),
            gate: scratch(b, "gate", gate_width, tokens),
            branch: scratch(b, "branch", hidden, tokens),
        }
    }
}

/// F32 `[width, tokens]` of one plan.
pub(super) fn scratch(b: &mut Builder, name: &str, width: usize, tokens: usize) -> Tensor {
    b.slot(name, SlotKind::Scratch, TensorType::F32, [width, tokens, 1, 1])
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
    b.step(label, b.product(weight, x, y));
}

/// y = f(weight x + bias).
pub(super) fn linear_function(
    b: &mut Builder,
    label: String,
    (weight, bias): (Tensor, Option<Tensor>),
    f: Function,
    x: Tensor,
    y: Tensor,
) {
    let mut call = b.product(weight, x, y);
    epilogue(&mut call).bias = bias.map(|bias| bias.reshape([bias.len(), 1, 1, 1]));
    match call {
        // Few columns: in the same pass.
        Call::MulMatVec(call) => b.step(label, mul_mat_vec::Call { function: Some(f), ..call }),
        call => {
            b.step(label.clone(), call);
            function(b, format!("{label}.function"), f, y, y);
        }
    }
}

/// y = weight x + bias.
pub(super) fn affine(b: &mut Builder, label: String, [weight, bias]: [Tensor; 2], x: Tensor, y: Tensor) {
    let bias = bias.reshape([bias.len(), 1, 1, 1]);
    let mut call = b.product(weight, x, y);
    epilogue(&mut call).bias = Some(bias);
    b.step(label, call);
}

/// y = weight x, plus the bias where there is one.
pub(super) fn maybe_affine(b: &mut Builder, label: String, matrix: (Tensor, Option<Tensor>), x: Tensor, y: Tensor) {
    match matrix {
        (weight, Some(bias)) => affine(b, label, [weight, bias], x, y),
        (weight, None) => linear(b, label, weight, x, y),
    }
}

/// y += weight x.
pub(super) fn linear_onto(b: &mut Builder, label: String, weight: Tensor, x: Tensor, y: Tensor) {
    let mut call = b.product(weight, x, y);
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
