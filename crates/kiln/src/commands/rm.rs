//! `kiln rm`: removes models of the store.

use std::process::ExitCode;

use kiln_store::{Left, Record, Removed, Stays};
use serde_json::json;

use crate::output::{print, say, size};
use crate::store::store;

/// Flags of `kiln rm`.
#[derive(clap::Args)]
#[command(after_help = "Example:
  kiln rm smollm2          # the default model is fetched again when it is used

Files that another program fetched into the cache of Hugging Face stay; so do those that another model needs, and links to \
files outside the store.")]
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
    let mut records: Vec<Record> = Vec::new();
    for name in &arguments.models {
        let record = store.record(name)?;
        if !records.iter().any(|other| other.source == record.source) {
            records.push(record);
        }
    }
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
            let left: Vec<_> = removed.left.iter().map(|left| &left.path).collect();
            json!({"name": name, "removed": files, "left": left})
        };
        print(&serde_json::to_string_pretty(&all.iter().map(row).collect::<Vec<_>>())?);
        return Ok(ExitCode::SUCCESS);
    }
    for (name, removed) in &all {
        let bytes = removed.files.iter().map(|(_, bytes)| bytes).sum();
        let files = removed.files.len();
        say(&format!("{name}: {files} file{}, {} removed", if files == 1 { "" } else { "s" }, size(bytes)));
        for Left { path, why } in &removed.left {
            let why = match why {
                Stays::Foreign => "another program fetched it",
                Stays::Shared => "another model needs it",
                Stays::Linked => "it is a link, or lies behind one that leads out of the store; delete it yourself",
            };
            say(&format!("note: {} stays: {why}", path.display()));
        }
    }
    Ok(ExitCode::SUCCESS)
}
