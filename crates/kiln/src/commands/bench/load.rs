//! `kiln bench MODEL --load 64x2:512+64`: concurrent clients against the scheduler itself, as a server has them, without HTTP.

use std::process::ExitCode;
use std::str::FromStr;
use std::sync::Arc;
use std::time::{Duration, Instant};

use anyhow::{Context as _, bail, ensure};
use kiln_engine::arch::{PAGE, Room};
use kiln_engine::model::Model;
use kiln_engine::run::{Event, Policy, Request, Scheduler, StopRule, Tally};
use serde_json::{Value, json};

use super::model::ModelArguments;
use super::sequences::{Texts, together};
use crate::output::{print, progress};

/// Runs of each load where no number is given: the first compiles, the third is warm.
const RUNS: usize = 3;

/// Clients that each send requests one after the other.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct Load {
    clients: usize,
    /// Requests of each client.
    requests: usize,
    /// Tokens of each prompt.
    prompt: usize,
    /// Tokens that each request generates.
    generated: usize,
}

impl FromStr for Load {
    type Err = String;

    fn from_str(text: &str) -> Result<Load, String> {
        let form = || "a load is CLIENTSxREQUESTS:PROMPT+GENERATED, such as 64x2:512+64".to_owned();
        let (who, what) = text.split_once(':').ok_or_else(form)?;
        let (clients, requests) = who.split_once('x').ok_or_else(form)?;
        let (prompt, generated) = what.split_once('+').ok_or_else(form)?;
        let count = |text: &str| match text.trim().parse::<usize>() {
            Ok(n) if (1..=1 << 20).contains(&n) => Ok(n),
            _ => Err(format!("{text:?} is not a number from 1 to {}: {}", 1 << 20, form())),
        };
        Ok(Load {
            clients: count(clients)?,
            requests: count(requests)?,
            prompt: count(prompt)?,
            generated: count(generated)?,
        })
    }
}

impl std::fmt::Display for Load {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        write!(f, "{}x{}:{}+{}", self.clients, self.requests, self.prompt, self.generated)
    }
}

impl Load {
    fn all(&self) -> usize {
        self.clients * self.requests
    }

    fn context(&self) -> usize {
        self.prompt + self.generated
    }
}

/// What the engine alone reaches with the sizes of a load, in tokens a second.
#[derive(Clone, Copy)]
struct OwnRates {
    prefill: f64,
    decode: f64,
}

impl OwnRates {
    /// Seconds that a load would take at these rates.
    fn seconds(&self, load: &Load) -> f64 {
        let all = load.all() as f64;
        all * load.prompt as f64 / self.prefill + all * load.generated as f64 / self.decode
    }
}

/// One run of a load.
struct Run {
    seconds: f64,
    first_tokens: Vec<f64>,
    /// Seconds between two tokens of one request.
    gaps: Vec<f64>,
    before: Tally,
    after: Tally,
}

/// One request as its client saw it.
struct Seen {
    first: Duration,
    gaps: Vec<Duration>,
}

