//! What RWKV-6, RWKV-7 and their hybrids with transformers share: the frame around the layers, the state that takes the
//! place of a cache, the shift by one token, and the second half of a layer. The time mix is in files of its own.

use kiln_gguf::TensorType;
use kiln_kernels::glu::Gate;
use kiln_kernels::tensor::Tensor;
use kiln_kernels::token_mix;
use kiln_kernels::unary::Function;

use super::Batch;
use crate::Error;
use crate::blocks::mlp::{Activation, Mlp, MlpSpec};
use crate::blocks::norms::NormKind;
use crate::blocks::output::{Embedding, Head, Output};
use crate::model::{Loader, MOST_LAYERS};
use crate::plan::{Builder, Linear, Norm};

/// The name of the norm of each head.
const HEAD_NORM: &str = "time_mix_ln";
/// Added to the variance in the norm of each head.
pub(super) const HEAD_EPS: f32 = 64e-5;
/// Most of a rank of a pair of small matrices.
pub(super) const MOST_RANK: usize = 1 << 14;

/// Sizes that all of them have.
#[derive(Clone, Copy)]
pub(super) struct Sizes {
    /// Whether only attention was replaced: norms and feed-forward layers are those of a transformer.
    pub(super) hybrid: bool,
    pub(super) layers: usize,
    pub(super) hidden: usize,
    pub(super) heads: usize,
    pub(super) kv_heads: usize,
    pub(super) head_dim: usize,
    feed_forward: usize,
    norm: NormKind,
    eps: f32,
    /// After so many layers the residual stream is halved; 0 for never.
    rescale_every: usize,
}

impl Sizes {
    pub(super) fn read(l: &Loader<'_>, hybrid: bool) -> Result<Sizes, Error> {
        let keys = l.keys;
        let hidden = keys.count("embedding_length", 1 << 17)?;
        let head_dim = keys.count("wkv.head_size", 1024)?;
        let fits = hidden.is_multiple_of(head_dim);
        keys.require(fits, "wkv.head_size", head_dim, &format!("a divisor of the width {hidden}"))?;
        let heads = hidden / head_dim;
        // Files of models without grouped heads say 0.
        let kv_heads = keys.count_opt("attention.head_count_kv", heads)?.unwrap_or(heads);
        let fits = heads.is_multiple_of(kv_heads);
        keys.require(fits, "attention.head_count_kv", kv_heads, &format!("a divisor of the {heads} heads"))?;
        let norm = if hybrid { NormKind::Rms } else { NormKind::Layer };
        Ok(Sizes {
            hybrid,
            layers: keys.count("block_count", MOST_LAYERS)?,
            hidden,
            heads,
            kv_heads,
            head_dim,
            feed_forward: keys.count("feed_forward_length", 1 << 20)?,
            norm,
            eps: keys.float(norm.eps_key(), 1e-5, [0.0, 1.0])?,
            rescale_every: keys.count_opt("rescale_every_n_layers", MOST_LAYERS)?.unwrap_or(0),
        })
    }

    /// The norm of tokens before a half of a layer.
    pub(super) fn norm(&self, l: &mut Loader<'_>, name: &str) -> Result<Norm, Error> {
        self.norm.load(l, name, self.hidden, self.eps)
    }

    /// `[hidden, tokens]` as `[head_dim, heads, tokens]`.
    pub(super) fn by_head(&self, t: Tensor) -> Tensor {
        t.reshape([self.head_dim, self.heads, t.len() / self.hidden, 1])
    }

    /// A vector for the last token's input of a mix.
    pub(super) fn shift_state(&self, l: &mut Loader<'_>, layer: usize, name: &str) -> Tensor {
        l.state(&format!("{layer}.{name}"), &[self.hidden])
    }

    /// The matrix of each head.
    pub(super) fn wkv_state(&self, l: &mut Loader<'_>, layer: usize) -> Tensor {
        l.state(&format!("{layer}.wkv_state"), &[self.head_dim, self.head_dim, self.heads])
    }

    /// Weight and bias of the norm of every head, which hybrids may not have.
    pub(super) fn head_norm(&self, l: &mut Loader<'_>) -> Result<Option<[Tensor; 2]>, Error> {
        let weight = format!("{HEAD_NORM}.weight");
        if self.hybrid && !l.has(&weight) {
            return Ok(None);
        }
        let weight = l.vector(&weight, &[self.hidden])?;
        Ok(Some([weight, l.vector(&format!("{HEAD_NORM}.bias"), &[self.hidden])?]))
    }
}

/// A model without its layers.
pub(super) struct Frame {
    pub(super) sizes: Sizes,
    embedding: Embedding,
    output: Output,
}

impl Frame {
    pub(super) fn load(l: &mut Loader<'_>, sizes: Sizes) -> Result<Frame, Error> {
        let vocab = l.vocab()?;
        let mut embedding = Embedding::load(l, sizes.hidden, vocab)?;
        if !sizes.hybrid {
            embedding.norm = Some(sizes.norm(l, "token_embd_norm")?);
        }
        let output = Output::load(l, (sizes.norm, sizes.eps), Head::Tied, &embedding)?;
        Ok(Frame { sizes, embedding, output })
    }

