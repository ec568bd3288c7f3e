//! Steps that become one: along edges with one writer and one reader, and products of the same activations.

use kiln_gguf::TensorType;
use kiln_kernels::{Call, fuse};

use super::Target;
use super::edit::Edit;
use crate::plan::{Plan, SlotKind, Step};

/// Steps take in the one step that reads their result.
pub(super) fn epilogue(plan: &mut Plan, target: &Target) {
    let mut edit = Edit::new(plan);
    for first in 0..edit.steps.len() {
        // A step that was fused may go on with the next reader.
        while take_next(&mut edit, first, target) {}
    }
    edit.finish();
}

/// Whether the step at `first` took its reader in and stayed where it was.
fn take_next(edit: &mut Edit<'_>, first: usize, target: &Target) -> bool {
    let Some(step) = &edit.steps[first] else { return false };
    for result in step.call.operation().writes() {
        let reader = edit.def_use.reader(result.slot).filter(|_| edit.is_result(result.slot));
        let Some(second) = reader.filter(|second| *second > first) else { continue };
        let Some(next) = &edit.steps[second] else { continue };
        let Some(fused) = fuse::after(&step.call, &next.call).filter(|call| target.joins(call)) else { continue };
        let Some(at) = edit.meeting(first, second) else { continue };
        let label = step.label.clone();
        edit.replace(&[first, second], at, Step { label, call: fused });
        return at == first;
    }
    false
}

/// Steps take in the step whose result they read.
pub(super) fn prologue(plan: &mut Plan, target: &Target) {
    let mut edit = Edit::new(plan);
    for first in 0..edit.steps.len() {
        give_norm(&mut edit, first, target);
    }
    for last in 0..edit.steps.len() {
        while take_previous(&mut edit, last, target) {}
    }
    edit.finish();
}

/// A norm of one token that several products read goes into each of them, where the target would rather compute it again than wait
/// for it.
fn give_norm(edit: &mut Edit<'_>, first: usize, target: &Target) {
    let Some(Step { call: norm @ Call::RmsNorm(call), .. }) = &edit.steps[first] else { return };
    let readers = edit.def_use.readers(call.y.slot).to_vec();
    // What is normed must be what it was when the products read it.
    let stays = edit.def_use.writers(call.x.slot).iter().all(|writer| *writer < first);
    if !target.saves_steps || call.x.rows() != 1 || readers.len() < 2 || !stays || !edit.is_result(call.y.slot) {
        return;
    }
    let taken = |reader: &usize| {
        let step = edit.steps[*reader].as_ref()?;
        let call = fuse::before(&step.call, norm, false).filter(|call| target.joins(call))?;
        Some(Step { label: step.label.clone(), call })
    };
    let Some(steps) = readers.iter().map(taken).collect::<Option<Vec<_>>>() else { return };
    for (reader, step) in readers.into_iter().zip(steps) {
        edit.replace(&[reader], reader, step);
    }
    edit.remove(first);
}

/// Whether the step at `last` took a writer in and stayed where it was.
fn take_previous(edit: &mut Edit<'_>, last: usize, target: &Target) -> bool {
    let Some(step) = &edit.steps[last] else { return false };
    for operand in step.call.operation().reads() {
        let writer = edit.def_use.writer(operand.slot).filter(|_| edit.is_result(operand.slot));
        let Some(first) = writer.filter(|first| *first < last) else { continue };
        let Some(previous) = &edit.steps[first] else { continue };
        let kept = edit.def_use.reader(operand.slot).is_none();
        // A result that others read too must be there before they read it.
        if kept && edit.def_use.readers(operand.slot).iter().any(|reader| *reader < last) {
            continue;
        }
        let fused = fuse::before(&step.call, &previous.call, kept);
        let Some(fused) = fused.filter(|call| target.joins(call)) else { continue };
        let Some(at) = edit.meeting(first, last) else { continue };
        let label = step.label.clone();
        edit.replace(&[first, last], at, Step { label, call: fused });
        return at == last;
    }
    false
}

/// A gate takes in the two products it is between.
pub(super) fn gate(plan: &mut Plan, target: &Target) {
    let mut edit = Edit::new(plan);
    for at in 0..edit.steps.len() {
        let Some(Step { call: Call::Glu(glu), .. }) = &edit.steps[at] else { continue };
        let product = |slot| {
            let alone = edit.is_result(slot) && edit.def_use.reader(slot) == Some(at);
            edit.def_use.writer(slot).filter(|writer| alone && edit.can_move(*writer, at))
        };
        let (Some(gate), Some(up)) = (product(glu.gate.slot), product(glu.up.slot)) else { continue };
        let (Some(first), Some(second)) = (&edit.steps[gate], &edit.steps[up]) else { continue };
        let fused = fuse::gated(&first.call, &second.call, glu);
        if let Some(call) = fused.filter(|call| target.joins(call)) {
            let label = joined(&first.label, &second.label);
            edit.replace(&[gate, up, at], at, Step { label, call });
        }
    }
    edit.finish();
}

/// Choices of experts take in the products of their routers.
pub(super) fn router(plan: &mut Plan, target: &Target) {
    let one = |step: &Step| matches!(&step.call, Call::TopkMoe(call) if call.logits.shape[1] == 1);
    if !target.saves_steps || !plan.steps.iter().any(one) {
        return;
    }
    // Layers follow each other: one counter is enough.
    let counter = plan.add("router.counter", SlotKind::Zeroed, TensorType::I32, [1, 1, 1, 1]);
    let mut edit = Edit::new(plan);
    for at in 0..edit.steps.len() {
        let Some(Step { label, call: choice @ Call::TopkMoe(call) }) = &edit.steps[at] else { continue };
        let alone = edit.is_result(call.logits.slot) && edit.def_use.reader(call.logits.slot) == Some(at);
        let writer = edit.def_use.writer(call.logits.slot).filter(|writer| alone && edit.can_move(*writer, at));
        let Some((writer, product)) = writer.and_then(|writer| Some((writer, edit.steps[writer].as_ref()?))) else {
            continue;
        };
        let routed = fuse::routed(choice, &product.call, counter).filter(|call| target.joins(call));
        if let Some(call) = routed {
            let step = Step { label: label.clone(), call };
            edit.replace(&[writer, at], at, step);
        }
    }
    edit.finish();
}

/// Products take in later ones of the same activations.
pub(super) fn fused_products(plan: &mut Plan, target: &Target) {
    let mut edit = Edit::new(plan);
    for first in 0..edit.steps.len() {
        let columns = match &edit.steps[first] {
            Some(Step { call: Call::MulMatVec(call), .. }) => call.product.b,
            Some(Step { call: Call::MulMm(call), .. }) => call.product.b,
            _ => continue,
        };
        let others: Vec<usize> = edit.def_use.readers(columns.slot).iter().copied().filter(|n| *n > first).collect();
        for other in others {
            let (Some(step), Some(next)) = (&edit.steps[first], &edit.steps[other]) else { continue };
            let fused = fuse::beside(&step.call, &next.call).filter(|call| target.joins(call));
            if let Some(call) = fused.filter(|_| edit.can_move(other, first)) {
                let label = joined(&step.label, &next.label);
                edit.replace(&[first, other], first, Step { label, call });
            }
        }
    }
    edit.finish();
}

/// `3.attention.q+k` for `3.attention.q` and `3.attention.k`.
fn joined(first: &str, second: &str) -> String {
    let (place, name) = second.rsplit_once('.').unwrap_or(("", second));
    if first.rsplit_once('.').map_or("", |(p, _)| p) == place { format!("{first}+{name}") } else { first.to_owned() }
}
