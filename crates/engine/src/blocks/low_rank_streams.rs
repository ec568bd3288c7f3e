//! Several residual streams without norms of layers: each half of a layer reads the mean of the normed streams, gated by a product of low rank, and
//! adds its result to each stream with a weight. Qwen 3.8 Flash Next.

use kiln_kernels::tensor::Tensor;
use kiln_kernels::unary::Function;

use super::streams::{mean, same};
use crate::Error;
use crate::model::Loader;
use crate::plan::{Builder, Linear, Norm};

/// Sizes and numbers that all layers share.
#[derive(Clone, Copy, Debug)]
pub struct LowRankSpec {
    /// Width of a stream.
    pub hidden: usize,
    /// Number of streams.
    pub count: usize,
    /// Width of the product.
    pub rank: usize,
    /// What norms add.
    pub eps: f32,
}

/// What one half of a layer reads and writes the streams with.
#[derive(Clone, Debug)]
pub struct LowRank {
    spec: LowRankSpec,
    /// `[hidden, count]`.
    norm: Tensor,
    down: Linear,
    up: Linear,
    /// What makes the weights of its result; the output has none.
    inject: Option<Linear>,
}

impl LowRankSpec {
    /// Reads the matrices whose names begin so; `last` is those before the output, which only read.
    pub fn load(self, l: &mut Loader<'_>, name: &str, last: bool) -> Result<LowRank, Error> {
        let LowRankSpec { hidden, count, rank, .. } = self;
        let part = 1.0 / count as f32;
        let matrix = |l: &mut Loader<'_>, end: &str, shape: [usize; 2]| l.unscaled(&format!("{name}_{end}"), &shape);
        let down = matrix(l, "down", [count * hidden, rank])?;
        let inject = if last { None } else { Some(matrix(l, "inject", [count * hidden, count])?) };
        Ok(LowRank {
            spec: self,
            norm: l.vector(&format!("{name}_norm.weight"), &[hidden, count])?,
            down: Linear { scale: part, ..down },
            up: matrix(l, "up", [rank, count * hidden])?,
            inject: inject.map(|inject| Linear { scale: part, ..inject }),
        })
    }
}

/// Each stream of `x [hidden, count, rows]` normed, with a weight of its own.
pub(super) fn normed(b: &mut Builder, name: &str, x: Tensor, (weight, eps): (Tensor, f32)) -> Tensor {
    let y = b.norm(name, x, &Norm::Rms { weight: None, eps });
    b.multiply(&format!("{name}.weight"), y, weight)
}

impl LowRank {
    /// What is read of the streams `x [hidden, count, rows]`, and the normed streams, which [`LowRank::write`] takes.
    pub fn read(&self, b: &mut Builder, x: Tensor) -> [Tensor; 2] {
        let LowRankSpec { hidden, count, eps, .. } = self.spec;
        let all = normed(b, "streams.norm", x, (self.norm, eps));
        let flat = all.reshape([hidden * count, x.shape[2], 1, 1]);
        let low = b.linear("streams.down", flat, &self.down);
        let low = b.function("streams.silu", low, Function::Silu);
        let gate = b.linear("streams.up", low, &self.up);
        let gate = b.function("streams.sigmoid", gate, Function::Sigmoid);
        let gated = b.multiply("streams.gated", flat, gate);
        [mean(b, gated.reshape(all.shape)), flat]
    }

    /// The streams `x` with the result `y` added to each.
    pub fn write(&self, b: &mut Builder, x: Tensor, normed: Tensor, y: Tensor) -> Tensor {
        let Some(inject) = &self.inject else { return x };
        let weights = b.linear("streams.weights", normed, inject);
        let weights = b.function("streams.inject", weights, Function::Sigmoid);
        let weights = b.scale("streams.twice", weights, 2.0);
        let [count, rows, ..] = weights.shape;
        let spread = b.multiply("streams.spread", same(y, count), weights.reshape([1, count, rows, 1]));
        b.add("streams.residual", x, spread)
    }
}
