//! Batch-invariant plans: no GEMM goes to `mul_mm`. The pass cuts it into `mul_mat_vec` calls of as many activations as a device takes at
//! once; each activation uses the kernel and reduction order of N = 1.

use kiln_kernels::Call;
use kiln_kernels::mul_mat::MAX_GEMV_N;

use super::Target;
use crate::plan::{Plan, Step};

pub(super) fn run(plan: &mut Plan, target: &Target) {
    if !target.batch_invariant || target.caps.is_none() {
        return;
    }
    let mut steps = Vec::with_capacity(plan.steps.len());
    for step in std::mem::take(&mut plan.steps) {
        let Call::MulMatVec(call) = &step.call else {
            steps.push(step);
            continue;
        };
        let columns = call.product.b.shape[1];
        // Products of experts take any N, one at a time.
        if columns <= MAX_GEMV_N || call.experts.is_some() {
            steps.push(step);
            continue;
        }
        for first in (0..columns).step_by(MAX_GEMV_N) {
            let part = call.columns(first, MAX_GEMV_N.min(columns - first));
            steps.push(Step { label: format!("{}[{first}]", step.label), call: part.into() });
        }
    }
    plan.steps = steps;
}
