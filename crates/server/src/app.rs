//! What every request sees: the settings, the models, and what the server is doing.

use std::path::PathBuf;
use std::sync::atomic::{AtomicBool, AtomicUsize, Ordering};
use std::sync::{Arc, Mutex, PoisonError};
use std::time::{Duration, Instant, SystemTime, UNIX_EPOCH};

use kiln_engine::embed::Pooling;
use kiln_engine::sampler::Sampling;
use serde_json::{Map, Value};

use crate::chat::ThinkingBudget;
use crate::guard::Caller;
use crate::refusal::{Kind, Refusal};
use crate::seats::Seats;
use crate::shelf::{Loaded, Shelf};
use crate::trace::{Tracer, Tracing};

/// A key that clients prove themselves with.
#[derive(Clone, Default)]
pub struct Key {
    /// Shown in logs in place of the key.
    pub name: String,
    /// The secret.
    pub secret: String,
    /// Requests at once at most.
    pub at_once: Option<usize>,
    /// Requests in a minute at most.
    pub per_minute: Option<u32>,
}

/// A certificate and its key, as PEM.
#[derive(Clone)]
pub struct Tls {
    /// The certificate, and those that vouch for it.
    pub certificates: Vec<u8>,
    /// The private key.
    pub key: Vec<u8>,
}

/// Changes how tokens are chosen.
pub type Change = Arc<dyn Fn(&mut Sampling) + Send + Sync>;

/// What holds where a request says nothing. It goes before what the model's file says.
#[derive(Clone, Default)]
pub struct Usual {
    /// How tokens are chosen.
    pub sampling: Option<Change>,
    /// Tokens of an answer; none for as many as the context holds.
    pub limit: Option<usize>,
    /// The chat template, as Jinja.
    pub template: Option<String>,
    /// Further values for the template.
    pub kwargs: Map<String, Value>,
    /// Reasoning stays in the content.
    pub keep_reasoning: bool,
    /// The field that reasoning is told in by OpenAI's chat API; empty for `reasoning_content`.
    pub reasoning_field: &'static str,
    /// How long a model may think.
    pub thinking_budget: Option<ThinkingBudget>,
}

/// How the server behaves.
#[derive(Clone)]
pub struct Settings {
    /// The name that the model is served under.
    pub model: String,
    /// Further names that mean the same model.
    pub aliases: Vec<String>,
    /// Words about the models that clients may read.
    pub tags: Vec<String>,
    /// Where the model's file lies, if clients may know.
    pub shown_path: Option<PathBuf>,
    /// `GET /slots` is not served.
    pub hides_slots: bool,
    /// Keys that open it; without any it is open to all who reach it.
    pub keys: Vec<Key>,
    /// `GET /metrics` asks for no key.
    pub open_metrics: bool,
    /// All keys share the beginnings of their prompts. Who shares them can find out by the clock what others have asked.
    pub shared_cache: bool,
    /// What the server proves itself with to clients that speak TLS; without it they speak plainly.
    pub tls: Option<Tls>,
    /// The folder that slots are saved to; without one they are not.
    pub slots_folder: Option<PathBuf>,
    /// Names that a client may have in `Host`; empty for any.
    pub hosts: Vec<String>,
    /// Web pages of other origins that may use the server from a browser.
    pub origins: Vec<String>,
    /// Requests that may wait while others run; one more is refused.
    pub queue: usize,
    /// How long a request may wait before it is begun.
    pub queue_limit: Option<Duration>,
    /// How long a request may take from its arrival to its end.
    pub total_limit: Option<Duration>,
    /// Bytes of a request.
    pub body_limit: usize,
    /// Fields that are not known are errors.
    pub strict: bool,
    /// How long answers may go on after the server was told to end.
    pub drain: Duration,
    /// How long a stream is silent before a sign of life.
    pub keep_alive: Duration,
    /// How the vectors of tokens become one of a text, where it is not what the model was made for.
    pub pooling: Option<Pooling>,
    /// What holds where a request says nothing.
    pub usual: Usual,
    /// Where traces go; none for nowhere.
    pub tracing: Option<Tracing>,
    /// How long a client may take to say what it wants: from the connection, or the last answer, to the end of the headers.
    pub header_timeout: Duration,
    /// How long a client may take nothing of an answer that waits for it.
    pub write_timeout: Duration,
    /// How long an engine with work may not get on before it counts as hung: longer than any step and any kernel's compilation.
    pub stall: Duration,
    /// Connections at once; further ones wait to be taken up.
    pub connections: usize,
}

impl Settings {
    /// Settings for a server on the loopback interface.
    pub fn new(model: impl Into<String>) -> Settings {
        Settings {
            model: model.into(),
            aliases: Vec::new(),
            tags: Vec::new(),
            shown_path: None,
            hides_slots: false,
            keys: Vec::new(),
            open_metrics: false,
            shared_cache: false,
            tls: None,
            slots_folder: None,
            hosts: ["localhost", "127.0.0.1", "[::1]"].map(str::to_owned).to_vec(),
            origins: Vec::new(),
            queue: 256,
            queue_limit: None,
            total_limit: None,
            body_limit: 64 << 20,
            strict: false,
            drain: Duration::from_secs(30),
            keep_alive: Duration::from_secs(10),
            pooling: None,
            usual: Usual::default(),
            tracing: None,
            header_timeout: Duration::from_secs(75),
            write_timeout: Duration::from_secs(120),
            stall: Duration::from_secs(300),
            connections: 4096,
        }
    }
}

