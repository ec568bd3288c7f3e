//! `kiln launch`: the configuration with which another program talks to a running server. Each program is a row of `Client::setup`.

use std::path::{Path, PathBuf};
use std::process::ExitCode;
use std::time::Duration;

use anyhow::{Context as _, bail};
use kiln_system::files::{Output, Overwrite};
use kiln_system::text::shown;
use serde_json::{Value, json};
use toml_edit::{DocumentMut, Item, Table, value};

use crate::output::{print, say};

/// Flags of `kiln launch`.
#[derive(clap::Args)]
#[command(after_help = "Examples:
  kiln serve smollm2                   # a server, in another terminal
  kiln launch claude                   # writes ~/.claude/settings.json
  kiln launch codex --print            # shows what would be written
  kiln launch zed --url http://gpu-box:8080 --api-key s3cret

What a file holds already stays; the file as it was is kept beside it with .before-kiln at the end of its name.")]
pub(crate) struct Arguments {
    /// The program that will use the server
    #[arg(value_enum)]
    client: Client,
    /// Where the server listens
    #[arg(long, value_name = "URL", default_value = "http://127.0.0.1:8080")]
    url: String,
    /// Model to use [default: the server's first one]
    #[arg(short, long, value_name = "NAME")]
    model: Option<String>,
    /// Key that the server wants
    #[arg(long, env = "KILN_API_KEY", hide_env_values = true, value_name = "KEY")]
    api_key: Option<String>,
    /// Print the configuration, and write nothing
    #[arg(long)]
    print: bool,
}

/// Programs that can use a server.
#[derive(clap::ValueEnum, Clone, Copy, Debug, PartialEq, Eq)]
enum Client {
    /// Claude Code
    Claude,
    /// Codex CLI of OpenAI
    Codex,
    /// OpenCode
    Opencode,
    /// Aider
    Aider,
    /// The editor Zed
    Zed,
    /// Continue, for VS Code and JetBrains
    Continue,
}

/// What a program is told.
#[derive(Debug)]
struct Server {
    /// Without a slash at its end.
    url: String,
    model: String,
    key: String,
    context: Option<u64>,
}

