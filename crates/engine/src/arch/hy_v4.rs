//! Hunyuan 4: latent attention with sinks and gates around several residual streams; gate and up of experts are bounded.

use kiln_kernels::glu;
use kiln_kernels::rope::RopeStyle;
use kiln_kernels::tensor::Tensor;
use kiln_kernels::topk_moe::Gate;

use super::experts::keyed;
use super::latent::{Choosing, all, choosing_layers};
use super::{Architecture, Batch};
use crate::Error;
use crate::blocks::attend::ResultGate;
use crate::blocks::decoder::{FeedForward, Spec};
use crate::blocks::latent::Latent;
use crate::blocks::mixer::Mixer;
use crate::blocks::moe::MoeSpec;
use crate::blocks::norms::NormKind;
use crate::blocks::output::{Embedding, Head, Output};
use crate::blocks::streams::{StreamSpec, Streams};
use crate::model::Loader;
use crate::model::parts::Factors;
use crate::plan::{Builder, Norm};

struct Model {
    streams: StreamSpec,
    embedding: Embedding,
    layers: Vec<[Half; 2]>,
    last: Streams,
    output: Output,
}

/// Attention or the feed-forward layer, with what it reads and writes.
struct Half {
    streams: Streams,
    norm: Norm,
    mixer: Box<dyn Mixer>,
}

pub(super) fn load(l: &mut Loader<'_>) -> Result<Box<dyn Architecture>, Error> {
    let keys = l.keys;
    let mut spec = Spec::rotary(l, NormKind::Rms, RopeStyle::Normal, Factors::Unused)?;
    let mut latent = all(l, &spec)?;
    for layer in &mut latent {
        (layer.sinks, layer.gate, layer.scaled) = (true, ResultGate::Sigmoid, false);
    }
    if keys.count_opt("attention.indexer.top_k", 1 << 24)?.is_some() {
        let choosing = Choosing { style: RopeStyle::Normal, tail: true, eps: spec.eps };
        choosing.apply(l, &choosing_layers(l, spec.sizes.layers, 0)?, &mut latent)?;
    }
    let moe = keyed(l, &mut spec, Gate::Sigmoid)?;
    let limits = keys.floats("swiglu_clamp_exp", spec.sizes.layers, [0.0, 1e6])?;
    let dense = spec.dense_layers;
    spec.moe_where(|i| {
        let limit = limits[i];
        let activation = if limit > 1e-6 { glu::Gate::SwigluBounded { limit } } else { moe.activation };
        (i >= dense).then_some(MoeSpec { activation, shared_activation: Some(glu::Gate::Swiglu), ..moe })
    });
    let streams = StreamSpec {
        hidden: spec.sizes.hidden,
        count: keys.count("hyper_connection.count", 64)?,
        eps: keys.float("hyper_connection.epsilon", 0.0, [0.0, 1.0])?,
        magnitude: keys.float("hyper_connection.magnitude", 1.0, [0.0, 1e6])?,
        norm_eps: spec.eps,
    };
    let embedding = spec.embedding(l)?;
    let mut layers = Vec::new();
    for (i, latent) in latent.iter().enumerate() {
        l.layer(i);
        let norm = |l: &mut Loader<'_>, name: &str| spec.norm.load(l, name, spec.sizes.hidden, spec.eps);
        let attention = Half {
            streams: streams.load(l, "hc_attn", false)?,
            norm: norm(l, "attn_norm")?,
            mixer: Box::new(Latent::load(l, latent, i)?),
        };
        let feed_forward = Half {
            streams: streams.load(l, "hc_ffn", false)?,
            norm: norm(l, "ffn_norm")?,
            mixer: Box::new(FeedForward::load(l, &spec, i)?),
        };
        layers.push([attention, feed_forward]);
    }
    l.whole();
    let last = streams.load(l, "output_hc", true)?;
    let output = Output::load(l, (spec.norm, spec.eps), Head::Own, &embedding)?;
    Ok(Box::new(Model { streams, embedding, layers, last, output }))
}

impl Architecture for Model {
    fn build(&self, b: &mut Builder, batch: &Batch) -> Tensor {
        let x = self.embedding.build(b, batch);
        let mut x = self.streams.begin(b, x);
        for (i, halves) in self.layers.iter().enumerate() {
            for (half, name) in halves.iter().zip(["attention", "feed_forward"]) {
                b.at(format!("{i}.{name}"));
                let (read, weights) = half.streams.read(b, x);
                let read = b.norm("norm", read, &half.norm);
                let y = half.mixer.build(b, batch, read);
                x = half.streams.write(b, x, weights, y);
            }
        }
        b.at("output");
        let (x, _) = self.last.read(b, x);
        self.output.build(b, batch, x)
    }
}
