//! Gemma 1 to 3: embeddings scaled by the root of the width, gates by GELU, norms before and after each half of a layer
//! (from Gemma 2 on), layers with a window, caps of scores and logits (Gemma 2), norms of heads (Gemma 3).

use kiln_kernels::glu::Gate;
use kiln_kernels::rope::RopeStyle;

use super::Architecture;
use crate::Error;
use crate::blocks::attention::HeadNorm;
use crate::blocks::decoder::{Decoder, Layout, Spec};
use crate::blocks::mlp::Activation;
use crate::blocks::norms::NormKind;
use crate::blocks::output::Head;
use crate::model::Loader;
use crate::model::parts::{Factors, window_base, windows};

/// Most that a cap may be.
const MOST_CAP: f32 = 1e6;

fn plain(l: &mut Loader<'_>) -> Result<Spec, Error> {
    let mut spec = Spec::rotary(l, NormKind::Rms, RopeStyle::Neox, Factors::Unused)?;
    spec.activation = Activation::Gated(Gate::Geglu);
    spec.embedding_scale = (spec.sizes.hidden as f32).sqrt();
    Ok(spec)
}

pub(super) fn load(l: &mut Loader<'_>) -> Result<Box<dyn Architecture>, Error> {
    let mut spec = plain(l)?;
    spec.head = Head::Embedding;
    Decoder::load(l, spec)
}

/// The factor of scores goes by the width of a head, in the largest model of a generation by that of the residual stream.
fn score_scale(spec: &mut Spec, largest: usize) {
    if spec.sizes.layers == largest {
        let width = spec.sizes.hidden / spec.sizes.heads[0];
        spec.each_attention(|_, attention| attention.scale = 1.0 / (width as f32).sqrt());
    }
}

pub(super) fn load2(l: &mut Loader<'_>) -> Result<Box<dyn Architecture>, Error> {
    let mut spec = plain(l)?;
    spec.layout = Layout::Sandwich;
    spec.head = Head::Embedding;
    score_scale(&mut spec, 46);
    spec.logit_softcap = l.keys.float("final_logit_softcapping", 30.0, [0.0, MOST_CAP])?;
    let softcap = l.keys.float("attn_logit_softcapping", 50.0, [0.0, MOST_CAP])?;
    let window = l.keys.count_opt("attention.sliding_window", 1 << 24)?.unwrap_or(4096);
    let windows = windows(l, spec.sizes.layers, window, 2)?;
    let base = l.keys.float("rope.freq_base", 10000.0, [1.0, 1e12])?;
    let base = window_base(l, base)?;
    spec.each_attention(|i, attention| {
        (attention.softcap, attention.window) = (softcap, windows[i]);
        if attention.window.is_some() {
            attention.rope = attention.rope.as_ref().map(|rope| rope.with_base(base));
        }
    });
    Decoder::load(l, spec)
}

pub(super) fn load3(l: &mut Loader<'_>) -> Result<Box<dyn Architecture>, Error> {
    let mut spec = plain(l)?.with_head_norm(HeadNorm::Rms);
    spec.layout = Layout::Sandwich;
    score_scale(&mut spec, 62);
    spec.logit_softcap = l.keys.float("final_logit_softcapping", 0.0, [0.0, MOST_CAP])?;
    let spec = with_windows3(l, spec)?;
    Decoder::load(l, spec)
}

/// Five layers of six have a window and turn heads by a base of their own.
fn with_windows3(l: &mut Loader<'_>, mut spec: Spec) -> Result<Spec, Error> {
    if let Some(window) = l.keys.count_opt("attention.sliding_window", 1 << 24)? {
        let windows = windows(l, spec.sizes.layers, window, 6)?;
        let base = window_base(l, 10000.0)?;
        spec.each_attention(|i, attention| {
            attention.window = windows[i];
            if attention.window.is_some() {
                attention.rope = attention.rope.as_ref().map(|rope| rope.unscaled(base));
            }
        });
    }
    Ok(spec)
}

/// EmbeddingGemma: Gemma 3 whose tokens see the whole text, or a window on both sides, and no vocabulary to write in.
pub(super) fn load_embedding(l: &mut Loader<'_>) -> Result<Box<dyn Architecture>, Error> {
    let mut spec = plain(l)?.with_head_norm(HeadNorm::Rms);
    (spec.layout, spec.head) = (Layout::Sandwich, Head::Nothing);
    let mut spec = with_windows3(l, spec)?;
    spec.each_attention(|_, attention| {
        (attention.causal, attention.window) = (false, attention.window.map(super::encoders::half));
    });
    Decoder::load(l, spec)
}
