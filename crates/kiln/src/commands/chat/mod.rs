//! `kiln chat`: a conversation at the terminal, or through a pipe with one turn a line.

mod files;
mod input;
mod markdown;
mod media;
mod saved;
mod settings;
mod slash;
mod thoughts;
mod tools;

use std::path::PathBuf;
use std::process::ExitCode;
use std::sync::Arc;

use anyhow::bail;
use kiln_engine::model::Model;
use kiln_engine::run::{EndReason, First, Scheduler};
use kiln_engine::sampler::Sampling;
use kiln_engine::text::{Content, Message};
use kiln_llm::chat::ChatSetup;
use kiln_system::interrupt::Catch;
use kiln_system::terminal::Quiet;
use kiln_system::text::{shown, shown_within};
use kiln_tools::Answered;

use self::files::with_files;
use self::input::{Input, Turn};
use self::markdown::Markdown;
use self::media::{Asked, Attached, Gallery, SenseFlags, Senses};
use self::slash::{Next, Typed, unknown};
use self::thoughts::Thoughts;
use self::tools::Tools;
use super::run::{as_json, interrupted};
use super::sampling_flags::SamplingFlags;
use super::talk_flags::TalkFlags;
use crate::cache_flags::CacheFlags;
use crate::draft_flags::DraftFlags;
use crate::generate::{Answer, Piece, Reading, Talk, Thinking, answer, chat_prompt, name};
use crate::model::{ModelFlags, OneSequence, resolve};
use crate::output::{has_style, is_watched, print, print_piece, print_styled, say};
use crate::tool_flags::ToolFlags;

/// Flags of `kiln chat`.
#[derive(clap::Args)]
#[command(after_help = "Examples:
  kiln chat                                        # the default model
  kiln chat smollm2 --system \"Answer in one sentence.\"
  printf 'Hello\\nAnd in French?\\n' | kiln chat smollm2  # one turn a line
  kiln chat smolvlm.gguf --mmproj mm.gguf          # @photo.jpg is a picture
  kiln chat qwen.gguf --tool-calculator --mcp tools.json # tools of MCP servers

In the chat, /help lists the commands. Put a message of several lines between \"\"\", or end each line with a backslash. \
@path attaches a text file, @path:1-200 these lines of it, and with --mmproj a picture or a sound. Before a tool of an MCP server is called you are asked. What you type during an answer is kept for the next message. Ctrl-C stops an answer, Ctrl-D ends the \
conversation.")]
pub(crate) struct Arguments {
    /// Model: a GGUF file or a name as in `kiln pull`; SmolLM2-135M-Instruct if omitted, downloaded on first use
    model: Option<PathBuf>,
    #[command(flatten)]
    talk: TalkFlags,
    #[command(flatten)]
    senses: SenseFlags,
    /// Print each answer as one line of JSON, with the fields of `kiln run --json`
    #[arg(long)]
    json: bool,
    #[command(flatten)]
    tools: ToolFlags,
    #[command(flatten)]
    sampling: SamplingFlags,
    #[command(flatten)]
    flags: ModelFlags,
    #[command(flatten)]
    draft: DraftFlags,
    #[command(flatten)]
    cache: CacheFlags,
}

/// Tokens of a first turn, more or less: its kernels are made while weights are loaded.
const USUAL_PROMPT: usize = 32;

/// A model that is ready to talk.
struct Loaded {
    model: Arc<Model>,
    setup: ChatSetup,
    scheduler: Scheduler,
    /// What it sees and hears by.
    senses: Option<Senses>,
}

impl Loaded {
    /// Opens a model. Encoders belong to one: another model that is talked to later sees and hears nothing.
    fn open(path: Option<&std::path::Path>, arguments: &Arguments, is_first: bool) -> anyhow::Result<Loaded> {
        let (flags, path) = (&arguments.flags, resolve(path)?);
        flags.open_early();
        let model = flags.open(&path)?;
        let setup = arguments.talk.setup(&model)?;
        if setup.template.is_err() {
            bail!(
                "{} has no chat template\nhint: --chat-template names one, such as chatml; `kiln run MODEL PROMPT` continues a text",
                name(&model)
            );
        }
        let first = First::Text { prompt: USUAL_PROMPT, cuts: true, goes_on: true };
        let drafting = arguments.draft.open(&model)?;
        let senses = match arguments.senses.open(&model, flags) {
            Err(why) if !is_first => {
                say(&format!("note: no pictures are shown and no sounds played from here on: {why:#}"));
                None
            }
            senses => senses?,
        };
        let scheduler =
            flags.scheduler(&model, OneSequence { spare: 1, first: Some(first), expected: None, drafting })?;
        arguments.cache.apply_to(&scheduler)?;
        Ok(Loaded { model, setup, scheduler, senses })
    }
}

