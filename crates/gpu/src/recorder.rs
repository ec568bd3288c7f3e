//! Records work and places the barriers. Every step declares the byte ranges it reads and writes; a barrier comes
//! only where ranges conflict with work since the last one. This is the only place in Kiln that knows of barriers.

use std::sync::{Arc, PoisonError};
use std::time::Duration;

use vulkanalia::prelude::v1_2::*;
use vulkanalia::vk::ExtDebugUtilsExtensionInstanceCommands as _;

use crate::dependent_launch::{Chain, LINE};
use crate::error::vulkan;
use crate::pace::{Cost, TARGET_SECONDS, Work};
use crate::{Address, Buffer, Device, Error, Pipeline, Submission};

/// A range of device memory.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Span {
    /// First byte.
    pub start: Address,
    /// Number of bytes.
    pub bytes: u64,
}

impl Span {
    pub(crate) fn overlaps(self, other: Span) -> bool {
        self.start.0 < other.start.0 + other.bytes && other.start.0 < self.start.0 + self.bytes
    }
}

/// How many workgroups.
#[derive(Clone, Copy, Debug)]
pub enum Groups<'a> {
    /// This many in x, y, z.
    Direct([u32; 3]),
    /// As many as three `u32` at this offset of a buffer say when the step runs.
    Indirect(&'a Buffer, u64),
}

/// One dispatch.
#[derive(Clone, Copy, Debug)]
pub struct Dispatch<'a> {
    /// Name in profiles and debuggers.
    pub label: &'a str,
    /// The kernel.
    pub pipeline: &'a Arc<Pipeline>,
    /// Its parameter block.
    pub params: &'a [u8],
    /// How many workgroups.
    pub groups: Groups<'a>,
    /// What it reads.
    pub reads: &'a [Span],
    /// What it writes.
    pub writes: &'a [Span],
    /// What a dependent launch reads before `grid_wait`.
    pub early: &'a [Span],
    /// What it costs, for pacing.
    pub cost: Cost,
}

/// What kind of work a step is. Barriers name only the kinds they stand between: one that also waits for copies costs
/// an NVIDIA H200 3.4 us, one between dispatches alone 1.1 us (`kiln bench device`).
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Kind {
    Dispatch,
    IndirectDispatch,
    Transfer,
}

impl Kind {
    fn stages(self) -> vk::PipelineStageFlags {
        match self {
            Kind::Dispatch => vk::PipelineStageFlags::COMPUTE_SHADER,
            Kind::IndirectDispatch => vk::PipelineStageFlags::COMPUTE_SHADER | vk::PipelineStageFlags::DRAW_INDIRECT,
            Kind::Transfer => vk::PipelineStageFlags::TRANSFER,
        }
    }

    fn writes(self) -> vk::AccessFlags {
        match self {
            Kind::Dispatch | Kind::IndirectDispatch => vk::AccessFlags::SHADER_WRITE,
            Kind::Transfer => vk::AccessFlags::TRANSFER_WRITE,
        }
    }

    fn uses(self) -> vk::AccessFlags {
        let shader = vk::AccessFlags::SHADER_READ | vk::AccessFlags::SHADER_WRITE;
        match self {
            Kind::Dispatch => shader,
            Kind::IndirectDispatch => shader | vk::AccessFlags::INDIRECT_COMMAND_READ,
            Kind::Transfer => vk::AccessFlags::TRANSFER_READ | vk::AccessFlags::TRANSFER_WRITE,
        }
    }
}

/// Ranges touched since the last barrier, and by what kinds of work.
#[derive(Debug, Default)]
struct Hazards {
    reads: Vec<Span>,
    writes: Vec<Span>,
    dispatched: bool,
    transferred: bool,
}

impl Hazards {
    /// Whether a step with these ranges must wait for what was recorded before.
    fn conflict(&self, reads: &[Span], writes: &[Span]) -> bool {
        let hits = |old: &[Span], new: &[Span]| new.iter().any(|n| old.iter().any(|o| o.overlaps(*n)));
        hits(&self.writes, reads) || hits(&self.writes, writes) || hits(&self.reads, writes)
    }

    /// Adds the ranges of a step that waits for everything. Returns what that is.
    fn add_after_all(&mut self, kind: Kind, reads: &[Span], writes: &[Span]) -> Vec<Kind> {
        let before = self.kinds();
        *self = Hazards::default();
        self.add(kind, reads, writes);
        before
    }

