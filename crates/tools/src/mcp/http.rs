//! An MCP server at an address ("streamable HTTP"): each message is a POST, and the answer is JSON or a stream of events. A thread reads it, so that
//! whoever waits can go away; every answer has a limit in bytes and in time.

use std::io::{BufRead, BufReader, Read};
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::sync::mpsc::{RecvTimeoutError, Sender, channel};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::{Duration, Instant};

use kiln_system::text::{shown, shown_bytes};
use serde_json::{Value, json};
use ureq::Agent;
use ureq::http::{Response, Uri};

use super::link::Link;
use super::rpc::{Answer, Failure, Incoming, incoming, notification, request};
use crate::limits::Wait;

/// How long a message without an answer may take.
const SHORT: Duration = Duration::from_secs(10);
/// Questions of a server that are answered while it is asked one thing.
const MOST_ASKED: u64 = 16;
/// Bytes of an error's page that are read.
const MOST_OF_AN_ERROR: u64 = 16 << 10;

struct Shared {
    agent: Agent,
    url: String,
    headers: Vec<(String, String)>,
    /// What the server calls this session, and the version that is spoken.
    session: Mutex<Option<String>>,
    version: Mutex<Option<String>>,
    changed: AtomicBool,
    lost: AtomicBool,
    asked: AtomicU64,
    most: usize,
}

/// A server at an address.
pub(crate) struct Http {
    shared: Arc<Shared>,
    next: AtomicU64,
}

fn lock<T>(mutex: &Mutex<T>) -> MutexGuard<'_, T> {
    mutex.lock().unwrap_or_else(PoisonError::into_inner)
}

/// Whether a host is this machine, which no proxy leads to.
fn is_here(url: &str) -> bool {
    let uri = url.parse::<Uri>().ok();
    let host = uri.as_ref().and_then(Uri::host).unwrap_or_default().trim_matches(['[', ']']);
    host == "localhost" || host.parse::<std::net::IpAddr>().is_ok_and(|address| address.is_loopback())
}

impl Http {
    pub(crate) fn new(url: &str, headers: &[(String, String)], most: usize) -> Http {
        // Headers hold keys; a redirect could take them elsewhere.
        let config = Agent::config_builder()
            .http_status_as_error(false)
            .max_redirects(0)
            .max_redirects_will_error(false)
            .user_agent(concat!("kiln/", env!("CARGO_PKG_VERSION")))
            .accept_encoding("identity")
            .timeout_connect(Some(SHORT));
        let config = if is_here(url) { config.proxy(None) } else { config };
        let shared = Shared {
            agent: config.build().into(),
            url: url.to_owned(),
            headers: headers.to_vec(),
            session: Mutex::default(),
            version: Mutex::default(),
            changed: AtomicBool::new(false),
            lost: AtomicBool::new(false),
            asked: AtomicU64::new(0),
            most,
        };
        Http { shared: Arc::new(shared), next: AtomicU64::new(1) }
    }
}

impl Shared {
    /// Sends a message; gives what answers it.
    fn post(&self, message: &Value, time: Duration) -> Result<Response<ureq::Body>, Failure> {
        let mut call = self.agent.post(&self.url).config().timeout_global(Some(time)).build();
        call = call.header("Content-Type", "application/json").header("Accept", "application/json, text/event-stream");
        for (name, value) in &self.headers {
            call = call.header(name, value);
        }
        if let Some(session) = lock(&self.session).clone() {
            call = call.header("Mcp-Session-Id", session);
        }
        if let Some(version) = lock(&self.version).clone() {
            call = call.header("MCP-Protocol-Version", version);
        }
        let response = call.send(message.to_string()).map_err(failed)?;
        let status = response.status().as_u16();
        if let Some(session) = response.headers().get("mcp-session-id").and_then(|value| value.to_str().ok()) {
            lock(&self.session).replace(session.to_owned());
        }
        match status {
            200..=299 => Ok(response),
            404 if lock(&self.session).is_some() => {
                self.lost.store(true, Ordering::Relaxed);
                Err(Failure::Gone("has forgotten the session".to_owned()))
            }
            300..=399 => {
                Err(Failure::Wrong(format!("it redirects ({status}), which is not followed; give its last address")))
            }
            401 | 403 => Err(Failure::Refused(format!("it wants another key (status {status}); headers name one"))),
            _ => {
                let mut page = Vec::new();
                // The status says enough where the page cannot be read.
                let _ = response.into_body().into_reader().take(MOST_OF_AN_ERROR).read_to_end(&mut page);
                let said = serde_json::from_slice::<Value>(&page).ok();
                let said = said.and_then(|page| Some(page.get("error")?.get("message")?.as_str()?.to_owned()));
                Err(Failure::Refused(match said {
                    Some(said) => format!("{} (status {status})", shown(&said)),
                    None => format!("status {status} {}", shown_bytes(page.trim_ascii())).trim().to_owned(),
                }))
            }
        }
    }