/// Where a message came from.
#[derive(Clone, Copy, PartialEq, Eq)]
enum Source {
    /// A typed line, or a line of a pipe.
    Line,
    /// Between three quotes: words behind an `@` may be of a program.
    Quotes,
    /// Pasted: nothing in it has a meaning here.
    Paste,
}

/// A conversation.
struct Chat<'a> {
    arguments: &'a Arguments,
    loaded: Loaded,
    sampling: Sampling,
    limit: Option<usize>,
    thinking: Thinking,
    system: Option<String>,
    /// Turns of both sides.
    messages: Vec<Message>,
    /// Messages at the beginning that the context has no room for any more.
    left_out: usize,
    last: Option<Answer>,
    input: Input,
    gallery: Gallery,
    tools: Option<Tools>,
}

/// Runs the command.
pub(crate) fn run(arguments: &Arguments) -> anyhow::Result<ExitCode> {
    let (input, system, first) = (Input::new()?, arguments.talk.system()?, arguments.senses.first()?);
    let toolbox = arguments.tools.toolbox()?;
    // What is typed while the model is loaded is kept for the first prompt.
    let quiet = input.is_terminal().then(Quiet::begin).flatten();
    let loaded = Loaded::open(arguments.model.as_deref(), arguments, true)?;
    drop(quiet);
    // Both before anything is typed: what is wrong with a flag should not come to light with the first answer.
    let sampling = arguments.sampling.sampling(&loaded.model, &loaded.setup)?;
    arguments.sampling.constraint(&loaded.setup)?;
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
        thinking: arguments.talk.thinking(),
        system,
        messages: Vec::new(),
        left_out: 0,
        last: None,
        input,
        gallery: Gallery::new(first),
        tools: toolbox.map(Tools::new),
    };
    chat.talk()
}

