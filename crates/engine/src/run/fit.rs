//! How much room a model can have on an executor: the arithmetic of its memory, before anything is loaded.

use kiln_gguf::TensorType;

use super::decode::add_tail;
use crate::Error;
use crate::arch::{BatchShape, Graph, PAGE, Pictures, Results, Room};
use crate::executor::{Executor, Memory, Share};
use crate::lower::cut::Part;
use crate::lower::{Target, lower};
use crate::model::Model;
use crate::plan::{Plan, SlotInfo, SlotKind};

/// Tokens of context that a model gets from all memory there is, where no context is asked for. What exceeds it must leave as much memory to
/// others as the caches take.
const LEAST_DEFAULT: usize = 8192;
/// Tokens of the page pool for each sequence. A sequence may grow to the whole context; those that run beside it rarely do so together.
const POOL_SHARE: usize = 4096;
/// Most tokens of context where a model takes any number.
const MOST_CONTEXT: usize = 1 << 20;
/// Of all memory this share is left to others, and to what drivers need for themselves.
const MARGIN: u64 = 20;
/// Pages are numbered with fewer bits than this.
const MOST_PAGES: usize = 1 << 24;
/// Pages for the texts of a batch of encoders, most of which are short.
const BATCH_PAGES: usize = 64;

/// What somebody would like.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Wish {
    /// Most tokens of one sequence; none for the model's own number, as far as there is memory.
    pub context: Option<usize>,
    /// Where no context is asked for: tokens that one sequence will need at most, if the caller knows.
    pub expected: Option<usize>,
    /// Sequences at once.
    pub sequences: usize,
    /// Types of cached keys and values.
    pub caches: [TensorType; 2],
}

/// What memory is counted for: an executor, or a device that is only thought of.
pub struct Place<'e> {
    /// What each device has.
    pub shares: Vec<Share>,
    /// Most tokens of a prompt that are read at once.
    pub batch: usize,
    /// Whether every token goes the way of one alone.
    pub batch_invariant: bool,
    parts: Box<dyn Fn(Plan) -> Result<Vec<Part>, Error> + 'e>,
}

impl<'e> Place<'e> {
    /// An executor's.
    pub fn of(executor: &'e dyn Executor) -> Place<'e> {
        let (shares, batch, batch_invariant) = (executor.shares(), executor.batch(), executor.target().batch_invariant);
        Place { shares, batch, batch_invariant, parts: Box::new(|plan| executor.parts(plan, None)) }
    }

    /// One of a device that is only thought of.
    pub fn thought(target: Target, batch: usize, memory: Option<Memory>) -> Place<'static> {
        let shares = vec![Share { name: String::new(), part: None, memory, holds: None, staging: Vec::new() }];
        let batch_invariant = target.batch_invariant;
        let parts = move |plan| Ok(vec![Part { device: 0, plan: lower(plan, &target)? }]);
        Place { shares, batch, batch_invariant, parts: Box::new(parts) }
    }
}

/// What a model takes of one device's memory.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct DeviceFit {
    /// What the device is, for people.
    pub name: String,
    /// What of the model it has, for people; nothing where it has all.
    pub part: Option<String>,
    /// Bytes of weights and constants.
    pub weights: u64,
    /// Bytes of one page in the caches of layers that see everything.
    pub page: u64,
    /// Bytes of one page in the caches of layers with a window.
    pub window_page: u64,
    /// Bytes of the states of all sequences.
    pub states: u64,
    /// Bytes that steps compute in.
    pub scratch: u64,
    /// What there is, where anybody can tell.
    pub memory: Option<Memory>,
}

impl DeviceFit {
    /// Bytes in all, with this room.
    pub fn bytes(&self, room: &Room) -> u64 {
        self.weights + self.cache_bytes(room) + self.states + self.scratch
    }

    /// Bytes of the caches, with this room.
    pub fn cache_bytes(&self, room: &Room) -> u64 {
        self.page * room.pages as u64 + self.window_page * room.window_pages as u64
    }

    /// Bytes that are there for Kiln.
    pub fn usable(&self) -> Option<u64> {
        self.memory.as_ref().map(usable)
    }

    /// Whether it has memory for this room.
    pub fn has_room(&self, room: &Room) -> bool {
        self.usable().is_none_or(|usable| self.bytes(room) <= usable)
    }

