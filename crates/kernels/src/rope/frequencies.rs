//! How fast each pair of elements turns: the frequencies of `rope` with frequency factors and YaRN, computed once in f64
//! when a model is loaded.

use std::f64::consts::TAU;

use super::RopeStyle;
use crate::operation::{Invalid, require};

/// What a model says about its rotary embedding.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct RopeParams {
    /// Which elements form a pair, and which positions a pair follows.
    pub style: RopeStyle,
    /// Rotated elements of a head; for [`RopeStyle::Vision`] the number of pairs.
    pub n_dims: usize,
    /// Pairs per section (time, height, width, extra), for the styles with several positions.
    pub sections: [usize; 4],
    /// Base of the geometric series of frequencies, such as 10000.
    pub freq_base: f32,
    /// Factor of every frequency (positions are interpolated where it is below 1).
    pub freq_scale: f32,
    /// YaRN: how much of the high frequencies stays uninterpolated; 0 without YaRN.
    pub ext_factor: f32,
    /// Factor of the result.
    pub attn_factor: f32,
    /// YaRN: pairs that turn more often than this in the original context stay as they are.
    pub beta_fast: f32,
    /// YaRN: pairs that turn less often than this in the original context are interpolated.
    pub beta_slow: f32,
    /// YaRN: the context length the model was trained with.
    pub n_ctx_orig: usize,
}

impl RopeParams {
    /// Plain rotary embedding: no interpolation, no YaRN.
    pub fn plain(style: RopeStyle, n_dims: usize, freq_base: f32) -> RopeParams {
        RopeParams {
            style,
            n_dims,
            sections: [0; 4],
            freq_base,
            freq_scale: 1.0,
            ext_factor: 0.0,
            attn_factor: 1.0,
            beta_fast: 32.0,
            beta_slow: 1.0,
            n_ctx_orig: 0,
        }
    }

    /// Number of rotated pairs.
    pub fn pairs(&self) -> usize {
        self.style.pairs(self.n_dims)
    }

    /// Factor of the result: `magnitude` of the call.
    pub fn magnitude(&self) -> f32 {
        let grown = 1.0 + 0.1 * (1.0 / f64::from(self.freq_scale)).ln();
        let yarn = if self.ext_factor == 0.0 { 1.0 } else { grown };
        (f64::from(self.attn_factor) * yarn) as f32
    }

    /// Radians per position of each pair. `factors` divide them, one for each pair (more are ignored).
    pub fn frequencies(&self, factors: Option<&[f32]>) -> Result<Vec<f64>, Invalid> {
        let given = factors.map_or(self.pairs(), <[f32]>::len);
        require(given >= self.pairs(), super::NAME, || {
            format!("{given} frequency factors for {} pairs of elements", self.pairs())
        })?;
        let (low, high) = self.ramp_ends();
        let frequency = |pair: usize| {
            let exponent = self.exponent(pair) as f64;
            let factor = factors.map_or(1.0, |f| f64::from(f[pair]));
            let plain = f64::from(self.freq_base).powf(-2.0 * exponent / self.n_dims as f64) / factor;
            let interpolated = f64::from(self.freq_scale) * plain;
            if self.ext_factor == 0.0 {
                return interpolated;
            }
            let along = ((pair as f64 - low) / (high - low).max(0.001)).clamp(0.0, 1.0);
            let kept = (1.0 - along) * f64::from(self.ext_factor);
            interpolated * (1.0 - kept) + plain * kept
        };
        Ok((0..self.pairs()).map(frequency).collect())
    }

    /// The frequencies as the kernel takes them, an I32 tensor `[2, pairs]`: for each pair the high and the low word of
    /// its turns per position, in units of 2^-64 turns. Whole turns are dropped, positions being whole numbers.
    pub fn freqs(&self, factors: Option<&[f32]>) -> Result<Vec<i32>, Invalid> {
        let words = |frequency: f64| {
            let freqs = ((frequency / TAU).rem_euclid(1.0) * 2f64.powi(64)) as u64;
            [(freqs >> 32) as u32 as i32, freqs as u32 as i32]
        };
        Ok(self.frequencies(factors)?.into_iter().flat_map(words).collect())
    }

    /// The power of the series a pair has: in vision models it starts again with each section.
    fn exponent(&self, pair: usize) -> usize {
        let [rows, cols, ..] = self.sections;
        if self.style != RopeStyle::Vision || rows + cols == 0 {
            return pair;
        }
        let sector = pair % (rows + cols);
        if sector < rows { sector } else { sector - rows }
    }

