//! What every request passes before it is looked at, and every answer on its way out: who may ask, from where, and the
//! request's id.

use std::panic::AssertUnwindSafe;
use std::sync::Arc;
use std::time::Instant;

use axum::extract::{MatchedPath, Request, State};
use axum::http::{HeaderMap, HeaderValue, Method, StatusCode, Version, header};
use axum::middleware::Next;
use axum::response::{IntoResponse, Response};
use futures_util::FutureExt as _;
use serde_json::{Value, json};

use crate::api_error::{ApiError, Dialect, Kind};
use crate::app::{App, fresh_id};
use crate::connections::Connection;
use crate::keys::Holder;
use crate::scope::scoped;
use crate::tenants::tenant;
use crate::trace::{Trace, Tracer};

/// Who asks.
#[derive(Clone, Debug)]
pub(crate) struct Caller {
    /// Which key was sent, where there are keys.
    pub(crate) key: Option<Arc<Holder>>,
    /// The owner of the key, its cache scope; 0 where there are no keys, or all share. Owners share nothing.
    pub(crate) owner: u64,
    /// The id of the request.
    pub(crate) request: String,
    /// Its span, where requests are traced.
    pub(crate) trace: Option<Arc<Trace>>,
    /// No page of a browser asks, or one of this server, or one that the operator named.
    pub(crate) is_own_page: bool,
}

/// Paths that tell nothing but the state of the server. They are answered however full it is.
const PROBES: [&str; 6] = ["/health", "/v1/health", "/livez", "/readyz", "/ping", "/health_generate"];

/// Headers of answers that pages of other origins may read.
const EXPOSED: &str = "x-request-id, request-id, retry-after, x-should-retry, x-kiln-ignored, x-kiln-replica";

