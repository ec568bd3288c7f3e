//! A part of a model on another host. A leader has a [`RemoteExecutor`] for it, one of the devices of a pipeline executor; the host has a
//! [`StageHost`], which makes the same plans of its own copy of the file and runs its part of them. How messages travel is no business of
//! the engine: that is a [`Link`].

mod host;
mod messages;
mod remote;

pub use host::{Make, StageHost};
pub(crate) use messages::mark;
pub use messages::{About, FromStage, PIECE, PartKey, Seat, SlotRange, ToStage, Wrong};
pub use remote::{Link, RemoteExecutor};
