//! A plan being changed: steps can be taken out and replaced one by one, while it stays known who writes and reads each
//! slot.

use kiln_kernels::tensor::Slot;

use crate::plan::def_use::{Accesses, DefUse};
use crate::plan::{Plan, SlotKind, Step};

/// Steps of a plan with their uses.
pub(super) struct Edit<'p> {
    pub(super) plan: &'p mut Plan,
    /// `None` where a step was taken out.
    pub(super) steps: Vec<Option<Step>>,
    pub(super) def_use: DefUse,
}

impl<'p> Edit<'p> {
    pub(super) fn new(plan: &'p mut Plan) -> Edit<'p> {
        let steps: Vec<Option<Step>> = std::mem::take(&mut plan.steps).into_iter().map(Some).collect();
        let def_use = DefUse::of(plan.slots.len(), &steps);
        Edit { plan, steps, def_use }
    }

    /// Puts the steps that are left back into the plan.
    pub(super) fn finish(self) {
        self.plan.steps = self.steps.into_iter().flatten().collect();
    }

    /// Whether a slot holds a result of one step for others, and nothing else.
    pub(super) fn is_result(&self, slot: Slot) -> bool {
        self.plan.slots[slot.0 as usize].kind == SlotKind::Scratch && self.def_use.writers(slot).len() == 1
    }

    /// Whether a step could stand at another place: it depends on no step between the two.
    pub(super) fn can_move(&self, from: usize, to: usize) -> bool {
        self.can_move_with(from, to, &[])
    }

    /// The same where some of the steps between the two move along.
    pub(super) fn can_move_with(&self, from: usize, to: usize, along: &[usize]) -> bool {
        let Some(step) = &self.steps[from] else { return false };
        let mut between = if from < to { from + 1..to } else { to + 1..from };
        let moved = Accesses::of(step);
        between.all(|other| match &self.steps[other] {
            Some(other_step) if !along.contains(&other) => !moved.conflict(&Accesses::of(other_step)),
            _ => true,
        })
    }

    /// Where two steps can become one: at the place of the later one, or of the earlier one.
    pub(super) fn meeting(&self, first: usize, second: usize) -> Option<usize> {
        if self.can_move(first, second) { Some(second) } else { self.can_move(second, first).then_some(first) }
    }

    /// Takes a step out.
    pub(super) fn remove(&mut self, at: usize) {
        if let Some(step) = self.steps[at].take() {
            self.def_use.remove(at, &step);
        }
    }

    /// Takes steps out and puts one in.
    pub(super) fn replace(&mut self, old: &[usize], at: usize, new: Step) {
        for &i in old {
            self.remove(i);
        }
        self.def_use.add(at, &new);
        self.steps[at] = Some(new);
    }
}
