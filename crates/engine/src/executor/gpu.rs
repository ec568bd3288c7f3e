//! The GPU executor: weights go to the device once, each plan is recorded once and submitted again and again.

use std::collections::HashMap;
use std::sync::Arc;
use std::time::{Duration, Instant};

use kiln_gguf::{Gguf, TensorType};
use kiln_gpu::{
    Address, Buffer, Commands, Device, MemoryKind, Recorder, StepTime, Submission, Uploader, counter_bytes,
};
use kiln_kernels::operation::Choice;
use kiln_kernels::record::record;
use kiln_kernels::tensor::{Slot, Tensor};
use kiln_kernels::{dependent_launch, dequantise};

use super::crossings::{Crossing, Crossings, staged};
use super::options::{Options, Order, Sums};
use super::upload::{Pieces, group_bytes, upload};
use super::warm::{Warmer, launching_dependent, picked, shaders, waits_by_itself};
use super::{BATCH, Executor, FORGOTTEN, Fetched, INVARIANT_BATCH, Memory, PlanId, Progress, Range, Ticket};
use crate::Error;
use crate::lower::{PackB, Target, Weights};
use crate::plan::{Fixed, Plan, SlotInfo, SlotKind};
use crate::weights;

/// Activations of 2048 tokens of a model with 8 billion weights take half a gigabyte.
const MEMORY_FOR_LARGE_BATCHES: u64 = 16 << 30;
/// Runs after which a plan keeps the number of submits it was recorded with.
const MOST_TRIALS: usize = 16;

/// Runs plans on a Vulkan device.
pub struct GpuExecutor {
    device: Arc<Device>,
    options: Options,
    fixed: Vec<Buffer>,
    /// The type and extents of each shared slot as it lies on the device, packed where it was.
    loaded: Vec<(TensorType, [usize; 4])>,
    /// Weights as F16, by the slot they were decoded from.
    decoded: HashMap<Slot, Buffer>,
    plans: Vec<Option<Prepared>>,
    /// Where scratch slots of plans lie: as large as the largest plan needs. Plans that were made ready before it grew keep
    /// the one they have.
    arena: Option<Buffer>,
    /// Host memory that what arrives from other devices is copied from, and that what leaves for them is copied to: as large as
    /// the largest part of a plan needs.
    stages: [Option<Buffer>; 2],
    /// The same for weights that are brought for a run. Parts take them in turn: while one is copied from and multiplied, the host
    /// fills the other.
    ring: [Option<Buffer>; 2],
    /// Parts of plans that have weights brought.
    streaming: usize,
    /// Pieces of shared slots that are on their way to the device.
    sent: Vec<(Submission, Commands)>,
    /// Whether the steps of generating wait for each other by themselves; not known before the first such plan.
    launches_dependent: Option<bool>,
}

/// What steps that wait for each other by themselves need.
struct Counters {
    buffer: Buffer,
    /// Host memory of the mark that a step leaves which has waited for too long.
    mark: Buffer,
}

/// Where the operands of steps lie, and what steps need besides.
struct Places<'a> {
    buffers: &'a [Buffer],
    bases: &'a [u64],
    results: &'a [(Slot, Buffer)],
    crossings: &'a Crossings,
    counters: Option<&'a Counters>,
}

struct Prepared {
    plan: Plan,
    choices: Vec<Choice>,
    /// One buffer a slot: the shared ones, then the plan's own.
    buffers: Vec<Buffer>,
    /// Where each slot begins in its buffer.
    bases: Vec<u64>,
    /// Host memory of the results, by slot: the commands end with a copy, because kernels that write to the host a few
    /// bytes at a time would wait for the bus.
    results: Vec<(Slot, Buffer)>,
    crossings: Crossings,
    /// Whether `results` are those of the last run.
    copied: bool,
    /// Where steps wait for each other by themselves.
    counters: Option<Counters>,
    commands: Commands,
    /// Runs that were waited for to learn whether the commands need more than one submit.
    trials: usize,
}

impl Prepared {
    /// The buffer of a slot, and where the slot begins in it.
    fn place(&self, slot: Slot) -> (&Buffer, u64) {
        (&self.buffers[slot.0 as usize], self.bases.get(slot.0 as usize).copied().unwrap_or(0))
    }

