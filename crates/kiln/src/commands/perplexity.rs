//! `kiln perplexity`: how well a model knows a text, and how far it is from another model.

use std::fs::File;
use std::io::{BufReader, BufWriter, Read as _};
use std::path::{Path, PathBuf};
use std::process::ExitCode;
use std::sync::Arc;
use std::time::Instant;

use anyhow::{Context as _, bail, ensure};
use kiln_engine::Session;
use kiln_engine::measure::{
    Base, Divergence, Estimate, LogProbs, LogitsFile, LogitsHeader, LogitsWriter, Recorded, compare,
};
use kiln_engine::model::Model;
use kiln_engine::run::Wanted;
use kiln_engine::tokenizer::{AddSpecial, ParseSpecial};
use kiln_system::files::{Output, Overwrite};
use rayon::prelude::*;
use serde_json::{Value, json};

use super::prompt::file_text;
use crate::model::{ModelFlags, open, resolve};
use crate::output::{print, progress, say};

/// Bytes of logits that are looked at together.
const PIECE: usize = 64 << 20;

/// Flags of `kiln perplexity`.
#[derive(clap::Args)]
#[command(after_help = "Examples:
  kiln perplexity smollm2 book.txt
  kiln perplexity smollm2 book.txt --save-logits base.logits
  kiln quantize smollm2 small.gguf Q3_K_M
  kiln perplexity small.gguf book.txt --against smollm2
  kiln perplexity small.gguf book.txt --against base.logits

The text is cut into chunks; the second half of each is scored, as llama-perplexity does, and files of logits are those of \
its --kl-divergence-base.")]
pub(crate) struct Arguments {
    /// GGUF file or a name, as `kiln pull` takes them
    model: PathBuf,
    /// The text; `-` reads stdin
    file: PathBuf,
    /// Tokens of a chunk; -c says the same [default: 512]
    #[arg(long, value_name = "TOKENS")]
    chunk: Option<usize>,
    /// Score at most N chunks
    #[arg(long, value_name = "N")]
    chunks: Option<usize>,
    /// Compare with the probabilities of another model, or with a file that --save-logits wrote
    #[arg(long, value_name = "MODEL")]
    against: Option<PathBuf>,
    /// Write the probabilities to a file
    #[arg(long, value_name = "FILE", conflicts_with = "against")]
    save_logits: Option<PathBuf>,
    /// Overwrite the file of --save-logits if it is there
    #[arg(long)]
    force: bool,
    /// Print JSON
    #[arg(long)]
    json: bool,
    #[command(flatten)]
    flags: ModelFlags,
}

impl Arguments {
    /// Tokens of a chunk. In llama-perplexity the context size is the chunk.
    fn chunk(&self) -> anyhow::Result<usize> {
        let chunk = match (self.chunk, self.flags.ctx_size) {
            (Some(chunk), Some(context)) if chunk != context => {
                bail!("--chunk is {chunk} and -c is {context}: both set the tokens of a chunk\nhint: give one of them")
            }
            (chunk, context) => chunk.or(context).unwrap_or(512),
        };
        ensure!(chunk >= 4, "--chunk must be at least 4 tokens");
        Ok(chunk)
    }
}

/// What is compared with.
enum Other {
    File(LogitsFile<BufReader<File>>),
    Model(Box<Session>),
}

/// What was found.
#[derive(Default)]
struct Found {
    estimate: Estimate,
    divergence: Divergence,
}

