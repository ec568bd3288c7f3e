//! `kiln serve`: models behind the HTTP APIs that clients already speak.

use std::io::IsTerminal as _;
use std::path::{Path, PathBuf};
use std::process::ExitCode;
use std::sync::Arc;
use std::time::Duration;

use anyhow::{Context as _, bail};
use kiln_engine::embed::Pooling;
use kiln_engine::media::Mmproj;
use kiln_engine::model::Model;
use kiln_engine::run::{First, Policy, Scheduler};
use kiln_engine::sampler::Sampling;
use kiln_engine::text::Template;
use kiln_llm::Job;
use kiln_server::{
    AfterHangUp, Key, LoadedEngine, MediaHost, ModelSpec, ModelStore, RequestDefaults, Running, Secrets, Server,
    Settings, Sharing, StoredResponses, ThinkingBudget, Tls, Tracing,
};

use super::embed::pooling;
use super::media::open_encoder;
use super::sampling_flags::SamplerFlags;
use super::talk_flags::template_source;
use crate::cache_flags::CacheFlags;
use crate::draft_flags::{DraftFlags, Drafting};
use crate::fleet_flags::FleetFlags;
use crate::managed::Managed;
use crate::model::{ModelFlags, resolve};
use crate::output::{log_as_json, log_with_time, print, say};
use crate::store::store;
use crate::tool_flags::ToolFlags;

/// Flags of `kiln serve`.
#[derive(clap::Args)]
#[command(after_help = "Examples:
  kiln serve                  # the default model on http://127.0.0.1:8080
  kiln serve smollm2 --parallel 16 --ctx-size 2048
  kiln serve small=smollm2 large=hf:owner/repo --keep-alive 10m
  kiln serve smollm2 --host 0.0.0.0 --api-key-file keys.txt
  kiln serve smollm2 --tool-calculator --mcp tools.json # tools of MCP servers

Then, with any client of OpenAI's API:
  curl http://127.0.0.1:8080/v1/chat/completions \\
    -H 'Content-Type: application/json' \\
    -d '{\"messages\": [{\"role\": \"user\", \"content\": \"Hello\"}]}'

