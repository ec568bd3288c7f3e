//! A transformer decoder: layers of attention and a feed-forward layer around a residual stream. [`Spec`] holds what models
//! change about it; a plain one is the Llama of the papers.

use kiln_kernels::glu::Gate;
use kiln_kernels::rope::RopeStyle;
use kiln_kernels::tensor::Tensor;

use super::attend::ResultGate;
use super::attention::{Attention, AttentionSpec, HeadNorm};
use super::draft_head::{DraftHead, Handed};
use super::latent::{Latent, LatentSpec};
use super::mixer::Mixer;
use super::mlp::{Activation, Mlp, MlpSpec, Scaled};
use super::moe::{Moe, MoeSpec};
use super::norms::NormKind;
use super::output::{Embedding, Head, Output};
use super::per_layer::{Inject, PerLayer, PerLayerSpec, of_layer};
use crate::Error;
use crate::arch::{Architecture, Batch, Results};
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
    /// The same; the second half reads the normed result of the first one, not the stream.
    PostChained,
    /// Both.
    Sandwich,
    /// Both halves read the same normed stream and are added together.
    Parallel,
    /// The same, each half with a norm of its own.
    ParallelTwoNorms,
    /// Each half reads the normed stream, and its result is added to what it read, times the residual scale.
    Normed,
    /// The first half alone.
    Single,
    /// Each half reads the stream, and the stream with its result is normed (`attn_output_norm`, `layer_output_norm` in files). There
    /// is no norm at the end then.
    Outer,
}

/// Where experts stand.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Place {
    /// In the place of the feed-forward layer.
    Instead,
    /// Beside the feed-forward layer; they read what enters the layer through a norm of their own (`ffn_norm_exps`).
    BesideFromInput,
    /// Beside the feed-forward layer, where the file has one; the root of a half of both counts.
    BesideHalved,
    /// Beside the feed-forward layer: they and their router read the stream through norms of their own, and each result is normed.
    BesideNormed,
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
    /// Whether layers may lack it.
    pub maybe_attention_norm: bool,
    /// Whether layers may add what they read to the normed stream and norm it once more (`attn_norm_2`), with [`Layout::Outer`].
    pub maybe_second_norm: bool,
    /// Name of the norm before the feed-forward layer.
    pub ffn_norm: &'static str,
    /// Name of the norm after attention.
    pub attention_post: &'static str,
    /// Name of the norm after the feed-forward layer.
    pub ffn_post: &'static str,
    /// What norms after the halves of a layer add, where it is something else.
    pub post_eps: Option<f32>,
    /// Attention of each layer.
    pub attention: Vec<AttentionSpec>,
    /// Latent attention of each layer, in the place of the other; empty for none.
    pub latent: Vec<LatentSpec>,
    /// Whether layers with 0 heads have no attention, and those with 0 key heads a matrix in its place.
    pub may_lack_attention: bool,
    /// The feed-forward layer.
    pub activation: Activation,
    /// The feed-forward layer of each layer, where they differ; empty otherwise.
    pub activations: Vec<Activation>,
    /// Whether what stands before the last matrix of a feed-forward layer is normed (`ffn_sub_norm`).
    pub inner_norms: bool,
    /// Which `ffn_*.scale` count.
    pub scaled: Scaled,
    /// Whether biases of the feed-forward layer count.
    pub ffn_bias: bool,
    /// Experts in the place of the feed-forward layer, in layers from `dense_layers` on.
    pub moe: Option<MoeSpec>,
    /// Experts of each layer, where layers differ in more than that; empty otherwise.
    pub moe_by_layer: Vec<Option<MoeSpec>>,
    /// Where they stand.
    pub experts: Place,
    /// Whether the router reads what enters the layer.
    pub routes_input: bool,
    /// Layers without experts at the beginning.
    pub dense_layers: usize,
    /// Whether further layers may have no experts: those without a router in the file.
    pub maybe_dense: bool,
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
    /// Whether the embeddings are divided by the root of their mean square.
    pub embedding_rms: bool,
    /// Whether every layer adds the embeddings once more, times `layer_output_scale`.
    pub embedding_skip: bool,
    /// Whether the stream is multiplied by `layer_output_scale` behind each layer, where the file has it.
    pub output_scale: bool,
    /// Vectors that each layer gets for each token.
    pub per_layer: Option<PerLayerSpec>,
    /// Whether factors of matrices belong to a run of a layer, not to the layer.
    pub scales_by_slot: bool,
    /// Number of times that the layers are run, with a norm between two times if `loop_norm`.
    pub loops: usize,
    /// Whether the last norm stands between two times, too.
    pub loop_norm: bool,
    /// Whether tokens get the vector of a kind (`token_types`), where the file has some.
    pub token_kinds: bool,
    /// Layers behind which a further part of the vectors of pictures is added.
    pub deepstack: usize,
    /// Whether positions are learnt vectors (`position_embd`).
    pub learnt_positions: bool,
    /// Whether the bias of the output matrix counts.
    pub output_bias: bool,
    /// Name of the norm before the output matrix.
    pub output_norm: &'static str,
    /// Tokens that text never draws: their logits are minus infinity.
    pub hidden_tokens: Vec<usize>,
    /// Which state of a token the draft head of such models takes; none where there is no head that Kiln runs.
    pub drafts: Option<Handed>,
}

