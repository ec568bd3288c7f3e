//! Whether a plan is sound: operands fit together and lie inside their slots, everything that is read was written before,
//! nothing is overwritten by accident.

use kiln_kernels::tensor::Tensor;

use super::def_use::overlap;
use super::{Plan, SlotInfo, SlotKind, Step};
use crate::Error;

/// Bytes of a slot that were written: ranges that do not touch each other, in ascending order.
#[derive(Clone, Debug, Default)]
struct Written(Vec<(usize, usize)>);

impl Written {
    /// Strided tensors have a range for each of many rows: they are sorted in at once, as each by itself would move all behind it.
    fn add(&mut self, ranges: Vec<(usize, usize)>) {
        self.0.extend(ranges);
        self.0.sort_unstable();
        self.0.dedup_by(|next, last| {
            let joins = next.0 <= last.1;
            if joins {
                last.1 = last.1.max(next.1);
            }
            joins
        });
    }

    fn covers(&self, start: usize, end: usize) -> bool {
        let at = self.0.partition_point(|r| r.1 < end);
        self.0.get(at).is_some_and(|r| r.0 <= start && end <= r.1)
    }

    fn touches(&self, start: usize, end: usize) -> bool {
        let at = self.0.partition_point(|r| r.1 <= start);
        self.0.get(at).is_some_and(|r| r.0 < end)
    }
}

/// The ranges of bytes that a tensor's elements lie in: one where it is dense, else one a row.
fn ranges(tensor: &Tensor) -> Vec<(usize, usize)> {
    if tensor.is_empty() {
        return Vec::new();
    }
    let whole = |t: &Tensor| {
        let (first, bytes) = t.span();
        (first, first + bytes)
    };
    if tensor.is_dense() {
        return vec![whole(tensor)];
    }
    let [_, n1, n2, n3] = tensor.shape;
    let rows = (0..n3).flat_map(|i3| (0..n2).flat_map(move |i2| (0..n1).map(move |i1| [i1, i2, i3])));
    let len = Tensor { shape: [tensor.shape[0], 1, 1, 1], offset: 0, ..*tensor }.span().1;
    rows.map(|i| (tensor.row_offset(i), tensor.row_offset(i) + len)).collect()
}

impl Plan {
    /// Whether every call's operands fit together, lie inside their slots and read only what was written before. A step may
    /// overwrite results only in place: it reads the very tensor that it writes.
    pub fn check(&self) -> Result<(), Error> {
        let fresh = |s: &SlotInfo| matches!(s.kind, SlotKind::Scratch | SlotKind::Output | SlotKind::Send);
        let mut written: Vec<Written> = vec![Written::default(); self.slots.len()];
        for step in &self.steps {
            let fault = |why: String| Error::Plan { step: step.label.clone(), why };
            let operation = step.call.operation();
            operation.check().map_err(|e| fault(e.to_string()))?;
            let (reads, writes) = (operation.reads(), operation.writes());
            for tensor in reads.iter().chain(&writes).chain(&operation.scratch()) {
                let slot = self.slots.get(tensor.slot.0 as usize);
                let slot = slot.ok_or_else(|| fault(format!("there is no slot {}", tensor.slot.0)))?;
                let (first, bytes) = tensor.span();
                if first + bytes > slot.bytes {
                    return Err(fault(format!("{tensor} exceeds slot {} of {} bytes", slot.name, slot.bytes)));
                }
            }
            for tensor in reads.iter().filter(|t| fresh(&self.slots[t.slot.0 as usize])) {
                let ready = &written[tensor.slot.0 as usize];
                let (first, bytes) = tensor.span();
                let covered = ready.covers(first, first + bytes)
                    || ranges(tensor).iter().all(|&(start, end)| ready.covers(start, end));
                if !covered {
                    let name = self.slot_name(tensor);
                    return Err(fault(format!("reads {name} {tensor}, which no step before it writes as a whole")));
                }
            }
            self.check_aliases(step, &reads, &writes)?;
            for tensor in &writes {
                let slot = &self.slots[tensor.slot.0 as usize];
                let given = matches!(
                    slot.kind,
                    SlotKind::Weight
                        | SlotKind::WeightVariant(_)
                        | SlotKind::Constant(_)
                        | SlotKind::Input
                        | SlotKind::Recv
                        | SlotKind::StreamedWeight(_)
                );
                if given {
                    return Err(fault(format!("writes {}, which is not its to write", slot.name)));
                }
                if !fresh(slot) {
                    continue;
                }
                let in_place = reads.contains(tensor);
                let mut rows = ranges(tensor);
                rows.sort_unstable();
                let before = &mut written[tensor.slot.0 as usize];
                let twice = rows.windows(2).any(|pair| pair[1].0 < pair[0].1);
                if !in_place && (twice || rows.iter().any(|&(start, end)| before.touches(start, end))) {
                    return Err(fault(format!("overwrites {}, the result of another step", slot.name)));
                }
                before.add(rows);
            }
        }
        Ok(())
    }

