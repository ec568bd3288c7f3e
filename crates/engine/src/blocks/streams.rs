//! Several residual streams in the place of one: each half of a layer reads a weighted sum of them, and what it gives is added to
//! each with a weight. The weights depend on the streams. Or one stream, of which earlier states are kept: each half reads a weighted sum of
//! those and of what the stream is now.

use kiln_gguf::TensorType;
use kiln_kernels::soft_max;
use kiln_kernels::tensor::Tensor;
use kiln_kernels::unary::Function;

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
    /// Added in the norm of all streams.
    pub norm_eps: f32,
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
        let parts = if last { 1 } else { 2 };
        let scale = format!("{name}_scale.weight");
        let scales = l.values(&scale)?.ok_or_else(|| Error::MissingTensor { name: l.full(&scale) })?;
        if scales.len() != parts {
            return Err(Error::TensorShape { name: l.full(&scale), got: vec![scales.len()], want: vec![parts] });
        }
        let factors: Vec<f32> = scales.iter().flat_map(|scale| vec![*scale; count]).collect();
        Ok(Streams {
            spec: self,
            matrix: l.matrix(&format!("{name}_fn"), &[count * hidden, parts * count])?,
            factors: l.constant(&l.full(&format!("{name}_factors")), &factors, [factors.len(), 1, 1, 1]),
            base: l.vector(&format!("{name}_base.weight"), &[parts * count])?,
        })
    }

    /// All streams at the beginning: the embeddings.
    pub fn begin(self, b: &mut Builder, x: Tensor) -> Tensor {
        let all = b.fresh("streams", TensorType::F32, [self.hidden, self.count, x.shape[1], 1]);
        b.copy("streams", self.same(x), all);
        all
    }

    /// One column for all streams: a stride of 0.
    fn same(self, x: Tensor) -> Tensor {
        let [width, rows, ..] = x.shape;
        Tensor { shape: [width, self.count, rows, 1], stride: [x.stride[0], 0, x.stride[1], x.stride[2]], ..x }
    }
}

impl Streams {
    /// What a half of a layer reads of the streams `x [hidden, count, rows]`, and the weights for its result.
    pub fn read(&self, b: &mut Builder, x: Tensor) -> (Tensor, Tensor) {
        let StreamSpec { hidden, count, eps, norm_eps, .. } = self.spec;
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
        (sum.reshape([hidden, rows, 1, 1]), weights)
    }

    /// The streams `x` with the result `y` added to each.
    pub fn write(&self, b: &mut Builder, x: Tensor, weights: Tensor, y: Tensor) -> Tensor {
        let StreamSpec { count, eps, magnitude, .. } = self.spec;
        let after = b.affine("streams.after", weights.narrow(0, count, count), magnitude, eps);
        let spread = b.multiply("streams.spread", self.spec.same(y), after.permute([2, 0, 1, 3]));
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
