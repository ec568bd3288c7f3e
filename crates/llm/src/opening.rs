//! Opening a model: the file with its adapters, the executor, the engine. Commands, the server and programs of others all take this way.

use std::path::{Path, PathBuf};
use std::sync::{Arc, Once};

use kiln_engine::arch::Room;
use kiln_engine::executor::{DequantCache, Executor, GpuExecutor, Options, Packing, Progress, Sums};
use kiln_engine::model::{Adapter, Model, Overlay};
use kiln_engine::run::{self, Engine, First, Heads, fit};
use kiln_gguf::{Gguf, TensorType};
use kiln_gpu::{AdapterKind, Device, Error as GpuError};
use kiln_kernels::probe::{Probe, host_read_rate};
use kiln_system::environment;

use crate::device::{DeviceChoice, Early};
use crate::error::{DeviceError, Error, LoadError};
use crate::kind::check_model;
use crate::note::{Note, Watch};
use crate::placing::Placing;
use crate::stages::Stages;

/// Types that KV caches can have.
pub const CACHE_TYPES: [TensorType; 9] = [
    TensorType::F32,
    TensorType::F16,
    TensorType::BF16,
    TensorType::Q8_0,
    TensorType::Q5_1,
    TensorType::Q5_0,
    TensorType::Q4_1,
    TensorType::Q4_0,
    TensorType::IQ4_NL,
];

/// Where a model runs and how much memory it takes.
#[derive(Clone, Debug)]
pub struct Opening {
    /// The device.
    pub device: DeviceChoice,
    /// CPU threads; none for one per physical core.
    pub threads: Option<usize>,
    /// Tokens of context; none for the model's own as far as memory allows.
    pub context: Option<usize>,
    /// KV cache types of keys and of values.
    pub caches: [TensorType; 2],
    /// Whether a sequence has the same bits whatever else is in the batch.
    pub reproducible: bool,
    /// Which device holds what.
    pub placing: Placing,
    /// Other hosts that have layers of it.
    pub stages: Stages,
    /// Adapters that go on top of the model.
    pub adapters: Vec<AdapterFile>,
    /// What is said of the model in the place of its file.
    pub overlay: Overlay,
    /// Devices that are being opened meanwhile.
    pub early: Early,
    /// Hears of notes.
    pub watch: Watch,
}

impl Default for Opening {
    fn default() -> Opening {
        Opening {
            device: DeviceChoice::Any,
            threads: None,
            context: None,
            caches: [TensorType::F16; 2],
            reproducible: false,
            placing: Placing::default(),
            stages: Stages::default(),
            adapters: Vec::new(),
            overlay: Overlay::default(),
            early: Early::default(),
            watch: Watch::default(),
        }
    }
}

/// A LoRA adapter of the model.
#[derive(Clone, Debug, PartialEq)]
pub struct AdapterFile {
    /// The file.
    pub path: PathBuf,
    /// How strongly it counts.
    pub scale: f32,
}

/// What an engine is made for.
#[derive(Default)]
pub struct Job {
    /// Sequences that run at once; 0 counts as one.
    pub sequences: usize,
    /// Sequences that are held beside those that run.
    pub spare: usize,
    /// The first request, whose kernels are compiled while weights are loaded.
    pub first: Option<First>,
    /// Tokens that a sequence will need at most, where the caller knows.
    pub expected: Option<usize>,
    /// Whether the head that drafts is loaded, where the file has one and one device runs the model.
    pub heads: Heads,
}

/// A variable whose value makes no sense.
fn setting(name: &str, value: &str, hint: &str) -> DeviceError {
    DeviceError::Setting(format!("{name} is {value:?}\nhint: {hint}, or not be set"))
}

/// Which weights are packed, as `KILN_PACK` has it: for measuring what it gains.
fn packing() -> Result<Packing, DeviceError> {
    match environment::text("KILN_PACK").as_deref() {
        None => Ok(Packing::Faster),
        Some("all") => Ok(Packing::All),
        Some("none") => Ok(Packing::None),
        Some(other) => Err(setting("KILN_PACK", other, "it may be `all` or `none`")),
    }
}

/// Which weights are cached as F16, as `KILN_F16_CACHE` has it; `KILN_KEEP` is its old name.
fn f16_cache() -> Result<DequantCache, DeviceError> {
    static TOLD: Once = Once::new();
    let old = || {
        let value = environment::text("KILN_KEEP")?;
        TOLD.call_once(|| log::warn!("KILN_KEEP is called KILN_F16_CACHE now"));
        Some(value)
    };
    match environment::text("KILN_F16_CACHE").or_else(old).as_deref() {
        None => Ok(DequantCache::WhenRoom),
        Some("none") => Ok(DequantCache::None),
        Some(other) => Err(setting("KILN_F16_CACHE", other, "it may be `none`")),
    }
}

