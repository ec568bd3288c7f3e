//! `GET /openapi.json`: what is served, for programs that read descriptions. What a request may hold is made from the very types that
//! requests are read into.

use std::sync::{Arc, OnceLock};

use axum::extract::State;
use axum::response::Response;
use schemars::generate::{SchemaGenerator, SchemaSettings};
use schemars::{JsonSchema, Schema};
use serde_json::{Map, Value, json};

use super::{
    anthropic, chat_completions, completion, completions, embeddings, infill, lora, ollama, ollama_store, responses,
    tokens, tools,
};
use crate::api_error::Dialect;
use crate::app::App;
use crate::encoder::json as reply;
use crate::params::Params;
use crate::response_format::ResponseFormatFields;

/// How an answer comes.
#[derive(Clone, Copy, PartialEq, Eq)]
enum Kind {
    Json,
    /// JSON, or server-sent events where `stream` asks for them.
    Events,
    /// JSON, or a value a line where `stream` asks for them.
    Lines,
    /// Text for Prometheus.
    Text,
}

/// One thing that can be asked.
struct Entry {
    path: &'static str,
    summary: &'static str,
    kind: Kind,
    /// The parts of a request's body; none where there is no body.
    body: Vec<Schema>,
    /// Fields that every whole answer has.
    answer: &'static [&'static str],
}

const CHAT: &[&str] = &["id", "object", "created", "model", "choices", "usage"];
const COUNT: &[&str] = &["object", "input_tokens"];
const RESPONSE: &[&str] = &["id", "object", "status", "output"];
const OLLAMA: &[&str] = &["model", "created_at", "done"];
const LLAMA: &[&str] = &["content", "tokens", "stop", "stop_type", "model", "timings"];

fn of<T: JsonSchema>(schemas: &mut SchemaGenerator) -> Schema {
    schemas.subschema_for::<T>()
}

/// What is asked without a body.
fn looked_at() -> Vec<Entry> {
    let get = |path, summary, kind, answer| Entry { path, summary, kind, body: Vec::new(), answer };
    vec![
        get("/v1/models", "The models there are", Kind::Json, &["object", "data"]),
        get("/health", "Whether requests are welcome, in llama-server's words", Kind::Json, &["status"]),
        get("/livez", "Whether the process is alive", Kind::Json, &["status"]),
        get("/readyz", "Whether requests are welcome", Kind::Json, &["status"]),
        get("/version", "Which program this is", Kind::Json, &["version"]),
        get("/metrics", "Metrics for Prometheus, under vLLM's names", Kind::Text, &[]),
        get("/server_info", "The model and its sizes", Kind::Json, &["model_path", "max_model_len"]),
        get("/loads", "How busy the server is", Kind::Json, &["num_running_reqs", "num_waiting_reqs"]),
        get("/v1/loads", "The same in SGLang's words", Kind::Json, &["loads"]),
        get("/load", "How many requests there are, in vLLM's words", Kind::Json, &["server_load"]),
        get("/ping", "As `/health`, for gateways that ask there", Kind::Json, &["status"]),
        get("/health_generate", "As `/health`, for gateways that ask there", Kind::Json, &["status"]),
        get("/engine", "The engine as it runs", Kind::Json, &["model", "device", "load", "tokens"]),
        get("/engine/kernels", "Runs one step, and tells the time of each kernel", Kind::Json, &["kernels"]),
        get(
            "/tokenizer_info",
            "The tokenizer, in vLLM's words",
            Kind::Json,
            &["bos_token", "eos_token", "chat_template"],
        ),
        get("/props", "What the server can do, in llama-server's words", Kind::Json, &["total_slots"]),
        get("/lora-adapters", "The adapters of the model, and how strongly each counts", Kind::Json, &[]),
        get("/slots", "Which texts are being written", Kind::Json, &[]),
        get("/api/version", "Ollama's version", Kind::Json, &["version"]),
        get("/api/tags", "The models there are, in Ollama's words", Kind::Json, &["models"]),
        get("/api/ps", "The models that are loaded, in Ollama's words", Kind::Json, &["models"]),
        get("/v1/responses/{id}", "A response that was kept", Kind::Json, RESPONSE),
        get("/v1/responses/{id}/input_items", "What a response was made from", Kind::Json, &["object", "data"]),
        get("/conversations", "What the page keeps on this server", Kind::Json, &["object", "kept", "folder", "data"]),
        get("/conversations/{id}", "A conversation of the page", Kind::Json, &[]),
        get(
            "/tools",
            "The tools that the operator gave to this server",
            Kind::Json,
            &["object", "data", "problems", "limits"],
        ),
        get("/openapi.json", "This document", Kind::Json, &["openapi", "paths"]),
    ]
}

