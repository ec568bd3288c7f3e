//! Several executors as one: a plan is cut into parts by where layers and weights lie ([`crate::lower::cut`]), each part is lowered for
//! its own device, and what one part makes for another goes by way of host memory. Products of many columns go to a GPU wherever their
//! weights lie: those that lie in the file are brought there for the run, ahead of time, while the part before is computed, and the caches of
//! their layers come along ([`super::staging`]). A part is sent on its way as soon as what it needs is there; nobody waits for it before its results are needed.

use std::collections::{HashMap, VecDeque};
use std::sync::Arc;
use std::time::Instant;

use kiln_gguf::{Gguf, Shared, TensorType};
use kiln_gpu::StepTime;
use kiln_kernels::tensor::{Slot, Tensor};

use super::stage::mark;
use super::staging::{Inputs, StagedCache, inputs};
use super::{Executor, FORGOTTEN, Fetched, Memory, PartKey, PlanId, Progress, Range, Seat, Share, Ticket, keep};
use crate::Error;
use crate::lower::cut::{Part, cut, holders, layer};
use crate::lower::streams::{Streams, staging};
use crate::lower::{Target, lower_until};
use crate::placement::Placement;
use crate::plan::{Fixed, Plan, SlotInfo, SlotKind};
use crate::run::{PlanKey, Pulse};

/// Runs plans of one model on several devices.
pub struct PipelineExecutor {
    devices: Vec<Box<dyn Executor>>,
    placement: Placement,
    /// Which devices hold each shared slot, as bits.
    holders: Vec<u64>,
    plans: Vec<Option<Prepared>>,
    /// The parts that each device has on their way: the plan of each and its number there.
    busy: Vec<VecDeque<(PlanId, usize, Ticket)>>,
    /// Rows of caches and states on their way back to the device that holds them.
    returning: Vec<(Vec<Range>, Fetched)>,
    /// What crosses over and is not taken yet, by slot.
    held: HashMap<u32, Vec<u8>>,
    /// Memory for what will cross over.
    spare: Vec<Vec<u8>>,
    streaming: Option<Streaming>,
}

/// Columns of a matrix from which on weights of the CPU's part are brought to a GPU: 16 cores multiply about twenty while it takes its
/// way over the bus.
const STREAM_FROM: usize = 32;
/// Memory of a GPU for caches that come along with weights that nobody misses. More is taken only if it is less than the weights of a layer.
const SMALL_VISITS: usize = 32 << 20;
/// States come and go as a whole, so they should be this much smaller than the weights.
const STATES_SHARE: usize = 8;

/// Weights of the CPU's part that a GPU multiplies where columns are many.
struct Streaming {
    /// The GPU.
    to: usize,
    /// Fewest columns.
    from: usize,
    /// Which shared slots they are.
    slots: Vec<bool>,
    /// The place there of each cache and state that comes along.
    staging: Vec<Option<usize>>,
    /// Bytes of the weights of the largest layer.
    largest: usize,
    /// Where they lie, once the model is loaded.
    files: Vec<Option<Shared>>,
    /// The part whose weights were brought last.
    streamed_part: Option<(PlanId, usize)>,
}

impl Streaming {
    fn streams(&self) -> Streams<'_> {
        Streams { to: self.to, from: self.from, slots: &self.slots, staging: &self.staging }
    }

    /// Whether there should be memory for caches and states of this size on the GPU, which some layers more could have instead.
    fn should_visit(&self, fixed: &Fixed) -> bool {
        let bytes = |states: bool| {
            let mut places: HashMap<usize, usize> = HashMap::new();
            for (slot, place) in
                fixed.slots.iter().zip(&self.staging).filter(|(s, _)| (s.kind == SlotKind::State) == states)
            {
                place.iter().for_each(|place| {
                    let most = places.entry(*place).or_default();
                    *most = slot.bytes.max(*most);
                });
            }
            places.values().sum::<usize>()
        };
        let most = self.largest.max(SMALL_VISITS);
        bytes(false) <= most && bytes(true) <= most / STATES_SHARE
    }
}

/// Bytes of the weights among these that the largest layer has.
fn largest_layer(plans: &[Plan], slots: &[bool]) -> usize {
    let mut of: HashMap<usize, (usize, usize)> = HashMap::new();
    for plan in plans {
        for (step, layer) in plan.steps.iter().filter_map(|step| Some((step, layer(&step.label)?))) {
            let slots_of = step.call.operation().reads().into_iter().map(|t| t.slot.0 as usize);
            let slots_of = slots_of.filter(|slot| slots.get(*slot) == Some(&true));
            of.extend(slots_of.map(|slot| (slot, (layer, plan.slots[slot].bytes))));
        }
    }
    let mut layers: HashMap<usize, usize> = HashMap::new();
    of.values().for_each(|(layer, bytes)| *layers.entry(*layer).or_default() += bytes);
    layers.into_values().max().unwrap_or(0)
}

