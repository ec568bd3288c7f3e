//! Products of many columns go to `mul_mm`, those of few stay with `mul_mat_vec`. Where rows must not depend on their company, all
//! stay there: each column goes the way of one, and so does the attention of each sequence.

use kiln_kernels::{Call, mul_mm};

use super::Target;
use crate::plan::Plan;

pub(super) fn run(plan: &mut Plan, target: &Target) {
    for step in &mut plan.steps {
        if let Call::FlashAttention(call) = &mut step.call {
            call.alike = target.alike;
        }
        let Call::MulMatVec(call) = &mut step.call else { continue };
        if target.alike {
            call.alike = true;
            continue;
        }
        let b = &call.product.b;
        let columns = if call.experts.is_some() { b.shape[2] } else { b.shape[1] };
        let used = call.experts.map(|experts| experts.ids.shape[0]);
        if target.is_few(&call.product, columns, used) {
            continue;
        }
        if let Some(many) = mul_mm::Call::of_neutral(call).map(Call::from).filter(|many| target.runs(many)) {
            step.call = many;
        }
    }
}
