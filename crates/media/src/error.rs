//! What can be wrong with a picture or a sound.

use crate::sizes::Size;
use crate::sound::SoundError;

/// Why a picture or a sound cannot be used.
#[derive(Debug, thiserror::Error)]
pub enum Error {
    /// It is a sound.
    #[error(transparent)]
    Sound(#[from] SoundError),
    /// There are no bytes.
    #[error("the picture is empty: it has no bytes")]
    Empty,
    /// No known format.
    #[error("the {bytes} bytes are no picture that can be read: it has to be PNG, JPEG, WebP, GIF, BMP or TIFF")]
    Format {
        /// Length of what was given.
        bytes: usize,
    },
    /// The decoder gave up.
    #[error("the {format} picture cannot be decoded: {why}")]
    Decode {
        /// Name of the format.
        format: &'static str,
        /// What the decoder says.
        why: String,
    },
    /// No pixels, or more than are allowed.
    #[error("the picture has {size} pixels; 1 to {most} in all can be read, so make it smaller")]
    Pixels {
        /// Width and height.
        size: Size,
        /// The limit.
        most: usize,
    },
    /// Far longer than wide, or far wider than long.
    #[error("the picture has {size} pixels; one side may be {most} times the other at most, so crop it")]
    Ratio {
        /// Width and height.
        size: Size,
        /// The limit.
        most: usize,
    },
    /// Decoding would take too much memory.
    #[error("the {format} picture of {size} pixels takes {bytes} bytes to decode; at most {most} are allowed")]
    Memory {
        /// Name of the format.
        format: &'static str,
        /// Width and height.
        size: Size,
        /// What decoding takes.
        bytes: u64,
        /// The limit.
        most: u64,
    },
    /// A model file asks for a size that no picture can have.
    #[error("the model wants pictures of {size} pixels; at most {most} in all can be made")]
    Target {
        /// Width and height.
        size: Size,
        /// The limit.
        most: usize,
    },
}
