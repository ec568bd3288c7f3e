//! Layers that see some of the keys alone: small queries and keys of their own find out which fit best. What they choose is a list of cache rows
//! for each token, and attention goes over that list.

use kiln_gguf::TensorType;
use kiln_kernels::choose_keys::{self, Rule};
use kiln_kernels::flash_attention::Pages;
use kiln_kernels::tensor::Tensor;

use super::attend::{Turned, flat, turned};
use super::blocks_of_tokens::{BlockSpec, Blocks, Shared, Turn};
use super::pool::Pool;
use crate::Error;
use crate::arch::{Batch, BatchShape, PAGE};
use crate::model::parts::Rope;
use crate::model::{Cached, Loader};
use crate::plan::{Builder, Linear, Norm};

/// How the small queries and keys of a layer are made, and what is chosen by them.
#[derive(Clone, Debug)]
pub struct IndexSpec {
    /// Their heads. Keys have one.
    pub heads: usize,
    /// Width of a head.
    pub width: usize,
    /// What is chosen.
    pub rule: Rule,
    /// Rotary positions.
    pub rope: Option<Rope>,
    /// The first element of a head that is turned.
    pub offset: usize,
    /// What norms add.
    pub eps: f32,
}

/// The part of a layer that chooses.
#[derive(Clone, Debug)]
pub struct Indexer {
    spec: IndexSpec,
    /// The matrix of the queries, and the norm of their heads.
    q: (Linear, Option<Norm>),
    /// The matrix and the norm of the keys.
    k: (Linear, Norm),
    /// What makes the weights of heads. Without it all have the same.
    weights: Option<Linear>,
    /// Whether every head chooses for itself.
    each: bool,
    freqs: Option<Tensor>,
    keys: Keys,
}

/// Where keys are kept.
#[derive(Clone, Debug)]
enum Keys {
    /// One for each token.
    Tokens(Tensor),
    /// One for each pool of tokens.
    Pools(Box<Pool>),
    /// One for each block of tokens, the mean of theirs.
    Means(Box<Means>),
}

/// Keys of blocks, which are normed and turned when their last token is there.
#[derive(Clone, Debug)]
struct Means {
    blocks: Blocks,
    size: usize,
    /// `[width, blocks]`.
    cache: Tensor,
}

impl Means {
    fn load(l: &mut Loader<'_>, [width, size]: [usize; 2], layer: usize) -> Result<Means, Error> {
        // Numbers of rows are divided by it in floating point, and blocks do not cross pages.
        let fits = size.is_power_of_two() && size <= PAGE && width.is_multiple_of(size);
        let want = format!("a power of two that divides {PAGE} and the width {width} of keys");
        l.keys.require(fits, "attention.compress_ratios", size, &want)?;
        let spec = BlockSpec { width, size, overlaps: false, weighed: false };
        let blocks = Blocks::load(l, &format!("{layer}.index_tokens"), spec, None)?;
        // Keys of blocks are as many times fewer: pages hold a part of one for each token.
        let cache = l.cache(&format!("{layer}.index_cache"), Cached::Keys, width / size, None)?;
        Ok(Means { blocks, size, cache: cache.reshape([width, cache.shape[1] / size, 1, 1]) })
    }
}

impl Keys {
    /// The cache of the keys that are chosen by.
    fn cache(&self) -> Tensor {
        match self {
            Keys::Tokens(cache) => *cache,
            Keys::Pools(pool) => pool.cache,
            Keys::Means(means) => means.cache,
        }
    }
}

/// The keys of the first rows of a batch: cache rows `[room, columns]` and their numbers `[columns]`. Nothing where no row has a list.
#[derive(Clone, Copy, Debug)]
pub struct Chosen {
    /// Rows that have a list; those behind see all keys.
    pub rows: usize,
    lists: Option<[Tensor; 2]>,
}

/// Most scores that are in memory at once: rows are taken in runs.
const MOST_SCORES: usize = 1 << 24;
/// Under which the builder remembers what a layer chose.
const NOTE: &str = "chosen";

