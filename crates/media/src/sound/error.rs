//! What can be wrong with a sound.

/// Why a sound cannot be used.
#[derive(Debug, thiserror::Error)]
pub enum SoundError {
    /// There are no bytes.
    #[error("the sound is empty: it has no bytes")]
    Empty,
    /// No known format.
    #[error("the {bytes} bytes are no sound that can be read: it has to be WAV, MP3, FLAC or OGG (Vorbis)")]
    Format {
        /// Length of what was given.
        bytes: usize,
    },
    /// The decoder gave up.
    #[error("the {format} sound cannot be decoded: {why}")]
    Decode {
        /// Name of the format.
        format: &'static str,
        /// What the decoder says.
        why: String,
    },
    /// The file has a beginning and nothing to be heard.
    #[error("the {format} sound is empty: it has no samples")]
    Silent {
        /// Name of the format.
        format: &'static str,
    },
    /// No channels, or more than are allowed.
    #[error("the sound has {channels} channels; 1 to {most} can be read")]
    Channels {
        /// How many there are.
        channels: usize,
        /// The limit.
        most: usize,
    },
    /// Samples come too seldom or too often.
    #[error("the sound has {rate} samples a second; {least} to {most} can be read")]
    Rate {
        /// Samples of a second.
        rate: u32,
        /// The lower limit.
        least: u32,
        /// The upper limit.
        most: u32,
    },
    /// It lasts too long.
    #[error(
        "the sound is longer than {most} seconds, which is all that can be read at {rate} samples a second; cut it into parts"
    )]
    Length {
        /// Samples of a second.
        rate: u32,
        /// The limit.
        most: u64,
    },
    /// A sample that no sound has.
    #[error("sample {at} of the sound is {value}; samples are numbers from -{most} to {most}")]
    Sample {
        /// Which one, from 0.
        at: usize,
        /// Its value.
        value: f32,
        /// The limit.
        most: f32,
    },
}
