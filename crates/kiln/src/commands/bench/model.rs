//! `kiln bench MODEL`: tokens per second of reading a prompt (pp) and of generating (tg), several times over.

use std::collections::HashMap;
use std::io::Write as _;
use std::path::{Path, PathBuf};
use std::process::ExitCode;
use std::sync::Arc;
use std::time::{Duration, Instant};

use anyhow::ensure;
use kiln_engine::Session;
use kiln_engine::run::{StepKind, Wanted, step_kinds};
use kiln_gpu::StepTime;
use kiln_system::files::{Output, Overwrite};
use serde_json::json;

use super::load::Load;
use super::plot::{Bar, Kind, Picture, Span, Test, plain, svg};
use super::sequences::Texts;
use crate::draft_flags::DraftFlags;
use crate::model::ModelFlags;
use crate::output::{print, progress, say, size};

/// Runs before the first that counts take this long, after the one that compiles.
const WARM: Duration = Duration::from_millis(300);

/// Flags of `kiln bench MODEL`.
#[derive(clap::Args)]
pub(crate) struct ModelArguments {
    /// GGUF file or a name, as `kiln pull` takes them
    model: Option<PathBuf>,
    /// The same by a flag
    #[arg(short = 'm', long = "model", value_name = "MODEL", conflicts_with = "model")]
    named: Option<PathBuf>,
    /// Prompt tokens to process; several values give a test each, as in `-p 128,512`; 0 skips the test
    #[arg(short = 'p', long, value_name = "TOKENS", value_delimiter = ',', default_value = "512")]
    pub(super) n_prompt: Vec<usize>,
    /// Tokens to generate; several values give a test each, as in `-n 16,64`; 0 skips the test
    #[arg(short = 'n', long, value_name = "TOKENS", value_delimiter = ',', default_value = "128")]
    pub(super) n_gen: Vec<usize>,
    /// Tokens in the context before each test
    #[arg(short = 'd', long, default_value_t = 0)]
    pub(super) depth: usize,
    /// How often each test is run [default: 5; 1 with --cold]
    #[arg(short = 'r', long)]
    pub(super) repetitions: Option<usize>,
    /// Generate this many sequences in one batch instead: a row for each number, as in `--sequences 1,2,4,8`
    #[arg(long, value_delimiter = ',', value_name = "NUMBERS")]
    pub(super) sequences: Vec<usize>,
    /// Drive the scheduler with concurrent requests instead, as a server does: CLIENTSxREQUESTS:PROMPT+GENERATED, several with commas
    /// between, as in `--load 64x2:512+64,16x2:2048+32`; -r runs each several times [default: 3]
    #[arg(long, value_delimiter = ',', value_name = "LOADS", conflicts_with_all = ["sequences", "profile", "depth", "plot", "cold"])]
    pub(super) load: Vec<Load>,
    /// Generate answers with and without drafts in turn instead, and show what drafts gain: an edit of a file of code, a question about it, a
    /// story; -n tokens each, -r times [default: 3]
    #[arg(long, conflicts_with_all = ["sequences", "profile", "depth", "plot", "cold", "load"])]
    speculative: bool,
    /// Show where the time goes: one row for each kind of step, timed by the device's own clock
    #[arg(long)]
    pub(super) profile: bool,
    /// Draw a picture as well: a roofline, where the time goes, texts written together, one token step by step
    #[arg(long, value_name = "FILE.svg", conflicts_with = "cold")]
    plot: Option<PathBuf>,
    /// Write what deploy/simulate.py needs to know of a server like this one, to predict many: times of steps by the number of sequences
    /// (--sequences, else 1,2,4,8), speed of prefill, cost of context, room of the cache
    #[arg(long, value_name = "FILE.json", conflicts_with_all = ["plot", "cold", "load", "speculative", "profile"])]
    curve: Option<PathBuf>,
    /// Overwrite the picture or the curve if it is there
    #[arg(long)]
    force: bool,
    /// Time the way from empty caches to the first token instead, phase by phase
    #[arg(long, conflicts_with_all = ["sequences", "profile", "depth"])]
    cold: bool,
    /// The process of one cold start, which was begun then
    #[arg(long, hide = true, requires = "cold")]
    cold_run: Option<u64>,
    /// Print JSON
    #[arg(long)]
    pub(super) json: bool,
    #[command(flatten)]
    pub(super) flags: ModelFlags,
    #[command(flatten)]
    pub(super) draft: DraftFlags,
}

