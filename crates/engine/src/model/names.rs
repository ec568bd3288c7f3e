//! Names of tensors that several parts of the engine ask for. Architectures and blocks spell those that only they read.

/// Token embeddings `[hidden, vocab]`.
pub const TOKEN_EMBEDDING: &str = "token_embd.weight";
/// Divisors of the rotary frequencies.
pub const ROPE_FACTORS: &str = "rope_freqs.weight";
