//! Command R: both halves of a layer side by side on one layer norm without a bias; logits have a factor. Command R7B (Cohere
//! 2): heads are turned in layers with a window alone.

use kiln_kernels::rope::RopeStyle;

use super::Architecture;
use crate::Error;
use crate::blocks::attention::HeadNorm;
use crate::blocks::decoder::{Decoder, Layout, Spec};
use crate::blocks::norms::NormKind;
use crate::blocks::output::Head;
use crate::model::Loader;
use crate::model::parts::{Factors, windows};

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
    spec.scaled = true;
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
