//! The definition of `unary`, and the special functions it needs in f64.

use super::Call;
use crate::host::HostMemory;

/// dst = f(x), element by element.
pub(super) fn reference(call: &Call, memory: &mut HostMemory) {
    if call.dst.is_empty() {
        return;
    }
    let mut values = memory.read(&call.x);
    for v in &mut values {
        *v = call.function.of(*v);
    }
    memory.write(&call.dst, &values);
}

/// 1 / (1 + e^-x)
pub(crate) fn sigmoid(x: f64) -> f64 {
    1.0 / (1.0 + (-x).exp())
}

/// The complementary error function: its Taylor series near zero, its continued fraction further out.
pub(crate) fn erfc(x: f64) -> f64 {
    if x < 0.0 {
        return 2.0 - erfc(-x);
    }
    let half = std::f64::consts::FRAC_2_SQRT_PI;
    if x < 2.0 {
        // erf(x) = 2/sqrt(pi) e^(-x^2) sum (2x^2)^n x / (1 * 3 * .. * (2n+1)): all terms positive, no cancellation.
        let (mut term, mut sum) = (x, x);
        for n in 1..100 {
            term *= 2.0 * x * x / f64::from(2 * n + 1);
            sum += term;
        }
        return 1.0 - half * (-x * x).exp() * sum;
    }
    // erfc(x) = e^(-x^2) / sqrt(pi) / (x + (1/2)/(x + (2/2)/(x + (3/2)/(x + ..)))), from the inside out.
    let fraction = (1..200).rev().fold(x, |inner, k| x + f64::from(k) / 2.0 / inner);
    half / 2.0 * (-x * x).exp() / fraction
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn erfc_matches_published_values() {
        // Values of Abramowitz and Stegun, table 7.1, and of erfc at 2, 3 and 5 to more digits.
        for (x, want) in [
            (0.0, 1.0),
            (0.5, 0.479_500_122_186_953_5),
            (1.0, 0.157_299_207_050_285_13),
            (1.999_999, 4.677_755_648_073_953e-3),
            (2.0, 4.677_734_981_047_266e-3),
            (3.0, 2.209_049_699_858_544e-5),
            (5.0, 1.537_459_794_428_035e-12),
            (-1.0, 1.842_700_792_949_715),
        ] {
            let got = erfc(x);
            assert!((got - want).abs() <= 1e-12 * want, "erfc({x}) = {got:e}, want {want:e}");
        }
    }
}
