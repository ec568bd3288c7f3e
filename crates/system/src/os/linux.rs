//! Linux and Android: the kernel's own files tell of memory, cores and the process.

use std::fs::File;
use std::io::{self, Read as _};
use std::ops::Range;
use std::os::fd::IntoRawFd as _;
use std::sync::atomic::{AtomicI32, Ordering};

use memmap2::{Advice, Mmap};

mod cores;
mod memory;
mod process;

pub use super::unix::*;
pub(crate) use cores::physical_cores;
pub(crate) use memory::{available_memory, taken_memory, total_memory};
pub(crate) use process::{most_files, threads, usage};

/// Whether memory that is left is known.
pub const TELLS_MEMORY: bool = true;

/// Names of the library that finds Vulkan drivers, best first.
pub const VULKAN_LOADERS: &[&str] = &["libvulkan.so.1", "libvulkan.so"];

/// Whether Vulkan is a layer above another interface here, and lists its devices only to programs that ask for such ones.
pub const PORTABILITY_DRIVERS: bool = false;

/// Asks the system to forget what it holds of a file. Whether it could be asked.
pub fn forget_file(file: &File) -> bool {
    rustix::fs::fadvise(file, 0, None, rustix::fs::Advice::DontNeed).is_ok()
}

/// Keeps a part of a mapped file in small pages: with large ones, reading a neighbour would bring these bytes back. Systems without large
/// pages ignore it.
pub fn small_pages(map: &Mmap, range: Range<usize>) {
    let _ = map.advise_range(Advice::NoHugePage, range.start, range.len());
}

/// Has the system bring a part of a mapped file into this process's memory. Whether it did so.
pub fn populate_mapped(map: &Mmap, range: Range<usize>) -> bool {
    map.advise_range(Advice::PopulateRead, range.start, range.len()).is_ok()
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
