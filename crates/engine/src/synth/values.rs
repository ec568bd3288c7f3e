//! Random numbers by position: element `i` of a tensor is a function of seed, name and `i`, so that any number of
//! threads makes the same file.

/// How the elements of a tensor are spread.
#[derive(Clone, Debug, PartialEq)]
pub(super) enum Fill {
    /// About normal, with this mean and deviation.
    Normal(f32, f32),
    /// Even between two bounds.
    Even(f32, f32),
    /// These numbers.
    Listed(Vec<f32>),
}

/// The numbers of one tensor.
#[derive(Clone, Copy, Debug)]
pub(super) struct Values(u64);

/// Scrambles 64 bits; neighbouring inputs give unrelated outputs.
pub(super) fn scramble(mut x: u64) -> u64 {
    x ^= x >> 30;
    x = x.wrapping_mul(0xbf58_476d_1ce4_e5b9);
    x ^= x >> 27;
    x = x.wrapping_mul(0x94d0_49bb_1331_11eb);
    x ^ (x >> 31)
}

impl Values {
    pub(super) fn new(seed: u64, name: &str) -> Values {
        let hash = name.bytes().fold(seed, |h, b| scramble(h ^ u64::from(b)).wrapping_add(0x9e37_79b9_7f4a_7c15));
        Values(hash)
    }

    /// 64 bits for this position.
    pub(super) fn bits(self, at: u64) -> u64 {
        scramble(self.0.wrapping_add(at.wrapping_mul(0x9e37_79b9_7f4a_7c15)))
    }

    /// The elements from `first` on.
    pub(super) fn fill(self, fill: &Fill, first: u64, out: &mut [f32]) {
        let (mean, deviation) = match fill {
            Fill::Normal(mean, deviation) => (*mean, *deviation),
            Fill::Even(low, high) => {
                let step = (high - low) / (1u64 << 24) as f32;
                for (i, x) in out.iter_mut().enumerate() {
                    *x = low + step * (self.bits(first + i as u64) >> 40) as f32;
                }
                return;
            }
            Fill::Listed(list) => {
                let first = usize::try_from(first).expect("listed tensors are short");
                out.copy_from_slice(&list[first..first + out.len()]);
                return;
            }
        };
        // The sum of four even numbers is close to normal and has no far tails; its deviation is 65536 / sqrt(3).
        let factor = deviation * 3f32.sqrt() / 65536.0;
        for (i, x) in out.iter_mut().enumerate() {
            let bits = self.bits(first + i as u64);
            let sum = (bits & 0xffff) + (bits >> 16 & 0xffff) + (bits >> 32 & 0xffff) + (bits >> 48);
            *x = mean + factor * (sum as f32 - 131_070.0);
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn values_have_their_mean_and_deviation_and_depend_on_the_position_alone() {
        let values = Values::new(7, "blk.0.attn_q.weight");
        let mut all = vec![0.0; 100_000];
        values.fill(&Fill::Normal(1.0, 0.5), 0, &mut all);
        let mean = all.iter().sum::<f32>() / all.len() as f32;
        let deviation = (all.iter().map(|x| (x - mean).powi(2)).sum::<f32>() / all.len() as f32).sqrt();
        assert!((mean - 1.0).abs() < 0.01 && (deviation - 0.5).abs() < 0.01, "{mean} {deviation}");
        let mut part = vec![0.0; 10];
        values.fill(&Fill::Normal(1.0, 0.5), 5000, &mut part);
        assert_eq!(part, all[5000..5010]);
        Values::new(8, "blk.0.attn_q.weight").fill(&Fill::Normal(1.0, 0.5), 5000, &mut part);
        assert_ne!(part, all[5000..5010], "another seed gives other numbers");
    }
}
