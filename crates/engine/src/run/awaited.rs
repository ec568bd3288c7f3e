//! Prompts that begin alike and come at once: one of them is read, and the others wait for the pages that it fills.

use super::active::Active;
use super::engine::Engine;
use super::request::Request;
use crate::arch::PAGE;

/// The beginning of a prompt that another request is about to have read.
#[derive(Clone, Copy, Debug)]
pub(super) struct Awaited {
    /// The request that reads it, by the number it was taken up with.
    pub(super) reader: u64,
    /// Tokens of full pages that both prompts begin with.
    pub(super) tokens: usize,
}

impl Awaited {
    /// What a request should wait for instead of computing it beside another: the longest beginning that is still to be read.
    pub(super) fn find(engine: &Engine, active: &[Active], request: &Request) -> Option<Awaited> {
        if !request.reuse || request.from.is_some() || !engine.shares_prefixes() {
            return None;
        }
        let readers =
            active.iter().filter(|reader| is_reading(engine, reader) && may_share(&reader.job.request, request));
        let of = |reader: &Active| {
            // The last token of a prompt is always read: somebody wants its logits.
            let pairs = request.prompt[..request.prompt.len() - 1].iter().zip(&reader.job.request.prompt);
            let tokens = pairs.take_while(|(one, other)| one == other).count() / PAGE * PAGE;
            (tokens > reader.read).then_some(Awaited { reader: reader.number, tokens })
        };
        readers.filter_map(of).max_by_key(|awaited| awaited.tokens)
    }

    /// Whether it is still on its way. A reader that has gone, failed, had to make room or gets no further is not waited for: the next
    /// request reads on from where it stopped.
    pub(super) fn is_coming(&self, engine: &Engine, active: &[Active]) -> bool {
        let reader = active.iter().find(|reader| reader.number == self.reader);
        reader.is_some_and(|reader| is_reading(engine, reader) && reader.read < self.tokens)
    }
}

fn is_reading(engine: &Engine, reader: &Active) -> bool {
    !reader.is_stalled && reader.reading.is_some_and(|id| !engine.is_swapped(id))
}

/// Whether the pages of one request are found by the other, and the other way round.
fn may_share(one: &Request, other: &Request) -> bool {
    one.reuse && one.from.is_none() && one.owner == other.owner && one.scales == other.scales
}