    /// All there is, with the results that are copied at the end.
    fn memory(&self) -> Places<'_> {
        let Prepared { buffers, bases, results, crossings, counters, .. } = self;
        Places { buffers, bases, results, crossings, counters: counters.as_ref() }
    }

    /// All there is, for a part of the steps.
    fn places(&self) -> Places<'_> {
        const NONE: &Crossings = &Crossings { streamed: Vec::new(), arriving: Vec::new(), leaving: Vec::new() };
        Places { results: &[], crossings: NONE, ..self.memory() }
    }

    /// Where the host writes or reads a slot that crosses over.
    fn crossing(&self, slot: Slot) -> Option<&Crossing> {
        let Crossings { streamed, arriving, leaving } = &self.crossings;
        streamed.iter().chain(arriving).chain(leaving).find(|crossing| crossing.slot == slot)
    }

    fn steps(&self) -> Vec<(&str, &kiln_kernels::Call, &Choice)> {
        steps(&self.plan, &self.choices)
    }
}

fn steps<'p>(plan: &'p Plan, choices: &'p [Choice]) -> Vec<(&'p str, &'p kiln_kernels::Call, &'p Choice)> {
    plan.steps.iter().zip(choices).map(|(s, choice)| (s.label.as_str(), &s.call, choice)).collect()
}

impl GpuExecutor {
    /// An executor without a model.
    pub fn new(device: Arc<Device>) -> GpuExecutor {
        GpuExecutor::with_options(device, Options::default())
    }

    /// An executor without a model that keeps weights so.
    pub fn with_options(device: Arc<Device>, options: Options) -> GpuExecutor {
        let decoded = HashMap::new();
        GpuExecutor {
            device,
            options,
            fixed: Vec::new(),
            loaded: Vec::new(),
            decoded,
            plans: Vec::new(),
            arena: None,
            stages: [None, None],
            ring: [None, None],
            streaming: 0,
            sent: Vec::new(),
            launches_dependent: None,
        }
    }

    /// How weights lie on the device, and how much room there is for more.
    fn weights(&self) -> Weights {
        let Options { packing, f16_cache, sums, .. } = self.options;
        let (total, free) = self.memory_now();
        let kept: u64 = self.decoded.values().map(Buffer::bytes).sum();
        // Before anything is loaded plans are counted as they are without such weights: they take the most memory then.
        let room = if self.fixed.is_empty() { 0 } else { (total / 4).saturating_sub(kept).min(free / 2) };
        let kept = self.decoded.keys().copied().collect();
        Weights { packing, f16_cache, room, cached: kept, half_sums: sums == Sums::F16 }
    }

    /// Memory for the scratch slots of a plan that needs this many bytes; `None` for a plan whose slots have no places.
    fn arena(&mut self, bytes: u64) -> Result<Option<Buffer>, Error> {
        if bytes == 0 {
            return Ok(None);
        }
        if self.arena.as_ref().is_none_or(|arena| arena.bytes() < bytes) {
            self.arena = None;
            self.arena = Some(self.allocate(bytes)?);
        }
        Ok(self.arena.clone())
    }

    /// Host memory for what crosses over in a plan.
    fn crossings(&mut self, plan: &Plan) -> Result<Crossings, Error> {
        let [arrives, leaves] = &mut self.stages;
        let arriving = staged(&self.device, arrives, MemoryKind::Upload, plan, |kind| *kind == SlotKind::Recv)?;
        let leaving = staged(&self.device, leaves, MemoryKind::Readback, plan, |kind| *kind == SlotKind::Send)?;
        let ring = &mut self.ring[self.streaming % 2];
        let streams = |kind: &SlotKind| matches!(kind, SlotKind::StreamedWeight(_));
        let streamed = staged(&self.device, ring, MemoryKind::Upload, plan, streams)?;
        self.streaming += usize::from(!streamed.is_empty());
        Ok(Crossings { streamed, arriving, leaving })
    }

    fn prepared(&self, plan: PlanId) -> &Prepared {
        self.plans[plan.0].as_ref().expect(FORGOTTEN)
    }

    fn prepared_mut(&mut self, plan: PlanId) -> &mut Prepared {
        self.plans[plan.0].as_mut().expect(FORGOTTEN)
    }

    fn buffer(&self, range: &Range) -> &Buffer {
        &self.fixed[range.slot.0 as usize]
    }

    /// Dispatches and barriers of a prepared plan.
    pub fn counts(&self, plan: PlanId) -> kiln_gpu::Counts {
        self.prepared(plan).commands.counts()
    }

