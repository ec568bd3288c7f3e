//! When encoding ends before its text does: with more tokens than anybody can use, or when nobody waits for them any more.

use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};

use super::error::TokenizerError;

/// How far a text is encoded.
#[derive(Clone, Debug, Default)]
pub struct EncodeLimit {
    /// More tokens are an error, as soon as they are seen.
    pub tokens: Option<usize>,
    /// Encoding ends soon after this is set.
    pub cancelled: Option<Arc<AtomicBool>>,
}

impl EncodeLimit {
    /// Whether encoding should end, where nobody waits for it.
    pub(super) fn is_cancelled(&self) -> bool {
        self.cancelled.as_ref().is_some_and(|cancelled| cancelled.load(Ordering::Relaxed))
    }

    /// Whether encoding may continue with this many tokens.
    pub(super) fn check(&self, tokens: usize) -> Result<(), TokenizerError> {
        if let Some(limit) = self.tokens.filter(|limit| tokens > *limit) {
            return Err(TokenizerError::OverLimit { tokens, limit });
        }
        if self.is_cancelled() {
            return Err(TokenizerError::Cancelled);
        }
        Ok(())
    }
}
