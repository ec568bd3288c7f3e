//! A fast seeded hasher for the lookup tables. Keys come from model files and prompts, so the seed is random per process:
//! nobody can prepare keys that all collide.

use std::hash::{BuildHasher, Hasher, RandomState};
use std::sync::OnceLock;

/// A map with the fast hasher.
pub(super) type FastMap<K, V> = std::collections::HashMap<K, V, FoldState>;

const MULTIPLIER: u64 = 0x9E37_79B9_7F4A_7C15;

/// Builds [`Fold`] hashers from the seed of this process.
#[derive(Clone, Copy)]
pub(super) struct FoldState(u64);

impl Default for FoldState {
    fn default() -> Self {
        static SEED: OnceLock<u64> = OnceLock::new();
        Self(*SEED.get_or_init(|| RandomState::new().hash_one(MULTIPLIER)))
    }
}

impl BuildHasher for FoldState {
    type Hasher = Fold;

    fn build_hasher(&self) -> Fold {
        Fold { state: self.0, key: self.0.rotate_left(32) | 1 }
    }
}

/// Mixes eight bytes at a time by a folded 128-bit product.
pub(super) struct Fold {
    state: u64,
    key: u64,
}

impl Fold {
    fn mix(&mut self, word: u64) {
        let product = u128::from(self.state ^ word) * u128::from(self.key ^ MULTIPLIER);
        self.state = (product as u64) ^ ((product >> 64) as u64) ^ self.key;
    }
}

impl Hasher for Fold {
    fn write(&mut self, bytes: &[u8]) {
        let mut chunks = bytes.chunks_exact(8);
        for chunk in &mut chunks {
            let mut word = [0; 8];
            word.copy_from_slice(chunk);
            self.mix(u64::from_le_bytes(word));
        }
        let rest = chunks.remainder();
        let mut word = [0; 8];
        word[..rest.len()].copy_from_slice(rest);
        // The length tells trailing zero bytes from padding.
        self.mix(u64::from_le_bytes(word) ^ (bytes.len() as u64).rotate_right(8));
    }

    fn write_u8(&mut self, value: u8) {
        self.mix(u64::from(value));
    }

    fn write_u64(&mut self, value: u64) {
        self.mix(value);
    }

    fn write_usize(&mut self, value: usize) {
        self.mix(value as u64);
    }

    fn finish(&self) -> u64 {
        self.state
    }
}