Of several models each is loaded when it is asked for.")]
pub(crate) struct Arguments {
    /// GGUF files or names as `kiln pull` takes them, as MODEL or NAME=MODEL; without one SmolLM2-135M-Instruct from the local store, fetched at first use. One is loaded
    /// at the start; of several, each when the first request for it comes
    #[arg(value_name = "MODEL")]
    models: Vec<PathBuf>,
    /// Address to listen on; several with commas between, as 127.0.0.1,::1
    #[arg(long, default_value = "127.0.0.1")]
    host: String,
    /// Port to listen on; 0 for any free one
    #[arg(long, default_value_t = 8080)]
    port: u16,
    /// Key that clients must send; may be given several times
    #[arg(long, env = "KILN_API_KEY", hide_env_values = true, value_name = "KEY")]
    api_key: Vec<String>,
    /// File with a key on each line, as KEY or NAME:KEY, with limits behind it if you like: `alice:s3cret at-once=4 per-minute=60`;
    /// lines that begin with # are left out. Read again on SIGHUP, as are --tls-cert and --tls-key
    #[arg(long, value_name = "FILE")]
    api_key_file: Option<PathBuf>,
    /// Listen on other addresses than this machine's own without any key: anyone who reaches the port may use the model
    #[arg(long)]
    allow_insecure_address: bool,
    /// Serve /metrics without a key, for gateways that choose among servers
    #[arg(long)]
    open_metrics: bool,
    /// Speak TLS with this certificate (PEM, with those that vouch for it behind it)
    #[arg(long, value_name = "FILE", requires = "tls_key")]
    tls_cert: Option<PathBuf>,
    /// The certificate's private key (PEM)
    #[arg(long, value_name = "FILE", requires = "tls_cert")]
    tls_key: Option<PathBuf>,
    /// Name that clients may have in `Host`, beside the address itself; may be given several times
    #[arg(long, value_name = "NAME")]
    allow_host: Vec<String>,
    /// Origin of web pages that may use the server, like `https://chat.example`; may be given several times
    #[arg(long, value_name = "ORIGIN")]
    allow_origin: Vec<String>,
    /// Sequences to run at once. They share one KV cache: any of them may grow to the whole context, and the youngest waits where memory is short
    #[arg(long, default_value_t = 8, value_name = "N", value_parser = clap::value_parser!(u16).range(1..=1024))]
    parallel: u16,
    /// Requests that may wait while others run; one more is refused with 429
    #[arg(long, default_value_t = 256, value_name = "N")]
    queue: usize,
    /// How long a request may wait before it is begun, as 30s or 2m; without it as long as it takes
    #[arg(long, value_name = "TIME", value_parser = duration)]
    queue_timeout: Option<Duration>,
    /// How long a request may take in all, as 90s or 10m; without it as long as it takes
    #[arg(long, value_name = "TIME", value_parser = duration)]
    request_timeout: Option<Duration>,
    /// How long an engine with work may not get on, as 10m, before `/livez` calls it hung (503); more than any step takes, and than KILN_TIMEOUT
    #[arg(long, value_name = "TIME", default_value = "5m", value_parser = stall_time)]
    stall_timeout: Duration,
    /// How long an idle model stays loaded, as 5m or 1h [default: forever with one model, else 5m]
    #[arg(long, value_name = "TIME", value_parser = duration)]
    keep_alive: Option<Duration>,
    /// Memory that loaded models may take together, by the size of their files, as 20G; idle ones make room for others
    /// [default: as much as there is]
    #[arg(long, value_name = "BYTES", value_parser = bytes)]
    models_memory: Option<u64>,
    /// Folder that `/slots/ID?action=save` writes to; without one slots are not saved
    #[arg(long, value_name = "FOLDER")]
    slot_save_path: Option<PathBuf>,
    /// Folder that the page keeps conversations in, apart for each key; without one they stay in the readers' browsers. They lie there as plain
    /// files that only this server's user can read
    #[arg(long, value_name = "FOLDER")]
    conversations: Option<PathBuf>,
    /// Let all keys share what was computed of the beginnings of prompts. By the clock, each can then find out what others have
    /// asked
    #[arg(long)]
    shared_cache: bool,
    /// Name to serve the model under [default: the file's name]; may be given several times, or with commas between
    #[arg(long, value_name = "NAME", value_delimiter = ',')]
    alias: Vec<String>,
    /// Words about the models, with commas between, that `/v1/models` tells
    #[arg(long, value_name = "WORDS", value_delimiter = ',')]
    tags: Vec<String>,
    /// Tell clients where the model's file lies (`model_path` of `/props`); without it they learn its name alone
    #[arg(long)]
    show_path: bool,
    /// Do not tell what is being written: `GET /slots` is answered with 501
    #[arg(long)]
    no_slots: bool,
    /// How the vectors of tokens become one of a text in embeddings: none, mean, cls, last [default: what the model was made for]
    #[arg(long, value_name = "NAME", value_parser = pooling)]
    pooling: Option<Pooling>,
    /// Chat template instead of the model's own: one of chatml, command-r, deepseek3, gemma, granite, llama2, llama3,
    /// llama4, mistral, mistral-v7, phi3, phi4, vicuna and zephyr, a file with a Jinja template, or the template itself
    #[arg(long, alias = "chat-template-file", value_name = "TEMPLATE")]
    chat_template: Option<String>,
    /// Values for the template where a request gives none, as '{"enable_thinking": false}'
    #[arg(long, value_name = "JSON")]
    chat_template_kwargs: Option<String>,
    /// What becomes of a model's reasoning where a request does not say: deepseek puts it into a field of its own
    /// (`reasoning_content`), none leaves it in the text
    #[arg(long, value_name = "NAME", default_value = "deepseek", value_parser = ["deepseek", "auto", "none"])]
    reasoning_format: String,
    /// Tokens that a model may think where a request does not say; then its thought is closed. -1 for as many as it likes
    #[arg(long, value_name = "N", allow_negative_numbers = true, value_parser = clap::value_parser!(i64).range(-1..))]
    reasoning_budget: Option<i64>,
    /// Tokens of an answer where a request does not say [default: as many as the context holds]
    #[arg(short = 'n', long, alias = "predict", value_name = "N", allow_negative_numbers = true)]
    n_predict: Option<i64>,
    /// The field that reasoning is told in: reasoning_content as DeepSeek and llama.cpp have it, or reasoning as vLLM has it
    #[arg(long, value_name = "NAME", default_value = "reasoning_content", value_parser = ["reasoning_content", "reasoning"])]
    reasoning_field: String,
    /// Memory for responses of the Responses API that clients come back to by `previous_response_id`, as 64M; 0 keeps none
    #[arg(long, value_name = "BYTES", default_value = "64M", value_parser = bytes)]
    response_store: u64,
    /// Connections at once. One more takes the place of the connection that has been idle the longest; if none is idle, it gets 503 and health
    /// probes get their answer [default: 4096, or fewer where the system allows fewer open files]
    #[arg(long, value_name = "N", value_parser = clap::value_parser!(u32).range(1..))]
    connections: Option<u32>,
    /// Connections at once from one IPv4 address, or one IPv6 network of 64 bits [default: three quarters of all]
    #[arg(long, value_name = "N", value_parser = clap::value_parser!(u32).range(1..))]
    connections_per_address: Option<u32>,
    /// How long a connection may stay open without a request
    #[arg(long, value_name = "TIME", default_value = "75s", value_parser = duration)]
    idle_timeout: Duration,
    /// Bytes of a request at most
    #[arg(long, value_name = "BYTES", default_value = "64M", value_parser = bytes)]
    body_limit: u64,
    /// Log as lines of JSON, requests with their facts; this means -v as well
    #[arg(long)]
    log_json: bool,
    /// Refuse requests with fields that are not known
    #[arg(long)]
    strict_api: bool,
    /// Let clients fetch models into the store and delete them from it (`/api/pull` and `/api/delete` of Ollama's API)
    #[arg(long)]
    allow_pull: bool,
    /// Refuse requests for a model under another name than its own; without it, every name means the model where there is only one
    #[arg(long)]
    strict_model: bool,
    /// Send a trace of each request to this collector of OpenTelemetry (OTLP over HTTP), as http://localhost:4318. Nothing of prompts or
    /// answers is in it. OTEL_EXPORTER_OTLP_HEADERS and OTEL_SERVICE_NAME are heeded
    #[arg(long, value_name = "URL", env = "OTEL_EXPORTER_OTLP_ENDPOINT")]
    otlp_endpoint: Option<String>,
    /// Seconds that running answers may take after the server was asked to end
    #[arg(long, default_value_t = 30, value_name = "SECONDS")]
    drain: u64,
    /// Print a line of JSON when clients may connect: addresses and the names of the models
    #[arg(long)]
    json: bool,
    /// If a device is lost and cannot be opened again, move its layers to what is left
    #[arg(long)]
    fallback: bool,
    /// Encoders of pictures and sounds that belong to the model, in a file usually called mmproj-*.gguf, named as models are: requests may have them then
    #[arg(long, value_name = "FILE")]
    mmproj: Option<PathBuf>,
    /// Serve text alone, also where --mmproj stands before it or in the config file
    #[arg(long, overrides_with = "mmproj")]
    no_mmproj: bool,
    /// Host that pictures of requests may be fetched from, like `images.example` or `*.example.org:8443`; may be given several times. Without it
    /// requests must bring the pictures themselves
    #[arg(long, value_name = "HOST")]
    allow_media_host: Vec<MediaHost>,
    #[command(flatten)]
    tools: ToolFlags,
    #[command(flatten)]
    fleet: FleetFlags,
    #[command(flatten)]
    flags: ModelFlags,
    #[command(flatten)]
    draft: DraftFlags,
    #[command(flatten)]
    cache: CacheFlags,
    #[command(flatten)]
    sampler: SamplerFlags,
}

