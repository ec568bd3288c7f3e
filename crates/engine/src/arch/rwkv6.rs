//! RWKV-6: per layer, a time mix around the recurrence `wkv6`, then a channel mix. How far a token leans to the one
//! before it, and how fast a head forgets, depend on the token.

use kiln_gguf::Gguf;
use kiln_kernels::glu::{self, Gate};
use kiln_kernels::recurrence::{Form, Sequences};
use kiln_kernels::tensor::Tensor;
use kiln_kernels::unary::Function;
use kiln_kernels::wkv6;

use super::rwkv::{
    ChannelMix, Frame, LayerTable, MixWork, Norm, add, affine, function, group, lean, linear, linear_onto, multiply,
    scratch, token_shift,
};
use super::{BatchShape, Graph, WeightTable};
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
    first: Tensor,
    key: Tensor,
    value: Tensor,
    receptance: Tensor,
    gate: Tensor,
    head_norm: Norm,
    output: Tensor,
    channel_mix: ChannelMix,
    last: Tensor,
    state: Tensor,
}

impl Layer {
    fn read(config: &Config, rwkv: &Rwkv, table: &mut LayerTable<'_, '_>) -> Result<Layer, Error> {
        let Config { hidden, heads, head_dim, .. } = *config;
        let Rwkv { mix_rank, decay_rank, .. } = *rwkv;
        let mut square = |name: &str| table.weight(name, &[hidden, hidden]);
        Ok(Layer {
            key: square("time_mix_key")?,
            value: square("time_mix_value")?,
            receptance: square("time_mix_receptance")?,
            gate: square("time_mix_gate")?,
            output: square("time_mix_output")?,
            norm: table.norm("attn_norm", hidden)?,
            lerp_x: table.weight("time_mix_lerp_x", &[hidden])?,
            lerp: table.weight("time_mix_lerp_fused", &[hidden, 1, 1, BLENDS])?,
            mix_in: table.weight("time_mix_w1", &[hidden, BLENDS * mix_rank])?,
            mix_out: table.weight("time_mix_w2", &[mix_rank, hidden, BLENDS])?,
            decay: table.weight("time_mix_decay", &[hidden])?,
            decay_in: table.weight("time_mix_decay_w1", &[hidden, decay_rank])?,
            decay_out: table.weight("time_mix_decay_w2", &[decay_rank, hidden])?,
            first: table.weight("time_mix_first", &[head_dim, heads])?,
            head_norm: table.norm("time_mix_ln", hidden)?,
            channel_mix: ChannelMix::read(table, config, true)?,
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
    pub(super) fn new(config: &Config, gguf: &Gguf) -> Result<Rwkv6, Error> {
        let mut table = WeightTable { gguf, fixed: Fixed::default() };
        let frame = Frame::new(config, &mut table)?;
        let layers = frame.layers(&mut table, |_, table| Layer::read(config, &frame.rwkv, table))?;
        Ok(Rwkv6 { frame, fixed: table.fixed, layers })
    }

    /// The time mix of one layer, added to the residual stream `x`.
    fn time_mix(&self, b: &mut Builder, i: usize, layer: &Layer, x: Tensor, work: &Work) {
        let at = |part: &str| format!("{i}.time_mix.{part}");
        let Work { ranks, mixed, decay_rank, w, k, v, r, g, y, .. } = *work;
        let MixWork { normed, shift, blend, .. } = work.mix;
        let (hidden, tokens) = (x.shape[0], x.shape[1]);
        self.frame.norm(b, at("norm"), x, layer.norm, normed);
        token_shift(b, &at("shift"), normed, layer.last, shift);

        // Five blends of the token and the one before, each leaning by a learnt vector plus one that depends on both.
        lean(b, &at("x"), [normed, shift], layer.lerp_x, blend);
        linear(b, at("mix.in"), layer.mix_in, blend, ranks);
        function(b, at("mix.tanh"), Function::Tanh, ranks, ranks);
        let by_blend = ranks.reshape([ranks.shape[0] / BLENDS, BLENDS, tokens, 1]).permute([0, 2, 1, 3]);
        linear(b, at("mix.out"), layer.mix_out, by_blend, mixed);
        add(b, at("mix.lerp"), mixed, layer.lerp.reshape([hidden, 1, BLENDS, 1]), mixed);
        multiply(b, at("mix.lean"), mixed, shift, mixed);
        add(b, at("mix.blend"), mixed, normed, mixed);
        let [xw, xk, xv, xr, xg] = [0, 1, 2, 3, 4].map(|n| group(mixed, n));

        linear(b, at("r"), layer.receptance, xr, r);
        linear(b, at("k"), layer.key, xk, k);
        linear(b, at("v"), layer.value, xv, v);
        linear(b, at("g"), layer.gate, xg, g);
        // w = exp(-exp(decay + D2 tanh(D1 xw)))
        linear(b, at("w.in"), layer.decay_in, xw, decay_rank);
        function(b, at("w.tanh"), Function::Tanh, decay_rank, decay_rank);
        affine(b, at("w.out"), [layer.decay_out, layer.decay], decay_rank, w);
        for (part, f) in [("w.exp", Function::Exp), ("w.neg", Function::Neg), ("w", Function::Exp)] {
            function(b, at(part), f, w, w);
        }

        let by_head = |t: Tensor| self.frame.by_head(t);
        b.step(
            at("wkv"),
            wkv6::Call {
                k: by_head(k),
                v: by_head(v),
                r: by_head(r),
                tf: layer.first,
                td: by_head(w),
                state_in: layer.state,
                y: by_head(y),
                state_out: layer.state,
                scratch: work.recurrence,
                sequences: Sequences::Equal(1),
                form: Form::Auto,
            },
        );
        self.frame.head_norm(b, at("head_norm"), y, layer.head_norm);
        b.step(at("gate"), glu::Call { kind: Gate::Swiglu, gate: g, up: y, dst: y });
        linear_onto(b, at("output"), layer.output, y, x);
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
    recurrence: Option<Tensor>,
}

impl Graph for Rwkv6 {
    fn fixed(&self) -> &Fixed {
        &self.fixed
    }

    fn plan(&self, shape: BatchShape) -> Result<Plan, Error> {
        let Config { hidden, heads, head_dim, .. } = self.frame.config;
        let Rwkv { mix_rank, decay_rank, .. } = self.frame.rwkv;
        let tokens = shape.tokens;
        self.frame.plan(&self.fixed, shape, |b, x| {
            let recurrence = wkv6::scratch_bytes(head_dim, heads, tokens, 1);
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
                recurrence: self.frame.recurrence_scratch(b, tokens, recurrence),
            };
            for (i, layer) in self.layers.iter().enumerate() {
                self.time_mix(b, i, layer, x, &work);
                layer.channel_mix.steps(b, &self.frame, i, x, &work.mix);
                self.frame.rescale(b, i, x);
            }
        })
    }
}