    fn kinds(&self) -> Vec<Kind> {
        let dispatched = self.dispatched.then_some(Kind::Dispatch);
        dispatched.into_iter().chain(self.transferred.then_some(Kind::Transfer)).collect()
    }

    /// Adds a step's ranges, forgetting the older ones first if it had to wait. Returns what it has to wait for.
    fn add(&mut self, kind: Kind, reads: &[Span], writes: &[Span]) -> Vec<Kind> {
        let mut before = Vec::new();
        if self.conflict(reads, writes) {
            before = self.kinds();
            *self = Hazards::default();
        }
        self.reads.extend_from_slice(reads);
        self.writes.extend_from_slice(writes);
        self.dispatched |= kind != Kind::Transfer;
        self.transferred |= kind == Kind::Transfer;
        before
    }
}

/// Commands being recorded.
pub struct Recorder {
    commands: Commands,
    hazards: Hazards,
    open: Option<Segment>,
    profile: bool,
    /// Largest estimated time of a segment.
    limit: f64,
    /// The last stamp of a profile.
    stamped: u32,
    /// Counters of dependent launches.
    chain: Option<Chain>,
}

/// One command buffer: what is submitted at once.
struct Segment {
    raw: vk::CommandBuffer,
    work: Work,
    /// First of the two timestamps around it, where there is room for them.
    query: Option<u32>,
}

/// Recorded commands; they can be submitted again and again.
pub struct Commands {
    device: Arc<Device>,
    pool: vk::CommandPool,
    queries: vk::QueryPool,
    most_queries: u32,
    n_queries: u32,
    segments: Vec<Segment>,
    /// Steps of a profile: label, the stamps at the end of the step before and of this one, bytes.
    labels: Vec<(String, [u32; 2], f64)>,
    /// Buffers named by copies; dispatches name addresses, whose owners the caller keeps.
    _kept: Vec<Buffer>,
    counts: Counts,
    last: std::sync::Mutex<Option<Submission>>,
}

/// What a step took.
#[derive(Clone, Debug, PartialEq)]
pub struct StepTime {
    /// Its label.
    pub label: String,
    /// From the end of the step before to its own.
    pub time: Duration,
    /// Bytes it has to move.
    pub bytes: f64,
}

/// What was recorded.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Counts {
    /// Dispatches.
    pub dispatches: u32,
    /// Barriers between them.
    pub barriers: u32,
    /// Dependent launches: dispatches that wait by a counter instead of a barrier.
    pub dependent_launches: u32,
}

/// Queries of a recording: two for each submit and, where every step is timed, two for each step.
const QUERIES: u32 = 512;
const PROFILE_QUERIES: u32 = 16384;

impl Recorder {
    /// Begins a recording.
    pub fn new(device: &Arc<Device>) -> Result<Recorder, Error> {
        Recorder::with_queries(device, QUERIES)
    }

    /// Begins a recording that takes the time of every step: from the end of the step before to its own, so that what is lost
    /// between two steps counts with the second.
    pub fn profiled(device: &Arc<Device>) -> Result<Recorder, Error> {
        Ok(Recorder { profile: true, ..Recorder::with_queries(device, PROFILE_QUERIES)? })
    }

    fn with_queries(device: &Arc<Device>, most_queries: u32) -> Result<Recorder, Error> {
        let info = vk::CommandPoolCreateInfo::builder().queue_family_index(device.queue_family);
        // SAFETY: the family is the one the device was made with.
        let pool = unsafe { device.raw.create_command_pool(&info, None) }.map_err(vulkan("vkCreateCommandPool"))?;
        let info = vk::QueryPoolCreateInfo::builder().query_type(vk::QueryType::TIMESTAMP).query_count(most_queries);
        // SAFETY: the device is alive; on failure the pool goes with it.
        let queries = unsafe { device.raw.create_query_pool(&info, None) }.map_err(|e| {
            // SAFETY: nothing was allocated from the pool yet.
            unsafe { device.raw.destroy_command_pool(pool, None) };
            vulkan("vkCreateQueryPool")(e)
        })?;
        let commands = Commands {
            device: Arc::clone(device),
            pool,
            queries,
            most_queries,
            n_queries: 0,
            segments: Vec::new(),
            labels: Vec::new(),
            _kept: Vec::new(),
            counts: Counts::default(),
            last: std::sync::Mutex::new(None),
        };
        let limit = TARGET_SECONDS;
        Ok(Recorder {
            commands,
            hazards: Hazards::default(),
            open: None,
            profile: false,
            limit,
            stamped: 0,
            chain: None,
        })
    }

