//! What follows when the results of a step are wrong and the executor knows a slower way. Kernels waited for each other in vain: barriers
//! order them from then on. Activations left the range of an f16: plans no longer pack them. Then the step runs again. Keys and values are written
//! once more to the same rows. A recurrent state has no way back, so it is computed again from the sequence's tokens.

use super::draw::End;
use super::engine::{Engine, Entry, SequenceId, Wanted};
use crate::Error;

/// How often a step is repeated at most. Each device of a model says once that its kernels stalled and once that activations left their range;
/// what goes on after this is not what repeating mends.
pub(super) const MOST_REPEATS: usize = 16;

impl Engine {
    /// Runs a batch, and again if its results are wrong: once for each thing that can go wrong on each device. The outer error of `once` is that of a batch
    /// that was not run.
    pub(super) fn again_if_wrong<T>(
        &mut self,
        entries: &[Entry<'_>],
        mut once: impl FnMut(&mut Engine) -> Result<Result<T, Error>, Error>,
    ) -> Result<Result<T, Error>, Error> {
        for _ in 0..MOST_REPEATS {
            match once(self)? {
                Err(wrong @ (Error::Stalled | Error::OutOfRange)) => {
                    self.recover(&wrong, entries.iter().map(|entry| entry.sequence))?;
                }
                result => return Ok(result),
            }
        }
        once(self)
    }

    /// Brings sequences back to where they were before a step whose results are wrong. Those that cannot be brought back are broken.
    pub(super) fn recover(&mut self, wrong: &Error, ids: impl Iterator<Item = SequenceId>) -> Result<(), Error> {
        if matches!(wrong, Error::OutOfRange) {
            self.forget_plans();
        }
        if !self.cache.has_states() {
            return Ok(());
        }
        let all: Vec<(SequenceId, Vec<u32>)> = ids.map(|id| (id, self.tokens(id).to_vec())).collect();
        let mut recovered = Ok(());
        for _ in 0..MOST_REPEATS {
            recovered = all.iter().try_for_each(|(id, tokens)| self.recompute(*id, tokens));
            match recovered {
                // Another device says the same of this step.
                Err(Error::OutOfRange) => self.forget_plans(),
                Err(Error::Stalled) => {}
                _ => break,
            }
        }
        recovered.inspect_err(|_| self.break_all(&all.iter().map(|(id, _)| *id).collect::<Vec<_>>()))
    }

    /// Computes what a sequence remembers from its tokens.
    fn recompute(&mut self, id: SequenceId, tokens: &[u32]) -> Result<(), Error> {
        let sequence = self.sequence_mut(id)?;
        // So that an empty sequence gets a state of zeros, too.
        sequence.broken = true;
        self.truncate(id, 0)?;
        // Batch-invariant states take in one token at a time.
        let piece = if self.batch_invariant { 1 } else { self.batch() };
        for tokens in tokens.chunks(piece) {
            let entries = [Entry { sequence: id, tokens, wanted: Wanted::Nothing }];
            let entered = self.enter(&entries, End::Logits)?;
            self.executor.run(entered.plan)?;
            self.leave(&entries, true);
        }
        Ok(())
    }
}
