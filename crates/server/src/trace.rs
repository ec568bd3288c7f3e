//! Traces for OpenTelemetry: one span for each request that uses a model, under the names of its conventions for generative AI, sent as
//! OTLP over HTTP with JSON. Nothing of what was asked or answered is in them.
//!
//! A span ends when the last one lets go of it: the guard, or the generation that writes the answer. It then goes into a bounded queue, and a
//! thread of its own sends what is there. Where the collector is away or too slow, spans are left out; requests never wait.

use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::mpsc::{Receiver, RecvTimeoutError, SyncSender, sync_channel};
use std::sync::{Arc, Mutex, PoisonError};
use std::time::{Duration, Instant, SystemTime, UNIX_EPOCH};

use kiln_engine::run::Usage;
use serde_json::{Value, json};

/// Spans that wait to be sent; further ones are left out.
const QUEUE: usize = 2048;
/// Spans that are sent at once, and how long the first of them waits for others.
const BATCH: usize = 256;
const GATHER: Duration = Duration::from_secs(1);
/// How long the collector may take.
const PATIENCE: Duration = Duration::from_secs(5);

/// Where traces go.
#[derive(Clone, Debug)]
pub struct Tracing {
    /// The address that spans are posted to, as `http://localhost:4318/v1/traces`.
    pub url: String,
    /// Headers that the collector wants.
    pub headers: Vec<(String, String)>,
    /// The name that the server goes by.
    pub service: String,
}

/// What a path does, in the words of the conventions; nothing where it uses no model.
fn operation(path: &str) -> Option<&'static str> {
    match path.strip_prefix("/v1").unwrap_or(path) {
        "/chat/completions" | "/responses" | "/messages" | "/api/chat" => Some("chat"),
        "/completions" | "/completion" | "/infill" | "/api/generate" => Some("text_completion"),
        "/embeddings" | "/embedding" | "/api/embed" | "/api/embeddings" => Some("embeddings"),
        "/rerank" | "/reranking" | "/v2/rerank" => Some("rerank"),
        _ => None,
    }
}

/// Who asked, by W3C's `traceparent`: the trace, the caller's span, and whether anybody wants to see it.
fn parent(header: &str) -> Option<(u128, u64, bool)> {
    let mut parts = header.trim().split('-');
    let [version, trace, span, flags] = [parts.next()?, parts.next()?, parts.next()?, parts.next()?];
    let is_hex =
        |text: &str, digits| text.len() == digits && text.bytes().all(|b| matches!(b, b'0'..=b'9' | b'a'..=b'f'));
    // Later versions may have more parts, the first has none.
    let known = is_hex(version, 2) && version != "ff" && (version != "00" || parts.next().is_none());
    if !known || !is_hex(trace, 32) || !is_hex(span, 16) || !is_hex(flags, 2) {
        return None;
    }
    let trace = u128::from_str_radix(trace, 16).ok().filter(|id| *id != 0)?;
    let span = u64::from_str_radix(span, 16).ok().filter(|id| *id != 0)?;
    Some((trace, span, u8::from_str_radix(flags, 16).ok()? & 1 == 1))
}

/// A unique id.
fn fresh() -> u128 {
    let mut bytes = [0u8; 16];
    if getrandom::fill(&mut bytes).is_err() {
        // Without a source of chance the clock must do.
        bytes = SystemTime::now().duration_since(UNIX_EPOCH).map_or(1, |d| d.as_nanos()).to_le_bytes();
    }
    u128::from_le_bytes(bytes).max(1)
}

/// What is learned while a request is served.
#[derive(Debug, Default)]
struct Facts {
    model: Option<String>,
    usage: Option<[usize; 3]>,
    /// Tokens of texts that were only read: vectors or scores were made of them.
    read: Option<usize>,
    first_token: Option<Duration>,
    finish: Vec<&'static str>,
    status: u16,
    error: Option<&'static str>,
}

/// The span of one request. It ends when it is dropped.
pub(crate) struct Trace {
    to: SyncSender<Value>,
    lost: Arc<AtomicU64>,
    trace: u128,
    span: u64,
    parent: Option<u64>,
    operation: &'static str,
    path: String,
    request: String,
    began: Instant,
    began_at: SystemTime,
    facts: Mutex<Facts>,
}

impl std::fmt::Debug for Trace {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        write!(f, "Trace({:032x}, {:016x})", self.trace, self.span)
    }
}

impl Trace {
    fn with(&self, change: impl FnOnce(&mut Facts)) {
        change(&mut self.facts.lock().unwrap_or_else(PoisonError::into_inner));
    }

    /// The model that serves it.
    pub(crate) fn model(&self, name: &str) {
        self.with(|facts| facts.model = Some(name.to_owned()));
    }

    /// A token was made.
    pub(crate) fn token(&self) {
        let took = self.began.elapsed();
        self.with(|facts| _ = facts.first_token.get_or_insert(took));
    }