    /// Keeps everything in one submit: for measurements that must not be cut.
    pub fn uncut(mut self) -> Recorder {
        self.limit = f64::INFINITY;
        self
    }

    /// Sets the counters of dependent launches ([`crate::counter_bytes`]). Profiled recordings use barriers instead: they time every step
    /// alone.
    pub fn counting_on(mut self, counters: &Buffer) -> Recorder {
        self.chain = Some(Chain::new(counters, !self.profile));
        self
    }

    /// Records a dispatch.
    pub fn dispatch(&mut self, step: Dispatch<'_>) -> Result<(), Error> {
        let limits = &self.commands.device.adapter.caps.limits;
        let push = u64::from(limits.max_push_bytes.min(256));
        let launches_dependent = step.pipeline.launches_dependent;
        let more = if launches_dependent { crate::dependent_launch::FIELD_BYTES } else { 0 };
        if (step.params.len() + more) as u64 > push {
            let (needs, name) = ((step.params.len() + more) as u64, step.pipeline.name.clone());
            return Err(Error::OverLimit { name, what: "bytes of parameters", needs, limit: push });
        }
        if let Groups::Direct(groups) = step.groups {
            for (n, limit) in groups.into_iter().zip(limits.max_workgroup_count) {
                if n > limit {
                    let (needs, limit, name) = (u64::from(n), u64::from(limit), step.pipeline.name.clone());
                    return Err(Error::OverLimit { name, what: "workgroups in one dimension", needs, limit });
                }
            }
        }
        let device = Arc::clone(&self.commands.device);
        let kind = match step.groups {
            Groups::Direct(_) => Kind::Dispatch,
            Groups::Indirect(..) => Kind::IndirectDispatch,
        };
        let early = self.chain.as_ref().is_some_and(|chain| chain.has_written(step.early));
        let raw = self.begin((kind, launches_dependent, early), step.reads, step.writes, step.cost)?;
        self.label_begin(raw, step.label);
        self.chain.iter_mut().for_each(|chain| chain.write(step.writes));
        let count = || {
            let chain = self.chain.as_mut().expect("dependent launches should have counters");
            let Groups::Direct(groups) = step.groups else {
                panic!("dependent launches should know their number of workgroups")
            };
            chain.count(&step.pipeline.name, step.params, groups)
        };
        let counted = launches_dependent.then(count).transpose()?;
        let params = counted.as_deref().unwrap_or(step.params);
        // SAFETY: the command buffer is being recorded; pipeline and layout are alive; the block fits the limit.
        unsafe {
            device.raw.cmd_bind_pipeline(raw, vk::PipelineBindPoint::COMPUTE, step.pipeline.raw);
            if !params.is_empty() {
                device.raw.cmd_push_constants(raw, device.layout, vk::ShaderStageFlags::COMPUTE, 0, params);
            }
            match step.groups {
                Groups::Direct([x, y, z]) => device.raw.cmd_dispatch(raw, x, y, z),
                Groups::Indirect(buffer, offset) => {
                    let (vk_buffer, base) = buffer.raw();
                    device.raw.cmd_dispatch_indirect(raw, vk_buffer, base + offset);
                }
            }
        }
        if let Groups::Indirect(buffer, _) = step.groups {
            self.commands._kept.push(buffer.clone());
        }
        self.label_end(raw, step.label, step.cost.bytes);
        self.commands.counts.dispatches += 1;
        Ok(())
    }

