//! A transformer decoder: layers of attention and a feed-forward layer around a residual stream. [`Spec`] holds what models
//! change about it; a plain one is the Llama of the papers.

use kiln_kernels::glu::Gate;
use kiln_kernels::rope::RopeStyle;
use kiln_kernels::tensor::Tensor;

use super::attention::{Attention, AttentionSpec, HeadNorm, ResultGate};
use super::mlp::{Activation, Mlp, MlpSpec};
use super::moe::{Moe, MoeSpec};
use super::norms::NormKind;
use super::output::{Embedding, Head, Output};
use crate::Error;
use crate::arch::{Architecture, Batch};
use crate::model::Loader;
use crate::model::parts::{Factors, Rope, Sizes, sections};
use crate::plan::{Builder, Norm};

/// Where norms stand around the two halves of a layer.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Layout {
    /// Each half reads the normed stream.
    Pre,
    /// Each half reads the stream; its result is normed (`post_attention_norm`, `post_ffw_norm`).
    Post,
    /// Both.
    Sandwich,
    /// Both halves read the same normed stream and are added together.
    Parallel,
    /// The same, each half with a norm of its own.
    ParallelTwoNorms,
}

/// What models change about the plain decoder.
#[derive(Clone, Debug)]
pub struct Spec {
    /// Sizes.
    pub sizes: Sizes,
    /// The norm of tokens.
    pub norm: NormKind,
    /// What it adds.
    pub eps: f32,
    /// Where norms stand.
    pub layout: Layout,
    /// Name of the norm before attention.
    pub attention_norm: &'static str,
    /// Name of the norm before the feed-forward layer.
    pub ffn_norm: &'static str,
    /// Attention of each layer.
    pub attention: Vec<AttentionSpec>,
    /// The feed-forward layer.
    pub activation: Activation,
    /// Whether `ffn_*.scale` counts.
    pub scaled: bool,
    /// Whether biases of the feed-forward layer count.
    pub ffn_bias: bool,
    /// Experts in the place of the feed-forward layer, in layers from `dense_layers` on.
    pub moe: Option<MoeSpec>,
    /// Layers without experts at the beginning.
    pub dense_layers: usize,
    /// Which matrix makes the logits.
    pub head: Head,
    /// Factor of the embeddings.
    pub embedding_scale: f32,
    /// Factor of what each half of a layer adds.
    pub residual_scale: f32,
    /// Factor of the logits.
    pub logit_scale: f32,
    /// Cap of the logits; 0 for none.
    pub logit_softcap: f32,
    /// Whether the embeddings are normed (`token_embd_norm`).
    pub embedding_norm: bool,
    /// Whether positions are learnt vectors (`position_embd`).
    pub learnt_positions: bool,
    /// Whether the bias of the output matrix counts.
    pub output_bias: bool,
}

impl Spec {
    /// The plain decoder with the sizes of a file, without positions.
    pub fn plain(l: &mut Loader<'_>, norm: NormKind) -> Result<Spec, Error> {
        let sizes = Sizes::read(l)?;
        let eps = l.keys.eps(norm.eps_key())?;
        Ok(Spec {
            attention: (0..sizes.layers).map(|i| AttentionSpec::plain(&sizes, i, eps)).collect(),
            sizes,
            norm,
            eps,
            layout: Layout::Pre,
            attention_norm: "attn_norm",
            ffn_norm: "ffn_norm",
            activation: Activation::Gated(Gate::Swiglu),
            scaled: false,
            ffn_bias: true,
            moe: None,
            dense_layers: 0,
            head: Head::Tied,
            embedding_scale: 1.0,
            residual_scale: 1.0,
            logit_scale: 1.0,
            logit_softcap: 0.0,
            embedding_norm: false,
            learnt_positions: false,
            output_bias: true,
        })
    }

    /// The same with rotary positions in every layer.
    pub fn rotary(l: &mut Loader<'_>, norm: NormKind, style: RopeStyle, factors: Factors) -> Result<Spec, Error> {
        let mut spec = Spec::plain(l, norm)?;
        let rope = Rope::read(l, &spec.sizes, style, factors)?;
        spec.each_attention(|_, attention| attention.rope = Some(rope.clone()));
        Ok(spec)
    }

    /// For text of models whose rotary pairs follow several positions, where the file says so.
    pub fn with_sections(mut self, l: &Loader<'_>, style: RopeStyle) -> Result<Spec, Error> {
        if let Some(sections) = sections(l)? {
            self.each_attention(|_, attention| {
                attention.rope = attention.rope.as_ref().map(|rope| rope.for_text(style, sections));
            });
        }
        Ok(self)
    }

    /// Changes the attention of every layer.
    pub fn each_attention(&mut self, mut change: impl FnMut(usize, &mut AttentionSpec)) {
        self.attention.iter_mut().enumerate().for_each(|(i, attention)| change(i, attention));
    }

    /// Norms of queries and keys in every layer.
    pub fn with_head_norm(mut self, norm: HeadNorm) -> Spec {
        self.each_attention(|_, attention| attention.head_norm = norm);
        self
    }

    /// A gate on the result of attention in every layer.
    pub fn with_result_gate(mut self, gate: ResultGate) -> Spec {
        self.each_attention(|_, attention| attention.gate = gate);
        self
    }
}

