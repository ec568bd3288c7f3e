//! Plans by what they are for, and those that a text will ask for first.

use std::thread::Scope;

use super::decode::{Tail, add_tail};
use super::draw::{End, Tokens, add_tokens};
use super::shapes;
use crate::Error;
use crate::arch::{BatchShape, Coordinates, Graph, PAGE, Pictures, Results, Room};
use crate::executor::{Executor, Warmer};
use crate::lower::{Target, lower};
use crate::plan::{Plan, SlotKind};

/// What a plan is made for: a shape, what it ends with, and whether adapters count differently for its rows.
pub(super) type Key = (BatchShape, End, bool);

/// What a plan is made for, to be told to others who have the same model: they make the same plan of it.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct PlanKey(pub(super) Key);

/// Rows of the largest plans that anybody is told of.
const MOST_ROWS: u64 = 1 << 24;

impl PlanKey {
    /// How many numbers it is.
    pub const NUMBERS: usize = 7;

    /// As numbers.
    pub fn numbers(&self) -> [u64; PlanKey::NUMBERS] {
        let PlanKey((shape, end, by_row)) = self;
        let BatchShape { decode, prompt, pieces, outputs, expands, shares, pictures } = *shape;
        let (end, cuts) = match *end {
            End::Logits => (0, false),
            End::Vectors => (1, false),
            End::Source => (2, false),
            End::Tokens { cuts } => (3, cuts),
            End::NextStep { cuts } => (4, cuts),
            End::Draft => (5, false),
            End::DraftTokens { cuts } => (6, cuts),
        };
        let said = [expands, shares, pictures.vectors, pictures.sees_ahead, *by_row, cuts];
        let said = said.into_iter().enumerate().map(|(at, yes)| u64::from(yes) << at).sum();
        let [decode, prompt, pieces, outputs] = [decode, prompt, pieces, outputs].map(|n| n as u64);
        [decode, prompt, pieces, outputs, said, pictures.coordinates as u64, end]
    }

    /// The key that has these numbers, if one does.
    pub fn from_numbers(numbers: &[u64]) -> Option<PlanKey> {
        let &[decode, prompt, pieces, outputs, said, coordinates, end] = numbers else { return None };
        let said: Vec<bool> = (0..6).map(|at| said >> at & 1 == 1).collect();
        let coordinates = match coordinates {
            0 => Coordinates::Positions,
            1 => Coordinates::Each,
            2 => Coordinates::Four,
            _ => return None,
        };
        let end = match (end, said[5]) {
            (0, _) => End::Logits,
            (1, _) => End::Vectors,
            (2, _) => End::Source,
            (3, cuts) => End::Tokens { cuts },
            (4, cuts) => End::NextStep { cuts },
            (5, _) => End::Draft,
            (6, cuts) => End::DraftTokens { cuts },
            _ => return None,
        };
        if [decode, prompt, pieces, outputs].iter().any(|n| *n > MOST_ROWS) {
            return None;
        }
        let [decode, prompt, pieces, outputs] = [decode, prompt, pieces, outputs].map(|n| n as usize);
        let pictures = Pictures { vectors: said[2], sees_ahead: said[3], coordinates };
        let shape = BatchShape { decode, prompt, pieces, outputs, expands: said[0], shares: said[1], pictures };
        let key = PlanKey((shape, end, said[4]));
        (key.numbers()[..] == *numbers).then_some(key)
    }
}

/// The plan of a key that somebody else told, before it is cut; its rows are at most so many.
pub(crate) fn made_for(graph: &Graph, target: &Target, key: &PlanKey, most: usize) -> Result<Plan, Error> {
    let shape = key.0.0;
    let sound = shape.rows() > 0
        && shape.rows() <= most
        && shape.outputs <= shape.rows()
        && shape.pieces <= shape.prompt
        && (shape.pieces == 0) == (shape.prompt == 0);
    if !sound {
        return Err(Error::Run { why: format!("no plan has {} rows in this room", shape.rows()) });
    }
    Ok(make(graph, target, key.0)?.plan)
}

/// A lowered plan.
pub(super) struct Made {
    pub(super) plan: Plan,
    pub(super) tail: Option<Tail>,
    pub(super) tokens: Option<Tokens>,
}

/// What an engine will be asked for first, so that its kernels can be compiled while weights are loaded.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum First {
    /// One text.
    Text {
        /// Tokens of its prompt.
        prompt: usize,
        /// Whether tokens are drawn with top-k and the like.
        cuts: bool,
        /// Whether more than one token is generated.
        goes_on: bool,
    },
    /// Requests of clients, whatever their sizes.
    Requests,
}

