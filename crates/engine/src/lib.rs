//! Filled in below.
pub mod tokenizer;
