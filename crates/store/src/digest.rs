//! SHA-256 as registries write it: 64 digits in lower case, and nothing else is one.

use std::fmt;
use std::fs::File;
use std::io::Read as _;
use std::path::Path;

use serde::{Deserialize, Serialize};
use sha2::{Digest as _, Sha256};

use crate::error::{Error, Result};

/// A SHA-256.
#[derive(Clone, PartialEq, Eq, Hash, Serialize, Deserialize)]
#[serde(try_from = "String", into = "String")]
pub struct Digest(String);

impl Digest {
    /// Reads 64 hexadecimal digits.
    pub fn parse(text: &str) -> Option<Digest> {
        let is_digit = |b: u8| matches!(b, b'0'..=b'9' | b'a'..=b'f');
        (text.len() == 64 && text.bytes().all(is_digit)).then(|| Digest(text.to_owned()))
    }

    /// The digits.
    pub fn hex(&self) -> &str {
        &self.0
    }

    /// Of a text.
    pub fn of(bytes: &[u8]) -> Digest {
        let mut hasher = Hasher::default();
        hasher.update(bytes);
        hasher.finish()
    }
}

impl fmt::Debug for Digest {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(&self.0)
    }
}

impl fmt::Display for Digest {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(&self.0)
    }
}

impl TryFrom<String> for Digest {
    type Error = String;

    fn try_from(text: String) -> Result<Digest, String> {
        Digest::parse(&text).ok_or_else(|| "a SHA-256 has 64 hexadecimal digits".to_owned())
    }
}

impl From<Digest> for String {
    fn from(digest: Digest) -> String {
        digest.0
    }
}

/// Takes bytes as they come.
#[derive(Default)]
pub(crate) struct Hasher(Sha256);

impl Hasher {
    pub(crate) fn update(&mut self, bytes: &[u8]) {
        self.0.update(bytes);
    }

    pub(crate) fn finish(self) -> Digest {
        Digest(self.0.finalize().iter().map(|b| format!("{b:02x}")).collect())
    }
}

/// The hash of a file; `progress` hears of every piece that was read.
pub fn hash_file(path: &Path, progress: &mut dyn FnMut(u64)) -> Result<Digest> {
    let mut file = File::open(path).map_err(Error::io(path))?;
    let (mut piece, mut hasher) = (vec![0; 1 << 20], Hasher::default());
    loop {
        let n = file.read(&mut piece).map_err(Error::io(path))?;
        if n == 0 {
            return Ok(hasher.finish());
        }
        hasher.update(&piece[..n]);
        progress(n as u64);
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn nothing_but_64_digits_is_one() {
        let good = "97ff8a35544dcf40ad84047074439dd6aa3a0be469ea578a1b1c017d939ec61c";
        assert_eq!(Digest::of(b"a model").hex(), good);
        assert!(Digest::parse(good).is_some());
        for bad in ["", &good[1..], &good.to_uppercase(), &good.replace('9', "/"), "../../../../etc/passwd"] {
            assert!(Digest::parse(bad).is_none(), "{bad}");
        }
    }
}