impl Spec {
    /// The plain decoder with the sizes of a file, without positions.
    pub fn plain(l: &mut Loader<'_>, norm: NormKind) -> Result<Spec, Error> {
        let sizes = Sizes::read(l)?;
        let eps = l.keys.eps(norm.eps_key())?;
        // Files of models that were made to give vectors of texts may say that tokens see the whole of one.
        let causal = l.keys.flag("attention.causal", true)?;
        let attention = |i| {
            let mut attention = AttentionSpec::plain(&sizes, i, eps);
            attention.causal = causal;
            attention
        };
        Ok(Spec {
            attention: (0..sizes.layers).map(attention).collect(),
            sizes,
            norm,
            eps,
            layout: Layout::Pre,
            attention_norm: "attn_norm",
            maybe_attention_norm: false,
            maybe_second_norm: false,
            ffn_norm: "ffn_norm",
            attention_post: "post_attention_norm",
            ffn_post: "post_ffw_norm",
            post_eps: None,
            latent: Vec::new(),
            may_lack_attention: false,
            activation: Activation::Gated(Gate::Swiglu),
            activations: Vec::new(),
            inner_norms: false,
            scaled: Scaled::None,
            ffn_bias: true,
            moe: None,
            moe_by_layer: Vec::new(),
            experts: Place::Instead,
            routes_input: false,
            dense_layers: 0,
            maybe_dense: false,
            head: Head::Tied,
            embedding_scale: 1.0,
            residual_scale: 1.0,
            logit_scale: 1.0,
            logit_softcap: 0.0,
            embedding_norm: false,
            embedding_rms: false,
            embedding_skip: false,
            output_scale: false,
            per_layer: None,
            scales_by_slot: false,
            loops: 1,
            loop_norm: true,
            token_kinds: false,
            deepstack: 0,
            learnt_positions: false,
            output_bias: true,
            output_norm: "output_norm",
            hidden_tokens: Vec::new(),
            drafts: None,
        })
    }

    /// The same with rotary positions in every layer.
    pub fn rotary(l: &mut Loader<'_>, norm: NormKind, style: RopeStyle, factors: Factors) -> Result<Spec, Error> {
        let mut spec = Spec::plain(l, norm)?;
        let rope = Rope::read(l, &spec.sizes, style, factors)?;
        spec.each_attention(|_, attention| attention.rope = Some(rope.clone()));
        Ok(spec)
    }

