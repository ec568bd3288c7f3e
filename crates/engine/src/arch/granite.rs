//! Granite and MiniCPM: Llama with factors on the embeddings, on what each half of a layer adds, on scores and on logits.

use kiln_kernels::rope::RopeStyle;

use super::{Architecture, llama};
use crate::Error;
use crate::blocks::decoder::{Decoder, Spec};
use crate::blocks::moe::MoeSpec;
use crate::blocks::norms::NormKind;
use crate::model::Loader;
use crate::model::parts::Factors;

fn plain(l: &mut Loader<'_>) -> Result<Spec, Error> {
    let mut spec = Spec::rotary(l, NormKind::Rms, RopeStyle::Normal, Factors::Usual)?;
    spec.moe = llama::experts(l, &spec)?.map(|moe| MoeSpec { scaled: false, ..moe });
    Ok(spec)
}

pub(super) fn load(l: &mut Loader<'_>) -> Result<Box<dyn Architecture>, Error> {
    // Some models are trained without positions, and say so here.
    let turned = l.keys.flag("rope.scaling.finetuned", true)?;
    scaled(l, turned)
}

pub(super) fn load_moe(l: &mut Loader<'_>) -> Result<Box<dyn Architecture>, Error> {
    scaled(l, true)
}

fn scaled(l: &mut Loader<'_>, turned: bool) -> Result<Box<dyn Architecture>, Error> {
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
    Decoder::load(l, spec)
}

pub(super) fn load_minicpm(l: &mut Loader<'_>) -> Result<Box<dyn Architecture>, Error> {
    let mut spec = plain(l)?;
    let (layers, hidden) = (spec.sizes.layers as f32, spec.sizes.hidden as f32);
    spec.embedding_scale = l.keys.factor("embedding_scale")?.unwrap_or(12.0);
    spec.residual_scale = l.keys.factor("residual_scale")?.unwrap_or(1.4 / layers.sqrt());
    spec.logit_scale = 1.0 / l.keys.factor("logit_scale")?.unwrap_or(256.0 / hidden);
    Decoder::load(l, spec)
}
