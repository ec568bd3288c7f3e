//! Attention over a cache of keys and values: projections, norms of heads, rotary positions, and all that models change about
//! it.

use kiln_kernels::tensor::Tensor;
use kiln_kernels::unary::Function;

use super::attend::{Attended, Extras, ResultGate, Temperature, Turned, flat, turned};
use super::indexer::{IndexSpec, Indexer};
use super::mixer::Mixer;
use super::moe::{ValueSpec, Values};
use crate::Error;
use crate::arch::Batch;
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
    /// Each head by its mean square; each head has its weight.
    RmsEach,
    /// The same. Files may leave it out.
    RmsEachMaybe,
    /// Each head by its mean square, nothing else.
    BareRms,
    /// The same; each head of queries has a factor.
    RmsFactor,
    /// Each head to mean 0 and variance 1; each head has its weight, and a bias where the file has one.
    LayerEach,
}

/// How attention is read and computed in one layer. The fields of [`Attended`] are its own as well.
#[derive(Clone, Debug)]
pub struct AttentionSpec {
    /// Heads, scores, and what tokens see.
    pub attended: Attended,
    /// Width of the tokens.
    pub hidden: usize,
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
    /// Whether biases of queries, keys and values count.
    pub bias: bool,
    /// Factors of queries that grow with the position.
    pub temperature: Option<Temperature>,
    /// What stands before the output matrix is normed (`attn_sub_norm`), with this added.
    pub inner_norm: Option<f32>,
    /// Factor of the result, after the output matrix.
    pub result_scale: f32,
    /// Values are those of experts, in the place of `attn_v`.
    pub values: Option<ValueSpec>,
    /// Whether values are the keys before their norm where the file has no `attn_v`.
    pub keys_as_values: bool,
    /// Whether each head of values is divided by the root of its mean square.
    pub value_norm: bool,
    /// The layer whose caches this one reads: it has no keys and values of its own, and writes none.
    pub caches_of: Option<usize>,
    /// Small queries and keys, one head for each head of keys, choose what the tokens see.
    pub index: Option<IndexSpec>,
}

impl std::ops::Deref for AttentionSpec {
    type Target = Attended;

    fn deref(&self) -> &Attended {
        &self.attended
    }
}

impl std::ops::DerefMut for AttentionSpec {
    fn deref_mut(&mut self) -> &mut Attended {
        &mut self.attended
    }
}

impl AttentionSpec {
    /// What the sizes say, and nothing else.
    pub fn plain(sizes: &Sizes, layer: usize, eps: f32) -> AttentionSpec {
        let attended = Attended {
            heads: sizes.heads[layer],
            kv_heads: sizes.kv_heads[layer],
            head_dim: sizes.head_dim,
            value_dim: sizes.value_dim,
            scale: 1.0 / (sizes.head_dim as f32).sqrt(),
            softcap: 0.0,
            max_bias: 0.0,
            window: None,
            chunk: None,
            causal: true,
        };
        AttentionSpec {
            attended,
            hidden: sizes.hidden,
            rope: None,
            head_norm: HeadNorm::None,
            norm_after_rope: false,
            eps,
            sinks: false,
            gate: ResultGate::None,
            output_bias: true,
            scaled: true,
            clamp: None,
            bias: true,
            temperature: None,
            inner_norm: None,
            result_scale: 1.0,
            values: None,
            keys_as_values: false,
            value_norm: false,
            caches_of: None,
            index: None,
        }
    }
}

/// Weight of a norm that every head has its own row of.
#[derive(Clone, Copy, Debug)]
struct Normed {
    norm: Norm,
    /// `[width, heads]`: multiplied after the norm.
    per_head: Option<Tensor>,
    /// `[width, heads]`: added then.
    bias: Option<Tensor>,
    whole: bool,
}

