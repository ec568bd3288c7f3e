//! `sample`: from logits to a token.

mod numbers;

pub use numbers::{MOST_GUMBEL, gumbel, gumbel_of, score, stream};