/// Whether a model has shared slots of this kind.
pub(super) fn has(graph: &Graph, kind: &SlotKind) -> bool {
    graph.fixed().slots.iter().any(|slot| slot.kind == *kind)
}

/// Whether anything is kept of each token.
pub(super) fn has_caches(graph: &Graph) -> bool {
    has(graph, &SlotKind::Cache) || has(graph, &SlotKind::WindowCache)
}

/// The plan of a key, lowered for a device.
pub(super) fn make(graph: &Graph, target: &Target, (shape, end, by_row): Key) -> Result<Made, Error> {
    let results = match end {
        End::Vectors => Results::Vectors,
        End::Source => Results::Source,
        End::Draft | End::DraftTokens { .. } => Results::Draft,
        End::Logits | End::Tokens { .. } | End::NextStep { .. } => Results::Logits,
    };
    if results == Results::Logits && graph.facts().encodes {
        return Err(Error::NoText);
    }
    let plain = if by_row { graph.plan_by_row(shape, results) } else { graph.plan_of(shape, results) };
    let mut plan = lower(plain?, target)?;
    // Without caches positions only tell draws apart: pages that nobody writes to hold as many tokens as can be counted.
    let page = if has_caches(graph) { PAGE } else { i32::MAX as usize / plan.ports.table.shape[0] };
    let (mut tail, mut tokens) = (None, None);
    match end {
        End::Logits | End::Vectors | End::Source | End::Draft => {}
        End::Tokens { cuts } | End::DraftTokens { cuts } => tokens = Some(add_tokens(&mut plan, cuts)?),
        End::NextStep { cuts } => tail = Some(add_tail(&mut plan, cuts, page)?),
    }
    // Plans are kept, and passes leave room for the steps that they took out.
    plan.steps.shrink_to_fit();
    Ok(Made { plan, tail, tokens })
}

/// Keys of [`expected_keys`] that hold every batch of a server without logits for the host.
const FIRST_KEYS: usize = 5;

/// The plans that concurrent requests will need, the likeliest first. What a draw may cut differs in one kernel, which the first keys have.
pub(super) fn expected_keys(sequences: usize, batch: usize) -> Vec<Key> {
    let key = |(at, shape): (usize, BatchShape)| {
        let cuts = at < FIRST_KEYS;
        (shape, if shape.prompt > 0 { End::Tokens { cuts } } else { End::NextStep { cuts } }, false)
    };
    shapes::expected(sequences, batch).into_iter().enumerate().map(key).collect()
}

/// Kernels that are made while weights are loaded.
pub(super) struct Warming {
    warmer: Warmer,
    target: Target,
    keys: Vec<Key>,
}

impl Warming {
    /// What will be asked for first. Nothing where kernels take no time, or where plans are others than those of generating.
    pub(super) fn new(graph: &Graph, executor: &dyn Executor, room: &Room, first: First) -> Option<Warming> {
        let (facts, target) = (graph.facts(), executor.target());
        if target.batch_invariant || facts.encodes || facts.fills || facts.start.is_some() {
            return None;
        }
        let exact = executor.takes_any_shape();
        let keys = match first {
            First::Text { prompt, cuts, goes_on } => {
                let token = (shapes::shape([1, 0, 0], false, exact), End::NextStep { cuts }, false);
                let token = (goes_on || prompt == 1).then_some(token);
                let tokens = prompt.min(executor.batch());
                let mut read = shapes::shape([0, tokens, 1], false, exact || has(graph, &SlotKind::State));
                if facts.latents {
                    read = graph.expanding(read, &target);
                }
                let read = (tokens > 1).then_some((read, End::Tokens { cuts }, false));
                read.into_iter().chain(token).collect()
            }
            First::Requests if target.caps.as_ref().is_none_or(|caps| caps.is_cpu) => return None,
            First::Requests => expected_keys(room.sequences, executor.batch()).into_iter().take(FIRST_KEYS).collect(),
        };
        Some(Warming { warmer: executor.warmer()?, target, keys })
    }

    /// Makes them, those of all plans at once: a driver takes a second for the largest, and the time of all is that of the slowest where
    /// there are cores for them. A plan that cannot be made is not told of here: it fails again where it is asked for.
    pub(super) fn run<'s>(&'s self, graph: &'s Graph, scope: &'s Scope<'s, '_>) {
        for key in &self.keys {
            scope.spawn(move || {
                let made = make(graph, &self.target, *key).and_then(|made| self.warmer.compile(&made.plan));
                match made {
                    Ok(()) => log::debug!("kernels are ready for {:?}", key.0),
                    Err(why) => log::debug!("kernels were not made beforehand: {why}"),
                }
            });
        }
    }
}
