//! What the store knows of a model: where it came from, and what its files are to the bit. One small JSON file each.

use std::fs;
use std::path::{Path, PathBuf};

use kiln_system::files::{Output, Overwrite};
use serde::{Deserialize, Serialize};

use crate::digest::Digest;
use crate::error::{Error, Result};
use crate::quants::part_of;

/// A file of a model.
#[derive(Clone, Debug, Serialize, Deserialize)]
pub struct Kept {
    /// Where it lies.
    pub path: PathBuf,
    /// Its length.
    pub bytes: u64,
    /// Its hash, where one is known.
    pub sha256: Option<Digest>,
    /// Whether Kiln fetched it. What another program fetched is not removed.
    pub own: bool,
}

impl Kept {
    /// Whether all of it is there, by its length.
    pub(crate) fn is_there(&self) -> bool {
        fs::metadata(&self.path).is_ok_and(|there| there.len() == self.bytes)
    }
}

/// A model of the store.
#[derive(Clone, Debug, Serialize, Deserialize)]
pub struct Record {
    /// What it can be called.
    pub name: String,
    /// Where it came from, as it would be named to fetch it.
    pub source: String,
    /// Its files; parts of a split model in order.
    pub files: Vec<Kept>,
    /// When it was fetched, in seconds since 1970.
    pub fetched: u64,
}

impl Record {
    /// Bytes of all files.
    pub fn bytes(&self) -> u64 {
        self.files.iter().map(|file| file.bytes).sum()
    }

    /// The file to open: the first of a split model.
    pub fn path(&self) -> Option<&Path> {
        self.files.first().map(|file| file.path.as_path())
    }

    /// Whether all files are there.
    pub fn is_there(&self) -> bool {
        !self.files.is_empty() && self.files.iter().all(Kept::is_there)
    }

    fn file(folder: &Path, source: &str) -> PathBuf {
        let whole = Digest::of(source.as_bytes());
        folder.join("records").join(format!("{}.json", &whole.hex()[..16]))
    }

    pub(crate) fn write(&self, folder: &Path) -> Result<()> {
        let path = Record::file(folder, &self.source);
        let parent = path.parent().unwrap_or(folder);
        fs::create_dir_all(parent).map_err(Error::io(parent))?;
        let text = serde_json::to_vec_pretty(self).map_err(|why| Error::Io { path: path.clone(), why: why.into() })?;
        Ok(Output::write(&path, Overwrite::Yes, &text)?)
    }

    pub(crate) fn forget(&self, folder: &Path) -> Result<()> {
        let path = Record::file(folder, &self.source);
        fs::remove_file(&path).map_err(Error::io(path))
    }

    /// All records of a store, by name. One that cannot be read is as good as none: its model is fetched again.
    pub(crate) fn all(folder: &Path) -> Vec<Record> {
        let entries = fs::read_dir(folder.join("records")).into_iter().flatten().flatten();
        let read = |path: PathBuf| serde_json::from_slice(&fs::read(path).ok()?).ok();
        let mut records: Vec<Record> = entries.filter_map(|entry| read(entry.path())).collect();
        records.sort_by(|a, b| (&a.name, &a.source).cmp(&(&b.name, &b.source)));
        records
    }
}

/// What a file is called without its end: the model's name, of a part as of a whole.
pub(crate) fn stem(path: &str) -> String {
    let name = path.rsplit('/').next().unwrap_or(path);
    part_of(name).map_or(name.trim_end_matches(".gguf"), |(prefix, ..)| prefix).to_owned()
}
