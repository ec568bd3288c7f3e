//! What lies beneath a folder. Files are opened by their whole name here; so every folder on the way is held open, so that it cannot be renamed
//! or removed meanwhile, and what is a link of any kind is not opened.
//!
//! One thing is left: who may change the attributes of an empty folder can make a junction of it while it is held. That is looked for once
//! more when everything is open; it goes unseen only where it is made and taken back within that time.

use std::fs::{self, File, Metadata, OpenOptions};
use std::io;
use std::os::windows::fs::{MetadataExt as _, OpenOptionsExt as _};
use std::path::{Path, PathBuf};

use windows_sys::Win32::Storage::FileSystem::{
    FILE_ATTRIBUTE_REPARSE_POINT, FILE_FLAG_BACKUP_SEMANTICS, FILE_FLAG_OPEN_REPARSE_POINT, FILE_SHARE_READ,
    FILE_SHARE_WRITE,
};

use crate::os::{NotOpened, SharedEntry, is_one_name};

/// A folder that others may look into, and from which nothing leads out: it cannot be renamed as long as this is there.
#[derive(Debug)]
pub struct SharedFolder {
    /// In the form in which names mean nothing but files: no devices, no `..`, no other separators.
    path: PathBuf,
    held: File,
}

/// Opens a file or a folder, and a link as the link that it is. It cannot be renamed or removed before it is closed.
fn hold(path: &Path) -> io::Result<File> {
    OpenOptions::new()
        .read(true)
        .share_mode(FILE_SHARE_READ | FILE_SHARE_WRITE)
        .custom_flags(FILE_FLAG_BACKUP_SEMANTICS | FILE_FLAG_OPEN_REPARSE_POINT)
        .open(path)
}

fn is_link(metadata: &Metadata) -> bool {
    metadata.file_attributes() & FILE_ATTRIBUTE_REPARSE_POINT != 0
}

/// What was opened, behind the folders that lead to it.
struct Reached {
    path: PathBuf,
    held: File,
    _above: Vec<File>,
}

impl SharedFolder {
    /// Opens the folder that a name leads to.
    pub fn open(path: &Path) -> io::Result<SharedFolder> {
        let path = fs::canonicalize(path)?;
        let held = hold(&path)?;
        match held.metadata()?.is_dir() {
            true => Ok(SharedFolder { path, held }),
            false => Err(io::ErrorKind::NotADirectory.into()),
        }
    }

    /// Opens what the parts of a path lead to, to be read: a file, or anything else, of which the caller has to ask what it is.
    pub fn file(&self, parts: &[&str]) -> Result<File, NotOpened> {
        self.at(parts).map(|reached| reached.held)
    }

    /// The files and folders in the folder that the parts of a path lead to, at most `most` of them. Names that are no text are left out.
    pub fn entries(&self, parts: &[&str], most: usize) -> Result<Vec<SharedEntry>, NotOpened> {
        let reached = self.at(parts)?;
        if !reached.held.metadata()?.is_dir() {
            return Err(NotOpened::NoFolder);
        }
        let mut found = Vec::new();
        for entry in fs::read_dir(&reached.path)?.take(most) {
            let entry = entry?;
            // What this tells is of the entry itself, where it is a link.
            let metadata = entry.metadata()?;
            if let (Ok(name), false) = (entry.file_name().into_string(), is_link(&metadata)) {
                found.push(SharedEntry { name, is_folder: metadata.is_dir() });
            }
        }
        Ok(found)
    }

    fn at(&self, parts: &[&str]) -> Result<Reached, NotOpened> {
        let mut path = self.path.clone();
        let mut held = self.held.try_clone()?;
        let mut above = Vec::new();
        for part in parts {
            if !held.metadata()?.is_dir() {
                return Err(NotOpened::NoFolder);
            }
            // What is behind a colon is another stream of the same file.
            if !is_one_name(part) || part.contains(['\\', ':']) {
                return Err(NotOpened::Missing);
            }
            path.push(part);
            let next = hold(&path)?;
            if is_link(&next.metadata()?) {
                return Err(NotOpened::Link);
            }
            above.push(std::mem::replace(&mut held, next));
        }
        for folder in &above {
            if is_link(&folder.metadata()?) {
                return Err(NotOpened::Link);
            }
        }
        Ok(Reached { path, held, _above: above })
    }
}
