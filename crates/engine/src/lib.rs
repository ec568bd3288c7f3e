//! From a model file to text: configuration and weights, the plan, two executors that run it, sampler, tokenizer.
//!
//! The way of the data: GGUF file, [`model`] (configuration and weights), [`plan`] built by [`arch`], [`executor`],
//! logits, [`sampler`], token, [`tokenizer`], text. [`run`] walks it.

pub mod arch;
pub mod blocks;
pub mod compare;
pub mod diffusion;
pub mod embed;
pub mod error;
pub mod executor;
pub mod importance;
pub mod lower;
pub mod measure;
pub mod media;
pub mod model;
pub mod placement;
pub mod plan;
pub mod quantise_recipe;
pub mod requantise;
pub mod run;
pub mod sampler;
pub mod sound;
pub mod state;
pub mod synth;
pub mod text;
pub mod tokenizer;
pub mod vision;
pub mod weights;

pub use error::Error;
pub use run::Session;
