//! `/api/pull` and `/api/delete`: Ollama's way to fetch and remove models, where the server lets clients do so.

use std::convert::Infallible;
use std::sync::Arc;
use std::sync::atomic::Ordering;
use std::time::{Duration, Instant};

use axum::body::Body as Reply;
use axum::extract::State;
use axum::http::{HeaderValue, header};
use axum::response::{IntoResponse as _, Response};
use schemars::JsonSchema;
use serde::Deserialize;
use serde_json::{Value, json};
use tokio::sync::mpsc::{UnboundedReceiver, unbounded_channel};

use crate::api_error::{ApiError, Kind};
use crate::app::App;
use crate::body::Body;
use crate::encoder::json as reply;

/// How far a pull is.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct PullProgress {
    /// The file that is fetched.
    pub file: String,
    /// Its bytes.
    pub total: u64,
    /// Those that are there.
    pub completed: u64,
}

/// Models on this machine that clients may add to and take from.
pub trait ModelStore: Send + Sync {
    /// Fetches a model by the name that a client gave. An error is told to the client.
    fn pull(&self, name: &str, progress: &(dyn Fn(PullProgress) + Sync)) -> Result<(), String>;
    /// Removes a model; `false` where there is none of that name.
    fn remove(&self, name: &str) -> Result<bool, String>;
}

/// How often a client hears of bytes.
const PACE: Duration = Duration::from_millis(100);

#[derive(Debug, Default, Deserialize, JsonSchema)]
#[serde(default)]
#[schemars(rename = "OllamaModel")]
pub(crate) struct Fields {
    model: Option<String>,
    name: Option<String>,
    stream: Option<bool>,
    #[allow(dead_code, reason = "registries are always spoken to over TLS")]
    insecure: Option<bool>,
}

impl Fields {
    fn name(self) -> Result<String, ApiError> {
        let name = self.model.or(self.name).filter(|name| !name.trim().is_empty());
        name.ok_or_else(|| ApiError::invalid("model", "`model` is missing"))
    }
}

fn store(app: &App) -> Result<Arc<dyn ModelStore>, ApiError> {
    let message = "this server does not let clients fetch or delete models";
    app.settings.store.clone().ok_or_else(|| ApiError::new(Kind::Forbidden, message))
}

/// `POST /api/pull`.
pub(crate) async fn pull(State(app): State<Arc<App>>, mut body: Body) -> Result<Response, ApiError> {
    let fields = body.get::<Fields>()?;
    let leftover = body.leftover(&app)?;
    let (store, streams) = (store(&app)?, fields.stream.unwrap_or(true));
    let name = fields.name()?;
    if app.pulling.swap(true, Ordering::AcqRel) {
        return Err(ApiError::new(Kind::QueueFull, "another model is being fetched; one is at a time"));
    }
    let (to, mut from) = unbounded_channel();
    let of_work = Arc::clone(&app);
    let work = move || {
        // A client that has gone gets no progress; the partial file stays for the next pull.
        let tell = |line: Value| drop(to.send(line));
        tell(json!({"status": "pulling manifest"}));
        let told = std::sync::Mutex::new(None::<Instant>);
        let progress = |progress: PullProgress| {
            let PullProgress { file, total, completed } = progress;
            let mut told = told.lock().unwrap_or_else(std::sync::PoisonError::into_inner);
            if completed == 0 || completed >= total || told.is_none_or(|told| told.elapsed() >= PACE) {
                *told = Some(Instant::now());
                tell(
                    json!({"status": format!("pulling {file}"), "digest": file, "total": total, "completed": completed}),
                );
            }
        };
        let pulled = std::panic::catch_unwind(std::panic::AssertUnwindSafe(|| store.pull(&name, &progress)));
        of_work.pulling.store(false, Ordering::Release);
        match pulled.unwrap_or_else(|_| Err("fetching it failed; the log says why".to_owned())) {
            Ok(()) => tell(json!({"status": "success"})),
            Err(why) => tell(json!({"error": why})),
        }
    };
    if let Err(error) = std::thread::Builder::new().name("kiln pull".into()).spawn(work) {
        app.pulling.store(false, Ordering::Release);
        return Err(ApiError::internal(&error));
    }
    if streams {
        return Ok(leftover.tell(lines(from)));
    }
    let mut last = json!({"error": "the model was not fetched"});
    while let Some(line) = from.recv().await {
        last = line;
    }
    match last.get("error").and_then(Value::as_str) {
        Some(why) => Err(ApiError::new(Kind::Invalid, why)),
        None => Ok(leftover.tell(reply(&last))),
    }
}

/// Lines of JSON as they come.
fn lines(from: UnboundedReceiver<Value>) -> Response {
    let next = |mut from: UnboundedReceiver<Value>| async {
        let line = from.recv().await?;
        Some((Ok::<_, Infallible>(format!("{line}\n")), from))
    };
    let mut response = Reply::from_stream(futures_util::stream::unfold(from, next)).into_response();
    response.headers_mut().insert(header::CONTENT_TYPE, HeaderValue::from_static("application/x-ndjson"));
    response
}

/// `DELETE /api/delete`.
pub(crate) async fn delete(State(app): State<Arc<App>>, mut body: Body) -> Result<Response, ApiError> {
    let (fields, store) = (body.get::<Fields>()?, store(&app)?);
    let name = fields.name()?;
    let asked = name.clone();
    let removed = tokio::task::spawn_blocking(move || store.remove(&asked)).await;
    match removed.map_err(|error| ApiError::internal(&error))? {
        Ok(true) => Ok(reply(&json!({"status": "success"}))),
        Ok(false) => Err(ApiError::new(Kind::Model, format!("model {name:?} not found"))),
        Err(why) => Err(ApiError::new(Kind::Invalid, why)),
    }
}
