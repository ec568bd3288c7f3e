//! Where rows must not depend on their company, no product of many columns goes to `mul_mm`: it is cut into products of as many
//! columns as a device takes at once, each of which goes the way of one.

use kiln_kernels::Call;
use kiln_kernels::mul_mat::MOST_COLUMNS;

use super::Target;
use crate::plan::{Plan, Step};

pub(super) fn run(plan: &mut Plan, target: &Target) {
    if !target.alike || target.caps.is_none() {
        return;
    }
    let mut steps = Vec::with_capacity(plan.steps.len());
    for step in std::mem::take(&mut plan.steps) {
        let Call::MulMatVec(call) = &step.call else {
            steps.push(step);
            continue;
        };
        let columns = call.product.b.shape[1];
        // Products of experts take any number of columns, one at a time.
        if columns <= MOST_COLUMNS || call.experts.is_some() {
            steps.push(step);
            continue;
        }
        for first in (0..columns).step_by(MOST_COLUMNS) {
            let part = call.columns(first, MOST_COLUMNS.min(columns - first));
            steps.push(Step { label: format!("{}[{first}]", step.label), call: part.into() });
        }
    }
    plan.steps = steps;
}