/// Runs the command.
pub(crate) fn run(arguments: &Arguments) -> anyhow::Result<ExitCode> {
    let chunk = arguments.chunk()?;
    ensure!(arguments.chunks != Some(0), "--chunks must be 1 or more");
    let model = arguments.flags.open(&resolve(Some(&arguments.model))?)?;
    let text = file_text(&arguments.file)?;
    let tokens = cut(arguments.chunks, chunk, &model, &text)?;
    let mut header = LogitsHeader { context: chunk, vocab: model.config.vocab, tokens };
    let inputs: Vec<&Path> = model.gguf.paths().chain([arguments.file.as_path()]).collect();
    let create = |path: &PathBuf| -> anyhow::Result<_> {
        let output = Output::create(path, Overwrite::if_forced(arguments.force), &inputs)?;
        Ok(LogitsWriter::new(BufWriter::with_capacity(1 << 20, output), header.clone())?)
    };
    let mut saved = arguments.save_logits.as_ref().map(create).transpose()?;
    let flags = ModelFlags { ctx_size: Some(chunk), ..arguments.flags.clone() };
    let mut other = arguments.against.as_deref().map(|path| other(path, &model, &header, &flags)).transpose()?;
    if let (Some(Other::File(file)), Some(path)) = (&other, &arguments.against) {
        let (there, here) = (file.header.tokens.len(), header.tokens.len());
        if there < here {
            header.tokens.truncate(there);
            let (path, there, here) = (path.display(), there / chunk, here / chunk);
            say(&format!("note: {path} holds {there} of the {here} chunks of this text; those are compared"));
        }
    }
    let chunks = header.tokens.len() / chunk;
    let mut session = flags.session(&model)?;

    let (mut found, start) = (Found::default(), Instant::now());
    let bar = progress(chunks as u64, "perplexity");
    for chunk in header.tokens.chunks_exact(chunk) {
        score(&mut session, chunk, other.as_mut(), saved.as_mut(), &mut found)?;
        bar.inc(1);
        bar.set_message(format!("PPL {:.4}", found.estimate.perplexity()));
    }
    bar.finish_and_clear();
    if let Some(writer) = saved {
        let output = writer.into_inner().into_inner().map_err(|why| anyhow::anyhow!("{}", why.error()))?;
        output.finish()?;
    }
    let seconds = start.elapsed().as_secs_f64();
    report(arguments, &found, (chunks, chunk), seconds, other.is_some())
}

/// The tokens of all chunks of this size, of at most `most` chunks.
fn cut(most: Option<usize>, size: usize, model: &Model, text: &str) -> anyhow::Result<Vec<u32>> {
    let mut tokens = model.tokenizer.encode(text, AddSpecial::Yes, ParseSpecial::No)?;
    let chunks = (tokens.len() / size).min(most.unwrap_or(usize::MAX));
    ensure!(
        chunks > 0,
        "the text has {} tokens, and a chunk has {size}\nhint: a longer text, or a smaller --chunk",
        tokens.len()
    );
    tokens.truncate(chunks * size);
    Ok(tokens)
}

/// Opens what is compared with; it must have seen the same text.
fn other(path: &Path, model: &Model, header: &LogitsHeader, flags: &ModelFlags) -> anyhow::Result<Other> {
    let is_logits = |path: &Path| {
        let mut magic = [0; 8];
        File::open(path).and_then(|mut file| file.read_exact(&mut magic)).is_ok() && magic == *b"_logits_"
    };
    if is_logits(path) {
        let name = || format!("cannot read {}", path.display());
        let file = File::open(path).with_context(name)?;
        let bytes = file.metadata().with_context(name)?.len();
        let file = LogitsFile::new(BufReader::with_capacity(1 << 20, file), bytes).with_context(name)?;
        let (theirs, ours, path) = (&file.header, header, path.display());
        let (there, here) = (theirs.vocab, ours.vocab);
        ensure!(there == here, "{path} is of a model with {there} tokens in its vocabulary; this one has {here}");
        let (there, here) = (theirs.context, ours.context);
        ensure!(there == here, "{path} has chunks of {there} tokens; here they have {here}\nhint: --chunk {there}");
        // Either may have more chunks than the other.
        let same = theirs.tokens.iter().zip(&ours.tokens).all(|(a, b)| a == b) && !theirs.tokens.is_empty();
        ensure!(same, "{path} is of another text\nhint: give the file that it was made of");
        return Ok(Other::File(file));
    }
    let base = open(&resolve(Some(path))?)?;
    let (theirs, ours) = (base.config.vocab, model.config.vocab);
    ensure!(theirs == ours, "the vocabularies differ: {theirs} tokens and {ours}; nothing can be compared");
    Ok(Other::Model(Box::new(flags.session(&Arc::clone(&base))?)))
}

