//! `kiln run`: a prompt in, the answer out as it is made.

use std::io::{IsTerminal as _, Write as _};
use std::path::{Path, PathBuf};
use std::process::ExitCode;
use std::sync::Arc;

use anyhow::bail;
use kiln_engine::media::Joined;
use kiln_engine::model::Model;
use kiln_engine::run::{Constraint, EndReason, Engine, Entry, First, Request, Scheduler, SequenceId, Usage, Wanted};
use kiln_engine::sampler::Sampling;
use kiln_engine::text::Message;
use kiln_engine::tokenizer::{AddSpecial, ParseSpecial};
use kiln_engine::{Error, state};
use kiln_llm::chat::{AnswerReader, ChatSetup};
use kiln_system::files::{Output, Overwrite};
use kiln_system::interrupt::{Catch, Interrupted};
use serde_json::{Value, json};

use super::diffusion::{self, DiffusionFlags};
use super::media::{Media, MediaFlags};
use super::prompt::{PromptArgs, Resolved, asked};
use super::sampling_flags::SamplingFlags;
use super::talk_flags::TalkFlags;
use crate::draft_flags::DraftFlags;
use crate::generate::{Answer, Piece, Reading, Talk, answer, chat_prompt, name};
use crate::model::{ModelFlags, OneSequence, resolve};
use crate::output::{is_watched, print, print_piece, print_styled, progress, say};

/// Flags of `kiln run`.
#[derive(clap::Args)]
#[command(after_help = "Examples:
  kiln run \"What is a kiln?\"                       # the default model
  kiln run smollm2 \"What is a kiln?\" --temp 0 -n 200
  ls | kiln run smollm2 \"What is this folder for?\"   # stdin follows the prompt
  kiln run smollm2 --raw \"Once upon a time\" -n 64  # continue a text
  kiln run smollm2 \"Name a city\" --json-schema '{\"type\": \"string\"}'
  kiln run smollm2 --raw -f book.txt -n 0 --save-state book.state
  kiln run smollm2 -p \" The end came when\" --load-state book.state
  kiln run smolvlm.gguf \"What is this?\" --mmproj mm.gguf --image photo.jpg
  kiln run voxtral.gguf \"What do they say?\" --mmproj mm.gguf --audio talk.mp3
  kiln run t5.gguf \"translate English to German: That is good.\"
  kiln run dream.gguf \"Why is the sky blue?\" --diffusion-steps 64 -n 64")]
pub(crate) struct Arguments {
    /// Model: a GGUF file or a name as in `kiln pull`; SmolLM2-135M-Instruct if omitted, downloaded on first use
    #[arg(value_name = "MODEL")]
    first: Option<String>,
    /// Prompt; `-` or none reads it from stdin. What is piped to stdin beside a prompt is appended to it, after an empty line
    #[arg(value_name = "PROMPT")]
    second: Option<String>,
    /// Model, instead of the first argument
    #[arg(short, long, value_name = "FILE")]
    model: Option<PathBuf>,
    /// Prompt, instead of the second argument
    #[arg(short, long, value_name = "TEXT")]
    prompt: Option<String>,
    /// Read the prompt from a file
    #[arg(short, long, value_name = "FILE")]
    file: Option<PathBuf>,
    #[command(flatten)]
    talk: TalkFlags,
    #[command(flatten)]
    media: MediaFlags,
    /// Continue the prompt as plain text, without the chat template
    #[arg(long, conflicts_with_all = ["system", "system_file", "chat_template"])]
    raw: bool,
    /// Print one JSON object at the end: text, tokens, counts and timings
    #[arg(long)]
    json: bool,
    /// With --json: add the log-probability of each token and of the N most likely ones
    #[arg(long, value_name = "N", requires = "json")]
    logprobs: Option<usize>,
    /// Save the KV cache after the prompt to a file, for --load-state
    #[arg(long, value_name = "FILE")]
    save_state: Option<PathBuf>,
    /// Continue from a saved state of the same model; the prompt, if any, is appended to it
    #[arg(long, value_name = "FILE", conflicts_with_all = ["system", "system_file", "chat_template"])]
    load_state: Option<PathBuf>,
    /// Overwrite the --save-state file if it exists
    #[arg(long)]
    force: bool,
    #[command(flatten)]
    sampling: SamplingFlags,
    #[command(flatten)]
    diffusion: DiffusionFlags,
    #[command(flatten)]
    flags: ModelFlags,
    #[command(flatten)]
    draft: DraftFlags,
}

