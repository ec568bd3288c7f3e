//! Vectors that each layer gets for each token, beside the stream: a table of the vocabulary, a product of the embeddings, or both.

use kiln_kernels::glu::Gate;
use kiln_kernels::tensor::Tensor;

use crate::Error;
use crate::arch::Batch;
use crate::model::Loader;
use crate::plan::{Builder, Linear, Norm};

/// Sizes and numbers that all layers share.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct PerLayerSpec {
    /// Width of a vector.
    pub width: usize,
    /// Number of layers.
    pub layers: usize,
    /// Width of the stream.
    pub hidden: usize,
    /// What norms add.
    pub eps: f32,
    /// Whether there is a table (`per_layer_token_embd`): its rows and the product are added, each with the root of a half.
    pub table: bool,
}

/// What makes the vectors of all layers.
#[derive(Clone, Debug)]
pub struct PerLayer {
    spec: PerLayerSpec,
    table: Option<Tensor>,
    projection: Linear,
    norm: Norm,
}

impl PerLayer {
    /// Reads it.
    pub fn load(l: &mut Loader<'_>, spec: PerLayerSpec, vocab: usize) -> Result<PerLayer, Error> {
        let PerLayerSpec { width, layers, hidden, eps, table } = spec;
        l.whole();
        let all = width * layers;
        let projection = l.matrix("per_layer_model_proj", &[hidden, all])?;
        Ok(PerLayer {
            spec,
            table: table.then(|| l.tensor("per_layer_token_embd.weight", &[all, vocab])).transpose()?,
            projection: Linear { scale: 1.0 / (hidden as f32).sqrt(), ..projection },
            norm: Norm::Rms { weight: Some(l.vector("per_layer_proj_norm.weight", &[width])?), eps },
        })
    }

    /// Adds the steps: `[width, layers, rows]` of the embeddings `x`.
    pub fn build(&self, b: &mut Builder, batch: &Batch, x: Tensor) -> Tensor {
        let PerLayerSpec { width, layers, .. } = self.spec;
        b.at("per_layer");
        let shape = [width, layers, x.shape[1], 1];
        let product = b.linear("product", x, &self.projection).reshape(shape);
        let product = b.norm("norm", product, &self.norm);
        let Some(table) = self.table else { return product };
        // Vectors of pictures have no token: the table gives them what it has for the first one.
        let tokens = batch.ports.vectors.map_or(batch.ports.tokens, |rows| rows.stand_ins);
        let rows = b.rows("table", table, tokens).reshape(shape);
        let rows = b.scale("table.scale", rows, (width as f32).sqrt());
        let both = b.add("both", product, rows);
        b.scale("both.scale", both, std::f32::consts::FRAC_1_SQRT_2)
    }
}

/// The vectors `[width, rows]` of one layer.
pub fn of_layer(vectors: Tensor, layer: usize) -> Tensor {
    vectors.narrow(1, layer, 1).permute([0, 2, 1, 3])
}

/// What a layer makes of its vectors.
#[derive(Clone, Debug)]
pub struct Inject {
    gate: Linear,
    projection: Linear,
    norm: Norm,
}

impl Inject {
    /// Reads it.
    pub fn load(l: &mut Loader<'_>, spec: PerLayerSpec) -> Result<Inject, Error> {
        let PerLayerSpec { width, hidden, eps, .. } = spec;
        Ok(Inject {
            gate: l.matrix("inp_gate", &[hidden, width])?,
            projection: l.matrix("proj", &[width, hidden])?,
            norm: Norm::Rms { weight: Some(l.vector("post_norm.weight", &[hidden])?), eps },
        })
    }

    /// Adds the steps: what is added to the stream, of what the gate reads and of the vectors of the layer.
    pub fn build(&self, b: &mut Builder, x: Tensor, own: Tensor) -> Tensor {
        let gate = b.linear("own.gate", x, &self.gate);
        let gated = b.gated("own.gated", Gate::Geglu, gate, own);
        let y = b.linear("own.projection", gated, &self.projection);
        b.norm("own.norm", y, &self.norm)
    }
}
