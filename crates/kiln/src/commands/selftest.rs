//! `kiln selftest`: the kernel cases of the tests, run by the release binary on the user's own device and driver.

use std::collections::HashSet;
use std::process::ExitCode;
use std::time::{Duration, Instant};

use anyhow::bail;
use kiln_gpu::{Device, Shader};
use kiln_kernels::case::{Case, Level};
use kiln_kernels::harness::{Outcome, Prepared};
use kiln_kernels::operation::Path;
use kiln_kernels::{KERNELS, Kernel};
use rayon::prelude::*;
use serde_json::json;

use crate::device::DeviceFlag;
use crate::output::{print, progress, say};

/// Flags of `kiln selftest`.
#[derive(clap::Args)]
#[command(after_help = "Examples:
  kiln selftest rms_norm rope --device 0
  kiln selftest --share 2/2
  kiln selftest --compile mul_mm --chosen --json")]
pub(crate) struct Arguments {
    /// Operations to test; all without any
    operations: Vec<String>,
    #[command(flatten)]
    device: DeviceFlag,
    /// Also run the cases that want a real GPU
    #[arg(long)]
    full: bool,
    #[command(flatten)]
    part: Part,
    /// Only one share of the cases of every operation: 1/2 is the first half. For several processes at once, as a software GPU computes for each
    /// on a core of its own
    #[arg(long, value_name = "I/N", value_parser = share_of, conflicts_with = "compile")]
    share: Option<[usize; 2]>,
    /// Run nothing: compile every kernel and print what the driver tells of it. Works without hardware (scripts/null-gpu)
    #[arg(long, conflicts_with = "full")]
    compile: bool,
    /// With --compile: only the kernels that the device takes by itself
    #[arg(long, requires = "compile")]
    chosen: bool,
    /// Print JSON
    #[arg(long)]
    json: bool,
}

/// Which cases of the operations are looked at, and on which paths.
#[derive(clap::Args)]
pub(crate) struct Part {
    /// Only cases whose name holds this text, in small or capital letters; may be given several times
    #[arg(long, value_name = "TEXT")]
    case: Vec<String>,
    /// Only these paths: scalar, int_dot, coopmat, fragment, fragment_prefill, coopmat2
    #[arg(long, value_name = "PATHS", value_delimiter = ',', value_parser = path_of)]
    pub(crate) path: Vec<Path>,
}

fn path_of(text: &str) -> Result<Path, String> {
    let names = Path::ALL.map(Path::name);
    let present = kiln_kernels::tuning::present(text);
    Path::ALL
        .into_iter()
        .find(|p| p.name() == present.trim_end())
        .ok_or_else(|| format!("no such path; there are {}", names.join(", ")))
}

fn share_of(text: &str) -> Result<[usize; 2], String> {
    let numbers = text.split_once('/').and_then(|(i, n)| Some([i.parse().ok()?, n.parse().ok()?]));
    numbers.filter(|[i, n]| (1..=*n).contains(i)).ok_or_else(|| "as 1/2 for the first of two, up to 2/2".into())
}

/// The cases of that share. Neighbours stay together: they have kernels in common.
fn within_share(mut cases: Vec<Case>, share: Option<[usize; 2]>) -> Vec<Case> {
    let Some([i, n]) = share else { return cases };
    let bound = |i: usize| cases.len() * i / n;
    let (first, end) = (bound(i - 1), bound(i));
    cases.truncate(end);
    cases.split_off(first)
}

impl Part {
    /// The cases of an operation that are looked at.
    pub(crate) fn cases(&self, kernel: &Kernel, level: Level) -> Vec<Case> {
        (kernel.cases)(level).into_iter().filter(|case| self.holds(&case.name)).collect()
    }

    /// Whether a case of this name is looked at. Types are written in capitals in names and not by people.
    fn holds(&self, name: &str) -> bool {
        self.case.is_empty() || self.case.iter().any(|text| name.to_lowercase().contains(&text.to_lowercase()))
    }

    /// The paths they are looked at on.
    pub(crate) fn paths(&self) -> Vec<Path> {
        if self.path.is_empty() { Path::ALL.to_vec() } else { self.path.clone() }
    }
}

/// The rows of one operation on one path.
struct Row {
    operation: &'static str,
    path: Path,
    passed: usize,
    failed: usize,
    worst: f64,
    time: Duration,
}

/// The operations of these names; all without any.
pub(crate) fn chosen(names: &[String]) -> anyhow::Result<Vec<&'static Kernel>> {
    for name in names {
        if !KERNELS.iter().any(|k| k.name == name) {
            let known: Vec<&str> = KERNELS.iter().map(|k| k.name).collect();
            bail!("no operation {name:?}\nhint: there are {}", known.join(", "));
        }
    }
    Ok(KERNELS.iter().filter(|k| names.is_empty() || names.iter().any(|n| n == k.name)).collect())
}

