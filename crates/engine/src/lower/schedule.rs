//! Groups independent steps between barriers. A step that touches memory of an earlier one needs a barrier, so the pass moves every step that
//! could run before the barrier ahead of it.

use std::collections::VecDeque;

use super::Target;
use crate::plan::def_use::Accesses;
use crate::plan::{Plan, Step};

/// Steps behind a barrier that are looked at: further ones belong to the next layer, and results that are made too early take memory.
const FAR: usize = 12;

pub(super) fn run(plan: &mut Plan, target: &Target) {
    // The CPU runs one step at a time.
    if target.caps.is_none() {
        return;
    }
    let accesses: Vec<Accesses> = plan.steps.iter().map(Accesses::of).collect();
    let mut steps: Vec<Option<Step>> = std::mem::take(&mut plan.steps).into_iter().map(Some).collect();
    plan.steps = order(&accesses).into_iter().filter_map(|at| steps[at].take()).collect();
}

/// The numbers of steps in their new order.
fn order(accesses: &[Accesses]) -> Vec<usize> {
    let holds_up = |before: &usize, step: usize| accesses[*before].conflict(&accesses[step]);
    let mut left: VecDeque<usize> = (0..accesses.len()).collect();
    let mut order = Vec::with_capacity(accesses.len());
    // Steps since the last barrier.
    let mut side_by_side: Vec<usize> = Vec::new();
    while let Some(step) = left.pop_front() {
        if side_by_side.iter().any(|before| holds_up(before, step)) {
            let mut at = 0;
            while at < left.len().min(FAR) {
                let next = left[at];
                let before = side_by_side.iter().chain([&step]).chain(left.iter().take(at));
                if before.into_iter().any(|before| holds_up(before, next)) {
                    at += 1;
                } else {
                    side_by_side.extend(left.remove(at));
                }
            }
            order.append(&mut side_by_side);
        }
        side_by_side.push(step);
    }
    order.append(&mut side_by_side);
    order
}

#[cfg(test)]
mod tests {
    use kiln_gguf::TensorType;
    use kiln_gpu::Caps;
    use kiln_kernels::tensor::{Slot, Tensor};
    use kiln_kernels::{Call, scale};

    use super::*;
    use crate::plan::{Ports, SlotInfo, SlotKind};

    /// Steps that each read one slot and write another.
    fn plan(steps: &[(u32, u32)]) -> Plan {
        let tensor = |slot| Tensor::dense(Slot(slot), TensorType::F32, [16, 1, 1, 1]);
        let slot = |n: u32| SlotInfo {
            name: n.to_string(),
            kind: SlotKind::Scratch,
            bytes: 64,
            ty: TensorType::F32,
            shape: [16, 1, 1, 1],
            place: None,
        };
        let step = |&(x, y): &(u32, u32)| {
            let call = scale::Call { x: tensor(x), dst: tensor(y), factor: 1.0, bias: 0.0 };
            Step { label: format!("{x} {y}"), call: Call::from(call) }
        };
        let (slots, steps) = ((0..64).map(slot).collect(), steps.iter().map(step).collect());
        Plan { slots, n_fixed: 0, steps, ports: Ports::all(tensor(0)), arena: 0 }
    }

    fn ordered(steps: &[(u32, u32)], target: &Target) -> Vec<String> {
        let mut plan = plan(steps);
        run(&mut plan, target);
        plan.steps.into_iter().map(|step| step.label).collect()
    }

    #[test]
    fn branches_go_side_by_side_and_chains_stay_as_they_are() {
        let gpu = Target::gpu(&Caps::example_nvidia());
        // Two chains from slot 0, one behind the other: step by step both at once.
        let two = [(0, 1), (1, 2), (2, 3), (0, 11), (11, 12), (12, 13)];
        assert_eq!(ordered(&two, &gpu), ["0 1", "0 11", "1 2", "11 12", "2 3", "12 13"]);
        assert_eq!(ordered(&two, &Target::cpu()), two.map(|(x, y)| format!("{x} {y}")));
        let chain = [(0, 1), (1, 2), (2, 3)];
        assert_eq!(ordered(&chain, &gpu), chain.map(|(x, y)| format!("{x} {y}")));
        // What overwrites a slot stays behind its readers, and its own readers behind it.
        let again = [(0, 1), (1, 2), (5, 1), (1, 3)];
        assert_eq!(ordered(&again, &gpu), again.map(|(x, y)| format!("{x} {y}")));
        // Too far away to be looked for.
        let mut far: Vec<(u32, u32)> = (0..20).map(|i| (i, i + 1)).collect();
        far.push((50, 51));
        assert_eq!(ordered(&far, &gpu)[8], "50 51", "as soon as it is near");
    }
}
