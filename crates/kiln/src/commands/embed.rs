//! `kiln embed` and `kiln rerank`: vectors of texts, and how well texts answer a question.

use std::path::{Path, PathBuf};
use std::process::ExitCode;
use std::sync::Arc;

use anyhow::bail;
use kiln_engine::embed::{Length, Pooling, cosine, pair};
use kiln_engine::model::Model;
use kiln_engine::run::EmbedRequest;
use kiln_engine::tokenizer::{AddSpecial, ParseSpecial};
use serde_json::json;

use super::prompt::whole_text;
use crate::model::{ModelFlags, OneSequence, resolve};
use crate::output::{print, say};

/// Flags of `kiln embed`.
#[derive(clap::Args)]
#[command(after_help = "Examples:
  kiln embed minilm.gguf \"A cat sits\" \"A dog runs\" --similarity
  kiln embed smollm2 --file titles.txt --pooling mean --json > vectors.json
  cat titles.txt | kiln embed smollm2 --pooling mean

Texts come as arguments, or one on each line of a file or of stdin. Each becomes a line of numbers, in the same order, an \
empty line too; with --pooling none, each of its tokens does. Models that \
were made for it need no --pooling, and do better than those that were made to talk.")]
pub(crate) struct Arguments {
    /// GGUF file or a name, as `kiln pull` takes them
    model: PathBuf,
    /// The texts; without any, the lines of stdin
    #[arg(conflicts_with_all = ["file", "tokens"])]
    texts: Vec<String>,
    /// The texts are the lines of this file
    #[arg(short, long, value_name = "FILE", conflicts_with = "tokens")]
    file: Option<PathBuf>,
    /// Token ids instead of a text
    #[arg(long, value_name = "IDS", value_delimiter = ',')]
    tokens: Option<Vec<u32>>,
    /// Truncate texts that are longer than the context; without it they are an error
    #[arg(long)]
    truncate: bool,
    /// How the vectors of tokens become one: none, mean, cls, last, rank [default: what the model was made for]
    #[arg(long, value_name = "NAME", value_parser = pooling)]
    pooling: Option<Pooling>,
    /// Bring vectors to the length 1 by this norm: 2 is the usual one, 1 sums magnitudes, 0 makes the largest element 32760, -1
    /// leaves them as they are. What --pooling none and rank give stays as it is unless this is said
    #[arg(long, value_name = "NORM", allow_negative_numbers = true)]
    normalize: Option<i32>,
    /// Keep the first N elements of each vector, for Matryoshka models
    #[arg(long, value_name = "ELEMENTS", value_parser = clap::value_parser!(u32).range(1..))]
    dimensions: Option<u32>,
    /// Print the cosine similarity of every pair of texts instead of their vectors
    #[arg(long)]
    similarity: bool,
    /// Print JSON
    #[arg(long)]
    json: bool,
    #[command(flatten)]
    flags: ModelFlags,
}

/// Flags of `kiln rerank`.
#[derive(clap::Args)]
#[command(after_help = "Examples:
  kiln rerank reranker.gguf \"What do pandas eat?\" \"Bamboo.\" \"Paris is large.\"
  kiln rerank reranker.gguf \"What do pandas eat?\" --file texts.txt --top 3

Prints a line for each text, the best first: its score, its number from 0 on, and the text.")]
pub(crate) struct RerankArguments {
    /// GGUF file of a reranker, or a name, as `kiln pull` takes them
    model: PathBuf,
    /// What is asked
    query: String,
    /// The texts; without any, the lines of stdin
    #[arg(conflicts_with = "file")]
    texts: Vec<String>,
    /// The texts are the lines of this file
    #[arg(short, long, value_name = "FILE")]
    file: Option<PathBuf>,
    /// Print only the best N
    #[arg(long, value_name = "TEXTS", value_parser = clap::value_parser!(u32).range(1..))]
    top: Option<u32>,
    /// Print JSON
    #[arg(long)]
    json: bool,
    #[command(flatten)]
    flags: ModelFlags,
}

pub(super) fn pooling(name: &str) -> Result<Pooling, String> {
    Pooling::from_name(name).ok_or_else(|| format!("it can be {}", Pooling::names()))
}

/// The texts that were given, or the lines of a file or of stdin. Empty lines keep their place.
fn texts(given: &[String], file: Option<&Path>) -> anyhow::Result<Vec<String>> {
    if !given.is_empty() {
        return Ok(given.to_vec());
    }
    let lines: Vec<String> = whole_text(file)?.lines().map(str::to_owned).collect();
    if lines.is_empty() {
        bail!("there is no text to embed\nhint: give texts as arguments, or one on each line of stdin or of --file");
    }
    Ok(lines)
}

/// What becomes of texts that are longer than the context.
#[derive(Clone, Copy, PartialEq, Eq)]
enum TooLong {
    Refuse,
    Truncate,
}

/// Vectors of texts, as the model and the flags have it.
fn vectors(
    model: &Arc<Model>,
    flags: &ModelFlags,
    texts: &mut [Vec<u32>],
    pooling: Pooling,
    too_long: TooLong,
) -> anyhow::Result<Vec<Vec<f32>>> {
    if let Some(nth) = texts.iter().position(Vec::is_empty) {
        bail!("text {} is empty, and this model makes no tokens of it\nhint: leave the line out", nth + 1);
    }
    let expected = texts.iter().map(Vec::len).max();
    let scheduler = flags.scheduler(model, OneSequence { expected, ..OneSequence::default() })?;
    let context = scheduler.context();
    let long: Vec<usize> = (0..texts.len()).filter(|nth| texts[*nth].len() > context).collect();
    if let (Some(first), TooLong::Refuse) = (long.first(), too_long) {
        let (tokens, trained) = (texts[*first].len(), model.config.context);
        let raise = if context < trained { format!("; -c goes up to {trained}") } else { String::new() };
        bail!(
            "text {} has {tokens} tokens, and the context has {context}\nhint: --truncate shortens it{raise}",
            first + 1
        );
    }
    if !long.is_empty() {
        say(&format!("note: {} of {} texts are truncated to {context} tokens", long.len(), texts.len()));
    }
    let vocab = model.tokenizer.vocab();
    for nth in long {
        texts[nth].truncate(context);
        // The token that ends a text stays.
        if let (Some(last), Some(eos)) = (texts[nth].last_mut(), vocab.eos.filter(|_| vocab.add_eos)) {
            *last = eos;
        }
    }
    Ok(scheduler.embed(EmbedRequest { texts: texts.to_vec(), pooling })?)
}

