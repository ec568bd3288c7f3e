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
    if a.slot != b.slot {
        return false;
    }
    let ((a_first, a_bytes), (b_first, b_bytes)) = (a.span(), b.span());
    a_first < b_first + b_bytes && b_first < a_first + a_bytes
}

/// Slots by their numbers modulo 64: two sets without a number in common have no slot in common.
#[derive(Clone, Copy, Debug, Default)]
struct SlotSet(u64);

impl SlotSet {
    fn of(tensors: &[Tensor]) -> SlotSet {
        SlotSet(tensors.iter().fold(0, |set, tensor| set | 1 << (tensor.slot.0 % 64)))
    }

    fn may_meet(self, other: SlotSet) -> bool {
        self.0 & other.0 != 0
    }
}

/// What a step reads and writes. Passes compare each step with many others.
#[derive(Clone, Debug)]
pub struct Accesses {
    /// What it reads.
    pub reads: Vec<Tensor>,
    /// What it writes, scratch memory included.
    pub writes: Vec<Tensor>,
    read_slots: SlotSet,
    written_slots: SlotSet,
}

impl Accesses {
    /// Those of a step.
    pub fn of(step: &Step) -> Accesses {
        let operation = step.call.operation();
        let (reads, mut writes) = (operation.reads(), operation.writes());
        writes.extend(operation.scratch());
        let (read_slots, written_slots) = (SlotSet::of(&reads), SlotSet::of(&writes));
        Accesses { reads, writes, read_slots, written_slots }
    }

    /// Whether two steps must stay in their order: one writes what the other reads or writes.
    pub fn conflict(&self, other: &Accesses) -> bool {
        let meet = |x: &[Tensor], y: &[Tensor]| x.iter().any(|x| y.iter().any(|y| overlap(x, y)));
        let (written, others) = (self.written_slots, other.written_slots);
        (written.may_meet(other.read_slots) && meet(&self.writes, &other.reads))
            || (written.may_meet(others) && meet(&self.writes, &other.writes))
            || (self.read_slots.may_meet(others) && meet(&self.reads, &other.writes))
    }
}

/// Whether two steps must stay in their order.
pub fn depend(first: &Step, second: &Step) -> bool {
    Accesses::of(first).conflict(&Accesses::of(second))
}
