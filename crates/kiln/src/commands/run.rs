//! `kiln run`: a prompt in, text out as it is made.

use std::io::Write as _;
use std::path::{Path, PathBuf};
use std::process::ExitCode;
use std::time::Instant;

use kiln_engine::state;
use kiln_engine::tokenizer::{AddSpecial, LeadingSpace, ParseSpecial, ShowSpecial, TextStream};
use kiln_system::files::{Output, Overwrite};
use kiln_system::text::shown;

use crate::model::{ModelFlags, open, resolve};
use crate::output::{print_piece, say};

/// Flags of `kiln run`.
#[derive(clap::Args)]
#[command(
    after_help = "Examples:\n  kiln run                                  the default model, fetched at first use\n  kiln run model.gguf \"The capital of France is\" -n 32\n  kiln run model.gguf \"$(cat book.txt)\" -n 0 --save-state book.state\n  kiln run model.gguf \" The end came when\" --load-state book.state"
)]
pub(crate) struct Arguments {
    /// GGUF file; without one SmolLM2-135M-Instruct from the local store, fetched at first use
    model: Option<PathBuf>,
    /// Text to continue
    #[arg(default_value = "The capital of France is")]
    prompt: String,
    /// Tokens to generate at most
    #[arg(short = 'n', long, default_value_t = 128)]
    n_predict: usize,
    /// Never choose a token that ends the text
    #[arg(long)]
    ignore_eos: bool,
    /// Save what the model remembers after the prompt, to go on from with --load-state
    #[arg(long, value_name = "FILE")]
    save_state: Option<PathBuf>,
    /// Go on from a saved state of the same model and context: the prompt continues the text it holds
    #[arg(long, value_name = "FILE")]
    load_state: Option<PathBuf>,
    /// Overwrite the file of --save-state if it is there
    #[arg(long)]
    force: bool,
    #[command(flatten)]
    flags: ModelFlags,
}

/// Runs the command.
pub(crate) fn run(arguments: &Arguments) -> anyhow::Result<ExitCode> {
    let model = open(&resolve(arguments.model.as_deref())?)?;
    // Both before the weights are loaded: a wrong name should not cost a minute.
    let inputs: Vec<&Path> = model.gguf.paths().chain(arguments.load_state.as_deref()).collect();
    let save = |path: &PathBuf| Output::create(path, Overwrite::if_forced(arguments.force), &inputs);
    let output = arguments.save_state.as_ref().map(save).transpose()?;
    let from = |path: &PathBuf| {
        state::read(path, &model).map_err(|why| match why {
            // This names the file itself.
            kiln_engine::Error::Gguf(why) => anyhow::Error::new(why),
            why => anyhow::Error::new(why).context(format!("cannot go on from {}", path.display())),
        })
    };
    let state = arguments.load_state.as_ref().map(from).transpose()?;
    let mut session = arguments.flags.session(&model)?;
    let tokenizer = &model.tokenizer;
    let special = if arguments.load_state.is_some() { AddSpecial::No } else { AddSpecial::Yes };
    let prompt = tokenizer.encode(&arguments.prompt, special, ParseSpecial::Yes)?;
    if let Some(state) = state {
        session.load_state(&state)?;
    }
    let name = shown(model.gguf.metadata().get_str_or("general.name", "model")?);
    say(&format!("{name} on {}", session.describe()));
    // Before the prompt is shown, which may be long.
    session.admit(&prompt)?;

    print_piece(&arguments.prompt);
    let mut stream = TextStream::new(tokenizer.clone(), ShowSpecial::No, LeadingSpace::Keep);
    let start = Instant::now();
    let banned = if arguments.ignore_eos { tokenizer.end_ids() } else { &[] };
    let mut token = session.next_greedy(&prompt, banned)?;
    let prompted = start.elapsed();
    // Said when the text is complete, so as not to stand in it.
    let mut notes = Vec::new();
    if let Some(mut output) = output {
        output.write_all(&session.save_state()?).map_err(|why| output.failed(why))?;
        let name = output.path().display().to_string();
        output.finish()?;
        notes.push(format!("{name}: {} tokens", session.length()));
    }
    let start = Instant::now();
    let mut made = 0;
    while made < arguments.n_predict && !tokenizer.is_end(token) {
        print_piece(&stream.push(token)?);
        made += 1;
        if made == arguments.n_predict {
            break;
        }
        if session.length() == session.context() {
            let context = session.context();
            notes.push(format!("note: the context of {context} tokens is full\nhint: --ctx-size makes room for more"));
            break;
        }
        token = session.next_greedy(&[token], banned)?;
    }
    print_piece(&stream.finish());
    print_piece("\n");
    notes.iter().for_each(|note| say(note));
    let rate = |n: usize, seconds: f64| if seconds > 0.0 { n as f64 / seconds } else { 0.0 };
    let decode = start.elapsed().as_secs_f64();
    say(&format!(
        "prompt: {} tokens, {:.1} tokens/s; generated: {made} tokens, {:.1} tokens/s",
        prompt.len(),
        rate(prompt.len(), prompted.as_secs_f64()),
        rate(made.saturating_sub(1), decode),
    ));
    Ok(ExitCode::SUCCESS)
}