    /// The pairs between which YaRN goes from keeping a frequency to interpolating it.
    fn ramp_ends(&self) -> (f64, f64) {
        let n_dims = self.n_dims as f64;
        let pair_that_turns = |times: f32| {
            n_dims * (self.n_ctx_orig as f64 / (TAU * f64::from(times))).ln() / (2.0 * f64::from(self.freq_base).ln())
        };
        (pair_that_turns(self.beta_fast).floor().max(0.0), pair_that_turns(self.beta_slow).ceil().min(n_dims - 1.0))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn close(got: f64, want: f64, tolerance: f64) {
        assert!((got - want).abs() <= tolerance, "got {got}, want {want}");
    }

    #[test]
    fn plain_frequencies_are_a_geometric_series() {
        let f = RopeParams::plain(RopeStyle::Normal, 64, 10000.0).frequencies(None).unwrap();
        assert_eq!(f.len(), 32);
        close(f[0], 1.0, 0.0);
        close(f[16], 0.01, 1e-15);
        close(f[31], 10000f64.powf(-62.0 / 64.0), 1e-15);
    }

    #[test]
    fn factors_divide_and_must_be_enough() {
        let params = RopeParams { freq_scale: 0.25, ..RopeParams::plain(RopeStyle::Neox, 8, 100.0) };
        let f = params.frequencies(Some(&[1.0, 2.0, 4.0, 8.0, 99.0])).unwrap();
        close(f[0], 0.25, 1e-15);
        close(f[2], 0.25 * 0.1 / 4.0, 1e-15);
        assert!(params.freqs(Some(&[1.0; 3])).unwrap_err().reason.contains("3 frequency factors for 4"));
    }

    /// The numbers of a model with 128 dimensions, base 10000, trained with 4096 positions and stretched 16 times: the
    /// ramp of YaRN goes from pair 20 to pair 46.
    #[test]
    fn yarn_keeps_fast_pairs_and_interpolates_slow_ones() {
        let plain = RopeParams::plain(RopeStyle::Neox, 128, 10000.0);
        let yarn = RopeParams { freq_scale: 1.0 / 16.0, ext_factor: 1.0, n_ctx_orig: 4096, ..plain };
        assert_eq!(yarn.ramp_ends(), (20.0, 46.0));
        let (f, original) = (yarn.frequencies(None).unwrap(), plain.frequencies(None).unwrap());
        close(f[20], original[20], 1e-15);
        close(f[46], original[46] / 16.0, 1e-15);
        close(f[33] / original[33], 0.5 + 0.5 / 16.0, 1e-12);
        close(f64::from(yarn.magnitude()), 1.0 + 0.1 * 16f64.ln(), 1e-7);
        close(f64::from(RopeParams { attn_factor: 1.5, ..plain }.magnitude()), 1.5, 0.0);
        let half = RopeParams { ext_factor: 0.5, ..yarn }.frequencies(None).unwrap();
        close(half[0], 0.5 + 0.5 / 16.0, 1e-12);
    }

    #[test]
    fn vision_starts_again_with_the_second_section() {
        let plain = RopeParams::plain(RopeStyle::Vision, 8, 10000.0);
        let f = RopeParams { sections: [4, 4, 0, 0], ..plain }.frequencies(None).unwrap();
        assert_eq!(f.len(), 8);
        assert_eq!(f[..4], f[4..]);
        close(f[5], 0.1, 1e-15);
    }

    #[test]
    fn turns_hold_the_angle_at_far_positions() {
        let params = RopeParams::plain(RopeStyle::Normal, 128, 500_000.0);
        let (freqs, frequencies) = (params.freqs(None).unwrap(), params.frequencies(None).unwrap());
        assert_eq!(freqs.len(), 128);
        for position in [1i64, -7, 131_072, -1_000_003] {
            for (words, frequency) in freqs.chunks_exact(2).zip(&frequencies) {
                let turn = (u64::from(words[0] as u32) << 32) | u64::from(words[1] as u32);
                let phase = (position as u64).wrapping_mul(turn) as i64 as f64 / 2f64.powi(64) * TAU;
                let angle = position as f64 * frequency;
                close(phase.sin(), angle.sin(), 1e-9);
                close(phase.cos(), angle.cos(), 1e-9);
            }
        }
    }

    #[test]
    fn odd_numbers_give_an_answer() {
        let odd = RopeParams { freq_scale: 0.0, ext_factor: 1.0, ..RopeParams::plain(RopeStyle::Vision, 4, 1.0) };
        assert_eq!(odd.freqs(Some(&[0.0; 4])).unwrap().len(), 8);
    }
}
