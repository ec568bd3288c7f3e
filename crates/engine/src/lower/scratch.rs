//! Steps get the memory they need between their dispatches. Each has its own slot; the memory pass lets them share.

use kiln_gguf::TensorType;
use kiln_kernels::{Call, gla, mul_mat_vec, wkv6, wkv7};

use super::Target;
use crate::plan::{Plan, SlotKind};

pub(super) fn run(plan: &mut Plan, target: &Target) {
    for at in 0..plan.steps.len() {
        let bytes = match &plan.steps[at].call {
            Call::MulMm(call) => call.ample_scratch_bytes(),
            // A single activation vector of usual length is rounded by every workgroup for itself.
            Call::MulMatVec(call) if target.caps.is_some() => {
                let b = &call.product.b;
                let wanted = b.rows() > 1 || b.shape[0] > target.long_activation || call.batch_invariant;
                // One that comes rounded needs none.
                if wanted && call.rounded.is_none() { mul_mat_vec::Call::scratch_bytes(b) } else { 0 }
            }
            Call::Wkv6(call) => recurrence(call.r.shape, call.sequences.count(), wkv6::scratch_bytes),
            Call::Wkv7(call) => recurrence(call.r.shape, call.sequences.count(), wkv7::scratch_bytes),
            Call::Gla(call) => recurrence(call.r.shape, call.sequences.count(), gla::scratch_bytes),
            _ => 0,
        };
        if bytes == 0 {
            continue;
        }
        let name = format!("{}.memory", plan.steps[at].label);
        let (ty, len) = match &plan.steps[at].call {
            Call::MulMm(_) => (TensorType::I32, bytes.div_ceil(4)),
            Call::MulMatVec(_) => (TensorType::I8, bytes),
            _ => (TensorType::F32, bytes.div_ceil(4)),
        };
        let memory = plan.add(&name, SlotKind::Scratch, ty, [len, 1, 1, 1]);
        match &mut plan.steps[at].call {
            Call::MulMm(call) => call.scratch = Some(memory),
            Call::MulMatVec(call) => call.scratch = Some(memory),
            Call::Wkv6(call) => call.scratch = Some(memory),
            Call::Wkv7(call) => call.scratch = Some(memory),
            Call::Gla(call) => call.scratch = Some(memory),
            _ => {}
        }
    }
}

/// Memory for the chunked form; sequences of one token have none.
fn recurrence(
    [head, heads, tokens, _]: [usize; 4],
    sequences: usize,
    bytes: fn(usize, usize, usize, usize) -> usize,
) -> usize {
    if tokens > sequences { bytes(head, heads, tokens, sequences) } else { 0 }
}
