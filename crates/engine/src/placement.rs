//! Which device holds which part of a model: arithmetic over bytes, before anything is opened or loaded. Everything goes to the GPU if
//! it fits; else the embedding, then the matrices of experts, then whole layers stay on the CPU.

use std::collections::BTreeSet;

use fancy_regex::Regex;
use kiln_system::memory::size as bytes;

use crate::Error;
use crate::lower::cut::{has_experts, is_light, layer};
use crate::plan::{Plan, SlotKind};

/// The device of every layer, by the device's number.
#[derive(Clone, Debug)]
pub struct Placement {
    /// Of what comes before the first layer: embeddings.
    pub input: usize,
    /// Of each layer, with its caches and states.
    pub layers: Vec<usize>,
    /// Of the matrices of experts of each layer.
    pub experts: Vec<usize>,
    /// Of what comes behind the last layer.
    pub output: usize,
    /// What was said of single tensors; the first that fits counts.
    pub rules: Vec<Rule>,
}

/// The device of tensors with certain names.
#[derive(Clone, Debug)]
pub struct Rule {
    pattern: Regex,
    device: usize,
}

impl Rule {
    /// Tensors whose name has a part that this regular expression fits. What is none may be a glob: `*_exps*`.
    pub fn new(pattern: &str, device: usize) -> Result<Rule, Error> {
        let glob = || pattern.replace('.', "\\.").replace('*', ".*").replace('?', ".");
        let compiled = Regex::new(pattern).or_else(|why| Regex::new(&glob()).map_err(|_| why));
        let refused = |why: fancy_regex::Error| Error::Placement {
            why: format!(
                "--place {pattern:?} is no regular expression: {why}\nhint: write PATTERN=DEVICE, as 'blk.*.ffn_.*_exps=cpu'"
            ),
        };
        Ok(Rule { pattern: compiled.map_err(refused)?, device })
    }

    /// Whether the name of a tensor matches.
    pub fn fits(&self, name: &str) -> bool {
        self.pattern.is_match(name).unwrap_or(false)
    }
}

impl Placement {
    /// Everything on one device.
    pub fn whole(device: usize, layers: usize) -> Placement {
        Placement {
            input: device,
            layers: vec![device; layers],
            experts: vec![device; layers],
            output: device,
            rules: Vec::new(),
        }
    }

    /// The device of a layer.
    pub fn layer(&self, layer: usize) -> usize {
        self.layers.get(layer).copied().unwrap_or(self.output)
    }

    /// The device of a layer's experts.
    pub fn experts(&self, layer: usize) -> usize {
        self.experts.get(layer).copied().unwrap_or_else(|| self.layer(layer))
    }

    /// What was said of a tensor of this name.
    pub fn rule(&self, name: &str) -> Option<usize> {
        self.rules.iter().find(|rule| rule.fits(name)).map(|rule| rule.device)
    }

    /// Every device that has something to do, in order.
    pub fn devices(&self) -> Vec<usize> {
        let places = [self.input, self.output].into_iter().chain(self.layers.iter().copied());
        let places = places.chain(self.experts.iter().copied()).chain(self.rules.iter().map(|rule| rule.device));
        places.collect::<BTreeSet<_>>().into_iter().collect()
    }

    /// The same with other numbers: `numbers[i]` takes the place of device i.
    pub fn renumbered(mut self, numbers: &[usize]) -> Placement {
        let all = [&mut self.input, &mut self.output].into_iter().chain(&mut self.layers).chain(&mut self.experts);
        all.chain(self.rules.iter_mut().map(|rule| &mut rule.device)).for_each(|device| *device = numbers[*device]);
        self
    }

