//! `kiln run`: a prompt in, text out as it is made.

use std::io::Write as _;
use std::path::PathBuf;
use std::process::ExitCode;
use std::time::Instant;

use kiln_engine::tokenizer::{AddSpecial, LeadingSpace, ParseSpecial, ShowSpecial, TextStream};

use crate::model::{ModelFlags, open, resolve};
use crate::output::say;

/// Flags of `kiln run`.
#[derive(clap::Args)]
#[command(
    after_help = "Examples:\n  kiln run                                  the default model, fetched at first use\n  kiln run model.gguf \"The capital of France is\" -n 32"
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
    #[command(flatten)]
    flags: ModelFlags,
}

/// Runs the command.
pub(crate) fn run(arguments: &Arguments) -> anyhow::Result<ExitCode> {
    let model = open(&resolve(arguments.model.as_deref())?)?;
    let mut session = arguments.flags.session(&model)?;
    let tokenizer = &model.tokenizer;
    let prompt = tokenizer.encode(&arguments.prompt, AddSpecial::Yes, ParseSpecial::Yes)?;
    say(&format!("{} on {}", model.gguf.metadata().get_str_or("general.name", "model")?, session.describe()));

    print_piece(&arguments.prompt)?;
    let mut stream = TextStream::new(tokenizer.clone(), ShowSpecial::No, LeadingSpace::Keep);
    let start = Instant::now();
    let banned = if arguments.ignore_eos { tokenizer.end_ids() } else { &[] };
    let mut token = session.next_greedy(&prompt, banned)?;
    let prompted = start.elapsed();
    let start = Instant::now();
    let mut made = 0;
    while made < arguments.n_predict && !tokenizer.is_end(token) {
        print_piece(&stream.push(token)?)?;
        made += 1;
        if made == arguments.n_predict || session.length() == session.context() {
            break;
        }
        token = session.next_greedy(&[token], banned)?;
    }
    print_piece(&stream.finish())?;
    print_piece("\n")?;
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

/// Text as it comes. A reader that has gone ends the program.
fn print_piece(text: &str) -> anyhow::Result<()> {
    let mut out = std::io::stdout().lock();
    match out.write_all(text.as_bytes()).and_then(|()| out.flush()) {
        Err(e) if e.kind() == std::io::ErrorKind::BrokenPipe => std::process::exit(0),
        other => Ok(other?),
    }
}
