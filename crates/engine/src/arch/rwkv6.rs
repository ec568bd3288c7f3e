//! RWKV-6: per layer, a time mix around the recurrence `wkv6`, then a channel mix. How far a token leans to the one
//! before it, and how fast a head forgets, depend on the token. QRWKV: the same mixing of tokens around gated linear
//! attention (`gla`), in a transformer.

use kiln_gguf::Gguf;
use kiln_kernels::head_mix::Mix;
use kiln_kernels::recurrence::{Form, Sequences};
use kiln_kernels::tensor::Tensor;
use kiln_kernels::unary::Function;
use kiln_kernels::{copy, gla, token_mix, wkv6};

use super::rwkv::{
    FeedForward, Frame, HeadNorm, LayerTable, MixWork, Norm, function, group, linear, linear_function, linear_onto,
    maybe_affine, multiply, scratch, subtract,
};
use super::{BatchShape, Graph, Room, WeightTable};
use crate::Error;
use crate::model::{Config, Rwkv};
use crate::plan::{Builder, Fixed, Plan};

/// Blended inputs of the time mix, in the order in which files hold them: decay, key, value, receptance, gate.
const BLENDS: usize = 5;

/// The weights and the state of one layer.
struct Layer {
    norm: Norm,
    lerp_x: Tensor,
    lerp: Tensor,
    mix_in: Tensor,
    mix_out: Tensor,
    decay: Tensor,
    decay_in: Tensor,
    decay_out: Tensor,
    /// Matrix and bias.
    key: (Tensor, Option<Tensor>),
    value: (Tensor, Option<Tensor>),
    receptance: (Tensor, Option<Tensor>),
    gate: Tensor,
    /// The bonus of the token itself and the norm of the heads, which QRWKV has not.
    own: Option<(Tensor, HeadNorm)>,
    output: Tensor,
    feed_forward: FeedForward,
    last: Tensor,
    state: Tensor,
}

impl Layer {
    fn read(config: &Config, rwkv: &Rwkv, table: &mut LayerTable<'_, '_>) -> Result<Layer, Error> {
        let Config { hidden, heads, head_dim, .. } = *config;
        let Rwkv { mix_rank, decay_rank, .. } = *rwkv;
        let kv_width = config.kv_heads * head_dim;
        let own = if config.architecture.is_hybrid() {
            None
        } else {
            Some((table.weight("time_mix_first", &[head_dim, heads])?, table.head_norm(hidden)?))
        };
        let mut matrix = |name: &str, width: usize| -> Result<(Tensor, Option<Tensor>), Error> {
            Ok((table.weight(name, &[hidden, width])?, table.bias(name, width)?))
        };
        Ok(Layer {
            key: matrix("time_mix_key", kv_width)?,
            value: matrix("time_mix_value", kv_width)?,
            receptance: matrix("time_mix_receptance", hidden)?,
            gate: table.weight("time_mix_gate", &[hidden, hidden])?,
            own,
            output: table.weight("time_mix_output", &[hidden, hidden])?,
            norm: table.norm("attn_norm", hidden)?,
            lerp_x: table.weight("time_mix_lerp_x", &[hidden])?,
            lerp: table.weight("time_mix_lerp_fused", &[hidden, 1, 1, BLENDS])?,
            mix_in: table.weight("time_mix_w1", &[hidden, BLENDS * mix_rank])?,
            mix_out: table.weight("time_mix_w2", &[mix_rank, hidden, BLENDS])?,
            decay: table.weight("time_mix_decay", &[hidden])?,
            decay_in: table.weight("time_mix_decay_w1", &[hidden, decay_rank])?,
            decay_out: table.weight("time_mix_decay_w2", &[decay_rank, hidden])?,
            feed_forward: FeedForward::read(table, config, true)?,
            last: table.shift_state("time_shift", config),
            state: table.wkv_state(config),
        })
    }
}

/// An RWKV-6 model with its slots.
pub(super) struct Rwkv6 {
    frame: Frame,
    fixed: Fixed,
    layers: Vec<Layer>,
}