    /// What a device has, for people: `layers 4 to 11 and the output`.
    pub fn describe(&self, device: usize) -> String {
        let mut parts = Vec::new();
        if self.input == device {
            parts.push("the embedding".to_owned());
        }
        parts.extend(ranges("layer", self.layers.iter().map(|d| *d == device)));
        let elsewhere =
            self.experts.iter().zip(&self.layers).map(|(experts, layer)| *experts == device && *layer != device);
        parts.extend(ranges("the experts of layer", elsewhere));
        if self.output == device {
            parts.push("the output".to_owned());
        }
        if self.rules.iter().any(|rule| rule.device == device) {
            parts.push("tensors that --place names".to_owned());
        }
        match parts.pop() {
            Some(last) if !parts.is_empty() => format!("{} and {last}", parts.join(", ")),
            Some(only) => only,
            None => "nothing".to_owned(),
        }
    }
}

/// Numbers for which `yes` holds, as ranges.
fn ranges(what: &str, yes: impl Iterator<Item = bool>) -> Option<String> {
    let mut found: Vec<(usize, usize)> = Vec::new();
    for at in yes.enumerate().filter(|(_, yes)| *yes).map(|(at, _)| at) {
        match found.last_mut() {
            Some((_, last)) if *last + 1 == at => *last = at,
            _ => found.push((at, at)),
        }
    }
    let plural = found.len() > 1 || found.first().is_some_and(|(first, last)| first < last);
    let shown = |(first, last): &(usize, usize)| match last - first {
        0 => first.to_string(),
        _ => format!("{first} to {last}"),
    };
    let shown: Vec<String> = found.iter().map(shown).collect();
    (!found.is_empty()).then(|| format!("{what}{} {}", if plural { "s" } else { "" }, shown.join(", ")))
}

/// Bytes of one layer.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct LayerSizes {
    /// Matrices of experts.
    pub experts: u64,
    /// All other weights.
    pub others: u64,
    /// One page of its caches.
    pub page: u64,
    /// What does not grow with the pages: states of all sequences, and caches of windows.
    pub states: u64,
}

/// Bytes of a model, by where they belong.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Sizes {
    /// What comes before the first layer.
    pub input: u64,
    /// What comes behind the last one.
    pub output: u64,
    /// What both need: counted once where they lie on the same device, and else on both.
    pub tied: u64,
    /// Small things that every device has.
    pub everywhere: u64,
    /// Each layer.
    pub layers: Vec<LayerSizes>,
}

impl Sizes {
    /// Counts the shared slots of plain plans, all of one model. Caches have `pages` pages.
    pub fn of(plans: &[Plan], pages: usize) -> Sizes {
        let mut sizes = Sizes::default();
        let Some(fixed) = plans.first().map(|plan| &plan.slots[..plan.n_fixed]) else { return sizes };
        #[derive(Clone, Copy, Default)]
        struct Seen {
            input: bool,
            output: bool,
            light: bool,
            layer: Option<(usize, bool)>,
        }
        let mut seen = vec![Seen::default(); fixed.len()];
        for plan in plans {
            let first_layer = plan.steps.iter().position(|step| layer(&step.label).is_some());
            for (at, step) in plan.steps.iter().enumerate() {
                let operation = step.call.operation();
                for tensor in operation.reads().iter().chain(&operation.writes()) {
                    let Some(seen) = seen.get_mut(tensor.slot.0 as usize) else { continue };
                    if is_light(&fixed[tensor.slot.0 as usize], tensor) {
                        seen.light = true;
                        continue;
                    }
                    match layer(&step.label) {
                        Some(layer) => seen.layer = seen.layer.or(Some((layer, has_experts(step)))),
                        None if first_layer.is_none_or(|first| at < first) => seen.input = true,
                        None => seen.output = true,
                    }
                }
            }
        }
        let count = seen.iter().filter_map(|s| s.layer).map(|(layer, _)| layer + 1).max().unwrap_or(0);
        sizes.layers = vec![LayerSizes::default(); count];
        for (slot, seen) in fixed.iter().zip(&seen) {
            let bytes = slot.bytes as u64;
            match (seen.layer, &slot.kind) {
                (Some((layer, _)), SlotKind::Cache) => sizes.layers[layer].page += bytes / pages.max(1) as u64,
                (Some((layer, _)), SlotKind::State | SlotKind::Carried | SlotKind::WindowCache) => {
                    sizes.layers[layer].states += bytes
                }
                (Some((layer, true)), _) => sizes.layers[layer].experts += bytes,
                (Some((layer, false)), _) => sizes.layers[layer].others += bytes,
                (None, _) if seen.input && seen.output => sizes.tied += bytes,
                (None, _) if seen.input => sizes.input += bytes,
                (None, _) if seen.output => sizes.output += bytes,
                (None, _) if seen.light => sizes.everywhere += bytes,
                // What no step of these plans uses is small, too.
                (None, _) => sizes.everywhere += bytes,
            }
        }
        sizes
    }

