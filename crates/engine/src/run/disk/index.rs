//! What files a cache folder has: names, sizes, and which goes first when there are too many bytes.

use std::collections::{BTreeMap, HashMap};
use std::io;
use std::path::{Path, PathBuf};

use crate::run::cache::{MissingPage, PageKind, PrefixHash, SavedState};

/// What a file holds.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub(in crate::run) enum DiskKey {
    /// The full page that a prefix ends with.
    Page(PageKind, PrefixHash),
    /// The state after `tail` tokens behind full pages; all tokens together are `prefix`.
    State { pages: PrefixHash, tail: usize, prefix: PrefixHash },
}

impl From<&SavedState> for DiskKey {
    fn from(state: &SavedState) -> DiskKey {
        DiskKey::State { pages: state.pages, tail: state.tail, prefix: state.prefix }
    }
}

impl From<MissingPage> for DiskKey {
    fn from(page: MissingPage) -> DiskKey {
        DiskKey::Page(page.kind, page.hash)
    }
}

impl DiskKey {
    /// The name of its file.
    pub(super) fn name(&self) -> String {
        match self {
            DiskKey::Page(kind, hash) => format!("page-{}-{hash}.kv", *kind as usize),
            DiskKey::State { pages, tail, prefix } => format!("state-{pages}-{tail}-{prefix}.kv"),
        }
    }

    /// What the file of this name holds.
    pub(super) fn parse(name: &str) -> Option<DiskKey> {
        let mut words = name.strip_suffix(".kv")?.split('-');
        let key = match words.next()? {
            "page" => {
                let kind: usize = words.next()?.parse().ok()?;
                DiskKey::Page(*PageKind::ALL.get(kind)?, PrefixHash::parse(words.next()?)?)
            }
            "state" => DiskKey::State {
                pages: PrefixHash::parse(words.next()?)?,
                tail: words.next()?.parse().ok()?,
                prefix: PrefixHash::parse(words.next()?)?,
            },
            _ => return None,
        };
        // One name for one key.
        (key.name() == name).then_some(key)
    }
}

/// A file, in the order of use.
#[derive(Debug)]
enum Item {
    Own(DiskKey),
    /// Of another model, or of another version of Kiln.
    Foreign(PathBuf, u64),
}

/// The files of a folder.
#[derive(Debug)]
pub(super) struct Index {
    folder: PathBuf,
    limit: u64,
    bytes: u64,
    clock: u64,
    own: HashMap<DiskKey, (u64, u64)>,
    order: BTreeMap<u64, Item>,
    tails: HashMap<PrefixHash, Vec<usize>>,
}

impl Index {
    /// Looks through a folder; `own` is that of the model in use. Gives also what is too much.
    pub(super) fn scan(folder: &Path, own: &Path, limit: u64) -> io::Result<(Index, Vec<PathBuf>)> {
        let mut files = Vec::new();
        for model in std::fs::read_dir(folder)?.flatten().filter(|entry| entry.path().is_dir()) {
            for file in std::fs::read_dir(model.path()).into_iter().flatten().flatten() {
                let (path, name) = (file.path(), file.file_name());
                let (Ok(metadata), Some(key)) = (file.metadata(), name.to_str().and_then(DiskKey::parse)) else {
                    // Not a file of this cache: it is not counted, and not removed.
                    continue;
                };
                let used = metadata.modified().unwrap_or(std::time::UNIX_EPOCH);
                files.push((used, path, key, metadata.len(), model.path() == own));
            }
        }
        files.sort_by(|a, b| (a.0, &a.1).cmp(&(b.0, &b.1)));
        let (own_files, order, tails) = (HashMap::new(), BTreeMap::new(), HashMap::new());
        let folder = own.to_owned();
        let mut index = Index { folder, limit, bytes: 0, clock: 0, own: own_files, order, tails };
        for (_, path, key, bytes, is_own) in files {
            if is_own {
                index.add(key, bytes);
            } else {
                index.clock += 1;
                index.bytes += bytes;
                index.order.insert(index.clock, Item::Foreign(path, bytes));
            }
        }
        let surplus = index.shrink();
        Ok((index, surplus))
    }

    pub(super) fn bytes(&self) -> u64 {
        self.bytes
    }

    pub(super) fn contains(&self, key: &DiskKey) -> bool {
        self.own.contains_key(key)
    }

    pub(super) fn tails(&self, pages: PrefixHash) -> Vec<usize> {
        let mut tails = self.tails.get(&pages).cloned().unwrap_or_default();
        tails.sort_unstable_by(|a, b| b.cmp(a));
        tails.dedup();
        tails
    }

    fn add(&mut self, key: DiskKey, bytes: u64) {
        self.clock += 1;
        self.bytes += bytes;
        self.own.insert(key, (bytes, self.clock));
        self.order.insert(self.clock, Item::Own(key));
        if let DiskKey::State { pages, tail, .. } = key {
            self.tails.entry(pages).or_default().push(tail);
        }
    }

    /// A file is about to be written. Gives those that make room.
    pub(super) fn insert(&mut self, key: DiskKey, bytes: u64) -> Vec<PathBuf> {
        self.forget(&key);
        self.add(key, bytes);
        self.shrink()
    }

    /// A file was used.
    pub(super) fn touch(&mut self, key: &DiskKey) {
        if let Some((bytes, _)) = self.own.get(key).copied() {
            self.forget(key);
            self.add(*key, bytes);
        }
    }

    /// A file is no longer there.
    pub(super) fn forget(&mut self, key: &DiskKey) {
        let Some((bytes, at)) = self.own.remove(key) else { return };
        self.bytes -= bytes;
        self.order.remove(&at);
        if let DiskKey::State { pages, tail, .. } = key
            && let Some(tails) = self.tails.get_mut(pages)
            && let Some(at) = tails.iter().position(|other| other == tail)
        {
            tails.swap_remove(at);
        }
    }

    /// Drops the least recently used files until the rest is within the limit.
    fn shrink(&mut self) -> Vec<PathBuf> {
        let mut dropped = Vec::new();
        while self.bytes > self.limit
            && let Some((at, item)) = self.order.pop_first()
        {
            match item {
                Item::Foreign(path, bytes) => {
                    self.bytes -= bytes;
                    dropped.push(path);
                }
                Item::Own(key) => {
                    self.order.insert(at, Item::Own(key));
                    self.forget(&key);
                    dropped.push(self.folder.join(key.name()));
                }
            }
        }
        dropped
    }
}