/// What can be removed.
fn removed(schemas: &mut SchemaGenerator) -> Vec<Entry> {
    let delete = |path, summary, body, answer| Entry { path, summary, kind: Kind::Json, body, answer };
    vec![
        delete("/v1/responses/{id}", "Forgets a response", Vec::new(), &["id", "deleted"]),
        delete("/conversations/{id}", "Forgets a conversation of the page", Vec::new(), &["deleted"]),
        delete(
            "/api/delete",
            "Removes a model, where clients may",
            vec![of::<ollama_store::Fields>(schemas)],
            &["status"],
        ),
    ]
}

/// What is asked with a body.
fn asked(schemas: &mut SchemaGenerator) -> Vec<Entry> {
    let [chat, text, shape, params] =
        [of::<chat_completions::Fields>, of::<completions::Fields>, of::<ResponseFormatFields>, of::<Params>]
            .map(|f| f(schemas));
    let [response, message, ollama] =
        [of::<responses::Fields>, of::<anthropic::Fields>, of::<ollama::Fields>].map(|f| f(schemas));
    let [show, tokenize, detokenize] =
        [of::<ollama::Show>, of::<tokens::Tokenize>, of::<tokens::Detokenize>].map(|f| f(schemas));
    let [embed, rank, ollama_embed] =
        [of::<embeddings::Fields>, of::<embeddings::RerankFields>, of::<embeddings::OllamaFields>].map(|f| f(schemas));
    let [completion, middle, wishes] =
        [of::<completion::Fields>, of::<infill::Fields>, of::<completion::Wishes>].map(|f| f(schemas));
    let scales = of::<Vec<lora::Scale>>(schemas);
    let post = |path, summary, kind, parts: &[&Schema], answer| Entry {
        path,
        summary,
        kind,
        body: parts.iter().map(|part| (*part).clone()).collect(),
        answer,
    };
    let sampled = [&chat, &params, &shape];
    vec![
        post("/v1/chat/completions", "Answers a conversation", Kind::Events, &sampled, CHAT),
        post("/v1/chat/completions/input_tokens", "Counts the tokens of a conversation", Kind::Json, &[&chat], COUNT),
        post("/v1/completions", "Continues texts", Kind::Events, &[&text, &params, &shape], CHAT),
        post(
            "/v1/responses",
            "Answers, in the words of the Responses API",
            Kind::Events,
            &[&response, &params],
            RESPONSE,
        ),
        post("/v1/responses/input_tokens", "Counts the tokens of an input", Kind::Json, &[&response], COUNT),
        post(
            "/v1/messages",
            "Answers a conversation, in Anthropic's words",
            Kind::Events,
            &[&message, &params],
            &["id", "type", "role", "content", "usage"],
        ),
        post(
            "/v1/messages/count_tokens",
            "Counts the tokens of a conversation",
            Kind::Json,
            &[&message],
            &["input_tokens"],
        ),
        post("/api/chat", "Answers a conversation, in Ollama's words", Kind::Lines, &[&ollama], OLLAMA),
        post("/api/generate", "Answers a prompt, in Ollama's words", Kind::Lines, &[&ollama], OLLAMA),
        post(
            "/api/pull",
            "Fetches a model, where clients may",
            Kind::Lines,
            &[&of::<ollama_store::Fields>(schemas)],
            &["status"],
        ),
        post("/lora-adapters", "Says how strongly adapters count", Kind::Json, &[&scales], &["success"]),
        post("/api/show", "All about a model", Kind::Json, &[&show], &["details", "model_info"]),
        post("/v1/embeddings", "Vectors of texts", Kind::Json, &[&embed], &["object", "data", "model", "usage"]),
        post("/v1/rerank", "Sorts texts by how well they answer", Kind::Json, &[&rank], &[]),
        post("/v2/rerank", "The same for Cohere's clients", Kind::Json, &[&rank], &[]),
        post(
            "/api/embed",
            "Vectors of texts, in Ollama's words",
            Kind::Json,
            &[&ollama_embed],
            &["model", "embeddings"],
        ),
        post(
            "/api/embeddings",
            "The vector of a text, in Ollama's words",
            Kind::Json,
            &[&ollama_embed],
            &["embedding"],
        ),
        post("/embedding", "Vectors of texts, in llama-server's words", Kind::Json, &[&embed], &[]),
        post(
            "/completion",
            "Continues a text, in llama-server's words",
            Kind::Events,
            &[&completion, &wishes, &params, &shape],
            LLAMA,
        ),
        post(
            "/infill",
            "Writes what lies between two texts",
            Kind::Events,
            &[&middle, &wishes, &params, &shape],
            LLAMA,
        ),
        post("/tokenize", "Text to tokens", Kind::Json, &[&tokenize, &chat], &["tokens"]),
        post(
            "/tools/call",
            "Calls a tool of this server",
            Kind::Json,
            &[&of::<tools::Fields>(schemas)],
            &["content", "text", "is_error", "cut", "seconds"],
        ),
        post("/detokenize", "Tokens to text", Kind::Json, &[&detokenize], &["content"]),
        post("/apply-template", "A conversation as the prompt that it becomes", Kind::Json, &[&chat], &["prompt"]),
    ]
}