    /// Whether it has memory for this room and as much again as the caches take, for other programs and for dequantised weights.
    fn has_ample_room(&self, room: &Room) -> bool {
        self.usable().is_none_or(|usable| self.bytes(room) + self.cache_bytes(room) <= usable)
    }
}

/// Bytes of a memory that are there for Kiln.
pub fn usable(memory: &Memory) -> u64 {
    memory.free.saturating_sub(memory.total / MARGIN)
}

/// What a model takes of an executor's memory.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Fit {
    /// The room that it gets.
    pub room: Room,
    /// The largest window, where there are layers with one.
    pub window: Option<usize>,
    /// What each device takes.
    pub devices: Vec<DeviceFit>,
}

impl Fit {
    fn sum(&self, of: impl Fn(&DeviceFit) -> u64) -> u64 {
        self.devices.iter().map(of).sum()
    }

    /// Bytes of weights and constants; those that several devices have count for each.
    pub fn weights(&self) -> u64 {
        self.sum(|device| device.weights)
    }

    /// Bytes of one page in the caches of layers that see everything.
    pub fn page(&self) -> u64 {
        self.sum(|device| device.page)
    }

    /// Bytes of one page in the caches of layers with a window.
    pub fn window_page(&self) -> u64 {
        self.sum(|device| device.window_page)
    }

    /// Bytes of the caches.
    pub fn cache_bytes(&self) -> u64 {
        self.sum(|device| device.cache_bytes(&self.room))
    }

    /// Bytes of the states of all sequences.
    pub fn states(&self) -> u64 {
        self.sum(|device| device.states)
    }

    /// Bytes that steps compute in.
    pub fn scratch(&self) -> u64 {
        self.sum(|device| device.scratch)
    }

    /// What all devices have together, where each can tell.
    pub fn memory(&self) -> Option<Memory> {
        let all = self.devices.iter().map(|device| device.memory).collect::<Option<Vec<Memory>>>()?;
        let place = if all.len() > 1 { "on all devices" } else { all.first()?.place };
        let sum = |of: fn(&Memory) -> u64| all.iter().map(of).fold(0, u64::saturating_add);
        Some(Memory { free: sum(|m| m.free), total: sum(|m| m.total), place })
    }

    /// Bytes in all.
    pub fn bytes(&self) -> u64 {
        self.sum(|device| device.bytes(&self.room))
    }

    /// The room for so many pages of tokens.
    fn with_pages(&self, pages: usize, batch: usize) -> Room {
        Room { pages, ..self.room }.with_windows(self.window, batch)
    }

    /// The largest number of pages, at most `wanted`, that every device takes by this rule.
    fn most_pages(&self, wanted: usize, batch: usize, takes: fn(&DeviceFit, &Room) -> bool) -> usize {
        let fits = |pages: usize| {
            let room = self.with_pages(pages, batch);
            self.devices.iter().all(|device| takes(device, &room))
        };
        let (mut low, mut high) = (0, wanted);
        while low < high {
            let middle = low + (high - low).div_ceil(2);
            (low, high) = if fits(middle) { (middle, high) } else { (low, middle - 1) };
        }
        low
    }
}

/// The room that a wish can have. A context that was asked for is had whole or not at all.
pub fn fit(model: &Model, executor: &dyn Executor, wish: &Wish) -> Result<Fit, Error> {
    fit_in(model, &Place::of(executor), wish)
}

/// Tokens of context that a wish asks for, or at most gets.
pub(crate) fn context(model: &Model, wish: &Wish) -> Result<usize, Error> {
    let facts = &model.facts;
    let trained = model.config.context.max(1);
    let most = if facts.any_length { MOST_CONTEXT.max(trained) } else { trained };
    // Models that see a prompt as a whole compute it in one step, so memory for activations grows with the context.
    let is_whole = facts.sees_all || facts.start.is_some();
    let own = model.usual_context().min(if is_whole { LEAST_DEFAULT } else { usize::MAX });
    let context = wish.context.unwrap_or_else(|| own.min(wish.expected.unwrap_or(usize::MAX).max(1)));
    if (context == 0 || context > most) && facts.has_cache() {
        return Err(Error::Context { asked: context, most });
    }
    Ok(context)
}