/// A plan that is ready, in parts.
struct Prepared {
    parts: Vec<Ready>,
    /// What one run makes for the next: slot, the part that makes it, and those that read it.
    carried: Vec<Carried>,
    /// Whether the last run has ended without its results being carried over.
    due: bool,
    /// The inputs that say which pages of caches there are.
    inputs: Inputs,
}

struct Ready {
    device: usize,
    plan: PlanId,
    steps: usize,
    /// Slots that arrive, each with the part that makes it.
    arriving: Vec<(Tensor, usize)>,
    /// Slots that have weights brought, each with the shared slot of these.
    streamed: Vec<(Tensor, usize)>,
    /// Caches and states of another device that it has while it runs.
    staged: Vec<StagedCache>,
    /// Slots that leave, each with the last part that takes it.
    leaving: Vec<(Tensor, usize)>,
    /// Slots that the host writes or reads.
    open: Vec<Tensor>,
    /// Of those, the ones that steps write.
    written: Vec<Tensor>,
    /// Whether it may run again from the same inputs.
    repeats: bool,
}

struct Carried {
    tensor: Tensor,
    from: usize,
    to: Vec<usize>,
}

/// A whole slot, as bytes.
fn whole(slot: usize, info: &SlotInfo) -> Tensor {
    let slot = Slot(u32::try_from(slot).expect("slots are numbered with 32 bits"));
    Tensor::dense(slot, TensorType::I8, [info.bytes, 1, 1, 1])
}

/// Whether the slot of a tensor is among these.
fn has(slots: &[Tensor], tensor: &Tensor) -> bool {
    slots.iter().any(|slot| slot.slot == tensor.slot)
}

impl PipelineExecutor {
    /// These executors, numbered as in the placement. `plans` are plain plans of the model, of one token and of several.
    pub fn new(devices: Vec<Box<dyn Executor>>, placement: Placement, plans: &[Plan]) -> PipelineExecutor {
        let holders = holders(plans, &placement);
        let busy = devices.iter().map(|_| VecDeque::new()).collect();
        let (held, spare) = (HashMap::new(), Vec::new());
        let targets: Vec<Target> = devices.iter().map(|device| device.target()).collect();
        let gpu = targets.iter().position(|target| target.caps.as_ref().is_some_and(|caps| !caps.is_cpu));
        let (plans_ready, returning) = (Vec::new(), Vec::new());
        let several = PipelineExecutor {
            devices,
            placement,
            holders,
            plans: plans_ready,
            busy,
            returning,
            held,
            spare,
            streaming: None,
        };
        match gpu {
            // Whether weights are brought depends on the columns beside each other.
            Some(gpu) if !targets.iter().any(|target| target.batch_invariant) => {
                several.streaming(gpu, STREAM_FROM, plans)
            }
            _ => several,
        }
    }

    /// Products of at least this many columns go to this GPU, also where their weights lie on the CPU. `plans` as for [`PipelineExecutor::new`].
    pub fn streaming(mut self, to: usize, from: usize, plans: &[Plan]) -> PipelineExecutor {
        let is_cpu = |device: &dyn Executor| device.target().caps.is_none();
        let cpus = self.devices.iter().enumerate().filter(|(_, device)| is_cpu(&***device));
        let cpus = cpus.fold(0, |cpus, (device, _)| cpus | 1u64 << device);
        let slots = plans.first().map_or(&[][..], |plan| &plan.slots[..plan.n_fixed]);
        let held = |wanted: fn(&SlotKind) -> bool| -> Vec<bool> {
            let may = |(slot, holders): (&SlotInfo, &u64)| wanted(&slot.kind) && *holders != 0 && holders & !cpus == 0;
            slots.iter().zip(&self.holders).map(may).collect()
        };
        let remembers = held(|kind| matches!(kind, SlotKind::Cache | SlotKind::WindowCache | SlotKind::State));
        let slots = held(|kind| *kind == SlotKind::Weight);
        let (staging, largest) = (staging(plans, &remembers), largest_layer(plans, &slots));
        let any = slots.contains(&true);
        self.streaming =
            any.then(|| Streaming { to, from, slots, staging, largest, files: Vec::new(), streamed_part: None });
        self
    }

