//! What is asked of a model: a prompt or a conversation, how tokens are chosen, when the answer ends, what it must look like.

use kiln_engine::run::{self, Constraint, LogitsHook, StopRule};
use kiln_engine::sampler::Sampling;
use kiln_engine::tokenizer::{AddSpecial, ParseSpecial};
use serde_json::Value;

use crate::Error;
use crate::chat::{AnswerReader, Conversation, Format, ToolChoice};
use crate::error::RequestError;
use crate::llm::Llm;
use crate::stream::{Answer, Stream};

/// What a model continues.
pub enum Prompt {
    /// A text, as it is. Spellings of control tokens become such.
    Text(String),
    /// Tokens.
    Tokens(Vec<u32>),
    /// A conversation, which the model's template makes a prompt of.
    Chat(Box<Conversation>),
}

impl From<&str> for Prompt {
    fn from(text: &str) -> Prompt {
        Prompt::Text(text.to_owned())
    }
}

impl From<String> for Prompt {
    fn from(text: String) -> Prompt {
        Prompt::Text(text)
    }
}

impl From<Vec<u32>> for Prompt {
    fn from(tokens: Vec<u32>) -> Prompt {
        Prompt::Tokens(tokens)
    }
}

impl From<Conversation> for Prompt {
    fn from(conversation: Conversation) -> Prompt {
        Prompt::Chat(Box::new(conversation))
    }
}

/// A request that is being put together; [`stream`](Request::stream), [`answer`](Request::answer) or [`text`](Request::text) send it.
///
/// Where nothing is said, tokens are chosen as the model's file recommends, else with the usual settings, and the answer ends where the
/// model ends it.
#[must_use = "a request is sent by `stream`, `answer` or `text`"]
pub struct Request {
    llm: Llm,
    prompt: Prompt,
    limit: Option<usize>,
    sampling: Sampling,
    stop: StopRule,
    format: Option<Format>,
    rule: Option<Box<dyn Constraint>>,
    hook: Option<LogitsHook>,
    logprobs: Option<usize>,
    tokens: bool,
    owner: u64,
    priority: i32,
    reuse: bool,
    scales: Option<Vec<f32>>,
}

impl Request {
    pub(crate) fn new(llm: Llm, prompt: Prompt) -> Request {
        let sampling = llm.chat_setup().sampling.clone();
        Request {
            llm,
            prompt,
            limit: None,
            sampling,
            stop: StopRule::default(),
            format: None,
            rule: None,
            hook: None,
            logprobs: None,
            tokens: false,
            owner: 0,
            priority: 0,
            reuse: true,
            scales: None,
        }
    }

    /// Tokens of the answer at most; without a number as many as the context holds.
    pub fn max_tokens(mut self, tokens: usize) -> Request {
        self.limit = Some(tokens);
        self
    }

    /// 0 takes the most likely token each time; higher ones are bolder.
    pub fn temperature(mut self, temperature: f32) -> Request {
        self.sampling.temperature = temperature;
        self
    }

    /// Keeps the most likely tokens up to this total probability.
    pub fn top_p(mut self, top_p: f32) -> Request {
        self.sampling.top_p = top_p;
        self
    }

    /// Keeps this many of the most likely tokens; 0 keeps all.
    pub fn top_k(mut self, top_k: i32) -> Request {
        self.sampling.top_k = top_k;
        self
    }

    /// Drops tokens less likely than this fraction of the top token's probability.
    pub fn min_p(mut self, min_p: f32) -> Request {
        self.sampling.min_p = min_p;
        self
    }

    /// The same seed draws the same answer.
    pub fn seed(mut self, seed: u64) -> Request {
        self.sampling.seed = Some(seed);
        self
    }

    /// Changes any of the settings of samplers.
    pub fn sampling(mut self, change: impl FnOnce(&mut Sampling)) -> Request {
        change(&mut self.sampling);
        self
    }

    /// Ends the answer before this text. May be called several times.
    pub fn stop(mut self, text: impl Into<String>) -> Request {
        self.stop.strings.push(text.into());
        self
    }

    /// Changes what ends the answer.
    pub fn stop_rule(mut self, change: impl FnOnce(&mut StopRule)) -> Request {
        change(&mut self.stop);
        self
    }

    /// What the answer must look like: JSON that fits a schema, a regular expression, a grammar, one of several texts.
    pub fn format(mut self, format: Format) -> Request {
        self.format = Some(format);
        self
    }

    /// JSON that fits a schema.
    pub fn json_schema(self, schema: Value) -> Request {
        self.format(Format::Schema(schema))
    }

    /// A rule of the caller's own, token by token, in place of a format.
    pub fn constraint(mut self, rule: Box<dyn Constraint>) -> Request {
        self.rule = Some(rule);
        self
    }

