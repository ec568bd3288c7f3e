//! What an engine can tell of its speed: the times of a plan's steps, added up by kind, and the limits of where it runs.

use std::time::Duration;

use kiln_gpu::StepTime;

use super::engine::Engine;
use crate::executor::Share;
use crate::lower::Target;
use crate::plan::SlotKind;

/// Steps that stand at the same place of each layer.
#[derive(Clone, Debug, PartialEq)]
pub struct StepKind {
    /// The label without the layer.
    pub name: String,
    /// How many there are.
    pub count: usize,
    /// Their time in all.
    pub time: Duration,
    /// Bytes that they have to move in all.
    pub bytes: f64,
}

/// Adds up the times of steps that differ in their layer alone, the longest first.
pub fn step_kinds(times: Vec<StepTime>) -> Vec<StepKind> {
    let mut kinds: Vec<StepKind> = Vec::new();
    for StepTime { label, time, bytes } in times {
        let name = match label.split_once('.') {
            Some((layer, rest)) if layer.bytes().all(|b| b.is_ascii_digit()) => rest.to_owned(),
            _ => label,
        };
        match kinds.iter_mut().find(|k| k.name == name) {
            Some(kind) => {
                (kind.count, kind.time, kind.bytes) = (kind.count + 1, kind.time + time, kind.bytes + bytes);
            }
            None => kinds.push(StepKind { name, count: 1, time, bytes }),
        }
    }
    kinds.sort_by_key(|k| std::cmp::Reverse(k.time));
    kinds
}

impl Engine {
    /// Bytes of weights on GPUs.
    pub fn gpu_bytes(&self) -> u64 {
        let (shares, targets) = (self.executor.shares(), self.executor.targets());
        let slots = &self.fixed().slots;
        let on_gpu = |(share, target): (&Share, &Target)| {
            let holds = |slot: usize| share.holds.as_ref().is_none_or(|holds| holds.get(slot) == Some(&true));
            let weights = slots.iter().enumerate().filter(|(at, slot)| slot.kind == SlotKind::Weight && holds(*at));
            if target.caps.is_some() { weights.map(|(_, slot)| slot.bytes as u64).sum::<u64>() } else { 0 }
        };
        shares.iter().zip(&targets).map(on_gpu).sum()
    }

    /// Bytes a second that the memory of where it runs can be read at, where that can be told.
    pub fn read_ceiling(&mut self) -> Option<f64> {
        self.executor.read_ceiling()
    }

    /// Operations a second that where it runs can do at best, by the name of what does them.
    pub fn arithmetic_ceilings(&mut self) -> Vec<(String, f64)> {
        self.executor.arithmetic_ceilings()
    }
}
