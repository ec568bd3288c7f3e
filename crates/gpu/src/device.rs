//! An opened device: one compute queue, one timeline that counts submissions, memory and pipelines.

use std::ffi::CStr;
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Mutex, PoisonError};
use std::time::{Duration, Instant};

use vulkanalia::prelude::v1_2::*;

use crate::error::vulkan;
use crate::memory::Arenas;
use crate::pace::Pace;
use crate::pipeline::{Pipelines, build_key};
use crate::query::{self, Offers};
use crate::{Adapter, Cache, Error, FragmentLayout, Instance, Sources, statistics};

/// How long a device may go without finishing any submit before it counts as hung. Submits are paced to well under a
/// second (`pace.rs`); a software GPU under load may need a while for the largest ones. `KILN_TIMEOUT` names another
/// number of seconds.
const PATIENCE: Duration = Duration::from_secs(30);
const PATIENCE_WITH_SOFTWARE: Duration = Duration::from_secs(120);
/// How long a wait looks at the device before it sleeps.
const SPIN: Duration = Duration::from_micros(200);
/// After this long the user is told what Kiln waits for.
const NOTICE: Duration = Duration::from_secs(5);

/// An opened device.
pub struct Device {
    pub(crate) raw: vulkanalia::Device,
    /// What was opened.
    pub adapter: Adapter,
    pub(crate) instance: Arc<Instance>,
    pub(crate) queue_family: u32,
    queue: Mutex<Queue>,
    /// Null where the device was opened to compile.
    timeline: vk::Semaphore,
    /// Whether pipelines are made so that the driver tells of them.
    pub(crate) tells: bool,
    pub(crate) arenas: Mutex<Arenas>,
    pub(crate) memory_types: vk::PhysicalDeviceMemoryProperties,
    pub(crate) pipelines: Pipelines,
    pub(crate) pipeline_cache: vk::PipelineCache,
    pub(crate) layout: vk::PipelineLayout,
    pub(crate) cache: Cache,
    pub(crate) sources: Sources,
    pub(crate) pace: Mutex<Pace>,
    /// Bits of a timestamp that mean something; 0 where the queue has no timestamps.
    pub(crate) timestamp_bits: u32,
    patience: Duration,
    lost: AtomicBool,
    hung: AtomicBool,
}

/// What a device is opened for.
#[derive(Clone, Copy, PartialEq, Eq)]
enum Purpose {
    Run,
    Compile,
}

struct Queue {
    raw: vk::Queue,
    /// The timeline's value after everything submitted so far.
    last: u64,
}

/// A point on the device's timeline: everything submitted up to it.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub struct Submission(pub(crate) u64);

impl std::fmt::Debug for Device {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        write!(f, "Device {{ {} }}", self.adapter.describe())
    }
}

impl Device {
    /// Opens a device. May be called again after the device was lost.
    pub fn open(
        instance: &Arc<Instance>,
        adapter: &Adapter,
        sources: Sources,
        cache: Cache,
    ) -> Result<Arc<Device>, Error> {
        if adapter.is_null() {
            return Err(Error::CompilesOnly { device: adapter.name.clone() });
        }
        Device::open_for(instance, adapter, sources, cache, Purpose::Run)
    }

    /// Opens a device for making pipelines alone, which then know their [`crate::Statistic`]s: without a timeline, memory or
    /// queue work, so that a driver without hardware will do.
    pub fn open_to_compile(
        instance: &Arc<Instance>,
        adapter: &Adapter,
        sources: Sources,
        cache: Cache,
    ) -> Result<Arc<Device>, Error> {
        Device::open_for(instance, adapter, sources, cache, Purpose::Compile)
    }

