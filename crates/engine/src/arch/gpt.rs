//! The family of GPT-2: layer norms with biases, a plain feed-forward layer with GELU, biases everywhere. GPT-2 and StarCoder
//! learn a vector for each position, StarCoder 2, CodeShell and GPT-NeoX turn heads, Bloom and MPT lean scores by distance.

use kiln_kernels::rope::RopeStyle;
use kiln_kernels::unary::Function;

use super::Architecture;
use crate::Error;
use crate::blocks::attention::HeadNorm;
use crate::blocks::decoder::{Decoder, Layout, Spec};
use crate::blocks::mlp::Activation;
use crate::blocks::norms::NormKind;
use crate::blocks::output::Head;
use crate::model::Loader;
use crate::model::parts::Factors;

/// Steepness of Bloom's lean.
const BLOOM_BIAS: f32 = 8.0;

fn plain(l: &mut Loader<'_>, norm: NormKind) -> Result<Spec, Error> {
    let mut spec = Spec::plain(l, norm)?;
    spec.activation = Activation::Plain(Function::Gelu);
    Ok(spec)
}

fn rotary(l: &mut Loader<'_>) -> Result<Spec, Error> {
    let mut spec = Spec::rotary(l, NormKind::Layer, RopeStyle::Neox, Factors::Unused)?;
    spec.activation = Activation::Plain(Function::Gelu);
    Ok(spec)
}

pub(super) fn load_learnt(l: &mut Loader<'_>) -> Result<Box<dyn Architecture>, Error> {
    let mut spec = plain(l, NormKind::Layer)?;
    spec.learnt_positions = true;
    Decoder::load(l, spec)
}

pub(super) fn load_rotary(l: &mut Loader<'_>) -> Result<Box<dyn Architecture>, Error> {
    let spec = rotary(l)?;
    Decoder::load(l, spec)
}

pub(super) fn load_neox(l: &mut Loader<'_>) -> Result<Box<dyn Architecture>, Error> {
    let mut spec = rotary(l)?;
    spec.head = Head::Own;
    if l.keys.flag("use_parallel_residual", true)? {
        spec.layout = Layout::ParallelTwoNorms;
    }
    Decoder::load(l, spec)
}

pub(super) fn load_bloom(l: &mut Loader<'_>) -> Result<Box<dyn Architecture>, Error> {
    let mut spec = plain(l, NormKind::Layer)?;
    spec.embedding_norm = true;
    spec.each_attention(|_, attention| attention.max_bias = BLOOM_BIAS);
    Decoder::load(l, spec)
}

pub(super) fn load_mpt(l: &mut Loader<'_>) -> Result<Box<dyn Architecture>, Error> {
    let mut spec = plain(l, NormKind::LayerMaybeBias)?;
    spec.learnt_positions = l.has("position_embd.weight");
    let max_bias = l.keys.factor("attention.max_alibi_bias")?.unwrap_or(0.0);
    let clamp = l.keys.factor("attention.clamp_kqv")?;
    l.layer(0);
    // Keys are normed only together with queries.
    let head_norm = if l.has("attn_q_norm.weight") { HeadNorm::WholeLayerMaybe } else { HeadNorm::None };
    spec.each_attention(|_, attention| {
        (attention.max_bias, attention.clamp, attention.head_norm) = (max_bias, clamp, head_norm);
    });
    Decoder::load(l, spec)
}
