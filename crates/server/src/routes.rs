//! Which path is served by what.

use std::sync::Arc;

use axum::Router;
use axum::middleware::from_fn_with_state;
use axum::routing::{any, delete, get, post};

use crate::api::{
    anthropic, chat_completions, completion, completions, conversations, embeddings, engine, health, infill, llama,
    lora, models, ollama, ollama_store, openapi, page, responses, stored_responses, tokens, tools,
};
use crate::api_error::{ApiError, Kind};
use crate::app::App;
use crate::guard::guard;

/// All routes, behind the guard.
pub(crate) fn routes(app: Arc<App>) -> Router {
    let openai = Router::new()
        .route("/chat/completions", post(chat_completions::create))
        .route("/chat/completions/input_tokens", post(tokens::count_chat))
        .route("/completions", post(completions::create))
        .route("/models", get(models::list))
        .route("/models/{*id}", get(models::get))
        .route("/embeddings", post(embeddings::create))
        .route("/rerank", post(embeddings::rerank))
        .route("/reranking", post(embeddings::rerank))
        .route("/responses", post(responses::create))
        .route("/responses/input_tokens", post(responses::count))
        .route("/responses/{id}", get(stored_responses::retrieve).delete(stored_responses::remove))
        .route("/responses/{id}/input_items", get(stored_responses::input_items))
        .route("/responses/{id}/cancel", post(stored_responses::cancel));
    Router::new()
        .route("/health", get(health::health))
        .route("/v1/health", get(health::health))
        .route("/livez", get(health::live))
        .route("/readyz", get(health::ready))
        .route("/version", get(health::version))
        .route("/metrics", get(health::metrics))
        .route("/openapi.json", get(openapi::show))
        .route("/server_info", get(health::server_info))
        .route("/get_server_info", get(health::server_info))
        .route("/get_model_info", get(health::server_info))
        .route("/loads", get(health::loads))
        .route("/v1/loads", get(health::loads_of_workers))
        .route("/load", get(health::server_load))
        .route("/ping", get(health::health).post(health::health))
        .route("/health_generate", get(health::health))
        .route("/tokenize", post(tokens::tokenize))
        .route("/tokenizer_info", get(tokens::info))
        .route("/conversations", get(conversations::list))
        .route("/conversations/{id}", get(conversations::find).put(conversations::keep).delete(conversations::remove))
        .route("/tools", get(tools::list))
        .route("/tools/call", post(tools::call))
        .route("/detokenize", post(tokens::detokenize))
        .route("/apply-template", post(tokens::apply_template))
        .route("/props", get(llama::props))
        .route("/slots", get(llama::slots))
        .route("/slots/{id}", post(llama::slot))
        .route("/lora-adapters", get(lora::list).post(lora::set))
        .route("/completion", post(completion::create))
        .route("/infill", post(infill::create))
        .route("/v1/messages", post(anthropic::create))
        .route("/v1/messages/count_tokens", post(anthropic::count))
        .route("/", get(page::root))
        .route("/page/{name}", get(page::part))
        .route("/engine", get(engine::show))
        .route("/engine/kernels", get(engine::kernels))
        .route("/api/version", get(ollama::version))
        .route("/api/tags", get(ollama::tags))
        .route("/api/ps", get(ollama::ps))
        .route("/api/show", post(ollama::show))
        .route("/api/chat", post(ollama::chat))
        .route("/api/generate", post(ollama::generate))
        .route("/api/embed", post(embeddings::ollama))
        .route("/api/embeddings", post(embeddings::ollama_one))
        .route("/embedding", post(embeddings::llama))
        .route("/v2/rerank", post(embeddings::rerank))
        .route("/api/pull", post(ollama_store::pull))
        .route("/api/delete", delete(ollama_store::delete))
        .route("/api/{admin}", any(ollama::admin))
        .merge(openai.clone())
        .nest("/v1", openai)
        .fallback(|| async { ApiError::new(Kind::Route, "there is nothing at this path") })
        .method_not_allowed_fallback(|| async { ApiError::new(Kind::Method, "this path takes another method") })
        .layer(from_fn_with_state(Arc::clone(&app), guard))
        .with_state(app)
}
