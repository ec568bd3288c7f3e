//! `kiln bench MODEL --sequences 1,2,4`: batched decode, as a server does it.

use std::process::ExitCode;
use std::sync::Arc;
use std::time::Instant;

use kiln_engine::arch::{PAGE, Room};
use kiln_engine::model::Model;
use kiln_engine::run::{Engine, Entry, SequenceId, StepKind, Wanted, step_kinds};
use kiln_kernels::sample;
use serde_json::json;

use super::model::{ModelArguments, step_json, step_table};
use crate::output::{print, progress};

/// One width.
pub(super) struct Row {
    pub(super) sequences: usize,
    /// Seconds of reading all prompts.
    reading: f64,
    /// Seconds of writing all texts.
    writing: f64,
    /// Where the time of one more token of each text goes, if that was asked for.
    steps: Vec<StepKind>,
}

/// What each of several texts is: tokens before, tokens of the prompt, tokens to write.
#[derive(Clone, Copy)]
pub(super) struct Texts {
    pub(super) depth: usize,
    pub(super) prompt: usize,
    pub(super) written: usize,
    pub(super) repetitions: usize,
    /// Whether the steps of one more token are timed.
    pub(super) profiled: bool,
}

impl Row {
    /// Seconds of a step that writes a token to each sequence.
    pub(super) fn step(&self, texts: &Texts) -> f64 {
        self.writing / texts.written.max(1) as f64
    }

    /// Tokens a second of reading and of writing, of all texts together.
    pub(super) fn rates(&self, texts: &Texts) -> (f64, f64) {
        let rate = |tokens: usize, seconds: f64| (self.sequences * tokens) as f64 / seconds.max(1e-9);
        (rate(texts.prompt, self.reading), rate(texts.written, self.writing))
    }
}

/// Runs the command for each of the widths.
pub(super) fn run(arguments: &ModelArguments, model: &Arc<Model>) -> anyhow::Result<ExitCode> {
    let (depth, of) = (arguments.depth, "--sequences");
    let (prompt, written) = (arguments.one_prompt(of)?, arguments.one_gen(of)?);
    let texts = Texts { depth, prompt, written, repetitions: arguments.repetitions(), profiled: arguments.profile };
    let (mut engine, rows) = measure(arguments, model, &texts, &arguments.sequences)?;
    let ceiling = if texts.profiled { engine.read_ceiling() } else { None };
    report(arguments, &engine, &texts, (&rows, ceiling))?;
    Ok(ExitCode::SUCCESS)
}

/// Times each of the widths.
pub(super) fn measure(
    arguments: &ModelArguments,
    model: &Arc<Model>,
    texts: &Texts,
    widths: &[usize],
) -> anyhow::Result<(Engine, Vec<Row>)> {
    anyhow::ensure!(widths.iter().all(|n| *n > 0), "--sequences must be at least 1 each");
    let most = widths.iter().copied().max().unwrap_or(1);
    let context = texts.depth + texts.prompt + texts.written + usize::from(texts.profiled);
    anyhow::ensure!(texts.prompt > 0 && texts.written > 0, "--sequences needs a prompt and tokens to generate");
    let room = Room { sequences: most, states: most, pages: most * context.div_ceil(PAGE), ..Room::one(context) };
    let mut engine = arguments.flags.engine(model, room)?;
    let bar = progress((widths.len() * (1 + texts.repetitions)) as u64, "bench");
    let mut rows = Vec::new();
    for &sequences in widths {
        let mut best: Option<Row> = None;
        // The first run compiles.
        for run in 0..=texts.repetitions {
            let row = together(&mut engine, sequences, texts)?;
            if run > 0 && best.as_ref().is_none_or(|b| row.reading + row.writing < b.reading + b.writing) {
                best = Some(row);
            }
            bar.inc(1);
        }
        rows.extend(best);
    }
    bar.finish_and_clear();
    Ok((engine, rows))
}

