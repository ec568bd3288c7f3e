//! The engine as it runs, for the page and `kiln top`: `/engine` is asked often and costs nothing, `/engine/kernels` runs one step.

use std::sync::Arc;
use std::time::{Duration, Instant};

use axum::extract::State;
use axum::response::Response;
use kiln_engine::run::{Engine, Entry, StepKind, StepTime, Wanted, step_kinds};
use serde_json::{Value, json};

use crate::app::App;
use crate::chat::blocking;
use crate::refusal::Refusal;
use crate::shelf::Loaded;
use crate::wire::json as reply;

/// How long a look at the memory is good for. Looking interrupts texts that go on by themselves on a device.
const MEMORY_KEPT: Duration = Duration::from_secs(5);
/// Nobody's requests: what is read while measuring is shared with none.
const OWNER: u64 = u64::MAX;

fn memory(loaded: &Loaded) -> Value {
    let mut seen = loaded.memory.lock().unwrap_or_else(std::sync::PoisonError::into_inner);
    if seen.is_none_or(|(at, _)| at.elapsed() > MEMORY_KEPT) {
        let found = loaded.scheduler.with_engine(|engine| engine.memory()).unwrap_or_default();
        *seen = Some((Instant::now(), found));
    }
    match seen.and_then(|(_, memory)| memory) {
        Some(memory) => {
            // On the CPU nobody knows more than what is left; what this process has was part of it.
            let taken = if memory.total > memory.free { 0 } else { kiln_system::memory::taken().unwrap_or_default() };
            json!({"free": memory.free, "total": memory.total + taken, "place": memory.place})
        }
        None => Value::Null,
    }
}

/// What the engine is doing.
pub(crate) async fn show(State(app): State<Arc<App>>) -> Result<Response, Refusal> {
    // Connections and what they wait for: a server that nobody uses any more has few again.
    let tasks = tokio::runtime::Handle::current().metrics().num_alive_tasks();
    let seen = blocking(&app, move |app| {
        let loaded = app.loaded()?;
        let load = loaded.scheduler.load();
        let [prompt, cached, generated] = loaded.metrics.tokens();
        Ok(json!({
            "model": loaded.name, "device": loaded.scheduler.describe(), "context": loaded.scheduler.context(),
            "sequences": loaded.sequences, "uptime_seconds": app.started.elapsed().as_secs(),
            "load": {
                "waiting": load.waiting, "reading": load.reading, "writing": load.writing, "swapped": load.swapped,
                "free_pages": load.free_pages, "pages": load.pages,
            },
            "tokens": {"prompt": prompt, "cached": cached, "generated": generated},
            "memory": memory(&loaded), "tasks": tasks,
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
pub(crate) async fn kernels(State(app): State<Arc<App>>) -> Result<Response, Refusal> {
    let times = blocking(&app, |app| Ok(app.loaded()?.scheduler.with_engine(step)??)).await?;
    let micros = |time: Duration| time.as_secs_f64() * 1e6;
    let (steps, total) = (times.len(), times.iter().map(|step| micros(step.time)).sum::<f64>());
    let told = |StepKind { name, count, time, .. }: StepKind| json!({"name": name, "count": count, "microseconds": micros(time)});
    let kernels: Vec<Value> = step_kinds(times).into_iter().map(told).collect();
    Ok(reply(&json!({"steps": steps, "microseconds": total, "kernels": kernels})))
}
