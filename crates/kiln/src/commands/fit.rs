//! `kiln inspect MODEL --fit`: what a model takes of a device's memory, and how long its texts can be there.

use std::path::Path;
use std::process::ExitCode;

use kiln_engine::arch::PAGE;
use kiln_engine::run::{DeviceFit, Fit, fit};
use serde_json::json;

use crate::model::ModelFlags;
use crate::output::{print, size};

/// Prints the arithmetic for this many parallel sequences.
pub(super) fn run(path: &Path, flags: &ModelFlags, sequences: usize, as_json: bool) -> anyhow::Result<ExitCode> {
    anyhow::ensure!(sequences > 0, "--sequences must be at least 1");
    let model = flags.open(path)?;
    let wish = flags.wish(sequences);
    let executor = flags.executor_for(&model, &wish)?;
    let fit = fit(&model, &*executor, &wish)?;
    if as_json {
        print(&serde_json::to_string_pretty(&as_value(&fit, &executor.describe()))?);
    } else {
        lines(&fit).iter().for_each(|line| print(line));
    }
    Ok(ExitCode::SUCCESS)
}

pub(super) fn as_value(fit: &Fit, device: &str) -> serde_json::Value {
    let share = |device: &DeviceFit| {
        json!({
            "device": device.name,
            "holds": device.part,
            "weights_bytes": device.weights,
            "cache_bytes": device.cache_bytes(&fit.room),
            "state_bytes": device.states,
            "scratch_bytes": device.scratch,
            "bytes": device.bytes(&fit.room),
            "usable_bytes": device.usable(),
            "free_bytes": device.memory.map(|m| m.free),
            "total_bytes": device.memory.map(|m| m.total),
        })
    };
    json!({
        "device": device,
        "context": fit.room.context,
        "sequences": fit.room.sequences,
        "weights_bytes": fit.weights(),
        "cache_bytes": fit.cache_bytes(),
        "cache_bytes_per_token": fit.page() / PAGE as u64,
        "pages": fit.room.pages,
        "window": fit.window,
        "window_pages": fit.room.window_pages,
        "window_bytes_per_token": fit.window_page() / PAGE as u64,
        "tokens_of_a_page": PAGE,
        "state_bytes": fit.states(),
        "scratch_bytes": fit.scratch(),
        "bytes": fit.bytes(),
        "free_bytes": fit.memory().map(|m| m.free),
        "total_bytes": fit.memory().map(|m| m.total),
        "devices": fit.devices.iter().map(share).collect::<Vec<_>>(),
    })
}

/// The arithmetic, line by line.
pub(super) fn lines(fit: &Fit) -> Vec<String> {
    let mut lines = Vec::new();
    for device in &fit.devices {
        lines.extend(Some(device.name.clone()).filter(|name| !name.is_empty()));
        device_lines(device, fit, &mut lines);
    }
    let texts =
        if fit.room.sequences == 1 { "one text".to_owned() } else { format!("{} texts at once", fit.room.sequences) };
    lines.push(match fit.page() + fit.window_page() {
        0 => format!("{texts} of any length"),
        _ => format!("{texts} of up to {} tokens", fit.room.context),
    });
    lines
}

fn device_lines(device: &DeviceFit, fit: &Fit, lines: &mut Vec<String>) {
    let mut row = |what: &str, bytes: u64, why: String| {
        lines.push(format!("{what:10} {:>12}   {why}", size(bytes)).trim_end().to_owned());
    };
    row("weights", device.weights, device.part.clone().unwrap_or_default());
    let (room, tokens) = (&fit.room, PAGE as u64);
    let caches = |pages: usize, each: u64| {
        let [k, v] = [room.k_type, room.v_type];
        format!("{pages} pages of {PAGE} tokens, {} a token ({k} and {v})", size(each / tokens))
    };
    if device.page > 0 {
        row("caches", device.page * room.pages as u64, caches(room.pages, device.page));
    }
    if let Some(window) = fit.window.filter(|_| device.window_page > 0) {
        let why = format!("{}, in layers that see {window}", caches(room.window_pages, device.window_page));
        row("windows", device.window_page * room.window_pages as u64, why);
    }
    if device.states > 0 {
        row("states", device.states, format!("of {} texts", room.sequences));
    }
    row("scratch", device.scratch, "what steps compute in".to_owned());
    let free = match (device.memory, device.usable()) {
        (Some(m), Some(usable)) => {
            format!("{} of {} are free, {} of them for Kiln", size(m.free), size(m.total), size(usable))
        }
        _ => String::new(),
    };
    row("in all", device.bytes(room), free);
}
