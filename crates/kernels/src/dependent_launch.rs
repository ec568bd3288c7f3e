//! Whether dependent launches work on a device: a short proof, run once for each device and driver.

use std::sync::Arc;

use kiln_gpu::{
    Address, Caps, Cost, Device, Dispatch, Error, FIELD_BYTES, Groups, MemoryKind, Recorder, Shader, Span, Uploader,
    counter_bytes,
};

use crate::Call;
use crate::operation::{Choice, Launch};

/// Numbers that each stage of the proof copies, stages of the chain, and how often the chain runs.
const COLUMN: usize = 4096;
const STAGES: usize = 96;
const RUNS: usize = 20;

/// Largest N of GEMMs that are dependent launches: beyond it, waiting workgroups occupy cores that working ones need. An 8B model decodes 32
/// and 64 sequences 4 and 6 % faster with dependent launches, 128 sequences 3 % faster with barriers (NVIDIA H200).
const MAX_DEPENDENT_N: usize = 96;

kiln_gpu::params! {
    struct Params { column: Address, errors: Address, stage: u32, groups: u32 }
}

fn shader(threads: u32) -> Shader {
    let shader = Shader::new("probe.dependent_launch", "probes/dependent_launch.comp", Params::glsl());
    shader.define("WG", threads).define("COLUMN", COLUMN).launching_dependent()
}

/// Every kernel of these choices as a dependent launch. `None` if the parameter block of one has no room for the counter fields.
pub fn launching_dependent(
    choices: &[Choice],
    params: impl Fn(usize, usize) -> usize,
    caps: &Caps,
) -> Option<Vec<Choice>> {
    let room = caps.limits.max_push_bytes.min(256) as usize;
    let fits = |step: usize, launch: usize| params(step, launch) + FIELD_BYTES <= room;
    let launch = |l: &Launch| Launch { shader: l.shader.clone().launching_dependent(), ..l.clone() };
    let all = choices.iter().enumerate().all(|(step, c)| (0..c.launches.len()).all(|launch| fits(step, launch)));
    let of = |c: &Choice| Choice { path: c.path, launches: c.launches.iter().map(launch).collect() };
    all.then(|| choices.iter().map(of).collect())
}

/// Whether a plan with this call is slower with dependent launches. GEMMs of experts launch a workgroup for every tile that could exist, and
/// most of them exit at once. As dependent launches each would hold its core until the wait ends: a mixture of experts decoded 16
/// sequences 12 % more slowly (NVIDIA H200).
pub fn costs(call: &Call) -> bool {
    matches!(call, Call::MulMm(call) if call.ids.is_some() || call.product.b.shape[1] > MAX_DEPENDENT_N)
}

/// Whether dependent launches work on this device. Tried once for each device and driver, for less than a second, and remembered.
pub fn proved(device: &Arc<Device>) -> Result<bool, Error> {
    if !device.adapter.caps.dependent_launch {
        return Ok(false);
    }
    if let Some(known) = device.recall("dependent-launch") {
        return Ok(known == b"yes");
    }
    let found = prove(device)?;
    device.remember("dependent-launch", if found { b"yes" } else { b"no" });
    if !found {
        log::info!("{}: dependent launches do not work; barriers order kernels instead", device.adapter.name);
    }
    Ok(found)
}

/// Runs a chain of stages of different sizes, each of which copies what the previous one wrote, many times over.
pub fn prove(device: &Arc<Device>) -> Result<bool, Error> {
    let limit = device.adapter.caps.limits.max_workgroup_invocations;
    let cores = device.adapter.caps.cores_or_guess();
    let shaders: Vec<Shader> = [64, 256, 1024].map(|threads| shader(threads.min(limit))).to_vec();
    device.prepare(&shaders, &|| {})?;
    let column = device.allocate(MemoryKind::Device, 8 * COLUMN as u64)?;
    let errors = device.allocate(MemoryKind::Device, 4)?;
    let counters = device.allocate(MemoryKind::Device, counter_bytes(STAGES))?;
    let mut uploader = Uploader::new(device)?;
    for buffer in [&column, &errors, &counters] {
        uploader.zero(buffer)?;
    }
    uploader.finish()?;
    let mut recorder = Recorder::new(device)?.uncut().counting_on(&counters);
    let sizes = [cores, 1, 2 * cores, 33, 4 * cores];
    for stage in 0..STAGES {
        let groups = sizes[stage % sizes.len()];
        let pipeline = device.pipeline(&shaders[stage % shaders.len()])?;
        let params = Params { column: column.address(), errors: errors.address(), stage: stage as u32, groups };
        let half =
            |n: usize| Span { start: column.address().offset((n % 2 * 4 * COLUMN) as u64), bytes: 4 * COLUMN as u64 };
        let read = [half(stage)];
        recorder.dispatch(Dispatch {
            label: "dependent_launch",
            pipeline: &pipeline,
            params: &params.bytes(),
            groups: Groups::Direct([groups, 1, 1]),
            reads: &read,
            writes: &[half(stage + 1)],
            early: &[],
            cost: Cost { bytes: 8.0 * COLUMN as f64, flops: 0.0 },
        })?;
    }
    let commands = recorder.finish()?;
    if commands.counts().dependent_launches as usize != STAGES - 1 {
        return Ok(false);
    }
    for _ in 0..RUNS {
        commands.run()?;
        let (mut wrong, mut mark) = ([0; 4], [0; 4]);
        device.read(&errors, 0, &mut wrong)?;
        device.read(&counters, 0, &mut mark)?;
        // What the last stage left: a device that runs nothing has found no fault either.
        let mut last = [0; 4];
        device.read(&column, (STAGES % 2 * 4 * COLUMN) as u64, &mut last)?;
        if wrong != [0; 4] || mark != [0; 4] || u32::from_ne_bytes(last) as usize != STAGES {
            return Ok(false);
        }
    }
    Ok(true)
}
