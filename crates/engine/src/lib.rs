//! From a model file to text: configuration and weights, the plan, two executors that run it, sampler, tokenizer.

pub mod quantise_recipe;
pub mod requantise;
pub mod synth;
pub mod tokenizer;
