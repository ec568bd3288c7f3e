//! The JSON of a request: read with a limit, and taken apart so that errors name the field.

use std::collections::BTreeSet;
use std::sync::Arc;
use std::time::Duration;

use axum::extract::{FromRequest, Request};
use axum::http::{HeaderValue, header};
use axum::response::Response;
use futures_util::StreamExt as _;
use serde::de::DeserializeOwned;
use serde_json::Value;

use crate::api_error::{ApiError, Kind};
use crate::app::App;
use crate::connections::{Connection, Receiving};
use crate::scope::{self, LONG};

/// The body of a request, read and parsed.
#[derive(Debug)]
pub(crate) struct Body {
    value: Value,
    /// Fields that nothing has read so far; `None` before the first reading.
    unread: Option<BTreeSet<String>>,
}

impl FromRequest<Arc<App>> for Body {
    type Rejection = ApiError;

    async fn from_request(request: Request, app: &Arc<App>) -> Result<Body, ApiError> {
        // What a slot is told stands in its address; llama-server's clients send no body with it.
        let may_be_empty = request.uri().path().starts_with("/slots/");
        let body = match bytes(request, app).await? {
            bytes if bytes.is_empty() && may_be_empty => Body::parse(b"{}")?,
            // Other requests are served while a long one is parsed.
            bytes if bytes.len() > LONG => tokio::task::block_in_place(|| Body::parse(&bytes))?,
            bytes => Body::parse(&bytes)?,
        };
        // Ollama's clients may say `name`.
        let named = ["model", "name"].into_iter().find_map(|field| body.value.get(field)?.as_str());
        scope::current().set_model(named.unwrap_or_default());
        Ok(body)
    }
}

/// A body that is a list.
#[derive(Debug)]
pub(crate) struct List<T>(pub(crate) Vec<T>);

impl<T: DeserializeOwned> FromRequest<Arc<App>> for List<T> {
    type Rejection = ApiError;

    async fn from_request(request: Request, app: &Arc<App>) -> Result<List<T>, ApiError> {
        let bytes = bytes(request, app).await?;
        let list = serde_json::from_slice(&bytes);
        list.map(List).map_err(|error| ApiError::new(Kind::Invalid, format!("the body must be a list: {error}")))
    }
}

/// The bytes of a body of JSON.
async fn bytes(request: Request, app: &Arc<App>) -> Result<Vec<u8>, ApiError> {
    // Other content types are what a foreign web page can post without asking. Some programs say nothing, which a page can do
    // as well, but not without naming its origin.
    let headers = request.headers();
    let silent = !headers.contains_key(header::CONTENT_TYPE) && !headers.contains_key(header::ORIGIN);
    let kind = headers.get(header::CONTENT_TYPE).and_then(|v| v.to_str().ok()).unwrap_or_default();
    let kind = kind.split(';').next().unwrap_or_default().trim().to_ascii_lowercase();
    // Ollama's users type `curl -d`, which calls everything a form. Forms of web pages come with their origin.
    let from_page = headers.contains_key(header::ORIGIN) || headers.contains_key("sec-fetch-site");
    let typed = request.uri().path().starts_with("/api/") && kind == "application/x-www-form-urlencoded" && !from_page;
    let is_json = kind == "application/json" || (kind.starts_with("application/") && kind.ends_with("+json"));
    if !(is_json || silent || typed) {
        let shown = if kind.is_empty() { "nothing" } else { &kind };
        return Err(ApiError::new(Kind::Invalid, format!("Content-Type must be application/json, it is {shown}")));
    }
    if let Some(encoding) = headers.get(header::CONTENT_ENCODING).filter(|encoding| *encoding != "identity") {
        let encoding = encoding.to_str().unwrap_or_default();
        let message = format!("Content-Encoding {encoding:?} is not served; send the body as it is");
        return Err(ApiError::new(Kind::Encoding, message));
    }
    let limit = app.settings.body_limit;
    let too_large = || ApiError::new(Kind::TooLarge, format!("the body is larger than {limit} bytes"));
    let length = request.headers().get(header::CONTENT_LENGTH).and_then(|v| v.to_str().ok()?.parse::<u64>().ok());
    if let Some(length) = length.filter(|length| *length > limit as u64) {
        // Who asks before it sends learns it now. Others read no answer before they have sent everything, so that is taken and
        // dropped, unless it is far too much.
        if !request.headers().contains_key(header::EXPECT) && length <= MOST_DROPPED * limit as u64 {
            drop_all(request.into_body(), app).await;
        }
        return Err(too_large());
    }
    let time = patience(app, length.unwrap_or(limit as u64));
    let late = |time: Duration| ApiError::new(Kind::Late, format!("the body did not come within {} s", time.as_secs()));
    let receiving = request.extensions().get::<Arc<Connection>>().map(Connection::receive);
    let (scope, stall) = (scope::current(), app.settings.header_timeout.min(STALL));
    // No more is reserved than has come and been counted: a client may announce much and send nothing.
    let mut body = Vec::new();
    let all = async {
        let mut pieces = request.into_body().into_data_stream();
        while let Some(piece) = tokio::time::timeout(stall, pieces.next()).await.map_err(|_| late(stall))? {
            let piece = piece.map_err(|_| ApiError::new(Kind::Invalid, "the body ended early"))?;
            if body.len() + piece.len() > limit {
                return Err(too_large());
            }
            receiving.iter().for_each(Receiving::progress);
            scope.take(&app.bodies, piece.len()).await?;
            body.extend_from_slice(&piece);
        }
        Ok(())
    };
    tokio::time::timeout(time, all).await.map_err(|_| late(time))??;
    let count = if body.len() > LONG { tokio::task::block_in_place(|| values(&body)) } else { values(&body) };
    let most = app.bodies.most_parsed() / size_of::<Value>();
    if count > most {
        let message = format!("the body has about {count} JSON values, this server takes {most}");
        return Err(ApiError::new(Kind::TooLarge, message));
    }
    scope.take_parsed(&app.bodies, count * size_of::<Value>()).await?;
    Ok(body)
}

