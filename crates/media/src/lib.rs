//! Pictures and sounds that users bring, made ready for the encoder of a model: pictures decoded within limits, resized, cut into tiles and
//! normalised as the model's family wants it, sounds decoded, resampled and turned into spectrograms (`sound`). Nothing here knows model
//! files, plans or requests.

mod decode;
mod error;
mod families;
mod filters;
mod fit;
mod picture;
mod prepare;
mod sizes;
mod sound;

pub use decode::{Limits, decode, is_picture};
pub use error::Error;
pub use families::Keys;
pub use filters::Filter;
pub use fit::{Fit, Placing};
pub use picture::{Picture, Pixels};
pub use prepare::{Layout, Prepared, Preprocessing};
pub use sizes::{Halves, PixelLimits, Size};
pub use sound::{Hearing, Sound, SoundError, SoundKeys, SoundLimits, Spectrogram, decode_sound, is_sound};