    /// The weights of a shared slot in another form: packed, as they were loaded, or decoded.
    fn form(&mut self, of: Slot, form: &SlotInfo) -> Result<Buffer, Error> {
        let at = of.0 as usize;
        if form.ty == TensorType::F16 {
            let (ty, shape) = self.loaded[at];
            return self.decode(&Tensor::dense(of, ty, shape));
        }
        assert_eq!(self.loaded[at].0, form.ty, "weights should have been packed as the plan was told");
        Ok(self.fixed[at].clone())
    }

    /// Bytes in all, and bytes that may still be taken: the driver's numbers, within the limit that was set.
    fn memory_now(&self) -> (u64, u64) {
        let (total, free) = self.device.memory_now();
        match self.options.memory_limit {
            Some(limit) => (total.min(limit), free.min(limit.saturating_sub(self.device.held_bytes()))),
            None => (total, free),
        }
    }

    /// Memory of the device, within the limit that was set.
    fn allocate(&self, bytes: u64) -> Result<Buffer, Error> {
        if let Some(limit) = self.options.memory_limit
            && self.device.held_bytes() + bytes > limit
        {
            return Err(Error::MemoryLimit { needed: bytes, held: self.device.held_bytes(), limit });
        }
        Ok(self.device.allocate(MemoryKind::Device, bytes)?)
    }

    /// Whether a step reads weights as the file has them which were packed for the device: it cannot.
    fn refuse_unpacked(&self, plan: &Plan) -> Result<(), Error> {
        for step in &plan.steps {
            let operation = step.call.operation();
            let loaded = |t: &Tensor| self.loaded.get(t.slot.0 as usize).filter(|_| plan.kind(t) == &SlotKind::Weight);
            let left = operation.reads().into_iter().find(|t| loaded(t).is_some_and(|(ty, _)| ty.base() != *ty));
            if let Some(t) = left {
                let why = format!("{} reads {t}, which was packed and cannot be read so", operation.name());
                return Err(Error::Plan { step: step.label.clone(), why });
            }
        }
        Ok(())
    }

    /// The weights of a whole slot as F16, decoded now if they are new.
    fn decode(&mut self, src: &Tensor) -> Result<Buffer, Error> {
        if let Some(buffer) = self.decoded.get(&src.slot) {
            return Ok(buffer.clone());
        }
        let dst = Tensor::dense(Slot(u32::MAX), TensorType::F16, src.shape);
        let to = self.device.allocate(MemoryKind::Device, 2 * src.len() as u64)?;
        let call = kiln_kernels::Call::from(dequantise::Call { src: *src, dst });
        let choice =
            call.operation().pick(&self.device.adapter.caps, None).map_err(kiln_kernels::record::Error::from)?;
        let from = &self.fixed[src.slot.0 as usize];
        let at = |t: &Tensor| if t.slot == dst.slot { to.address() } else { from.address() };
        let mut recorder = Recorder::new(&self.device)?;
        record(&mut recorder, &self.device, "decode", (&call, &choice), &at)?;
        recorder.finish()?.run()?;
        self.decoded.insert(src.slot, to.clone());
        Ok(to)
    }

    /// Whether the steps of generating wait for each other by themselves: as the options say, or as the device has proved.
    fn launches_dependent(&mut self) -> Result<bool, Error> {
        if self.launches_dependent.is_none() {
            self.launches_dependent = Some(match self.options.order {
                Order::Proved => dependent_launch::proved(&self.device)?,
                Order::DependentLaunch | Order::Stalls => self.device.adapter.caps.memory_model,
                Order::Barriers => false,
            });
        }
        Ok(self.launches_dependent == Some(true))
    }

    /// Lets the steps of a plan that continues by itself wait for each other, where they can.
    fn dependent_launch(&mut self, plan: &Plan, choices: &mut Vec<Choice>) -> Result<Option<Counters>, Error> {
        if !waits_by_itself(plan) || !self.launches_dependent()? {
            return Ok(None);
        }
        let Some(launching_dependent) = launching_dependent(plan, choices, &self.device) else {
            return Ok(None);
        };
        *choices = launching_dependent;
        let dispatches = choices.iter().map(|c| c.launches.len()).sum();
        let buffer = self.device.allocate(MemoryKind::Device, counter_bytes(dispatches))?;
        let mut uploader = Uploader::new(&self.device)?;
        uploader.zero(&buffer)?;
        if self.options.order == Order::Stalls {
            uploader.write(&buffer, 0, &[1, 0, 0, 0])?;
        }
        uploader.finish()?;
        let mark = self.device.allocate(MemoryKind::Readback, 4)?;
        mark.write(0, &[0; 4]);
        Ok(Some(Counters { buffer, mark }))
    }