/// Tokens of an answer that memory is taken for where no limit is given.
const USUAL_ANSWER: usize = 8192;

/// What the model gets.
struct Prepared {
    /// Its tokens: one part more than there are pictures and sounds.
    parts: Vec<Vec<u32>>,
    reader: Option<AnswerReader>,
    show_special: bool,
    /// Ends thoughts that become too long.
    thoughts: Option<Box<dyn Constraint>>,
    /// Tokens that end a turn, the file's sampling settings, and what compiles rules.
    setup: ChatSetup,
    /// The text is continued: a terminal shows it before what comes.
    continues: bool,
}

impl Arguments {
    fn asked(&self) -> anyhow::Result<Resolved> {
        asked(&PromptArgs {
            words: [self.first.as_deref(), self.second.as_deref()],
            model: self.model.as_deref(),
            prompt: self.prompt.as_deref(),
            file: self.file.as_deref(),
        })
    }

    /// The prompt as tokens: by the template if there is one.
    fn prepare(&self, model: &Model, prompt: &str, marker: Option<&str>) -> anyhow::Result<Prepared> {
        let raw = self.raw || self.load_state.is_some();
        let setup = if raw { ChatSetup::without_template(model) } else { self.talk.setup(model)? };
        let system = self.talk.system()?;
        if setup.template.is_ok() {
            let system = system.map(|text| Message::new("system", text));
            let messages: Vec<Message> = system.into_iter().chain([Message::new("user", prompt)]).collect();
            let talk = Talk {
                messages: &messages,
                thinking: self.talk.thinking(),
                has_rule: self.sampling.has_rule(),
                between: marker,
                ..Talk::default()
            };
            let chat = chat_prompt(model, &setup, talk)?;
            let (parts, show_special, thoughts) = (chat.parts, chat.show_special, chat.constraint);
            return Ok(Prepared { parts, reader: Some(chat.reader), show_special, thoughts, setup, continues: false });
        }
        if system.is_some() {
            bail!(
                "the model has no chat template, so --system has no place\nhint: --chat-template names one, such as chatml; or write it into the prompt"
            );
        }
        // What is read is not gone on with.
        let continues = model.facts.start.is_none() && !model.facts.fills;
        if !raw && continues {
            say(
                "note: the model has no chat template, so it continues the prompt as text (--raw does so without this note; --chat-template names a template)",
            );
        }
        let mut special = if self.load_state.is_some() { AddSpecial::No } else { AddSpecial::Yes };
        let mut parts = Vec::new();
        for part in marker.map_or(vec![prompt], |marker| prompt.split(marker).collect()) {
            parts.push(model.tokenizer.encode(part, special, ParseSpecial::Yes)?);
            special = AddSpecial::No;
        }
        Ok(Prepared { parts, reader: None, show_special: false, thoughts: None, setup, continues })
    }

    /// An answer of a model that fills in texts.
    fn fill(&self, model: &Arc<Model>, prompt: Vec<u32>, sampling: Sampling) -> anyhow::Result<ExitCode> {
        let unfit = [
            (self.save_state.is_some(), "--save-state"),
            (self.load_state.is_some(), "--load-state"),
            (self.logprobs.is_some(), "--logprobs"),
            (self.sampling.has_rule(), "a grammar, schema or regular expression"),
        ];
        if let Some((_, what)) = unfit.into_iter().find(|(given, _)| *given) {
            bail!("the model fills in a text as a whole, in any order, which {what} cannot be used with");
        }
        let (flags, length, stops) = (&self.diffusion, self.sampling.limit(), self.sampling.stops());
        let task = diffusion::Task { flags, prompt, sampling, length, stops, json: self.json };
        diffusion::run(model, &self.flags, &task)
    }

    fn has_states(&self) -> bool {
        self.save_state.is_some() || self.load_state.is_some()
    }
}

