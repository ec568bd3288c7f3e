//! T5: an encoder reads a text, every token of which sees all others; a decoder writes another one, and looks at what the encoder
//! made of the first in every layer. Keys and values of that are computed once for each text.

use kiln_kernels::glu::Gate;
use kiln_kernels::tensor::Tensor;
use kiln_kernels::unary::Function;

use super::{Architecture, Batch, Results};
use crate::Error;
use crate::blocks::mlp::{Activation, Mlp, MlpSpec};
use crate::blocks::norms::NormKind;
use crate::blocks::output::{Embedding, Head, Output};
use crate::blocks::relative::{Relative, RelativeSpec, buckets, distances};
use crate::model::parts::Sizes;
use crate::model::{Cached, Loader, MOST_LAYERS};
use crate::plan::{Builder, Norm};

struct T5 {
    embedding: Embedding,
    encoder: Vec<Layer>,
    encoder_norm: Norm,
    /// Nothing where the file has the encoder alone.
    decoder: Option<Decoder>,
}

struct Decoder {
    layers: Vec<Layer>,
    output: Output,
}

struct Layer {
    attention_norm: Norm,
    attention: Relative,
    /// Attention to the text that was read.
    cross: Option<(Norm, Relative)>,
    ffn_norm: Norm,
    ffn: Mlp,
}

/// What all layers share.
struct Spec {
    sizes: Sizes,
    relative: RelativeSpec,
    eps: f32,
    buckets: usize,
}

type Loaded = Result<Box<dyn Architecture>, Error>;

pub(super) fn load(l: &mut Loader<'_>) -> Loaded {
    read(l, true)
}

pub(super) fn load_encoder(l: &mut Loader<'_>) -> Loaded {
    read(l, false)
}

fn read(l: &mut Loader<'_>, writes: bool) -> Loaded {
    let spec = Spec::read(l)?;
    let Sizes { layers, hidden, vocab, .. } = spec.sizes;
    let embedding = Embedding::load(l, hidden, vocab)?;
    l.any_length();
    // Layers of the encoder run one after the other and leave nothing behind: they share their caches.
    let caches = spec.caches(l, "enc")?;
    let encoder = spec.layers(l, "enc", layers, |_, _| Ok(caches))?;
    l.whole();
    let encoder_norm = NormKind::Rms.load(l, "enc.output_norm", hidden, spec.eps)?;
    if !writes {
        l.sees_all();
        l.encodes();
        return Ok(Box::new(T5 { embedding, encoder, encoder_norm, decoder: None }));
    }
    l.answers(l.keys.start_token("decoder_start_token_id", vocab)?);
    let count = l.keys.count_opt("decoder_block_count", MOST_LAYERS)?.unwrap_or(layers);
    let layers = spec.layers(l, "dec", count, |l, i| spec.caches(l, &i.to_string()))?;
    let output = Output::load_named(l, "dec.output_norm", (NormKind::Rms, spec.eps), Head::Tied, &embedding)?;
    Ok(Box::new(T5 { embedding, encoder, encoder_norm, decoder: Some(Decoder { layers, output }) }))
}

impl Spec {
    fn read(l: &mut Loader<'_>) -> Result<Spec, Error> {
        let sizes = Sizes::read(l)?;
        let (heads, key) = (sizes.heads[0], "attention.head_count");
        l.keys.require(heads > 0, key, heads, "1 to 4096")?;
        let same = sizes.heads.iter().chain(&sizes.kv_heads).all(|n| *n == heads);
        l.keys.require(same, key, heads, "the same in all layers, for queries as for keys")?;
        let Sizes { hidden, head_dim, value_dim, .. } = sizes;
        let relative = RelativeSpec { hidden, heads, head_dim, value_dim };
        let eps = l.keys.eps(NormKind::Rms.eps_key())?;
        Ok(Spec { sizes, relative, eps, buckets: buckets(l)? })
    }

    fn caches(&self, l: &mut Loader<'_>, name: &str) -> Result<[Tensor; 2], Error> {
        let RelativeSpec { heads, head_dim, value_dim, .. } = self.relative;
        let keys = l.heads_cache(&format!("{name}.k_cache"), Cached::Keys, [head_dim, heads], None)?;
        Ok([keys, l.heads_cache(&format!("{name}.v_cache"), Cached::Values, [value_dim, heads], None)?])
    }

