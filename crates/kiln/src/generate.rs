//! A model that answers: its chat template on the way in, thoughts and words told apart on the way out, Ctrl-C on the way.

use std::sync::mpsc::{RecvTimeoutError, channel};
use std::time::Duration;

use kiln_engine::Error;
use kiln_engine::model::Model;
use kiln_engine::run::{Constraint, EndReason, Event, Request, Scheduler, Usage};
use kiln_engine::sampler::Logprobs;
use kiln_engine::text::{self, Message};
use kiln_engine::tokenizer::EncodeLimit;
use kiln_llm::chat::{AnswerReader, ChatSetup, Conversation, ToolChoice};
use kiln_system::interrupt::Catch;
use kiln_system::text::shown;
use kiln_tools::Call;
use serde_json::Value;

/// The name of a model, for people.
pub(crate) fn name(model: &Model) -> String {
    shown(model.gguf.metadata().get_str_or("general.name", "model").unwrap_or("model"))
}

/// A conversation as the model reads it.
pub(crate) struct Prompt {
    /// The tokens: one part more than there are pictures and sounds.
    pub(crate) parts: Vec<Vec<u32>>,
    /// Tells thoughts from words in what the model makes of it.
    pub(crate) reader: AnswerReader,
    /// Whether the marks of thoughts are control tokens, which must be in the text to be found.
    pub(crate) show_special: bool,
    /// Ends thoughts that become too long, where they may.
    pub(crate) constraint: Option<Box<dyn Constraint>>,
}

/// How a model may think before it answers.
#[derive(Clone, Copy, Debug, Default)]
pub(crate) struct Thinking {
    /// Whether it may: the template asks it not to otherwise.
    pub(crate) on: bool,
    /// Tokens of its thoughts at most.
    pub(crate) budget: Option<usize>,
}

/// A conversation that is to be continued.
#[derive(Clone, Copy, Default)]
pub(crate) struct Talk<'a> {
    pub(crate) messages: &'a [Message],
    pub(crate) thinking: Thinking,
    /// A rule holds for the whole answer.
    pub(crate) has_rule: bool,
    /// Stands for each picture and sound.
    pub(crate) between: Option<&'a str>,
    /// Tools, as templates have them.
    pub(crate) tools: &'a [Value],
    /// The model may call none of them: it has called enough.
    pub(crate) no_calls: bool,
}

/// Brings a conversation into the form of the template.
pub(crate) fn chat_prompt(model: &Model, setup: &ChatSetup, talk: Talk<'_>) -> anyhow::Result<Prompt> {
    let Talk { messages, thinking, has_rule, between, tools, no_calls } = talk;
    // A rule holds for the whole text: nothing in it is a thought.
    let mut conversation = Conversation {
        messages: messages.to_vec(),
        tools: tools.to_vec(),
        tool_choice: if no_calls { ToolChoice::None } else { ToolChoice::Auto },
        keep_reasoning: has_rule,
        thinking_budget: thinking.budget.filter(|_| !has_rule),
        ..Conversation::default()
    };
    if !thinking.on || has_rule {
        conversation.kwargs.insert("enable_thinking".into(), false.into());
    }
    let rendered = setup.render(&conversation)?;
    let form = setup.form(&conversation, &rendered, None)?;
    Ok(Prompt {
        parts: match between {
            Some(marker) => rendered.encode_parts(&model.tokenizer, marker, &EncodeLimit::default())?,
            None => vec![rendered.encode(&model.tokenizer)?],
        },
        reader: form.reader(&setup.ends),
        // Marks of calls are control tokens in some vocabularies.
        show_special: form.show_special && (!has_rule || !tools.is_empty()),
        constraint: form.constraint,
    })
}

