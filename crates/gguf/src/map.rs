//! Where the bytes of a file come from: a memory map, or memory. The crate's only unsafe block.

use std::fs::File;
use std::io;
use std::path::Path;

use memmap2::Mmap;

use crate::error::{Error, Result};

/// The bytes of one file.
#[derive(Debug)]
pub(crate) enum Source {
    Map(Mmap),
    Memory(Vec<u8>),
}

impl Source {
    /// Maps a file for reading.
    pub(crate) fn open(path: &Path) -> Result<Source> {
        let fail = |action| move |why| Error::Io { action, path: path.to_owned(), why };
        // Looked at before it is opened: opening a pipe waits for somebody to write to it.
        let kind = std::fs::metadata(path).map_err(fail("open"))?.file_type();
        if kind.is_dir() {
            return Err(fail("open")(io::Error::from(io::ErrorKind::IsADirectory)));
        }
        if !kind.is_file() {
            return Err(fail("open")(io::Error::other("it is a pipe or a device; models are read from regular files")));
        }
        let file = File::open(path).map_err(fail("open"))?;
        // SAFETY: the map is read-only and private to this process, so Rust code never writes to it. Another process that
        // changes the file under us could change bytes that were checked already: everything parsed is copied out of the map
        // and tensor data is plain numbers without invalid bit patterns, so this gives wrong numbers at worst. One that cuts
        // the file short ends this process with SIGBUS, as with every program that maps its model.
        #[allow(unsafe_code)]
        let map = unsafe { Mmap::map(&file) }.map_err(fail("map"))?;
        Ok(Source::Map(map))
    }

    pub(crate) fn bytes(&self) -> &[u8] {
        match self {
            Source::Map(map) => map,
            Source::Memory(bytes) => bytes,
        }
    }
}