    /// The layers of one side, `enc` or `dec`.
    fn layers(
        &self,
        l: &mut Loader<'_>,
        side: &str,
        count: usize,
        mut caches: impl FnMut(&mut Loader<'_>, usize) -> Result<[Tensor; 2], Error>,
    ) -> Result<Vec<Layer>, Error> {
        let (decodes, hidden) = (side == "dec", self.relative.hidden);
        let mut layers = Vec::with_capacity(count);
        let mut first = None;
        for i in 0..count {
            let caches = caches(l, i)?;
            l.part(format!("{side}.blk.{i}."));
            let own = distances(l, self.relative.heads, self.buckets, !decodes)?;
            let missing = || Error::MissingTensor { name: l.full("attn_rel_b.weight") };
            let biases = own.or(first).ok_or_else(missing)?;
            first = first.or(Some(biases));
            let norm = |l: &mut Loader<'_>, name: &str| NormKind::Rms.load(l, name, hidden, self.eps);
            let attention = Relative::load(l, "attn", &self.relative, decodes, caches, Some(biases))?;
            let cross = if decodes {
                // Some files have this table, which nobody uses.
                l.ignore("cross_attn_rel_b.weight");
                let cross = Relative::load(l, "cross_attn", &self.relative, false, caches, None)?;
                Some((norm(l, "cross_attn_norm")?, cross))
            } else {
                None
            };
            layers.push(Layer {
                attention_norm: norm(l, "attn_norm")?,
                attention,
                cross,
                ffn_norm: norm(l, "ffn_norm")?,
                ffn: self.mlp(l, i)?,
            });
        }
        Ok(layers)
    }

    /// Gated where the file has a gate.
    fn mlp(&self, l: &mut Loader<'_>, i: usize) -> Result<Mlp, Error> {
        // A decoder may have more layers than keys have numbers for.
        let widths = &self.sizes.feed_forward;
        let width = widths[i.min(widths.len() - 1)];
        l.keys.require(width > 0, "feed_forward_length", width, "1 or more")?;
        let gated = l.has("ffn_gate.weight");
        let activation = if gated { Activation::Gated(Gate::Geglu) } else { Activation::Plain(Function::Relu) };
        let hidden = self.relative.hidden;
        Mlp::load(l, &MlpSpec::plain(hidden, width, activation))
    }
}

impl Layer {
    fn build(&self, b: &mut Builder, batch: &Batch, place: &str, x: Tensor) -> Tensor {
        b.at(format!("{place}.attention"));
        let normed = b.norm("norm", x, &self.attention_norm);
        self.attention.remember(b, batch, normed);
        let seen = self.attention.attend(b, batch, normed, None);
        let mut x = b.add("residual", x, seen);
        if let Some((norm, cross)) = &self.cross {
            b.at(format!("{place}.cross"));
            let normed = b.norm("norm", x, norm);
            let seen = cross.attend(b, batch, normed, batch.ports.source);
            x = b.add("residual", x, seen);
        }
        b.at(format!("{place}.ffn"));
        let normed = b.norm("norm", x, &self.ffn_norm);
        let added = self.ffn.build(b, normed);
        b.add("residual", x, added)
    }
}

impl T5 {
    /// What the encoder makes of every token.
    fn encode(&self, b: &mut Builder, batch: &Batch) -> Tensor {
        let mut x = self.embedding.build(b, batch);
        for (i, layer) in self.encoder.iter().enumerate() {
            x = layer.build(b, batch, &format!("enc.{i}"), x);
        }
        b.at("enc");
        b.norm("norm", x, &self.encoder_norm)
    }
}

impl Architecture for T5 {
    fn build(&self, b: &mut Builder, batch: &Batch) -> Tensor {
        if let (Results::Logits, Some(decoder)) = (batch.results, &self.decoder) {
            let mut x = self.embedding.build(b, batch);
            for (i, layer) in decoder.layers.iter().enumerate() {
                x = layer.build(b, batch, &i.to_string(), x);
            }
            return decoder.output.build(b, batch, x);
        }
        let read = self.encode(b, batch);
        let decoder = self.decoder.as_ref().filter(|_| batch.results == Results::Source);
        for (i, layer) in decoder.iter().flat_map(|decoder| decoder.layers.iter().enumerate()) {
            b.at(format!("{i}.cross"));
            layer.cross.iter().for_each(|(_, cross)| cross.remember(b, batch, read));
        }
        b.at("output");
        if batch.shape.outputs == batch.shape.rows() { read } else { b.rows("rows", read, batch.ports.wanted) }
    }
}