/// Something that an answer is made of, as it comes.
pub(crate) enum Piece<'a> {
    /// Prompt tokens processed so far.
    Read(usize),
    /// A piece of what the model thinks.
    Thought(&'a str),
    /// A piece of what it says.
    Word(&'a str),
}

/// A token of an answer.
pub(crate) struct GeneratedToken {
    pub(crate) id: u32,
    pub(crate) logprobs: Option<Logprobs>,
}

/// An answer, when it is complete.
pub(crate) struct Answer {
    pub(crate) words: String,
    pub(crate) thoughts: String,
    /// Tools that it calls. What was cut off is no call.
    pub(crate) calls: Vec<Call>,
    pub(crate) tokens: Vec<GeneratedToken>,
    pub(crate) reason: EndReason,
    pub(crate) usage: Usage,
}

impl Answer {
    /// Tokens of the prompt that were read in a second, and tokens written.
    pub(crate) fn rates(&self) -> [f64; 2] {
        let rate = |tokens: usize, time: Duration| match time.as_secs_f64() {
            seconds if seconds > 0.0 => tokens as f64 / seconds,
            _ => 0.0,
        };
        let usage = &self.usage;
        let read = usage.prompt_tokens.saturating_sub(usage.cached_tokens);
        // The first token is made by reading.
        [rate(read, usage.reading), rate(usage.generated_tokens.saturating_sub(1), usage.writing)]
    }
}

/// Has a request answered. Ctrl-C ends the answer early.
pub(crate) fn answer(
    scheduler: &Scheduler,
    request: Request,
    reader: Option<AnswerReader>,
    catch: &Catch,
    tell: &mut dyn FnMut(Piece<'_>),
) -> anyhow::Result<Answer> {
    let (to, from) = channel();
    let cancel = scheduler.submit(request, move |event| to.send(event).is_ok());
    let mut listener = Listener {
        reader: reader.unwrap_or_else(AnswerReader::plain),
        words: String::new(),
        thoughts: String::new(),
        calls: Vec::new(),
        tell,
    };
    let mut tokens = Vec::new();
    loop {
        if catch.happened() {
            cancel.cancel();
        }
        let event = match from.recv_timeout(Duration::from_millis(50)) {
            Ok(event) => event,
            Err(RecvTimeoutError::Timeout) => continue,
            Err(RecvTimeoutError::Disconnected) => Event::Failed(Error::Stopped),
        };
        match event {
            Event::Started { cached_tokens } => (listener.tell)(Piece::Read(cached_tokens)),
            Event::Read { tokens } => (listener.tell)(Piece::Read(tokens)),
            Event::Token { token, text, logprobs, .. } => {
                tokens.push(GeneratedToken { id: token, logprobs });
                listener.hear(&text);
            }
            Event::End { text, reason, usage, .. } => {
                listener.finish(&text, &reason);
                let Listener { words, thoughts, mut calls, .. } = listener;
                if matches!(reason, EndReason::Limit | EndReason::Context | EndReason::Cancelled) {
                    calls.clear();
                }
                return Ok(Answer { words, thoughts, calls, tokens, reason, usage });
            }
            Event::Failed(error) => return Err(error.into()),
        }
    }
}

/// What was heard of an answer so far.
struct Listener<'t> {
    reader: AnswerReader,
    words: String,
    thoughts: String,
    calls: Vec<Call>,
    tell: &'t mut dyn FnMut(Piece<'_>),
}

impl Listener<'_> {
    fn hear(&mut self, text: &str) {
        let events = self.reader.push(text);
        self.pass(events);
    }

    fn finish(&mut self, text: &str, reason: &EndReason) {
        let events = self.reader.end(text, reason);
        self.pass(events);
    }

    fn pass(&mut self, events: Vec<text::Event>) {
        for event in events {
            match event {
                text::Event::Content(text) => {
                    (self.tell)(Piece::Word(&text));
                    self.words.push_str(&text);
                }
                text::Event::Reasoning(text) => {
                    (self.tell)(Piece::Thought(&text));
                    self.thoughts.push_str(&text);
                }
                text::Event::CallStart { id, name, .. } => {
                    self.calls.push(Call { id: id.unwrap_or_default(), name, arguments: String::new() });
                }
                text::Event::CallArguments { index, text } => {
                    if let Some(call) = self.calls.get_mut(index) {
                        call.arguments += &text;
                    }
                }
                text::Event::CallEnd { .. } => {}
            }
        }
    }
}

/// Shows how far a prompt is read, from its beginning until it is read whole.
pub(crate) struct Reading {
    total: usize,
    bar: Option<indicatif::ProgressBar>,
}

impl Reading {
    /// For a prompt of this many tokens.
    pub(crate) fn new(total: usize) -> Reading {
        Reading { total, bar: None }
    }

    /// This many tokens are processed.
    pub(crate) fn read(&mut self, tokens: usize) {
        if tokens < self.total {
            let total = self.total as u64;
            self.bar.get_or_insert_with(|| crate::output::progress(total, "reading")).set_position(tokens as u64);
        } else if let Some(bar) = self.bar.take() {
            bar.finish_and_clear();
        }
    }
}

impl Drop for Reading {
    fn drop(&mut self) {
        self.bar.iter().for_each(indicatif::ProgressBar::finish_and_clear);
    }
}
