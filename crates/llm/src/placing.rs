//! Where a model's layers lie: what was asked for, and the executors that come of it.

use std::sync::Arc;

use kiln_engine::arch::{BatchShape, Room};
use kiln_engine::executor::{Arithmetic, BATCH, CpuExecutor, Executor, GpuExecutor, PipelineExecutor};
use kiln_engine::model::{Model, Overlay};
use kiln_engine::placement::{Ask, Candidate, CpuExperts, GpuLayers, Placement, Rule, Sizes, place};
use kiln_engine::plan::Plan;
use kiln_engine::run::{self, Place, fit, fit_in, usable};
use kiln_gpu::Device;
use kiln_system::cores::cores;

use crate::device::Early;
use crate::error::{Error, PlacingError};
use crate::note::Note;
use crate::opening::Opening;
use crate::stages::Stages;

/// Which device holds what.
#[derive(Clone, Debug, Default)]
pub struct Placing {
    /// Layers on GPUs, counted from the end; the output layer counts as one.
    pub gpu_layers: GpuLayers,
    /// Layers whose expert weights stay on the CPU.
    pub cpu_experts: CpuExperts,
    /// Share of the model for each GPU; empty for by free memory.
    pub split: Vec<f64>,
    /// Devices of single tensors; the first rule that fits counts.
    pub rules: Vec<PlaceRule>,
    /// Bytes of each GPU's memory that may be taken.
    pub memory_limit: Option<u64>,
}

/// The device of the tensors whose names fit a pattern.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct PlaceRule {
    text: String,
    pattern: String,
    home: Home,
}

/// A device that a rule names.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Home {
    /// The CPU.
    Cpu,
    /// The GPU of this number, in words: `1`, `Vulkan1`.
    Gpu(String),
}

impl PlaceRule {
    /// Reads `PATTERN=DEVICE`, as `blk.*.ffn_.*_exps=cpu`.
    pub fn parse(text: &str) -> Result<PlaceRule, PlacingError> {
        let Some((pattern, device)) = text.rsplit_once('=') else {
            return Err(PlacingError::NoDeviceNamed { rule: text.to_owned() });
        };
        let home = match device.trim().eq_ignore_ascii_case("cpu") {
            true => Home::Cpu,
            false => Home::Gpu(device.to_owned()),
        };
        Ok(PlaceRule { text: text.to_owned(), pattern: pattern.to_owned(), home })
    }
}

/// Default context for which layers are moved off the GPU to make room.
const LEAST_CONTEXT: usize = 4096;
/// Pages that each further sequence should find.
pub(crate) const PAGES_OF_OTHERS: usize = 16;

impl Placing {
    /// Whether anything was said.
    pub(crate) fn says_anything(&self) -> bool {
        let Placing { gpu_layers, cpu_experts, split, rules, memory_limit: _ } = self;
        *gpu_layers != GpuLayers::Auto || *cpu_experts != CpuExperts::Auto || !split.is_empty() || !rules.is_empty()
    }

    /// What was asked of devices with these numbers; the CPU comes behind them.
    fn ask(&self, gpus: &[Arc<Device>]) -> Result<Ask, Error> {
        if !self.split.is_empty() && self.split.iter().sum::<f64>() <= 0.0 {
            return Err(PlacingError::NoShares { split: self.split.clone() }.into());
        }
        let rule = |rule: &PlaceRule| -> Result<Rule, Error> {
            let number = match &rule.home {
                Home::Cpu => gpus.len(),
                Home::Gpu(device) => gpu_named(gpus, device).ok_or_else(|| {
                    let there = gpus.iter().map(|gpu| gpu.adapter.index.to_string()).chain(["cpu".to_owned()]);
                    PlacingError::NoSuchDevice {
                        rule: rule.text.clone(),
                        device: device.clone(),
                        there: there.collect::<Vec<_>>().join(", "),
                    }
                })?,
            };
            Ok(Rule::new(&rule.pattern, number)?)
        };
        Ok(Ask {
            gpu_layers: self.gpu_layers,
            cpu_experts: self.cpu_experts,
            split: self.split.clone(),
            rules: self.rules.iter().map(rule).collect::<Result<_, _>>()?,
        })
    }
}

/// The place in the list of the GPU that a rule names, as llama.cpp's users have it: Vulkan0, CUDA1.
fn gpu_named(gpus: &[Arc<Device>], device: &str) -> Option<usize> {
    let digits = device.trim().trim_start_matches(|c: char| c.is_ascii_alphabetic());
    let number = digits.parse::<usize>().ok()?;
    gpus.iter().position(|gpu| gpu.adapter.index == number)
}

/// Tokens of context for which layers leave the GPU where it is short of memory.
pub(crate) fn least_context(model: &Model, wish: &run::Wish) -> usize {
    let usual = || LEAST_CONTEXT.min(model.config.context).min(wish.expected.unwrap_or(usize::MAX)).max(1);
    wish.context.unwrap_or_else(usual)
}

/// Plain plans of a model, of one token and of several: what is known of its shared slots comes from them.
pub(crate) fn plain(model: &Model, room: &Room) -> Result<Vec<Plan>, kiln_engine::Error> {
    // With the adapters that the engine will load: both must number slots the same way.
    let graph = model.graph(room)?;
    [1, 9].map(|tokens| graph.plan(BatchShape::new(tokens, 1))).into_iter().collect()
}

