//! The parts that architectures are put together from. Each reads its weights from the file ([`crate::model::Loader`]) and
//! adds its steps to a plain plan ([`crate::plan::Builder`]).

pub mod altup;
pub mod attend;
pub mod attention;
pub mod blocks_of_tokens;
pub mod compressed;
pub mod decoder;
pub mod delta_net;
pub mod draft_head;
pub mod indexer;
pub mod latent;
pub mod lightning;
pub mod low_rank_streams;
pub mod mamba;
pub mod mixer;
pub mod mlp;
pub mod moe;
pub mod ngrams;
pub mod norms;
pub mod output;
pub mod per_layer;
pub mod pool;
pub mod relative;
pub mod short_conv;
pub mod streams;
pub mod switched;
