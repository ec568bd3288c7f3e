//! The engine as it runs, for the page and `kiln top`: `/engine` is asked often and costs nothing, `/engine/kernels` runs one step.

use std::sync::Arc;
use std::time::{Duration, Instant};

use axum::extract::{Query, State};
use axum::response::Response;
use kiln_engine::run::{Engine, Entry, StepKind, StepTime, Wanted, step_kinds};
use serde::Deserialize;
use serde_json::{Value, json};

use crate::api_error::{ApiError, Kind};
use crate::app::App;
use crate::encoder::json as reply;
use crate::prep_pool::{blocking, release};
use crate::registry::{Loaded, ModelEntry};

/// How long a look at the memory is good for. Looking interrupts texts that go on by themselves on a device.
const MEMORY_KEPT: Duration = Duration::from_secs(5);
/// Cache scope of measurements: shared with no request.
const OWNER: u64 = u64::MAX;

fn memory(loaded: &Loaded) -> Value {
    // Another request may hold the lock while it waits for the engine.
    release();
    let mut seen = loaded.memory.lock().unwrap_or_else(std::sync::PoisonError::into_inner);
    if seen.is_none_or(|(at, _)| at.elapsed() > MEMORY_KEPT) {
        let found = loaded.scheduler.with_engine(|engine| engine.memory()).unwrap_or_default();
        *seen = Some((Instant::now(), found));
    }
    match seen.and_then(|(_, memory)| memory) {
        Some(memory) => {
            // The CPU's executor counts what can still be had; the kernel knows how much there is.
            let bound = kiln_system::memory::available().filter(|_| memory.total <= memory.free).map(|a| a.bound);
            let total = bound.and_then(kiln_system::memory::total).unwrap_or(0).max(memory.total);
            json!({"free": memory.free, "total": total, "place": memory.place})
        }
        None => Value::Null,
    }
}

/// Which model is looked at.
#[derive(Debug, Default, Deserialize)]
pub(crate) struct Which {
    model: Option<String>,
}

/// The place of the model that is named, else of one that is loaded, else of the first. Looking wakes none.
fn place<'a>(app: &'a App, which: &Which) -> Result<&'a ModelEntry, ApiError> {
    let named = which.model.as_deref().filter(|name| !name.is_empty());
    let loaded = app.registry.places().iter().find(|place| place.peek().is_some());
    match (named, loaded) {
        (None, Some(place)) => Ok(place),
        _ => app.registry.place_named(named),
    }
}

/// What the engine is doing.
pub(crate) async fn show(State(app): State<Arc<App>>, Query(which): Query<Which>) -> Result<Response, ApiError> {
    // Connections and what they wait for: an idle server has few again.
    let tasks = tokio::runtime::Handle::current().metrics().num_alive_tasks();
    let seen = blocking(&app, move |app| {
        let place = place(app, &which)?;
        let loaded = place.peek();
        let scheduler = loaded.as_ref().map(|loaded| &loaded.scheduler);
        let load = scheduler.map(|scheduler| scheduler.load()).unwrap_or_default();
        let [prompt, cached, generated] = place.metrics.tokens();
        Ok(json!({
            "model": place.name, "loaded": loaded.is_some(),
            "device": scheduler.map_or("no device: the model is not loaded", |scheduler| scheduler.describe()),
            "context": scheduler.map_or(0, |scheduler| scheduler.context()),
            "sequences": loaded.as_ref().map_or(0, |loaded| loaded.sequences), "uptime_seconds": app.started.elapsed().as_secs(),
            "load": {
                "waiting": load.waiting, "reading": load.reading, "writing": load.writing, "swapped": load.swapped,
                "free_pages": load.free_pages, "pages": load.pages,
            },
            "tokens": {"prompt": prompt, "cached": cached, "generated": generated},
            "memory": loaded.as_ref().map_or(Value::Null, |loaded| memory(loaded)), "tasks": tasks,
        }))
    });
    Ok(reply(&seen.await?))
}

/// One token through the model, each step timed.
fn step(engine: &mut Engine) -> Result<Vec<StepTime>, kiln_engine::Error> {
    let token = engine.model().tokenizer.vocab().bos.unwrap_or_default();
    let sequence = engine.open(OWNER)?;
    let times = engine.profile(&[Entry { sequence, tokens: &[token], wanted: Wanted::Last }]);
    engine.close(sequence);
    times
}

/// Where the time of one token goes, by kind of step, the longest first.
pub(crate) async fn kernels(State(app): State<Arc<App>>, Query(which): Query<Which>) -> Result<Response, ApiError> {
    let times = blocking(&app, move |app| {
        let place = place(app, &which)?;
        let missing = || ApiError::new(Kind::Unavailable, format!("the model `{}` is not loaded", place.name));
        release();
        Ok(place.peek().ok_or_else(missing)?.scheduler.with_engine(step)??)
    })
    .await?;
    let micros = |time: Duration| time.as_secs_f64() * 1e6;
    let (steps, total) = (times.len(), times.iter().map(|step| micros(step.time)).sum::<f64>());
    let told = |StepKind { name, count, time, .. }: StepKind| json!({"name": name, "count": count, "microseconds": micros(time)});
    let kernels: Vec<Value> = step_kinds(times).into_iter().map(told).collect();
    Ok(reply(&json!({"steps": steps, "microseconds": total, "kernels": kernels})))
}
