//! What all formats share: the search for the beginning of calls in content, the events, and the way back to content
//! where a beginning turns out to be none.

use std::sync::Arc;

use super::scan::Status;
use super::{Event, Family, Format, Tool, functionary, gemma, json, named, python, tagged};
use crate::text::marker::{find_first, hold_from};

/// Takes events; knows the tools and counts the calls.
#[derive(Debug, Default)]
pub(super) struct Sink {
    events: Vec<Event>,
    tools: Arc<[Tool]>,
    calls: usize,
    open: bool,
    /// The call that is open is one that means "no call".
    dropped: bool,
}

/// A name by which Command-R says that it wants to call nothing.
const NO_CALL: [&str; 2] = ["directly-answer", "directly_answer"];

impl Sink {
    pub(super) fn content(&mut self, text: &str) {
        push_event(&mut self.events, Event::Content(text.to_owned()));
    }

    pub(super) fn reasoning(&mut self, text: &str) {
        push_event(&mut self.events, Event::Reasoning(text.to_owned()));
    }

    pub(super) fn tool(&self, name: &str) -> Option<&Tool> {
        self.tools.iter().find(|tool| tool.name == name)
    }

    /// Begins a call; `false` where there is no such tool.
    pub(super) fn start(&mut self, name: &str, id: Option<String>) -> bool {
        self.dropped = NO_CALL.contains(&name) && self.tool(name).is_none();
        let known = self.tools.is_empty() || self.tool(name).is_some() || self.dropped;
        if known {
            self.open = true;
            if !self.dropped {
                self.events.push(Event::CallStart { index: self.calls, id, name: name.to_owned() });
            }
        }
        known
    }

    pub(super) fn arguments(&mut self, text: &str) {
        if text.is_empty() || self.dropped {
            return;
        }
        push_event(&mut self.events, Event::CallArguments { index: self.calls, text: text.to_owned() });
    }

    pub(super) fn end(&mut self) {
        if self.open {
            if !self.dropped {
                self.events.push(Event::CallEnd { index: self.calls });
                self.calls += 1;
            }
            self.open = false;
            self.dropped = false;
        }
    }

    fn is_open(&self) -> bool {
        self.open
    }

    pub(super) fn with_tools(tools: Arc<[Tool]>) -> Self {
        Self { tools, ..Self::default() }
    }

    pub(super) fn take(&mut self) -> Vec<Event> {
        std::mem::take(&mut self.events)
    }
}

/// Adds an event; text goes to the last one where it is of the same kind.
pub(in crate::text) fn push_event(events: &mut Vec<Event>, event: Event) {
    match (events.last_mut(), &event) {
        (_, Event::Content(text) | Event::Reasoning(text)) if text.is_empty() => {}
        (Some(Event::Content(last)), Event::Content(text)) => last.push_str(text),
        (Some(Event::Reasoning(last)), Event::Reasoning(text)) => last.push_str(text),
        (Some(Event::CallArguments { text: last, .. }), Event::CallArguments { text, .. }) => last.push_str(text),
        _ => events.push(event),
    }
}

/// Reads the calls of one region, from its opening text on.
pub(super) trait Region {
    /// Takes what it can from the beginning of `text`; `last` where no more will come. Gives how many bytes it took.
    fn step(&mut self, text: &str, last: bool, sink: &mut Sink) -> (usize, Status);

    /// The text was cut off here: begins the call whose name is known and that has not begun.
    fn cut(&mut self, _sink: &mut Sink) {}
}

/// Finds tool calls in text that arrives in pieces.
pub struct Calls {
    format: Format,
    sink: Sink,
    buffer: String,
    region: Option<Box<dyn Region + Send>>,
    /// What the open region took since its beginning, or since its last whole call.
    raw: String,
    /// Nothing but white space came yet.
    at_start: bool,
    /// Nothing but white space came since a call; before another call it is no content.
    after_call: bool,
}

impl Calls {
    /// Looks for calls as a family writes them. With no tools, every name is taken for one.
    pub fn new(family: &Family, tools: Vec<Tool>) -> Self {
        let mut calls = Self {
            format: family.format,
            sink: Sink::with_tools(tools.into()),
            buffer: String::new(),
            region: None,
            raw: String::new(),
            at_start: true,
            after_call: false,
        };
        if let Format::Functionary = family.format {
            calls.region = Some(Box::new(functionary::Reader::default()));
        }
        calls
    }

    /// Takes a piece of text.
    pub fn push(&mut self, text: &str) -> Vec<Event> {
        self.buffer.push_str(text);
        self.run(false);
        self.sink.take()
    }

    /// The text is over.
    pub fn finish(&mut self) -> Vec<Event> {
        self.run(true);
        self.sink.take()
    }