    /// A text is over.
    pub(crate) fn end(&self, usage: &Usage, reason: &'static str) {
        self.with(|facts| {
            let [prompt, cached, made] = facts.usage.unwrap_or_default();
            // Texts of one prompt count it once; which ones those are makes no difference to the largest.
            let counted =
                [prompt.max(usage.prompt_tokens), cached.max(usage.cached_tokens), made + usage.generated_tokens];
            facts.usage = Some(counted);
            facts.finish.push(reason);
        });
    }

    /// Vectors or scores were made of texts of so many tokens.
    pub(crate) fn embedded(&self, tokens: usize) {
        self.with(|facts| facts.read = Some(tokens));
    }

    /// It failed after the answer had begun.
    pub(crate) fn failed(&self, what: &'static str) {
        self.with(|facts| facts.error = Some(what));
    }

    /// The status that the client sees.
    pub(crate) fn status(&self, status: u16) {
        self.with(|facts| facts.status = status);
    }

    fn value(&self) -> Value {
        let facts = self.facts.lock().unwrap_or_else(PoisonError::into_inner);
        let nanos = |time: SystemTime| time.duration_since(UNIX_EPOCH).map_or(0, |d| d.as_nanos()).to_string();
        let text = |key: &str, value: &str| json!({"key": key, "value": {"stringValue": value}});
        let count = |key: &str, value: usize| json!({"key": key, "value": {"intValue": value.to_string()}});
        let mut attributes = vec![
            text("gen_ai.operation.name", self.operation),
            text("gen_ai.provider.name", "kiln"),
            text("http.request.method", "POST"),
            text("url.path", &self.path),
            count("http.response.status_code", usize::from(facts.status)),
            text("kiln.request.id", &self.request),
        ];
        let mut name = self.operation.to_owned();
        if let Some(model) = &facts.model {
            name = format!("{name} {model}");
            attributes.extend(["gen_ai.request.model", "gen_ai.response.model"].map(|key| text(key, model)));
        }
        if let Some([prompt, cached, made]) = facts.usage {
            attributes.push(count("gen_ai.usage.input_tokens", prompt));
            attributes.push(count("gen_ai.usage.cache_read.input_tokens", cached));
            attributes.push(count("gen_ai.usage.output_tokens", made));
        }
        attributes.extend(facts.read.map(|tokens| count("gen_ai.usage.input_tokens", tokens)));
        if let Some(first) = facts.first_token {
            let value = json!({"doubleValue": first.as_secs_f64()});
            attributes.push(json!({"key": "gen_ai.latency.time_to_first_token", "value": value}));
        }
        if !facts.finish.is_empty() {
            let reasons: Vec<Value> = facts.finish.iter().map(|reason| json!({"stringValue": reason})).collect();
            attributes
                .push(json!({"key": "gen_ai.response.finish_reasons", "value": {"arrayValue": {"values": reasons}}}));
        }
        let error = facts.error.map(str::to_owned).or((facts.status >= 400).then(|| facts.status.to_string()));
        if let Some(error) = &error {
            attributes.push(text("error.type", error));
        }
        // By the conventions a client's mistake is no failure of the server's span.
        let failed = facts.error.is_some() || facts.status >= 500;
        let mut span = json!({
            "traceId": format!("{:032x}", self.trace), "spanId": format!("{:016x}", self.span), "name": name, "kind": 2,
            "startTimeUnixNano": nanos(self.began_at), "endTimeUnixNano": nanos(self.began_at + self.began.elapsed()),
            "attributes": attributes, "status": if failed { json!({"code": 2}) } else { json!({}) },
        });
        if let Some(parent) = self.parent {
            span["parentSpanId"] = json!(format!("{parent:016x}"));
        }
        span
    }
}

impl Drop for Trace {
    fn drop(&mut self) {
        // A queue that is full, or a sender that is gone: the span is left out.
        if self.to.try_send(self.value()).is_err() {
            self.lost.fetch_add(1, Ordering::Relaxed);
        }
    }
}

/// Begins spans, and has them sent.
pub(crate) struct Tracer {
    to: SyncSender<Value>,
    lost: Arc<AtomicU64>,
}

impl Tracer {
    /// Starts the thread that sends. The other value tells when it has ended, which it does when all senders are gone.
    pub(crate) fn start(tracing: Tracing) -> std::io::Result<(Tracer, Receiver<()>)> {
        let (to, from) = sync_channel(QUEUE);
        let (ended, when_ended) = sync_channel(0);
        let lost = Arc::new(AtomicU64::new(0));
        let tracer = Tracer { to, lost: Arc::clone(&lost) };
        std::thread::Builder::new().name("kiln traces".into()).spawn(move || {
            Sender::new(tracing, lost).run(&from);
            drop(ended);
        })?;
        Ok((tracer, when_ended))
    }

    /// A span for a request to this path, if anybody wants to see it.
    pub(crate) fn begin(&self, path: &str, traceparent: Option<&str>, request: &str) -> Option<Arc<Trace>> {
        let operation = operation(path)?;
        let (trace, parent) = match traceparent.and_then(parent) {
            Some((_, _, false)) => return None,
            Some((trace, span, true)) => (trace, Some(span)),
            None => (fresh(), None),
        };
        Some(Arc::new(Trace {
            to: self.to.clone(),
            lost: Arc::clone(&self.lost),
            trace,
            span: (fresh() as u64).max(1),
            parent,
            operation,
            path: path.to_owned(),
            request: request.to_owned(),
            began: Instant::now(),
            began_at: SystemTime::now(),
            facts: Mutex::default(),
        }))
    }
}

