//! Other Unixes, such as FreeBSD: what all of them share, and no facts about memory and cores.

use std::fs::File;
use std::ops::Range;

use memmap2::{Advice, Mmap};

pub use super::unix::*;
use crate::memory::{Available, Bound};
use crate::process::Usage;

/// Whether memory that is left is known.
pub const TELLS_MEMORY: bool = false;

/// Names of the library that finds Vulkan drivers, best first.
pub const VULKAN_LOADERS: &[&str] = &["libvulkan.so.1", "libvulkan.so"];

/// Whether Vulkan is a layer above another interface here, and lists its devices only to programs that ask for such ones.
pub const PORTABILITY_DRIVERS: bool = false;

/// What this process may still take.
pub(crate) fn available_memory() -> Option<Available> {
    None
}

/// Bytes of memory that this process takes now.
pub(crate) fn taken_memory() -> Option<u64> {
    None
}

/// Bytes that a bound of the memory is about in all.
pub(crate) fn total_memory(_: Bound) -> Option<u64> {
    None
}

/// Physical cores among the CPUs that this process may run on.
pub(crate) fn physical_cores() -> Option<usize> {
    None
}

/// What this process takes now.
pub(crate) fn usage() -> Option<Usage> {
    None
}

/// Files that this process may have open.
pub(crate) fn most_files() -> Option<u64> {
    rustix::process::getrlimit(rustix::process::Resource::Nofile).current
}

/// Threads of this process.
pub(crate) fn threads() -> Option<u64> {
    None
}

/// Asks the system to forget what it holds of a file. Whether it could be asked.
pub fn forget_file(_: &File) -> bool {
    false
}

/// Keeps a part of a mapped file in small pages. Large ones are not known to hold files here.
pub fn small_pages(_: &Mmap, _: Range<usize>) {}

/// Asks the system to read a part of a mapped file. It is not in this process's memory then.
pub fn populate_mapped(map: &Mmap, range: Range<usize>) -> bool {
    let _ = map.advise_range(Advice::WillNeed, range.start, range.len());
    false
}

/// Nothing: a mapped file that is cut short ends the process by a signal.
pub fn end_on_cut_files(_: impl FnOnce() + Send + 'static) {}
