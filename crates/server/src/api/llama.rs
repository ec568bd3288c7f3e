//! What llama-server's own clients ask about the server: `/props`, `/slots`.

use std::sync::Arc;

use axum::Extension;
use axum::extract::{Path, Query, State};
use axum::response::Response;
use kiln_engine::media::Medium;
use kiln_engine::run::StopRule;
use schemars::JsonSchema;
use serde::Deserialize;
use serde_json::{Value, json};

use super::{completion, token_text};
use crate::api_error::{ApiError, Kind};
use crate::app::App;
use crate::body::Body;
use crate::encoder::json as reply;
use crate::guard::Caller;
use crate::prep_pool::blocking;
use crate::registry::Loaded;
use crate::slots::{self, Seen};

fn settings(loaded: &Loaded) -> Value {
    let params = completion::settings(loaded, &loaded.setup.sampling, loaded.limit, &StopRule::default());
    json!({"n_ctx": loaded.scheduler.context(), "params": params})
}

/// What the server can do. Asking wakes no model: of one that is not loaded little is told.
pub(crate) async fn props(State(app): State<Arc<App>>) -> Result<Response, ApiError> {
    let asleep = app.registry.places().first().filter(|place| app.not_ready().is_none() && place.can_load());
    let loaded = match (app.loaded(), asleep) {
        (Err(_), Some(place)) => {
            return Ok(reply(&json!({
                "default_generation_settings": {"n_ctx": 0, "params": {}}, "total_slots": 0, "model_alias": place.name,
                "model_path": place.name, "chat_template": "", "chat_template_caps": {},
                "modalities": {"vision": false, "audio": false}, "bos_token": "", "eos_token": "",
                "build_info": format!("kiln {}", env!("CARGO_PKG_VERSION")), "is_sleeping": true,
            })));
        }
        (loaded, _) => loaded?,
    };
    let tokenizer = &loaded.scheduler.model().tokenizer;
    let text = |id: Option<u32>| id.map(|id| token_text(tokenizer, id)).unwrap_or_default();
    let template = loaded.setup.template.as_ref().ok();
    let caps = template.map(|t| {
        let caps = t.capabilities();
        json!({
            "supports_system_role": caps.system, "supports_tools": caps.tools, "supports_tool_calls": caps.tool_calls,
            "supports_parallel_tool_calls": caps.parallel_calls, "supports_typed_content": caps.part_content,
        })
    });
    Ok(reply(&json!({
        "default_generation_settings": settings(&loaded),
        "total_slots": loaded.sequences,
        "model_alias": loaded.name,
        // Paths reveal details of the machine, so they are only shown if the operator allows it.
        "model_path": app.settings.shown_path.as_ref().map_or(loaded.name.clone(), |path| path.display().to_string()),
        "chat_template": template.map(|t| t.source()).unwrap_or_default(),
        "chat_template_caps": caps,
        "modalities": {"vision": loaded.takes(Medium::Picture), "audio": loaded.takes(Medium::Sound)},
        "bos_token": text(tokenizer.vocab().bos),
        "eos_token": text(tokenizer.vocab().eos),
        "build_info": format!("kiln {}", env!("CARGO_PKG_VERSION")),
        "is_sleeping": false,
    })))
}

/// Flags of `/slots`.
#[derive(Debug, Default, Deserialize)]
pub(crate) struct SlotsQuery {
    fail_on_no_slot: Option<String>,
}

/// What is being written under which number: no text of it, and what it was asked for only to those who asked.
pub(crate) async fn slots(
    State(app): State<Arc<App>>,
    Extension(caller): Extension<Caller>,
    Query(query): Query<SlotsQuery>,
) -> Result<Response, ApiError> {
    if app.settings.hides_slots {
        return Err(ApiError::new(
            Kind::CannotDo,
            "slots are not shown here\nhint: start the server without --no-slots",
        ));
    }
    let loaded = app.loaded()?;
    let load = loaded.scheduler.load();
    let busy = load.reading + load.writing + load.swapped;
    if query.fail_on_no_slot.is_some_and(|flag| flag == "1") && busy >= loaded.sequences {
        return Err(ApiError::new(Kind::Unavailable, "no slot is free"));
    }
    let slot = |(id, slot): (usize, Seen)| {
        let limit = slot.wish.as_ref().and_then(|wish| wish.limit);
        let left = limit.map_or(json!(-1), |limit| json!(limit.saturating_sub(slot.written)));
        let params = slot.wish.map(|wish| completion::settings(&loaded, &wish.sampling, wish.limit, &wish.stop));
        let mut told = json!({
            "id": id, "id_task": slot.task.map_or(json!(-1), |task| json!(task)), "n_ctx": loaded.scheduler.context(),
            "is_processing": slot.running, "speculative": false,
            "next_token": {"has_next_token": slot.running, "n_decoded": slot.written, "n_remain": left},
        });
        if let Some(params) = params {
            told["params"] = params;
        }
        told
    };
    Ok(reply(&loaded.slots.seen(caller.owner).into_iter().enumerate().map(slot).collect()))
}

/// Flags of `/slots/{id}`.
#[derive(Debug, Default, Deserialize)]
pub(crate) struct SlotQuery {
    action: Option<String>,
}

#[derive(Debug, Default, Deserialize, JsonSchema)]
#[serde(default)]
#[schemars(rename = "SlotRequest")]
pub(crate) struct SlotFields {
    model: Option<String>,
    filename: Option<String>,
}

/// `POST /slots/{id}?action=save|restore|erase`.
pub(crate) async fn slot(
    State(app): State<Arc<App>>,
    Extension(caller): Extension<Caller>,
    Path(id): Path<usize>,
    Query(query): Query<SlotQuery>,
    mut body: Body,
) -> Result<Response, ApiError> {
    let fields = body.get::<SlotFields>()?;
    let value = blocking(&app, move |app| {
        let loaded = app.model(fields.model.as_deref())?;
        let name = fields.filename.as_deref().unwrap_or_default();
        let own = caller.key.as_ref().filter(|_| !app.settings.shared_cache);
        let key = own.map(|holder| holder.key.secret.as_str());
        let folder = &slots::Folder::of(app.settings.slots_folder.as_deref(), key);
        match query.action.as_deref() {
            Some("save") => slots::save(&loaded, id, caller.owner, folder, name),
            Some("restore") => slots::restore(&loaded, id, caller.owner, folder, name),
            Some("erase") => slots::erase(&loaded, id, caller.owner),
            _ => Err(ApiError::invalid("action", "`action` must be save, restore or erase")),
        }
    });
    Ok(reply(&value.await?))
}