    fn open_for(
        instance: &Arc<Instance>,
        adapter: &Adapter,
        sources: Sources,
        cache: Cache,
        purpose: Purpose,
    ) -> Result<Arc<Device>, Error> {
        sources.check()?;
        let patience = patience(adapter)?;
        if let Some(feature) = adapter.missing() {
            return Err(Error::MissingFeature { device: adapter.name.clone(), feature });
        }
        // SAFETY: the physical device belongs to this instance.
        let families = unsafe { instance.raw.get_physical_device_queue_family_properties(adapter.physical) };
        let computes = |f: &vk::QueueFamilyProperties| f.queue_flags.contains(vk::QueueFlags::COMPUTE);
        let queue_family = families
            .iter()
            .position(computes)
            .and_then(|i| u32::try_from(i).ok())
            .ok_or_else(|| Error::MissingFeature { device: adapter.name.clone(), feature: "a compute queue" })?;
        let timestamp_bits = families[queue_family as usize].timestamp_valid_bits;
        let tells = statistics::wanted(adapter, purpose == Purpose::Compile);
        let raw = create(instance, adapter, queue_family, tells)?;
        log::debug!("device made");
        // SAFETY: the family and index were asked for at creation.
        let queue = unsafe { raw.get_device_queue(queue_family, 0) };

        let mut kind = vk::SemaphoreTypeCreateInfo::builder().semaphore_type(vk::SemaphoreType::TIMELINE);
        let info = vk::SemaphoreCreateInfo::builder().push_next(&mut kind);
        let timeline = match purpose {
            // SAFETY: timeline semaphores are enabled.
            Purpose::Run => unsafe { raw.create_semaphore(&info, None) }.map_err(vulkan("vkCreateSemaphore"))?,
            Purpose::Compile => vk::Semaphore::null(),
        };

        let push = vk::PushConstantRange::builder()
            .stage_flags(vk::ShaderStageFlags::COMPUTE)
            .size(adapter.caps.limits.max_push_bytes.min(256));
        let ranges = [push];
        let info = vk::PipelineLayoutCreateInfo::builder().push_constant_ranges(&ranges);
        // SAFETY: the range is within the device's limit.
        let layout = unsafe { raw.create_pipeline_layout(&info, None) }.map_err(vulkan("vkCreatePipelineLayout"))?;

        let (pipeline_cache, pipelines) = Pipelines::open(&raw, adapter, &cache)?;
        log::debug!("pipeline cache taken in");
        // SAFETY: the physical device belongs to this instance.
        let memory_types = unsafe { instance.raw.get_physical_device_memory_properties(adapter.physical) };
        Ok(Arc::new(Device {
            raw,
            adapter: adapter.clone(),
            instance: Arc::clone(instance),
            queue_family,
            queue: Mutex::new(Queue { raw: queue, last: 0 }),
            timeline,
            tells,
            arenas: Mutex::default(),
            memory_types,
            pipelines,
            pipeline_cache,
            layout,
            cache,
            sources,
            pace: Mutex::new(Pace::new(adapter.caps.is_cpu)),
            timestamp_bits,
            patience,
            lost: AtomicBool::new(false),
            hung: AtomicBool::new(false),
        }))
    }

    /// Stores what the fragment probe found: the layout, whether accumulators have that of A, and whether bfloat16 matrices have it too.
    /// Only valid right after opening, before the device is shared.
    pub fn note_fragment_layout(
        self: &mut Arc<Self>,
        order: Option<FragmentLayout>,
        sums_as_left: bool,
        bfloat16: bool,
    ) {
        match Arc::get_mut(self) {
            Some(device) => {
                device.adapter.caps.fragment_layout = order;
                device.adapter.caps.accumulator_is_a_fragment = sums_as_left;
                device.adapter.caps.bf16_shares_layout = bfloat16;
            }
            None => {
                log::warn!("the fragment layout of {} is not used: the device is shared already", self.adapter.name)
            }
        }
    }

    /// What was noted about this device and this driver build under a name.
    pub fn recall(&self, name: &str) -> Option<Vec<u8>> {
        self.cache.read(&self.fact(name))
    }

    /// Notes something about this device and this driver build, for later runs.
    pub fn remember(&self, name: &str, fact: &[u8]) {
        self.cache.write(&self.fact(name), fact);
    }

    fn fact(&self, name: &str) -> String {
        format!("facts/{name}-{}.bin", build_key(&self.adapter))
    }

    /// The instance it was opened from.
    pub fn instance(&self) -> &Arc<Instance> {
        &self.instance
    }

    /// Hands one command buffer to the queue.
    pub(crate) fn submit(&self, commands: vk::CommandBuffer) -> Result<Submission, Error> {
        self.check()?;
        let mut queue = self.queue.lock().unwrap_or_else(PoisonError::into_inner);
        let value = queue.last + 1;
        let (values, semaphores, commands) = ([value], [self.timeline], [commands]);
        let mut timeline = vk::TimelineSemaphoreSubmitInfo::builder().signal_semaphore_values(&values);
        let info = vk::SubmitInfo::builder()
            .command_buffers(&commands)
            .signal_semaphores(&semaphores)
            .push_next(&mut timeline);
        // SAFETY: the queue is used under its lock; the command buffer is complete and kept until it has run.
        unsafe { self.raw.queue_submit(queue.raw, &[info], vk::Fence::null()) }
            .map_err(|e| self.note(vulkan("vkQueueSubmit")(e)))?;
        queue.last = value;
        Ok(Submission(value))
    }

