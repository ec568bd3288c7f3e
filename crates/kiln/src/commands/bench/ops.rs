//! `kiln bench ops`: times the operations and shows how near they come to the read bandwidth measured in the same run.

use std::process::ExitCode;

use anyhow::bail;
use kiln_gpu::Shader;
use kiln_kernels::case::Level;
use kiln_kernels::harness::Prepared;
use kiln_kernels::probe::Probe;
use kiln_kernels::timing::{self, Timing};
use serde_json::json;

use super::{rate, time};
use crate::commands::selftest::{Part, chosen};
use crate::device::DeviceFlag;
use crate::output::{print, progress, say};

/// Flags of `kiln bench ops`.
#[derive(clap::Args)]
#[command(after_help = "Example:
  kiln bench ops rms_norm mul_mat_vec --case q4_k")]
pub(crate) struct Arguments {
    /// Operations to time; all without any
    operations: Vec<String>,
    #[command(flatten)]
    part: Part,
    /// Only the path that a model would take
    #[arg(long, conflicts_with = "path")]
    chosen: bool,
    /// Time each case again and again on the same data, so that caches help: for comparison with tools that do so
    #[arg(long)]
    cached: bool,
    #[command(flatten)]
    device: DeviceFlag,
    /// Print JSON
    #[arg(long)]
    json: bool,
}

struct Row {
    case: String,
    path: &'static str,
    timing: Timing,
    bytes: f64,
    flops: f64,
}

/// Runs the command.
pub(crate) fn run(arguments: &Arguments) -> anyhow::Result<ExitCode> {
    let kernels = chosen(&arguments.operations)?;
    let device = arguments.device.choice().open()?;
    // The memory of the probe is given back before the cases need theirs.
    let ceiling = Probe::new(&device)?.read_bandwidth()?.rate();
    if !arguments.json {
        print(&format!("device: {}, read {}", device.adapter.describe(), rate(ceiling, "B")));
        let head = ("case", "path", "after", "at once", "bytes", "of read", "arithmetic");
        let (case, path, after, once, bytes, share, flops) = head;
        print(&format!("{case:52} {path:9} {after:>10} {once:>10} {bytes:>11} {share:>8} {flops:>14}"));
    }
    let mut rows = Vec::new();
    let mut failed = 0;
    for kernel in kernels {
        let cases = arguments.part.cases(kernel, Level::Bench);
        let bar = progress(cases.len() as u64, kernel.name);
        for case in &cases {
            let paths = if arguments.chosen { vec![Prepared::chosen(case, &device)?] } else { arguments.part.paths() };
            let prepared = Prepared::on(case, &device, &paths)?;
            let shaders: Vec<Shader> = prepared.iter().flat_map(|p| p.shaders_of_call().cloned()).collect();
            device.prepare(&shaders, &|| {})?;
            for p in &prepared {
                match timing::time(p, &device, arguments.cached) {
                    Ok(timing) => {
                        let work = p.call().operation().work();
                        let (bytes, flops) = (work.bytes, work.flops);
                        let row = Row { case: case.name.clone(), path: p.path.name(), timing, bytes, flops };
                        if !arguments.json {
                            bar.suspend(|| show(&row, ceiling));
                        }
                        rows.push(row);
                    }
                    Err(e) => {
                        failed += 1;
                        bar.suspend(|| say(&format!("{} ({}): {e}", case.name, p.path.name())));
                    }
                }
            }
            bar.inc(1);
        }
        bar.finish_and_clear();
    }
    if rows.is_empty() && failed == 0 {
        bail!(
            "nothing was timed\nhint: no case has such a name, or the device has none of these paths; without --case and --path all are timed"
        );
    }
    if arguments.json {
        print(&serde_json::to_string_pretty(&json!({
            "device": device.adapter.name,
            "driver": format!("{} {}", device.adapter.driver, device.adapter.driver_version),
            "read_bytes_per_second": ceiling,
            "rows": rows.iter().map(|r| row_json(r, ceiling)).collect::<Vec<_>>(),
            "failed": failed,
        }))?);
    }
    Ok(if failed == 0 { ExitCode::SUCCESS } else { ExitCode::from(1) })
}

fn show(r: &Row, ceiling: f64) {
    let t = &r.timing;
    let bandwidth = r.bytes / t.dependent;
    let share = format!("{:.0} %", 100.0 * bandwidth / ceiling);
    let (after, once) = (time(t.dependent), time(t.independent));
    let (bytes, flops) = (rate(bandwidth, "B"), rate(r.flops / t.dependent, "FLOP"));
    print(&format!("{:52} {:9} {after:>10} {once:>10} {bytes:>11} {share:>8} {flops:>14}", r.case, r.path));
}

fn row_json(r: &Row, ceiling: f64) -> serde_json::Value {
    let t = &r.timing;
    json!({
        "case": r.case,
        "path": r.path,
        "dependent_seconds": t.dependent,
        "independent_seconds": t.independent,
        "copies": t.copies,
        "calls": t.calls,
        "bytes": r.bytes,
        "flops": r.flops,
        "bytes_per_second": r.bytes / t.dependent,
        "flops_per_second": r.flops / t.dependent,
        "share_of_read": r.bytes / t.dependent / ceiling,
    })
}
