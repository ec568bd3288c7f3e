//! The config file: what a user would say on every command line. Flags and variables of the environment come before it.
//!
//! A key is the long name of a flag. Those in `[flags]` go to every command that has the flag, those in a table with the name
//! of a command to that one. `model`, above all tables, takes the place of the default model.

use std::ffi::OsString;
use std::path::PathBuf;
use std::sync::OnceLock;

use anyhow::{Context as _, bail};
use clap::parser::ValueSource;
use clap::{ArgAction, ArgMatches, Command};
use etcetera::BaseStrategy as _;
use kiln_system::environment;
use toml_edit::{DocumentMut, Item, Value};

/// The table of flags that are for every command.
const EVERY: &str = "flags";

static MODEL: OnceLock<String> = OnceLock::new();

/// The model that is taken where none is named, if the file names one.
pub(crate) fn default_model() -> Option<&'static str> {
    MODEL.get().map(String::as_str)
}

/// A config file.
pub(crate) struct Config {
    pub(crate) path: PathBuf,
    pub(crate) document: DocumentMut,
}

/// Where the file is: `KILN_CONFIG`, else `kiln/config.toml` in the user's folder of configurations.
pub(crate) fn path() -> anyhow::Result<PathBuf> {
    if let Some(named) = environment::path("KILN_CONFIG") {
        return Ok(named);
    }
    let dirs = etcetera::choose_base_strategy().context("no home folder\nhint: name the file with KILN_CONFIG")?;
    Ok(dirs.config_dir().join("kiln/config.toml"))
}

impl Config {
    /// Reads the file; one that is not there is empty, unless it was named.
    pub(crate) fn read() -> anyhow::Result<Config> {
        let config = Config::read_or_new()?;
        if environment::path("KILN_CONFIG").is_some() && !config.path.exists() {
            bail!("KILN_CONFIG names {}, which is not there\nhint: `kiln config set` makes it", config.path.display());
        }
        Ok(config)
    }

    /// Reads the file to change it; one that is not there is empty.
    pub(crate) fn read_or_new() -> anyhow::Result<Config> {
        let path = path()?;
        let text = match std::fs::read_to_string(&path) {
            Ok(text) => text,
            Err(e) if e.kind() == std::io::ErrorKind::NotFound => String::new(),
            Err(e) => bail!("cannot read {}: {e}", path.display()),
        };
        let document = text.parse().map_err(|why: toml_edit::TomlError| {
            anyhow::anyhow!(
                "{} is no TOML: {}\nhint: `kiln config --help` shows one",
                path.display(),
                why.to_string().trim()
            )
        })?;
        Ok(Config { path, document })
    }

    /// Every key with the table it is in, and its value.
    fn entries(&self) -> anyhow::Result<Vec<(String, String, Value)>> {
        let mut all = Vec::new();
        for (table, item) in self.document.iter() {
            match item {
                Item::Value(value) if table == "model" => all.push((String::new(), table.to_owned(), value.clone())),
                Item::Table(inside) => {
                    for (key, item) in inside {
                        let Item::Value(value) = item else { bail!(self.wrong(&format!("{table}.{key}"), "no value")) };
                        all.push((table.to_owned(), key.to_owned(), value.clone()));
                    }
                }
                _ => bail!(self.wrong(table, "neither `model` nor a table")),
            }
        }
        Ok(all)
    }

    fn wrong(&self, key: &str, what: &str) -> String {
        format!("{}: `{key}` is {what}\nhint: `kiln config --help` shows how the file looks", self.path.display())
    }

    /// Whether every key of the file means something and has a value that its flag takes; `command` is the program's.
    pub(crate) fn check(&self, command: &Command) -> anyhow::Result<()> {
        for (table, key, value) in self.entries()? {
            let name = if table.is_empty() { key.clone() } else { format!("{table}.{key}") };
            let owners = match table.as_str() {
                "" => continue,
                EVERY => leaves(command),
                table => match command.find_subcommand(table) {
                    Some(command) => leaves(command),
                    None => bail!(self.wrong(table, "neither a command nor `flags`")),
                },
            };
            let flags: Vec<&clap::Arg> = owners.into_iter().filter_map(|leaf| flag(leaf, &key)).collect();
            if flags.is_empty() {
                bail!(self.wrong(&name, "no flag that has a value or is a switch"));
            }
            let repeats = flags.iter().any(|arg| matches!(arg.get_action(), ArgAction::Append));
            let Some(given) = texts(&value) else { bail!(self.wrong(&name, "a table, which no flag takes")) };
            if value.is_array() && !repeats {
                bail!(self.wrong(&name, "a list, and the flag is given once"));
            }
            for arg in flags {
                self.check_value(&name, arg, &value, &given)?;
            }
        }
        Ok(())
    }

    /// Tries a value as if it were typed.
    fn check_value(&self, name: &str, arg: &clap::Arg, value: &Value, given: &[String]) -> anyhow::Result<()> {
        if matches!(arg.get_action(), ArgAction::SetTrue) {
            return match value.as_bool() {
                Some(_) => Ok(()),
                None => bail!(self.wrong(name, "a switch: it is true or false")),
            };
        }
        // The one flag alone, so that nothing else is asked for or excluded.
        let alone = Command::new("kiln").disable_help_flag(true).arg(
            clap::Arg::new("value")
                .long("value")
                .allow_hyphen_values(true)
                .action(arg.get_action().clone())
                .value_parser(arg.get_value_parser().clone())
                .value_delimiter(arg.get_value_delimiter()),
        );
        let words = given.iter().map(|text| format!("--value={text}"));
        let tried = alone.try_get_matches_from(std::iter::once("kiln".to_owned()).chain(words));
        match tried {
            Ok(_) => Ok(()),
            Err(why) => {
                let line = why.to_string().lines().next().unwrap_or_default().to_owned();
                let reason = line.rsplit_once("': ").map_or("", |(_, reason)| reason);
                let reason = if reason.is_empty() { String::new() } else { format!(": {reason}") };
                let given = kiln_system::text::shown(&given.join(", "));
                bail!(self.wrong(
                    name,
                    &format!("{given:?}, which --{} does not take{reason}", arg.get_long().unwrap_or_default())
                ))
            }
        }
    }