impl Arguments {
    fn keys(&self) -> anyhow::Result<Vec<Key>> {
        let mut keys: Vec<Key> = Vec::new();
        for secret in self.api_key.iter().map(|key| key.trim()).filter(|key| !key.is_empty()) {
            let name = format!("key {}", keys.len() + 1);
            keys.push(Key { name, secret: secret.to_owned(), ..Key::default() });
        }
        if let Some(path) = &self.api_key_file {
            let text = std::fs::read_to_string(path).with_context(|| format!("cannot read {}", path.display()))?;
            for line in text.lines().map(str::trim).filter(|line| !line.is_empty() && !line.starts_with('#')) {
                let number = keys.len() + 1;
                keys.push(key(line, number).with_context(|| format!("{}: key {number}", path.display()))?);
            }
            if keys.is_empty() {
                bail!("{} holds no key\nhint: write one key on a line", path.display());
            }
        }
        Ok(keys)
    }

    fn tls(&self) -> anyhow::Result<Option<Tls>> {
        let (Some(certificates), Some(key)) = (&self.tls_cert, &self.tls_key) else { return Ok(None) };
        let read = |path: &Path| std::fs::read(path).with_context(|| format!("cannot read {}", path.display()));
        Ok(Some(Tls { certificates: read(certificates)?, key: read(key)? }))
    }

