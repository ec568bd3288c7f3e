//! The names GGUF gives to tensors. No other file spells them.

/// Token embeddings `[hidden, vocab]`.
pub const TOKEN_EMBEDDING: &str = "token_embd.weight";
/// Weight of the norm of the embeddings, where there is one.
pub const TOKEN_EMBEDDING_NORM: &str = "token_embd_norm.weight";
/// Bias of the norm of the embeddings.
pub const TOKEN_EMBEDDING_NORM_BIAS: &str = "token_embd_norm.bias";
/// Weight of the last norm.
pub const OUTPUT_NORM: &str = "output_norm.weight";
/// Bias of the last norm, where it has one.
pub const OUTPUT_NORM_BIAS: &str = "output_norm.bias";
/// The output matrix `[hidden, vocab]`; the embeddings serve where it is missing.
pub const OUTPUT: &str = "output.weight";
/// Divisors of the rotary frequencies.
pub const ROPE_FACTORS: &str = "rope_freqs.weight";

/// A tensor of a layer: `blk.3.attn_q.weight` for `("attn_q.weight", 3)`.
pub fn layer(name: &str, layer: usize) -> String {
    format!("blk.{layer}.{name}")
}