    /// Records a copy of bytes between buffers.
    pub fn copy(&mut self, from: (&Buffer, u64), to: (&Buffer, u64), bytes: u64) -> Result<(), Error> {
        assert!(
            from.1 + bytes <= from.0.bytes() && to.1 + bytes <= to.0.bytes(),
            "copy: {bytes} bytes exceed a buffer"
        );
        if bytes == 0 {
            return Ok(());
        }
        let span = |(buffer, offset): (&Buffer, u64)| Span { start: buffer.address().offset(offset), bytes };
        let raw = self.begin(
            (Kind::Transfer, false, false),
            &[span(from)],
            &[span(to)],
            Cost { bytes: 2.0 * bytes as f64, flops: 0.0 },
        )?;
        self.label_begin(raw, "copy");
        let ((source, source_base), (target, target_base)) = (from.0.raw(), to.0.raw());
        let region = vk::BufferCopy { src_offset: source_base + from.1, dst_offset: target_base + to.1, size: bytes };
        // SAFETY: ranges were checked; both buffers are kept by the commands.
        unsafe { self.commands.device.raw.cmd_copy_buffer(raw, source, target, &[region]) };
        self.label_end(raw, "copy", 2.0 * bytes as f64);
        self.commands._kept.extend([from.0.clone(), to.0.clone()]);
        Ok(())
    }

    /// Records filling a range (whole multiples of four bytes) with a 32-bit pattern.
    pub fn fill(&mut self, to: (&Buffer, u64), bytes: u64, pattern: u32) -> Result<(), Error> {
        assert!(to.1 + bytes <= to.0.bytes().next_multiple_of(4), "fill: {bytes} bytes exceed the buffer");
        if bytes == 0 {
            return Ok(());
        }
        let span = Span { start: to.0.address().offset(to.1), bytes };
        let raw = self.begin((Kind::Transfer, false, false), &[], &[span], Cost { bytes: bytes as f64, flops: 0.0 })?;
        let (buffer, base) = to.0.raw();
        // SAFETY: the range was checked; the buffer is kept by the commands.
        unsafe { self.commands.device.raw.cmd_fill_buffer(raw, buffer, base + to.1, bytes, pattern) };
        self.commands._kept.push(to.0.clone());
        Ok(())
    }

    /// Ends the recording.
    pub fn finish(mut self) -> Result<Commands, Error> {
        self.close()?;
        Ok(self.commands)
    }

    /// The command buffer for the next step, behind a barrier where its ranges conflict, unless it is a dependent launch.
    fn begin(
        &mut self,
        (kind, waits, too_early): (Kind, bool, bool),
        reads: &[Span],
        writes: &[Span],
        cost: Cost,
    ) -> Result<vk::CommandBuffer, Error> {
        let device = Arc::clone(&self.commands.device);
        let (work, full) = {
            let pace = device.pace.lock().unwrap_or_else(PoisonError::into_inner);
            let work = pace.work(cost);
            (work, self.open.as_ref().is_some_and(|s| pace.estimate(s.work + work) > self.limit))
        };
        if full {
            self.close()?;
        }
        let mut before = self.hazards.add(kind, reads, writes);
        if before.is_empty() && (too_early || (!waits && self.chain.as_ref().is_some_and(Chain::is_waiting))) {
            // It could run in parallel with the pending dispatches, but these wait by a counter for earlier ones, which this step would not wait for.
            before = self.hazards.add_after_all(kind, reads, writes);
        }
        let fresh = self.open.is_none();
        if fresh {
            self.open = Some(self.open_segment()?);
        }
        let segment = self.open.as_mut().expect("a segment was just opened");
        segment.work = segment.work + work;
        let raw = segment.raw;
        // A new segment starts with a barrier anyway, against what ran before it.
        if !before.is_empty() && !fresh {
            match self
                .chain
                .as_mut()
                .filter(|chain| waits && !too_early && before == [Kind::Dispatch] && chain.can_wait())
            {
                Some(chain) => {
                    chain.wait();
                    self.commands.counts.dependent_launches += 1;
                }
                None => {
                    barrier(&device, raw, &before, kind);
                    self.commands.counts.barriers += 1;
                    self.chain.iter_mut().for_each(|chain| chain.after_barrier(false));
                }
            }
        }
        self.chain.iter_mut().filter(|_| !waits).for_each(Chain::uncounted);
        Ok(raw)
    }

