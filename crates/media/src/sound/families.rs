//! How each family of encoders wants its sounds, by the name of its projector in model files. One row a family.

use super::decode::SoundLimits;
use super::mel::{Bands, HOP, Log, RATE, Scale, Spectrogram, hann};

/// What a model file says about its sounds.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct SoundKeys {
    /// Bands of a spectrogram.
    pub bins: usize,
}

/// How a family hears.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Way {
    /// Whisper's: pieces of half a minute, filled up with silence.
    Halves,
    /// Windows of eight seconds, filled up to whole seconds.
    Windows,
    /// Magnitudes, half a minute at once.
    Magnitudes,
    /// The samples themselves, 40 milliseconds at once.
    Samples,
    /// Every band brought to mean 0 and deviation 1 over the whole sound.
    Normed,
}

/// Makes sounds ready for one encoder.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Hearing {
    way: Way,
    bins: usize,
}

/// Samples of half a minute.
const HALF_MINUTE: usize = 30 * RATE as usize;
/// Frames of half a minute.
const PIECE: usize = HALF_MINUTE / HOP;
/// Samples of a token that is made of samples.
const SAMPLES: usize = 640;
/// Frames of a window, and those of one second, of which it has a whole number.
const WINDOW: [usize; 2] = [800, 100];
/// Shorter sounds are followed by silence: a tenth of a second has a few frames in every family.
const LEAST: usize = RATE as usize / 10;

/// Seconds of a sound whose moments all see each other.
const MOST_SEEN: u64 = 240;

impl SoundKeys {
    /// How sounds are made ready for a family; `None` for one that is not known.
    pub fn hearing(&self, projector: &str) -> Option<Hearing> {
        let way = match projector {
            "ultravox" | "qwen2a" | "voxtral" | "musicflamingo" | "glma" | "meralion" => Way::Halves,
            "qwen3a" => Way::Windows,
            "gemma4a" => Way::Magnitudes,
            "gemma4ua" => Way::Samples,
            "lfm2a" => Way::Normed,
            _ => return None,
        };
        let bins = if way == Way::Samples { SAMPLES } else { self.bins };
        (bins > 0).then_some(Hearing { way, bins })
    }
}

impl Hearing {
    /// Samples of a second that it takes.
    pub fn rate(&self) -> u32 {
        RATE
    }

    /// What sounds may be at most: where all moments see each other, memory grows with the square of the length.
    pub fn limits(&self) -> SoundLimits {
        let usual = SoundLimits::default();
        match self.way {
            Way::Normed => SoundLimits { seconds: MOST_SEEN, ..usual },
            _ => usual,
        }
    }

    /// The inputs that a sound of this rate becomes, each by itself.
    pub fn prepare(&self, samples: &[f32]) -> Vec<Spectrogram> {
        let mut x = samples.to_vec();
        x.resize(x.len().max(LEAST), 0.0);
        match self.way {
            Way::Halves => self.halves(&x),
            Way::Windows => self.windows(&x),
            Way::Magnitudes => x.chunks(HALF_MINUTE).filter_map(|part| self.magnitudes(part)).collect(),
            Way::Samples => {
                x.resize(x.len().next_multiple_of(SAMPLES), 0.0);
                vec![Spectrogram { bins: SAMPLES, values: x }]
            }
            Way::Normed => vec![self.normed(&x)],
        }
    }

    fn whisper(&self, padded: &[f32]) -> Spectrogram {
        let bands = Bands { window: hann(400, 400), scale: Scale::Slaney, log: Log::Ten };
        bands.of(padded, self.bins)
    }

    fn halves(&self, x: &[f32]) -> Vec<Spectrogram> {
        let padded: Vec<f32> = mirrored(&x[1..=200]).chain(x.iter().copied()).collect();
        let padded = [padded, vec![0.0; HALF_MINUTE + 200]].concat();
        let mut all = self.whisper(&padded);
        scale(&mut all.values);
        (0..all.frames() / PIECE).map(|piece| all.part(piece * PIECE..(piece + 1) * PIECE)).collect()
    }

    fn windows(&self, x: &[f32]) -> Vec<Spectrogram> {
        let n = x.len();
        let padded: Vec<f32> =
            mirrored(&x[1..=200]).chain(x.iter().copied()).chain(mirrored(&x[n - 201..n - 1])).collect();
        let mut all = self.whisper(&padded);
        scale(&mut all.values);
        let frames = all.frames().min(n / HOP + 1);
        let [window, second] = WINDOW;
        let one = |start: usize| {
            let mut part = all.part(start..(start + window).min(frames));
            part.values.resize(part.frames().next_multiple_of(second) * self.bins, 0.0);
            part
        };
        (0..frames).step_by(window).map(one).collect()
    }

    /// Half a minute at most; `None` where there is less than a frame.
    fn magnitudes(&self, x: &[f32]) -> Option<Spectrogram> {
        const SIZE: usize = 512;
        const LENGTH: usize = 320;
        let frames = (x.len() + HOP).checked_sub(LENGTH + 1)? / HOP + 1;
        let padded = vec![0.0; HOP].into_iter().chain(x.iter().copied());
        let length = (x.len() + HOP).max((frames - 1) * HOP + SIZE);
        let padded: Vec<f32> = padded.chain(std::iter::repeat(0.0)).take(length).collect();
        // This window is computed in F32 throughout.
        let cosine = |i: usize| (std::f32::consts::TAU * i as f32 / LENGTH as f32).cos();
        let window: Vec<f32> = (0..SIZE).map(|i| if i < LENGTH { 0.5 - 0.5 * cosine(i) } else { 0.0 }).collect();
        let all = Bands { window, scale: Scale::Htk, log: Log::Magnitude }.of(&padded, self.bins);
        Some(all.part(0..frames.min(all.frames())))
    }

    fn normed(&self, x: &[f32]) -> Spectrogram {
        // High tones are raised.
        let raised = (0..x.len()).map(|i| if i == 0 { x[0] } else { x[i] - 0.97 * x[i - 1] });
        let silence = || std::iter::repeat_n(0.0, 256);
        let padded: Vec<f32> = silence().chain(raised).chain(silence()).collect();
        let mut window = vec![0.0; 56];
        window.extend(hann(400, 399));
        window.extend([0.0; 56]);
        let mut all = Bands { window, scale: Scale::Slaney, log: Log::Added }.of(&padded, self.bins);
        let (counted, bins) = (x.len() / HOP, self.bins);
        for bin in 0..bins {
            let band = || all.values[..counted * bins].iter().skip(bin).step_by(bins).map(|v| f64::from(*v));
            let mean = band().sum::<f64>() / counted as f64;
            let squares: f64 = band().map(|v| (v - mean).powi(2)).sum();
            let deviation = (squares / (counted - 1) as f64).sqrt() + 1e-5;
            for (frame, v) in all.values.iter_mut().skip(bin).step_by(bins).enumerate() {
                *v = if frame < counted { ((f64::from(*v) - mean) / deviation) as f32 } else { 0.0 };
            }
        }
        all
    }
}

/// Samples in the opposite order.
fn mirrored(x: &[f32]) -> impl Iterator<Item = f32> {
    x.iter().rev().copied()
}

/// Brings the loudest to 1 at most and drops what is 8 below it.
fn scale(values: &mut [f32]) {
    let loudest = values.iter().copied().fold(f32::NEG_INFINITY, f32::max);
    let least = f64::from(loudest) - 8.0;
    values.iter_mut().for_each(|v| *v = ((f64::from(*v).max(least) + 4.0) / 4.0) as f32);
}
