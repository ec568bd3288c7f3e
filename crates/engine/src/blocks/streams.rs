//! Several residual streams in the place of one: each half of a layer reads a weighted sum of them, and what it gives is added to
//! each with a weight. The weights depend on the streams. Or one stream, of which earlier states are kept: each half reads a weighted sum of
//! those and of what the stream is now.

use kiln_gguf::TensorType;
use kiln_kernels::tensor::Tensor;
use kiln_kernels::unary::Function;
use kiln_kernels::{sinkhorn, soft_max, sum_rows};

use super::moe::weighed_sum;
use crate::Error;
use crate::model::Loader;
use crate::plan::{Builder, Linear, Norm};

/// Sizes and numbers that all layers share.
#[derive(Clone, Copy, Debug)]
pub struct StreamSpec {
    /// Width of a stream.
    pub hidden: usize,
    /// Number of streams.
    pub count: usize,
    /// Added to weights.
    pub eps: f32,
    /// Factor of the weights with which results are added.
    pub magnitude: f32,
    /// How often the weights with which streams are mixed are brought to sums of 1 (`sinkhorn`); 0 where streams stay apart.
    pub mixes: usize,
    /// Added in the norm of all streams.
    pub norm_eps: f32,
}

/// With which weights a half of a layer adds its result to the streams.
#[derive(Clone, Copy, Debug)]
pub struct Weights {
    /// `[count, rows]`.
    after: Tensor,
    /// `[count, count, rows]`: of each new stream the weights of the old ones.
    mix: Option<Tensor>,
}

/// What makes the weights of one half of a layer.
#[derive(Clone, Debug)]
pub struct Streams {
    spec: StreamSpec,
    matrix: Linear,
    /// F32 `[weights]`: factors and summands of the products.
    factors: Tensor,
    base: Tensor,
}

impl StreamSpec {
    /// Reads the matrix `NAME_fn` and what belongs to it; `last` is the one before the output, which only sums.
    pub fn load(self, l: &mut Loader<'_>, name: &str, last: bool) -> Result<Streams, Error> {
        let StreamSpec { hidden, count, .. } = self;
        let parts: &[usize] = match (last, self.mixes) {
            (true, _) => &[count],
            (false, 0) => &[count, count],
            (false, _) => &[count, count, count * count],
        };
        let scale = format!("{name}_scale.weight");
        let scales = l.values(&scale)?.ok_or_else(|| Error::MissingTensor { name: l.full(&scale) })?;
        if scales.len() != parts.len() {
            return Err(Error::TensorShape { name: l.full(&scale), got: vec![scales.len()], want: vec![parts.len()] });
        }
        let factors: Vec<f32> = scales.iter().zip(parts).flat_map(|(scale, n)| vec![*scale; *n]).collect();
        let all = factors.len();
        Ok(Streams {
            spec: self,
            matrix: l.matrix(&format!("{name}_fn"), &[count * hidden, all])?,
            factors: l.constant(&l.full(&format!("{name}_factors")), &factors, [all, 1, 1, 1]),
            base: l.vector(&format!("{name}_base.weight"), &[all])?,
        })
    }

    /// All streams at the beginning: the embeddings.
    pub fn begin(self, b: &mut Builder, x: Tensor) -> Tensor {
        all_alike(b, x, self.count)
    }
}

/// So many streams, each of which is `x`.
pub fn all_alike(b: &mut Builder, x: Tensor, count: usize) -> Tensor {
    let all = b.fresh("streams", TensorType::F32, [x.shape[0], count, x.shape[1], 1]);
    b.copy("streams", same(x, count), all);
    all
}

/// Each stream a weighed sum of all: `weights [count, count, rows]`.
pub(super) fn mixed(b: &mut Builder, x: Tensor, weights: Tensor) -> Tensor {
    let [hidden, count, rows, _] = x.shape;
    let y = b.fresh("streams.mixed", TensorType::F32, [hidden, count, rows, 1]);
    // Every new stream reads the same old ones: a stride of 0.
    let [element, stream, row, _] = x.stride;
    let all = Tensor { shape: [count, hidden, count, rows], stride: [stream, element, 0, row], ..x };
    let (dst, weights) = (y.reshape([1, hidden, count, rows]), weights.reshape([count, 1, count, rows]));
    b.step("streams.mixed", sum_rows::Call { x: all, dst, weights: Some(weights) });
    y
}

