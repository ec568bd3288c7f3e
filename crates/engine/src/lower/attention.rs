//! Around attention: rope and the writing of caches become one step, attention of few tokens is split over the keys, and that of single
//! tokens writes the caches itself.

use std::collections::HashMap;

use kiln_gguf::TensorType;
use kiln_kernels::flash_attention::{self, Split};
use kiln_kernels::mul_mat::MAX_GEMV_N;
use kiln_kernels::tensor::Tensor;
use kiln_kernels::{Call, fuse, rope, set_rows};

use super::Target;
use super::edit::Edit;
use crate::plan::{Plan, SlotKind, Step};

/// Queries and keys are turned and caches written in one step.
pub(super) fn cache_write(plan: &mut Plan, target: &Target) {
    let mut edit = Edit::new(plan);
    for at in 0..edit.steps.len() {
        let Some(Step { call: Call::FlashAttention(attention), .. }) = &edit.steps[at] else { continue };
        let Some(found) = four_steps(&edit, [attention.q, attention.k, attention.v]) else { continue };
        let Four { steps, turn_q, turn_k, write_k, write_v } = found;
        let fused = fuse::cache_write(&turn_q, &turn_k, [&write_k, &write_v]).filter(|call| target.runs(call));
        let last = steps.into_iter().max().unwrap_or(at);
        let Some(call) = fused.filter(|_| steps.iter().all(|step| edit.can_move_with(*step, last, &steps))) else {
            continue;
        };
        let label = edit.steps[steps[2]].as_ref().map_or_else(String::new, |step| step.label.clone());
        let label = format!("{}.kv_write", label.rsplit_once('.').map_or("", |(place, _)| place));
        let normed = norms_before(&edit, &call, (steps, last), target);
        let (call, lies) = match normed {
            Some((norms, call, q)) => {
                norms.into_iter().for_each(|norm| edit.remove(norm));
                (call, q)
            }
            None => (call, turn_q.x),
        };
        edit.replace(&steps, last, Step { label, call });
        for reader in edit.def_use.readers(turn_q.y.slot).to_vec() {
            let Some(Step { label, call: Call::FlashAttention(call) }) = &edit.steps[reader] else { continue };
            let (mut call, label) = (*call, label.clone());
            call.q = Tensor { slot: lies.slot, offset: call.q.offset - turn_q.y.offset + lies.offset, ..call.q };
            edit.replace(&[reader], reader, Step { label, call: call.into() });
        }
    }
    edit.finish();
}

/// The norms of queries and keys before the steps that become `write` at the place of the last of them, the call that takes the norms
/// in too, and where the queries lie then.
fn norms_before(
    edit: &Edit<'_>,
    write: &Call,
    (four, last): ([usize; 4], usize),
    target: &Target,
) -> Option<([usize; 2], Call, Tensor)> {
    let Call::KvWrite(kv) = write else { return None };
    let norm = |slot| match edit.steps[edit.def_use.writer(slot)?].as_ref()?.call {
        Call::RmsNorm(call) => Some(call),
        _ => None,
    };
    let (q, k) = (norm(kv.q.x.slot)?, norm(kv.k.slot)?);
    let steps = [edit.def_use.writer(kv.q.x.slot)?, edit.def_use.writer(kv.k.slot)?];
    // No other step reads what is normed, and the queries overwrite what no other step reads.
    let alone = edit.def_use.reader(kv.k.slot) == Some(four[1])
        && edit.is_result(kv.k.slot)
        && edit.def_use.reader(q.x.slot) == Some(steps[0])
        && edit.is_result(q.x.slot);
    let along: Vec<usize> = four.into_iter().chain(steps).collect();
    let moves = steps.iter().all(|step| edit.can_move_with(*step, last, &along));
    let call = fuse::normed_cache_write(write, &q, &k).filter(|call| alone && moves && target.joins(call))?;
    Some((steps, call, q.x))
}

/// The steps that `kv_write` stands for, with their numbers.
struct Four {
    steps: [usize; 4],
    turn_q: rope::Call,
    turn_k: rope::Call,
    write_k: set_rows::Call,
    write_v: set_rows::Call,
}