    /// Embeddings, what `layer` makes of the residual stream layer by layer, logits.
    pub(super) fn build(
        &self,
        b: &mut Builder,
        batch: &Batch,
        mut layer: impl FnMut(&mut Builder, usize, Tensor) -> Tensor,
    ) -> Tensor {
        let mut x = self.embedding.build(b, batch);
        for i in 0..self.sizes.layers {
            x = layer(b, i, x);
            // Keeps the stream inside the range of F16 where the model was trained so.
            let every = self.sizes.rescale_every;
            if every != 0 && (i + 1).is_multiple_of(every) {
                b.at(format!("{i}"));
                x = b.scale("rescale", x, 0.5);
            }
        }
        self.output.build(b, batch, x)
    }
}

/// The second half of a layer.
pub(super) struct FeedForward {
    norm: Norm,
    kind: Kind,
}

enum Kind {
    /// RWKV: a blend of each token with the one before, widened, squared where positive, and gated in RWKV-6.
    ChannelMix { last: Tensor, lerp: Tensor, key: Linear, value: Linear, receptance: Option<(Tensor, Linear)> },
    /// Hybrids: the gated layer of transformers.
    Mlp(Mlp),
}

impl FeedForward {
    /// Reads it; `gated` says whether a channel mix has a receptance.
    pub(super) fn load(l: &mut Loader<'_>, sizes: &Sizes, layer: usize, gated: bool) -> Result<FeedForward, Error> {
        let Sizes { hidden, feed_forward: width, .. } = *sizes;
        if sizes.hybrid {
            let activation = Activation::Gated(Gate::Swiglu);
            let spec = MlpSpec { bias: true, ..MlpSpec::plain(hidden, width, activation) };
            return Ok(FeedForward { norm: sizes.norm(l, "ffn_norm")?, kind: Kind::Mlp(Mlp::load(l, &spec)?) });
        }
        let receptance = if gated {
            let lerp = l.vector("channel_mix_lerp_r.weight", &[hidden])?;
            Some((lerp, l.linear("channel_mix_receptance", &[hidden, hidden])?))
        } else {
            None
        };
        let kind = Kind::ChannelMix {
            last: sizes.shift_state(l, layer, "channel_shift"),
            lerp: l.vector("channel_mix_lerp_k.weight", &[hidden])?,
            key: l.linear("channel_mix_key", &[hidden, width])?,
            value: l.linear("channel_mix_value", &[width, hidden])?,
            receptance,
        };
        Ok(FeedForward { norm: sizes.norm(l, "attn_norm_2")?, kind })
    }

    /// Adds the steps; gives the residual stream after it.
    pub(super) fn build(&self, b: &mut Builder, batch: &Batch, i: usize, x: Tensor) -> Tensor {
        match &self.kind {
            Kind::Mlp(mlp) => {
                // x += D (silu(G x) * U x)
                b.at(format!("{i}.feed_forward"));
                let normed = b.norm("norm", x, &self.norm);
                let branch = mlp.build(b, normed);
                b.add("residual", x, branch)
            }
            Kind::ChannelMix { last, lerp, key, value, receptance } => {
                // x += sigmoid(R xr) * (V relu(K xk)^2), without the gate in RWKV-7.
                b.at(format!("{i}.channel_mix"));
                let normed = b.norm("norm", x, &self.norm);
                let another = receptance.as_ref().map(|(lerp, _)| *lerp);
                let blends = Blends { before: *last, lerp: *lerp, another, extra: None, keep: true };
                let mixed = blends.build(b, batch, "mix", normed);
                // Products of different blends do not wait for each other.
                let wide = b.linear("k", mixed.narrow(2, 0, 1), key);
                let wide = b.function("k.relu2", wide, Function::Relu2);
                let r = receptance.as_ref().map(|(_, receptance)| b.linear("r", mixed.narrow(2, 1, 1), receptance));
                let branch = b.linear("value", wide, value);
                match r {
                    Some(r) => b.gated_add("gate", x, (r, Function::Sigmoid), branch),
                    None => b.add("residual", x, branch),
                }
            }
        }
    }
}

/// Blends of each token with the one before it.
pub(super) struct Blends {
    /// The token before the first one.
    pub(super) before: Tensor,
    /// How far the blends lean to the token before, `[hidden, 1, groups]`.
    pub(super) lerp: Tensor,
    /// The same for one more blend.
    pub(super) another: Option<Tensor>,
    /// Added to that for each token.
    pub(super) extra: Option<Tensor>,
    /// Whether the last token is kept for the next batch.
    pub(super) keep: bool,
}

impl Blends {
    /// `[hidden, tokens, groups]`.
    pub(super) fn build(&self, b: &mut Builder, batch: &Batch, name: &str, x: Tensor) -> Tensor {
        let [hidden, tokens, ..] = x.shape;
        let groups = self.lerp.len() / hidden + usize::from(self.another.is_some());
        let y = b.fresh(name, TensorType::F32, [hidden, tokens, groups, 1]);
        let Blends { before, lerp, another, extra, keep } = *self;
        let (sequences, slots) = batch.recurrence();
        b.step(name, token_mix::Call { x, norm: None, before, lerp, another, extra, y, keep, sequences, slots });
        y
    }
}