    /// Gives a server the keys and the certificate as their files have them now; says how many keys there are.
    fn renew(&self, server: &Running) -> anyhow::Result<usize> {
        let secrets = Secrets { keys: self.keys()?, tls: self.tls()? };
        let keys = secrets.keys.len();
        server.renew(secrets)?;
        Ok(keys)
    }

    /// Whether the model, with this many tokens, has those that flags name.
    fn has_tokens(&self, vocab: usize) -> anyhow::Result<()> {
        let mut tried = Sampling::default();
        self.sampler.apply(&mut tried)?;
        Ok(tried.check(vocab)?)
    }

    /// What holds where a request says nothing.
    fn request_defaults(&self) -> anyhow::Result<RequestDefaults> {
        // What is wrong is found now, not by the first client. Which tokens there are is the model's to say.
        self.has_tokens(usize::MAX)?;
        let sampler = self.sampler.clone();
        let kwargs = match &self.chat_template_kwargs {
            Some(text) => serde_json::from_str(text).context("--chat-template-kwargs is no JSON object")?,
            None => serde_json::Map::new(),
        };
        if let Some(name) = kwargs.keys().find(|name| Template::is_reserved(name)) {
            bail!("--chat-template-kwargs cannot set {name}: the conversation or the model's vocabulary does");
        }
        Ok(RequestDefaults {
            sampling: Some(Arc::new(move |s| drop(sampler.apply(s)))),
            limit: self.n_predict.and_then(|n| usize::try_from(n).ok()).filter(|n| *n > 0),
            template: self.chat_template.as_deref().map(template_source).transpose()?,
            kwargs,
            keep_reasoning: self.reasoning_format == "none",
            reasoning_field: if self.reasoning_field == "reasoning" { "reasoning" } else { "reasoning_content" },
            thinking_budget: self.reasoning_budget.map(ThinkingBudget::from_number),
            media_hosts: self.allow_media_host.clone(),
            adapters: self.flags.lora.named()?,
        })
    }

    /// The folder of conversations, which is there from now on: one that cannot be made is found now, not by the first reader.
    fn conversations(&self) -> anyhow::Result<Option<PathBuf>> {
        let Some(folder) = &self.conversations else { return Ok(None) };
        kiln_system::os::make_private_folder(folder)
            .with_context(|| format!("--conversations: cannot make the folder {}", folder.display()))?;
        Ok(Some(folder.clone()))
    }

    /// The addresses to listen on.
    fn hosts(&self) -> impl Iterator<Item = &str> {
        self.host.split(',').map(str::trim)
    }

    fn is_loopback(&self) -> bool {
        self.hosts().all(|host| {
            let plain = host.trim_start_matches('[').trim_end_matches(']');
            plain == "localhost" || plain.parse::<std::net::IpAddr>().is_ok_and(|ip| ip.is_loopback())
        })
    }

