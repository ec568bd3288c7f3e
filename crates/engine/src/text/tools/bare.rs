//! A call without any marks: some models write `{"name": ..., "arguments": {...}}` as their whole answer, or fenced as code, although their
//! template shows marks. It is read as a call where it names a tool and nothing else stands beside it.

use super::driver::Calls;
use super::{Event, Family, Format, Tool, json};

/// Objects and nothing else.
static FAMILY: Family = super::row("bare", &[], &[], Format::Json(&json::BARE));

const FENCE: &str = "```";
/// Letters behind a fence at most; a longer name is of no language that calls are written in.
const LONGEST_LANGUAGE: usize = 16;

/// Holds an answer back as long as it may be such a call.
pub(in crate::text) struct Bare {
    calls: Calls,
    events: Vec<Event>,
    /// Everything that came.
    raw: String,
    /// How much of it the calls have seen.
    seen: usize,
    fence: Fence,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Fence {
    /// Not known yet.
    Open,
    Absent,
    Present,
    /// The closing one was there.
    Closed,
}

impl Bare {
    pub(in crate::text) fn new(tools: Vec<Tool>) -> Self {
        let calls = Calls::new(&FAMILY, tools);
        Self { calls, events: Vec::new(), raw: String::new(), seen: 0, fence: Fence::Open }
    }

    /// Takes a piece of the answer. Gives back everything that came as soon as it cannot be a call.
    pub(in crate::text) fn push(&mut self, text: &str) -> Option<String> {
        self.raw.push_str(text);
        match self.advance(false) {
            true => None,
            false => Some(std::mem::take(&mut self.raw)),
        }
    }

    /// The answer is over: the call that it was, or the text.
    pub(in crate::text) fn finish(mut self) -> Result<Vec<Event>, String> {
        if self.advance(true) && self.is_whole_call() { Ok(self.events) } else { Err(self.raw) }
    }

    /// Reads on; whether all may still be a call.
    fn advance(&mut self, last: bool) -> bool {
        if self.fence == Fence::Open && !self.open_fence(last) {
            return false;
        }
        let rest = &self.raw[self.seen..];
        let more = match self.fence {
            Fence::Open => return true,
            Fence::Closed => return rest.trim().is_empty(),
            Fence::Absent => rest.to_owned(),
            Fence::Present => match rest.find(FENCE) {
                // No string of JSON has a line end, so that a fence at the beginning of a line is outside of all of them.
                Some(at) if rest[..at].trim_end_matches([' ', '\t']).ends_with('\n') => {
                    let more = rest[..at].to_owned();
                    (self.fence, self.seen) = (Fence::Closed, self.seen + at + FENCE.len());
                    let closed = self.feed(&more);
                    return closed && self.raw[self.seen..].trim().is_empty();
                }
                _ => {
                    // The beginning of a fence may be on its way, and the line end before it.
                    let held = rest.trim_end_matches(|c: char| c == '`' || c.is_whitespace()).len();
                    rest[..held].to_owned()
                }
            },
        };
        self.seen += more.len();
        let goes_on = self.feed(&more);
        if last {
            self.events.extend(self.calls.finish());
        }
        goes_on && self.has_no_content()
    }

    /// Looks what the answer begins with; `false` where it is no call.
    fn open_fence(&mut self, last: bool) -> bool {
        let blank = self.raw.len() - self.raw.trim_start().len();
        let start = &self.raw[blank..];
        if start.starts_with('{') {
            (self.fence, self.seen) = (Fence::Absent, blank);
            return true;
        }
        match start.strip_prefix(FENCE) {
            None => !last && FENCE.starts_with(start),
            Some(rest) => match rest.find('\n') {
                Some(at) if is_language(&rest[..at]) => {
                    (self.fence, self.seen) = (Fence::Present, blank + FENCE.len() + at + 1);
                    true
                }
                None => !last && is_language(rest),
                Some(_) => false,
            },
        }
    }

    fn feed(&mut self, text: &str) -> bool {
        let events = self.calls.push(text);
        self.events.extend(events);
        self.has_no_content()
    }

    fn has_no_content(&self) -> bool {
        let is_content = |event: &Event| matches!(event, Event::Content(text) if !text.trim().is_empty());
        !self.events.iter().any(is_content)
    }

    /// Whether one call came, with arguments that are an object.
    fn is_whole_call(&mut self) -> bool {
        let mut joined = Vec::new();
        for event in std::mem::take(&mut self.events) {
            if !matches!(event, Event::Content(_)) {
                super::push_event(&mut joined, event);
            }
        }
        self.events = joined;
        match self.events.as_slice() {
            [Event::CallStart { .. }, Event::CallArguments { text, .. }, Event::CallEnd { .. }] => {
                serde_json::from_str::<serde_json::Value>(text).is_ok_and(|value| value.is_object())
            }
            _ => false,
        }
    }
}

fn is_language(text: &str) -> bool {
    let text = text.trim_end();
    text.len() <= LONGEST_LANGUAGE && text.chars().all(|c| c.is_ascii_alphanumeric() || c == '_')
}
