//! Run large language models (GGUF files) in a Rust program: on GPUs through Vulkan, on the CPU where there is none.
//!
//! [`Opening`] says where a model runs and how much memory it takes; it opens the file, the devices and the engine.

mod device;
mod error;
mod kind;
mod note;
mod opening;
mod placing;

pub use device::{DeviceChoice, Early, all_adapters, tuning_file};
pub use error::{DeviceError, Error, LoadError, PlacingError};
pub use kind::check_model;
pub use note::{Note, Watch};
pub use opening::{AdapterFile, CACHE_TYPES, Job, Opening};
pub use placing::{Home, PlaceRule, Placing};