    /// Caches and states stay with their layers, also where weights are brought to a GPU.
    pub fn without_staging(mut self) -> PipelineExecutor {
        self.streaming.iter_mut().for_each(|streaming| streaming.staging.fill(None));
        self
    }

    /// Every product is computed where its weights lie.
    pub fn without_streaming(mut self) -> PipelineExecutor {
        self.streaming = None;
        self
    }

    /// The device that holds what is remembered in a slot.
    fn holder(&self, slot: Slot) -> usize {
        self.holders[slot.0 as usize].trailing_zeros() as usize
    }

    fn prepared(&self, plan: PlanId) -> &Prepared {
        self.plans[plan.0].as_ref().expect(FORGOTTEN)
    }

    /// Waits for the parts that a device has on their way, and takes what they made for others.
    fn finish(&mut self, device: usize) -> Result<(), Error> {
        self.finish_but(device, 0)
    }

    /// The same, but for this many of the last ones.
    fn finish_but(&mut self, device: usize, left: usize) -> Result<(), Error> {
        while self.busy[device].len() > left
            && let Some((plan, number, ticket)) = self.busy[device].pop_front()
        {
            let part = &self.plans[plan.0].as_ref().expect(FORGOTTEN).parts[number];
            let executor = &mut self.devices[device];
            match executor.wait(ticket) {
                Err(Error::Stalled) if part.repeats => executor.run(part.plan)?,
                waited => waited?,
            }
            for (tensor, _) in &part.leaving {
                let mut bytes = self.spare.pop().unwrap_or_default();
                bytes.resize(tensor.shape[0], 0);
                executor.read(part.plan, tensor, &mut bytes)?;
                self.held.insert(tensor.slot.0, bytes);
            }
        }
        Ok(())
    }

    /// Whether a part may be sent on its way while one before it runs on the same device: nothing crosses over in the host memory that parts of
    /// a device share, and the other never has to run again.
    fn may_follow(&self, plan: PlanId, number: usize) -> bool {
        let part = &self.prepared(plan).parts[number];
        let waits = |(other, before, _): &(PlanId, usize, Ticket)| {
            let before = &self.prepared(*other).parts[*before];
            *other == plan && !before.streamed.is_empty() && before.leaving.is_empty()
        };
        part.arriving.is_empty() && part.leaving.is_empty() && self.busy[part.device].iter().all(waits)
    }

    /// Gives a part what it needs from others.
    fn bring(&mut self, plan: PlanId, number: usize) -> Result<(), Error> {
        // Parts of a device share the host memory that things cross over in.
        let device = self.prepared(plan).parts[number].device;
        let left = usize::from(self.may_follow(plan, number));
        self.finish_but(device, left)?;
        let sources: Vec<usize> = self.prepared(plan).parts[number].arriving.iter().map(|(_, from)| *from).collect();
        for from in sources {
            let source = self.prepared(plan).parts[from].device;
            if self.busy[source].iter().any(|(other, part, _)| *other == plan && *part == from) {
                self.finish(source)?;
            }
        }
        let prepared = self.plans[plan.0].as_ref().expect(FORGOTTEN);
        let part = &prepared.parts[number];
        for (tensor, from) in &part.arriving {
            let bytes = self.held.get(&tensor.slot.0).expect("the part that sends it ran before");
            self.devices[device].write(part.plan, tensor, bytes)?;
            let last = prepared.parts[*from].leaving.iter().find(|(left, _)| left.slot == tensor.slot);
            if last.is_some_and(|(_, last)| *last == number) {
                self.spare.extend(self.held.remove(&tensor.slot.0));
            }
        }
        Ok(())
    }

    /// Brings the weights of a part to where its device copies them from, if they are not there.
    fn stream(&mut self, plan: PlanId, number: usize) -> Result<(), Error> {
        let part = &self.plans[plan.0].as_ref().expect(FORGOTTEN).parts[number];
        let Some(streaming) = self.streaming.as_mut().filter(|_| !part.streamed.is_empty()) else { return Ok(()) };
        if streaming.streamed_part == Some((plan, number)) {
            return Ok(());
        }
        let file = |of: usize| {
            streaming.files[of].as_deref().expect("weights that are streamed were mapped when the model was loaded")
        };
        let weights = |(tensor, of): &(Tensor, usize)| (*tensor, file(*of));
        let weights: Vec<(Tensor, &[u8])> = part.streamed.iter().map(weights).collect();
        self.devices[part.device].write_all(part.plan, &weights)?;
        streaming.streamed_part = Some((plan, number));
        Ok(())
    }

