//! Why a request was not served: one value, told in the words of whichever API was spoken.

use axum::http::{HeaderValue, StatusCode, header};
use axum::response::{IntoResponse, Response};
use serde_json::{Value, json};

/// Which API a client speaks; it shows in the shape of errors.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Dialect {
    OpenAi,
    Anthropic,
    Ollama,
}

impl Dialect {
    /// The API that a path belongs to.
    pub(crate) fn of_path(path: &str) -> Dialect {
        match path {
            _ if path == "/v1/messages" || path.starts_with("/v1/messages/") => Dialect::Anthropic,
            _ if path.starts_with("/api/") => Dialect::Ollama,
            _ => Dialect::OpenAi,
        }
    }
}

/// What kind of refusal it is: decides the status and the names.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Kind {
    /// Bad JSON, a bad field, a bad value.
    Invalid,
    /// A field that is known, but not served.
    UnsupportedField,
    /// A value that is known, but not served.
    UnsupportedValue,
    /// The prompt is longer than the context.
    TooLong { prompt: usize, context: usize },
    /// The chat template refused or is not there.
    Template,
    /// A schema that cannot be kept.
    Schema,
    /// A grammar that cannot be kept.
    Grammar,
    /// No key, or a wrong one.
    Key,
    /// Asked from a place that may not ask.
    Forbidden,
    /// No such model.
    Model,
    /// No such path.
    Route,
    /// The path is there, the method is not.
    Method,
    /// The body is too large.
    TooLarge,
    /// The body is packed in a way that is not served.
    Encoding,
    /// The body did not come.
    Late,
    /// Too many wait.
    QueueFull,
    /// A key has used up what it may have.
    KeyLimit { seconds: u64 },
    /// It took longer than it may.
    TooSlow,
    /// Not now: loading or lost.
    Unavailable,
    /// Not here any more: the server goes down, and another one may serve the request at once.
    Leaving,
    /// The model cannot do this.
    CannotDo,
    /// Our fault.
    Internal,
}

/// The message of a [`Kind::TooLong`] whose tokens were not counted to the end.
pub(crate) const AT_LEAST: &str = "at least ";

/// A request that was not served, and why.
#[derive(Clone, Debug)]
pub(crate) struct ApiError {
    pub(crate) kind: Kind,
    pub(crate) message: String,
    /// The field that is wrong, as a path.
    pub(crate) param: Option<String>,
}

impl ApiError {
    pub(crate) fn new(kind: Kind, message: impl Into<String>) -> ApiError {
        ApiError { kind, message: message.into(), param: None }
    }

    /// A bad value of a field.
    pub(crate) fn invalid(param: impl Into<String>, message: impl Into<String>) -> ApiError {
        ApiError { kind: Kind::Invalid, message: message.into(), param: Some(param.into()) }
    }

    /// A field that is known, but not served.
    pub(crate) fn unsupported(param: impl Into<String>, message: impl Into<String>) -> ApiError {
        ApiError { kind: Kind::UnsupportedField, message: message.into(), param: Some(param.into()) }
    }

    /// Something that should not happen. The log has the details; the client learns no paths.
    pub(crate) fn internal(what: &dyn std::fmt::Display) -> ApiError {
        log::error!("{what}");
        ApiError::new(Kind::Internal, "the server failed to answer; its log says why")
    }

    pub(crate) fn with_param(self, param: impl Into<String>) -> ApiError {
        ApiError { param: Some(param.into()), ..self }
    }

    /// The status in an API.
    pub(crate) fn status(&self, dialect: Dialect) -> StatusCode {
        match (self.kind, dialect) {
            (Kind::Key, _) => StatusCode::UNAUTHORIZED,
            (Kind::Forbidden, _) => StatusCode::FORBIDDEN,
            (Kind::Model | Kind::Route, _) => StatusCode::NOT_FOUND,
            (Kind::Method, _) => StatusCode::METHOD_NOT_ALLOWED,
            (Kind::TooLarge, _) => StatusCode::PAYLOAD_TOO_LARGE,
            (Kind::Encoding, _) => StatusCode::UNSUPPORTED_MEDIA_TYPE,
            (Kind::Late, _) => StatusCode::REQUEST_TIMEOUT,
            (Kind::KeyLimit { .. }, _) | (Kind::QueueFull, Dialect::OpenAi) => StatusCode::TOO_MANY_REQUESTS,
            // "Overloaded", which Anthropic's clients know.
            (Kind::QueueFull, Dialect::Anthropic) => StatusCode::from_u16(529).unwrap_or(StatusCode::TOO_MANY_REQUESTS),
            (Kind::QueueFull, Dialect::Ollama) | (Kind::Unavailable | Kind::Leaving, _) => {
                StatusCode::SERVICE_UNAVAILABLE
            }
            (Kind::TooSlow, _) => StatusCode::GATEWAY_TIMEOUT,
            (Kind::CannotDo, Dialect::OpenAi | Dialect::Ollama) => StatusCode::NOT_IMPLEMENTED,
            (Kind::Internal, _) => StatusCode::INTERNAL_SERVER_ERROR,
            _ => StatusCode::BAD_REQUEST,
        }
    }