impl Chat<'_> {
    fn talk(&mut self) -> anyhow::Result<ExitCode> {
        let (mut initial, mut code) = (String::new(), ExitCode::SUCCESS);
        loop {
            let done = match self.input.turn(&std::mem::take(&mut initial))? {
                Turn::End => return Ok(code),
                Turn::Interrupted => {
                    say("(Ctrl-D or /quit ends the conversation)");
                    continue;
                }
                Turn::Line(text) | Turn::Quoted(text) | Turn::Pasted(text) if text.trim().is_empty() => continue,
                Turn::Pasted(text) => self.say_to_model(&text, Source::Paste).map(|()| Next::Go),
                Turn::Quoted(text) => self.say_to_model(&text, Source::Quotes).map(|()| Next::Go),
                Turn::Line(line) => match Typed::of(&line) {
                    Typed::Command(command, rest) => self.command(command, rest),
                    Typed::Message(text) => self.say_to_model(text, Source::Line).map(|()| Next::Go),
                    // Nothing was done, so that what comes next can be.
                    Typed::Unknown(word) => {
                        say(&format!("error: {:#}", unknown(word)));
                        code = if self.input.is_terminal() { code } else { ExitCode::from(1) };
                        Ok(Next::Go)
                    }
                },
            };
            match done {
                Ok(Next::Go) => {}
                Ok(Next::Edit(text)) => initial = text,
                Ok(Next::Quit) => return Ok(code),
                // A person can say it in another way; a pipe cannot.
                Err(why) if self.input.is_terminal() => say(&format!("error: {why:#}")),
                Err(why) => return Err(why),
            }
        }
    }

    /// One turn of the user and its answer.
    fn say_to_model(&mut self, message: &str, source: Source) -> anyhow::Result<()> {
        let (text, media) = self.attached(message, source)?;
        let (messages, left_out) = (self.messages.len(), self.left_out);
        self.gallery.wait(media);
        let text = self.gallery.hang(messages, &text);
        self.messages.push(Message::new("user", text));
        let answered = self.answer();
        if answered.is_err() {
            self.messages.truncate(messages);
            self.gallery.take_back(messages);
            self.left_out = left_out;
        }
        answered
    }

    /// A message with the files that it names, and its pictures and sounds. A name without a file is told: the model would make up what is in it.
    fn attached(&self, message: &str, source: Source) -> anyhow::Result<(String, Vec<Attached>)> {
        if source == Source::Paste {
            return Ok((message.to_owned(), Vec::new()));
        }
        let found = with_files(message)?;
        for missing in &found.missing {
            let name = shown(&missing.name);
            if missing.surely && source == Source::Line {
                bail!("there is no file {name}\nhint: write \\@{name} to send the word as it is");
            }
            say(&format!("note: there is no file {name}: @{name} is sent as it is"));
        }
        if !found.names.is_empty() && is_watched() {
            say(&format!("with {}", found.names.join(", ")));
        }
        found.media.iter().try_for_each(|one| self.needs_encoder(one.medium, &one.name))?;
        Ok((found.text, found.media))
    }

    /// Lets the model answer once; it may call tools, if there are some, unless it has called enough.
    fn one_answer(&mut self, no_calls: bool) -> anyhow::Result<Answered> {
        let (prompt, joined) = self.fit(no_calls)?.join(self.loaded.senses.as_mut())?;
        let sampling = &self.arguments.sampling;
        let mut request = sampling.request(joined.tokens, self.sampling.clone(), &self.loaded.setup.ends);
        request.spans = joined.spans;
        request.limit = self.limit;
        request.show_special = prompt.show_special;
        request.constraint = self.arguments.sampling.constraint(&self.loaded.setup)?.or(prompt.constraint);
        let mut reading = Reading::new(request.prompt.len());
        let quiet = self.arguments.json;
        let mut thoughts = Thoughts::new(self.input.size().filter(|_| !quiet));
        let mut markdown = has_style().then(Markdown::new);
        let catch = Catch::new();
        // What is typed meanwhile is not echoed into the answer, and is the next message.
        let typing = self.input.is_terminal().then(Quiet::begin).flatten();
        let show = |pieces: Vec<markdown::Styled>| pieces.iter().for_each(|(text, style)| print_styled(text, style));
        let mut answered =
            answer(&self.loaded.scheduler, request, Some(prompt.reader), &catch, &mut |piece| match piece {
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
            false if answered.words.is_empty() && !answered.calls.is_empty() => {}
            false if !answered.words.ends_with('\n') => print_piece("\n"),
            false => {}
        }
        drop((catch, typing));
        let is_last = answered.reason == EndReason::Cancelled;
        if is_last && !self.input.is_terminal() {
            // Input has ended.
            return Err(interrupted().into());
        }
        let mut message = Message::new("assistant", answered.words.as_str());
        message.reasoning_content = Some(answered.thoughts.clone()).filter(|text| !text.is_empty());
        message.tool_calls = self.named(&mut answered.calls);
        if answered.words.is_empty() && !message.tool_calls.is_empty() {
            message.content = Content::None;
        }
        self.messages.push(message);
        let calls = answered.calls.clone();
        self.after(answered);
        Ok(Answered { calls, is_last })
    }

    /// What there is to say after an answer.
    fn after(&mut self, answer: Answer) {
        match answer.reason {
            EndReason::Cancelled => say("note: the answer was stopped; /retry asks again"),
            EndReason::Context => {
                let context = self.loaded.scheduler.context();
                say(&format!(
                    "note: the answer is cut off: the context of {context} tokens is full\nhint: --ctx-size sets a larger context"
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
            // The last token is never fed: it needs no place.
            context => format!("{} of {context}", used.min(context)),
        }
    }

    fn prompt(&self, no_calls: bool) -> anyhow::Result<Asked> {
        let system = self.system.as_ref().map(|text| Message::new("system", text.as_str()));
        let messages: Vec<Message> = system.into_iter().chain(self.messages[self.left_out..].iter().cloned()).collect();
        let talk = Talk {
            messages: &messages,
            thinking: self.thinking,
            has_rule: self.arguments.sampling.has_rule(),
            between: self.gallery.between(self.left_out),
            tools: &self.tools.as_ref().map(Tools::schemas).unwrap_or_default(),
            no_calls,
        };
        let prompt = chat_prompt(&self.loaded.model, &self.loaded.setup, talk)?;
        self.arranged(prompt)
    }

    /// The prompt of the conversation. Where it outgrows the context the oldest turns are left out, never the system's
    /// message nor the last one of the user, and that is said.
    fn fit(&mut self, no_calls: bool) -> anyhow::Result<Asked> {
        let context = self.loaded.scheduler.context();
        // Room for an answer worth the name.
        let most = context - (context / 4).min(256);
        let before = self.left_out;
        let mut prompt = self.prompt(no_calls)?;
        // Behind the user's last message stand calls and what they gave; all of it belongs to the turn.
        let last = self.messages.iter().rposition(|message| message.role == "user").unwrap_or(0);
        while prompt.length() > most && self.left_out < last {
            let rest = &self.messages[self.left_out + 1..];
            // A turn is a message of the user with all that was said to it.
            let next = rest.iter().position(|message| message.role == "user").unwrap_or(rest.len() - 1);
            self.left_out += next + 1;
            prompt = self.prompt(no_calls)?;
        }
        if prompt.length() > context {
            self.left_out = before;
            bail!(
                "the message and the system prompt, with tools and what they gave, have {} tokens, the context holds {context}\nhint: shorten the message (@file:1-200 attaches these lines alone), or raise --ctx-size",
                prompt.length(),
            );
        }
        if self.left_out > before {
            let dropped = self.left_out - before;
            let first = shown_within(&self.gallery.words(&self.messages[before]), 40);
            say(&format!(
                "note: the conversation is longer than the context of {context} tokens: the model no longer sees the oldest {} messages \
                 ({dropped} more than before, from \"{first}\" on)\nhint: --ctx-size sets a larger context, /clear starts over",
                self.left_out,
            ));
        }
        Ok(prompt)
    }
}
