//! The engine's side of the KV cache: executes the copies that [`KvCache`] asks for, moves sequences to host memory and back, and
//! saves them.

use std::sync::Arc;

use super::cache::{
    AddedPage, Blob, Demotion, KvCache, Load, PageCount, PageKind, PageTable, Rank, Reused, SequenceCache, Stop,
    SwapPlan, Swapped, stops,
};
use super::disk::DiskKey;
use super::engine::{Engine, Sequence, SequenceId};
use crate::Error;
use crate::executor::Range;
use crate::state;

impl Engine {
    /// Pages of the caches that can be taken now, and in all: of layers that see every token, where there are such.
    pub fn pages(&self) -> (usize, usize) {
        PageKind::ALL.into_iter().find_map(|kind| self.cache.pages(kind)).unwrap_or_default()
    }

    /// The same of layers with a window, where those have pages of their own.
    pub fn window_pages(&self) -> Option<(usize, usize)> {
        self.cache.pages(PageKind::Window)
    }

    /// Whether these pages can be taken now.
    pub(crate) fn room_for(&self, wanted: PageCount) -> Result<(), Error> {
        self.cache.room_for(wanted)
    }

    /// Pages that a new prompt takes, with the sequences of its choices that continue it.
    pub(crate) fn pages_of_prompt(&self, tokens: usize, choices: usize) -> PageCount {
        self.cache.pages_of_prompt(tokens, choices)
    }

    fn pages_by(&self, id: SequenceId, of: impl Fn(&KvCache, &SequenceCache) -> PageCount) -> PageCount {
        self.sequences.get(&id).map_or(PageCount::default(), |sequence| of(&self.cache, &sequence.cache))
    }

    /// Tokens that may be fed behind so many certain ones of a sequence and taken back again.
    pub(crate) fn revocable(&self, id: SequenceId, certain: usize) -> usize {
        let revocable = |sequence: &Sequence| self.cache.revocable(&sequence.cache, certain);
        self.sequences.get(&id).filter(|_| self.start().is_none()).map_or(0, revocable)
    }

    /// How many more pages a sequence needs for `more` tokens.
    pub(crate) fn pages_needed(&self, id: SequenceId, more: usize) -> PageCount {
        self.pages_by(id, |cache, sequence| cache.pages_needed(sequence, more))
    }

    /// Pages that feeding `more` tokens takes: new ones, and one for a last page that others share.
    pub(crate) fn pages_to_feed(&self, id: SequenceId, more: usize) -> PageCount {
        self.pages_by(id, |cache, sequence| cache.pages_to_feed(sequence, more))
    }

    /// Pages that a sequence lacks for `more` tokens, at most those of its context.
    pub(crate) fn pages_ahead(&self, id: SequenceId, more: usize) -> PageCount {
        self.pages_by(id, |cache, sequence| cache.pages_ahead(sequence, more))
    }

    /// Takes those pages.
    pub(super) fn take_pages_ahead(&mut self, id: SequenceId, more: usize) -> Result<Vec<AddedPage>, Error> {
        let sequence = self.sequences.get_mut(&id).ok_or(CLOSED)?;
        let added = self.cache.take_ahead(&mut sequence.cache, more);
        self.demote()?;
        added
    }

    /// Takes the pages for the tokens that an encoder reads.
    pub(super) fn take_encoder_pages(&mut self, tokens: usize) -> Result<PageTable, Error> {
        let table = self.cache.take_encoder_pages(tokens);
        self.demote()?;
        table
    }

    /// Reads pieces of the device's memory; each list becomes one blob.
    pub(super) fn read_blobs(&mut self, lists: &[Vec<Range>]) -> Result<Vec<Blob>, Error> {
        let size = |list: &Vec<Range>| list.iter().map(|range| range.bytes).sum::<usize>();
        let ranges: Vec<Range> = lists.iter().flatten().copied().collect();
        let mut bytes = vec![0; lists.iter().map(size).sum()];
        if !bytes.is_empty() {
            self.executor.gather(&ranges, &mut bytes)?;
        }
        let mut rest = &bytes[..];
        let blob = |list: &Vec<Range>| {
            let (blob, behind) = rest.split_at(size(list));
            rest = behind;
            Arc::new(blob.to_vec())
        };
        Ok(lists.iter().map(blob).collect())
    }

