//! What `mul_mm` can take in: a norm or a gate that makes its activations, bias, factor and residual after it, and more matrices
//! for the same activations.

use kiln_gguf::TensorType;

use super::{Call, Prologue};
use crate::binary::Operator;
use crate::mul_mat::{Epilogue, FusedProduct, Norm, Product, other_summand};
use crate::mul_mat_vec;
use crate::tensor::Tensor;

impl Call {
    /// The same product as a call of `mul_mat_vec` that has nothing but an epilogue.
    pub fn of_neutral(call: &mul_mat_vec::Call) -> Option<Call> {
        let bare = call.norm.is_none()
            && call.function.is_none()
            && call.gate.is_none()
            && call.factor.is_none()
            && call.others.is_empty()
            && call.experts.is_none_or(|experts| experts.weights.is_none() && !experts.summed);
        let mut bias = call.epilogue.bias;
        if call.experts.is_some() {
            let [_, m, experts, _] = call.product.a.shape;
            bias = bias.map(|bias| bias.reshape([m, experts, 1, 1]));
        }
        let epilogue = Epilogue { bias, ..call.epilogue };
        let ids = call.experts.map(|experts| experts.ids);
        bare.then(|| Call { epilogue, ids, exact: call.exact, ..Call::plain(call.product) })
    }

    /// This product with `next` as its last part.
    pub(crate) fn after(&self, next: &crate::Call) -> Option<Call> {
        if !self.others.is_empty() || self.epilogue.residual.is_some() {
            return None;
        }
        let (d, epilogue) = (self.product.d, self.epilogue);
        let to =
            |d: Tensor, epilogue: Epilogue| Call { product: Product { d, ..self.product }, epilogue, ..self.clone() };
        match next {
            crate::Call::Scale(s) if s.x == d && s.bias == 0.0 && epilogue.bias.is_none() => {
                Some(to(s.dst, Epilogue { scale: epilogue.scale * s.factor, ..epilogue }))
            }
            crate::Call::Binary(b) if b.operator == Operator::Add => {
                if b.a == d && b.b.len() == d.shape[0] && b.b.shape[0] == d.shape[0] && d.rows() > 1 {
                    let fits = self.ids.is_none() && epilogue.bias.is_none();
                    return fits.then(|| to(b.dst, Epilogue { bias: Some(b.b), ..epilogue }));
                }
                Some(to(b.dst, Epilogue { residual: Some(other_summand(b, &d)?), ..epilogue }))
            }
            _ => None,
        }
    }

    /// This product of activations that `previous` makes.
    pub(crate) fn with_prologue(&self, previous: &crate::Call) -> Option<Call> {
        if self.prologue.is_some() {
            return None;
        }
        let with = |b: Tensor, prologue: Prologue| Call {
            product: Product { b, ..self.product },
            prologue: Some(prologue),
            ..self.clone()
        };
        match previous {
            crate::Call::RmsNorm(norm) if norm.y == self.product.b => {
                Some(with(norm.x, Prologue::Norm(Norm { weight: norm.weight, eps: norm.eps })))
            }
            crate::Call::Glu(glu) if glu.dst == self.product.b && glu.kind.function().is_some() => {
                Some(with(glu.gate, Prologue::Gate { kind: glu.kind, up: glu.up }))
            }
            _ => None,
        }
    }

    /// This product and another one of the same activations.
    pub(crate) fn beside(&self, other: &Call) -> Option<Call> {
        let plain = |call: &Call| call.epilogue.residual.is_none();
        // Matrix units do not take F32, and a call has one path: a small router would draw large matrices onto the scalar one.
        let is_f32 = |call: &Call| call.product.a.ty == TensorType::F32;
        let same = self.product.b == other.product.b
            && self.ids == other.ids
            && (self.ids.is_none() || self.product.a.shape[2] == other.product.a.shape[2])
            && self.prologue == other.prologue
            && self.epilogue.scale == other.epilogue.scale
            && self.exact == other.exact
            && self.half_sums == other.half_sums
            && is_f32(self) == is_f32(other)
            && other.others.is_empty();
        if !(plain(self) && plain(other) && same) {
            return None;
        }
        let mut call = self.clone();
        call.others.push(FusedProduct { a: other.product.a, d: other.product.d, bias: other.epilogue.bias });
        Some(call)
    }
}