impl Rwkv6 {
    pub(super) fn new(config: &Config, gguf: &Gguf, room: &Room) -> Result<Rwkv6, Error> {
        let mut table = WeightTable { gguf, fixed: Fixed::default() };
        let frame = Frame::new(config, &mut table, room)?;
        let layers = frame.layers(&mut table, |_, table| Layer::read(config, &frame.rwkv, table))?;
        Ok(Rwkv6 { frame, fixed: table.fixed, layers })
    }

    /// The time mix of one layer, added to the residual stream `x`.
    fn time_mix(&self, b: &mut Builder, i: usize, layer: &Layer, x: Tensor, work: &Work) {
        let at = |part: &str| format!("{i}.time_mix.{part}");
        let Work { ranks, mixed, decay_rank, w, k, v, r, g, y, .. } = *work;
        let MixWork { normed, blends, .. } = work.mix;
        let blend = group(blends, 0);
        let (hidden, tokens) = (x.shape[0], x.shape[1]);

        // Five blends of the token and the one before, each leaning by a learnt vector plus one that depends on both.
        let mix = token_mix::Call {
            x: normed,
            norm: None,
            before: layer.last,
            lerp: layer.lerp_x,
            another: None,
            extra: None,
            y: blend,
            keep: false,
            sequences: Sequences::Equal(1),
            slots: None,
        };
        self.frame.normed_mix(b, [at("norm"), at("x")], x, layer.norm, mix, true);
        linear_function(b, at("mix.in"), (layer.mix_in, None), Function::Tanh, blend, ranks);
        let by_blend = ranks.reshape([ranks.shape[0] / BLENDS, BLENDS, tokens, 1]).permute([0, 2, 1, 3]);
        linear(b, at("mix.out"), layer.mix_out, by_blend, mixed);
        let lerp = layer.lerp.reshape([hidden, 1, BLENDS, 1]);
        b.step(at("mix"), token_mix::Call { lerp, extra: Some(mixed), y: mixed, keep: true, ..mix });
        let [xw, xk, xv, xr, xg] = [0, 1, 2, 3, 4].map(|n| group(mixed, n));

        maybe_affine(b, at("r"), layer.receptance, xr, r);
        self.repeated(b, at("k"), layer.key, xk, [work.grouped, k]);
        self.repeated(b, at("v"), layer.value, xv, [work.grouped, v]);
        linear(b, at("g"), layer.gate, xg, g);
        // w = exp(-exp(decay + D2 tanh(D1 xw)))
        linear_function(b, at("w.in"), (layer.decay_in, None), Function::Tanh, xw, decay_rank);
        let decay = (layer.decay_out, Some(layer.decay));
        linear_function(b, at("w.out"), decay, Function::ExpNegExp, decay_rank, w);

        match layer.own {
            Some((first, norm)) => {
                let mix = self.frame.head_mix(norm, Some((g, Some(Function::Silu))));
                self.recurrence(b, at("wkv"), layer.state, first, mix, work);
            }
            None => {
                // What a head forgets makes room for as much of the key.
                multiply(b, at("k.kept"), k, w, blend);
                subtract(b, at("k.room"), k, blend, k);
                self.linear_attention(b, at("attention"), layer.state, work);
                function(b, at("gate.sigmoid"), Function::Sigmoid, g, g);
                multiply(b, at("gate"), y, g, y);
            }
        }
        linear_onto(b, at("output"), layer.output, y, x);
    }

    /// Keys or values: where they have fewer heads, each is computed in `grouped` and repeated for its group.
    fn repeated(
        &self,
        b: &mut Builder,
        label: String,
        matrix: (Tensor, Option<Tensor>),
        x: Tensor,
        [grouped, y]: [Tensor; 2],
    ) {
        let Config { heads, kv_heads, head_dim, .. } = self.frame.config;
        if kv_heads == heads {
            return maybe_affine(b, label, matrix, x, y);
        }
        maybe_affine(b, format!("{label}.grouped"), matrix, x, grouped);
        let (group, tokens) = (heads / kv_heads, x.shape[1]);
        // A view that does not advance in dimension 1 repeats.
        let mut src = grouped.reshape([head_dim, 1, kv_heads, tokens]);
        src.shape[1] = group;
        src.stride[1] = 0;
        b.step(label, copy::Call { src, dst: y.reshape(src.shape) });
    }

