//! Steps whose results nobody reads go.

use super::Target;
use super::edit::Edit;
use crate::plan::{Plan, SlotKind};

pub(super) fn run(plan: &mut Plan, _: &Target) {
    let mut edit = Edit::new(plan);
    // From the end on, so that what only such steps read goes too.
    for at in (0..edit.steps.len()).rev() {
        let Some(step) = &edit.steps[at] else { continue };
        let unread = step.call.operation().writes().iter().all(|t| {
            let others = edit.uses.readers(t.slot).iter().any(|reader| *reader != at);
            edit.plan.slots[t.slot.0 as usize].kind == SlotKind::Scratch && !others
        });
        if unread && let Some(step) = edit.steps[at].take() {
            edit.uses.remove(at, &step);
        }
    }
    edit.finish();
}
