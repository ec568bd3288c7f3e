//! RWKV-7: per layer, a time mix around the recurrence `wkv7`, then a channel mix. A head does not only forget: it looks
//! up what it remembers under a key and replaces a share of it. ARWKV: the same time mix in a transformer.

use kiln_kernels::head_mix::{self, Bonus};
use kiln_kernels::recurrence::Form;
use kiln_kernels::tensor::Tensor;
use kiln_kernels::unary::Function;
use kiln_kernels::{key_mix, wkv7};

use super::rwkv::{Blends, FeedForward, Frame, HEAD_EPS, MOST_RANK, Sizes};
use super::{Architecture, Batch};
use crate::Error;
use crate::model::Loader;
use crate::plan::{Builder, Linear, Norm};

/// The name of the vectors by which tokens lean to the ones before.
const LERP: &str = "time_mix_lerp_fused.weight";
/// The least length that keys are divided by.
const KEY_EPS: f32 = 1e-12;

/// A pair of small matrices with a bias: out (f (into x)) + bias.
struct LowRank {
    activation: Option<Function>,
    into: Linear,
    out: Linear,
}

impl LowRank {
    fn load(l: &mut Loader<'_>, letter: char, hidden: usize, rank: usize) -> Result<LowRank, Error> {
        let bias = l.vector(&format!("time_mix_{letter}0.weight"), &[hidden])?;
        let out = l.matrix(&format!("time_mix_{letter}2"), &[rank, hidden])?;
        Ok(LowRank {
            activation: (letter == 'w').then_some(Function::Tanh),
            into: l.matrix(&format!("time_mix_{letter}1"), &[hidden, rank])?,
            out: Linear { bias: Some(bias), ..out },
        })
    }

    /// The first matrix and the function.
    fn enter(&self, b: &mut Builder, name: &str, x: Tensor) -> Tensor {
        let between = b.linear(&format!("{name}.in"), x, &self.into);
        match self.activation {
            Some(f) => b.function(&format!("{name}.function"), between, f),
            None => between,
        }
    }

