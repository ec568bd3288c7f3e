//! Where prefixes are kept that the device has no room for: host memory and disk, below the pages on the device.

use std::path::Path;

use sha2::{Digest as _, Sha256};

use super::cache::{CacheSink, CacheWatch, PageKind, PrefixHash};
use super::disk::{DiskKey, DiskTier};
use super::engine::{Engine, SequenceId};
use crate::Error;
use crate::executor::Range;
use crate::state;

/// Bytes that are read from disk for one prompt at most, and the share of the free memory that they may take.
const MOST_STAGED: usize = 8 << 30;
const STAGED_SHARE: u64 = 4;

/// Bytes that may be read from disk for a prompt now.
fn most_staged() -> usize {
    let left = kiln_system::memory::available().map_or(u64::MAX, |available| available.bytes);
    usize::try_from(left / STAGED_SHARE).unwrap_or(usize::MAX).min(MOST_STAGED)
}

impl Engine {
    /// Bounds the host memory for saved states of models with recurrent layers; those that were saved before are forgotten.
    pub fn limit_checkpoints(&mut self, bytes: usize) {
        self.cache.limit_checkpoints(bytes);
    }

    /// Gives evicted pages and saved states this much host memory: states have half of it in models that have pages and states.
    pub fn limit_host_cache(&mut self, bytes: usize) {
        let states = match (self.cache.has_states(), self.cache.has_pages()) {
            (true, true) => bytes / 2,
            (true, false) => bytes,
            (false, _) => 0,
        };
        self.cache.limit_checkpoints(states);
        self.cache.limit_host_pages(bytes - states);
    }

    /// Tells what becomes of full pages of the prefix cache from now on, after each step of a [`Scheduler`]: at first, and when the engine goes,
    /// that there are none. Before the first sequence.
    ///
    /// [`Scheduler`]: super::Scheduler
    pub fn watch_cache(&mut self, sink: CacheSink) {
        self.cache.log_events();
        self.watch = Some(CacheWatch::new(sink));
    }

    /// Tells whoever wants to know what has become of cached pages.
    pub(super) fn tell_cache_events(&mut self) {
        if let Some(watch) = &mut self.watch {
            watch.tell(self.cache.take_events());
        }
    }

    /// Bytes of host memory that saved states take.
    pub fn checkpoint_bytes(&self) -> usize {
        self.cache.checkpoint_bytes()
    }

    /// Bytes of host memory that evicted pages take.
    pub fn host_page_bytes(&self) -> usize {
        self.cache.host_page_bytes()
    }

    /// Bytes of all files of the folder that finished sequences are kept in; none without one.
    pub fn disk_cache_bytes(&self) -> Option<u64> {
        self.disk.as_ref().map(DiskTier::bytes)
    }

    /// Keeps finished sequences in a folder, in at most `bytes` bytes, and finds those of earlier processes there. Before the first
    /// sequence: what was cached so far is not found any more.
    pub fn open_disk_cache(&mut self, folder: &Path, bytes: u64) -> Result<(), Error> {
        let failed = |why| kiln_gguf::Error::Io { action: "use", path: folder.to_owned(), why };
        let disk = DiskTier::open(folder, bytes, &self.cache_fingerprint()).map_err(failed)?;
        self.cache.set_hash_key(disk.key());
        self.disk = Some(disk);
        Ok(())
    }

    /// What must be the same for cached bytes to be of use: the model and its adapters, the layout of caches and states, the version
    /// of Kiln, and, where bits count, the device.
    fn cache_fingerprint(&self) -> [u8; 32] {
        let mut hash = Sha256::new_with_prefix(b"kiln kv cache 1 ");
        hash.update(env!("CARGO_PKG_VERSION"));
        hash.update(state::fingerprint(self.model(), &self.model().scales()));
        let room = self.room();
        hash.update(format!("{:?} {:?} {:?}", room.k_type, room.v_type, self.cache.layout_sizes()));
        if self.batch_invariant {
            hash.update(self.describe());
        }
        hash.finalize().into()
    }

    /// Keeps what is cached of a finished sequence on disk, where there is a folder for it.
    pub(super) fn keep_on_disk(&mut self, id: SequenceId) -> Result<(), Error> {
        let (Some(disk), Some(sequence)) = (&self.disk, self.sequences.get(&id)) else { return Ok(()) };
        if sequence.broken || sequence.swapped.is_some() {
            return Ok(());
        }
        let pages = self.cache.published_pages(&sequence.cache).into_iter();
        let pages = pages.map(|(page, from)| (DiskKey::from(page), from)).filter(|(key, _)| !disk.contains(key));
        let (keys, lists): (Vec<DiskKey>, Vec<Vec<Range>>) = pages.unzip();
        let blobs = self.read_blobs(&lists)?;
        if let Some(disk) = &mut self.disk {
            keys.into_iter().zip(&blobs).for_each(|(key, blob)| disk.write(key, blob));
        }
        Ok(())
    }

    /// Reads what the disk alone has of a prompt, so that the cache finds it.
    pub(super) fn stage_from_disk(&mut self, id: SequenceId, tokens: &[u32]) {
        let (Some(disk), Some(sequence)) = (&mut self.disk, self.sequences.get(&id)) else { return };
        let is_new = sequence.cache.tokens.is_empty() && self.cache.shares_prefixes();
        let Some((_, known)) = tokens.split_last().filter(|_| is_new) else { return };
        let on_disk = |kind: PageKind, hash: PrefixHash| disk.find(&DiskKey::Page(kind, hash));
        let mut hashes = self.cache.known_on_disk(&sequence.cache, known, on_disk);
        if self.cache.has_states() {
            let states = self.cache.saved_states(&sequence.cache, &hashes, known, |pages| disk.tails(pages));
            // The longest one that is there.
            let found = states.iter().find(|state| {
                self.cache.has_checkpoint(state.prefix)
                    || disk.read(&DiskKey::from(*state)).is_some_and(|blob| self.cache.stage_state(state, blob))
            });
            let Some(found) = found else { return };
            hashes.truncate(found.full);
        }
        let (mut staged, most) = (0, most_staged());
        for page in self.cache.missing_pages(&hashes) {
            let blob = disk.read(&DiskKey::from(page)).filter(|blob| staged + blob.len() <= most);
            let Some(blob) = blob else { break };
            staged += blob.len();
            self.cache.stage_page(page, blob);
        }
    }
}
