//! Blocks of a sequence's tokens that one row of a cache stands for: what the tokens of a block are averaged of is kept in a cache of the last
//! tokens, and the row of a block is made by the token that finishes it.

use kiln_gguf::TensorType;
use kiln_kernels::flash_attention::Pages;
use kiln_kernels::tensor::Tensor;
use kiln_kernels::unary::Function;
use kiln_kernels::{pool_keys, rope};

use crate::Error;
use crate::arch::{Batch, BatchShape, PAGE};
use crate::model::parts::Rope;
use crate::model::{Cached, Loader};
use crate::plan::Builder;

/// More than any row of a cache: subtracted, it makes a number negative.
const FAR: f32 = 16_777_216.0;
/// Under which the builder remembers where blocks and tokens go.
const PLACES: [&str; 2] = ["block places within pages", "block places across pages"];
/// Under which it remembers where blocks begin.
const STARTS: [&str; 2] = ["block starts within pages", "block starts across pages"];

/// Rows of a batch whose sequences are known the same way.
#[derive(Clone, Copy, Debug)]
pub struct BatchRows {
    /// The first one, and how many.
    pub range: [usize; 2],
    /// Where the tokens of their sequences lie.
    pub pages: Pages,
    /// Whose they are; without it all are of the only sequence, or each of its own.
    pub sequences: Option<Tensor>,
}

/// The rows that go on by one token, and those of prompts, in caches of the last tokens or of all.
pub fn rows_of(batch: &Batch, window: Option<usize>) -> Vec<BatchRows> {
    let BatchShape { decode, prompt, pieces, .. } = batch.shape;
    let table = batch.places(window).table;
    let pages = |first: usize, n: usize| Pages { table: table.narrow(1, first, n), size: PAGE };
    let going_on = BatchRows { range: [0, decode], pages: pages(0, decode), sequences: None };
    let owners = (pieces > 1).then_some(batch.ports.owners);
    let prompts = BatchRows { range: [decode, prompt], pages: pages(decode, pieces), sequences: owners };
    [going_on, prompts].into_iter().filter(|rows| rows.range[1] > 0).collect()
}

/// How blocks are made of tokens.
#[derive(Clone, Copy, Debug)]
pub struct BlockSpec {
    /// Width of the row of a block.
    pub width: usize,
    /// Tokens of a block.
    pub size: usize,
    /// Whether the tokens of the block before count as well, by numbers of their own.
    pub overlaps: bool,
    /// Whether tokens have weights.
    pub weighed: bool,
}

/// What the last tokens have left for their block.
#[derive(Clone, Debug)]
pub struct Blocks {
    spec: BlockSpec,
    /// Values, then weights, of the last tokens.
    cache: Tensor,
    /// Added to the weights by place.
    places: Option<Tensor>,
}

impl BlockSpec {
    /// Width of what a token leaves, once as values and perhaps once as weights.
    pub fn wide(&self) -> usize {
        if self.overlaps { 2 * self.width } else { self.width }
    }

    /// Last tokens that a block is made of.
    fn span(&self) -> usize {
        if self.overlaps { 2 * self.size } else { self.size }
    }
}

impl Blocks {
    /// Declares the cache of this name; `places` are added to the weights.
    pub fn load(l: &mut Loader<'_>, name: &str, spec: BlockSpec, places: Option<Tensor>) -> Result<Blocks, Error> {
        let width = spec.wide() * if spec.weighed { 2 } else { 1 };
        let cache = l.cache(name, Cached::Keys, width, Some(spec.span()))?;
        Ok(Blocks { spec, cache, places })
    }

    /// Keeps `values` and `weights [wide, rows]` of the tokens of a batch, and makes the row of its block of each that finishes one:
    /// `[width, rows]`, zeros of all others.
    pub fn build(&self, b: &mut Builder, batch: &Batch, values: Tensor, weights: Option<Tensor>) -> Tensor {
        let (window, wide) = (Some(self.spec.span()), self.spec.wide());
        let ids = batch.places(window).rows;
        b.store("blocks.values_write", values, ids, self.cache.narrow(0, 0, wide));
        let kept = weights.map(|weights| {
            b.store("blocks.weights_write", weights, ids, self.cache.narrow(0, wide, wide));
            self.cache.narrow(0, wide, wide)
        });
        let y = b.fresh("blocks", TensorType::F32, [self.spec.width, values.shape[1], 1, 1]);
        for BatchRows { range: [first, n], pages, sequences } in rows_of(batch, window) {
            let call = pool_keys::Call {
                values: self.cache.narrow(0, 0, wide),
                weights: kept,
                places: self.places,
                positions: batch.ports.positions.narrow(0, first, n),
                pages,
                sequences,
                size: self.spec.size,
                overlaps: self.spec.overlaps,
                y: y.narrow(1, first, n),
            };
            b.step("blocks", call);
        }
        y
    }
}