/// One layer.
struct Layer {
    attention_norm: Option<Norm>,
    attention: Attention,
    attention_post: Option<Norm>,
    ffn_norm: Option<Norm>,
    ffn: FeedForward,
    ffn_post: Option<Norm>,
}

enum FeedForward {
    Mlp(Box<Mlp>),
    Moe(Box<Moe>),
}

/// A model of such layers.
pub struct Decoder {
    spec: Spec,
    embedding: Embedding,
    layers: Vec<Layer>,
    output: Output,
}

impl Decoder {
    /// Reads the weights.
    pub fn load(l: &mut Loader<'_>, spec: Spec) -> Result<Box<dyn Architecture>, Error> {
        let Sizes { hidden, vocab, layers, context, .. } = spec.sizes;
        let mut embedding = Embedding::load(l, hidden, vocab)?;
        embedding.scale = spec.embedding_scale;
        if spec.embedding_norm {
            embedding.norm = Some(spec.norm.load(l, "token_embd_norm", hidden, spec.eps)?);
        }
        if spec.learnt_positions {
            embedding.positions = Some(l.tensor("position_embd.weight", &[hidden, context])?);
        }
        let layers = (0..layers).map(|i| Layer::load(l, &spec, i)).collect::<Result<_, _>>()?;
        let mut output = Output::load(l, (spec.norm, spec.eps), spec.head, &embedding)?;
        (output.scale, output.softcap) = (spec.logit_scale, spec.logit_softcap);
        let output = if spec.output_bias { output } else { output.without_bias() };
        Ok(Box::new(Decoder { spec, embedding, layers, output }))
    }
}

impl Layer {
    fn load(l: &mut Loader<'_>, spec: &Spec, i: usize) -> Result<Layer, Error> {
        l.layer(i);
        let hidden = spec.sizes.hidden;
        let mut norm = |name: &str, wanted: bool| -> Result<Option<Norm>, Error> {
            if wanted { spec.norm.load(l, name, hidden, spec.eps).map(Some) } else { Ok(None) }
        };
        let before = spec.layout != Layout::Post;
        let after = matches!(spec.layout, Layout::Post | Layout::Sandwich);
        let attention_norm = norm(spec.attention_norm, before)?;
        let ffn_norm = norm(spec.ffn_norm, before && spec.layout != Layout::Parallel)?;
        let attention_post = norm("post_attention_norm", after)?;
        let ffn_post = norm("post_ffw_norm", after)?;
        let ffn = match &spec.moe {
            Some(moe) if i >= spec.dense_layers => FeedForward::Moe(Box::new(Moe::load(l, moe)?)),
            _ => {
                let width = spec.sizes.feed_forward[i];
                l.keys.require(width > 0, "feed_forward_length", width, "1 or more")?;
                let mlp = MlpSpec {
                    hidden,
                    width,
                    activation: spec.activation,
                    scaled: spec.scaled,
                    bias: spec.ffn_bias,
                    suffix: "",
                };
                FeedForward::Mlp(Box::new(Mlp::load(l, &mlp)?))
            }
        };
        let attention = Attention::load(l, &spec.attention[i], i)?;
        Ok(Layer { attention_norm, attention, attention_post, ffn_norm, ffn, ffn_post })
    }
}

impl Architecture for Decoder {
    fn build(&self, b: &mut Builder, batch: &Batch) -> Tensor {
        let mut x = self.embedding.build(b, batch);
        for (i, layer) in self.layers.iter().enumerate() {
            x = self.layer(b, batch, i, layer, x);
        }
        self.output.build(b, batch, x)
    }
}

impl Decoder {
    fn layer(&self, b: &mut Builder, batch: &Batch, i: usize, layer: &Layer, x: Tensor) -> Tensor {
        b.at(format!("{i}.attention"));
        let normed = |b: &mut Builder, norm: &Option<Norm>, name: &str, x: Tensor| match norm {
            Some(norm) => b.norm(name, x, norm),
            None => x,
        };
        let entered = normed(b, &layer.attention_norm, "norm", x);
        let branch = layer.attention.build(b, batch, entered);
        let branch = normed(b, &layer.attention_post, "post_norm", branch);
        let middle = self.onto(b, x, branch);
        b.at(format!("{i}.feed_forward"));
        let read = match self.spec.layout {
            Layout::Parallel => entered,
            Layout::ParallelTwoNorms => normed(b, &layer.ffn_norm, "norm", x),
            _ => normed(b, &layer.ffn_norm, "norm", middle),
        };
        let branch = match &layer.ffn {
            FeedForward::Mlp(mlp) => mlp.build(b, read),
            FeedForward::Moe(moe) => moe.build(b, read),
        };
        let branch = normed(b, &layer.ffn_post, "post_norm", branch);
        self.onto(b, middle, branch)
    }

    /// The stream with what a half of a layer adds to it.
    fn onto(&self, b: &mut Builder, x: Tensor, branch: Tensor) -> Tensor {
        let scale = self.spec.residual_scale;
        let branch = if scale == 1.0 { branch } else { b.scale("scaled", branch, scale) };
        b.add("residual", x, branch)
    }
}
