//! The cache folder: SPIR-V by content hash and one pipeline cache per device and driver. A cache that cannot be
//! read or written costs time, never a result, so trouble is logged once and work continues.

use std::path::{Path, PathBuf};
use std::sync::atomic::{AtomicBool, Ordering};

use etcetera::BaseStrategy as _;
use kiln_system::environment;
use kiln_system::files::{Output, Overwrite};
use sha2::{Digest as _, Sha256};

/// Part of every key: a change of the compiler or of this crate's rules makes old entries unreachable.
const VERSION: &str = "kiln-2 glslang-0.9.1";

/// A folder for things that can be made again.
#[derive(Debug)]
pub struct Cache {
    folder: Option<PathBuf>,
    warned: AtomicBool,
}

impl Cache {
    /// The folder named by `KILN_CACHE_DIR`, else `kiln` in the user's cache folder.
    pub fn user() -> Cache {
        let named = environment::path("KILN_CACHE_DIR");
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
        // Looked at before it is opened: opening a pipe would wait for somebody to write to it.
        if std::fs::metadata(&path).is_ok_and(|m| !m.is_file()) {
            self.warn(&format!("{} is no regular file", path.display()));
            return None;
        }
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
        if checksum(name, body) != sum {
            log::warn!("{} is damaged; it will be made anew", path.display());
            return None;
        }
        Some(body.to_vec())
    }

    /// Writes an entry: to a temporary file first, so that no reader ever sees half of it.
    pub(crate) fn write(&self, name: &str, body: &[u8]) {
        let Some(folder) = &self.folder else { return };
        // Where one entry cannot be written the others cannot either.
        if self.warned.load(Ordering::Relaxed) {
            return;
        }
        let path = folder.join(name);
        if std::fs::symlink_metadata(&path).is_ok_and(|m| !m.is_file()) {
            return self.warn(&format!("{} is no regular file", path.display()));
        }
        let mut bytes = body.to_vec();
        bytes.extend_from_slice(&checksum(name, body));
        if let Some(Err(e)) = path.parent().map(std::fs::create_dir_all) {
            return self.warn(&format!("cannot write {}: {e}", path.display()));
        }
        if let Err(e) = Output::write(&path, Overwrite::Yes, &bytes) {
            self.warn(e.to_string().lines().next().unwrap_or_default());
        }
    }

    fn warn(&self, what: &str) {
        if !self.warned.swap(true, Ordering::Relaxed) {
            log::warn!("{what}; kernels are compiled anew each start (KILN_CACHE_DIR names another folder)");
        }
    }
}

/// Stands behind an entry's bytes. Its name is part of it, so that one entry cannot take another's place.
fn checksum(name: &str, body: &[u8]) -> [u8; 32] {
    let mut hash = Sha256::new();
    hash.update((name.len() as u64).to_le_bytes());
    hash.update(name);
    hash.update(body);
    hash.finalize().into()
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

    /// What can become of the file of an entry. Beside it lies `other.spv`, a good entry.
    type Damage = (&'static str, fn(&Path));
    const DAMAGES: &[Damage] = &[
        ("nothing left", |path| std::fs::write(path, b"").unwrap()),
        ("shorter than a checksum", |path| std::fs::write(path, b"short").unwrap()),
        ("zeros", |path| std::fs::write(path, [0; 37]).unwrap()),
        ("something else", |path| std::fs::write(path, [7; 100]).unwrap()),
        ("a bit of the body flipped", |path| change(path, |bytes| bytes[0] ^= 1)),
        ("a bit of the checksum flipped", |path| change(path, |bytes| *bytes.last_mut().unwrap() ^= 0x80)),
        ("cut by a byte", |path| change(path, |bytes| bytes.truncate(bytes.len() - 1))),
        ("a byte more", |path| change(path, |bytes| bytes.push(0))),
        ("another entry's file", |path| {
            std::fs::copy(path.with_file_name("other.spv"), path).unwrap();
        }),
        ("a link to another entry", |path| replace(path, |p| std::os::unix::fs::symlink("other.spv", p).unwrap())),
        ("a link to itself", |path| replace(path, |p| std::os::unix::fs::symlink("entry.spv", p).unwrap())),
        ("a folder", |path| replace(path, |p| std::fs::create_dir(p).unwrap())),
        ("a pipe without a writer", |path| {
            replace(path, |p| assert!(std::process::Command::new("mkfifo").arg(p).status().unwrap().success()))
        }),
    ];

    fn change(path: &Path, change: impl Fn(&mut Vec<u8>)) {
        let mut bytes = std::fs::read(path).unwrap();
        change(&mut bytes);
        std::fs::write(path, bytes).unwrap();
    }

    fn replace(path: &Path, make: impl Fn(&Path)) {
        std::fs::remove_file(path).unwrap();
        make(path);
    }

    #[test]
    fn a_damaged_entry_is_ignored_and_replaced() {
        for (what, damage) in DAMAGES {
            let folder = tempfile::tempdir().unwrap();
            let path = folder.path().join("entry.spv");
            let cache = Cache::at(Some(folder.path().to_owned()));
            assert_eq!(cache.read("entry.spv"), None, "there is none yet");
            cache.write("entry.spv", b"hello");
            cache.write("other.spv", b"another kernel");
            assert_eq!(cache.read("entry.spv").as_deref(), Some(&b"hello"[..]));
            damage(&path);
            assert_eq!(cache.read("entry.spv"), None, "{what}");
            // Only regular files are replaced; anything else under the name stays.
            let cache = Cache::at(Some(folder.path().to_owned()));
            let was_file = std::fs::symlink_metadata(&path).unwrap().is_file();
            cache.write("entry.spv", b"again");
            assert_eq!(cache.read("entry.spv").is_some(), was_file, "{what}");
            assert_eq!(std::fs::symlink_metadata(&path).unwrap().is_file(), was_file, "{what}");
            assert_eq!(cache.read("other.spv").as_deref(), Some(&b"another kernel"[..]), "{what}: its neighbour stays");
        }
    }

    #[test]
    fn what_cannot_be_written_leaves_nothing_and_is_tried_once() {
        let folder = tempfile::tempdir().unwrap();
        let cache = Cache::at(Some(folder.path().to_owned()));
        // Nothing can take the place of a folder.
        std::fs::create_dir_all(folder.path().join("a/b.spv/inside")).unwrap();
        cache.write("a/b.spv", b"hello");
        cache.write("a/c.spv", b"hello");
        let names: Vec<_> =
            std::fs::read_dir(folder.path().join("a")).unwrap().map(|e| e.unwrap().file_name()).collect();
        assert_eq!(names, ["b.spv"]);
        assert_eq!(cache.read("a/b.spv"), None, "a folder is no entry");
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
