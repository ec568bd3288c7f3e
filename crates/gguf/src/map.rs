//! Where the bytes of a file come from: a memory map, or memory. The crate's only unsafe block.

use std::io;
use std::ops::Range;
use std::path::Path;

use kiln_system::os;
use memmap2::Mmap;

use crate::error::{Error, Result};

/// Bytes of a page on most systems. Where pages are larger, those at both ends of what is forgotten go as well.
pub(crate) const PAGE: usize = 4096;

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
        let file = os::open_to_map(path).map_err(fail("open"))?;
        // SAFETY: the map is read-only and private to this process, so Rust code never writes to it. Another process that
        // changes the file under us could change bytes that were checked already: everything parsed is copied out of the map
        // and tensor data is plain numbers without invalid bit patterns, so this gives wrong numbers at worst. One that cuts
        // the file short ends this process with SIGBUS, as with every program that maps its model; see `end_on_cut_files` of `kiln_system::os`.
        #[allow(unsafe_code)]
        let map = unsafe { Mmap::map(&file) }.map_err(fail("map"))?;
        Ok(Source::Map(map))
    }

    /// Gives the memory of a part of the file back, until it is read again.
    pub(crate) fn forget(&self, range: Range<usize>) {
        if let Source::Map(map) = self {
            os::forget_mapped(map, range);
        }
    }

    /// The same for the pages that hold nothing else.
    pub(crate) fn forget_within(&self, range: Range<usize>) {
        let whole = range.start.next_multiple_of(PAGE)..range.end / PAGE * PAGE;
        if whole.is_empty() {
            return;
        }
        if let Source::Map(map) = self {
            os::small_pages(map, whole.clone());
        }
        self.forget(whole);
    }

    /// Has the system bring a part of the file into this process's memory, which otherwise happens page by page as it is read. Whether it
    /// did so.
    pub(crate) fn fetch(&self, range: Range<usize>) -> bool {
        match self {
            Source::Map(map) => os::populate_mapped(map, range),
            Source::Memory(_) => true,
        }
    }

    pub(crate) fn bytes(&self) -> &[u8] {
        match self {
            Source::Map(map) => map,
            Source::Memory(bytes) => bytes,
        }
    }
}