/// What a refusal looks like in an API.
fn error(dialect: Dialect) -> Value {
    let text = json!({"type": "string"});
    match dialect {
        Dialect::OpenAi => json!({
            "type": "object", "required": ["error"],
            "properties": {"error": {
                "type": "object", "required": ["message", "type"],
                "properties": {"message": text, "type": text, "param": {"type": ["string", "null"]}},
            }},
        }),
        Dialect::Anthropic => json!({
            "type": "object", "required": ["type", "error"],
            "properties": {
                "type": {"const": "error"},
                "error": {"type": "object", "required": ["type", "message"], "properties": {"type": text, "message": text}},
            },
        }),
        Dialect::Ollama => json!({"type": "object", "required": ["error"], "properties": {"error": text}}),
    }
}

/// What a request to a path must hold, where the types alone do not say it: every field of theirs may be absent.
fn needed(path: &str) -> Option<Value> {
    let field = match path {
        "/v1/chat/completions" | "/v1/chat/completions/input_tokens" | "/apply-template" => "messages",
        "/v1/messages" | "/v1/messages/count_tokens" => "messages",
        "/detokenize" => "tokens",
        _ => return None,
    };
    Some(json!({"required": [field]}))
}

fn operation(entry: &Entry) -> Value {
    let whole = match entry.answer {
        [] => json!({}),
        fields => json!({"type": "object", "required": fields}),
    };
    let mut content = match entry.kind {
        Kind::Text => json!({"text/plain": {"schema": {"type": "string"}}}),
        _ => json!({"application/json": {"schema": whole}}),
    };
    let stream = match entry.kind {
        Kind::Events => Some("text/event-stream"),
        Kind::Lines => Some("application/x-ndjson"),
        Kind::Json | Kind::Text => None,
    };
    if let Some(stream) = stream {
        content[stream] = json!({"schema": {"type": "string"}});
    }
    let refused = |why: &str| {
        let schema = error(Dialect::of_path(entry.path));
        json!({"description": why, "content": {"application/json": {"schema": schema}}})
    };
    let mut operation = json!({
        "summary": entry.summary,
        "responses": {
            "200": {"description": "The answer", "content": content},
            "4XX": refused("The request cannot be served as it is"),
            "5XX": refused("The server cannot serve it, or not now"),
        },
    });
    if entry.path.contains("{id}") {
        operation["parameters"] = json!([{"name": "id", "in": "path", "required": true, "schema": {"type": "string"}}]);
    }
    if !entry.body.is_empty() {
        let parts = entry.body.iter().map(|part| part.as_value().clone());
        let parts: Vec<Value> = parts.chain(needed(entry.path)).collect();
        let schema = if let [one] = parts.as_slice() { one.clone() } else { json!({"allOf": parts}) };
        operation["requestBody"] = json!({"required": true, "content": {"application/json": {"schema": schema}}});
    }
    operation
}

