//! What `token_mix` can take in: the layer norm before it.

use super::{Call, Norm};

impl Call {
    /// The blends of columns that `previous` norms. The normed columns are written too if they are `kept`.
    pub(crate) fn before(&self, previous: &crate::Call, kept: bool) -> Option<Call> {
        let crate::Call::Norm(norm) = previous else { return None };
        let fits = norm.y == self.x && self.norm.is_none();
        let (weight, bias) = (norm.weight.filter(|_| fits)?, norm.bias?);
        let norm_first = Norm { weight, bias, eps: norm.eps, y: kept.then_some(self.x) };
        Some(Call { x: norm.x, norm: Some(norm_first), ..*self })
    }
}
