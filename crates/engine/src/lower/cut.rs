//! A plan for several devices, cut into parts: each step goes to the device of its layer or of its weights, and neighbours that run on
//! the same device make a part. A part is a plan of its own, with the same slot numbers; what crosses over leaves one part
//! ([`SlotKind::Send`]) and arrives at others ([`SlotKind::Recv`]); what a GPU makes for itself stays there ([`SlotKind::Resident`]).

use std::collections::{HashMap, HashSet};

use kiln_kernels::Call;
use kiln_kernels::tensor::{Slot, Tensor};

use super::memory::{LiveRange, assign};
use super::streams::{Needs, StreamedBytes, Streams};
use crate::Error;
use crate::placement::Placement;
use crate::plan::{Plan, SlotInfo, SlotKind, Step};

/// Vectors and constants up to this many bytes are replicated, so that steps which use nothing else can run wherever least data crosses.
const MOST_LIGHT: usize = 1 << 20;
/// Most steps that move to another device together: the sum over experts and what stands around it.
const LONGEST_CHAIN: usize = 8;
/// Times that steps look for a better device; two are enough for what architectures make.
const SWEEPS: usize = 8;

/// A piece of a plan that runs on one device.
#[derive(Clone, Debug)]
pub struct Part {
    /// The device, by its number.
    pub device: usize,
    /// Its steps.
    pub plan: Plan,
}

/// Which slots a step touches.
struct Touched {
    reads: Vec<usize>,
    writes: Vec<usize>,
}

impl Touched {
    fn of(step: &Step) -> Touched {
        let operation = step.call.operation();
        let slots = |tensors: Vec<Tensor>| {
            let mut slots: Vec<usize> = tensors.iter().map(|t| t.slot.0 as usize).collect();
            slots.sort_unstable();
            slots.dedup();
            slots
        };
        Touched { reads: slots(operation.reads()), writes: slots(operation.writes()) }
    }

    fn all(&self) -> impl Iterator<Item = usize> {
        self.reads.iter().chain(&self.writes).copied()
    }
}

/// Whether a shared slot lies on every device: what is small and no matrix, and what no step writes.
pub fn is_light(slot: &SlotInfo, tensor: &Tensor) -> bool {
    let vector = tensor.shape[1..] == [1, 1, 1];
    match slot.kind {
        SlotKind::Weight => vector && slot.bytes <= MOST_LIGHT,
        SlotKind::Constant(_) => slot.bytes <= MOST_LIGHT,
        _ => false,
    }
}

/// The layer that a step belongs to: the number that its label begins with.
pub fn layer(label: &str) -> Option<usize> {
    label.split('.').next()?.parse().ok()
}

/// Whether a step of a plan that is not lowered multiplies with matrices of experts.
pub(crate) fn has_experts(step: &Step) -> bool {
    matches!(&step.call, Call::MulMatVec(call) if call.experts.is_some())
}

/// The device of each step by what it must be near to, and whether it must stay there.
fn homes(plan: &Plan, placement: &Placement, streams: Option<&Streams<'_>>) -> Vec<(usize, bool)> {
    let staged = streams.map_or_else(Vec::new, |streams| streams.staged(plan));
    let last_layer = plan.steps.iter().rposition(|step| layer(&step.label).is_some());
    // Where the caches of a layer come along, what is done between products should not go back and forth.
    let moved = streams.map_or_else(HashSet::new, |streams| streams.moved(plan, &staged));
    let mut device = placement.input;
    // Caches and states stay with the first layer that has them, also where others read them.
    let mut owners: HashMap<usize, usize> = HashMap::new();
    let mut homes = Vec::with_capacity(plan.steps.len());
    for (at, step) in plan.steps.iter().enumerate() {
        device = match layer(&step.label) {
            Some(layer) => placement.layer(layer),
            None if last_layer.is_none_or(|last| at > last) => placement.output,
            None => device,
        };
        let operation = step.call.operation();
        let (reads, writes) = (operation.reads(), operation.writes());
        let heavy = |t: &&Tensor| {
            let slot = &plan.slots[t.slot.0 as usize];
            (t.slot.0 as usize) < plan.n_fixed && !is_light(slot, t)
        };
        let pinned: Vec<&Tensor> = reads.iter().chain(&writes).filter(heavy).collect();
        // Caches and states stay with their layer, whatever is said of its weights.
        let remembers = pinned.iter().any(|t| *plan.kind(t) != SlotKind::Weight);
        let heaviest = pinned.iter().max_by_key(|t| plan.slots[t.slot.0 as usize].bytes);
        let chosen = heaviest.filter(|_| !remembers).and_then(|t| placement.rule(plan.slot_name(t)));
        let experts = layer(&step.label).filter(|_| has_experts(step)).map(|layer| placement.experts(layer));
        let staging = pinned.iter().any(|t| staged.get(t.slot.0 as usize) == Some(&true));
        let streamed = streams.filter(|streams| staging || !streams.of(step).is_empty()).map(|streams| streams.to);
        let moves = pinned.is_empty() && layer(&step.label).is_some_and(|layer| moved.contains(&layer));
        let streamed = streamed.or(streams.filter(|_| moves).map(|streams| streams.to));
        let kept = |t: &&&Tensor| matches!(plan.kind(t), SlotKind::Cache | SlotKind::WindowCache | SlotKind::State);
        let kept = pinned.iter().filter(kept).map(|t| *owners.entry(t.slot.0 as usize).or_insert(device)).last();
        homes.push((streamed.or(chosen).or(experts).or(kept).unwrap_or(device), !pinned.is_empty()));
    }
    homes
}

