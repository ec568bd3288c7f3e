//! What an engine is doing, and what it has done since it began: for those who watch it.

/// What a schedule is doing.
#[derive(Clone, Copy, Debug, Default, PartialEq)]
pub struct Load {
    /// Requests that wait.
    pub waiting: usize,
    /// Those of them that wait because another request reads what they begin with.
    pub deferred: usize,
    /// Prompts that are being read.
    pub reading: usize,
    /// Texts that are being written.
    pub writing: usize,
    /// Texts that had to make room.
    pub swapped: usize,
    /// Pages of the cache that are free or kept only for beginnings.
    pub free_pages: usize,
    /// Pages of the cache in all.
    pub pages: usize,
    /// Whether the device was lost: every request fails.
    pub lost: bool,
    /// Whether the engine is being built again since.
    pub rebuilding: bool,
    /// What it has done.
    pub tally: Tally,
}

/// Tokens of prompts that were found in the cache, by where they were.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct CacheHits {
    /// On the device.
    pub device: u64,
    /// In host memory: evicted pages, and states.
    pub host: u64,
    /// On disk.
    pub disk: u64,
}

/// Sizes of steps that are told apart.
pub const STEP_SIZES: usize = 15;

/// What has been done since the engine began.
#[derive(Clone, Copy, Debug, Default, PartialEq)]
pub struct Tally {
    /// How often a text had to make room for others.
    pub swaps: u64,
    /// Steps by their tokens: entry i counts those of at most 2^i tokens that no entry before it counts; the last one all larger ones, too.
    pub steps: [u64; STEP_SIZES],
    /// Tokens of all steps.
    pub tokens: u64,
    /// Steps that made vectors of texts.
    pub embed_steps: u64,
    /// Rows that the steps computed which the host prepared, padding included: all steps but those of run-ahead decode.
    pub rows: u64,
    /// Tokens of those steps.
    pub row_tokens: u64,
    /// Plans that were prepared.
    pub plans: u64,
    /// Tokens of prompts that were found in the cache.
    pub hits: CacheHits,
    /// How drafts have fared.
    pub drafts: DraftTally,
}

/// Places of a draft that are told apart.
pub const DRAFT_PLACES: usize = 16;

/// Who makes drafts.
pub const DRAFT_SOURCES: [&str; 5] = ["rule", "prediction", "lookup", "draft model", "head"];

/// How drafts have fared.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct DraftTally {
    /// Drafts that were verified.
    pub rounds: u64,
    /// Tokens that were drafted.
    pub drafted: u64,
    /// Drafted tokens that were accepted.
    pub accepted: u64,
    /// The same by their place in the draft.
    pub accepted_at: [u64; DRAFT_PLACES],
    /// Drafts that were verified, by who made them, in the order of [`DRAFT_SOURCES`].
    pub rounds_of: [u64; DRAFT_SOURCES.len()],
}

impl DraftTally {
    /// A draft of so many tokens was verified, and so many were accepted; `source` is the number of who made it.
    pub(super) fn note(&mut self, source: usize, drafted: usize, accepted: usize) {
        self.rounds += 1;
        self.rounds_of[source] += 1;
        self.drafted += drafted as u64;
        self.accepted += accepted as u64;
        self.accepted_at.iter_mut().take(accepted).for_each(|count| *count += 1);
    }
}

impl std::ops::Add for DraftTally {
    type Output = DraftTally;

    fn add(self, other: DraftTally) -> DraftTally {
        DraftTally {
            rounds: self.rounds + other.rounds,
            drafted: self.drafted + other.drafted,
            accepted: self.accepted + other.accepted,
            accepted_at: std::array::from_fn(|at| self.accepted_at[at] + other.accepted_at[at]),
            rounds_of: std::array::from_fn(|at| self.rounds_of[at] + other.rounds_of[at]),
        }
    }
}

impl std::ops::Sub for DraftTally {
    type Output = DraftTally;

    fn sub(self, before: DraftTally) -> DraftTally {
        DraftTally {
            rounds: self.rounds - before.rounds,
            drafted: self.drafted - before.drafted,
            accepted: self.accepted - before.accepted,
            accepted_at: std::array::from_fn(|at| self.accepted_at[at] - before.accepted_at[at]),
            rounds_of: std::array::from_fn(|at| self.rounds_of[at] - before.rounds_of[at]),
        }
    }
}

impl Tally {
    /// A step of so many tokens.
    pub(super) fn step(&mut self, tokens: usize) {
        let size = tokens.next_power_of_two().trailing_zeros() as usize;
        self.steps[size.min(STEP_SIZES - 1)] += 1;
        self.tokens += tokens as u64;
    }
}

#[cfg(test)]
mod tests {
    use std::sync::{Arc, Mutex};

    use super::*;
    use crate::arch::Room;
    use crate::executor::{Arithmetic, CpuExecutor};
    use crate::model::Model;
    use crate::quantise_recipe::Recipe;
    use crate::run::engine::Engine;
    use crate::run::job::Job;
    use crate::run::policy::Policy;
    use crate::run::request::{Event, Request};
    use crate::run::schedule::Schedule;
    use crate::synth::{Preset, Synth};

    #[test]
    fn choices_that_are_over_are_no_longer_written() {
        let (preset, recipe) = (Preset::from_name("tiny-llama").unwrap(), Recipe::from_name("F32").unwrap());
        let bytes = Synth::new(preset, recipe, 1).to_bytes().unwrap();
        let model = Arc::new(Model::new(kiln_gguf::Gguf::from_bytes(bytes).unwrap()).unwrap());
        let room = Room::for_sequences(3, 256);
        let engine = Engine::new(model, Box::new(CpuExecutor::new(Arithmetic::Fast)), room, &mut |_, _| {}).unwrap();
        let mut schedule = Schedule::new(engine, Policy::default());
        let over = Arc::new(Mutex::new(0));
        let seen = Arc::clone(&over);
        let sink = Box::new(move |event| {
            *seen.lock().unwrap() += usize::from(matches!(event, Event::End { .. }));
            true
        });
        // Every tenth token ends a choice, so that the three end at different times.
        let mut request = Request { choices: 3, limit: Some(200), ..Request::new(vec![40, 41, 42]) };
        request.sampling.seed = Some(1);
        request.stop.tokens = (0..10_000).step_by(10).collect();
        schedule.add(Job::new(request, sink, Arc::default()));
        let mut counts = Vec::new();
        while !schedule.is_idle() {
            schedule.step();
            let (over, load) = (*over.lock().unwrap(), schedule.load());
            if load.reading == 0 && load.waiting == 0 {
                assert_eq!(load.writing, 3 - over, "{over} of 3 are over");
                counts.push(over);
            }
        }
        counts.dedup();
        assert!(counts.contains(&1) && counts.contains(&2), "they end at different times: {counts:?}");
    }

    #[test]
    fn steps_are_counted_by_their_size() {
        let mut tally = Tally::default();
        [1, 2, 3, 4, 5, 1 << 20].into_iter().for_each(|tokens| tally.step(tokens));
        assert_eq!(&tally.steps[..5], [1, 1, 2, 1, 0]);
        assert_eq!((tally.steps[STEP_SIZES - 1], tally.tokens), (1, 15 + (1 << 20)));
    }
}
