//! Reading and writing alike: every token of a batch goes the way that it would go alone, as a row of its own that sees the keys
//! up to itself. A text then has the same bits whatever else is in the batch, however its prompt is cut into pieces, and whoever
//! computed the pages that it found. Prompts are read more slowly for it.

use super::batch::{Carry, Inputs, Taken};
use super::draw::End;
use super::engine::{Engine, Entry, Ready, Wanted};
use super::media::Placed;
use super::shapes;
use crate::Error;
use crate::executor::INVARIANT_BATCH;

/// A token of an entry, both by number.
type Row = (usize, usize);

impl Engine {
    /// Feeds tokens of several sequences, each as a row of its own.
    pub(super) fn feed_batch_invariant(&mut self, entries: &[Entry<'_>]) -> Result<Vec<Vec<f32>>, Error> {
        self.answers_something(entries)?;
        self.admit(entries)?;
        let runs = runs(entries, self.cache.has_states());
        let result = self.again_if_wrong(entries, |engine| {
            for entry in entries {
                engine.make_room(entry.sequence, entry.tokens.len())?;
            }
            let mut logits = vec![Vec::new(); entries.len()];
            let ran = runs.iter().try_for_each(|rows| engine.run_rows(entries, rows, &mut logits));
            Ok(ran.map(|()| logits))
        })?;
        self.leave(entries, result.is_ok());
        result
    }

    /// Runs some rows and adds the wanted logits to those of their entries.
    fn run_rows(&mut self, entries: &[Entry<'_>], rows: &[Row], logits: &mut [Vec<f32>]) -> Result<(), Error> {
        let is_wanted = |(entry, token): &Row| match entries[*entry].wanted {
            Wanted::Nothing => false,
            Wanted::First => *token == 0,
            Wanted::Last => token + 1 == entries[*entry].tokens.len(),
            Wanted::All => true,
        };
        let wanted: Vec<usize> = (0..rows.len()).filter(|at| is_wanted(&rows[*at])).collect();
        let mut shape = shapes::batch_invariant(rows.len(), wanted.len(), self.executor.takes_any_shape());
        shape.pictures = self.pictures(entries)?;
        let ready = self.prepared((shape, End::Logits, self.by_row(entries)))?;
        let Ready { plan, ports, .. } = ready;
        let part = |(entry, token): &Row| {
            let taken = self.part(&entries[*entry], *token..token + 1);
            // States are kept of what each run takes: the next one goes on from there.
            let last = rows.iter().filter(|(other, _)| other == entry).map(|(_, token)| token + 1).max().unwrap_or(0);
            let carry = taken.carry.map(|carry| Carry { end: carry.start + last, ..carry });
            Taken { carry, ..taken }
        };
        let taken: Vec<Taken<'_>> = rows.iter().map(part).collect();
        let mut inputs = Inputs::new(&shape, &ports, &taken, &[]);
        if shape.outputs < shape.rows() {
            inputs.want(&ports, &wanted);
        }
        for (tensor, bytes) in inputs.bytes() {
            self.executor.write(plan, tensor, bytes)?;
        }
        let parts: Vec<_> = rows.iter().enumerate().map(|(at, (entry, _))| (entries[*entry].sequence, at, 1)).collect();
        self.write_scales(ready, &parts)?;
        let placed = |(row, (entry, token)): (usize, &Row)| {
            let Entry { sequence, tokens, .. } = entries[*entry];
            let position = self.length(sequence) + token;
            Placed { sequence, row, tokens: &tokens[*token..token + 1], position, fed: tokens }
        };
        let placed: Vec<_> = rows.iter().enumerate().map(placed).collect();
        self.write_pictures(ready, &placed)?;
        self.executor.run(plan)?;
        let vocab = ports.logits.shape[0];
        for (nth, at) in wanted.iter().enumerate() {
            let from = if shape.outputs < shape.rows() { nth } else { *at };
            let mut values = vec![0.0f32; vocab];
            self.executor.read(plan, &ports.logits.narrow(1, from, 1), bytemuck::cast_slice_mut(&mut values))?;
            logits[rows[*at].0].append(&mut values);
        }
        Ok(())
    }
}

/// The rows of all entries, cut into runs. A state takes in one token at a time: there a run has one of each sequence.
fn runs(entries: &[Entry<'_>], has_states: bool) -> Vec<Vec<Row>> {
    let of = |entry: usize| (0..entries[entry].tokens.len()).map(move |token| (entry, token));
    let rounds: Vec<Vec<Row>> = if has_states {
        let longest = entries.iter().map(|entry| entry.tokens.len()).max().unwrap_or(0);
        let round = |token: usize| (0..entries.len()).filter(move |i| token < entries[*i].tokens.len());
        (0..longest).map(|token| round(token).map(|entry| (entry, token)).collect()).collect()
    } else {
        vec![(0..entries.len()).flat_map(of).collect()]
    };
    rounds.iter().flat_map(|round| round.chunks(INVARIANT_BATCH)).map(<[Row]>::to_vec).collect()
}
