//! Text to tokens and back, and prompts as the template makes them: `/tokenize`, `/detokenize`, `/apply-template`,
//! `/v1/chat/completions/input_tokens`.

use std::sync::Arc;

use axum::extract::State;
use axum::response::Response;
use kiln_engine::tokenizer::{AddSpecial, ParseSpecial, ShowSpecial};
use schemars::JsonSchema;
use serde::Deserialize;
use serde_json::{Value, json};

use super::{chat_completions, completions, token_text};
use crate::api_error::ApiError;
use crate::app::App;
use crate::body::Body;
use crate::encode::{Purpose, encode};
use crate::encoder::json as reply;
use crate::prep_pool::blocking;
use crate::registry::Loaded;

#[derive(Debug, Default, Deserialize, JsonSchema)]
#[serde(default)]
#[schemars(rename = "Tokenize")]
pub(crate) struct Tokenize {
    model: Option<String>,
    /// llama.cpp's way.
    content: Option<Value>,
    add_special: Option<bool>,
    parse_special: Option<bool>,
    with_pieces: Option<bool>,
    /// vLLM's way.
    prompt: Option<String>,
    messages: Option<Value>,
    add_special_tokens: Option<bool>,
    return_token_strs: Option<bool>,
}

/// llama.cpp's `content`: a text, or a list of texts and tokens.
fn mixed(loaded: &Loaded, content: &Value, add: AddSpecial, parse: ParseSpecial) -> Result<Vec<u32>, ApiError> {
    let wrong = || ApiError::invalid("content", "`content` must be a string or a list of strings and tokens");
    match content {
        Value::String(text) => encode(loaded, Purpose::Count, text, add, parse),
        Value::Array(pieces) => completions::piece_tokens(loaded, Purpose::Count, "content", pieces, add, parse),
        _ => Err(wrong()),
    }
}

/// What clients ask of a tokenizer, in vLLM's words, which are those of its file at Hugging Face.
pub(crate) async fn info(State(app): State<Arc<App>>) -> Result<Response, ApiError> {
    let loaded = blocking(&app, |app| app.model(None)).await?;
    let model = loaded.scheduler.model();
    let (tokenizer, vocab) = (&model.tokenizer, model.tokenizer.vocab());
    let named = |id: Option<u32>| id.map(|id| token_text(tokenizer, id));
    let context = loaded.scheduler.context().min(model.config.context);
    Ok(reply(&json!({
        "tokenizer_class": "PreTrainedTokenizerFast", "model": loaded.name, "model_max_length": context,
        "bos_token": named(vocab.bos), "eos_token": named(vocab.eos), "pad_token": named(vocab.pad), "unk_token": named(vocab.unk),
        "bos_token_id": vocab.bos, "eos_token_id": vocab.eos, "pad_token_id": vocab.pad, "unk_token_id": vocab.unk,
        "add_bos_token": vocab.add_bos, "add_eos_token": vocab.add_eos, "vocab_size": model.config.vocab,
        "chat_template": loaded.setup.template.as_ref().ok().map(|template| template.source()),
    })))
}

/// Text to tokens; which API is spoken is told by the field that holds the text.
pub(crate) async fn tokenize(State(app): State<Arc<App>>, mut body: Body) -> Result<Response, ApiError> {
    let fields = body.get::<Tokenize>()?;
    let chat = body.get::<chat_completions::Fields>()?;
    let value = blocking(&app, move |app| {
        let loaded = app.model(fields.model.as_deref())?;
        let tokenizer = &loaded.scheduler.model().tokenizer;
        let add = |wanted: bool| if wanted { AddSpecial::Yes } else { AddSpecial::No };
        let parse = if fields.parse_special.unwrap_or(true) { ParseSpecial::Yes } else { ParseSpecial::No };
        if let Some(content) = &fields.content {
            let tokens = mixed(&loaded, content, add(fields.add_special.unwrap_or(false)), parse)?;
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
                encode(&loaded, Purpose::Count, prompt, add(fields.add_special_tokens.unwrap_or(true)), parse)?
            }
            (None, Some(_)) => chat.chat()?.tokens(&loaded)?,
            (None, None) => {
                return Err(ApiError::invalid("content", "one of `content`, `prompt` and `messages` is wanted"));
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
pub(crate) async fn detokenize(State(app): State<Arc<App>>, mut body: Body) -> Result<Response, ApiError> {
    let fields = body.get::<Detokenize>()?;
    let loaded = blocking(&app, move |app| app.model(fields.model.as_deref())).await?;
    let tokens = fields.tokens.ok_or_else(|| ApiError::invalid("tokens", "`tokens` is missing"))?;
    let text = loaded.scheduler.model().tokenizer.decode(&tokens, ShowSpecial::Yes);
    let text = text.map_err(|error| ApiError::invalid("tokens", error.to_string()))?;
    Ok(reply(&json!({"content": text, "prompt": text})))
}

/// The prompt that a conversation becomes.
pub(crate) async fn apply_template(State(app): State<Arc<App>>, mut body: Body) -> Result<Response, ApiError> {
    let fields = body.get::<chat_completions::Fields>()?;
    let text = blocking(&app, move |app| {
        let loaded = app.model(fields.model.as_deref())?;
        fields.chat()?.shown(&loaded)
    })
    .await?;
    Ok(reply(&json!({"prompt": text})))
}

/// How many tokens a conversation is.
pub(crate) async fn count_chat(State(app): State<Arc<App>>, mut body: Body) -> Result<Response, ApiError> {
    let fields = body.get::<chat_completions::Fields>()?;
    let tokens = blocking(&app, move |app| {
        let loaded = app.model(fields.model.as_deref())?;
        fields.chat()?.count(&loaded)
    })
    .await?;
    Ok(reply(&json!({"object": "response.input_tokens", "input_tokens": tokens})))
}
