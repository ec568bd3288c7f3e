//! Run large language models (GGUF files) in a Rust program: on GPUs through Vulkan, on the CPU where there is none, many requests at once.
//!
//! ```no_run
//! use kiln_llm::Llm;
//!
//! # fn main() -> Result<(), kiln_llm::Error> {
//! let llm = Llm::open("model.gguf")?;
//! for piece in llm.chat("What is a kiln?").max_tokens(200).stream()? {
//!     print!("{}", piece?.text());
//! }
//! # Ok(())
//! # }
//! ```
//!
//! - [`Llm::open`] takes the best device and as much context as memory allows; [`Llm::builder`] says otherwise.
//! - [`Llm::chat`] answers a message or a conversation by the model's own template, with tools and structured output; [`Llm::generate`]
//!   continues a text. Both give a [`Request`], which [`stream`](Request::stream), [`answer`](Request::answer) or [`text`](Request::text)
//!   sends. A [`Stream`] is an iterator; [`Stream::into_async`] makes a `futures` stream of it.
//! - [`Llm::embed`], [`Llm::tokenize`], [`Llm::detokenize`] and [`Llm::logits`] are what their names say; [`Request::sampler`] is a hook for
//!   samplers of your own.
//! - An [`Llm`] is cheap to clone and may be asked from any number of threads. What they ask at the same time goes through the model in
//!   one batch, and common beginnings of prompts are computed once; [`Builder::parallel`] says how many sequences run at once.
//!
//! ```no_run
//! use kiln_llm::{Llm, chat::Format, system, user};
//!
//! # fn main() -> Result<(), kiln_llm::Error> {
//! let llm = Llm::builder().context(8192).parallel(4).open("model.gguf")?;
//! let city = llm
//!     .chat([system("You answer with JSON."), user("Name a city.")])
//!     .format(Format::Schema(serde_json::json!({"type": "object", "properties": {"city": {"type": "string"}}, "required": ["city"]})))
//!     .temperature(0.0)
//!     .text()?;
//! # Ok(())
//! # }
//! ```
//!
//! # Stability
//!
//! Versions follow SemVer: before 1.0 a minor version may change names. This crate alone is meant for other programs. What it re-exports of
//! `kiln-engine`, `kiln-gguf` and `kiln-gpu` is part of it; everything else in those crates may change at any time.

pub mod chat;
mod device;
mod error;
mod json;
mod kind;
mod llm;
mod note;
mod opening;
mod placing;
mod request;
mod stages;
mod stream;

pub use device::{DeviceChoice, Early, all_adapters, tuning_file};
pub use error::{DeviceError, Error, LoadError, PlacingError, RequestError};
pub use kiln_engine::Error as EngineError;
pub use kiln_engine::embed::{Length, Pooling};
pub use kiln_engine::model::Model;
pub use kiln_engine::placement::{CpuExperts, GpuLayers};
pub use kiln_engine::run::{Cancel, Constraint, Lookup, Scheduler, Usage};
pub use kiln_engine::sampler::{Logprobs, Sampling};
pub use kiln_engine::text::{Content, Message};
pub use kiln_engine::tokenizer::{AddSpecial, ParseSpecial, ShowSpecial};
pub use kiln_gguf::TensorType;
pub use kind::check_model;
pub use llm::{Builder, EmbedOptions, Llm, Messages};
pub use note::{Note, Watch};
pub use opening::{AdapterFile, CACHE_TYPES, Job, Opening};
pub use placing::{Home, PlaceRule, Placing};
pub use request::{Prompt, Request};
pub use stages::{Host, Stages};
pub use stream::{Answer, AsyncStream, Call, Piece, Stream, Token};

/// A message of the user.
pub fn user(text: impl Into<Content>) -> Message {
    Message::new("user", text)
}

/// A message of the system, which says how the model should answer.
pub fn system(text: impl Into<Content>) -> Message {
    Message::new("system", text)
}

/// A message of the assistant: what the model said before.
pub fn assistant(text: impl Into<Content>) -> Message {
    Message::new("assistant", text)
}