    /// Brings what a part needs of caches and states that another device holds.
    fn receive(&mut self, plan: PlanId, number: usize) -> Result<(), Error> {
        let prepared = self.plans[plan.0].as_ref().expect(FORGOTTEN);
        let part = &prepared.parts[number];
        let returning =
            |visit: &StagedCache| self.returning.iter().any(|(to, _)| to.iter().any(|r| r.slot == visit.slot));
        if part.staged.iter().any(returning) {
            self.finish_writeback()?;
        }
        let prepared = self.plans[plan.0].as_ref().expect(FORGOTTEN);
        let part = &prepared.parts[number];
        let coming: Vec<Range> = part.staged.iter().flat_map(|visit| visit.coming(&prepared.inputs)).collect();
        if coming.is_empty() {
            return Ok(());
        }
        let device = part.device;
        let mut bytes = vec![0; coming.iter().map(|range| range.bytes).sum()];
        self.gather(&coming, &mut bytes)?;
        self.devices[device].send(&coming, &bytes)
    }

    /// Begins to take back what a part on its way changes of them.
    fn begin_writeback(&mut self, plan: PlanId, number: usize) -> Result<(), Error> {
        let prepared = self.plans[plan.0].as_ref().expect(FORGOTTEN);
        let part = &prepared.parts[number];
        let going: Vec<Range> = part.staged.iter().flat_map(|visit| visit.going(&prepared.inputs)).collect();
        if !going.is_empty() {
            let fetched = self.devices[part.device].fetch(&going)?;
            self.returning.push((going, fetched));
        }
        Ok(())
    }

    /// Waits for what goes back to the devices that hold it.
    fn finish_writeback(&mut self) -> Result<(), Error> {
        for (ranges, fetched) in std::mem::take(&mut self.returning) {
            let bytes = fetched()?;
            self.scatter(&ranges, &bytes)?;
        }
        Ok(())
    }

    /// Brings the weights of the next part of a device that has some brought, while the one that was sent on its way runs: those two have host
    /// memory of their own, and all before them have ended.
    fn stream_ahead(&mut self, plan: PlanId, running: usize) -> Result<(), Error> {
        let parts = &self.prepared(plan).parts;
        let device = parts[running].device;
        let next = (running + 1..parts.len()).find(|n| parts[*n].device == device && !parts[*n].streamed.is_empty());
        let Some(next) = next else { return Ok(()) };
        self.finish_but(device, 1)?;
        self.stream(plan, next)
    }

    /// Waits for everything on its way, and brings what a run has made for the next one to where it is read.
    fn drain(&mut self) -> Result<(), Error> {
        for device in 0..self.devices.len() {
            self.finish(device)?;
        }
        for at in 0..self.plans.len() {
            let Some(prepared) = self.plans[at].as_mut().filter(|prepared| prepared.due) else { continue };
            prepared.due = false;
            for Carried { tensor, from, to } in &prepared.carried {
                let mut bytes = vec![0; tensor.shape[0]];
                let part = &prepared.parts[*from];
                self.devices[part.device].read(part.plan, tensor, &mut bytes)?;
                for part in to.iter().map(|to| &prepared.parts[*to]) {
                    self.devices[part.device].write(part.plan, tensor, &bytes)?;
                }
            }
        }
        Ok(())
    }

    /// Sends all parts on their way; the last ones may still be when this ends.
    fn go(&mut self, plan: PlanId) -> Result<(), Error> {
        self.drain()?;
        for number in 0..self.prepared(plan).parts.len() {
            self.bring(plan, number)?;
            self.stream(plan, number)?;
            self.receive(plan, number)?;
            let Ready { device, plan: own, .. } = self.prepared(plan).parts[number];
            let ticket = self.devices[device].submit(own)?;
            self.busy[device].push_back((plan, number, ticket));
            self.begin_writeback(plan, number)?;
            self.stream_ahead(plan, number)?;
        }
        self.finish_writeback()?;
        if let Some(prepared) = self.plans[plan.0].as_mut() {
            prepared.due = true;
        }
        Ok(())
    }

    /// Works on a thread of those that the CPU's part is computed on, where there is one: the work would change threads with every part
    /// otherwise, and wait each time for one to wake up. Not beside a stage: the thread would wait for a network, and other models that
    /// compute on it would wait, too.
    fn among_threads<T: Send>(&mut self, work: impl FnOnce(&mut PipelineExecutor) -> T + Send) -> T {
        let is_remote = self.devices.iter().any(|device| device.is_remote());
        match self.devices.iter().find_map(|device| device.threads()) {
            Some(threads) if !is_remote => threads.run(|| work(self)),
            _ => work(self),
        }
    }