    /// Whether there are experts.
    pub fn has_experts(&self) -> bool {
        self.layers.iter().any(|layer| layer.experts > 0)
    }

    /// Bytes of the weights of the largest layer.
    pub fn largest_layer(&self) -> u64 {
        self.layers.iter().map(|layer| layer.experts + layer.others).max().unwrap_or(0)
    }

    /// Bytes of the caches, of so many pages, and states of the layer that has most.
    pub fn largest_caches(&self, pages: u64) -> u64 {
        self.layers.iter().map(|layer| layer.page * pages + layer.states).max().unwrap_or(0)
    }

    /// Bytes that a device holds, with caches of so many pages.
    pub fn on(&self, device: usize, placement: &Placement, pages: u64) -> u64 {
        let mut sum = self.everywhere;
        sum += if placement.input == device { self.input } else { 0 };
        sum += if placement.output == device { self.output } else { 0 };
        sum += if [placement.input, placement.output].contains(&device) { self.tied } else { 0 };
        for (at, layer) in self.layers.iter().enumerate() {
            if placement.layer(at) == device {
                sum += layer.others + layer.page * pages + layer.states;
            }
            if placement.experts(at) == device {
                sum += layer.experts;
            }
        }
        sum
    }
}

/// A device that a model could lie on.
#[derive(Clone, Debug, PartialEq)]
pub struct Candidate {
    /// Its name, for messages.
    pub name: String,
    /// Bytes that may be taken; without end where nobody can tell.
    pub usable: u64,
    /// Bytes that steps compute in there.
    pub scratch: u64,
}

/// How many layers GPUs should have, counted from the end. What comes behind the last layer counts as one.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum GpuLayers {
    /// As many as fit.
    #[default]
    Auto,
    /// All, or an error.
    All,
    /// So many, or an error.
    Count(usize),
}

/// Which experts stay on the CPU.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum CpuExperts {
    /// As many as must.
    #[default]
    Auto,
    /// All.
    All,
    /// Those of the first layers.
    First(usize),
}

/// What somebody asked for.
#[derive(Clone, Debug, Default)]
pub struct Ask {
    /// Layers of GPUs.
    pub gpu_layers: GpuLayers,
    /// Experts of the CPU.
    pub cpu_experts: CpuExperts,
    /// The share of each GPU; by free memory where it is empty.
    pub split: Vec<f64>,
    /// What was said of single tensors.
    pub rules: Vec<Rule>,
}

