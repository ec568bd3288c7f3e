//! Finds the fastest path and tile of `mul_mm` on a device by trying: what `kiln tune` runs for large N. Candidates get a glance
//! each, the best of them a proper measurement.

use std::sync::Arc;

use kiln_gguf::TensorType;
use kiln_gpu::Device;

use super::cases::timed_call;
use super::pick;
use super::tuning::{self, TileConfig};
use crate::Call;
use crate::case::{Case, Tolerance};
use crate::operation::{Choice, Path};
use crate::record::Error;
use crate::timing::{Copies, Timing};

/// A product to tune.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Subject {
    /// Format of the weights.
    pub ty: TensorType,
    /// Elements of a row, rows, activations.
    pub shape: [usize; 3],
}

/// What a cut gave.
#[derive(Clone, Debug, PartialEq)]
pub struct Trial {
    /// Its path.
    pub path: Path,
    /// The cut, as a tuning line has it.
    pub settings: &'static str,
    /// Its time.
    pub timing: Timing,
}

/// What a search found.
#[derive(Clone, Debug, Default, PartialEq)]
pub struct Found {
    /// What the product takes without a search, and its time.
    pub now: Option<(Path, Timing)>,
    /// The best, fastest first; none where the device has no matrix units.
    pub trials: Vec<Trial>,
}

/// How many of the candidates are measured properly.
const FINALISTS: usize = 4;

/// Cuts worth a try: the path, the fewest and the largest N they are tried for, and what a line says of them. `docs/ladder/mul_mm.md` has
/// what each gave on the cards that were at hand.
const CANDIDATES: &[(Path, [usize; 2], &str)] = {
    use Path::{Coopmat, Coopmat2, Fragment};
    const MANY: usize = usize::MAX;
    &[
        (Fragment, [2, 128], "tile=16x128 split_k=4x8 prefetch=1"),
        (Fragment, [2, 128], "tile=16x128 split_k=4x8 offsets prefetch=1"),
        (Fragment, [2, 128], "tile=16x128 split_k=2x8 prefetch=1"),
        (Fragment, [2, 16], "tile=16x128 split_k=4x16 prefetch=1"),
        (Fragment, [2, 64], "tile=16x128 split_k=4x8 prefetch=2"),
        (Fragment, [17, 128], "tile=16x128 split_k=2x2 prefetch=1"),
        (Fragment, [2, 32], "tile=16x128 split_k=3x10 occupancy=25 prefetch=1"),
        (Fragment, [2, 48], "tile=16x128 split_k=3x10 occupancy=25 offsets prefetch=1"),
        (Fragment, [33, 128], "tile=16x128 split_k=3x8 occupancy=16 offsets prefetch=1"),
        (Fragment, [65, 128], "tile=16x128 split_k=3x8 occupancy=12 offsets prefetch=1"),
        (Coopmat, [2, 16], "tile=64x16x64 warp=32x16 stages=1 prefetch=2"),
        (Coopmat, [2, 16], "tile=64x16x128 warp=16x16 stages=1"),
        (Coopmat, [17, 32], "tile=128x32x64 warp=32x32"),
        (Coopmat, [17, 32], "tile=128x32x128 warp=32x32 stages=1"),
        (Coopmat, [17, 64], "tile=64x32x64 warp=32x16 stages=1"),
        (Coopmat, [33, 128], "tile=128x64x64 warp=64x32 stages=1"),
        (Coopmat, [33, 256], "tile=64x64x64 warp=32x32 stages=1"),
        (Coopmat, [65, MANY], "tile=128x128x64 warp=64x32 stages=1 swizzle=16"),
        (Coopmat, [129, MANY], "tile=128x128x32 warp=64x64 stages=1 prefetch=2 swizzle=16"),
        (Coopmat, [129, MANY], "tile=128x128x32 warp=64x64 stages=1 swizzle=16"),
        (Coopmat, [129, MANY], "tile=128x256x32 warp=64x64 stages=1 prefetch=2 swizzle=16"),
        (Coopmat, [129, MANY], "tile=256x128x32 warp=64x64 stages=1 prefetch=2 swizzle=8"),
        (Coopmat2, [17, 64], "tile=64x32x64 threads=128"),
        (Coopmat2, [17, 256], "tile=64x64x64 threads=128"),
        (Coopmat2, [33, 512], "tile=128x64x64 threads=128"),
        (Coopmat2, [65, MANY], "tile=128x128x64 threads=256 swizzle=16"),
        (Coopmat2, [65, MANY], "tile=128x128x32 threads=256 swizzle=16"),
        (Coopmat2, [129, MANY], "tile=128x256x32 threads=256 unroll=8 swizzle=16"),
        (Coopmat2, [129, MANY], "tile=128x256x32 threads=256 unroll=16 swizzle=16"),
    ]
};

