//! Host memory that what a part of a plan gets from other devices is copied from, and that what it makes for them is copied to.

use std::sync::Arc;

use kiln_gpu::{Buffer, Device, MemoryKind};
use kiln_kernels::tensor::Slot;

use crate::Error;
use crate::plan::{Plan, SlotInfo, SlotKind};

/// What crosses over begins at multiples of this many bytes in host memory.
const STAGE_ALIGNMENT: u64 = 256;

/// What a part of a plan gets from other devices, and makes for them.
#[derive(Default)]
pub(super) struct Crossings {
    /// Weights that are brought for each run.
    pub(super) streamed: Vec<Crossing>,
    pub(super) arriving: Vec<Crossing>,
    pub(super) leaving: Vec<Crossing>,
}

/// A slot of the arena that has a place in host memory, too.
pub(super) struct Crossing {
    pub(super) slot: Slot,
    pub(super) stage: Buffer,
    pub(super) offset: u64,
    pub(super) bytes: u64,
}

/// Places in host memory for the slots of a plan that cross over; the memory is kept for the next plan if it is large enough.
pub(super) fn staged(
    device: &Arc<Device>,
    kept: &mut Option<Buffer>,
    memory: MemoryKind,
    plan: &Plan,
    crosses: impl Fn(&SlotKind) -> bool,
) -> Result<Vec<Crossing>, Error> {
    let slots = || (0..).map(Slot).zip(&plan.slots).filter(|(_, slot)| crosses(&slot.kind) && slot.bytes > 0);
    let bytes = |slot: &SlotInfo| (slot.bytes as u64).next_multiple_of(STAGE_ALIGNMENT);
    let all: u64 = slots().map(|(_, slot)| bytes(slot)).sum();
    if all == 0 {
        return Ok(Vec::new());
    }
    let stage = match kept.take() {
        Some(stage) if stage.bytes() >= all => stage,
        _ => device.allocate(memory, all)?,
    };
    let mut offset = 0;
    let mut crossings = Vec::new();
    for (number, slot) in slots() {
        crossings.push(Crossing { slot: number, stage: stage.clone(), offset, bytes: slot.bytes as u64 });
        offset += bytes(slot);
    }
    *kept = Some(stage);
    Ok(crossings)
}
