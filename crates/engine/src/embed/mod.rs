//! Vectors of texts: what is made of the vectors of their tokens. A pooling takes one of them or their mean; small layers of the
//! file may follow, which make a shorter vector or a score; then the length is brought to 1. [`crate::run::Scheduler::embed`]
//! walks it.

mod layers;
mod pair;

pub use layers::Layers;
pub use pair::pair;

use crate::Error;
use crate::model::{Keys, Model};

/// Beginnings of the tensors that [`Layers`] reads. Plans have no use for them.
pub(crate) const TENSORS: [&str; 3] = ["cls.", "dense_2.", "dense_3."];

/// What becomes of the vectors of a text's tokens.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Pooling {
    /// All of them stay.
    None,
    /// Their mean.
    Mean,
    /// That of the first token.
    Cls,
    /// That of the last token.
    Last,
    /// Scores of a text, made by the layers of the file out of one vector.
    Rank,
}

/// Every pooling by its name; files say the number.
const NAMES: [(&str, Pooling); 5] = [
    ("none", Pooling::None),
    ("mean", Pooling::Mean),
    ("cls", Pooling::Cls),
    ("last", Pooling::Last),
    ("rank", Pooling::Rank),
];

impl Pooling {
    /// The names, for messages.
    pub fn names() -> String {
        NAMES.map(|(name, _)| name).join(", ")
    }

    /// The pooling of this name.
    pub fn from_name(name: &str) -> Option<Pooling> {
        NAMES.iter().find(|(known, _)| *known == name).map(|(_, pooling)| *pooling)
    }

    /// Its name.
    pub fn name(self) -> &'static str {
        NAMES.iter().find(|(_, pooling)| *pooling == self).map_or("", |(name, _)| name)
    }

    /// What a model was made for: what its file says. Encoders whose file says nothing get the mean. `None` for models that write.
    pub fn of(model: &Model) -> Result<Option<Pooling>, Error> {
        let keys = Keys::new(&model.gguf, model.config.architecture.name);
        let key = keys.name("pooling_type");
        // Files say 0 or -1, as either kind of number, where they leave it open.
        match model.gguf.metadata().get_i64_opt(&key)? {
            None | Some(0 | -1 | 0xffff_ffff) => {
                let reads = model.facts.encodes || model.facts.start.is_some();
                Ok(reads.then_some(Pooling::Mean))
            }
            Some(number) => {
                let found = usize::try_from(number).ok().and_then(|number| NAMES.get(number));
                let want = format!("0 to {}", NAMES.len() - 1);
                let wrong = || Error::Hyperparameter { key, value: number.to_string(), want };
                found.map(|(_, pooling)| Some(*pooling)).ok_or_else(wrong)
            }
        }
    }

    /// The pooling that a request gets: the one that it names, else the model's own. A model that is no embedder has none.
    pub fn choose(model: &Model, named: Option<Pooling>) -> Result<Pooling, Error> {
        let own = Pooling::of(model)?;
        match named.or(own) {
            Some(Pooling::Rank) if !Layers::can_rank(model) => Err(Error::NoRanking),
            Some(pooling) => Ok(pooling),
            None => Err(Error::NoEmbedder { architecture: model.config.architecture.name }),
        }
    }

    /// Which token a score is made of, or their mean.
    fn of_scores(architecture: &str) -> Pooling {
        match architecture {
            "modern-bert" => Pooling::Mean,
            "qwen3" | "qwen3vl" => Pooling::Last,
            _ => Pooling::Cls,
        }
    }

    /// How the vectors of tokens become one, whatever follows.
    pub(crate) fn of_tokens(self, architecture: &str) -> Pooling {
        if self == Pooling::Rank { Pooling::of_scores(architecture) } else { self }
    }
}

/// How long a vector is in the end.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Length {
    /// As it is.
    Free,
    /// Its largest element is 32760 or -32760.
    Largest,
    /// The sum of its elements' powers, taken to 1 over the same power, is 1; with 2 this is the length that people mean.
    Norm(u32),
}

impl Length {
    /// From the number that llama.cpp's tools take: below 0 for none, 0 for the largest element, else the power.
    pub fn from_number(n: i32) -> Length {
        match u32::try_from(n) {
            Err(_) => Length::Free,
            Ok(0) => Length::Largest,
            Ok(power) => Length::Norm(power),
        }
    }

    /// Brings a vector to this length. One of zeros stays.
    pub fn apply(self, vector: &mut [f32]) {
        let values = || vector.iter().map(|v| f64::from(v.abs()));
        let length = match self {
            Length::Free => return,
            Length::Largest => values().fold(0.0, f64::max) / 32760.0,
            Length::Norm(2) => values().map(|v| v * v).sum::<f64>().sqrt(),
            Length::Norm(power) => {
                let power = f64::from(power);
                values().map(|v| v.powf(power)).sum::<f64>().powf(1.0 / power)
            }
        };
        if length > 0.0 {
            let factor = (1.0 / length) as f32;
            vector.iter_mut().for_each(|v| *v *= factor);
        }
    }
}

/// The mean of rows of this width.
pub(crate) fn mean(rows: &[f32], width: usize) -> Vec<f32> {
    let mut sums = vec![0.0f64; width];
    for row in rows.chunks_exact(width) {
        sums.iter_mut().zip(row).for_each(|(sum, v)| *sum += f64::from(*v));
    }
    let count = (rows.len() / width).max(1) as f64;
    sums.into_iter().map(|sum| (sum / count) as f32).collect()
}

/// The similarity of two vectors: 1 where they point the same way, 0 at a right angle.
pub fn cosine(a: &[f32], b: &[f32]) -> f64 {
    let dot = |a: &[f32], b: &[f32]| a.iter().zip(b).map(|(a, b)| f64::from(*a) * f64::from(*b)).sum::<f64>();
    let length = (dot(a, a) * dot(b, b)).sqrt();
    if length > 0.0 { dot(a, b) / length } else { 0.0 }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn lengths_are_those_of_their_numbers() {
        let of = |n: i32| {
            let mut vector = [3.0f32, -4.0, 0.0];
            Length::from_number(n).apply(&mut vector);
            vector
        };
        assert_eq!(of(-1), [3.0, -4.0, 0.0]);
        assert_eq!(of(0), [24570.0, -32760.0, 0.0]);
        assert_eq!(of(2), [0.6, -0.8, 0.0]);
        assert!((of(1)[0] - 3.0 / 7.0).abs() < 1e-7, "{:?}", of(1));
        assert!((of(3)[1] + 4.0 / 91f32.cbrt()).abs() < 1e-6, "{:?}", of(3));
        let mut zero = [0.0f32; 2];
        Length::Norm(2).apply(&mut zero);
        assert_eq!(zero, [0.0; 2]);
    }

    #[test]
    fn the_mean_is_of_rows() {
        assert_eq!(mean(&[1.0, 2.0, 3.0, 6.0], 2), [2.0, 4.0]);
        assert!((cosine(&[1.0, 1.0], &[1.0, 0.0]) - 0.5f64.sqrt()).abs() < 1e-12);
    }
}