/// How the rows of tokens and of blocks share the pages of a cache ([`kiln_kernels::list_blocks::Layout`]).
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Shared {
    /// Tokens of a block, a power of two.
    pub block: usize,
    /// Rows of a page beside those of its tokens.
    pub spare: usize,
}

impl Shared {
    fn note(self, names: [&'static str; 2]) -> &'static str {
        names[usize::from(self.block > PAGE)]
    }

    /// Where the tokens of a batch go in a cache whose pages have room for blocks, and where the blocks go that they finish; numbers below 0 where
    /// they finish none. Layers with the same blocks share them.
    pub fn places(self, b: &mut Builder, batch: &Batch) -> [Tensor; 2] {
        let Shared { block, spare } = self;
        if let Some((size, [tokens, blocks])) = b.remembered(self.note(PLACES))
            && size == block
        {
            return [*tokens, *blocks];
        }
        let rows = batch.places(None).rows;
        let number = float(b, "places.rows", rows);
        let page = b.scale("places.pages", number, 1.0 / PAGE as f32);
        let page = whole(b, "places.page", page);
        let before = b.scale("places.before", page, PAGE as f32);
        let inside = b.subtract("places.inside", number, before);
        let slot = b.scale("places.slots", inside, 1.0 / block as f32);
        let slot = whole(b, "places.slot", slot);
        // A block lies behind its last token.
        let first = b.scale("places.first", page, (PAGE + spare) as f32);
        let token = b.add("places.inside_page", first, inside);
        let token = b.add("places.token", token, slot);
        let at = b.affine("places.block", token, 1.0, 1.0);
        let position = float(b, "places.positions", batch.ports.positions);
        let finished = b.affine("places.finished", position, 1.0 / block as f32, 1.0 / block as f32);
        let whole_blocks = whole(b, "places.whole", finished);
        let rest = b.subtract("places.rest", finished, whole_blocks);
        let open = b.function("places.open", rest, Function::Step);
        // Rows without a token have numbers below 0.
        let none = b.scale("places.below", number, -1.0);
        let none = b.function("places.none", none, Function::Step);
        let far = b.add("places.nowhere", open, none);
        let far = b.scale("places.far", far, FAR);
        let at = b.subtract("places.at", at, far);
        let places = [ids(b, "places.token_ids", token), ids(b, "places.block_ids", at)];
        b.remember(self.note(PLACES), block, places.to_vec());
        places
    }

    /// Where the block begins that each token would finish.
    pub fn starts(self, b: &mut Builder, batch: &Batch) -> Tensor {
        let note = self.note(STARTS);
        if let Some((size, [starts])) = b.remembered(note)
            && size == self.block
        {
            return *starts;
        }
        let positions = float(b, "starts.positions", batch.ports.positions);
        let starts = b.affine("starts.begin", positions, 1.0, 1.0 - self.block as f32);
        let starts = ids(b, "starts", starts);
        b.remember(note, self.block, vec![starts]);
        starts
    }
}

fn float(b: &mut Builder, name: &str, x: Tensor) -> Tensor {
    let y = b.fresh(name, TensorType::F32, x.shape);
    b.copy(name, x, y);
    y
}

fn ids(b: &mut Builder, name: &str, x: Tensor) -> Tensor {
    let y = b.fresh(name, TensorType::I32, x.shape);
    b.copy(name, x, y);
    y
}

fn whole(b: &mut Builder, name: &str, x: Tensor) -> Tensor {
    let y = ids(b, name, x);
    float(b, name, y)
}

/// How heads are turned at positions that are not their rows'.
#[derive(Clone, Copy, Debug)]
pub struct Turn {
    /// I32 `[rows]`.
    pub positions: Tensor,
    /// The table of turns.
    pub freqs: Tensor,
    /// The first turned element of a head.
    pub offset: usize,
    /// Whether they are turned back.
    pub backward: bool,
}

impl Turn {
    /// `x [width, heads, rows]` turned.
    pub fn build(self, b: &mut Builder, name: &str, x: Tensor, rope: &Rope) -> Tensor {
        let Turn { positions, freqs, offset, backward } = self;
        let y = b.like(name, x);
        let params = &rope.params;
        let (style, n_dims, sections, magnitude) = (params.style, params.n_dims, params.sections, params.magnitude());
        b.step(name, rope::Call { x, positions, freqs, y, style, n_dims, offset, sections, magnitude, backward });
        y
    }
}