    /// Keeps pages in host memory that were evicted, before anything is written to them. One that cannot be read is computed again
    /// when it is needed.
    fn demote(&mut self) -> Result<(), Error> {
        let demotions = self.cache.take_demotions();
        if demotions.is_empty() {
            return Ok(());
        }
        let lists: Vec<Vec<Range>> = demotions.iter().map(|demotion| demotion.from.clone()).collect();
        match self.read_blobs(&lists) {
            Ok(blobs) => {
                for (Demotion { kind, hash, .. }, blob) in demotions.into_iter().zip(blobs) {
                    self.cache.keep_page(kind, hash, blob);
                }
            }
            Err(error) if error.is_lost() => return Err(error),
            Err(error) => log::debug!("evicted pages were not kept: {error}"),
        }
        Ok(())
    }

    /// Writes what comes from host memory. A sequence whose contents are not complete then is broken.
    fn load(&mut self, id: SequenceId, loads: &[Load]) -> Result<(), Error> {
        for (at, Load { to, blob, .. }) in loads.iter().enumerate().filter(|(_, load)| !load.to.is_empty()) {
            if let Err(error) = self.executor.scatter(to, blob) {
                self.cache.undo_loads(&loads[at..]);
                self.sequence_mut(id)?.broken = true;
                return Err(error);
            }
        }
        Ok(())
    }

    /// Takes the pages for `more` tokens; the page that is written to next becomes the sequence's own.
    pub(super) fn make_room(&mut self, id: SequenceId, more: usize) -> Result<(), Error> {
        let sequence = self.sequences.get_mut(&id).ok_or(CLOSED)?;
        let reserved = self.cache.reserve(&mut sequence.cache, more);
        self.demote()?;
        let copies = reserved?;
        if copies.is_empty() {
            return Ok(());
        }
        let copied = self.executor.copy(&copies);
        // Its last page holds nothing that can be trusted then.
        self.sequence_mut(id)?.broken |= copied.is_err();
        copied
    }

    /// Tokens of a sequence went through the model.
    pub(super) fn append(&mut self, id: SequenceId, tokens: &[u32]) {
        if let Some(sequence) = self.sequences.get_mut(&id) {
            self.cache.append(&mut sequence.cache, tokens);
        }
    }

    /// A step that goes on by itself took in one token of a sequence.
    pub(super) fn append_ahead(&mut self, id: SequenceId, token: u32) {
        if let Some(sequence) = self.sequences.get_mut(&id) {
            self.cache.append_ahead(&mut sequence.cache, token);
        }
    }

    /// Sequences will go on by themselves: where the state before the next token is not known that a draft head reads it with, it is zero.
    pub(super) fn carry_on(&mut self, ids: &[SequenceId]) -> Result<(), Error> {
        let mut zero = Vec::new();
        for id in ids {
            let sequence = self.sequences.get_mut(id).ok_or(CLOSED)?;
            zero.extend(self.cache.carry_on(&mut sequence.cache));
        }
        if zero.is_empty() { Ok(()) } else { self.executor.zero(&zero) }
    }

    /// Whether sequences share what is cached of a common prefix.
    pub(super) fn shares_prefixes(&self) -> bool {
        self.cache.shares_prefixes()
    }

    /// Gives an empty sequence what is cached of a prefix of `tokens` already, and says how many tokens that are. At least one
    /// token is left to be fed, because its logits are wanted.
    pub fn reuse(&mut self, id: SequenceId, tokens: &[u32]) -> Result<usize, Error> {
        self.stage_from_disk(id, tokens);
        let sequence = self.sequences.get_mut(&id).ok_or(CLOSED)?;
        let reused = self.cache.reuse(&mut sequence.cache, tokens);
        self.cache.clear_staged();
        self.demote()?;
        self.load(id, &reused.loads)?;
        let Reused { tokens, host_tokens, disk_tokens, .. } = reused;
        self.hits.host += host_tokens as u64;
        self.hits.disk += disk_tokens as u64;
        self.hits.device += tokens.saturating_sub(host_tokens + disk_tokens) as u64;
        Ok(tokens)
    }

    /// Where the prefill of a prompt should stop so that its state can be saved there.
    pub(super) fn checkpoint_stops(&self, id: SequenceId, prompt: usize) -> Vec<Stop> {
        match self.sequences.get(&id) {
            Some(sequence) if self.cache.has_states() && self.cache.shares_prefixes() => {
                stops(sequence.cache.tokens.len(), sequence.cache.branch, prompt, self.batch())
            }
            _ => Vec::new(),
        }
    }