    /// Whether a step of the plan has waited for another one for too long in a run that has ended. Then barriers order the
    /// steps of all plans from now on.
    fn has_stalled(&mut self, plan: PlanId) -> Result<bool, Error> {
        let mut mark = [0; 4];
        match &self.prepared(plan).counters {
            Some(counters) => counters.mark.read(0, &mut mark),
            None => return Ok(false),
        }
        if mark == [0; 4] {
            return Ok(false);
        }
        log::warn!(
            "{}: a step waited in vain for the one before; barriers order them from now on (KILN_DISABLE=dependent_launch does so from \
             the start)",
            self.device.adapter.name
        );
        self.device.remember("hand-over", b"no");
        self.launches_dependent = Some(false);
        self.device.wait_idle()?;
        for at in 0..self.plans.len() {
            let Some(prepared) = self.plans[at].as_mut().filter(|prepared| prepared.counters.is_some()) else {
                continue;
            };
            prepared.counters = None;
            prepared.choices = picked(&prepared.plan, &self.device)?;
            self.record_again(PlanId(at))?;
        }
        Ok(true)
    }

    /// Whether the results of a run that has ended are what they should be.
    fn check_run(&mut self, plan: PlanId) -> Result<(), Error> {
        // What a stalled step computed says nothing of ranges.
        if self.has_stalled(plan)? {
            return Err(Error::Stalled);
        }
        if self.is_out_of_range(plan) {
            return Err(Error::OutOfRange);
        }
        Ok(())
    }

    /// Whether a step of the plan has set its flag. Then plans for this model no longer pack activations: one that was prepared before sets it
    /// again.
    fn is_out_of_range(&mut self, plan: PlanId) -> bool {
        let prepared = self.prepared(plan);
        let is_flag = |(slot, _): &&(Slot, Buffer)| prepared.plan.slots[slot.0 as usize].kind == SlotKind::Flag;
        let mut flag = [0; 4];
        prepared.results.iter().filter(is_flag).for_each(|(_, result)| result.read(0, &mut flag));
        if flag == [0; 4] {
            return false;
        }
        if self.options.pack_b != PackB::Never {
            log::warn!(
                "{}: activations left the range of an f16, so steps no longer pack them for matrix units from now on; \
                 steps of several sequences take a little longer",
                self.device.adapter.name
            );
            self.options.pack_b = PackB::Never;
        }
        true
    }

