//! The disk tier: pages and states of finished sequences in files, found again after a restart. A folder has a secret that keys
//! prefix hashes and checksums, and a folder for each model, cache layout and version of Kiln. What goes wrong costs what would have
//! been found, never a request: it is said once, and the engine computes.

mod file;
mod index;

use std::collections::HashMap;
use std::io::{self, Write as _};
use std::path::{Path, PathBuf};
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::mpsc::{Receiver, Sender, channel};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::thread::JoinHandle;

use kiln_system::files::stale;
use kiln_system::os;
use sha2::{Digest as _, Sha256};

use super::cache::{Blob, PrefixHash};
use file::Unreadable;
pub(super) use index::DiskKey;
use index::Index;

/// Bytes that wait to be written, at most; what comes beside them is not kept.
const MOST_PENDING: usize = 1 << 30;
const SECRET: &str = "secret";

/// Files of one model.
pub(super) struct DiskTier {
    folder: PathBuf,
    key: [u8; 32],
    index: Index,
    to: Option<Sender<Job>>,
    thread: Option<JoinHandle<()>>,
    pending: Arc<Pending>,
    /// Whether a file could not be written: nothing more is.
    is_full: Arc<AtomicBool>,
    has_said: bool,
}

/// What waits to be written.
#[derive(Default)]
struct Pending(Mutex<HashMap<DiskKey, Blob>>);

impl Pending {
    fn blobs(&self) -> MutexGuard<'_, HashMap<DiskKey, Blob>> {
        self.0.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

/// What the writing thread does.
enum Job {
    Write(DiskKey),
    Remove(PathBuf),
    Touch(PathBuf),
}

impl DiskTier {
    /// Opens a folder for at most `limit` bytes, for the model of this fingerprint.
    pub(super) fn open(folder: &Path, limit: u64, fingerprint: &[u8; 32]) -> io::Result<DiskTier> {
        os::make_private_folder(folder)?;
        let secret = secret(folder)?;
        let own = folder.join(fingerprint.iter().take(16).map(|byte| format!("{byte:02x}")).collect::<String>());
        os::make_private_folder(&own)?;
        // Processes that were killed while they wrote left these.
        let folders = std::fs::read_dir(folder)?.flatten().map(|entry| entry.path()).filter(|path| path.is_dir());
        folders.flat_map(|folder| stale(&folder)).for_each(|(path, _)| drop(std::fs::remove_file(path)));
        let (index, surplus) = Index::scan(folder, &own, limit)?;
        let key = Sha256::new_with_prefix(secret).chain_update(fingerprint).finalize().into();
        let (to, from) = channel();
        let (pending, is_full) = (Arc::new(Pending::default()), Arc::new(AtomicBool::new(false)));
        let writer = Writer { folder: own.clone(), key, pending: Arc::clone(&pending), is_full: Arc::clone(&is_full) };
        let thread = std::thread::Builder::new().name("kiln cache".into()).spawn(move || writer.run(&from))?;
        let (to, thread) = (Some(to), Some(thread));
        let tier = DiskTier { folder: own, key, index, to, thread, pending, is_full, has_said: false };
        surplus.into_iter().for_each(|path| tier.send(Job::Remove(path)));
        Ok(tier)
    }

    /// The key of prefix hashes.
    pub(super) fn key(&self) -> [u8; 32] {
        self.key
    }

    /// Bytes of all files.
    pub(super) fn bytes(&self) -> u64 {
        self.index.bytes()
    }

    /// Whether a file is there.
    pub(super) fn contains(&self, key: &DiskKey) -> bool {
        self.index.contains(key)
    }

    /// Whether a file is there, also one that another process has written since this one looked through the folder.
    pub(super) fn find(&mut self, key: &DiskKey) -> bool {
        if self.contains(key) {
            return true;
        }
        let there = std::fs::metadata(self.folder.join(key.name())).ok().filter(std::fs::Metadata::is_file);
        let Some(there) = there else { return false };
        for path in self.index.insert(*key, there.len()) {
            self.send(Job::Remove(path));
        }
        self.contains(key)
    }

    /// Tokens behind these full pages at which states were saved, the longest first.
    pub(super) fn tails(&self, pages: PrefixHash) -> Vec<usize> {
        self.index.tails(pages)
    }

    fn send(&self, job: Job) {
        // Without the thread nothing is kept.
        if let Some(to) = &self.to {
            let _ = to.send(job);
        }
    }