impl Opening {
    /// Tells of patterns that no tensor's name matches.
    fn check_patterns(&self, model: &Model) -> Result<(), Error> {
        for PlaceRule { text, pattern, .. } in &self.placing.rules {
            let rule = Rule::new(pattern, 0)?;
            if !model.gguf.tensors().iter().any(|tensor| rule.fits(&tensor.name)) {
                self.watch.note(Note::RuleFitsNothing { rule: text.clone() });
            }
        }
        Ok(())
    }

    /// Refuses what needs a GPU where there is none. A number of layers is no reason to stop: scripts give one for any machine.
    fn without_gpus(&self) -> Result<(), PlacingError> {
        let Placing { gpu_layers, split, rules, .. } = &self.placing;
        match *gpu_layers {
            GpuLayers::All => return Err(PlacingError::LayersNeedGpu),
            GpuLayers::Count(n) if n > 0 => self.watch.note(Note::LayersIgnored { asked: n }),
            _ => {}
        }
        if !split.is_empty() {
            return Err(PlacingError::SplitNeedsGpu);
        }
        match rules.iter().find(|rule| rule.home != Home::Cpu) {
            Some(rule) => Err(PlacingError::RuleNeedsGpu { rule: rule.text.clone() }),
            None => Ok(()),
        }
    }

    /// The CPU on as many threads as were asked for.
    pub(crate) fn cpu_executor(&self) -> Result<Box<dyn Executor>, Error> {
        let threads = cores().threads(self.threads).unwrap_or_else(|many| {
            log::warn!("threads: {many}; {} are used", many.usable);
            many.usable
        });
        Ok(Box::new(CpuExecutor::new(Arithmetic::Fast).reproducible(self.reproducible).threads(threads)?))
    }

    pub(crate) fn gpu_executor(&self, device: &Arc<Device>) -> Result<Box<dyn Executor>, Error> {
        Ok(Box::new(GpuExecutor::with_options(Arc::clone(device), self.options()?)))
    }

    /// The executor for a model: the GPU if everything fits, else as much of the model there as does.
    pub fn executor_for(&self, model: &Model, wish: &run::Wish) -> Result<Box<dyn Executor>, Error> {
        if !self.stages.hosts.is_empty() {
            return self.over_hosts(model, wish);
        }
        let gpus = self.open_gpus()?;
        self.check_patterns(model)?;
        let Some(first) = gpus.first() else {
            self.without_gpus()?;
            return self.cpu_executor();
        };
        if gpus.len() == 1 && !self.placing.says_anything() {
            let gpu = self.gpu_executor(first)?;
            let enough = least_context(model, wish);
            let fits = |fit: run::Fit| within(&fit) && (!model.facts.has_cache() || fit.room.context >= enough);
            if fit(model, &*gpu, wish).is_ok_and(fits) {
                return Ok(gpu);
            }
        }
        let ask = self.placing.ask(&gpus)?;
        let placement = self.placement(model, &gpus, wish, &ask)?;
        let used = placement.devices();
        let cpu = gpus.len();
        let executor = |device: usize| match gpus.get(device) {
            Some(gpu) => self.gpu_executor(gpu),
            None => self.cpu_executor(),
        };
        if used == [cpu] && ask.gpu_layers == GpuLayers::Auto {
            self.watch.note(Note::NoLayerFits { gpu: first.adapter.name.clone() });
        }
        if let [only] = used[..] {
            return executor(only);
        }
        let devices = used.iter().map(|device| executor(*device)).collect::<Result<Vec<_>, _>>()?;
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

    /// The same for the devices that can still be opened, with nothing said of where layers lie.
    pub fn without_lost(&self) -> Opening {
        let placing = Placing { memory_limit: self.placing.memory_limit, ..Placing::default() };
        Opening { device: self.device.that_open(), placing, ..self.clone() }
    }

    /// The same for a draft model beside the model that this opens: adapters and the places of layers are that one's own. A draft may be
    /// wrong, so nothing of it need be reproducible.
    pub fn for_draft(&self) -> Opening {
        let placing = Placing { memory_limit: self.placing.memory_limit, ..Placing::default() };
        Opening {
            adapters: Vec::new(),
            overlay: Overlay::default(),
            early: Early::default(),
            placing,
            context: None,
            reproducible: false,
            stages: Stages::default(),
            ..self.clone()
        }
    }

    /// Where everything goes.
    fn placement(&self, model: &Model, gpus: &[Arc<Device>], wish: &run::Wish, ask: &Ask) -> Result<Placement, Error> {
        let [k_type, v_type] = wish.caches;
        let sequences = wish.sequences.max(1);
        let context = least_context(model, wish);
        let one = Room { context, pages: 1, window_pages: 0, states: sequences, sequences, k_type, v_type };
        let pages = one.pages_of_a_sequence() + (sequences - 1) * PAGES_OF_OTHERS;
        let room = Room { pages, ..one }.with_windows(model.facts.window, BATCH);
        let sizes = Sizes::of(&plain(model, &room)?, room.pages);
        let layers = sizes.layers.len();
        if let GpuLayers::Count(asked) = ask.gpu_layers
            && asked > layers + 1
        {
            self.watch.note(Note::MoreLayersThan { asked, layers });
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

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn rules_name_a_pattern_and_a_device() {
        let rule = PlaceRule::parse("blk.[0-3]=.*=CPU ").expect("a rule");
        assert_eq!((rule.pattern.as_str(), rule.home), ("blk.[0-3]=.*", Home::Cpu));
        assert_eq!(PlaceRule::parse("a=Vulkan1").expect("a rule").home, Home::Gpu("Vulkan1".into()));
        assert!(matches!(PlaceRule::parse("blk.0"), Err(PlacingError::NoDeviceNamed { rule }) if rule == "blk.0"));
    }
}
