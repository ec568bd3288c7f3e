//! Opening the model a user asked for: the file, the executor, the context, with progress on stderr.

use std::path::Path;
use std::sync::{Arc, Once};

use kiln_engine::Session;
use kiln_engine::arch::Room;
use kiln_engine::executor::{DequantCache, Executor, GpuExecutor, Options, Packing, Progress, Sums};
use kiln_engine::model::Model;
use kiln_engine::run::{self, Engine, First, Policy, Scheduler};
use kiln_engine::vision::{Encoder, Vision};
use kiln_gguf::{Gguf, TensorType};
use kiln_gpu::{Adapter, AdapterKind, Device, Error as GpuError};
use kiln_kernels::probe::{Probe, host_read_rate};
use kiln_system::environment;

use crate::device::{DeviceFlag, Early, Wish};
use crate::draft_flags::Drafting;
use crate::kind::check_model;
use crate::lora::LoraFlags;
use crate::output::{byte_progress, is_verbose, say, size};
use crate::placing::PlaceFlags;

/// Where a model runs and how much memory it takes: flags of every command that runs one.
#[derive(clap::Args, Clone, Debug)]
#[command(next_help_heading = "Device and memory")]
pub(crate) struct ModelFlags {
    #[command(flatten)]
    pub(crate) device: DeviceFlag,
    /// Run on the CPU alone
    #[arg(long, conflicts_with = "device")]
    pub(crate) cpu: bool,
    /// CPU threads; more than the machine has are lowered [default: one per physical core]
    #[arg(short = 't', long, value_name = "N", value_parser = clap::value_parser!(u32).range(1..))]
    pub(crate) threads: Option<u32>,
    /// Context size in tokens [default: the model's own as far as memory allows in run, chat and serve; at most 4096 elsewhere]
    #[arg(short = 'c', long, value_name = "TOKENS", value_parser = context)]
    pub(crate) ctx_size: Option<usize>,
    /// KV cache type of keys (-ctk): f32, f16, bf16, q8_0, q5_1, q5_0, q4_1, q4_0, iq4_nl [default: f16]
    #[arg(long, value_name = "TYPE", value_parser = cache_type, default_value = "f16", hide_default_value = true)]
    pub(crate) cache_type_k: TensorType,
    /// KV cache type of values (-ctv) [default: f16]
    #[arg(long, value_name = "TYPE", value_parser = cache_type, default_value = "f16", hide_default_value = true)]
    pub(crate) cache_type_v: TensorType,
    /// Bit-identical output regardless of batching: batch-invariant kernels (slower prompt processing)
    #[arg(long, visible_alias = "batch-invariant")]
    pub(crate) reproducible: bool,
    #[command(flatten)]
    pub(crate) lora: LoraFlags,
    #[command(flatten)]
    pub(crate) place: PlaceFlags,
    #[arg(skip)]
    pub(crate) early: Early,
}

