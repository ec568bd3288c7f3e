//! Vectors of texts and ranks: `/v1/embeddings`, `/v1/rerank`, Ollama's `/api/embed` and `/api/embeddings`, llama-server's
//! `/embedding`. Each translates into one request to the scheduler.

use std::sync::Arc;
use std::time::Instant;

use axum::Extension;
use axum::extract::State;
use axum::response::Response;
use base64::Engine as _;
use base64::engine::general_purpose::STANDARD;
use kiln_engine::embed::{Length, Pooling, pair};
use kiln_engine::run::{Cancel, EmbedRequest};
use kiln_engine::tokenizer::{AddSpecial, ParseSpecial};
use schemars::JsonSchema;
use serde::Deserialize;
use serde_json::{Value, json};

use super::completions::prompt_tokens;
use crate::api_error::{ApiError, Kind};
use crate::app::App;
use crate::body::Body;
use crate::encode::{Purpose, check_bytes, encode};
use crate::encoder::json as reply;
use crate::guard::Caller;
use crate::prep_pool::blocking;
use crate::registry::Loaded;

/// Texts of one request, as OpenAI has it.
const MOST_TEXTS: usize = 2048;

/// What is asked of a model, checked.
struct Asked {
    loaded: Arc<Loaded>,
    texts: Vec<Vec<u32>>,
    pooling: Pooling,
    length: Length,
    /// Elements that are kept of each vector.
    dimensions: Option<usize>,
}

/// What a model made of it: vectors, or scores.
struct Made {
    rows: Vec<Vec<f32>>,
    /// Tokens of each text.
    counts: Vec<usize>,
    pooling: Pooling,
}

impl Made {
    fn tokens(&self) -> usize {
        self.counts.iter().sum()
    }

    /// The vectors of each text: one, or one for each token where nothing is pooled.
    fn vectors(&self) -> impl Iterator<Item = std::slice::ChunksExact<'_, f32>> {
        let unpooled = self.pooling == Pooling::None;
        let width = move |row: &[f32], count: usize| if unpooled { row.len() / count } else { row.len() };
        self.rows.iter().zip(&self.counts).map(move |(row, count)| row.chunks_exact(width(row, *count)))
    }
}

/// Ends the work when its client has gone.
struct Waiting(Cancel);

impl Drop for Waiting {
    fn drop(&mut self) {
        self.0.cancel();
    }
}

impl Asked {
    fn new(loaded: Arc<Loaded>, texts: Vec<Vec<u32>>, named: Option<Pooling>) -> Result<Asked, ApiError> {
        let pooling = Pooling::choose(loaded.scheduler.model(), named)?;
        // Vectors of tokens are what the model makes, as llama-server has it.
        let length = if pooling == Pooling::None { Length::Free } else { Length::Norm(2) };
        Ok(Asked { loaded, texts, pooling, length, dimensions: None })
    }

    /// The same for vectors of texts, of which scores are none, by the pooling that the server was started with.
    fn vectors(app: &App, loaded: Arc<Loaded>, texts: Vec<Vec<u32>>) -> Result<Asked, ApiError> {
        let asked = Asked::new(loaded, texts, app.settings.pooling)?;
        if asked.pooling == Pooling::Rank {
            let message = "this model ranks texts and makes no vectors of them; /v1/rerank serves it";
            return Err(ApiError::new(Kind::CannotDo, message));
        }
        Ok(asked)
    }

    /// The same for APIs that have one vector for a text.
    fn one_each(self) -> Result<Asked, ApiError> {
        if self.pooling == Pooling::None {
            let message = "the server runs with --pooling none: a vector for each token is what /v1/embeddings and /embedding give";
            return Err(ApiError::new(Kind::CannotDo, message));
        }
        Ok(self)
    }