    /// A sampler of the caller's own. For each token it gets all tokens before it and the logits of the next one. It may change them, and
    /// the samplers go on from there, or return the token itself. It runs on the engine's thread: all requests wait for it.
    pub fn sampler(mut self, hook: impl FnMut(&[u32], &mut [f32]) -> Option<u32> + Send + 'static) -> Request {
        self.hook = Some(LogitsHook::new(hook));
        self
    }

    /// Reports each token with its logarithm of probability, and those of this many likeliest ones.
    pub fn logprobs(mut self, top: usize) -> Request {
        (self.logprobs, self.tokens) = (Some(top), true);
        self
    }

    /// Reports each token.
    pub fn tokens(mut self) -> Request {
        self.tokens = true;
        self
    }

    /// Whose request this is: owners take turns, and share the beginnings of their prompts with nobody else.
    pub fn owner(mut self, owner: u64) -> Request {
        self.owner = owner;
        self
    }

    /// Requests of higher priority are begun first.
    pub fn priority(mut self, priority: i32) -> Request {
        self.priority = priority;
        self
    }

    /// Whether the beginning of the prompt may come from the prefix cache.
    pub fn reuse(mut self, reuse: bool) -> Request {
        self.reuse = reuse;
        self
    }

    /// How strongly each adapter counts, in the order in which they were put on the model.
    pub fn adapter_scales(mut self, scales: Vec<f32>) -> Request {
        self.scales = Some(scales);
        self
    }

    /// Tools that the model may call, as OpenAI's API has them: `{"type": "function", "function": {...}}`. Of a chat.
    pub fn tools(self, tools: Vec<Value>) -> Request {
        self.conversation(|conversation| conversation.tools = tools)
    }

    /// Which tools may or must be called. Of a chat.
    pub fn tool_choice(self, choice: ToolChoice) -> Request {
        self.conversation(|conversation| conversation.tool_choice = choice)
    }

    /// Changes the conversation. Nothing happens where there is none.
    pub fn conversation(mut self, change: impl FnOnce(&mut Conversation)) -> Request {
        if let Prompt::Chat(conversation) = &mut self.prompt {
            change(conversation);
        }
        self
    }

    /// Sends the request and gives the answer piece by piece. Dropping the stream ends the request.
    pub fn stream(self) -> Result<Stream, Error> {
        let Request { llm, prompt, limit, sampling, mut stop, format, rule, hook, logprobs, .. } = self;
        let (setup, model) = (llm.chat_setup(), llm.model());
        sampling.check(model.config.vocab).map_err(kiln_engine::Error::from)?;
        let chat = matches!(prompt, Prompt::Chat(_));
        let (tokens, reader, constraint, show_special) = match prompt {
            Prompt::Chat(mut conversation) => {
                if conversation.messages.is_empty() {
                    return Err(RequestError::NoMessages.into());
                }
                conversation.format = format.or(conversation.format.take());
                let rendered = setup.render(&conversation)?;
                let mut form = setup.form(&conversation, &rendered, rule)?;
                let tokens = rendered.encode(&model.tokenizer).map_err(kiln_engine::Error::from)?;
                (tokens, form.reader(&setup.ends), form.constraint.take(), form.show_special)
            }
            other => {
                let tokens = match other {
                    Prompt::Tokens(tokens) => tokens,
                    Prompt::Text(text) => llm.tokenize_with(&text, AddSpecial::Yes, ParseSpecial::Yes)?,
                    Prompt::Chat(_) => Vec::new(),
                };
                let constraint = match (rule, format) {
                    (Some(rule), _) => Some(rule),
                    (None, Some(format)) => Some(setup.constraint(&format)?),
                    (None, None) => None,
                };
                (tokens, AnswerReader::plain(), constraint, false)
            }
        };
        if chat {
            stop.tokens.extend(&setup.ends);
        }
        // One token is drawn whenever a prompt is read; where none was asked for it is not told.
        let silent = limit == Some(0);
        let request = run::Request {
            limit: limit.map(|limit| limit.max(1)),
            sampling,
            stop,
            logprobs,
            constraint,
            hook,
            owner: self.owner,
            priority: self.priority,
            reuse: self.reuse,
            scales: self.scales,
            show_special,
            ..run::Request::new(tokens)
        };
        Ok(Stream::start(llm, request, reader, self.tokens, silent))
    }

    /// Sends the request and waits for the whole answer.
    pub fn answer(self) -> Result<Answer, Error> {
        self.stream()?.collect_answer()
    }

    /// Sends the request and waits for the text of the answer.
    pub fn text(self) -> Result<String, Error> {
        Ok(self.answer()?.text)
    }
}
