//! `kiln verify`: compares the files of the store with what was fetched, to the bit.

use std::process::ExitCode;

use kiln_store::{Checked, Record};
use serde_json::json;

use crate::output::print;
use crate::store::{Bars, store};

/// Flags of `kiln verify`.
#[derive(clap::Args)]
#[command(after_help = "Examples:
  kiln verify
  kiln verify smollm2

Exit code 1 when a file is damaged or missing.")]
pub(crate) struct Arguments {
    /// Names that `kiln list` shows, or sources; all models without one
    #[arg(value_name = "MODEL")]
    models: Vec<String>,
    /// Print JSON
    #[arg(long)]
    json: bool,
}

/// Runs the command.
pub(crate) fn run(arguments: &Arguments) -> anyhow::Result<ExitCode> {
    let store = store()?;
    let of = |name: &String| -> anyhow::Result<Record> {
        // A damaged one is not found by its name, and is just what is looked for.
        let listed = store.list().into_iter().find(|record| record.source == *name || record.name == *name);
        Ok(listed.map_or_else(|| store.record(name), Ok)?)
    };
    let records = if arguments.models.is_empty() {
        store.list()
    } else {
        arguments.models.iter().map(of).collect::<anyhow::Result<_>>()?
    };
    let (mut rows, mut bad) = (Vec::new(), 0);
    for record in &records {
        for (path, found) in store.verify(record, &Bars::default())? {
            let (state, why) = match &found {
                Checked::Good => ("good", None),
                Checked::LengthOnly => ("length only", Some("no SHA-256 is known")),
                Checked::Missing => ("missing", None),
                Checked::Damaged(why) => ("damaged", Some(why.as_str())),
            };
            bad += usize::from(matches!(found, Checked::Missing | Checked::Damaged(_)));
            if !arguments.json {
                let why = why.map(|why| format!(" ({why})")).unwrap_or_default();
                print(&format!("{state:12} {}{why}", path.display()));
            }
            rows.push(json!({"name": record.name, "source": record.source, "path": path, "state": state, "why": why}));
        }
    }
    if arguments.json {
        print(&serde_json::to_string_pretty(&rows)?);
    }
    anyhow::ensure!(
        bad == 0,
        "{bad} of {} files are not what was fetched\nhint: `kiln pull` fetches them again",
        rows.len()
    );
    Ok(ExitCode::SUCCESS)
}
