//! What the store knows of a model: where it came from, and what its files are to the bit. One small JSON file each, whose paths
//! are relative (`place.rs`).

use std::fs;
use std::path::{Path, PathBuf};

use kiln_system::files::{Output, Overwrite};
use serde::{Deserialize, Serialize};

use crate::digest::Digest;
use crate::error::{Error, Result};
use crate::place::Stored;
use crate::quants::part_of;
use crate::settings::Settings;

/// A file of a model.
#[derive(Clone, Debug, Serialize)]
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

/// What is known of a model before it is fetched.
pub(crate) struct Expected<'a> {
    /// What the user says its SHA-256 must be.
    pub(crate) sha256: Option<&'a Digest>,
    /// What was recorded when it was fetched before.
    pub(crate) old: Option<&'a Record>,
}

impl Expected<'_> {
    /// The recorded hash of a file.
    pub(crate) fn recorded(&self, path: &Path) -> Option<Digest> {
        self.old?.files.iter().find(|file| file.path == path)?.sha256.clone()
    }

    /// Compares what a file is, or is announced to be, with what the user expects.
    pub(crate) fn check(&self, name: &str, got: &Digest) -> Result<()> {
        match self.sha256 {
            Some(want) if want != got => {
                Err(Error::Mismatch { name: name.to_owned(), want: want.clone(), got: got.clone() })
            }
            _ => Ok(()),
        }
    }

    /// One hash cannot speak for several files.
    pub(crate) fn check_count(&self, name: &str, files: usize) -> Result<()> {
        if files == 1 || self.sha256.is_none() {
            return Ok(());
        }
        let what = format!("{name} has {files} files, and one SHA-256 was given");
        Err(Error::Refused {
            what,
            hint: "pull it without one; `kiln verify` compares it with what was fetched".into(),
        })
    }
}

/// A model of the store.
#[derive(Clone, Debug)]
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

    pub(crate) fn write(&self, settings: &Settings) -> Result<()> {
        let whole = Digest::of(self.source.as_bytes());
        let folder = settings.folder.join("records");
        let path = folder.join(format!("{}.json", &whole.hex()[..16]));
        fs::create_dir_all(&folder).map_err(Error::io(&folder))?;
        let place = |kept: &Kept| {
            let outside = || Error::Outside { name: self.name.clone(), path: kept.path.clone(), record: path.clone() };
            Stored::of(settings, kept).ok_or_else(outside)
        };
        let files = self.files.iter().map(place).collect::<Result<_>>()?;
        let written = Written { name: self.name.clone(), source: self.source.clone(), files, fetched: self.fetched };
        let text =
            serde_json::to_vec_pretty(&written).map_err(|why| Error::Io { path: path.clone(), why: why.into() })?;
        Ok(Output::write(&path, Overwrite::Yes, &text)?)
    }

    /// Removes what is recorded of the model.
    pub(crate) fn forget(&self, settings: &Settings) -> Result<()> {
        for (path, written) in Written::all(settings) {
            if written.source == self.source {
                fs::remove_file(&path).map_err(Error::io(path))?;
            }
        }
        Ok(())
    }

    /// All records of a store, by name. One that cannot be read is as good as none: its model is fetched again.
    pub(crate) fn all(settings: &Settings) -> Vec<Record> {
        let mut records: Vec<Record> =
            Written::all(settings).filter_map(|(path, written)| written.locate(settings, &path).ok()).collect();
        records.sort_by(|a, b| (&a.name, &a.source).cmp(&(&b.name, &b.source)));
        records
    }

    /// Why records are not believed: they name files outside the store.
    pub(crate) fn refused(settings: &Settings) -> Vec<(String, Error)> {
        let why =
            |(path, written): (PathBuf, Written)| Some((written.name.clone(), written.locate(settings, &path).err()?));
        Written::all(settings).filter_map(why).collect()
    }
}

/// A record as its file has it.
#[derive(Serialize, Deserialize)]
struct Written {
    name: String,
    source: String,
    files: Vec<Stored>,
    fetched: u64,
}

impl Written {
    fn all(settings: &Settings) -> impl Iterator<Item = (PathBuf, Written)> {
        let entries = fs::read_dir(settings.folder.join("records")).into_iter().flatten().flatten();
        entries.filter_map(|entry| Some((entry.path(), serde_json::from_slice(&fs::read(entry.path()).ok()?).ok()?)))
    }

    fn locate(&self, settings: &Settings, record: &Path) -> Result<Record> {
        let place = |stored: &Stored| {
            let outside =
                || Error::Outside { name: self.name.clone(), path: stored.path.clone(), record: record.to_owned() };
            stored.locate(settings, &self.source).ok_or_else(outside)
        };
        Ok(Record {
            name: self.name.clone(),
            source: self.source.clone(),
            files: self.files.iter().map(place).collect::<Result<_>>()?,
            fetched: self.fetched,
        })
    }
}

/// What a file is called without its end: the model's name, of a part as of a whole.
pub(crate) fn stem(path: &str) -> String {
    let name = path.rsplit('/').next().unwrap_or(path);
    part_of(name).map_or(name.trim_end_matches(".gguf"), |(prefix, ..)| prefix).to_owned()
}
