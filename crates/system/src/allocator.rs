//! Gives freed memory that the allocator still holds back to the system. Calls of the C library, which have no safe wrappers.

/// Gives freed memory back to the system. glibc keeps it for itself: behind a long prompt that was tens of megabytes, which grew with every
/// thread that had computed. Other allocators give it back by themselves, or not at all. Takes about a millisecond, so it is for
/// moments when much has been freed.
pub fn give_back() {
    #[cfg(all(target_os = "linux", target_env = "gnu"))]
    // SAFETY: the function may be called at any time and by any thread; it locks what it looks at, and takes only what is free.
    #[allow(unsafe_code)]
    unsafe {
        libc::malloc_trim(0);
    }
    give_back_end();
}

/// Gives back the free end of this thread's heap, as [`give_back`] does for the thread that calls it. Threads have heaps of their own, and of
/// all but the first, glibc's function gives back only what lies between things that are in use.
pub fn give_back_end() {
    #[cfg(all(target_os = "linux", target_env = "gnu"))]
    linux::give_back_end();
}

#[cfg(all(target_os = "linux", target_env = "gnu"))]
mod linux {
    /// MiB of the blocks that are taken from the end of a heap, which has 64 at most. glibc has blocks above a bound come from the system
    /// instead, which goes up to the largest that was freed; but the free end of a heap has no more than twice that bound.
    const BLOCKS: [usize; 5] = [1, 2, 4, 8, 16];

    pub(super) fn give_back_end() {
        let Some(page) = crate::code::page_size() else { return };
        let mut blocks = BLOCKS.map(|mib| {
            let mut block: Vec<u8> = Vec::new();
            // It is never written to, so pages past the highest use take no memory. One that cannot be had is left out.
            let _ = block.try_reserve_exact(mib << 20);
            block
        });
        for block in &mut blocks {
            let free = block.spare_capacity_mut();
            let first = free.as_ptr().addr().next_multiple_of(page) - free.as_ptr().addr();
            let Some(rest) = free.get_mut(first..) else { continue };
            let pages = rest.len() / page * page;
            // SAFETY: these are whole pages of a block that is ours, in which nothing has been stored yet.
            #[allow(unsafe_code)]
            unsafe {
                libc::madvise(rest.as_mut_ptr().cast(), pages, libc::MADV_DONTNEED);
            }
        }
    }
}

#[cfg(test)]
#[cfg(all(target_os = "linux", target_env = "gnu"))]
mod tests {
    use super::*;
    use crate::memory::taken;

    #[test]
    fn what_a_thread_has_freed_goes_back() {
        // Blocks of a heap become as large as the largest that was freed.
        drop(vec![1u8; 16 << 20]);
        std::thread::spawn(|| {
            let used: Vec<Vec<u8>> = (0..24).map(|_| vec![1; 1 << 20]).collect();
            let full = taken().unwrap();
            drop(used);
            give_back();
            let left = taken().unwrap();
            assert!(full - left > 20 << 20, "{full} bytes taken, {left} when 24 MiB had been freed");
        })
        .join()
        .unwrap();
    }
}