    /// What a step writes must not overlap what it reads or writes besides, unless it is the same tensor: kernels have no
    /// order among the elements of a step. Scratch memory must be its own.
    fn check_aliases(&self, step: &Step, reads: &[Tensor], writes: &[Tensor]) -> Result<(), Error> {
        let fault = |a: &Tensor, b: &Tensor| Error::Plan {
            step: step.label.clone(),
            why: format!("writes {} {a}, which overlaps its operand {b}", self.slot_name(a)),
        };
        for (i, tensor) in writes.iter().enumerate() {
            let same_memory = |t: &Tensor| t.span() == tensor.span() && t.is_dense() && tensor.is_dense();
            if let Some(other) = reads.iter().find(|t| overlap(t, tensor) && *t != tensor && !same_memory(t)) {
                return Err(fault(tensor, other));
            }
            if let Some(other) = writes[i + 1..].iter().find(|t| overlap(t, tensor)) {
                return Err(fault(tensor, other));
            }
        }
        let scratch = step.call.operation().scratch();
        for tensor in &scratch {
            if let Some(other) = reads.iter().chain(writes).find(|t| overlap(t, tensor)) {
                return Err(fault(tensor, other));
            }
        }
        Ok(())
    }
}

#[cfg(test)]
mod tests {
    use kiln_gguf::TensorType::F32;
    use kiln_kernels::binary::{self, Operator};
    use kiln_kernels::tensor::{Slot, Tensor};
    use kiln_kernels::unary::{self, Function};

    use super::super::{Plan, Ports, SlotInfo, SlotKind, Step};

    fn slot(name: &str, kind: SlotKind) -> SlotInfo {
        SlotInfo { name: name.into(), kind, bytes: 64, ty: F32, shape: [16, 1, 1, 1], place: None }
    }

    fn tensor(slot: u32) -> Tensor {
        Tensor::dense(Slot(slot), F32, [4, 4, 1, 1])
    }

    fn silu(x: Tensor, dst: Tensor) -> Step {
        Step { label: "silu".into(), call: unary::Call { function: Function::Silu, x, dst }.into() }
    }

    fn fault(steps: Vec<Step>) -> String {
        let kinds = [SlotKind::Input, SlotKind::Scratch, SlotKind::Scratch, SlotKind::Output];
        let slots = ["in", "a", "b", "out"].iter().zip(kinds).map(|(n, k)| slot(n, k)).collect();
        let ports = Ports::all(tensor(0));
        let plan = Plan { slots, n_fixed: 0, steps, ports, arena: 0 };
        plan.check().err().map(|e| e.to_string()).unwrap_or_default()
    }

    #[test]
    fn halves_make_a_whole_and_one_half_does_not() {
        let (x, a, out) = (tensor(0), tensor(1), tensor(3));
        let half = |t: Tensor, i: usize| t.narrow(1, 2 * i, 2);
        let halves = |n: usize| (0..n).map(|i| silu(half(x, i), half(a, i))).chain([silu(a, out)]).collect::<Vec<_>>();
        assert_eq!(fault(halves(2)), "");
        assert!(fault(halves(1)).contains("reads a F32[4, 4]"), "{}", fault(halves(1)));
        // Columns side by side interleave in memory and still make a whole.
        let side = |t: Tensor, i: usize| t.narrow(0, 2 * i, 2);
        let sides = (0..2).map(|i| silu(side(x, i), side(a, i))).chain([silu(a, out)]).collect();
        assert_eq!(fault(sides), "");
    }

    #[test]
    fn results_are_overwritten_in_place_only() {
        let (x, a, b, out) = (tensor(0), tensor(1), tensor(2), tensor(3));
        assert_eq!(fault(vec![silu(x, a), silu(a, a), silu(a, out)]), "");
        let again = fault(vec![silu(x, a), silu(x, a), silu(a, out)]);
        assert!(again.contains("overwrites a"), "{again}");
        let aside =
            |dst| Step { label: "add".into(), call: binary::Call { operator: Operator::Add, a, b, dst }.into() };
        assert_eq!(fault(vec![silu(x, a), silu(x, b), aside(out)]), "");
        let shifted = Tensor { offset: 16, shape: [4, 3, 1, 1], ..a };
        let overlapping = Step {
            label: "shift".into(),
            call: unary::Call { function: Function::Abs, x: shifted, dst: a.narrow(1, 0, 3) }.into(),
        };
        let refused = fault(vec![silu(x, a), overlapping]);
        assert!(refused.contains("overlaps its operand"), "{refused}");
        let input = fault(vec![silu(x, x)]);
        assert!(input.contains("writes in, which is not its to write"), "{input}");
    }
}
