//! `kiln bench MODEL --cold`: from nothing to the first token, phase by phase. Each run is a process of its own with empty caches of
//! kernels, and the model's file is forgotten by the system first, where that can be asked for.

use std::fs::File;
use std::path::Path;
use std::process::{Command, ExitCode};
use std::sync::Arc;
use std::time::{Duration, Instant, SystemTime, UNIX_EPOCH};

use anyhow::{Context as _, bail, ensure};
use kiln_engine::Session;
use kiln_engine::model::Model;
use kiln_engine::run::Wanted;
use kiln_gguf::Gguf;
use kiln_system::files::Workspace;
use serde_json::{Value, json};

use super::model::ModelArguments;
use super::time;
use crate::output::{print, progress, say, size};

/// The phases of a run, in order.
const PHASES: [(&str, &str); 7] = [
    ("process", "the program starts"),
    ("file", "the model's file is opened and checked"),
    ("device", "the device is opened"),
    ("weights", "weights are loaded"),
    ("kernels", "plans are made, kernels compiled"),
    ("prompt", "the prompt is read, the first token drawn"),
    ("second", "the second token, with what it needs"),
];

fn microseconds() -> u64 {
    SystemTime::now().duration_since(UNIX_EPOCH).map_or(0, |since| since.as_micros() as u64)
}

const COLD: &str = "--cold";

/// Tokens that are drawn: the first and the second.
const DRAWN: usize = 2;

/// Tokens of the prompt: as many as asked for, where they fit the context of the model beside those that are drawn.
fn prompt_tokens(arguments: &ModelArguments, context: usize) -> anyhow::Result<usize> {
    let asked = arguments.one_prompt(COLD)?;
    ensure!(asked > 0, "--cold needs a prompt: --n-prompt must be at least 1");
    let context = arguments.flags.ctx_size.unwrap_or(context);
    ensure!(context > DRAWN, "--cold needs a context of at least {} tokens", DRAWN + 1);
    Ok(asked.min(context - DRAWN))
}

/// Runs the command: starts processes that measure themselves, and shows what they say.
pub(super) fn run(arguments: &ModelArguments, path: &Path, context: usize) -> anyhow::Result<ExitCode> {
    let prompt = prompt_tokens(arguments, context)?;
    if prompt < arguments.one_prompt(COLD)? {
        say(&format!("note: the prompt has {prompt} tokens: the model's context has {context}"));
    }
    let program = std::env::current_exe().context("cannot find this program to start it again")?;
    let (paths, bytes) = {
        let gguf = Gguf::open(path)?;
        (gguf.paths().map(Path::to_owned).collect::<Vec<_>>(), gguf.data_bytes())
    };
    let runs = arguments.repetitions.unwrap_or(1);
    let bar = progress(runs as u64, "cold starts");
    let mut forgotten = true;
    let mut all = Vec::new();
    for _ in 0..runs {
        forgotten &= paths.iter().all(|path| forget(path));
        let place = std::env::temp_dir();
        let folder = Workspace::in_folder(&place)
            .with_context(|| format!("cannot make a folder for empty caches in {}", place.display()))?;
        let mut command = Command::new(&program);
        command.args(std::env::args_os().skip(1)).arg("--cold-run").arg(microseconds().to_string());
        // Drivers have caches of their own.
        command
            .env("KILN_CACHE_DIR", folder.path())
            .env("MESA_SHADER_CACHE_DISABLE", "true")
            .env("__GL_SHADER_DISK_CACHE", "0");
        let output =
            command.stderr(std::process::Stdio::inherit()).output().context("cannot start the program again")?;
        if !output.status.success() {
            bail!("a cold start failed ({})", output.status);
        }
        let told: Value = serde_json::from_slice(&output.stdout).context("a cold start told no times")?;
        all.push(told);
        bar.inc(1);
    }
    bar.finish_and_clear();
    if !forgotten {
        say("note: the system keeps the file in memory, so reading it is not cold");
    }
    report(arguments, (bytes, prompt), &all, forgotten);
    Ok(ExitCode::SUCCESS)
}

