//! `kiln devices`: what Vulkan devices there are and what each can do.

use std::collections::BTreeSet;
use std::process::ExitCode;

use kiln_gpu::{Adapter, AdapterKind, IntDot, choose};
use kiln_llm::all_adapters;
use serde_json::json;

use crate::output::{print, size};

/// Flags of `kiln devices`.
#[derive(clap::Args)]
#[command(after_help = "Example:
  kiln devices --json")]
pub(crate) struct Arguments {
    /// Print JSON
    #[arg(long)]
    json: bool,
}

/// Runs the command.
pub(crate) fn run(arguments: &Arguments) -> anyhow::Result<ExitCode> {
    let (_instance, adapters) = all_adapters()?;
    if arguments.json {
        let taken = taken(&adapters);
        let row = |adapter: &Adapter| {
            let mut row = as_json(adapter);
            row["taken"] = json!(taken == Some(adapter.index));
            row["why"] = json!(why(adapter, &adapters));
            row
        };
        let rows: Vec<_> = adapters.iter().map(row).collect();
        print(&serde_json::to_string_pretty(&rows)?);
        return Ok(ExitCode::SUCCESS);
    }
    if adapters.is_empty() {
        return Err(kiln_gpu::Error::NoDevice.into());
    }
    for adapter in &adapters {
        describe(adapter);
        print(&format!(
            "   {:11} {}",
            if taken(&adapters) == Some(adapter.index) { "taken" } else { "not taken" },
            why(adapter, &adapters)
        ));
    }
    if taken(&adapters).is_none() {
        print("without --device the CPU runs models");
    }
    Ok(ExitCode::SUCCESS)
}

/// The device that is taken where none is named.
fn taken(adapters: &[Adapter]) -> Option<usize> {
    choose(adapters, None).ok().filter(|adapter| !adapter.is_null()).map(|adapter| adapter.index)
}

/// Why a device is taken where none is named, or is not.
fn why(adapter: &Adapter, adapters: &[Adapter]) -> String {
    let best = taken(adapters).and_then(|index| adapters.iter().find(|other| other.index == index));
    if let Some(missing) = adapter.missing() {
        return format!("it lacks {missing}, which every kernel needs");
    }
    if adapter.is_null() {
        return "it has no hardware".to_owned();
    }
    match (adapter.kind, best) {
        (AdapterKind::Cpu, _) => "a software GPU is slower than the CPU alone; --device names it".to_owned(),
        (kind, Some(best)) if best.index == adapter.index => {
            let others = adapters.iter().filter(|other| other.kind == kind && other.missing().is_none()).count();
            let most = if others > 1 { ", the one with most memory" } else { "" };
            match kind {
                AdapterKind::Discrete => format!("a discrete GPU{most}"),
                AdapterKind::Integrated => {
                    format!(
                        "an integrated GPU{most}, as there is no discrete one; the CPU is taken if it reads memory faster"
                    )
                }
                _ => format!("the only kind of GPU here{most}"),
            }
        }
        (kind, Some(best)) if best.kind == kind => {
            format!("{} has more memory; --device {},{} takes both", best.index, best.index, adapter.index)
        }
        (_, Some(best)) => {
            format!("{} is a {} GPU; --device {} takes this one", best.index, best.kind.name(), adapter.index)
        }
        (_, None) => "it cannot be used".to_owned(),
    }
}

/// The matrix shapes in short: `16x16x16 f16->f32`.
fn coopmat(adapter: &Adapter) -> Vec<String> {
    let short = |c: kiln_gpu::Component| format!("{c:?}").to_lowercase();
    let shapes: BTreeSet<String> = adapter
        .caps
        .coopmat
        .iter()
        .filter(|s| !s.saturating)
        .map(|s| format!("{}x{}x{} {}->{}", s.m, s.n, s.k, short(s.a), short(s.result)))
        .collect();
    shapes.into_iter().collect()
}

fn describe(a: &Adapter) {
    let caps = &a.caps;
    let (major, minor, patch) = a.api_version;
    print(&format!("{}: {}", a.index, a.name));
    print(&format!("   kind        {}, Vulkan {major}.{minor}.{patch}", a.kind.name()));
    print(&format!("   driver      {} {}", a.driver, a.driver_version));
    let free = a.memory_free.map_or(String::new(), |f| format!(", {} free", size(f)));
    print(&format!("   memory      {}{free}", size(a.memory_bytes)));
    if let Some(pci) = &a.pci {
        print(&format!("   pci         {pci}"));
    }
    print(&format!("   uuid        {}", a.uuid));
    let s = &caps.subgroups;
    print(&format!("   subgroups   {} lanes ({} to {})", s.size, s.min_size, s.max_size));
    print(&format!("   shared      {} per workgroup", size(u64::from(caps.limits.max_shared_bytes))));
    let flags = [
        (caps.float16, "f16"),
        (caps.bfloat16, "bf16"),
        (caps.int8, "int8"),
        (caps.int64, "int64"),
        (caps.int_dot == IntDot::Accelerated, "int dot"),
        (caps.int_dot == IntDot::Emulated, "int dot (emulated)"),
        (caps.coopmat2.is_complete(), "cooperative matrix 2"),
    ];
    let arithmetic: Vec<&str> = flags.iter().filter(|(on, _)| *on).map(|(_, name)| *name).collect();
    print(&format!("   arithmetic  {}", arithmetic.join(", ")));
    let shapes = coopmat(a);
    if !shapes.is_empty() {
        print(&format!("   matrices    {}", shapes.join(", ")));
    }
    if let Some(cores) = caps.cores {
        print(&format!("   cores       {cores}"));
    }
    if a.is_null() {
        print("   hardware    none: kernels can be compiled, nothing runs");
    }
    if let Some(missing) = a.missing() {
        print(&format!("   unusable    lacks {missing}"));
    }
}

fn as_json(a: &Adapter) -> serde_json::Value {
    let caps = &a.caps;
    json!({
        "index": a.index,
        "name": a.name,
        "kind": a.kind.name(),
        "driver": a.driver,
        "driver_version": a.driver_version,
        "api_version": format!("{}.{}.{}", a.api_version.0, a.api_version.1, a.api_version.2),
        "pci": a.pci,
        "uuid": a.uuid,
        "memory_bytes": a.memory_bytes,
        "memory_free_bytes": a.memory_free,
        "missing": a.missing(),
        "null": a.is_null(),
        "capabilities": caps,
        "caps": {
            "subgroup_size": caps.subgroups.size,
            "subgroup_min": caps.subgroups.min_size,
            "subgroup_max": caps.subgroups.max_size,
            "subgroup_arithmetic": caps.subgroups.arithmetic,
            "shared_bytes": caps.limits.max_shared_bytes,
            "push_bytes": caps.limits.max_push_bytes,
            "workgroup_invocations": caps.limits.max_workgroup_invocations,
            "max_buffer_bytes": caps.limits.max_buffer_bytes,
            "max_allocation_bytes": caps.limits.max_allocation_bytes,
            "float16": caps.float16,
            "bfloat16": caps.bfloat16,
            "int8": caps.int8,
            "int16": caps.int16,
            "int64": caps.int64,
            "storage_8bit": caps.storage_8bit,
            "storage_16bit": caps.storage_16bit,
            "int_dot": format!("{:?}", caps.int_dot).to_lowercase(),
            "coopmat": coopmat(a),
            "coopmat2": caps.coopmat2.is_complete(),
            "cores": caps.cores,
        },
    })
}
