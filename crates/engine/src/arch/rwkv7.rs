//! RWKV-7: per layer, a time mix around the recurrence `wkv7`, then a channel mix. A head does not only forget: it looks
//! up what it remembers under a key and replaces a share of it. ARWKV: the same time mix in a transformer.

use kiln_gguf::Gguf;
use kiln_kernels::recurrence::{Form, Sequences};
use kiln_kernels::tensor::Tensor;
use kiln_kernels::unary::Function;
use kiln_kernels::{key_mix, sum_rows, token_mix, wkv7};

use super::rwkv::{
    FeedForward, Frame, HeadNorm, LayerTable, MixWork, Norm, add, affine, group, linear, linear_function, linear_onto,
    multiply, scratch,
};
use super::{BatchShape, Graph, Room, WeightTable};
use crate::Error;
use crate::model::{Config, Rwkv};
use crate::plan::{Builder, Fixed, Plan};

/// The name of the vectors by which tokens lean to the ones before.
const LERP: &str = "time_mix_lerp_fused";
/// The least length that keys are divided by.
const KEY_EPS: f32 = 1e-12;

/// A pair of small matrices with a bias: out (f (into x)) + bias.
struct LowRank {
    activation: Option<Function>,
    into: Tensor,
    out: Tensor,
    bias: Tensor,
}

impl LowRank {
    fn read(table: &mut LayerTable<'_, '_>, letter: char, hidden: usize, rank: usize) -> Result<LowRank, Error> {
        Ok(LowRank {
            activation: (letter == 'w').then_some(Function::Tanh),
            bias: table.weight(&format!("time_mix_{letter}0"), &[hidden])?,
            into: table.weight(&format!("time_mix_{letter}1"), &[hidden, rank])?,
            out: table.weight(&format!("time_mix_{letter}2"), &[rank, hidden])?,
        })
    }

    /// The first matrix and the function; `between` holds what lies between the two.
    fn enter(&self, b: &mut Builder, at: &str, x: Tensor, between: Tensor) {
        let label = format!("{at}.in");
        match self.activation {
            Some(f) => linear_function(b, label, (self.into, None), f, x, between),
            None => linear(b, label, self.into, x, between),
        }
    }

    /// The second matrix and the bias.
    fn leave(&self, b: &mut Builder, at: &str, between: Tensor, y: Tensor) {
        affine(b, format!("{at}.out"), [self.out, self.bias], between, y);
    }
}

/// The weights and the state of one layer.
struct Layer {
    norm: Norm,
    lerp: Tensor,
    decay: LowRank,
    rate: LowRank,
    /// How much of the first layer's values a value takes; the first layer has none.
    first_value: Option<LowRank>,
    gate: Option<(Tensor, Tensor)>,
    k_k: Tensor,
    k_a: Tensor,
    r_k: Tensor,
    key: Tensor,
    value: Tensor,
    receptance: Tensor,
    head_norm: Option<HeadNorm>,
    output: Tensor,
    feed_forward: FeedForward,
    last: Tensor,
    state: Tensor,
}

impl Layer {
    fn read(i: usize, config: &Config, rwkv: &Rwkv, table: &mut LayerTable<'_, '_>) -> Result<Layer, Error> {
        let hidden = config.hidden;
        let Rwkv { decay_rank, rate_rank, value_rank, gate_rank, .. } = *rwkv;
        let gate = if gate_rank > 0 {
            let into = table.weight("time_mix_g1", &[hidden, gate_rank])?;
            Some((into, table.weight("time_mix_g2", &[gate_rank, hidden])?))
        } else {
            None
        };
        // Some files hold the gate's vector and no gate.
        let groups = blends(rwkv);
        let stored = if table.extent(LERP, 3) == Some(6) { 6 } else { groups };
        let lerp = table.weight(LERP, &[hidden, 1, 1, stored])?.narrow(3, 0, groups);
        let mut square = |name: &str| table.weight(name, &[hidden, hidden]);
        Ok(Layer {
            key: square("time_mix_key")?,
            value: square("time_mix_value")?,
            receptance: square("time_mix_receptance")?,
            output: square("time_mix_output")?,
            norm: table.norm("attn_norm", hidden)?,
            lerp,
            decay: LowRank::read(table, 'w', hidden, decay_rank)?,
            rate: LowRank::read(table, 'a', hidden, rate_rank)?,
            first_value: if i > 0 { Some(LowRank::read(table, 'v', hidden, value_rank)?) } else { None },
            gate,
            k_k: table.weight("time_mix_k_k", &[hidden])?,
            k_a: table.weight("time_mix_k_a", &[hidden])?,
            r_k: table.weight("time_mix_r_k", &[hidden])?,
            head_norm: table.optional_head_norm(hidden)?,
            feed_forward: FeedForward::read(table, config, false)?,
            last: table.shift_state("time_shift", config),
            state: table.wkv_state(config),
        })
    }
}