/// The candidates of N activations.
fn candidates(columns: usize) -> impl Iterator<Item = (Path, &'static str, TileConfig)> {
    CANDIDATES.iter().filter(move |(_, [least, most], _)| (least..=most).contains(&&columns)).map(
        |&(path, _, settings)| {
            let config = tuning::config_of(path, settings).expect("a test reads every candidate");
            (path, settings, config)
        },
    )
}

/// Tries the candidates. `progress` hears how many are done, and of how many.
pub fn search(device: &Arc<Device>, subject: Subject, progress: &dyn Fn(usize, usize)) -> Result<Found, Error> {
    let caps = &device.adapter.caps;
    let Subject { ty, shape } = subject;
    let case = Case::new(format!("tune {ty} {shape:?}"), move |data| {
        (timed_call(data, ty, shape, false).into(), Tolerance::Exact)
    });
    let (call, _, memory) = case.build();
    let Call::MulMm(product) = &call else { return Ok(Found::default()) };
    let tries: Vec<(Path, &'static str, Choice)> = candidates(shape[2])
        .filter_map(|(path, settings, config)| {
            Some((path, settings, pick::with_config(product, caps, path, config).ok()?))
        })
        .collect();
    if tries.is_empty() {
        return Ok(Found::default());
    }
    let now = call.operation().pick(caps, None)?;
    let choices = tries.iter().map(|(.., choice)| choice).chain([&now]);
    let shaders: Vec<_> = choices.flat_map(|choice| choice.launches.iter().map(|l| l.shader.clone())).collect();
    device.prepare(&shaders, &|| {})?;
    let copies = Copies::new(device, &memory, false)?;
    let mut glances = Vec::new();
    for (number, (.., choice)) in tries.iter().enumerate() {
        glances.push((copies.glance((&call, choice))?, number));
        progress(number + 1, tries.len());
    }
    glances.sort_by(|a, b| a.0.total_cmp(&b.0));
    let mut trials = Vec::new();
    for &(_, number) in glances.iter().take(FINALISTS) {
        let &(path, settings, ref choice) = &tries[number];
        trials.push(Trial { path, settings, timing: copies.time((&call, choice))? });
    }
    trials.sort_by(|a, b| a.timing.dependent.total_cmp(&b.timing.dependent));
    Ok(Found { now: Some((now.path, copies.time((&call, &now))?)), trials })
}

/// The lines that make products of a format take a trial's path and cut up to N.
pub fn lines(subject: &Subject, trial: &Trial, software: bool) -> [String; 2] {
    let Subject { ty, shape: [_, _, columns] } = subject;
    // Packed types take the lines of their base.
    let (format, path) = (ty.base().name().to_lowercase(), trial.path.name());
    // For files that `KILN_TUNING` names; of what is kept for a device it does not count.
    let decode =
        if tuning::of_all_devices().is_ok_and(|table| table.preferred(*ty, *columns).1) { " decode" } else { "" };
    let device = if software { "cpu" } else { "gpu" };
    [
        format!("{} {device} {format} {path} {columns} {}", super::NAME, trial.settings),
        format!("{} * {format} prefer {columns} {path}{decode}", super::NAME),
    ]
}

#[cfg(test)]
mod tests {
    use kiln_gpu::Caps;

    use super::*;
    use crate::case::Data;

    #[test]
    fn every_candidate_can_be_read_and_is_taken_by_a_large_gpu() {
        let caps = Caps::example_nvidia();
        for &(path, [least, most], settings) in CANDIDATES {
            let config = tuning::config_of(path, settings).unwrap();
            let n = most.min(2048).max(least);
            let case = Case::new("a product", move |data: &mut Data| {
                (timed_call(data, TensorType::F16, [4096, 4096, n], false).into(), Tolerance::Exact)
            });
            let Call::MulMm(call) = case.call() else { panic!("a product of many columns") };
            let choice = pick::with_config(&call, &caps, path, config).unwrap_or_else(|e| panic!("{settings}: {e}"));
            assert_eq!(choice.path, path);
        }
    }

    #[test]
    fn what_was_found_is_lines_that_can_be_read() {
        let timing = Timing { dependent: 1.0, independent: 1.0, copies: 1, calls: 1 };
        let trial = |path, settings| Trial { path, settings, timing };
        let subject = Subject { ty: TensorType::Q6_Kx8, shape: [4096, 14336, 32] };
        let found = lines(&subject, &trial(Path::Fragment, "tile=16x128 split_k=4x8 prefetch=1"), false);
        assert_eq!(
            found,
            ["mul_mm gpu q6_k fragment 32 tile=16x128 split_k=4x8 prefetch=1", "mul_mm * q6_k prefer 32 fragment"]
        );
        assert_eq!(tuning::check(&found.join("\n")), Ok(()));
        let many = Subject { shape: [4096, 14336, 2048], ..subject };
        let found = lines(&many, &trial(Path::Coopmat, "tile=128x128x64 warp=64x32 stages=1 swizzle=16"), false);
        assert_eq!(found[1], "mul_mm * q6_k prefer 2048 coopmat decode");
        assert_eq!(tuning::check(&found.join("\n")), Ok(()));
    }
}