/// Runs the command.
pub(crate) fn run(arguments: &Arguments) -> anyhow::Result<ExitCode> {
    let asked = arguments.asked()?;
    let Some(text) = asked.prompt.or(arguments.load_state.is_some().then(String::new)) else {
        bail!(
            "there is no prompt\nhint: kiln run MODEL PROMPT, -p, -f FILE, or text on stdin; `kiln chat` holds a conversation"
        );
    };
    let path = resolve(asked.model.as_deref())?;
    arguments.flags.open_early();
    let model = arguments.flags.open(&path)?;
    // All before the weights are loaded: a wrong word should not cost a minute.
    let media = arguments.media.open(&model)?;
    let shown = media.as_ref().map(|media| media.before(&text));
    let marker = media.as_ref().map(Media::marker);
    let prepared = arguments.prepare(&model, shown.as_deref().unwrap_or(&text), marker)?;
    let sampling = arguments.sampling.sampling(&model, &prepared.setup)?;
    if model.facts.fills {
        return arguments.fill(&model, prepared.parts.concat(), sampling);
    }
    arguments.diffusion.refuse(&model)?;
    if model.facts.start.is_some() && arguments.has_states() {
        bail!(
            "the model reads one text and writes another, and a saved state holds one\nhint: give the prompt again: it is read at once"
        );
    }
    let constraint = arguments.sampling.constraint(&prepared.setup)?.or(prepared.thoughts);
    let inputs: Vec<&Path> = model.gguf.paths().chain(arguments.load_state.as_deref()).collect();
    let save = |path: &PathBuf| Output::create(path, Overwrite::if_forced(arguments.force), &inputs);
    let output = arguments.save_state.as_ref().map(save).transpose()?;
    let from = |path: &PathBuf| {
        state::read(path, &model).map_err(|why| match why {
            // This names the file itself.
            Error::Gguf(why) => anyhow::Error::new(why),
            why => anyhow::Error::new(why).context(format!("cannot go on from {}", path.display())),
        })
    };
    let state = arguments.load_state.as_ref().map(from).transpose()?;
    let mut prompt = match &media {
        Some(media) => media.join(&model, &arguments.flags, prepared.parts)?,
        None => Joined { tokens: prepared.parts.concat(), ..Joined::default() },
    };
    let goes_on = arguments.sampling.limit().is_none_or(|limit| limit > 1);
    let first = First::Text { prompt: prompt.tokens.len(), cuts: sampling.cuts(), goes_on };
    let spare = if arguments.has_states() { 2 } else { 0 };
    // Memory for a whole context would be taken for nothing: this command knows its prompt.
    let tokens = prompt.tokens.len() + arguments.sampling.limit().unwrap_or(USUAL_ANSWER) + 1;
    let expected = Some(tokens).filter(|_| !arguments.has_states());
    let drafting = arguments.draft.open(&model)?;
    let job = OneSequence { spare, first: Some(first), expected, drafting };
    let scheduler = arguments.flags.scheduler(&model, job)?;
    if is_watched() {
        say(&format!("{} on {}", name(&model), scheduler.describe()));
    }

    let catch = Arc::new(Catch::new());
    let mut from = None;
    if arguments.has_states() {
        let held = hold(&scheduler, state, prompt.tokens, output.is_some(), &catch)?;
        let Some(held) = held else { return Err(interrupted().into()) };
        if let (Some(mut output), Some(bytes)) = (output, held.saved) {
            output.write_all(&bytes).map_err(|why| output.failed(why))?;
            let name = output.path().display().to_string();
            output.finish()?;
            say(&format!("{name}: {} tokens", held.tokens.len()));
        }
        if arguments.sampling.limit() == Some(0) {
            let usage = Usage { prompt_tokens: held.tokens.len(), ..Usage::default() };
            let (words, thoughts, tokens) = (String::new(), String::new(), Vec::new());
            let nothing = Answer { words, thoughts, calls: Vec::new(), tokens, reason: EndReason::Limit, usage };
            return if arguments.json { report(arguments, &scheduler, &nothing) } else { Ok(ExitCode::SUCCESS) };
        }
        (from, prompt.tokens) = (Some(held.sequence), held.tokens);
    }
    let mut request = arguments.sampling.request(prompt.tokens, sampling, &prepared.setup.ends);
    request.spans = prompt.spans;
    request.show_special = prepared.show_special;
    (request.constraint, request.logprobs, request.from) = (constraint, arguments.logprobs, from);
    let echo = if prepared.continues { text } else { String::new() };
    let answer = stream(arguments, &scheduler, request, prepared.reader, &echo, &catch)?;
    report(arguments, &scheduler, &answer)
}

