//! Where the bytes of a file come from: a memory map, or memory; and what happens when a mapped file is cut short. The
//! crate's only unsafe blocks.

use std::fs::File;
use std::io::{self, Read as _};
use std::ops::Range;
use std::os::fd::IntoRawFd as _;
use std::path::Path;
use std::sync::atomic::{AtomicI32, Ordering};

use memmap2::{Advice, Mmap, UncheckedAdvice};

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
        let file = File::open(path).map_err(fail("open"))?;
        // SAFETY: the map is read-only and private to this process, so Rust code never writes to it. Another process that
        // changes the file under us could change bytes that were checked already: everything parsed is copied out of the map
        // and tensor data is plain numbers without invalid bit patterns, so this gives wrong numbers at worst. One that cuts
        // the file short ends this process with SIGBUS, as with every program that maps its model; see `end_on_cut_files`.
        #[allow(unsafe_code)]
        let map = unsafe { Mmap::map(&file) }.map_err(fail("map"))?;
        Ok(Source::Map(map))
    }

    /// Gives the memory of a part of the file back, until it is read again.
    pub(crate) fn forget(&self, range: Range<usize>) {
        if let Source::Map(map) = self {
            // SAFETY: the map is of a file and this process never writes to it, so its bytes are the same when they are read again.
            #[allow(unsafe_code)]
            let forgotten = unsafe { map.unchecked_advise_range(UncheckedAdvice::DontNeed, range.start, range.len()) };
            // A system that keeps them has them in memory, as before.
            let _ = forgotten;
        }
    }

    /// The same for the pages that hold nothing else.
    pub(crate) fn forget_within(&self, range: Range<usize>) {
        let whole = range.start.next_multiple_of(PAGE)..range.end / PAGE * PAGE;
        if whole.is_empty() {
            return;
        }
        // With large pages, reading a neighbour would bring these bytes back. Systems without large pages ignore the call.
        #[cfg(target_os = "linux")]
        if let Source::Map(map) = self {
            let _ = map.advise_range(Advice::NoHugePage, whole.start, whole.len());
        }
        self.forget(whole);
    }

    /// Has the system bring a part of the file into this process's memory, which otherwise happens page by page as it is read. Whether it
    /// did so.
    pub(crate) fn fetch(&self, range: Range<usize>) -> bool {
        match self {
            Source::Map(map) => map.advise_range(Advice::PopulateRead, range.start, range.len()).is_ok(),
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

/// The end of a pipe that is written to when a mapped file turns out to be cut short; -1 without a listener.
static CUT: AtomicI32 = AtomicI32::new(-1);

/// From now on a mapped file that another program cuts short ends this process with `end`, on a thread of its own, and
/// not with SIGBUS and nothing said. The threads that miss bytes stop where they are.
pub fn end_on_cut_files(end: impl FnOnce() + Send + 'static) {
    let Ok((mut reader, writer)) = io::pipe() else { return };
    let wait = move || {
        if reader.read(&mut [0]).is_ok_and(|bytes| bytes > 0) {
            end();
        }
    };
    if std::thread::Builder::new().name("cut files".into()).spawn(wait).is_err() {
        return;
    }
    CUT.store(writer.into_raw_fd(), Ordering::Relaxed);
    // SAFETY: the action is whole: zeros are an empty mask and no flags, and the handler has the signature of one without
    // further information. The handler that is replaced is the standard library's, which tells stack overflows apart: on
    // Linux those are SIGSEGV and not SIGBUS.
    #[allow(unsafe_code)]
    unsafe {
        let mut action: libc::sigaction = std::mem::zeroed();
        action.sa_sigaction = on_missing_bytes as extern "C" fn(libc::c_int) as usize;
        libc::sigaction(libc::SIGBUS, &action, std::ptr::null_mut());
    }
}

/// Runs on the thread that touched bytes which are no longer there. Going back would touch them again.
extern "C" fn on_missing_bytes(_: libc::c_int) {
    // SAFETY: a signal handler may call `write` and `pause`; the byte that is written is a constant.
    #[allow(unsafe_code)]
    unsafe {
        libc::write(CUT.load(Ordering::Relaxed), [1u8].as_ptr().cast(), 1);
        loop {
            libc::pause();
        }
    }
}
