//! Filling in the middle: the text between a prefix and a suffix, for models that were trained to. `/infill` of llama.cpp, and
//! `suffix` of `/v1/completions`.

use std::sync::Arc;

use axum::Extension;
use axum::extract::State;
use axum::response::Response;
use kiln_engine::tokenizer::{AddSpecial, ParseSpecial};
use schemars::JsonSchema;
use serde::Deserialize;

use super::completion::{Prompts, serve};
use crate::api_error::{ApiError, Kind};
use crate::app::App;
use crate::body::Body;
use crate::chat::check_length;
use crate::encode::{Purpose, beginning, encode, end};
use crate::guard::Caller;
use crate::registry::Loaded;

/// Tokens around the gap at most; three of four go to what is before it.
const MOST_TOKENS: usize = 2048;

/// What the tokens are called in the files of known models: the key's name, and spellings where the key is missing.
const MARKS: [(&str, &[&str]); 5] = [
    (
        "pre",
        &["<|fim_prefix|>", "<fim-prefix>", "<fim_prefix>", "<｜fim▁begin｜>", "<PRE>", "▁<PRE>", "<|code_prefix|>"],
    ),
    (
        "suf",
        &["<|fim_suffix|>", "<fim-suffix>", "<fim_suffix>", "<｜fim▁hole｜>", "<SUF>", "▁<SUF>", "<|code_suffix|>"],
    ),
    ("mid", &["<|fim_middle|>", "<fim-middle>", "<fim_middle>", "<｜fim▁end｜>", "<MID>", "▁<MID>", "<|code_middle|>"]),
    ("rep", &["<|fim_repo|>", "<|repo_name|>", "<fim-repo>", "<REPO>", "<reponame>"]),
    ("sep", &["<|file_sep|>", "<|fim_sep|>", "<file_sep>"]),
];

/// The tokens of a model that stand for the parts.
struct Marks {
    prefix: u32,
    suffix: u32,
    middle: u32,
    /// Before the name of a repository and before the name of a file.
    repository: Option<[u32; 2]>,
}

impl Marks {
    fn of(loaded: &Loaded) -> Result<Marks, ApiError> {
        let model = loaded.scheduler.model();
        let (metadata, tokenizer) = (model.gguf.metadata(), &model.tokenizer);
        let id = |(key, spellings): (&str, &[&str])| {
            let keyed = metadata.value(&format!("tokenizer.ggml.fim_{key}_token_id"));
            let keyed =
                keyed.and_then(|v| u32::try_from(v.as_int()?).ok()).filter(|id| (*id as usize) < model.config.vocab);
            keyed.or_else(|| spellings.iter().find_map(|spelling| tokenizer.token_id(spelling)))
        };
        let [prefix, suffix, middle, rep, sep] = MARKS.map(id);
        match (prefix, suffix, middle) {
            (Some(prefix), Some(suffix), Some(middle)) => {
                Ok(Marks { prefix, suffix, middle, repository: rep.zip(sep).map(|(rep, sep)| [rep, sep]) })
            }
            _ => Err(ApiError::new(Kind::CannotDo, "this model was not trained to fill in the middle")),
        }
    }
}

/// Whether a model was trained to fill in the middle.
pub(crate) fn can(loaded: &Loaded) -> bool {
    Marks::of(loaded).is_ok()
}

/// Another file that the model should know.
#[derive(Debug, Deserialize, JsonSchema)]
pub(crate) struct Extra {
    filename: Option<String>,
    text: String,
}

fn code(loaded: &Loaded, text: &str) -> Result<Vec<u32>, ApiError> {
    // Code that is spelled like a control token stays code.
    encode(loaded, Purpose::Count, text, AddSpecial::No, ParseSpecial::No)
}

/// The prompt that asks for what lies between two texts.
pub(crate) fn prompt(loaded: &Loaded, prefix: &str, suffix: &str, extra: &[Extra]) -> Result<Vec<u32>, ApiError> {
    let marks = Marks::of(loaded)?;
    let tokenizer = &loaded.scheduler.model().tokenizer;
    let vocab = tokenizer.vocab();
    let most = MOST_TOKENS.min(loaded.scheduler.context() / 2).max(8);
    let [most_before, most_after] = [most / 4 * 3, most / 4];
    let before = code(loaded, end(loaded, prefix, most_before))?;
    let after = code(loaded, beginning(loaded, suffix, most_after))?;
    let before = &before[before.len().saturating_sub(most_before)..];
    let after = &after[..after.len().min(most_after)];
    let mut tokens: Vec<u32> = vocab.bos.filter(|_| vocab.add_bos).into_iter().collect();
    if let Some([repository, file]) = marks.repository.filter(|_| !extra.is_empty()) {
        tokens.push(repository);
        tokens.extend(code(loaded, "myproject\n")?);
        for Extra { filename, text } in extra {
            tokens.push(file);
            tokens.extend(code(loaded, &format!("{}\n", filename.as_deref().unwrap_or("tmp")))?);
            tokens.extend(code(loaded, text)?);
        }
        tokens.push(file);
        tokens.extend(code(loaded, "filename\n")?);
    }
    tokens.push(marks.prefix);
    tokens.extend(before);
    tokens.push(marks.suffix);
    tokens.extend(after);
    tokens.push(marks.middle);
    Ok(tokens)
}

/// What `/infill` takes beside the fields about choosing tokens.
#[derive(Debug, Default, Deserialize, JsonSchema)]
#[serde(default)]
#[schemars(rename = "Infill")]
pub(crate) struct Fields {
    model: Option<String>,
    /// The text before the gap.
    input_prefix: Option<String>,
    /// The text after the gap.
    input_suffix: Option<String>,
    /// Other files of the project.
    input_extra: Option<Vec<Extra>>,
    /// More text before the gap: the line that is being written.
    prompt: Option<String>,
}

/// `POST /infill`.
pub(crate) async fn create(
    State(app): State<Arc<App>>,
    Extension(caller): Extension<Caller>,
    mut body: Body,
) -> Result<Response, ApiError> {
    let fields = body.get::<Fields>()?;
    serve(&app, caller, body, move |app| {
        let loaded = app.model(fields.model.as_deref())?;
        let text = |field: Option<String>| field.unwrap_or_default();
        let prefix = text(fields.input_prefix) + &text(fields.prompt);
        let extra = fields.input_extra.unwrap_or_default();
        let prompt = prompt(&loaded, &prefix, &text(fields.input_suffix), &extra)?;
        check_length(&loaded, prompt.len())?;
        Ok(Prompts { loaded, tokens: vec![prompt], several: false })
    })
    .await
}