/// What long prompts add up in, as `KILN_SUMS` has it.
fn sums() -> Result<Sums, DeviceError> {
    match environment::text("KILN_SUMS").as_deref() {
        None | Some("f32") => Ok(Sums::F32),
        Some("f16") => Ok(Sums::F16),
        Some(other) => Err(setting("KILN_SUMS", other, "it may be `f32` or `f16`")),
    }
}

/// An integrated GPU that reads memory at this share of the CPU's speed is taken: prompts it reads faster by far.
const ENOUGH_BESIDE_CPU: f64 = 0.7;

/// Whether an integrated GPU is worth more than the CPU beside it. Measured once, and remembered for the device and its driver.
fn beats_cpu(device: &Arc<Device>) -> bool {
    const FACT: &str = "beside-cpu";
    if let Some(known) = device.recall(FACT) {
        return known == b"yes";
    }
    let rate = Probe::new(device).and_then(|probe| Ok(probe.read_bandwidth()?.rate()));
    let yes = rate.is_ok_and(|rate| rate >= ENOUGH_BESIDE_CPU * host_read_rate());
    device.remember(FACT, if yes { b"yes" } else { b"no" });
    yes
}

/// The model with the head of its file, where that is to draft. A head that cannot be read is an error only where it was asked for.
fn with_head(model: &Model, executor: &dyn Executor, heads: Heads) -> Result<Option<Arc<Model>>, Error> {
    let wanted = match heads {
        Heads::Off => false,
        Heads::On => true,
        Heads::Auto => executor.takes_any_shape(),
    };
    if !wanted || executor.shares().len() > 1 {
        return Ok(None);
    }
    match model.with_head() {
        Ok(model) => Ok(Some(model).filter(|model| model.facts.drafts).map(Arc::new)),
        Err(why) if heads == Heads::On => Err(why.into()),
        Err(why) => {
            log::warn!("{why}");
            Ok(None)
        }
    }
}

impl Opening {
    /// Opens a model file with the adapters that were asked for. Where a GPU is being opened meanwhile, which takes tenths of a second, the
    /// file's pages are brought into memory, from where they will be copied to the GPU.
    pub fn model(&self, path: &Path) -> Result<Arc<Model>, Error> {
        let fits = |bytes| kiln_system::memory::available().is_some_and(|left| left.bytes / 2 > bytes);
        let fetch = |gguf: &Gguf| {
            if self.early.has_begun() && fits(gguf.data_bytes()) {
                gguf.fetch();
            }
        };
        self.adapted(self.bare(path, fetch, Model::new)?)
    }

    /// The same for callers that give ids of tokens alone: a vocabulary that cannot be read is no obstacle.
    pub fn model_of_ids(&self, path: &Path) -> Result<Arc<Model>, Error> {
        self.adapted(self.bare(path, |_| (), Model::of_ids)?)
    }

    /// Opens a model file, with what is said in its place; `mapped` is told of it before it is read.
    fn bare(
        &self,
        path: &Path,
        mapped: impl FnOnce(&Gguf),
        read: fn(Gguf) -> Result<Model, kiln_engine::Error>,
    ) -> Result<Model, LoadError> {
        let named = |why: kiln_engine::Error| match why {
            // These name the file themselves.
            kiln_engine::Error::Gguf(why) => LoadError::File(why),
            why => LoadError::Model { path: path.to_owned(), why },
        };
        let mut gguf = Gguf::open(path).map_err(|why| named(why.into()))?;
        check_model(&gguf, path)?;
        for why in self.overlay.apply(&mut gguf).map_err(named)? {
            self.watch.note(Note::KeyStays { why });
        }
        mapped(&gguf);
        read(gguf).map_err(named)
    }

    /// Puts the adapters on a model.
    fn adapted(&self, model: Model) -> Result<Arc<Model>, Error> {
        let mut adapters = Vec::new();
        for AdapterFile { path, scale } in &self.adapters {
            let adapter = Adapter::open(path, *scale, &model).map_err(|why| match why {
                // These name the file themselves.
                kiln_engine::Error::Gguf(_) | kiln_engine::Error::Adapter { .. } => LoadError::AdapterFile(why),
                why => LoadError::Adapter { path: path.clone(), why },
            })?;
            if adapter.left_out > 0 {
                let (count, path) = (adapter.left_out, adapter.path.clone());
                self.watch.note(Note::NormsLeftOut { count, path });
            }
            adapters.push(adapter);
        }
        Ok(Arc::new(model.with_adapters(adapters)?))
    }

