//! Pictures that users bring, made ready for the encoder of a model: decoded within limits, resized, cut into tiles and normalised as
//! the model's family wants it. Nothing here knows model files, plans or requests.

mod decode;
mod error;
mod families;
mod filters;
mod fit;
mod picture;
mod prepare;
mod sizes;

pub use decode::{Limits, decode, is_picture};
pub use error::Error;
pub use families::Keys;
pub use filters::Filter;
pub use fit::{Fit, Placing};
pub use picture::{Picture, Pixels};
pub use prepare::{Layout, Prepared, Preprocessing};
pub use sizes::{Halves, PixelLimits, Size};
