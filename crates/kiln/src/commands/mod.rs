//! One file per command, and what several of them share.

pub(crate) mod bench;
pub(crate) mod chat;
pub(crate) mod devices;
pub(crate) mod doctor;
mod fit;
pub(crate) mod inspect;
pub(crate) mod logits;
pub(crate) mod plan;
pub(crate) mod prompt;
pub(crate) mod quantize;
pub(crate) mod run;
pub(crate) mod sampling_flags;
pub(crate) mod selftest;
pub(crate) mod serve;
pub(crate) mod synth;
pub(crate) mod top;
pub(crate) mod tune;
