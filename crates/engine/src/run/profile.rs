//! The times of a plan's steps, added up by kind.

use std::time::Duration;

use kiln_gpu::StepTime;

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
