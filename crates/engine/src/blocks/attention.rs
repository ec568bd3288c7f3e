//! Attention over a cache of keys and values: projections, norms of heads, rotary positions, and all that models change about
//! it.

use kiln_gguf::TensorType;
use kiln_kernels::flash_attention::{self, Mask, Pages};
use kiln_kernels::rope;
use kiln_kernels::tensor::Tensor;
use kiln_kernels::unary::Function;

use crate::Error;
use crate::arch::{Batch, PAGE};
use crate::model::parts::{Rope, Sizes};
use crate::model::{Cached, Loader};
use crate::plan::{Builder, Linear, Norm};

/// Norms of queries and keys.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum HeadNorm {
    /// None.
    None,
    /// Each head by its mean square; heads share a weight.
    Rms,
    /// The same. Files may leave it out.
    RmsMaybe,
    /// Each head to mean 0 and variance 1; each head has its weight. Files may leave it out.
    LayerMaybe,
    /// All heads together by their mean square.
    WholeRms,
    /// All heads together to mean 0 and variance 1. Files may leave it out.
    WholeLayerMaybe,
}

/// What gates the result of attention before the output matrix.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum ResultGate {
    /// Nothing.
    None,
    /// The sigmoid of a product of the normed input, `attn_gate`.
    Sigmoid,
}

/// How attention is read and computed in one layer.
#[derive(Clone, Debug)]
pub struct AttentionSpec {
    /// Width of the tokens.
    pub hidden: usize,
    /// Query heads.
    pub heads: usize,
    /// Key and value heads.
    pub kv_heads: usize,
    /// Width of a head of queries and keys.
    pub head_dim: usize,
    /// Width of a head of values.
    pub value_dim: usize,
    /// Factor of the scores.
    pub scale: f32,
    /// With c > 0, scores become c * tanh(score / c).
    pub softcap: f32,
    /// Steepness of ALiBi; 0 for none.
    pub max_bias: f32,
    /// Number of the last positions a token sees, its own included.
    pub window: Option<usize>,
    /// Rotary positions; `None` for none.
    pub rope: Option<Rope>,
    /// Norms of queries and keys.
    pub head_norm: HeadNorm,
    /// Whether heads are normed after they are turned.
    pub norm_after_rope: bool,
    /// Added in norms of heads.
    pub eps: f32,
    /// Whether every head has one more score that takes part in the sum alone (`attn_sinks`).
    pub sinks: bool,
    /// What gates the result.
    pub gate: ResultGate,
    /// Whether the bias of the output matrix counts.
    pub output_bias: bool,
    /// Whether factors of queries, keys and values count (`attn_q.scale`).
    pub scaled: bool,
    /// Every element of queries, keys and values is brought within this bound of 0.
    pub clamp: Option<f32>,
}

impl AttentionSpec {
    /// What the sizes say, and nothing else.
    pub fn plain(sizes: &Sizes, layer: usize, eps: f32) -> AttentionSpec {
        AttentionSpec {
            hidden: sizes.hidden,
            heads: sizes.heads[layer],
            kv_heads: sizes.kv_heads[layer],
            head_dim: sizes.head_dim,
            value_dim: sizes.value_dim,
            scale: 1.0 / (sizes.head_dim as f32).sqrt(),
            softcap: 0.0,
            max_bias: 0.0,
            window: None,
            rope: None,
            head_norm: HeadNorm::None,
            norm_after_rope: false,
            eps,
            sinks: false,
            gate: ResultGate::None,
            output_bias: true,
            scaled: true,
            clamp: None,
        }
    }
}

/// Weight of a norm that every head has its own row of.
#[derive(Clone, Copy, Debug)]
struct Normed {
    norm: Norm,
    /// `[width, heads]`: multiplied after the norm.
    per_head: Option<Tensor>,
    whole: bool,
}

/// Attention of one layer.
#[derive(Clone, Debug)]
pub struct Attention {
    spec: AttentionSpec,
    q: Linear,
    k: Linear,
    v: Linear,
    output: Linear,
    q_norm: Option<Normed>,
    k_norm: Option<Normed>,
    turns: Option<Tensor>,
    sinks: Option<Tensor>,
    gate: Option<Linear>,
    k_cache: Tensor,
    v_cache: Tensor,
}

