//! `kiln chat`: a conversation at the terminal, or through a pipe with one turn a line.

mod input;
mod markdown;
mod slash;
mod thoughts;

use std::path::PathBuf;
use std::process::ExitCode;
use std::sync::Arc;

use anyhow::bail;
use kiln_engine::model::Model;
use kiln_engine::run::{EndReason, First, Scheduler};
use kiln_engine::sampler::Sampling;
use kiln_engine::text::{Message, Template};
use kiln_system::interrupt::Catch;

use self::input::{Input, Turn, with_files};
use self::markdown::Markdown;
use self::slash::Next;
use self::thoughts::Thoughts;
use super::run::{as_json, interrupted};
use super::sampling_flags::SamplingFlags;
use crate::model::{ModelFlags, resolve};
use crate::output::{has_style, is_watched, print, print_piece, print_styled, say};
use crate::speaker::{Answer, Piece, Prompt, Reading, answer, chat_prompt, name, template, turn_ends};

/// Flags of `kiln chat`.
#[derive(clap::Args)]
#[command(after_help = "Examples:
  kiln chat                                        # the default model
  kiln chat smollm2 --system \"Answer in one sentence.\"
  printf 'Hello\\nAnd in French?\\n' | kiln chat smollm2  # one turn a line

Inside, /help lists the commands. A text of several lines stands between \"\"\", or has a backslash at the end of \
each line; @path puts a file in; Ctrl-C stops an answer; Ctrl-D ends the conversation.")]
pub(crate) struct Arguments {
    /// GGUF file or a name, as `kiln pull` takes them; without one SmolLM2-135M-Instruct from the local store, fetched at first use
    model: Option<PathBuf>,
    /// What the model should be and do
    #[arg(long, alias = "system-prompt", value_name = "TEXT")]
    system: Option<String>,
    /// Ask the model not to think before it answers, if it can be asked
    #[arg(long)]
    no_think: bool,
    /// Print each answer as one line of JSON: text, tokens, counts and times, as `kiln run --json` does
    #[arg(long)]
    json: bool,
    #[command(flatten)]
    sampling: SamplingFlags,
    #[command(flatten)]
    flags: ModelFlags,
}

/// Tokens of a first turn, more or less: its kernels are made while weights are loaded.
const USUAL_PROMPT: usize = 32;

/// A model that is ready to talk.
struct Loaded {
    model: Arc<Model>,
    template: Template,
    ends: Vec<u32>,
    scheduler: Scheduler,
}

impl Loaded {
    fn open(path: Option<&std::path::Path>, flags: &ModelFlags) -> anyhow::Result<Loaded> {
        let path = resolve(path)?;
        flags.open_early();
        let model = flags.open(&path)?;
        let Some(template) = template(&model)? else {
            bail!("{} has no chat template: it continues texts\nhint: kiln run MODEL PROMPT", name(&model));
        };
        let ends = turn_ends(&model, Some(&template))?;
        let first = First { prompt: USUAL_PROMPT, cuts: true, goes_on: true };
        let scheduler = flags.scheduler(&model, 1, Some(first))?;
        Ok(Loaded { model, template, ends, scheduler })
    }
}

/// A conversation.
struct Chat<'a> {
    arguments: &'a Arguments,
    loaded: Loaded,
    sampling: Sampling,
    limit: Option<usize>,
    think: bool,
    system: Option<String>,
    /// Turns of both sides.
    messages: Vec<Message>,
    /// Messages at the beginning that the context has no room for any more.
    left_out: usize,
    last: Option<Answer>,
    input: Input,
}

/// Runs the command.
pub(crate) fn run(arguments: &Arguments) -> anyhow::Result<ExitCode> {
    let loaded = Loaded::open(arguments.model.as_deref(), &arguments.flags)?;
    // Both before anything is typed: what is wrong with a flag should not come to light with the first answer.
    let sampling = arguments.sampling.sampling(&loaded.model)?;
    arguments.sampling.constraint(&loaded.model, &loaded.ends)?;
    let input = Input::new()?;
    if is_watched() {
        say(&format!("{} on {}", name(&loaded.model), loaded.scheduler.describe()));
    }
    if input.is_terminal() {
        say("/help lists the commands, Ctrl-C stops an answer, Ctrl-D ends the conversation");
    }
    let mut chat = Chat {
        arguments,
        loaded,
        sampling,
        limit: arguments.sampling.limit(),
        think: !arguments.no_think,
        system: arguments.system.clone(),
        messages: Vec::new(),
        left_out: 0,
        last: None,
        input,
    };
    chat.talk()
}

