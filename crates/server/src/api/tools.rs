//! `GET /tools` and `POST /tools/call`: the tools that the operator has given to this server, for its page and for other programs that ask a
//! person before each call. The loop of a model that calls them by itself is `response_tools`.

use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::Instant;

use axum::Extension;
use axum::extract::State;
use axum::response::Response;
use kiln_tools::{Listing, Toolbox, Wait};
use schemars::JsonSchema;
use serde::Deserialize;
use serde_json::{Value, json};

use crate::api_error::{ApiError, Kind};
use crate::app::App;
use crate::body::Body;
use crate::encoder::json as reply;
use crate::guard::Caller;
use crate::prep_pool::SetWhenDropped;

/// A call.
#[derive(Debug, Default, Deserialize, JsonSchema)]
#[serde(default)]
#[schemars(rename = "ToolCallRequest")]
pub(crate) struct Fields {
    /// The tool, as `GET /tools` names it.
    name: Option<String>,
    /// Its arguments: an object, or a text that holds one.
    arguments: Option<Value>,
    /// What the person who allowed the call saw; where the tool is another one now, it is not called.
    fingerprint: Option<String>,
}

/// The tools of this server, for those who may have them. Pages that merely come from this machine may use its models; tools do things.
pub(crate) fn toolbox(app: &App, caller: &Caller) -> Result<Arc<Toolbox>, ApiError> {
    let toolbox = app.settings.tools.clone().filter(|toolbox| !toolbox.is_empty());
    let none = "this server has no tools\nhint: --mcp, --tool-calculator and --tool-folder give it some";
    let toolbox = toolbox.ok_or_else(|| ApiError::new(Kind::CannotDo, none))?;
    if !caller.is_own_page {
        let message =
            "pages of other origins may not use the tools of this server\nhint: --allow-origin names those that may";
        return Err(ApiError::new(Kind::Forbidden, message));
    }
    Ok(toolbox)
}

/// What there is now. Servers may have to be started, which takes time.
pub(crate) async fn listing(toolbox: &Arc<Toolbox>) -> Result<Listing, ApiError> {
    let toolbox = Arc::clone(toolbox);
    tokio::task::spawn_blocking(move || toolbox.tools()).await.map_err(|error| ApiError::internal(&error))
}

/// `GET /tools`.
pub(crate) async fn list(
    State(app): State<Arc<App>>,
    Extension(caller): Extension<Caller>,
) -> Result<Response, ApiError> {
    let toolbox = match toolbox(&app, &caller) {
        Ok(toolbox) => toolbox,
        Err(refusal) if refusal.kind == Kind::CannotDo => {
            return Ok(reply(&json!({"object": "list", "data": [], "problems": [], "limits": null})));
        }
        Err(refusal) => return Err(refusal),
    };
    let (listing, limits) = (listing(&toolbox).await?, toolbox.limits());
    let tools: Vec<Value> = listing
        .tools
        .iter()
        .map(|tool| {
            json!({
                "name": tool.name, "server": tool.server, "tool": tool.own_name, "description": tool.description,
                "parameters": tool.parameters, "approval": tool.approval, "fingerprint": tool.fingerprint(),
            })
        })
        .collect();
    let problems: Vec<Value> =
        listing.problems.iter().map(|problem| json!({"server": problem.server, "why": problem.why})).collect();
    let limits = json!({
        "turns": limits.turns, "calls": limits.calls, "call_seconds": limits.call_time.as_secs_f64(),
        "total_seconds": limits.total_time.as_secs_f64(), "output_bytes": limits.output,
    });
    Ok(reply(&json!({"object": "list", "data": tools, "problems": problems, "limits": limits})))
}

/// `POST /tools/call`.
pub(crate) async fn call(
    State(app): State<Arc<App>>,
    Extension(caller): Extension<Caller>,
    mut body: Body,
) -> Result<Response, ApiError> {
    let fields = body.get::<Fields>()?;
    let leftover = body.leftover(&app)?;
    let toolbox = toolbox(&app, &caller)?;
    let _counted = caller.key.as_ref().map(|holder| holder.count()).transpose()?;
    let name = fields.name.ok_or_else(|| ApiError::invalid("name", "`name` is missing"))?;
    let arguments = match fields.arguments {
        None => String::new(),
        Some(Value::String(text)) => text,
        Some(value) => value.to_string(),
    };
    let listing = listing(&toolbox).await?;
    let missing = || ApiError::invalid("name", format!("there is no tool {name:?}; GET /tools lists them"));
    let tool = listing.find(&name).ok_or_else(missing)?.clone();
    if fields.fingerprint.is_some_and(|seen| seen != tool.fingerprint()) {
        let message = "the tool is another one than the one that was allowed: its server has changed it";
        return Err(ApiError::invalid("fingerprint", message));
    }
    log::info!("{} calls {} of {:?}", caller.request, tool.own_name, tool.server);
    // A client that goes does not wait for the result any more.
    let gone = Arc::<AtomicBool>::default();
    let _set = SetWhenDropped(Arc::clone(&gone));
    let began = Instant::now();
    let work = move || {
        let until = Instant::now() + toolbox.limits().call_time;
        toolbox.call(&tool, &arguments, &Wait { until, cancelled: &|| gone.load(Ordering::Relaxed) })
    };
    let output = tokio::task::spawn_blocking(work).await.map_err(|error| ApiError::internal(&error))?;
    let answer = json!({
        "content": output.parts, "text": output.for_model(), "is_error": output.is_error, "cut": output.cut,
        "seconds": began.elapsed().as_secs_f64(),
    });
    Ok(leftover.tell(reply(&answer)))
}
