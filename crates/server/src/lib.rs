//! The HTTP server: the APIs that people's clients already speak, on models that are loaded when they are asked for.
//!
//! A request takes one way: `guard` lets it in, a file of `api` translates it into one request to the engine,
//! `generate` turns the engine's events into parts, and `encoder` writes them as the API wants. Nothing below this crate knows
//! HTTP.

mod adapters;
mod api;
mod api_error;
mod app;
mod body;
mod chat;
mod connections;
mod conversations;
mod encode;
mod encoder;
mod generate;
mod guard;
mod half_close;
mod http_metrics;
mod keys;
mod kv_events;
mod media;
mod metrics;
mod params;
mod prep_pool;
mod registry;
mod remote_media;
mod response_format;
mod response_store;
mod routes;
mod scope;
mod server;
mod shutdown;
mod slots;
mod tenants;
mod trace;

pub use adapters::NamedAdapter;
pub use api::ollama_store::{ModelStore, PullProgress};
pub use app::{Change, RequestDefaults, Settings, Tls};
pub use chat::ThinkingBudget;
pub use conversations::ConversationLimits;
pub use keys::Key;
pub use kv_events::{KvEndpoint, KvEvents};
pub use registry::{LoadEngine, LoadedEngine, ModelSpec, Sharing};
pub use remote_media::MediaHost;
pub use response_store::StoredResponses;
pub use server::{AfterHangUp, Error, Running, Secrets, Server};
pub use tenants::TrustedProxy;
pub use trace::Tracing;
