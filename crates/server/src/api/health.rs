//! Whether the server is alive and ready, what it is, and what Prometheus wants to know.

use std::sync::Arc;

use axum::extract::State;
use axum::http::{StatusCode, header};
use axum::response::{IntoResponse, Response};
use serde_json::{Value, json};

use crate::api_error::{ApiError, Kind};
use crate::app::App;
use crate::encoder::json as reply;
use crate::http_metrics::{ServerMetrics, of_server};
use crate::metrics::merged;
use crate::registry::{Loaded, ModelEntry};

/// Ready to serve, in llama-server's words.
pub(crate) async fn health(State(app): State<Arc<App>>) -> Response {
    match app.not_ready() {
        None => reply(&json!({"status": "ok"})),
        Some(why) => {
            let error = json!({"error": {"code": 503, "message": why, "type": "unavailable_error"}});
            let mut response = reply(&error);
            *response.status_mut() = StatusCode::SERVICE_UNAVAILABLE;
            let seconds = if app.shutdown.is_leaving() { "1" } else { "5" };
            response.headers_mut().insert(header::RETRY_AFTER, header::HeaderValue::from_static(seconds));
            response
        }
    }
}

/// Ready to serve.
pub(crate) async fn ready(State(app): State<Arc<App>>) -> Result<Response, ApiError> {
    match app.not_ready() {
        None => Ok(reply(&json!({"status": "ready"}))),
        Some(why) if app.shutdown.is_leaving() => Err(ApiError::new(Kind::Leaving, why)),
        Some(why) => Err(ApiError::new(Kind::Unavailable, why)),
    }
}

/// The process answers, and its engine has not died and does not hang.
pub(crate) async fn live(State(app): State<Arc<App>>) -> Response {
    // An engine that can be had again is no reason to end the process.
    let stopped = |l: &Loaded| !l.scheduler.is_running() && !l.scheduler.load().rebuilding;
    let dead = |place: &ModelEntry| !place.can_load() && place.peek().is_some_and(|loaded| stopped(&loaded));
    if app.registry.places().iter().any(dead) {
        return (StatusCode::INTERNAL_SERVER_ERROR, "the engine has stopped\n").into_response();
    }
    let silent = app.registry.places().iter().filter_map(|place| place.peek()?.scheduler.silent()).max();
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
    let text = |(at, place): (usize, &ModelEntry)| {
        let loaded = place.peek();
        let load = loaded.as_ref().map(|loaded| loaded.scheduler.load()).unwrap_or_default();
        // Which model a request is for is known once it is prepared.
        let preparing = place.awaiting() + if at == 0 { app.prep_pool.waiting() } else { 0 };
        place.metrics.text(load, loaded.map_or(0, |loaded| loaded.in_flight()), preparing)
    };
    let ServerMetrics { requests, gauges } = of_server(&app);
    let mut text = merged(app.registry.places().iter().enumerate().map(text).chain([requests]));
    text.insert_str(text.trim_end().trim_end_matches("# EOF").len(), &gauges);
    ([(header::CONTENT_TYPE, "text/plain; version=0.0.4; charset=utf-8")], text).into_response()
}

/// What gateways ask of a worker.
pub(crate) async fn server_info(State(app): State<Arc<App>>) -> Result<Response, ApiError> {
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
fn load_of(app: &App) -> Result<Value, ApiError> {
    let load = app.loaded()?.scheduler.load();
    let awaiting: usize = app.registry.places().iter().map(ModelEntry::awaiting).sum();
    Ok(json!({
        "num_running_reqs": load.reading + load.writing + load.swapped,
        "num_waiting_reqs": load.waiting + app.prep_pool.waiting() + awaiting,
        "num_free_pages": load.free_pages,
        "num_pages": load.pages,
        "uptime_seconds": app.started.elapsed().as_secs(),
    }))
}

/// The same as an answer.
pub(crate) async fn loads(State(app): State<Arc<App>>) -> Result<Response, ApiError> {
    Ok(reply(&load_of(&app)?))
}

/// The same in SGLang's shape: a list of workers, with tokens in place of pages.
pub(crate) async fn loads_of_workers(State(app): State<Arc<App>>) -> Result<Response, ApiError> {
    let mut load = load_of(&app)?;
    let pages = |name: &str| load[name].as_u64().unwrap_or(0);
    let (all, free) = (pages("num_pages"), pages("num_free_pages"));
    let (used, page) = (all.saturating_sub(free), kiln_engine::arch::PAGE as u64);
    let [running, waiting] = ["num_running_reqs", "num_waiting_reqs"].map(|name| load[name].as_u64().unwrap_or(0));
    load["dp_rank"] = json!(0);
    load["num_total_reqs"] = json!(running + waiting);
    load["num_used_tokens"] = json!(used * page);
    load["max_total_num_tokens"] = json!(all * page);
    load["token_usage"] = json!(if all == 0 { 0.0 } else { used as f64 / all as f64 });
    let loaded = app.loaded()?;
    Ok(reply(&json!({"version": env!("CARGO_PKG_VERSION"), "model": loaded.name, "dp_rank_count": 1, "loads": [load]})))
}

/// How many requests there are, in vLLM's words.
pub(crate) async fn server_load(State(app): State<Arc<App>>) -> Response {
    let in_flight = |place: &ModelEntry| place.awaiting() + place.peek().map_or(0, |loaded| loaded.in_flight());
    let all: usize = app.registry.places().iter().map(in_flight).sum();
    reply(&json!({"server_load": all}))
}
