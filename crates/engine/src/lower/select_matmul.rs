//! Wide GEMMs go to `mul_mm`, skinny ones stay with `mul_mat_vec`. In batch-invariant plans all stay there: each activation vector, and the
//! attention of each sequence, uses the kernels of a batch of one.

use kiln_kernels::{Call, mul_mm};

use super::Target;
use crate::plan::Plan;

pub(super) fn run(plan: &mut Plan, target: &Target) {
    for step in &mut plan.steps {
        if let Call::FlashAttention(call) = &mut step.call {
            call.batch_invariant = target.batch_invariant;
        }
        let Call::MulMatVec(call) = &mut step.call else { continue };
        if target.batch_invariant {
            call.batch_invariant = true;
            continue;
        }
        let b = &call.product.b;
        let columns = if call.experts.is_some() { b.shape[2] } else { b.shape[1] };
        let used = call.experts.map(|experts| experts.ids.shape[0]);
        if target.is_skinny(&call.product, columns, used) {
            continue;
        }
        if let Some(many) = mul_mm::Call::of_neutral(call).map(Call::from).filter(|many| target.runs(many)) {
            step.call = many;
        }
    }
}