    /// The flags of the file for a command, but for those that the user has given or that exclude one another with those.
    fn flags(&self, path: &[&str], leaf: &Command, given: &ArgMatches) -> anyhow::Result<Vec<OsString>> {
        let said = |id: &str| {
            let source = given.try_contains_id(id).ok().and_then(|_| given.value_source(id));
            matches!(source, Some(ValueSource::CommandLine | ValueSource::EnvVariable))
        };
        // What is said for the one command counts more than what is said for all.
        let mut chosen: Vec<(String, Value)> = Vec::new();
        for (table, key, value) in self.entries()? {
            if table == EVERY || path.first() == Some(&table.as_str()) {
                let own = table != EVERY;
                match chosen.iter_mut().find(|(other, _)| *other == key) {
                    Some(there) if own => there.1 = value,
                    Some(_) => {}
                    None => chosen.push((key, value)),
                }
            }
        }
        let mut words = Vec::new();
        for (key, value) in chosen {
            let Some(arg) = flag(leaf, &key) else { continue };
            let excluded = leaf.get_arg_conflicts_with(arg).iter().any(|other| said(other.get_id().as_str()));
            if said(arg.get_id().as_str()) || excluded {
                continue;
            }
            let given = texts(&value).unwrap_or_default();
            match arg.get_action() {
                ArgAction::SetTrue if value.as_bool() == Some(true) => words.push(format!("--{key}").into()),
                ArgAction::SetTrue if value.as_bool() == Some(false) => {}
                ArgAction::SetTrue => bail!(self.wrong(&key, "a switch: true or false")),
                ArgAction::Append => words.extend(given.iter().map(|text| format!("--{key}={text}").into())),
                _ if value.is_array() => bail!(self.wrong(&key, "a list, and the flag is given once")),
                _ => words.push(format!("--{key}={}", given.concat()).into()),
            }
        }
        Ok(words)
    }
}

/// The command itself, or the commands below it.
fn leaves(command: &Command) -> Vec<&Command> {
    let below: Vec<&Command> = command.get_subcommands().flat_map(leaves).collect();
    if below.is_empty() { vec![command] } else { below }
}

/// A flag by its long name.
fn flag<'a>(command: &'a Command, key: &str) -> Option<&'a clap::Arg> {
    // What a command is asked to do this once is no setting: a prompt or a model in the file would stand beside the one that is typed.
    const ONCE: [&str; 6] = ["help", "version", "json", "prompt", "file", "model"];
    command.get_arguments().find(|arg| arg.get_long() == Some(key) && !ONCE.contains(&key))
}

/// A value as it would be typed.
pub(crate) fn plain(value: &Value) -> Option<String> {
    match value {
        Value::String(text) => Some(text.value().clone()),
        Value::Integer(number) => Some(number.value().to_string()),
        Value::Float(number) => Some(number.value().to_string()),
        Value::Boolean(on) => Some(on.value().to_string()),
        _ => None,
    }
}

/// The values of a key, as they would be typed: one, or those of a list for a flag that may be given several times.
fn texts(value: &Value) -> Option<Vec<String>> {
    match value {
        Value::Array(list) => list.iter().map(plain).collect(),
        one => plain(one).map(|text| vec![text]),
    }
}

/// What the user said, and behind it what the file says. `Err` is an error of the file.
pub(crate) fn parse(mut command: Command, words: Vec<OsString>) -> anyhow::Result<ArgMatches> {
    command.build();
    let matches = command.clone().try_get_matches_from(&words).unwrap_or_else(|why| crate::refuse(why));
    let Some((first, mut given)) = matches.subcommand() else { return Ok(matches) };
    // These mend the file, or do without it.
    if ["config", "completions", "man", "help"].contains(&first) {
        return Ok(matches);
    }
    let config = Config::read()?;
    if config.document.is_empty() {
        return Ok(matches);
    }
    config.check(&command)?;
    if let Some(model) = config.document.get("model").and_then(Item::as_str) {
        let _ = MODEL.set(model.to_owned());
    }
    let mut path = vec![first];
    let mut leaf = command.find_subcommand(first).context("the command is there")?;
    while let Some((next, inside)) = given.subcommand() {
        leaf = leaf.find_subcommand(next).context("the command is there")?;
        (given, path) = (inside, [path, vec![next]].concat());
    }
    let more = config.flags(&path, leaf, given)?;
    if more.is_empty() {
        return Ok(matches);
    }
    // Behind the names of the commands, before what the user said.
    let (mut at, mut words) = (1, words);
    for name in &path {
        let aliases =
            |word: &OsString| word == name || command.find_subcommand(word).is_some_and(|c| c.get_name() == *name);
        at += words[at..].iter().position(aliases).context("the name of the command is said")? + 1;
    }
    words.splice(at..at, more);
    command.try_get_matches_from(words).map_err(|why| {
        let line = why.to_string().lines().next().unwrap_or_default().trim_start_matches("error: ").to_owned();
        anyhow::anyhow!("{}: {line}\nhint: `kiln config` shows what the file says", config.path.display())
    })
}