    /// Begins to open the GPUs asked for, while the model's file is read: both take tenths of a second. For callers that need them in any
    /// case.
    pub fn open_early(&self) {
        if self.device != DeviceChoice::Cpu {
            self.early.begin(self.device.clone());
        }
    }

    /// The requested memory layout for this many parallel sequences.
    pub fn wish(&self, sequences: usize) -> run::Wish {
        run::Wish { context: self.context, expected: None, sequences, caches: self.caches }
    }

    /// Loads a model for a job, with the requested context or what memory allows.
    pub fn engine(&self, model: &Arc<Model>, job: Job, progress: Progress<'_>) -> Result<Engine, Error> {
        self.engine_within(model, job, |room, _| room, progress)
    }

    /// The same where the caller makes room for more.
    pub fn engine_within(
        &self,
        model: &Arc<Model>,
        job: Job,
        widen: impl FnOnce(Room, &dyn Executor) -> Room,
        progress: Progress<'_>,
    ) -> Result<Engine, Error> {
        let Job { sequences, spare, first, expected, heads } = job;
        let wish = run::Wish { expected, ..self.wish(sequences.max(1)) };
        let executor = self.executor_for(model, &wish)?;
        let fitted = match with_head(model, &*executor, heads)? {
            Some(headed) => fit(&headed, &*executor, &wish).ok().map(|fit| (fit, headed)),
            None => None,
        };
        let (fit, model) = match fitted {
            Some(fitted) => fitted,
            None => (fit(model, &*executor, &wish)?, Arc::clone(model)),
        };
        let room = widen(fit.room.with_spare(spare, model.facts.window), &*executor);
        let start = std::time::Instant::now();
        let engine = Engine::expecting(Arc::clone(&model), executor, room, first, progress)?;
        let (weights, seconds) = (kiln_system::memory::size(model.gguf.data_bytes()), start.elapsed().as_secs_f64());
        log::info!("{weights} of weights on {} in {seconds:.2} s; room for {} tokens", engine.describe(), room.context);
        Ok(engine)
    }

    /// The executor asked for, of one device. Without a GPU and without a wish the CPU runs the model, and says so.
    pub fn executor(&self) -> Result<Box<dyn Executor>, Error> {
        let first = |gpus: Vec<Arc<Device>>| gpus.into_iter().next().ok_or(GpuError::NoDevice);
        let open = |choice: &DeviceChoice| self.early.end().map_or_else(|| choice.open(), |gpus| gpus.and_then(first));
        let Some(device) = self.or_cpu(open)? else {
            return self.cpu_executor();
        };
        Ok(Box::new(GpuExecutor::with_options(device, self.options()?)))
    }

    /// How weights lie on GPUs.
    pub fn options(&self) -> Result<Options, DeviceError> {
        Ok(Options {
            packing: packing()?,
            f16_cache: f16_cache()?,
            sums: sums()?,
            reproducible: self.reproducible,
            memory_limit: self.placing.memory_limit,
            ..Options::default()
        })
    }

    /// The GPUs asked for, opened; none where the CPU is to run the model.
    pub(crate) fn open_gpus(&self) -> Result<Vec<Arc<Device>>, Error> {
        let open = |choice: &DeviceChoice| self.early.end().unwrap_or_else(|| choice.open_all());
        let gpus = self.or_cpu(open)?.unwrap_or_default();
        match &gpus[..] {
            [one]
                if self.device == DeviceChoice::Any
                    && one.adapter.kind == AdapterKind::Integrated
                    && !beats_cpu(one) =>
            {
                self.watch.note(Note::CpuIsFaster { gpu: one.adapter.name.clone() });
                Ok(Vec::new())
            }
            _ => Ok(gpus),
        }
    }

    /// The first device asked for, not opened: one without hardware will do. None for the CPU.
    pub fn adapter(&self) -> Result<Option<kiln_gpu::Adapter>, Error> {
        self.or_cpu(|choice| choice.first().adapter().map(|(_, adapter)| adapter))
    }

    /// What comes of the device asked for; nothing where the CPU is to run the model.
    fn or_cpu<T>(&self, open: impl Fn(&DeviceChoice) -> Result<T, GpuError>) -> Result<Option<T>, Error> {
        if self.device == DeviceChoice::Cpu {
            return Ok(None);
        }
        match open(&self.device) {
            Ok(opened) => Ok(Some(opened)),
            Err(
                why @ (GpuError::CpuOnly
                | GpuError::NoLoader { .. }
                | GpuError::NoDevice
                | GpuError::OnlySoftware { .. }),
            ) if self.device == DeviceChoice::Any => {
                let only_software = matches!(why, GpuError::OnlySoftware { .. });
                self.watch.note(Note::NoGpu { why: why.to_string(), only_software });
                Ok(None)
            }
            Err(why) => Err(why.into()),
        }
    }
}
