//! `/lora-adapters`: which adapters the model has, and how strongly each counts for requests that do not say, in llama-server's
//! words. The field `lora` of a request says it for that request alone.

use std::sync::{Arc, PoisonError};

use axum::extract::State;
use axum::response::Response;
use schemars::JsonSchema;
use serde::Deserialize;
use serde_json::{Value, json};

use crate::api_error::ApiError;
use crate::app::App;
use crate::body::List;
use crate::encoder::json as reply;
use crate::registry::Loaded;

/// One adapter, and how strongly it counts.
#[derive(Clone, Debug, Deserialize, JsonSchema)]
pub(crate) struct Scale {
    id: usize,
    scale: f32,
}

/// The scales of all adapters: those that a list does not name do not count.
pub(crate) fn scales(loaded: &Loaded, field: &str, list: &[Scale]) -> Result<Vec<f32>, ApiError> {
    let count = loaded.scheduler.model().adapters().len();
    let mut scales = vec![0.0; count];
    for Scale { id, scale } in list {
        let Some(of) = scales.get_mut(*id) else {
            let message = format!("there is no adapter {id}: the model has {count}, numbered from 0 (--lora)");
            return Err(ApiError::invalid(field, message));
        };
        if !scale.is_finite() {
            return Err(ApiError::invalid(field, format!("the scale of adapter {id} is {scale}, which is no number")));
        }
        *of = *scale;
    }
    Ok(scales)
}

/// The scales of requests that do not say any.
fn request_defaults(loaded: &Loaded) -> Vec<f32> {
    let set = loaded.scales.lock().unwrap_or_else(PoisonError::into_inner);
    set.clone().unwrap_or_else(|| loaded.scheduler.model().scales())
}

/// The scales of a request that picks this adapter: the others count as for all requests.
pub(crate) fn with_one(loaded: &Loaded, number: usize) -> Vec<f32> {
    let mut scales = request_defaults(loaded);
    scales.iter_mut().skip(number).take(1).for_each(|scale| *scale = 1.0);
    scales
}

/// The adapters there are.
pub(crate) async fn list(State(app): State<Arc<App>>) -> Result<Response, ApiError> {
    let loaded = app.loaded()?;
    let scales = request_defaults(&loaded);
    let adapters = loaded.scheduler.model().adapters();
    let one = |(id, adapter): (usize, &kiln_engine::model::Adapter)| json!({"id": id, "path": adapter.path, "scale": scales[id]});
    Ok(reply(&adapters.iter().enumerate().map(one).collect::<Value>()))
}

/// From now on adapters count so, for requests that do not say.
pub(crate) async fn set(State(app): State<Arc<App>>, List(list): List<Scale>) -> Result<Response, ApiError> {
    let loaded = app.loaded()?;
    let scales = scales(&loaded, "scale", &list)?;
    *loaded.scales.lock().unwrap_or_else(PoisonError::into_inner) = Some(scales);
    Ok(reply(&json!({"success": true})))
}
