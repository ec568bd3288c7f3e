//! What the allocator holds of memory that nobody has any more. One call of the C library, which has no safe wrapper.

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
}