/// What one key has under way, and what it has left of its minute.
struct Account {
    running: AtomicUsize,
    /// Requests that it may still begin, and when that was counted.
    left: Mutex<(f64, Instant)>,
}

/// The state of the server.
pub(crate) struct App {
    pub(crate) settings: Settings,
    pub(crate) shelf: Shelf,
    pub(crate) tracer: Option<Tracer>,
    pub(crate) seats: Seats,
    accounts: Vec<Account>,
    draining: AtomicBool,
    pub(crate) started: Instant,
    /// The same, in seconds since 1970.
    pub(crate) created: u64,
}

/// A place among the requests that run or wait. While somebody holds it, the model stays.
pub(crate) struct Permit {
    app: Arc<App>,
    loaded: Arc<Loaded>,
    account: Option<usize>,
}

impl Drop for Permit {
    fn drop(&mut self) {
        self.loaded.in_flight.fetch_sub(1, Ordering::Relaxed);
        if let Some(account) = self.account {
            self.app.accounts[account].running.fetch_sub(1, Ordering::Relaxed);
        }
    }
}

impl App {
    pub(crate) fn new(settings: Settings, mut shelf: Shelf, tracer: Option<Tracer>) -> App {
        shelf.usual = settings.usual.clone();
        let account = |key: &Key| Account {
            running: AtomicUsize::new(0),
            left: Mutex::new((f64::from(key.per_minute.unwrap_or(0)), Instant::now())),
        };
        App {
            accounts: settings.keys.iter().map(account).collect(),
            settings,
            shelf,
            tracer,
            seats: Seats::default(),
            draining: AtomicBool::new(false),
            started: Instant::now(),
            created: now(),
        }
    }

    /// No new requests; those that run may finish.
    pub(crate) fn drain(&self) {
        self.draining.store(true, Ordering::Relaxed);
    }

    /// A model that is loaded, for those who look at the server and must not wake one.
    pub(crate) fn loaded(&self) -> Result<Arc<Loaded>, Refusal> {
        let found = self.shelf.places().iter().find_map(|place| place.peek());
        found.ok_or_else(|| Refusal::new(Kind::Unavailable, self.not_ready().unwrap_or("No model is loaded")))
    }

    /// Why no request can be served now, if that is so.
    pub(crate) fn not_ready(&self) -> Option<&'static str> {
        if self.draining.load(Ordering::Relaxed) {
            return Some("The server is going down");
        }
        self.shelf.is_ready().err()
    }

    /// The model for a request; any of its names will do, and none at all. It is loaded now if need be, so this belongs off the
    /// threads that serve connections.
    pub(crate) fn model(&self, named: Option<&str>) -> Result<Arc<Loaded>, Refusal> {
        if self.draining.load(Ordering::Relaxed) {
            return Err(Refusal::new(Kind::Unavailable, "The server is going down"));
        }
        let loaded = self.shelf.get(named)?;
        if !loaded.scheduler.is_running() {
            return Err(Refusal::new(Kind::Unavailable, loaded.scheduler.why_not()));
        }
        Ok(loaded)
    }

    /// A place for one more request, if the queue and the caller's key have one.
    pub(crate) fn permit(self: &Arc<App>, loaded: &Arc<Loaded>, caller: &Caller) -> Result<Permit, Refusal> {
        let most = loaded.sequences.saturating_add(self.settings.queue);
        let before = loaded.in_flight.fetch_add(1, Ordering::Relaxed);
        let mut permit = Permit { app: Arc::clone(self), loaded: Arc::clone(loaded), account: None };
        if before >= most {
            let message = format!("{before} requests are running or waiting, which is all this server takes");
            return Err(Refusal::new(Kind::QueueFull, message));
        }
        if let Some(account) = caller.key {
            let key = &self.settings.keys[account];
            let running = self.accounts[account].running.fetch_add(1, Ordering::Relaxed);
            permit.account = Some(account);
            if key.at_once.is_some_and(|most| running >= most) {
                let message =
                    format!("the key {:?} has {running} requests under way, which is all it may have", key.name);
                return Err(Refusal::new(Kind::KeyLimit { seconds: 1 }, message));
            }
            self.accounts[account].take_one(key)?;
        }
        Ok(permit)
    }
}

impl Account {
    /// Counts one request against the minute of a key.
    fn take_one(&self, key: &Key) -> Result<(), Refusal> {
        let Some(most) = key.per_minute else { return Ok(()) };
        let most = f64::from(most);
        let mut left = self.left.lock().unwrap_or_else(PoisonError::into_inner);
        // What was used comes back evenly over a minute.
        let now = (left.0 + left.1.elapsed().as_secs_f64() * most / 60.0).min(most);
        *left = (now, Instant::now());
        if now < 1.0 {
            let seconds = ((1.0 - now) * 60.0 / most).ceil() as u64;
            let message = format!("the key {:?} has had its {most} requests of this minute", key.name);
            return Err(Refusal::new(Kind::KeyLimit { seconds }, message));
        }
        left.0 -= 1.0;
        Ok(())
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