/// Who makes and who reads each slot, and how much of it there is to bring from device to device.
struct Traffic<'p> {
    plan: &'p Plan,
    writers: Vec<Vec<usize>>,
    readers: Vec<Vec<usize>>,
}

impl Traffic<'_> {
    /// Whether a slot is made by one step for others.
    fn crosses(&self, slot: usize) -> bool {
        slot >= self.plan.n_fixed && self.plan.slots[slot].kind == SlotKind::Scratch
    }

    /// Bytes of a slot that go from device to device.
    fn bytes(&self, slot: usize, devices: &[usize]) -> usize {
        let Some(home) = self.writers[slot].first().filter(|_| self.crosses(slot)).map(|at| devices[*at]) else {
            return 0;
        };
        let mut others: Vec<usize> = self.readers[slot].iter().map(|at| devices[*at]).filter(|d| *d != home).collect();
        others.sort_unstable();
        others.dedup();
        others.len() * self.plan.slots[slot].bytes
    }

    /// Steps that use what this one makes, one after the other, as long as there is one reader and it may go anywhere.
    fn chain(&self, first: usize, touched: &[Touched], homes: &[(usize, bool)]) -> Vec<usize> {
        let mut chain = vec![first];
        while let Some(&last) = chain.last()
            && chain.len() < LONGEST_CHAIN
            && let [made] = touched[last].writes[..]
            && let [next] = self.readers[made][..]
            && !homes[next].1
            && next > last
        {
            chain.push(next);
        }
        chain
    }
}

/// The device of each step, by number: steps that may run anywhere do where least crosses over.
fn devices(plan: &Plan, placement: &Placement, streams: Option<&Streams<'_>>, touched: &[Touched]) -> Vec<usize> {
    let homes = homes(plan, placement, streams);
    let mut devices: Vec<usize> = homes.iter().map(|(device, _)| *device).collect();
    let none = vec![Vec::new(); plan.slots.len()];
    let mut traffic = Traffic { plan, writers: none.clone(), readers: none };
    for (at, touched) in touched.iter().enumerate() {
        touched.reads.iter().for_each(|slot| traffic.readers[*slot].push(at));
        touched.writes.iter().for_each(|slot| traffic.writers[*slot].push(at));
    }
    for _ in 0..SWEEPS {
        let mut moved = false;
        for at in (0..plan.steps.len()).filter(|at| !homes[*at].1) {
            let near = touched[at].all().filter(|slot| traffic.crosses(*slot));
            let near = near.flat_map(|slot| traffic.writers[slot].iter().chain(&traffic.readers[slot]));
            let near: Vec<usize> = near.map(|step| devices[*step]).filter(|d| *d != devices[at]).collect();
            for other in near {
                moved |= improve(&traffic, &mut devices, touched, &traffic.chain(at, touched, &homes), other);
            }
        }
        if !moved {
            break;
        }
    }
    // Steps that make a slot together stay together, where they can.
    for writers in traffic.writers.iter().enumerate().filter(|(slot, w)| traffic.crosses(*slot) && w.len() > 1) {
        let writers = writers.1;
        let home = writers.iter().find(|w| homes[**w].1).or(writers.first()).map(|w| devices[*w]);
        for &writer in writers.iter().filter(|w| !homes[**w].1) {
            devices[writer] = home.unwrap_or(devices[writer]);
        }
    }
    devices
}

