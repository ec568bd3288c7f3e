//! Running a model: an [`Engine`] with any number of sequences, and a [`Session`] for tools that need one.

pub(crate) mod batch;
mod engine;
mod pages;
mod session;
mod shapes;

pub use engine::{Engine, Entry, SequenceId, Wanted};
pub use session::Session;
