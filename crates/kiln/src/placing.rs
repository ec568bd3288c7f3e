//! Where a model's layers lie: the flags, and the executors that come of them.

use std::sync::Arc;

use anyhow::bail;
use kiln_engine::arch::{BatchShape, Room};
use kiln_engine::executor::{Arithmetic, BATCH, CpuExecutor, Executor, GpuExecutor, PipelineExecutor};
use kiln_engine::model::Model;
use kiln_engine::placement::{Ask, Candidate, CpuExperts, GpuLayers, Placement, Rule, Sizes, place};
use kiln_engine::plan::Plan;
use kiln_engine::run::{self, Place, fit, fit_in, usable};
use kiln_gpu::Device;
use kiln_system::cores::cores;

use crate::device::Early;
use crate::lora::LoraFlags;
use crate::model::ModelFlags;
use crate::output::say;

/// Flags that say which device holds what.
#[derive(clap::Args, Clone, Debug, Default)]
pub(crate) struct PlaceFlags {
    /// Layers to offload to GPUs (-ngl), counted from the end; the output layer counts as one. A number, `all`, or `auto` for as many as
    /// fit [default: auto]
    #[arg(long, alias = "n-gpu-layers", value_name = "N", value_parser = gpu_layers)]
    gpu_layers: Option<GpuLayers>,
    /// Keep the expert weights of all layers on the CPU (-cmoe)
    #[arg(long, conflicts_with = "n_cpu_moe")]
    cpu_moe: bool,
    /// Keep the expert weights of the first N layers on the CPU (-ncmoe)
    #[arg(long, value_name = "N")]
    n_cpu_moe: Option<usize>,
    /// Share of the model for each GPU (-ts), as 3,1 for `--device 0,1` [default: by free memory]
    #[arg(long, value_name = "SHARES", value_delimiter = ',', value_parser = share)]
    tensor_split: Vec<f64>,
    /// Put tensors whose names match a regular expression on a device (-ot): 'blk.*.ffn_.*_exps=cpu', 'blk.[0-7]\.=1'; may be given
    /// several times, and the first match counts
    #[arg(long, alias = "override-tensor", value_name = "PATTERN=DEVICE")]
    place: Vec<String>,
    /// Use at most this much memory of each GPU, as 3GiB
    #[arg(long, value_name = "SIZE", value_parser = kiln_system::memory::bytes_of)]
    pub(crate) memory_limit: Option<u64>,
}

fn gpu_layers(text: &str) -> Result<GpuLayers, String> {
    match text {
        // The number is llama.cpp's word for it.
        "auto" | "-1" => Ok(GpuLayers::Auto),
        "all" => Ok(GpuLayers::All),
        number => number.parse().map(GpuLayers::Count).map_err(|_| "want a number, `auto` or `all`".to_owned()),
    }
}

fn share(text: &str) -> Result<f64, String> {
    let share = text.trim().parse().ok().filter(|share: &f64| share.is_finite() && *share >= 0.0);
    share.ok_or_else(|| "want numbers that are not negative, as 3,1".to_owned())
}

/// Default context for which layers are moved off the GPU to make room.
const LEAST_CONTEXT: usize = 4096;
/// Pages that each further text should find.
const PAGES_OF_OTHERS: usize = 16;

impl PlaceFlags {
    /// Whether anything was said.
    fn says_anything(&self) -> bool {
        let PlaceFlags { gpu_layers, cpu_moe, n_cpu_moe, tensor_split, place, memory_limit: _ } = self;
        gpu_layers.is_some_and(|layers| layers != GpuLayers::Auto)
            || *cpu_moe
            || n_cpu_moe.is_some()
            || !tensor_split.is_empty()
            || !place.is_empty()
    }

