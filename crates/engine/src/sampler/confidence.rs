//! A draw at any place of a text, with how sure the model is of it: what models need that fill in texts, where the likeliest places
//! are filled first. Its numbers belong to seed, round, place and token, whatever was drawn before.

use kiln_kernels::sample::{gumbel_of, score, stream};

use super::{Kind, SampleError, Sampler};

/// The ids whose noise decides about places in the place of tokens: no vocabulary has them.
const CHANCE: u32 = u32::MAX - 1;
const LEANING: u32 = u32::MAX - 2;

/// A token for a place, and what is left of the distribution after all samplers says of it.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Drawn {
    /// The token.
    pub token: u32,
    /// Its probability.
    pub probability: f64,
    /// By how much the likeliest token is likelier than the next.
    pub margin: f64,
    /// How little is known, in nats: 0 where one token is certain.
    pub entropy: f64,
}

impl Sampler {
    fn stream_at(&self, [round, place]: [usize; 2]) -> [u32; 2] {
        stream(self.seed.wrapping_add((round as u64).wrapping_mul(0x9e37_79b9_7f4a_7c15)), place as u32)
    }

    /// A number between 0 and 1 for a place in a round.
    pub fn chance_at(&self, at: [usize; 2]) -> f64 {
        (-(-f64::from(gumbel_of(self.stream_at(at), CHANCE))).exp()).exp()
    }

    /// Noise that makes the largest of scores a draw by their exponentials.
    pub fn noise_at(&self, at: [usize; 2]) -> f64 {
        f64::from(gumbel_of(self.stream_at(at), LEANING))
    }

    /// Draws a token other than `banned` for a place in a round, both by number. Without a temperature it is the likeliest one, and sure
    /// as the samplers before the temperature have it.
    pub fn draw_at(&self, logits: &[f32], banned: u32, at: [usize; 2]) -> Result<Drawn, SampleError> {
        let mut candidates = self.candidates(logits, None)?;
        candidates.retain(|item| item.id != banned);
        if candidates.len() == 0 {
            return Err(SampleError::NothingLeft);
        }
        let greedy = self.sampling.temperature <= 0.0;
        for &kind in &self.sampling.samplers {
            if !(greedy && kind == Kind::Temperature) {
                self.apply(kind, &mut candidates);
            }
        }
        candidates.settle();
        candidates.sort_front(2);
        let probabilities = candidates.probabilities();
        let stream = self.stream_at(at);
        let noise = |id: u32| if greedy { 0.0 } else { gumbel_of(stream, id) };
        let scored = candidates.items().iter().zip(&probabilities);
        let scored = scored.map(|(item, probability)| (score(item.logit, 1.0, noise(item.id)), item.id, *probability));
        let best = scored.min_by(|a, b| b.0.total_cmp(&a.0).then(a.1.cmp(&b.1)));
        let (_, token, probability) = best.ok_or(SampleError::NothingLeft)?;
        let margin = probabilities[0] - probabilities.get(1).copied().unwrap_or(0.0);
        let entropy = probabilities.iter().filter(|p| **p > 0.0).map(|p| -p * p.ln()).sum();
        Ok(Drawn { token, probability, margin, entropy })
    }
}

#[cfg(test)]
mod tests {
    use super::super::Sampling;
    use super::*;

    fn sampler(temperature: f32, seed: u64) -> Sampler {
        let sampling =
            Sampling { temperature, top_k: 0, top_p: 1.0, min_p: 0.0, seed: Some(seed), ..Sampling::default() };
        Sampler::new(sampling, 4, None).unwrap()
    }

    #[test]
    fn a_draw_tells_how_sure_it_is() {
        let logits: Vec<f32> = [0.5f32, 0.25, 0.125, 0.125].iter().map(|p| p.ln()).collect();
        let drawn = sampler(0.0, 1).draw_at(&logits, 9, [0, 0]).unwrap();
        assert_eq!(drawn.token, 0);
        let close = |a: f64, b: f64| (a - b).abs() < 1e-6;
        assert!(close(drawn.probability, 0.5) && close(drawn.margin, 0.25), "{drawn:?}");
        assert!(close(drawn.entropy, 1.75 * std::f64::consts::LN_2), "{drawn:?}");
        let other = sampler(0.0, 1).draw_at(&logits, 0, [0, 0]).unwrap();
        assert_eq!((other.token, close(other.probability, 0.5)), (1, true), "what is banned has no share");
    }

    #[test]
    fn draws_belong_to_seed_round_and_place() {
        let logits = [0.0f32; 4];
        let draws = |seed: u64, round: usize| -> Vec<u32> {
            (0..200).map(|place| sampler(1.0, seed).draw_at(&logits, 9, [round, place]).unwrap().token).collect()
        };
        assert_eq!(draws(1, 3), draws(1, 3));
        assert!(draws(1, 3) != draws(1, 4) && draws(1, 3) != draws(2, 3));
        let counts = (0..4).map(|id| draws(1, 0).iter().filter(|t| **t == id).count());
        assert!(counts.clone().all(|n| (25..75).contains(&n)), "{:?}", counts.collect::<Vec<_>>());
    }
}