    fn settings(&self, name: &str, aliases: Vec<String>) -> anyhow::Result<Settings> {
        let keys = self.keys()?;
        let loopback = self.is_loopback();
        if !loopback && keys.is_empty() && !self.allow_insecure_address {
            bail!(
                "{} can be reached by other machines, and no key is set\nhint: --api-key KEY or --api-key-file FILE asks for one; --allow-insecure-address lets everybody in",
                self.host
            );
        }
        let request_defaults = Settings::new(name);
        let open_files = kiln_system::process::most_files().and_then(|most| usize::try_from(most).ok());
        let mut hosts = self.allow_host.clone();
        if loopback {
            hosts.extend(request_defaults.hosts.iter().cloned().chain(self.hosts().map(str::to_owned)));
        }
        Ok(self.fleet.apply(Settings {
            aliases,
            tags: self.tags.iter().map(|tag| tag.trim().to_owned()).filter(|tag| !tag.is_empty()).collect(),
            hides_slots: self.no_slots,
            keys,
            open_metrics: self.open_metrics,
            hosts,
            origins: self.allow_origin.clone(),
            shared_cache: self.shared_cache,
            tls: self.tls()?,
            slots_folder: self.slot_save_path.clone(),
            conversations: self.conversations()?,
            tools: self.tools.toolbox()?.map(Arc::new),
            queue: self.queue,
            queue_limit: self.queue_timeout,
            total_limit: self.request_timeout,
            strict: self.strict_api,
            strict_model: self.strict_model,
            responses: StoredResponses {
                bytes: usize::try_from(self.response_store).unwrap_or(usize::MAX),
                ..request_defaults.responses
            },
            body_limit: usize::try_from(self.body_limit).unwrap_or(usize::MAX),
            pooling: self.pooling,
            request_defaults: self.request_defaults()?,
            tracing: self.otlp_endpoint.as_deref().filter(|url| !url.is_empty()).map(tracing).transpose()?,
            stall: self.stall_timeout,
            drain: Duration::from_secs(self.drain),
            // Every connection is an open file.
            connections: self.connections.map_or(connections(open_files, request_defaults.connections), |n| n as usize),
            connections_per_address: self.connections_per_address.map(|n| n as usize),
            idle_timeout: self.idle_timeout,
            ..request_defaults
        }))
    }
}

/// A model that was named: what it is called, and where it lies.
struct Named {
    name: String,
    aliases: Vec<String>,
    path: PathBuf,
}

impl Arguments {
    /// The models that were named, or the default one.
    fn named(&self) -> anyhow::Result<Vec<Named>> {
        if self.models.len() > 1 && !self.alias.is_empty() {
            bail!("--alias names one model, and there are {}\nhint: write NAME=FILE", self.models.len());
        }
        let given: Vec<Option<&Path>> = match self.models.as_slice() {
            [] => vec![None],
            models => models.iter().map(|model| Some(model.as_path())).collect(),
        };
        let mut models: Vec<Named> = Vec::new();
        for model in given {
            let (name, path) = match model.and_then(split_name) {
                Some((name, path)) => (Some(name), resolve(Some(&path))?),
                None => (None, resolve(model)?),
            };
            let stem = path.file_stem().map(|stem| stem.to_string_lossy().into_owned()).unwrap_or_default();
            let mut names = name.into_iter().chain(self.alias.iter().cloned()).chain([stem]);
            let name = names.next().unwrap_or_default();
            if models.iter().any(|other| other.name == name) {
                bail!("two models are called {name:?}\nhint: write NAME=FILE");
            }
            models.push(Named { name, aliases: names.collect(), path });
        }
        Ok(models)
    }

    /// The store, where clients may change what is in it.
    fn managed(&self, served: Vec<PathBuf>) -> anyhow::Result<Option<Arc<dyn ModelStore>>> {
        match self.allow_pull {
            true => Ok(Some(Arc::new(Managed { store: store()?, served }))),
            false => Ok(None),
        }
    }

    /// The encoders that were named, if the model can be given what they encode.
    fn mmproj(&self, model: &Model) -> anyhow::Result<Option<Arc<Mmproj>>> {
        let path = self.mmproj.as_ref().filter(|_| !self.no_mmproj);
        path.map(|path| open_encoder(path, model)).transpose()
    }

