//! `GET /v1/models`: one body that OpenAI's, Anthropic's, vLLM's and llama.cpp's clients understand.

use std::sync::Arc;

use axum::extract::{Path, State};
use axum::response::Response;
use serde_json::{Value, json};

use crate::app::{App, Loaded};
use crate::refusal::Refusal;
use crate::wire::json as reply;

/// A time as RFC 3339 has it.
pub(crate) fn rfc3339(seconds: u64) -> String {
    let time = i64::try_from(seconds).ok().and_then(|s| jiff::Timestamp::from_second(s).ok());
    time.map(|t| t.to_string()).unwrap_or_default()
}

/// Number of weights.
pub(crate) fn parameters(loaded: &Loaded) -> u64 {
    loaded.scheduler.model().gguf.tensors().iter().map(|t| t.n_elements() as u64).sum()
}

fn entry(app: &App, loaded: &Loaded) -> Value {
    let (model, id) = (loaded.scheduler.model(), &app.settings.model);
    json!({
        "id": id, "object": "model", "type": "model", "created": loaded.created,
        "created_at": rfc3339(loaded.created), "display_name": id, "owned_by": "kiln",
        "max_model_len": loaded.scheduler.context(),
        "meta": {
            "n_ctx_train": model.config.context, "n_vocab": model.config.vocab, "n_embd": model.config.hidden,
            "n_params": parameters(loaded), "size": model.gguf.data_bytes(),
        },
    })
}

/// All models, which is one.
pub(crate) async fn list(State(app): State<Arc<App>>) -> Result<Response, Refusal> {
    let entry = entry(&app, app.loaded()?);
    let id = &app.settings.model;
    Ok(reply(
        &json!({"object": "list", "data": [entry], "first_id": id, "last_id": id, "has_more": false, "models": []}),
    ))
}

/// One model by its name. Names may hold slashes.
pub(crate) async fn get(State(app): State<Arc<App>>, Path(id): Path<String>) -> Result<Response, Refusal> {
    let loaded = app.model(Some(&id))?;
    Ok(reply(&entry(&app, loaded)))
}
