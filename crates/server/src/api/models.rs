//! `GET /v1/models`: one body that OpenAI's, Anthropic's, vLLM's and llama.cpp's clients understand.

use std::sync::Arc;

use axum::extract::{Path, State};
use axum::response::Response;
use kiln_engine::media::Medium;
use serde_json::{Value, json};

use crate::api_error::{ApiError, Kind};
use crate::app::App;
use crate::encoder::json as reply;
use crate::registry::{Loaded, ModelEntry};

/// A time as RFC 3339 has it.
pub(crate) fn rfc3339(seconds: u64) -> String {
    let time = i64::try_from(seconds).ok().and_then(|s| jiff::Timestamp::from_second(s).ok());
    time.map(|t| t.to_string()).unwrap_or_default()
}

/// Number of weights.
pub(crate) fn parameters(loaded: &Loaded) -> u64 {
    loaded.scheduler.model().gguf.tensors().iter().map(|t| t.n_elements() as u64).sum()
}

/// What is told of a model; more where it is loaded. Asking wakes none.
fn entry(app: &App, place: &ModelEntry) -> Value {
    let (id, loaded) = (&place.name, place.peek());
    let created = loaded.as_ref().map_or(app.created, |loaded| loaded.created);
    let mut entry = json!({
        "id": id, "object": "model", "type": "model", "created": created, "created_at": rfc3339(created),
        "display_name": id, "owned_by": "kiln", "aliases": place.names(), "tags": app.settings.tags, "status": {"value": if loaded.is_some() { "loaded" } else { "unloaded" }},
    });
    if let Some(loaded) = loaded {
        let model = loaded.scheduler.model();
        let more = [(Medium::Picture, "image"), (Medium::Sound, "audio")].into_iter();
        let more = more.filter(|(medium, _)| loaded.takes(*medium)).map(|(_, name)| name);
        let input: Vec<&str> = std::iter::once("text").chain(more).collect();
        let multimodal = (input.len() > 1).then_some("multimodal");
        entry["architecture"] = json!({"input_modalities": input, "output_modalities": ["text"]});
        entry["capabilities"] = json!(std::iter::once("completion").chain(multimodal).collect::<Vec<_>>());
        entry["max_model_len"] = json!(loaded.scheduler.context());
        entry["meta"] = json!({
            "n_ctx_train": model.config.context, "n_vocab": model.config.vocab, "n_embd": model.config.hidden,
            "n_params": parameters(&loaded), "size": model.gguf.data_bytes(),
        });
    }
    entry
}

/// All models.
pub(crate) async fn list(State(app): State<Arc<App>>) -> Result<Response, ApiError> {
    if let Some(why) = app.not_ready() {
        return Err(ApiError::new(Kind::Unavailable, why));
    }
    let places = app.registry.places();
    let mut entries: Vec<Value> = places.iter().map(|place| entry(&app, place)).collect();
    // Adapters with names are models of their own to clients.
    for adapter in &app.settings.request_defaults.adapters {
        let parent = places.first().map(|place| &place.name);
        entries.push(json!({
            "id": adapter.name, "object": "model", "type": "model", "created": app.created, "created_at": rfc3339(app.created),
            "display_name": adapter.name, "owned_by": "kiln", "parent": parent, "root": adapter.name,
        }));
    }
    let [first, last] = [places.first(), places.last()].map(|place| place.map(|place| &place.name));
    Ok(reply(
        &json!({"object": "list", "data": entries, "first_id": first, "last_id": last, "has_more": false, "models": []}),
    ))
}

/// One model by its name. Names may hold slashes.
pub(crate) async fn get(State(app): State<Arc<App>>, Path(id): Path<String>) -> Result<Response, ApiError> {
    Ok(reply(&entry(&app, app.registry.place_named(Some(&id))?)))
}
