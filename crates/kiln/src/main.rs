//! The `kiln` binary: flags, commands, progress, output. Data goes to stdout, everything else to stderr.

mod commands;
mod device;
mod model;
mod output;
mod speaker;
mod store;

use std::process::ExitCode;

use clap::{Parser, Subcommand};

/// Runs large language models on any GPU through Vulkan, and on the CPU where there is none.
#[derive(Parser)]
#[command(name = "kiln", version, arg_required_else_help = true)]
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
    Run(commands::run::Arguments),
    /// Talk with a model
    Chat(commands::chat::Arguments),
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
    /// Serve a model over HTTP: OpenAI's, Anthropic's and Ollama's APIs
    Serve(commands::serve::Arguments),
    /// Prove every kernel on this device and driver against its reference
    Selftest(commands::selftest::Arguments),
    /// Make a model file with random weights in the shape of a real model
    Synth(commands::synth::Arguments),
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
            Command::Quantize(_) | Command::Synth(_) | Command::Top(_) => false,
            _ => true,
        }
    }
}

fn main() -> ExitCode {
    let arguments = Arguments::parse();
    output::start_log(arguments.verbose);
    // In this order: the first may set a variable of the environment, which only a process of one thread can do, and the
    // second starts a thread.
    if arguments.command.may_use_device() {
        kiln_gpu::icd::help_headless_nvidia(&kiln_gpu::Cache::user());
    }
    kiln_system::files::remove_on_signals();
    let result = match arguments.command {
        Command::Bench(a) => commands::bench::run(&a),
        Command::Chat(a) => commands::chat::run(&a),
        Command::Run(a) => commands::run::run(&a),
        Command::Logits(a) => commands::logits::run(&a),
        Command::Plan(a) => commands::plan::run(&a),
        Command::Devices(a) => commands::devices::run(&a),
        Command::Doctor(a) => commands::doctor::run(&a),
        Command::Inspect(a) => commands::inspect::run(&a),
        Command::Quantize(a) => commands::quantize::run(&a),
        Command::Serve(a) => commands::serve::run(&a),
        Command::Selftest(a) => commands::selftest::run(&a),
        Command::Synth(a) => commands::synth::run(&a),
        Command::Top(a) => commands::top::run(&a),
        Command::Tune(a) => commands::tune::run(&a),
    };
    match result {
        Ok(code) => code,
        Err(error) => {
            output::say(&format!("error: {error:#}"));
            ExitCode::from(1)
        }
    }
}