    /// Takes memory for every slot and hands in what it is filled with.
    fn load_slots<'g>(
        &mut self,
        fixed: &'g Fixed,
        gguf: &'g Gguf,
        pieces: &Pieces<'g>,
        progress: Progress<'_>,
    ) -> Result<(), Error> {
        let total = fixed.here().map(|s| s.bytes as u64).sum();
        let mut done = 0;
        let mut uploader = Uploader::new(&self.device)?;
        let weights = self.weights();
        let mut nothing: Option<Buffer> = None;
        let mut taking = Duration::ZERO;
        let staging_buffers = self.staging_buffers(fixed, &mut uploader)?;
        for slot in &fixed.slots {
            if let SlotKind::StagedCache(place) = slot.kind {
                self.fixed.push(staging_buffers[place].clone());
                self.loaded.push((slot.ty, slot.shape));
                continue;
            }
            if slot.kind == SlotKind::Remote {
                let buffer = match &nothing {
                    Some(buffer) => buffer.clone(),
                    None => nothing.insert(self.device.allocate(MemoryKind::Device, 4)?).clone(),
                };
                self.fixed.push(buffer);
                self.loaded.push((slot.ty, slot.shape));
                continue;
            }
            let weight = if slot.kind == SlotKind::Weight { Some(gguf.tensor(&slot.name)?) } else { None };
            let caps = &self.device.adapter.caps;
            let packed = weight.and_then(|info| weights.packed_type(info.ty, info.shape[0], caps));
            let bytes = packed.map_or(slot.bytes, |ty| slot.bytes / group_bytes(ty) * ty.block_bytes());
            let start = Instant::now();
            let buffer = self.allocate(bytes as u64)?;
            taking += start.elapsed();
            match (&slot.kind, weight) {
                (_, Some(info)) => pieces.put(&buffer, packed, weights::data(gguf, info)?),
                (SlotKind::Constant(bytes), _) => uploader.write(&buffer, 0, bytes)?,
                // Rows of the cache past the length are never used, but NaN left in memory must not be there either.
                _ => uploader.zero(&buffer)?,
            }
            self.fixed.push(buffer);
            self.loaded.push((packed.unwrap_or(slot.ty), slot.shape));
            done += slot.bytes as u64;
            progress(done, total);
        }
        log::debug!("all weights are handed in; taking memory for them took {taking:.0?}");
        Ok(uploader.finish()?)
    }

    /// Memory for the caches and states of other devices that come here for a part of a plan. As in a cache of its own, there must be no NaN.
    fn staging_buffers(&self, fixed: &Fixed, uploader: &mut Uploader) -> Result<Vec<Buffer>, Error> {
        let mut places: Vec<u64> = Vec::new();
        for slot in &fixed.slots {
            if let SlotKind::StagedCache(place) = slot.kind {
                places.resize(places.len().max(place + 1), 4);
                places[place] = places[place].max(slot.bytes as u64);
            }
        }
        let staging_buffer = |bytes: u64| {
            let buffer = self.allocate(bytes)?;
            uploader.zero(&buffer)?;
            Ok(buffer)
        };
        places.into_iter().map(staging_buffer).collect()
    }

    /// Copies between shared slots and host memory, which lie there one after the other.
    fn pieces(&self, ranges: &[Range], stage: &Buffer, to_stage: bool) -> Result<Commands, Error> {
        let mut recorder = Recorder::new(&self.device)?;
        let mut at = 0;
        for range in ranges {
            let (here, there) = ((self.buffer(range), range.offset as u64), (stage, at));
            let (from, to) = if to_stage { (here, there) } else { (there, here) };
            recorder.copy(from, to, range.bytes as u64)?;
            at += range.bytes as u64;
        }
        Ok(recorder.finish()?)
    }

    fn record_again(&mut self, plan: PlanId) -> Result<(), Error> {
        let prepared = self.prepared(plan);
        let commands = self.record(Recorder::new(&self.device)?, &prepared.steps(), prepared.memory())?;
        self.prepared_mut(plan).commands = commands;
        Ok(())
    }

    fn record(
        &self,
        recorder: Recorder,
        steps: &[(&str, &kiln_kernels::Call, &Choice)],
        Places { buffers, bases, results, crossings, counters }: Places<'_>,
    ) -> Result<Commands, Error> {
        let mut recorder = match counters {
            Some(counters) => recorder.counting_on(&counters.buffer),
            None => recorder,
        };
        let at = |t: &Tensor| -> Address {
            let slot = t.slot.0 as usize;
            buffers[slot].address().offset(bases.get(slot).copied().unwrap_or(0) + t.offset as u64)
        };
        let base = |slot: Slot| bases.get(slot.0 as usize).copied().unwrap_or(0);
        for Crossing { slot, stage, offset, bytes } in crossings.streamed.iter().chain(&crossings.arriving) {
            recorder.copy((stage, *offset), (&buffers[slot.0 as usize], base(*slot)), *bytes)?;
        }
        for (label, call, choice) in steps {
            record(&mut recorder, &self.device, label, (call, choice), &at)?;
        }
        for (slot, result) in results {
            recorder.copy((&buffers[slot.0 as usize], 0), (result, 0), result.bytes())?;
        }
        for Crossing { slot, stage, offset, bytes } in &crossings.leaving {
            recorder.copy((&buffers[slot.0 as usize], base(*slot)), (stage, *offset), *bytes)?;
        }
        if let Some(counters) = counters {
            recorder.copy((&counters.buffer, 0), (&counters.mark, 0), 4)?;
        }
        Ok(recorder.finish()?)
    }
}

/// Most tokens of a prompt that are read at once on a device with so much memory.
pub fn batch_on(memory_bytes: u64, is_software: bool) -> usize {
    if memory_bytes >= MEMORY_FOR_LARGE_BATCHES && !is_software { 4 * BATCH } else { BATCH }
}