/// Feeds one chunk and scores its second half.
fn score(
    session: &mut Session,
    chunk: &[u32],
    mut other: Option<&mut Other>,
    mut saved: Option<&mut LogitsWriter<BufWriter<Output>>>,
    found: &mut Found,
) -> anyhow::Result<()> {
    let vocab = &session.model().tokenizer;
    let mut tokens = chunk.to_vec();
    // Every chunk begins as a text does.
    if let (true, Some(bos)) = (vocab.vocab().add_bos, vocab.vocab().bos) {
        tokens[0] = bos;
    }
    let (first, last) = (tokens.len() / 2, tokens.len() - 1);
    let width = session.model().config.vocab;
    let rows = (PIECE / 4 / width).max(1);
    let start = |session: &mut Session| -> anyhow::Result<()> {
        session.reset()?;
        session.feed(&tokens[..first], Wanted::Nothing)?;
        Ok(())
    };
    start(session)?;
    if let Some(Other::Model(base)) = &mut other {
        start(base)?;
    }
    for at in (first..last).step_by(rows) {
        let end = (at + rows).min(last);
        let logits = session.feed(&tokens[at..end], Wanted::All)?;
        let theirs = match &mut other {
            Some(Other::Model(base)) => base.feed(&tokens[at..end], Wanted::All)?,
            _ => Vec::new(),
        };
        let recorded = match &mut other {
            Some(Other::File(file)) => (at..end).map(|_| file.read()).collect::<Result<Vec<_>, _>>()?,
            _ => Vec::new(),
        };
        let places = logits.par_chunks(width).enumerate().map(|(i, row)| {
            let theirs = theirs.get(i * width..(i + 1) * width);
            place(row, tokens[at + i + 1] as usize, theirs, recorded.get(i))
        });
        let places: Vec<Place<'_>> = places.collect::<anyhow::Result<_>>()?;
        for (probs, loss, compared) in places {
            found.estimate.losses.add(loss);
            if let Some(compared) = compared {
                found.divergence.add(compared, loss);
            }
            if let Some(writer) = &mut saved {
                writer.write(&probs)?;
            }
        }
    }
    Ok(())
}

/// What one place shows: its probabilities, the loss of the token that came, and how it compares.
type Place<'a> = (LogProbs<'a>, f64, Option<(f64, bool, f64)>);

fn place<'a>(
    logits: &'a [f32],
    next: usize,
    theirs: Option<&[f32]>,
    recorded: Option<&Recorded>,
) -> anyhow::Result<Place<'a>> {
    let nothing = || anyhow::anyhow!("a logit is no number\nhint: `kiln plan --diff` finds the step that made it");
    let probs = LogProbs::new(logits).ok_or_else(nothing)?;
    let other = theirs.map(|row| LogProbs::new(row).ok_or_else(nothing)).transpose()?;
    let base: Option<&dyn Base> = match (&other, recorded) {
        (Some(other), _) => Some(other),
        (None, Some(recorded)) => Some(recorded),
        (None, None) => None,
    };
    Ok((probs, -probs.of(next), base.map(|base| compare(base, &probs, next))))
}

fn report(
    a: &Arguments,
    found: &Found,
    (chunks, chunk): (usize, usize),
    seconds: f64,
    compared: bool,
) -> anyhow::Result<ExitCode> {
    let (estimate, d) = (&found.estimate, &found.divergence);
    let quantiles = d.quantiles().filter(|_| compared);
    if a.json {
        let mut out = json!({
            "perplexity": estimate.perplexity(),
            "error": estimate.error(),
            "mean_loss": estimate.losses.mean(),
            "tokens": estimate.losses.count(),
            "chunk": chunk,
            "chunks": chunks,
            "seconds": seconds,
        });
        out["against"] = quantiles.map_or(Value::Null, |q| {
            json!({
                "perplexity": d.base.perplexity(),
                "mean_divergence": d.mean.mean(),
                "mean_divergence_error": d.mean.error(),
                "median": q.median, "p90": q.p90, "p99": q.p99, "p999": q.p999, "largest": q.largest,
                "same_top_token": d.same.mean(),
                "same_top_token_error": d.same.error(),
                "mean_loss_difference": d.loss.mean(),
            })
        });
        print(&serde_json::to_string_pretty(&out)?);
        return Ok(ExitCode::SUCCESS);
    }
    print(&format!("perplexity        {:.4} +/- {:.5}", estimate.perplexity(), estimate.error()));
    if let Some(q) = quantiles {
        print(&format!("of the other      {:.4} +/- {:.5}", d.base.perplexity(), d.base.error()));
        print(&format!("ratio             {:.5} +/- {:.5}", d.loss.mean().exp(), d.loss.mean().exp() * d.loss.error()));
        print(&format!("mean divergence   {:.6} +/- {:.6}", d.mean.mean(), d.mean.error()));
        print(&format!(
            "  median {:.6}, 90 % {:.6}, 99 % {:.6}, 99.9 % {:.6}, largest {:.6}",
            q.median, q.p90, q.p99, q.p999, q.largest
        ));
        print(&format!("same top token    {:.3} % +/- {:.3} %", 100.0 * d.same.mean(), 100.0 * d.same.error()));
    }
    let plural = if chunks == 1 { "" } else { "s" };
    say(&format!("{chunks} chunk{plural} of {chunk} tokens, {} scored, in {seconds:.1} s", estimate.losses.count()));
    Ok(ExitCode::SUCCESS)
}