    /// Whatever was on its way when something failed is waited for, and counts for nothing.
    fn give_up<T>(&mut self, failed: Result<T, Error>) -> Result<T, Error> {
        if failed.is_err() {
            for (device, busy) in self.busy.iter_mut().enumerate() {
                for (.., ticket) in busy.drain(..) {
                    // It is the first error that is told.
                    let _ = self.devices[device].wait(ticket);
                }
            }
            self.returning.clear();
            self.held.clear();
            self.streaming.iter_mut().for_each(|streaming| streaming.streamed_part = None);
            self.plans.iter_mut().flatten().for_each(|prepared| prepared.due = false);
        }
        failed
    }

    /// Ranges by the device that holds them, each with its place among all bytes.
    fn by_device(&self, ranges: &[Range]) -> Vec<(usize, Vec<(Range, usize)>)> {
        let mut sorted: Vec<(usize, Vec<(Range, usize)>)> = Vec::new();
        let mut at = 0;
        for range in ranges {
            let device = self.holder(range.slot);
            match sorted.iter_mut().find(|(known, _)| *known == device) {
                Some((_, ranges)) => ranges.push((*range, at)),
                None => sorted.push((device, vec![(*range, at)])),
            }
            at += range.bytes;
        }
        sorted
    }

    /// Which devices have memory that stays as it is between parts.
    fn keeps(&self) -> Vec<bool> {
        self.devices.iter().map(|device| device.target().caps.is_some()).collect()
    }

    /// The parts of a plan, not lowered yet.
    fn cut(&self, plan: &Plan) -> Result<Vec<Part>, Error> {
        let streams = self.streaming.as_ref().map(Streaming::streams);
        cut(plan, &self.placement, streams.as_ref(), &self.keeps())
    }

    fn lowered(&self, part: Part, last: Option<&str>) -> Result<Part, Error> {
        Ok(Part { plan: lower_until(part.plan, &self.devices[part.device].target(), last)?, ..part })
    }

    /// Makes a plan ready; parts of stages are made there of the same key.
    fn prepare_of(&mut self, plan: Plan, key: Option<PlanKey>) -> Result<PlanId, Error> {
        let inputs = inputs(&plan).into_iter().map(|slot| (slot, Vec::new())).collect();
        let parts = self.cut(&lower_until(plan, &self.target(), None)?)?;
        let keyed = |(number, part): (usize, &Part)| {
            let plan = key.filter(|_| self.devices[part.device].is_remote())?;
            Some(PartKey { plan, part: number, mark: mark(&part.plan) })
        };
        let keys: Vec<Option<PartKey>> = parts.iter().enumerate().map(keyed).collect();
        let parts = parts.into_iter().map(|part| self.lowered(part, None)).collect::<Result<Vec<_>, _>>()?;
        let mut ready = Vec::with_capacity(parts.len());
        if let Err(why) = self.ready(parts, &keys, &mut ready) {
            ready.iter().for_each(|part| self.devices[part.device].forget(part.plan));
            return Err(why);
        }
        let mut carried = Vec::new();
        for (from, part) in ready.iter().enumerate() {
            for slot in &part.written {
                let reads = |other: &usize| *other != from && has(&ready[*other].open, slot);
                let to: Vec<usize> = (0..ready.len()).filter(reads).collect();
                if !to.is_empty() {
                    carried.push(Carried { tensor: *slot, from, to });
                }
            }
        }
        Ok(keep(&mut self.plans, Prepared { parts: ready, carried, due: false, inputs }))
    }