/// Attention of one layer.
#[derive(Clone, Debug)]
pub struct Attention {
    spec: AttentionSpec,
    q: Linear,
    /// Nothing where the layer reads caches of another one.
    own: Option<KeysValues>,
    inner_norm: Option<Norm>,
    output: Linear,
    q_norm: Option<Normed>,
    freqs: Option<Tensor>,
    sinks: Option<Tensor>,
    gate: Option<super::attend::Gated>,
    temperature: Option<Tensor>,
    indexer: Option<Indexer>,
    k_cache: Tensor,
    v_cache: Tensor,
}

/// What makes keys and values.
#[derive(Clone, Debug)]
struct KeysValues {
    k: Linear,
    v: Source,
    k_norm: Option<Normed>,
}

/// Where values come from.
#[derive(Clone, Debug)]
enum Source {
    Matrix(Linear),
    Experts(Box<Values>),
    /// They are the keys before their norm.
    Keys,
}

impl Mixer for Attention {
    fn build(&self, b: &mut Builder, batch: &Batch, x: Tensor) -> Tensor {
        let Attended { heads, head_dim, .. } = self.spec.attended;
        let q = b.linear("q", x, &self.q);
        let made = self.own.as_ref().map(|own| own.products(b, x));
        let q = self.clamped(b, "q_clamp", q);
        let made = made.map(|[k, v]| [self.clamped(b, "k_clamp", k), self.clamped(b, "v_clamp", v)]);
        let (q, inner_gate) = match self.spec.gate {
            ResultGate::InQueries => {
                let both = by_head(q, 2 * head_dim, heads);
                (both.narrow(0, 0, head_dim), Some(both.narrow(0, head_dim, head_dim)))
            }
            _ => (by_head(q, head_dim, heads), None),
        };
        let q = self.heads(b, batch, ["q_norm", "q_rope"], q, self.q_norm.as_ref());
        let made = made.map(|made| self.placed(b, batch, made));
        let q = match self.temperature {
            Some(table) => super::attend::warmed(b, batch, q, table),
            None => q,
        };
        if let Some(made) = made {
            self.store(b, batch, made);
        }
        let caches = [self.k_cache, self.v_cache];
        let lists = self.indexer.as_ref().and_then(|indexer| indexer.build(b, batch, x, x).lists());
        let mut y = match lists {
            Some(lists) => self.spec.attended.over_lists(b, q, caches, self.sinks, lists),
            None => self.spec.attended.build(b, batch, q, caches, Extras::sinks(self.sinks)),
        };
        if let Some(gate) = &self.gate {
            y = gate.build(b, x, y);
        }
        if let Some(gate) = inner_gate {
            let gate = b.function("gate.sigmoid", gate, Function::Sigmoid);
            y = b.multiply("gated", y, gate.reshape(y.shape));
        }
        let y = self.inner_norm.map_or(y, |norm| b.norm("inner_norm", y, &norm));
        let y = b.linear("output", y, &self.output);
        if self.spec.result_scale == 1.0 { y } else { b.scale("result", y, self.spec.result_scale) }
    }

    fn keep(&self, b: &mut Builder, batch: &Batch, x: Tensor) {
        let Some(own) = &self.own else { return };
        let [k, v] = own.products(b, x);
        let made = [self.clamped(b, "k_clamp", k), self.clamped(b, "v_clamp", v)];
        let made = self.placed(b, batch, made);
        self.store(b, batch, made);
    }
}