/// About as many values as JSON holds, keys among them: each takes far more memory than its two bytes of text.
fn values(json: &[u8]) -> usize {
    let (mut count, mut in_text, mut escaped) = (1, false, false);
    for byte in json {
        match byte {
            _ if escaped => escaped = false,
            b'\\' if in_text => escaped = true,
            b'"' => in_text = !in_text,
            b',' | b':' | b'[' | b'{' if !in_text => count += 1,
            _ => {}
        }
    }
    count
}

/// How long a client may send nothing in the middle of a body.
const STALL: Duration = Duration::from_secs(30);

/// Bodies over the limit, but by no more than this factor, are read to their end.
const MOST_DROPPED: u64 = 4;

/// How long a body of this many bytes may take: as long as the headers, and a second for each 64 KiB.
fn patience(app: &App, bytes: u64) -> Duration {
    app.settings.header_timeout + Duration::from_secs(bytes >> 16)
}

/// Reads a body and keeps nothing of it.
async fn drop_all(body: axum::body::Body, app: &App) {
    let mut pieces = body.into_data_stream();
    let all = async { while let Some(Ok(_)) = pieces.next().await {} };
    // A client that is too slow gets the answer as well.
    let _ = tokio::time::timeout(app.settings.header_timeout, all).await;
}

impl Body {
    /// Parses JSON that must be an object.
    pub(crate) fn parse(bytes: &[u8]) -> Result<Body, ApiError> {
        let value: Value = serde_json::from_slice(bytes)
            .map_err(|error| ApiError::new(Kind::Invalid, format!("the body is not valid JSON: {error}")))?;
        if !value.is_object() {
            return Err(ApiError::new(Kind::Invalid, "the body must be a JSON object"));
        }
        Ok(Body { value, unread: None })
    }

    /// The fields that `T` knows. May be called for several types, each of which knows its own.
    pub(crate) fn get<T: DeserializeOwned>(&mut self) -> Result<T, ApiError> {
        let mut unread = BTreeSet::new();
        let mut track = serde_path_to_error::Track::new();
        let tracked = serde_path_to_error::Deserializer::new(&self.value, &mut track);
        let parsed = serde_ignored::deserialize(tracked, |path| {
            let path = path.to_string();
            if !path.contains('.') {
                unread.insert(path);
            }
        });
        let value = parsed.map_err(|error| {
            let (path, why) = (track.path().to_string(), in_words(&error.to_string()));
            let refusal = ApiError::new(Kind::Invalid, format!("{path}: {why}"));
            if path == "." { ApiError::new(Kind::Invalid, why) } else { refusal.with_param(path) }
        })?;
        self.unread = Some(match self.unread.take() {
            Some(before) => before.intersection(&unread).cloned().collect(),
            None => unread,
        });
        Ok(value)
    }

