//! Qwen 3.8 Flash Next: delta nets and gated attention that chooses among blocks of keys, around residual streams without norms of layers. Before
//! some layers, n-grams add vectors of their own.

use kiln_kernels::choose_keys::Rule;
use kiln_kernels::rope::RopeStyle;
use kiln_kernels::tensor::Tensor;

use super::{Architecture, Batch, recurrent_layers};
use crate::Error;
use crate::blocks::attend::ResultGate;
use crate::blocks::attention::{Attention, HeadNorm};
use crate::blocks::decoder::{FeedForward, Spec};
use crate::blocks::delta_net::{DeltaNet, DeltaSpec, OutputGate};
use crate::blocks::indexer::IndexSpec;
use crate::blocks::low_rank_streams::{LowRank, LowRankSpec};
use crate::blocks::mixer::Mixer;
use crate::blocks::moe::MoeSpec;
use crate::blocks::ngrams::{NgramSpec, Ngrams};
use crate::blocks::norms::NormKind;
use crate::blocks::output::{Embedding, Output};
use crate::blocks::streams::all_alike;
use crate::model::Loader;
use crate::model::parts::{Factors, expert_width};
use crate::plan::Builder;

struct Model {
    count: usize,
    embedding: Embedding,
    layers: Vec<Layer>,
    /// What the output reads.
    last: LowRank,
    output: Output,
}

struct Layer {
    ngrams: Option<Ngrams>,
    /// Attention or a delta net, then experts.
    halves: [(LowRank, Box<dyn Mixer>); 2],
}

pub(super) fn load(l: &mut Loader<'_>) -> Result<Box<dyn Architecture>, Error> {
    let keys = l.keys;
    let spec = Spec::rotary(l, NormKind::Rms, RopeStyle::Neox, Factors::Unused)?.with_sections(l, RopeStyle::Imrope)?;
    let mut spec = spec.with_head_norm(HeadNorm::Rms).with_result_gate(ResultGate::InQueries);
    let counts = MoeSpec::required_counts(l)?;
    let width = expert_width(l, &spec.sizes, counts)?;
    let shared = keys.count_opt("expert_shared_feed_forward_length", 1 << 20)?;
    spec.moe = Some(MoeSpec { scaled: true, shared, ..MoeSpec::usual(spec.sizes.hidden, width, counts) });
    let (hidden, layers, eps) = (spec.sizes.hidden, spec.sizes.layers, spec.eps);
    let recurrent = recurrent_layers(l, layers, 4)?;
    choose_blocks(l, &mut spec, &recurrent)?;
    let count = keys.count("hyper_connection.count", 64)?;
    let streams = LowRankSpec { hidden, count, rank: keys.count("hyper_connection.low_rank", 1 << 16)?, eps };
    let with_ngrams = keys.list("ple.layers", layers)?;
    let ngrams = match with_ngrams.is_empty() {
        true => None,
        false => Some(NgramSpec::read(l, [hidden, count], eps, spec.sizes.vocab)?),
    };
    let delta = DeltaSpec { hidden, eps, grouped: false, output_gate: OutputGate::Sigmoid, adds: true };
    let embedding = spec.embedding(l)?;
    let mut all = Vec::new();
    for (i, recurrent) in recurrent.iter().take(layers).enumerate() {
        l.layer(i);
        let ngrams = match ngrams.as_ref().filter(|_| with_ngrams.contains(&i)) {
            Some(ngrams) => Some(Ngrams::load(l, ngrams, i)?),
            None => None,
        };
        let mixer: Box<dyn Mixer> = match recurrent {
            true => Box::new(DeltaNet::load(l, &delta, i)?),
            false => Box::new(Attention::load(l, &spec.attention[i], i)?),
        };
        let halves = [
            (streams.load(l, "hc_attn", false)?, mixer),
            (streams.load(l, "hc_ffn", false)?, Box::new(FeedForward::load(l, &spec, i)?) as Box<dyn Mixer>),
        ];
        all.push(Layer { ngrams, halves });
    }
    l.whole();
    let last = streams.load(l, "output_hc", true)?;
    let output = Output::load_bare(l, &embedding)?;
    Ok(Box::new(Model { count, embedding, layers: all, last, output }))
}

/// Layers with attention choose among blocks of keys where the file says how long these are.
fn choose_blocks(l: &mut Loader<'_>, spec: &mut Spec, recurrent: &[bool]) -> Result<(), Error> {
    let (keys, layers, eps) = (l.keys, spec.sizes.layers, spec.eps);
    let scale = keys.factor("attention.scale")?;
    let ratios = keys.list("attention.compress_ratios", 1 << 12)?;
    let some: Vec<usize> = ratios.iter().copied().filter(|ratio| *ratio > 0).collect();
    if !ratios.is_empty() {
        keys.require(
            ratios.len() >= layers,
            "attention.compress_ratios",
            ratios.len(),
            &format!("one for each of {layers} layers"),
        )?;
    }
    let alike = some.windows(2).all(|pair| pair[0] == pair[1]);
    keys.require(alike, "attention.compress_ratios", some.len(), "the same number in all layers that have one")?;
    let index = match some.first() {
        None => None,
        Some(&size) => {
            let count = |key: &str, most: usize| keys.count(&format!("attention.indexer.{key}"), most);
            let most = (count("top_k", 1 << 24)? / size).max(1);
            let rule = Rule { per_key: size, block: 1, most, near: 0, tail: true };
            Some((count("head_count", 4096)?, count("key_length", 4096)?, rule))
        }
    };
    spec.each_attention(|i, attention| {
        attention.bias = false;
        attention.output_bias = false;
        attention.scale = scale.unwrap_or(attention.scale);
        let chooses = !recurrent[i] && ratios.get(i).is_some_and(|ratio| *ratio > 0);
        attention.index = index.filter(|_| chooses).map(|(heads, width, rule)| IndexSpec {
            heads,
            width,
            rule,
            rope: attention.rope.clone(),
            offset: 0,
            eps,
        });
    });
    Ok(())
}

impl Architecture for Model {
    fn build(&self, b: &mut Builder, batch: &Batch) -> Tensor {
        let x = self.embedding.build(b, batch);
        let mut x = all_alike(b, x, self.count);
        for (i, layer) in self.layers.iter().enumerate() {
            if let Some(ngrams) = &layer.ngrams {
                b.at(format!("{i}.ngrams"));
                x = ngrams.build(b, batch, x);
            }
            for ((streams, mixer), name) in layer.halves.iter().zip(["attention", "feed_forward"]) {
                b.at(format!("{i}.{name}"));
                let [read, normed] = streams.read(b, x);
                let y = mixer.build(b, batch, read);
                x = streams.write(b, x, normed, y);
            }
        }
        b.at("output");
        let [read, _] = self.last.read(b, x);
        self.output.build(b, batch, read)
    }
}