impl Attention {
    /// Reads it; `layer` names its caches.
    pub fn load(l: &mut Loader<'_>, spec: &AttentionSpec, layer: usize) -> Result<Attention, Error> {
        let AttentionSpec { hidden, heads, kv_heads, head_dim, value_dim, .. } = *spec;
        let (q_width, k_width, v_width) = (heads * head_dim, kv_heads * head_dim, kv_heads * value_dim);
        if heads == 0 || kv_heads == 0 {
            l.keys.require(false, "attention.head_count", 0, "1 to 4096")?;
        }
        let (q, k, v) = if l.has("attn_qkv.weight") {
            let all = l.linear("attn_qkv", &[hidden, q_width + k_width + v_width])?;
            (all.rows(0, q_width), all.rows(q_width, k_width), all.rows(q_width + k_width, v_width))
        } else {
            let (q, k) = (l.linear("attn_q", &[hidden, q_width])?, l.linear("attn_k", &[hidden, k_width])?);
            (q, k, l.linear("attn_v", &[hidden, v_width])?)
        };
        let counted = |linear: Linear| if spec.scaled { linear } else { Linear { scale: 1.0, ..linear } };
        let [q, k, v] = [q, k, v].map(counted);
        let mut output = l.linear("attn_output", &[heads * value_dim, hidden])?;
        output.bias = output.bias.filter(|_| spec.output_bias);
        let gate = match spec.gate {
            ResultGate::None => None,
            ResultGate::Sigmoid => Some(l.matrix("attn_gate", &[hidden, heads * value_dim])?),
        };
        let turns = match &spec.rope {
            Some(rope) => Some(l.turns(&rope.params, rope.factors.as_deref())?),
            None => None,
        };
        Ok(Attention {
            q_norm: head_norm(l, "attn_q_norm", heads, spec)?,
            k_norm: head_norm(l, "attn_k_norm", kv_heads, spec)?,
            sinks: if spec.sinks { Some(l.vector("attn_sinks.weight", &[heads])?) } else { None },
            k_cache: l.heads_cache(&format!("{layer}.k_cache"), Cached::Keys, [head_dim, kv_heads])?,
            v_cache: l.heads_cache(&format!("{layer}.v_cache"), Cached::Values, [value_dim, kv_heads])?,
            spec: spec.clone(),
            q,
            k,
            v,
            output,
            turns,
            gate,
        })
    }

    /// Adds the steps; gives what is added to the residual stream.
    pub fn build(&self, b: &mut Builder, batch: &Batch, x: Tensor) -> Tensor {
        let AttentionSpec { heads, kv_heads, head_dim, .. } = self.spec;
        let q = b.linear("q", x, &self.q);
        let k = b.linear("k", x, &self.k);
        let v = b.linear("v", x, &self.v);
        let [q, k, v] = [("q_clamp", q), ("k_clamp", k), ("v_clamp", v)].map(|(name, t)| match self.spec.clamp {
            Some(most) => b.clamp(name, t, most),
            None => t,
        });
        let q = self.heads(b, batch, ["q_norm", "q_rope"], by_head(q, head_dim, heads), self.q_norm.as_ref());
        let k = self.heads(b, batch, ["k_norm", "k_rope"], by_head(k, head_dim, kv_heads), self.k_norm.as_ref());
        b.store("k_write", flat(k), batch.ports.rows, self.k_cache);
        b.store("v_write", v, batch.ports.rows, self.v_cache);
        let mut y = self.attend(b, batch, q);
        if let Some(gate) = &self.gate {
            let gate = b.linear("gate", x, gate);
            let gate = b.function("gate.sigmoid", gate, Function::Sigmoid);
            y = b.multiply("gated", y, gate);
        }
        b.linear("output", y, &self.output)
    }

    /// Norm and rotary positions of `[width, heads, rows]`.
    fn heads(
        &self,
        b: &mut Builder,
        batch: &Batch,
        [norm, turn]: [&str; 2],
        x: Tensor,
        how: Option<&Normed>,
    ) -> Tensor {
        let normed = |b: &mut Builder, x: Tensor| how.map_or(x, |how| how.build(b, norm, x));
        let turned = |b: &mut Builder, x: Tensor| self.turned(b, batch, turn, x);
        if self.spec.norm_after_rope {
            let x = turned(b, x);
            normed(b, x)
        } else {
            let x = normed(b, x);
            turned(b, x)
        }
    }

    /// Heads turned by their positions.
    fn turned(&self, b: &mut Builder, batch: &Batch, name: &str, x: Tensor) -> Tensor {
        let (Some(rope), Some(turns)) = (&self.spec.rope, self.turns) else { return x };
        let y = b.like(name, x);
        let params = &rope.params;
        b.step(
            name,
            rope::Call {
                x,
                positions: batch.ports.positions,
                turns,
                y,
                style: params.style,
                n_dims: params.n_dims,
                offset: 0,
                sections: params.sections,
                magnitude: params.magnitude(),
                backward: false,
            },
        );
        y
    }

