//! `kiln top`: a running server in the terminal: requests, tokens per second, cache, queue, memory.

use std::collections::VecDeque;
use std::io::IsTerminal as _;
use std::process::ExitCode;
use std::time::{Duration, Instant};

use anyhow::{Context as _, bail};
use kiln_system::interrupt::Catch;
use kiln_system::terminal::{Quiet, columns_of_stdout, key};
use serde::Deserialize;
use serde_json::Value;
use unicode_width::UnicodeWidthChar as _;

use crate::output::{erase_lines, print, print_styled, say, size};

/// Looks that are drawn.
const SAMPLES: usize = 48;
const BARS: [char; 8] = ['▁', '▂', '▃', '▄', '▅', '▆', '▇', '█'];

/// Flags of `kiln top`.
#[derive(clap::Args)]
#[command(after_help = "Examples:
  kiln top
  kiln top 10.0.0.5:8080 --api-key KEY
  kiln top --json             # once, as JSON

q or Ctrl-C ends it.")]
pub(crate) struct Arguments {
    /// Address of the server
    #[arg(default_value = "http://127.0.0.1:8080")]
    url: String,
    /// API key of the server
    #[arg(long, env = "KILN_API_KEY", hide_env_values = true, value_name = "KEY")]
    api_key: Option<String>,
    /// Seconds between updates
    #[arg(long, default_value_t = 1.0, value_name = "SECONDS")]
    interval: f64,
    /// Print the state once, as JSON
    #[arg(long)]
    json: bool,
}

/// What the server tells.
#[derive(Deserialize)]
struct Seen {
    model: String,
    device: String,
    sequences: u64,
    uptime_seconds: u64,
    load: Load,
    tokens: Tokens,
    memory: Option<Memory>,
}

#[derive(Deserialize)]
struct Load {
    waiting: u64,
    reading: u64,
    writing: u64,
    swapped: u64,
    free_pages: u64,
    pages: u64,
}

#[derive(Deserialize)]
struct Tokens {
    prompt: u64,
    cached: u64,
    generated: u64,
}

#[derive(Deserialize)]
struct Memory {
    free: u64,
    total: u64,
}

/// The address of a server as people type it: HTTP, unless they say otherwise.
fn address(url: &str) -> String {
    let scheme = if url.contains("://") { "" } else { "http://" };
    format!("{scheme}{}", url.trim_end_matches('/'))
}

fn look(arguments: &Arguments, agent: &ureq::Agent) -> anyhow::Result<Value> {
    let url = format!("{}/engine", address(&arguments.url));
    let mut request = agent.get(&url);
    if let Some(key) = &arguments.api_key {
        request = request.header("Authorization", format!("Bearer {key}"));
    }
    let mut reply = request.call().map_err(|error| match error {
        ureq::Error::StatusCode(401) => anyhow::anyhow!("{url} asks for a key\nhint: --api-key KEY, or KILN_API_KEY"),
        ureq::Error::StatusCode(503) => anyhow::anyhow!("{url}: no model is loaded now"),
        error => anyhow::anyhow!("{url}: {error}\nhint: is `kiln serve` running there?"),
    })?;
    let text = reply.body_mut().read_to_string().with_context(|| format!("{url} broke off"))?;
    serde_json::from_str(&text).with_context(|| format!("{url} is no server of Kiln's"))
}

/// Two looks, and what happened between them.
#[derive(Default)]
struct History {
    before: Option<(Instant, u64, u64)>,
    written: VecDeque<f64>,
    read: VecDeque<f64>,
}

fn keep(values: &mut VecDeque<f64>, value: f64) {
    values.push_back(value);
    if values.len() > SAMPLES {
        values.pop_front();
    }
}

impl History {
    fn add(&mut self, seen: &Seen, now: Instant) {
        let (written, read) = (seen.tokens.generated, seen.tokens.prompt.saturating_sub(seen.tokens.cached));
        if let Some((then, written_then, read_then)) = self.before {
            let seconds = now.duration_since(then).as_secs_f64().max(1e-3);
            keep(&mut self.written, written.saturating_sub(written_then) as f64 / seconds);
            keep(&mut self.read, read.saturating_sub(read_then) as f64 / seconds);
        }
        self.before = Some((now, written, read));
    }

    fn lines(&self, seen: &Seen) -> Vec<(&'static str, String)> {
        let last = |values: &VecDeque<f64>| values.back().copied().unwrap_or_default();
        let Load { waiting, reading, writing, swapped, free_pages, pages } = seen.load;
        let rate = |values| format!("{:>10.1}  {}", last(values), graph(values));
        let used = pages.saturating_sub(free_pages);
        let cached = 100.0 * seen.tokens.cached as f64 / seen.tokens.prompt.max(1) as f64;
        let mut lines = vec![
            ("generation tok/s", rate(&self.written)),
            ("prompt tok/s", rate(&self.read)),
            (
                "sequences",
                format!("{:>10}  of {}: {reading} prefill, {writing} decode", reading + writing, seen.sequences),
            ),
            (
                "waiting",
                format!(
                    "{waiting:>10}  {}",
                    if swapped > 0 { format!("{swapped} moved to host memory") } else { String::new() }
                ),
            ),
            ("cache pages", format!("{used:>10}  of {pages} {}", meter(used, pages))),
            ("prompt cached", format!("{cached:>8.0} %  of {} tokens", seen.tokens.prompt)),
        ];
        if let Some(Memory { free, total }) = seen.memory {
            let used = total.saturating_sub(free);
            lines.push(("memory", format!("{:>10}  of {} {}", size(used), size(total), meter(used, total))));
        }
        lines
    }
}

