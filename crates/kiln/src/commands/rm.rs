//! `kiln rm`: removes models of the store.

use std::process::ExitCode;

use kiln_store::Removed;
use serde_json::json;

use crate::output::{print, say, size};
use crate::store::store;

/// Flags of `kiln rm`.
#[derive(clap::Args)]
#[command(after_help = "Example:
  kiln rm smollm2          # the default model is fetched again when it is used

Files that another program fetched into the cache of Hugging Face stay; so do those that another model needs.")]
pub(crate) struct Arguments {
    /// Names that `kiln list` shows, or sources
    #[arg(value_name = "MODEL", required_unless_present = "incomplete")]
    models: Vec<String>,
    /// Remove what downloads that broke off have left
    #[arg(long)]
    incomplete: bool,
    /// Print JSON
    #[arg(long)]
    json: bool,
}

/// Runs the command.
pub(crate) fn run(arguments: &Arguments) -> anyhow::Result<ExitCode> {
    let store = store()?;
    // A name that is wrong leaves all as it is.
    let records = arguments.models.iter().map(|name| store.record(name)).collect::<Result<Vec<_>, _>>()?;
    let mut all: Vec<(String, Removed)> = Vec::new();
    for record in &records {
        all.push((record.name.clone(), store.remove(record)?));
    }
    if arguments.incomplete {
        all.push(("incomplete downloads".into(), store.remove_incomplete()?));
    }
    if arguments.json {
        let row = |(name, removed): &(String, Removed)| {
            let files: Vec<_> =
                removed.files.iter().map(|(path, bytes)| json!({"path": path, "bytes": bytes})).collect();
            json!({"name": name, "removed": files, "left": removed.left})
        };
        print(&serde_json::to_string_pretty(&all.iter().map(row).collect::<Vec<_>>())?);
        return Ok(ExitCode::SUCCESS);
    }
    for (name, removed) in &all {
        let bytes = removed.files.iter().map(|(_, bytes)| bytes).sum();
        say(&format!("{name}: {} files, {} removed", removed.files.len(), size(bytes)));
        for path in &removed.left {
            say(&format!("note: {} stays: another program fetched it, or another model needs it", path.display()));
        }
    }
    Ok(ExitCode::SUCCESS)
}