    /// Asks, and reads until the answer has come.
    fn exchange(&self, id: u64, message: &Value, until: Instant) -> Answer {
        let time = until.saturating_duration_since(Instant::now());
        self.asked.store(0, Ordering::Relaxed);
        let response = self.post(message, time)?;
        let kind = response.headers().get("content-type").and_then(|value| value.to_str().ok()).unwrap_or_default();
        let is_stream = kind.trim_start().starts_with("text/event-stream");
        let mut reader = BufReader::new(response.into_body().into_reader());
        if !is_stream {
            let mut bytes = Vec::new();
            reader.take(self.most as u64 + 1).read_to_end(&mut bytes).map_err(unread)?;
            if bytes.len() > self.most {
                return Err(Failure::TooMuch(self.most));
            }
            let value = serde_json::from_slice(&bytes);
            let value = value.map_err(|why| Failure::Wrong(format!("its answer is no JSON: {why}")))?;
            return self
                .read(id, &value)
                .unwrap_or_else(|| Err(Failure::Wrong("its answer answers something else".to_owned())));
        }
        let mut left = self.most;
        while let Some(data) = event(&mut reader, &mut left, self.most)? {
            let Ok(value) = serde_json::from_str::<Value>(&data) else { continue };
            if let Some(answer) = self.read(id, &value) {
                return answer;
            }
        }
        Err(Failure::Wrong("its stream ended without an answer".to_owned()))
    }

    /// Understands a message; gives the answer, if it is that.
    fn read(&self, id: u64, value: &Value) -> Option<Answer> {
        match incoming(value) {
            Incoming::Answer(of, answer) if of == id => return Some(answer),
            Incoming::Asked(told) => {
                if self.asked.fetch_add(1, Ordering::Relaxed) < MOST_ASKED {
                    drop(self.post(&told, SHORT));
                }
            }
            Incoming::ToolsChanged => self.changed.store(true, Ordering::Relaxed),
            Incoming::Answer(..) | Incoming::Other => {}
        }
        None
    }
}

/// The data of the next event; nothing at the end. `left` counts the bytes of the stream.
fn event(stream: &mut impl BufRead, left: &mut usize, most: usize) -> Result<Option<String>, Failure> {
    let mut data: Option<String> = None;
    loop {
        let mut line = Vec::new();
        let count = stream.by_ref().take(*left as u64 + 1).read_until(b'\n', &mut line).map_err(unread)?;
        if count > *left {
            return Err(Failure::TooMuch(most));
        }
        *left -= count;
        if count == 0 {
            return Ok(data);
        }
        let line = String::from_utf8_lossy(&line);
        let line = line.trim_end_matches(['\n', '\r']);
        match (line.is_empty(), line.strip_prefix("data:")) {
            (true, _) if data.is_some() => return Ok(data),
            (_, Some(more)) => {
                let more = more.strip_prefix(' ').unwrap_or(more);
                data = Some(data.map_or_else(|| more.to_owned(), |before| before + "\n" + more));
            }
            _ => {}
        }
    }
}