impl ModelArguments {
    pub(super) fn repetitions(&self) -> usize {
        self.repetitions.unwrap_or(5)
    }

    /// The tests: prompt processing (pp) and generation (tg), with their tokens.
    fn tests(&self) -> Vec<(&'static str, usize)> {
        let all = |kind, tokens: &[usize]| tokens.iter().filter(|n| **n > 0).map(|n| (kind, *n)).collect::<Vec<_>>();
        [all("pp", &self.n_prompt), all("tg", &self.n_gen)].concat()
    }

    /// The tokens of the prompt, for measurements with one of them.
    pub(super) fn one_prompt(&self, of: &str) -> anyhow::Result<usize> {
        one(&self.n_prompt, "-p", of)
    }

    /// The tokens to generate, likewise.
    pub(super) fn one_gen(&self, of: &str) -> anyhow::Result<usize> {
        one(&self.n_gen, "-n", of)
    }
}

fn one(values: &[usize], flag: &str, of: &str) -> anyhow::Result<usize> {
    ensure!(values.len() == 1, "{of} takes one value of {flag}, {} are given", values.len());
    Ok(values[0])
}

/// One row of the table.
struct Row {
    test: String,
    /// Tokens per second of each repetition.
    rates: Vec<f64>,
    /// The steps of one more run, by kind; empty unless asked for.
    steps: Vec<StepKind>,
    /// The same as they came, and how many tokens they read at once.
    times: Vec<StepTime>,
    tokens: usize,
}

impl Row {
    fn mean(&self) -> f64 {
        self.rates.iter().sum::<f64>() / self.rates.len() as f64
    }

    fn deviation(&self) -> f64 {
        let mean = self.mean();
        let n = self.rates.len().saturating_sub(1).max(1) as f64;
        (self.rates.iter().map(|r| (r - mean).powi(2)).sum::<f64>() / n).sqrt()
    }
}

/// Runs the command.
pub(crate) fn run(arguments: &ModelArguments) -> anyhow::Result<ExitCode> {
    let path = crate::model::resolve(arguments.named.as_deref().or(arguments.model.as_deref()))?;
    ensure!(arguments.repetitions() > 0, "--repetitions must be at least 1");
    if let Some(started) = arguments.cold_run {
        return super::cold::child(arguments, started, || arguments.flags.open(&path));
    }
    let model = arguments.flags.open(&path)?;
    if arguments.cold {
        let context = model.usual_context();
        // What this process has mapped cannot be forgotten.
        drop(model);
        return super::cold::run(arguments, &path, context);
    }
    let output = |path: &PathBuf| {
        let inputs: Vec<&Path> = model.gguf.paths().collect();
        Output::create(path, Overwrite::if_forced(arguments.force), &inputs)
    };
    // Before anything is timed: a wrong name should not cost minutes.
    let picture = arguments.plot.as_ref().map(output).transpose()?;
    if let Some(curve) = arguments.curve.as_ref().map(output).transpose()? {
        return super::curve::run(arguments, &model, curve);
    }
    if !arguments.load.is_empty() {
        return super::load::run(arguments, &model);
    }
    if arguments.speculative {
        return super::speculative::run(arguments, &model);
    }
    if !arguments.sequences.is_empty() && picture.is_none() {
        return super::sequences::run(arguments, &model);
    }
    let tests = arguments.tests();
    ensure!(!tests.is_empty(), "nothing to time: both --n-prompt and --n-gen are 0");
    let needed = arguments.depth + tests.iter().map(|(_, n)| *n).max().unwrap_or(0);
    let mut flags = arguments.flags.clone();
    flags.ctx_size = flags.ctx_size.or(Some(needed.max(1)));
    let mut session = flags.session(&model)?;
    // Ids spread over the vocabulary; what they say does not matter for the time.
    let vocab = model.config.vocab;
    let tokens: Vec<u32> = (0..needed.max(1)).map(|i| ((i * 7919 + 13) % vocab) as u32).collect();

    let mut rows = Vec::new();
    let bar = progress((tests.len() * arguments.repetitions()) as u64, "bench");
    for (kind, n) in tests {
        let mut rates = Vec::new();
        // The first runs warm up: kernels are compiled, then clocks rise.
        let mut warm = None;
        while rates.len() < arguments.repetitions() {
            session.reset()?;
            if arguments.depth > 0 {
                session.feed(&tokens[..arguments.depth], Wanted::Last)?;
            }
            let start = Instant::now();
            if kind == "tg" {
                session.go_on(tokens[arguments.depth], n)?;
            } else {
                session.feed(&tokens[arguments.depth..arguments.depth + n], Wanted::Last)?;
            }
            if warm.is_some_and(|since: Instant| since.elapsed() > WARM) {
                rates.push(n as f64 / start.elapsed().as_secs_f64());
                bar.inc(1);
            }
            warm.get_or_insert_with(Instant::now);
        }
        let profiled = arguments.profile || picture.is_some();
        let (times, tokens_of) = if profiled {
            session.reset()?;
            if arguments.depth > 0 {
                session.feed(&tokens[..arguments.depth], Wanted::Last)?;
            }
            // Generating is timed behind some tokens, so that clocks are as they were.
            let (before, timed) = if kind == "tg" { (n.min(32) - 1, 1) } else { (0, n) };
            let (before, timed) = tokens[arguments.depth..][..before + timed].split_at(before);
            feed(&mut session, before)?;
            (session.profile(timed)?, timed.len())
        } else {
            (Vec::new(), 0)
        };
        let steps = step_kinds(times.clone());
        let depth = if arguments.depth > 0 { format!(" @ d{}", arguments.depth) } else { String::new() };
        rows.push(Row { test: format!("{kind}{n}{depth}"), rates, steps, times, tokens: tokens_of });
    }
    bar.finish_and_clear();
    let steps = session.plan(1, 1)?.len();
    let profiled = arguments.profile || picture.is_some();
    let ceiling = if profiled { session.read_ceiling() } else { None };
    report(arguments, &session, &rows, (steps, ceiling))?;
    if let Some(mut output) = picture {
        let drawn = plot(arguments, session, &rows, ceiling)?;
        output.write_all(drawn.as_bytes()).map_err(|why| output.failed(why))?;
        let name = output.path().display().to_string();
        output.finish()?;
        say(&format!("the picture is in {name}"));
    }
    Ok(ExitCode::SUCCESS)
}

