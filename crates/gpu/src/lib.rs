//! Vulkan for compute: adapters, memory, kernels compiled when they are needed, and a recorder that places the
//! barriers. This crate is the only one with GPU code that is `unsafe`, and it knows nothing of language models.

mod cache;
mod caps;
mod compile;
mod error;
pub mod params;
mod shader;
mod spirv;

pub use cache::Cache;
pub use caps::{Caps, Component, Coopmat2, CoopmatShape, FlexibleShape, IntDot, Limits, Scope, Subgroups};
pub use compile::{Sources, compile_offline};
pub use error::Error;
pub use params::Address;
pub use shader::{Shader, SubgroupRequest};
