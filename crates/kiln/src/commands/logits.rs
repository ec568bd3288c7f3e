//! `kiln logits`: the logits of every token of a prompt, as a GGUF file that other tools can compare.

use std::path::{Path, PathBuf};
use std::process::ExitCode;

use kiln_engine::run::Wanted;
use kiln_engine::tokenizer::{AddSpecial, ParseSpecial};
use kiln_gguf::{Metadata, TensorType, Writer};
use kiln_system::files::{Output, Overwrite};
use serde_json::json;

use crate::model::{ModelFlags, resolve};
use crate::output::{print, say};

/// Flags of `kiln logits`.
#[derive(clap::Args)]
#[command(after_help = "Examples:
  kiln logits smollm2 -p \"Hello\" -o hello.gguf
  kiln logits smollm2 --tokens 98,36,54 -o ids.gguf
  kiln logits t5.gguf --source 98,36,54 --tokens 0,7,12 -o answer.gguf")]
pub(crate) struct Arguments {
    /// GGUF file or a name, as `kiln pull` takes them; without one the default model of the local store
    model: Option<PathBuf>,
    /// Text
    #[arg(short, long, required_unless_present = "tokens")]
    prompt: Option<String>,
    /// Token ids instead of a text; a model whose tokenizer Kiln does not know takes these, too
    #[arg(long, value_name = "IDS", value_delimiter = ',', conflicts_with = "prompt")]
    tokens: Option<Vec<u32>>,
    /// Models that read one text and write another (T5): ids of what is read; the tokens are those of what is written then. Without it the
    /// model reads the tokens, too
    #[arg(long, value_name = "IDS", value_delimiter = ',')]
    source: Option<Vec<u32>>,
    /// Feed N tokens at a time instead of as many as the device takes at once
    #[arg(long, value_name = "TOKENS", value_parser = clap::value_parser!(u32).range(1..))]
    pieces: Option<u32>,
    /// File to write: tensors `tokens` (I32) and `logits` (F32)
    #[arg(short, long)]
    output: PathBuf,
    /// Overwrite the output if it is there
    #[arg(long)]
    force: bool,
    /// Print JSON: the tokens, the size of the vocabulary, the likeliest token after each
    #[arg(long)]
    json: bool,
    #[command(flatten)]
    flags: ModelFlags,
}

/// Runs the command.
pub(crate) fn run(arguments: &Arguments) -> anyhow::Result<ExitCode> {
    let path = resolve(arguments.model.as_deref())?;
    let model = match &arguments.tokens {
        Some(_) => arguments.flags.open_for_ids(&path)?,
        None => arguments.flags.open(&path)?,
    };
    let tokens = match (&arguments.tokens, &arguments.prompt) {
        (Some(tokens), _) => tokens.clone(),
        (None, Some(prompt)) => model.tokenizer.encode(prompt, AddSpecial::Yes, ParseSpecial::Yes)?,
        (None, None) => Vec::new(),
    };
    anyhow::ensure!(!tokens.is_empty(), "the prompt is empty: it has no tokens\nhint: -p takes a text, --tokens ids");
    let inputs: Vec<&Path> = model.gguf.paths().collect();
    let output = Output::create(&arguments.output, Overwrite::if_forced(arguments.force), &inputs)?;
    let mut session = arguments.flags.session(&model)?;
    if model.facts.start.is_some() {
        session.read_source(arguments.source.as_deref().unwrap_or(&tokens))?;
    } else if arguments.source.is_some() {
        anyhow::bail!("--source is for encoder-decoder models; this one is decoder-only");
    }
    let piece = arguments.pieces.map_or(tokens.len(), |n| n as usize).max(1);
    let mut logits = Vec::new();
    for piece in tokens.chunks(piece) {
        logits.extend(session.feed(piece, Wanted::All)?);
    }

    let mut metadata = Metadata::new();
    metadata.set("path_model", path.display().to_string());
    let mut writer = Writer::new(metadata);
    let ids: Vec<u8> = tokens.iter().flat_map(|t| t.to_le_bytes()).collect();
    writer.add("tokens", &[tokens.len()], TensorType::I32, ids)?;
    let bytes: Vec<u8> = logits.iter().flat_map(|v| v.to_le_bytes()).collect();
    // The established layout names the number of tokens first, though rows of the vocabulary lie in memory.
    writer.add("logits", &[tokens.len(), model.config.vocab], TensorType::F32, bytes)?;
    writer.save_to(output)?;
    if arguments.json {
        let best = |row: &[f32]| kiln_engine::sampler::greedy(row, &[]);
        let likeliest: Vec<_> = logits.chunks_exact(model.config.vocab).map(best).collect();
        let output = arguments.output.display().to_string();
        let told = json!({"output": output, "tokens": tokens, "vocab": model.config.vocab, "likeliest": likeliest});
        print(&serde_json::to_string_pretty(&told)?);
    }
    say(&format!("{} tokens, {} logits each, in {}", tokens.len(), model.config.vocab, arguments.output.display()));
    Ok(ExitCode::SUCCESS)
}
