//! `kiln inspect MODEL --fit`: what a model takes of a device's memory, and how long its texts can be there.

use std::path::Path;
use std::process::ExitCode;

use kiln_engine::arch::PAGE;
use kiln_engine::run::{Fit, fit};
use serde_json::json;

use crate::model::ModelFlags;
use crate::output::{print, size};

/// Prints the arithmetic for so many texts at once.
pub(super) fn run(path: &Path, flags: &ModelFlags, sequences: usize, as_json: bool) -> anyhow::Result<ExitCode> {
    anyhow::ensure!(sequences > 0, "--sequences must be at least 1");
    let model = flags.open(path)?;
    let executor = flags.executor()?;
    let fit = fit(&model, &*executor, &flags.wish(sequences))?;
    if as_json {
        print(&serde_json::to_string_pretty(&as_value(&fit, &executor.describe()))?);
    } else {
        describe(&fit, &executor.describe());
    }
    Ok(ExitCode::SUCCESS)
}

pub(super) fn as_value(fit: &Fit, device: &str) -> serde_json::Value {
    json!({
        "device": device,
        "context": fit.room.context,
        "sequences": fit.room.sequences,
        "weights_bytes": fit.weights,
        "cache_bytes": fit.cache_bytes(),
        "cache_bytes_per_token": fit.page / PAGE as u64,
        "pages": fit.room.pages,
        "window": fit.window,
        "window_pages": fit.room.window_pages,
        "window_bytes_per_token": fit.window_page / PAGE as u64,
        "tokens_of_a_page": PAGE,
        "state_bytes": fit.states,
        "scratch_bytes": fit.scratch,
        "bytes": fit.bytes(),
        "free_bytes": fit.memory.map(|m| m.free),
        "total_bytes": fit.memory.map(|m| m.total),
    })
}

fn describe(fit: &Fit, device: &str) {
    print(device);
    lines(fit).iter().for_each(|line| print(line));
}

/// The arithmetic, line by line.
pub(super) fn lines(fit: &Fit) -> Vec<String> {
    let mut lines = Vec::new();
    let mut row = |what: &str, bytes: u64, why: String| lines.push(format!("{what:10} {:>12}   {why}", size(bytes)));
    row("weights", fit.weights, String::new());
    let (room, tokens) = (fit.room, PAGE as u64);
    let caches = |pages: usize, each: u64| {
        let [k, v] = [room.k_type, room.v_type];
        format!("{pages} pages of {PAGE} tokens, {} a token ({k} and {v})", size(each / tokens))
    };
    if fit.page > 0 {
        row("caches", fit.page * room.pages as u64, caches(room.pages, fit.page));
    }
    if let Some(window) = fit.window {
        let why = format!("{}, in layers that see {window}", caches(room.window_pages, fit.window_page));
        row("windows", fit.window_page * room.window_pages as u64, why);
    }
    if fit.states > 0 {
        row("states", fit.states, format!("of {} texts", fit.room.sequences));
    }
    row("scratch", fit.scratch, "what steps compute in".to_owned());
    let free = fit.memory.map_or(String::new(), |m| format!("{} of {} are free", size(m.free), size(m.total)));
    row("in all", fit.bytes(), free);
    let texts =
        if fit.room.sequences == 1 { "one text".to_owned() } else { format!("{} texts at once", fit.room.sequences) };
    lines.push(match fit.page + fit.window_page {
        0 => format!("{texts} of any length"),
        _ => format!("{texts} of up to {} tokens", fit.room.context),
    });
    lines
}