fn document() -> Value {
    let settings = SchemaSettings::draft2020_12().with(|s| s.definitions_path = "/components/schemas".into());
    let mut schemas = SchemaGenerator::new(settings);
    let mut paths = Map::new();
    for (method, entries) in [("get", looked_at()), ("post", asked(&mut schemas)), ("delete", removed(&mut schemas))] {
        for entry in entries {
            let path = paths.entry(entry.path).or_insert_with(|| json!({}));
            path[method] = operation(&entry);
        }
    }
    let bearer = json!({"type": "http", "scheme": "bearer", "description": "Where the server asks for keys"});
    json!({
        "openapi": "3.1.0",
        "info": {
            "title": "Kiln", "version": env!("CARGO_PKG_VERSION"),
            "description": "Language models behind the APIs of OpenAI, Anthropic, Ollama and llama-server.",
        },
        "paths": paths,
        "components": {"schemas": schemas.take_definitions(true), "securitySchemes": {"key": bearer}},
        "security": [{}, {"key": []}],
    })
}

/// The document. It is the same as long as the program runs.
pub(crate) async fn show(State(_): State<Arc<App>>) -> Response {
    static DOCUMENT: OnceLock<Value> = OnceLock::new();
    reply(DOCUMENT.get_or_init(document))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_document_knows_every_route_and_every_field() {
        let document = document();
        let paths = document["paths"].as_object().expect("paths");
        // Names for the same, the page, and what says no.
        let others =
            ["/", "/page/{name}", "/v1/health", "/get_server_info", "/get_model_info", "/api/{admin}", "/slots/{id}"];
        let source = include_str!("../routes.rs");
        let routes = source.split(".route(\"").skip(1).filter_map(|rest| rest.split('"').next());
        let nested =
            ["/chat/completions", "/chat/completions/input_tokens", "/completions", "/models", "/models/{*id}"];
        let nested =
            nested.iter().chain(&["/embeddings", "/rerank", "/reranking", "/responses", "/responses/input_tokens"]);
        let kept = ["/responses/{id}", "/responses/{id}/input_items", "/responses/{id}/cancel"];
        let nested: Vec<&str> = nested.chain(&kept).copied().collect();
        for route in routes.filter(|route| !others.contains(route) && !nested.contains(route)) {
            assert!(paths.contains_key(route), "{route} is not described");
        }
        let chat = &document["components"]["schemas"]["ChatRequest"]["properties"];
        assert!(chat["messages"].is_object() && chat["tools"].is_object(), "{chat}");
        // What must be there is said, beside what may be.
        let body =
            &document["paths"]["/v1/chat/completions"]["post"]["requestBody"]["content"]["application/json"]["schema"];
        let all = body["allOf"].as_array().expect("parts");
        assert!(all.iter().any(|part| part["required"] == json!(["messages"])), "{body}");
        let sampling = &document["components"]["schemas"]["Sampling"]["properties"];
        assert_eq!(sampling["temperature"]["type"], json!(["number", "null"]), "{sampling}");
    }
}