/// The same for any place.
pub fn fit_in(model: &Model, place: &Place<'_>, wish: &Wish) -> Result<Fit, Error> {
    let context = context(model, wish)?;
    let [k_type, v_type] = wish.caches;
    let sequences = wish.sequences.max(1);
    let windows = usize::from(model.facts.window.is_some());
    let one = Room { context, pages: 1, window_pages: windows, states: sequences, sequences, k_type, v_type };
    let mut fit = needs(model, place, &one)?;
    if !model.facts.has_cache() {
        return Ok(fit);
    }
    // Encoder-decoder models hold pages of the source and of the target.
    let texts = 1 + usize::from(model.facts.start.is_some());
    let of_one = |context: usize| texts * context.div_ceil(PAGE);
    // One pool for all sequences: the longest of them fits, and all of them fit up to their share. Encoders keep nothing and need pages for
    // one batch of texts.
    let pool = |context: usize| match model.facts.encodes {
        true => of_one(context).max(BATCH_PAGES),
        false => of_one(context).max(sequences.saturating_mul(of_one(context.min(POOL_SHARE)))).min(MOST_PAGES),
    };
    let pages = match wish.context {
        Some(context) => fit.most_pages(pool(context), place.batch, DeviceFit::has_room),
        None => {
            let least = fit.most_pages(pool(context.min(LEAST_DEFAULT)), place.batch, DeviceFit::has_room);
            least.max(fit.most_pages(pool(context), place.batch, DeviceFit::has_ample_room))
        }
    };
    let wanted = of_one(context);
    if pages < wanted && (wish.context.is_some() || pages < texts) {
        let room = fit.with_pages(wanted, place.batch);
        let lacking = fit.devices.iter().find(|device| !device.has_room(&room)).or(fit.devices.first());
        let needed = lacking.map_or(0, |device| device.bytes(&room));
        let free = lacking.and_then(DeviceFit::usable).unwrap_or(0);
        let place = lacking.and_then(|device| device.memory).map_or("", |memory| memory.place);
        return Err(Error::DoesNotFit { context, needed, free, place, largest: pages / texts * PAGE });
    }
    fit.room = fit.with_pages(pages, place.batch);
    fit.room.context = context.min(pages / texts * PAGE);
    Ok(fit)
}

/// What a model takes with this room.
fn needs(model: &Model, place: &Place<'_>, room: &Room) -> Result<Fit, Error> {
    let graph = model.graph(room)?;
    let plans = largest(&graph, place, room)?;
    let device = |(number, share): (usize, &Share)| {
        let fixed = |wanted: fn(&SlotKind) -> bool| {
            let slots = graph.fixed().slots.iter().enumerate();
            let here = slots.filter(|(at, _)| share.holds.as_ref().is_none_or(|holds| holds[*at]));
            here.filter(|(_, slot)| wanted(&slot.kind)).map(|(_, slot)| slot.bytes as u64).sum::<u64>()
                + staged_bytes(&graph.fixed().slots, &share.staging, wanted)
        };
        let parts = || plans.iter().flatten().filter(|part| part.device == number);
        let arena = parts().map(|part| part.plan.arena as u64).max().unwrap_or(0);
        DeviceFit {
            name: share.name.clone(),
            part: share.part.clone(),
            weights: fixed(|kind| matches!(kind, SlotKind::Weight | SlotKind::Constant(_))),
            page: fixed(|kind| *kind == SlotKind::Cache),
            window_page: fixed(|kind| *kind == SlotKind::WindowCache),
            states: fixed(|kind| matches!(kind, SlotKind::State | SlotKind::Carried)),
            scratch: arena + parts().map(|part| part.plan.own_bytes() as u64).sum::<u64>(),
            memory: share.memory,
        }
    };
    Ok(Fit {
        room: *room,
        window: graph.facts().window,
        devices: place.shares.iter().enumerate().map(device).collect(),
    })
}

/// Bytes of the places for slots of other devices that come to one for a part of a plan: each as large as the largest that comes there.
fn staged_bytes(slots: &[SlotInfo], staging: &[Option<usize>], wanted: fn(&SlotKind) -> bool) -> u64 {
    let mut places: Vec<u64> = Vec::new();
    for (slot, place) in slots.iter().zip(staging).filter(|(slot, _)| wanted(&slot.kind)) {
        let Some(place) = *place else { continue };
        places.resize(places.len().max(place + 1), 0);
        places[place] = places[place].max(slot.bytes as u64);
    }
    places.iter().sum()
}

