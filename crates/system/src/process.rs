//! What this process takes of the machine, as the kernel tells: for those who watch it.

use std::fs;

/// Ticks of the kernel's clock in a second, as programs see it: the same on every Linux.
const TICKS: f64 = 100.0;

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

/// What this process takes now; none where the kernel does not tell.
pub fn usage() -> Option<Usage> {
    let [stat, status] = ["stat", "status"].map(|name| fs::read_to_string(format!("/proc/self/{name}")).ok());
    let (user, kernel) = times(&stat?)?;
    let status = status?;
    let number = |word: &str| -> Option<u64> {
        status.lines().find_map(|line| line.strip_prefix(word)?.split_whitespace().next()?.parse().ok())
    };
    Some(Usage {
        cpu_seconds: (user + kernel) as f64 / TICKS,
        resident_bytes: number("VmRSS:")? * 1024,
        virtual_bytes: number("VmSize:")? * 1024,
        threads: number("Threads:")?,
        open_files: fs::read_dir("/proc/self/fd").ok()?.count() as u64,
        most_files: most_files(),
    })
}

/// Files that this process may have open; none where there is no limit, or the kernel does not tell.
pub fn most_files() -> Option<u64> {
    let limits = fs::read_to_string("/proc/self/limits").ok()?;
    let line = limits.lines().find_map(|line| line.strip_prefix("Max open files"))?;
    line.split_whitespace().next()?.parse().ok()
}

/// The ticks that a process has run, in itself and in the kernel. Its name, in brackets, may hold anything.
fn times(stat: &str) -> Option<(u64, u64)> {
    let mut fields = stat.rsplit_once(") ")?.1.split(' ').skip(11);
    Some((fields.next()?.parse().ok()?, fields.next()?.parse().ok()?))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn times_stand_behind_a_name_of_any_kind() {
        let stat = "7 (a) S (b) S 1 7 7 0 -1 4194304 10 0 0 0 250 50 0 0 20 0 1 0 9";
        assert_eq!(times(stat), Some((250, 50)));
        assert_eq!(times("7 (a"), None);
    }

    #[test]
    fn this_process_takes_something() {
        if !std::path::Path::new("/proc/self/stat").exists() {
            return;
        }
        let usage = usage().expect("the kernel tells");
        assert!(usage.resident_bytes > 1 << 16 && usage.virtual_bytes >= usage.resident_bytes, "{usage:?}");
        assert!(usage.threads > 0 && usage.open_files > 2, "{usage:?}");
    }
}