    /// Makes the parts of a plan ready.
    fn ready(&mut self, parts: Vec<Part>, keys: &[Option<PartKey>], made: &mut Vec<Ready>) -> Result<(), Error> {
        // Parts of a device find what others left there: all of them should compute in the same memory.
        for (device, executor) in self.devices.iter_mut().enumerate() {
            let arenas = parts.iter().filter(|part| part.device == device).map(|part| part.plan.arena);
            executor.reserve(arenas.max().unwrap_or(0))?;
        }
        let kinds: Vec<Vec<SlotKind>> =
            parts.iter().map(|part| part.plan.slots.iter().map(|slot| slot.kind.clone()).collect()).collect();
        let is = |part: usize, slot: usize, kind: &SlotKind| kinds[part].get(slot) == Some(kind);
        for (number, Part { device, plan }) in parts.into_iter().enumerate() {
            let (mut arriving, mut leaving, mut open, mut streamed) = (Vec::new(), Vec::new(), Vec::new(), Vec::new());
            for (at, slot) in plan.slots.iter().enumerate().skip(plan.n_fixed) {
                let tensor = whole(at, slot);
                match slot.kind {
                    SlotKind::Recv => {
                        let from = (0..number).find(|part| is(*part, at, &SlotKind::Send));
                        arriving.push((tensor, from.expect("what arrives was made by a part before")));
                    }
                    SlotKind::Send => {
                        let last = (number..kinds.len()).rfind(|part| is(*part, at, &SlotKind::Recv));
                        leaving.push((tensor, last.unwrap_or(number)));
                    }
                    SlotKind::StreamedWeight(of) => streamed.push((tensor, of.0 as usize)),
                    SlotKind::Input | SlotKind::Control | SlotKind::Output | SlotKind::Log => open.push(tensor),
                    _ => {}
                }
            }
            let writes = plan.steps.iter().flat_map(|step| step.call.operation().writes());
            let writes: Vec<Tensor> = writes.collect();
            let repeats = repeats(&plan);
            let written = open.iter().filter(|open| writes.iter().any(|t| t.slot == open.slot)).copied().collect();
            let staging = self.streaming.as_ref().filter(|streaming| streaming.to == device);
            let staged = staging.map_or_else(Vec::new, |streaming| StagedCache::of(&plan, &streaming.staging));
            let steps = plan.len();
            let plan = match &keys[number] {
                Some(key) => self.devices[device].prepare_keyed(plan, key)?,
                None => self.devices[device].prepare(plan)?,
            };
            made.push(Ready { device, plan, steps, arriving, streamed, staged, leaving, open, written, repeats });
        }
        Ok(())
    }
}

/// Whether a part may run again at once when it has stalled. What it remembers must not have changed, nor what it was given: steps work in place on
/// what came from another device, and that is sent once.
pub(super) fn repeats(plan: &Plan) -> bool {
    use SlotKind::{Control, Input, Log, Recv, State};
    let changes = |t: &Tensor| matches!(plan.kind(t), State | Control | Log | Input);
    let receives = plan.slots.iter().any(|slot| matches!(slot.kind, Recv));
    !receives && !plan.steps.iter().flat_map(|step| step.call.operation().writes()).any(|t| changes(&t))
}

impl Executor for PipelineExecutor {
    fn describe(&self) -> String {
        let one = |(number, device): (usize, &dyn Executor)| {
            format!("{}: {}", device.describe(), self.placement.describe(number))
        };
        self.devices.iter().map(|device| &**device).enumerate().map(one).collect::<Vec<_>>().join("; ")
    }

    fn load(&mut self, fixed: &Fixed, gguf: &Gguf, progress: Progress<'_>) -> Result<(), Error> {
        self.plans.clear();
        if let Some(streaming) = self.streaming.as_mut().filter(|streaming| !streaming.should_visit(fixed)) {
            streaming.staging.fill(None);
        }
        let here = |device: usize| {
            let streams = self.streaming.as_ref().map(Streaming::streams).filter(|streams| streams.to == device);
            let slot = |(at, slot): (usize, &SlotInfo)| match self.holders[at] >> device & 1 {
                1 => slot.clone(),
                _ => match streams.and_then(|streams| streams.place(at)) {
                    Some(place) => SlotInfo { kind: SlotKind::StagedCache(place), ..slot.clone() },
                    None => SlotInfo { kind: SlotKind::Remote, bytes: 0, ..slot.clone() },
                },
            };
            Fixed { slots: fixed.slots.iter().enumerate().map(slot).collect() }
        };
        let shares: Vec<Fixed> = (0..self.devices.len()).map(here).collect();
        let bytes = |share: &Fixed| share.here().map(|slot| slot.bytes as u64).sum::<u64>();
        let total = shares.iter().map(bytes).sum();
        if let Some(streaming) = &mut self.streaming {
            let file = |(slot, may): (&SlotInfo, &bool)| match may {
                true => Ok(Some(gguf.shared(gguf.tensor(&slot.name)?))),
                false => Ok(None),
            };
            streaming.files = fixed.slots.iter().zip(&streaming.slots).map(file).collect::<Result<_, Error>>()?;
            streaming.streamed_part = None;
        }
        let mut before = 0;
        for (device, share) in self.devices.iter_mut().zip(&shares) {
            device.load(share, gguf, &mut |done, _| progress(before + done, total))?;
            before += bytes(share);
        }
        Ok(())
    }

    fn reserve(&mut self, bytes: usize) -> Result<(), Error> {
        self.devices.iter_mut().try_for_each(|device| device.reserve(bytes))
    }

