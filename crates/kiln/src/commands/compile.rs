//! `kiln selftest --compile`: every kernel through the driver's compiler, and what that tells of it. Nothing runs, so that
//! a driver without hardware (`scripts/null-gpu`) will do.

use std::process::ExitCode;
use std::time::Instant;

use kiln_gpu::{Device, Statistic, SubgroupRequest, Told};
use kiln_kernels::Kernel;
use kiln_kernels::compiled::{Variant, variants};
use kiln_kernels::operation::Path;
use rayon::prelude::*;
use serde_json::json;

use crate::device::DeviceFlag;
use crate::output::{print, progress, say};

/// What came of one kernel.
struct Compiled {
    variant: Variant,
    told: Told,
    statistics: Vec<Statistic>,
    /// Why it counts as failed.
    fault: Option<String>,
    /// Why a spill of it does not.
    excuse: Option<&'static str>,
}

/// Compiles the kernels of these operations and prints what comes of it.
pub(super) fn run(
    kernels: &[&'static Kernel],
    flag: &DeviceFlag,
    only_chosen: bool,
    as_json: bool,
) -> anyhow::Result<ExitCode> {
    let start = Instant::now();
    let device = flag.choice().open_to_compile()?;
    let found = variants(kernels, &device.adapter.caps, only_chosen);
    let picked = start.elapsed();
    let bar = progress(found.len() as u64, "compiling");
    let compile = |variant: Variant| {
        let done = compiled(&device, variant);
        bar.inc(1);
        done
    };
    let all: Vec<Compiled> = found.into_par_iter().map(compile).collect();
    bar.finish_and_clear();
    for failed in all.iter().filter(|c| c.fault.is_some()) {
        let why = failed.fault.as_deref().unwrap_or_default();
        say(&format!("FAILED {} ({}): {why}", failed.variant.shader.name, failed.variant.case));
    }
    let failed = all.iter().filter(|c| c.fault.is_some()).count();
    let passed = all.len() - failed;
    if as_json {
        print(&serde_json::to_string_pretty(&json!({
            "device": device.adapter.name,
            "driver": format!("{} {}", device.adapter.driver, device.adapter.driver_version),
            "kernels": all.iter().map(as_value).collect::<Vec<_>>(),
            "passed": passed,
            "failed": failed,
        }))?);
    } else {
        print(&format!("device: {}", device.adapter.describe()));
        print(&heading("kernel"));
        all.iter().for_each(|c| print(&line(c)));
        print(&heading("operation and path"));
        summary(&all).iter().for_each(|row| print(row));
        let (picked, seconds) = (picked.as_secs_f64(), start.elapsed().as_secs_f64());
        print(&format!("{} kernels, {picked:.1} s to find them, in all {seconds:.1} s", all.len()));
        print(&format!("{passed} passed, {failed} failed"));
    }
    Ok(if failed == 0 { ExitCode::SUCCESS } else { ExitCode::from(1) })
}

fn compiled(device: &Device, variant: Variant) -> Compiled {
    match device.pipeline(&variant.shader) {
        Ok(pipeline) => {
            let (statistics, told) = (pipeline.statistics.clone(), Told::of(&pipeline.statistics));
            let excuse = if told.spills() { variant.excuse(&told).map(|e| e.reason) } else { None };
            Compiled { fault: variant.fault(&told), excuse, told, statistics, variant }
        }
        Err(e) => Compiled {
            fault: Some(e.to_string()),
            excuse: None,
            told: Told::default(),
            statistics: Vec::new(),
            variant,
        },
    }
}

/// A column of the table: its head, and what stands in it.
type Column = (&'static str, fn(&Told) -> Option<f64>);

/// The columns: a name, and how it is read from what the driver told.
const COLUMNS: [Column; 9] = [
    ("regs", |t| t.registers),
    ("scalar", |t| t.scalar_registers),
    ("spilled", |t| t.spilled),
    ("scratch", |t| t.scratch),
    ("shared", |t| t.shared),
    ("code", |t| t.code),
    ("at once", |t| t.subgroups),
    ("latency", |t| t.latency),
    ("busy", |t| t.busy),
];

fn heading(first: &str) -> String {
    let columns: Vec<String> = COLUMNS.iter().map(|(name, _)| format!("{name:>8}")).collect();
    format!("{first:34}{}", columns.concat())
}

fn cells(values: impl Iterator<Item = Option<f64>>) -> String {
    values.map(|value| value.map_or(format!("{:>8}", "-"), |n| format!("{n:>8}"))).collect()
}

fn line(c: &Compiled) -> String {
    let size = match c.variant.shader.subgroup {
        SubgroupRequest::Size(n) => format!(" subgroups of {n}"),
        _ => String::new(),
    };
    let marks = [
        (!c.variant.chosen, " (not chosen)".to_owned()),
        (c.fault.is_some(), " FAILED".to_owned()),
        (c.excuse.is_some(), format!(" excused: {}", c.excuse.unwrap_or_default())),
    ];
    let marks: String = marks.into_iter().filter(|(is_so, _)| *is_so).map(|(_, mark)| mark).collect();
    let numbers = cells(COLUMNS.iter().map(|(_, of)| of(&c.told)));
    format!("{:34}{numbers}  {}{size}{marks}", c.variant.shader.name, c.variant.case)
}

/// One row for each operation and path: the worst of every column, which is the least of what fits at once.
fn summary(all: &[Compiled]) -> Vec<String> {
    let mut keys: Vec<(&str, Path)> = all.iter().map(|c| (c.variant.operation, c.variant.path)).collect();
    keys.dedup();
    keys.sort();
    keys.dedup();
    let row = |(operation, path): (&str, Path)| {
        let of: Vec<&Compiled> =
            all.iter().filter(|c| (c.variant.operation, c.variant.path) == (operation, path)).collect();
        let worst = |(name, value): &(&str, fn(&Told) -> Option<f64>)| {
            let values = of.iter().filter_map(|c| value(&c.told));
            if *name == "at once" { values.reduce(f64::min) } else { values.reduce(f64::max) }
        };
        let failed = of.iter().filter(|c| c.fault.is_some()).count();
        let name = format!("{operation} {}", path.name());
        format!("{name:34}{}  {} passed, {failed} failed", cells(COLUMNS.iter().map(worst)), of.len() - failed)
    };
    keys.into_iter().map(row).collect()
}

fn as_value(c: &Compiled) -> serde_json::Value {
    let Variant { operation, path, chosen, case, shader } = &c.variant;
    let statistics: serde_json::Map<String, serde_json::Value> =
        c.statistics.iter().map(|one| (one.name.clone(), json!(one.value))).collect();
    let defines: serde_json::Map<String, serde_json::Value> =
        shader.defines.iter().map(|(name, value)| (name.clone(), json!(value))).collect();
    json!({
        "operation": operation,
        "path": path.name(),
        "chosen": chosen,
        "kernel": shader.name,
        "file": shader.file,
        "case": case,
        "subgroup_size": match shader.subgroup { SubgroupRequest::Size(n) => Some(n), _ => None },
        "defines": defines,
        "statistics": statistics,
        "spills": c.told.spills(),
        "excuse": c.excuse,
        "fault": c.fault,
    })
}
