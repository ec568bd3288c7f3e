//! Vulkan for compute: adapters, memory, kernels compiled when they are needed, and a recorder that places the
//! barriers. This crate is the only one with GPU code that is `unsafe`, and it knows nothing of language models.

mod adapter;
mod cache;
mod caps;
mod compile;
mod dependent_launch;
mod device;
mod error;
pub mod icd;
mod instance;
mod loader;
mod memory;
mod pace;
pub mod params;
mod pipeline;
mod query;
mod recorder;
mod shader;
mod spirv;
mod statistics;
mod transfer;

pub use adapter::{Adapter, AdapterKind, adapters, choose};
pub use cache::Cache;
pub use caps::{
    Caps, Component, Coopmat2, CoopmatShape, FlexibleShape, FragmentLayout, IntDot, Limits, Scope, Subgroups,
};
pub use compile::{Sources, compile_offline};
pub use dependent_launch::{FIELD_BYTES, counter_bytes};
pub use device::{Device, Submission};
pub use error::Error;
pub use instance::Instance;
pub use loader::{LOADER_LIBRARY, loader_version};
pub use memory::{Buffer, MemoryKind};
pub use pace::Cost;
pub use params::Address;
pub use pipeline::{Pipeline, PipelineCounts};
pub use recorder::Counts;
pub use recorder::{Commands, Dispatch, Groups, Recorder, Span, StepTime};
pub use shader::{Shader, SubgroupRequest};
pub use statistics::{Statistic, Told};
pub use transfer::Uploader;