/// Values as bars, the tallest as high as the line.
fn graph(values: &VecDeque<f64>) -> String {
    let most = values.iter().copied().fold(1e-9, f64::max);
    values.iter().map(|v| BARS[((v / most * 7.0).round() as usize).min(7)]).collect()
}

/// A share as a bar.
fn meter(part: u64, all: u64) -> String {
    let full = if all == 0 { 0 } else { (part as f64 / all as f64 * 20.0).round() as usize }.min(20);
    format!("{}{}", "█".repeat(full), "░".repeat(20 - full))
}

/// Runs the command.
pub(crate) fn run(arguments: &Arguments) -> anyhow::Result<ExitCode> {
    if !(0.05..=3600.0).contains(&arguments.interval) {
        bail!("--interval is {}, it must be 0.05 to 3600 seconds", arguments.interval);
    }
    let config = ureq::Agent::config_builder().timeout_global(Some(Duration::from_secs(10)));
    let agent: ureq::Agent = config.build().into();
    if arguments.json {
        print(&look(arguments, &agent)?.to_string());
        return Ok(ExitCode::SUCCESS);
    }
    let (catch, typing) = (Catch::new(), Quiet::begin());
    let is_over = |seconds: f64| waits(Duration::from_secs_f64(seconds), typing.is_some(), &catch);
    let mut history = History::default();
    let (mut drawn, mut away) = (0, false);
    loop {
        let seen = match look(arguments, &agent) {
            Ok(seen) => seen,
            // A server that was there may come back.
            Err(why) if drawn > 0 || away => {
                match drawn {
                    0 => log::debug!("{why:#}"),
                    _ => say(&format!("{}; trying again", why.to_string().lines().next().unwrap_or_default())),
                }
                (drawn, history.before, away) = (0, None, true);
                if is_over(arguments.interval.max(1.0)) {
                    return Ok(ExitCode::SUCCESS);
                }
                continue;
            }
            Err(why) => return Err(why),
        };
        let seen: Seen = serde_json::from_value(seen).context("the server is of another version")?;
        history.add(&seen, Instant::now());
        let terminal = std::io::stdout().is_terminal();
        if terminal && drawn > 0 {
            erase_lines(drawn);
        }
        let columns = if terminal { columns_of_stdout().unwrap_or(usize::MAX) } else { usize::MAX };
        let lines = history.lines(&seen);
        print_styled(&fitted(&format!("{} on {}", seen.model, seen.device), columns), "1");
        print("");
        print(&fitted(&format!("up {} s{}", seen.uptime_seconds, if terminal { "; q quits" } else { "" }), columns));
        for (name, value) in &lines {
            print(&fitted(&format!("{name:16} {value}"), columns));
        }
        drawn = lines.len() + 2;
        if is_over(arguments.interval) {
            return Ok(ExitCode::SUCCESS);
        }
    }
}

/// Waits for the next update. `true` where the person at the terminal wants to leave: by `q`, or by Ctrl-C.
fn waits(time: Duration, has_keys: bool, catch: &Catch) -> bool {
    let end = Instant::now() + time;
    loop {
        let left = end.saturating_duration_since(Instant::now()).min(Duration::from_millis(100));
        if catch.happened() {
            return true;
        }
        if left.is_zero() {
            return false;
        }
        match has_keys {
            true if matches!(key(left), Some(b'q' | b'Q' | 4)) => return true,
            true => {}
            false => std::thread::sleep(left),
        }
    }
}

/// As much of a line as a terminal with this many columns shows in one row.
fn fitted(line: &str, columns: usize) -> String {
    let mut width = 0;
    let fits = |c: &char| {
        width += c.width().unwrap_or(0);
        width <= columns
    };
    line.chars().take_while(fits).collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn lines_fit_the_terminal() {
        assert_eq!(fitted("tokens/s  12.5 █████", 12), "tokens/s  12");
        assert_eq!(fitted("漢字漢字", 5), "漢字");
        assert_eq!(fitted("short", usize::MAX), "short");
    }

    #[test]
    fn addresses_need_no_scheme() {
        for (typed, want) in [
            ("10.0.0.5:8080", "http://10.0.0.5:8080"),
            ("http://localhost:1/", "http://localhost:1"),
            ("https://host/kiln/", "https://host/kiln"),
        ] {
            assert_eq!(address(typed), want);
        }
    }

    #[test]
    fn rates_are_of_the_time_between_two_looks() {
        let seen = |generated, prompt| {
            let text = format!(
                r#"{{"model":"m","device":"d","sequences":8,"uptime_seconds":1,"load":{{"waiting":1,"reading":0,"writing":2,
                "swapped":0,"free_pages":3,"pages":4}},"tokens":{{"prompt":{prompt},"cached":50,"generated":{generated}}},"memory":null}}"#
            );
            serde_json::from_str::<Seen>(&text).unwrap()
        };
        let (mut history, start) = (History::default(), Instant::now());
        history.add(&seen(100, 100), start);
        history.add(&seen(140, 150), start + Duration::from_secs(2));
        assert_eq!((history.written.back(), history.read.back()), (Some(&20.0), Some(&25.0)));
        let lines = history.lines(&seen(140, 150));
        assert!(lines[2].1.contains("of 8: 0 prefill, 2 decode"), "{lines:?}");
        assert!(lines[4].1.ends_with("of 4 █████░░░░░░░░░░░░░░░"), "{lines:?}");
        assert_eq!(graph(&VecDeque::from([0.0, 5.0, 10.0])), "▁▅█");
    }
}