    fn openai_names(&self) -> (&'static str, Option<&'static str>) {
        match self.kind {
            Kind::Invalid | Kind::Route | Kind::Method => ("invalid_request_error", None),
            Kind::UnsupportedField => ("invalid_request_error", Some("unsupported_parameter")),
            Kind::UnsupportedValue => ("invalid_request_error", Some("unsupported_value")),
            Kind::TooLong { .. } => ("invalid_request_error", Some("context_length_exceeded")),
            Kind::Template => ("invalid_request_error", Some("template_error")),
            Kind::Schema => ("invalid_request_error", Some("invalid_json_schema")),
            Kind::Grammar => ("invalid_request_error", Some("invalid_grammar")),
            Kind::Key => ("authentication_error", Some("invalid_api_key")),
            Kind::Forbidden => ("permission_error", None),
            Kind::Model => ("invalid_request_error", Some("model_not_found")),
            Kind::TooLarge => ("invalid_request_error", Some("request_too_large")),
            Kind::Encoding => ("invalid_request_error", Some("unsupported_encoding")),
            Kind::Late => ("invalid_request_error", Some("request_timeout")),
            Kind::QueueFull => ("rate_limit_error", Some("queue_full")),
            Kind::KeyLimit { .. } => ("rate_limit_error", Some("rate_limit_exceeded")),
            Kind::TooSlow => ("timeout_error", Some("timeout")),
            Kind::Unavailable | Kind::Leaving => ("unavailable_error", None),
            Kind::CannotDo => ("not_supported_error", None),
            Kind::Internal => ("server_error", None),
        }
    }

    /// A name for the kind of refusal, for those who count them.
    pub(crate) fn name(&self) -> &'static str {
        self.openai_names().0
    }

    fn anthropic_name(&self) -> &'static str {
        match self.kind {
            Kind::Key => "authentication_error",
            Kind::Forbidden => "permission_error",
            Kind::Model | Kind::Route => "not_found_error",
            Kind::TooLarge => "request_too_large",
            Kind::QueueFull => "overloaded_error",
            Kind::KeyLimit { .. } => "rate_limit_error",
            Kind::TooSlow => "timeout_error",
            Kind::Unavailable | Kind::Leaving | Kind::Internal => "api_error",
            _ => "invalid_request_error",
        }
    }

    /// The error object of OpenAI's APIs.
    pub(crate) fn openai(&self) -> Value {
        let (kind, code) = self.openai_names();
        let mut error = json!({"message": self.text(Dialect::OpenAi), "type": kind, "param": self.param, "code": code});
        if let Kind::TooLong { prompt, context } = self.kind {
            error["n_prompt_tokens"] = json!(prompt);
            error["n_ctx"] = json!(context);
        }
        json!({ "error": error })
    }

    /// The error object of Anthropic's API.
    pub(crate) fn anthropic(&self, request: &str) -> Value {
        let error = json!({"type": self.anthropic_name(), "message": self.text(Dialect::Anthropic)});
        json!({"type": "error", "error": error, "request_id": request})
    }

    /// The message. Clients know a prompt that is too long by its words.
    pub(crate) fn text(&self, dialect: Dialect) -> String {
        match (self.kind, dialect) {
            (Kind::TooLong { prompt, context }, Dialect::Anthropic) => {
                format!("prompt is too long: {}{prompt} tokens > {context} maximum", self.message)
            }
            (Kind::TooLong { prompt, context }, _) => format!(
                "This model's maximum context length is {context} tokens. However, your request has {}{prompt} input tokens, which exceeds the available context size",
                self.message
            ),
            _ => self.message.clone(),
        }
    }

    /// The whole answer in an API.
    pub(crate) fn render(&self, dialect: Dialect, request: &str) -> Response {
        let body = match dialect {
            Dialect::OpenAi => self.openai(),
            Dialect::Anthropic => self.anthropic(request),
            Dialect::Ollama => json!({"error": self.text(dialect)}),
        };
        let mut response = (self.status(dialect), body.to_string()).into_response();
        let headers = response.headers_mut();
        headers.insert(header::CONTENT_TYPE, HeaderValue::from_static("application/json"));
        match self.kind {
            Kind::QueueFull => headers.insert(header::RETRY_AFTER, HeaderValue::from_static("1")),
            Kind::KeyLimit { seconds } => headers.insert(header::RETRY_AFTER, HeaderValue::from(seconds)),
            Kind::Unavailable => headers.insert(header::RETRY_AFTER, HeaderValue::from_static("5")),
            Kind::Leaving => headers.insert(header::RETRY_AFTER, HeaderValue::from_static("1")),
            // Trying again would not help.
            Kind::CannotDo | Kind::Internal | Kind::TooSlow => {
                headers.insert("x-should-retry", HeaderValue::from_static("false"))
            }
            Kind::Key => headers.insert(header::WWW_AUTHENTICATE, HeaderValue::from_static("Bearer")),
            _ => None,
        };
        response
    }
}

