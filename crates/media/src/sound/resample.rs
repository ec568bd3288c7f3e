//! From one rate to another: each result is a sum of the samples around its moment, weighed by a sine that fades out (Kaiser), which
//! leaves alone what both rates can hold and takes away what the new one cannot.

/// Waves of the sine on each side.
const WAVES: f64 = 32.0;
/// How fast the window fades: what the new rate cannot hold is below -100 dB.
const STEEPNESS: f64 = 10.0;
/// How much of what the lower rate can hold stays as it is; the rest lies in the slope of the filter.
const KEPT: f64 = 0.94;
/// Most moments between two samples that have weights of their own; others lie between two of these.
const MOST_PHASES: u64 = 1024;

/// Samples of one rate at another.
pub(super) fn resample(samples: &[f32], [from, to]: [u32; 2]) -> Vec<f32> {
    let common = gcd(from, to);
    let (from, to) = (u64::from(from / common), u64::from(to / common));
    let phases = to.min(MOST_PHASES);
    // In samples of the old rate: a filter for a lower new rate is wider and lower.
    let cut = KEPT * (to as f64 / from as f64).min(1.0);
    let reach = (WAVES / cut).ceil();
    let (half, taps) = (reach as usize, 2 * reach as usize);
    let table: Vec<Vec<f32>> = (0..=phases).map(|p| weights(p as f64 / phases as f64, cut, half)).collect();
    let count = (samples.len() as u64 * to).div_ceil(from);
    let one = |i: u64| -> f32 {
        let (whole, rest) = (i * from / to, i * from % to);
        let (phase, between) = (rest * phases / to, (rest * phases % to) as f32 / to as f32);
        let (a, b) = (&table[phase as usize], &table[(phase + 1).min(phases) as usize]);
        // Tap `half - 1` stands on the sample before the moment, or on it.
        let first = whole as i64 - (half as i64 - 1);
        let skipped = usize::try_from(-first).unwrap_or(0).min(taps);
        let start = usize::try_from(first).unwrap_or(0);
        let here = samples.get(start..).unwrap_or_default();
        let weigh = |w: &[f32]| -> f32 { w[skipped..].iter().zip(here).map(|(w, x)| w * x).sum() };
        match between {
            0.0 => weigh(a),
            between => weigh(a) * (1.0 - between) + weigh(b) * between,
        }
    };
    (0..count).map(one).collect()
}

/// Weights of the samples around a moment that lies `after` behind one of them. They add up to 1: what does not change stays the same.
fn weights(after: f64, cut: f64, half: usize) -> Vec<f32> {
    let weight = |tap: usize| -> f64 {
        let x = tap as f64 - (half as f64 - 1.0) - after;
        let inside = 1.0 - (x / half as f64).powi(2);
        if inside <= 0.0 { 0.0 } else { sinc(x * cut) * bessel(STEEPNESS * inside.sqrt()) }
    };
    let all: Vec<f64> = (0..2 * half).map(weight).collect();
    let sum: f64 = all.iter().sum();
    all.into_iter().map(|w| (w / sum) as f32).collect()
}

fn sinc(x: f64) -> f64 {
    let x = x * std::f64::consts::PI;
    if x.abs() < 1e-9 { 1.0 } else { x.sin() / x }
}

/// The modified Bessel function of order 0, by its series.
fn bessel(x: f64) -> f64 {
    let (mut term, mut sum) = (1.0, 1.0);
    for n in 1..64 {
        term *= (x / 2.0 / f64::from(n)).powi(2);
        sum += term;
    }
    sum
}

fn gcd(a: u32, b: u32) -> u32 {
    if b == 0 { a.max(1) } else { gcd(b, a % b) }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Loudness of what is left of a wave's best fit, and of the fit, in the middle of a sound.
    fn compared(frequency: f64, [from, to]: [u32; 2]) -> [f64; 2] {
        let wave = |rate: u32, n: usize| {
            (0..n).map(move |i| (std::f64::consts::TAU * frequency * i as f64 / f64::from(rate)).sin())
        };
        let given: Vec<f32> = wave(from, from as usize / 2).map(|v| v as f32).collect();
        let got = resample(&given, [from, to]);
        assert_eq!(got.len(), to as usize / 2);
        let middle = got.len() / 4..got.len() * 3 / 4;
        let power = |values: &[f64]| values.iter().map(|v| v * v).sum::<f64>() / values.len() as f64;
        let want: Vec<f64> = wave(to, got.len()).collect();
        let off: Vec<f64> = middle.clone().map(|i| f64::from(got[i]) - want[i]).collect();
        let all: Vec<f64> = middle.map(|i| f64::from(got[i])).collect();
        [power(&off), power(&all)]
    }

    #[test]
    fn waves_stay_what_they_are_or_go() {
        for rates in
            [[44_100, 16_000], [48_000, 16_000], [8_000, 16_000], [22_050, 16_000], [11_025, 16_000], [15_999, 16_000]]
        {
            let [from, to] = rates;
            for part in [0.01, 0.3, 0.8] {
                let [off, _] = compared(f64::from(from.min(to)) / 2.0 * part, rates);
                assert!(off < 1e-9, "{rates:?} at {part}: {off:e}");
            }
        }
        // What 16,000 samples a second cannot hold is not heard as something else.
        for (frequency, rates) in [(9_000.0, [44_100, 16_000]), (20_000.0, [48_000, 16_000])] {
            let [_, left] = compared(frequency, rates);
            assert!(left < 1e-9, "{frequency} Hz: {left:e}");
        }
    }

    #[test]
    fn what_does_not_change_stays_the_same() {
        let got = resample(&vec![0.5; 3000], [44_100, 16_000]);
        assert!(got[200..800].iter().all(|v| (v - 0.5).abs() < 1e-5));
        assert_eq!(resample(&[], [44_100, 16_000]), []);
        assert_eq!(resample(&[0.25], [8_000, 16_000]).len(), 2);
    }
}
