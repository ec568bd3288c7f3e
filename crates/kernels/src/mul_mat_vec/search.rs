//! Finds the fastest split of `mul_mat_vec` on a device by trying: what `kiln tune` runs. Candidates get a glance each, the
//! best of them a proper measurement.

use std::sync::Arc;

use kiln_gguf::TensorType;
use kiln_gpu::{Caps, Device};

use super::cases::{plain, scratch_for};
use super::tuning::{RowGroup, Slice, Tuning};
use crate::Call;
use crate::case::Case;
use crate::operation::{Choice, Path};
use crate::record::Error;
use crate::timing::{Copies, Timing};

/// A product to tune.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Subject {
    /// Format of the weights.
    pub ty: TensorType,
    /// The path.
    pub path: Path,
    /// Elements of a row, rows, activations.
    pub shape: [usize; 3],
}

/// What a split gave.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Trial {
    /// The split.
    pub split: Tuning,
    /// Its time.
    pub timing: Timing,
}

/// What a search found.
#[derive(Clone, Debug, Default, PartialEq)]
pub struct Found {
    /// The split of the table, if it has one for the product.
    pub now: Option<Timing>,
    /// The best, fastest first; none where the device has no such path.
    pub trials: Vec<Trial>,
}

/// How many of the candidates are measured properly.
const FINALISTS: usize = 5;
/// Sums, or slices under way, of a thread: with more of either, registers spill.
const MOST_SUMS: u32 = 32;
const MOST_LOADS: u32 = 8;
/// A software GPU has nothing under way at once.
const MOST_LOADS_SOFTWARE: u32 = 4;

/// Every split worth a try.
fn candidates(subject: &Subject, caps: &Caps) -> Vec<Tuning> {
    let Subject { ty, shape: [_, _, columns], .. } = *subject;
    let slices: &[Slice] = if ty.is_quantised() && caps.is_cpu {
        // It compiles for longer than it runs, and strides only cost it.
        &[Slice::Groups(1), Slice::Groups(2)]
    } else if ty.is_quantised() {
        &[
            Slice::Groups(1),
            Slice::Groups(2),
            Slice::Quads { count: 2, step: 16 },
            Slice::Quads { count: 4, step: 16 },
            Slice::Quads { count: 4, step: 32 },
            Slice::Quads { count: 8, step: 32 },
        ]
    } else if caps.is_cpu {
        &[Slice::Groups(1)]
    } else {
        // Plain types: by eights or by fours.
        &[Slice::Groups(1), Slice::Quads { count: 1, step: 4 }]
    };
    let threads: &[u32] = if caps.is_cpu { &[8, 64] } else { &[128, 256, 512, 1024] };
    // Teams go from row to row where a core's threads are all there; more of them than run at once would only wait.
    let persistent = |threads: u32| -> &[u32] {
        match threads {
            _ if caps.is_cpu => &[0],
            1024 => &[1],
            512 => &[0, 1, 2],
            256 => &[0, 4],
            _ => &[0],
        }
    };
    let most_loads = if caps.is_cpu { MOST_LOADS_SOFTWARE } else { MOST_LOADS };
    let mut splits = Vec::new();
    for &slice in slices.iter().filter(|s| !ty.is_quantised() || ty.block_len().is_multiple_of(s.span())) {
        // Where activations are rounded in every workgroup, its teams share that work.
        let alone = caps.is_cpu || subject.path == Path::IntDot;
        let teams: &[RowGroup] = if alone { &[RowGroup::Subgroup] } else { &[RowGroup::Subgroup, RowGroup::Workgroup] };
        for (&row_group, &threads) in teams.iter().flat_map(|t| threads.iter().map(move |n| (t, n))) {
            for (rows, prefetch) in [1, 2, 4, 8].iter().flat_map(|&rows| [1, 2, 4].map(|prefetch| (rows, prefetch))) {
                let sums = rows * u32::try_from(columns).unwrap_or(u32::MAX);
                if sums <= MOST_SUMS && rows * prefetch <= most_loads {
                    // Loads without conditions pay where teams go on to further rows.
                    let rings = |persistent| [false, true].into_iter().filter(move |&ring| !ring || persistent > 0);
                    let loops = persistent(threads).iter().flat_map(|&n| rings(n).map(move |ring| (n, ring)));
                    splits.extend(loops.map(|(persistent, ring)| Tuning {
                        threads,
                        row_group,
                        rows,
                        prefetch,
                        slice,
                        persistent,
                        ring,
                    }));
                }
            }
        }
    }
    splits
}

/// Tries the candidates. `progress` hears how many are done, and of how many.
pub fn search(device: &Arc<Device>, subject: Subject, progress: &dyn Fn(usize, usize)) -> Result<Found, Error> {
    let caps = &device.adapter.caps;
    let Subject { ty, path, shape } = subject;
    let case = Case::new(format!("tune {ty} {shape:?}"), move |data| {
        let mut call = plain(data, ty, shape);
        call.scratch = scratch_for(data, &call.product.b);
        (call.into(), crate::case::Tolerance::Exact)
    });
    let (call, _, memory) = case.build();
    let Call::MulMatVec(call) = call else { return Ok(Found::default()) };
    let with = |split: Option<Tuning>| -> Option<(Call, Choice)> {
        let call = Call::from(super::Call { split, ..call.clone() });
        let choice = call.operation().pick(caps, Some(path)).ok()?;
        Some((call, choice))
    };
    let tries: Vec<(Tuning, Call, Choice)> = candidates(&subject, caps)
        .into_iter()
        .filter_map(|split| with(Some(split)).map(|(call, choice)| (split, call, choice)))
        .collect();
    if tries.is_empty() {
        return Ok(Found::default());
    }
    let now = with(None);
    let choices = tries.iter().map(|(_, _, choice)| choice).chain(now.iter().map(|(_, choice)| choice));
    let shaders: Vec<_> = choices.flat_map(|choice| choice.launches.iter().map(|l| l.shader.clone())).collect();
    device.prepare(&shaders, &|| {})?;
    let copies = Copies::new(device, &memory, false)?;
    let mut glances = Vec::new();
    for (number, (_, call, choice)) in tries.iter().enumerate() {
        glances.push((copies.glance((call, choice))?, number));
        progress(number + 1, tries.len());
    }
    glances.sort_by(|a, b| a.0.total_cmp(&b.0));
    let mut trials = Vec::new();
    for &(_, number) in glances.iter().take(FINALISTS) {
        let (split, call, choice) = &tries[number];
        trials.push(Trial { split: *split, timing: copies.time((call, choice))? });
    }
    trials.sort_by(|a, b| a.timing.dependent.total_cmp(&b.timing.dependent));
    let now = now.map(|(call, choice)| copies.time((&call, &choice))).transpose()?;
    Ok(Found { now, trials })
}