    fn open_segment(&mut self) -> Result<Segment, Error> {
        let device = &self.commands.device;
        let info = vk::CommandBufferAllocateInfo::builder()
            .command_pool(self.commands.pool)
            .level(vk::CommandBufferLevel::PRIMARY)
            .command_buffer_count(1);
        // SAFETY: the pool belongs to this recording alone.
        let raw = unsafe { device.raw.allocate_command_buffers(&info) }.map_err(vulkan("vkAllocateCommandBuffers"))?[0];
        let info = vk::CommandBufferBeginInfo::builder().flags(vk::CommandBufferUsageFlags::SIMULTANEOUS_USE);
        // SAFETY: the command buffer is new.
        unsafe { device.raw.begin_command_buffer(raw, &info) }.map_err(vulkan("vkBeginCommandBuffer"))?;
        // Whatever an earlier submit did is finished and visible to whatever this one does.
        for kind in [Kind::IndirectDispatch, Kind::Transfer] {
            barrier(device, raw, &[Kind::Dispatch, Kind::Transfer], kind);
        }
        if let Some(chain) = &mut self.chain {
            let (buffer, base) = chain.counters.raw();
            let bytes = chain.counters.bytes() - LINE;
            // SAFETY: the range lies in the buffer, which the commands keep.
            unsafe { device.raw.cmd_fill_buffer(raw, buffer, base + LINE, bytes, 0) };
            barrier(device, raw, &[Kind::Transfer], Kind::Dispatch);
            chain.after_barrier(true);
            self.commands._kept.push(chain.counters.clone());
        }
        if self.profile && self.commands.n_queries == 0 && self.commands.device.timestamp_bits > 0 {
            // All at once: between two steps it would take longer than some of them.
            // SAFETY: the queries exist; none of them is in use.
            unsafe { device.raw.cmd_reset_query_pool(raw, self.commands.queries, 0, self.commands.most_queries) };
        }
        let query = if self.profile { self.commands.count_queries(2) } else { self.commands.take_queries(raw) };
        self.commands.stamp(raw, query);
        self.stamped = query.unwrap_or(0);
        Ok(Segment { raw, work: Work::default(), query })
    }

    fn close(&mut self) -> Result<(), Error> {
        let Some(segment) = self.open.take() else { return Ok(()) };
        let device = &self.commands.device;
        // What the host reads next must have arrived.
        host_barrier(device, segment.raw);
        self.commands.stamp(segment.raw, segment.query.map(|q| q + 1));
        // SAFETY: the command buffer is being recorded.
        unsafe { device.raw.end_command_buffer(segment.raw) }.map_err(vulkan("vkEndCommandBuffer"))?;
        self.commands.segments.push(segment);
        self.hazards = Hazards::default();
        Ok(())
    }

    fn label_begin(&mut self, raw: vk::CommandBuffer, label: &str) {
        let device = &self.commands.device;
        if device.instance.has_debug() {
            let name = std::ffi::CString::new(label).unwrap_or_default();
            let info = vk::DebugUtilsLabelEXT::builder().label_name(name.as_bytes_with_nul());
            // SAFETY: the extension is enabled where the instance has debug on.
            unsafe { device.instance.raw.cmd_begin_debug_utils_label_ext(raw, &info) };
        }
    }

    fn label_end(&mut self, raw: vk::CommandBuffer, label: &str, bytes: f64) {
        let query = if self.profile { self.commands.count_queries(1) } else { None };
        if let Some(query) = query {
            self.commands.stamp(raw, Some(query));
            self.commands.labels.push((label.to_owned(), [self.stamped, query], bytes));
            self.stamped = query;
        }
        let device = &self.commands.device;
        if device.instance.has_debug() {
            // SAFETY: closes the label opened by `label_begin`.
            unsafe { device.instance.raw.cmd_end_debug_utils_label_ext(raw) };
        }
    }
}

const WORK: vk::PipelineStageFlags = vk::PipelineStageFlags::COMPUTE_SHADER.union(vk::PipelineStageFlags::TRANSFER);

/// What was done before is finished and visible to the step that comes.
fn barrier(device: &Device, raw: vk::CommandBuffer, before: &[Kind], after: Kind) {
    let memory = vk::MemoryBarrier::builder()
        .src_access_mask(before.iter().fold(vk::AccessFlags::empty(), |all, k| all | k.writes()))
        .dst_access_mask(after.uses());
    let stages = before.iter().fold(vk::PipelineStageFlags::empty(), |all, k| all | k.stages());
    let none = vk::DependencyFlags::empty();
    let (buffers, images): (&[vk::BufferMemoryBarrier], &[vk::ImageMemoryBarrier]) = (&[], &[]);
    // SAFETY: the command buffer is being recorded.
    unsafe { device.raw.cmd_pipeline_barrier(raw, stages, after.stages(), none, &[memory], buffers, images) };
}

