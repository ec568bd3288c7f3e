//! `kiln bench device`: what the device can do at best. Every number is a median of several runs by the GPU's own clock.

use std::process::ExitCode;

use kiln_kernels::probe::{Bandwidth, Chain, DispatchCost, Fma, MatrixRate, Probe};
use serde_json::json;

use super::{rate, time};
use crate::device::DeviceFlag;
use crate::output::{print, progress, size};

/// Flags of `kiln bench device`.
#[derive(clap::Args)]
#[command(after_help = "Example:
  kiln bench device --device 0 --json")]
pub(crate) struct Arguments {
    #[command(flatten)]
    device: DeviceFlag,
    /// Print JSON
    #[arg(long)]
    json: bool,
}

/// Everything measured.
struct Results {
    dispatches: Vec<DispatchCost>,
    read: Bandwidth,
    copy: Bandwidth,
    driver_copy: Bandwidth,
    chain: Chain,
    fma: Vec<(Fma, f64)>,
    matrices: Vec<MatrixRate>,
}

/// Runs the command.
pub(crate) fn run(arguments: &Arguments) -> anyhow::Result<ExitCode> {
    let device = arguments.device.choice().open()?;
    let shapes = kiln_kernels::probe::matrix_shapes(&device.adapter.caps).len();
    let bar = progress(6 + shapes as u64, "measuring");
    let probe = Probe::new(&device)?;
    let step = || bar.inc(1);
    // The reads come first: they also bring the clocks up.
    let read = probe.read_bandwidth().inspect(|_| step())?;
    let results = Results {
        read,
        copy: probe.copy_bandwidth().inspect(|_| step())?,
        driver_copy: probe.driver_copy_bandwidth().inspect(|_| step())?,
        chain: probe.decode_chain().inspect(|_| step())?,
        dispatches: probe.dispatches().inspect(|_| step())?,
        fma: probe.fma_rates().inspect(|_| step())?,
        matrices: probe.matrix_rates(&step),
    };
    bar.finish_and_clear();
    if arguments.json {
        let adapter = &device.adapter;
        let mut json = as_json(&results);
        json["device"] = json!(adapter.name);
        json["driver"] = json!(format!("{} {}", adapter.driver, adapter.driver_version));
        print(&serde_json::to_string_pretty(&json)?);
    } else {
        print(&format!("device: {}", device.adapter.describe()));
        table(&results, probe.bytes());
    }
    Ok(ExitCode::SUCCESS)
}

/// `16x16x16 f16->f32`.
fn shape_name(m: &MatrixRate) -> String {
    let s = &m.shape;
    let short = |c: kiln_gpu::Component| format!("{c:?}").to_lowercase();
    format!("{}x{}x{} {}->{}", s.m, s.n, s.k, short(s.a), short(s.c))
}

fn table(r: &Results, bytes: u64) {
    let row = |what: &str, value: String| print(&format!("{what:44} {value:>16}"));
    print("");
    print(&format!("{:44} {:>16} {:>16}", "empty dispatch, workgroups", "with barrier", "without"));
    for d in &r.dispatches {
        print(&format!("{:<44} {:>16} {:>16}", d.groups, time(d.with_barrier), time(d.without_barrier)));
    }
    print("");
    row(&format!("read {} ({} loads in flight)", size(bytes), r.read.loads), rate(r.read.rate(), "B"));
    row(&format!("copy, read and write ({} loads in flight)", r.copy.loads), rate(r.copy.rate(), "B"));
    row("copy, read and write, by the driver", rate(r.driver_copy.rate(), "B"));
    let chain = |b: &Bandwidth| format!("{} = {}", time(b.seconds), rate(b.rate(), "B"));
    let (reads, amount) = (r.chain.reads, size(r.chain.dependent.bytes as u64));
    row(&format!("{reads} reads of {amount}, each after the last"), chain(&r.chain.dependent));
    row(&format!("{reads} reads of {amount}, at once"), chain(&r.chain.independent));
    print("");
    for (kind, value) in &r.fma {
        row(kind.name(), rate(*value, if *kind == Fma::PackedBytes { "OP" } else { "FLOP" }));
    }
    for m in &r.matrices {
        let unit = if shape_name(m).contains(" f") || shape_name(m).contains(" b") { "FLOP" } else { "OP" };
        let value = m.rate.as_ref().map_or_else(|e| format!("not measured: {e}"), |r| rate(*r, unit));
        row(&format!("matrices {}", shape_name(m)), value);
    }
}

fn as_json(r: &Results) -> serde_json::Value {
    let bandwidth = |b: &Bandwidth| json!({"bytes": b.bytes, "seconds": b.seconds, "bytes_per_second": b.rate(), "loads_in_flight": b.loads});
    let dispatch = |d: &DispatchCost| {
        json!({
            "workgroups": d.groups,
            "with_barrier_seconds": d.with_barrier,
            "without_barrier_seconds": d.without_barrier,
        })
    };
    let matrix = |m: &MatrixRate| json!({"shape": shape_name(m), "per_second": m.rate.as_ref().ok(), "error": m.rate.as_ref().err()});
    json!({
        "dispatch": r.dispatches.iter().map(dispatch).collect::<Vec<_>>(),
        "read": bandwidth(&r.read),
        "copy": bandwidth(&r.copy),
        "driver_copy": bandwidth(&r.driver_copy),
        "decode_chain": {
            "reads": r.chain.reads,
            "dependent": bandwidth(&r.chain.dependent),
            "independent": bandwidth(&r.chain.independent),
        },
        "multiply_add": r.fma.iter().map(|(kind, rate)| json!({"kind": kind.name(), "per_second": rate})).collect::<Vec<_>>(),
        "matrices": r.matrices.iter().map(matrix).collect::<Vec<_>>(),
    })
}
