//! What this process takes, as `/proc/self` tells.

use std::fs;

use crate::process::Usage;

/// Ticks of the kernel's clock in a second, as programs see it: the same on every Linux.
const TICKS: f64 = 100.0;

/// What this process takes now; none where `/proc` is not there.
pub(crate) fn usage() -> Option<Usage> {
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
pub(crate) fn most_files() -> Option<u64> {
    let limits = fs::read_to_string("/proc/self/limits").ok()?;
    let line = limits.lines().find_map(|line| line.strip_prefix("Max open files"))?;
    line.split_whitespace().next()?.parse().ok()
}

/// The ticks that a process has run, in itself and in the kernel. Its name, in brackets, may hold anything.
fn times(stat: &str) -> Option<(u64, u64)> {
    let mut fields = stat.rsplit_once(") ")?.1.split(' ').skip(11);
    Some((fields.next()?.parse().ok()?, fields.next()?.parse().ok()?))
}

/// Threads of this process.
pub(crate) fn threads() -> Option<u64> {
    let status = fs::read_to_string("/proc/self/status").ok()?;
    status.lines().find_map(|line| line.strip_prefix("Threads:")?.trim().parse().ok())
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
}