/// Everything before is visible to the host once the submission has finished.
fn host_barrier(device: &Device, raw: vk::CommandBuffer) {
    let memory = vk::MemoryBarrier::builder()
        .src_access_mask(vk::AccessFlags::SHADER_WRITE | vk::AccessFlags::TRANSFER_WRITE)
        .dst_access_mask(vk::AccessFlags::HOST_READ);
    let none = vk::DependencyFlags::empty();
    let (buffers, images): (&[vk::BufferMemoryBarrier], &[vk::ImageMemoryBarrier]) = (&[], &[]);
    // SAFETY: the command buffer is being recorded.
    unsafe {
        device.raw.cmd_pipeline_barrier(raw, WORK, vk::PipelineStageFlags::HOST, none, &[memory], buffers, images);
    };
}

impl Commands {
    /// Queries that no step has, while there are some.
    fn count_queries(&mut self, count: u32) -> Option<u32> {
        let query = self.n_queries;
        // A queue without timestamps must not be asked for any.
        (self.device.timestamp_bits > 0 && query + count <= self.most_queries).then(|| {
            self.n_queries += count;
            query
        })
    }

    /// Two queries, made ready.
    fn take_queries(&mut self, raw: vk::CommandBuffer) -> Option<u32> {
        let query = self.count_queries(2)?;
        // SAFETY: the queries exist; they are reset before they are written.
        unsafe { self.device.raw.cmd_reset_query_pool(raw, self.queries, query, 2) };
        Some(query)
    }

    fn stamp(&self, raw: vk::CommandBuffer, query: Option<u32>) {
        let Some(query) = query else { return };
        // SAFETY: the query exists and was reset in this command buffer.
        unsafe {
            self.device.raw.cmd_write_timestamp(raw, vk::PipelineStageFlags::BOTTOM_OF_PIPE, self.queries, query)
        };
    }

    /// What was recorded.
    pub fn counts(&self) -> Counts {
        self.counts
    }

    /// In how many submits it runs.
    pub fn submits(&self) -> usize {
        self.segments.len()
    }

    /// Whether all of it would fit one submit, by what is known now of the device's speed.
    pub fn fits_one_submit(&self) -> bool {
        let pace = self.device.pace.lock().unwrap_or_else(PoisonError::into_inner);
        let work = self.segments.iter().fold(Work::default(), |sum, segment| sum + segment.work);
        pace.estimate(work) <= TARGET_SECONDS
    }

    /// Submits everything, in as many submits as pacing asks for.
    pub fn submit(&self) -> Result<Submission, Error> {
        let mut last = Submission(0);
        for segment in &self.segments {
            last = self.device.submit(segment.raw)?;
        }
        *self.last.lock().unwrap_or_else(PoisonError::into_inner) = Some(last);
        Ok(last)
    }

    /// Submits everything and waits for it.
    pub fn run(&self) -> Result<(), Error> {
        let last = self.submit()?;
        self.device.wait(last, self.device.patience())?;
        self.learn();
        Ok(())
    }

    /// Seconds from the start of the first to the end of the last step, by the GPU's clock, of the last finished run.
    pub fn gpu_time(&self) -> Option<Duration> {
        let first = self.segments.first()?;
        let last = self.segments.last()?;
        self.between(first.query?, last.query? + 1)
    }

    /// The time of each step, for recordings made with `profiled`.
    pub fn timings(&self) -> Vec<StepTime> {
        let of = |(label, [first, second], bytes): &(String, [u32; 2], f64)| {
            let time = self.between(*first, *second)?;
            Some(StepTime { label: label.clone(), time, bytes: *bytes })
        };
        self.labels.iter().filter_map(of).collect()
    }

    fn learn(&self) {
        let mut pace = self.device.pace.lock().unwrap_or_else(PoisonError::into_inner);
        for segment in &self.segments {
            if let Some(took) = segment.query.and_then(|q| self.between(q, q + 1)) {
                pace.learn(segment.work, took.as_secs_f64());
            }
        }
    }