    fn reserve_on(&mut self, device: usize, bytes: usize) -> Result<(), Error> {
        self.devices[device].reserve(bytes)
    }

    fn parts(&self, plan: Plan, last: Option<&str>) -> Result<Vec<Part>, Error> {
        let plan = lower_until(plan, &self.target(), last)?;
        self.cut(&plan)?.into_iter().map(|part| self.lowered(part, last)).collect()
    }

    fn seat(&mut self, seat: &Seat) {
        let (keeps, batch_invariant) = (self.keeps(), self.target().batch_invariant);
        for (device, executor) in self.devices.iter_mut().enumerate() {
            let (keeps, placement) = (keeps.clone(), self.placement.clone());
            executor.seat(&Seat { room: seat.room, placement, device, keeps, batch_invariant });
        }
    }

    fn prepare(&mut self, plan: Plan) -> Result<PlanId, Error> {
        self.prepare_of(plan, None)
    }

    fn prepare_keyed(&mut self, plan: Plan, key: &PartKey) -> Result<PlanId, Error> {
        self.prepare_of(plan, Some(key.plan))
    }

    fn write(&mut self, plan: PlanId, tensor: &Tensor, bytes: &[u8]) -> Result<(), Error> {
        let prepared = self.plans[plan.0].as_mut().expect(FORGOTTEN);
        if let Some(input) = prepared.inputs.get_mut(&tensor.slot).filter(|_| tensor.offset == 0) {
            *input = bytes.as_chunks().0.iter().map(|bytes| i32::from_ne_bytes(*bytes)).collect();
        }
        for part in prepared.parts.iter().filter(|part| has(&part.open, tensor)) {
            self.devices[part.device].write(part.plan, tensor, bytes)?;
        }
        Ok(())
    }

    fn run(&mut self, plan: PlanId) -> Result<(), Error> {
        let result = self.among_threads(|several| several.go(plan).and_then(|()| several.drain()));
        self.give_up(result)
    }

    fn submit(&mut self, plan: PlanId) -> Result<Ticket, Error> {
        let result = self.among_threads(|several| several.go(plan));
        self.give_up(result)?;
        Ok(Ticket { plan, submission: None })
    }

    fn wait(&mut self, _: Ticket) -> Result<(), Error> {
        let result = self.drain();
        self.give_up(result)
    }

    fn read(&mut self, plan: PlanId, tensor: &Tensor, bytes: &mut [u8]) -> Result<(), Error> {
        let prepared = self.plans[plan.0].as_ref().expect(FORGOTTEN);
        let writer = prepared.parts.iter().rfind(|part| has(&part.written, tensor));
        let part = writer.or(prepared.parts.iter().find(|part| has(&part.open, tensor)));
        let part = part.ok_or_else(|| Error::Run { why: "no part of the plan has what was asked for".into() })?;
        self.devices[part.device].read(part.plan, tensor, bytes)
    }

    fn rest(&mut self) {
        self.devices.iter_mut().for_each(|device| device.rest());
    }

    fn forget(&mut self, plan: PlanId) {
        // A part that is on its way should not lose its memory; what comes of it concerns nobody any more.
        let _ = self.drain();
        // Its number may be given to another plan.
        self.streaming.iter_mut().for_each(|streaming| streaming.streamed_part = None);
        if let Some(prepared) = self.plans[plan.0].take() {
            prepared.parts.iter().for_each(|part| self.devices[part.device].forget(part.plan));
        }
    }

    fn watch(&mut self, pulse: &Arc<Pulse>) {
        self.devices.iter_mut().for_each(|device| device.watch(pulse));
    }

    fn gather(&mut self, from: &[Range], bytes: &mut [u8]) -> Result<(), Error> {
        for (device, ranges) in self.by_device(from) {
            let (own, _): (Vec<Range>, Vec<usize>) = ranges.iter().copied().unzip();
            let mut found = vec![0; own.iter().map(|range| range.bytes).sum()];
            self.devices[device].gather(&own, &mut found)?;
            let mut rest = &found[..];
            for (range, at) in ranges {
                let (first, others) = rest.split_at(range.bytes);
                bytes[at..at + range.bytes].copy_from_slice(first);
                rest = others;
            }
        }
        Ok(())
    }

    fn scatter(&mut self, to: &[Range], bytes: &[u8]) -> Result<(), Error> {
        for (device, ranges) in self.by_device(to) {
            let own: Vec<Range> = ranges.iter().map(|(range, _)| *range).collect();
            let given: Vec<u8> = ranges.iter().flat_map(|(range, at)| bytes[*at..at + range.bytes].to_vec()).collect();
            self.devices[device].scatter(&own, &given)?;
        }
        Ok(())
    }

