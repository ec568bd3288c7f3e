//! `kiln show`: what is known of a model of the store, or of a model file.

use std::path::Path;
use std::process::ExitCode;

use kiln_gguf::Gguf;
use kiln_store::{Error, Store};
use kiln_system::text::shown;
use serde_json::json;

use super::list::age;
use crate::output::{print, size};
use crate::store::store;

/// Flags of `kiln show`.
#[derive(clap::Args)]
#[command(after_help = "Example:
  kiln show smollm2

`kiln inspect` tells more of the file itself.")]
pub(crate) struct Arguments {
    /// A name that `kiln list` shows, a source, or a file
    model: String,
    /// Print JSON
    #[arg(long)]
    json: bool,
}

/// Runs the command.
pub(crate) fn run(arguments: &Arguments) -> anyhow::Result<ExitCode> {
    let record = match store()?.record(&arguments.model) {
        Err(Error::NotStored { path }) if path.is_file() => Store::describe(Path::new(&path)),
        found => found?,
    };
    let mut rows: Vec<(&str, String)> = vec![("name", record.name.clone()), ("source", record.source.clone())];
    let mut facts = serde_json::Map::new();
    if let Some(path) = record.path() {
        let gguf = Gguf::open(path)?;
        let m = gguf.metadata();
        let architecture = m.get_str_or("general.architecture", "")?.to_owned();
        let context = m.get_u64_opt(&format!("{architecture}.context_length"))?;
        let parameters: u64 = gguf.tensors().iter().map(|tensor| tensor.n_elements() as u64).sum();
        let title = m.get_str_or("general.name", "")?.to_owned();
        let license = m.get_str_or("general.license", "")?.to_owned();
        let template = m.get_str_or("tokenizer.chat_template", "").is_ok_and(|text| !text.is_empty());
        let bits = 8.0 * gguf.data_bytes() as f64 / parameters.max(1) as f64;
        for (key, value) in [("title", title), ("architecture", architecture), ("license", license)] {
            facts.insert(key.into(), json!(value));
            if !value.is_empty() {
                rows.push((key, shown(&value)));
            }
        }
        rows.push(("parameters", format!("{:.2} B, {bits:.2} bits each", parameters as f64 / 1e9)));
        rows.push(("context", context.map_or_else(|| "not told".into(), |n| format!("{n} tokens"))));
        rows.push(("chat", if template { "has a template" } else { "no template: it continues texts" }.into()));
        facts.insert("parameters".into(), json!(parameters));
        facts.insert("bits_per_weight".into(), json!(bits));
        facts.insert("context".into(), json!(context));
        facts.insert("chat_template".into(), json!(template));
    }
    if arguments.json {
        let mut out = json!({
            "name": record.name,
            "source": record.source,
            "bytes": record.bytes(),
            "fetched": record.fetched,
            "files": record.files,
        });
        out["model"] = facts.into();
        print(&serde_json::to_string_pretty(&out)?);
        return Ok(ExitCode::SUCCESS);
    }
    rows.push(("fetched", age(record.fetched)));
    rows.iter().for_each(|(key, value)| print(&format!("{key:13} {value}")));
    for file in &record.files {
        let whose = if file.own { "" } else { " (another program's)" };
        print(&format!("{:13} {} {}{whose}", "file", size(file.bytes), file.path.display()));
        if let Some(sha256) = &file.sha256 {
            print(&format!("{:13} {sha256}", "sha256"));
        }
    }
    Ok(ExitCode::SUCCESS)
}