    /// Saves the state of a sequence as it is now, in models with recurrent layers: later prompts that begin with its tokens
    /// continue from here.
    pub fn checkpoint(&mut self, id: SequenceId) -> Result<(), Error> {
        self.checkpoint_as(id, Rank::Kept)
    }

    /// The same, with how soon it is evicted.
    pub(super) fn checkpoint_as(&mut self, id: SequenceId, rank: Rank) -> Result<(), Error> {
        let Some(sequence) = self.sequences.get(&id) else { return Ok(()) };
        let ranges = self.cache.checkpoint(&sequence.cache);
        if ranges.is_empty() || sequence.broken {
            return Ok(());
        }
        let mut bytes = vec![0; ranges.iter().map(|range| range.bytes).sum()];
        self.executor.gather(&ranges, &mut bytes)?;
        let blob = Arc::new(bytes);
        if rank == Rank::Kept {
            let state = self.cache.state_of(&sequence.cache);
            self.disk.iter_mut().for_each(|disk| disk.write(DiskKey::from(&state), &blob));
        }
        self.cache.save_checkpoint(&sequence.cache, blob, rank);
        Ok(())
    }

    /// A sequence that continues another one from where that is now.
    pub fn fork(&mut self, id: SequenceId) -> Result<SequenceId, Error> {
        self.usable(id)?;
        let from = self.sequences.get(&id).ok_or(CLOSED)?;
        let (cache, copies) = self.cache.fork(&from.cache)?;
        let (scales, spans, lost_pictures) = (from.scales.clone(), from.spans.clone(), from.lost_pictures);
        let forked = self.add(Sequence { cache, scales, spans, lost_pictures, ..Sequence::default() });
        if !copies.is_empty() {
            self.executor.copy(&copies).inspect_err(|_| self.close(forked))?;
        }
        Ok(forked)
    }

    /// Forgets a sequence from this token on. A recurrent state has no way back but to the start; nor have layers with a window,
    /// once the pages that the next token would see were released and evicted.
    pub fn truncate(&mut self, id: SequenceId, length: usize) -> Result<(), Error> {
        let sequence = self.sequences.get_mut(&id).ok_or(CLOSED)?;
        let now = sequence.cache.tokens.len();
        if length >= now && !sequence.broken {
            return Ok(());
        }
        let zero = self.cache.truncate(&mut sequence.cache, length.min(now))?;
        if sequence.lost_pictures {
            sequence.find_lost_pictures();
        }
        // Rows past the length are written anew before anybody reads them, so a failed run leaves nothing behind.
        sequence.broken = false;
        if zero.is_empty() {
            return Ok(());
        }
        let zeroed = self.executor.zero(&zero);
        sequence.broken = zeroed.is_err();
        zeroed
    }

    /// Keeps the state of a sequence as it is now, in models with recurrent layers, so that it can go back. `false`: there is no room.
    pub(super) fn mark(&mut self, id: SequenceId) -> Result<bool, Error> {
        let sequence = self.sequences.get_mut(&id).ok_or(CLOSED)?;
        let Some(copies) = self.cache.mark(&mut sequence.cache) else { return Ok(false) };
        let copied = self.executor.copy(&copies);
        copied.inspect_err(|_| self.unmark(id)).map(|()| true)
    }

    /// Forgets where a sequence could have gone back to.
    pub(super) fn unmark(&mut self, id: SequenceId) {
        if let Some(sequence) = self.sequences.get_mut(&id) {
            self.cache.unmark(&mut sequence.cache);
        }
    }

    /// Brings a sequence back to where it was marked.
    pub(super) fn go_back(&mut self, id: SequenceId) -> Result<(), Error> {
        let sequence = self.sequences.get_mut(&id).ok_or(CLOSED)?;
        self.cache.go_back(&mut sequence.cache)
    }

    /// Whether going back needs a mark.
    pub(super) fn has_states(&self) -> bool {
        self.cache.has_states()
    }

    /// Everything that is cached of a sequence, page by page.
    fn contents(&mut self, id: SequenceId) -> Result<Vec<u8>, Error> {
        self.usable(id)?;
        let ranges = self.cache.ranges(&self.sequence(id)?.cache);
        let mut bytes = vec![0; ranges.iter().map(|range| range.bytes).sum()];
        self.executor.gather(&ranges, &mut bytes)?;
        Ok(bytes)
    }

