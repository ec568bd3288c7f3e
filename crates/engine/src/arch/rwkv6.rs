//! RWKV-6: per layer, a time mix around the recurrence `wkv6`, then a channel mix. How far a token leans to the one
//! before it, and how fast a head forgets, depend on the token. QRWKV: the same mixing of tokens around gated linear
//! attention (`gla`), in a transformer.

use kiln_kernels::recurrence::Form;
use kiln_kernels::tensor::Tensor;
use kiln_kernels::unary::Function;
use kiln_kernels::{copy, gla, head_mix, wkv6};

use super::rwkv::{Blends, FeedForward, Frame, HEAD_EPS, MOST_RANK, Sizes};
use super::{Architecture, Batch};
use crate::Error;
use crate::model::Loader;
use crate::plan::{Builder, Linear, Norm};

/// Blended inputs of the time mix, in the order in which files hold them: decay, key, value, receptance, gate.
const BLENDS: usize = 5;

/// The weights and the state of one layer.
struct Layer {
    norm: Norm,
    lerp_x: Tensor,
    lerp: Tensor,
    mix_in: Linear,
    mix_out: Linear,
    decay_in: Linear,
    decay_out: Linear,
    key: Linear,
    value: Linear,
    receptance: Linear,
    gate: Linear,
    /// The bonus of the token itself and the norm of the heads, which QRWKV has not.
    own: Option<(Tensor, [Tensor; 2])>,
    output: Linear,
    feed_forward: FeedForward,
    last: Tensor,
    state: Tensor,
}

impl Layer {
    fn load(l: &mut Loader<'_>, sizes: &Sizes, i: usize) -> Result<Layer, Error> {
        let Sizes { hidden, heads, head_dim, .. } = *sizes;
        let mix_rank = l.keys.count("time_mix_extra_dim", MOST_RANK)?;
        let decay_rank = l.keys.count("time_decay_extra_dim", MOST_RANK)?;
        let kv_width = sizes.kv_heads * head_dim;
        l.layer(i);
        let own = if sizes.hybrid {
            None
        } else {
            let first = l.vector("time_mix_first.weight", &[head_dim, heads])?;
            sizes.head_norm(l)?.map(|norm| (first, norm))
        };
        let decay = l.vector("time_mix_decay.weight", &[hidden])?;
        let decay_out = l.linear("time_mix_decay_w2", &[decay_rank, hidden])?;
        Ok(Layer {
            norm: sizes.norm(l, "attn_norm")?,
            lerp_x: l.vector("time_mix_lerp_x.weight", &[hidden])?,
            lerp: l.vector("time_mix_lerp_fused.weight", &[hidden, 1, 1, BLENDS])?.reshape([hidden, 1, BLENDS, 1]),
            mix_in: l.linear("time_mix_w1", &[hidden, BLENDS * mix_rank])?,
            mix_out: Linear::plain(l.tensor("time_mix_w2.weight", &[mix_rank, hidden, BLENDS])?),
            decay_in: l.linear("time_mix_decay_w1", &[hidden, decay_rank])?,
            decay_out: Linear { bias: Some(decay), ..decay_out },
            key: l.linear("time_mix_key", &[hidden, kv_width])?,
            value: l.linear("time_mix_value", &[hidden, kv_width])?,
            receptance: l.linear("time_mix_receptance", &[hidden, hidden])?,
            gate: l.linear("time_mix_gate", &[hidden, hidden])?,
            own,
            output: l.linear("time_mix_output", &[hidden, hidden])?,
            feed_forward: FeedForward::load(l, sizes, i, true)?,
            last: sizes.shift_state(l, i, "time_shift"),
            state: sizes.wkv_state(l, i),
        })
    }
}

/// An RWKV-6 model with its slots.
struct Rwkv6 {
    frame: Frame,
    layers: Vec<Layer>,
}

pub(super) fn load(l: &mut Loader<'_>) -> Result<Box<dyn Architecture>, Error> {
    read(l, false)
}

pub(super) fn load_hybrid(l: &mut Loader<'_>) -> Result<Box<dyn Architecture>, Error> {
    read(l, true)
}

fn read(l: &mut Loader<'_>, hybrid: bool) -> Result<Box<dyn Architecture>, Error> {
    let sizes = Sizes::read(l, hybrid)?;
    let frame = Frame::load(l, sizes)?;
    let layers = (0..sizes.layers).map(|i| Layer::load(l, &sizes, i)).collect::<Result<_, _>>()?;
    Ok(Box::new(Rwkv6 { frame, layers }))
}

impl Architecture for Rwkv6 {
    fn build(&self, b: &mut Builder, batch: &Batch) -> Tensor {
        self.frame.build(b, batch, |b, i, x| {
            let layer = &self.layers[i];
            let x = self.time_mix(b, batch, i, layer, x);
            layer.feed_forward.build(b, batch, i, x)
        })
    }
}