/// Reads a prompt for each sequence and writes to all of them at once.
pub(super) fn together(engine: &mut Engine, sequences: usize, texts: &Texts) -> anyhow::Result<Row> {
    let vocab = engine.model().config.vocab;
    let token = |i: usize, sequence: usize| ((i * 7919 + sequence * 104_729 + 13) % vocab) as u32;
    // Owners keep their beginnings apart, so that every prompt is computed.
    let open = |engine: &mut Engine| (0..sequences).map(|i| engine.open(i as u64)).collect::<Result<Vec<_>, _>>();
    let ids: Vec<SequenceId> = open(engine)?;
    let read = texts.depth + texts.prompt;
    let prompts: Vec<Vec<u32>> = (0..sequences).map(|s| (0..read).map(|i| token(i, s)).collect()).collect();
    for (id, prompt) in ids.iter().zip(&prompts) {
        feed_prompt(engine, *id, &prompt[..texts.depth])?;
    }
    let start = Instant::now();
    for (id, prompt) in ids.iter().zip(&prompts) {
        feed_prompt(engine, *id, &prompt[texts.depth..])?;
    }
    let reading = start.elapsed().as_secs_f64();
    let start = Instant::now();
    let going: Vec<(SequenceId, u32)> = ids.iter().zip(0..).map(|(id, s)| (*id, token(read, s))).collect();
    engine.go_on(&going, texts.written, sample::Row::default())?;
    let writing = start.elapsed().as_secs_f64();
    let mut steps = Vec::new();
    if texts.profiled {
        let tokens: Vec<[u32; 1]> = (0..sequences).map(|s| [token(read + texts.written, s)]).collect();
        let pairs = ids.iter().zip(&tokens);
        let entries: Vec<Entry<'_>> =
            pairs.map(|(id, tokens)| Entry { sequence: *id, tokens, wanted: Wanted::Last }).collect();
        steps = step_kinds(engine.profile(&entries)?);
    }
    ids.into_iter().for_each(|id| engine.close(id));
    Ok(Row { sequences, reading, writing, steps })
}

fn feed_prompt(engine: &mut Engine, sequence: SequenceId, tokens: &[u32]) -> anyhow::Result<()> {
    for tokens in tokens.chunks(engine.batch()) {
        engine.feed(&[Entry { sequence, tokens, wanted: Wanted::Nothing }])?;
    }
    Ok(())
}

fn report(
    arguments: &ModelArguments,
    engine: &Engine,
    texts: &Texts,
    (rows, ceiling): (&[Row], Option<f64>),
) -> anyhow::Result<()> {
    let name = engine.model().gguf.metadata().get_str_or("general.name", "model")?;
    if arguments.json {
        let one = |row: &Row| {
            let (read, written) = row.rates(texts);
            let steps: Vec<_> = row.steps.iter().map(step_json).collect();
            json!({ "sequences": row.sequences, "prompt_tokens_per_second": read, "tokens_per_second": written,
                    "prompt_seconds": row.reading, "seconds": row.writing, "steps": steps })
        };
        let rows: Vec<_> = rows.iter().map(one).collect();
        let all = json!({ "model": name, "device": engine.describe(), "prompt": texts.prompt,
                          "generated": texts.written, "depth": arguments.depth, "read_bytes_per_second": ceiling, "sequences": rows });
        print(&serde_json::to_string_pretty(&all)?);
        return Ok(());
    }
    print(&format!("{name} on {}: {} + {} tokens", engine.describe(), texts.prompt, texts.written));
    print(&format!(
        "{:>9} {:>18} {:>18} {:>18}",
        "sequences", "reading, tokens/s", "writing, tokens/s", "each, tokens/s"
    ));
    for row in rows {
        let (read, written) = row.rates(texts);
        let each = written / row.sequences as f64;
        print(&format!("{:>9} {read:>18.1} {written:>18.1} {each:>18.1}", row.sequences));
    }
    for row in rows.iter().filter(|row| !row.steps.is_empty()) {
        let token = ("a token of each", row.writing / texts.written as f64);
        step_table(&format!("{} sequences", row.sequences), &row.steps, (Some(token), ceiling));
    }
    Ok(())
}
