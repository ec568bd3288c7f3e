//! What `wkv7` can take in: the mix of heads after it, with the bonus of the token itself.

use super::{Call, Mix};
use crate::head_mix;

impl Call {
    /// This recurrence with the mix of its heads.
    pub(crate) fn after(&self, next: &crate::Call) -> Option<Call> {
        let crate::Call::HeadMix(mix) = next else { return None };
        let bonus = mix.bonus?;
        let own = [bonus.r, bonus.k, bonus.v] == [self.r, self.k, self.v];
        let fits = own && mix.x == self.y && self.mix.is_none();
        let heads = head_mix::Mix { weight: mix.weight, bias: mix.bias, eps: mix.eps, gate: mix.gate };
        fits.then_some(Call { y: mix.y, mix: Some(Mix { heads, bonus: bonus.weight }), ..*self })
    }
}