    /// Writes what is cached of a sequence to the pages and the state that it holds for that.
    fn write_contents(&mut self, id: SequenceId, bytes: &[u8]) -> Result<(), Error> {
        let ranges = self.cache.ranges(&self.sequence(id)?.cache);
        let worked = self.executor.scatter(&ranges, bytes);
        self.sequence_mut(id)?.broken = worked.is_err();
        worked
    }

    /// Bytes that are cached of a sequence.
    pub(crate) fn bytes_of(&self, id: SequenceId) -> usize {
        self.sequences.get(&id).map_or(0, |sequence| self.cache.bytes(&sequence.cache))
    }

    /// Bytes that all swapped sequences take in host memory.
    pub(crate) fn swapped_bytes(&self) -> usize {
        self.sequences.values().filter_map(|sequence| sequence.swapped.as_ref()).map(Swapped::bytes).sum()
    }

    /// A saved state holds one token sequence; encoder-decoder models have two.
    fn has_savable_states(&self) -> Result<(), Error> {
        if self.start().is_none() {
            return Ok(());
        }
        let why = "the model reads one text and writes another, and a saved state holds one".to_owned();
        Err(Error::SavedState { why, hint: "give the prompt again: it is read at once" })
    }

    /// Everything a sequence remembers, as bytes that [`Engine::load_state`] takes: a prefix to continue from, here or in another
    /// engine with the same model.
    pub fn save_state(&mut self, id: SequenceId) -> Result<Vec<u8>, Error> {
        self.has_savable_states()?;
        let bytes = self.contents(id)?;
        Ok(state::write(self.model(), &self.scales_of(id), self.tokens(id), &bytes))
    }

    /// Lets a sequence continue from a saved state. One of another model, or too long for the context, is refused, and nothing has
    /// changed then.
    pub fn load_state(&mut self, id: SequenceId, bytes: &[u8]) -> Result<(), Error> {
        self.has_savable_states()?;
        let (tokens, rest) = state::open(self.model(), &self.scales_of(id), bytes)?;
        if tokens.len() > self.context() {
            let why = format!("it holds {} tokens, the context has room for {}", tokens.len(), self.context());
            return Err(Error::SavedState { why, hint: "--ctx-size makes room for more" });
        }
        let needed = self.cache.bytes_of_tokens(tokens.len());
        if rest.len() != needed {
            let why = format!("it remembers {} bytes, {needed} belong to its tokens", rest.len());
            let hint = "it was saved with other --cache-type or --ctx-size flags, or by another version of Kiln; save the state again";
            return Err(Error::SavedState { why, hint });
        }
        self.truncate(id, 0)?;
        let sequence = self.sequences.get_mut(&id).ok_or(CLOSED)?;
        let restored = self.cache.restore(&mut sequence.cache, &tokens);
        self.demote()?;
        let written = restored.and_then(|()| self.write_contents(id, rest));
        written.inspect_err(|_| drop(self.truncate(id, 0)))?;
        self.sequence_mut(id)?.find_lost_pictures();
        // Others find it, as if it had been computed here.
        self.append(id, &[]);
        self.checkpoint(id)
    }

    /// Moves what is cached of a sequence to host memory; its pages and its state are free for others.
    pub fn swap_out(&mut self, id: SequenceId) -> Result<(), Error> {
        self.usable(id)?;
        let SwapPlan { mut pages, rest } = self.cache.swap_plan(&self.sequence(id)?.cache);
        pages.push(rest);
        let mut blobs = self.read_blobs(&pages)?;
        let rest = blobs.pop().unwrap_or_default();
        let sequence = self.sequences.get_mut(&id).ok_or(CLOSED)?;
        sequence.swapped = Some(self.cache.swap_out(&mut sequence.cache, blobs, rest));
        Ok(())
    }

    /// Brings a sequence back.
    pub fn swap_in(&mut self, id: SequenceId) -> Result<(), Error> {
        let sequence = self.sequences.get_mut(&id).ok_or(CLOSED)?;
        let Some(swapped) = &sequence.swapped else { return Ok(()) };
        let loads = self.cache.swap_in(&mut sequence.cache, swapped)?;
        sequence.swapped = None;
        self.demote()?;
        self.load(id, &loads)
    }

    /// Whether a sequence lies in host memory.
    pub fn is_swapped(&self, id: SequenceId) -> bool {
        self.sequences.get(&id).is_some_and(|s| s.swapped.is_some())
    }
}

/// What is wrong with a sequence that there is no more.
pub(super) const CLOSED: Error = Error::NoSequence { why: "it was closed" };