impl Executor for GpuExecutor {
    fn describe(&self) -> String {
        self.device.adapter.describe()
    }

    fn load(&mut self, fixed: &Fixed, gguf: &Gguf, progress: Progress<'_>) -> Result<(), Error> {
        self.plans.clear();
        self.decoded.clear();
        self.fixed.clear();
        self.loaded.clear();
        let device = Arc::clone(&self.device);
        upload(&device, |pieces| self.load_slots(fixed, gguf, pieces, progress))?;
        log::debug!("weights are on the device");
        Ok(())
    }

    fn warmer(&self) -> Option<Warmer> {
        Some(Warmer::new(Arc::clone(&self.device), self.options.order == Order::Proved))
    }

    fn reserve(&mut self, bytes: usize) -> Result<(), Error> {
        self.arena(bytes as u64).map(drop)
    }

    fn prepare(&mut self, plan: Plan) -> Result<PlanId, Error> {
        assert_eq!(plan.n_fixed, self.fixed.len(), "the plan should stand on the slots that were loaded");
        self.refuse_unpacked(&plan)?;
        let start = Instant::now();
        let mut choices = picked(&plan, &self.device)?;
        let counters = self.dependent_launch(&plan, &mut choices)?;
        let (picked_in, made) = (start.elapsed(), self.device.pipeline_counts().made);
        self.device.prepare(&shaders(&choices), &|| {})?;
        let (pipelines_in, made) = (start.elapsed(), self.device.pipeline_counts().made - made);

        let mut buffers = self.fixed.clone();
        let mut bases = vec![0; buffers.len()];
        let mut results = Vec::new();
        let arena = self.arena(plan.arena as u64)?;
        for slot in &plan.slots[plan.n_fixed..] {
            let bytes = slot.bytes as u64;
            if let SlotKind::WeightVariant(of) = slot.kind {
                buffers.push(self.form(of, slot)?);
                bases.push(0);
                continue;
            }
            if let (Some(place), Some(arena)) = (slot.place, &arena) {
                buffers.push(arena.clone());
                bases.push(place as u64);
                continue;
            }
            bases.push(0);
            let kind = match slot.kind {
                SlotKind::Input | SlotKind::Control => MemoryKind::Shared,
                _ => MemoryKind::Device,
            };
            if matches!(slot.kind, SlotKind::Output | SlotKind::Log | SlotKind::Flag) {
                let number = u32::try_from(buffers.len()).expect("slots are numbered with 32 bits");
                results.push((Slot(number), self.device.allocate(MemoryKind::Readback, bytes)?));
            }
            let buffer = self.device.allocate(kind, bytes.max(4))?;
            if matches!(slot.kind, SlotKind::Zeroed | SlotKind::Flag) {
                let mut uploader = Uploader::new(&self.device)?;
                uploader.zero(&buffer)?;
                uploader.finish()?;
            }
            buffers.push(buffer);
        }
        let crossings = self.crossings(&plan)?;
        let places = Places {
            buffers: &buffers,
            bases: &bases,
            results: &results,
            crossings: &crossings,
            counters: counters.as_ref(),
        };
        let commands = self.record(Recorder::new(&self.device)?, &steps(&plan, &choices), places)?;
        let ms = |d: Duration| 1e3 * d.as_secs_f64();
        log::debug!(
            "{} steps: kernels chosen in {:.1} ms, {made} new ones made in {:.1} ms, recorded in {:.1} ms",
            plan.len(),
            ms(picked_in),
            ms(pipelines_in.saturating_sub(picked_in)),
            ms(start.elapsed().saturating_sub(pipelines_in)),
        );
        let prepared = Prepared {
            plan,
            choices,
            buffers,
            bases,
            results,
            crossings,
            copied: false,
            counters,
            commands,
            trials: 0,
        };
        Ok(super::keep(&mut self.plans, prepared))
    }

    fn write(&mut self, plan: PlanId, tensor: &Tensor, bytes: &[u8]) -> Result<(), Error> {
        let prepared = self.prepared(plan);
        let (buffer, base) = match prepared.crossing(tensor.slot) {
            Some(crossing) => (&crossing.stage, crossing.offset),
            None => prepared.place(tensor.slot),
        };
        let at = base + tensor.offset as u64;
        if buffer.is_mapped() {
            buffer.write_many(at, bytes);
            return Ok(());
        }
        let mut uploader = Uploader::new(&self.device)?;
        uploader.write(buffer, at, bytes)?;
        Ok(uploader.finish()?)
    }