    fn copy(&mut self, pairs: &[(Range, Range)]) -> Result<(), Error> {
        for device in 0..self.devices.len() {
            let here = |pair: &&(Range, Range)| self.holder(pair.0.slot) == device;
            let own: Vec<(Range, Range)> = pairs.iter().filter(here).copied().collect();
            if !own.is_empty() {
                self.devices[device].copy(&own)?;
            }
        }
        Ok(())
    }

    fn zero(&mut self, ranges: &[Range]) -> Result<(), Error> {
        for (device, ranges) in self.by_device(ranges) {
            let own: Vec<Range> = ranges.iter().map(|(range, _)| *range).collect();
            self.devices[device].zero(&own)?;
        }
        Ok(())
    }

    fn run_step(&mut self, plan: PlanId, step: usize) -> Result<(), Error> {
        self.drain()?;
        let mut before = 0;
        for number in 0..self.prepared(plan).parts.len() {
            let Ready { device, plan: own, steps, .. } = self.prepared(plan).parts[number];
            if step < before + steps {
                return self.devices[device].run_step(own, step - before);
            }
            before += steps;
        }
        Ok(())
    }

    fn profile(&mut self, plan: PlanId) -> Result<Vec<StepTime>, Error> {
        self.drain()?;
        let mut times = Vec::new();
        for number in 0..self.prepared(plan).parts.len() {
            let Ready { device, plan: own, .. } = self.prepared(plan).parts[number];
            let to = self.devices[device].describe();
            let mut timed = |what: &str, start: Instant, bytes: usize| {
                if bytes > 0 {
                    times.push(StepTime { label: format!("{what} {to}"), time: start.elapsed(), bytes: bytes as f64 });
                }
            };
            let start = Instant::now();
            self.bring(plan, number)?;
            timed("to", start, self.prepared(plan).parts[number].arriving.iter().map(|(t, _)| t.shape[0]).sum());
            let start = Instant::now();
            self.stream(plan, number)?;
            timed(
                "weights for",
                start,
                self.prepared(plan).parts[number].streamed.iter().map(|(t, _)| t.shape[0]).sum(),
            );
            self.receive(plan, number)?;
            times.extend(self.devices[device].profile(own)?);
            self.busy[device].push_back((plan, number, Ticket { plan: own, submission: None }));
            self.begin_writeback(plan, number)?;
        }
        self.finish_writeback()?;
        self.drain()?;
        Ok(times)
    }

    fn batch(&self) -> usize {
        // Where weights are brought, as many tokens as the GPU takes share them.
        let all = self.devices.iter().map(|device| device.batch());
        let streamed = self.streaming.as_ref().map(|streaming| self.devices[streaming.to].batch());
        streamed.or(all.min()).unwrap_or(super::BATCH)
    }

    fn target(&self) -> Target {
        let batch_invariant = self.devices.iter().any(|device| device.target().batch_invariant);
        Target { batch_invariant, in_parts: true, ..Target::cpu() }
    }

    fn memory(&self) -> Option<Memory> {
        let all = self.devices.iter().map(|device| device.memory()).collect::<Option<Vec<_>>>()?;
        let sum = |of: fn(&Memory) -> u64| all.iter().map(of).fold(0, u64::saturating_add);
        Some(Memory { free: sum(|m| m.free), total: sum(|m| m.total), place: "on all devices" })
    }

    fn takes_any_shape(&self) -> bool {
        self.devices.iter().all(|device| device.takes_any_shape())
    }

    fn targets(&self) -> Vec<Target> {
        self.devices.iter().map(|device| device.target()).collect()
    }

    fn shares(&self) -> Vec<Share> {
        let share = |(number, device): (usize, &dyn Executor)| Share {
            name: device.describe(),
            part: Some(self.placement.describe(number)),
            memory: device.memory(),
            holds: Some(self.holders.iter().map(|holders| holders >> number & 1 == 1).collect()),
            staging: match &self.streaming {
                Some(streaming) if streaming.to == number => streaming.staging.clone(),
                _ => Vec::new(),
            },
        };
        self.devices.iter().map(|device| &**device).enumerate().map(share).collect()
    }

    fn choices(&self, plan: PlanId) -> Vec<String> {
        let parts = self.prepared(plan).parts.iter();
        parts.flat_map(|part| self.devices[part.device].choices(part.plan)).collect()
    }
}