    /// What was asked of devices with these numbers on the command line; the CPU comes behind them.
    fn ask(&self, gpus: &[Arc<Device>]) -> anyhow::Result<Ask> {
        if !self.tensor_split.is_empty() && self.tensor_split.iter().sum::<f64>() <= 0.0 {
            bail!("--tensor-split {:?} gives no device a share", self.tensor_split);
        }
        let rule = |text: &String| -> anyhow::Result<Rule> {
            let Some((pattern, device)) = text.rsplit_once('=') else {
                bail!("--place {text:?} names no device\nhint: write PATTERN=DEVICE, as 'blk.*.ffn_.*_exps=cpu'");
            };
            let number = match device.trim().to_lowercase().as_str() {
                "cpu" => gpus.len(),
                // As llama.cpp's users have it: Vulkan0, CUDA1.
                word => {
                    let digits = word.trim_start_matches(|c: char| c.is_ascii_alphabetic());
                    let number = digits.parse::<usize>().ok();
                    let known = |n: &usize| gpus.iter().any(|gpu| gpu.adapter.index == *n);
                    let place = number.filter(known).and_then(|n| gpus.iter().position(|gpu| gpu.adapter.index == n));
                    let there: Vec<String> = gpus.iter().map(|gpu| gpu.adapter.index.to_string()).collect();
                    match place {
                        Some(place) => place,
                        None => bail!(
                            "--place {text:?}: there is no device {device:?} here, only {}\nhint: `kiln devices` lists all, --device 0,1 takes several",
                            there.into_iter().chain(["cpu".to_owned()]).collect::<Vec<_>>().join(", ")
                        ),
                    }
                }
            };
            Ok(Rule::new(pattern, number)?)
        };
        Ok(Ask {
            gpu_layers: self.gpu_layers.unwrap_or_default(),
            cpu_experts: match (self.cpu_moe, self.n_cpu_moe) {
                (true, _) => CpuExperts::All,
                (_, Some(n)) => CpuExperts::First(n),
                _ => CpuExperts::Auto,
            },
            split: self.tensor_split.clone(),
            rules: self.place.iter().map(rule).collect::<anyhow::Result<_>>()?,
        })
    }

    /// Tells of patterns that no tensor's name matches.
    fn check_patterns(&self, model: &Model) -> anyhow::Result<()> {
        for text in &self.place {
            let pattern = text.rsplit_once('=').map_or(text.as_str(), |(pattern, _)| pattern);
            let rule = Rule::new(pattern, 0)?;
            if !model.gguf.tensors().iter().any(|tensor| rule.fits(&tensor.name)) {
                say(&format!("note: --place {text:?} matches no tensor of the model"));
            }
        }
        Ok(())
    }

    /// Refuses what needs a GPU where there is none. A number of layers is no reason to stop: scripts give one for any machine.
    fn without_gpus(&self) -> anyhow::Result<()> {
        let wants = |what: &str| -> anyhow::Result<()> {
            bail!(
                "{what} needs a GPU, and the CPU alone would run this model\nhint: `kiln devices` lists what there is; --device names one"
            )
        };
        match self.gpu_layers {
            Some(GpuLayers::All) => return wants("--gpu-layers all"),
            Some(GpuLayers::Count(n)) if n > 0 => {
                say(&format!("note: --gpu-layers {n} is ignored: the CPU alone runs the model"));
            }
            _ => {}
        }
        if !self.tensor_split.is_empty() {
            return wants("--tensor-split");
        }
        match self.place.iter().find(|rule| !rule.to_lowercase().trim_end().ends_with("=cpu")) {
            Some(rule) => wants(&format!("--place {rule:?}")),
            None => Ok(()),
        }
    }
}

/// Tokens of context for which layers leave the GPU where it is short of memory.
fn least_context(model: &Model, wish: &run::Wish) -> usize {
    let usual = || LEAST_CONTEXT.min(model.config.context).min(wish.expected.unwrap_or(usize::MAX)).max(1);
    wish.context.unwrap_or_else(usual)
}

/// Plain plans of a model, of one token and of several: what is known of its shared slots comes from them.
fn plain(model: &Model, room: &Room) -> anyhow::Result<Vec<Plan>> {
    // With the adapters that the engine will load: both must number slots the same way.
    let graph = model.graph(room)?;
    Ok([1, 9].map(|tokens| graph.plan(BatchShape::new(tokens, 1))).into_iter().collect::<Result<_, _>>()?)
}

impl ModelFlags {
    /// The CPU on as many threads as were asked for.
    pub(crate) fn cpu_executor(&self) -> anyhow::Result<Box<dyn Executor>> {
        let asked = self.threads.map(|n| n as usize);
        let threads = cores().threads(asked).unwrap_or_else(|many| {
            log::warn!("--threads: {many}; {} are used", many.usable);
            many.usable
        });
        Ok(Box::new(CpuExecutor::new(Arithmetic::Fast).reproducible(self.reproducible).threads(threads)?))
    }

    fn gpu_executor(&self, device: &Arc<Device>) -> anyhow::Result<Box<dyn Executor>> {
        Ok(Box::new(GpuExecutor::with_options(Arc::clone(device), self.options()?)))
    }

