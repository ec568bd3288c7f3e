//! GGUF files and the tensor formats in them, in plain Rust: no GPU, no models.

mod types;

pub use types::TensorType;
