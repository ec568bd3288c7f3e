//! What every request sees: the settings, the models, and what the server is doing.

use std::path::PathBuf;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::{Duration, Instant, SystemTime, UNIX_EPOCH};

use axum::http::HeaderValue;
use kiln_engine::embed::Pooling;
use kiln_engine::sampler::Sampling;
use kiln_tools::Toolbox;
use serde_json::{Map, Value};
use tokio::sync::Semaphore;

use crate::adapters::NamedAdapter;
use crate::api::ollama_store::ModelStore;
use crate::api::response_tools::MOST_TALKS;
use crate::api_error::{ApiError, Kind};
use crate::chat::ThinkingBudget;
use crate::connections::{Connections, Limits};
use crate::conversations::{ConversationLimits, Conversations};
use crate::guard::Caller;
use crate::http_metrics::HttpMetrics;
use crate::keys::{Counted, Key, Keys};
use crate::prep_pool::PrepPool;
use crate::registry::{Loaded, ModelRegistry};
use crate::remote_media::MediaHost;
use crate::response_store::{ResponseStore, StoredResponses};
use crate::scope::BodyBudget;
use crate::shutdown::Shutdown;
use crate::tenants::TrustedProxy;
use crate::trace::{Tracer, Tracing};

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
pub struct RequestDefaults {
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
    /// Hosts that pictures may be fetched from.
    pub media_hosts: Vec<MediaHost>,
    /// Adapters that requests pick by name. Such an adapter counts for those requests alone.
    pub adapters: Vec<NamedAdapter>,
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
    /// Keys that open it at first; without any it is open to all who reach it.
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
    /// A model is served under its own names alone, even where there is only one.
    pub strict_model: bool,
    /// How long answers may go on after the server was told to end.
    pub drain: Duration,
    /// How long probes say that the server goes down, while new requests are still served.
    pub drain_delay: Duration,
    /// How long a stream is silent before a sign of life.
    pub keep_alive: Duration,
    /// How long the status of a stream may wait for its first token, so that a gateway can ask another server; zero for not at all.
    pub late_headers: Duration,
    /// What this server calls itself in answers; empty for nothing.
    pub replica: String,
    /// Gateways that say which of their clients asks.
    pub trusted_proxies: Vec<TrustedProxy>,
    /// How the vectors of tokens become one of a text, where it is not what the model was made for.
    pub pooling: Option<Pooling>,
    /// Models that clients may fetch and remove; none where they may not.
    pub store: Option<Arc<dyn ModelStore>>,
    /// The folder that the page keeps conversations in; none for the browsers of readers alone.
    pub conversations: Option<PathBuf>,
    /// How much of them is kept for each key.
    pub conversation_limits: ConversationLimits,
    /// Tools that models may call on this machine; none where they may not.
    pub tools: Option<Arc<Toolbox>>,
    /// How much is kept of responses that clients may come back to.
    pub responses: StoredResponses,
    /// What holds where a request says nothing.
    pub request_defaults: RequestDefaults,
    /// Where traces go; none for nowhere.
    pub tracing: Option<Tracing>,
    /// How long a client may take to say what it wants: from the connection, or the last answer, to the end of the headers.
    pub header_timeout: Duration,
    /// How long a client may take nothing of an answer that waits for it.
    pub write_timeout: Duration,
    /// How long an engine with work may not get on before it counts as hung: longer than any step and any kernel's compilation.
    pub stall: Duration,
    /// How long a connection may have no request in flight after its first one.
    pub idle_timeout: Duration,
    /// How often an HTTP/2 client is asked whether it is there, and how long it may take to say so.
    pub http2_ping: Duration,
    /// Connections at once. One more takes the place of the one that has been idle the longest.
    pub connections: usize,
    /// Those of them from one address; none for three quarters of all.
    pub connections_per_address: Option<usize>,
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
            strict_model: false,
            drain: Duration::from_secs(30),
            drain_delay: Duration::ZERO,
            keep_alive: Duration::from_secs(10),
            late_headers: Duration::ZERO,
            replica: String::new(),
            trusted_proxies: Vec::new(),
            pooling: None,
            store: None,
            conversations: None,
            conversation_limits: ConversationLimits::default(),
            tools: None,
            responses: StoredResponses::default(),
            request_defaults: RequestDefaults::default(),
            tracing: None,
            header_timeout: Duration::from_secs(75),
            write_timeout: Duration::from_secs(120),
            stall: Duration::from_secs(300),
            idle_timeout: Duration::from_secs(75),
            http2_ping: Duration::from_secs(20),
            connections: 4096,
            connections_per_address: None,
        }
    }
}

