//! Reads the text of an answer: reasoning, content and calls told apart, and the end in the words of whoever asked.

use kiln_engine::run::EndReason;
use kiln_engine::text::{Event, OutputParser};

/// Why an answer ended.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Stop {
    /// The model had said everything.
    End,
    /// A stop text of the request.
    Text(String),
    /// A stop token of the request.
    Token(u32),
    /// As many tokens as were asked for.
    Limit,
    /// The context is full.
    Context,
    /// The request was cancelled.
    Cancelled,
}

impl Stop {
    /// What a reason of the engine means, where `ends` are the tokens that end a turn.
    pub fn of(reason: EndReason, ends: &[u32]) -> Stop {
        match reason {
            EndReason::EndToken(_) | EndReason::Complete => Stop::End,
            EndReason::Cancelled => Stop::Cancelled,
            EndReason::StopToken(token) if ends.contains(&token) => Stop::End,
            EndReason::StopToken(token) => Stop::Token(token),
            EndReason::StopString(text) => Stop::Text(text),
            EndReason::Limit => Stop::Limit,
            EndReason::Context => Stop::Context,
        }
    }
}

/// Reads one answer.
pub struct AnswerReader {
    parser: Option<OutputParser>,
    most_calls: usize,
    ends: Vec<u32>,
}

impl AnswerReader {
    /// For a parser, or for plain text without one; calls above `most_calls` are left out.
    pub fn new(parser: Option<OutputParser>, most_calls: usize, ends: Vec<u32>) -> AnswerReader {
        AnswerReader { parser, most_calls, ends }
    }

    /// For plain text.
    pub fn plain() -> AnswerReader {
        AnswerReader::new(None, 0, Vec::new())
    }

    /// Whether the model is thinking at the moment.
    pub fn is_reasoning(&self) -> bool {
        self.parser.as_ref().is_some_and(OutputParser::is_reasoning)
    }

    /// Takes a piece of text.
    pub fn push(&mut self, text: &str) -> Vec<Event> {
        match &mut self.parser {
            _ if text.is_empty() => Vec::new(),
            None => vec![Event::Content(text.to_owned())],
            Some(parser) => {
                let events = parser.push(text);
                self.told(events)
            }
        }
    }

    /// The text is over, with this much that was held back.
    pub fn end(&mut self, text: &str, reason: &EndReason) -> Vec<Event> {
        let mut events = self.push(text);
        if let Some(parser) = &mut self.parser {
            let cut = matches!(reason, EndReason::Limit | EndReason::Context);
            let rest = if cut { parser.finish_cut() } else { parser.finish() };
            events.extend(self.told(rest));
        }
        events
    }

    /// Whether the last token ended the turn, and so is no part of what was said.
    pub fn ended_by_token(&self, reason: &EndReason) -> bool {
        match reason {
            EndReason::EndToken(_) => true,
            EndReason::StopToken(token) => self.ends.contains(token),
            _ => false,
        }
    }

    /// Why the answer ended.
    pub fn stop(&self, reason: EndReason) -> Stop {
        Stop::of(reason, &self.ends)
    }

    fn told(&self, mut events: Vec<Event>) -> Vec<Event> {
        events.retain(|event| match event {
            Event::CallStart { index, .. } | Event::CallArguments { index, .. } | Event::CallEnd { index } => {
                *index < self.most_calls
            }
            Event::Content(_) | Event::Reasoning(_) => true,
        });
        events
    }
}
