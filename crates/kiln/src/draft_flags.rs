//! How tokens are drafted: by lookup, by a head in the model's file, and by a second model. Flags of the commands that generate text.

use std::path::PathBuf;
use std::sync::Arc;

use anyhow::Context as _;
use kiln_engine::arch::Room;
use kiln_engine::executor::Executor;
use kiln_engine::model::Model;
use kiln_engine::run::{DraftLimits, DraftModel, Engine, Heads, Lookup, Policy};
use kiln_llm::{Job, Opening};

use crate::model::{in_words, loading, open, resolve};

/// Sequences whose states can go back in one step: with more at once drafts hardly pay.
const MOST_MARKS: usize = 4;

/// How a command drafts tokens.
#[derive(clap::Args, Clone, Debug, Default)]
#[command(next_help_heading = "Speculative decoding")]
pub(crate) struct DraftFlags {
    /// Draft tokens by lookup in the prompt and the answer, where that is faster; the answer stays the same. auto: on the CPU
    #[arg(long, value_name = "WHEN", value_enum, default_value_t)]
    lookup: When,
    /// Draft tokens with the head in the model's file, where it has one (MTP, nextn); the answer stays the same, and where drafts do not pay, none are
    /// made. auto: on the CPU. A head drafts where no --draft-model is named
    #[arg(long, value_name = "WHEN", value_enum, default_value_t)]
    mtp: When,
    /// Smaller model with the same vocabulary that drafts tokens (-md, --model-draft): a GGUF file or a name as `kiln pull` takes it. The answer
    /// stays the same; where drafts do not pay, none are made
    #[arg(long, value_name = "MODEL")]
    draft_model: Option<PathBuf>,
    /// Most tokens of a draft of --draft-model or --mtp; fewer are drafted where that is faster [default: 16]
    #[arg(long, value_name = "N", value_parser = clap::value_parser!(u32).range(0..=16))]
    draft_max: Option<u32>,
    /// Drop drafts of --draft-model or --mtp that are shorter [default: 0]
    #[arg(long, value_name = "N", value_parser = clap::value_parser!(u32).range(0..=16))]
    draft_min: Option<u32>,
    /// End a draft of --draft-model or --mtp before a token that is less probable, among its ten likeliest [default: 0]
    #[arg(long, value_name = "P", value_parser = probability)]
    draft_p_min: Option<f32>,
}

fn probability(text: &str) -> Result<f32, String> {
    let number = text.parse().ok().filter(|number| (0.0..=1.0).contains(number));
    number.ok_or_else(|| "a probability is a number from 0 to 1".to_owned())
}

/// When tokens are drafted.
#[derive(clap::ValueEnum, Clone, Copy, Debug, Default)]
enum When {
    #[default]
    Auto,
    On,
    Off,
}

impl DraftFlags {
    /// Opens the draft model, if one is named, and sees whether it can draft for this one.
    pub(crate) fn open(&self, target: &Model) -> anyhow::Result<Drafting> {
        let lookup = match self.lookup {
            When::Auto => Lookup::Auto,
            When::On => Lookup::On,
            When::Off => Lookup::Off,
        };
        // Of two that compute drafts, the one that was named does.
        let heads = match self.mtp {
            _ if self.draft_model.is_some() => Heads::Off,
            When::Auto => Heads::Auto,
            When::On => Heads::On,
            When::Off => Heads::Off,
        };
        let usual = DraftLimits::default();
        let limits = DraftLimits {
            most: self.draft_max.map_or(usual.most, |most| most as usize),
            least: self.draft_min.map_or(usual.least, |least| least as usize),
            least_probability: self.draft_p_min.unwrap_or(usual.least_probability),
            ..usual
        };
        let model = self.draft_model.as_ref().map(|name| -> anyhow::Result<Arc<Model>> {
            let path = resolve(Some(name))?;
            let model = open(&path)?;
            DraftModel::check(&model, target).with_context(|| format!("cannot draft with {}", path.display()))?;
            Ok(model)
        });
        Ok(Drafting { lookup, heads, limits, model: model.transpose()? })
    }
}

/// How tokens are drafted, with the model that drafts.
#[derive(Clone, Default)]
pub(crate) struct Drafting {
    lookup: Lookup,
    heads: Heads,
    limits: DraftLimits,
    model: Option<Arc<Model>>,
}

impl Drafting {
    /// The same rules for requests, with drafts.
    pub(crate) fn policy(&self, policy: Policy) -> Policy {
        Policy { lookup: self.lookup, draft: self.limits, heads: self.heads, ..policy }
    }

    /// Bytes of the draft model's weights.
    pub(crate) fn bytes(&self) -> u64 {
        self.model.as_ref().map_or(0, |model| model.gguf.data_bytes())
    }

    /// Room for the states that sequences go back to when drafts are wrong.
    fn widen(&self, room: Room, model: &Model, executor: &dyn Executor) -> Room {
        let looks_up = match self.lookup {
            Lookup::Auto => executor.takes_any_shape(),
            Lookup::On => true,
            Lookup::Off => false,
        };
        let drafts = looks_up || self.model.is_some() || self.heads == Heads::On;
        let goes_back = model.facts.has_state() && drafts;
        let marks = if goes_back { room.sequences.min(MOST_MARKS) } else { 0 };
        Room { states: room.states + marks, ..room }
    }

    /// Loads the draft model, if there is one. Before the model itself, which takes what memory is left.
    fn load(&self, opening: &Opening, target: &Model, sequences: usize) -> anyhow::Result<Option<DraftModel>> {
        let Some(model) = &self.model else { return Ok(None) };
        let context = opening.context.unwrap_or_else(|| target.usual_context()).min(model.usual_context());
        // A context that was asked for is had whole or not at all; drafts of shorter sequences are better than none.
        let job = Job { sequences, expected: Some(context), heads: Heads::Off, ..Job::default() };
        // A state cannot be shortened, and drafts are always taken back.
        let widen = |room: Room, _: &dyn Executor| {
            let marks = if model.facts.has_state() { room.sequences } else { 0 };
            Room { states: room.states + marks, ..room }
        };
        let load = || -> anyhow::Result<DraftModel> {
            let opening = opening.for_draft();
            let engine = loading(|progress| opening.engine_within(model, job, widen, progress)).map_err(in_words)?;
            Ok(DraftModel::new(engine, target)?)
        };
        let draft = load().context("cannot load the draft model")?;
        log::info!("the draft model runs on {}", draft.describe());
        Ok(Some(draft))
    }

    /// Loads a model for a job, with what drafts for it and a progress bar.
    pub(crate) fn engine(&self, opening: &Opening, model: &Arc<Model>, job: Job) -> anyhow::Result<Engine> {
        let draft = self.load(opening, model, job.sequences.max(1))?;
        let widen = |room: Room, executor: &dyn Executor| self.widen(room, model, executor);
        let job = Job { heads: self.heads, ..job };
        let mut engine = loading(|progress| opening.engine_within(model, job, widen, progress)).map_err(in_words)?;
        if self.heads == Heads::On && !engine.drafts() {
            log::warn!(
                "the model's file has no head that Kiln runs, or several devices run the model: --mtp does nothing"
            );
        }
        draft.into_iter().for_each(|draft| engine.draft_with(draft));
        Ok(engine)
    }
}
