//! GGUF files and the tensor formats in them, in plain Rust: no GPU, no models.
//!
//! Files are read through a memory map and every field is checked before it is used; a hostile file gives an [`Error`].
//!
//! ```
//! use kiln_gguf::{Gguf, Metadata, TensorType, Writer};
//!
//! let mut metadata = Metadata::new();
//! metadata.set("general.architecture", "llama");
//! metadata.set("llama.block_count", 1_u32);
//! let mut writer = Writer::new(metadata);
//! writer.add("output.weight", &[2, 1], TensorType::F32, [1.0_f32, 2.0].map(f32::to_le_bytes).concat())?;
//!
//! let model = Gguf::from_bytes(writer.to_bytes()?)?;
//! assert_eq!(model.metadata().get_u32("llama.block_count")?, 1);
//! let weight = model.tensor("output.weight")?;
//! assert_eq!((weight.dims(), model.data(weight).len()), ([2, 1].as_slice(), 8));
//! # Ok::<(), kiln_gguf::Error>(())
//! ```

mod error;
mod header;
mod map;
mod metadata;
pub mod parts;
pub mod quant;
mod reader;
pub mod split;
mod tensor;
mod types;
mod value;
mod writer;

pub use error::{Error, Result, ShapeError};
pub use header::Header;
pub use metadata::Metadata;
pub use reader::{Gguf, Shared, check_file};
pub use tensor::{MAX_DIMS, TensorInfo};
pub use types::TensorType;
pub use value::{Array, Strings, Value};
pub use writer::{Stream, Writer};
