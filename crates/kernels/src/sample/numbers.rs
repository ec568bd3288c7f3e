//! The arithmetic of a draw, the same bits on the CPU and on every GPU. Logarithm and exponential are written out with
//! additions and multiplications of f32, which every device rounds the same way, because built-in ones differ in their last bits
//! and a token must not depend on them. `numbers.glsl` holds the same lines; cases of `sample` compare the two.

/// A bijection of 32 bits in which every bit of the result depends on every bit of `x`.
fn mix(mut x: u32) -> u32 {
    x = (x ^ (x >> 17)).wrapping_mul(0xed5a_d4bb);
    x = (x ^ (x >> 11)).wrapping_mul(0xac4c_1b51);
    x = (x ^ (x >> 15)).wrapping_mul(0x3184_8bab);
    x ^ (x >> 14)
}

/// What all tokens of one draw share: 64 bits made of the seed and the position.
pub fn stream(seed: u64, position: u32) -> [u32; 2] {
    let first = mix(seed as u32 ^ mix(position ^ 0x9e37_79b9));
    let second = mix(((seed >> 32) as u32).wrapping_add(mix(first.wrapping_add(position))));
    [first, second]
}

/// 32 random bits for a token of a draw.
fn random_bits([first, second]: [u32; 2], id: u32) -> u32 {
    mix(mix(id ^ first).wrapping_add(second))
}

/// The number made of the 24 leading bits of `x`: no rounding takes place, whatever a device's rounding is.
fn leading(x: u32) -> f32 {
    let below = 8u32.saturating_sub(x.leading_zeros());
    ((x >> below) << below) as f32
}

/// ln(1 + x) for x of -0.3 to 0.42.
fn ln_near_one(x: f32) -> f32 {
    let mut sum = 7.037_683_6e-2_f32;
    for factor in [
        -1.151_461e-1_f32,
        1.167_699_9e-1,
        -1.242_014_1e-1,
        1.424_932_3e-1,
        -1.666_805_8e-1,
        2.000_071_5e-1,
        -2.499_999_4e-1,
        3.333_333e-1,
    ] {
        sum = sum * x + factor;
    }
    let square = x * x;
    let third = x * (square * sum);
    x + (third - square * 0.5)
}

/// ln(x) for positive normal x.
fn ln(x: f32) -> f32 {
    let bits = x.to_bits();
    // x = 2^exponent * (1 + rest), with 1 + rest from sqrt(1/2) to sqrt(2).
    let exponent = (bits as i32 - 0x3f35_04f3) >> 23;
    let rest = f32::from_bits(bits.wrapping_sub((exponent << 23) as u32)) - 1.0;
    let exponent = exponent as f32;
    // ln 2 in two parts, the first of few bits: its product is exact.
    ln_near_one(rest) + exponent * -2.121_944_4e-4 + exponent * 0.693_359_4
}

/// The Gumbel number of a token in the draw of a [`stream`].
pub fn gumbel_of(stream: [u32; 2], id: u32) -> f32 {
    gumbel_from(random_bits(stream, id))
}

/// The Gumbel number made of 32 random bits.
fn gumbel_from(bits: u32) -> f32 {
    // w / 2^32 is uniform over the odd multiples of 2^-32, so neither 0 nor 1.
    let w = bits | 1;
    const UNIT: f32 = 1.0 / 4_294_967_296.0;
    // -ln(1 - w): where w is small, 1 - w would lose the bits that tell the largest numbers apart.
    let exponential =
        if w < 1 << 30 { -ln_near_one(-(leading(w) * UNIT)) } else { -ln(leading(w.wrapping_neg()) * UNIT) };
    -ln(exponential)
}

/// The Gumbel number of token `id` at a position: -ln(-ln u) for a u in (0, 1) that depends on nothing but the three. The
/// token whose [`score`] is largest is a draw from the softmax, so no order of summation matters.
pub fn gumbel(seed: u64, position: u32, id: u32) -> f32 {
    gumbel_of(stream(seed, position), id)
}

/// No Gumbel number is larger: -ln(2^-32) and what the logarithm may be off.
pub const MOST_GUMBEL: f32 = 22.2;

/// What tokens are compared by in a draw: `logit / temperature + gumbel`, times the temperature, since a product is rounded
/// the same way everywhere and a quotient is not.
pub fn score(logit: f32, temperature: f32, gumbel: f32) -> f32 {
    logit + temperature * gumbel
}

