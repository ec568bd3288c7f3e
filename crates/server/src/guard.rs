//! What every request passes before it is looked at, and every answer on its way out: who may ask, from where, and the
//! request's id.

use std::panic::AssertUnwindSafe;
use std::sync::Arc;
use std::time::Instant;

use axum::extract::{Request, State};
use axum::http::{HeaderMap, HeaderValue, Method, StatusCode, header};
use axum::middleware::Next;
use axum::response::{IntoResponse, Response};
use futures_util::FutureExt as _;
use serde_json::{Value, json};
use subtle::ConstantTimeEq as _;

use crate::app::{App, fresh_id};
use crate::refusal::{Dialect, Kind, Refusal};
use crate::trace::{Trace, Tracer};

/// Who asks.
#[derive(Clone, Debug)]
pub(crate) struct Caller {
    /// Which key was sent, where there are keys.
    pub(crate) key: Option<usize>,
    /// The number of the key, from 1; 0 where there are no keys, or all share. Owners share nothing.
    pub(crate) owner: u64,
    /// The id of the request.
    pub(crate) request: String,
    /// Its span, where requests are traced.
    pub(crate) trace: Option<Arc<Trace>>,
}

/// Paths that tell nothing but the state of the server, and the page, which asks for a key itself.
const OPEN: [&str; 5] = ["/", "/health", "/v1/health", "/livez", "/readyz"];

/// The outermost layer.
pub(crate) async fn guard(State(app): State<Arc<App>>, mut request: Request, next: Next) -> Response {
    let (id, came, mut caller_key) = (fresh_id("req_"), Instant::now(), None);
    let path = request.uri().path().to_owned();
    let method = request.method().clone();
    let origin = allowed_origin(&app, request.headers());
    let begin = |tracer: &Tracer| tracer.begin(&path, text(request.headers(), "traceparent"), &id);
    let trace = app.tracer.as_ref().filter(|_| method == Method::POST).and_then(begin);
    let mut response = match check(&app, &request) {
        Ok(key) => {
            caller_key = key;
            let own = key.filter(|_| !app.settings.shared_cache);
            let owner = own.map_or(0, |key| key as u64 + 1);
            request.extensions_mut().insert(Caller { key, owner, request: id.clone(), trace: trace.clone() });
            if is_preflight(&request) {
                StatusCode::NO_CONTENT.into_response()
            } else {
                // A defect costs the request that meets it and no other.
                let served = AssertUnwindSafe(next.run(request)).catch_unwind().await;
                served.unwrap_or_else(|_| Refusal::internal(&format!("a panic while serving {path}")).into_response())
            }
        }
        Err(refusal) => refusal.into_response(),
    };
    if let Some(refusal) = response.extensions_mut().remove::<Refusal>() {
        response = refusal.render(Dialect::of_path(&path), &id);
    }
    if let Some(trace) = trace {
        trace.status(response.status().as_u16());
    }
    let key = caller_key.and_then(|key| app.settings.keys.get(key)).map(|key| key.name.as_str());
    let seconds = (came.elapsed().as_secs_f64() * 1e6).round() / 1e6;
    let status = response.status().as_u16();
    facts(
        "request",
        &json!({"id": id, "method": method.as_str(), "path": path, "status": status, "seconds": seconds, "key": key}),
    );
    let headers = response.headers_mut();
    if let Ok(value) = HeaderValue::from_str(&id) {
        headers.insert("x-request-id", value.clone());
        headers.insert("request-id", value);
    }
    if let Some(origin) = origin {
        headers.insert(header::ACCESS_CONTROL_ALLOW_ORIGIN, origin);
        headers.insert(header::VARY, HeaderValue::from_static("Origin"));
        headers.insert(header::ACCESS_CONTROL_ALLOW_METHODS, HeaderValue::from_static("GET, POST"));
        headers.insert(header::ACCESS_CONTROL_ALLOW_HEADERS, HeaderValue::from_static("*, Authorization"));
    }
    response
}

/// Logs what happened, for people and for programs: what it is, and facts about it that hold nothing of what anybody said.
pub(crate) fn facts(what: &str, facts: &Value) {
    log::info!(target: "kiln::facts", "{what} {facts}");
}

