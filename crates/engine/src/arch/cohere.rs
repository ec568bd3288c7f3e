//! Command R: both halves of a layer side by side on one layer norm without a bias; logits have a factor. Command R7B (Cohere
//! 2): heads are turned in layers with a window alone.

use kiln_kernels::rope::RopeStyle;
use kiln_kernels::topk_moe::Gate;

use super::{Architecture, experts};
use crate::Error;
use crate::blocks::attention::HeadNorm;
use crate::blocks::decoder::{Decoder, Layout, Spec};
use crate::blocks::draft_head::Handed;
use crate::blocks::mlp::Scaled;
use crate::blocks::moe::MoeSpec;
use crate::blocks::norms::NormKind;
use crate::blocks::output::Head;
use crate::model::Loader;
use crate::model::parts::{Factors, Period, Rope, windows, windows_opt};

fn plain(l: &mut Loader<'_>) -> Result<Spec, Error> {
    let mut spec = Spec::rotary(l, NormKind::LayerWeight, RopeStyle::Normal, Factors::Unused)?;
    spec.layout = Layout::Parallel;
    spec.head = Head::Embedding;
    spec.logit_scale = l.keys.factor("logit_scale")?.unwrap_or(1.0);
    Ok(spec)
}

pub(super) fn load(l: &mut Loader<'_>) -> Result<Box<dyn Architecture>, Error> {
    let mut spec = plain(l)?;
    // The largest models norm each head.
    if spec.sizes.layers >= 64 {
        spec = spec.with_head_norm(HeadNorm::LayerMaybe);
    }
    Decoder::load(l, spec)
}

pub(super) fn load2(l: &mut Loader<'_>) -> Result<Box<dyn Architecture>, Error> {
    let mut spec = plain(l)?;
    spec.scaled = Scaled::All;
    let window = l.keys.count("attention.sliding_window", 1 << 24)?;
    let windows = windows(l, spec.sizes.layers, window, 4)?;
    spec.each_attention(|i, attention| {
        attention.window = windows[i];
        if attention.window.is_none() {
            attention.rope = None;
        }
    });
    Decoder::load(l, spec)
}

/// Cohere with experts: half of the sum of chosen and shared experts counts. The first layers are turned whatever they see.
pub(super) fn load_moe(l: &mut Loader<'_>) -> Result<Box<dyn Architecture>, Error> {
    let by_square = l.keys.factor("attention.layer_norm_rms_epsilon")?.is_some();
    let norm = if by_square { NormKind::Rms } else { NormKind::LayerWeight };
    let mut spec = Spec::rotary(l, norm, RopeStyle::Normal, Factors::Unused)?;
    (spec.layout, spec.scaled) = (Layout::Parallel, Scaled::All);
    spec.logit_scale = l.keys.factor("logit_scale")?.unwrap_or(1.0);
    let windows = windows_opt(l, spec.sizes.layers, Period::First(4))?;
    let moe = experts::keyed(l, &mut spec, Gate::Sigmoid)?;
    let shared = l.keys.count_opt("expert_shared_feed_forward_length", 1 << 20)?.or(moe.shared);
    spec.moe = Some(MoeSpec { shared, factor: 0.5, scaled: true, ..moe });
    let (first, plain) = (spec.dense_layers, spec.attention[0].clone());
    let mut spec = spec.with_windows(&windows, Rope::clone);
    spec.turned_where(|i| windows[i].is_some() || i < first);
    // The head sees everything and is turned all the same.
    spec.attention.push(plain);
    spec.drafts = Some(Handed::Normed);
    Decoder::load(l, spec)
}
