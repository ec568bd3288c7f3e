//! Streams of which a layer computes one alone: before the layer, each stream is predicted from all of them; behind it, each is corrected by what the
//! layer changed about the first one. The weights depend on that stream.

use kiln_gguf::TensorType;
use kiln_kernels::mul_mat::Product;
use kiln_kernels::tensor::Tensor;
use kiln_kernels::unary::Function;
use kiln_kernels::{concat, mul_mat_vec};

use super::streams::{mixed, same};
use crate::Error;
use crate::model::Loader;
use crate::plan::{Builder, Linear, Norm};

/// Added to the mean squares that lengths are compared by: a row without a token has none.
const LEAST: f32 = 1e-30;

/// Sizes and numbers that all layers share.
#[derive(Clone, Copy, Debug)]
pub struct AltUpSpec {
    /// Width of a stream.
    pub hidden: usize,
    /// Number of streams. The first one is computed.
    pub count: usize,
    /// What norms add.
    pub eps: f32,
}

/// The matrices between one stream and the others, at the beginning and the end of a model: `[hidden, hidden, count - 1]`.
#[derive(Clone, Copy, Debug)]
pub struct Ends {
    spec: AltUpSpec,
    matrices: [Tensor; 2],
}

impl AltUpSpec {
    /// Reads the matrices of both ends.
    pub fn ends(self, l: &mut Loader<'_>) -> Result<Ends, Error> {
        let AltUpSpec { hidden, count, .. } = self;
        l.whole();
        let mut matrix = |name: &str| l.tensor(name, &[hidden, hidden, count - 1]);
        Ok(Ends { spec: self, matrices: [matrix("altup_proj.weight")?, matrix("altup_unembd_proj.weight")?] })
    }

    /// Reads what a layer has.
    pub fn load(self, l: &mut Loader<'_>) -> Result<AltUp, Error> {
        let AltUpSpec { hidden, count, eps } = self;
        let router = l.matrix("altup_router", &[hidden, count])?;
        Ok(AltUp {
            count,
            norm: Norm::Rms { weight: Some(l.vector("altup_router_norm.weight", &[hidden])?), eps },
            router: Linear { scale: 1.0 / hidden as f32, ..router },
            predict: l.matrix("altup_predict_coef", &[count, count * count])?,
            correct: l.matrix("altup_correct_coef", &[count, count])?,
        })
    }
}

impl Ends {
    /// All streams `[hidden, count, rows]` at the beginning, of the embeddings `x`.
    pub fn begin(&self, b: &mut Builder, x: Tensor) -> Tensor {
        b.at("altup");
        let others = b.fresh("copies", TensorType::F32, [self.spec.hidden, self.spec.count - 1, x.shape[1], 1]);
        b.copy("copies", same(x, self.spec.count - 1), others);
        self.as_long(b, self.matrices[0], x, others)
    }

    /// All streams as the output takes their mean.
    pub fn end(&self, b: &mut Builder, x: Tensor) -> Tensor {
        b.at("altup.end");
        self.as_long(b, self.matrices[1], first(x), x.narrow(1, 1, self.spec.count - 1))
    }

    /// The stream `x` and behind it products with the others, each as long as `x`.
    fn as_long(&self, b: &mut Builder, matrices: Tensor, x: Tensor, others: Tensor) -> Tensor {
        let AltUpSpec { hidden, count, .. } = self.spec;
        let rows = x.shape[1];
        let by_stream = |t: Tensor| t.permute([0, 2, 1, 3]);
        let made = b.fresh("made", TensorType::F32, [hidden, count - 1, rows, 1]);
        let product = Product { a: matrices, b: by_stream(others), d: by_stream(made) };
        b.step("made", mul_mat_vec::Call::plain(product));
        let made = b.norm("made.norm", made, &Norm::Rms { weight: None, eps: LEAST });
        let squares = b.function("squares", x, Function::Sqr);
        let squares = b.sum("squares.sum", squares);
        let mean = b.scale("squares.mean", squares, 1.0 / hidden as f32);
        let length = b.function("length", mean, Function::Sqrt);
        let made = b.multiply("made.length", made, length.reshape([1, 1, rows, 1]));
        let all = b.fresh("streams", TensorType::F32, [hidden, count, rows, 1]);
        b.step("streams", concat::Call { a: by_stream(x), b: made, dst: all, dim: 1 });
        all
    }
}

/// The stream `[hidden, rows]` that layers compute.
pub fn first(x: Tensor) -> Tensor {
    x.narrow(1, 0, 1).permute([0, 2, 1, 3])
}

/// What predicts and corrects the streams of one layer.
#[derive(Clone, Debug)]
pub struct AltUp {
    count: usize,
    norm: Norm,
    router: Linear,
    predict: Linear,
    correct: Linear,
}

impl AltUp {
    /// The numbers that weights are made of, of the stream `x`.
    fn route(&self, b: &mut Builder, name: &str, x: Tensor) -> Tensor {
        let y = b.norm(&format!("{name}.norm"), x, &self.norm);
        let y = b.linear(&format!("{name}.router"), y, &self.router);
        b.function(&format!("{name}.tanh"), y, Function::Tanh)
    }

    /// What all streams are expected to be behind the layer.
    pub fn predict(&self, b: &mut Builder, x: Tensor) -> Tensor {
        let routed = self.route(b, "predict", first(x));
        let weights = b.linear("predict", routed, &self.predict);
        let change = mixed(b, x, weights);
        b.add("predicted", x, change)
    }

    /// The streams as expected, with what the layer made of the first one.
    pub fn correct(&self, b: &mut Builder, expected: Tensor, made: Tensor) -> Tensor {
        let routed = self.route(b, "correct", made);
        let weights = b.linear("correct", routed, &self.correct);
        let weights = b.affine("correct.weights", weights, 1.0, 1.0);
        let change = b.subtract("correct.change", made, first(expected));
        let spread = b.multiply("correct.spread", same(change, self.count), weights.permute([2, 0, 1, 3]));
        b.add("corrected", expected, spread)
    }

    /// Adds `y` to all streams but the first; `others` is 0 for that and 1 for all others, `[1, count]`.
    pub fn add_to_others(&self, b: &mut Builder, x: Tensor, y: Tensor, others: Tensor) -> Tensor {
        let spread = b.multiply("others.spread", same(y, self.count), others);
        b.add("others", x, spread)
    }
}