/// Runs `kiln embed`.
pub(crate) fn run(arguments: &Arguments) -> anyhow::Result<ExitCode> {
    let model = arguments.flags.open(&resolve(Some(&arguments.model))?)?;
    let pooling = Pooling::choose(&model, arguments.pooling)?;
    let mut tokens: Vec<Vec<u32>> = match &arguments.tokens {
        Some(ids) => vec![ids.clone()],
        None => texts(&arguments.texts, arguments.file.as_deref())?
            .iter()
            .map(|text| model.tokenizer.encode(text, AddSpecial::Yes, ParseSpecial::No))
            .collect::<Result<_, _>>()?,
    };
    let too_long = if arguments.truncate { TooLong::Truncate } else { TooLong::Refuse };
    let rows = vectors(&model, &arguments.flags, &mut tokens, pooling, too_long)?;
    let counts: Vec<usize> = tokens.iter().map(Vec::len).collect();
    let plain = matches!(pooling, Pooling::None | Pooling::Rank);
    let length = Length::from_number(arguments.normalize.unwrap_or(if plain { -1 } else { 2 }));
    let mut lists = Vec::with_capacity(rows.len());
    for (row, count) in rows.iter().zip(&counts) {
        // Without a pooling, the vectors of a text's tokens lie one after the other.
        let width = if pooling == Pooling::None { row.len() / count } else { row.len() };
        let kept = arguments.dimensions.map_or(width, |n| n as usize);
        if kept > width {
            bail!(
                "--dimensions is {kept}, the vectors of this model have {width} elements\nhint: it can only shorten them"
            );
        }
        let mut vectors: Vec<Vec<f32>> = row.chunks_exact(width).map(|vector| vector[..kept].to_vec()).collect();
        vectors.iter_mut().for_each(|vector| length.apply(vector));
        lists.push(vectors);
    }
    if arguments.similarity {
        return similarity(&lists.concat(), arguments.json);
    }
    if arguments.json {
        let row = |((i, vectors), tokens): ((usize, &Vec<Vec<f32>>), &usize)| match pooling {
            Pooling::None => json!({"index": i, "tokens": tokens, "embedding": vectors}),
            _ => json!({"index": i, "tokens": tokens, "embedding": vectors[0]}),
        };
        let rows: Vec<_> = lists.iter().enumerate().zip(&counts).map(row).collect();
        let width = lists.first().and_then(|vectors| vectors.first()).map_or(0, Vec::len);
        print(&json!({"pooling": pooling.name(), "dimensions": width, "data": rows}).to_string());
        return Ok(ExitCode::SUCCESS);
    }
    for vector in lists.iter().flatten() {
        print(&vector.iter().map(f32::to_string).collect::<Vec<_>>().join(" "));
    }
    Ok(ExitCode::SUCCESS)
}

/// Cosine similarities of all pairs, as a table.
fn similarity(vectors: &[Vec<f32>], as_json: bool) -> anyhow::Result<ExitCode> {
    let table: Vec<Vec<f64>> = vectors.iter().map(|a| vectors.iter().map(|b| cosine(a, b)).collect()).collect();
    if as_json {
        print(&json!({"similarity": table}).to_string());
        return Ok(ExitCode::SUCCESS);
    }
    for row in table {
        print(&row.iter().map(|value| format!("{value:7.4}")).collect::<Vec<_>>().join(" "));
    }
    Ok(ExitCode::SUCCESS)
}

/// Runs `kiln rerank`.
pub(crate) fn rerank(arguments: &RerankArguments) -> anyhow::Result<ExitCode> {
    let model = arguments.flags.open(&resolve(Some(&arguments.model))?)?;
    let pooling = Pooling::choose(&model, Some(Pooling::Rank))?;
    let texts = texts(&arguments.texts, arguments.file.as_deref())?;
    let pairs: Vec<Vec<u32>> =
        texts.iter().map(|text| pair(&model, &arguments.query, text)).collect::<Result<_, _>>()?;
    let job = OneSequence { expected: pairs.iter().map(Vec::len).max(), ..OneSequence::default() };
    let scores = arguments.flags.scheduler(&model, job)?.embed(EmbedRequest { texts: pairs, pooling })?;
    let mut order: Vec<(usize, f32)> =
        scores.iter().enumerate().map(|(i, scores)| (i, scores.first().copied().unwrap_or(0.0))).collect();
    order.sort_by(|a, b| b.1.total_cmp(&a.1));
    order.truncate(arguments.top.map_or(usize::MAX, |n| n as usize));
    if arguments.json {
        let row = |(i, score): &(usize, f32)| json!({"index": i, "relevance_score": score, "document": texts[*i]});
        print(&json!({"results": order.iter().map(row).collect::<Vec<_>>()}).to_string());
        return Ok(ExitCode::SUCCESS);
    }
    for (i, score) in order {
        print(&format!("{score:8.4} {i:4} {}", texts[i]));
    }
    Ok(ExitCode::SUCCESS)
}
