//! macOS: `sysctl` and Mach tell of memory, cores and the process.
#![allow(unsafe_code, reason = "calls of the C library, each with its reason")]

use std::ffi::{CStr, c_int, c_void};
use std::fs::File;
use std::ops::Range;

use memmap2::{Advice, Mmap};

pub use super::unix::*;
use crate::memory::{Available, Bound};
use crate::process::Usage;

/// Whether memory that is left is known.
pub const TELLS_MEMORY: bool = true;

/// Names of the library that finds Vulkan drivers, best first: the SDK's loader, MoltenVK by itself, and both where Homebrew puts them, which
/// the linker does not search by itself.
pub const VULKAN_LOADERS: &[&str] = &[
    "libvulkan.1.dylib",
    "libvulkan.dylib",
    "/opt/homebrew/lib/libvulkan.1.dylib",
    "/usr/local/lib/libvulkan.1.dylib",
    "libMoltenVK.dylib",
    "/opt/homebrew/lib/libMoltenVK.dylib",
    "/usr/local/lib/libMoltenVK.dylib",
];

/// Whether Vulkan is a layer above another interface here, and lists its devices only to programs that ask for such ones.
pub const PORTABILITY_DRIVERS: bool = true;

/// A number of the kernel; none where it has no such one.
fn number(name: &CStr) -> Option<u64> {
    let mut value = 0u64;
    let mut bytes = size_of::<u64>();
    // SAFETY: the name ends with a zero, and the kernel writes no more than `bytes` bytes to `value`. A shorter number fills its lower half:
    // these machines are little-endian.
    let failed =
        unsafe { libc::sysctlbyname(name.as_ptr(), (&raw mut value).cast(), &mut bytes, std::ptr::null_mut(), 0) };
    (failed == 0 && bytes > 0).then_some(value)
}

/// What this process may still take: pages that are free, and those of files and caches that the system gives up when somebody needs them.
pub(crate) fn available_memory() -> Option<Available> {
    // SAFETY: all of the structure's fields are numbers, for which zeros are right.
    let mut told: libc::vm_statistics64 = unsafe { std::mem::zeroed() };
    let mut count = libc::HOST_VM_INFO64_COUNT;
    #[allow(deprecated, reason = "the crate that replaces it would be here for this call alone")]
    // SAFETY: the kernel writes no more than `count` numbers to `told`, which has room for them.
    let failed = unsafe {
        libc::host_statistics64(libc::mach_host_self(), libc::HOST_VM_INFO64, (&raw mut told).cast(), &mut count)
    };
    if failed != 0 {
        return None;
    }
    let pages = [told.free_count, told.inactive_count, told.purgeable_count].map(u64::from).iter().sum::<u64>();
    Some(Available { bytes: pages * number(c"hw.pagesize")?, bound: Bound::Machine })
}

/// Bytes of memory that this process takes now.
pub(crate) fn taken_memory() -> Option<u64> {
    Some(task()?.pti_resident_size)
}

/// Bytes that a bound of the memory is about in all.
pub(crate) fn total_memory(bound: Bound) -> Option<u64> {
    if bound == Bound::Machine { number(c"hw.memsize") } else { None }
}

/// Physical cores: those of all kinds.
pub(crate) fn physical_cores() -> Option<usize> {
    usize::try_from(number(c"hw.physicalcpu")?).ok()
}

/// What the kernel tells of this process.
fn task() -> Option<libc::proc_taskinfo> {
    let own = c_int::try_from(std::process::id()).ok()?;
    // SAFETY: all of the structure's fields are numbers, for which zeros are right.
    let mut told: libc::proc_taskinfo = unsafe { std::mem::zeroed() };
    let bytes = c_int::try_from(size_of_val(&told)).ok()?;
    let to: *mut c_void = (&raw mut told).cast();
    // SAFETY: the kernel writes no more than `bytes` bytes to `told`.
    let written = unsafe { libc::proc_pidinfo(own, libc::PROC_PIDTASKINFO, 0, to, bytes) };
    (written == bytes).then_some(told)
}

/// What this process takes now.
pub(crate) fn usage() -> Option<Usage> {
    let task = task()?;
    // The times of `task` are in ticks whose length differs between machines; these are in seconds.
    // SAFETY: all of the structure's fields are numbers, for which zeros are right; the call fills it and does nothing else.
    let times = unsafe {
        let mut times: libc::rusage = std::mem::zeroed();
        libc::getrusage(libc::RUSAGE_SELF, &mut times);
        times
    };
    let seconds = |time: libc::timeval| time.tv_sec as f64 + f64::from(time.tv_usec) / 1e6;
    Some(Usage {
        cpu_seconds: seconds(times.ru_utime) + seconds(times.ru_stime),
        resident_bytes: task.pti_resident_size,
        virtual_bytes: task.pti_virtual_size,
        threads: u64::try_from(task.pti_threadnum).ok()?,
        open_files: std::fs::read_dir("/dev/fd").ok()?.count() as u64,
        most_files: most_files(),
    })
}

/// Files that this process may have open.
pub(crate) fn most_files() -> Option<u64> {
    rustix::process::getrlimit(rustix::process::Resource::Nofile).current
}

/// Threads of this process.
pub(crate) fn threads() -> Option<u64> {
    u64::try_from(task()?.pti_threadnum).ok()
}

/// Asks the system to forget what it holds of a file. There is no such call for one file.
pub fn forget_file(_: &File) -> bool {
    false
}

/// Keeps a part of a mapped file in small pages. Files are mapped in pages of one size here.
pub fn small_pages(_: &Mmap, _: Range<usize>) {}

/// Asks the system to read a part of a mapped file. It is not in this process's memory then.
pub fn populate_mapped(map: &Mmap, range: Range<usize>) -> bool {
    let _ = map.advise_range(Advice::WillNeed, range.start, range.len());
    false
}

/// Nothing: the standard library tells stack overflows by the signal that a cut file sends (SIGBUS), so that its handler must stay.
pub fn end_on_cut_files(_: impl FnOnce() + Send + 'static) {}