/// Runs the command.
pub(super) fn run(arguments: &ModelArguments, model: &Arc<Model>) -> anyhow::Result<ExitCode> {
    let loads = &arguments.load;
    let sequences = loads.iter().map(|load| load.clients).max().unwrap_or(1);
    let context = loads.iter().map(Load::context).max().unwrap_or(1);
    let most = model.usual_context();
    ensure!(context <= most, "a request of {context} tokens does not fit the model's context of {most}");
    // Steps that are on their way have a page more where a sequence ends with one.
    let pages = loads.iter().map(|load| load.clients * (1 + load.context().div_ceil(PAGE))).max().unwrap_or(1);
    let room = Room { sequences, states: sequences, pages, ..Room::one(context) };
    let mut engine = arguments.flags.engine(model, room)?;
    let runs = arguments.repetitions.unwrap_or(RUNS);
    let bar = progress((loads.len() * (runs + 1)) as u64, "bench");
    let mut own = Vec::new();
    for load in loads {
        let texts = Texts { depth: 0, prompt: load.prompt, written: load.generated, repetitions: 1, profiled: false };
        // The first run compiles.
        together(&mut engine, load.clients, &texts)?;
        let (prefill, decode) = together(&mut engine, load.clients, &texts)?.rates(&texts);
        own.push(OwnRates { prefill, decode });
        bar.inc(1);
    }
    let device = engine.describe();
    let policy = Policy { queue: usize::MAX, compiles_ahead: true, ..Policy::default() };
    let scheduler = Arc::new(Scheduler::start(engine, policy));
    let mut rows = Vec::new();
    for (load, own) in loads.iter().zip(own) {
        for number in 1..=runs {
            rows.push((*load, own, number, one(&scheduler, load, number)?));
            bar.inc(1);
        }
    }
    bar.finish_and_clear();
    let name = kiln_system::text::shown(model.gguf.metadata().get_str_or("general.name", "model")?);
    if arguments.json {
        let rows: Vec<Value> = rows.iter().map(|(load, own, number, run)| run.json(load, own, *number)).collect();
        let all = json!({ "model": name, "device": device, "version": env!("CARGO_PKG_VERSION"), "loads": rows });
        print(&serde_json::to_string_pretty(&all)?);
        return Ok(ExitCode::SUCCESS);
    }
    print(&format!("{name} on {device}"));
    print(&format!(
        "{:>18} {:>3} {:>9} {:>12} {:>15} {:>15} {:>7} {:>7} {:>10}",
        "load", "run", "seconds", "generated/s", "first p50/p95", "gap p50/p99", "padding", "plans", "of engine"
    ));
    for (load, own, number, run) in &rows {
        print(&run.line(load, own, *number));
    }
    print(
        "first: ms from a request to its first token; gap: ms between tokens of a request; padding: rows computed for no token, in steps",
    );
    print(
        "with prefill; plans: prepared during the run; of engine: the time at the engine's own rates, by the time it took",
    );
    Ok(ExitCode::SUCCESS)
}

/// All clients of a load at once.
fn one(scheduler: &Arc<Scheduler>, load: &Load, number: usize) -> anyhow::Result<Run> {
    let before = scheduler.load().tally;
    let start = Instant::now();
    let clients: Vec<_> = (0..load.clients)
        .map(|client| {
            let (scheduler, load) = (Arc::clone(scheduler), *load);
            std::thread::Builder::new()
                .name(format!("client {client}"))
                .spawn(move || {
                    let ask = |request| request_of(&scheduler, &load, (number * load.clients + client, request));
                    (0..load.requests).map(ask).collect::<anyhow::Result<Vec<Seen>>>()
                })
                .context("cannot start a thread for each client")
        })
        .collect::<anyhow::Result<_>>()?;
    let mut seen = Vec::new();
    for client in clients {
        match client.join() {
            Ok(requests) => seen.extend(requests?),
            Err(_) => bail!("a client's thread ended early"),
        }
    }
    let seconds = start.elapsed().as_secs_f64();
    let sorted = |mut times: Vec<f64>| {
        times.sort_by(f64::total_cmp);
        times
    };
    Ok(Run {
        seconds,
        first_tokens: sorted(seen.iter().map(|seen| seen.first.as_secs_f64()).collect()),
        gaps: sorted(seen.iter().flat_map(|seen| &seen.gaps).map(Duration::as_secs_f64).collect()),
        before,
        after: scheduler.load().tally,
    })
}

/// One request of a client, whose prompt shares no prefix with any other.
fn request_of(scheduler: &Scheduler, load: &Load, (client, request): (usize, usize)) -> anyhow::Result<Seen> {
    let vocab = scheduler.model().config.vocab;
    let seed = (client * 1_000_003 + request) as u64;
    // Numbers of a generator of 64 bits (SplitMix64): what the tokens say does not matter for the time.
    let token = |i: u64| {
        let mut z = (seed << 24 | i).wrapping_mul(0x9E37_79B9_7F4A_7C15);
        z = (z ^ (z >> 30)).wrapping_mul(0xBF58_476D_1CE4_E5B9);
        z = (z ^ (z >> 27)).wrapping_mul(0x94D0_49BB_1331_11EB);
        ((z ^ (z >> 31)) % vocab as u64) as u32
    };
    let request = Request {
        limit: Some(load.generated),
        stop: StopRule { ignore_end: true, ..StopRule::default() },
        reuse: false,
        ..Request::new((0..load.prompt as u64).map(token).collect())
    };
    let start = Instant::now();
    let (mut first, mut last, mut gaps) = (None, start, Vec::with_capacity(load.generated));
    for event in scheduler.generate(request) {
        match event {
            Event::Token { .. } => {
                let now = Instant::now();
                if first.is_none() {
                    first = Some(now - start);
                } else {
                    gaps.push(now - last);
                }
                last = now;
            }
            Event::Failed(error) => return Err(error.into()),
            _ => {}
        }
    }
    Ok(Seen { first: first.context("a request ended without a token")?, gaps })
}

