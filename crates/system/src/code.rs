//! The program's own code and constants, and those of its libraries, as memory: which of them stays with the process. Calls of the C
//! library, which have no safe wrappers.

/// Gives back the memory of code and constants, until they are used again. The system maps up to a megabyte around what is used, so that a
/// program that has started and loaded a model holds most of itself, while writing a text needs a small part. These are pages of files that the
/// system has in its cache: what is used again comes from there.
///
/// Takes less than a millisecond, and as much again until what is used is back. Does nothing under a debugger, nor where the system does not
/// tell which pages are as they are in the file.
pub fn give_back() {
    #[cfg(target_os = "linux")]
    linux::give_back();
}

/// Bytes of a page: 4, 16 or 64 KiB.
#[cfg(target_os = "linux")]
pub(crate) fn page_size() -> Option<usize> {
    // SAFETY: the function tells a number and does nothing else.
    #[allow(unsafe_code)]
    let bytes = unsafe { libc::sysconf(libc::_SC_PAGESIZE) };
    usize::try_from(bytes).ok().filter(|bytes| *bytes > 0)
}

#[cfg(target_os = "linux")]
mod linux {
    use std::ffi::{c_int, c_void};
    use std::fs::{self, File};
    use std::os::unix::fs::FileExt as _;

    use super::page_size;

    /// Bits of an entry of `/proc/self/pagemap`: the page is in memory, and it is one of a file, not a copy that belongs to the process.
    const PRESENT: u64 = 1 << 63;
    const OF_FILE: u64 = 1 << 61;
    /// Bytes of such an entry.
    const ENTRY: usize = 8;

    /// What one look at the loaded objects needs.
    struct Look {
        pages: File,
        page: usize,
    }

    pub(super) fn give_back() {
        // A tracer may write to the code of this process at any time.
        if fs::read_to_string("/proc/self/status").map_or(true, |status| is_traced(&status)) {
            return;
        }
        let (Ok(pages), Some(page)) = (File::open("/proc/self/pagemap"), page_size()) else { return };
        let mut look = Look { pages, page };
        // SAFETY: the function calls `forget` with what it is given here, which lives until it returns, and with descriptions of objects that
        // stay loaded meanwhile: it holds the lock that unloading needs.
        #[allow(unsafe_code)]
        unsafe {
            libc::dl_iterate_phdr(Some(forget), (&raw mut look).cast());
        }
    }

    pub(super) fn is_traced(status: &str) -> bool {
        status.lines().filter_map(|line| line.strip_prefix("TracerPid:")).any(|by| by.trim() != "0")
    }

    /// Forgets the read-only segments of one object. What the loader has written to (relocations) lies in others, and where it
    /// does not, its pages are copies, as are those with breakpoints and probes: these stay.
    #[allow(unsafe_code)]
    extern "C" fn forget(object: *mut libc::dl_phdr_info, _size: usize, look: *mut c_void) -> c_int {
        // SAFETY: `dl_iterate_phdr` passes on a valid description of an object, and the `Look` of `give_back`, which has no other reference.
        let (object, look) = unsafe { (&*object, &*look.cast::<Look>()) };
        // SAFETY: the description says where the headers of the object's segments lie and how many there are; they do not change.
        let segments = unsafe { std::slice::from_raw_parts(object.dlpi_phdr, object.dlpi_phnum.into()) };
        for segment in segments.iter().filter(|s| s.p_type == libc::PT_LOAD && s.p_flags & libc::PF_W == 0) {
            let start = object.dlpi_addr.wrapping_add(segment.p_vaddr) as usize;
            let first = start / look.page;
            let end = (start + segment.p_memsz as usize).div_ceil(look.page);
            for (from, to) in look.clean(first, end) {
                // SAFETY: these are pages of a read-only segment that is loaded now, and each is that of the file: reading it again gives the
                // same bytes.
                unsafe {
                    libc::madvise((from * look.page) as *mut c_void, (to - from) * look.page, libc::MADV_DONTNEED);
                }
            }
        }
        0
    }

    impl Look {
        /// Runs of pages that are in memory as they are in the file, first and end of each.
        fn clean(&self, first: usize, end: usize) -> Vec<(usize, usize)> {
            let mut entries = vec![0; (end - first) * ENTRY];
            if self.pages.read_exact_at(&mut entries, (first * ENTRY) as u64).is_err() {
                return Vec::new();
            }
            let mut runs: Vec<(usize, usize)> = Vec::new();
            for (page, entry) in (first..end).zip(entries.chunks_exact(ENTRY)) {
                let entry = u64::from_ne_bytes(entry.try_into().unwrap_or_default());
                if entry & (PRESENT | OF_FILE) != PRESENT | OF_FILE {
                    continue;
                }
                match runs.last_mut() {
                    Some((_, end)) if *end == page => *end += 1,
                    _ => runs.push((page, page + 1)),
                }
            }
            runs
        }
    }
}

#[cfg(test)]
#[cfg(target_os = "linux")]
mod tests {
    use super::*;

    /// KiB in memory of all code of this process.
    fn code_in_memory() -> u64 {
        let (mut inside, mut sum) = (false, 0);
        for line in std::fs::read_to_string("/proc/self/smaps").unwrap().lines() {
            if let Some(rest) = line.strip_prefix("Rss:").filter(|_| inside) {
                sum += rest.trim().trim_end_matches(" kB").parse::<u64>().unwrap();
            } else if line.split(' ').next().is_some_and(|word| !word.ends_with(':')) {
                inside = line.contains(" r-xp ");
            }
        }
        sum
    }

    #[test]
    fn code_leaves_memory_and_comes_back() {
        let traced = linux::is_traced(&std::fs::read_to_string("/proc/self/status").unwrap());
        let before = code_in_memory();
        give_back();
        // Under a debugger it stays, and an emulator does not tell where it is.
        let untold = traced || before == 0;
        let after = code_in_memory();
        assert!(untold || after < before, "{before} KiB in memory before, {after} after");
    }

    #[test]
    fn a_debugger_is_seen() {
        assert!(linux::is_traced("Name:\tkiln\nTracerPid:\t4711\nUid:\t0\n"));
        assert!(!linux::is_traced("Name:\tkiln\nTracerPid:\t0\n") && !linux::is_traced(""));
    }
}