/// Runs the command.
pub(crate) fn run(arguments: &Arguments) -> anyhow::Result<ExitCode> {
    let kernels = chosen(&arguments.operations)?;
    if arguments.compile {
        return super::compile::run(&kernels, &arguments.device, arguments.chosen, arguments.json);
    }
    // Where nothing is tested, nothing is proved.
    let level = if arguments.full { Level::Full } else { Level::Small };
    if kernels.iter().all(|kernel| arguments.part.cases(kernel, level).is_empty()) {
        bail!(
            "no case fits --case {}\nhint: a case's name holds types and sizes: --case q4_0",
            arguments.part.case.join(", ")
        );
    }
    let start = Instant::now();
    let device = arguments.device.choice().open()?;
    let set_up = start.elapsed();
    if !arguments.json {
        print(&format!("device: {}", device.adapter.describe()));
    }
    // Cases whose references are computed at once: large ones take gigabytes.
    let at_once = if arguments.full { 8 } else { 64 };
    // All at once, on all cores; one that fails is met again, and named, by the case that wants it.
    let paths = arguments.part.paths();
    let cases_of = |kernel: &Kernel| within_share(arguments.part.cases(kernel, level), arguments.share);
    let shaders = shaders(kernels.iter().flat_map(|kernel| cases_of(kernel)).collect(), &paths, &device);
    let bar = progress(shaders.len() as u64, "compiling");
    let _ = device.prepare(&shaders, &|| bar.inc(1));
    bar.finish_and_clear();
    let compiled = start.elapsed() - set_up;
    let mut rows: Vec<Row> = Vec::new();
    let mut failures = Vec::new();
    if !arguments.json {
        print(&heading());
    }
    for kernel in kernels {
        let cases = cases_of(kernel);
        let bar = progress(cases.len() as u64, kernel.name);
        for chunk in cases.chunks(at_once) {
            let make = |case| {
                let clock = Instant::now();
                let made = Prepared::on(case, &device, &paths);
                tell_if_slow("made", case, &clock);
                // Once for all paths of the case: a reference computes on all threads, and one of them must not come to wait
                // for what it has itself begun, as it would where each path asked by itself.
                let clock = Instant::now();
                let _ = made.as_ref().map(|paths| paths.first().map(Prepared::expected));
                tell_if_slow("its reference computed", case, &clock);
                (case, made)
            };
            let mut ready = Vec::new();
            for (case, made) in chunk.par_iter().map(make).collect::<Vec<_>>() {
                match made {
                    Ok(prepared) => ready.extend(prepared.into_iter().map(|p| (case, p))),
                    Err(e) => {
                        bar.suspend(|| say(&format!("FAILED {}: {e}", case.name)));
                        failures.push(format!("{}: {e}", case.name));
                    }
                }
            }
            for (case, prepared) in &ready {
                let clock = Instant::now();
                let outcome = match prepared.run(&device) {
                    Ok(outcome) => outcome,
                    // Without the device no case can go on; anything else is this case's alone.
                    Err(e) if device.is_lost() => return Err(e.into()),
                    Err(e) => Outcome { error: f64::INFINITY, time: None, failures: vec![e.to_string()] },
                };
                tell_if_slow(prepared.path.name(), case, &clock);
                let row = row_of(&mut rows, kernel.name, prepared.path);
                row.time += clock.elapsed();
                row.worst = row.worst.max(outcome.error);
                if outcome.failures.is_empty() {
                    row.passed += 1;
                } else {
                    row.failed += 1;
                    let what = outcome.failures.join("; ");
                    let failure = format!("{} ({}): {what}", case.name, prepared.path.name());
                    bar.suspend(|| say(&format!("FAILED {failure}")));
                    failures.push(failure);
                }
            }
            bar.inc(chunk.len() as u64);
        }
        bar.finish_and_clear();
        if !arguments.json {
            rows.iter().filter(|r| r.operation == kernel.name).for_each(|r| print(&line(r)));
        }
    }
    for message in device.instance().validation_messages() {
        say(&format!("FAILED validation layer: {message}"));
        failures.push(format!("validation layer: {message}"));
    }
    let counts = device.pipeline_counts();
    let passed: usize = rows.iter().map(|r| r.passed).sum();
    let failed = failures.len();
    if arguments.json {
        let rows: Vec<_> = rows.iter().map(row_json).collect();
        print(&serde_json::to_string_pretty(&json!({
            "device": device.adapter.name,
            "driver": format!("{} {}", device.adapter.driver, device.adapter.driver_version),
            "rows": rows,
            "failures": failures,
            "passed": passed,
            "failed": failed,
            "glsl_compiled": counts.glsl_compiled,
            "driver_compiled": counts.driver_compiled,
            "pipelines": counts.made,
        }))?);
    } else {
        print(&format!(
            "pipelines: {} used, {} compiled from GLSL, {} compiled by the driver",
            counts.made, counts.glsl_compiled, counts.driver_compiled
        ));
        print(&format!(
            "set-up {:.2} s, pipelines {:.1} s, in all {:.1} s",
            set_up.as_secs_f64(),
            compiled.as_secs_f64(),
            start.elapsed().as_secs_f64()
        ));
        print(&format!("{passed} passed, {failed} failed"));
    }
    Ok(if failed == 0 { ExitCode::SUCCESS } else { ExitCode::from(1) })
}