impl Indexer {
    /// Reads one whose queries come from `low` numbers for each token, and whose heads are weighed.
    pub fn weighed(
        l: &mut Loader<'_>,
        spec: &IndexSpec,
        [hidden, low]: [usize; 2],
        layer: usize,
    ) -> Result<Indexer, Error> {
        let IndexSpec { heads, width, eps, .. } = *spec;
        let norm = |l: &mut Loader<'_>, end: &str| l.vector(&format!("indexer.k_norm.{end}"), &[width]).map(Some);
        let k_norm = Norm::Layer { weight: norm(l, "weight")?, bias: norm(l, "bias")?, eps };
        let weights = Some(l.unscaled("indexer.proj", &[hidden, heads])?);
        Ok(Indexer {
            q: (l.unscaled("indexer.attn_q_b", &[low, heads * width])?, None),
            k: (l.unscaled("indexer.attn_k", &[hidden, width])?, k_norm),
            weights,
            each: false,
            freqs: freqs(l, spec)?,
            keys: match spec.rule.per_key {
                1 => Keys::Tokens(l.cache(&format!("{layer}.index_cache"), Cached::Keys, width, None)?),
                size => Keys::Pools(Box::new(Pool::load(l, size, [hidden, width], layer)?)),
            },
            spec: spec.clone(),
        })
    }

    /// Reads one whose heads choose for themselves; together and by the mean of a block where keys are those of blocks of tokens.
    pub fn each(l: &mut Loader<'_>, spec: &IndexSpec, hidden: usize, layer: usize) -> Result<Indexer, Error> {
        let IndexSpec { heads, width, eps, .. } = *spec;
        let norm = |l: &mut Loader<'_>, name: &str| -> Result<Norm, Error> {
            Ok(Norm::Rms { weight: Some(l.vector(&format!("indexer.{name}.weight"), &[width])?), eps })
        };
        Ok(Indexer {
            q: (l.unscaled("indexer.q_proj", &[hidden, heads * width])?, Some(norm(l, "q_norm")?)),
            k: (l.unscaled("indexer.k_proj", &[hidden, width])?, norm(l, "k_norm")?),
            weights: None,
            each: spec.rule.per_key == 1,
            freqs: freqs(l, spec)?,
            keys: match spec.rule.per_key {
                1 => Keys::Tokens(l.cache(&format!("{layer}.index_cache"), Cached::Keys, width, None)?),
                size => Keys::Means(Box::new(Means::load(l, [width, size], layer)?)),
            },
            spec: spec.clone(),
        })
    }

    /// Writes the keys of the tokens `x` and chooses for those rows that do not see all anyway: a prompt that is attended in the expanded form
    /// ([`BatchShape::expands`]) does, where it has no more tokens than are chosen. Queries are made of `from`.
    pub fn build(&self, b: &mut Builder, batch: &Batch, x: Tensor, from: Tensor) -> Chosen {
        let IndexSpec { heads, width, rule, .. } = self.spec;
        let k = b.linear("index.k", x, &self.k.0);
        match &self.keys {
            Keys::Tokens(cache) => {
                let k = self.normed(b, batch, k);
                b.store("index.k_write", k, batch.places(None).rows, *cache);
            }
            Keys::Pools(pool) => {
                let k = self.normed(b, batch, k);
                pool.build(b, batch, x, k);
            }
            Keys::Means(means) => self.write_means(b, batch, means, k),
        }
        let BatchShape { decode, prompt, expands, .. } = batch.shape;
        let rows = if expands && prompt <= rule.room() { decode } else { decode + prompt };
        let chosen = Chosen {
            rows,
            lists: (rows > 0).then(|| {
                let x = x.narrow(1, 0, rows);
                let q = b.linear("index.q", from.narrow(1, 0, rows), &self.q.0).reshape([width, heads, rows, 1]);
                let q = self.q.1.map_or(q, |norm| b.norm("index.q_norm", q, &norm));
                let q = self.turned(b, batch, "index.q_rope", q);
                let weights = self.weights.map(|matrix| b.linear("index.weights", x, &matrix));
                let by = Choosing { q, weights, keys: self.keys.cache(), rule, each: self.each };
                choose(b, batch, &by)
            }),
        };
        chosen.remember(b);
        chosen
    }

    /// Keys of tokens, normed and turned.
    fn normed(&self, b: &mut Builder, batch: &Batch, k: Tensor) -> Tensor {
        let k = b.norm("index.k_norm", k, &self.k.1);
        flat(self.turned(b, batch, "index.k_rope", k.reshape([self.spec.width, 1, k.shape[1], 1])))
    }

    /// Keys of the blocks that tokens with these products finish, turned by where the blocks begin.
    fn write_means(&self, b: &mut Builder, batch: &Batch, means: &Means, k: Tensor) {
        let mean = means.blocks.build(b, batch, k, None);
        let mut key = b.norm("index.k_norm", mean, &self.k.1).reshape([self.spec.width, 1, k.shape[1], 1]);
        if let (Some(rope), Some(freqs)) = (&self.spec.rope, self.freqs) {
            let positions = Shared { block: means.size, spare: 0 }.starts(b, batch);
            let turn = Turn { positions, freqs, offset: self.spec.offset, backward: false };
            key = turn.build(b, "index.k_rope", key, rope);
        }
        let ids = super::pool::ids(b, batch, means.size);
        b.store("index.k_write", flat(key), ids, means.cache);
    }

    fn turned(&self, b: &mut Builder, batch: &Batch, name: &str, x: Tensor) -> Tensor {
        let (Some(rope), Some(freqs)) = (&self.spec.rope, self.freqs) else { return x };
        let y = b.like(name, x);
        let mut batch = *batch;
        batch.ports.positions = batch.ports.positions.narrow(0, 0, x.shape[2]);
        batch.ports.coordinates = batch.ports.coordinates.map(|t| t.narrow(0, 0, x.shape[2]));
        turned(b, &batch, name, Turned { x, y, freqs, offset: self.spec.offset }, rope);
        y
    }
}

