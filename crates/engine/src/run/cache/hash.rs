//! What identifies a prefix: a keyed hash of its cache scope and of every token in it. Two prefixes that
//! collide cannot be constructed without the key.

use sha2::{Digest as _, Sha256};

/// Keeps the prefixes of one tenant from all others: an API key, a salt, the scales of adapters.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Hash)]
pub(crate) struct CacheScope(pub(crate) u64);

/// Identifies a prefix by its scope and its tokens.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub(crate) struct PrefixHash([u8; 16]);

/// Makes prefix hashes with a secret key.
#[derive(Clone)]
pub(crate) struct PrefixHasher {
    key: [u8; 32],
}

impl PrefixHash {
    /// Its last 64 bits, which name it to others.
    pub(super) fn short(self) -> u64 {
        let [.., a, b, c, d, e, f, g, h] = self.0;
        u64::from_be_bytes([a, b, c, d, e, f, g, h])
    }

    /// Reads what [`PrefixHash`] prints.
    pub(crate) fn parse(hex: &str) -> Option<PrefixHash> {
        let is_hex = |byte: u8| byte.is_ascii_digit() || (b'a'..=b'f').contains(&byte);
        if hex.len() != 32 || !hex.bytes().all(is_hex) {
            return None;
        }
        u128::from_str_radix(hex, 16).ok().map(|number| PrefixHash(number.to_be_bytes()))
    }
}

impl std::fmt::Display for PrefixHash {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        write!(f, "{:032x}", u128::from_be_bytes(self.0))
    }
}

impl std::fmt::Debug for PrefixHasher {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.write_str("PrefixHasher { key: secret }")
    }
}

impl PrefixHasher {
    /// A hasher with a key that only this process knows.
    pub(crate) fn new() -> PrefixHasher {
        let mut key = [0; 32];
        getrandom::fill(&mut key).expect("the system has random numbers");
        PrefixHasher { key }
    }

    /// A hasher with a key that is kept elsewhere.
    pub(crate) fn with_key(key: [u8; 32]) -> PrefixHasher {
        PrefixHasher { key }
    }

    /// The empty prefix of a scope.
    pub(crate) fn root(&self, scope: CacheScope) -> PrefixHash {
        self.hash(&[b"scope", &scope.0.to_le_bytes()])
    }

    /// A prefix followed by these tokens.
    pub(crate) fn extend(&self, prefix: PrefixHash, tokens: &[u32]) -> PrefixHash {
        self.hash(&[b"token", &prefix.0, bytemuck::cast_slice(tokens)])
    }

    fn hash(&self, parts: &[&[u8]]) -> PrefixHash {
        let mut hash = Sha256::new_with_prefix(self.key);
        parts.iter().for_each(|part| hash.update(part));
        let mut bytes = [0; 16];
        bytes.copy_from_slice(&hash.finalize()[..16]);
        PrefixHash(bytes)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn hashes_depend_on_key_scope_tokens_and_order() {
        let hasher = PrefixHasher::new();
        let of = |hasher: &PrefixHasher, scope, pages: &[&[u32]]| {
            pages.iter().fold(hasher.root(CacheScope(scope)), |hash, tokens| hasher.extend(hash, tokens))
        };
        let one = of(&hasher, 1, &[&[1, 2], &[3, 4]]);
        assert_eq!(one, of(&hasher, 1, &[&[1, 2], &[3, 4]]));
        for other in [
            of(&hasher, 2, &[&[1, 2], &[3, 4]]),
            of(&hasher, 1, &[&[3, 4], &[1, 2]]),
            of(&hasher, 1, &[&[1, 2]]),
            of(&PrefixHasher::new(), 1, &[&[1, 2], &[3, 4]]),
        ] {
            assert_ne!(one, other);
        }
    }
}
