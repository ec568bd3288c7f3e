//! One file for each API: each translates its own words into the one request and out of the one stream of parts.

pub(crate) mod anthropic;
pub(crate) mod chat_completions;
pub(crate) mod completion;
pub(crate) mod completions;
pub(crate) mod conversations;
pub(crate) mod embeddings;
pub(crate) mod engine;
pub(crate) mod health;
pub(crate) mod infill;
pub(crate) mod llama;
pub(crate) mod lora;
pub(crate) mod models;
pub(crate) mod ollama;
pub(crate) mod ollama_store;
pub(crate) mod openapi;
pub(crate) mod page;
pub(crate) mod response_items;
pub(crate) mod response_tools;
pub(crate) mod responses;
pub(crate) mod stored_responses;
pub(crate) mod tokens;
pub(crate) mod tools;

use std::time::Instant;

use kiln_engine::run::Usage;
use kiln_engine::tokenizer::Tokenizer;
use serde_json::{Value, json};

use crate::generate::{Answer, Stop, Token};

/// Counts over all texts of a generation.
#[derive(Clone, Debug, Default)]
pub(crate) struct Totals {
    pub(crate) prompt: usize,
    pub(crate) cached: usize,
    pub(crate) generated: usize,
    pub(crate) reasoning: usize,
    /// Tokens of the client's prediction that were tried, and those that were right.
    predicted: usize,
    accepted_predicted: usize,
    last: Usage,
}

impl Totals {
    /// Adds a text. Texts of one prompt count it once.
    pub(crate) fn add(&mut self, choice: usize, choices: usize, usage: &Usage, reasoning_tokens: usize) {
        if choice.is_multiple_of(choices.max(1)) {
            self.prompt += usage.prompt_tokens;
            self.cached += usage.cached_tokens;
        }
        self.generated += usage.generated_tokens;
        self.reasoning += reasoning_tokens;
        self.predicted += usage.predicted_tokens;
        self.accepted_predicted += usage.accepted_predicted_tokens;
        self.last = *usage;
    }

    pub(crate) fn of(answers: &[Answer], choices: usize) -> Totals {
        let mut totals = Totals::default();
        for (choice, answer) in answers.iter().enumerate() {
            totals.add(choice, choices, &answer.usage, answer.reasoning_tokens);
        }
        totals
    }

    /// `usage` of the chat and completions APIs.
    pub(crate) fn openai(&self) -> Value {
        let mut usage = json!({
            "prompt_tokens": self.prompt,
            "completion_tokens": self.generated,
            "total_tokens": self.prompt + self.generated,
            "prompt_tokens_details": {"cached_tokens": self.cached},
            "completion_tokens_details": {"reasoning_tokens": self.reasoning},
        });
        if self.predicted > 0 {
            let details = &mut usage["completion_tokens_details"];
            details["accepted_prediction_tokens"] = self.accepted_predicted.into();
            details["rejected_prediction_tokens"] = (self.predicted - self.accepted_predicted).into();
        }
        usage
    }

    /// llama.cpp's times of the last text.
    pub(crate) fn timings(&self) -> Value {
        let (usage, ms) = (&self.last, |d: std::time::Duration| d.as_secs_f64() * 1e3);
        let read = usage.prompt_tokens.saturating_sub(usage.cached_tokens);
        let rate = |n: usize, d: std::time::Duration| if d.is_zero() { 0.0 } else { n as f64 / d.as_secs_f64() };
        let mut timings = json!({
            "cache_n": usage.cached_tokens,
            "prompt_n": read,
            "prompt_ms": ms(usage.reading),
            "prompt_per_second": rate(read, usage.reading),
            "predicted_n": usage.generated_tokens,
            "predicted_ms": ms(usage.writing),
            "predicted_per_second": rate(usage.generated_tokens.saturating_sub(1), usage.writing),
        });
        if usage.drafted_tokens > 0 {
            timings["draft_n"] = usage.drafted_tokens.into();
            timings["draft_n_accepted"] = usage.accepted_tokens.into();
        }
        timings
    }
}