    /// The text is over because it was cut off. What a call had written of itself is no content; with `only_calls`, neither is the beginning of a
    /// mark.
    pub fn finish_cut(&mut self, only_calls: bool) -> Vec<Event> {
        let (_, at_start) = self.openings();
        // Functionary's reader gives content itself.
        let has_marks = !at_start && !matches!(self.format, Format::Functionary);
        if let Some(region) = &mut self.region {
            region.cut(&mut self.sink);
            // What has no marks may be content.
            if has_marks || self.sink.is_open() {
                self.sink.end();
                self.region = None;
                self.buffer.clear();
                self.raw.clear();
            }
        } else if only_calls {
            self.buffer.clear();
        }
        self.finish()
    }

    /// How many whole calls there were.
    pub fn calls(&self) -> usize {
        self.sink.calls
    }

    fn run(&mut self, last: bool) {
        loop {
            let moved = match self.region.is_some() {
                true => self.run_region(last),
                false => self.run_content(last),
            };
            if !moved {
                return;
            }
        }
    }

    /// Passes content on up to the beginning of a region; `true` where one begins.
    fn run_content(&mut self, last: bool) -> bool {
        let blank = self.buffer.len() - self.buffer.trim_start().len();
        let may_drop = self.at_start || self.after_call;
        if let Some((at, len, region)) = self.find_opening(last) {
            let from = if may_drop && blank >= at { at } else { 0 };
            self.sink.content(&self.buffer[from..at]);
            self.raw = self.buffer[at..at + len].to_owned();
            self.buffer.drain(..at + len);
            self.region = Some(region);
            (self.at_start, self.after_call) = (false, false);
            return true;
        }
        let mut keep_from = if last { self.buffer.len() } else { self.hold() };
        if may_drop && blank >= keep_from {
            if last && self.after_call {
                self.buffer.clear();
            }
            keep_from = if last { self.buffer.len() } else { 0 };
        }
        if keep_from > 0 {
            (self.at_start, self.after_call) = (false, false);
        }
        self.sink.content(&self.buffer[..keep_from]);
        self.buffer.drain(..keep_from);
        false
    }

    /// The texts that may begin a region here, and whether only at the very beginning.
    fn openings(&self) -> (&'static [&'static str], bool) {
        match self.format {
            Format::Json(form) => (form.opens, form.at_start),
            Format::Named(form) => (form.opens, false),
            Format::Tagged(form) => (form.opens, false),
            Format::Python(form) => (form.opens, form.at_start),
            Format::Gemma(form) => (form.opens, false),
            Format::Functionary | Format::Harmony => (&[], false),
        }
    }

    fn hold(&self) -> usize {
        let (opens, at_start) = self.openings();
        if at_start && !(self.at_start && self.buffer.trim_start().len() < 32) {
            return self.buffer.len();
        }
        hold_from(&self.buffer, opens.iter().copied())
    }

    fn find_opening(&self, last: bool) -> Option<(usize, usize, Box<dyn Region + Send>)> {
        let (opens, at_start) = self.openings();
        let (at, len) = if at_start {
            let at = self.buffer.len() - self.buffer.trim_start().len();
            if !self.at_start {
                return None;
            }
            let rest = &self.buffer[at..];
            let open = opens.iter().filter(|open| rest.starts_with(**open)).max_by_key(|open| open.len())?;
            (at, open.len())
        } else {
            let (at, index) = find_first(&self.buffer, opens.iter().copied())?;
            // A longer opening may be on its way at the same place.
            if !last && hold_from(&self.buffer, opens.iter().copied()) <= at {
                return None;
            }
            (at, opens[index].len())
        };
        let open = &self.buffer[at..at + len];
        let region: Box<dyn Region + Send> = match self.format {
            Format::Json(form) => Box::new(json::Reader::new(form, open)),
            Format::Named(form) => Box::new(named::Reader::new(form, open)),
            Format::Tagged(form) => Box::new(tagged::Reader::new(form, open)),
            Format::Python(form) => Box::new(python::Reader::new(form, open)),
            Format::Gemma(form) => Box::new(gemma::Reader::new(form)),
            Format::Functionary | Format::Harmony => return None,
        };
        Some((at, len, region))
    }

    /// Lets the region read; `true` where it is over and content follows.
    fn run_region(&mut self, last: bool) -> bool {
        let Some(region) = &mut self.region else { return false };
        let calls = self.sink.calls;
        let (taken, status) = region.step(&self.buffer, last, &mut self.sink);
        self.raw.push_str(&self.buffer[..taken]);
        self.buffer.drain(..taken);
        // Functionary's reader gives content itself.
        if self.sink.calls > calls || self.sink.is_open() || matches!(self.format, Format::Functionary) {
            self.raw.clear();
        }
        match status {
            Status::More if !last => false,
            Status::Done => {
                self.sink.end();
                self.region = None;
                self.raw.clear();
                self.after_call = true;
                true
            }
            Status::More | Status::Broken => {
                let was_call = self.sink.is_open();
                self.sink.end();
                let raw = std::mem::take(&mut self.raw);
                if !was_call {
                    self.sink.content(&raw);
                }
                self.region = None;
                true
            }
        }
    }
}
