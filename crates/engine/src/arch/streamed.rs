//! Models whose layers stand around several residual streams: Hunyuan 4 and GLM 5 Next.

use kiln_kernels::tensor::Tensor;

use super::{Architecture, Batch};
use crate::Error;
use crate::blocks::decoder::{FeedForward, Spec};
use crate::blocks::mixer::Mixer;
use crate::blocks::output::{Embedding, Head, Output};
use crate::blocks::streams::{StreamSpec, Streams, mean};
use crate::model::Loader;
use crate::plan::{Builder, Norm};

struct Model {
    streams: StreamSpec,
    embedding: Embedding,
    layers: Vec<[Half; 2]>,
    /// What the output reads; the mean of all streams without it.
    last: Option<Streams>,
    output: Output,
}

/// Attention or the feed-forward layer, with what it reads and writes.
struct Half {
    streams: Streams,
    norm: Norm,
    mixer: Box<dyn Mixer>,
}

/// Reads such a model: `mixer` what stands in the place of attention, `feeds` the feed-forward layer, layer by layer. `last`: whether the
/// output has weights of its own for the streams.
pub(super) fn load(
    l: &mut Loader<'_>,
    (spec, streams, last): (&Spec, StreamSpec, bool),
    mut mixer: impl FnMut(&mut Loader<'_>, usize) -> Result<Box<dyn Mixer>, Error>,
    mut feeds: impl FnMut(&mut Loader<'_>, usize) -> Result<FeedForward, Error>,
) -> Result<Box<dyn Architecture>, Error> {
    let embedding = spec.embedding(l)?;
    let mut layers = Vec::new();
    for i in 0..spec.sizes.layers {
        l.layer(i);
        let norm = |l: &mut Loader<'_>, name: &str| spec.norm.load(l, name, spec.sizes.hidden, spec.eps);
        let attention =
            Half { streams: streams.load(l, "hc_attn", false)?, norm: norm(l, "attn_norm")?, mixer: mixer(l, i)? };
        let feed_forward = Half {
            streams: streams.load(l, "hc_ffn", false)?,
            norm: norm(l, "ffn_norm")?,
            mixer: Box::new(feeds(l, i)?),
        };
        layers.push([attention, feed_forward]);
    }
    l.whole();
    let last = if last { Some(streams.load(l, "output_hc", true)?) } else { None };
    let output = Output::load(l, (spec.norm, spec.eps), Head::Own, &embedding)?;
    Ok(Box::new(Model { streams, embedding, layers, last, output }))
}

/// What a file says of its streams. `mixes` and `magnitude` are the architecture's.
pub(super) fn spec(l: &Loader<'_>, spec: &Spec, mixes: usize, magnitude: f32) -> Result<StreamSpec, Error> {
    Ok(StreamSpec {
        hidden: spec.sizes.hidden,
        count: l.keys.count("hyper_connection.count", kiln_kernels::sinkhorn::MOST)?,
        eps: l.keys.float("hyper_connection.epsilon", 0.0, [0.0, 1.0])?,
        magnitude,
        mixes,
        norm_eps: spec.eps,
    })
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
                x = weights.map_or(x, |weights| half.streams.write(b, x, weights, y));
            }
        }
        b.at("output");
        let x = match &self.last {
            Some(last) => last.read(b, x).0,
            None => mean(b, x),
        };
        self.output.build(b, batch, x)
    }
}
