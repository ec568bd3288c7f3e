//! Opening the model a user asked for: the flags, progress on stderr, and the library's notes and errors in the words of the command line.

use std::path::Path;
use std::sync::{Arc, Once};

use kiln_engine::Session;
use kiln_engine::arch::Room;
use kiln_engine::executor::{Executor, Progress};
use kiln_engine::media::{Encoder, Mmproj};
use kiln_engine::model::Model;
use kiln_engine::run::{self, Engine, First, Policy, Scheduler};
use kiln_gguf::TensorType;
use kiln_gpu::Adapter;
pub(crate) use kiln_llm::CACHE_TYPES;
use kiln_llm::{DeviceChoice, DeviceError, Early, Error, Job, LoadError, Note, Opening, PlacingError, Watch};

use crate::device::DeviceFlag;
use crate::draft_flags::Drafting;
use crate::key_flags::KeyFlags;
use crate::lora::LoraFlags;
use crate::output::{byte_progress, is_verbose, say, size};
use crate::placing::PlaceFlags;
use crate::stage_flags::StageFlags;

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
    #[command(flatten)]
    pub(crate) stages: StageFlags,
    #[command(flatten)]
    pub(crate) keys: KeyFlags,
    #[arg(skip)]
    pub(crate) early: Early,
}

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
    Opening::default().model(path).map_err(in_words)
}

/// An error of the library with the flags that help.
pub(crate) fn in_words(why: Error) -> anyhow::Error {
    const NO_GPU: &str = "needs a GPU, and the CPU alone would run this model\nhint: `kiln devices` lists what there is; --device names one";
    let words = match &why {
        Error::Load(LoadError::IsAdapter { path }) => {
            let path = path.display();
            format!(
                "{path} is a LoRA adapter, not a model\nhint: give the model it was made for, and the adapter with --lora"
            )
        }
        Error::Device(DeviceError::Placing(placing)) => match placing {
            PlacingError::NoShares { split } => format!("--tensor-split {split:?} gives no device a share"),
            PlacingError::NoDeviceNamed { rule } => {
                format!("--place {rule:?} names no device\nhint: write PATTERN=DEVICE, as 'blk.*.ffn_.*_exps=cpu'")
            }
            PlacingError::NoSuchDevice { rule, device, there } => format!(
                "--place {rule:?}: there is no device {device:?} here, only {there}\nhint: `kiln devices` lists all, --device 0,1 takes several"
            ),
            PlacingError::LayersNeedGpu => format!("--gpu-layers all {NO_GPU}"),
            PlacingError::NotWithStages => {
                "--stage and flags that place layers on devices of this machine exclude each other\nhint: --stage-split shares the layers out".to_owned()
            }
            PlacingError::StageShares { .. } => format!("--stage-split: {placing}"),
            PlacingError::SplitNeedsGpu => format!("--tensor-split {NO_GPU}"),
            PlacingError::RuleNeedsGpu { rule } => format!("--place {rule:?} {NO_GPU}"),
            _ => return why.into(),
        },
        _ => return why.into(),
    };
    anyhow::Error::msg(words)
}

/// Tells a note of the library with the flags that it is about.
fn tell(note: Note) {
    // Once: a command may ask several times, as `/model` in a chat does.
    static SAID: Once = Once::new();
    let say_it = || say(&format!("note: {}", in_flags(&note, is_verbose())));
    match note {
        Note::NoGpu { .. } => SAID.call_once(say_it),
        _ => say_it(),
    }
}

/// A note in words, with the flags that it is about.
fn in_flags(note: &Note, verbose: bool) -> String {
    match note {
        // The same on every run of a machine without a GPU, so all of it is only shown with -v.
        Note::NoGpu { only_software: true, .. } if !verbose => {
            "running on the CPU: there is no GPU (-v says more)".to_owned()
        }
        Note::LayersIgnored { asked } => format!("--gpu-layers {asked} is ignored: the CPU alone runs the model"),
        Note::MoreLayersThan { asked, layers } => {
            format!("--gpu-layers {asked}: the model has {layers} layers, and all of them are offloaded")
        }
        Note::RuleFitsNothing { rule } => format!("--place {rule:?} matches no tensor of the model"),
        _ => note.to_string(),
    }
}