    /// Keeps something in a file, in the background.
    pub(super) fn write(&mut self, key: DiskKey, blob: &Blob) {
        let waiting: usize = self.pending.blobs().values().map(|blob| blob.len()).sum();
        if self.is_full.load(Ordering::Relaxed) || self.contains(&key) || waiting + blob.len() > MOST_PENDING {
            return;
        }
        self.pending.blobs().insert(key, Arc::clone(blob));
        self.send(Job::Write(key));
        for path in self.index.insert(key, file::file_bytes(blob.len())) {
            self.send(Job::Remove(path));
        }
    }

    /// What a file holds. One that cannot be used is forgotten.
    pub(super) fn read(&mut self, key: &DiskKey) -> Option<Blob> {
        if !self.find(key) {
            return None;
        }
        if let Some(blob) = self.pending.blobs().get(key) {
            return Some(Arc::clone(blob));
        }
        let name = key.name();
        let path = self.folder.join(&name);
        let why = match file::read(&path, &self.key, &name) {
            Ok(contents) => {
                self.index.touch(key);
                self.send(Job::Touch(path));
                return Some(Arc::new(contents));
            }
            Err(Unreadable::Gone) => None,
            Err(Unreadable::Io(why)) => Some(why.to_string()),
            Err(Unreadable::Damaged(why)) => {
                self.send(Job::Remove(path.clone()));
                Some(why.to_owned())
            }
        };
        self.index.forget(key);
        if let Some(why) = why {
            let said = std::mem::replace(&mut self.has_said, true);
            let level = if said { log::Level::Debug } else { log::Level::Warn };
            log::log!(level, "{} of the cache cannot be used: {why}; it is computed again", path.display());
        }
        None
    }

    /// Waits until everything is written.
    fn finish(&mut self) {
        self.to = None;
        if let Some(thread) = self.thread.take() {
            // It ends with its queue.
            let _ = thread.join();
        }
    }
}

impl Drop for DiskTier {
    fn drop(&mut self) {
        self.finish();
    }
}

/// The thread that writes.
struct Writer {
    folder: PathBuf,
    key: [u8; 32],
    pending: Arc<Pending>,
    is_full: Arc<AtomicBool>,
}

impl Writer {
    fn run(&self, from: &Receiver<Job>) {
        for job in from {
            match job {
                Job::Write(key) => {
                    let blob = self.pending.blobs().get(&key).cloned();
                    blob.iter().for_each(|blob| self.write(&key, blob));
                    self.pending.blobs().remove(&key);
                }
                // It may be gone already: another process may use the same folder.
                Job::Remove(path) => drop(std::fs::remove_file(path)),
                Job::Touch(path) => {
                    let file = std::fs::File::options().append(true).open(path);
                    drop(file.and_then(|file| file.set_modified(std::time::SystemTime::now())));
                }
            }
        }
    }

    fn write(&self, key: &DiskKey, contents: &[u8]) {
        if self.is_full.load(Ordering::Relaxed) {
            return;
        }
        let name = key.name();
        if let Err(error) = file::write(&self.folder.join(&name), &self.key, &name, contents) {
            self.is_full.store(true, Ordering::Relaxed);
            let first = error.to_string();
            log::warn!("no more prefixes are kept on disk: {}", first.lines().next().unwrap_or_default());
        }
    }
}

/// Writes a secret that only its user can read, whole or not at all. Where another process was faster, its secret counts.
fn write_secret(folder: &Path, path: &Path, secret: &[u8; 32]) -> io::Result<()> {
    let unfinished = folder.join(format!(".secret-{}", std::process::id()));
    let mut options = std::fs::OpenOptions::new();
    let mut file = os::private_file(&mut options).write(true).create(true).truncate(true).open(&unfinished)?;
    let named = file.write_all(secret).and_then(|()| file.sync_all()).and_then(|()| match path.try_exists()? {
        true => Ok(()),
        false => std::fs::hard_link(&unfinished, path).or_else(|why| match why.kind() {
            io::ErrorKind::AlreadyExists => Ok(()),
            _ => Err(why),
        }),
    });
    std::fs::remove_file(&unfinished)?;
    named
}

/// The secret of a folder; made at its first use.
fn secret(folder: &Path) -> io::Result<[u8; 32]> {
    let path = folder.join(SECRET);
    if !path.try_exists()? {
        let mut fresh = [0; 32];
        getrandom::fill(&mut fresh).map_err(io::Error::other)?;
        write_secret(folder, &path, &fresh)?;
    }
    os::make_private(&path)?;
    let bytes = std::fs::read(&path)?;
    bytes.try_into().map_err(|_| {
        let why = format!("{} is not the secret of a cache; remove the folder to start anew", path.display());
        io::Error::other(why)
    })
}

#[cfg(test)]
#[path = "tests.rs"]
mod tests;