    fn write_all(&mut self, plan: PlanId, tensors: &[(Tensor, &[u8])]) -> Result<(), Error> {
        let prepared = self.prepared(plan);
        // Weights that are brought for a part lie in one piece of host memory, which threads fill together.
        let streamed = &prepared.crossings.streamed;
        let mut pieces: Vec<(u64, &[u8])> = Vec::new();
        for (tensor, bytes) in tensors {
            match streamed.iter().find(|crossing| crossing.slot == tensor.slot) {
                Some(crossing) => pieces.push((crossing.offset + tensor.offset as u64, bytes)),
                None => return tensors.iter().try_for_each(|(tensor, bytes)| self.write(plan, tensor, bytes)),
            }
        }
        streamed.first().into_iter().for_each(|crossing| crossing.stage.write_pieces(&pieces));
        Ok(())
    }

    fn run(&mut self, plan: PlanId) -> Result<(), Error> {
        let prepared = self.prepared_mut(plan);
        prepared.commands.run()?;
        prepared.copied = true;
        self.check_run(plan)
    }

    fn submit(&mut self, plan: PlanId) -> Result<Ticket, Error> {
        let prepared = self.prepared_mut(plan);
        if prepared.commands.submits() > 1 && prepared.trials < MOST_TRIALS {
            // What was recorded before the device's speed was known is cut too finely, and every cut costs each run again. The
            // time of a run can be taken while no other one is on its way.
            prepared.trials += 1;
            prepared.commands.run()?;
            if prepared.commands.fits_one_submit() {
                self.record_again(plan)?;
            }
            return Ok(Ticket { plan, submission: None });
        }
        let submission = prepared.commands.submit()?;
        Ok(Ticket { plan, submission: Some(submission) })
    }

    fn wait(&mut self, ticket: Ticket) -> Result<(), Error> {
        if let Some(submission) = ticket.submission {
            self.device.wait(submission, self.device.patience())?;
            // What was sent before it has arrived.
            self.sent.retain(|(sent, _)| *sent > submission);
        }
        self.prepared_mut(ticket.plan).copied = true;
        self.check_run(ticket.plan)
    }

    fn read(&mut self, plan: PlanId, tensor: &Tensor, bytes: &mut [u8]) -> Result<(), Error> {
        let prepared = self.prepared(plan);
        if let Some(crossing) = prepared.crossing(tensor.slot).filter(|_| prepared.copied) {
            crossing.stage.read(crossing.offset + tensor.offset as u64, bytes);
            return Ok(());
        }
        let result = prepared.results.iter().find(|(slot, _)| prepared.copied && *slot == tensor.slot);
        let (buffer, base) = result.map_or_else(|| prepared.place(tensor.slot), |(_, buffer)| (buffer, 0));
        Ok(self.device.read(buffer, base + tensor.offset as u64, bytes)?)
    }

    fn forget(&mut self, plan: PlanId) {
        self.plans[plan.0] = None;
    }

    fn gather(&mut self, from: &[Range], bytes: &mut [u8]) -> Result<(), Error> {
        let stage = self.device.allocate(MemoryKind::Readback, bytes.len() as u64)?;
        self.pieces(from, &stage, true)?.run()?;
        stage.read(0, bytes);
        Ok(())
    }

    fn scatter(&mut self, to: &[Range], bytes: &[u8]) -> Result<(), Error> {
        let stage = self.device.allocate(MemoryKind::Upload, bytes.len() as u64)?;
        stage.write(0, bytes);
        Ok(self.pieces(to, &stage, false)?.run()?)
    }

    fn send(&mut self, to: &[Range], bytes: &[u8]) -> Result<(), Error> {
        let stage = self.device.allocate(MemoryKind::Upload, bytes.len() as u64)?;
        stage.write(0, bytes);
        // The commands keep the host memory until they have run.
        let commands = self.pieces(to, &stage, false)?;
        let submission = commands.submit()?;
        self.sent.push((submission, commands));
        Ok(())
    }

