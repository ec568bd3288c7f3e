//! OLMoE: norms over all heads of queries and of keys, experts weighed by the router's shares as they are.

use kiln_kernels::rope::RopeStyle;
use kiln_kernels::topk_moe::Shares;

use super::Architecture;
use crate::Error;
use crate::blocks::attention::HeadNorm;
use crate::blocks::decoder::{Decoder, Spec};
use crate::blocks::moe::MoeSpec;
use crate::blocks::norms::NormKind;
use crate::blocks::output::Head;
use crate::model::Loader;
use crate::model::parts::Factors;

pub(super) fn load(l: &mut Loader<'_>) -> Result<Box<dyn Architecture>, Error> {
    let spec = Spec::rotary(l, NormKind::Rms, RopeStyle::Neox, Factors::Unused)?;
    let mut spec = spec.with_head_norm(HeadNorm::WholeRms);
    spec.head = Head::Own;
    let counts = MoeSpec::required_counts(l)?;
    let usual = MoeSpec::usual(spec.sizes.hidden, spec.sizes.feed_forward[0], counts);
    spec.moe = Some(MoeSpec { shares: Shares::Gates, ..usual });
    Decoder::load(l, spec)
}
