//! Physical cores as Linux tells of them: the CPUs that the process may run on, and the topology below `/sys`.

use std::collections::BTreeSet;
use std::fs;
use std::path::Path;

/// Physical cores among the CPUs that this process may run on.
pub(crate) fn physical_cores() -> Option<usize> {
    physical_at(Path::new("/"))
}

/// The same, where the kernel's files lie below `root`: for tests.
fn physical_at(root: &Path) -> Option<usize> {
    let status = fs::read_to_string(root.join("proc/self/status")).ok()?;
    let allowed = status.lines().find_map(|line| line.strip_prefix("Cpus_allowed_list:"))?;
    let mut cores = BTreeSet::new();
    for cpu in listed(allowed)? {
        let folder = root.join(format!("sys/devices/system/cpu/cpu{cpu}/topology"));
        let number = |name: &str| fs::read_to_string(folder.join(name)).ok()?.trim().parse::<i64>().ok();
        // Numbers of cores begin anew in every cluster of an ARM machine; kernels that tell no clusters count them as packages.
        cores.insert((number("physical_package_id")?, number("cluster_id"), number("core_id")?));
    }
    Some(cores.len())
}

/// The numbers of a list as the kernel writes it: `0-3,8`.
fn listed(text: &str) -> Option<Vec<usize>> {
    let mut all = Vec::new();
    for part in text.trim().split(',') {
        let (first, last) = part.split_once('-').unwrap_or((part, part));
        let (first, last): (usize, usize) = (first.parse().ok()?, last.parse().ok()?);
        // No machine has more; the list is the kernel's, but a wrong one should not fill the memory.
        all.extend(first..=last.min(first + (1 << 16)));
    }
    Some(all)
}

#[cfg(test)]
mod tests {
    use super::*;

    /// A machine with a core number for each CPU.
    fn machine(allowed: &str, cores: &[(usize, usize)]) -> tempfile::TempDir {
        let folder = tempfile::tempdir().unwrap();
        let write = |name: String, text: String| {
            let path = folder.path().join(name);
            fs::create_dir_all(path.parent().unwrap()).unwrap();
            fs::write(path, text).unwrap();
        };
        write("proc/self/status".into(), format!("Name:\tkiln\nCpus_allowed_list:\t{allowed}\n"));
        for (cpu, (package, core)) in cores.iter().enumerate() {
            let topology = format!("sys/devices/system/cpu/cpu{cpu}/topology");
            write(format!("{topology}/physical_package_id"), format!("{package}\n"));
            write(format!("{topology}/core_id"), format!("{core}\n"));
        }
        folder
    }

    #[test]
    fn cores_are_counted_once_and_only_where_the_process_may_run() {
        // Two packages of two cores with two CPUs each; numbers of cores begin anew in each package.
        let cores = [(0, 0), (0, 1), (1, 0), (1, 1), (0, 0), (0, 1), (1, 0), (1, 1)];
        let found = |allowed| physical_at(machine(allowed, &cores).path());
        assert_eq!(found("0-7"), Some(4));
        assert_eq!(found("0,4-5"), Some(2));
        assert_eq!(found("0-8"), None, "the kernel says nothing of the last one");
        assert_eq!(found("what"), None);
    }

    #[test]
    fn cores_of_clusters_are_told_apart() {
        // Four small cores and two clusters of two large ones in one package.
        let cores = [0, 1, 2, 3, 0, 1, 0, 1].map(|core| (0, core));
        let folder = machine("0-7", &cores);
        for (cpu, cluster) in [0, 0, 0, 0, 1, 1, 2, 2].into_iter().enumerate() {
            let path = folder.path().join(format!("sys/devices/system/cpu/cpu{cpu}/topology/cluster_id"));
            fs::write(path, format!("{cluster}\n")).unwrap();
        }
        assert_eq!(physical_at(folder.path()), Some(8));
    }
}