/// The mean of all streams `x [hidden, count, rows]`.
pub fn mean(b: &mut Builder, x: Tensor) -> Tensor {
    let [hidden, count, rows, _] = x.shape;
    let sum = b.sum("streams.sum", x.permute([1, 0, 2, 3]));
    b.scale("streams.mean", sum.reshape([hidden, rows, 1, 1]), 1.0 / count as f32)
}

/// One column for `count` streams: a stride of 0.
pub(super) fn same(x: Tensor, count: usize) -> Tensor {
    let [width, rows, ..] = x.shape;
    Tensor { shape: [width, count, rows, 1], stride: [x.stride[0], 0, x.stride[1], x.stride[2]], ..x }
}

impl Streams {
    /// What a half of a layer reads of the streams `x [hidden, count, rows]`, and the weights for its result.
    pub fn read(&self, b: &mut Builder, x: Tensor) -> (Tensor, Option<Weights>) {
        let StreamSpec { hidden, count, eps, magnitude, mixes, norm_eps } = self.spec;
        let rows = x.shape[2];
        let flat = x.reshape([hidden * count, rows, 1, 1]);
        let normed = b.norm("streams.norm", flat, &Norm::Rms { weight: None, eps: norm_eps });
        let z = b.linear("streams.weights", normed, &self.matrix);
        let z = b.multiply("streams.factors", z, self.factors);
        let z = b.add("streams.base", z, self.base);
        let weights = b.function("streams.sigmoid", z, Function::Sigmoid);
        let by_stream = |t: Tensor| t.permute([2, 0, 1, 3]);
        let before = b.affine("streams.before", weights.narrow(0, 0, count), 1.0, eps);
        let weighed = b.multiply("streams.weighed", x, by_stream(before));
        let sum = b.sum("streams.sum", weighed.permute([1, 0, 2, 3]));
        let parts = weights.shape[0];
        let after = (parts > count).then(|| {
            // Where streams are mixed, nothing is added to the weights of the result.
            let added = if mixes > 0 { 0.0 } else { eps };
            b.affine("streams.after", weights.narrow(0, count, count), magnitude, added)
        });
        let mix = (parts > 2 * count).then(|| {
            let y = b.fresh("streams.mix", TensorType::F32, [count, count, rows, 1]);
            let x = z.narrow(0, 2 * count, count * count);
            b.step("streams.mix", sinkhorn::Call { x, y, eps, times: mixes });
            y
        });
        (sum.reshape([hidden, rows, 1, 1]), after.map(|after| Weights { after, mix }))
    }

    /// The streams `x`, mixed where they are, with the result `y` added to each.
    pub fn write(&self, b: &mut Builder, x: Tensor, weights: Weights, y: Tensor) -> Tensor {
        let spread = b.multiply("streams.spread", same(y, self.spec.count), weights.after.permute([2, 0, 1, 3]));
        let x = match weights.mix {
            Some(mix) => mixed(b, x, mix),
            None => x,
        };
        b.add("streams.residual", x, spread)
    }
}

/// States of the stream that were kept.
#[derive(Default)]
pub struct Bank(Vec<Tensor>);

impl Bank {
    /// Keeps the stream as it is.
    pub fn keep(&mut self, x: Tensor) {
        self.0.push(x);
    }

    /// What is kept and the stream `x [hidden, rows]`, weighed by a softmax of each one's product with a vector, after a norm with that vector as
    /// its weight. The stream alone where nothing is kept.
    pub fn read(&self, b: &mut Builder, x: Tensor, score: (Tensor, f32)) -> Tensor {
        if self.0.is_empty() {
            return x;
        }
        let ([hidden, rows, ..], count) = (x.shape, self.0.len() + 1);
        let all = b.fresh("kept", TensorType::F32, [hidden, count, rows, 1]);
        for (i, stream) in self.0.iter().chain([&x]).enumerate() {
            b.copy("kept", stream.permute([0, 2, 1, 3]), all.narrow(1, i, 1));
        }
        let normed = b.norm("kept.norm", all, &Norm::Rms { weight: Some(score.0), eps: score.1 });
        let scores = b.sum("kept.scores", normed).reshape([count, rows, 1, 1]);
        let weights = b.like("kept.weights", scores);
        let call = soft_max::Call { x: scores, mask: None, sinks: None, y: weights, scale: 1.0, max_bias: 0.0 };
        b.step("kept.weights", call);
        weighed_sum(b, "kept.", all, Some(weights))
    }
}