    /// Waits until the device has passed a point. If it finishes nothing at all for as long as `patience`, it counts as
    /// hung, and is lost from then on.
    pub fn wait(&self, submission: Submission, patience: Duration) -> Result<(), Error> {
        self.check()?;
        let start = Instant::now();
        // A thread that sleeps is woken some ten microseconds late; parts of a model that alternate with the CPU's are as short.
        while !self.adapter.caps.is_cpu && start.elapsed() < SPIN.min(patience) {
            if self.finished()? >= submission.0 {
                return Ok(());
            }
            std::hint::spin_loop();
        }
        if self.wait_for(submission.0, patience.min(NOTICE))? {
            return Ok(());
        }
        let mut progress = (self.finished()?, start);
        if start.elapsed() < patience {
            log::warn!(
                "{} has been busy for {:.0} s; it counts as hung when it finishes nothing for {:.0} s (KILN_TIMEOUT)",
                self.adapter.name,
                start.elapsed().as_secs_f64(),
                patience.as_secs_f64()
            );
        }
        while progress.1.elapsed() < patience {
            let left = patience.saturating_sub(progress.1.elapsed()).min(NOTICE);
            if self.wait_for(submission.0, left)? {
                return Ok(());
            }
            let finished = self.finished()?;
            if finished > progress.0 {
                progress = (finished, Instant::now());
            }
        }
        self.hung.store(true, Ordering::Relaxed);
        self.lost.store(true, Ordering::Relaxed);
        Err(Error::Timeout { what: format!("work on {}", self.adapter.name), after: start.elapsed() })
    }

    /// Waits for a value of the timeline; says whether it came in time.
    fn wait_for(&self, value: u64, most: Duration) -> Result<bool, Error> {
        let (semaphores, values) = ([self.timeline], [value]);
        let info = vk::SemaphoreWaitInfo::builder().semaphores(&semaphores).values(&values);
        let nanos = u64::try_from(most.as_nanos()).unwrap_or(u64::MAX);
        // SAFETY: the semaphore is alive.
        match unsafe { self.raw.wait_semaphores(&info, nanos) } {
            Ok(code) => Ok(code != vk::SuccessCode::TIMEOUT),
            Err(e) => Err(self.note(vulkan("vkWaitSemaphores")(e))),
        }
    }

    /// How far the device has come on its timeline.
    fn finished(&self) -> Result<u64, Error> {
        // SAFETY: the semaphore is alive and a timeline.
        let value = unsafe { self.raw.get_semaphore_counter_value(self.timeline) };
        value.map_err(|e| self.note(vulkan("vkGetSemaphoreCounterValue")(e)))
    }

    /// Waits for everything submitted so far.
    pub fn wait_idle(&self) -> Result<(), Error> {
        let last = self.queue.lock().unwrap_or_else(PoisonError::into_inner).last;
        self.wait(Submission(last), self.patience)
    }

    /// How long the device may go without finishing anything before it counts as hung.
    pub fn patience(&self) -> Duration {
        self.patience
    }

    /// Whether the driver has given the device up, or it did not finish in time. Everything on it fails from then on; open
    /// it again.
    pub fn is_lost(&self) -> bool {
        self.lost.load(Ordering::Relaxed)
    }

    /// Whether abandoned work may still be running. Kiln never frees the memory it uses: the device could still write to it.
    pub fn is_hung(&self) -> bool {
        self.hung.load(Ordering::Relaxed)
    }

    /// Treats the device as lost from now on: for tests of recovery, which no driver offers a way to provoke.
    #[doc(hidden)]
    pub fn pretend_lost(&self) {
        self.lost.store(true, Ordering::Relaxed);
    }

    /// Whether work may be given to the device.
    pub(crate) fn check(&self) -> Result<(), Error> {
        if self.timeline.is_null() {
            return Err(Error::CompilesOnly { device: self.adapter.name.clone() });
        }
        if self.is_lost() {
            let how = if self.is_hung() { "work that did not finish in time" } else { "earlier work" };
            return Err(Error::DeviceLost { during: format!("{how} on {}", self.adapter.name) });
        }
        Ok(())
    }

    fn note(&self, error: Error) -> Error {
        if matches!(error, Error::DeviceLost { .. }) {
            self.lost.store(true, Ordering::Relaxed);
        }
        error
    }
}