impl Chat<'_> {
    fn talk(&mut self) -> anyhow::Result<ExitCode> {
        let mut initial = String::new();
        loop {
            let line = match self.input.turn(&std::mem::take(&mut initial))? {
                Turn::End => return Ok(ExitCode::SUCCESS),
                Turn::Interrupted => {
                    say("(Ctrl-D or /quit ends the conversation)");
                    continue;
                }
                Turn::Text(line) if line.trim().is_empty() => continue,
                Turn::Text(line) => line,
            };
            let done = match line.strip_prefix('/') {
                Some(command) => self.command(command),
                None => self.say_to_model(&line).map(|()| Next::Go),
            };
            match done {
                Ok(Next::Go) => {}
                Ok(Next::Edit(text)) => initial = text,
                Ok(Next::Quit) => return Ok(ExitCode::SUCCESS),
                // A person can say it in another way; a pipe cannot.
                Err(why) if self.input.is_terminal() => say(&format!("error: {why:#}")),
                Err(why) => return Err(why),
            }
        }
    }

    /// One turn of the user and its answer.
    fn say_to_model(&mut self, line: &str) -> anyhow::Result<()> {
        let (text, files) = with_files(line)?;
        if !files.is_empty() && is_watched() {
            say(&format!("with {}", files.join(", ")));
        }
        let (messages, left_out) = (self.messages.len(), self.left_out);
        self.messages.push(Message::new("user", text));
        let answered = self.answer();
        if answered.is_err() {
            self.messages.truncate(messages);
            self.left_out = left_out;
        }
        answered
    }

    /// Has the last message answered.
    fn answer(&mut self) -> anyhow::Result<()> {
        let prompt = self.fit()?;
        let mut request = self.arguments.sampling.request(prompt.tokens, self.sampling.clone(), &self.loaded.ends);
        request.limit = self.limit;
        request.show_special = prompt.show_special;
        request.constraint = self.arguments.sampling.constraint(&self.loaded.model, &self.loaded.ends)?;
        let mut reading = Reading::new(request.prompt.len());
        let quiet = self.arguments.json;
        let mut thoughts = Thoughts::new(self.input.size().filter(|_| !quiet));
        let mut markdown = has_style().then(Markdown::new);
        let catch = Catch::new();
        let show = |pieces: Vec<markdown::Styled>| pieces.iter().for_each(|(text, style)| print_styled(text, style));
        let answered =
            answer(&self.loaded.scheduler, request, Some(prompt.parser), &catch, &mut |piece| match piece {
                Piece::Read(tokens) => reading.read(tokens),
                Piece::Word(_) if quiet => {}
                Piece::Thought(text) => thoughts.show(text),
                Piece::Word(text) => {
                    thoughts.fold();
                    match &mut markdown {
                        Some(markdown) => show(markdown.push(text)),
                        None => print_piece(text),
                    }
                }
            })?;
        thoughts.fold();
        markdown.iter_mut().for_each(|markdown| show(markdown.finish()));
        match quiet {
            true => print(&serde_json::to_string(&as_json(&self.loaded.scheduler, &answered)?)?),
            false if !answered.words.ends_with('\n') => print_piece("\n"),
            false => {}
        }
        drop(catch);
        if answered.reason == EndReason::Cancelled && !self.input.is_terminal() {
            // Nobody is there to go on.
            return Err(interrupted().into());
        }
        let mut message = Message::new("assistant", answered.words.as_str());
        message.reasoning_content = Some(answered.thoughts.clone()).filter(|text| !text.is_empty());
        self.messages.push(message);
        self.after(answered);
        Ok(())
    }

    /// What there is to say after an answer.
    fn after(&mut self, answer: Answer) {
        match answer.reason {
            EndReason::Cancelled => say("note: the answer was stopped; /retry asks again"),
            EndReason::Context => {
                let context = self.loaded.scheduler.context();
                say(&format!(
                    "note: the answer is cut off: the context of {context} tokens is full\nhint: --ctx-size makes room for more"
                ));
            }
            _ => {}
        }
        if is_watched() {
            let [reading, writing] = answer.rates();
            let usage = &answer.usage;
            let read = usage.prompt_tokens - usage.cached_tokens.min(usage.prompt_tokens);
            say(&format!(
                "[{} tokens at {writing:.1}/s; read {read} at {reading:.1}/s; context {}]",
                usage.generated_tokens,
                self.context_used(&answer),
            ));
        }
        self.last = Some(answer);
    }

    fn context_used(&self, answer: &Answer) -> String {
        let used = answer.usage.prompt_tokens + answer.usage.generated_tokens;
        match self.loaded.scheduler.context() {
            usize::MAX => format!("{used} tokens"),
            context => format!("{used} of {context}"),
        }
    }

    fn prompt(&self) -> anyhow::Result<Prompt> {
        let system = self.system.as_ref().map(|text| Message::new("system", text.as_str()));
        let messages: Vec<Message> = system.into_iter().chain(self.messages[self.left_out..].iter().cloned()).collect();
        let rule = self.arguments.sampling.has_rule();
        chat_prompt(&self.loaded.model, &self.loaded.template, &messages, self.think, rule)
    }

    /// The prompt of the conversation. Where it outgrows the context the oldest turns are left out, never the system's
    /// message nor the last one of the user, and that is said.
    fn fit(&mut self) -> anyhow::Result<Prompt> {
        let context = self.loaded.scheduler.context();
        // Room for an answer worth the name.
        let most = context - (context / 4).min(256);
        let before = self.left_out;
        let mut prompt = self.prompt()?;
        while prompt.tokens.len() > most && self.left_out + 1 < self.messages.len() {
            let rest = &self.messages[self.left_out + 1..];
            // A turn is a message of the user with all that was said to it.
            let next = rest.iter().position(|message| message.role == "user").unwrap_or(rest.len() - 1);
            self.left_out += next + 1;
            prompt = self.prompt()?;
        }
        if self.left_out > before {
            let dropped = self.left_out - before;
            let first = kiln_system::text::shown_within(&self.messages[before].content.to_text(), 40);
            say(&format!(
                "note: the conversation has outgrown the context of {context} tokens: the model no longer sees the oldest {} messages \
                 ({dropped} more than before, from {first:?} on)\nhint: --ctx-size makes room for more, /clear begins anew",
                self.left_out,
            ));
        }
        if prompt.tokens.len() > context {
            self.left_out = before;
            bail!(
                "the message has {} tokens with what must go with it, the context holds {context}\nhint: shorten it, or raise --ctx-size",
                prompt.tokens.len(),
            );
        }
        Ok(prompt)
    }
}