/// The end of the queue.
struct Sender {
    tracing: Tracing,
    agent: ureq::Agent,
    lost: Arc<AtomicU64>,
    /// The collector did not take the last spans; that was told.
    away: bool,
}

impl Sender {
    fn new(tracing: Tracing, lost: Arc<AtomicU64>) -> Sender {
        let config = ureq::Agent::config_builder().timeout_global(Some(PATIENCE)).proxy(None);
        let agent = config.user_agent(concat!("kiln/", env!("CARGO_PKG_VERSION"))).build().into();
        Sender { tracing, agent, lost, away: false }
    }

    fn run(&mut self, from: &Receiver<Value>) {
        while let Ok(first) = from.recv() {
            let (mut spans, until) = (vec![first], Instant::now() + GATHER);
            let mut over = false;
            while spans.len() < BATCH && !over {
                match from.recv_timeout(until.saturating_duration_since(Instant::now())) {
                    Ok(span) => spans.push(span),
                    Err(RecvTimeoutError::Timeout) => break,
                    Err(RecvTimeoutError::Disconnected) => over = true,
                }
            }
            self.send(spans);
        }
    }

    fn send(&mut self, spans: Vec<Value>) {
        let text = |key: &str, value: &str| json!({"key": key, "value": {"stringValue": value}});
        let version = env!("CARGO_PKG_VERSION");
        let (count, resource) =
            (spans.len(), [text("service.name", &self.tracing.service), text("service.version", version)]);
        let body = json!({"resourceSpans": [{
            "resource": {"attributes": resource},
            "scopeSpans": [{"scope": {"name": "kiln", "version": version}, "spans": spans}],
        }]});
        let mut request = self.agent.post(&self.tracing.url).header("Content-Type", "application/json");
        for (name, value) in &self.tracing.headers {
            request = request.header(name, value);
        }
        match request.send(body.to_string()) {
            Ok(_) if self.away => {
                self.away = false;
                let lost = self.lost.swap(0, Ordering::Relaxed);
                log::warn!("the collector at {} takes traces again; {lost} spans were left out", self.tracing.url);
            }
            Ok(_) => {}
            Err(error) => {
                self.lost.fetch_add(count as u64, Ordering::Relaxed);
                if !self.away {
                    self.away = true;
                    let url = &self.tracing.url;
                    log::warn!("traces cannot be sent to {url}: {error}; spans are left out until it takes them");
                }
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const TRACE: &str = "0af7651916cd43dd8448eb211c80319c";

    #[test]
    fn callers_are_known_by_their_header() {
        let seen = parent(&format!("00-{TRACE}-b7ad6b7169203331-01"));
        assert_eq!(seen, Some((0x0af7_6519_16cd_43dd_8448_eb21_1c80_319c, 0xb7ad_6b71_6920_3331, true)));
        assert_eq!(parent(&format!("00-{TRACE}-b7ad6b7169203331-00")).map(|(.., wanted)| wanted), Some(false));
        assert!(parent(&format!("cc-{TRACE}-b7ad6b7169203331-01-what-may-come")).is_some());
        let zero = "0".repeat(32);
        for wrong in [
            String::new(),
            "00".to_owned(),
            format!("00-{TRACE}-b7ad6b7169203331"),
            format!("00-{TRACE}-b7ad6b7169203331-01-more"),
            format!("ff-{TRACE}-b7ad6b7169203331-01"),
            format!("00-{zero}-b7ad6b7169203331-01"),
            format!("00-{TRACE}-0000000000000000-01"),
            format!("00-{}-b7ad6b7169203331-01", TRACE.to_uppercase()),
            format!("00-{TRACE}-b7ad6b7169203331-+1"),
        ] {
            assert_eq!(parent(&wrong), None, "{wrong}");
        }
    }

    #[test]
    fn only_requests_that_use_a_model_are_traced() {
        assert_eq!(operation("/v1/chat/completions"), Some("chat"));
        assert_eq!(operation("/chat/completions"), Some("chat"));
        assert_eq!(operation("/completion"), Some("text_completion"));
        assert_eq!(operation("/v1/embeddings"), Some("embeddings"));
        assert_eq!(operation("/v1/models"), None);
        assert_eq!(operation("/metrics"), None);
    }

    #[test]
    fn a_full_queue_costs_spans_and_no_time() {
        let (to, _from) = sync_channel(1);
        let tracer = Tracer { to, lost: Arc::default() };
        let started = Instant::now();
        for _ in 0..100 {
            drop(tracer.begin("/v1/messages", None, "req"));
        }
        assert_eq!(tracer.lost.load(Ordering::Relaxed), 99);
        assert!(started.elapsed() < Duration::from_secs(5));
    }
}