    fn fetch(&mut self, from: &[Range]) -> Result<Fetched, Error> {
        let all: usize = from.iter().map(|range| range.bytes).sum();
        let stage = self.device.allocate(MemoryKind::Readback, all as u64)?;
        let commands = self.pieces(from, &stage, true)?;
        let submission = commands.submit()?;
        let device = Arc::clone(&self.device);
        Ok(Box::new(move || {
            device.wait(submission, device.patience())?;
            drop(commands);
            let mut bytes = vec![0; all];
            stage.read(0, &mut bytes);
            Ok(bytes)
        }))
    }

    fn copy(&mut self, pairs: &[(Range, Range)]) -> Result<(), Error> {
        let mut recorder = Recorder::new(&self.device)?;
        for (from, to) in pairs {
            let (source, target) = (self.buffer(from), self.buffer(to));
            recorder.copy((source, from.offset as u64), (target, to.offset as u64), from.bytes as u64)?;
        }
        Ok(recorder.finish()?.run()?)
    }

    fn zero(&mut self, ranges: &[Range]) -> Result<(), Error> {
        let mut recorder = Recorder::new(&self.device)?;
        for range in ranges {
            recorder.fill((self.buffer(range), range.offset as u64), range.bytes as u64, 0)?;
        }
        Ok(recorder.finish()?.run()?)
    }

    fn run_step(&mut self, plan: PlanId, step: usize) -> Result<(), Error> {
        self.prepared_mut(plan).copied = false;
        let prepared = self.prepared(plan);
        let at = &prepared.plan.steps[step];
        let one = [(at.label.as_str(), &at.call, &prepared.choices[step])];
        Ok(self.record(Recorder::new(&self.device)?, &one, prepared.places())?.run()?)
    }

    fn read_ceiling(&mut self) -> Option<f64> {
        let probe = kiln_kernels::probe::Probe::new(&self.device).ok()?;
        probe.read_bandwidth().ok().map(|bandwidth| bandwidth.rate())
    }

    fn arithmetic_ceilings(&mut self) -> Vec<(String, f64)> {
        let Ok(probe) = kiln_kernels::probe::Probe::new(&self.device) else { return Vec::new() };
        let plain = probe.fma_rates().unwrap_or_default().into_iter();
        let plain = plain.filter(|(kind, _)| *kind == kiln_kernels::probe::Fma::F32);
        let mut all: Vec<(String, f64)> = plain.map(|(kind, rate)| (kind.name().to_owned(), rate)).collect();
        let rates = probe.matrix_rates(&|| ()).into_iter().filter_map(|matrix| matrix.rate.ok());
        all.extend(rates.reduce(f64::max).map(|rate| ("matrix units".to_owned(), rate)));
        all
    }

    fn profile(&mut self, plan: PlanId) -> Result<Vec<StepTime>, Error> {
        self.prepared_mut(plan).copied = false;
        let prepared = self.prepared(plan);
        let commands = self.record(Recorder::profiled(&self.device)?, &prepared.steps(), prepared.memory())?;
        commands.run()?;
        self.prepared_mut(plan).copied = true;
        Ok(commands.timings())
    }

    fn batch(&self) -> usize {
        let adapter = &self.device.adapter;
        if self.options.reproducible {
            return INVARIANT_BATCH;
        }
        let bytes = self.options.memory_limit.map_or(adapter.memory_bytes, |limit| limit.min(adapter.memory_bytes));
        batch_on(bytes, adapter.caps.is_cpu)
    }

    fn memory(&self) -> Option<Memory> {
        let (total, free) = self.memory_now();
        Some(Memory { free, total, place: "on the device" })
    }

    fn order(&mut self) -> Result<&'static str, Error> {
        Ok(match self.launches_dependent()? {
            true => "steps of generating hand over to each other, without barriers",
            false if self.device.adapter.caps.dependent_launch => "barriers between steps: they cannot hand over here",
            false => "barriers between steps",
        })
    }

    fn target(&self) -> Target {
        let target = Target::gpu(&self.device.adapter.caps);
        Target {
            batch_invariant: self.options.reproducible,
            weights: self.weights(),
            rounds: self.options.rounds,
            pack_b: self.options.pack_b,
            ..target
        }
    }

    fn choices(&self, plan: PlanId) -> Vec<String> {
        let variant = |c: &Choice| c.launches.iter().map(|l| l.shader.name.clone()).collect::<Vec<_>>().join(" + ");
        self.prepared(plan).choices.iter().map(|c| format!("{} ({})", variant(c), c.path.name())).collect()
    }
}
