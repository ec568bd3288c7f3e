//! Whether the server is alive and ready, what it is, and what Prometheus wants to know.

use std::sync::Arc;

use axum::extract::State;
use axum::http::{StatusCode, header};
use axum::response::{IntoResponse, Response};
use serde_json::json;

use crate::app::App;
use crate::metrics::merged;
use crate::refusal::{Kind, Refusal};
use crate::shelf::{Loaded, Place};
use crate::wire::json as reply;

/// Ready to serve, in llama-server's words.
pub(crate) async fn health(State(app): State<Arc<App>>) -> Response {
    match app.not_ready() {
        None => reply(&json!({"status": "ok"})),
        Some(why) => {
            let error = json!({"error": {"code": 503, "message": why, "type": "unavailable_error"}});
            let mut response = reply(&error);
            *response.status_mut() = StatusCode::SERVICE_UNAVAILABLE;
            response.headers_mut().insert(header::RETRY_AFTER, header::HeaderValue::from_static("5"));
            response
        }
    }
}

/// Ready to serve.
pub(crate) async fn ready(State(app): State<Arc<App>>) -> Result<Response, Refusal> {
    match app.not_ready() {
        None => Ok(reply(&json!({"status": "ready"}))),
        Some(why) => Err(Refusal::new(Kind::Unavailable, why)),
    }
}

/// The process answers, and its engine has not died and does not hang.
pub(crate) async fn live(State(app): State<Arc<App>>) -> Response {
    // An engine that can be had again is no reason to end the process.
    let stopped = |l: &Loaded| !l.scheduler.is_running() && !l.scheduler.load().rebuilding;
    let dead = |place: &Place| !place.can_load() && place.peek().is_some_and(|loaded| stopped(&loaded));
    if app.shelf.places().iter().any(dead) {
        return (StatusCode::INTERNAL_SERVER_ERROR, "the engine has stopped\n").into_response();
    }
    let silent = app.shelf.places().iter().filter_map(|place| place.peek()?.scheduler.silent()).max();
    match silent.filter(|silent| *silent > app.settings.stall) {
        Some(silent) => {
            let why = format!("the engine has work and has not got on with it for {} s\n", silent.as_secs());
            (StatusCode::SERVICE_UNAVAILABLE, why).into_response()
        }
        None => reply(&json!({"status": "alive"})),
    }
}

/// Which program this is.
pub(crate) async fn version() -> Response {
    reply(&json!({"version": env!("CARGO_PKG_VERSION"), "name": "kiln"}))
}

/// The metrics.
pub(crate) async fn metrics(State(app): State<Arc<App>>) -> Response {
    let text = |place: &Place| {
        let loaded = place.peek();
        let load = loaded.as_ref().map(|loaded| loaded.scheduler.load()).unwrap_or_default();
        place.metrics.text(load, loaded.map_or(0, |loaded| loaded.in_flight()))
    };
    let text = merged(app.shelf.places().iter().map(text));
    ([(header::CONTENT_TYPE, "text/plain; version=0.0.4; charset=utf-8")], text).into_response()
}

/// What gateways ask of a worker.
pub(crate) async fn server_info(State(app): State<Arc<App>>) -> Result<Response, Refusal> {
    let loaded = app.loaded()?;
    Ok(reply(&json!({
        "model_path": loaded.name,
        "served_model_name": loaded.name,
        "max_model_len": loaded.scheduler.context(),
        "max_num_seqs": loaded.sequences,
        "version": env!("CARGO_PKG_VERSION"),
    })))
}

/// How busy this worker is.
pub(crate) async fn loads(State(app): State<Arc<App>>) -> Result<Response, Refusal> {
    let load = app.loaded()?.scheduler.load();
    Ok(reply(&json!({
        "num_running_reqs": load.reading + load.writing + load.swapped,
        "num_waiting_reqs": load.waiting,
        "num_free_pages": load.free_pages,
        "num_pages": load.pages,
        "uptime_seconds": app.started.elapsed().as_secs(),
    })))
}
