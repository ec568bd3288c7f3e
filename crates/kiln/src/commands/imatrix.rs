//! `kiln imatrix`: how much every column of a model's matrices counts, measured on a text.

use std::path::{Path, PathBuf};
use std::process::ExitCode;
use std::sync::{Arc, Mutex, PoisonError};
use std::time::Instant;

use anyhow::ensure;
use kiln_engine::Session;
use kiln_engine::importance::{Importance, Observer};
use kiln_engine::measure::{Estimate, LogProbs};
use kiln_engine::run::Wanted;
use kiln_engine::tokenizer::{AddSpecial, ParseSpecial};
use kiln_system::files::{Output, Overwrite};
use serde_json::json;

use super::prompt::file_text;
use crate::model::{ModelFlags, resolve};
use crate::output::{print, progress, say};

/// Flags of `kiln imatrix`.
#[derive(clap::Args)]
#[command(after_help = "Examples:
  kiln imatrix smollm2 book.txt imatrix.gguf
  kiln quantize smollm2 small.gguf IQ4_XS --imatrix imatrix.gguf

The file is the one that llama-imatrix writes and llama-quantize reads.")]
pub(crate) struct Arguments {
    /// GGUF file or a name, as `kiln pull` takes them
    model: PathBuf,
    /// A text like those the model will meet; `-` reads stdin
    text: PathBuf,
    /// The file to write
    out: PathBuf,
    /// Tokens of a chunk
    #[arg(long, value_name = "TOKENS", default_value_t = 512)]
    chunk: usize,
    /// Process at most N chunks
    #[arg(long, value_name = "N")]
    chunks: Option<usize>,
    /// Take texts that are spelled like control tokens as such tokens
    #[arg(long)]
    parse_special: bool,
    /// Overwrite OUT if it is there
    #[arg(long)]
    force: bool,
    /// Print JSON
    #[arg(long)]
    json: bool,
    #[command(flatten)]
    flags: ModelFlags,
}

/// Runs the command.
pub(crate) fn run(arguments: &Arguments) -> anyhow::Result<ExitCode> {
    let size = arguments.chunk;
    ensure!(size >= 2, "--chunk must be at least 2 tokens");
    let model = arguments.flags.open(&resolve(Some(&arguments.model))?)?;
    let text = file_text(&arguments.text)?;
    let parse = if arguments.parse_special { ParseSpecial::Yes } else { ParseSpecial::No };
    let mut tokens = model.tokenizer.encode(&text, AddSpecial::Yes, parse)?;
    let chunks = (tokens.len() / size).min(arguments.chunks.unwrap_or(usize::MAX));
    let n = tokens.len();
    ensure!(chunks > 0, "the text has {n} tokens, and a chunk has {size}\nhint: a longer text, or a smaller --chunk");
    tokens.truncate(chunks * size);
    let inputs: Vec<&Path> = model.gguf.paths().chain([arguments.text.as_path()]).collect();
    let output = Output::create(&arguments.out, Overwrite::if_forced(arguments.force), &inputs)?;

    let found = Arc::new(Mutex::new(Importance::default()));
    let observer = Observer::new(arguments.flags.executor()?, Arc::clone(&found));
    let caches = [arguments.flags.cache_type_k, arguments.flags.cache_type_v];
    let mut session = Session::with_caches(Arc::clone(&model), Box::new(observer), size, caches, &mut |_, _| {})?;
    let (vocab, bar, start) = (model.tokenizer.vocab(), progress(chunks as u64, "imatrix"), Instant::now());
    let mut estimate = Estimate::default();
    for chunk in tokens.chunks_exact_mut(size) {
        if let (true, Some(bos)) = (vocab.add_bos, vocab.bos) {
            chunk[0] = bos;
        }
        session.reset()?;
        // All logits are wanted, so that every token goes through every matrix.
        let logits = session.feed(chunk, Wanted::All)?;
        for (row, next) in logits.chunks_exact(model.config.vocab).zip(&chunk[1..]).skip(size / 2) {
            let probs = LogProbs::new(row).ok_or_else(|| anyhow::anyhow!("a logit is no number"))?;
            estimate.losses.add(-probs.of(*next as usize));
        }
        bar.inc(1);
        bar.set_message(format!("PPL {:.4}", estimate.perplexity()));
    }
    bar.finish_and_clear();
    drop(session);

    let mut found = found.lock().unwrap_or_else(PoisonError::into_inner);
    let name = arguments.text.file_name().map(|name| name.to_string_lossy().into_owned());
    found.datasets = vec![name.unwrap_or_else(|| "stdin".into())];
    found.chunks = [chunks, size].map(|n| u32::try_from(n).unwrap_or(u32::MAX));
    let never = found.tensors.values().map(|seen| seen.counts.iter().filter(|count| **count == 0.0).count());
    let never: usize = never.sum();
    found.save(output)?;
    if never > 0 {
        say(&format!(
            "note: {never} experts were never routed to; their columns get the same importance\nhint: use a longer text"
        ));
    }
    let (tensors, seconds, perplexity) = (found.tensors.len(), start.elapsed().as_secs_f64(), estimate.perplexity());
    if arguments.json {
        print(&serde_json::to_string_pretty(&json!({
            "file": arguments.out.to_string_lossy(),
            "tensors": tensors,
            "chunks": chunks,
            "chunk": size,
            "experts_never_asked": never,
            "perplexity": perplexity,
            "seconds": seconds,
        }))?);
    } else {
        let out = arguments.out.display();
        say(&format!(
            "{out}: {tensors} tensors, {chunks} chunks of {size} tokens, in {seconds:.1} s; perplexity {perplexity:.4}"
        ));
    }
    Ok(ExitCode::SUCCESS)
}
