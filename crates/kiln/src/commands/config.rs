//! `kiln config`: the file of flags that need not be typed again.

use std::process::ExitCode;

use anyhow::{Context as _, bail};
use clap::Subcommand;
use kiln_system::files::{Output, Overwrite};
use serde_json::json;
use toml_edit::{Item, Table, Value, value};

use crate::config::{Config, path, plain};
use crate::output::{print, say};

/// Flags of `kiln config`.
#[derive(clap::Args)]
#[command(after_help = "Examples:
  kiln config                               # show the file
  kiln config set model hf:owner/repo       # the model where none is named
  kiln config set flags.device cpu          # a flag of every command
  kiln config set chat.temp 0.7             # a flag of one command
  kiln config unset chat.temp

The file looks like this; keys are the long names of flags:

  model = \"hf:owner/repo:Q4_K_M\"
  [flags]
  ctx-size = 16384
  [serve]
  port = 9000
  allow-host = [\"kiln.lan\", \"kiln\"]

Flags on the command line override environment variables, and those override the file. The file is config.toml in \
~/.config/kiln, or the one that KILN_CONFIG names; `kiln config path` prints it.")]
pub(crate) struct Arguments {
    #[command(subcommand)]
    action: Option<Action>,
    /// Print JSON
    #[arg(long)]
    json: bool,
}

#[derive(Subcommand)]
enum Action {
    /// Print where the file is
    Path,
    /// Set a key
    Set {
        /// `model`, `flags.FLAG` or `COMMAND.FLAG`
        key: String,
        /// Its value
        value: String,
    },
    /// Remove a key
    Unset {
        /// `model`, `flags.FLAG` or `COMMAND.FLAG`
        key: String,
    },
}

/// Runs the command; `command` is the program's.
pub(crate) fn run(arguments: &Arguments, command: &clap::Command) -> anyhow::Result<ExitCode> {
    match &arguments.action {
        Some(Action::Path) => print(&path()?.display().to_string()),
        Some(Action::Set { key, value }) => change(key, Some(value), command)?,
        Some(Action::Unset { key }) => change(key, None, command)?,
        None => show(arguments.json, command)?,
    }
    Ok(ExitCode::SUCCESS)
}

fn show(as_json: bool, command: &clap::Command) -> anyhow::Result<()> {
    let config = Config::read()?;
    config.check(command)?;
    if !as_json {
        if config.document.is_empty() {
            say(&format!("{} is empty, or not there\nhint: kiln config --help", config.path.display()));
        } else {
            say(&config.path.display().to_string());
            print(config.document.to_string().trim_end());
        }
        return Ok(());
    }
    let mut out = json!({"path": config.path});
    let told = |item: &Item| match item.as_value() {
        Some(Value::Array(list)) => json!(list.iter().map(plain).collect::<Vec<_>>()),
        value => json!(value.and_then(plain)),
    };
    for (name, item) in config.document.iter() {
        out["settings"][name] = match item {
            Item::Table(table) => table.iter().map(|(key, item)| (key.to_owned(), told(item))).collect(),
            item => told(item),
        };
    }
    print(&serde_json::to_string_pretty(&out)?);
    Ok(())
}

fn change(key: &str, to: Option<&str>, command: &clap::Command) -> anyhow::Result<()> {
    let mut config = Config::read_or_new()?;
    let (table, name) = match key.split_once('.') {
        Some((table, name)) if !table.is_empty() && !name.is_empty() => (table, name),
        None if key == "model" => ("", key),
        _ => bail!("{key:?} is no key\nhint: `model`, flags.FLAG or COMMAND.FLAG, as in chat.temp"),
    };
    let root = config.document.as_table_mut();
    let inside = if table.is_empty() {
        root
    } else {
        let there = root.entry(table).or_insert(Item::Table(Table::new())).as_table_mut();
        there.with_context(|| format!("`{table}` is no table in {}", config.path.display()))?
    };
    match to {
        Some(text) => inside[name] = typed(text),
        None if inside.remove(name).is_none() => bail!("{key} is not set in {}", config.path.display()),
        None => {}
    }
    if !table.is_empty() && config.document.get(table).and_then(Item::as_table).is_some_and(Table::is_empty) {
        config.document.remove(table);
    }
    // A key that means nothing is not written.
    config.check(command)?;
    let folder = config.path.parent().filter(|folder| !folder.as_os_str().is_empty());
    if let Some(folder) = folder {
        std::fs::create_dir_all(folder).with_context(|| format!("cannot make {}", folder.display()))?;
    }
    Ok(Output::write(&config.path, Overwrite::Yes, config.document.to_string().as_bytes())?)
}

/// A number or a switch where the text is one.
fn typed(text: &str) -> Item {
    if let Ok(on) = text.parse::<bool>() {
        return value(on);
    }
    match (text.parse::<i64>(), text.parse::<f64>()) {
        (Ok(number), _) => value(number),
        (_, Ok(number)) if number.is_finite() => value(number),
        _ => value(text),
    }
}
