//! Granite and MiniCPM: Llama with factors on the embeddings, on what each half of a layer adds, on scores and on logits.

use kiln_kernels::rope::RopeStyle;

use super::{Architecture, llama};
use crate::Error;
use crate::blocks::decoder::{Decoder, Spec};
use crate::blocks::moe::MoeSpec;
use crate::blocks::norms::NormKind;
use crate::model::Loader;
use crate::model::parts::{Factors, Rope, windows};

fn plain(l: &mut Loader<'_>) -> Result<Spec, Error> {
    let mut spec = Spec::rotary(l, NormKind::Rms, RopeStyle::Normal, Factors::Usual)?;
    spec.moe = llama::experts(l, &spec)?.map(|moe| MoeSpec { scaled: false, ..moe });
    Ok(spec)
}

pub(super) fn load(l: &mut Loader<'_>) -> Result<Box<dyn Architecture>, Error> {
    let spec = spec(l)?;
    Decoder::load(l, spec)
}

/// What Granite 4 changes about the plain decoder.
pub(super) fn spec(l: &mut Loader<'_>) -> Result<Spec, Error> {
    // Some models are trained without positions, and say so here.
    let turned = l.keys.flag("rope.scaling.finetuned", true)?;
    scaled_spec(l, turned)
}

pub(super) fn load_moe(l: &mut Loader<'_>) -> Result<Box<dyn Architecture>, Error> {
    let spec = scaled_spec(l, true)?;
    Decoder::load(l, spec)
}

/// Granite with windows: a sink for every head; the file says which layers turn their heads.
pub(super) fn load_windows(l: &mut Loader<'_>) -> Result<Box<dyn Architecture>, Error> {
    let mut spec = scaled_spec(l, true)?;
    spec.each_attention(|_, attention| attention.sinks = true);
    let layers = spec.sizes.layers;
    let window = l.keys.count("attention.sliding_window", 1 << 24)?;
    let windows = windows(l, layers, window, 1)?;
    let mut spec = spec.with_windows(&windows, Rope::clone);
    if l.keys.is_array("attention.rope_pattern") {
        let turned = l.keys.flags("attention.rope_pattern")?;
        l.keys.require(turned.len() >= layers, "attention.rope_pattern", turned.len(), "one flag for each layer")?;
        spec.turned_where(|i| turned[i]);
    }
    if let Some(moe) = &mut spec.moe {
        moe.shared_fused = true;
    }
    Decoder::load(l, spec)
}

fn scaled_spec(l: &mut Loader<'_>, turned: bool) -> Result<Spec, Error> {
    let mut spec = plain(l)?;
    spec.embedding_scale = l.keys.factor("embedding_scale")?.unwrap_or(1.0);
    spec.residual_scale = l.keys.factor("residual_scale")?.unwrap_or(1.0);
    spec.logit_scale = 1.0 / l.keys.factor("logit_scale")?.unwrap_or(1.0);
    let scale = l.keys.factor("attention.scale")?;
    spec.each_attention(|_, attention| {
        attention.scale = scale.unwrap_or(attention.scale);
        attention.rope = attention.rope.take().filter(|_| turned);
    });
    if let Some(moe) = &mut spec.moe {
        moe.shared = l.keys.count_opt("expert_shared_feed_forward_length", 1 << 20)?;
    }
    Ok(spec)
}

pub(super) fn load_minicpm(l: &mut Loader<'_>) -> Result<Box<dyn Architecture>, Error> {
    let mut spec = plain(l)?;
    let (layers, hidden) = (spec.sizes.layers as f32, spec.sizes.hidden as f32);
    spec.embedding_scale = l.keys.factor("embedding_scale")?.unwrap_or(12.0);
    spec.residual_scale = l.keys.factor("residual_scale")?.unwrap_or(1.4 / layers.sqrt());
    spec.logit_scale = 1.0 / l.keys.factor("logit_scale")?.unwrap_or(256.0 / hidden);
    Decoder::load(l, spec)
}