impl IntoResponse for ApiError {
    /// The outermost layer knows which API was spoken and writes the body there.
    fn into_response(self) -> Response {
        let mut response = self.status(Dialect::OpenAi).into_response();
        response.extensions_mut().insert(self);
        response
    }
}

impl From<kiln_engine::Error> for ApiError {
    fn from(error: kiln_engine::Error) -> ApiError {
        use kiln_engine::Error;
        match error {
            Error::PromptTooLong { tokens, context, .. } => {
                ApiError::new(Kind::TooLong { prompt: tokens, context }, String::new())
            }
            Error::TextTooLong { tokens, context, .. } => {
                ApiError::new(Kind::TooLong { prompt: tokens, context }, String::new())
            }
            Error::EmptyText { .. } => ApiError::new(Kind::Invalid, error.to_string()),
            // The hints are about flags of the command line.
            Error::NoText => ApiError::new(
                Kind::CannotDo,
                "this model gives vectors of texts and writes none; /v1/embeddings serves it",
            ),
            Error::Fills => ApiError::new(
                Kind::CannotDo,
                "this model fills in texts as a whole and does not write them token by token, which this server does not do",
            ),
            Error::NoEmbedder { .. } => ApiError::new(
                Kind::CannotDo,
                "this model writes text; it was not made for vectors of texts (`kiln serve --pooling mean` has it make some)",
            ),
            Error::NoRanking => ApiError::new(Kind::CannotDo, "this model has no layers that make scores of texts"),
            Error::Busy { .. } => ApiError::new(Kind::QueueFull, error.to_string()),
            Error::Stopped => ApiError::new(Kind::Unavailable, "the server is going down"),
            Error::NoRoom { what: "texts at once", all, .. } => {
                ApiError::invalid("n", format!("{error}; this server makes at most {all} (--parallel)"))
            }
            Error::NoRoom { .. } => ApiError::new(Kind::Unavailable, error.to_string()),
            Error::EmptyPrompt | Error::TokenOutOfRange { .. } => ApiError::new(Kind::Invalid, error.to_string()),
            Error::Sample(ref why) => match why {
                kiln_engine::sampler::SampleError::Setting { name, .. } => {
                    ApiError::new(Kind::Invalid, why.to_string()).with_param(*name)
                }
                kiln_engine::sampler::SampleError::NotFinite { .. } => ApiError::internal(&error),
                _ => ApiError::new(Kind::Invalid, why.to_string()),
            },
            // A rule may need more work than it is given only when text is written: it is still the client's.
            Error::Constraint { .. } => ApiError::new(Kind::Grammar, error.to_string()),
            Error::Tokenizer(ref why) => ApiError::new(Kind::Invalid, why.to_string()),
            lost if lost.is_lost() => {
                log::error!("{lost}");
                ApiError::new(
                    Kind::Unavailable,
                    "the engine of this model failed or lost its device; send the request again",
                )
            }
            other => ApiError::internal(&other),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn each_api_has_its_own_shape_and_status() {
        let full = ApiError::new(Kind::QueueFull, "full");
        let status = |dialect| full.status(dialect).as_u16();
        assert_eq!([Dialect::OpenAi, Dialect::Anthropic, Dialect::Ollama].map(status), [429, 529, 503]);
        let long = ApiError::new(Kind::TooLong { prompt: 9, context: 8 }, "");
        assert_eq!(long.openai()["error"]["code"], "context_length_exceeded");
        assert_eq!(long.openai()["error"]["n_prompt_tokens"], 9);
        assert_eq!(long.anthropic("r")["error"]["message"], "prompt is too long: 9 tokens > 8 maximum");
        let bad = ApiError::invalid("messages[2].content", "no").openai();
        assert_eq!(bad["error"]["param"], "messages[2].content");
        assert_eq!(bad["error"]["code"], Value::Null);
    }

    #[test]
    fn paths_belong_to_apis() {
        assert_eq!(Dialect::of_path("/v1/messages/count_tokens"), Dialect::Anthropic);
        assert_eq!(Dialect::of_path("/api/chat"), Dialect::Ollama);
        assert_eq!(Dialect::of_path("/v1/chat/completions"), Dialect::OpenAi);
    }
}