    /// One model, loaded now. It stays.
    fn serve_one(&self, model: Named) -> anyhow::Result<Running> {
        let settings = self.settings(&model.name, model.aliases)?;
        let store = self.managed(vec![model.path.clone()])?;
        let settings = Settings { shown_path: self.show_path.then(|| model.path.clone()), store, ..settings };
        let opened = self.flags.open(&model.path)?;
        self.has_tokens(opened.config.vocab)?;
        let mmproj = self.mmproj(&opened)?;
        // Probes get an answer while the weights are loaded.
        let server = Server::listen(&self.host, self.port, settings)?;
        let sequences = usize::from(self.parallel);
        // Before the engine, which takes what memory is left.
        let encoder = mmproj.map(|mmproj| self.flags.encoder(&mmproj)).transpose()?;
        let drafting = self.draft.open(&opened)?;
        let job = move || requests(sequences);
        let teller = self.fleet.teller()?;
        let mut engine = drafting.engine(&self.flags.opening()?, &opened, job())?;
        self.cache.apply(&mut engine);
        teller.iter().for_each(|teller| teller.watch(&model.name, &mut engine));
        say(&format!("{} on {}", model.name, engine.describe()));
        let (flags, cache, fallback) = (self.flags.clone(), self.cache.clone(), self.fallback);
        let name = model.name.clone();
        let rules = policy(&drafting);
        let rebuild = move |tries: usize| {
            let opening = flags.opening();
            let built = opening.and_then(|opening| drafting.engine(&opening, &opened, job()));
            let built = match built {
                Err(why) if fallback && tries > 0 => {
                    log::warn!("{why:#}");
                    flags.opening().and_then(|opening| drafting.engine(&opening.without_lost(), &opened, job()))
                }
                built => built,
            };
            // Where it runs now may be another device than before.
            let built = built.inspect(|engine| say(&format!("{name} on {}", engine.describe())));
            let built = built.map(|mut engine| {
                cache.apply(&mut engine);
                teller.iter().for_each(|teller| teller.watch(&name, &mut engine));
                engine
            });
            built.map_err(|why| kiln_engine::Error::Run { why: format!("{why:#}") })
        };
        let scheduler = Scheduler::start_lasting(engine, rules, Box::new(rebuild));
        server.ready_with(LoadedEngine { scheduler: Arc::new(scheduler), sequences, encoder });
        Ok(server)
    }

    /// Several models, or one that may go: loaded when they are asked for.
    fn serve_many(&self, models: Vec<Named>) -> anyhow::Result<Running> {
        if models.len() > 1 && !self.flags.lora.is_empty() {
            bail!("--lora changes one model, and {} are to be served\nhint: a server for each of them", models.len());
        }
        if models.len() > 1 && self.mmproj.is_some() && !self.no_mmproj {
            bail!(
                "--mmproj belongs to one model, and {} are to be served\nhint: a server for each of them",
                models.len()
            );
        }
        let store = self.managed(models.iter().map(|model| model.path.clone()).collect())?;
        let settings = Settings { store, ..self.settings(&models[0].name, Vec::new())? };
        let teller = self.fleet.teller()?;
        let mut specs = Vec::new();
        for Named { name, aliases, path } in models {
            // What is no model is found now, not by the first client.
            let opened = self.flags.open(&path)?;
            self.has_tokens(opened.config.vocab)?;
            let mmproj = self.mmproj(&opened)?;
            let drafting = self.draft.open(&opened)?;
            let mmproj_bytes = mmproj.as_ref().map_or(0, |mmproj| mmproj.gguf.data_bytes());
            let bytes = opened.gguf.data_bytes() + mmproj_bytes + drafting.bytes();
            let (flags, cache, sequences) = (self.flags.clone(), self.cache.clone(), usize::from(self.parallel));
            let (teller, told) = (teller.clone(), name.clone());
            let load = move || {
                let load = || -> anyhow::Result<LoadedEngine> {
                    let encoder = mmproj.as_ref().map(|mmproj| flags.encoder(mmproj)).transpose()?;
                    let mut engine = drafting.engine(&flags.opening()?, &flags.open(&path)?, requests(sequences))?;
                    cache.apply(&mut engine);
                    teller.iter().for_each(|teller| teller.watch(&told, &mut engine));
                    Ok(LoadedEngine {
                        scheduler: Arc::new(Scheduler::start(engine, policy(&drafting))),
                        sequences,
                        encoder,
                    })
                };
                load().map_err(|error| format!("{error:#}"))
            };
            say(&format!("{name}: loaded when it is asked for"));
            specs.push(ModelSpec { name, aliases, bytes, load: Box::new(load) });
        }
        let keep = self.keep_alive.unwrap_or(Duration::from_secs(300));
        let sharing = Sharing { keep: Some(keep), budget: self.models_memory };
        Ok(Server::offer(&self.host, self.port, settings, specs, sharing)?)
    }
}

/// What the engine of a server is made for.
fn requests(sequences: usize) -> Job {
    Job { sequences, first: Some(First::Requests), ..Job::default() }
}

/// The server counts requests itself, so that a refusal need not wait for the engine.
fn policy(drafting: &Drafting) -> Policy {
    let request_defaults = Policy::default();
    // Others may come at any time, and should not wait for a whole piece of a long prompt.
    let alone = Some(request_defaults.stutter);
    drafting.policy(Policy { queue: usize::MAX, alone, compiles_ahead: true, ..request_defaults })
}

