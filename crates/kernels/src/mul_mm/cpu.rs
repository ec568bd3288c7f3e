//! `mul_mm` on the CPU: the product of `mul_mat_vec`, which takes any number of columns there.

use super::Call;
use crate::host::HostMemory;
use crate::mul_mat_vec::{self, Experts};

/// Computes the result of the call.
pub(super) fn compute(call: &Call, memory: &mut HostMemory) {
    let experts = call.ids.map(|ids| Experts { ids, weights: None });
    let plain = mul_mat_vec::Call::plain(call.product);
    let (epilogue, others) = (call.epilogue, call.others.clone());
    mul_mat_vec::cpu::compute(&mul_mat_vec::Call { epilogue, others, experts, ..plain }, memory);
}