/// Places a model on GPUs, numbered as they stand in the list, and the CPU, numbered behind them; with caches of so many pages.
pub fn place(sizes: &Sizes, gpus: &[Candidate], pages: u64, ask: &Ask) -> Result<Placement, Error> {
    let count = sizes.layers.len();
    if !ask.split.is_empty() && ask.split.len() != gpus.len() {
        return refuse(format!(
            "--tensor-split has {} numbers for {} GPUs\nhint: one number for each device of --device",
            ask.split.len(),
            gpus.len()
        ));
    }
    match ask.cpu_experts {
        CpuExperts::First(1..) | CpuExperts::All if !sizes.has_experts() => {
            return refuse(
                "the model has no experts that could stay on the CPU\nhint: --gpu-layers N leaves layers there".into(),
            );
        }
        _ => {}
    }
    let arranged = |layers: usize, experts: usize, input: bool| {
        let mut placement = arrange(sizes, gpus, pages, &ask.split, layers, experts);
        if input && layers > count && !gpus.is_empty() {
            placement.input = placement.layer(0);
        }
        placement.rules = ask.rules.clone();
        placement
    };
    let asked_experts = match ask.cpu_experts {
        CpuExperts::Auto => None,
        CpuExperts::All => Some(count),
        CpuExperts::First(n) => Some(n.min(count)),
    };
    let experts = asked_experts.unwrap_or(0);
    let fits = |placement: &Placement| lacking(sizes, gpus, pages, placement).is_none();
    match ask.gpu_layers {
        _ if gpus.is_empty() => Ok(arranged(0, 0, false)),
        GpuLayers::Auto => {
            let all = arranged(count + 1, experts, true);
            let mut tries = vec![all, arranged(count + 1, experts, false)];
            if asked_experts.is_none() && sizes.has_experts() {
                tries.extend((1..=count).map(|n| arranged(count + 1, n, false)));
            }
            let experts = if sizes.has_experts() { asked_experts.unwrap_or(count) } else { 0 };
            tries.extend((0..=count).rev().map(|n| arranged(n, experts, false)));
            Ok(tries.into_iter().find(fits).unwrap_or_else(|| arranged(0, 0, false)))
        }
        GpuLayers::All | GpuLayers::Count(_) => {
            let layers = if let GpuLayers::Count(n) = ask.gpu_layers { n.min(count + 1) } else { count + 1 };
            let input = arranged(layers, experts, true);
            let placement = if fits(&input) { input } else { arranged(layers, experts, false) };
            let Some((device, needed)) = lacking(sizes, gpus, pages, &placement) else { return Ok(placement) };
            let fitting = (0..layers).rev().find(|n| fits(&arranged(*n, experts, false)));
            refuse(format!(
                "{} layers need {} on {}, {} are there\nhint: {}",
                layers.min(count),
                bytes(needed),
                gpus[device].name,
                bytes(gpus[device].usable),
                match fitting {
                    Some(n) if n > 0 => format!("--gpu-layers {n} fits, and `auto` finds it"),
                    _ => "not one layer fits; a smaller --ctx-size or --cpu may".to_owned(),
                }
            ))
        }
    }
}

/// Places all layers on these devices, in their order: hosts that share a model. The first has what comes before the layers, the last that has
/// any what comes behind. Without a split, by free memory.
pub fn spread(sizes: &Sizes, devices: &[Candidate], pages: u64, split: &[f64]) -> Result<Placement, Error> {
    let layers = sizes.layers.len();
    let mut placement = arrange(sizes, devices, pages, split, layers + 1, 0);
    placement.input = placement.layer(0);
    match lacking(sizes, devices, pages, &placement) {
        None => Ok(placement),
        Some((device, needed)) => refuse(format!(
            "{} of {} needs {}, {} are there\nhint: another host, a split that gives it less, or a smaller context",
            placement.describe(device),
            devices[device].name,
            bytes(needed),
            bytes(devices[device].usable)
        )),
    }
}

fn refuse<T>(why: String) -> Result<T, Error> {
    Err(Error::Placement { why })
}

/// The first GPU that has not enough memory, and what it would need.
fn lacking(sizes: &Sizes, gpus: &[Candidate], pages: u64, placement: &Placement) -> Option<(usize, u64)> {
    let used = placement.devices();
    let needed = |device: usize| sizes.on(device, placement, pages) + gpus[device].scratch;
    (0..gpus.len()).filter(|device| used.contains(device)).find_map(|device| {
        let needed = needed(device);
        (needed > gpus[device].usable).then_some((device, needed))
    })
}

