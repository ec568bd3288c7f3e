//! gpt-oss: experts with biases and a bounded gate, a sink for every head, every other layer with a window.

use kiln_kernels::glu::Gate;
use kiln_kernels::rope::RopeStyle;
use kiln_kernels::topk_moe::{self, Shares};

use super::Architecture;
use crate::Error;
use crate::blocks::decoder::{Decoder, Spec};
use crate::blocks::moe::MoeSpec;
use crate::blocks::norms::NormKind;
use crate::blocks::output::Head;
use crate::model::Loader;
use crate::model::parts::{Factors, expert_width, window_base, windows};

pub(super) fn load(l: &mut Loader<'_>) -> Result<Box<dyn Architecture>, Error> {
    let mut spec = Spec::rotary(l, NormKind::Rms, RopeStyle::Neox, Factors::Unused)?;
    (spec.head, spec.ffn_norm) = (Head::Own, "post_attention_norm");
    let window = l.keys.count("attention.sliding_window", 1 << 24)?;
    let windows = windows(l, spec.sizes.layers, window, 2)?;
    let base = l.keys.float("rope.freq_base", 10000.0, [1.0, 1e12])?;
    let base = window_base(l, base)?;
    spec.each_attention(|i, attention| {
        (attention.sinks, attention.window) = (true, windows[i]);
        if windows[i].is_some() {
            attention.rope = attention.rope.as_ref().map(|rope| rope.with_base(base));
        }
    });
    let counts = MoeSpec::required_counts(l)?;
    let width = expert_width(l, &spec.sizes, counts)?;
    spec.moe = Some(MoeSpec {
        gating: topk_moe::Gate::Identity,
        shares: Shares::Softmax,
        activation: Gate::SwigluOai { alpha: 1.702, limit: 7.0 },
        ..MoeSpec::usual(spec.sizes.hidden, width, counts)
    });
    Decoder::load(l, spec)
}
