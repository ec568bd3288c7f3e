//! Models that fill in whole texts: every token sees all others. What the loop does that writes with them is in [`crate::diffusion`].

use kiln_kernels::rope::RopeStyle;
use kiln_kernels::topk_moe::Shares;

use super::Architecture;
use crate::Error;
use crate::blocks::attention::HeadNorm;
use crate::blocks::decoder::{Decoder, Spec};
use crate::blocks::moe::MoeSpec;
use crate::blocks::norms::NormKind;
use crate::blocks::output::Head;
use crate::model::Loader;
use crate::model::parts::{Factors, expert_width};

type Loaded = Result<Box<dyn Architecture>, Error>;

fn plain(l: &mut Loader<'_>, style: RopeStyle) -> Result<Spec, Error> {
    let mut spec = Spec::rotary(l, NormKind::Rms, style, Factors::Unused)?;
    spec.each_attention(|_, attention| attention.causal = false);
    l.fills();
    Ok(spec)
}

/// Dream: Qwen 2. The bias of its output does not count.
pub(super) fn dream(l: &mut Loader<'_>) -> Loaded {
    let mut spec = plain(l, RopeStyle::Neox)?;
    spec.output_bias = false;
    Decoder::load(l, spec)
}

/// LLaDA: Llama. Biases of attention's output and of the feed-forward layer do not count.
pub(super) fn llada(l: &mut Loader<'_>) -> Loaded {
    let mut spec = plain(l, RopeStyle::Normal)?;
    spec.ffn_bias = false;
    spec.each_attention(|_, attention| attention.output_bias = false);
    Decoder::load(l, spec)
}

fn experts(l: &mut Loader<'_>, head: Head, shares: Shares) -> Loaded {
    let mut spec = plain(l, RopeStyle::Neox)?.with_head_norm(HeadNorm::Rms);
    spec.head = head;
    let counts = MoeSpec::required_counts(l)?;
    let width = expert_width(l, &spec.sizes, counts)?;
    spec.moe = Some(MoeSpec { shares, ..MoeSpec::usual(spec.sizes.hidden, width, counts) });
    Decoder::load(l, spec)
}

/// LLaDA with experts.
pub(super) fn llada_moe(l: &mut Loader<'_>) -> Loaded {
    experts(l, Head::Own, Shares::Gates)
}

/// RND1: Qwen 3 with experts.
pub(super) fn rnd1(l: &mut Loader<'_>) -> Loaded {
    experts(l, Head::Tied, MoeSpec::of_sum())
}
