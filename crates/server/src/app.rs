//! What every request sees: the settings, the model once it is loaded, and what the server is doing.

use std::sync::atomic::{AtomicBool, AtomicUsize, Ordering};
use std::sync::{Arc, Mutex, OnceLock};
use std::time::{Duration, Instant, SystemTime, UNIX_EPOCH};

use kiln_engine::executor::Memory;
use kiln_engine::run::Scheduler;
use kiln_engine::sampler::Sampling;
use kiln_engine::text::Template;
use kiln_engine::text::constraint::Constraints;

use crate::metrics::Metrics;
use crate::refusal::{Kind, Refusal};

/// A key that clients prove themselves with.
#[derive(Clone)]
pub struct Key {
    /// Shown in logs in place of the key.
    pub name: String,
    /// The secret.
    pub secret: String,
}

/// How the server behaves.
#[derive(Clone)]
pub struct Settings {
    /// The name that the model is served under.
    pub model: String,
    /// Further names that mean the same model.
    pub aliases: Vec<String>,
    /// Keys that open it; without any it is open to all who reach it.
    pub keys: Vec<Key>,
    /// Names that a client may have in `Host`; empty for any.
    pub hosts: Vec<String>,
    /// Web pages of other origins that may use the server from a browser.
    pub origins: Vec<String>,
    /// Requests that may wait while others run; one more is refused.
    pub queue: usize,
    /// Bytes of a request.
    pub body_limit: usize,
    /// Fields that are not known are errors.
    pub strict: bool,
    /// How long answers may go on after the server was told to end.
    pub drain: Duration,
    /// How long a stream is silent before a sign of life.
    pub keep_alive: Duration,
    /// How long a client may take to say what it wants: from the connection, or the last answer, to the end of the headers.
    pub header_timeout: Duration,
    /// Connections at once; further ones wait to be taken up.
    pub connections: usize,
}

impl Settings {
    /// Settings for a server on the loopback interface.
    pub fn new(model: impl Into<String>) -> Settings {
        Settings {
            model: model.into(),
            aliases: Vec::new(),
            keys: Vec::new(),
            hosts: ["localhost", "127.0.0.1", "[::1]"].map(str::to_owned).to_vec(),
            origins: Vec::new(),
            queue: 256,
            body_limit: 64 << 20,
            strict: false,
            drain: Duration::from_secs(30),
            keep_alive: Duration::from_secs(10),
            header_timeout: Duration::from_secs(75),
            connections: 4096,
        }
    }
}

/// A model that is ready.
pub(crate) struct Loaded {
    pub(crate) scheduler: Scheduler,
    /// How its conversations are written, or why there is no way to.
    pub(crate) template: Result<Template, String>,
    /// Tokens that end a turn, beside those that the vocabulary names.
    pub(crate) ends: Vec<u32>,
    /// Compiles schemas and grammars; made when the first one comes.
    pub(crate) constraints: OnceLock<Result<Constraints, String>>,
    /// What is not said in a request.
    pub(crate) defaults: Sampling,
    /// Texts at once at most.
    pub(crate) sequences: usize,
    /// Since when it is there, in seconds.
    pub(crate) created: u64,
    /// The executor's memory, and when somebody looked.
    pub(crate) memory: Mutex<Option<(Instant, Option<Memory>)>>,
}

/// The state of the server.
pub(crate) struct App {
    pub(crate) settings: Settings,
    loaded: OnceLock<Loaded>,
    draining: AtomicBool,
    in_flight: AtomicUsize,
    pub(crate) metrics: Metrics,
    pub(crate) started: Instant,
}

/// A place among the requests that run or wait.
pub(crate) struct Permit(Arc<App>);

impl Drop for Permit {
    fn drop(&mut self) {
        self.0.in_flight.fetch_sub(1, Ordering::Relaxed);
    }
}

impl App {
    pub(crate) fn new(settings: Settings) -> App {
        App {
            metrics: Metrics::new(&settings.model),
            settings,
            loaded: OnceLock::new(),
            draining: AtomicBool::new(false),
            in_flight: AtomicUsize::new(0),
            started: Instant::now(),
        }
    }

    /// The model is there.
    pub(crate) fn set_loaded(&self, loaded: Loaded) {
        self.metrics.model_is_there(&loaded);
        if self.loaded.set(loaded).is_err() {
            log::warn!("a second model was handed to the server and is not used");
        }
    }

    /// No new requests; those that run may finish.
    pub(crate) fn drain(&self) {
        self.draining.store(true, Ordering::Relaxed);
    }

    /// The model, where it can be used now.
    pub(crate) fn loaded(&self) -> Result<&Loaded, Refusal> {
        self.loaded.get().ok_or_else(|| Refusal::new(Kind::Unavailable, "Loading model"))
    }

    /// Why no request can be served now, if that is so.
    pub(crate) fn not_ready(&self) -> Option<&'static str> {
        match self.loaded.get() {
            _ if self.draining.load(Ordering::Relaxed) => Some("The server is going down"),
            None => Some("Loading model"),
            Some(loaded) if !loaded.scheduler.is_running() => Some("The engine has stopped"),
            Some(_) => None,
        }
    }

    /// The model for a request that names one; any of its names will do, and none at all.
    pub(crate) fn model(&self, named: Option<&str>) -> Result<&Loaded, Refusal> {
        if let Some(why) = self.not_ready() {
            return Err(Refusal::new(Kind::Unavailable, why));
        }
        let served = &self.settings.model;
        // Ollama's clients add the tag.
        let plain = |name: &str| name.strip_suffix(":latest").unwrap_or(name).to_owned();
        if let Some(name) = named.filter(|name| !name.is_empty())
            && plain(name) != plain(served)
            && !self.settings.aliases.iter().any(|alias| plain(alias) == plain(name))
        {
            let message = format!("The model `{name}` does not exist; this server has `{served}`");
            return Err(Refusal::new(Kind::Model, message).with_param("model"));
        }
        self.loaded()
    }

    /// A place for one more request, if the queue has one.
    pub(crate) fn permit(self: &Arc<App>) -> Result<Permit, Refusal> {
        let most = self.loaded()?.sequences.saturating_add(self.settings.queue);
        let before = self.in_flight.fetch_add(1, Ordering::Relaxed);
        let permit = Permit(Arc::clone(self));
        if before >= most {
            let message = format!("{before} requests are running or waiting, which is all this server takes");
            return Err(Refusal::new(Kind::QueueFull, message));
        }
        Ok(permit)
    }

    /// Requests that run or wait.
    pub(crate) fn in_flight(&self) -> usize {
        self.in_flight.load(Ordering::Relaxed)
    }
}

/// Seconds since 1970.
pub(crate) fn now() -> u64 {
    SystemTime::now().duration_since(UNIX_EPOCH).map_or(0, |d| d.as_secs())
}

/// A name that nobody can guess: a prefix and 24 letters and digits.
pub(crate) fn fresh_id(prefix: &str) -> String {
    const LETTERS: &[u8; 62] = b"0123456789ABCDEFGHIJKLMNOPQRSTUVWXYZabcdefghijklmnopqrstuvwxyz";
    let mut bytes = [0u8; 24];
    if getrandom::fill(&mut bytes).is_err() {
        // Without a source of chance the clock must do: ids still differ.
        let nanos = SystemTime::now().duration_since(UNIX_EPOCH).map_or(0, |d| d.as_nanos());
        bytes[..16].copy_from_slice(&nanos.to_le_bytes());
    }
    let letters = bytes.iter().map(|b| char::from(LETTERS[usize::from(*b) % LETTERS.len()]));
    prefix.chars().chain(letters).collect()
}