/// The value below which this share of sorted ones lies.
fn quantile(sorted: &[f64], share: f64) -> f64 {
    let at = (share * sorted.len() as f64) as usize;
    sorted.get(at.min(sorted.len().saturating_sub(1))).copied().unwrap_or(0.0)
}

impl Run {
    fn plans(&self) -> u64 {
        self.after.plans - self.before.plans
    }

    /// Rows of steps with prefill that no token was in, by all of them.
    fn padding(&self) -> f64 {
        let rows = (self.after.rows - self.before.rows).max(1) as f64;
        let tokens = (self.after.row_tokens - self.before.row_tokens) as f64;
        (1.0 - tokens / rows).max(0.0)
    }

    fn line(&self, load: &Load, own: &OwnRates, number: usize) -> String {
        let ms = |sorted: &[f64], shares: [f64; 2]| {
            let [a, b] = shares.map(|share| 1e3 * quantile(sorted, share));
            format!("{a:.1}/{b:.1}")
        };
        let rate = (load.all() * load.generated) as f64 / self.seconds;
        format!(
            "{:>18} {number:>3} {:>9.2} {rate:>12.1} {:>15} {:>15} {:>6.1}% {:>7} {:>9.0}%",
            load.to_string(),
            self.seconds,
            ms(&self.first_tokens, [0.5, 0.95]),
            ms(&self.gaps, [0.5, 0.99]),
            100.0 * self.padding(),
            self.plans(),
            100.0 * own.seconds(load) / self.seconds,
        )
    }

    fn json(&self, load: &Load, own: &OwnRates, number: usize) -> Value {
        let quantiles = |sorted: &[f64]| json!({ "p50": quantile(sorted, 0.5), "p95": quantile(sorted, 0.95), "p99": quantile(sorted, 0.99) });
        let (requests, steps) = (load.all(), |tally: &Tally| tally.steps.iter().sum::<u64>());
        json!({
            "load": load.to_string(), "run": number, "clients": load.clients, "requests": requests,
            "prompt_tokens": load.prompt, "generated_tokens": load.generated, "seconds": self.seconds,
            "generated_tokens_per_second": (requests * load.generated) as f64 / self.seconds,
            "tokens_per_second": (requests * load.context()) as f64 / self.seconds,
            "first_token_seconds": quantiles(&self.first_tokens), "inter_token_seconds": quantiles(&self.gaps),
            "steps": steps(&self.after) - steps(&self.before), "padding": self.padding(), "plans_made": self.plans(),
            "swaps": self.after.swaps - self.before.swaps,
            "engine_prefill_tokens_per_second": own.prefill, "engine_decode_tokens_per_second": own.decode,
            "share_of_engine": own.seconds(load) / self.seconds,
        })
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_load_is_read_as_it_is_written() {
        let load: Load = "64x2:512+64".parse().unwrap();
        assert_eq!(load, Load { clients: 64, requests: 2, prompt: 512, generated: 64 });
        assert_eq!((load.to_string(), load.all(), load.context()), ("64x2:512+64".to_owned(), 128, 576));
        for wrong in ["", "64", "64x2", "64x2:512", "0x2:512+64", "64x2:512+0", "ax2:512+64", "1x1:1+99999999"] {
            let why = wrong.parse::<Load>().unwrap_err();
            assert!(why.contains("64x2:512+64"), "{why}");
        }
    }

    #[test]
    fn quantiles_are_those_of_sorted_values() {
        let sorted: Vec<f64> = (0..100).map(f64::from).collect();
        assert_eq!([0.5, 0.95, 0.99].map(|share| quantile(&sorted, share)), [50.0, 95.0, 99.0]);
        assert_eq!((quantile(&[], 0.5), quantile(&[7.0], 0.99)), (0.0, 7.0));
    }
}
