//! How many threads of this process can run at once: what affinity and a container's CPU limit leave of the machine, and how
//! many physical cores that is.

use crate::os;

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
    Cores::of(os::usable_cpus(), os::physical_cores())
}

impl Cores {
    /// Cores that the system does not tell of are taken for as many as CPUs; a limit of a container may leave fewer than there are.
    fn of(usable: usize, physical: Option<usize>) -> Cores {
        Cores { usable, physical: physical.map_or(usable, |n| n.clamp(1, usable)) }
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

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_limit_leaves_fewer_cores_than_there_are() {
        assert_eq!(Cores::of(8, Some(4)), Cores { usable: 8, physical: 4 });
        assert_eq!(Cores::of(2, Some(4)), Cores { usable: 2, physical: 2 });
        assert_eq!(Cores::of(9, None), Cores { usable: 9, physical: 9 });
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