/// Shows an answer as it comes.
fn stream(
    arguments: &Arguments,
    scheduler: &Scheduler,
    mut request: Request,
    reader: Option<AnswerReader>,
    echo: &str,
    catch: &Catch,
) -> anyhow::Result<Answer> {
    // One token is drawn whenever a prompt is read; where none was asked for it is not shown.
    let silent = arguments.json || request.limit == Some(0);
    request.limit = request.limit.map(|limit| limit.max(1));
    let (total, terminal) = (request.prompt.len(), std::io::stdout().is_terminal());
    let mut reading = Reading::new(total);
    let mut thinking = false;
    let mut answer = answer(scheduler, request, reader, catch, &mut |piece| match piece {
        Piece::Read(tokens) => {
            reading.read(tokens);
            // Not before it is known that the prompt can be read.
            if tokens == total && !silent && terminal {
                print_piece(echo);
            }
        }
        _ if silent => {}
        // A pipe gets the answer alone.
        Piece::Thought(text) if terminal => {
            thinking = true;
            print_styled(text, "2");
        }
        Piece::Thought(_) => {}
        Piece::Word(text) => {
            if std::mem::take(&mut thinking) {
                print_piece("\n\n");
            }
            print_piece(text);
        }
    })?;
    if arguments.sampling.limit() == Some(0) {
        (answer.words, answer.tokens) = (String::new(), Vec::new());
        answer.usage.generated_tokens = 0;
    }
    if !silent && !answer.words.ends_with('\n') && (terminal || !answer.words.is_empty()) {
        print_piece("\n");
    }
    Ok(answer)
}

/// What there is to say when an answer is complete.
fn report(arguments: &Arguments, scheduler: &Scheduler, answer: &Answer) -> anyhow::Result<ExitCode> {
    if arguments.json {
        print(&serde_json::to_string_pretty(&as_json(scheduler, answer)?)?);
    }
    if answer.reason == EndReason::Context {
        let context = scheduler.context();
        say(&format!("note: the context of {context} tokens is full\nhint: --ctx-size sets a larger one"));
    }
    if is_watched() {
        let ([reading, writing], usage) = (answer.rates(), &answer.usage);
        say(&format!(
            "prompt: {} tokens, {reading:.1} tokens/s; generated: {} tokens, {writing:.1} tokens/s",
            usage.prompt_tokens, usage.generated_tokens,
        ));
        if usage.drafted_tokens > 0 {
            say(&format!("drafted: {} tokens, {} accepted", usage.drafted_tokens, usage.accepted_tokens));
        }
    }
    if answer.reason == EndReason::Cancelled {
        return Err(interrupted().into());
    }
    Ok(ExitCode::SUCCESS)
}

pub(super) fn interrupted() -> Interrupted {
    Interrupted { left: "the answer is not complete (-n limits its length)" }
}