    fn recurrence(&self, b: &mut Builder, label: String, state: Tensor, first: Tensor, mix: Mix, work: &Work) {
        let by_head = |t: Tensor| self.frame.by_head(t);
        b.step(
            label,
            wkv6::Call {
                k: by_head(work.k),
                v: by_head(work.v),
                r: by_head(work.r),
                tf: first,
                td: by_head(work.w),
                state_in: state,
                y: by_head(work.y),
                state_out: state,
                scratch: work.recurrence,
                sequences: Sequences::Equal(1),
                slots: None,
                form: Form::Auto,
                mix: Some(mix),
            },
        );
    }

    fn linear_attention(&self, b: &mut Builder, label: String, state: Tensor, work: &Work) {
        let by_head = |t: Tensor| self.frame.by_head(t);
        b.step(
            label,
            gla::Call {
                k: by_head(work.k),
                v: by_head(work.v),
                r: by_head(work.r),
                td: by_head(work.w),
                state_in: state,
                y: by_head(work.y),
                state_out: state,
                scratch: work.recurrence,
                sequences: Sequences::Equal(1),
                slots: None,
                form: Form::Auto,
                scale: 1.0 / (self.frame.config.head_dim as f32).sqrt(),
            },
        );
    }
}

/// What the layers of one plan compute in.
struct Work {
    mix: MixWork,
    ranks: Tensor,
    /// `[hidden, tokens, BLENDS]`
    mixed: Tensor,
    decay_rank: Tensor,
    w: Tensor,
    k: Tensor,
    v: Tensor,
    r: Tensor,
    g: Tensor,
    y: Tensor,
    /// Keys or values before their heads are repeated.
    grouped: Tensor,
    recurrence: Option<Tensor>,
}

impl Graph for Rwkv6 {
    fn fixed(&self) -> &Fixed {
        &self.fixed
    }

    fn plan(&self, shape: BatchShape) -> Result<Plan, Error> {
        let Config { hidden, heads, kv_heads, head_dim, .. } = self.frame.config;
        let Rwkv { mix_rank, decay_rank, .. } = self.frame.rwkv;
        let tokens = shape.rows();
        self.frame.plan(&self.fixed, shape, |b, x| {
            let recurrence = if self.frame.config.architecture.is_hybrid() {
                gla::scratch_bytes(head_dim, heads, tokens, 1)
            } else {
                wkv6::scratch_bytes(head_dim, heads, tokens, 1)
            };
            let work = Work {
                mix: MixWork::new(b, &self.frame.config, tokens),
                ranks: scratch(b, "ranks", BLENDS * mix_rank, tokens),
                mixed: scratch(b, "mixed", hidden, tokens * BLENDS).reshape([hidden, tokens, BLENDS, 1]),
                decay_rank: scratch(b, "decay_rank", decay_rank, tokens),
                w: scratch(b, "w", hidden, tokens),
                k: scratch(b, "k", hidden, tokens),
                v: scratch(b, "v", hidden, tokens),
                r: scratch(b, "r", hidden, tokens),
                g: scratch(b, "g", hidden, tokens),
                y: scratch(b, "y", hidden, tokens),
                grouped: scratch(b, "grouped", kv_heads * head_dim, tokens),
                recurrence: self.frame.recurrence_scratch(b, tokens, recurrence),
            };
            for (i, layer) in self.layers.iter().enumerate() {
                self.time_mix(b, i, layer, x, &work);
                layer.feed_forward.steps(b, &self.frame, i, x, &work.mix);
                self.frame.rescale(b, i, x);
            }
        })
    }
}