/// exp(-distance) in units of 2^-30, before it is cut to a whole number: weights of a row are whole numbers, so that their sums have
/// no order either. Distances are 0 or more.
fn scaled(distance: f32) -> f32 {
    if distance.partial_cmp(&21.0).is_none_or(|order| order.is_ge()) {
        return 0.0;
    }
    // exp(x) = 2^n * exp(rest), with a rest of at most half of ln 2.
    let x = -distance;
    let n = (x * std::f32::consts::LOG2_E + 0.5).floor();
    let rest = x - n * 0.693_359_4 + n * 2.121_944_4e-4;
    let mut sum = 1.987_569_1e-4_f32;
    for factor in [1.398_2e-3_f32, 8.333_452e-3, 4.166_579_6e-2, 1.666_666_5e-1, 5e-1] {
        sum = sum * rest + factor;
    }
    let square = rest * rest;
    (sum * square + rest + 1.0) * f32::from_bits((n as i32 + 127 + 30) as u32 * (1 << 23))
}

/// What a token weighs whose logit lies so far below the largest.
pub(super) fn weight(distance: f32) -> u32 {
    scaled(distance) as u32
}

/// A token's weight times its distance: the sum of these over that of the weights is the mean distance.
pub(super) fn spread(distance: f32) -> u32 {
    // Weights are zero from a finite distance on.
    if distance < 21.0 { (scaled(distance) * distance) as u32 } else { 0 }
}