/// The picture of these tests, and of texts written together.
fn plot(arguments: &ModelArguments, mut session: Session, rows: &[Row], read: Option<f64>) -> anyhow::Result<String> {
    let mut tests = Vec::new();
    for row in rows {
        // Batches may be padded: what a step has to do is that of the tokens that were asked for.
        let plan = session.plan(row.tokens.max(1), 1)?;
        let of: HashMap<&str, (Kind, f64)> = plan
            .steps
            .iter()
            .map(|step| (&*step.label, (Kind::of(step.call.operation().name()), step.call.operation().work().flops)))
            .collect();
        let kind = |label: &str| of.get(label).map_or(Kind::Other, |(kind, _)| *kind);
        let mut flops: HashMap<&str, (Kind, f64)> = HashMap::new();
        for time in &row.times {
            let sum = flops.entry(plain(&time.label)).or_insert((kind(&time.label), 0.0));
            sum.1 += of.get(&*time.label).map_or(0.0, |(_, flops)| *flops);
        }
        let bar = |s: &StepKind| {
            let (kind, flops) = flops.get(&*s.name).copied().unwrap_or((Kind::Other, 0.0));
            Bar { name: s.name.clone(), kind, count: s.count, seconds: s.time.as_secs_f64(), bytes: s.bytes, flops }
        };
        let mut start = 0.0;
        let span = |time: &StepTime| {
            let seconds = time.time.as_secs_f64();
            start += seconds;
            Span { name: time.label.clone(), kind: kind(&time.label), start: start - seconds, seconds }
        };
        let spans = if row.tokens == 1 { row.times.iter().map(span).collect() } else { Vec::new() };
        tests.push(Test { name: row.test.clone(), rate: row.mean(), bars: row.steps.iter().map(bar).collect(), spans });
    }
    let model = Arc::clone(session.model());
    let arithmetic = session.arithmetic_ceilings();
    let name = model.gguf.metadata().get_str_or("general.name", "model")?.to_owned();
    let says: Vec<String> = tests.iter().map(|t| format!("{}: {:.1} tokens/s", t.name, t.rate)).collect();
    let subtitle = format!("{} on {}; {}", size(model.gguf.data_bytes()), session.describe(), says.join(", "));
    // Two models would not always fit.
    drop(session);
    let usual = [1, 2, 4, 8, 16];
    let widths = if arguments.sequences.is_empty() { &usual[..] } else { &arguments.sequences };
    let texts = Texts {
        depth: 0,
        prompt: 16,
        written: arguments.n_gen.first().map_or(1, |n| (*n).clamp(1, 32)),
        repetitions: 1,
        profiled: false,
    };
    let (_, together) = super::sequences::measure(arguments, &model, &texts, widths)?;
    let mut batches: Vec<(usize, f64)> = together.iter().map(|row| (row.sequences, row.rates(&texts).1)).collect();
    batches.sort_by_key(|(n, _)| *n);
    Ok(svg(&Picture { title: name, subtitle, tests, read, arithmetic, batches }))
}

