//! Latent attention: keys and values of all heads come from one short vector for each token, the latent.
//!
//! Files hold the matrices from the latent to the heads in one of two forms. Split by kind (`attn_k_b`, `attn_v_b`), the one of
//! the keys is applied to the queries, so that attention reads latents: a cache row is a latent and one turned key that all
//! heads share, and values are a part of keys. A prompt that begins its text, all of whose keys are in the batch, may be attended in the other form
//! all the same. In one piece (`attn_kv_b`), keys and values of all heads are made and cached as
//! in other models.

use kiln_gguf::TensorType;
use kiln_kernels::flash_attention::{self, Mask, Window};
use kiln_kernels::mul_mat::Product;
use kiln_kernels::mul_mat_vec;
use kiln_kernels::tensor::Tensor;

use super::attend::{Attended, Extras, Gated, ResultGate, Temperature, Turned, flat, keys, turned, warmed};
use super::indexer::{Chosen, IndexSpec, Indexer};
use super::mixer::Mixer;
use crate::Error;
use crate::arch::{Batch, BatchShape};
use crate::model::parts::Rope;
use crate::model::{Cached, Loader};
use crate::plan::{Builder, Linear, Norm, Ports};

/// How latent attention is read and computed in one layer.
#[derive(Clone, Debug)]
pub struct LatentSpec {
    /// Width of the tokens.
    pub hidden: usize,
    /// Heads.
    pub heads: usize,
    /// Width of the latent.
    pub rank: usize,
    /// Width of what queries are made from, where they have such a step.
    pub query_rank: Option<usize>,
    /// Width of a head of queries and keys; the last `turned` elements depend on the position.
    pub head_dim: usize,
    /// Elements of a head that are turned, or left as they are without `rope`.
    pub turned: usize,
    /// Width of a head of values.
    pub value_dim: usize,
    /// Factor of the scores.
    pub scale: f32,
    /// Rotary positions; `None` for none.
    pub rope: Option<Rope>,
    /// Added in norms.
    pub eps: f32,
    /// Whether the key that all heads share is normed (`attn_k_norm`).
    pub key_norm: bool,
    /// What gates the result.
    pub gate: ResultGate,
    /// Whether every head has one more score that takes part in the sum alone (`attn_sinks`).
    pub sinks: bool,
    /// Number of the last positions a token sees, its own included.
    pub window: Option<usize>,
    /// Factors of queries that grow with the position.
    pub temperature: Option<Temperature>,
    /// Whether the factor of the output matrix counts.
    pub scaled: bool,
    /// Which keys a token sees.
    pub sees: Sees,
}

/// Which of the keys before it a token sees.
#[allow(clippy::large_enum_variant, reason = "there is one for each kind of layer, while a model is loaded")]
#[derive(Clone, Debug)]
pub enum Sees {
    /// All, or those of the window.
    All,
    /// Those that small queries and keys choose.
    Chosen(IndexSpec),
    /// Those that the nearest layer before chose.
    AsBefore,
}

/// Latent attention of one layer.
#[derive(Clone, Debug)]
pub struct Latent {
    spec: LatentSpec,
    query: Query,
    /// To the latent and the shared key.
    down: Linear,
    norm: Norm,
    key_norm: Option<Norm>,
    up: Up,
    output: Linear,
    freqs: Option<Tensor>,
    sinks: Option<Tensor>,
    gate: Option<Gated>,
    temperature: Option<Tensor>,
    indexer: Option<Indexer>,
}

#[derive(Clone, Debug)]
struct Query {
    /// The matrix and norm of the step in between.
    low: Option<(Linear, Norm)>,
    matrix: Linear,
}

/// From the latent to the heads.
#[derive(Clone, Debug)]
enum Up {
    /// `[still, rank, heads]` and `[rank, values, heads]`; the cache holds latents.
    Split { k: Tensor, v: Tensor, cache: Tensor },
    /// `[rank, heads * (still + values)]`; the caches hold keys and values of all heads.
    Whole { matrix: Linear, k_cache: Tensor, v_cache: Tensor },
}