    /// Hands the texts to the engine and waits for what it makes of them.
    async fn run(self, app: &Arc<App>, caller: &Caller) -> Result<Made, ApiError> {
        let Asked { loaded, texts, pooling, length, dimensions } = self;
        let trace = caller.trace.as_deref();
        if let Some(trace) = trace {
            trace.model(&loaded.name);
        }
        let _permit = app.permit(&loaded, caller)?;
        let counts: Vec<usize> = texts.iter().map(Vec::len).collect();
        let (to, from) = tokio::sync::oneshot::channel();
        let came = Instant::now();
        let _waiting = Waiting(loaded.scheduler.submit_embed(EmbedRequest { texts, pooling }, move |result| {
            // The client may have gone.
            let _ = to.send(result);
        }));
        let result = match app.settings.total_limit {
            Some(limit) => tokio::time::timeout(limit, from).await.map_err(|_| {
                let seconds = limit.as_secs_f64();
                ApiError::new(Kind::TooSlow, format!("the request ran for {seconds:.1} s, which is all it may"))
            })?,
            None => from.await,
        };
        let rows = result.map_err(|_| kiln_engine::Error::Stopped)?;
        loaded.metrics.embedded(counts.iter().sum(), came.elapsed(), rows.is_ok());
        let mut rows = rows?;
        if let Some(trace) = trace {
            trace.embedded(counts.iter().sum());
        }
        for (row, count) in rows.iter_mut().zip(&counts).filter(|_| pooling != Pooling::Rank) {
            let mut width = if pooling == Pooling::None { row.len() / count } else { row.len() };
            if let Some(kept) = dimensions {
                if kept > width {
                    let message = format!("dimensions is {kept}, vectors of this model have {width}");
                    return Err(ApiError::invalid("dimensions", message));
                }
                *row = row.chunks_exact(width).flat_map(|vector| &vector[..kept]).copied().collect();
                width = kept;
            }
            row.chunks_exact_mut(width).for_each(|vector| length.apply(vector));
        }
        Ok(Made { rows, counts, pooling })
    }
}

/// The tokens of a text. What is spelled like a control token is text.
fn tokens(loaded: &Loaded, purpose: Purpose, text: &str) -> Result<Vec<u32>, ApiError> {
    encode(loaded, purpose, text, AddSpecial::Yes, ParseSpecial::No)
}

/// Texts or tokens, one or many.
fn texts(loaded: &Loaded, purpose: Purpose, param: &str, value: Option<&Value>) -> Result<Vec<Vec<u32>>, ApiError> {
    let one = |param: &str, value: &Value| match value {
        Value::String(text) if text.is_empty() => Err(ApiError::invalid(param, format!("`{param}` is empty"))),
        Value::String(text) => tokens(loaded, purpose, text),
        Value::Array(ids) if ids.is_empty() => Err(ApiError::invalid(param, format!("`{param}` is empty"))),
        Value::Array(_) => prompt_tokens(loaded, param, value),
        _ => Err(ApiError::invalid(param, format!("`{param}` must be a string or a list of tokens"))),
    };
    match value {
        None | Some(Value::Null) => Err(ApiError::invalid(param, format!("`{param}` is missing"))),
        Some(Value::Array(list)) if list.len() > MOST_TEXTS && !list[0].is_u64() => {
            Err(ApiError::invalid(param, format!("{} texts are too many, at most {MOST_TEXTS}", list.len())))
        }
        Some(Value::Array(list)) if list.iter().any(|v| v.is_string() || v.is_array()) => {
            list.iter().enumerate().map(|(i, value)| one(&format!("{param}[{i}]"), value)).collect()
        }
        Some(value) => Ok(vec![one(param, value)?]),
    }
}

fn dimensions(said: Option<i64>) -> Result<Option<usize>, ApiError> {
    let bad = |n: i64| ApiError::invalid("dimensions", format!("dimensions is {n}, want 1 or more"));
    said.map(|n| usize::try_from(n).ok().filter(|n| *n > 0).ok_or_else(|| bad(n))).transpose()
}

