//! Attention over the last tokens and, in most layers, over blocks that stand for all tokens before: DeepSeek 4. A token has one vector, which is
//! key and value of all heads; so has a block. Where blocks are short, small queries and keys choose among them.

use kiln_gguf::TensorType;
use kiln_kernels::choose_keys::Rule;
use kiln_kernels::list_blocks::{self, Layout};
use kiln_kernels::mul_mat::Product;
use kiln_kernels::mul_mat_vec;
use kiln_kernels::tensor::Tensor;

use super::attend::{Attended, Extras, flat};
use super::blocks_of_tokens::{BatchRows, BlockSpec, Blocks, Shared, Turn, rows_of};
use super::indexer::{Choosing, choose};
use super::mixer::Mixer;
use crate::Error;
use crate::arch::{Batch, PAGE};
use crate::model::parts::Rope;
use crate::model::{Cached, Loader};
use crate::plan::{Builder, Linear, Norm};

/// How attention is read and computed in one layer.
#[derive(Clone, Debug)]
pub struct CompressedSpec {
    /// Width of the tokens.
    pub hidden: usize,
    /// Query heads.
    pub heads: usize,
    /// Width of a head, of keys and of values; the last elements are turned.
    pub head_dim: usize,
    /// Width of what queries are made from.
    pub query_rank: usize,
    /// Last tokens that are seen by themselves.
    pub window: usize,
    /// Tokens of a block; none where the window is all that is seen.
    pub block: Option<usize>,
    /// Rotary positions.
    pub rope: Rope,
    /// Groups of heads, and the width that each group is brought to before the output matrix.
    pub groups: [usize; 2],
    /// How short blocks are chosen.
    pub index: IndexSizes,
    /// What norms add.
    pub eps: f32,
}

/// Sizes of the small queries and keys.
#[derive(Clone, Copy, Debug)]
pub struct IndexSizes {
    /// Heads of queries.
    pub heads: usize,
    /// Width of a head.
    pub width: usize,
    /// Blocks that are chosen.
    pub most: usize,
}

/// Tokens of the blocks that are chosen among; they take the tokens of the block before in as well.
pub const SHORT: usize = 4;
/// Tokens of the blocks that are all seen.
pub const LONG: usize = 128;

/// Makes the rows of blocks.
#[derive(Clone, Debug)]
struct Compressor {
    values: Linear,
    weights: Linear,
    norm: Norm,
    blocks: Blocks,
}

/// Chooses among blocks.
#[derive(Clone, Debug)]
struct Index {
    q: Linear,
    weights: Linear,
    keys: Compressor,
    /// `[width, blocks]`.
    cache: Tensor,
}

/// Attention of one layer.
#[derive(Clone, Debug)]
pub struct Compressed {
    spec: CompressedSpec,
    q_low: (Linear, Norm),
    q: Linear,
    kv: (Linear, Norm),
    freqs: Tensor,
    sinks: Tensor,
    /// `[width of a group's heads, rank, groups]`.
    down: Tensor,
    output: Linear,
    /// Of tokens, and of blocks where there are some.
    cache: Tensor,
    compressor: Option<Compressor>,
    index: Option<Index>,
}

impl Compressor {
    fn load(
        l: &mut Loader<'_>,
        name: &str,
        [hidden, width, size]: [usize; 3],
        (layer, eps): (usize, f32),
    ) -> Result<Compressor, Error> {
        let spec = BlockSpec { width, size, overlaps: size == SHORT, weighed: true };
        let wide = spec.wide();
        let places = l.vector(&format!("{name}_ape.weight"), &[wide, size])?;
        let blocks = Blocks::load(l, &format!("{layer}.{name}_cache"), spec, Some(places))?;
        let weight = Some(l.vector(&format!("{name}_norm.weight"), &[width])?);
        Ok(Compressor {
            values: l.unscaled(&format!("{name}_kv"), &[hidden, wide])?,
            weights: l.unscaled(&format!("{name}_gate"), &[hidden, wide])?,
            norm: Norm::Rms { weight, eps },
            blocks,
        })
    }

    /// `[width, 1, rows]`, not turned yet.
    fn build(&self, b: &mut Builder, batch: &Batch, x: Tensor) -> Tensor {
        let values = b.linear("compressor.values", x, &self.values);
        let weights = b.linear("compressor.weights", x, &self.weights);
        let y = self.blocks.build(b, batch, values, Some(weights));
        let y = b.norm("compressor.norm", y, &self.norm);
        y.reshape([y.shape[0], 1, y.shape[1], 1])
    }
}

/// Rows of a page that blocks get. Caches of blocks of 32 numbers want whole ones of them.
fn spare(block: usize) -> usize {
    (PAGE / block).max(4)
}

