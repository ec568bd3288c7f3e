//! Removes steps whose results no step reads.

use super::Target;
use super::edit::Edit;
use crate::plan::{Plan, SlotKind};

pub(super) fn run(plan: &mut Plan, _: &Target) {
    let mut edit = Edit::new(plan);
    // From the end, so that steps which only feed removed ones go too.
    for at in (0..edit.steps.len()).rev() {
        let Some(step) = &edit.steps[at] else { continue };
        let unread = step.call.operation().writes().iter().all(|t| {
            let others = edit.def_use.readers(t.slot).iter().any(|reader| *reader != at);
            edit.plan.slots[t.slot.0 as usize].kind == SlotKind::Scratch && !others
        });
        if unread && let Some(step) = edit.steps[at].take() {
            edit.def_use.remove(at, &step);
        }
    }
    edit.finish();
}
