//! Which steps `kv_write` stands for.

use super::{Call, by_token};
use crate::mul_mat::Norm;
use crate::rms_norm;
use crate::rope;
use crate::set_rows;
use crate::tensor::Tensor;

/// Queries and keys with the same RoPE, keys and values written to the same rows of their caches.
pub(crate) fn of(q: &rope::Call, k: &rope::Call, [write_k, write_v]: [&set_rows::Call; 2]) -> Option<Call> {
    let v = write_v.src;
    let [head, kv_heads, tokens, _] = k.x.shape;
    let same_rope = rope::Call { x: k.x, y: k.y, ..*q } == *k;
    let keys = by_token(&k.y);
    let src = Tensor { stride: keys.stride, ..write_k.src };
    let same_rows = write_k.ids == write_v.ids && keys == src && keys.stride[..2] == write_k.src.stride[..2];
    let wide = v.shape[0].is_multiple_of(kv_heads) && v.shape[1..] == [tokens, 1, 1];
    let same_place = q.x.shape == q.y.shape && q.x.stride == q.y.stride && q.x.ty == q.y.ty;
    if !(same_rope && same_rows && wide && same_place && head > 0 && v.is_dense()) {
        return None;
    }
    let v = v.reshape([v.shape[0] / kv_heads, kv_heads, tokens, 1]);
    let q = rope::Call { y: q.x, ..*q };
    Some(Call { q, k: k.x, v, norms: None, ids: write_k.ids, k_cache: write_k.dst, v_cache: write_v.dst })
}

/// The same where queries and keys come from norms: they are normed and turned where they lay before that.
pub(crate) fn with_norms(call: &Call, q: &rms_norm::Call, k: &rms_norm::Call) -> Option<Call> {
    let in_place = |norm: &rms_norm::Call, to: &Tensor| {
        norm.y == *to && norm.x.shape == to.shape && norm.x.stride == to.stride && norm.x.ty == to.ty
    };
    let fits = call.norms.is_none() && in_place(q, &call.q.x) && in_place(k, &call.k);
    let norms = Some([q, k].map(|norm| Norm { weight: norm.weight, eps: norm.eps }));
    let turn = rope::Call { x: q.x, y: q.x, ..call.q };
    fits.then_some(Call { q: turn, k: k.x, norms, ..*call })
}
