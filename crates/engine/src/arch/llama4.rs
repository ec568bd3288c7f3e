//! Llama 4: three of four layers see their chunk of the text alone and turn their heads; in the others, queries grow with the
//! position. The weight of an expert multiplies what it reads.

use kiln_kernels::rope::RopeStyle;
use kiln_kernels::topk_moe::{Gate, Shares};

use super::Architecture;
use crate::Error;
use crate::blocks::attend::Temperature;
use crate::blocks::attention::HeadNorm;
use crate::blocks::decoder::{Decoder, Spec};
use crate::blocks::moe::MoeSpec;
use crate::blocks::norms::NormKind;
use crate::model::Loader;
use crate::model::parts::{Factors, window_base, windows};

/// Positions of a chunk, whatever the file says.
const CHUNK: usize = 8192;

pub(super) fn load(l: &mut Loader<'_>) -> Result<Box<dyn Architecture>, Error> {
    let keys = l.keys;
    let mut spec = Spec::rotary(l, NormKind::Rms, RopeStyle::Normal, Factors::Usual)?;
    let layers = spec.sizes.layers;
    keys.count("attention.sliding_window", 1 << 24)?;
    let counts = MoeSpec::required_counts(l)?;
    let chunked = windows(l, layers, CHUNK, 4)?;
    let base = keys.float("rope.freq_base", 10000.0, [1.0, 1e12])?;
    let base = window_base(l, base)?;
    spec.each_attention(|i, attention| {
        if chunked[i].is_some() {
            attention.rope = attention.rope.as_ref().map(|rope| rope.with_base(base));
            attention.chunk = Some(CHUNK);
        }
        if (i + 1) % 4 != 0 {
            attention.norm_after_rope = true;
            attention.head_norm = if counts[0] == 128 { HeadNorm::None } else { HeadNorm::BareRms };
        } else {
            attention.rope = None;
            attention.temperature = Some(Temperature { scale: 0.1, length: CHUNK, offset: 1 });
        }
    });
    let step = keys.count("interleave_moe_layer_step", layers)?;
    let width = keys.count("expert_feed_forward_length", 1 << 20)?;
    let moe = MoeSpec {
        gating: Gate::Sigmoid,
        shares: Shares::Gates,
        weighs_input: true,
        shared: Some(width),
        ..MoeSpec::usual(spec.sizes.hidden, width, counts)
    };
    spec.moe_where(|i| ((i + 1) % step == 0).then_some(moe));
    Decoder::load(l, spec)
}
