//! Gemma 3n: four streams of which layers compute one, a branch of low rank beside attention, gates of which the first layers keep the largest
//! elements alone, vectors for each layer, and caches that the last layers read from earlier ones.

use kiln_kernels::glu::Gate;
use kiln_kernels::rope::RopeStyle;
use kiln_kernels::tensor::Tensor;

use super::{Architecture, Batch};
use crate::Error;
use crate::blocks::altup::{AltUp, AltUpSpec, Ends, first};
use crate::blocks::attention::{Attention, HeadNorm};
use crate::blocks::decoder::Spec;
use crate::blocks::mixer::Mixer;
use crate::blocks::mlp::{Activation, Mlp, MlpSpec};
use crate::blocks::norms::NormKind;
use crate::blocks::output::{Embedding, Head, Output};
use crate::blocks::per_layer::{Inject, PerLayer, PerLayerSpec, of_layer};
use crate::blocks::streams::mean;
use crate::model::Loader;
use crate::model::parts::{Factors, window_base, windows};
use crate::plan::{Builder, Linear, Norm};

// All of these are the same in every model, whatever its keys say.
const STREAMS: usize = 4;
const RANK: usize = 64;
const WIDTH: usize = 256;
const CAP: f32 = 30.0;
/// Layers that have keys and values of their own.
const OWN: usize = 20;
/// Layers whose gates are sparse.
const SPARSE: usize = 10;
/// Standard deviations above the mean that elements of sparse gates must lie: one in twenty does.
const DEVIATIONS: f32 = 1.644_853_6;

struct Gemma3n {
    embedding: Embedding,
    per_layer: PerLayer,
    ends: Ends,
    /// 0 for the first stream, 1 for all others.
    others: Tensor,
    layers: Vec<Layer>,
    output: Output,
}

struct Layer {
    altup: AltUp,
    attention_norm: Norm,
    attention: Attention,
    attention_post: Norm,
    laurel: [Linear; 2],
    laurel_norm: Norm,
    ffn_norm: Norm,
    ffn: Mlp,
    ffn_post: Norm,
    correct_scale: Tensor,
    inject: Inject,
}

pub(super) fn load(l: &mut Loader<'_>) -> Result<Box<dyn Architecture>, Error> {
    let keys = l.keys;
    let spec = Spec::rotary(l, NormKind::Rms, RopeStyle::Neox, Factors::Unused)?;
    let mut spec = spec.with_head_norm(HeadNorm::Rms);
    let (hidden, layers, eps) = (spec.sizes.hidden, spec.sizes.layers, spec.eps);
    spec.embedding_scale = (hidden as f32).sqrt();
    let window = keys.count("attention.sliding_window", 1 << 24)?;
    let windows = windows(l, layers, window, 5)?;
    keys.require(layers > OWN, "block_count", layers, &format!("more than the {OWN} that have keys of their own"))?;
    let fits = windows[OWN - 2].is_some() && windows[OWN - 1].is_none();
    let pattern = "attention.sliding_window_pattern";
    let want = format!("a window for layer {} and none for layer {}", OWN - 2, OWN - 1);
    keys.require(fits, pattern, usize::from(windows[OWN - 1].is_some()), &want)?;
    let base = window_base(l, 10000.0)?;
    let mut spec = spec.with_windows(&windows, |rope| rope.unscaled(base));
    spec.each_attention(|i, attention| {
        (attention.scale, attention.value_norm) = (1.0, true);
        let owner = if attention.window.is_some() { OWN - 2 } else { OWN - 1 };
        attention.caches_of = (i >= OWN).then_some(owner);
    });
    let embedding = spec.embedding(l)?;
    let own = PerLayerSpec { width: WIDTH, layers, hidden, eps, table: true };
    let per_layer = PerLayer::load(l, own, spec.sizes.vocab)?;
    let altup = AltUpSpec { hidden, count: STREAMS, eps };
    let ends = altup.ends(l)?;
    let layers = (0..layers).map(|i| Layer::load(l, &spec, (altup, own), i)).collect::<Result<_, _>>()?;
    let mut output = Output::load(l, (NormKind::Rms, eps), Head::Tied, &embedding)?;
    output.softcap = CAP;
    let others: Vec<f32> = (0..STREAMS).map(|i| if i == 0 { 0.0 } else { 1.0 }).collect();
    let others = l.constant("altup.others", &others, [1, STREAMS, 1, 1]);
    Ok(Box::new(Gemma3n { embedding, per_layer, ends, others, layers, output }))
}