/// How long to wait for a device without any sign of progress.
fn patience(adapter: &Adapter) -> Result<Duration, Error> {
    let Some(text) = kiln_system::environment::text("KILN_TIMEOUT") else {
        return Ok(if adapter.caps.is_cpu { PATIENCE_WITH_SOFTWARE } else { PATIENCE });
    };
    let seconds = text.parse().ok().filter(|seconds| (0.001..=1e6).contains(seconds));
    seconds.map(Duration::from_secs_f64).ok_or_else(|| {
        let text = kiln_system::text::shown(&text);
        Error::Setting(format!("KILN_TIMEOUT is \"{text}\"\nhint: it is a number of seconds, such as 30"))
    })
}

impl Drop for Device {
    fn drop(&mut self) {
        if self.is_hung() {
            // Everything stays as it is until the process ends, the instance too: a device must go before it.
            std::mem::forget(Arc::clone(&self.instance));
            return;
        }
        self.save_pipelines();
        let memory = self.arenas.get_mut().unwrap_or_else(std::sync::PoisonError::into_inner).all();
        // SAFETY: buffers and commands hold an Arc of the device, so all are gone; the queue is idle after the wait.
        unsafe {
            if !self.timeline.is_null() {
                let _ = self.raw.device_wait_idle();
            }
            memory.iter().for_each(|chunk| self.release(chunk));
            self.destroy_pipelines();
            self.raw.destroy_pipeline_cache(self.pipeline_cache, None);
            self.raw.destroy_pipeline_layout(self.layout, None);
            self.raw.destroy_semaphore(self.timeline, None);
            self.raw.destroy_device(None);
        }
    }
}

/// What drivers offer that are a layer above another interface. The bindings have it behind a feature, because its structures may change.
const PORTABILITY_SUBSET: &CStr = c"VK_KHR_portability_subset";

/// Creates the logical device with every feature Kiln can use that the driver offers.
fn create(instance: &Instance, adapter: &Adapter, queue_family: u32, tells: bool) -> Result<vulkanalia::Device, Error> {
    let (major, minor, patch) = adapter.api_version;
    let version = vulkanalia::Version::new(major, minor, patch);
    let offers = Offers::of(version.into(), &adapter.extensions);
    let mut f = query::features(&instance.raw, adapter.physical, offers);
    // Bounds are the kernels' own business; the driver's checks would only cost time.
    f.core.robust_buffer_access = vk::FALSE;
    f.coopmat.cooperative_matrix_robust_buffer_access = vk::FALSE;
    f.v12.buffer_device_address_capture_replay = vk::FALSE;
    f.v12.buffer_device_address_multi_device = vk::FALSE;

    let mut extensions = Vec::new();
    let mut want = |offered: bool, extension: &vk::Extension| {
        if offered {
            extensions.push(extension.name.as_ptr());
        }
    };
    want(offers.coopmat, &vk::KHR_COOPERATIVE_MATRIX_EXTENSION);
    want(offers.coopmat2, &vk::NV_COOPERATIVE_MATRIX2_EXTENSION);
    want(offers.bfloat16, &vk::KHR_SHADER_BFLOAT16_EXTENSION);
    want(adapter.has(&vk::EXT_MEMORY_BUDGET_EXTENSION), &vk::EXT_MEMORY_BUDGET_EXTENSION);
    want(tells, &statistics::EXTENSION);
    // A driver that offers this one demands that it is enabled.
    if adapter.extensions.iter().any(|name| name.as_bytes() == PORTABILITY_SUBSET.to_bytes()) {
        extensions.push(PORTABILITY_SUBSET.as_ptr());
    }

    let priorities = [1.0];
    let queues = [vk::DeviceQueueCreateInfo::builder().queue_family_index(queue_family).queue_priorities(&priorities)];
    let mut info = vk::DeviceCreateInfo::builder()
        .queue_create_infos(&queues)
        .enabled_features(&f.core)
        .enabled_extension_names(&extensions)
        .push_next(&mut f.v11)
        .push_next(&mut f.v12);
    if offers.v13 {
        info = info.push_next(&mut f.v13);
    }
    if offers.coopmat {
        info = info.push_next(&mut f.coopmat);
    }
    if offers.coopmat2 {
        info = info.push_next(&mut f.coopmat2);
    }
    if offers.bfloat16 {
        info = info.push_next(&mut f.bfloat16);
    }
    let mut told = vk::PhysicalDevicePipelineExecutablePropertiesFeaturesKHR::builder().pipeline_executable_info(true);
    if tells {
        info = info.push_next(&mut told);
    }
    // SAFETY: only offered features and extensions are asked for; every pointer lives until the call returns.
    unsafe { instance.raw.create_device(adapter.physical, &info, None) }.map_err(vulkan("vkCreateDevice"))
}
