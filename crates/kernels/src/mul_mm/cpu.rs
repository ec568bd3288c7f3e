//! `mul_mm` on the CPU: the product of `mul_mat_vec`, which takes any N there, normed ones too.

use super::{Call, Prologue};
use crate::host::HostMemory;
use crate::mul_mat_vec::{self, Experts};
use crate::operation::Operation;

/// Computes the result of the call.
pub(super) fn compute(call: &Call, memory: &mut HostMemory) {
    product(call, memory);
    call.leave(memory);
}

fn product(call: &Call, memory: &mut HostMemory) {
    if let Some(gate) = call.gate {
        return call.with_gate(gate, memory, product, |glu, memory| glu.cpu(memory));
    }
    if let Some(Prologue::Gate { .. }) = call.prologue {
        return call.with_made(memory, |made, memory| made.operation().cpu(memory), product);
    }
    if call.ids.is_some() && !call.others.is_empty() {
        return call.alone().iter().for_each(|alone| product(alone, memory));
    }
    let norm = call.prologue.and_then(Prologue::norm);
    let experts = call.ids.map(|ids| Experts { ids, weights: None, summed: false });
    let plain = mul_mat_vec::Call::plain(call.product);
    let (epilogue, others) = (call.epilogue, call.others.clone());
    mul_mat_vec::cpu::compute(&mul_mat_vec::Call { epilogue, norm, others, experts, ..plain }, memory);
}
