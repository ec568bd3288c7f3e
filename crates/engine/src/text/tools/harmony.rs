//! gpt-oss: messages in channels. `analysis` is reasoning, `final` is content, `commentary` to a function is a call and
//! without a recipient content.

use std::sync::Arc;

use super::driver::Sink;
use super::scan::{Status, ValueScan};
use super::{Event, Tool};
use crate::text::marker::{find_first, hold_from};

const START: &str = "<|start|>";
const CHANNEL: &str = "<|channel|>";
const MESSAGE: &str = "<|message|>";
const CONSTRAIN: &str = "<|constrain|>";
/// What ends a message.
const ENDS: [&str; 5] = ["<|end|>", "<|return|>", "<|call|>", START, CHANNEL];
const MAX_HEAD: usize = 1024;

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Stage {
    /// Role, channel and recipient, up to `<|message|>`.
    Head,
    Reasoning,
    Content,
    /// The arguments of a call; `true` where they are over.
    Arguments(bool),
}

/// Reads all that the model writes.
pub(in crate::text) struct Harmony {
    sink: Sink,
    buffer: String,
    stage: Stage,
    scan: ValueScan,
    /// Arguments have come.
    begun: bool,
}

impl Harmony {
    /// `generation_prompt` is where the model begins: usually `<|start|>assistant`.
    pub(in crate::text) fn new(tools: Vec<Tool>, generation_prompt: &str) -> Self {
        let tools: Arc<[Tool]> = tools.into();
        let sink = Sink::with_tools(tools);
        let mut harmony =
            Self { sink, buffer: String::new(), stage: Stage::Head, scan: ValueScan::default(), begun: false };
        // A prompt that opens a channel is part of the first head.
        if let Some(at) = generation_prompt.rfind(START) {
            harmony.buffer.push_str(&generation_prompt[at + START.len()..]);
        }
        harmony
    }

    pub(in crate::text) fn push(&mut self, text: &str) -> Vec<Event> {
        self.buffer.push_str(text);
        while self.advance(false) {}
        self.sink.take()
    }

    pub(in crate::text) fn finish(&mut self) -> Vec<Event> {
        while self.advance(true) {}
        self.sink.end();
        self.sink.take()
    }

    pub(in crate::text) fn is_reasoning(&self) -> bool {
        self.stage == Stage::Reasoning
    }

    fn advance(&mut self, last: bool) -> bool {
        match self.stage {
            Stage::Head => self.head(last),
            Stage::Arguments(_) => self.arguments(last),
            Stage::Reasoning | Stage::Content => {
                let end = find_first(&self.buffer, ENDS);
                let upto = end
                    .map_or_else(|| if last { self.buffer.len() } else { hold_from(&self.buffer, ENDS) }, |(at, _)| at);
                match self.stage {
                    Stage::Reasoning => self.sink.reasoning(&self.buffer[..upto]),
                    _ => self.sink.content(&self.buffer[..upto]),
                }
                self.leave(upto, end.map(|(_, index)| ENDS[index]))
            }
        }
    }

    /// Drops what was read; a message that ends is followed by a head.
    fn leave(&mut self, upto: usize, end: Option<&str>) -> bool {
        self.buffer.drain(..upto);
        let Some(end) = end else { return false };
        self.stage = Stage::Head;
        // A channel that opens without a start is part of the next head.
        if end != CHANNEL {
            self.buffer.drain(..end.len());
        }
        true
    }

    fn head(&mut self, last: bool) -> bool {
        let Some(end) = self.buffer.find(MESSAGE) else {
            let text = self.buffer.trim_start_matches(START);
            let text = text.strip_prefix("assistant").unwrap_or(text);
            let begins = |part: &str| part.starts_with(text.trim_start()) || text.trim_start().starts_with(part);
            let is_head = ["to=", CHANNEL, MESSAGE, START, "assistant"].into_iter().any(begins);
            // Not a head at all: a model that left its format just speaks.
            if !is_head || self.buffer.len() > MAX_HEAD {
                let text = text.to_owned();
                self.buffer = text;
                self.stage = Stage::Content;
                return true;
            }
            if last {
                self.buffer.clear();
            }
            return false;
        };
        let head: String = self.buffer.drain(..end + MESSAGE.len()).collect();
        let head = &head[..end];
        let recipient = head.split("to=").nth(1).map(|rest| {
            let rest = rest.split([' ', '<']).next().unwrap_or_default();
            rest.strip_prefix("functions.").unwrap_or(rest).to_owned()
        });
        let channel = head.split(CHANNEL).nth(1).unwrap_or_default();
        let channel = channel.split(CONSTRAIN).next().unwrap_or_default().trim_start();
        self.stage = match recipient.filter(|name| !name.is_empty()) {
            Some(name) if self.sink.start(&name, None) => {
                self.scan = ValueScan::default();
                Stage::Arguments(false)
            }
            _ if channel.starts_with("analysis") => Stage::Reasoning,
            _ => Stage::Content,
        };
        true
    }

    fn arguments(&mut self, last: bool) -> bool {
        let end = find_first(&self.buffer, ENDS);
        let upto =
            end.map_or_else(|| if last { self.buffer.len() } else { hold_from(&self.buffer, ENDS) }, |(at, _)| at);
        let text = self.buffer[..upto].to_owned();
        let mut text = text.as_str();
        if let Stage::Arguments(false) = self.stage {
            if !self.begun {
                text = text.trim_start();
            }
            if !text.is_empty() {
                let (len, status) = self.scan.feed(text);
                self.sink.arguments(&text[..len]);
                if status != Status::More {
                    self.stage = Stage::Arguments(true);
                }
                self.begun = true;
            }
        }
        if end.is_some() || last {
            if !self.begun {
                self.sink.arguments("{}");
            }
            self.begun = false;
            self.sink.end();
        }
        self.leave(upto, end.map(|(_, index)| ENDS[index]))
    }
}
