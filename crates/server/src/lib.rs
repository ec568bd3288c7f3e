//! The HTTP server: the APIs that people's clients already speak, on models that are loaded when they are asked for.
//!
//! A request takes one way: `guard` lets it in, a file of `api` translates it into one request to the engine,
//! `generate` turns the engine's events into parts, and `wire` writes them as the API wants. Nothing below this crate knows
//! HTTP.

mod api;
mod app;
mod body;
mod chat;
mod generate;
mod guard;
mod lingering;
mod metrics;
mod params;
mod refusal;
mod routes;
mod rule;
mod seats;
mod server;
mod shape;
mod shelf;
mod slots;
mod trace;
mod wire;

pub use app::{Change, Key, Settings, Tls, Usual};
pub use chat::ThinkingBudget;
pub use server::{Error, Running, Server};
pub use shelf::{Load, Offer, Opened, Sharing};
pub use trace::Tracing;
