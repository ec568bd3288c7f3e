//! Encoders of sounds: one table, one row and one short file a family. Most are Whisper's encoder with other ends; its layers are those of
//! pictures ([`crate::vision`]). Convolutions are products of unfolded rows (`unfold.rs`). [`crate::media`] opens their files and runs them.

mod conformer;
mod gemma;
mod glm;
mod lfm;
mod meralion;
mod qwen3;
mod ultravox;
mod unfold;
mod voxtral;
mod whisper;

use kiln_kernels::tensor::Tensor;
use kiln_media::{Hearing, Sound, SoundKeys, SoundLimits, Spectrogram};

use crate::Error;
use crate::media::PromptPart;
use crate::media::prompt::around;
use crate::model::Loader;
use crate::plan::Fixed;
use crate::vision::Grid;
use crate::vision::sheet::Sheet;

/// One family.
pub struct SoundEntry {
    /// The name of its projector in files.
    pub projector: &'static str,
    /// Which models are of this kind.
    pub models: &'static str,
    load: Load,
}

/// Reads the keys and tensors of a file.
type Load = fn(&mut Loader<'_>, &SoundKeys) -> Result<Box<dyn Family>, Error>;

/// Every family whose sounds are encoded.
pub const TABLE: &[SoundEntry] = &[
    of("gemma4a", "Gemma 4", gemma::load),
    of("gemma4ua", "Gemma 4 without an encoder", gemma::load_samples),
    of("glma", "GLM-ASR", glm::load),
    of("lfm2a", "LFM 2 Audio", lfm::load),
    of("meralion", "MERaLiON", meralion::load),
    of("musicflamingo", "Music Flamingo", voxtral::load_halved),
    of("qwen2a", "Qwen 2 Audio, Qwen 2.5 Omni", voxtral::load_single),
    of("qwen3a", "Qwen 3 ASR, Qwen 3 Omni", qwen3::load),
    of("ultravox", "Ultravox", ultravox::load),
    of("voxtral", "Voxtral", voxtral::load),
];

const fn of(projector: &'static str, models: &'static str, load: Load) -> SoundEntry {
    SoundEntry { projector, models, load }
}

/// The row of a projector.
pub(crate) fn row(projector: &str) -> Option<&'static SoundEntry> {
    TABLE.iter().find(|row| row.projector == projector)
}

/// A family with the tensors of a file: builds plans for inputs of any length.
trait Family: Send + Sync {
    /// What the host writes for an input: the frames, unfolded for the first product.
    fn unfolded(&self, heard: &Spectrogram) -> Vec<f32>;

    /// Adds the steps from there to rows of the model's width.
    fn build(&self, s: &mut Sheet, frames: usize) -> Tensor;

    /// Rows of the result for so many frames.
    fn rows(&self, frames: usize) -> usize;
}

/// An encoder of sounds.
pub struct Audio {
    /// Its family.
    pub row: &'static SoundEntry,
    hearing: Hearing,
    family: Box<dyn Family>,
}

impl Audio {
    /// Reads the keys and tensors of sounds.
    pub(crate) fn load(l: &mut Loader<'_>, row: &'static SoundEntry) -> Result<Audio, Error> {
        let keys = SoundKeys { bins: l.keys.count("audio.num_mel_bins", 256)? };
        let name = row.projector;
        let unknown = || Error::NoEncoder { why: format!("how sounds are prepared for {name} is not known") };
        let hearing = keys.hearing(name).ok_or_else(unknown)?;
        Ok(Audio { row, hearing, family: (row.load)(l, &keys)? })
    }

    /// How long sounds may be, and what else they may be at most.
    pub fn limits(&self) -> SoundLimits {
        self.hearing.limits()
    }

    /// The inputs that a sound becomes.
    pub fn prepare(&self, sound: Sound) -> Vec<Spectrogram> {
        self.hearing.prepare(&sound.at_rate(self.hearing.rate()).samples)
    }

    /// Rows that come out for an input of so many frames.
    pub fn rows(&self, frames: usize) -> usize {
        self.family.rows(frames)
    }

    /// Rows of each input that a sound of so many seconds becomes.
    pub fn rows_of(&self, seconds: usize) -> Vec<usize> {
        let silence = vec![0.0; seconds * self.hearing.rate() as usize];
        self.hearing.prepare(&silence).iter().map(|heard| self.rows(heard.frames())).collect()
    }

    /// What a sound of so many inputs becomes: words and inputs.
    pub fn pieces(&self, inputs: usize) -> Vec<PromptPart<usize>> {
        let (before, after) = around(self.row.projector);
        let words = |text: &str| (!text.is_empty()).then(|| PromptPart::Words(text.to_owned()));
        words(before).into_iter().chain((0..inputs).map(PromptPart::Input)).chain(words(after)).collect()
    }

    /// Frames of the first input of a sound of a second.
    pub(crate) fn usual(&self) -> usize {
        let second = vec![0.0; self.hearing.rate() as usize];
        self.hearing.prepare(&second).first().map_or(1, Spectrogram::frames)
    }

    /// What the host writes for an input.
    pub(crate) fn unfolded(&self, heard: &Spectrogram) -> Vec<f32> {
        self.family.unfolded(heard)
    }

    /// The plan for an input of so many frames on its way, and its result.
    pub(crate) fn build(&self, fixed: &Fixed, frames: usize) -> (Sheet, Tensor) {
        let mut s = Sheet::new(fixed, Grid { rows: frames, columns: 1 }, 1);
        let rows = self.family.build(&mut s, frames);
        (s, rows)
    }
}