/// Every shader of every case, each once. Cases are built for it and dropped: some hold much data.
fn shaders(cases: Vec<Case>, paths: &[Path], device: &Device) -> Vec<Shader> {
    let bar = progress(cases.len() as u64, "making cases");
    let of = |case: &Case| {
        let prepared = Prepared::on(case, device, paths).unwrap_or_default();
        bar.inc(1);
        prepared.iter().flat_map(|p| p.shaders().cloned().collect::<Vec<_>>()).collect::<HashSet<Shader>>()
    };
    let all: HashSet<Shader> =
        cases.chunks(8).flat_map(|few| few.par_iter().map(of).reduce(HashSet::new, join)).collect();
    bar.finish_and_clear();
    all.into_iter().collect()
}

/// With `-v`: where the time goes.
fn tell_if_slow(what: &str, case: &Case, since: &Instant) {
    let seconds = since.elapsed().as_secs_f64();
    if seconds > 2.0 {
        log::info!("{} ({what}): {seconds:.1} s", case.name);
    }
}

fn join(mut a: HashSet<Shader>, b: HashSet<Shader>) -> HashSet<Shader> {
    a.extend(b);
    a
}

fn row_of<'a>(rows: &'a mut Vec<Row>, operation: &'static str, path: Path) -> &'a mut Row {
    let at = rows.iter().position(|r| r.operation == operation && r.path == path).unwrap_or_else(|| {
        rows.push(Row { operation, path, passed: 0, failed: 0, worst: 0.0, time: Duration::ZERO });
        rows.len() - 1
    });
    &mut rows[at]
}

fn heading() -> String {
    let head = ("operation", "path", "passed", "failed", "worst nmse", "time");
    format!("{:16} {:9} {:>7} {:>7} {:>11} {:>9}", head.0, head.1, head.2, head.3, head.4, head.5)
}

fn line(r: &Row) -> String {
    let time = format!("{:.2} s", r.time.as_secs_f64());
    let Row { operation, passed, failed, worst, .. } = r;
    format!("{operation:16} {:9} {passed:>7} {failed:>7} {worst:>11.1e} {time:>9}", r.path.name())
}

fn row_json(r: &Row) -> serde_json::Value {
    json!({
        "operation": r.operation,
        "path": r.path.name(),
        "passed": r.passed,
        "failed": r.failed,
        "worst_nmse": if r.worst.is_finite() { Some(r.worst) } else { None },
        "seconds": r.time.as_secs_f64(),
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn cases_are_found_whatever_their_case() {
        let name = "mul_mat_vec Q4_K k=4096 m=14336 n=1";
        let holds = |texts: &[&str]| {
            let case = texts.iter().map(|&text| text.to_owned()).collect();
            Part { case, path: Vec::new() }.holds(name)
        };
        assert!(holds(&[]) && holds(&["q4_k"]) && holds(&["Q4_K"]) && holds(&["q8_0", "N=1"]));
        assert!(!holds(&["q4_0"]) && !holds(&["q8_0", "m=4096"]));
    }

    #[test]
    fn shares_are_all_cases_and_none_twice() {
        let names = |cases: Vec<Case>| cases.into_iter().map(|case| case.name).collect::<Vec<_>>();
        for kernel in KERNELS.iter().filter(|kernel| ["rms_norm", "argmax"].contains(&kernel.name)) {
            let cases = || (kernel.cases)(Level::Small);
            for n in [1, 2, 3, 100] {
                let parts = (1..=n).flat_map(|i| names(within_share(cases(), Some([i, n]))));
                assert_eq!(parts.collect::<Vec<_>>(), names(cases()), "{} in {n}", kernel.name);
            }
        }
        assert_eq!(share_of("2/3"), Ok([2, 3]));
        assert!(["0/2", "3/2", "1", "a/b", "1/0"].iter().all(|text| share_of(text).is_err()));
    }
}
