//! `/v1/responses/ID`: responses that are kept, for those who come back to them.

use std::sync::Arc;

use axum::Extension;
use axum::extract::{Path, Query, State};
use axum::response::Response;
use serde::Deserialize;
use serde_json::{Value, json};

use crate::api_error::{ApiError, Kind};
use crate::app::App;
use crate::encoder::json as reply;
use crate::guard::Caller;
use crate::response_store::Owner;

/// Whose responses a caller finds.
pub(crate) fn owner(app: &App, caller: &Caller) -> Owner {
    let secret = caller.key.as_ref().map(|holder| holder.key.secret.as_str());
    app.responses.owner(secret)
}

fn missing(id: &str) -> ApiError {
    ApiError::new(
        Kind::Route,
        format!("there is no response {id:?}; it was not stored, has expired or made room for others"),
    )
}

/// What a client may ask of a response.
#[derive(Debug, Default, Deserialize)]
#[serde(default)]
pub(crate) struct Retrieve {
    stream: Option<String>,
}

/// `GET /v1/responses/ID`.
pub(crate) async fn retrieve(
    State(app): State<Arc<App>>,
    Extension(caller): Extension<Caller>,
    Path(id): Path<String>,
    Query(asked): Query<Retrieve>,
) -> Result<Response, ApiError> {
    if asked.stream.as_deref() == Some("true") {
        return Err(ApiError::unsupported("stream", "a response that is kept is given whole"));
    }
    let response = app.responses.response(owner(&app, &caller), &id).ok_or_else(|| missing(&id))?;
    Ok(reply(&response))
}

/// `DELETE /v1/responses/ID`.
pub(crate) async fn remove(
    State(app): State<Arc<App>>,
    Extension(caller): Extension<Caller>,
    Path(id): Path<String>,
) -> Result<Response, ApiError> {
    if !app.responses.remove(owner(&app, &caller), &id) {
        return Err(missing(&id));
    }
    Ok(reply(&json!({"id": id, "object": "response", "deleted": true})))
}

/// `POST /v1/responses/ID/cancel`: only what runs in the background can be cancelled, and nothing does.
pub(crate) async fn cancel(
    State(app): State<Arc<App>>,
    Extension(caller): Extension<Caller>,
    Path(id): Path<String>,
) -> Result<Response, ApiError> {
    app.responses.response(owner(&app, &caller), &id).ok_or_else(|| missing(&id))?;
    Err(ApiError::new(
        Kind::Invalid,
        "only responses that run in the background can be cancelled, and this one has ended",
    ))
}

/// Which items, and how many of them.
#[derive(Debug, Default, Deserialize)]
#[serde(default)]
pub(crate) struct Page {
    after: Option<String>,
    limit: Option<usize>,
    order: Option<String>,
}

/// `GET /v1/responses/ID/input_items`: what a response was made from, the last first unless asked otherwise.
pub(crate) async fn input_items(
    State(app): State<Arc<App>>,
    Extension(caller): Extension<Caller>,
    Path(id): Path<String>,
    Query(page): Query<Page>,
) -> Result<Response, ApiError> {
    let mut items = app.responses.input(owner(&app, &caller), &id).ok_or_else(|| missing(&id))?;
    match page.order.as_deref() {
        None | Some("desc") => items.reverse(),
        Some("asc") => {}
        Some(other) => return Err(ApiError::invalid("order", format!("`order` is {other:?}; it must be asc or desc"))),
    }
    if let Some(after) = &page.after {
        let at = items.iter().position(|item| item["id"] == after.as_str());
        let at = at.ok_or_else(|| ApiError::invalid("after", format!("there is no item {after:?}")))?;
        items.drain(..=at);
    }
    let limit = page.limit.unwrap_or(20);
    if !(1..=100).contains(&limit) {
        return Err(ApiError::invalid("limit", format!("`limit` is {limit}; it must be 1 to 100")));
    }
    let has_more = items.len() > limit;
    items.truncate(limit);
    let [first, last] = [items.first(), items.last()].map(|item| item.map_or(Value::Null, |item| item["id"].clone()));
    Ok(reply(&json!({"object": "list", "data": items, "first_id": first, "last_id": last, "has_more": has_more})))
}
