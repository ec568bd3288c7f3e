//! How many threads of this process can run at once: what affinity and a container's CPU limit leave of the machine, and how
//! many physical cores that is.

use std::collections::BTreeSet;
use std::fs;
use std::path::Path;

/// What this process may run on.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Cores {
    /// Threads that run at once: CPUs as the system counts them, within the limits of the process (`taskset`, cgroups).
    pub usable: usize,
    /// Physical cores among them; two CPUs of one core share its arithmetic.
    pub physical: usize,
}

/// More threads than can run at once.
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
#[error("{asked} threads are more than the {usable} that can run at once here ({physical} physical cores)")]
pub struct TooMany {
    /// Threads that were asked for.
    pub asked: usize,
    /// See [`Cores::usable`].
    pub usable: usize,
    /// See [`Cores::physical`].
    pub physical: usize,
}

/// The cores of this process.
pub fn cores() -> Cores {
    // The standard library reads affinity and the quotas of both versions of cgroups.
    let usable = std::thread::available_parallelism().map_or(1, usize::from);
    Cores::of(usable, Path::new("/"))
}

impl Cores {
    fn of(usable: usize, root: &Path) -> Cores {
        Cores { usable, physical: physical(root).map_or(usable, |n| n.clamp(1, usable)) }
    }

    /// The number of threads to compute with: as many as were asked for, or one for each physical core.
    pub fn threads(self, asked: Option<usize>) -> Result<usize, TooMany> {
        let Cores { usable, physical } = self;
        match asked {
            None => Ok(physical),
            Some(asked) if asked > usable => Err(TooMany { asked, usable, physical }),
            Some(asked) => Ok(asked.max(1)),
        }
    }
}

/// Physical cores among the CPUs that this process may run on, where the kernel's files lie below `root`.
fn physical(root: &Path) -> Option<usize> {
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
        let found = |usable, allowed| Cores::of(usable, machine(allowed, &cores).path());
        assert_eq!(found(8, "0-7"), Cores { usable: 8, physical: 4 });
        assert_eq!(found(3, "0,4-5"), Cores { usable: 3, physical: 2 });
        // A limit of a container leaves fewer than there are.
        assert_eq!(found(2, "0-7"), Cores { usable: 2, physical: 2 });
        // CPUs the kernel says nothing of are taken for cores.
        assert_eq!(found(9, "0-8"), Cores { usable: 9, physical: 9 });
        assert_eq!(found(4, "what"), Cores { usable: 4, physical: 4 });
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
        assert_eq!(Cores::of(8, folder.path()), Cores { usable: 8, physical: 8 });
    }

    #[test]
    fn threads_are_those_of_the_cores_unless_said() {
        let cores = Cores { usable: 8, physical: 4 };
        assert_eq!(cores.threads(None), Ok(4));
        assert_eq!(cores.threads(Some(8)), Ok(8));
        assert_eq!(cores.threads(Some(1)), Ok(1));
        let error = cores.threads(Some(9)).unwrap_err();
        assert_eq!(error, TooMany { asked: 9, usable: 8, physical: 4 });
        assert_eq!(error.to_string(), "9 threads are more than the 8 that can run at once here (4 physical cores)");
    }

    #[test]
    fn this_machine_has_cores() {
        let Cores { usable, physical } = cores();
        assert!(1 <= physical && physical <= usable, "{physical} of {usable}");
    }
}