/// Blended inputs of the time mix, in the order in which files hold them: receptance, decay, key, value, rate, and the
/// gate where there is one.
fn blends(rwkv: &Rwkv) -> usize {
    if rwkv.gate_rank > 0 { 6 } else { 5 }
}

/// An RWKV-7 model with its slots.
pub(super) struct Rwkv7 {
    frame: Frame,
    fixed: Fixed,
    layers: Vec<Layer>,
}

impl Rwkv7 {
    pub(super) fn new(config: &Config, gguf: &Gguf, room: &Room) -> Result<Rwkv7, Error> {
        let mut table = WeightTable { gguf, fixed: Fixed::default() };
        let frame = Frame::new(config, &mut table, room)?;
        let layers = frame.layers(&mut table, |i, table| Layer::read(i, config, &frame.rwkv, table))?;
        Ok(Rwkv7 { frame, fixed: table.fixed, layers })
    }

    /// The time mix of one layer, added to the residual stream `x`. What does not wait for each other stands together.
    fn time_mix(&self, b: &mut Builder, i: usize, layer: &Layer, x: Tensor, work: &Work) {
        let at = |part: &str| format!("{i}.time_mix.{part}");
        let Work { mixed, w, k, r, a, g, lookup, replaced, y, .. } = *work;
        let MixWork { normed, .. } = work.mix;
        let [hidden, _, groups, _] = mixed.shape;
        let lerp = layer.lerp.reshape([hidden, 1, groups, 1]);
        let before = layer.last;
        let mix = token_mix::Call {
            x: normed,
            norm: None,
            before,
            lerp,
            another: None,
            extra: None,
            y: mixed,
            keep: true,
            sequences: Sequences::Equal(1),
            slots: None,
        };
        self.frame.normed_mix(b, [at("norm"), at("mix")], x, layer.norm, mix, false);
        let [xr, xw, xk, xv, xa] = [0, 1, 2, 3, 4].map(|n| group(mixed, n));
        // The values of the first layer are kept: the others lean to them.
        let v = if layer.first_value.is_some() { work.v } else { work.first_v };

        linear(b, at("r"), layer.receptance, xr, r);
        linear(b, at("k"), layer.key, xk, k);
        linear(b, at("v"), layer.value, xv, v);
        let low_ranks = [
            (Some(&layer.decay), at("w"), xw, work.decay_rank, w),
            (Some(&layer.rate), at("a"), xa, work.rate_rank, a),
            (layer.first_value.as_ref(), at("v.share"), xv, work.value_rank, work.share),
        ];
        let low_ranks =
            || low_ranks.iter().filter_map(|(pair, at, x, between, y)| Some(((*pair)?, at, *x, *between, *y)));
        low_ranks().for_each(|(pair, at, x, between, _)| pair.enter(b, at, x, between));
        if let Some((into, _)) = layer.gate {
            linear_function(b, at("g.in"), (into, None), Function::Sigmoid, group(mixed, 5), work.gate_rank);
        }
        low_ranks().for_each(|(pair, at, _, between, y)| pair.leave(b, at, between, y));
        if let Some((_, out)) = layer.gate {
            linear(b, at("g"), out, work.gate_rank, g);
        }

        // The key to look up has length one in each head; what is put there is stronger where the rate is high.
        // w = exp(-e^(-1/2) sigmoid(w0 + W2 tanh(W1 xw))), v += (first - v) sigmoid(v0 + V2 V1 xv)
        let by_head = |t: Tensor| self.frame.by_head(t);
        let (first, share) = (by_head(work.first_v), by_head(work.share));
        b.step(
            at("keys"),
            key_mix::Call {
                k: by_head(k),
                k_k: layer.k_k,
                k_a: layer.k_a,
                rate: by_head(a),
                w: by_head(w),
                lookup: by_head(lookup),
                replaced: by_head(replaced),
                value: layer.first_value.is_some().then(|| key_mix::Value { v: by_head(v), first, share }),
                eps: KEY_EPS,
            },
        );
        let gate = layer.gate.map(|_| g);
        // The token itself: y += v (r . k r_k) in each head, after the norm and before the gate.
        let mix = layer.head_norm.map(|norm| {
            let heads = self.frame.head_mix(norm, gate.map(|gate| (gate, None)));
            wkv7::Mix { heads, bonus: layer.r_k }
        });
        b.step(
            at("wkv"),
            wkv7::Call {
                r: by_head(r),
                w: by_head(w),
                k: by_head(k),
                v: by_head(v),
                a: by_head(lookup),
                b: by_head(replaced),
                state_in: layer.state,
                y: by_head(y),
                state_out: layer.state,
                scratch: work.recurrence,
                sequences: Sequences::Equal(1),
                slots: None,
                form: Form::Auto,
                mix,
            },
        );
        if mix.is_none() {
            self.plain_bonus(b, i, layer, v, gate, work);
        }
        linear_onto(b, at("output"), layer.output, y, x);
    }