fn is_preflight(request: &Request) -> bool {
    request.method() == Method::OPTIONS && request.headers().contains_key(header::ACCESS_CONTROL_REQUEST_METHOD)
}

/// Whether the request may go on; gives its key.
fn check(app: &App, request: &Request) -> Result<Option<usize>, Refusal> {
    let headers = request.headers();
    check_host(app, request)?;
    check_origin(app, request)?;
    let path = request.uri().path();
    let open = OPEN.contains(&path) || path.starts_with("/page/") || (path == "/metrics" && app.settings.open_metrics);
    if open || is_preflight(request) {
        return Ok(None);
    }
    check_key(app, headers)
}

fn text(headers: &HeaderMap, name: impl header::AsHeaderName) -> Option<&str> {
    headers.get(name).and_then(|value| value.to_str().ok())
}

/// The host without its port.
fn without_port(host: &str) -> &str {
    match host.rfind(':') {
        Some(colon) if !host[colon..].contains(']') => &host[..colon],
        _ => host,
    }
}

/// The name that the client knows this server by. HTTP/2 has it in the place of the header.
fn host(request: &Request) -> Option<&str> {
    request.uri().authority().map(|a| a.as_str()).or(text(request.headers(), header::HOST))
}

/// A page in a browser can point a name of its own at this machine; the name in `Host` gives it away.
fn check_host(app: &App, request: &Request) -> Result<(), Refusal> {
    if app.settings.hosts.is_empty() {
        return Ok(());
    }
    let host = without_port(host(request).unwrap_or_default());
    if app.settings.hosts.iter().any(|known| known.eq_ignore_ascii_case(host)) {
        return Ok(());
    }
    let message = format!("Host {host:?} is not a name of this server\nhint: --allow-host adds one");
    Err(Refusal::new(Kind::Forbidden, message))
}

fn allowed_origin(app: &App, headers: &HeaderMap) -> Option<HeaderValue> {
    let origin = headers.get(header::ORIGIN)?;
    let known = app.settings.origins.iter().any(|known| known == "*" || known.as_bytes() == origin.as_bytes());
    known.then(|| origin.clone())
}

/// Browsers say which page asks. Only pages of this server and those that were named may.
fn check_origin(app: &App, request: &Request) -> Result<(), Refusal> {
    let headers = request.headers();
    let Some(origin) = text(headers, header::ORIGIN) else { return Ok(()) };
    let own = origin.split_once("://").map(|(_, host)| host);
    if allowed_origin(app, headers).is_some() || (own.is_some() && own == host(request)) {
        return Ok(());
    }
    let message = format!("pages of {origin} may not use this server\nhint: --allow-origin adds one");
    Err(Refusal::new(Kind::Forbidden, message))
}

fn check_key(app: &App, headers: &HeaderMap) -> Result<Option<usize>, Refusal> {
    if app.settings.keys.is_empty() {
        return Ok(None);
    }
    let bearer = text(headers, header::AUTHORIZATION).and_then(|value| {
        let (scheme, key) = value.split_once(' ')?;
        scheme.eq_ignore_ascii_case("bearer").then_some(key.trim())
    });
    let given = bearer.or(text(headers, "x-api-key"));
    let Some(given) = given else {
        let message = "no API key: send `Authorization: Bearer KEY` or `x-api-key: KEY`";
        return Err(Refusal::new(Kind::Key, message));
    };
    // Every key is compared to its end, so that time tells nothing.
    let mut found = None;
    for (number, key) in app.settings.keys.iter().enumerate() {
        if bool::from(key.secret.as_bytes().ct_eq(given.as_bytes())) {
            found = Some(number);
        }
    }
    found.map(Some).ok_or_else(|| Refusal::new(Kind::Key, "the API key is not known"))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn ports_are_left_out() {
        let hosts = ["a:80", "a", "[::1]:8080", "[::1]", "127.0.0.1:1"];
        assert_eq!(hosts.map(without_port), ["a", "a", "[::1]", "[::1]", "127.0.0.1"]);
    }
}