/// What is chosen by, for the first rows of a batch.
#[derive(Clone, Copy, Debug)]
pub(super) struct Choosing {
    /// Queries `[width, heads, rows]`.
    pub q: Tensor,
    /// Weights of heads `[heads, rows]`.
    pub weights: Option<Tensor>,
    /// The cache of the keys.
    pub keys: Tensor,
    /// What is chosen.
    pub rule: Rule,
    /// Whether every head chooses for itself.
    pub each: bool,
}

/// The lists of the first rows of a batch, and how long they are.
pub(super) fn choose(b: &mut Builder, batch: &Batch, by: &Choosing) -> [Tensor; 2] {
    let Choosing { q, weights, keys, rule, each } = *by;
    let ([_, heads, rows, _], ports) = (q.shape, &batch.ports);
    let table = batch.places(None).table;
    let groups = if each { heads } else { 1 };
    let tokens = table.shape[0] * PAGE;
    let list = b.fresh("index.list", TensorType::I32, [rule.room().min(tokens), groups * rows, 1, 1]);
    let counts = b.fresh("index.counts", TensorType::I32, [groups * rows, 1, 1, 1]);
    let BatchShape { decode, pieces, .. } = batch.shape;
    let run = (MOST_SCORES / (tokens / rule.per_key * groups)).max(1);
    let mut first = 0;
    while first < rows {
        let goes_on = first < decode;
        let n = run.min(if goes_on { decode } else { rows } - first);
        let columns = |t: Tensor, d: usize| t.narrow(d, first * groups, n * groups);
        // Rows that go on are sequences of their own; those of prompts say whose they are.
        let (own, sequences) = match goes_on {
            true => (table.narrow(1, first, n), None),
            false => (table.narrow(1, decode, pieces), (pieces > 1).then(|| ports.owners.narrow(0, first - decode, n))),
        };
        let scratch = b.fresh("index.scores", TensorType::F32, [tokens / rule.per_key * groups * n, 1, 1, 1]);
        b.step(
            "index",
            choose_keys::Call {
                q: q.narrow(2, first, n),
                k: keys,
                weights: weights.map(|w| w.narrow(1, first, n)),
                each,
                positions: ports.positions.narrow(0, first, n),
                pages: Pages { table: own, size: PAGE },
                sequences,
                rule,
                list: columns(list, 1),
                counts: columns(counts, 0),
                scratch,
            },
        );
        first += n;
    }
    [list, counts]
}

fn freqs(l: &mut Loader<'_>, spec: &IndexSpec) -> Result<Option<Tensor>, Error> {
    let IndexSpec { width, offset, .. } = *spec;
    let Some(rope) = &spec.rope else { return Ok(None) };
    let turned = rope.params.n_dims;
    let fits = offset + turned <= width;
    l.keys.require(
        fits,
        "attention.indexer.key_length",
        width,
        &format!("at least the {turned} elements that are turned"),
    )?;
    l.freqs(&rope.params, rope.factors.as_deref()).map(Some)
}

impl Chosen {
    fn remember(&self, b: &mut Builder) {
        b.remember(NOTE, self.rows, self.lists.into_iter().flatten().collect());
    }

    /// What the nearest layer before chose.
    pub fn of_layer_before(b: &Builder) -> Option<Chosen> {
        let (rows, lists) = b.remembered(NOTE)?;
        Some(Chosen { rows, lists: lists.try_into().ok() })
    }

    /// The lists of the rows that have one.
    pub fn lists(&self) -> Option<[Tensor; 2]> {
        self.lists
    }
}