/// The last so many layers on GPUs, experts of the first so many on the CPU.
fn arrange(sizes: &Sizes, gpus: &[Candidate], pages: u64, split: &[f64], layers: usize, experts: usize) -> Placement {
    let (count, cpu) = (sizes.layers.len(), gpus.len());
    let mut placement = Placement::whole(cpu, count);
    let first = (count + 1).saturating_sub(layers);
    let experts_here = |at: usize| at >= experts;
    let size = |at: usize| match sizes.layers.get(at) {
        Some(layer) => {
            let experts = if experts_here(at) { layer.experts } else { 0 };
            layer.others + layer.page * pages + layer.states + experts
        }
        None => sizes.output + sizes.tied,
    };
    let shares: Vec<f64> = match split {
        [] => gpus.iter().map(|gpu| gpu.usable.saturating_sub(gpu.scratch) as f64).collect(),
        split => split.to_vec(),
    };
    let (all, share) = ((first..=count).map(size).sum::<u64>() as f64, shares.iter().sum::<f64>());
    let (mut gpu, mut before, mut end) = (0, 0.0, shares.first().copied().unwrap_or(0.0) / share * all);
    for at in first..=count {
        let middle = before + size(at) as f64 / 2.0;
        // A device's share ends where the middle of the next layer lies behind it.
        while middle > end && gpu + 1 < gpus.len() {
            gpu += 1;
            end += shares[gpu] / share * all;
        }
        before += size(at) as f64;
        match placement.layers.get_mut(at) {
            Some(layer) => {
                *layer = gpu;
                placement.experts[at] = if experts_here(at) { gpu } else { cpu };
            }
            None => placement.output = gpu,
        }
    }
    placement
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Four layers of 100 bytes with 10 bytes a page, experts of 300 in each if wanted, an embedding of 50 and an output of 60.
    fn sizes(experts: u64) -> Sizes {
        let layer = LayerSizes { experts, others: 100, page: 10, states: 0 };
        Sizes { input: 50, output: 60, tied: 0, everywhere: 1, layers: vec![layer; 4] }
    }

    fn gpu(usable: u64) -> Candidate {
        Candidate { name: "GPU".into(), usable, scratch: 20 }
    }

    /// Embedding, layers, experts, output.
    fn shown(placement: &Placement) -> (usize, Vec<usize>, Vec<usize>, usize) {
        (placement.input, placement.layers.clone(), placement.experts.clone(), placement.output)
    }

    fn auto(sizes: &Sizes, usable: &[u64]) -> Placement {
        let gpus: Vec<Candidate> = usable.iter().map(|bytes| gpu(*bytes)).collect();
        place(sizes, &gpus, 2, &Ask::default()).unwrap()
    }

    #[test]
    fn all_goes_to_the_gpu_if_it_fits_then_the_embedding_stays_then_layers_from_the_front() {
        let dense = sizes(0);
        // 4 (100 + 2 * 10) + 50 + 60 + 1 + 20 = 611.
        assert_eq!(shown(&auto(&dense, &[611])), (0, vec![0; 4], vec![0; 4], 0));
        assert_eq!(shown(&auto(&dense, &[610])), (1, vec![0; 4], vec![0; 4], 0));
        assert_eq!(shown(&auto(&dense, &[560])), (1, vec![1, 0, 0, 0], vec![1, 0, 0, 0], 0));
        assert_eq!(shown(&auto(&dense, &[81])), (1, vec![1; 4], vec![1; 4], 0));
        assert_eq!(auto(&dense, &[80]).devices(), [1]);
        assert_eq!(auto(&dense, &[]).devices(), [0]);
    }

    #[test]
    fn experts_leave_before_layers_do() {
        let mixture = sizes(300);
        assert_eq!(auto(&mixture, &[1811]).devices(), [0]);
        assert_eq!(shown(&auto(&mixture, &[1200])), (1, vec![0; 4], vec![1, 1, 0, 0], 0));
        assert_eq!(shown(&auto(&mixture, &[561])), (1, vec![0; 4], vec![1; 4], 0));
        assert_eq!(shown(&auto(&mixture, &[560])), (1, vec![1, 0, 0, 0], vec![1; 4], 0));
    }

    #[test]
    fn several_gpus_share_by_memory_or_as_told() {
        let dense = sizes(0);
        assert_eq!(auto(&dense, &[1000, 1000]).layers, [0, 0, 1, 1]);
        assert_eq!(auto(&dense, &[3000, 1000]).layers, [0, 0, 0, 1]);
        let ask = Ask { split: vec![1.0, 3.0], ..Ask::default() };
        let placed = place(&dense, &[gpu(1000), gpu(1000)], 2, &ask).unwrap();
        assert_eq!((placed.layers, placed.output), (vec![0, 1, 1, 1], 1));
        let none = Ask { split: vec![0.0, 1.0], ..Ask::default() };
        assert_eq!(place(&dense, &[gpu(1000), gpu(1000)], 2, &none).unwrap().devices(), [1]);
    }

    #[test]
    fn numbers_that_were_asked_for_are_kept_or_refused() {
        let (dense, mixture) = (sizes(0), sizes(300));
        let ask = |gpu_layers, cpu_experts| Ask { gpu_layers, cpu_experts, ..Ask::default() };
        let two = place(&dense, &[gpu(1000)], 2, &ask(GpuLayers::Count(3), CpuExperts::Auto)).unwrap();
        assert_eq!(shown(&two), (1, vec![1, 1, 0, 0], vec![1, 1, 0, 0], 0));
        let zero = place(&dense, &[gpu(1000)], 2, &ask(GpuLayers::Count(0), CpuExperts::Auto)).unwrap();
        assert_eq!(zero.devices(), [1]);
        let moe = place(&mixture, &[gpu(5000)], 2, &ask(GpuLayers::All, CpuExperts::First(1))).unwrap();
        assert_eq!(shown(&moe), (0, vec![0; 4], vec![1, 0, 0, 0], 0));
        let refused = |sizes: &Sizes, usable, ask: Ask| place(sizes, &[gpu(usable)], 2, &ask).unwrap_err().to_string();
        // More layers than the model has are all of them: scripts give 99 for any model.
        let many = place(&dense, &[gpu(400 << 20)], 2, &ask(GpuLayers::Count(9), CpuExperts::Auto)).unwrap();
        let all = place(&dense, &[gpu(400 << 20)], 2, &ask(GpuLayers::All, CpuExperts::Auto)).unwrap();
        assert_eq!(shown(&many), shown(&all));
        let big =
            |n: u64| Sizes { layers: vec![LayerSizes { others: n << 20, ..LayerSizes::default() }; 4], ..sizes(0) };
        let all = refused(&big(100), 250 << 20, ask(GpuLayers::All, CpuExperts::Auto));
        assert!(all.contains("4 layers need 400.0 MiB on GPU, 250.0 MiB are there"), "{all}");
        assert!(all.contains("--gpu-layers 3 fits"), "{all}");
        let none = refused(&dense, 1000, ask(GpuLayers::Auto, CpuExperts::All));
        assert!(none.contains("no experts"), "{none}");
        let split = refused(&dense, 1000, Ask { split: vec![1.0, 2.0], ..Ask::default() });
        assert!(split.contains("2 numbers for 1 GPUs"), "{split}");
    }

    #[test]
    fn a_tied_matrix_counts_once_on_one_device_and_on_both_else() {
        let tied = Sizes { tied: 40, input: 0, output: 0, ..sizes(0) };
        let one = Placement::whole(0, 4);
        assert_eq!(tied.on(0, &one, 0), 441);
        let both = Placement { input: 1, ..one };
        assert_eq!((tied.on(0, &both, 0), tied.on(1, &both, 0)), (441, 41));
    }

    #[test]
    fn patterns_are_regular_expressions_and_globs_where_they_are_none() {
        let fits = |pattern: &str, name: &str| Rule::new(pattern, 0).unwrap().fits(name);
        assert!(fits("blk.*.ffn_.*_exps", "blk.3.ffn_up_exps.weight"));
        assert!(fits("*_exps*", "blk.3.ffn_up_exps.weight"));
        assert!(!fits("blk\\.[0-3]\\.", "blk.13.attn_q.weight"));
        assert!(Rule::new("(", 0).unwrap_err().to_string().contains("no regular expression"));
    }

    #[test]
    fn a_device_says_what_it_has() {
        let placement =
            Placement { input: 1, layers: vec![1, 0, 0, 0], experts: vec![1, 1, 0, 1], output: 0, rules: Vec::new() };
        assert_eq!(placement.describe(0), "layers 1 to 3 and the output");
        assert_eq!(placement.describe(1), "the embedding, layer 0 and the experts of layers 1, 3");
    }
}
