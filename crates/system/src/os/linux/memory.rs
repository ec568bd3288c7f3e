//! Memory as Linux tells of it: `/proc/meminfo`, the files of cgroups and the limits of the process. These are the kernel's own files, so
//! nothing is allocated to find out.

use std::fs;
use std::path::{Path, PathBuf};

use crate::memory::{Available, Bound};

/// What this process may still take; `None` where the kernel does not tell.
pub(crate) fn available_memory() -> Option<Available> {
    available_at(Path::new("/"))
}

/// Bytes of memory that this process takes now.
pub(crate) fn taken_memory() -> Option<u64> {
    number_after(&read("/proc/self/status".into())?, "VmRSS:").map(|kib| kib * 1024)
}

/// Bytes that a bound of the memory is about in all.
pub(crate) fn total_memory(bound: Bound) -> Option<u64> {
    total_at(Path::new("/"), bound)
}

fn total_at(root: &Path, bound: Bound) -> Option<u64> {
    match bound {
        Bound::Machine => number_after(&read(root.join("proc/meminfo"))?, "MemTotal:").map(|kib| kib * 1024),
        Bound::Group => groups(root)?.into_iter().map(|group| group.limit).min(),
        Bound::AddressSpace => number_after(&read(root.join("proc/self/limits"))?, "Max address space"),
    }
}

/// The same, where the kernel's files lie below `root`: for tests.
fn available_at(root: &Path) -> Option<Available> {
    let found =
        [(machine(root), Bound::Machine), (group(root), Bound::Group), (address_space(root), Bound::AddressSpace)];
    let bounds = found.into_iter().filter_map(|(bytes, bound)| Some(Available { bytes: bytes?, bound }));
    bounds.min_by_key(|available| available.bytes)
}

fn read(path: PathBuf) -> Option<String> {
    fs::read_to_string(path).ok()
}

/// The first number after a word at the beginning of a line.
fn number_after(text: &str, word: &str) -> Option<u64> {
    text.lines().find_map(|line| line.strip_prefix(word)?.split_whitespace().next()?.parse().ok())
}

/// What can be had without swapping: free pages, and pages of files that can be read again.
fn machine(root: &Path) -> Option<u64> {
    let text = read(root.join("proc/meminfo"))?;
    Some(number_after(&text, "MemAvailable:").or_else(|| number_after(&text, "MemFree:"))?.saturating_mul(1024))
}

/// What the limits of the process's groups leave, its own and those above it.
fn group(root: &Path) -> Option<u64> {
    groups(root)?.into_iter().map(|group| group.left).min()
}

/// A group of processes with a limit.
struct Group {
    limit: u64,
    left: u64,
}

/// The groups of the process, its own and those above it.
fn groups(root: &Path) -> Option<Vec<Group>> {
    let text = read(root.join("proc/self/cgroup"))?;
    // `0::/path` names the one tree of version 2, `9:memory:/path` the tree of version 1.
    let own = text.lines().filter_map(|line| {
        let mut parts = line.splitn(3, ':');
        let (number, controllers, path) = (parts.next()?, parts.next()?, parts.next()?);
        let folder = root.join("sys/fs/cgroup");
        if number == "0" && controllers.is_empty() {
            return Some((folder, path.to_owned(), ["memory.max", "memory.current", "inactive_file "]));
        }
        let names = ["memory.limit_in_bytes", "memory.usage_in_bytes", "total_inactive_file "];
        controllers.split(',').any(|c| c == "memory").then(|| (folder.join("memory"), path.to_owned(), names))
    });
    let left = |folder: &Path, [limit, used, reclaimable]: [&str; 3]| -> Option<Group> {
        let number = |name: &str| read(folder.join(name))?.trim().parse::<u64>().ok();
        let limit = number(limit)?;
        let stat = read(folder.join("memory.stat")).unwrap_or_default();
        // Pages of files count as used until somebody needs them.
        let used = number(used)?.saturating_sub(number_after(&stat, reclaimable).unwrap_or(0));
        Some(Group { limit, left: limit.saturating_sub(used) })
    };
    let groups = own.flat_map(|(tree, path, names)| {
        let inside = Path::new(&path).strip_prefix("/").map(Path::to_owned).unwrap_or_default();
        // Inside a container the path may be the host's, which is not there: the root of the tree is then the group.
        let folders: Vec<PathBuf> = inside.ancestors().map(|p| tree.join(p)).collect();
        folders.into_iter().filter_map(move |folder| left(&folder, names)).collect::<Vec<_>>()
    });
    Some(groups.collect())
}