impl LatentSpec {
    /// Elements of a head that do not depend on the position.
    fn still(&self) -> usize {
        self.head_dim - self.turned
    }
}

impl Mixer for Latent {
    fn build(&self, b: &mut Builder, batch: &Batch, x: Tensor) -> Tensor {
        let LatentSpec { heads, head_dim, .. } = self.spec;
        let rows = x.shape[1];
        let from = match &self.query.low {
            Some((matrix, norm)) => {
                let low = b.linear("q_low", x, matrix);
                b.norm("q_low.norm", low, norm)
            }
            None => x,
        };
        let q = b.linear("q", from, &self.query.matrix);
        let chosen = match (&self.indexer, &self.spec.sees) {
            (Some(indexer), _) => Some(indexer.build(b, batch, x, from)),
            (None, Sees::AsBefore) => Chosen::of_layer_before(b),
            (None, _) => None,
        };
        let mut q = q.reshape([head_dim, heads, rows, 1]);
        if let Some(table) = self.temperature {
            q = warmed(b, batch, q, table);
        }
        let [latent, key] = self.latent(b, batch, x);
        let y = match &self.up {
            Up::Split { k, v, cache } => self.over_latents(b, batch, [q, latent, key], [*k, *v, *cache], chosen),
            Up::Whole { matrix, k_cache, v_cache } => {
                self.over_heads(b, batch, [q, latent, key], matrix, [*k_cache, *v_cache])
            }
        };
        let y = match &self.gate {
            Some(gate) => gate.build(b, x, y),
            None => y,
        };
        b.linear("output", y, &self.output)
    }

    fn keep(&self, b: &mut Builder, batch: &Batch, x: Tensor) {
        match self.up {
            Up::Split { cache, .. } => {
                let made = self.latent(b, batch, x);
                self.store(b, batch, made, cache);
            }
            Up::Whole { .. } => {
                self.build(b, batch, x);
            }
        }
    }
}

