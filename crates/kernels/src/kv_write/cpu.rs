//! `kv_write` at the speed of the CPU: queries and keys are turned by the same angles, and keys are turned on their way to the
//! cache.

use kiln_gguf::TensorType;
use rayon::prelude::*;

use super::{Call, by_token};
use crate::host::HostMemory;
use crate::mul_mat::Norm;
use crate::rms_norm::norm_row;
use crate::rope::Angles;
use crate::tensor::Tensor;

/// Most tokens that are worth no second thread.
const FEW: usize = 8;

/// Whether the call is one of those that [`compute`] is for. How many tokens there are must not count: each has the same bits in
/// any company.
pub(super) fn fits(call: &Call) -> bool {
    // Blocks of that type are written by the rules of the shaders, in f64.
    ![call.k_cache.ty, call.v_cache.ty].contains(&TensorType::IQ4_NL)
}

/// Turns the queries and writes the caches.
pub(super) fn compute(call: &Call, memory: &mut HostMemory) {
    let angles = Angles::of(&call.q, memory);
    let ids = memory.read(&call.ids);
    let [q_norm, k_norm] = call.norms.map_or([None; 2], |norms| norms.map(Some));
    let v = by_token(&call.v);
    let from = &*memory;
    let turn = |token: usize| {
        [(&call.q.x, q_norm), (&call.k, k_norm)].map(|(x, norm)| turned(call, x, norm, &angles, token, from))
    };
    let heads: Vec<[Vec<f32>; 2]> = match ids.len() {
        ..=FEW => (0..ids.len()).map(turn).collect(),
        tokens => (0..tokens).into_par_iter().map(turn).collect(),
    };
    let mut row = vec![0.0; v.shape[0]];
    for (token, (id, [q, mut k])) in ids.into_iter().zip(heads).enumerate() {
        // A number outside of the caches drops the rows.
        if id >= 0.0 && id < call.k_cache.shape[1] as f64 {
            memory.write_cache_row(&call.k_cache, [id as usize, 0, 0], &mut k);
            memory.float_row(&v, [token, 0, 0], &mut row);
            memory.write_cache_row(&call.v_cache, [id as usize, 0, 0], &mut row);
        }
        for (head, q) in q.chunks_exact(call.q.y.shape[0]).enumerate() {
            memory.write_float_row(&call.q.y, [head, token, 0], q);
        }
    }
}

/// The heads of a token, normed and turned.
fn turned(call: &Call, x: &Tensor, norm: Option<Norm>, angles: &Angles, token: usize, memory: &HostMemory) -> Vec<f32> {
    let mut heads = vec![0.0; x.shape[0] * x.shape[1]];
    let weight = norm.and_then(|norm| norm.weight).map(|t| memory.floats(&t));
    for (i, head) in heads.chunks_exact_mut(x.shape[0]).enumerate() {
        memory.float_row(x, [i, token, 0], head);
        if let Some(norm) = norm {
            norm_row(head, weight.as_deref(), norm.eps);
        }
        angles.turn(&call.q, token, head);
    }
    heads
}