    /// The rows of a batch that go on by one token, and those of prompts, over the keys of their sequences.
    fn attend(&self, b: &mut Builder, batch: &Batch, q: Tensor) -> Tensor {
        let AttentionSpec { heads, value_dim, .. } = self.spec;
        let shape = batch.shape;
        let out = b.fresh("attended", TensorType::F32, [value_dim * heads, shape.rows(), 1, 1]);
        if shape.decode > 0 {
            let call = self.part(batch, q, out, Part { rows: 0, sequences: [0, shape.decode], tokens: 1 });
            b.step("", call);
        }
        if shape.prompt > 0 {
            let sequences = [shape.decode, shape.pieces];
            let mut call = self.part(batch, q, out, Part { rows: shape.decode, sequences, tokens: shape.prompt });
            call.sequences = (shape.pieces > 1).then_some(batch.ports.owners);
            b.step("prompt", call);
        }
        out
    }

    fn part(&self, batch: &Batch, q: Tensor, out: Tensor, part: Part) -> flash_attention::Call {
        let AttentionSpec { heads, kv_heads, head_dim, value_dim, .. } = self.spec;
        let Part { rows: first, sequences: [sequence, sequences], tokens } = part;
        // Among rows that go on, each is a sequence of its own; those of prompts lie one after the other.
        let batches = if tokens == 1 && first == 0 && batch.shape.decode > 0 { sequences } else { 1 };
        let n = tokens * batches;
        let shape = |width: usize| [width, heads, tokens, batches];
        // A cache row holds all heads of a token; attention wants [width, keys, heads].
        let keys =
            |cache: Tensor, width: usize| cache.reshape([width, kv_heads, cache.shape[1], 1]).permute([0, 2, 1, 3]);
        let ports = &batch.ports;
        flash_attention::Call {
            mask: Mask::Causal {
                positions: ports.positions.narrow(0, first, n),
                length: ports.lengths.narrow(0, sequence, sequences),
                window: self.spec.window,
            },
            pages: Some(Pages { table: ports.table.narrow(1, sequence, sequences), size: PAGE }),
            sinks: self.sinks,
            max_bias: self.spec.max_bias,
            logit_softcap: self.spec.softcap,
            ..flash_attention::Call::plain(
                q.narrow(2, first, n).reshape(shape(head_dim)).permute([0, 2, 1, 3]),
                keys(self.k_cache, head_dim),
                keys(self.v_cache, value_dim),
                out.narrow(1, first, n).reshape(shape(value_dim)),
                self.spec.scale,
            )
        }
    }
}

/// Some rows of a batch: the first one, the first sequence and the number of sequences, tokens of each batch.
struct Part {
    rows: usize,
    sequences: [usize; 2],
    tokens: usize,
}

/// `[width * heads, rows]` as `[width, heads, rows]`.
fn by_head(t: Tensor, width: usize, heads: usize) -> Tensor {
    t.reshape([width, heads, t.shape[1], 1])
}

/// `[width, heads, rows]` as `[width * heads, rows]`.
fn flat(t: Tensor) -> Tensor {
    t.reshape([t.shape[0] * t.shape[1], t.shape[2], 1, 1])
}

impl Normed {
    fn build(&self, b: &mut Builder, name: &str, x: Tensor) -> Tensor {
        let y =
            if self.whole { b.norm(name, flat(x), &self.norm).reshape(x.shape) } else { b.norm(name, x, &self.norm) };
        match self.per_head {
            Some(weight) => b.multiply(&format!("{name}.weight"), y, weight),
            None => y,
        }
    }
}

fn head_norm(l: &mut Loader<'_>, name: &str, heads: usize, spec: &AttentionSpec) -> Result<Option<Normed>, Error> {
    let (weight, width, eps) = (format!("{name}.weight"), spec.head_dim, spec.eps);
    let plain = |norm: Norm, whole: bool| Some(Normed { norm, per_head: None, whole });
    Ok(match spec.head_norm {
        HeadNorm::None => None,
        HeadNorm::Rms => plain(Norm::Rms { weight: Some(l.vector(&weight, &[width])?), eps }, false),
        HeadNorm::RmsMaybe => match l.vector_opt(&weight, &[width])? {
            Some(weight) => plain(Norm::Rms { weight: Some(weight), eps }, false),
            None => None,
        },
        HeadNorm::WholeRms => plain(Norm::Rms { weight: Some(l.vector(&weight, &[width * heads])?), eps }, true),
        HeadNorm::WholeLayerMaybe => {
            let Some(weight) = l.vector_opt(&weight, &[width * heads])? else { return Ok(None) };
            let bias = l.vector_opt(&format!("{name}.bias"), &[width * heads])?;
            plain(Norm::Layer { weight: Some(weight), bias, eps }, true)
        }
        HeadNorm::LayerMaybe => {
            let Some(weight) = l.vector_opt(&weight, &[width, heads])? else { return Ok(None) };
            let norm = Norm::Layer { weight: None, bias: None, eps };
            Some(Normed { norm, per_head: Some(weight), whole: false })
        }
    })
}