/// Finds them from the operands of attention.
fn four_steps(edit: &Edit<'_>, [q, k, v]: [Tensor; 3]) -> Option<Four> {
    let rope = |slot| match edit.steps[edit.def_use.writer(slot)?].as_ref()?.call {
        Call::Rope(call) => Some(call),
        _ => None,
    };
    let set_rows = |slot| match edit.steps[edit.def_use.writer(slot)?].as_ref()?.call {
        Call::SetRows(call) => Some(call),
        _ => None,
    };
    let (turn_q, write_k, write_v) = (rope(q.slot)?, set_rows(k.slot)?, set_rows(v.slot)?);
    let turn_k = rope(write_k.src.slot)?;
    let steps = [q.slot, write_k.src.slot, k.slot, v.slot].map(|slot| edit.def_use.writer(slot));
    let [Some(a), Some(b), Some(c), Some(d)] = steps else { return None };
    // RoPE writes the queries in place: no other step may read them before, and only attention after.
    let attends = |reader: &usize| matches!(&edit.steps[*reader], Some(Step { call: Call::FlashAttention(_), .. }));
    let alone = edit.def_use.reader(turn_q.x.slot) == Some(a)
        && edit.is_result(turn_q.x.slot)
        && edit.def_use.readers(turn_q.y.slot).iter().all(attends)
        && edit.def_use.reader(turn_k.y.slot) == Some(c)
        && c != d;
    alone.then_some(Four { steps: [a, b, c, d], turn_q, turn_k, write_k, write_v })
}

/// Attention of single tokens takes in the step that turns queries and writes caches.
pub(super) fn kv_append(plan: &mut Plan, target: &Target) {
    // Batch-invariant plans use one kernel for single tokens and prompts.
    if target.caps.is_none() || target.batch_invariant {
        return;
    }
    let ports = plan.ports;
    let mut edit = Edit::new(plan);
    for at in 0..edit.steps.len() {
        let Some(Step { label, call: attention @ Call::FlashAttention(call) }) = &edit.steps[at] else { continue };
        // No step between the two reads the queries or the new rows of the caches.
        let Some(writer) = edit.def_use.writer(call.k.slot).filter(|writer| edit.can_move(*writer, at)) else {
            continue;
        };
        let Some(Step { call: write @ Call::KvWrite(kv), .. }) = &edit.steps[writer] else { continue };
        if edit.def_use.readers(kv.q.x.slot) != [writer, at] {
            continue;
        }
        // The row that a token is written to is that of its position: the host fills both so, and each step for the next one.
        let table = call.pages.map(|pages| pages.table);
        let known = [Some((ports.rows, ports.table)), ports.windows.map(|places| (places.rows, places.table))];
        if !known.iter().flatten().any(|(rows, pages)| *rows == kv.ids && Some(*pages) == table) {
            continue;
        }
        let joined = fuse::kv_append(attention, write).filter(|call| target.joins(call));
        if let Some(call) = joined {
            let label = format!("{label}+kv_write");
            edit.replace(&[writer, at], at, Step { label, call });
        }
    }
    edit.finish();
}

/// Few tokens over many keys: workgroups take a run of keys each.
pub(super) fn splits(plan: &mut Plan, target: &Target) {
    if target.cores == 0 {
        return;
    }
    // Layers follow each other and share memory. Calls of one layer that may run side by side have different shapes.
    let mut memory: HashMap<[usize; 4], (Tensor, Tensor)> = HashMap::new();
    for at in 0..plan.steps.len() {
        let Call::FlashAttention(mut call) = plan.steps[at].call else { continue };
        // Batch-invariant: the split must not depend on the number of sequences.
        let alone = flash_attention::Call { q: call.q.narrow(3, 0, 1), ..call };
        let judged = if target.batch_invariant { alone } else { call };
        let short = judged.good_splits(Some(u32::try_from(target.cores).unwrap_or(u32::MAX)));
        let count = judged.most_splits(short);
        if count < 2 || call.q.shape[1] > MAX_GEMV_N || call.split.is_some() || call.sequences.is_some() {
            continue;
        }
        let floats = call.scratch_bytes(count) / 4;
        let counters = call.counters();
        let enough = |(partials, zeroed): &(Tensor, Tensor)| partials.len() >= floats && zeroed.len() >= counters;
        let known = memory.get(&call.q.shape).copied().filter(enough);
        let (scratch, zeroed) = known.unwrap_or_else(|| {
            let partials = plan.add("attention.partials", SlotKind::Scratch, TensorType::F32, [floats, 1, 1, 1]);
            (partials, plan.add("attention.counters", SlotKind::Zeroed, TensorType::I32, [counters, 1, 1, 1]))
        });
        memory.insert(call.q.shape, (scratch, zeroed));
        call.split = Some(Split { count, short, scratch, counters: Some(zeroed) });
        if target.runs(&call.into()) {
            plan.steps[at].call = call.into();
        }
    }
}