/// An answer for programs.
pub(super) fn as_json(scheduler: &Scheduler, answer: &Answer) -> anyhow::Result<Value> {
    let (model, usage) = (scheduler.model(), &answer.usage);
    let spelled = |id: u32| model.tokenizer.piece(id).map(|bytes| String::from_utf8_lossy(bytes).into_owned());
    let mut tokens = Vec::with_capacity(answer.tokens.len());
    for spoken in &answer.tokens {
        let mut token = json!({"id": spoken.id, "text": spelled(spoken.id)?});
        if let Some(logprobs) = &spoken.logprobs {
            token["logprob"] = logprobs.logprob.into();
            let top = logprobs
                .top
                .iter()
                .map(|(id, logprob)| Ok(json!({"id": id, "text": spelled(*id)?, "logprob": logprob})));
            token["top_logprobs"] = top.collect::<anyhow::Result<_>>()?;
        }
        tokens.push(token);
    }
    let (reason, stopped_by) = match &answer.reason {
        EndReason::EndToken(id) | EndReason::StopToken(id) => ("end", Some(spelled(*id)?)),
        EndReason::StopString(text) => ("stop", Some(text.clone())),
        EndReason::Limit => ("limit", None),
        EndReason::Context => ("context", None),
        EndReason::Complete => ("complete", None),
        EndReason::Cancelled => ("interrupted", None),
    };
    let [reading, writing] = answer.rates();
    let milliseconds = |time: std::time::Duration| time.as_secs_f64() * 1e3;
    let mut all = json!({
        "model": name(model),
        "device": scheduler.describe(),
        "text": answer.words,
        "reasoning": Some(&answer.thoughts).filter(|text| !text.is_empty()),
        "end": reason,
        "ended_by": stopped_by,
        "tokens": tokens,
        "usage": {
            "prompt_tokens": usage.prompt_tokens,
            "cached_tokens": usage.cached_tokens,
            "generated_tokens": usage.generated_tokens,
        },
        "timings": {
            "prompt_ms": milliseconds(usage.reading),
            "prompt_tokens_per_second": reading,
            "generation_ms": milliseconds(usage.writing),
            "generation_tokens_per_second": writing,
        },
    });
    if !answer.calls.is_empty() {
        let calls = answer.calls.iter().map(|call| json!({"name": call.name, "arguments": call.arguments}));
        all["tool_calls"] = calls.collect();
    }
    Ok(all)
}

/// A sequence that generation continues from.
struct Held {
    /// Holds all tokens but the last, or fewer.
    sequence: SequenceId,
    /// The prompt, with what a state held before it.
    tokens: Vec<u32>,
    /// The state after the prompt, where it was wanted.
    saved: Option<Vec<u8>>,
}

/// Loads a state and reads a prompt behind it, as far as saving it needs. `None`: Ctrl-C.
fn hold(
    scheduler: &Scheduler,
    state: Option<Vec<u8>>,
    prompt: Vec<u32>,
    save: bool,
    catch: &Arc<Catch>,
) -> anyhow::Result<Option<Held>> {
    let catch = Arc::clone(catch);
    Ok(scheduler.with_engine(move |engine| hold_on(engine, state.as_deref(), prompt, save, &catch))??)
}

fn hold_on(
    engine: &mut Engine,
    state: Option<&[u8]>,
    prompt: Vec<u32>,
    save: bool,
    catch: &Catch,
) -> Result<Option<Held>, Error> {
    let sequence = engine.open(0)?;
    if let Some(state) = state {
        engine.load_state(sequence, state)?;
    }
    let mut tokens = engine.tokens(sequence).to_vec();
    tokens.extend(prompt);
    let (all, context) = (tokens.len(), engine.context());
    let Some(last) = all.checked_sub(1) else { return Err(Error::EmptyPrompt) };
    if all > context {
        return Err(Error::PromptTooLong { tokens: all, context, trained: engine.model().config.context });
    }
    // A text goes on from the logits of its last token, which must be fed for them. A recurrent state cannot go back by
    // one token: its text is read again.
    if engine.length(sequence) == all && matches!(engine.truncate(sequence, last), Err(Error::NoWayBack { .. })) {
        engine.truncate(sequence, 0)?;
    }
    let mut saved = None;
    if save {
        let bar = progress(all as u64, "reading");
        for piece in tokens[engine.length(sequence)..last].chunks(engine.batch()) {
            if catch.happened() {
                bar.finish_and_clear();
                return Ok(None);
            }
            engine.feed(&[Entry { sequence, tokens: piece, wanted: Wanted::Nothing }])?;
            bar.set_position(engine.length(sequence) as u64);
        }
        bar.finish_and_clear();
        let whole = engine.fork(sequence)?;
        engine.feed(&[Entry { sequence: whole, tokens: &tokens[last..], wanted: Wanted::Nothing }])?;
        saved = Some(engine.save_state(whole)?);
        engine.close(whole);
    }
    Ok(Some(Held { sequence, tokens, saved }))
}