impl Attention {
    /// Reads it; `layer` names its caches.
    pub fn load(l: &mut Loader<'_>, spec: &AttentionSpec, layer: usize) -> Result<Attention, Error> {
        let (hidden, window) = (spec.hidden, spec.kept());
        let Attended { heads, kv_heads, head_dim, value_dim, .. } = spec.attended;
        if !spec.causal {
            l.sees_all();
        }
        let (q_width, k_width, v_width) = (heads * head_dim, kv_heads * head_dim, kv_heads * value_dim);
        if heads == 0 || kv_heads == 0 {
            l.keys.require(false, "attention.head_count", 0, "1 to 4096")?;
        }
        let counted = |linear: Linear| {
            let scale = if spec.scaled { linear.scale } else { 1.0 };
            Linear { scale, bias: linear.bias.filter(|_| spec.bias), ..linear }
        };
        let (q, made) = if l.has("attn_qkv.weight") {
            let all = counted(l.linear("attn_qkv", &[hidden, q_width + k_width + v_width])?);
            let v = Source::Matrix(all.rows(q_width + k_width, v_width));
            (all.rows(0, q_width), Some((all.rows(q_width, k_width), v)))
        } else {
            let q_width = if spec.gate == ResultGate::InQueries { 2 * q_width } else { q_width };
            let q = counted(l.linear("attn_q", &[hidden, q_width])?);
            let made = match spec.caches_of {
                Some(_) => {
                    // Files may hold what makes keys and values all the same.
                    ["attn_k", "attn_v", "attn_k_norm"].iter().for_each(|name| l.ignore_matrix(name));
                    None
                }
                None => {
                    let k = counted(l.linear("attn_k", &[hidden, k_width])?);
                    let v = match &spec.values {
                        Some(values) => Source::Experts(Box::new(Values::load(l, values, [hidden, v_width])?)),
                        None if spec.keys_as_values && !l.has("attn_v.weight") => Source::Keys,
                        None => Source::Matrix(counted(l.linear("attn_v", &[hidden, v_width])?)),
                    };
                    Some((k, v))
                }
            };
            (q, made)
        };
        let mut output = l.linear("attn_output", &[heads * value_dim, hidden])?;
        output.bias = output.bias.filter(|_| spec.output_bias);
        let cache = |name: &str, which: Cached, l: &mut Loader<'_>, width: usize| match spec.caches_of {
            Some(owner) => l.shared_cache(&format!("{owner}.{name}"), [width, kv_heads]),
            None => l.heads_cache(&format!("{layer}.{name}"), which, [width, kv_heads], window),
        };
        let freqs = match &spec.rope {
            Some(rope) => Some(l.freqs(&rope.params, rope.factors.as_deref())?),
            None => None,
        };
        Ok(Attention {
            gate: spec.gate.load(l, hidden, [heads, value_dim])?,
            temperature: spec.temperature.map(|t| t.load(l)),
            q_norm: head_norm(l, "attn_q_norm", heads, spec)?,
            own: match made {
                Some((k, v)) => Some(KeysValues { k, v, k_norm: head_norm(l, "attn_k_norm", kv_heads, spec)? }),
                None => None,
            },
            inner_norm: match spec.inner_norm {
                Some(eps) => {
                    let weight = Some(l.vector("attn_sub_norm.weight", &[heads * value_dim])?);
                    Some(Norm::Rms { weight, eps })
                }
                None => None,
            },
            sinks: if spec.sinks { Some(l.vector("attn_sinks.weight", &[heads])?) } else { None },
            indexer: match &spec.index {
                Some(index) => Some(Indexer::each(l, index, hidden, layer)?),
                None => None,
            },
            k_cache: cache("k_cache", Cached::Keys, l, head_dim)?,
            v_cache: cache("v_cache", Cached::Values, l, value_dim)?,
            spec: spec.clone(),
            q,
            output,
            freqs,
        })
    }

    fn clamped(&self, b: &mut Builder, name: &str, t: Tensor) -> Tensor {
        match self.spec.clamp {
            Some(most) => b.clamp(name, t, most),
            None => t,
        }
    }

    /// Keys and values as they are kept.
    fn placed(&self, b: &mut Builder, batch: &Batch, [k, v]: [Tensor; 2]) -> [Tensor; 2] {
        let Attended { kv_heads, head_dim, .. } = self.spec.attended;
        let norm = self.own.as_ref().and_then(|own| own.k_norm.as_ref());
        let k = self.heads(b, batch, ["k_norm", "k_rope"], by_head(k, head_dim, kv_heads), norm);
        [flat(k), self.values(b, v)]
    }

    fn store(&self, b: &mut Builder, batch: &Batch, [k, v]: [Tensor; 2]) {
        let rows = batch.places(self.spec.kept()).rows;
        b.store("k_write", k, rows, self.k_cache);
        b.store("v_write", v, rows, self.v_cache);
    }

    /// Values `[width * heads, rows]` as they are kept.
    fn values(&self, b: &mut Builder, v: Tensor) -> Tensor {
        let AttentionSpec { attended: Attended { kv_heads, value_dim, .. }, value_norm, eps, .. } = self.spec;
        match value_norm {
            true => flat(b.norm("v_norm", by_head(v, value_dim, kv_heads), &Norm::Rms { weight: None, eps })),
            false => v,
        }
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
        let turned = |b: &mut Builder, x: Tensor| match (&self.spec.rope, self.freqs) {
            (Some(rope), Some(freqs)) => {
                let y = b.like(turn, x);
                turned(b, batch, turn, Turned { x, y, freqs, offset: 0 }, rope);
                y
            }
            _ => x,
        };
        if self.spec.norm_after_rope {
            let x = turned(b, x);
            normed(b, x)
        } else {
            let x = normed(b, x);
            turned(b, x)
        }
    }
}

