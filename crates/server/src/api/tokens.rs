//! Text to tokens and back, and prompts as the template makes them: `/tokenize`, `/detokenize`, `/apply-template`,
//! `/v1/chat/completions/input_tokens`.

use std::sync::Arc;

use axum::extract::State;
use axum::response::Response;
use kiln_engine::tokenizer::{AddSpecial, ParseSpecial, ShowSpecial};
use schemars::JsonSchema;
use serde::Deserialize;
use serde_json::{Value, json};

use super::{chat_completions, token_text};
use crate::app::App;
use crate::body::Body;
use crate::refusal::Refusal;
use crate::seats::blocking;
use crate::wire::json as reply;

#[derive(Debug, Default, Deserialize, JsonSchema)]
#[serde(default)]
#[schemars(rename = "Tokenize")]
pub(crate) struct Tokenize {
    model: Option<String>,
    /// llama.cpp's way.
    content: Option<String>,
    add_special: Option<bool>,
    parse_special: Option<bool>,
    with_pieces: Option<bool>,
    /// vLLM's way.
    prompt: Option<String>,
    messages: Option<Value>,
    add_special_tokens: Option<bool>,
    return_token_strs: Option<bool>,
}

/// Text to tokens; which API is spoken is told by the field that holds the text.
pub(crate) async fn tokenize(State(app): State<Arc<App>>, mut body: Body) -> Result<Response, Refusal> {
    let fields = body.get::<Tokenize>()?;
    let chat = body.get::<chat_completions::Fields>()?;
    let value = blocking(&app, move |app| {
        let loaded = app.model(fields.model.as_deref())?;
        let tokenizer = &loaded.scheduler.model().tokenizer;
        let add = |wanted: bool| if wanted { AddSpecial::Yes } else { AddSpecial::No };
        let parse = if fields.parse_special.unwrap_or(true) { ParseSpecial::Yes } else { ParseSpecial::No };
        if let Some(content) = &fields.content {
            let tokens = tokenizer.encode(content, add(fields.add_special.unwrap_or(false)), parse);
            let tokens = tokens.map_err(kiln_engine::Error::from)?;
            if fields.with_pieces != Some(true) {
                return Ok(json!({"tokens": tokens}));
            }
            let piece = |id: &u32| {
                let bytes = tokenizer.piece(*id).unwrap_or_default();
                let piece = std::str::from_utf8(bytes).map_or_else(|_| json!(bytes), |text| json!(text));
                json!({"id": id, "piece": piece})
            };
            return Ok(json!({"tokens": tokens.iter().map(piece).collect::<Vec<_>>()}));
        }
        let tokens = match (&fields.prompt, &fields.messages) {
            (Some(prompt), _) => {
                let tokens = tokenizer.encode(prompt, add(fields.add_special_tokens.unwrap_or(true)), parse);
                tokens.map_err(kiln_engine::Error::from)?
            }
            (None, Some(_)) => chat.chat()?.tokens(&loaded)?.0,
            (None, None) => {
                return Err(Refusal::invalid("content", "one of `content`, `prompt` and `messages` is wanted"));
            }
        };
        let count = tokens.len();
        let mut value = json!({"count": count, "max_model_len": loaded.scheduler.context(), "tokens": tokens});
        if fields.return_token_strs == Some(true) {
            value["token_strs"] = tokens.iter().map(|id| json!(token_text(tokenizer, *id))).collect();
        }
        Ok(value)
    })
    .await?;
    Ok(reply(&value))
}

#[derive(Debug, Default, Deserialize, JsonSchema)]
#[serde(default)]
#[schemars(rename = "Detokenize")]
pub(crate) struct Detokenize {
    model: Option<String>,
    tokens: Option<Vec<u32>>,
}

/// Tokens to text.
pub(crate) async fn detokenize(State(app): State<Arc<App>>, mut body: Body) -> Result<Response, Refusal> {
    let fields = body.get::<Detokenize>()?;
    let loaded = blocking(&app, move |app| app.model(fields.model.as_deref())).await?;
    let tokens = fields.tokens.ok_or_else(|| Refusal::invalid("tokens", "`tokens` is missing"))?;
    let text = loaded.scheduler.model().tokenizer.decode(&tokens, ShowSpecial::Yes);
    let text = text.map_err(|error| Refusal::invalid("tokens", error.to_string()))?;
    Ok(reply(&json!({"content": text, "prompt": text})))
}

/// The prompt that a conversation becomes.
pub(crate) async fn apply_template(State(app): State<Arc<App>>, mut body: Body) -> Result<Response, Refusal> {
    let fields = body.get::<chat_completions::Fields>()?;
    let text = blocking(&app, move |app| {
        let loaded = app.model(fields.model.as_deref())?;
        Ok(fields.chat()?.render(&loaded)?.plain())
    })
    .await?;
    Ok(reply(&json!({"prompt": text})))
}

/// How many tokens a conversation is.
pub(crate) async fn count_chat(State(app): State<Arc<App>>, mut body: Body) -> Result<Response, Refusal> {
    let fields = body.get::<chat_completions::Fields>()?;
    let tokens = blocking(&app, move |app| {
        let loaded = app.model(fields.model.as_deref())?;
        Ok(fields.chat()?.tokens(&loaded)?.0.len())
    })
    .await?;
    Ok(reply(&json!({"object": "response.input_tokens", "input_tokens": tokens})))
}