impl Latent {
    /// Reads it; `layer` names its caches.
    pub fn load(l: &mut Loader<'_>, spec: &LatentSpec, layer: usize) -> Result<Latent, Error> {
        let LatentSpec { hidden, heads, rank, head_dim, turned, value_dim, eps, .. } = *spec;
        let fits = turned <= head_dim;
        l.keys.require(fits, "rope.dimension_count", turned, &format!("at most the {head_dim} elements of a head"))?;
        let rms = |l: &mut Loader<'_>, name: &str, width: usize| -> Result<Norm, Error> {
            Ok(Norm::Rms { weight: Some(l.vector(&format!("{name}.weight"), &[width])?), eps })
        };
        let query = match spec.query_rank {
            Some(low) => Query {
                low: Some((plain(l, "attn_q_a", &[hidden, low])?, rms(l, "attn_q_a_norm", low)?)),
                matrix: plain(l, "attn_q_b", &[low, heads * head_dim])?,
            },
            None => Query { low: None, matrix: plain(l, "attn_q", &[hidden, heads * head_dim])? },
        };
        let mut output = l.linear("attn_output", &[heads * value_dim, hidden])?;
        if !spec.scaled {
            output.scale = 1.0;
        }
        let indexer = match &spec.sees {
            Sees::Chosen(index) => {
                Some(Indexer::weighed(l, index, [hidden, spec.query_rank.unwrap_or(hidden)], layer)?)
            }
            _ => None,
        };
        let still = spec.still();
        // A list names rows of latents: one for all heads.
        if !matches!(spec.sees, Sees::All) && !l.has("attn_k_b.weight") {
            return Err(Error::MissingTensor { name: l.full("attn_k_b.weight") });
        }
        let up = if l.has("attn_k_b.weight") {
            l.caches_latents();
            Up::Split {
                k: plain(l, "attn_k_b", &[still, rank, heads])?.weight,
                v: plain(l, "attn_v_b", &[rank, value_dim, heads])?.weight,
                cache: l.cache(&format!("{layer}.k_cache"), Cached::Keys, rank + turned, spec.window)?,
            }
        } else {
            Up::Whole {
                matrix: plain(l, "attn_kv_b", &[rank, heads * (still + value_dim)])?,
                k_cache: l.cache(&format!("{layer}.k_cache"), Cached::Keys, heads * head_dim, spec.window)?,
                v_cache: l.cache(&format!("{layer}.v_cache"), Cached::Values, heads * value_dim, spec.window)?,
            }
        };
        Ok(Latent {
            query,
            down: plain(l, "attn_kv_a_mqa", &[hidden, rank + turned])?,
            norm: rms(l, "attn_kv_a_norm", rank)?,
            key_norm: if spec.key_norm { Some(rms(l, "attn_k_norm", turned)?) } else { None },
            up,
            output,
            freqs: match &spec.rope {
                Some(rope) => Some(l.freqs(&rope.params, rope.factors.as_deref())?),
                None => None,
            },
            sinks: if spec.sinks { Some(l.vector("attn_sinks.weight", &[heads])?) } else { None },
            gate: spec.gate.load(l, hidden, [heads, value_dim])?,
            temperature: spec.temperature.map(|t| t.load(l)),
            indexer,
            spec: spec.clone(),
        })
    }

    /// The latent and the key that all heads share.
    fn latent(&self, b: &mut Builder, batch: &Batch, x: Tensor) -> [Tensor; 2] {
        let LatentSpec { rank, turned, .. } = self.spec;
        let low = b.linear("latent", x, &self.down);
        let latent = b.norm("latent.norm", low.narrow(0, 0, rank), &self.norm);
        // One head for all.
        let mut key = low.narrow(0, rank, turned).permute([0, 2, 1, 3]);
        if let Some(norm) = &self.key_norm {
            key = b.norm("k_norm", key, norm);
        }
        if turned > 0 && self.spec.rope.is_some() {
            let y = b.like("k_rope", key);
            self.turn(b, batch, "k_rope", [key, y], 0);
            key = y;
        }
        [latent, key]
    }

    fn store(&self, b: &mut Builder, batch: &Batch, [latent, key]: [Tensor; 2], cache: Tensor) {
        let LatentSpec { rank, turned, .. } = self.spec;
        let ids = batch.places(self.spec.window).rows;
        if turned > 0 {
            b.store("k_write", key.permute([0, 2, 1, 3]), ids, cache.narrow(0, rank, turned));
        }
        b.store("latent_write", latent, ids, cache.narrow(0, 0, rank));
    }

    fn turn(&self, b: &mut Builder, batch: &Batch, name: &str, [x, y]: [Tensor; 2], offset: usize) {
        if let (Some(rope), Some(freqs)) = (&self.spec.rope, self.freqs) {
            turned(b, batch, name, Turned { x, y, freqs, offset }, rope);
        }
    }

    fn attended(&self, kv_heads: usize, [head_dim, value_dim]: [usize; 2]) -> Attended {
        let LatentSpec { heads, scale, window, .. } = self.spec;
        let (softcap, max_bias, chunk, causal) = (0.0, 0.0, None, true);
        Attended { heads, kv_heads, head_dim, value_dim, scale, softcap, max_bias, window, chunk, causal }
    }

    /// Latents are cached. The rows of a batch read them; a prompt that begins its text may have keys and values of all heads in their place.
    fn over_latents(
        &self,
        b: &mut Builder,
        batch: &Batch,
        [q, latent, key]: [Tensor; 3],
        [k, v, cache]: [Tensor; 3],
        chosen: Option<Chosen>,
    ) -> Tensor {
        let LatentSpec { heads, value_dim, .. } = self.spec;
        let rows = q.shape[2];
        self.store(b, batch, [latent, key], cache);
        let out = b.fresh("v", TensorType::F32, [value_dim, heads, rows, 1]);
        let BatchShape { decode, prompt, expands, .. } = batch.shape;
        let lists = chosen.and_then(|chosen| chosen.lists());
        if !expands || chosen.is_some_and(|chosen| chosen.rows > decode) {
            self.absorbed(b, batch, [q, out], [k, v, cache], lists);
            return flat(out);
        }
        let part = |first: usize, n: usize, shape: BatchShape| {
            let positions = batch.ports.positions.narrow(0, first, n);
            Batch { shape, ports: Ports { positions, ..batch.ports }, ..*batch }
        };
        if decode > 0 {
            let texts = part(0, decode, BatchShape { prompt: 0, pieces: 0, expands: false, ..batch.shape });
            self.absorbed(b, &texts, [q, out].map(|t| t.narrow(2, 0, decode)), [k, v, cache], lists);
        }
        let prompt_alone = part(decode, prompt, BatchShape { decode: 0, ..batch.shape });
        let [q, key, to] = [q, key, out].map(|t| t.narrow(2, decode, prompt));
        let latent = latent.narrow(1, decode, prompt);
        let length = batch.ports.lengths.narrow(0, decode, 1);
        self.expanded(b, &prompt_alone, [q, latent, key, to], [k, v], (length, cache.ty));
        flat(out)
    }

    /// Queries are brought to the latents, which are keys and values for all heads.
    fn absorbed(
        &self,
        b: &mut Builder,
        batch: &Batch,
        [q, out]: [Tensor; 2],
        [k, v, cache]: [Tensor; 3],
        lists: Option<[Tensor; 2]>,
    ) {
        let LatentSpec { heads, rank, turned, .. } = self.spec;
        let (rows, still) = (q.shape[2], self.spec.still());
        let by_head = |t: Tensor| t.permute([0, 2, 1, 3]);
        let wide = b.fresh("q_latent", TensorType::F32, [rank + turned, heads, rows, 1]);
        let product = Product { a: k, b: by_head(q.narrow(0, 0, still)), d: by_head(wide.narrow(0, 0, rank)) };
        b.step("q_latent", mul_mat_vec::Call::plain(product));
        if turned > 0 {
            let pair = [q.narrow(0, still, turned), wide.narrow(0, rank, turned)];
            match self.spec.rope {
                Some(_) => self.turn(b, batch, "q_rope", pair, 0),
                None => b.copy("q_shared", pair[0], pair[1]),
            }
        }
        let how = self.attended(1, [rank + turned, rank]);
        let caches = [cache, cache.narrow(0, 0, rank)];
        let y = match lists {
            Some(lists) => how.over_lists(b, wide, caches, self.sinks, lists),
            None => how.build(b, batch, wide, caches, Extras::sinks(self.sinks)),
        };
        let y = y.reshape([rank, heads, rows, 1]);
        b.step("v", mul_mat_vec::Call::plain(Product { a: v, b: by_head(y), d: by_head(out) }));
    }

    /// Keys and values of all heads are made of the latents of a prompt that begins its text, and forgotten after it.
    fn expanded(
        &self,
        b: &mut Builder,
        batch: &Batch,
        [q, latent, key, out]: [Tensor; 4],
        [k, v]: [Tensor; 2],
        (length, cached): (Tensor, TensorType),
    ) {
        let LatentSpec { heads, head_dim, turned, value_dim, scale, window, .. } = self.spec;
        let (rows, rank, still) = (q.shape[2], self.spec.rank, self.spec.still());
        // Where caches round less, so do these.
        let ty = if cached == TensorType::F32 { TensorType::F32 } else { TensorType::F16 };
        let heads_of = |b: &mut Builder, name: &str, matrix: Tensor, width: usize, to: Tensor| {
            let made = b.fresh(name, TensorType::F32, [width * heads, rows, 1, 1]);
            b.step(name, mul_mat_vec::Call::plain(Product { a: matrix, b: latent, d: made }));
            b.copy(&format!("{name}_heads"), made.reshape([width, heads, rows, 1]), to);
        };
        let keys = b.fresh("k_heads", ty, [head_dim, heads, rows, 1]);
        if still > 0 {
            let matrix = by_rank(b, k);
            heads_of(b, "k_still", matrix, still, keys.narrow(0, 0, still));
        }
        if turned > 0 {
            // Every head gets the same key: a stride of 0.
            let mut shared = key;
            (shared.shape[1], shared.stride[1]) = (heads, 0);
            b.copy("k_shared", shared, keys.narrow(0, still, turned));
        }
        let values = b.fresh("v_heads", ty, [value_dim, heads, rows, 1]);
        heads_of(b, "v_made", v.reshape([rank, value_dim * heads, 1, 1]), value_dim, values);
        let mut queries = q;
        if turned > 0 && self.spec.rope.is_some() {
            queries = b.like("q_rope", q);
            self.turn(b, batch, "q_rope", [q, queries], still);
        }
        let by_head = |t: Tensor| t.permute([0, 2, 1, 3]);
        let plain = flash_attention::Call::plain(by_head(queries), by_head(keys), by_head(values), out, scale);
        let mask =
            Mask::Causal { positions: batch.ports.positions, length, window: window.map(Window::Last), both: false };
        b.step("prompt", flash_attention::Call { mask, sinks: self.sinks, ..plain });
    }

    /// Keys and values of all heads are made of the latents.
    fn over_heads(
        &self,
        b: &mut Builder,
        batch: &Batch,
        [q, latent, key]: [Tensor; 3],
        matrix: &Linear,
        [k_cache, v_cache]: [Tensor; 2],
    ) -> Tensor {
        let LatentSpec { heads, head_dim, turned, value_dim, .. } = self.spec;
        let (rows, still) = (q.shape[2], self.spec.still());
        let both = b.linear("kv", latent, matrix).reshape([still + value_dim, heads, rows, 1]);
        let by_head = |t: Tensor| t.permute([0, 2, 1, 3]);
        let k_rows = keys(k_cache, [head_dim, heads]);
        let ids = batch.places(self.spec.window).rows;
        if still > 0 {
            b.store("k_write", by_head(both.narrow(0, 0, still)), ids, k_rows.narrow(0, 0, still));
        }
        if turned > 0 {
            // Every head gets the same key: a stride of 0.
            let mut shared = by_head(key);
            (shared.shape[2], shared.stride[2]) = (heads, 0);
            b.store("k_shared_write", shared, ids, k_rows.narrow(0, still, turned));
        }
        b.store("v_write", by_head(both.narrow(0, still, value_dim)), ids, keys(v_cache, [value_dim, heads]));
        let mut turned_q = q;
        if turned > 0 && self.spec.rope.is_some() {
            turned_q = b.like("q_rope", q);
            self.turn(b, batch, "q_rope", [q, turned_q], still);
        }
        let extras = Extras::sinks(self.sinks);
        self.attended(heads, [head_dim, value_dim]).build(b, batch, turned_q, [k_cache, v_cache], extras)
    }
}

/// The matrices of the keys, `[still, rank, heads]`, as one that multiplies latents: `[rank, still * heads]`. Files have them the other way round,
/// as queries need them; turning them takes far less than multiplying by them.
fn by_rank(b: &mut Builder, k: Tensor) -> Tensor {
    let [still, rank, heads, _] = k.shape;
    let mut plain = k;
    if k.ty.is_quantised() {
        plain = b.fresh("k_b", TensorType::F16, k.shape);
        b.copy("k_b", k, plain);
    }
    let turned = b.fresh("k_b.turned", plain.ty, [rank, still, heads, 1]);
    b.copy("k_b.turned", plain.permute([1, 0, 2, 3]), turned);
    turned.reshape([rank, still * heads, 1, 1])
}

/// A matrix whose factor does not count, and which has no bias.
fn plain(l: &mut Loader<'_>, name: &str, shape: &[usize]) -> Result<Linear, Error> {
    l.ignore(&format!("{name}.scale"));
    l.matrix(name, shape)
}
