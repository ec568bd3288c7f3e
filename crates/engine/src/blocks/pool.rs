//! Keys that stand for pools of neighbouring tokens: a mean of the tokens' keys, channel by channel, with weights that each token gives its channels
//! and that the place in the pool leans. The tokens of a pool that is not finished are kept as a state.

use kiln_gguf::TensorType;
use kiln_kernels::soft_max;
use kiln_kernels::tensor::Tensor;
use kiln_kernels::unary::Function;

use super::mixer::Convolution;
use super::streams::same;
use crate::Error;
use crate::arch::{Batch, PAGE};
use crate::model::{Cached, Loader};
use crate::plan::{Builder, Linear};

/// Under which the builder remembers where the keys of pools go.
const NOTE: &str = "pools";
/// More than any row of a cache: subtracted, it makes a number negative.
const FAR: f32 = 16_777_216.0;

/// What makes the keys of pools.
#[derive(Clone, Debug)]
pub struct Pool {
    /// Tokens of a pool.
    size: usize,
    /// Makes the weights of a token.
    gate: Linear,
    /// `[width, size]`: added to the weights by place.
    places: Tensor,
    /// Gives each token the ones before it.
    delays: Convolution,
    /// `[width, pools]`.
    pub cache: Tensor,
}

impl Pool {
    /// Reads one for keys of this width; `layer` names its cache and its state.
    pub fn load(l: &mut Loader<'_>, size: usize, [hidden, width]: [usize; 2], layer: usize) -> Result<Pool, Error> {
        let key = "attention.indexer.kpool";
        // Numbers of rows are divided by it in floating point, and pools do not cross pages.
        let fits = size.is_power_of_two() && size <= PAGE && width.is_multiple_of(size);
        l.keys.require(
            fits,
            key,
            size,
            &format!("a power of two that divides {PAGE} and the width {width} of keys"),
        )?;
        // Keys of pools are as many times fewer: pages hold a part of one for each token.
        let cache = l.cache(&format!("{layer}.pool_cache"), Cached::Keys, width / size, None)?;
        Ok(Pool {
            size,
            gate: l.unscaled("indexer_compressor_gate", &[hidden, width])?,
            places: l.vector("indexer_compressor_ape.weight", &[width, size])?,
            delays: Convolution::delays(l, &format!("{layer}.pool"), [size, 2 * width]),
            cache: cache.reshape([width, cache.shape[1] / size, 1, 1]),
        })
    }

    /// Writes the keys of the pools that are finished by tokens `x` with the keys `k [width, rows]`.
    pub fn build(&self, b: &mut Builder, batch: &Batch, x: Tensor, k: Tensor) {
        let (width, rows, size) = (k.shape[0], k.shape[1], self.size);
        let gate = b.linear("pool.gate", x, &self.gate);
        let both = b.concat("pool.both", k, gate);
        let all = b.fresh("pool.tokens", TensorType::F32, [2 * width, size, rows, 1]);
        b.copy("pool.tokens", same(both, size), all);
        let late = self.delays.build(b, batch, "pool.delayed", all.reshape([2 * width * size, rows, 1, 1]));
        // `[size, width, rows]`: the tokens of a pool side by side.
        let late = late.reshape([2 * width, size, rows, 1]).permute([1, 0, 2, 3]);
        let scores = b.add("pool.scores", late.narrow(1, width, width), self.places.permute([1, 0, 2, 3]));
        let weights = b.like("pool.weights", scores);
        let call = soft_max::Call { x: scores, mask: None, sinks: None, y: weights, scale: 1.0, max_bias: 0.0 };
        b.step("pool.weights", call);
        let weighed = b.multiply("pool.weighed", weights, late.narrow(1, 0, width));
        let keys = b.sum("pool.keys", weighed).reshape([width, rows, 1, 1]);
        let ids = ids(b, batch, self.size);
        b.store("pool.write", keys, ids, self.cache);
    }
}

/// The row of each token's pool of so many where the token finishes it, a number below 0 elsewhere. All layers have the same.
pub(super) fn ids(b: &mut Builder, batch: &Batch, size: usize) -> Tensor {
    if let Some((known_size, [known])) = b.remembered(NOTE)
        && known_size == size
    {
        return *known;
    }
    let rows = batch.places(None).rows;
    let part = 1.0 / size as f32;
    let numbers = b.like("pool.rows", rows);
    b.copy("pool.rows", rows, numbers);
    // Pools lie in pages as tokens do, so that a row says how many are finished, and whether one just is.
    let pools = b.affine("pool.finished", numbers, part, part);
    let whole = b.fresh("pool.whole", TensorType::I32, rows.shape);
    b.copy("pool.whole", pools, whole);
    let whole_number = b.like("pool.number", rows);
    b.copy("pool.number", whole, whole_number);
    let rest = b.subtract("pool.rest", pools, whole_number);
    let open = b.function("pool.open", rest, Function::Step);
    let far = b.affine("pool.far", open, FAR, 1.0);
    let row = b.subtract("pool.row", whole_number, far);
    let ids = b.fresh("pool.ids", TensorType::I32, rows.shape);
    b.copy("pool.ids", row, ids);
    b.remember(NOTE, size, vec![ids]);
    ids
}
