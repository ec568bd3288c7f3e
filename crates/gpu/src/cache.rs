//! The cache folder: SPIR-V by content hash and one pipeline cache per device and driver. A cache that cannot be
//! read or written costs time, never a result, so trouble is logged once and work goes on.

use std::path::{Path, PathBuf};
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};

use etcetera::BaseStrategy as _;
use sha2::{Digest as _, Sha256};

/// Part of every key: a change of the compiler or of this crate's rules makes old entries unreachable.
const VERSION: &str = "kiln-1 glslang-0.9.1";

/// A folder for things that can be made again.
#[derive(Debug)]
pub struct Cache {
    folder: Option<PathBuf>,
    warned: AtomicBool,
}

impl Cache {
    /// The folder named by `KILN_CACHE_DIR`, else `kiln` in the user's cache folder.
    pub fn user() -> Cache {
        let named = std::env::var_os("KILN_CACHE_DIR").map(PathBuf::from);
        let folder = named.or_else(|| etcetera::choose_base_strategy().ok().map(|dirs| dirs.cache_dir().join("kiln")));
        Cache::at(folder)
    }

    /// This folder, or none.
    pub fn at(folder: Option<PathBuf>) -> Cache {
        Cache { folder, warned: AtomicBool::new(false) }
    }

    /// Where entries lie.
    pub fn folder(&self) -> Option<&Path> {
        self.folder.as_deref()
    }

    /// The entry of this name with its checksum verified; `None` where there is none or it is damaged.
    pub(crate) fn read(&self, name: &str) -> Option<Vec<u8>> {
        let path = self.folder.as_ref()?.join(name);
        let bytes = match std::fs::read(&path) {
            Ok(bytes) => bytes,
            Err(e) if e.kind() == std::io::ErrorKind::NotFound => return None,
            Err(e) => {
                self.warn(&format!("cannot read {}: {e}", path.display()));
                return None;
            }
        };
        let sum_at = bytes.len().checked_sub(32)?;
        let (body, sum) = bytes.split_at(sum_at);
        if Sha256::digest(body).as_slice() != sum {
            log::warn!("{} is damaged; it will be made anew", path.display());
            return None;
        }
        Some(body.to_vec())
    }

    /// Writes an entry: to a temporary file first, so that no reader ever sees half of it.
    pub(crate) fn write(&self, name: &str, body: &[u8]) {
        let Some(folder) = &self.folder else { return };
        let path = folder.join(name);
        // Unique among processes and threads: two may write the same entry at once.
        static WRITES: AtomicU64 = AtomicU64::new(0);
        let number = WRITES.fetch_add(1, Ordering::Relaxed);
        let temporary = path.with_extension(format!("tmp{}-{number}", std::process::id()));
        let mut bytes = body.to_vec();
        bytes.extend_from_slice(&Sha256::digest(body));
        let written = path
            .parent()
            .map_or(Ok(()), std::fs::create_dir_all)
            .and_then(|()| std::fs::write(&temporary, &bytes))
            .and_then(|()| std::fs::rename(&temporary, &path));
        if let Err(e) = written {
            self.warn(&format!("cannot write {}: {e}", path.display()));
        }
    }

    fn warn(&self, what: &str) {
        if !self.warned.swap(true, Ordering::Relaxed) {
            log::warn!("{what}; kernels are compiled anew each start (KILN_CACHE_DIR names another folder)");
        }
    }
}

/// The key of a text: hex of a hash over the version, the texts and their lengths.
pub(crate) fn key(parts: &[&[u8]]) -> String {
    let mut hash = Sha256::new();
    hash.update(VERSION);
    for part in parts {
        hash.update((part.len() as u64).to_le_bytes());
        hash.update(part);
    }
    hash.finalize().iter().take(16).map(|b| format!("{b:02x}")).collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_damaged_entry_is_ignored_and_replaced() {
        let folder = std::env::temp_dir().join(format!("kiln-cache-{}", std::process::id()));
        let cache = Cache::at(Some(folder.clone()));
        assert_eq!(cache.read("a/b.spv"), None);
        cache.write("a/b.spv", b"hello");
        assert_eq!(cache.read("a/b.spv").as_deref(), Some(&b"hello"[..]));
        let path = folder.join("a/b.spv");
        for damage in [&b""[..], b"short", &[7; 100]] {
            std::fs::write(&path, damage).unwrap();
            assert_eq!(cache.read("a/b.spv"), None);
        }
        cache.write("a/b.spv", b"again");
        assert_eq!(cache.read("a/b.spv").as_deref(), Some(&b"again"[..]));
        std::fs::remove_dir_all(folder).unwrap();
    }

    #[test]
    fn a_folder_that_cannot_be_made_is_no_error() {
        let file = std::env::temp_dir().join(format!("kiln-cache-file-{}", std::process::id()));
        std::fs::write(&file, b"").unwrap();
        let cache = Cache::at(Some(file.join("below")));
        cache.write("x", b"y");
        assert_eq!(cache.read("x"), None);
        std::fs::remove_file(file).unwrap();
    }

    #[test]
    fn keys_tell_parts_apart() {
        assert_ne!(key(&[b"ab", b"c"]), key(&[b"a", b"bc"]));
    }
}
