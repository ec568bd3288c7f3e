//! How well a model knows a text: perplexity, and how far its probabilities are from another model's. Numbers alone; who runs
//! the models and who prints lives elsewhere.

mod divergence;
mod logits_file;
mod perplexity;

pub use divergence::{Base, Divergence, Quantiles, compare};
pub use logits_file::{LogitsFile, LogitsHeader, LogitsWriter, Recorded};
pub use perplexity::{Estimate, LogProbs, Mean};