    fn between(&self, first: u32, second: u32) -> Option<Duration> {
        let bits = self.device.timestamp_bits;
        let tick = self.device.adapter.caps.limits.timestamp_femtoseconds;
        if bits == 0 || tick == 0 {
            return None;
        }
        let stamp = |query: u32| {
            let mut bytes = [0u8; 8];
            let flags = vk::QueryResultFlags::_64;
            // SAFETY: one 64-bit result fits the array.
            let got = unsafe { self.device.raw.get_query_pool_results(self.queries, query, 1, &mut bytes, 8, flags) };
            (got == Ok(vk::SuccessCode::SUCCESS)).then(|| u64::from_ne_bytes(bytes))
        };
        Some(ticks_between(stamp(first)?, stamp(second)?, bits, tick))
    }
}

/// The time between two stamps of which only the lowest `bits` count, at this many femtoseconds a tick. The counter may
/// have begun anew in between.
fn ticks_between(first: u64, second: u64, bits: u32, femtoseconds: u64) -> Duration {
    let mask = if bits >= 64 { u64::MAX } else { (1 << bits) - 1 };
    let ticks = second.wrapping_sub(first) & mask;
    let nanos = u128::from(ticks) * u128::from(femtoseconds) / 1_000_000;
    Duration::from_nanos(u64::try_from(nanos).unwrap_or(u64::MAX))
}

impl Drop for Commands {
    fn drop(&mut self) {
        if let Some(last) = *self.last.lock().unwrap_or_else(PoisonError::into_inner) {
            // A lost device has nothing left to wait for.
            let _ = self.device.wait(last, self.device.patience());
        }
        if self.device.is_hung() {
            // The commands may still be running: they stay, and so do the buffers that they name.
            std::mem::take(&mut self._kept).into_iter().for_each(std::mem::forget);
            return;
        }
        // SAFETY: nothing of this recording is running any more: it was waited for, or the driver gave the device up.
        unsafe {
            self.device.raw.destroy_query_pool(self.queries, None);
            self.device.raw.destroy_command_pool(self.pool, None);
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn span(start: u64, bytes: u64) -> Span {
        Span { start: Address(start), bytes }
    }

    #[test]
    fn only_conflicting_ranges_wait() {
        let mut h = Hazards::default();
        let mut wait = |kind, reads: &[Span], writes: &[Span]| h.add(kind, reads, writes);
        let mut add = |reads: &[Span], writes: &[Span]| !wait(Kind::Dispatch, reads, writes).is_empty();
        assert!(!add(&[span(0, 100)], &[span(100, 50)]), "nothing came before");
        assert!(!add(&[span(0, 100)], &[span(150, 50)]), "reads may share, writes lie apart");
        assert!(add(&[span(149, 1)], &[span(300, 10)]), "reads what was written");
        assert!(!add(&[span(100, 10)], &[span(400, 10)]), "the barrier covers all that came before");
        assert!(add(&[], &[span(100, 1)]), "writes what is being read");
        assert!(add(&[], &[span(100, 1)]), "writes what was written");
        assert!(!add(&[span(0, 0)], &[]), "an empty range touches nothing");
    }

    #[test]
    fn times_come_from_the_bits_that_count() {
        let nanos = |first, second, bits, tick| ticks_between(first, second, bits, tick).as_nanos();
        assert_eq!(nanos(10, 40, 64, 1_000_000), 30);
        // 83.333 nanoseconds a tick: rounded to 83, an hour would be 14 seconds short.
        assert_eq!(nanos(0, 12_000_000, 64, 83_333_333), 999_999_996);
        // A counter of 36 bits that began anew, and garbage above it.
        assert_eq!(nanos((7 << 36) | ((1 << 36) - 5), 5 << 40 | 10, 36, 1_000_000), 15);
    }

    #[test]
    fn a_barrier_names_only_what_it_waits_for() {
        let mut h = Hazards::default();
        assert_eq!(h.add(Kind::Dispatch, &[], &[span(0, 8)]), []);
        assert_eq!(h.add(Kind::Dispatch, &[span(0, 8)], &[span(8, 8)]), [Kind::Dispatch]);
        assert_eq!(h.add(Kind::Transfer, &[span(8, 8)], &[span(16, 8)]), [Kind::Dispatch]);
        assert_eq!(h.add(Kind::Dispatch, &[], &[span(32, 8)]), []);
        assert_eq!(h.add(Kind::IndirectDispatch, &[span(16, 8)], &[]), [Kind::Dispatch, Kind::Transfer]);
    }
}