/// Moves the beginning of a chain of steps to another device: as many as make least cross over. `false` where none do.
fn improve(traffic: &Traffic<'_>, devices: &mut [usize], touched: &[Touched], chain: &[usize], to: usize) -> bool {
    let mut slots: Vec<usize> = chain.iter().flat_map(|at| touched[*at].all()).collect();
    slots.sort_unstable();
    slots.dedup();
    let bytes = |devices: &[usize]| slots.iter().map(|slot| traffic.bytes(*slot, devices)).sum::<usize>();
    let before: Vec<usize> = chain.iter().map(|at| devices[*at]).collect();
    let (mut least, mut moved) = (bytes(devices), 0);
    for (n, &at) in chain.iter().enumerate() {
        devices[at] = to;
        let now = bytes(devices);
        if now < least {
            (least, moved) = (now, n + 1);
        }
    }
    chain.iter().zip(before).skip(moved).for_each(|(at, before)| devices[*at] = before);
    moved > 0
}

/// The steps that must run before each, by what they touch.
fn before(slots: usize, touched: &[Touched]) -> Vec<Vec<usize>> {
    let mut writer: Vec<Option<usize>> = vec![None; slots];
    let mut readers: Vec<Vec<usize>> = vec![Vec::new(); slots];
    let mut before = Vec::with_capacity(touched.len());
    for (at, Touched { reads, writes }) in touched.iter().enumerate() {
        let mut own: Vec<usize> = reads.iter().filter_map(|slot| writer[*slot]).collect();
        for &slot in writes {
            own.extend(writer[slot]);
            own.append(&mut readers[slot]);
        }
        reads.iter().for_each(|slot| readers[*slot].push(at));
        for &slot in writes {
            writer[slot] = Some(at);
            readers[slot].clear();
        }
        own.retain(|other| *other != at);
        before.push(own);
    }
    before
}

/// The steps of each part, in an order in which they may run: a device continues as long as it can. `needs` has what each step has brought.
fn groups(devices: &[usize], before: &[Vec<usize>], needs: &[Needs]) -> Vec<(usize, Vec<usize>)> {
    let mut taken = vec![false; devices.len()];
    let mut left: Vec<usize> = (0..devices.len()).collect();
    let mut groups = Vec::new();
    while let Some(&first) = left.first() {
        let device = devices[first];
        let mut group = Vec::new();
        let mut streamed = StreamedBytes::default();
        for &at in &left {
            if devices[at] == device && before[at].iter().all(|other| taken[*other]) {
                if !streamed.add(&needs[at]) {
                    break;
                }
                taken[at] = true;
                group.push(at);
            }
        }
        left.retain(|at| !taken[*at]);
        groups.push((device, group));
    }
    groups
}

/// What each step has brought, if it runs on these devices.
fn needs(plan: &Plan, streams: Option<&Streams<'_>>, devices: &[usize], touched: &[Touched]) -> Vec<Needs> {
    let of = |((step, device), touched): ((&Step, &usize), &Touched)| {
        let Some(streams) = streams.filter(|streams| streams.to == *device) else { return Needs::default() };
        let bytes = streams.of(step).iter().map(|slot| plan.slots[*slot].bytes).sum();
        let visitors = touched.all().filter_map(|slot| Some((slot, streams.place(slot)?))).collect();
        Needs { bytes, layer: layer(&step.label), visitors }
    };
    plan.steps.iter().zip(devices).zip(touched).map(of).collect()
}

/// The parts that make and read each slot of results.
struct Crossings {
    made: Vec<Option<usize>>,
    read: Vec<Vec<usize>>,
}

impl Crossings {
    fn of(plan: &Plan, groups: &[(usize, Vec<usize>)], touched: &[Touched]) -> Result<Crossings, Error> {
        let mut made: Vec<Option<usize>> = vec![None; plan.slots.len()];
        let mut read: Vec<Vec<usize>> = vec![Vec::new(); plan.slots.len()];
        for (part, (_, steps)) in groups.iter().enumerate() {
            for &at in steps {
                for &slot in touched[at].writes.iter().filter(|slot| plan.slots[**slot].kind == SlotKind::Scratch) {
                    if made[slot].is_some_and(|other| other != part) {
                        let why = format!("{} is made by steps on different devices", plan.slots[slot].name);
                        return Err(Error::Plan { step: plan.steps[at].label.clone(), why });
                    }
                    made[slot] = Some(part);
                }
                touched[at].reads.iter().for_each(|slot| read[*slot].push(part));
            }
        }
        Ok(Crossings { made, read })
    }

    /// The first and the last part on a device that have to do with a slot, where there are several.
    fn stay(&self, slot: usize, device: usize, groups: &[(usize, Vec<usize>)]) -> Option<(usize, usize)> {
        let all = self.made[slot].iter().chain(&self.read[slot]).copied();
        let here = all.filter(|part| groups[*part].0 == device);
        let (first, last) = (here.clone().min()?, here.max()?);
        (first < last).then_some((first, last))
    }

