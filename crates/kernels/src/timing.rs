//! Times calls on a device, the way a model would run them: over this many copies of their data that caches do not help,
//! with and without waiting for the call before. Judging results is `harness.rs`'s part.

use std::sync::Arc;

use kiln_gpu::{Address, Buffer, Commands, Cost, Device, Dispatch, Groups, MemoryKind, Recorder, Span, Uploader};

use crate::Call;
use crate::harness::Prepared;
use crate::host::HostMemory;
use crate::operation::Choice;
use crate::record::Error;
use crate::tensor::Tensor;

/// Copies together are at least this large: more than twice the last cache of any GPU.
const SPREAD_BYTES: u64 = 256 << 20;
/// More copies than this are not made of small cases: their cost is the launch, not the memory.
const MOST_COPIES: u64 = 256;
/// Times are the shortest of this many runs: some take two to four times as long for a reason that is not known (clocks were
/// steady), and nothing makes a run too short. Even so a time stands out now and then.
const RUNS: usize = 9;
/// A run should take about this long.
const RUN_SECONDS: f64 = 0.01;
/// Clocks of an idle GPU rise within this time of work.
const WARM_SECONDS: f64 = 0.1;
const MOST_CALLS: usize = 4096;

/// How long a call takes.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Timing {
    /// Seconds of a call that waits for the one before.
    pub dependent: f64,
    /// Seconds of a call among others that do not wait for each other.
    pub independent: f64,
    /// Copies of the data that the calls went through.
    pub copies: usize,
    /// Calls in one run.
    pub calls: usize,
}

/// Many copies of a call's slots on a device.
pub struct Copies {
    device: Arc<Device>,
    buffers: Vec<Buffer>,
    /// Where each slot starts in a copy.
    offsets: Vec<u64>,
    /// What dependent calls pretend to write.
    token: Buffer,
}

impl Copies {
    /// Copies the slots as often as caches demand, or keeps one copy where caches may help.
    pub fn new(device: &Arc<Device>, memory: &HostMemory, cached: bool) -> Result<Copies, Error> {
        let mut bytes = Vec::new();
        let mut offsets = Vec::new();
        for slot in &memory.slots {
            offsets.push(bytes.len() as u64);
            bytes.extend_from_slice(slot);
            bytes.resize(bytes.len().next_multiple_of(256), 0);
        }
        let length = (bytes.len() as u64).max(256);
        // A software device has the memory of the CPU, and its caches are not what is measured.
        let one = cached || device.adapter.caps.is_cpu;
        let wanted = if one { 1 } else { SPREAD_BYTES.div_ceil(length).clamp(1, MOST_COPIES) };
        let mut buffers = Vec::new();
        for _ in 0..wanted {
            buffers.push(device.allocate(MemoryKind::Device, length)?);
        }
        let mut uploader = Uploader::new(device)?;
        uploader.write(&buffers[0], 0, &bytes)?;
        uploader.finish()?;
        let mut recorder = Recorder::new(device)?;
        for copy in &buffers[1..] {
            recorder.copy((&buffers[0], 0), (copy, 0), length)?;
        }
        recorder.finish()?.run()?;
        let token = device.allocate(MemoryKind::Device, 256)?;
        Ok(Copies { device: Arc::clone(device), buffers, offsets, token })
    }

    /// Records `calls` calls, one copy after the other.
    fn record(&self, (call, choice): (&Call, &Choice), calls: usize, dependent: bool) -> Result<Commands, Error> {
        let operation = call.operation();
        let launches = &choice.launches;
        let work = operation.work();
        let share = launches.len().max(1) as f64;
        let cost = Cost { bytes: work.bytes / share, flops: work.flops / share };
        let mut recorder = Recorder::new(&self.device)?;
        for number in 0..calls {
            let buffer = &self.buffers[number % self.buffers.len()];
            let at =
                |t: &Tensor| -> Address { buffer.address().offset(self.offsets[t.slot.0 as usize] + t.offset as u64) };
            let span = |t: &Tensor| Span { start: at(t), bytes: t.span().1 as u64 };
            // A call that waits: its first launch writes what all launches of the call before read, and no more launches of
            // one call wait for each other than must.
            let token = |n: usize| Span { start: self.token.address().offset(128 * (n as u64 % 2)), bytes: 4 };
            for (i, launch) in launches.iter().enumerate() {
                let touches = operation.touches(choice, i);
                let mut reads: Vec<Span> = touches.reads.iter().map(span).collect();
                let mut writes: Vec<Span> = touches.writes.iter().map(span).collect();
                if dependent {
                    reads.push(token(number));
                    writes.extend((i == 0).then(|| token(number + 1)));
                }
                recorder.dispatch(Dispatch {
                    label: operation.name(),
                    pipeline: &self.device.pipeline(&launch.shader)?,
                    params: &operation.params(choice, i, &at),
                    groups: Groups::Direct(launch.groups),
                    reads: &reads,
                    writes: &writes,
                    early: &[],
                    cost,
                })?;
            }
        }
        Ok(recorder.finish()?)
    }

    /// Seconds of a call that waits for the one before, from two short runs: enough to tell good from bad.
    pub fn glance(&self, call: (&Call, &Choice)) -> Result<f64, Error> {
        let calls = self.buffers.len().clamp(1, 32);
        let commands = self.record(call, calls, true)?;
        run(&commands)?;
        Ok(run(&commands)?.min(run(&commands)?) / calls as f64)
    }

    /// Times a call.
    pub fn time(&self, call: (&Call, &Choice)) -> Result<Timing, Error> {
        let few = self.buffers.len().clamp(1, 16);
        let first = self.record(call, few, true)?;
        let start = std::time::Instant::now();
        while start.elapsed().as_secs_f64() < WARM_SECONDS {
            run(&first)?;
        }
        let one = run(&first)? / few as f64;
        let wanted = (RUN_SECONDS / one.max(1e-9)).ceil() as usize;
        // Whole rounds, so that every copy weighs the same.
        let calls = match wanted.min(MOST_CALLS) {
            n if n <= self.buffers.len() => n.max(1),
            n => n.next_multiple_of(self.buffers.len()),
        };
        let shortest = |dependent: bool| -> Result<f64, Error> {
            let commands = self.record(call, calls, dependent)?;
            run(&commands)?;
            let times = (0..RUNS).map(|_| run(&commands)).collect::<Result<Vec<f64>, Error>>()?;
            Ok(times.into_iter().fold(f64::INFINITY, f64::min) / calls as f64)
        };
        let dependent = shortest(true)?;
        Ok(Timing { dependent, independent: shortest(false)?, copies: self.buffers.len(), calls })
    }
}

/// Seconds of one run.
fn run(commands: &Commands) -> Result<f64, Error> {
    let clock = std::time::Instant::now();
    commands.run()?;
    let wall = clock.elapsed();
    Ok(commands.gpu_time().filter(|t| !t.is_zero()).unwrap_or(wall).as_secs_f64())
}

/// Times a prepared case; `cached`: again and again on the same data.
pub fn time(prepared: &Prepared, device: &Arc<Device>, cached: bool) -> Result<Timing, Error> {
    Copies::new(device, &prepared.memory, cached)?.time((&prepared.call, &prepared.choice))
}
