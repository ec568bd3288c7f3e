//! Results that products of integers multiply leave their step rounded ([`kiln_kernels::rounded`]): the product takes them as they are,
//! and none of its workgroups rounds the activation vector for itself. Where a norm stands between the two, its weights are multiplied by who
//! makes the activation vector, and its factor behind the product.

use kiln_gguf::TensorType;
use kiln_gpu::Caps;
use kiln_kernels::rounded::{self, Rounding};
use kiln_kernels::tensor::{Slot, Tensor};
use kiln_kernels::{Call, fuse};

use super::Target;
use crate::plan::def_use::DefUse;
use crate::plan::{Plan, SlotKind, Step};

/// Who leaves activations rounded for the products that take them.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum Rounds {
    /// Whoever can, if the tuning table of the products wants it.
    #[default]
    ByTable,
    /// Whoever can.
    Always,
}

pub(super) fn run(plan: &mut Plan, target: &Target) {
    // Rows that must not depend on their company go one way, whoever makes them.
    let Some(caps) = target.caps.as_ref().filter(|_| !target.batch_invariant && target.fuses) else { return };
    let steps: Vec<Option<Step>> = plan.steps.iter().cloned().map(Some).collect();
    // Steps stay where they are, and touch only new slots besides what they did.
    let def_use = DefUse::of(plan.slots.len(), &steps);
    for at in 0..plan.steps.len() {
        let Some(column) = fuse::column(&plan.steps[at].call) else { continue };
        let alone =
            plan.slots[column.slot.0 as usize].kind == SlotKind::Scratch && def_use.writer(column.slot) == Some(at);
        if alone && column.ty == TensorType::F32 && column.len().is_multiple_of(rounded::GROUP) {
            connect(plan, at, (column, def_use.readers(column.slot)), (target, caps));
        }
    }
}

/// Lets the step at `at` leave its activation vector rounded for those of its readers that take it with the same weights as the first of them.
fn connect(plan: &mut Plan, at: usize, (column, readers): (Tensor, &[usize]), (target, caps): (&Target, &Caps)) {
    let bytes = rounded::bytes(column.len());
    let nowhere = Tensor::dense(Slot(u32::MAX), TensorType::I8, [bytes, 1, 1, 1]);
    let mut weight = None;
    let mut takers = Vec::new();
    for &reader in readers.iter().filter(|reader| **reader > at) {
        let Call::MulMatVec(product) = &plan.steps[reader].call else { continue };
        let own = product.norm.and_then(|norm| norm.weight);
        let wanted = target.rounds == Rounds::Always || product.wants_rounded(caps);
        if !wanted || weight.is_some_and(|weight| weight != own) {
            continue;
        }
        if product.taking(&column, &Rounding { to: nowhere, weight: own }, caps).is_some() {
            weight = Some(own);
            takers.push(reader);
        }
    }
    let Some(weight) = weight else { return };
    let leaves = |to| fuse::rounding(&plan.steps[at].call, Rounding { to, weight });
    if leaves(nowhere).is_none_or(|call| !target.runs(&call)) {
        return;
    }
    let name = format!("{}.rounded", plan.steps[at].label);
    let rounding = Rounding { to: plan.add(&name, SlotKind::Scratch, TensorType::I8, [bytes, 1, 1, 1]), weight };
    if let Some(call) = fuse::rounding(&plan.steps[at].call, rounding) {
        plan.steps[at].call = call;
    }
    for reader in takers {
        let Call::MulMatVec(product) = &plan.steps[reader].call else { continue };
        if let Some(call) = product.taking(&column, &rounding, caps) {
            plan.steps[reader].call = call.into();
        }
    }
}
