//! Memory planning: each scratch slot gets an offset in one arena, and slots whose live ranges do not overlap share memory.
//!
//! Steps that do not depend on each other may run side by side, and stay so: a device needs a barrier where a step meets
//! memory of one before it, so places are given anew only behind a barrier that is there anyway.

use kiln_kernels::Call;
use kiln_kernels::tensor::Tensor;

use super::Target;
use crate::plan::def_use::Accesses;
use crate::plan::{Plan, SlotInfo, SlotKind};

/// Places begin at multiples of this many bytes: kernels ask for 16, formats for up to 256.
const ALIGNMENT: usize = 256;

/// When a slot's contents are needed: numbers of the runs of steps between barriers, both included.
#[derive(Clone, Copy, Debug)]
pub(super) struct LiveRange {
    pub(super) slot: usize,
    pub(super) first: usize,
    pub(super) last: usize,
    pub(super) bytes: usize,
}

pub(super) fn run(plan: &mut Plan, _: &Target) {
    let live_ranges = live_ranges(plan);
    let (places, end) = assign(live_ranges, plan.arena);
    places.into_iter().for_each(|(slot, place)| plan.slots[slot].place = Some(place));
    plan.arena = end;
    // What no step uses any more takes no memory.
    for slot in &mut plan.slots[plan.n_fixed..] {
        if slot.kind == SlotKind::Scratch && slot.place.is_none() {
            (slot.bytes, slot.place) = (0, Some(0));
        }
    }
}

/// Gives scratch that was added to a lowered plan its place behind all other, so that all plans share the memory for it. A plan that is not
/// lowered yet has no places.
pub(crate) fn place_added(plan: &mut Plan) {
    if plan.arena == 0 {
        return;
    }
    let added = |slot: &&mut SlotInfo| slot.kind == SlotKind::Scratch && slot.place.is_none();
    for slot in plan.slots[plan.n_fixed..].iter_mut().filter(added) {
        slot.place = Some(plan.arena);
        plan.arena = (plan.arena + slot.bytes).next_multiple_of(ALIGNMENT);
    }
}

/// Gives places to all that live, from an offset on: those that live at the same time lie apart. Gives the end of all, too.
pub(super) fn assign(mut live_ranges: Vec<LiveRange>, base: usize) -> (Vec<(usize, usize)>, usize) {
    // Large ones first: they find the fewest places.
    live_ranges.sort_by_key(|live_range| (std::cmp::Reverse(live_range.bytes), live_range.first, live_range.slot));
    let mut placed: Vec<(LiveRange, usize)> = Vec::new();
    let mut end = base;
    for live_range in live_ranges {
        let mut taken: Vec<(usize, usize)> = placed
            .iter()
            .filter(|(other, _)| other.first <= live_range.last && live_range.first <= other.last)
            .map(|(other, place)| (*place, place + other.bytes))
            .collect();
        taken.sort_unstable();
        let mut place = base;
        for (start, end) in taken {
            if place + live_range.bytes <= start {
                break;
            }
            place = place.max(end.next_multiple_of(ALIGNMENT));
        }
        end = end.max(place + live_range.bytes);
        placed.push((live_range, place));
    }
    (placed.into_iter().map(|(live_range, place)| (live_range.slot, place)).collect(), end.next_multiple_of(ALIGNMENT))
}

/// The life of every scratch slot that a step uses.
fn live_ranges(plan: &Plan) -> Vec<LiveRange> {
    let mut live_ranges: Vec<Option<LiveRange>> = vec![None; plan.slots.len()];
    let mut run = 0;
    let mut start = 0;
    let mut decoding: Option<usize> = None;
    let accesses: Vec<Accesses> = plan.steps.iter().map(Accesses::of).collect();
    for (at, step) in plan.steps.iter().enumerate() {
        if accesses[start..at].iter().any(|before| before.conflict(&accesses[at])) {
            (run, start) = (run + 1, at);
        }
        let mut enter = |t: &Tensor, run: usize| {
            let slot = &plan.slots[t.slot.0 as usize];
            // What is kept from part to part has its place already.
            if slot.place.is_some() {
                return;
            }
            // What comes from another device is there before the first step.
            let arrives = matches!(slot.kind, SlotKind::Recv | SlotKind::StreamedWeight(_));
            let first = if arrives { 0 } else { run };
            if arrives || matches!(slot.kind, SlotKind::Scratch | SlotKind::Send) {
                let new = LiveRange { slot: t.slot.0 as usize, first, last: run, bytes: slot.bytes };
                live_ranges[t.slot.0 as usize].get_or_insert(new).last = run;
            }
        };
        accesses[at].reads.iter().chain(&accesses[at].writes).for_each(|tensor| enter(tensor, run));
        // Weights of the next product are decoded while this one still multiplies: their memory must differ.
        if let Call::MulMm(call) = &step.call {
            let before = decoding.and_then(|n| plan.steps[n].call.operation().scratch().first().copied());
            if let (Some(_), Some(before)) = (call.scratch, before) {
                enter(&before, run);
            }
            decoding = Some(at);
        }
    }
    // What goes to another device is taken away behind the last step.
    let to_the_end = |live_range: LiveRange| match plan.slots[live_range.slot].kind {
        SlotKind::Send => LiveRange { last: run, ..live_range },
        _ => live_range,
    };
    live_ranges.into_iter().flatten().map(to_the_end).collect()
}
