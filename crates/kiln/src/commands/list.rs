//! `kiln list`: the models on this machine.

use std::process::ExitCode;
use std::time::{SystemTime, UNIX_EPOCH};

use serde_json::json;

use crate::output::{print, say, size};
use crate::store::store;

/// Flags of `kiln list`.
#[derive(clap::Args)]
#[command(after_help = "Example:
  kiln list

Shows what `kiln pull` fetched, what lies in the store's folder (KILN_MODELS), and GGUF files that other programs have put \
into the cache of Hugging Face. Any of the names can be given to commands that take a MODEL.")]
pub(crate) struct Arguments {
    /// Print JSON
    #[arg(long)]
    json: bool,
}

/// Runs the command.
pub(crate) fn run(arguments: &Arguments) -> anyhow::Result<ExitCode> {
    let store = store()?;
    let (all, parts) = (store.list(), store.incomplete());
    if arguments.json {
        let models = all.iter().map(|record| {
            json!({
                "name": record.name,
                "source": record.source,
                "bytes": record.bytes(),
                "complete": record.is_there(),
                "fetched": record.fetched,
                "files": record.files,
            })
        });
        let parts = parts.iter().map(|part| json!({"path": part.path, "bytes": part.done, "of": part.total}));
        let (models, parts): (Vec<_>, Vec<_>) = (models.collect(), parts.collect());
        print(&serde_json::to_string_pretty(&json!({"models": models, "incomplete": parts}))?);
        return Ok(ExitCode::SUCCESS);
    }
    for why in store.refused() {
        say(&format!("warning: {why}"));
    }
    if all.is_empty() && parts.is_empty() {
        say("no models yet\nhint: kiln pull hf:OWNER/REPO");
        return Ok(ExitCode::SUCCESS);
    }
    let width = all.iter().map(|record| record.name.chars().count()).max().unwrap_or(0).clamp(4, 48);
    print(&format!("{:width$} {:>10} {:>14}  {}", "name", "size", "fetched", "source"));
    for record in &all {
        let state = if record.is_there() { age(record.fetched) } else { "damaged".to_owned() };
        print(&format!("{:width$} {:>10} {state:>14}  {}", record.name, size(record.bytes()), record.source));
    }
    for part in &parts {
        let name = part.path.file_name().unwrap_or_default().to_string_lossy();
        let (done, total) = (size(part.done), size(part.total));
        say(&format!(
            "incomplete: {name}, {done} of {total}; pull it again to resume, `kiln rm --incomplete` removes it"
        ));
    }
    Ok(ExitCode::SUCCESS)
}

/// How long ago a moment was.
pub(super) fn age(then: u64) -> String {
    let now = SystemTime::now().duration_since(UNIX_EPOCH).map_or(0, |age| age.as_secs());
    let seconds = now.saturating_sub(then);
    let (count, unit) = match seconds {
        0..60 => return "now".to_owned(),
        60..3600 => (seconds / 60, "minute"),
        3600..86_400 => (seconds / 3600, "hour"),
        _ => (seconds / 86_400, "day"),
    };
    format!("{count} {unit}{} ago", if count == 1 { "" } else { "s" })
}