/// The state of the server.
pub(crate) struct App {
    pub(crate) settings: Settings,
    pub(crate) registry: ModelRegistry,
    pub(crate) tracer: Option<Tracer>,
    pub(crate) prep_pool: PrepPool,
    /// What the page keeps here.
    pub(crate) conversations: Option<Conversations>,
    /// Places for conversations with tools.
    pub(crate) tool_talks: Arc<Semaphore>,
    /// A model is being fetched.
    pub(crate) pulling: AtomicBool,
    /// Responses that clients may come back to.
    pub(crate) responses: ResponseStore,
    pub(crate) bodies: BodyBudget,
    pub(crate) http: HttpMetrics,
    pub(crate) connections: Arc<Connections>,
    pub(crate) keys: Keys,
    pub(crate) shutdown: Shutdown,
    /// What the server calls itself in answers.
    pub(crate) replica: Option<HeaderValue>,
    pub(crate) started: Instant,
    /// The same, in seconds since 1970.
    pub(crate) created: u64,
}

/// A place among the requests that run or wait. While somebody holds it, the model stays.
pub(crate) struct Permit {
    loaded: Arc<Loaded>,
    _counted: Option<Counted>,
}

impl Drop for Permit {
    fn drop(&mut self) {
        self.loaded.in_flight.fetch_sub(1, Ordering::Relaxed);
    }
}

impl App {
    pub(crate) fn new(settings: Settings, mut registry: ModelRegistry, tracer: Option<Tracer>) -> App {
        registry.request_defaults = settings.request_defaults.clone();
        registry.strict_names = settings.strict_model;
        let all = settings.connections.max(1);
        let replica = Some(&settings.replica).filter(|name| !name.is_empty());
        let replica = replica.and_then(|name| HeaderValue::from_str(name).ok());
        let per_address = settings.connections_per_address.unwrap_or(all - all / 4).max(1);
        App {
            http: HttpMetrics::new(&settings.replica),
            bodies: BodyBudget::new(settings.body_limit),
            connections: Arc::new(Connections::new(Limits { all, per_address })),
            keys: Keys::new(settings.keys.clone()),
            conversations: settings
                .conversations
                .as_deref()
                .map(|folder| Conversations::new(folder, settings.conversation_limits)),
            tool_talks: Arc::new(Semaphore::new(MOST_TALKS)),
            pulling: AtomicBool::new(false),
            responses: ResponseStore::new(settings.responses),
            settings,
            registry,
            tracer,
            prep_pool: PrepPool::default(),
            shutdown: Shutdown::default(),
            replica,
            started: Instant::now(),
            created: now(),
        }
    }

    /// A model that is loaded, for those who look at the server and must not wake one.
    pub(crate) fn loaded(&self) -> Result<Arc<Loaded>, ApiError> {
        let found = self.registry.places().iter().find_map(|place| place.peek());
        found.ok_or_else(|| ApiError::new(Kind::Unavailable, self.not_ready().unwrap_or("No model is loaded")))
    }

    /// Why no request can be served now, if that is so.
    pub(crate) fn not_ready(&self) -> Option<&'static str> {
        if self.shutdown.is_leaving() {
            return Some("The server is going down");
        }
        self.registry.is_ready().err()
    }

    /// The model for a request; any of its names will do, and none at all. It is loaded now if need be, so this belongs off the
    /// threads that serve connections.
    pub(crate) fn model(&self, named: Option<&str>) -> Result<Arc<Loaded>, ApiError> {
        if self.shutdown.is_draining() {
            return Err(ApiError::new(Kind::Leaving, "The server is going down"));
        }
        let loaded = self.registry.get(named)?;
        if !loaded.scheduler.is_running() {
            return Err(ApiError::new(Kind::Unavailable, loaded.scheduler.why_not()));
        }
        Ok(loaded)
    }

    /// A place for one more request, if the queue and the caller's key have one.
    pub(crate) fn permit(&self, loaded: &Arc<Loaded>, caller: &Caller) -> Result<Permit, ApiError> {
        let most = loaded.sequences.saturating_add(self.settings.queue);
        let before = loaded.in_flight.fetch_add(1, Ordering::Relaxed);
        let mut permit = Permit { loaded: Arc::clone(loaded), _counted: None };
        if before >= most {
            let message = format!("{before} requests are running or waiting, which is all this server takes");
            return Err(ApiError::new(Kind::QueueFull, message));
        }
        permit._counted = caller.key.as_ref().map(|key| key.count()).transpose()?;
        Ok(permit)
    }
}

/// Seconds since 1970.
pub(crate) fn now() -> u64 {
    SystemTime::now().duration_since(UNIX_EPOCH).map_or(0, |d| d.as_secs())
}

/// An unguessable id: a prefix and 24 letters and digits.
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