/// Runs the command.
pub(crate) fn run(arguments: &Arguments) -> anyhow::Result<ExitCode> {
    if arguments.log_json {
        log_as_json();
    }
    log_with_time();
    let mut models = arguments.named()?;
    let names: Vec<String> = models.iter().map(|model| model.name.clone()).collect();
    let stays = models.len() == 1 && arguments.keep_alive.is_none();
    let server = match models.pop() {
        Some(model) if stays => arguments.serve_one(model)?,
        last => arguments.serve_many(models.into_iter().chain(last).collect())?,
    };
    let (address, scheme) = (server.address(), if arguments.tls_cert.is_some() { "https" } else { "http" });
    if arguments.json {
        let url = format!("{scheme}://{address}");
        print(&serde_json::json!({"url": url, "openai": format!("{url}/v1"), "models": names}).to_string());
    }
    say(&format!("listening on {scheme}://{address} (OpenAI: {scheme}://{address}/v1); Ctrl-C ends it"));
    // What is being written is finished before the process ends.
    kiln_system::files::leave_endings_to_the_program();
    if arguments.api_key_file.is_none() && arguments.tls_cert.is_none() {
        server.wait(None)?;
        return Ok(ExitCode::SUCCESS);
    }
    kiln_system::files::leave_hang_ups_to_the_program();
    let at_terminal = std::io::stderr().is_terminal();
    server.wait(Some(&|server: &Running| {
        // A terminal that was closed sends the same signal.
        if at_terminal && !std::io::stderr().is_terminal() {
            return AfterHangUp::End;
        }
        match arguments.renew(server) {
            Ok(keys) => {
                log::info!(target: "kiln::note", "SIGHUP: the keys (now {keys}) and the certificate were read again")
            }
            Err(why) => log::error!("SIGHUP: {why:#}\nhint: the server goes on with what it had"),
        }
        AfterHangUp::Stay
    }))?;
    Ok(ExitCode::SUCCESS)
}

/// Connections that a process with this limit of open files can have besides its other files, at most `most`.
fn connections(files: Option<usize>, most: usize) -> usize {
    files.map_or(most, |files| most.min(files / 4 * 3)).max(16)
}

/// `NAME=FILE`, unless there is a file of that whole name.
fn split_name(model: &Path) -> Option<(String, PathBuf)> {
    let (name, path) = model.to_str()?.split_once('=')?;
    let is_name = !name.is_empty() && !name.contains('/') && !model.exists();
    is_name.then(|| (name.to_owned(), path.into()))
}

/// Where traces go, by the variables that programs with OpenTelemetry share.
fn tracing(endpoint: &str) -> anyhow::Result<Tracing> {
    if !endpoint.starts_with("http://") && !endpoint.starts_with("https://") {
        bail!("--otlp-endpoint {endpoint} is no address\nhint: it looks like http://localhost:4318");
    }
    let variable = |name| std::env::var(name).ok().filter(|value: &String| !value.is_empty());
    let headers = variable("OTEL_EXPORTER_OTLP_HEADERS").unwrap_or_default();
    let header = |pair: &str| {
        let (name, value) = pair.split_once('=')?;
        Some((name.trim().to_owned(), value.trim().to_owned()))
    };
    Ok(Tracing {
        url: format!("{}/v1/traces", endpoint.trim_end_matches('/').trim_end_matches("/v1/traces")),
        headers: headers.split(',').filter_map(header).collect(),
        service: variable("OTEL_SERVICE_NAME").unwrap_or_else(|| "kiln".to_owned()),
    })
}

/// A line of a key file.
fn key(line: &str, number: usize) -> anyhow::Result<Key> {
    let mut words = line.split_whitespace();
    let first = words.next().unwrap_or_default();
    let (name, secret) = match first.split_once(':') {
        Some((name, secret)) => (name.to_owned(), secret),
        None => (format!("key {number}"), first),
    };
    if secret.is_empty() {
        bail!("the key of {name:?} is empty");
    }
    let mut key = Key { name, secret: secret.to_owned(), ..Key::default() };
    for limit in words {
        let number = |text: &str| {
            let number = text.parse::<u32>().ok().filter(|n| *n > 0);
            number.with_context(|| format!("{limit:?} must end in a number above 0"))
        };
        match limit.split_once('=') {
            Some(("at-once", n)) => key.at_once = Some(number(n)? as usize),
            Some(("per-minute", n)) => key.per_minute = Some(number(n)?),
            _ => bail!(
                "{limit:?} is no limit\nhint: a key has no spaces; behind it may stand at-once=N and per-minute=N"
            ),
        }
    }
    Ok(key)
}

