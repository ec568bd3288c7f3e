//! `kiln serve`: a model behind the HTTP APIs that clients already speak.

use std::path::PathBuf;
use std::process::ExitCode;
use std::time::Duration;

use anyhow::{Context as _, bail};
use kiln_engine::run::{Policy, Scheduler};
use kiln_server::{Key, Server, Settings};

use crate::model::{ModelFlags, open, resolve};
use crate::output::say;

/// Flags of `kiln serve`.
#[derive(clap::Args)]
#[command(
    after_help = "Examples:\n  kiln serve                                the default model on http://127.0.0.1:8080\n  kiln serve model.gguf --parallel 16 --ctx-size 8192\n  kiln serve model.gguf --host 0.0.0.0 --api-key-file keys.txt\n\nThen, with any client of OpenAI's API:\n  curl http://127.0.0.1:8080/v1/chat/completions -H 'Content-Type: application/json' \\\n    -d '{\"messages\": [{\"role\": \"user\", \"content\": \"Hello\"}]}'"
)]
pub(crate) struct Arguments {
    /// GGUF file or a name, as `kiln pull` takes them; without one SmolLM2-135M-Instruct from the local store, fetched at first use
    model: Option<PathBuf>,
    /// Address to listen on
    #[arg(long, default_value = "127.0.0.1")]
    host: String,
    /// Port to listen on; 0 for any free one
    #[arg(long, default_value_t = 8080)]
    port: u16,
    /// Key that clients must send; may be given several times
    #[arg(long, env = "KILN_API_KEY", hide_env_values = true, value_name = "KEY")]
    api_key: Vec<String>,
    /// File with a key on each line, as KEY or NAME:KEY; lines that begin with # are left out
    #[arg(long, value_name = "FILE")]
    api_key_file: Option<PathBuf>,
    /// Listen on other addresses than this machine's own without any key: whoever reaches the port may use the model
    #[arg(long)]
    allow_insecure_address: bool,
    /// Name that clients may have in `Host`, beside the address itself; may be given several times
    #[arg(long, value_name = "NAME")]
    allow_host: Vec<String>,
    /// Origin of web pages that may use the server, like `https://chat.example`; may be given several times
    #[arg(long, value_name = "ORIGIN")]
    allow_origin: Vec<String>,
    /// Texts to write at once; the memory for their contexts is taken at the start
    #[arg(long, default_value_t = 8, value_name = "N", value_parser = clap::value_parser!(u16).range(1..=1024))]
    parallel: u16,
    /// Requests that may wait while others run; one more is refused with 429
    #[arg(long, default_value_t = 256, value_name = "N")]
    queue: usize,
    /// Name to serve the model under [default: the file's name]; may be given several times
    #[arg(long, value_name = "NAME")]
    alias: Vec<String>,
    /// Refuse requests with fields that are not known
    #[arg(long)]
    strict_api: bool,
    /// Seconds that running answers may take after the server was asked to end
    #[arg(long, default_value_t = 30, value_name = "SECONDS")]
    drain: u64,
    #[command(flatten)]
    flags: ModelFlags,
}

impl Arguments {
    fn keys(&self) -> anyhow::Result<Vec<Key>> {
        let mut keys: Vec<Key> = Vec::new();
        for secret in self.api_key.iter().map(|key| key.trim()).filter(|key| !key.is_empty()) {
            keys.push(Key { name: format!("key {}", keys.len() + 1), secret: secret.to_owned() });
        }
        if let Some(path) = &self.api_key_file {
            let text = std::fs::read_to_string(path).with_context(|| format!("cannot read {}", path.display()))?;
            for line in text.lines().map(str::trim).filter(|line| !line.is_empty() && !line.starts_with('#')) {
                let number = keys.len() + 1;
                let (name, secret) = match line.split_once(':') {
                    Some((name, secret)) => (name.trim().to_owned(), secret.trim()),
                    None => (format!("key {number}"), line),
                };
                if secret.is_empty() {
                    bail!("{}: the key of {name:?} is empty", path.display());
                }
                keys.push(Key { name, secret: secret.to_owned() });
            }
            if keys.is_empty() {
                bail!("{} holds no key\nhint: write one key on a line", path.display());
            }
        }
        Ok(keys)
    }

    fn is_loopback(&self) -> bool {
        let plain = self.host.trim_start_matches('[').trim_end_matches(']');
        plain == "localhost" || plain.parse::<std::net::IpAddr>().is_ok_and(|ip| ip.is_loopback())
    }

    fn settings(&self, path: &std::path::Path) -> anyhow::Result<Settings> {
        let keys = self.keys()?;
        let loopback = self.is_loopback();
        if !loopback && keys.is_empty() && !self.allow_insecure_address {
            bail!(
                "{} can be reached by other machines, and no key is set\nhint: --api-key KEY or --api-key-file FILE asks for one; --allow-insecure-address lets everybody in",
                self.host
            );
        }
        let stem = path.file_stem().map(|stem| stem.to_string_lossy().into_owned()).unwrap_or_default();
        let name = self.alias.first().cloned().unwrap_or_else(|| stem.clone());
        let aliases = self.alias.iter().skip(1).cloned().chain([stem]).collect();
        let usual = Settings::new(name);
        let mut hosts = self.allow_host.clone();
        if loopback {
            hosts.extend(usual.hosts.iter().cloned().chain([self.host.clone()]));
        }
        Ok(Settings {
            aliases,
            keys,
            hosts,
            origins: self.allow_origin.clone(),
            queue: self.queue,
            strict: self.strict_api,
            drain: Duration::from_secs(self.drain),
            ..usual
        })
    }
}

/// Runs the command.
pub(crate) fn run(arguments: &Arguments) -> anyhow::Result<ExitCode> {
    let path = resolve(arguments.model.as_deref())?;
    let settings = arguments.settings(&path)?;
    let name = settings.model.clone();
    let model = open(&path)?;
    // Probes get an answer while the weights are loaded.
    let server = Server::listen(&arguments.host, arguments.port, settings)?;
    let address = server.address();
    let sequences = usize::from(arguments.parallel);
    let engine = arguments.flags.fitted(&model, sequences)?;
    say(&format!("{name} on {}", engine.describe()));
    // The server counts requests itself, so that a refusal need not wait for the engine.
    let policy = Policy { queue: usize::MAX, ..Policy::default() };
    server.ready(Scheduler::start(engine, policy), sequences);
    say(&format!("listening on http://{address} (OpenAI: http://{address}/v1); Ctrl-C ends it"));
    // What is being written is finished before the process ends.
    kiln_system::files::leave_endings_to_the_program();
    server.wait()?;
    Ok(ExitCode::SUCCESS)
}
