//! BERT and its kin: every token sees the whole text, and the stream is normed after each half of a layer. Tokens get the vector of
//! a kind; positions are learnt, turned or lean on scores.

use kiln_kernels::glu::Gate;
use kiln_kernels::rope::RopeStyle;
use kiln_kernels::topk_moe::Shares;
use kiln_kernels::unary::Function;

use super::Architecture;
use crate::Error;
use crate::blocks::attention::HeadNorm;
use crate::blocks::decoder::{Decoder, Layout, Spec};
use crate::blocks::mlp::Activation;
use crate::blocks::moe::MoeSpec;
use crate::blocks::norms::NormKind;
use crate::model::parts::Factors;
use crate::model::{Loader, MOST_LAYERS};

type Loaded = Result<Box<dyn Architecture>, Error>;

fn outer(mut spec: Spec) -> Spec {
    spec.layout = Layout::Outer;
    (spec.attention_post, spec.ffn_post) = ("attn_output_norm", "layer_output_norm");
    (spec.token_kinds, spec.embedding_norm) = (true, true);
    spec.activation = Activation::Plain(Function::Gelu);
    spec
}

fn turned(l: &mut Loader<'_>) -> Result<Spec, Error> {
    Ok(outer(Spec::rotary(l, NormKind::Layer, RopeStyle::Neox, Factors::Unused)?))
}

/// BERT, and RoBERTa as converters write it: learnt positions.
pub(super) fn load(l: &mut Loader<'_>) -> Loaded {
    let mut spec = outer(Spec::plain(l, NormKind::Layer)?);
    spec.learnt_positions = true;
    Decoder::load(l, spec)
}

/// Jina 3: BERT with rotary positions.
pub(super) fn rotary(l: &mut Loader<'_>) -> Loaded {
    let spec = turned(l)?;
    Decoder::load(l, spec)
}

/// Nomic: rotary positions and gates.
pub(super) fn nomic(l: &mut Loader<'_>) -> Loaded {
    let mut spec = turned(l)?;
    spec.activation = Activation::Gated(Gate::Swiglu);
    Decoder::load(l, spec)
}

/// Nomic with experts in every so many layers, from the second on.
pub(super) fn nomic_moe(l: &mut Loader<'_>) -> Loaded {
    let mut spec = turned(l)?;
    let every = l.keys.count_opt("moe_every_n_layers", MOST_LAYERS)?;
    let counts = MoeSpec::required_counts(l)?;
    let moe = MoeSpec {
        shares: Shares::Gates,
        plain: Some(Function::Gelu),
        ..MoeSpec::usual(spec.sizes.hidden, spec.sizes.feed_forward[0], counts)
    };
    spec.moe_where(|i| every.filter(|every| i % every == 1).map(|_| moe));
    Decoder::load(l, spec)
}

/// Jina 2: scores lean by distance; some files have norms of queries and keys, or one more norm after attention.
pub(super) fn jina2(l: &mut Loader<'_>) -> Loaded {
    let mut spec = outer(Spec::plain(l, NormKind::Layer)?).with_head_norm(HeadNorm::WholeLayerMaybe);
    spec.maybe_second_norm = true;
    spec.each_attention(|_, attention| attention.max_bias = 8.0);
    l.layer(0);
    let twice = l.shape("ffn_up.weight").is_some_and(|shape| shape[1] == 2 * spec.sizes.feed_forward[0]);
    spec.activation = match (l.has("ffn_gate.weight"), twice) {
        (true, _) => Activation::Gated(Gate::Geglu),
        (false, true) => Activation::GatedFused(Gate::Geglu),
        (false, false) => Activation::Plain(Function::Gelu),
    };
    Decoder::load(l, spec)
}
