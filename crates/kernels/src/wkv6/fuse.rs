//! What `wkv6` can take in: the mix of heads after it.

use super::Call;
use crate::head_mix::Mix;

impl Call {
    /// This recurrence with the mix of its heads.
    pub(crate) fn after(&self, next: &crate::Call) -> Option<Call> {
        let crate::Call::HeadMix(mix) = next else { return None };
        let fits = mix.x == self.y && self.mix.is_none() && mix.bonus.is_none();
        let heads = Mix { weight: mix.weight, bias: mix.bias, eps: mix.eps, gate: mix.gate };
        fits.then_some(Call { y: mix.y, mix: Some(heads), ..*self })
    }
}
