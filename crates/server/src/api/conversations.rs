//! `/conversations`: what the page keeps on the server, where the operator named a folder for it.

use std::sync::Arc;

use axum::Extension;
use axum::extract::{Path, State};
use axum::http::header;
use axum::response::{IntoResponse as _, Response};
use serde_json::{Map, Value, json};
use sha2::{Digest as _, Sha256};

use crate::api_error::{ApiError, Kind};
use crate::app::App;
use crate::body::Body;
use crate::conversations::{Conversations, Kept};
use crate::encoder::json as reply;
use crate::guard::Caller;

/// Whose conversations a caller finds: those of its key, also where keys share what was computed.
fn owner(caller: &Caller) -> Option<u64> {
    caller.key.as_ref().map(|holder| holder.owner)
}

/// Where conversations are kept. Pages that merely come from this machine have no business with what was said to another one.
fn kept<'a>(app: &'a App, caller: &Caller) -> Result<&'a Conversations, ApiError> {
    if !caller.is_own_page {
        return Err(ApiError::new(Kind::Forbidden, "pages of other origins may not read conversations"));
    }
    let none = "conversations are not kept here\nhint: start the server with --conversations FOLDER";
    app.conversations.as_ref().ok_or_else(|| ApiError::new(Kind::CannotDo, none))
}

/// Files are read and written off the threads that serve connections.
async fn apart<T: Send + 'static>(
    app: &Arc<App>,
    caller: &Caller,
    work: impl FnOnce(&Conversations, Option<u64>) -> Result<T, ApiError> + Send + 'static,
) -> Result<T, ApiError> {
    kept(app, caller)?;
    let (app, caller) = (Arc::clone(app), caller.clone());
    let done = tokio::task::spawn_blocking(move || work(kept(&app, &caller)?, owner(&caller))).await;
    done.map_err(|error| ApiError::internal(&error))?
}

/// `GET /conversations`.
pub(crate) async fn list(
    State(app): State<Arc<App>>,
    Extension(caller): Extension<Caller>,
) -> Result<Response, ApiError> {
    if app.conversations.is_none() {
        return Ok(reply(&json!({"object": "list", "kept": false, "folder": null, "data": []})));
    }
    let heads = apart(&app, &caller, Conversations::list).await?;
    // A browser knows by this whether it speaks to the same folder with the same key as before.
    let folder = app.settings.conversations.as_ref().map(|folder| folder.to_string_lossy().into_owned());
    let mark = Sha256::digest(format!("kiln conversations {:?} {folder:?}", owner(&caller)).as_bytes());
    let number: String = mark[..8].iter().map(|byte| format!("{byte:02x}")).collect();
    Ok(reply(&json!({"object": "list", "kept": true, "folder": number, "data": heads})))
}

/// `GET /conversations/ID`.
pub(crate) async fn find(
    State(app): State<Arc<App>>,
    Extension(caller): Extension<Caller>,
    Path(id): Path<String>,
) -> Result<Response, ApiError> {
    let found = apart(&app, &caller, move |all, owner| all.find(owner, &id)).await?;
    let found = found.ok_or_else(|| ApiError::new(Kind::Route, "there is no such conversation"))?;
    Ok(([(header::CONTENT_TYPE, "application/json")], found).into_response())
}

/// `PUT /conversations/ID`.
pub(crate) async fn keep(
    State(app): State<Arc<App>>,
    Extension(caller): Extension<Caller>,
    Path(id): Path<String>,
    mut body: Body,
) -> Result<Response, ApiError> {
    let talk = Value::Object(body.get::<Map<String, Value>>()?);
    let kept = apart(&app, &caller, move |all, owner| all.keep(owner, &id, &talk)).await?;
    Ok(reply(&json!({"kept": kept == Kept::Yes})))
}

/// `DELETE /conversations/ID`.
pub(crate) async fn remove(
    State(app): State<Arc<App>>,
    Extension(caller): Extension<Caller>,
    Path(id): Path<String>,
) -> Result<Response, ApiError> {
    let removed = apart(&app, &caller, move |all, owner| all.remove(owner, &id)).await?;
    Ok(reply(&json!({"deleted": removed})))
}
