//! The times of a plan's steps, added up by kind.

use std::time::Duration;

/// Steps that stand at the same place of each layer.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct StepKind {
    /// The label without the layer.
    pub name: String,
    /// How many there are.
    pub count: usize,
    /// Their time in all.
    pub time: Duration,
}

/// Adds up the times of steps that differ in their layer alone, the longest first.
pub fn step_kinds(times: Vec<(String, Duration)>) -> Vec<StepKind> {
    let mut kinds: Vec<StepKind> = Vec::new();
    for (label, time) in times {
        let name = match label.split_once('.') {
            Some((layer, rest)) if layer.bytes().all(|b| b.is_ascii_digit()) => rest.to_owned(),
            _ => label,
        };
        match kinds.iter_mut().find(|k| k.name == name) {
            Some(kind) => (kind.count, kind.time) = (kind.count + 1, kind.time + time),
            None => kinds.push(StepKind { name, count: 1, time }),
        }
    }
    kinds.sort_by_key(|k| std::cmp::Reverse(k.time));
    kinds
}