/// The outermost layer.
pub(crate) async fn guard(State(app): State<Arc<App>>, mut request: Request, next: Next) -> Response {
    let (id, came, mut caller_key) = (fresh_id("req_"), Instant::now(), None);
    let path = request.uri().path().to_owned();
    let (method, version) = (request.method().clone(), request.version());
    let origin = allowed_origin(&app, request.headers());
    let begin = |tracer: &Tracer| tracer.begin(&path, text(request.headers(), "traceparent"), &id);
    let route = request.extensions().get::<MatchedPath>().cloned();
    let crowded = is_crowded(&request);
    let trace = app.tracer.as_ref().filter(|_| method == Method::POST).and_then(begin);
    let mut response = match check(&app, &request) {
        Ok(key) => {
            let key = tenant_of(&app, &request, key);
            caller_key = key.clone();
            let own = key.as_ref().filter(|_| !app.settings.shared_cache);
            let owner = own.map_or(0, |holder| holder.owner);
            let is_own_page = is_own_page(&app, &request);
            let (request_id, trace) = (id.clone(), trace.clone());
            request.extensions_mut().insert(Caller { key, owner, request: request_id, trace, is_own_page });
            if is_preflight(&request) {
                StatusCode::NO_CONTENT.into_response()
            } else {
                // A defect costs the request that meets it and no other.
                let served = AssertUnwindSafe(scoped(next.run(request))).catch_unwind();
                let served = tokio::select! {
                    biased;
                    served = served => served,
                    refusal = app.shutdown.over() => Ok(refusal.into_response()),
                };
                served.unwrap_or_else(|_| ApiError::internal(&format!("a panic while serving {path}")).into_response())
            }
        }
        Err(refusal) => refusal.into_response(),
    };
    if let Some(refusal) = response.extensions_mut().remove::<ApiError>() {
        response = refusal.render(Dialect::of_path(&path), &id);
    }
    if let Some(trace) = trace {
        trace.status(response.status().as_u16());
    }
    let key = caller_key.as_ref().map(|holder| holder.key.name.as_str());
    let seconds = (came.elapsed().as_secs_f64() * 1e6).round() / 1e6;
    app.http.answered(&method, route.as_ref().map(MatchedPath::as_str), response.status());
    let status = response.status().as_u16();
    facts(
        "request",
        &json!({"id": id, "method": method.as_str(), "path": path, "status": status, "seconds": seconds, "key": key}),
    );
    let headers = response.headers_mut();
    // HTTP/2 says so in its own words.
    if crowded || (app.shutdown.is_leaving() && version < Version::HTTP_2) {
        headers.insert(header::CONNECTION, HeaderValue::from_static("close"));
    }
    if let Some(replica) = &app.replica {
        headers.insert("x-kiln-replica", replica.clone());
    }
    if let Ok(value) = HeaderValue::from_str(&id) {
        headers.insert("x-request-id", value.clone());
        headers.insert("request-id", value);
    }
    if let Some(origin) = origin {
        headers.insert(header::ACCESS_CONTROL_ALLOW_ORIGIN, origin);
        headers.insert(header::VARY, HeaderValue::from_static("Origin"));
        headers.insert(header::ACCESS_CONTROL_ALLOW_METHODS, HeaderValue::from_static("GET, POST, DELETE"));
        headers.insert(header::ACCESS_CONTROL_ALLOW_HEADERS, HeaderValue::from_static("*, Authorization"));
        headers.insert(header::ACCESS_CONTROL_EXPOSE_HEADERS, HeaderValue::from_static(EXPOSED));
        headers.insert(header::ACCESS_CONTROL_MAX_AGE, HeaderValue::from_static("600"));
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
fn check(app: &App, request: &Request) -> Result<Option<Arc<Holder>>, ApiError> {
    let headers = request.headers();
    if headers.get_all(header::HOST).iter().nth(1).is_some() {
        return Err(ApiError::new(Kind::Invalid, "the request has more than one Host header"));
    }
    let path = request.uri().path();
    let is_probe = PROBES.contains(&path);
    // Gateways probe by address, and some in HTTP/1.0 without a name. There is nothing in the answer that a page could not guess.
    if !(is_probe && request.method() == Method::GET) {
        check_host(app, request)?;
    }
    check_origin(app, request)?;
    if is_crowded(request) && !is_probe {
        let message = "the server has as many connections as it takes, and every one is in use";
        return Err(ApiError::new(Kind::Unavailable, message));
    }
    // The page asks for a key itself.
    let is_page = path == "/" || path.starts_with("/page/");
    if is_probe || is_page || (path == "/metrics" && app.settings.open_metrics) || is_preflight(request) {
        return Ok(None);
    }
    check_key(app, headers)
}

/// Whose request it is, by the word of a gateway that is trusted; else whose key it brings.
fn tenant_of(app: &App, request: &Request, key: Option<Arc<Holder>>) -> Option<Arc<Holder>> {
    let from = request.extensions().get::<Arc<Connection>>().map(|connection| connection.address());
    let trusted = from.is_some_and(|from| app.settings.trusted_proxies.iter().any(|proxy| proxy.has(from)));
    match tenant(request.headers()).filter(|_| trusted) {
        Some(name) => Some(app.keys.tenant(key.as_ref(), name)),
        None => key,
    }
}

/// Whether the request came on a connection for which there was no regular place.
fn is_crowded(request: &Request) -> bool {
    request.extensions().get::<Arc<Connection>>().is_some_and(|connection| connection.is_reserved())
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

/// The name that the client knows this server by: `Host`, or `:authority` in HTTP/2.
fn host(request: &Request) -> Option<&str> {
    request.uri().authority().map(|a| a.as_str()).or(text(request.headers(), header::HOST))
}

/// A page in a browser can point a name of its own at this machine; the name in `Host` gives it away.
fn check_host(app: &App, request: &Request) -> Result<(), ApiError> {
    if app.settings.hosts.is_empty() {
        return Ok(());
    }
    let host = without_port(host(request).unwrap_or_default());
    if app.settings.hosts.iter().any(|known| known.eq_ignore_ascii_case(host)) {
        return Ok(());
    }
    let message = format!("Host {host:?} is not a name of this server\nhint: --allow-host adds one");
    Err(ApiError::new(Kind::Forbidden, message))
}

/// Whether the page that asks, if one does, is one of this server or was named by the operator.
fn is_own_page(app: &App, request: &Request) -> bool {
    let Some(origin) = request.headers().get(header::ORIGIN) else { return true };
    let own = origin.to_str().ok().and_then(|origin| origin.split_once("://")).map(|(_, host)| host);
    let named = app.settings.origins.iter().any(|known| known == "*" || known.as_bytes() == origin.as_bytes());
    named || (own.is_some() && own == host(request))
}

fn allowed_origin(app: &App, headers: &HeaderMap) -> Option<HeaderValue> {
    let origin = headers.get(header::ORIGIN)?;
    let known = app.settings.origins.iter().any(|known| known == "*" || known.as_bytes() == origin.as_bytes());
    (known || origin.to_str().is_ok_and(is_local)).then(|| origin.clone())
}

/// Whether a page comes from the machine that it is looked at on, as those of developers and of programs with a browser inside do.
fn is_local(origin: &str) -> bool {
    let host = origin.strip_prefix("http://").or_else(|| origin.strip_prefix("https://"));
    host.is_some_and(|host| ["localhost", "127.0.0.1", "[::1]"].contains(&without_port(host)))
}

/// Browsers say which page asks. Only pages of this server and those that were named may.
fn check_origin(app: &App, request: &Request) -> Result<(), ApiError> {
    let headers = request.headers();
    let Some(origin) = text(headers, header::ORIGIN) else { return Ok(()) };
    let own = origin.split_once("://").map(|(_, host)| host);
    if allowed_origin(app, headers).is_some() || (own.is_some() && own == host(request)) {
        return Ok(());
    }
    let message = format!("pages of {origin} may not use this server\nhint: --allow-origin adds one");
    Err(ApiError::new(Kind::Forbidden, message))
}

fn check_key(app: &App, headers: &HeaderMap) -> Result<Option<Arc<Holder>>, ApiError> {
    if app.keys.is_empty() {
        return Ok(None);
    }
    let bearer = text(headers, header::AUTHORIZATION).and_then(|value| {
        let (scheme, key) = value.split_once(' ')?;
        scheme.eq_ignore_ascii_case("bearer").then_some(key.trim())
    });
    let given = bearer.or(text(headers, "x-api-key"));
    let Some(given) = given else {
        let message = "no API key: send `Authorization: Bearer KEY` or `x-api-key: KEY`";
        return Err(ApiError::new(Kind::Key, message));
    };
    let found = app.keys.find(given);
    found.map(Some).ok_or_else(|| ApiError::new(Kind::Key, "the API key is not known"))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn pages_of_this_machine_are_known_by_their_origin() {
        for origin in
            ["http://localhost:3000", "http://localhost", "https://127.0.0.1:1", "http://[::1]:5173", "http://[::1]"]
        {
            assert!(is_local(origin), "{origin}");
        }
        for origin in [
            "null",
            "http://localhost.evil.example",
            "http://evil.example:80",
            "file://localhost",
            "http://127.0.0.1.evil:1",
            "http://[::1].evil",
        ] {
            assert!(!is_local(origin), "{origin}");
        }
    }

    #[test]
    fn ports_are_left_out() {
        let hosts = ["a:80", "a", "[::1]:8080", "[::1]", "127.0.0.1:1"];
        assert_eq!(hosts.map(without_port), ["a", "a", "[::1]", "[::1]", "127.0.0.1"]);
    }
}
