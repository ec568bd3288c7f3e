//! What every operation promises before any device is involved: its cases fit together, `pick` answers on every kind of
//! device, the parameter block fits every device, and the reference writes nothing but its results.

use kiln_gpu::{Address, Caps};
use kiln_kernels::KERNELS;
use kiln_kernels::case::{Case, Level};
use kiln_kernels::operation::{Path, rows_apart};

fn small_cases() -> impl Iterator<Item = Case> {
    KERNELS.iter().flat_map(|kernel| (kernel.cases)(Level::Small))
}

fn devices() -> [Caps; 3] {
    let mut software = Caps::example_nvidia();
    software.is_cpu = true;
    [Caps::least(), Caps::example_nvidia(), software]
}

#[test]
fn every_small_case_has_a_path_with_128_bytes_of_parameters_or_names_the_limit() {
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
                assert!(refusal.reason.contains(&limit), "{}: {refusal}", case.name);
            }
            for choice in choices {
                for (i, launch) in choice.launches.iter().enumerate() {
                    let bytes = call.params(&choice, i, &|t| Address(t.offset as u64)).len();
                    assert!(bytes <= 128, "{}: {bytes} bytes of parameters", case.name);
                    let fits = (0..3).all(|d| (1..=caps.limits.max_workgroup_count[d]).contains(&launch.groups[d]));
                    assert!(fits, "{}: {:?} workgroups", case.name, launch.groups);
                }
            }
        }
    }
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
