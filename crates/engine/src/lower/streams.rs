//! What is brought to a GPU for long prompts, although it lies with the CPU: weights of products of large N, and with them the caches and
//! states of their layers, so that whole layers run there.

use std::collections::{HashMap, HashSet};

use kiln_kernels::Call;
use kiln_kernels::operation::Operation as _;
use kiln_kernels::tensor::{Slot, Tensor};

use super::cut::{is_light, layer};
use crate::plan::{Plan, SlotInfo, SlotKind, Step};

/// Bytes of weights of several layers that are brought to a device for one part. Those of one layer may be more.
const MOST_STREAMED: usize = 192 << 20;

/// Weights that are brought to a GPU for products of large N: reading them over the bus once takes less time than multiplying them
/// on the CPU.
#[derive(Clone, Copy, Debug)]
pub struct Streams<'a> {
    /// The GPU.
    pub to: usize,
    /// Smallest N of a matrix for which it is brought; of experts, on the average.
    pub from: usize,
    /// Whether each shared slot may be brought.
    pub slots: &'a [bool],
    /// The place on the GPU that each cache or state of the CPU's layers has while a part of a plan needs it. Those that no part needs at the
    /// same time may have the same.
    pub staging: &'a [Option<usize>],
}

impl Streams<'_> {
    /// The shared slots that a step of a plan that is not lowered should have brought: its weights, and the biases of experts.
    pub(super) fn of(&self, step: &Step) -> Vec<usize> {
        let Call::MulMatVec(call) = &step.call else { return Vec::new() };
        let (a, d) = (call.product.a, call.product.d);
        let may = |t: &Tensor| self.slots.get(t.slot.0 as usize).is_some_and(|may| *may);
        let known = |t: &Tensor| t.slot == a.slot || call.epilogue.bias.is_some_and(|bias| bias.slot == t.slot);
        let reads: Vec<Tensor> = call.reads().into_iter().filter(may).collect();
        if !may(&a) || !reads.iter().all(known) || d.rows() < self.from * a.shape[2] * a.shape[3] {
            return Vec::new();
        }
        reads.iter().map(|t| t.slot.0 as usize).collect()
    }

    /// Which shared slots of caches and states visit the GPU in a plan that is not lowered: all steps that touch such a slot run there.
    pub(super) fn staged(&self, plan: &Plan) -> Vec<bool> {
        let mut staged: Vec<bool> = (0..plan.n_fixed).map(|slot| self.place(slot).is_some()).collect();
        if !staged.contains(&true) || !self.has_long_prompts(plan) {
            return vec![false; plan.n_fixed];
        }
        let steps: Vec<(Vec<usize>, Vec<usize>, &Step)> =
            plan.steps.iter().map(|step| (pinned(plan, step), self.of(step), step)).collect();
        // What a recurrent layer does between its products is one chain: half of it elsewhere would cross over often.
        let mut states: HashMap<usize, Vec<usize>> = HashMap::new();
        for (pinned, _, step) in &steps {
            let own = pinned.iter().filter(|slot| plan.slots[**slot].kind == SlotKind::State);
            layer(&step.label).into_iter().for_each(|layer| states.entry(layer).or_default().extend(own.clone()));
        }
        // A slot that stays keeps steps where it is, and with them other slots.
        loop {
            let mut staying: Vec<usize> = Vec::new();
            for (pinned, streamed, step) in &steps {
                let comes = |slot: &usize| streamed.contains(slot) || staged[*slot];
                if !pinned.iter().all(comes) || !writes_known_rows(plan, step) {
                    let states = layer(&step.label).and_then(|layer| states.get(&layer));
                    staying.extend(pinned.iter().chain(states.into_iter().flatten()).filter(|slot| staged[**slot]));
                }
            }
            if staying.is_empty() {
                return staged;
            }
            staying.into_iter().for_each(|slot| staged[slot] = false);
        }
    }

    /// Whether a plan reads so long pieces of prompts that caches may come along: what their sequences have in caches already comes, too, so there
    /// should be large N to each of them. The host must know which pages there are.
    fn has_long_prompts(&self, plan: &Plan) -> bool {
        let ports = &plan.ports;
        let windows = ports.windows.iter().flat_map(|places| [places.table, places.rows]);
        let sources = ports.source.iter().flat_map(|source| [source.table, source.lengths]);
        let told = [ports.rows, ports.table, ports.lengths].into_iter().chain(windows).chain(sources);
        let (rows, sequences) = (ports.positions.shape[0], ports.lengths.shape[0]);
        rows >= self.from * sequences && told.into_iter().all(|port| *plan.kind(&port) == SlotKind::Input)
    }

    /// The layers whose caches or states visit the GPU.
    pub(super) fn moved(&self, plan: &Plan, staged: &[bool]) -> HashSet<usize> {
        let staging = |step: &&Step| pinned(plan, step).iter().any(|slot| staged[*slot]);
        plan.steps.iter().filter(staging).filter_map(|step| layer(&step.label)).collect()
    }

    /// The place of a slot that may visit the GPU.
    pub fn place(&self, slot: usize) -> Option<usize> {
        self.staging.get(slot).copied().flatten()
    }

    /// Lets the steps of a part read what is brought.
    pub(super) fn bring(&self, plan: &mut Plan) {
        for at in 0..plan.steps.len() {
            for of in self.of(&plan.steps[at]) {
                let SlotInfo { name, ty, shape, .. } = plan.slots[of].clone();
                let slot = numbered(of);
                let known = plan.slots.iter().position(|other| other.kind == SlotKind::StreamedWeight(slot));
                let streamed = match known {
                    Some(known) => numbered(known),
                    None => plan.add(&format!("{name}.streamed"), SlotKind::StreamedWeight(slot), ty, shape).slot,
                };
                if let Call::MulMatVec(call) = &mut plan.steps[at].call {
                    let operands = std::iter::once(&mut call.product.a).chain(&mut call.epilogue.bias);
                    operands.filter(|t| t.slot == slot).for_each(|t| t.slot = streamed);
                }
            }
        }
    }
}

