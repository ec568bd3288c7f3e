//! How much room a model can have on an executor: the arithmetic of its memory, before anything is loaded.

use kiln_gguf::TensorType;

use crate::Error;
use crate::arch::{BatchShape, Graph, PAGE, Room};
use crate::executor::{Executor, Memory};
use crate::lower::{Target, lower};
use crate::model::Model;
use crate::plan::{Plan, SlotKind};

/// Tokens of context where nobody says how many: enough for a long talk, and small beside most models.
const USUAL_CONTEXT: usize = 8192;
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
    /// Sequences at once.
    pub sequences: usize,
    /// Types of cached keys and values.
    pub caches: [TensorType; 2],
}

/// What memory is counted for: an executor, or a device that is only thought of.
#[derive(Clone, Debug)]
pub struct Place {
    /// What plans are lowered for.
    pub target: Target,
    /// Most tokens of a prompt that are read at once.
    pub batch: usize,
    /// What there is, where that is known.
    pub memory: Option<Memory>,
}

impl Place {
    /// An executor's.
    pub fn of(executor: &dyn Executor) -> Place {
        Place { target: executor.target(), batch: executor.batch(), memory: executor.memory() }
    }
}

/// What a model takes of an executor's memory.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Fit {
    /// The room that it gets.
    pub room: Room,
    /// Bytes of weights and constants.
    pub weights: u64,
    /// Bytes of one page in the caches of layers that see everything.
    pub page: u64,
    /// Bytes of one page in the caches of layers with a window.
    pub window_page: u64,
    /// The largest window, where there are such layers.
    pub window: Option<usize>,
    /// Bytes of the states of all sequences.
    pub states: u64,
    /// Bytes that steps compute in.
    pub scratch: u64,
    /// What the executor has, where it can tell.
    pub memory: Option<Memory>,
}

impl Fit {
    /// Bytes in all.
    pub fn bytes(&self) -> u64 {
        self.weights + self.cache_bytes() + self.states + self.scratch
    }

    /// Bytes of the caches.
    pub fn cache_bytes(&self) -> u64 {
        self.page * self.room.pages as u64 + self.window_page * self.room.window_pages as u64
    }

    /// The same with room for so many pages of tokens.
    fn with_pages(&self, pages: usize, batch: usize) -> Fit {
        Fit { room: Room { pages, ..self.room }.with_windows(self.window, batch), ..*self }
    }

    /// Bytes that are there for Kiln.
    fn usable(&self) -> Option<u64> {
        self.memory.map(|memory| memory.free.saturating_sub(memory.total / MARGIN))
    }

    /// Pages that there is memory for, of so many that are of use.
    fn most_pages(&self, of_use: usize, batch: usize) -> usize {
        let Some(usable) = self.usable() else { return of_use };
        let fits = |pages: usize| self.with_pages(pages, batch).bytes() <= usable;
        let (mut low, mut high) = (0, of_use);
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

/// The same for any place.
pub fn fit_in(model: &Model, place: &Place, wish: &Wish) -> Result<Fit, Error> {
    let trained = model.config.context.max(1);
    let context = wish.context.unwrap_or_else(|| trained.min(USUAL_CONTEXT));
    let [k_type, v_type] = wish.caches;
    let sequences = wish.sequences.max(1);
    if (context == 0 || context > trained) && model.facts.has_cache() {
        return Err(Error::Context { asked: context, most: trained });
    }
    let windows = usize::from(model.facts.window.is_some());
    let one = Room { context, pages: 1, window_pages: windows, states: sequences, sequences, k_type, v_type };
    let fit = needs(model, place, &one)?;
    if !model.facts.has_cache() {
        return Ok(fit);
    }
    let wanted = one.pages_of_a_sequence();
    // Models that keep nothing of a text need pages for one batch of texts, however short.
    let of_use = |each: usize| match model.facts.encodes {
        true => each.max(BATCH_PAGES),
        false => each.saturating_mul(sequences).min(MOST_PAGES),
    };
    let most = fit.most_pages(of_use(wanted), place.batch);
    if most < wanted && (wish.context.is_some() || most == 0) {
        let needed = fit.with_pages(wanted, place.batch).bytes();
        let free = fit.usable().unwrap_or(0);
        let place = fit.memory.map_or("", |memory| memory.place);
        return Err(Error::DoesNotFit { context, needed, free, place, largest: most * PAGE });
    }
    let pages_each = wanted.min(most);
    let mut fit = fit.with_pages(most.min(of_use(pages_each)), place.batch);
    fit.room.context = context.min(pages_each * PAGE);
    Ok(fit)
}

/// What a model takes with this room.
fn needs(model: &Model, place: &Place, room: &Room) -> Result<Fit, Error> {
    let graph = model.graph(room)?;
    let fixed = |kind: fn(&SlotKind) -> bool| graph.fixed().bytes(kind) as u64;
    let own = |plan: &Plan| {
        let apart = plan.slots[plan.n_fixed..].iter().filter(|s| s.place.is_none()).map(|s| s.bytes).sum::<usize>();
        apart as u64
    };
    let plans = largest(&graph, place, room)?;
    let scratch = plans.iter().map(|plan| plan.arena as u64).max().unwrap_or(0) + plans.iter().map(own).sum::<u64>();
    Ok(Fit {
        room: *room,
        weights: fixed(|kind| matches!(kind, SlotKind::Weight | SlotKind::Constant(_))),
        page: fixed(|kind| *kind == SlotKind::Cache),
        window_page: fixed(|kind| *kind == SlotKind::WindowCache),
        window: graph.facts().window,
        states: fixed(|kind| *kind == SlotKind::State),
        scratch,
        memory: place.memory,
    })
}

/// The plans of the largest prompts and of all texts at once.
fn largest(graph: &Graph, place: &Place, room: &Room) -> Result<[Plan; 2], Error> {
    let most = if graph.facts().has_cache() { room.context } else { usize::MAX };
    // A text that is seen as a whole cannot be cut.
    let prompt = if graph.facts().sees_all { place.batch.max(most) } else { place.batch.min(most) }.max(2);
    // Where every token goes the way of one alone, prompts are rows like all others.
    let [alike, read] = if place.target.alike { [prompt, 0] } else { [0, prompt] };
    let batch = BatchShape { decode: alike, prompt: read, pieces: usize::from(read > 0), outputs: 1 };
    let decode = BatchShape { decode: room.sequences, prompt: 0, pieces: 0, outputs: room.sequences };
    let lowered = |shape| lower(graph.plan(shape)?, &place.target);
    Ok([lowered(batch)?, lowered(decode)?])
}

/// Bytes that the steps of any plan compute in, but for those that want the logits of every token.
pub(super) fn arena(graph: &Graph, executor: &dyn Executor, room: &Room) -> Result<usize, Error> {
    // A batch of both kinds has rows of both.
    Ok(largest(graph, &Place::of(executor), room)?.iter().map(|plan| plan.arena).sum())
}