/// What `ulimit -v` leaves of the address space.
fn address_space(root: &Path) -> Option<u64> {
    let limits = read(root.join("proc/self/limits"))?;
    let limit = number_after(&limits, "Max address space")?;
    // In KiB, whatever the size of a page is: 4, 16 or 64 KiB on ARM.
    let taken = number_after(&read(root.join("proc/self/status"))?, "VmSize:")?;
    Some(limit.saturating_sub(taken.saturating_mul(1024)))
}

#[cfg(test)]
mod tests {
    use super::*;

    /// A machine made of these files.
    fn machine_of(files: &[(&str, &str)]) -> Option<Available> {
        let folder = tempfile::tempdir().unwrap();
        for (name, text) in files {
            let path = folder.path().join(name);
            fs::create_dir_all(path.parent().unwrap()).unwrap();
            fs::write(path, text).unwrap();
        }
        available_at(folder.path())
    }

    const MEMORY: (&str, &str) = ("proc/meminfo", "MemTotal: 100 kB\nMemFree: 10 kB\nMemAvailable:   50 kB\n");
    const SIZE: (&str, &str) = ("proc/self/status", "Name:\tkiln\nVmSize:\t      12 kB\nVmRSS:\t 8 kB\n");

    #[test]
    fn the_tightest_bound_counts() {
        let unlimited =
            ("proc/self/limits", "Max address space         unlimited            unlimited            bytes\n");
        let limited =
            ("proc/self/limits", "Max cpu time  unlimited\nMax address space         20480    unlimited    bytes\n");
        let two = ("proc/self/cgroup", "0::/a/b\n");
        let one = ("proc/self/cgroup", "12:cpu:/\n9:hugetlb,memory:/a\n");
        type Row<'a> = (&'a [(&'a str, &'a str)], u64, Bound);
        let rows: &[Row<'_>] = &[
            (&[MEMORY, SIZE, unlimited], 51200, Bound::Machine),
            (&[MEMORY, SIZE, limited], 20480 - 12 * 1024, Bound::AddressSpace),
            // The limit stands above the process's own group, and pages of files can be had back.
            (
                &[
                    MEMORY,
                    two,
                    ("sys/fs/cgroup/a/b/memory.max", "max\n"),
                    ("sys/fs/cgroup/a/b/memory.current", "400\n"),
                    ("sys/fs/cgroup/a/memory.max", "1000\n"),
                    ("sys/fs/cgroup/a/memory.current", "400\n"),
                    ("sys/fs/cgroup/a/memory.stat", "anon 1\ninactive_file 300\n"),
                ],
                900,
                Bound::Group,
            ),
            // In a container the tree begins at the group, whatever its path on the host.
            (
                &[MEMORY, two, ("sys/fs/cgroup/memory.max", "700"), ("sys/fs/cgroup/memory.current", "800")],
                0,
                Bound::Group,
            ),
            (
                &[
                    MEMORY,
                    one,
                    ("sys/fs/cgroup/memory/a/memory.limit_in_bytes", "5000"),
                    ("sys/fs/cgroup/memory/a/memory.usage_in_bytes", "1000"),
                ],
                4000,
                Bound::Group,
            ),
        ];
        for (files, bytes, bound) in rows {
            assert_eq!(machine_of(files), Some(Available { bytes: *bytes, bound: *bound }), "{files:?}");
        }
        assert_eq!(machine_of(&[]), None);
    }
}
