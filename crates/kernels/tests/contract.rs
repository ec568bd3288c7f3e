//! What every operation promises before any device is involved: its cases fit together, `pick` answers on every kind of
//! device, the parameter block fits every device, and the reference writes nothing but its results.

use std::ops::Range;

use kiln_gpu::{Address, Caps};
use kiln_kernels::KERNELS;
use kiln_kernels::case::{Case, Level};
use kiln_kernels::operation::{Path, rows_apart};
use kiln_kernels::tensor::{Slot, Tensor};

fn small_cases() -> impl Iterator<Item = Case> {
    KERNELS.iter().flat_map(|kernel| (kernel.cases)(Level::Small))
}

fn devices() -> [Caps; 3] {
    let mut software = Caps::example_nvidia();
    software.is_cpu = true;
    [Caps::least(), Caps::example_nvidia(), software]
}

#[test]
fn every_small_case_has_a_path_within_the_limits_or_names_the_limit() {
    let devices = devices();
    for case in small_cases() {
        let (call, _, _) = case.build();
        let call = call.operation();
        assert_eq!(call.check(), Ok(()), "{}", case.name);
        for caps in &devices {
            let mut choices = Path::ALL.iter().filter_map(|&path| call.pick(caps, Some(path)).ok()).peekable();
            if choices.peek().is_none() {
                // A call that insists on one form may be too large for a small device, and then says by how much.
                let refusal = call.pick(caps, None).unwrap_err();
                let limit = format!("fits {} shared bytes", caps.limits.max_shared_bytes);
                let room = format!("bytes of parameters, the device takes {}", caps.limits.max_push_bytes);
                // One that leaves its result quantised may have no workgroup that makes enough of it, and packed activations are for devices
                // that have their fragment layout.
                let known = [limit.as_str(), room.as_str(), "neighbouring rows", "matrices", "fragment"];
                let named = known.iter().any(|why| refusal.reason.contains(why));
                assert!(named, "{}: {refusal}", case.name);
            }
            for choice in choices {
                for (i, launch) in choice.launches.iter().enumerate() {
                    let bytes = call.params(&choice, i, &|t| Address(t.offset as u64)).len();
                    let room = caps.limits.max_push_bytes as usize;
                    assert!(bytes <= room, "{}: {bytes} bytes of parameters", case.name);
                    let fits = (0..3).all(|d| (1..=caps.limits.max_workgroup_count[d]).contains(&launch.groups[d]));
                    assert!(fits, "{}: {:?} workgroups", case.name, launch.groups);
                }
            }
        }
    }
}

/// Barriers come from what launches say they touch, and a software GPU would not miss one: so what they say is checked here.
#[test]
fn launches_touch_what_their_call_does_and_read_what_was_written() {
    for case in small_cases() {
        let (call, ..) = case.build();
        let operation = call.operation();
        let bytes = |t: &Tensor| {
            let (first, bytes) = t.span();
            (t.slot, first..first + bytes)
        };
        let within = |t: &Tensor, all: &[Tensor]| {
            let (slot, range) = bytes(t);
            let holds =
                |(of, whole): (Slot, Range<usize>)| of == slot && whole.start <= range.start && range.end <= whole.end;
            range.is_empty() || all.iter().any(|t| holds(bytes(t)))
        };
        let (reads, writes, scratch) = (operation.reads(), operation.writes(), operation.scratch());
        for (caps, path) in devices().iter().flat_map(|caps| Path::ALL.map(|path| (caps, path))) {
            let Ok(choice) = operation.pick(caps, Some(path)) else { continue };
            let mut written: Vec<Tensor> = Vec::new();
            for launch in 0..choice.launches.len() {
                let touches = operation.touches(&choice, launch);
                for t in &touches.reads {
                    let known = within(t, &reads) || within(t, &writes) || covered(bytes(t), &written, bytes);
                    assert!(known, "{} {path:?}: launch {launch} reads {t}, written by none before it", case.name);
                }
                for t in &touches.writes {
                    let own = within(t, &writes) || within(t, &scratch);
                    assert!(own, "{} {path:?}: launch {launch} writes {t}, not its own", case.name);
                }
                written.extend(touches.writes);
            }
            let left = writes.iter().find(|t| !within(t, &written));
            assert_eq!(left, None, "{} {path:?}: no launch writes it", case.name);
        }
    }
}

/// Whether every byte of a range lies in one of the tensors.
fn covered(
    (slot, range): (Slot, Range<usize>),
    tensors: &[Tensor],
    bytes: impl Fn(&Tensor) -> (Slot, Range<usize>),
) -> bool {
    let mut parts: Vec<Range<usize>> =
        tensors.iter().map(bytes).filter(|(of, _)| *of == slot).map(|(_, r)| r).collect();
    parts.sort_by_key(|part| part.start);
    let reached = parts.iter().fold(range.start, |at, part| if part.start <= at { at.max(part.end) } else { at });
    reached >= range.end
}

#[test]
fn references_write_nothing_but_their_results() {
    for case in small_cases() {
        let (call, _, before) = case.build();
        let mut after = before.clone();
        call.operation().reference(&mut after);
        let mut owned: Vec<Vec<bool>> = before.slots.iter().map(|slot| vec![false; slot.len()]).collect();
        for t in call.operation().writes() {
            for i in rows_apart(t.shape) {
                for block in 0..t.shape[0] / t.ty.block_len() {
                    let at = t.row_offset(i) + block * t.stride[0];
                    owned[t.slot.0 as usize][at..at + t.ty.block_bytes()].fill(true);
                }
            }
        }
        for (slot, owned) in owned.iter().enumerate() {
            let touched = (0..owned.len()).find(|&i| !owned[i] && after.slots[slot][i] != before.slots[slot][i]);
            assert_eq!(touched, None, "{}: byte of slot {slot}", case.name);
        }
    }
}
