//! What this process takes of the machine, as the system tells: for those who watch it.

use crate::os;

/// What a process takes.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Usage {
    /// Seconds of processors, in the program and in the kernel.
    pub cpu_seconds: f64,
    /// Bytes of memory.
    pub resident_bytes: u64,
    /// Bytes of address space.
    pub virtual_bytes: u64,
    /// Threads.
    pub threads: u64,
    /// Open files.
    pub open_files: u64,
    /// Files that may be open.
    pub most_files: Option<u64>,
}

/// What this process takes now; none where the system does not tell.
pub fn usage() -> Option<Usage> {
    os::usage()
}

/// Files that this process may have open; none where there is no limit, or the system does not tell.
pub fn most_files() -> Option<u64> {
    os::most_files()
}

/// Threads of this process; none where the system does not tell.
pub fn threads() -> Option<u64> {
    os::threads()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn this_process_takes_something() {
        if !os::TELLS_MEMORY {
            return;
        }
        let usage = usage().expect("the kernel tells");
        assert!(usage.resident_bytes > 1 << 16 && usage.virtual_bytes >= usage.resident_bytes, "{usage:?}");
        assert!(usage.threads > 0 && usage.open_files > 2, "{usage:?}");
    }
}