/// How far a text is while it is written, in llama-server's words.
#[derive(Debug)]
pub(crate) struct Pace {
    prompt: usize,
    cached: usize,
    read: usize,
    written: usize,
    began: Instant,
    /// When the prompt had been read.
    first: Option<Instant>,
}

impl Pace {
    /// A prompt of this many tokens.
    pub(crate) fn new(prompt: usize) -> Pace {
        Pace { prompt, cached: 0, read: 0, written: 0, began: Instant::now(), first: None }
    }

    pub(crate) fn read(&mut self, cached: usize, read: usize) {
        (self.cached, self.read) = (cached, read);
    }

    pub(crate) fn write(&mut self, tokens: usize) {
        self.first.get_or_insert_with(Instant::now);
        self.written += tokens;
    }

    pub(crate) fn written(&self) -> usize {
        self.written
    }

    /// `usage` of a running generation.
    pub(crate) fn usage(&self) -> Value {
        let (prompt, cached, generated) = (self.prompt, self.cached, self.written);
        Totals { prompt, cached, generated, ..Totals::default() }.openai()
    }

    /// `timings` of a running generation.
    pub(crate) fn timings(&self) -> Value {
        let first = self.first.unwrap_or_else(Instant::now);
        let usage = Usage {
            prompt_tokens: self.prompt,
            cached_tokens: self.cached,
            generated_tokens: self.written,
            reading: first - self.began,
            writing: first.elapsed(),
            ..Usage::default()
        };
        Totals { last: usage, ..Totals::default() }.timings()
    }

    /// `prompt_progress`.
    pub(crate) fn progress(&self) -> Value {
        let time = u64::try_from(self.began.elapsed().as_millis()).unwrap_or(u64::MAX);
        json!({"total": self.prompt, "cache": self.cached, "processed": self.read, "time_ms": time})
    }
}

/// JSON has no infinity.
fn finite(logprob: f32) -> f32 {
    logprob.max(-9999.0)
}

/// A token as text; bytes that are no text become U+FFFD.
pub(crate) fn token_text(tokenizer: &Tokenizer, id: u32) -> String {
    tokenizer.piece(id).map(|bytes| String::from_utf8_lossy(bytes).into_owned()).unwrap_or_default()
}

fn logprob_entry(tokenizer: &Tokenizer, id: u32, logprob: f32) -> Value {
    let bytes = tokenizer.piece(id).unwrap_or_default();
    json!({"token": String::from_utf8_lossy(bytes), "bytes": bytes, "logprob": finite(logprob)})
}

/// `logprobs` of the chat API; null where none were asked for.
pub(crate) fn chat_logprobs(tokenizer: &Tokenizer, tokens: &[Token]) -> Value {
    let entries: Vec<Value> = tokens
        .iter()
        .filter_map(|token| {
            let found = token.logprobs.as_ref()?;
            let mut entry = logprob_entry(tokenizer, token.id, found.logprob);
            let top = found.top.iter().map(|(id, logprob)| logprob_entry(tokenizer, *id, *logprob));
            entry["top_logprobs"] = top.collect();
            Some(entry)
        })
        .collect();
    if entries.is_empty() { Value::Null } else { json!({"content": entries, "refusal": null}) }
}

/// `finish_reason` of OpenAI's APIs.
pub(crate) fn finish_reason(stop: &Stop, called: bool) -> &'static str {
    match stop {
        Stop::Limit | Stop::Context => "length",
        Stop::End | Stop::Text(_) | Stop::Token(_) | Stop::Cancelled if called => "tool_calls",
        Stop::End | Stop::Text(_) | Stop::Token(_) | Stop::Cancelled => "stop",
    }
}

/// vLLM's `stop_reason`: the text or token that ended the answer.
pub(crate) fn stop_reason(stop: &Stop) -> Value {
    match stop {
        Stop::Text(text) => json!(text),
        Stop::Token(token) => json!(token),
        Stop::End | Stop::Limit | Stop::Context | Stop::Cancelled => Value::Null,
    }
}