/// Fields of `/v1/embeddings`, and of llama-server's `/embedding`.
#[derive(Debug, Default, Deserialize, JsonSchema)]
#[serde(default)]
#[schemars(rename = "EmbeddingRequest")]
pub(crate) struct Fields {
    model: Option<String>,
    /// A text, texts, tokens, or lists of tokens.
    input: Option<Value>,
    /// The same in llama-server's words.
    content: Option<Value>,
    encoding_format: Option<String>,
    dimensions: Option<i64>,
    #[allow(dead_code, reason = "accepted and ignored")]
    user: Option<String>,
    /// How long vectors are, in llama-server's numbers.
    embd_normalize: Option<i32>,
}

/// `POST /v1/embeddings`.
pub(crate) async fn create(
    State(app): State<Arc<App>>,
    Extension(caller): Extension<Caller>,
    mut body: Body,
) -> Result<Response, ApiError> {
    let fields = body.get::<Fields>()?;
    let leftover = body.leftover(&app)?;
    let base64 = match fields.encoding_format.as_deref() {
        None | Some("float") => false,
        Some("base64") => true,
        Some(other) => {
            let message = format!("encoding_format is {other:?}, want \"float\" or \"base64\"");
            return Err(ApiError::invalid("encoding_format", message));
        }
    };
    let asked = blocking(&app, move |app| {
        let loaded = app.model(fields.model.as_deref())?;
        let texts = match fields.input {
            Some(_) => texts(&loaded, Purpose::Prompt, "input", fields.input.as_ref())?,
            None => {
                texts(&loaded, Purpose::Prompt, "content", fields.content.as_ref()).map_err(|refusal| {
                    match fields.content {
                        Some(_) => refusal,
                        None => ApiError::invalid("input", "`input` is missing"),
                    }
                })?
            }
        };
        let asked = Asked::vectors(app, loaded, texts)?;
        let length = fields.embd_normalize.map_or(asked.length, Length::from_number);
        Ok(Asked { length, dimensions: dimensions(fields.dimensions)?, ..asked })
    })
    .await?;
    let loaded = Arc::clone(&asked.loaded);
    let made = asked.run(&app, &caller).await?;
    let vector = |(index, (row, mut vectors)): (usize, (&Vec<f32>, std::slice::ChunksExact<'_, f32>))| {
        let embedding = match (base64, made.pooling == Pooling::None) {
            (true, _) => json!(STANDARD.encode(row.iter().flat_map(|v| v.to_le_bytes()).collect::<Vec<u8>>())),
            (false, true) => json!(vectors.collect::<Vec<_>>()),
            (false, false) => json!(vectors.next().unwrap_or_default()),
        };
        json!({"object": "embedding", "index": index, "embedding": embedding})
    };
    let data: Vec<Value> = made.rows.iter().zip(made.vectors()).enumerate().map(vector).collect();
    Ok(leftover.tell(reply(&json!({
        "object": "list", "data": data, "model": loaded.name,
        "usage": {"prompt_tokens": made.tokens(), "total_tokens": made.tokens()},
    }))))
}

/// `POST /embedding`, in llama-server's words: a list, and a list of vectors for each text.
pub(crate) async fn llama(
    State(app): State<Arc<App>>,
    Extension(caller): Extension<Caller>,
    mut body: Body,
) -> Result<Response, ApiError> {
    let fields = body.get::<Fields>()?;
    let leftover = body.leftover(&app)?;
    let asked = blocking(&app, move |app| {
        let loaded = app.model(fields.model.as_deref())?;
        let (param, value) =
            if fields.content.is_some() { ("content", fields.content) } else { ("input", fields.input) };
        let texts = texts(&loaded, Purpose::Prompt, param, value.as_ref())?;
        let asked = Asked::vectors(app, loaded, texts)?;
        let length = fields.embd_normalize.map_or(asked.length, Length::from_number);
        Ok(Asked { length, ..asked })
    })
    .await?;
    let made = asked.run(&app, &caller).await?;
    let text = |(index, vectors): (usize, std::slice::ChunksExact<'_, f32>)| json!({"index": index, "embedding": vectors.collect::<Vec<_>>()});
    let list: Value = made.vectors().enumerate().map(text).collect();
    Ok(leftover.tell(reply(&list)))
}

/// Fields of `/v1/rerank`, as Jina, Cohere and TEI have them.
#[derive(Debug, Default, Deserialize, JsonSchema)]
#[serde(default)]
#[schemars(rename = "RerankRequest")]
pub(crate) struct RerankFields {
    model: Option<String>,
    query: Option<String>,
    /// Texts, or objects with a `text`.
    documents: Option<Vec<Value>>,
    top_n: Option<i64>,
    return_documents: Option<bool>,
    /// TEI's way: the answer is a bare list then.
    texts: Option<Vec<String>>,
    return_text: Option<bool>,
}

/// The text of a document.
fn document((i, value): (usize, &Value)) -> Result<String, ApiError> {
    let text = value.as_str().or_else(|| value.get("text")?.as_str());
    let param = format!("documents[{i}]");
    text.map(str::to_owned).ok_or_else(|| ApiError::invalid(param.clone(), format!("`{param}` must be a text")))
}

/// `POST /v1/rerank`.
pub(crate) async fn rerank(
    State(app): State<Arc<App>>,
    Extension(caller): Extension<Caller>,
    mut body: Body,
) -> Result<Response, ApiError> {
    let fields = body.get::<RerankFields>()?;
    let leftover = body.leftover(&app)?;
    let tei = fields.texts.is_some();
    let (top, told) = (fields.top_n, fields.return_documents.or(fields.return_text).unwrap_or(false));
    if let Some(n) = top.filter(|n| *n < 1) {
        return Err(ApiError::invalid("top_n", format!("top_n is {n}, want 1 or more")));
    }
    let (asked, texts) = blocking(&app, move |app| {
        let loaded = app.model(fields.model.as_deref())?;
        let query = fields.query.ok_or_else(|| ApiError::invalid("query", "`query` is missing"))?;
        let texts = match (fields.texts, fields.documents) {
            (Some(texts), _) => texts,
            (None, Some(documents)) => documents.iter().enumerate().map(document).collect::<Result<_, _>>()?,
            (None, None) => return Err(ApiError::invalid("documents", "`documents` is missing")),
        };
        if texts.is_empty() || texts.len() > MOST_TEXTS {
            let message = format!("{} documents, want 1 to {MOST_TEXTS}", texts.len());
            return Err(ApiError::invalid("documents", message));
        }
        let asked = Asked::new(loaded, Vec::new(), Some(Pooling::Rank))?;
        texts.iter().try_for_each(|text| check_bytes(&asked.loaded, text.len().max(query.len())))?;
        let model = asked.loaded.scheduler.model();
        let pairs = texts.iter().map(|text| pair(model, &query, text)).collect::<Result<_, _>>()?;
        Ok((Asked { texts: pairs, ..asked }, texts))
    })
    .await?;
    let loaded = Arc::clone(&asked.loaded);
    let made = asked.run(&app, &caller).await?;
    let mut order: Vec<(usize, f32)> =
        made.rows.iter().enumerate().map(|(i, scores)| (i, scores.first().copied().unwrap_or(0.0))).collect();
    order.sort_by(|a, b| b.1.total_cmp(&a.1));
    order.truncate(top.and_then(|n| usize::try_from(n).ok()).unwrap_or(usize::MAX));
    if tei {
        let row = |(i, score): &(usize, f32)| match told {
            true => json!({"index": i, "score": score, "text": texts[*i]}),
            false => json!({"index": i, "score": score}),
        };
        return Ok(leftover.tell(reply(&order.iter().map(row).collect())));
    }
    let row = |(i, score): &(usize, f32)| match told {
        true => json!({"index": i, "relevance_score": score, "document": {"text": texts[*i]}}),
        false => json!({"index": i, "relevance_score": score}),
    };
    Ok(leftover.tell(reply(&json!({
        "id": crate::app::fresh_id("rerank-"), "model": loaded.name, "object": "list",
        "usage": {"prompt_tokens": made.tokens(), "total_tokens": made.tokens()},
        "results": order.iter().map(row).collect::<Vec<_>>(),
    }))))
}

/// Fields of `/api/embed`, and of the older `/api/embeddings`.
#[derive(Debug, Default, Deserialize, JsonSchema)]
#[serde(default)]
#[schemars(rename = "OllamaEmbedRequest")]
pub(crate) struct OllamaFields {
    model: Option<String>,
    /// A text, or texts.
    input: Option<Value>,
    /// The text, in the older call.
    prompt: Option<String>,
    /// Texts that are too long are cut, which is what this API promises.
    truncate: Option<bool>,
    dimensions: Option<i64>,
    #[allow(dead_code, reason = "they are about writing")]
    options: Option<Value>,
    #[allow(dead_code, reason = "the model stays as long as the server does")]
    keep_alive: Option<Value>,
}

/// Cuts texts to the context; the token that ends a text stays.
fn cut(loaded: &Loaded, texts: &mut [Vec<u32>]) {
    let (context, vocab) = (loaded.scheduler.context(), loaded.scheduler.model().tokenizer.vocab());
    for text in texts.iter_mut().filter(|text| text.len() > context) {
        text.truncate(context);
        if let (Some(last), Some(eos)) = (text.last_mut(), vocab.eos.filter(|_| vocab.add_eos)) {
            *last = eos;
        }
    }
}

/// `POST /api/embed`.
pub(crate) async fn ollama(
    State(app): State<Arc<App>>,
    Extension(caller): Extension<Caller>,
    mut body: Body,
) -> Result<Response, ApiError> {
    let fields = body.get::<OllamaFields>()?;
    let leftover = body.leftover(&app)?;
    let came = Instant::now();
    let (asked, loading) = blocking(&app, move |app| {
        let loaded = app.model(fields.model.as_deref())?;
        let loading = came.elapsed();
        // Ollama's clients load a model by asking for nothing.
        let nothing = fields.input.as_ref().is_none_or(|v| *v == json!("") || *v == json!([]));
        let truncates = fields.truncate.unwrap_or(true);
        let purpose = if truncates { Purpose::Cut } else { Purpose::Prompt };
        let mut texts = if nothing { Vec::new() } else { texts(&loaded, purpose, "input", fields.input.as_ref())? };
        if truncates {
            cut(&loaded, &mut texts);
        }
        let dimensions = dimensions(fields.dimensions)?;
        Ok((Asked { dimensions, ..Asked::vectors(app, loaded, texts)?.one_each()? }, loading))
    })
    .await?;
    let loaded = Arc::clone(&asked.loaded);
    let made = asked.run(&app, &caller).await?;
    let nanos = |d: std::time::Duration| u64::try_from(d.as_nanos()).unwrap_or(u64::MAX);
    Ok(leftover.tell(reply(&json!({
        "model": loaded.name, "embeddings": made.rows, "total_duration": nanos(came.elapsed()),
        "load_duration": nanos(loading), "prompt_eval_count": made.tokens(),
    }))))
}

/// `POST /api/embeddings`: one text; its vector is as long as the model makes it.
pub(crate) async fn ollama_one(
    State(app): State<Arc<App>>,
    Extension(caller): Extension<Caller>,
    mut body: Body,
) -> Result<Response, ApiError> {
    let fields = body.get::<OllamaFields>()?;
    let leftover = body.leftover(&app)?;
    let asked = blocking(&app, move |app| {
        let loaded = app.model(fields.model.as_deref())?;
        let mut texts = match fields.prompt.as_deref() {
            None | Some("") => Vec::new(),
            Some(prompt) => vec![tokens(&loaded, Purpose::Cut, prompt)?],
        };
        cut(&loaded, &mut texts);
        Ok(Asked { length: Length::Free, ..Asked::vectors(app, loaded, texts)?.one_each()? })
    })
    .await?;
    let made = asked.run(&app, &caller).await?;
    let vector = made.rows.into_iter().next().unwrap_or_default();
    Ok(leftover.tell(reply(&json!({ "embedding": vector }))))
}
