//! Steps with drafts: which sequences get one, and what stays of it.

use super::active::Outcome;
use super::engine::Wanted;
use super::lookup::{self, Lookup, MOST_SEQUENCES, StepTimes};
use super::part::Part;
use super::schedule::Schedule;

impl Schedule {
    /// Whether tokens are drafted for a step of so many sequences.
    fn drafts_for(&self, sequences: usize) -> bool {
        let on = match self.policy.lookup {
            Lookup::Off => false,
            Lookup::On => true,
            // A device that pads runs ahead by itself: what a draft costs there has not been measured.
            Lookup::Auto => !self.engine.pads(),
        };
        on && sequences <= MOST_SEQUENCES
    }

    /// Drafts of texts: empty where none is found, or none pays.
    fn look_up(&mut self, texts: &[(usize, usize)]) -> Vec<Vec<u32>> {
        // Whoever turns drafts on has them by their acceptance alone.
        let times = if self.policy.lookup == Lookup::On { StepTimes::default() } else { self.times };
        let mut drafts = Vec::with_capacity(texts.len());
        for (at, choice) in texts {
            let text = &mut self.active[*at].texts[*choice];
            let most = text.writer.left().saturating_sub(1).min(self.engine.revocable(text.sequence));
            let found = lookup::draft(self.engine.tokens(text.sequence), text.next, most);
            let length = text.drafts.length(found.len(), texts.len(), &times);
            if length == 0 && !found.is_empty() {
                text.drafts.pass();
            }
            drafts.push(found[..length].to_vec());
        }
        drafts
    }

    /// Whether a text of the run-ahead decode has a draft: then the host makes the next step.
    pub(super) fn has_drafts_ahead(&mut self) -> bool {
        let texts = self.ahead.clone().unwrap_or_default();
        self.drafts_for(texts.len()) && self.look_up(&texts).iter().any(|draft| !draft.is_empty())
    }

    /// Adds drafts to a step without prompts, where there are pages for them.
    pub(super) fn add_drafts(&mut self, batch: &mut [Part]) {
        let texts: Vec<_> = batch.iter().filter_map(|part| part.choice.map(|choice| (part.active, choice))).collect();
        if texts.len() < batch.len() || !self.drafts_for(texts.len()) {
            return;
        }
        let drafts = self.look_up(&texts);
        let rows = batch.len() + drafts.iter().map(Vec::len).sum::<usize>();
        let pages = |(part, draft): (&Part, &Vec<u32>)| self.engine.pages_to_feed(part.sequence, 1 + draft.len());
        let needed = batch.iter().zip(&drafts).map(pages).sum();
        if rows > self.engine.batch() || self.engine.room_for(needed).is_err() {
            return;
        }
        for (part, draft) in batch.iter_mut().zip(drafts).filter(|(_, draft)| !draft.is_empty()) {
            part.tokens.extend(draft);
            part.wanted = Wanted::All;
        }
    }

    /// Tells the tokens of a text that a step with a draft gave, and takes back what was drafted wrongly.
    pub(super) fn verify(&mut self, part: &Part, choice: usize, outcome: &Outcome) {
        let Outcome::Logits(logits) = outcome else { unreachable!("all logits of a draft are wanted") };
        let active = &mut self.active[part.active];
        let draft = &part.tokens[1..];
        let accepted = active.verify(choice, draft, logits);
        self.tally.drafted += draft.len() as u64;
        self.tally.accepted += accepted as u64;
        let length = self.engine.length(part.sequence) - (draft.len() - accepted);
        if let Err(error) = self.engine.truncate(part.sequence, length) {
            active.texts[choice].writer.stop();
            active.job.fail(error.again());
            self.note(&error);
        }
    }
}
