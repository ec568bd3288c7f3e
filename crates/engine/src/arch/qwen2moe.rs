//! Qwen 2 with experts: weights are the router's shares as they are, and a gated expert that all tokens share stands beside.

use kiln_kernels::rope::RopeStyle;
use kiln_kernels::topk_moe::Shares;

use super::Architecture;
use crate::Error;
use crate::blocks::decoder::{Decoder, Spec};
use crate::blocks::moe::MoeSpec;
use crate::blocks::norms::NormKind;
use crate::blocks::output::Head;
use crate::model::Loader;
use crate::model::parts::{Factors, expert_width};

pub(super) fn load(l: &mut Loader<'_>) -> Result<Box<dyn Architecture>, Error> {
    let mut spec = Spec::rotary(l, NormKind::Rms, RopeStyle::Neox, Factors::Unused)?;
    spec.head = Head::Own;
    let counts = MoeSpec::required_counts(l)?;
    let width = expert_width(l, &spec.sizes, counts)?;
    let shared = l.keys.count_opt("expert_shared_feed_forward_length", 1 << 20)?;
    let shared = Some(shared.unwrap_or(spec.sizes.feed_forward[0]));
    let usual = MoeSpec::usual(spec.sizes.hidden, width, counts);
    spec.moe = Some(MoeSpec { shares: Shares::Gates, shared, ..usual });
    Decoder::load(l, spec)
}