    /// Windows of each layer; heads of those that have one are turned as `rope` says.
    pub fn with_windows(mut self, windows: &[Option<usize>], rope: impl Fn(&Rope) -> Rope) -> Spec {
        self.each_attention(|i, attention| {
            attention.window = windows[i];
            if attention.window.is_some() {
                attention.rope = attention.rope.as_ref().map(&rope);
            }
        });
        self
    }

    /// Reads where YaRN begins and ends, for models that say it.
    pub fn read_betas(&mut self, l: &Loader<'_>, fast: f32) -> Result<(), Error> {
        self.attention
            .iter_mut()
            .filter_map(|attention| attention.rope.as_mut())
            .try_for_each(|r| r.read_betas(l, fast))
    }

    /// Heads are turned only in the layers that `turned` names.
    pub fn turned_where(&mut self, turned: impl Fn(usize) -> bool) {
        self.each_attention(|i, attention| attention.rope = attention.rope.take().filter(|_| turned(i)));
    }

    /// Experts of each layer as `moe` says.
    pub fn moe_where(&mut self, mut moe: impl FnMut(usize) -> Option<MoeSpec>) {
        self.moe_by_layer = (0..self.sizes.layers).map(&mut moe).collect();
    }

    /// For models whose rotary pairs follow several positions, where the file says so.
    pub fn with_sections(mut self, l: &mut Loader<'_>, style: RopeStyle) -> Result<Spec, Error> {
        if let Some(sections) = sections(l)? {
            l.several_positions();
            self.each_attention(|_, attention| {
                attention.rope = attention.rope.as_ref().map(|rope| rope.with_sections(style, sections));
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
pub struct Layer {
    mixer_norm: Option<Norm>,
    mixer: Option<Box<dyn Mixer>>,
    mixer_post: Option<Norm>,
    /// The norm of what the layer reads and makes, once more.
    second: Option<Norm>,
    ffn_norm: Option<Norm>,
    ffn: Option<FeedForward>,
    ffn_post: Option<Norm>,
    /// Factor of the embeddings that the layer adds.
    skip: Option<f32>,
    /// What adds the vectors that are the layer's own.
    inject: Option<Inject>,
    /// Factor of the stream behind the layer.
    output_scale: Option<f32>,
}

/// What enters a layer.
#[derive(Clone, Copy, Debug)]
pub struct Entering {
    /// The stream.
    pub x: Tensor,
    /// The embeddings.
    pub first: Tensor,
    /// The vectors that are the layer's own, where it has some.
    pub own: Option<Tensor>,
}

/// The second half of a layer.
pub enum FeedForward {
    /// A feed-forward layer.
    Mlp(Box<Mlp>),
    /// A mixture of experts.
    Moe(Box<Moe>),
    /// Both, with the norm of what the experts read where they read something else.
    Both(Box<Mlp>, Box<Moe>, Option<Norm>),
    /// Both, with the norms of what the experts read, of the result of the feed-forward layer and of theirs.
    BothNormed(Box<Mlp>, Box<Moe>, Box<[Norm; 3]>),
}

impl Mixer for FeedForward {
    fn build(&self, b: &mut Builder, batch: &Batch, x: Tensor) -> Tensor {
        self.build(b, batch, x, [x, x])
    }
}

/// A model of such layers.
pub struct Decoder {
    spec: Spec,
    embedding: Embedding,
    per_layer: Option<PerLayer>,
    layers: Vec<Layer>,
    /// The norm between two times that the layers are run.
    between: Option<Norm>,
    output: Output,
    head: Option<DraftHead>,
}

/// Reads what mixes the tokens of a layer; `None` where nothing does.
type Mixed = Result<Option<Box<dyn Mixer>>, Error>;

impl Decoder {
    /// Reads the weights of a model with attention, as the specification says.
    pub fn load(l: &mut Loader<'_>, spec: Spec) -> Result<Box<dyn Architecture>, Error> {
        Decoder::load_layers(l, spec, |l, spec, i, slot| spec.mixer(l, i, slot))
    }

    /// The same with what `mixer` reads in the place of attention, layer by layer; the loader is at its names then.
    pub fn load_with(
        l: &mut Loader<'_>,
        spec: Spec,
        mut mixer: impl FnMut(&mut Loader<'_>, &Spec, usize) -> Result<Box<dyn Mixer>, Error>,
    ) -> Result<Box<dyn Architecture>, Error> {
        Decoder::load_layers(l, spec, |l, spec, i, _| mixer(l, spec, i).map(Some))
    }

    fn load_layers(
        l: &mut Loader<'_>,
        spec: Spec,
        mut mixer: impl FnMut(&mut Loader<'_>, &Spec, usize, usize) -> Mixed,
    ) -> Result<Box<dyn Architecture>, Error> {
        let Sizes { layers: count, .. } = spec.sizes;
        let embedding = spec.embedding(l)?;
        let per_layer = spec.per_layer.map(|own| PerLayer::load(l, own, spec.sizes.vocab)).transpose()?;
        // A layer that is run again has caches of its own.
        let numbers = (0..spec.loops).flat_map(|time| (0..count).map(move |i| (i, time * count + i)));
        let mut layers = Vec::new();
        for (i, slot) in numbers {
            // A layer without anything to feed forward is not run, whatever else it has.
            if spec.may_lack_attention && spec.sizes.feed_forward[i] == 0 {
                l.ignore_layers(i..i + 1);
            } else {
                layers.push(Layer::load_with(l, &spec, [i, slot], &mut mixer)?);
            }
        }
        l.whole();
        let between = spec.loops > 1 && spec.loop_norm;
        let between = between.then(|| spec.norm.load(l, spec.output_norm, spec.sizes.hidden, spec.eps)).transpose()?;
        let mut output = match spec.layout {
            Layout::Outer => Output::nothing(l),
            _ => Output::load_named(l, spec.output_norm, (spec.norm, spec.eps), spec.head, &embedding)?,
        };
        (output.scale, output.softcap) = (spec.logit_scale, spec.logit_softcap);
        output.hide(l, &spec.hidden_tokens, spec.sizes.vocab);
        let output = if spec.output_bias { output } else { output.without_bias() };
        let head = DraftHead::load(l, &spec, &embedding, &output)?;
        Ok(Box::new(Decoder { spec, embedding, per_layer, layers, between, output, head }))
    }
}

impl Spec {
    /// Reads the embeddings.
    pub fn embedding(&self, l: &mut Loader<'_>) -> Result<Embedding, Error> {
        let Sizes { hidden, vocab, context, .. } = self.sizes;
        let mut embedding = Embedding::load(l, hidden, vocab)?;
        embedding.scale = self.embedding_scale;
        if self.embedding_norm {
            embedding.norm = Some(self.norm.load(l, "token_embd_norm", hidden, self.eps)?);
        }
        if self.embedding_rms {
            embedding.norm = Some(Norm::Rms { weight: None, eps: self.eps });
        }
        if self.token_kinds {
            embedding.read_kind(l)?;
        }
        if self.learnt_positions {
            embedding.positions = Some(l.tensor("position_embd.weight", &[hidden, context])?);
        }
        Ok(embedding)
    }

    /// The experts of a layer.
    fn experts_of(&self, l: &Loader<'_>, i: usize) -> Option<MoeSpec> {
        match self.moe_by_layer.get(i) {
            Some(moe) => *moe,
            None => {
                let has = i >= self.dense_layers && (!self.maybe_dense || l.has("ffn_gate_inp.weight"));
                self.moe.filter(|_| has)
            }
        }
    }

    fn mlp(&self, l: &mut Loader<'_>, i: usize) -> Result<Box<Mlp>, Error> {
        let width = self.sizes.feed_forward[i];
        l.keys.require(width > 0, "feed_forward_length", width, "1 or more")?;
        let activation = self.activations.get(i).copied().unwrap_or(self.activation);
        let mlp = MlpSpec {
            scaled: self.scaled,
            bias: self.ffn_bias,
            inner_norm: self.inner_norms.then_some(self.eps),
            ..MlpSpec::plain(self.sizes.hidden, width, activation)
        };
        Ok(Box::new(Mlp::load(l, &mlp)?))
    }

    /// What mixes the tokens of a layer, whose caches have the number `slot`.
    fn mixer(&self, l: &mut Loader<'_>, i: usize, slot: usize) -> Mixed {
        if let Some(latent) = self.latent.get(i) {
            return Ok(Some(Box::new(Latent::load(l, latent, slot)?)));
        }
        let (attention, hidden) = (&self.attention[i], self.sizes.hidden);
        Ok(match (attention.heads, attention.kv_heads) {
            (0, _) if self.may_lack_attention => None,
            (_, 0) if self.may_lack_attention => Some(Box::new(l.matrix("attn_output", &[hidden, hidden])?)),
            _ => Some(Box::new(Attention::load(l, attention, slot)?)),
        })
    }

    /// The stream with what a half of a layer makes of what it read.
    fn onto(&self, b: &mut Builder, [x, read]: [Tensor; 2], branch: Tensor) -> Tensor {
        let scale = self.residual_scale;
        if self.layout == Layout::Normed {
            let read = b.scale("scaled", read, scale);
            return b.add("residual", read, branch);
        }
        let branch = if scale == 1.0 { branch } else { b.scale("scaled", branch, scale) };
        b.add("residual", x, branch)
    }
}

impl FeedForward {
    /// That of layer `i`, whose names the loader is at.
    pub fn load(l: &mut Loader<'_>, spec: &Spec, i: usize) -> Result<FeedForward, Error> {
        let Some(moe) = spec.experts_of(l, i) else { return Ok(FeedForward::Mlp(spec.mlp(l, i)?)) };
        let moe = Box::new(Moe::load(l, &moe)?);
        if spec.experts == Place::BesideNormed {
            let mut norm = |name: &str| spec.norm.load(l, name, spec.sizes.hidden, spec.eps);
            let norms = [norm("pre_ffw_norm_2")?, norm("post_ffw_norm_1")?, norm("post_ffw_norm_2")?];
            return Ok(FeedForward::BothNormed(spec.mlp(l, i)?, moe, Box::new(norms)));
        }
        let norm = spec.experts == Place::BesideFromInput;
        let norm = norm.then(|| spec.norm.load(l, "ffn_norm_exps", spec.sizes.hidden, spec.eps)).transpose()?;
        let both = norm.is_some() || (spec.experts == Place::BesideHalved && l.has("ffn_up.weight"));
        Ok(if both { FeedForward::Both(spec.mlp(l, i)?, moe, norm) } else { FeedForward::Moe(moe) })
    }

    /// Adds the steps: of what is read, what the router reads, and what experts beside the feed-forward layer read before their norm.
    fn build(&self, b: &mut Builder, batch: &Batch, read: Tensor, [routed, x]: [Tensor; 2]) -> Tensor {
        match self {
            FeedForward::Mlp(mlp) => mlp.build(b, read),
            FeedForward::Moe(moe) => moe.build(b, batch, read, routed),
            FeedForward::Both(mlp, moe, norm) => {
                let dense = mlp.build(b, read);
                let read = norm.map_or(read, |norm| b.norm("experts.norm", x, &norm));
                let chosen = moe.build(b, batch, read, read);
                let both = b.add("both", dense, chosen);
                if norm.is_some() { both } else { b.scale("halved", both, std::f32::consts::FRAC_1_SQRT_2) }
            }
            FeedForward::BothNormed(mlp, moe, norms) => {
                let [before, dense_after, chosen_after] = &**norms;
                let dense = mlp.build(b, read);
                let dense = b.norm("dense.norm", dense, dense_after);
                let read = b.norm("experts.norm", x, before);
                let chosen = moe.build(b, batch, read, x);
                let chosen = b.norm("chosen.norm", chosen, chosen_after);
                b.add("both", dense, chosen)
            }
        }
    }
}

impl Layer {
    /// Reads layer `i`, whose caches have the number `slot`.
    pub fn load(l: &mut Loader<'_>, spec: &Spec, i: usize, slot: usize) -> Result<Layer, Error> {
        Layer::load_with(l, spec, [i, slot], &mut |l, spec, i, slot| spec.mixer(l, i, slot))
    }

    fn load_with(
        l: &mut Loader<'_>,
        spec: &Spec,
        [i, slot]: [usize; 2],
        mixer: &mut impl FnMut(&mut Loader<'_>, &Spec, usize, usize) -> Mixed,
    ) -> Result<Layer, Error> {
        l.layer(i);
        if spec.scales_by_slot {
            l.scales_of(slot);
        }
        let hidden = spec.sizes.hidden;
        let mixer = mixer(l, spec, i, slot)?;
        let has_norm = !spec.maybe_attention_norm || l.has(&format!("{}.weight", spec.attention_norm));
        let second = spec.maybe_second_norm && l.has("attn_norm_2.weight");
        let mut norm = |name: &str, wanted: bool, eps: f32| -> Result<Option<Norm>, Error> {
            if wanted { spec.norm.load(l, name, hidden, eps).map(Some) } else { Ok(None) }
        };
        let before = !matches!(spec.layout, Layout::Post | Layout::PostChained | Layout::Outer);
        let after = matches!(spec.layout, Layout::Post | Layout::PostChained | Layout::Sandwich | Layout::Outer);
        let mixer_norm = norm(spec.attention_norm, before && mixer.is_some() && has_norm, spec.eps)?;
        let second = norm("attn_norm_2", second, spec.eps)?;
        let ffn_norm = before && !matches!(spec.layout, Layout::Parallel | Layout::Single);
        let ffn_norm = norm(spec.ffn_norm, ffn_norm, spec.eps)?;
        let post_eps = spec.post_eps.unwrap_or(spec.eps);
        let mixer_post = norm(spec.attention_post, after, post_eps)?;
        let ffn_post = norm(spec.ffn_post, after, post_eps)?;
        let skip = if spec.embedding_skip { Some(l.number("layer_output_scale.weight")?) } else { None };
        let ffn = if spec.layout == Layout::Single { None } else { Some(FeedForward::load(l, spec, i)?) };
        let scaled = spec.output_scale && l.has("layer_output_scale.weight");
        let output_scale = scaled.then(|| l.number("layer_output_scale.weight")).transpose()?;
        let inject = spec.per_layer.map(|own| Inject::load(l, own)).transpose()?;
        Ok(Layer { mixer_norm, mixer, mixer_post, second, ffn_norm, ffn, ffn_post, skip, inject, output_scale })
    }

    /// Adds the steps that keep what later tokens need of these in the first half, and no others.
    pub fn keep(&self, b: &mut Builder, batch: &Batch, name: &str, x: Tensor) {
        b.at(format!("{name}.attention"));
        let x = self.mixer_norm.as_ref().map_or(x, |norm| b.norm("norm", x, norm));
        if let Some(mixer) = &self.mixer {
            mixer.keep(b, batch, x);
        }
    }

    /// The stream with what a half of the layer made, normed before or after, and that by itself.
    fn half(&self, b: &mut Builder, spec: &Spec, post: &Option<Norm>, x: [Tensor; 2], branch: Tensor) -> [Tensor; 2] {
        match post {
            Some(norm) if spec.layout == Layout::Outer => {
                let x = spec.onto(b, x, branch);
                [b.norm("post_norm", x, norm), branch]
            }
            Some(norm) => {
                let branch = b.norm("post_norm", branch, norm);
                [spec.onto(b, x, branch), branch]
            }
            None => [spec.onto(b, x, branch), branch],
        }
    }

    /// Adds the steps: the stream after the layer. `name` stands before the steps.
    pub fn build(&self, b: &mut Builder, batch: &Batch, (spec, name): (&Spec, &str), entering: Entering) -> Tensor {
        let Entering { x, first, own } = entering;
        b.at(format!("{name}.attention"));
        let normed = |b: &mut Builder, norm: &Option<Norm>, name: &str, x: Tensor| match norm {
            Some(norm) => b.norm(name, x, norm),
            None => x,
        };
        let entered = normed(b, &self.mixer_norm, "norm", x);
        let [middle, mixed] = match &self.mixer {
            Some(mixer) => {
                let branch = mixer.build(b, batch, entered);
                let [middle, mixed] = self.half(b, spec, &self.mixer_post, [x, entered], branch);
                match &self.second {
                    Some(norm) => {
                        let both = b.add("second", middle, x);
                        [b.norm("second_norm", both, norm), mixed]
                    }
                    None => [middle, mixed],
                }
            }
            None => [x, x],
        };
        let Some(ffn) = &self.ffn else { return middle };
        b.at(format!("{name}.feed_forward"));
        let read = match spec.layout {
            Layout::Parallel => entered,
            Layout::PostChained => mixed,
            Layout::ParallelTwoNorms => normed(b, &self.ffn_norm, "norm", x),
            _ => normed(b, &self.ffn_norm, "norm", middle),
        };
        let beside = if spec.experts == Place::BesideNormed { middle } else { x };
        let branch = ffn.build(b, batch, read, [if spec.routes_input { x } else { read }, beside]);
        let [x, _] = self.half(b, spec, &self.ffn_post, [middle, read], branch);
        self.finish(b, x, first, own)
    }

    /// What some models do to the stream behind both halves.
    fn finish(&self, b: &mut Builder, x: Tensor, first: Tensor, own: Option<Tensor>) -> Tensor {
        let mut x = match self.skip {
            Some(factor) => {
                let again = b.scale("embedding", first, factor);
                b.add("skip", x, again)
            }
            None => x,
        };
        if let (Some(inject), Some(own)) = (&self.inject, own) {
            let added = inject.build(b, x, own);
            x = b.add("own", x, added);
        }
        self.output_scale.map_or(x, |factor| b.scale("output_scale", x, factor))
    }
}

impl Architecture for Decoder {
    fn build(&self, b: &mut Builder, batch: &Batch) -> Tensor {
        if let (Some(head), Results::Draft) = (&self.head, batch.results) {
            return head.build(b, batch);
        }
        let first = self.embedding.build(b, batch);
        let vectors = self.per_layer.as_ref().map(|own| own.build(b, batch, first));
        let mut x = first;
        for (i, layer) in self.layers.iter().enumerate() {
            if let Some(norm) = self.between.filter(|_| i > 0 && i % self.spec.sizes.layers == 0) {
                b.at(format!("{i}"));
                x = b.norm("again", x, &norm);
            }
            let own = vectors.map(|vectors| of_layer(vectors, i % self.spec.sizes.layers));
            x = layer.build(b, batch, (&self.spec, &i.to_string()), Entering { x, first, own });
            if let Some(rows) = batch.ports.vectors.filter(|_| i < self.spec.deepstack) {
                let hidden = self.spec.sizes.hidden;
                b.at(format!("{i}"));
                x = b.add("deepstack", x, rows.values.narrow(0, (i + 1) * hidden, hidden));
            }
        }
        match &self.head {
            Some(head) if batch.results == Results::Logits => {
                b.at("output");
                let normed = self.output.normed(b, x);
                head.catch_up(b, batch, [x, normed]);
                self.output.build_normed(b, batch, normed)
            }
            _ => self.output.build(b, batch, x),
        }
    }
}