    /// The token itself and the gate where heads have no norm.
    fn plain_bonus(&self, b: &mut Builder, i: usize, layer: &Layer, v: Tensor, gate: Option<Tensor>, work: &Work) {
        let at = |part: &str| format!("{i}.time_mix.{part}");
        let by_head = |t: Tensor| self.frame.by_head(t);
        let Work { r, k, y, .. } = *work;
        multiply(b, at("bonus.rk"), r, k, r);
        multiply(b, at("bonus.r_k"), r, layer.r_k, r);
        b.step(at("bonus.sum"), sum_rows::Call { x: by_head(r), dst: work.bonus });
        multiply(b, at("bonus.v"), by_head(v), work.bonus, by_head(r));
        add(b, at("bonus"), y, r, y);
        if let Some(gate) = gate {
            multiply(b, at("gate"), y, gate, y);
        }
    }
}

/// What the layers of one plan compute in.
struct Work {
    mix: MixWork,
    /// `[hidden, tokens, blends]`
    mixed: Tensor,
    decay_rank: Tensor,
    rate_rank: Tensor,
    value_rank: Tensor,
    gate_rank: Tensor,
    w: Tensor,
    k: Tensor,
    v: Tensor,
    first_v: Tensor,
    r: Tensor,
    a: Tensor,
    g: Tensor,
    lookup: Tensor,
    replaced: Tensor,
    /// How far values lean to the first layer's.
    share: Tensor,
    /// `[1, heads, tokens]`
    bonus: Tensor,
    y: Tensor,
    recurrence: Option<Tensor>,
}

impl Graph for Rwkv7 {
    fn fixed(&self) -> &Fixed {
        &self.fixed
    }

    fn plan(&self, shape: BatchShape) -> Result<Plan, Error> {
        let Config { hidden, heads, head_dim, .. } = self.frame.config;
        let rwkv = self.frame.rwkv;
        let tokens = shape.rows();
        self.frame.plan(&self.fixed, shape, |b, x| {
            let recurrence = wkv7::scratch_bytes(head_dim, heads, tokens, 1);
            let groups = blends(&rwkv);
            let work = Work {
                mix: MixWork::new(b, &self.frame.config, tokens),
                mixed: scratch(b, "mixed", hidden, tokens * groups).reshape([hidden, tokens, groups, 1]),
                decay_rank: scratch(b, "decay_rank", rwkv.decay_rank, tokens),
                rate_rank: scratch(b, "rate_rank", rwkv.rate_rank, tokens),
                value_rank: scratch(b, "value_rank", rwkv.value_rank, tokens),
                gate_rank: scratch(b, "gate_rank", rwkv.gate_rank.max(1), tokens),
                w: scratch(b, "w", hidden, tokens),
                k: scratch(b, "k", hidden, tokens),
                v: scratch(b, "v", hidden, tokens),
                first_v: scratch(b, "first_v", hidden, tokens),
                r: scratch(b, "r", hidden, tokens),
                a: scratch(b, "a", hidden, tokens),
                g: scratch(b, "g", hidden, tokens),
                lookup: scratch(b, "lookup", hidden, tokens),
                replaced: scratch(b, "replaced", hidden, tokens),
                share: scratch(b, "share", hidden, tokens),
                bonus: scratch(b, "bonus", 1, heads * tokens).reshape([1, heads, tokens, 1]),
                y: scratch(b, "y", hidden, tokens),
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