/// The plans of the largest prompts, of all texts at once, and, where texts are read that others are written for, of the longest.
fn largest(graph: &Graph, place: &Place<'_>, room: &Room) -> Result<Vec<Vec<Part>>, Error> {
    let most = if graph.facts().has_cache() { room.context } else { usize::MAX };
    // A text that is seen as a whole cannot be cut.
    let prompt = if graph.facts().sees_all { place.batch.max(most) } else { place.batch.min(most) }.max(2);
    // Where every token goes the way of one alone, prompts are rows like all others.
    let [batch_invariant, read] = if place.batch_invariant { [prompt, 0] } else { [0, prompt] };
    let (pieces, expands) = (usize::from(read > 0), false);
    let shares = false;
    let batch = BatchShape {
        decode: batch_invariant,
        prompt: read,
        pieces,
        outputs: 1,
        expands,
        shares,
        pictures: Pictures::default(),
    };
    // Sequences that share pages are cut into more runs, so that is what takes more memory.
    let (count, shares) = (room.sequences, room.sequences > 1);
    let decode = BatchShape {
        decode: count,
        prompt: 0,
        pieces: 0,
        outputs: count,
        expands,
        shares,
        pictures: Pictures::default(),
    };
    let lowered = |shape| {
        let mut plan = graph.plan(shape)?;
        let in_parts = place.shares.len() > 1;
        if in_parts && shape == decode {
            // The draw is part of the plan that is cut.
            add_tail(&mut plan, true, PAGE)?;
        }
        let mut parts = (place.parts)(plan)?;
        if let [Part { plan, .. }] = &mut parts[..]
            && !in_parts
            && shape == decode
            && !graph.facts().encodes
        {
            add_tail(plan, true, PAGE)?;
        }
        Ok::<_, Error>(parts)
    };
    let mut prompt = lowered(batch)?;
    if graph.facts().latents && read > 0 {
        // Which form takes more memory depends on the widths of latents and heads.
        let arena = |parts: &[Part]| parts.iter().map(|part| part.plan.arena).sum::<usize>();
        let expanded = lowered(BatchShape { expands: true, ..batch })?;
        prompt = if arena(&expanded) > arena(&prompt) { expanded } else { prompt };
    }
    let mut plans = vec![prompt, lowered(decode)?];
    if graph.facts().start.is_some() {
        let shape = BatchShape {
            decode: 0,
            prompt: place.batch.max(most),
            pieces: 1,
            outputs: 1,
            expands,
            shares,
            pictures: Pictures::default(),
        };
        plans.push((place.parts)(graph.plan_of(shape, Results::Source)?)?);
    }
    Ok(plans)
}

/// Bytes that the steps of any plan compute in on each device, but for those that want the logits of every token.
pub(super) fn arenas(graph: &Graph, executor: &dyn Executor, room: &Room) -> Result<Vec<usize>, Error> {
    arenas_of(graph, &Place::of(executor), room)
}

fn arenas_of(graph: &Graph, place: &Place<'_>, room: &Room) -> Result<Vec<usize>, Error> {
    let plans = largest(graph, place, room)?;
    let of = |device: usize| {
        let arena = |parts: &Vec<Part>| {
            let here = parts.iter().filter(|part| part.device == device);
            here.map(|part| part.plan.arena).max().unwrap_or(0)
        };
        // A batch of both kinds has rows of both.
        let both = plans.iter().take(2).map(arena).sum::<usize>();
        plans.iter().skip(2).map(arena).fold(both, usize::max)
    };
    Ok((0..place.shares.len()).map(of).collect())
}

/// Bytes that the parts of a stage compute in: `parts` has those of a plan that are its own, by their numbers.
pub(crate) fn arena_of_part(
    graph: &Graph,
    executor: &dyn Executor,
    room: &Room,
    parts: &dyn Fn(Plan) -> Result<Vec<(usize, Plan)>, Error>,
) -> Result<usize, Error> {
    let target = executor.target();
    let lowered = |plan: Plan| {
        let own = parts(plan)?.into_iter();
        own.map(|(_, plan)| Ok(Part { device: 0, plan: lower(plan, &target)? })).collect()
    };
    let thought = Place::thought(target.clone(), executor.batch(), None);
    // The model has other devices beside this one.
    let shares = [thought.shares.clone(), thought.shares].concat();
    let place =
        Place { shares, parts: Box::new(lowered), batch: thought.batch, batch_invariant: thought.batch_invariant };
    Ok(arenas_of(graph, &place, room)?.into_iter().max().unwrap_or(0))
}
