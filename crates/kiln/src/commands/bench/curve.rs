//! `kiln bench MODEL --curve FILE.json`: what `deploy/simulate.py` needs to know of one server, so that it can predict many.

use std::collections::BTreeMap;
use std::io::Write as _;
use std::process::ExitCode;
use std::sync::Arc;

use anyhow::{Context as _, ensure};
use kiln_engine::arch::PAGE;
use kiln_engine::model::Model;
use kiln_engine::run::{Engine, Policy};
use kiln_llm::Job;
use kiln_system::files::Output;
use serde::Serialize;

use super::model::ModelArguments;
use super::sequences::{Row, Texts, together};
use crate::output::{print, progress, say};

/// Sequences at once where nobody says: as many as `kiln serve` runs.
const WIDTHS: [usize; 4] = [1, 2, 4, 8];

/// Tokens of context that the cost of context is measured behind, unless -d says.
const DEPTH: usize = 4096;

/// Runs of each test where nobody says; the best counts.
const RUNS: usize = 2;

/// Tokens of a prompt that a step takes at least.
const LEAST_CHUNK: usize = 32;

/// One server, in the words of `deploy/simulate.py`.
#[derive(Debug, Serialize)]
struct Curve {
    model: String,
    device: String,
    version: &'static str,
    /// Milliseconds of a step by the number of sequences in it, without what their context costs.
    step_ms: BTreeMap<usize, f64>,
    /// Tokens of prompts a second.
    prefill: f64,
    /// Nanoseconds that a token of context costs in each step.
    context_ns: f64,
    /// Tokens of a prompt in a step beside sequences that decode.
    chunk: usize,
    /// Sequences at once.
    slots: usize,
    /// Tokens that the KV cache holds.
    cache_tokens: usize,
}

/// Runs the command.
pub(super) fn run(arguments: &ModelArguments, model: &Arc<Model>, file: Output) -> anyhow::Result<ExitCode> {
    let of = "--curve";
    let (prompt, written) = (arguments.one_prompt(of)?, arguments.one_gen(of)?);
    ensure!(prompt > 0 && written > 0, "{of} needs a prompt and tokens to generate");
    let widths = if arguments.sequences.is_empty() { WIDTHS.to_vec() } else { arguments.sequences.clone() };
    ensure!(widths.iter().all(|n| *n > 0), "--sequences must be at least 1 each");
    let slots = widths.iter().copied().max().unwrap_or(1);
    // The engine of a server, so that its cache is what a server has.
    let job = Job { sequences: slots, ..Job::default() };
    let drafting = arguments.draft.open(model)?;
    let mut engine = drafting.engine(&arguments.flags.opening()?, model, job)?;
    let texts =
        Texts { depth: 0, prompt, written, repetitions: arguments.repetitions.unwrap_or(RUNS), profiled: false };
    let cache_tokens = engine.pages().0 * PAGE;
    let needed = slots * (prompt + written).div_ceil(PAGE) * PAGE;
    ensure!(
        needed <= cache_tokens && prompt + written <= engine.context(),
        "{slots} sequences of {} tokens need {needed} tokens of cache, and there are {cache_tokens} for contexts of {}\nhint: fewer --sequences, or a smaller -p and -n",
        prompt + written,
        engine.context()
    );
    let left = engine.context().min(cache_tokens) - prompt - written;
    let deep = Texts { depth: if arguments.depth > 0 { arguments.depth } else { DEPTH.min(left) }, ..texts };
    ensure!(deep.depth > 0 && deep.depth <= left, "no context is left to measure its cost in\nhint: a larger -c");
    let bar = progress((widths.len() + 1) as u64, "bench");
    let mut rows = Vec::new();
    for &width in &widths {
        rows.push(best(&mut engine, width, &texts)?);
        bar.inc(1);
    }
    let alone = if widths.contains(&1) { None } else { Some(best(&mut engine, 1, &texts)?) };
    let alone =
        alone.as_ref().or_else(|| rows.iter().find(|row| row.sequences == 1)).context("no row of one sequence")?;
    let behind = best(&mut engine, 1, &deep)?;
    bar.inc(1);
    bar.finish_and_clear();
    let context_seconds = ((behind.step(&deep) - alone.step(&texts)) / deep.depth as f64).max(0.0);
    let widest = rows.iter().max_by_key(|row| row.sequences).unwrap_or(alone);
    let prefill = widest.rates(&texts).0;
    let curve = Curve {
        model: model.gguf.metadata().get_str_or("general.name", "model")?.to_owned(),
        device: engine.describe(),
        version: env!("CARGO_PKG_VERSION"),
        step_ms: rows.iter().map(|row| (row.sequences, bare_step(row, &texts, context_seconds) * 1e3)).collect(),
        prefill,
        context_ns: context_seconds * 1e9,
        chunk: chunk(&engine, prefill),
        slots,
        cache_tokens,
    };
    let written_to = file.path().display().to_string();
    let mut file = file;
    writeln!(file, "{}", serde_json::to_string_pretty(&curve)?).map_err(|why| file.failed(why))?;
    file.finish()?;
    if arguments.json {
        print(&serde_json::to_string_pretty(&curve)?);
    } else {
        say(&format!("{written_to}: deploy/simulate.py --curve {written_to} predicts many such servers"));
    }
    Ok(ExitCode::SUCCESS)
}

/// The fastest of some runs; the first one compiles.
fn best(engine: &mut Engine, sequences: usize, texts: &Texts) -> anyhow::Result<Row> {
    let mut best = together(engine, sequences, texts)?;
    for run in 0..texts.repetitions {
        let row = together(engine, sequences, texts)?;
        if run == 0 || row.step(texts) < best.step(texts) {
            best = row;
        }
    }
    Ok(best)
}

/// Seconds of a step without those of its context. At least half of it is taken for granted: times of different runs differ.
fn bare_step(row: &Row, texts: &Texts, context_seconds: f64) -> f64 {
    let context = row.sequences * (texts.prompt + texts.written / 2);
    let step = row.step(texts);
    (step - context as f64 * context_seconds).max(step / 2.0)
}

/// Tokens of a prompt that a step takes while others decode: as many as keep them waiting no longer than they should.
fn chunk(engine: &Engine, prefill: f64) -> usize {
    let most = engine.batch().max(1);
    ((prefill * Policy::default().stutter.as_secs_f64()) as usize).clamp(LEAST_CHUNK.min(most), most)
}