impl Mixer for Compressed {
    fn build(&self, b: &mut Builder, batch: &Batch, x: Tensor) -> Tensor {
        let CompressedSpec { heads, head_dim, eps, window, .. } = self.spec;
        let rows = x.shape[1];
        let positions = batch.ports.positions;
        let low = b.linear("q_low", x, &self.q_low.0);
        let low = b.norm("q_low.norm", low, &self.q_low.1);
        let q = b.linear("q", low, &self.q).reshape([head_dim, heads, rows, 1]);
        let q = b.norm("q_norm", q, &Norm::Rms { weight: None, eps });
        let q = self.turned(b, "q_rope", q, positions, false);
        let kv = b.linear("kv", x, &self.kv.0);
        let kv = b.norm("kv.norm", kv, &self.kv.1).reshape([head_dim, 1, rows, 1]);
        let kv = flat(self.turned(b, "kv_rope", kv, positions, false));
        let y = match &self.compressor {
            None => {
                b.store("kv_write", kv, batch.places(Some(window)).rows, self.cache);
                self.attended().build(b, batch, q, [self.cache; 2], Extras::sinks(Some(self.sinks)))
            }
            Some(compressor) => self.over_blocks(b, batch, [x, low, q, kv], compressor),
        };
        let y = self.turned(b, "turned_back", y.reshape([head_dim, heads, rows, 1]), positions, true);
        let [groups, rank] = self.spec.groups;
        let by_group = |t: Tensor| t.permute([0, 2, 1, 3]);
        let short = b.fresh("grouped", TensorType::F32, [rank, groups, rows, 1]);
        let y = y.reshape([head_dim * heads / groups, groups, rows, 1]);
        let product = Product { a: self.down, b: by_group(y), d: by_group(short) };
        b.step("grouped", mul_mat_vec::Call::plain(product));
        b.linear("output", flat(short), &self.output)
    }
}

