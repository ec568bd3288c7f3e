//! What `mul_mat_vec` can take in: the norm before it, what follows it in the order of its fields, a second matrix with a
//! gate between them, and more matrices for the same activations.

use super::{Call, Experts, Factor, FusedProduct, Gated, Norm};
use crate::binary::Operator;
use crate::glu;
use crate::mul_mat::{Epilogue, Product, other_summand};
use crate::tensor::Tensor;

impl Call {
    /// Whether nothing follows the sum of product and bias yet.
    fn ends_with_bias(&self) -> bool {
        let weighted = self.experts.is_some_and(|experts| experts.weights.is_some() || experts.summed);
        self.function.is_none()
            && self.gate.is_none()
            && self.factor.is_none()
            && self.epilogue.residual.is_none()
            && self.others.is_empty()
            && !weighted
    }

    /// This product with `next` as its last part.
    pub(crate) fn after(&self, next: &crate::Call) -> Option<Call> {
        let d = self.product.d;
        let to = |d: Tensor| Product { d, ..self.product };
        let open = self.ends_with_bias();
        let Call { epilogue, .. } = *self;
        match next {
            crate::Call::Scale(s) if s.x == d && s.bias == 0.0 && open && epilogue.bias.is_none() => {
                let epilogue = Epilogue { scale: epilogue.scale * s.factor, ..epilogue };
                Some(Call { product: to(s.dst), epilogue, ..self.clone() })
            }
            crate::Call::Unary(u) if u.x == d && open => {
                Some(Call { product: to(u.dst), function: Some(u.function), ..self.clone() })
            }
            crate::Call::Binary(b) if b.operator == Operator::Mul && b.a == d => {
                let experts = self.experts.filter(|experts| experts.weights.is_none() && !experts.summed)?;
                let fits = self.factor.is_none() && epilogue.residual.is_none();
                let [_, used, tokens, _] = d.shape;
                let fits = fits && b.b.shape == [1, used, tokens, 1] && b.b.is_dense();
                let weights = Some(b.b).filter(|_| fits)?.reshape([used, tokens, 1, 1]);
                let experts = Some(Experts { weights: Some(weights), ..experts });
                Some(Call { product: to(b.dst), experts, ..self.clone() })
            }
            crate::Call::Binary(b) if b.operator == Operator::Add => {
                if b.a == d && b.b.len() == d.shape[0] && b.b.shape[0] == d.shape[0] && d.rows() > 1 {
                    let fits = open && self.experts.is_none() && epilogue.bias.is_none();
                    let epilogue = Epilogue { bias: Some(b.b), ..epilogue };
                    return fits.then(|| Call { product: to(b.dst), epilogue, ..self.clone() });
                }
                let other = other_summand(b, &d)?;
                let fits = epilogue.residual.is_none() && self.others.is_empty();
                let epilogue = Epilogue { residual: Some(other), ..epilogue };
                fits.then(|| Call { product: to(b.dst), epilogue, ..self.clone() })
            }
            crate::Call::SumRows(s) if s.x == d.permute([1, 0, 2, 3]) && s.weights.is_none() => {
                let experts = self.experts.filter(|experts| !experts.summed)?;
                let plain = self.gate.is_none() && self.function.is_none() && self.norm.is_none();
                let whole = s.dst.is_dense() && d.shape[1] == self.product.b.shape[1];
                let fits = plain && whole && epilogue.residual.is_none();
                let experts = Some(Experts { summed: true, ..experts }).filter(|_| fits)?;
                let d = s.dst.reshape([d.shape[0], d.shape[2], 1, 1]);
                Some(Call { product: to(d), experts: Some(experts), ..self.clone() })
            }
            crate::Call::GatedAdd(g) if g.y == d && g.gate != d && g.x != d => {
                let fits = self.factor.is_none() && epilogue.residual.is_none() && self.others.is_empty();
                let factor = Some(Factor { function: g.function, gate: g.gate }).filter(|_| fits)?;
                let epilogue = Epilogue { residual: Some(g.x), ..epilogue };
                Some(Call { product: to(g.dst), epilogue, factor: Some(factor), ..self.clone() })
            }
            _ => None,
        }
    }

    /// This product of activations that `previous` norms.
    pub(crate) fn before(&self, previous: &crate::Call) -> Option<Call> {
        let crate::Call::RmsNorm(norm) = previous else { return None };
        let fits = norm.y == self.product.b && self.norm.is_none();
        let product = Product { b: norm.x, ..self.product };
        fits.then(|| Call { product, norm: Some(Norm { weight: norm.weight, eps: norm.eps }), ..self.clone() })
    }

    /// This product and another one of the same activations.
    pub(crate) fn beside(&self, other: &Call) -> Option<Call> {
        let plain = |call: &Call| {
            call.function.is_none()
                && call.gate.is_none()
                && call.factor.is_none()
                && call.experts.is_none()
                && call.epilogue.residual.is_none()
        };
        let same = self.product.b == other.product.b
            && self.norm == other.norm
            && self.epilogue.scale == other.epilogue.scale
            && self.exact == other.exact
            && self.batch_invariant == other.batch_invariant
            && other.others.is_empty();
        if !(plain(self) && plain(other) && same) {
            return None;
        }
        let mut call = self.clone();
        call.others.push(FusedProduct { a: other.product.a, d: other.product.d, bias: other.epilogue.bias });
        Some(call)
    }
}

/// activation(product of `gate`) * (product of `up`).
pub(crate) fn gated(gate: &Call, up: &Call, glu: &glu::Call) -> Option<Call> {
    let same = gate.product.b == up.product.b
        && gate.norm == up.norm
        && gate.exact == up.exact
        && gate.batch_invariant == up.batch_invariant
        && gate.experts == up.experts
        && [gate, up].iter().all(|call| call.epilogue.scale == 1.0 && call.ends_with_bias());
    let fits = same && glu.kind.joins_products() && glu.gate == gate.product.d && glu.up == up.product.d;
    let product = Product { d: glu.dst, ..gate.product };
    let second = Gated { kind: glu.kind, up: up.product.a, bias: up.epilogue.bias };
    fits.then(|| Call { product, gate: Some(second), ..gate.clone() })
}