/// What is added to a file.
enum Addition {
    /// Objects are merged into those that are there.
    Json(Value),
    /// Tables are merged into those that are there.
    Toml(DocumentMut),
    /// Lines `key: value` take the place of those with the same key.
    Lines(Vec<(&'static str, String)>),
    /// The whole file, if there is none yet.
    Whole(String),
}

/// How a program is set up.
struct Setup {
    /// The file, below the home folder.
    file: PathBuf,
    addition: Addition,
    /// How to begin.
    then: String,
}

/// The folders that programs keep their configuration in.
struct Folders {
    home: PathBuf,
    config: PathBuf,
}

impl Folders {
    fn of_user() -> anyhow::Result<Folders> {
        let home = etcetera::home_dir().context("there is no home folder")?;
        let config = std::env::var_os("XDG_CONFIG_HOME").map(PathBuf::from).filter(|folder| folder.is_absolute());
        Ok(Folders { config: config.unwrap_or_else(|| home.join(".config")), home })
    }
}

impl Client {
    fn setup(self, server: &Server, folders: &Folders) -> Setup {
        let Server { url, model, key, context } = server;
        let openai = format!("{url}/v1");
        match self {
            Client::Claude => Setup {
                file: folders.home.join(".claude/settings.json"),
                addition: Addition::Json(json!({"env": {
                    "ANTHROPIC_BASE_URL": url, "ANTHROPIC_AUTH_TOKEN": key, "ANTHROPIC_MODEL": model,
                    // Small tasks go to the same model: the server has no other.
                    "ANTHROPIC_DEFAULT_HAIKU_MODEL": model, "CLAUDE_CODE_DISABLE_NONESSENTIAL_TRAFFIC": "1",
                }})),
                then: "claude".to_owned(),
            },
            Client::Codex => Setup {
                // The profile's own file. Codex refuses `--profile` where config.toml has a table for it, as older ones read.
                file: folders.home.join(".codex/kiln.config.toml"),
                addition: Addition::Toml(codex(&openai, model, *context)),
                then: format!("KILN_API_KEY={} codex --profile kiln", quoted(key)),
            },
            Client::Opencode => Setup {
                file: folders.config.join("opencode/opencode.json"),
                addition: Addition::Json(json!({
                    "$schema": "https://opencode.ai/config.json",
                    "provider": {"kiln": {
                        "npm": "@ai-sdk/openai-compatible", "name": "Kiln",
                        "options": {"baseURL": openai, "apiKey": key}, "models": {model: opencode_model(model, *context)},
                    }},
                    "model": format!("kiln/{model}"),
                })),
                then: "opencode".to_owned(),
            },
            Client::Aider => Setup {
                file: folders.home.join(".aider.conf.yml"),
                addition: Addition::Lines(vec![
                    ("model", in_yaml(&format!("openai/{model}"))),
                    ("openai-api-base", in_yaml(&openai)),
                    ("openai-api-key", in_yaml(key)),
                ]),
                then: "aider".to_owned(),
            },
            Client::Zed => Setup {
                file: folders.config.join("zed/settings.json"),
                addition: Addition::Json(json!({"language_models": {"openai_compatible": {"Kiln": {
                    "api_url": openai,
                    "available_models": [{"name": model, "display_name": model, "max_tokens": context.unwrap_or(8192)}],
                }}}})),
                then: format!("zed, and choose {} of Kiln in the agent panel; its key is {key}", shown(model)),
            },
            Client::Continue => Setup {
                file: folders.home.join(".continue/config.yaml"),
                addition: Addition::Whole(format!(
                    "name: Kiln\nversion: 1.0.0\nschema: v1\nmodels:\n  - name: {name}\n    provider: openai\n    model: {name}\n    \
                     apiBase: {base}\n    apiKey: {key}\n    roles: [chat, edit, apply]\n",
                    name = in_yaml(model),
                    base = in_yaml(&openai),
                    key = in_yaml(key),
                )),
                then: "your editor".to_owned(),
            },
        }
    }
}

/// A model of opencode. With its context, a conversation is summed up before it outgrows this.
fn opencode_model(model: &str, context: Option<u64>) -> Value {
    match context {
        Some(context) => json!({"name": model, "limit": {"context": context, "output": (context / 4).clamp(1, 8192)}}),
        None => json!({"name": model}),
    }
}

/// A profile of Codex: what it does without the profile stays as it is.
fn codex(openai: &str, model: &str, context: Option<u64>) -> DocumentMut {
    let mut provider = Table::new();
    provider.insert("name", value("Kiln"));
    provider.insert("base_url", value(openai));
    provider.insert("env_key", value("KILN_API_KEY"));
    provider.insert("wire_api", value("responses"));
    let mut providers = Table::new();
    providers.set_implicit(true);
    providers.insert("kiln", Item::Table(provider));
    let mut all = DocumentMut::new();
    all.insert("model", value(model));
    all.insert("model_provider", value("kiln"));
    // Codex knows the contexts of its own models only, and sums up a conversation before it outgrows this one.
    if let Some(context) = context.and_then(|context| i64::try_from(context).ok()) {
        all.insert("model_context_window", value(context));
    }
    all.insert("model_providers", Item::Table(providers));
    all
}

/// A text as YAML has it: JSON's texts are YAML's.
fn in_yaml(text: &str) -> String {
    Value::from(text).to_string()
}

/// A word of a shell.
fn quoted(word: &str) -> String {
    let plain = !word.is_empty() && word.chars().all(|c| c.is_ascii_alphanumeric() || "-_./:".contains(c));
    if plain { word.to_owned() } else { format!("'{}'", word.replace('\'', "'\\''")) }
}

impl Addition {
    /// The file with the addition; `old` is what it holds, if it is there.
    fn added(&self, old: Option<&str>) -> anyhow::Result<String> {
        let old = old.filter(|text| !text.trim().is_empty());
        match self {
            Addition::Json(more) => {
                let mut all = match old {
                    None => json!({}),
                    Some(text) => {
                        serde_json::from_str(text).context("the file is no plain JSON; it may have comments")?
                    }
                };
                merge(&mut all, more);
                Ok(serde_json::to_string_pretty(&all)? + "\n")
            }
            Addition::Toml(more) => {
                let mut all: DocumentMut = old.unwrap_or_default().parse().context("the file is no TOML")?;
                merge_tables(all.as_table_mut(), more.as_table());
                Ok(all.to_string())
            }
            Addition::Lines(more) => {
                let is_new = |line: &&str| !more.iter().any(|(key, _)| line.starts_with(&format!("{key}:")));
                let kept = old.unwrap_or_default().lines().filter(is_new).map(str::to_owned);
                let lines = kept.chain(more.iter().map(|(key, value)| format!("{key}: {value}")));
                Ok(lines.map(|line| line + "\n").collect())
            }
            Addition::Whole(text) => match old {
                Some(old) if old != text => bail!("the file is there already, and lists are not merged"),
                _ => Ok(text.clone()),
            },
        }
    }
}

/// Puts all of an object into another one.
fn merge(all: &mut Value, more: &Value) {
    match (all, more) {
        (Value::Object(all), Value::Object(more)) => {
            more.iter().for_each(|(key, value)| merge(all.entry(key).or_insert(Value::Null), value));
        }
        (all, more) => *all = more.clone(),
    }
}

/// Puts all of a table into another one.
fn merge_tables(all: &mut Table, more: &Table) {
    for (key, item) in more {
        match (all.get_mut(key), item) {
            (Some(Item::Table(all)), Item::Table(more)) => merge_tables(all, more),
            // What stands before the key, as a comment, stays.
            (Some(there), item) => *there = item.clone(),
            (None, item) => drop(all.insert(key, item.clone())),
        }
    }
}

/// Asks a running server.
fn get(url: &str, path: &str, key: Option<&str>) -> anyhow::Result<Value> {
    let mut request = ureq::get(format!("{url}{path}")).config().timeout_global(Some(Duration::from_secs(5))).build();
    if let Some(key) = key {
        request = request.header("Authorization", format!("Bearer {key}"));
    }
    Ok(serde_json::from_str(&request.call()?.body_mut().read_to_string()?)?)
}

impl Arguments {
    fn server(&self) -> anyhow::Result<Server> {
        let url = self.url.trim_end_matches('/').trim_end_matches("/v1").to_owned();
        if !url.starts_with("http://") && !url.starts_with("https://") {
            bail!("--url {url} is no address\nhint: it looks like http://127.0.0.1:8080");
        }
        let key = self.api_key.as_deref().filter(|key| !key.is_empty());
        let model = match &self.model {
            Some(model) => model.clone(),
            None => {
                let models = get(&url, "/v1/models", key).with_context(|| {
                    format!("no server answers at {url}\nhint: `kiln serve` starts one; --url names another, --model spares the question")
                })?;
                let first = models.pointer("/data/0/id").and_then(Value::as_str);
                first
                    .with_context(|| format!("the server at {url} tells no model\nhint: --model names one"))?
                    .to_owned()
            }
        };
        // Only a convenience: programs that want it have a usual value.
        let facts = self.model.is_none().then(|| get(&url, "/props", key).ok()).flatten();
        let context = facts.as_ref().and_then(|facts| facts.pointer("/default_generation_settings/n_ctx")?.as_u64());
        Ok(Server { url, model, key: key.unwrap_or("kiln").to_owned(), context })
    }
}

/// Writes a file whole; what was there is kept beside it.
fn write(file: &Path, text: &str, old: Option<&str>) -> anyhow::Result<()> {
    let save = |path: &Path, text: &str| -> anyhow::Result<()> {
        let mut output = Output::create(path, Overwrite::Yes, &[])?;
        std::io::Write::write_all(&mut output, text.as_bytes()).map_err(|why| output.failed(why))?;
        Ok(output.finish()?)
    };
    if let Some(folder) = file.parent() {
        std::fs::create_dir_all(folder).with_context(|| format!("cannot make {}", folder.display()))?;
    }
    if let Some(old) = old {
        let mut kept = file.as_os_str().to_owned();
        kept.push(".before-kiln");
        // The first one is what the user had.
        if !Path::new(&kept).exists() {
            save(Path::new(&kept), old)?;
        }
    }
    save(file, text)
}

/// Runs the command.
pub(crate) fn run(arguments: &Arguments) -> anyhow::Result<ExitCode> {
    let server = arguments.server()?;
    let Setup { file, addition, then } = arguments.client.setup(&server, &Folders::of_user()?);
    if arguments.print {
        print(addition.added(None)?.trim_end());
        say(&format!("belongs in {}; then: {then}", file.display()));
        return Ok(ExitCode::SUCCESS);
    }
    let old = match std::fs::read_to_string(&file) {
        Ok(old) => Some(old),
        Err(why) if why.kind() == std::io::ErrorKind::NotFound => None,
        Err(why) => return Err(why).with_context(|| format!("cannot read {}", file.display())),
    };
    let text = addition
        .added(old.as_deref())
        .with_context(|| format!("{} is left as it is\nhint: --print shows what belongs in it", file.display()))?;
    match old.as_deref() == Some(text.as_str()) {
        true => say(&format!("{} has it already", file.display())),
        false => {
            write(&file, &text, old.as_deref())?;
            say(&format!("{} is written, for {} at {}", file.display(), shown(&server.model), server.url));
        }
    }
    say(&format!("then: {then}"));
    Ok(ExitCode::SUCCESS)
}

#[cfg(test)]
mod tests {
    use super::*;

    fn setup(client: Client) -> Setup {
        let server = Server { url: "http://h:1".into(), model: "m".into(), key: "k y".into(), context: Some(64) };
        client.setup(&server, &Folders { home: "/home/u".into(), config: "/home/u/.config".into() })
    }

    #[test]
    fn every_client_gets_the_address_and_the_model() {
        for client in <Client as clap::ValueEnum>::value_variants() {
            let Setup { file, addition, .. } = setup(*client);
            let text = addition.added(None).unwrap();
            assert!(
                text.contains("http://h:1") && text.contains("\"m\"") | text.contains("openai/m"),
                "{client:?}: {text}"
            );
            assert!(file.starts_with("/home/u"), "{file:?}");
            assert_eq!(addition.added(Some(&text)).unwrap(), text, "twice is once: {client:?}");
        }
    }

    #[test]
    fn what_is_there_stays() {
        let claude = setup(Client::Claude).addition;
        let text = claude.added(Some(r#"{"theme": "dark", "env": {"A": "1", "ANTHROPIC_MODEL": "old"}}"#)).unwrap();
        let all: Value = serde_json::from_str(&text).unwrap();
        assert_eq!(
            (&all["theme"], &all["env"]["A"], &all["env"]["ANTHROPIC_MODEL"]),
            (&json!("dark"), &json!("1"), &json!("m"))
        );
        assert!(claude.added(Some("{ // mine\n}")).is_err());
        let codex = setup(Client::Codex).addition;
        let text = codex.added(Some("# mine\nmodel = \"gpt\"\n[model_providers.other]\nname = \"x\"\n")).unwrap();
        assert!(text.starts_with("# mine\nmodel = \"m\"\n") && text.contains("[model_providers.other]"), "{text}");
        assert!(text.contains("model_context_window = 64") && text.contains("wire_api = \"responses\""), "{text}");
        assert!(!text.contains("profiles"), "Codex refuses the tables of old: {text}");
        let aider = setup(Client::Aider).addition;
        let text = aider.added(Some("# mine\nmodel: old\ndark-mode: true\n")).unwrap();
        assert!(text.starts_with("# mine\ndark-mode: true\nmodel: \"openai/m\"\n"), "{text}");
        assert!(setup(Client::Continue).addition.added(Some("models: []\n")).is_err());
    }

    #[test]
    fn words_of_a_shell_are_quoted_where_they_must_be() {
        assert_eq!(
            [quoted("a-b/c"), quoted("k y"), quoted("it's"), quoted("")],
            ["a-b/c", "'k y'", "'it'\\''s'", "''"]
        );
    }
}
