//! Running a model. A [`Scheduler`] serves requests from many threads; below it an [`Engine`] feeds tokens of any number of
//! sequences at once; a [`Session`] is an engine with one sequence, for tools.

mod active;
mod awaited;
pub(crate) mod batch;
mod batch_invariant;
pub(crate) mod cache;
mod decode;
mod disk;
mod draw;
mod embed;
mod engine;
mod fit;
mod job;
mod load;
mod making;
mod media;
mod memory;
mod policy;
mod profile;
mod pulse;
mod rate;
mod request;
mod schedule;
mod scheduler;
mod session;
mod shapes;
mod sharing;
mod source;
mod stall;
mod tiers;
mod writer;

pub use embed::EmbedRequest;
pub use engine::{Engine, Entry, SequenceId, Wanted};
pub use fit::{DeviceFit, Fit, Place, Wish, fit, fit_in, usable};
pub use kiln_gpu::StepTime;
pub use load::{CacheHits, Load, STEP_SIZES, Tally};
pub use making::First;
pub(crate) use media::numbers;
pub use media::{Span, Vectors};
pub use policy::Policy;
pub use profile::{StepKind, step_kinds};
pub use pulse::Pulse;
pub use request::{Constraint, EndReason, Event, Request, StopRule, Usage};
pub use scheduler::{Cancel, Events, Rebuild, Scheduler};
pub use session::Session;