    /// The executor for a model: the GPU if everything fits, else as much of the model there as does.
    pub(crate) fn executor_for(&self, model: &Model, wish: &run::Wish) -> anyhow::Result<Box<dyn Executor>> {
        let gpus = self.open_gpus()?;
        self.place.check_patterns(model)?;
        let Some(first) = gpus.first() else {
            self.place.without_gpus()?;
            return self.cpu_executor();
        };
        if gpus.len() == 1 && !self.place.says_anything() {
            let gpu = self.gpu_executor(first)?;
            let enough = least_context(model, wish);
            let fits = |fit: run::Fit| within(&fit) && (!model.facts.has_cache() || fit.room.context >= enough);
            if fit(model, &*gpu, wish).is_ok_and(fits) {
                return Ok(gpu);
            }
        }
        let ask = self.place.ask(&gpus)?;
        let placement = self.placement(model, &gpus, wish, &ask)?;
        let used = placement.devices();
        let cpu = gpus.len();
        let executor = |device: usize| match gpus.get(device) {
            Some(gpu) => self.gpu_executor(gpu),
            None => self.cpu_executor(),
        };
        if used == [cpu] && ask.gpu_layers == GpuLayers::Auto {
            say(&format!("note: running on the CPU: not one layer fits on {}", first.adapter.name));
        }
        if let [only] = used[..] {
            return executor(only);
        }
        let devices = used.iter().map(|device| executor(*device)).collect::<anyhow::Result<Vec<_>>>()?;
        let mut numbers = vec![0; cpu + 1];
        used.iter().enumerate().for_each(|(new, old)| numbers[*old] = new);
        let placement = placement.renumbered(&numbers);
        let plans = plain(model, &Room::one(64))?;
        let has_room = |several: &PipelineExecutor| fit(model, several, wish).is_ok_and(|fit| within(&fit));
        // Where there is no room for caches that come along with weights that are brought for long prompts, they stay where they are; where
        // there is none for weights, long prompts are computed where the weights lie.
        let mut several = PipelineExecutor::new(devices, placement, &plans);
        if !has_room(&several) {
            several = several.without_staging();
        }
        if !has_room(&several) {
            several = several.without_streaming();
        }
        Ok(Box::new(several))
    }

    /// The same flags for the devices that can still be opened, with nothing said of where layers lie.
    pub(crate) fn without_lost(&self) -> ModelFlags {
        let place = PlaceFlags { memory_limit: self.place.memory_limit, ..PlaceFlags::default() };
        let device = self.device.that_open();
        ModelFlags { cpu: device.is_none(), device: device.unwrap_or_default(), place, ..self.clone() }
    }

    /// The flags of a draft model beside the model that these are for: adapters and the places of layers are that one's own.
    pub(crate) fn for_draft(&self) -> ModelFlags {
        let place = PlaceFlags { memory_limit: self.place.memory_limit, ..PlaceFlags::default() };
        let (lora, early) = (LoraFlags::default(), Early::default());
        ModelFlags { lora, early, place, reproducible: false, ..self.clone() }
    }

    /// Where everything goes.
    fn placement(&self, model: &Model, gpus: &[Arc<Device>], wish: &run::Wish, ask: &Ask) -> anyhow::Result<Placement> {
        let [k_type, v_type] = wish.caches;
        let sequences = wish.sequences.max(1);
        let context = least_context(model, wish);
        let one = Room { context, pages: 1, window_pages: 0, states: sequences, sequences, k_type, v_type };
        let pages = one.pages_of_a_sequence() + (sequences - 1) * PAGES_OF_OTHERS;
        let room = Room { pages, ..one }.with_windows(model.facts.window, BATCH);
        let sizes = Sizes::of(&plain(model, &room)?, room.pages);
        let layers = sizes.layers.len();
        if let GpuLayers::Count(n) = ask.gpu_layers
            && n > layers + 1
        {
            say(&format!("note: --gpu-layers {n}: the model has {layers} layers, and all of them are offloaded"));
        }
        let mut candidates = Vec::new();
        for gpu in gpus {
            let executor = self.gpu_executor(gpu)?;
            let thought = Place::thought(executor.target(), executor.batch(), None);
            candidates.push(Candidate {
                name: gpu.adapter.name.clone(),
                usable: executor.memory().as_ref().map_or(u64::MAX, usable),
                // Weights that are brought for long prompts have their place among what is computed, and so have caches that come along.
                scratch: fit_in(model, &thought, wish)?.scratch()
                    + sizes.largest_layer()
                    + sizes.largest_caches(pages as u64).min(sizes.largest_layer()),
            });
        }
        Ok(place(&sizes, &candidates, pages as u64, ask)?)
    }
}

/// Whether every device has the memory that is counted.
fn within(fit: &run::Fit) -> bool {
    fit.devices.iter().all(|device| device.has_room(&fit.room))
}