fn failed(why: ureq::Error) -> Failure {
    match why {
        ureq::Error::Timeout(_) => Failure::Late,
        why => Failure::Gone(format!("cannot be reached: {}", shown(&why.to_string()))),
    }
}

fn unread(why: std::io::Error) -> Failure {
    match why.kind() {
        std::io::ErrorKind::TimedOut => Failure::Late,
        // ureq hands its own errors on in these.
        _ if why.to_string().starts_with("timeout") => Failure::Late,
        _ => Failure::Gone(format!("broke off: {}", shown(&why.to_string()))),
    }
}

/// Does work on a thread of its own.
fn apart(work: impl FnOnce() + Send + 'static) -> Result<(), Failure> {
    let thread = std::thread::Builder::new().name("mcp http".to_owned()).spawn(work);
    thread.map(drop).map_err(|why| Failure::Gone(format!("cannot be asked: {why}")))
}

impl Link for Http {
    fn ask(&self, method: &str, params: &Value, wait: &Wait<'_>) -> Answer {
        let id = self.next.fetch_add(1, Ordering::Relaxed);
        let (message, until, shared) = (request(id, method, params), wait.until, Arc::clone(&self.shared));
        let (answered, answer): (Sender<Answer>, _) = channel();
        apart(move || drop(answered.send(shared.exchange(id, &message, until))))?;
        loop {
            let given_up = match (wait.slice(), (wait.cancelled)()) {
                (_, true) => Failure::Cancelled,
                (None, _) => Failure::Late,
                (Some(slice), false) => match answer.recv_timeout(slice) {
                    Ok(answer) => return answer,
                    Err(RecvTimeoutError::Timeout) => continue,
                    Err(RecvTimeoutError::Disconnected) => Failure::Gone("failed".to_owned()),
                },
            };
            let (shared, reason) = (Arc::clone(&self.shared), json!({"requestId": id, "reason": given_up.to_string()}));
            let message = notification("notifications/cancelled", &reason);
            // It may be past hearing that.
            let _ = apart(move || drop(shared.post(&message, SHORT)));
            return Err(given_up);
        }
    }

    fn tell(&self, method: &str, params: &Value) -> Result<(), Failure> {
        self.shared.post(&notification(method, params), SHORT).map(drop)
    }

    fn speaks(&self, version: &str) {
        lock(&self.shared.version).replace(version.to_owned());
    }

    fn end(&self) -> Option<String> {
        self.shared.lost.load(Ordering::Relaxed).then(|| "has forgotten the session".to_owned())
    }

    fn take_changed(&self) -> bool {
        self.shared.changed.swap(false, Ordering::Relaxed)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn events(text: &str, most: usize) -> Result<Vec<String>, Failure> {
        let (mut stream, mut left, mut all) = (text.as_bytes(), most, Vec::new());
        while let Some(data) = event(&mut stream, &mut left, most)? {
            all.push(data);
        }
        Ok(all)
    }

    #[test]
    fn events_are_read_as_they_are_written() {
        let text = ": hello\nevent: message\ndata: {\"a\":\ndata: 1}\n\nid: 7\r\ndata:x\r\n\r\n\n\ndata: last";
        assert_eq!(events(text, 1000).unwrap(), ["{\"a\":\n1}", "x", "last"]);
        assert_eq!(events("", 10).unwrap(), [""; 0]);
        assert_eq!(events(&"data: x\n\n".repeat(100), 100), Err(Failure::TooMuch(100)));
        assert_eq!(events(&"x".repeat(200), 100), Err(Failure::TooMuch(100)));
    }

    #[test]
    fn this_machine_is_known() {
        assert!(["http://localhost:1/x", "http://127.0.0.1/", "http://[::1]:2/"].iter().all(|url| is_here(url)));
        assert!(!["http://example.org/", "http://localhost.example/"].iter().any(|url| is_here(url)));
    }
}