    /// The second matrix and the bias.
    fn leave(&self, b: &mut Builder, name: &str, between: Tensor) -> Tensor {
        b.linear(&format!("{name}.out"), between, &self.out)
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
    gate: Option<[Linear; 2]>,
    k_k: Tensor,
    k_a: Tensor,
    r_k: Tensor,
    key: Linear,
    value: Linear,
    receptance: Linear,
    head_norm: Option<[Tensor; 2]>,
    output: Linear,
    feed_forward: FeedForward,
    last: Tensor,
    state: Tensor,
}

impl Layer {
    fn load(l: &mut Loader<'_>, sizes: &Sizes, i: usize) -> Result<Layer, Error> {
        let hidden = sizes.hidden;
        let rank = |l: &Loader<'_>, name: &str| l.keys.count(&format!("attention.{name}_lora_rank"), MOST_RANK);
        let (decay, rate) = (rank(l, "decay")?, rank(l, "iclr")?);
        let value = rank(l, "value_residual_mix")?;
        // Files without a gate say that its rank is 0.
        let gate = l.keys.count_opt("attention.gate_lora_rank", MOST_RANK)?;
        l.layer(i);
        let gate = match gate {
            Some(rank) => Some([l.matrix("time_mix_g1", &[hidden, rank])?, l.matrix("time_mix_g2", &[rank, hidden])?]),
            None => None,
        };
        // Some files hold the gate's vector and no gate.
        let groups = if gate.is_some() { 6 } else { 5 };
        let stored = if l.shape(LERP).is_some_and(|shape| shape[3] == 6) { 6 } else { groups };
        let lerp = l.vector(LERP, &[hidden, 1, 1, stored])?.narrow(3, 0, groups);
        if i == 0 {
            // Files hold these for the first layer too, which has no earlier values to lean to.
            ["v0", "v1", "v2"].iter().for_each(|name| l.ignore(&format!("time_mix_{name}.weight")));
        }
        let mut square = |name: &str| l.linear(name, &[hidden, hidden]);
        Ok(Layer {
            key: square("time_mix_key")?,
            value: square("time_mix_value")?,
            receptance: square("time_mix_receptance")?,
            output: square("time_mix_output")?,
            norm: sizes.norm(l, "attn_norm")?,
            lerp: lerp.reshape([hidden, 1, groups, 1]),
            decay: LowRank::load(l, 'w', hidden, decay)?,
            rate: LowRank::load(l, 'a', hidden, rate)?,
            first_value: if i > 0 { Some(LowRank::load(l, 'v', hidden, value)?) } else { None },
            gate,
            k_k: l.vector("time_mix_k_k.weight", &[hidden])?,
            k_a: l.vector("time_mix_k_a.weight", &[hidden])?,
            r_k: l.vector("time_mix_r_k.weight", &[hidden])?,
            head_norm: sizes.head_norm(l)?,
            feed_forward: FeedForward::load(l, sizes, i, false)?,
            last: sizes.shift_state(l, i, "time_shift"),
            state: sizes.wkv_state(l, i),
        })
    }
}

/// An RWKV-7 model with its slots.
struct Rwkv7 {
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
    Ok(Box::new(Rwkv7 { frame, layers }))
}

impl Architecture for Rwkv7 {
    fn build(&self, b: &mut Builder, batch: &Batch) -> Tensor {
        // The values of the first layer are kept: the others lean to them.
        let mut first = None;
        self.frame.build(b, batch, |b, i, x| {
            let layer = &self.layers[i];
            let x = self.time_mix(b, batch, i, layer, x, &mut first);
            layer.feed_forward.build(b, batch, i, x)
        })
    }
}

impl Rwkv7 {
    /// The time mix of one layer; gives the residual stream after it. What does not wait for each other stands together.
    fn time_mix(
        &self,
        b: &mut Builder,
        batch: &Batch,
        i: usize,
        layer: &Layer,
        x: Tensor,
        first: &mut Option<Tensor>,
    ) -> Tensor {
        b.at(format!("{i}.time_mix"));
        let normed = b.norm("norm", x, &layer.norm);
        let blends = Blends { before: layer.last, lerp: layer.lerp, another: None, extra: None, keep: true };
        let mixed = blends.build(b, batch, "mix", normed);
        let [xr, xw, xk, xv, xa] = [0, 1, 2, 3, 4].map(|n| mixed.narrow(2, n, 1));
        let r = b.linear("r", xr, &layer.receptance);
        let k = b.linear("k", xk, &layer.key);
        let v = b.linear("v", xv, &layer.value);
        let w = layer.decay.enter(b, "w", xw);
        let a = layer.rate.enter(b, "a", xa);
        let share = layer.first_value.as_ref().map(|pair| pair.enter(b, "v.share", xv));
        let g = layer.gate.as_ref().map(|[into, _]| {
            let g = b.linear("g.in", mixed.narrow(2, 5, 1), into);
            b.function("g.sigmoid", g, Function::Sigmoid)
        });
        let w = layer.decay.leave(b, "w", w);
        let a = layer.rate.leave(b, "a", a);
        let share = layer.first_value.as_ref().zip(share).map(|(pair, share)| pair.leave(b, "v.share", share));
        let gate = layer.gate.as_ref().zip(g).map(|([_, out], g)| b.linear("g", g, out));

        // The key to look up has length one in each head; what is put there is stronger where the rate is high.
        // w = exp(-e^(-1/2) sigmoid(w0 + W2 tanh(W1 xw))), v += (first - v) sigmoid(v0 + V2 V1 xv)
        let by_head = |t: Tensor| self.frame.sizes.by_head(t);
        let (lookup, replaced) = (b.like("lookup", by_head(k)), b.like("replaced", by_head(k)));
        let value = (*first).zip(share).map(|(first, share)| key_mix::Value {
            v: by_head(v),
            first: by_head(first),
            share: by_head(share),
        });
        first.get_or_insert(v);
        b.step(
            "keys",
            key_mix::Call {
                k: by_head(k),
                k_k: layer.k_k,
                k_a: layer.k_a,
                rate: by_head(a),
                w: by_head(w),
                lookup,
                replaced,
                value,
                eps: KEY_EPS,
            },
        );
        let y = b.like("wkv", lookup);
        let (sequences, slots) = batch.recurrence();
        b.step(
            "wkv",
            wkv7::Call {
                r: by_head(r),
                w: by_head(w),
                k: by_head(k),
                v: by_head(v),
                a: lookup,
                b: replaced,
                state_in: layer.state,
                y,
                state_out: layer.state,
                scratch: None,
                sequences,
                slots,
                form: Form::Auto,
                mix: None,
            },
        );
        let y = self.own(b, layer, [by_head(r), by_head(k), by_head(v), y], gate);
        let branch = b.linear("output", y.reshape(x.shape), &layer.output);
        b.add("residual", x, branch)
    }

    /// The norm of every head, the token itself (y += v (r . k r_k) in each head), the gate.
    fn own(&self, b: &mut Builder, layer: &Layer, [r, k, v, y]: [Tensor; 4], gate: Option<Tensor>) -> Tensor {
        let gate = gate.map(|gate| self.frame.sizes.by_head(gate));
        let Some([weight, bias]) = layer.head_norm else {
            let Sizes { heads, head_dim, .. } = self.frame.sizes;
            let rk = b.multiply("bonus.rk", r, k);
            let rk = b.multiply("bonus.r_k", rk, layer.r_k.reshape([head_dim, heads, 1, 1]));
            let sum = b.sum("bonus.sum", rk);
            let bonus = b.multiply("bonus.v", v, sum);
            let y = b.add("bonus", y, bonus);
            return gate.map_or(y, |gate| b.multiply("gate", y, gate));
        };
        let mixed = b.like("heads", y);
        let bonus = Some(Bonus { r, k, v, weight: layer.r_k });
        let gate = gate.map(|gate| (gate, None));
        b.step("heads", head_mix::Call { x: y, weight, bias, eps: HEAD_EPS, bonus, gate, y: mixed });
        mixed
    }
}