fn numbered(slot: usize) -> Slot {
    Slot(u32::try_from(slot).expect("slots are numbered with 32 bits"))
}

/// The shared slots that a step must be near to: all that do not lie on every device.
fn pinned(plan: &Plan, step: &Step) -> Vec<usize> {
    let operation = step.call.operation();
    let heavy = |t: &Tensor| {
        let slot = t.slot.0 as usize;
        (slot < plan.n_fixed && !is_light(&plan.slots[slot], t)).then_some(slot)
    };
    operation.reads().iter().chain(&operation.writes()).filter_map(heavy).collect()
}

/// Whether the host knows which rows of caches a step writes.
fn writes_known_rows(plan: &Plan, step: &Step) -> bool {
    let operation = step.call.operation();
    let is_cache = |t: &Tensor| matches!(plan.kind(t), SlotKind::Cache | SlotKind::WindowCache);
    let mut caches = operation.writes().into_iter().filter(is_cache);
    let rows = |t: &Tensor| match plan.kind(t) {
        SlotKind::WindowCache => plan.ports.windows.map(|places| places.rows.slot),
        _ => Some(plan.ports.rows.slot),
    };
    caches.all(|t| matches!(&step.call, Call::SetRows(call) if Some(call.ids.slot) == rows(&t)))
}

/// Gives places on a GPU to the caches and states that may visit it: those of a layer lie side by side, those of different layers in the same
/// places. `may` says of each shared slot whether it may visit at all.
pub fn staging(plans: &[Plan], may: &[bool]) -> Vec<Option<usize>> {
    let mut layers: Vec<Option<usize>> = vec![None; may.len()];
    for step in plans.iter().flat_map(|plan| &plan.steps) {
        let operation = step.call.operation();
        for t in operation.reads().iter().chain(&operation.writes()) {
            if let Some(known) = layers.get_mut(t.slot.0 as usize) {
                *known = known.or(layer(&step.label));
            }
        }
    }
    let staging = |slot: usize| may[slot] && layers[slot].is_some();
    let place = |slot: usize| (0..slot).filter(|other| staging(*other) && layers[*other] == layers[slot]).count();
    (0..may.len()).map(|slot| staging(slot).then(|| place(slot))).collect()
}

/// What is brought for a part: weights, and the places of caches and states.
#[derive(Default)]
pub(super) struct StreamedBytes {
    bytes: usize,
    layer: Option<usize>,
    visitors: Vec<(usize, usize)>,
    /// The layer that they belong to.
    visited: Option<usize>,
}

/// What is brought for a step: bytes of weights, and visiting slots with their places.
#[derive(Clone, Default)]
pub(super) struct Needs {
    pub(super) bytes: usize,
    pub(super) layer: Option<usize>,
    pub(super) visitors: Vec<(usize, usize)>,
}

impl StreamedBytes {
    /// Counts what a step has brought; `false` if it should not be in the same part as those before.
    pub(super) fn add(&mut self, needs: &Needs) -> bool {
        // Layers with visitors are parts of their own: those of the next one have the same places.
        let next = self.visited.is_some() && needs.layer.is_some() && self.visited != needs.layer;
        let small = self.bytes + needs.bytes <= MOST_STREAMED;
        let fits = self.bytes == 0 || self.layer == needs.layer || small || needs.bytes == 0;
        let clash = |(slot, place): &(usize, usize)| self.visitors.iter().any(|(s, p)| p == place && s != slot);
        if next || !fits || needs.visitors.iter().any(clash) {
            return false;
        }
        if needs.bytes > 0 {
            self.layer = if self.bytes == 0 { needs.layer } else { self.layer };
            self.bytes += needs.bytes;
        }
        if !needs.visitors.is_empty() {
            self.visitors.extend(&needs.visitors);
            self.visited = self.visited.or(needs.layer);
        }
        true
    }
}