impl Compressed {
    /// Reads it; `layer` names its caches.
    pub fn load(l: &mut Loader<'_>, spec: &CompressedSpec, layer: usize) -> Result<Compressed, Error> {
        let CompressedSpec { hidden, heads, head_dim, query_rank, window, block, eps, groups: [groups, rank], .. } =
            *spec;
        let rms = |l: &mut Loader<'_>, name: &str, width: usize| -> Result<Norm, Error> {
            Ok(Norm::Rms { weight: Some(l.vector(&format!("{name}.weight"), &[width])?), eps })
        };
        let grouped = heads * head_dim / groups;
        // Files hold the matrices of all groups one after the other.
        let name = "attn_output_a.weight";
        let apart = l.shape(name).is_some_and(|shape| shape[2] > 1);
        let down =
            if apart { l.tensor(name, &[grouped, rank, groups])? } else { l.tensor(name, &[grouped, rank * groups])? };
        ["attn_output_a.scale", "attn_output_a.bias"].iter().for_each(|name| l.ignore(name));
        let (cache, compressor) = match block {
            None => (l.cache(&format!("{layer}.k_cache"), Cached::Keys, head_dim, Some(window))?, None),
            Some(block) => {
                let more = spare(block) * head_dim / PAGE;
                let fits = (spare(block) * head_dim).is_multiple_of(PAGE);
                l.keys.require(fits, "attention.key_length", head_dim, "a multiple of 16")?;
                let cache = l.cache(&format!("{layer}.k_cache"), Cached::Keys, head_dim + more, None)?;
                let rows = cache.shape[1] / PAGE * (PAGE + spare(block));
                let compressor = Compressor::load(l, "attn_compressor", [hidden, head_dim, block], (layer, eps))?;
                (cache.reshape([head_dim, rows, 1, 1]), Some(compressor))
            }
        };
        Ok(Compressed {
            q_low: (l.unscaled("attn_q_a", &[hidden, query_rank])?, rms(l, "attn_q_a_norm", query_rank)?),
            q: l.unscaled("attn_q_b", &[query_rank, heads * head_dim])?,
            kv: (l.unscaled("attn_kv", &[hidden, head_dim])?, rms(l, "attn_kv_a_norm", head_dim)?),
            freqs: l.freqs(&spec.rope.params, spec.rope.factors.as_deref())?,
            sinks: l.vector("attn_sinks.weight", &[heads])?,
            down: down.reshape([grouped, rank, groups, 1]),
            output: l.unscaled("attn_output_b", &[groups * rank, hidden])?,
            index: if block == Some(SHORT) { Some(Index::load(l, spec, layer)?) } else { None },
            cache,
            compressor,
            spec: spec.clone(),
        })
    }

    fn attended(&self) -> Attended {
        let CompressedSpec { heads, head_dim, window, block, .. } = self.spec;
        Attended {
            heads,
            kv_heads: 1,
            head_dim,
            value_dim: head_dim,
            scale: 1.0 / (head_dim as f32).sqrt(),
            softcap: 0.0,
            max_bias: 0.0,
            window: Some(window).filter(|_| block.is_none()),
            chunk: None,
            causal: true,
        }
    }

    /// The last elements of each head turned.
    fn turned(&self, b: &mut Builder, name: &str, x: Tensor, positions: Tensor, backward: bool) -> Tensor {
        let offset = x.shape[0] - self.spec.rope.params.n_dims;
        Turn { positions, freqs: self.freqs, offset, backward }.build(b, name, x, &self.spec.rope)
    }

    fn over_blocks(
        &self,
        b: &mut Builder,
        batch: &Batch,
        [x, low, q, kv]: [Tensor; 4],
        compressor: &Compressor,
    ) -> Tensor {
        let block = self.spec.block.unwrap_or(LONG);
        let shared = Shared { block, spare: spare(block) };
        let [tokens, blocks] = shared.places(b, batch);
        let starts = shared.starts(b, batch);
        b.store("kv_write", kv, tokens, self.cache);
        let row = compressor.build(b, batch, x);
        let row = self.turned(b, "block_rope", row, starts, false);
        b.store("block_write", flat(row), blocks, self.cache);
        let chosen = self.index.as_ref().map(|index| {
            let key = index.keys.build(b, batch, x);
            let key = self.turned(b, "index.k_rope", key, starts, false);
            let ids = super::pool::ids(b, batch, block);
            b.store("index.k_write", flat(key), ids, index.cache);
            let IndexSizes { heads, width, most } = self.spec.index;
            let iq = b.linear("index.q", low, &index.q).reshape([width, heads, x.shape[1], 1]);
            let iq = self.turned(b, "index.q_rope", iq, batch.ports.positions, false);
            let weights = b.linear("index.weights", x, &index.weights);
            let rule = Rule { per_key: block, block: 1, most, near: 0, tail: false };
            choose(b, batch, &Choosing { q: iq, weights: Some(weights), keys: index.cache, rule, each: false })
        });
        let lists = self.lists(b, batch, chosen, Layout { block, spare: shared.spare, window: self.spec.window });
        self.attended().over_lists(b, q, [self.cache; 2], Some(self.sinks), lists)
    }

    /// The cache rows that each row of a batch sees.
    fn lists(&self, b: &mut Builder, batch: &Batch, chosen: Option<[Tensor; 2]>, layout: Layout) -> [Tensor; 2] {
        let rows = batch.shape.rows();
        let all = rows_of(batch, None);
        let of_chosen = chosen.map(|[list, _]| list.shape[0]);
        let room = all.iter().map(|rows| list_blocks::Call::room(rows.pages, layout, of_chosen)).max().unwrap_or(1);
        let list = b.fresh("seen.list", TensorType::I32, [room, rows, 1, 1]);
        let counts = b.fresh("seen.counts", TensorType::I32, [rows, 1, 1, 1]);
        for BatchRows { range: [first, n], pages, sequences } in all {
            let call = list_blocks::Call {
                positions: batch.ports.positions.narrow(0, first, n),
                pages,
                sequences,
                chosen: chosen.map(|[list, counts]| [list.narrow(1, first, n), counts.narrow(0, first, n)]),
                layout,
                list: list.narrow(1, first, n),
                counts: counts.narrow(0, first, n),
            };
            b.step("seen", call);
        }
        [list, counts]
    }
}

impl Index {
    fn load(l: &mut Loader<'_>, spec: &CompressedSpec, layer: usize) -> Result<Index, Error> {
        let CompressedSpec { hidden, query_rank, eps, index: IndexSizes { heads, width, .. }, .. } = *spec;
        let turned = spec.rope.params.n_dims;
        let fits = width >= turned && width.is_multiple_of(SHORT);
        l.keys.require(
            fits,
            "attention.indexer.key_length",
            width,
            &format!("{turned} or more, a multiple of {SHORT}"),
        )?;
        // Keys of blocks are as many times fewer: pages hold a part of one for each token.
        let cache = l.cache(&format!("{layer}.index_cache"), Cached::Keys, width / SHORT, None)?;
        Ok(Index {
            q: l.unscaled("indexer.attn_q_b", &[query_rank, heads * width])?,
            weights: l.unscaled("indexer.proj", &[hidden, heads])?,
            keys: Compressor::load(l, "indexer_compressor", [hidden, width, SHORT], (layer, eps))?,
            cache: cache.reshape([width, cache.shape[1] / SHORT, 1, 1]),
        })
    }
}