/// Loads something with a progress bar.
pub(crate) fn loading<T>(load: impl FnOnce(Progress<'_>) -> T) -> T {
    let mut bar = None;
    let loaded = load(&mut |done, total| {
        let bar = bar.get_or_insert_with(|| byte_progress(total, "loading"));
        bar.set_length(total);
        bar.set_position(done);
    });
    bar.iter().for_each(indicatif::ProgressBar::finish_and_clear);
    loaded
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

impl OneSequence {
    fn job(self) -> Job {
        Job { sequences: 1, spare: self.spare, first: self.first, expected: self.expected, ..Job::default() }
    }
}

impl ModelFlags {
    /// What the flags say, for the library. Adapters are put on where a model is opened.
    pub(crate) fn opening(&self) -> anyhow::Result<Opening> {
        Ok(Opening {
            device: if self.cpu { DeviceChoice::Cpu } else { self.device.choice() },
            threads: self.threads.map(|n| n as usize),
            context: self.ctx_size,
            caches: [self.cache_type_k, self.cache_type_v],
            reproducible: self.reproducible,
            placing: self.place.placing().map_err(|why| in_words(why.into()))?,
            stages: self.stages.stages()?,
            adapters: Vec::new(),
            overlay: self.keys.overlay(),
            early: self.early.clone(),
            watch: Watch::new(tell),
        })
    }

    /// Opens a model file with the adapters that were asked for.
    pub(crate) fn open(&self, path: &Path) -> anyhow::Result<Arc<Model>> {
        Opening { adapters: self.lora.files()?, ..self.opening()? }.model(path).map_err(in_words)
    }

    /// The same for commands that are given ids of tokens alone: a vocabulary that cannot be read is no obstacle.
    pub(crate) fn open_for_ids(&self, path: &Path) -> anyhow::Result<Arc<Model>> {
        Opening { adapters: self.lora.files()?, ..self.opening()? }.model_of_ids(path).map_err(in_words)
    }

    /// Begins to open the GPUs asked for, while the model's file is read: both take tenths of a second. For commands that need them in any
    /// case.
    pub(crate) fn open_early(&self) {
        // Flags that make no sense are told where the model is opened.
        if let Ok(opening) = self.opening() {
            opening.open_early();
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

    /// The executor for a model: the GPU if everything fits, else as much of the model there as does.
    pub(crate) fn executor_for(&self, model: &Model, wish: &run::Wish) -> anyhow::Result<Box<dyn Executor>> {
        self.opening()?.executor_for(model, wish).map_err(in_words)
    }

    /// The executor asked for, of one device. Without a GPU and without a wish the CPU runs the model, and says so.
    pub(crate) fn executor(&self) -> anyhow::Result<Box<dyn Executor>> {
        self.opening()?.executor().map_err(in_words)
    }

    /// Loads encoders of pictures and sounds where the model will run, or the first part of it.
    pub(crate) fn encoder(&self, mmproj: &Arc<Mmproj>) -> anyhow::Result<Encoder> {
        let executor = self.executor()?;
        let encoder = loading(|progress| Encoder::new(Arc::clone(mmproj), executor, progress))?;
        let flags = self.clone();
        let reopen = move || flags.executor().map_err(|why| kiln_engine::Error::Run { why: format!("{why:#}") });
        Ok(encoder.lasting(Box::new(reopen)))
    }

    /// The first device asked for, not opened: one without hardware will do. None for the CPU.
    pub(crate) fn adapter(&self) -> anyhow::Result<Option<Adapter>> {
        self.opening()?.adapter().map_err(in_words)
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
        let (opening, drafting) = (self.opening()?, job.drafting.clone());
        let engine = drafting.engine(&opening, model, job.job())?;
        Ok(Scheduler::start(engine, drafting.policy(Policy::default())))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_software_gpu_is_told_of_in_few_words() {
        let why = "the only Vulkan device is a software one (llvmpipe), which is slower than the CPU alone".to_owned();
        let note = Note::NoGpu { why: why.clone(), only_software: true };
        assert_eq!(in_flags(&note, false), "running on the CPU: there is no GPU (-v says more)");
        assert!(in_flags(&note, true).contains(&why));
        let missing = Note::NoGpu { why: "no Vulkan loader".into(), only_software: false };
        assert!(in_flags(&missing, false).contains("no Vulkan loader"), "there may be a GPU");
    }
}