/// Feeds tokens one by one, as generating does.
fn feed(session: &mut Session, tokens: &[u32]) -> anyhow::Result<()> {
    for token in tokens {
        session.feed(&[*token], Wanted::Last)?;
    }
    Ok(())
}

fn report(
    arguments: &ModelArguments,
    session: &Session,
    rows: &[Row],
    (steps, ceiling): (usize, Option<f64>),
) -> anyhow::Result<()> {
    let model = session.model();
    let name = &kiln_system::text::shown(model.gguf.metadata().get_str_or("general.name", "model")?);
    if arguments.json {
        let rows: Vec<_> = rows
            .iter()
            .map(|r| {
                let steps: Vec<_> = r.steps.iter().map(step_json).collect();
                json!({ "test": r.test, "tokens_per_second": r.mean(), "deviation": r.deviation(), "runs": r.rates, "steps": steps })
            })
            .collect();
        let all = json!({
            "model": name,
            "bytes": model.gguf.data_bytes(),
            "device": session.describe(),
            "version": env!("CARGO_PKG_VERSION"),
            "steps_per_token": steps,
            "read_bytes_per_second": ceiling,
            "tests": rows,
        });
        print(&serde_json::to_string_pretty(&all)?);
        return Ok(());
    }
    print(&format!("{name}, {}, on {}", size(model.gguf.data_bytes()), session.describe()));
    print(&format!("{steps} steps for each generated token"));
    print(&format!("{:20} {:>22}", "test", "tokens/s"));
    for row in rows {
        print(&format!("{:20} {:>12.2} ± {:>7.2}", row.test, row.mean(), row.deviation()));
    }
    rows.iter().filter(|r| !r.steps.is_empty() && arguments.profile).for_each(|row| profile(row, ceiling));
    Ok(())
}

/// A kind of step for programs.
pub(super) fn step_json(step: &StepKind) -> serde_json::Value {
    json!({ "step": step.name, "count": step.count, "seconds": step.time.as_secs_f64(), "bytes": step.bytes })
}

/// Where the time of a test goes, and of a token beside it.
fn profile(row: &Row, ceiling: Option<f64>) {
    let token = row.test.starts_with("tg").then(|| 1.0 / row.mean());
    step_table(&row.test, &row.steps, (token.map(|seconds| ("a token", seconds)), ceiling));
}

/// A table of steps, each from the end of the one before it to its own; `whole` is what they make, with its seconds by the clock.
pub(super) fn step_table(test: &str, steps: &[StepKind], (whole, ceiling): (Option<(&str, f64)>, Option<f64>)) {
    let all: f64 = steps.iter().map(|s| s.time.as_secs_f64()).sum();
    print(&format!("\n{test}: {:.3} ms in steps between barriers, each with what is lost before it", 1e3 * all));
    if let Some((name, seconds)) = whole {
        print(&format!("{name} takes {:.3} ms by the clock, where steps may overlap", 1e3 * seconds));
    }
    if let Some(ceiling) = ceiling {
        print(&format!("memory can be read at {:.2} TB/s", 1e-12 * ceiling));
    }
    let heads = ["count", "each, us", "all, us", "share", "each, MB", "TB/s", "of read"];
    let heads: String = heads.iter().map(|head| format!(" {head:>9}")).collect();
    print(&format!("{:44}{heads}", "step"));
    for StepKind { name, count, time, bytes } in steps {
        let seconds = time.as_secs_f64();
        let (us, rate) = (1e6 * seconds, if seconds > 0.0 { bytes / seconds } else { 0.0 });
        let (each, megabytes) = (us / *count as f64, 1e-6 * bytes / *count as f64);
        let of_read = ceiling.map_or_else(String::new, |ceiling| format!("{:.0} %", 100.0 * rate / ceiling));
        let (share, rate) = (format!("{:.1} %", 100.0 * seconds / all), 1e-12 * rate);
        print(&format!(
            "{name:44} {count:>9} {each:>9.2} {us:>9.1} {share:>9} {megabytes:>9.2} {rate:>9.2} {of_read:>9}"
        ));
    }
}
