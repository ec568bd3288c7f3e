//! Kimi K3: delta nets and latent attention without positions. Each half of a layer reads a mixture of the stream and of states of it that were
//! kept every so many layers; where one is kept, the stream begins anew. Experts live in a space of their own.

use kiln_kernels::glu;
use kiln_kernels::tensor::Tensor;
use kiln_kernels::topk_moe::Gate;

use super::experts::keyed;
use super::kimi::{bounded, mixer};
use super::{Architecture, Batch};
use crate::Error;
use crate::blocks::attend::ResultGate;
use crate::blocks::decoder::{FeedForward, Spec};
use crate::blocks::mixer::Mixer;
use crate::blocks::mlp::Activation;
use crate::blocks::moe::MoeSpec;
use crate::blocks::norms::NormKind;
use crate::blocks::output::{Embedding, Head, Output};
use crate::blocks::streams::Bank;
use crate::model::Loader;
use crate::plan::{Builder, Norm};

struct Model {
    embedding: Embedding,
    layers: Vec<[Half; 2]>,
    /// Every so many layers the stream is kept; 0 for never.
    interval: usize,
    eps: f32,
    /// What the output reads.
    score: Option<Tensor>,
    output: Output,
}

/// Attention or the feed-forward layer.
struct Half {
    /// What weighs kept states, where some are.
    score: Option<Tensor>,
    norm: Norm,
    mixer: Box<dyn Mixer>,
}

pub(super) fn load(l: &mut Loader<'_>) -> Result<Box<dyn Architecture>, Error> {
    let keys = l.keys;
    let mut spec = Spec::plain(l, NormKind::Rms)?;
    spec.ffn_bias = false;
    let number = |key: &str| keys.float(key, 0.0, [0.0, 1e6]);
    let beta = number("activation.situ_beta")?;
    keys.require(beta > 0.0, "activation.situ_beta", 0, "a number above 0")?;
    let situ = glu::Gate::Situ { beta, linear: number("activation.situ_linear_beta")? };
    spec.activation = Activation::Gated(situ);
    let moe = keyed(l, &mut spec, Gate::Sigmoid)?;
    let latent = keys.count_opt("expert_latent_length", 1 << 17)?;
    let shared = Some(moe.shared.unwrap_or(moe.width));
    spec.moe = Some(MoeSpec { activation: situ, latent, routed: Some(spec.eps), shared, ..moe });
    let decay = bounded(l)?;
    let hidden = spec.sizes.hidden;
    let interval = keys.count_opt("attn_res.block_size", 1 << 12)?.unwrap_or(0);
    let score = |l: &mut Loader<'_>, name: &str| -> Result<Option<Tensor>, Error> {
        match interval {
            0 => l.vector_opt(name, &[hidden]),
            _ => l.vector(name, &[hidden]).map(Some),
        }
    };
    let embedding = spec.embedding(l)?;
    let mut layers = Vec::new();
    for i in 0..spec.sizes.layers {
        l.layer(i);
        let attention = Half {
            score: score(l, "attn_res_score.weight")?,
            norm: spec.norm.load(l, "attn_norm", hidden, spec.eps)?,
            mixer: mixer(l, &spec, i, (decay, None), |l, sizes| {
                let (gated, low) = (l.has("attn_gate.weight"), l.has("attn_q_a_norm.weight"));
                sizes.gate = if gated { ResultGate::Sigmoid } else { ResultGate::None };
                sizes.query_rank = sizes.query_rank.filter(|_| low);
                sizes.scaled = false;
            })?,
        };
        let feed_forward = Half {
            score: score(l, "ffn_res_score.weight")?,
            norm: spec.norm.load(l, "ffn_norm", hidden, spec.eps)?,
            mixer: Box::new(FeedForward::load(l, &spec, i)?),
        };
        layers.push([attention, feed_forward]);
    }
    l.whole();
    let score = score(l, "output_res_score.weight")?;
    let output = Output::load(l, (spec.norm, spec.eps), Head::Own, &embedding)?;
    Ok(Box::new(Model { embedding, layers, interval, eps: spec.eps, score, output }))
}

impl Architecture for Model {
    fn build(&self, b: &mut Builder, batch: &Batch) -> Tensor {
        let mut x = self.embedding.build(b, batch);
        let mut bank = Bank::default();
        let read = |b: &mut Builder, bank: &Bank, x: Tensor, score: Option<Tensor>| {
            score.map_or(x, |score| bank.read(b, x, (score, self.eps)))
        };
        for (i, halves) in self.layers.iter().enumerate() {
            for (half, name) in halves.iter().zip(["attention", "feed_forward"]) {
                b.at(format!("{i}.{name}"));
                let mixed = read(b, &bank, x, half.score);
                let anew = name == "attention" && self.interval > 0 && i.is_multiple_of(self.interval);
                if anew {
                    bank.keep(x);
                }
                let normed = b.norm("norm", mixed, &half.norm);
                let y = half.mixer.build(b, batch, normed);
                x = if anew { y } else { b.add("residual", x, y) };
            }
        }
        b.at("output");
        let x = read(b, &bank, x, self.score);
        self.output.build(b, batch, x)
    }
}