impl Layer {
    fn load(
        l: &mut Loader<'_>,
        spec: &Spec,
        (altup, own): (AltUpSpec, PerLayerSpec),
        i: usize,
    ) -> Result<Layer, Error> {
        l.layer(i);
        let (hidden, width) = (spec.sizes.hidden, spec.sizes.feed_forward[i]);
        l.keys.require(width > 1, "feed_forward_length", width, "2 or more")?;
        let norm = |l: &mut Loader<'_>, name: &str| spec.norm.load(l, name, hidden, spec.eps);
        let sparsity = (i < SPARSE).then_some(DEVIATIONS);
        let mlp = MlpSpec { sparsity, ..MlpSpec::plain(hidden, width, Activation::Gated(Gate::Geglu)) };
        Ok(Layer {
            altup: altup.load(l)?,
            attention_norm: norm(l, "attn_norm")?,
            attention: Attention::load(l, &spec.attention[i], i)?,
            attention_post: norm(l, "post_attention_norm")?,
            laurel: [l.matrix("laurel_l", &[hidden, RANK])?, l.matrix("laurel_r", &[RANK, hidden])?],
            laurel_norm: norm(l, "laurel_post_norm")?,
            ffn_norm: norm(l, "ffn_norm")?,
            ffn: Mlp::load(l, &mlp)?,
            ffn_post: norm(l, "post_ffw_norm")?,
            correct_scale: l.vector("altup_correct_scale.weight", &[hidden])?,
            inject: Inject::load(l, own)?,
        })
    }

    /// What the layer makes of the stream `x`.
    fn made(&self, b: &mut Builder, batch: &Batch, i: usize, x: Tensor) -> Tensor {
        b.at(format!("{i}.attention"));
        let read = b.norm("norm", x, &self.attention_norm);
        let low = b.linear("laurel.low", read, &self.laurel[0]);
        let high = b.linear("laurel.high", low, &self.laurel[1]);
        let high = b.norm("laurel.norm", high, &self.laurel_norm);
        let laurel = b.add("laurel", read, high);
        let branch = self.attention.build(b, batch, read);
        let branch = b.norm("post_norm", branch, &self.attention_post);
        let sum = b.add("residual", x, branch);
        let sum = b.add("laurel.residual", sum, laurel);
        let x = b.scale("halved", sum, std::f32::consts::FRAC_1_SQRT_2);
        b.at(format!("{i}.feed_forward"));
        let read = b.norm("norm", x, &self.ffn_norm);
        let branch = self.ffn.build(b, read);
        let branch = b.norm("post_norm", branch, &self.ffn_post);
        b.add("residual", x, branch)
    }
}

impl Architecture for Gemma3n {
    fn build(&self, b: &mut Builder, batch: &Batch) -> Tensor {
        let x = self.embedding.build(b, batch);
        let vectors = self.per_layer.build(b, batch, x);
        let mut streams = self.ends.begin(b, x);
        for (i, layer) in self.layers.iter().enumerate() {
            b.at(format!("{i}.altup"));
            let expected = layer.altup.predict(b, streams);
            let made = layer.made(b, batch, i, first(expected));
            b.at(format!("{i}.altup"));
            streams = layer.altup.correct(b, expected, made);
            let read = b.multiply("scaled", first(streams), layer.correct_scale);
            let own = layer.inject.build(b, read, of_layer(vectors, i));
            streams = layer.altup.add_to_others(b, streams, own, self.others);
        }
        let all = self.ends.end(b, streams);
        let x = mean(b, all);
        self.output.build(b, batch, x)
    }
}
