//! OLMo: layer norms without weights. OLMo 2: norms after each half of a layer, and over all heads of queries and of keys.

use kiln_kernels::rope::RopeStyle;

use super::Architecture;
use crate::Error;
use crate::blocks::attention::HeadNorm;
use crate::blocks::decoder::{Decoder, Layout, Spec};
use crate::blocks::norms::NormKind;
use crate::blocks::output::Head;
use crate::model::Loader;
use crate::model::parts::{Factors, windows};

pub(super) fn load(l: &mut Loader<'_>) -> Result<Box<dyn Architecture>, Error> {
    let mut spec = Spec::rotary(l, NormKind::BareLayer, RopeStyle::Normal, Factors::Unused)?;
    let clamp = l.keys.factor("attention.clamp_kqv")?;
    spec.each_attention(|_, attention| attention.clamp = clamp);
    Decoder::load(l, spec)
}

pub(super) fn load2(l: &mut Loader<'_>) -> Result<Box<dyn Architecture>, Error> {
    let spec = Spec::rotary(l, NormKind::Rms, RopeStyle::Neox, Factors::Unused)?;
    let mut spec = spec.with_head_norm(HeadNorm::WholeRms);
    spec.layout = Layout::Post;
    spec.head = Head::Own;
    if let Some(window) = l.keys.count_opt("attention.sliding_window", 1 << 24)? {
        let windows = windows(l, spec.sizes.layers, window, 4)?;
        spec.each_attention(|i, attention| {
            attention.window = windows[i];
            if attention.window.is_some() {
                // Layers with a window are not stretched.
                attention.rope = attention.rope.as_ref().map(|rope| rope.unscaled(rope.params.freq_base));
            }
        });
    }
    Decoder::load(l, spec)
}