impl KeysValues {
    /// The products with the normed input.
    fn products(&self, b: &mut Builder, x: Tensor) -> [Tensor; 2] {
        let k = b.linear("k", x, &self.k);
        let v = match &self.v {
            Source::Matrix(matrix) => b.linear("v", x, matrix),
            Source::Experts(values) => values.build(b, x),
            Source::Keys => k,
        };
        [k, v]
    }
}

/// `[width * heads, rows]` as `[width, heads, rows]`.
fn by_head(t: Tensor, width: usize, heads: usize) -> Tensor {
    t.reshape([width, heads, t.shape[1], 1])
}

impl Normed {
    fn build(&self, b: &mut Builder, name: &str, x: Tensor) -> Tensor {
        let y =
            if self.whole { b.norm(name, flat(x), &self.norm).reshape(x.shape) } else { b.norm(name, x, &self.norm) };
        let y = self.per_head.map_or(y, |weight| b.multiply(&format!("{name}.weight"), y, weight));
        self.bias.map_or(y, |bias| b.add(&format!("{name}.bias"), y, bias))
    }
}

fn head_norm(l: &mut Loader<'_>, name: &str, heads: usize, spec: &AttentionSpec) -> Result<Option<Normed>, Error> {
    let (weight, width, eps) = (format!("{name}.weight"), spec.head_dim, spec.eps);
    let plain = |norm: Norm, whole: bool| Some(Normed { norm, per_head: None, bias: None, whole });
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
        HeadNorm::RmsEach | HeadNorm::RmsEachMaybe => {
            if spec.head_norm == HeadNorm::RmsEachMaybe && !l.has(&weight) {
                return Ok(None);
            }
            let weight = l.vector(&weight, &[width, heads])?;
            Some(Normed { norm: Norm::Rms { weight: None, eps }, per_head: Some(weight), bias: None, whole: false })
        }
        HeadNorm::BareRms => plain(Norm::Rms { weight: None, eps }, false),
        HeadNorm::RmsFactor => {
            let per_head = if name == "attn_q_norm" { Some(l.tensor(&weight, &[1, heads])?) } else { None };
            Some(Normed { norm: Norm::Rms { weight: None, eps }, per_head, bias: None, whole: false })
        }
        HeadNorm::LayerMaybe => {
            let Some(weight) = l.vector_opt(&weight, &[width, heads])? else { return Ok(None) };
            let norm = Norm::Layer { weight: None, bias: None, eps };
            Some(Normed { norm, per_head: Some(weight), bias: None, whole: false })
        }
        HeadNorm::LayerEach => {
            let per_head = Some(l.vector(&weight, &[width, heads])?);
            let bias = l.vector_opt(&format!("{name}.bias"), &[width, heads])?;
            Some(Normed { norm: Norm::Layer { weight: None, bias: None, eps }, per_head, bias, whole: false })
        }
    })
}