    /// Places for what stays on a device between its parts, and the bytes that they take.
    fn kept(&self, plan: &Plan, device: usize, groups: &[(usize, Vec<usize>)]) -> (Vec<Option<usize>>, usize) {
        let crosses = |slot: &usize| plan.slots[*slot].kind == SlotKind::Scratch && self.made[*slot].is_some();
        let live_range = |slot: usize| {
            let (first, last) = self.stay(slot, device, groups)?;
            Some(LiveRange { slot, first, last, bytes: plan.slots[slot].bytes })
        };
        let live_ranges = (plan.n_fixed..plan.slots.len()).filter(crosses).filter_map(live_range).collect();
        let (given, bytes) = assign(live_ranges, 0);
        let mut places = vec![None; plan.slots.len()];
        given.into_iter().for_each(|(slot, place)| places[slot] = Some(place));
        (places, bytes)
    }

    /// What a slot of results is in a part; `kept` if it stays on the device of the part from one to another.
    fn kind(&self, slot: usize, number: usize, groups: &[(usize, Vec<usize>)], kept: bool) -> SlotKind {
        let (device, maker) = (groups[number].0, self.made[slot]);
        let goes = |part: &usize| *part != number && (!kept || groups[*part].0 != device);
        match maker {
            Some(maker) if maker != number => {
                let first = self.stay(slot, device, groups).map(|(first, _)| first);
                if kept && first != Some(number) { SlotKind::Resident } else { SlotKind::Recv }
            }
            Some(_) if self.read[slot].iter().any(goes) => SlotKind::Send,
            Some(_) if kept => SlotKind::Resident,
            _ => SlotKind::Scratch,
        }
    }
}

/// The parts of a plan that was not lowered yet, in the order in which they run. `keeps` says which devices have memory that stays as it is
/// between parts.
pub fn cut(
    plan: &Plan,
    placement: &Placement,
    streams: Option<&Streams<'_>>,
    keeps: &[bool],
) -> Result<Vec<Part>, Error> {
    let touched: Vec<Touched> = plan.steps.iter().map(Touched::of).collect();
    let devices = devices(plan, placement, streams, &touched);
    let needs = needs(plan, streams, &devices, &touched);
    let groups = groups(&devices, &before(plan.slots.len(), &touched), &needs);
    let crossings = Crossings::of(plan, &groups, &touched)?;
    let kept = |device: usize| match keeps.get(device) {
        Some(true) => crossings.kept(plan, device, &groups),
        _ => (vec![None; plan.slots.len()], 0),
    };
    let kept: Vec<(Vec<Option<usize>>, usize)> = (0..keeps.len()).map(kept).collect();
    let part = |(number, (device, steps)): (usize, &(usize, Vec<usize>))| {
        let mut used = vec![false; plan.slots.len()];
        for &at in steps {
            let scratch = plan.steps[at].call.operation().scratch();
            touched[at].all().for_each(|slot| used[slot] = true);
            scratch.iter().for_each(|t| used[t.slot.0 as usize] = true);
        }
        let (places, arena) = kept.get(*device).map_or((&[][..], 0), |(places, arena)| (&places[..], *arena));
        let info = |(at, slot): (usize, &SlotInfo)| {
            let place = places.get(at).copied().flatten();
            let kind = match slot.kind {
                _ if at < plan.n_fixed => slot.kind.clone(),
                _ if !used[at] => SlotKind::Scratch,
                SlotKind::Scratch => crossings.kind(at, number, &groups, place.is_some()),
                _ => slot.kind.clone(),
            };
            SlotInfo { kind, place: place.filter(|_| used[at]), ..slot.clone() }
        };
        let slots = plan.slots.iter().enumerate().map(info).collect();
        let steps = steps.iter().map(|at| plan.steps[*at].clone()).collect();
        let mut plan = Plan { slots, steps, arena, ..*plan };
        if let Some(streams) = streams.filter(|streams| streams.to == *device) {
            streams.bring(&mut plan);
        }
        Part { device: *device, plan }
    };
    Ok(groups.iter().enumerate().map(part).collect())
}

/// Which devices hold each shared slot, as bits, if these are the plans of a model.
pub fn holders(plans: &[Plan], placement: &Placement) -> Vec<u64> {
    let mut holders = vec![0; plans.first().map_or(0, |plan| plan.n_fixed)];
    let all = placement.devices().into_iter().fold(0, |all, device| all | 1 << device);
    for plan in plans {
        for (step, (device, _)) in plan.steps.iter().zip(homes(plan, placement, None)) {
            let operation = step.call.operation();
            for tensor in operation.reads().iter().chain(&operation.writes()) {
                let Tensor { slot: Slot(slot), .. } = *tensor;
                if (slot as usize) < plan.n_fixed {
                    let light = is_light(&plan.slots[slot as usize], tensor);
                    holders[slot as usize] |= if light { all } else { 1 << device };
                }
            }
        }
    }
    holders
}
