//! Mel spectrograms: how loud each band of frequencies is in each piece of a sound.

use realfft::RealFftPlanner;

/// Samples from one frame to the next: ten milliseconds.
pub(super) const HOP: usize = 160;
/// Samples of a second that all families want.
pub(super) const RATE: u32 = 16_000;

/// What an encoder hears: rows of the same length, one for each moment.
#[derive(Clone, Debug, PartialEq)]
pub struct Spectrogram {
    /// Numbers of a frame.
    pub bins: usize,
    /// Frame after frame.
    pub values: Vec<f32>,
}

impl Spectrogram {
    /// How many frames there are.
    pub fn frames(&self) -> usize {
        self.values.len() / self.bins.max(1)
    }

    /// One number; 0 outside.
    pub fn at(&self, frame: isize, bin: isize) -> f32 {
        let inside = |at: isize, count: usize| usize::try_from(at).ok().filter(|at| *at < count);
        match (inside(frame, self.frames()), inside(bin, self.bins)) {
            (Some(frame), Some(bin)) => self.values[frame * self.bins + bin],
            _ => 0.0,
        }
    }

    /// The frames of a range.
    pub(super) fn part(&self, frames: std::ops::Range<usize>) -> Spectrogram {
        let values = self.values[frames.start * self.bins..frames.end * self.bins].to_vec();
        Spectrogram { bins: self.bins, values }
    }
}

/// How frequencies become mel.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Scale {
    /// Straight up to 1000 Hz, logarithmic above; every band has the same area.
    Slaney,
    /// Logarithmic; every band has the same height.
    Htk,
}

impl Scale {
    fn to_mel(self, hz: f64) -> f64 {
        match self {
            Scale::Htk => 2595.0 * (1.0 + hz / 700.0).log10(),
            Scale::Slaney if hz < 1000.0 => hz * 3.0 / 200.0,
            Scale::Slaney => 15.0 + (hz / 1000.0).ln() * 27.0 / 6.4_f64.ln(),
        }
    }

    fn to_hz(self, mel: f64) -> f64 {
        match self {
            Scale::Htk => 700.0 * (10.0_f64.powf(mel / 2595.0) - 1.0),
            Scale::Slaney if mel < 15.0 => mel * 200.0 / 3.0,
            Scale::Slaney => 1000.0 * ((mel - 15.0) * 6.4_f64.ln() / 27.0).exp(),
        }
    }

    /// The weights of each band: the first frequency that has one, and those from there on.
    fn bands(self, bins: usize, size: usize) -> Vec<(usize, Vec<f64>)> {
        let highest = self.to_mel(f64::from(RATE) / 2.0);
        let edges: Vec<f64> = (0..bins + 2).map(|i| self.to_hz(highest * (i as f64 / (bins + 1) as f64))).collect();
        let frequency = |k: usize| k as f64 * (f64::from(RATE) / size as f64);
        let band = |edges: &[f64]| {
            let [low, middle, high] = [edges[0], edges[1], edges[2]];
            let norm = if self == Scale::Slaney { 2.0 / (high - low).max(1e-30) } else { 1.0 };
            let weight = |f: f64| match f {
                f if (low..=middle).contains(&f) => (f - low) / (middle - low).max(1e-30) * norm,
                f if f > middle && f <= high => (high - f) / (high - middle).max(1e-30) * norm,
                _ => 0.0,
            };
            // Filters are kept as F32.
            let weights: Vec<f64> = (0..=size / 2).map(|k| f64::from(weight(frequency(k)) as f32)).collect();
            let first = weights.iter().position(|w| *w != 0.0).unwrap_or(0);
            let end = weights.iter().rposition(|w| *w != 0.0).map_or(first, |last| last + 1);
            (first, weights[first..end].to_vec())
        };
        edges.windows(3).map(band).collect()
    }
}

/// Logarithm of what a band has.
#[derive(Clone, Copy, Debug, PartialEq)]
pub(super) enum Log {
    /// Base 10, of the power, which is 2^-24 at least.
    Ten,
    /// Natural, of the magnitude, which is 0.001 at least.
    Magnitude,
    /// Natural, of the power and 2^-24.
    Added,
}

/// How frames become bands.
pub(super) struct Bands {
    /// Factors of the samples of a frame, as many as the transform takes.
    pub(super) window: Vec<f32>,
    /// How frequencies become mel.
    pub(super) scale: Scale,
    /// What becomes of a band.
    pub(super) log: Log,
}

/// A window of this length that falls to 0 at both ends. `period` is the length after which it would begin anew.
pub(super) fn hann(length: usize, period: usize) -> Vec<f32> {
    let at = |i: usize| 0.5 * (1.0 - (std::f64::consts::TAU * i as f64 / period as f64).cos());
    (0..length).map(|i| at(i) as f32).collect()
}

impl Bands {
    /// The spectrogram of samples that are padded already.
    pub(super) fn of(&self, samples: &[f32], bins: usize) -> Spectrogram {
        let size = self.window.len();
        let bands = self.scale.bands(bins, size);
        let transform = RealFftPlanner::<f64>::new().plan_fft_forward(size);
        let (mut frame, mut spectrum) = (transform.make_input_vec(), transform.make_output_vec());
        let mut values = Vec::new();
        for start in (0..samples.len()).step_by(HOP).take_while(|start| start + size <= samples.len()) {
            let part = samples[start..start + size].iter().zip(&self.window);
            frame.iter_mut().zip(part).for_each(|(to, (x, w))| *to = f64::from(x * w));
            // Fails for wrong lengths alone, and these are its own.
            if transform.process(&mut frame, &mut spectrum).is_err() {
                break;
            }
            let loud: Vec<f64> = match self.log {
                Log::Magnitude => spectrum.iter().map(|c| c.norm()).collect(),
                Log::Ten | Log::Added => spectrum.iter().map(|c| c.norm_sqr()).collect(),
            };
            values.extend(bands.iter().map(|(first, weights)| {
                let sum: f64 = weights.iter().zip(&loud[*first..]).map(|(w, x)| w * x).sum();
                self.log.of(sum) as f32
            }));
        }
        Spectrogram { bins, values }
    }
}

impl Log {
    fn of(self, x: f64) -> f64 {
        let least = 2.0_f64.powi(-24);
        match self {
            Log::Ten => x.max(least).log10(),
            Log::Magnitude => x.max(0.001).ln(),
            Log::Added => (x + least).ln(),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_wave_is_loudest_in_its_band() {
        let wave: Vec<f32> =
            (0..4000).map(|i| (std::f64::consts::TAU * 1000.0 * f64::from(i) / f64::from(RATE)).sin() as f32).collect();
        let bands = Bands { window: hann(400, 400), scale: Scale::Slaney, log: Log::Ten };
        let heard = bands.of(&wave, 80);
        assert_eq!((heard.frames(), heard.bins), (23, 80));
        let frame = &heard.values[10 * 80..11 * 80];
        let loudest = (0..80).max_by(|a, b| frame[*a].total_cmp(&frame[*b])).unwrap();
        let edges = |i: usize| Scale::Slaney.to_hz(Scale::Slaney.to_mel(8000.0) * i as f64 / 81.0);
        assert!(edges(loudest) < 1000.0 && 1000.0 < edges(loudest + 2), "band {loudest}");
    }
}