/// Types that caches can have.
pub(crate) const CACHE_TYPES: [TensorType; 9] = [
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

fn context(text: &str) -> Result<usize, String> {
    text.parse().map_err(|_| "a context size is a number of tokens, such as 4096".to_owned())
}

fn cache_type(name: &str) -> Result<TensorType, String> {
    let found = CACHE_TYPES.into_iter().find(|ty| ty.name().eq_ignore_ascii_case(name));
    found.ok_or_else(|| format!("caches can be {}", CACHE_TYPES.map(|ty| ty.name().to_lowercase()).join(", ")))
}

pub(crate) use crate::store::resolve;

/// Opens a model file; one clear line where that fails.
pub(crate) fn open(path: &Path) -> anyhow::Result<Arc<Model>> {
    bare(path, |_| (), Model::new).map(Arc::new)
}

/// Opens a model file; `mapped` is told of it before it is read.
fn bare(
    path: &Path,
    mapped: impl FnOnce(&Gguf),
    read: fn(Gguf) -> Result<Model, kiln_engine::Error>,
) -> anyhow::Result<Model> {
    let named = |why: kiln_engine::Error| match why {
        // These name the file themselves.
        kiln_engine::Error::Gguf(why) => anyhow::Error::new(why).context("cannot run the model"),
        why => anyhow::Error::new(why).context(format!("cannot run {}", path.display())),
    };
    let gguf = Gguf::open(path).map_err(|why| named(why.into()))?;
    check_model(&gguf, path)?;
    mapped(&gguf);
    read(gguf).map_err(named)
}

/// Which weights are packed, as `KILN_PACK` has it: for measuring what it gains.
fn packing() -> anyhow::Result<Packing> {
    match environment::text("KILN_PACK").as_deref() {
        None => Ok(Packing::Faster),
        Some("all") => Ok(Packing::All),
        Some("none") => Ok(Packing::None),
        Some(other) => anyhow::bail!("KILN_PACK is {other:?}\nhint: it may be `all` or `none`, or not be set"),
    }
}

/// Which weights are cached as F16, as `KILN_F16_CACHE` has it; `KILN_KEEP` is its old name.
fn f16_cache() -> anyhow::Result<DequantCache> {
    static TOLD: Once = Once::new();
    let old = || {
        let value = environment::text("KILN_KEEP")?;
        TOLD.call_once(|| log::warn!("KILN_KEEP is called KILN_F16_CACHE now"));
        Some(value)
    };
    match environment::text("KILN_F16_CACHE").or_else(old).as_deref() {
        None => Ok(DequantCache::WhenRoom),
        Some("none") => Ok(DequantCache::None),
        Some(other) => anyhow::bail!("KILN_F16_CACHE is {other:?}\nhint: it may be `none`, or not be set"),
    }
}

/// What long prompts add up in, as `KILN_SUMS` has it.
fn sums() -> anyhow::Result<Sums> {
    match environment::text("KILN_SUMS").as_deref() {
        None | Some("f32") => Ok(Sums::F32),
        Some("f16") => Ok(Sums::F16),
        Some(other) => anyhow::bail!("KILN_SUMS is {other:?}\nhint: it may be `f32` or `f16`, or not be set"),
    }
}

/// Loads something with a progress bar.
pub(crate) fn loading<T>(load: impl FnOnce(Progress<'_>) -> T) -> T {
    let bar = byte_progress(0, "loading");
    let loaded = load(&mut |done, total| {
        bar.set_length(total);
        bar.set_position(done);
    });
    bar.finish_and_clear();
    loaded
}

/// An integrated GPU that reads memory at this share of the CPU's speed is taken: prompts it reads faster by far.
const ENOUGH_BESIDE_CPU: f64 = 0.7;

/// Whether an integrated GPU is worth more than the CPU beside it. Measured once, and remembered for the device and its driver.
fn beats_cpu(device: &Arc<Device>) -> bool {
    const FACT: &str = "beside-cpu";
    if let Some(known) = device.recall(FACT) {
        return known == b"yes";
    }
    let bandwidth =
        Probe::new(device).map_err(anyhow::Error::from).and_then(|probe| Ok(probe.read_bandwidth()?.rate()));
    let yes = bandwidth.is_ok_and(|rate| rate >= ENOUGH_BESIDE_CPU * host_read_rate());
    device.remember(FACT, if yes { b"yes" } else { b"no" });
    yes
}

/// What a command that runs one sequence at a time needs of an engine.
#[derive(Default)]
pub(crate) struct OneSequence {
    /// Sequences that are held beside the one that runs.
    pub(crate) spare: usize,
    /// The first request, whose kernels are compiled while weights are loaded.
    pub(crate) first: Option<First>,
    /// Tokens that the sequence will need at most, where the command knows.
    pub(crate) expected: Option<usize>,
    /// How tokens are drafted.
    pub(crate) drafting: Drafting,
}

impl ModelFlags {
    /// Opens a model file with the adapters that were asked for. Where a GPU is being opened meanwhile, which takes tenths of a second, its
    /// pages are brought into memory, from where they will be copied to the GPU.
    pub(crate) fn open(&self, path: &Path) -> anyhow::Result<Arc<Model>> {
        let fits = |bytes| kiln_system::memory::available().is_some_and(|left| left.bytes / 2 > bytes);
        let fetch = |gguf: &Gguf| {
            if self.early.has_begun() && fits(gguf.data_bytes()) {
                gguf.fetch();
            }
        };
        self.lora.apply(bare(path, fetch, Model::new)?)
    }

    /// The same for commands that are given ids of tokens alone: a vocabulary that cannot be read is no obstacle.
    pub(crate) fn open_for_ids(&self, path: &Path) -> anyhow::Result<Arc<Model>> {
        self.lora.apply(bare(path, |_| (), Model::of_ids)?)
    }

    /// Begins to open the GPUs asked for, while the model's file is read: both take tenths of a second. For commands that need them in any
    /// case.
    pub(crate) fn open_early(&self) {
        if !self.cpu && self.device.wish() != Wish::Cpu {
            self.early.begin(self.device.clone());
        }
    }

    /// Room for this many tokens.
    pub(crate) fn context(&self, model: &Model) -> usize {
        self.ctx_size.unwrap_or_else(|| model.usual_context().min(4096))
    }

    /// The requested memory layout for this many parallel sequences.
    pub(crate) fn wish(&self, sequences: usize) -> run::Wish {
        run::Wish { context: self.ctx_size, expected: None, sequences, caches: [self.cache_type_k, self.cache_type_v] }
    }

    /// The executor asked for, of one device. Without a GPU and without a wish the CPU runs the model, and says so.
    pub(crate) fn executor(&self) -> anyhow::Result<Box<dyn Executor>> {
        let first = |gpus: Vec<Arc<Device>>| gpus.into_iter().next().ok_or(GpuError::NoDevice);
        let open = |flag: &DeviceFlag| self.early.end().map_or_else(|| flag.open(), |gpus| gpus.and_then(first));
        let Some(device) = self.or_cpu(open)? else {
            return self.cpu_executor();
        };
        Ok(Box::new(GpuExecutor::with_options(device, self.options()?)))
    }

    /// Loads an encoder of pictures where the model will run, or the first part of it.
    pub(crate) fn encoder(&self, vision: &Arc<Vision>) -> anyhow::Result<Encoder> {
        let executor = self.executor()?;
        Ok(loading(|progress| Encoder::new(Arc::clone(vision), executor, progress))?)
    }

    /// How weights lie on GPUs.
    pub(crate) fn options(&self) -> anyhow::Result<Options> {
        Ok(Options {
            packing: packing()?,
            f16_cache: f16_cache()?,
            sums: sums()?,
            reproducible: self.reproducible,
            memory_limit: self.place.memory_limit,
            ..Options::default()
        })
    }

    /// The GPUs asked for, opened; none where the CPU is to run the model.
    pub(crate) fn open_gpus(&self) -> anyhow::Result<Vec<Arc<Device>>> {
        let open = |flag: &DeviceFlag| self.early.end().unwrap_or_else(|| flag.open_all());
        let gpus = self.or_cpu(open)?.unwrap_or_default();
        match &gpus[..] {
            [one]
                if self.device.wish() == Wish::Any
                    && one.adapter.kind == AdapterKind::Integrated
                    && !beats_cpu(one) =>
            {
                say(&format!("note: running on the CPU, which reads memory faster than {}", one.adapter.name));
                Ok(Vec::new())
            }
            _ => Ok(gpus),
        }
    }

    /// The first device asked for, not opened: one without hardware will do. None for the CPU.
    pub(crate) fn adapter(&self) -> anyhow::Result<Option<Adapter>> {
        self.or_cpu(|flag| flag.first().adapter().map(|(_, adapter)| adapter))
    }

    /// What comes of the device asked for; nothing where the CPU is to run the model.
    fn or_cpu<T>(&self, open: impl Fn(&DeviceFlag) -> Result<T, GpuError>) -> anyhow::Result<Option<T>> {
        let wish = self.device.wish();
        if self.cpu || wish == Wish::Cpu {
            return Ok(None);
        }
        match open(&self.device) {
            Ok(opened) => Ok(Some(opened)),
            Err(why @ (GpuError::NoLoader { .. } | GpuError::NoDevice | GpuError::OnlySoftware { .. }))
                if wish == Wish::Any =>
            {
                // Once: a command may ask several times, as `/model` in a chat does.
                static SAID: Once = Once::new();
                SAID.call_once(|| match (&why, is_verbose()) {
                    // The same on every run of a machine without a GPU, so it is only shown with -v.
                    (GpuError::OnlySoftware { .. }, false) => {
                        say("note: running on the CPU: there is no GPU (-v says more)")
                    }
                    _ => say(&format!(
                        "note: running on the CPU: {}",
                        why.to_string().lines().next().unwrap_or_default()
                    )),
                });
                Ok(None)
            }
            Err(why) => Err(why.into()),
        }
    }

    /// Loads a model for one sequence, with a progress bar.
    pub(crate) fn session(&self, model: &Arc<Model>) -> anyhow::Result<Session> {
        self.session_for(model, self.context(model))
    }

    /// The same with room for this many tokens, whatever the flags say.
    pub(crate) fn session_for(&self, model: &Arc<Model>, context: usize) -> anyhow::Result<Session> {
        let caches = [self.cache_type_k, self.cache_type_v];
        let asked = Some(context).filter(|_| model.facts.has_cache());
        let executor = self.executor_for(model, &run::Wish { context: asked, ..self.wish(1) })?;
        let start = std::time::Instant::now();
        let session = loading(|progress| Session::with_caches(Arc::clone(model), executor, context, caches, progress))?;
        let weights = size(model.gguf.data_bytes());
        let (context, seconds) = (session.context(), start.elapsed().as_secs_f64());
        log::info!("{weights} of weights on {} in {seconds:.2} s; room for {context} tokens", session.describe());
        Ok(session)
    }

    /// Loads a model with this much room, with a progress bar.
    pub(crate) fn engine(&self, model: &Arc<Model>, room: Room) -> anyhow::Result<Engine> {
        let wish = run::Wish { context: Some(room.context), ..self.wish(room.sequences) };
        let executor = self.executor_for(model, &wish)?;
        let room = Room { k_type: self.cache_type_k, v_type: self.cache_type_v, ..room };
        let room = room.with_windows(model.facts.window, executor.batch());
        Ok(loading(|progress| Engine::new(Arc::clone(model), executor, room, progress))?)
    }

    /// Loads a model for one sequence at a time, with a progress bar.
    pub(crate) fn scheduler(&self, model: &Arc<Model>, job: OneSequence) -> anyhow::Result<Scheduler> {
        let OneSequence { spare, first, expected, drafting } = job;
        let wish = run::Wish { expected, ..self.wish(1) };
        let draft = drafting.load(self, model, 1)?;
        let executor = self.executor_for(model, &wish)?;
        let room = run::fit(model, &*executor, &wish)?.room.with_spare(spare, model.facts.window);
        let room = drafting.widen(room, model, &*executor);
        let start = std::time::Instant::now();
        let mut engine = loading(|progress| Engine::expecting(Arc::clone(model), executor, room, first, progress))?;
        draft.into_iter().for_each(|draft| engine.draft_with(draft));
        let (weights, seconds) = (size(model.gguf.data_bytes()), start.elapsed().as_secs_f64());
        log::info!("{weights} of weights on {} in {seconds:.2} s; room for {} tokens", engine.describe(), room.context);
        Ok(Scheduler::start(engine, drafting.policy(Policy::default())))
    }
}