    /// The fields that were not read: refused where the server is strict, else named in a header of the answer. Nothing else is kept of
    /// the body: an answer may take minutes, and a body millions of bytes.
    pub(crate) fn leftover(&mut self, app: &App) -> Result<Leftover, ApiError> {
        self.value = Value::Null;
        self.leftover_of(app, "", Vec::new())
    }

    /// The same for an object inside a request, which `within` names; `others` were not read either.
    pub(crate) fn leftover_of(&self, app: &App, within: &str, others: Vec<String>) -> Result<Leftover, ApiError> {
        let fields = self.unread.iter().flatten().chain(&others);
        let fields: Vec<String> = fields.map(|field| format!("{within}{field}")).collect();
        match fields.first() {
            Some(first) if app.settings.strict => {
                Err(ApiError::unsupported(first.clone(), format!("the field `{first}` is not known (--strict-api)")))
            }
            Some(_) => {
                log::info!("fields that are not known: {}", shown(&fields));
                Ok(Leftover(fields))
            }
            None => Ok(Leftover(fields)),
        }
    }
}

/// A message about a type, in the words of JSON.
fn in_words(message: &str) -> String {
    let Some((found, wanted)) = message.rsplit_once(", expected ") else { return message.to_owned() };
    let wanted = match wanted {
        "i8" | "i16" | "i32" | "i64" | "isize" => "a whole number",
        "u8" | "u16" | "u32" | "u64" | "usize" => "a whole number of 0 or more",
        "f32" | "f64" => "a number",
        "a sequence" => "a list",
        "a map" => "an object",
        other => other,
    };
    format!("{found}, expected {wanted}")
}

/// The names of fields, as far as they are fit for a header and a log.
fn shown(fields: &[String]) -> String {
    let plain = |field: &&String| field.len() <= 64 && field.bytes().all(|b| b.is_ascii_graphic());
    fields.iter().filter(plain).take(32).map(String::as_str).collect::<Vec<_>>().join(", ")
}

/// Fields of a request that had no effect.
#[derive(Debug)]
pub(crate) struct Leftover(Vec<String>);

impl Leftover {
    /// These fields and others.
    pub(crate) fn and(mut self, others: Leftover) -> Leftover {
        self.0.extend(others.0);
        self
    }

    /// Names the fields in the answer.
    pub(crate) fn tell(&self, mut response: Response) -> Response {
        let named = shown(&self.0);
        if let (false, Ok(value)) = (named.is_empty(), HeaderValue::from_str(&named)) {
            response.headers_mut().insert("x-kiln-ignored", value);
        }
        response
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn values_are_counted_and_texts_are_not_looked_into() {
        assert_eq!(values(b"[5,5,5]"), 4);
        assert_eq!(values(br#"{"a": "x,[{:\"y,", "b": [1, 2]}"#), 7);
        assert_eq!(values(br#"{"a": "\\", "b": 1}"#), 5);
        assert_eq!(values(b""), 1);
    }

    #[derive(Debug, serde::Deserialize)]
    struct Inner {
        #[allow(dead_code, reason = "only its type matters")]
        a: i32,
    }

    #[derive(Debug, serde::Deserialize)]
    struct One {
        list: Option<Vec<Inner>>,
    }

    #[derive(Debug, serde::Deserialize)]
    struct Other {
        heat: Option<f32>,
    }

    #[test]
    fn errors_name_the_path_and_leftovers_are_known_by_nobody() {
        let mut body = Body::parse(br#"{"list":[{"a":1},{"a":"x"}],"heat":1,"odd":{},"null":null}"#).expect("parses");
        let error = body.get::<One>().expect_err("a string is no number");
        assert_eq!(error.param.as_deref(), Some("list[1].a"), "{error:?}");
        assert!(error.message.ends_with("expected a whole number"), "{error:?}");
        let mut body = Body::parse(br#"{"list":null,"heat":1,"odd":{}}"#).expect("parses");
        assert!(body.get::<One>().expect("null is absent").list.is_none());
        assert_eq!(body.get::<Other>().expect("whole numbers are numbers").heat, Some(1.0));
        assert_eq!(body.unread.expect("was read").into_iter().collect::<Vec<_>>(), ["odd"]);
        assert!(Body::parse(b"[1]").is_err() && Body::parse(b"{").is_err());
    }
}