impl Rwkv6 {
    /// The time mix of one layer; gives the residual stream after it.
    fn time_mix(&self, b: &mut Builder, batch: &Batch, i: usize, layer: &Layer, x: Tensor) -> Tensor {
        b.at(format!("{i}.time_mix"));
        let tokens = x.shape[1];
        let normed = b.norm("norm", x, &layer.norm);

        // Five blends of the token and the one before, each leaning by a learnt vector plus one that depends on both.
        let first = Blends { before: layer.last, lerp: layer.lerp_x, another: None, extra: None, keep: false };
        let blend = first.build(b, batch, "x", normed).narrow(2, 0, 1);
        let ranks = b.linear("mix.in", blend, &layer.mix_in);
        let ranks = b.function("mix.tanh", ranks, Function::Tanh);
        let by_blend = ranks.reshape([ranks.shape[0] / BLENDS, BLENDS, tokens, 1]).permute([0, 2, 1, 3]);
        let extra = b.linear("mix.out", by_blend, &layer.mix_out);
        let mix = Blends { before: layer.last, lerp: layer.lerp, another: None, extra: Some(extra), keep: true };
        let mixed = mix.build(b, batch, "mix", normed);
        let [xw, xk, xv, xr, xg] = [0, 1, 2, 3, 4].map(|n| mixed.narrow(2, n, 1));

        let r = b.linear("r", xr, &layer.receptance);
        let k = self.repeated(b, "k", &layer.key, xk);
        let v = self.repeated(b, "v", &layer.value, xv);
        let g = b.linear("g", xg, &layer.gate);
        // w = exp(-exp(decay + D2 tanh(D1 xw)))
        let w = b.linear("w.in", xw, &layer.decay_in);
        let w = b.function("w.tanh", w, Function::Tanh);
        let w = b.linear("w.out", w, &layer.decay_out);
        let w = b.function("w", w, Function::ExpNegExp);
        let y = match layer.own {
            Some((first, norm)) => self.recurrence(b, batch, [r, k, v, w, g], (layer.state, first, norm)),
            None => self.linear_attention(b, batch, [r, k, v, w, g], layer.state),
        };
        let branch = b.linear("output", y, &layer.output);
        b.add("residual", x, branch)
    }

    /// Keys or values: where they have fewer heads, each is repeated for its group.
    fn repeated(&self, b: &mut Builder, name: &str, matrix: &Linear, x: Tensor) -> Tensor {
        let Sizes { hidden, heads, kv_heads, head_dim, .. } = self.frame.sizes;
        if kv_heads == heads {
            return b.linear(name, x, matrix);
        }
        let grouped = b.linear(&format!("{name}.grouped"), x, matrix);
        let (group, tokens) = (heads / kv_heads, x.shape[1]);
        // A view that does not advance in dimension 1 repeats.
        let mut src = grouped.reshape([head_dim, 1, kv_heads, tokens]);
        src.shape[1] = group;
        src.stride[1] = 0;
        let y = b.fresh(name, kiln_gguf::TensorType::F32, [hidden, tokens, 1, 1]);
        b.step(name, copy::Call { src, dst: y.reshape(src.shape) });
        y
    }

    /// RWKV-6: the recurrence, the norm of every head, the gate.
    fn recurrence(
        &self,
        b: &mut Builder,
        batch: &Batch,
        operands: [Tensor; 5],
        (state, first, [weight, bias]): (Tensor, Tensor, [Tensor; 2]),
    ) -> Tensor {
        let (sequences, slots) = batch.recurrence();
        let [r, k, v, td, gate] = operands.map(|t| self.frame.sizes.by_head(t));
        let y = b.like("wkv", r);
        b.step(
            "wkv",
            wkv6::Call {
                k,
                v,
                r,
                tf: first,
                td,
                state_in: state,
                y,
                state_out: state,
                scratch: None,
                sequences,
                slots,
                form: Form::Auto,
                mix: None,
            },
        );
        let mixed = b.like("heads", y);
        let gate = Some((gate, Some(Function::Silu)));
        b.step("heads", head_mix::Call { x: y, weight, bias, eps: HEAD_EPS, bonus: None, gate, y: mixed });
        mixed.reshape(operands[0].shape)
    }

    /// QRWKV: gated linear attention.
    fn linear_attention(&self, b: &mut Builder, batch: &Batch, [r, k, v, w, g]: [Tensor; 5], state: Tensor) -> Tensor {
        let (sequences, slots) = batch.recurrence();
        // What a head forgets makes room for as much of the key.
        let kept = b.multiply("k.kept", k, w);
        let k = b.subtract("k.room", k, kept);
        let y = b.like("attention", r);
        let by_head = |t: Tensor| self.frame.sizes.by_head(t);
        b.step(
            "attention",
            gla::Call {
                k: by_head(k),
                v: by_head(v),
                r: by_head(r),
                td: by_head(w),
                state_in: state,
                y: by_head(y),
                state_out: state,
                scratch: None,
                sequences,
                slots,
                form: Form::Auto,
                scale: 1.0 / (self.frame.sizes.head_dim as f32).sqrt(),
            },
        );
        let gate = b.function("gate.sigmoid", g, Function::Sigmoid);
        b.multiply("gate", y, gate)
    }
}