/// A time with its unit: seconds where none is written.
pub(crate) fn duration(text: &str) -> Result<Duration, String> {
    let digits = text.trim_end_matches(|c: char| c.is_ascii_alphabetic());
    let unit = match &text[digits.len()..] {
        "" | "s" => 1.0,
        "ms" => 1e-3,
        "m" => 60.0,
        "h" => 3600.0,
        _ => return Err("a time is a number with s, m or h behind it, as 90s".into()),
    };
    let seconds =
        digits.parse::<f64>().map_err(|_| "a time is a number with s, m or h behind it, as 90s".to_owned())?;
    Duration::try_from_secs_f64(seconds * unit).map_err(|error| error.to_string())
}

/// A time within which any step of an engine ends: with less, an engine that works would be called hung, and be started again and again.
fn stall_time(text: &str) -> Result<Duration, String> {
    let time = duration(text)?;
    if time < Duration::from_secs(1) {
        return Err("steps of long prompts take a second and more; give at least 1s".into());
    }
    Ok(time)
}

/// A number of bytes with its unit.
pub(crate) fn bytes(text: &str) -> Result<u64, String> {
    let upper = text.to_ascii_uppercase();
    let digits = upper.trim_end_matches("IB").trim_end_matches(['K', 'M', 'G', 'T', 'B']);
    let power = match upper[digits.len()..].chars().next() {
        None | Some('B') => 0,
        Some('K') => 1,
        Some('M') => 2,
        Some('G') => 3,
        _ => 4,
    };
    let number = digits.parse::<f64>().ok().filter(|n| *n >= 0.0);
    number
        .map(|n| (n * 1024f64.powi(power)) as u64)
        .ok_or_else(|| "bytes are a number with K, M, G or T behind it, as 20G".into())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn times_and_sizes_have_units() {
        let times = ["90", "90s", "1.5m", "2h", "250ms"].map(|text| duration(text).map(|d| d.as_millis()));
        assert_eq!(times, [Ok(90_000), Ok(90_000), Ok(90_000), Ok(7_200_000), Ok(250)]);
        for wrong in ["", "m", "-1", "5 minutes", "1d", "nan"] {
            assert!(duration(wrong).is_err(), "{wrong}");
        }
        assert!(stall_time("0").is_err() && stall_time("900ms").is_err() && stall_time("10m").is_ok());
        assert_eq!(["512", "1k", "1.5G", "2GiB"].map(bytes), [Ok(512), Ok(1024), Ok(1_610_612_736), Ok(2_147_483_648)]);
        assert!(bytes("much").is_err() && bytes("-1G").is_err());
    }

    #[test]
    fn connections_leave_room_for_other_files() {
        assert_eq!(
            [Some(1024), Some(100_000), Some(8), None].map(|files| connections(files, 4096)),
            [768, 4096, 16, 4096]
        );
    }

    #[test]
    fn keys_have_names_and_limits() {
        let alice = key("alice:s3cret at-once=4 per-minute=60", 1).unwrap();
        assert_eq!((alice.name.as_str(), alice.secret.as_str()), ("alice", "s3cret"));
        assert_eq!((alice.at_once, alice.per_minute), (Some(4), Some(60)));
        assert_eq!(key("plain", 3).unwrap().name, "key 3");
        for wrong in ["bob:", "bob:x at-once=0", "bob:x at-once=many", "bob:x fast", "two words"] {
            assert!(key(wrong, 1).is_err(), "{wrong}");
        }
    }

    #[test]
    fn collectors_are_named_by_their_base_or_in_full() {
        for given in ["http://a:4318", "http://a:4318/", "http://a:4318/v1/traces"] {
            assert_eq!(tracing(given).unwrap().url, "http://a:4318/v1/traces");
        }
        assert!(tracing("a:4318").is_err());
    }

    #[test]
    fn a_model_may_bring_its_name() {
        assert_eq!(split_name(Path::new("small=a/b.gguf")), Some(("small".into(), "a/b.gguf".into())));
        assert_eq!(split_name(Path::new("a/b=c.gguf")), None);
        assert_eq!(split_name(Path::new("a.gguf")), None);
    }
}
