//! Who writes and who reads each slot of a list of steps. Passes change steps one by one and keep this up to date, because
//! counting anew after each change would take a second for a large model.

use kiln_kernels::tensor::{Slot, Tensor};

use super::Step;

/// Writers and readers of every slot, as numbers of steps in ascending order.
#[derive(Clone, Debug)]
pub struct DefUse {
    writers: Vec<Vec<usize>>,
    readers: Vec<Vec<usize>>,
}

impl DefUse {
    /// Counts the uses of every slot. Steps that were taken out are `None`.
    pub fn of(slots: usize, steps: &[Option<Step>]) -> DefUse {
        let mut def_use = DefUse { writers: vec![Vec::new(); slots], readers: vec![Vec::new(); slots] };
        for (at, step) in steps.iter().enumerate() {
            if let Some(step) = step {
                def_use.add(at, step);
            }
        }
        def_use
    }

    /// The steps that write a slot.
    pub fn writers(&self, slot: Slot) -> &[usize] {
        &self.writers[slot.0 as usize]
    }

    /// The steps that read a slot.
    pub fn readers(&self, slot: Slot) -> &[usize] {
        &self.readers[slot.0 as usize]
    }

    /// The one step that writes a slot, if there is exactly one.
    pub fn writer(&self, slot: Slot) -> Option<usize> {
        if let [one] = self.writers(slot) { Some(*one) } else { None }
    }

    /// The one step that reads a slot, if there is exactly one.
    pub fn reader(&self, slot: Slot) -> Option<usize> {
        if let [one] = self.readers(slot) { Some(*one) } else { None }
    }

    /// Enters a step.
    pub fn add(&mut self, at: usize, step: &Step) {
        let enter = |list: &mut Vec<usize>| {
            if let Err(place) = list.binary_search(&at) {
                list.insert(place, at);
            }
        };
        let operation = step.call.operation();
        operation.reads().iter().for_each(|t| enter(&mut self.readers[t.slot.0 as usize]));
        operation.writes().iter().for_each(|t| enter(&mut self.writers[t.slot.0 as usize]));
    }

    /// Takes a step out.
    pub fn remove(&mut self, at: usize, step: &Step) {
        let leave = |list: &mut Vec<usize>| list.retain(|n| *n != at);
        let operation = step.call.operation();
        operation.reads().iter().for_each(|t| leave(&mut self.readers[t.slot.0 as usize]));
        operation.writes().iter().for_each(|t| leave(&mut self.writers[t.slot.0 as usize]));
    }
}

/// Whether two tensors have bytes in common. Spans decide: two views whose elements interleave count as overlapping.
pub fn overlap(a: &Tensor, b: &Tensor) -> bool {
    let ((a_first, a_bytes), (b_first, b_bytes)) = (a.span(), b.span());
    a.slot == b.slot && a_first < b_first + b_bytes && b_first < a_first + a_bytes
}

/// Whether two steps must stay in their order: one writes what the other reads or writes.
pub fn depend(first: &Step, second: &Step) -> bool {
    let (a, b) = (first.call.operation(), second.call.operation());
    let meet = |x: &[Tensor], y: &[Tensor]| x.iter().any(|x| y.iter().any(|y| overlap(x, y)));
    let scratch =
        |writes: Vec<Tensor>, scratch: Vec<Tensor>| -> Vec<Tensor> { writes.into_iter().chain(scratch).collect() };
    let (a_writes, b_writes) = (scratch(a.writes(), a.scratch()), scratch(b.writes(), b.scratch()));
    meet(&a_writes, &b.reads()) || meet(&a_writes, &b_writes) || meet(&a.reads(), &b_writes)
}