/// Asks the system to forget what it holds of a file.
fn forget(path: &Path) -> bool {
    File::open(path).is_ok_and(|file| kiln_system::os::forget_file(&file))
}

fn seconds(told: &Value, phase: &str) -> f64 {
    told["phases"][phase].as_f64().unwrap_or(0.0)
}

/// The middle one of all runs.
fn median(all: &[Value], of: impl Fn(&Value) -> f64) -> f64 {
    let mut values: Vec<f64> = all.iter().map(of).collect();
    values.sort_by(f64::total_cmp);
    values.get(values.len() / 2).copied().unwrap_or(0.0)
}

fn report(arguments: &ModelArguments, (bytes, prompt): (u64, usize), all: &[Value], forgotten: bool) {
    let first = |told: &Value| PHASES[..6].iter().map(|(phase, _)| seconds(told, phase)).sum::<f64>();
    let device = all.first().map_or("", |told| told["device"].as_str().unwrap_or_default());
    if arguments.json {
        let phases: serde_json::Map<String, Value> = PHASES
            .iter()
            .map(|(phase, _)| ((*phase).to_owned(), median(all, |told| seconds(told, phase)).into()))
            .collect();
        let runs: Vec<&Value> = all.iter().map(|told| &told["phases"]).collect();
        let told = json!({
            "device": device, "bytes": bytes, "prompt": prompt, "file_was_forgotten": forgotten,
            "seconds": phases, "first_token_seconds": median(all, first), "runs": runs,
        });
        return print(&format!("{told:#}"));
    }
    print(&format!("{} on {device}, {prompt} tokens of prompt, {} cold start(s)", size(bytes), all.len()));
    for (phase, about) in PHASES {
        if phase == "second" {
            print(&format!("{:44} {:>12}", "the first token, from the start", time(median(all, first))));
        }
        print(&format!("{about:44} {:>12}", time(median(all, |told| seconds(told, phase)))));
    }
}

/// One start, told as JSON: the process that [`run`] starts.
pub(super) fn child(
    arguments: &ModelArguments,
    started: u64,
    open: impl FnOnce() -> anyhow::Result<Arc<Model>>,
) -> anyhow::Result<ExitCode> {
    let process = Duration::from_micros(microseconds().saturating_sub(started));
    let mut clock = Instant::now();
    let mut lap = || std::mem::replace(&mut clock, Instant::now()).elapsed().as_secs_f64();
    // The device is opened meanwhile, as other commands do; what it takes longer than the file counts for it.
    arguments.flags.open_early();
    let model = open()?;
    let file = lap();
    let prompt = prompt_tokens(arguments, model.usual_context())?;
    let mut flags = arguments.flags.clone();
    flags.ctx_size = flags.ctx_size.or(Some(prompt + DRAWN));
    let executor = flags.executor()?;
    let device = lap();
    let (context, caches) = (flags.context(&model), [flags.cache_type_k, flags.cache_type_v]);
    let mut session = Session::with_caches(Arc::clone(&model), executor, context, caches, &mut |_, _| {})?;
    let weights = lap();
    let vocab = model.config.vocab;
    let tokens: Vec<u32> = (0..prompt).map(|i| ((i * 7919 + 13) % vocab) as u32).collect();
    let logits = session.feed(&tokens, Wanted::Last)?;
    let token = kiln_engine::sampler::greedy(&logits, &[]).unwrap_or(0);
    let kernels = session.preparing().as_secs_f64();
    let reading = (lap() - kernels).max(0.0);
    session.go_on(token, 1)?;
    let second = lap();
    let phases = [process.as_secs_f64(), file, device, weights, kernels, reading, second];
    let phases: serde_json::Map<String, Value> =
        PHASES.iter().zip(phases).map(|((phase, _), seconds)| ((*phase).to_owned(), seconds.into())).collect();
    print(&json!({"device": session.describe(), "phases": phases}).to_string());
    Ok(ExitCode::SUCCESS)
}