/// The order of floats as an order of integers: NaN is below everything, -0 equals 0.
pub(super) fn order_key(x: f32) -> u32 {
    match x.to_bits() {
        _ if x.is_nan() => 0,
        0x8000_0000 => 0x8000_0000,
        bits if bits >> 31 == 1 => !bits,
        bits => bits | 0x8000_0000,
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Random bits along one coordinate.
    type Along = (&'static str, fn(u32) -> u32);

    /// Chi-square per degree of freedom minus one, in standard deviations: within 5 where the counts follow `expected`.
    fn deviation(counts: &[u64], expected: &[f64]) -> f64 {
        let chi: f64 = counts.iter().zip(expected).map(|(&n, e)| (n as f64 - e).powi(2) / e).sum();
        let freedom = (counts.len() - 1) as f64;
        (chi - freedom) / (2.0 * freedom).sqrt()
    }

    #[test]
    fn logarithms_are_those_of_f64() {
        for i in 1..200_000u32 {
            let x = i as f32 * 1.37e-4 + 1e-9;
            let want = f64::from(x).ln();
            assert!((f64::from(ln(x)) - want).abs() <= 2e-7 * want.abs() + 3e-8, "{x}: {} {want}", ln(x));
            let small = -0.25 * i as f32 / 200_000.0;
            let want = f64::from(small).ln_1p();
            assert!((f64::from(ln_near_one(small)) / want - 1.0).abs() < 3e-7, "{small}");
        }
        assert_eq!(leading(u32::MAX), 4_294_967_040.0);
        assert_eq!([leading(1), leading(0xff_ffff), leading(0x100_0001)], [1.0, 16_777_215.0, 16_777_216.0]);
    }

    #[test]
    fn weights_are_exponentials() {
        assert_eq!([weight(0.0), weight(f32::INFINITY), weight(f32::NAN), weight(25.0)], [1 << 30, 0, 0, 0]);
        assert_eq!([spread(0.0), spread(f32::INFINITY), spread(30.0)], [0, 0, 0]);
        let mut last = 1 << 30;
        for i in 1..22_000u32 {
            let distance = i as f32 * 1e-3;
            let want = (-f64::from(distance)).exp() * f64::from(1 << 30);
            assert!((f64::from(weight(distance)) - want).abs() <= 1.0 + 2e-7 * want, "{distance}");
            let want = want * f64::from(distance);
            assert!((f64::from(spread(distance)) - want).abs() <= 25.0 + 3e-7 * want, "{distance}");
            assert!(weight(distance) <= last, "{distance}: a smaller logit weighs more");
            last = weight(distance);
        }
    }

    #[test]
    fn random_bits_are_uniform_in_every_byte_along_every_coordinate() {
        let along: [Along; 4] = [
            ("ids", |i| random_bits(stream(7, 100), i)),
            ("positions", |i| random_bits(stream(7, i), 100)),
            ("seeds", |i| random_bits(stream(u64::from(i), 100), 100)),
            ("high seeds", |i| random_bits(stream(u64::from(i) << 32, 100), 100)),
        ];
        for (name, bits) in along {
            for byte in 0..4 {
                let (mut counts, mut pairs) = (vec![0u64; 256], vec![0u64; 65536]);
                let mut last = 0;
                for i in 0..1 << 20 {
                    let x = (bits(i) >> (8 * byte)) & 255;
                    counts[x as usize] += 1;
                    pairs[(last << 8 | x) as usize] += 1;
                    last = x;
                }
                assert!(deviation(&counts, &[4096.0; 256]).abs() < 5.0, "{name} byte {byte}");
                assert!(deviation(&pairs, &vec![16.0; 65536]).abs() < 5.0, "{name} byte {byte}: neighbours");
            }
        }
    }

    #[test]
    fn neighbours_differ_in_half_of_their_bits() {
        let near: [Along; 3] = [
            ("ids", |i| random_bits(stream(3, 9), i) ^ random_bits(stream(3, 9), i + 1)),
            ("positions", |i| random_bits(stream(3, i), 9) ^ random_bits(stream(3, i + 1), 9)),
            ("seeds", |i| random_bits(stream(u64::from(i), 9), 9) ^ random_bits(stream(u64::from(i) + 1, 9), 9)),
        ];
        for (name, differ) in near {
            for bit in 0..32 {
                let n = (0..100_000).filter(|&i| differ(i) >> bit & 1 == 1).count();
                assert!(n.abs_diff(50_000) < 800, "{name}: bit {bit} differs {n} times of 100000");
            }
        }
    }

    #[test]
    fn gumbel_numbers_have_their_mean_and_variance_and_stay_in_bounds() {
        let n = 1 << 20;
        let numbers = || (0..n).map(|i| f64::from(gumbel(0x0123_4567_89ab_cdef, i % 1000, i / 1000)));
        let mean = numbers().sum::<f64>() / f64::from(n);
        let variance = numbers().map(|x| (x - mean).powi(2)).sum::<f64>() / f64::from(n);
        assert!((mean - 0.577_215_66).abs() < 0.006, "{mean}");
        assert!((variance - std::f64::consts::PI.powi(2) / 6.0).abs() < 0.02, "{variance}");
        assert!(numbers().all(|x| (-3.2..=f64::from(MOST_GUMBEL)).contains(&x)));
    }

    #[test]
    fn extreme_bits_give_finite_numbers() {
        assert!((gumbel_from(0) - 22.180_71).abs() < 1e-4 && gumbel_from(0) <= MOST_GUMBEL, "{}", gumbel_from(0));
        assert!((gumbel_from(u32::MAX) + 3.099_223).abs() < 1e-4, "{}", gumbel_from(u32::MAX));
        assert!((gumbel_from((1 << 30) + 1) - gumbel_from((1 << 30) - 1)).abs() < 1e-5);
    }

    #[test]
    fn draws_follow_the_softmax() {
        let logits: Vec<f32> = (0..40).map(|i| ((i * 7) % 40) as f32 * 0.11).collect();
        for temperature in [0.7f32, 1.0, 1.5] {
            let weights: Vec<f64> = logits.iter().map(|l| f64::from(l / temperature).exp()).collect();
            let total: f64 = weights.iter().sum();
            let draws = 200_000;
            let mut counts = vec![0u64; logits.len()];
            for position in 0..draws {
                let at = |id: usize| score(logits[id], temperature, gumbel(42, position, id as u32));
                let best = (0..logits.len()).max_by(|a, b| at(*a).total_cmp(&at(*b)));
                counts[best.expect("some token")] += 1;
            }
            let expected: Vec<f64> = weights.iter().map(|w| w / total * f64::from(draws)).collect();
            assert!(deviation(&counts, &expected).abs() < 5.0, "{temperature}: {counts:?} of {expected:?}");
        }
    }

    /// Sequences that were drawn once must be drawn again by later versions.
    #[test]
    fn numbers_are_what_they_were() {
        let numbers = [gumbel(0, 0, 0), gumbel(1, 2, 3), gumbel(u64::MAX, 4095, 151_935)];
        assert_eq!(numbers.map(f32::to_bits), [1_012_072_340, 3_218_574_226, 1_062_848_974]);
    }
}
