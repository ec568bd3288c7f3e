//! Sounds that users bring, made ready for the encoder of a model: decoded within limits, brought to one channel and to the rate of the
//! model, and turned into mel spectrograms as the model's family wants them.

mod decode;
mod error;
mod families;
mod mel;
mod resample;

pub use decode::{SoundLimits, decode_sound, is_sound};
pub use error::SoundError;
pub use families::{Hearing, SoundKeys};
pub use mel::Spectrogram;

/// One channel of sound.
#[derive(Clone, Debug, PartialEq)]
pub struct Sound {
    /// Samples of a second.
    pub rate: u32,
    /// The samples; full loudness is 1.
    pub samples: Vec<f32>,
}

impl Sound {
    /// How long it lasts.
    pub fn seconds(&self) -> f64 {
        self.samples.len() as f64 / f64::from(self.rate.max(1))
    }

    /// The same at another rate.
    #[must_use]
    pub fn at_rate(self, rate: u32) -> Sound {
        if rate == self.rate {
            return self;
        }
        Sound { rate, samples: resample::resample(&self.samples, [self.rate, rate]) }
    }
}
