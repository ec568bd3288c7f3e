//! What lies beneath a folder: every part of a path is opened from the folder above it, and no link is followed.

use std::fs::File;
use std::io;
use std::os::fd::OwnedFd;
use std::path::Path;

use rustix::fs::{CWD, Dir, FileType, Mode, OFlags, openat};
use rustix::io::Errno;

use crate::os::{NotOpened, SharedEntry, is_one_name};

/// A folder that others may look into, and from which nothing leads out: it stays the same folder, whatever its name leads to meanwhile.
#[derive(Debug)]
pub struct SharedFolder(OwnedFd);

const ALWAYS: OFlags = OFlags::RDONLY.union(OFlags::CLOEXEC).union(OFlags::NOFOLLOW);

impl SharedFolder {
    /// Opens the folder that a name leads to.
    pub fn open(path: &Path) -> io::Result<SharedFolder> {
        Ok(SharedFolder(openat(CWD, path, OFlags::RDONLY | OFlags::DIRECTORY | OFlags::CLOEXEC, Mode::empty())?))
    }

    /// Opens what the parts of a path lead to, to be read: a file, or anything else, of which the caller has to ask what it is.
    pub fn file(&self, parts: &[&str]) -> Result<File, NotOpened> {
        // A pipe or a device would wait for somebody.
        self.at(parts, OFlags::NONBLOCK).map(File::from)
    }

    /// The files and folders in the folder that the parts of a path lead to, at most `most` of them. Names that are no text are left out.
    pub fn entries(&self, parts: &[&str], most: usize) -> Result<Vec<SharedEntry>, NotOpened> {
        let mut found = Vec::new();
        for entry in Dir::new(self.at(parts, OFlags::DIRECTORY)?)?.take(most) {
            let entry = entry?;
            let Ok(name) = entry.file_name().to_str() else { continue };
            let is_folder = match entry.file_type() {
                _ if name == "." || name == ".." => continue,
                FileType::Directory => true,
                FileType::RegularFile => false,
                _ => continue,
            };
            found.push(SharedEntry { name: name.to_owned(), is_folder });
        }
        Ok(found)
    }

    fn at(&self, parts: &[&str], last: OFlags) -> Result<OwnedFd, NotOpened> {
        let mut now = openat(&self.0, ".", ALWAYS | OFlags::DIRECTORY, Mode::empty())?;
        for (number, part) in parts.iter().enumerate() {
            if !is_one_name(part) {
                return Err(NotOpened::Missing);
            }
            let kind = if number + 1 == parts.len() { last } else { OFlags::DIRECTORY };
            now = openat(&now, *part, ALWAYS | kind, Mode::empty())?;
        }
        Ok(now)
    }
}

impl From<Errno> for NotOpened {
    fn from(why: Errno) -> NotOpened {
        match why {
            Errno::NOENT => NotOpened::Missing,
            Errno::LOOP => NotOpened::Link,
            Errno::NOTDIR => NotOpened::NoFolder,
            why => NotOpened::Failed(why.into()),
        }
    }
}
