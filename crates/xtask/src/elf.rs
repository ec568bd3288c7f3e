//! What a binary needs of the system it runs on, as `readelf` tells it: shared libraries and their symbol versions. The names of
//! packages and tags that follow from it are here, too.

use std::collections::BTreeSet;
use std::path::Path;
use std::process::Command;

use anyhow::{Context as _, bail};

use crate::machine::Machine;

/// Versions of libstdc++'s symbols and the GCC that brought them (GCC's "ABI policy and guidelines").
const LIBSTDCXX: [(Version, &str); 11] = [
    (Version([3, 4, 21]), "5"),
    (Version([3, 4, 22]), "6"),
    (Version([3, 4, 24]), "7"),
    (Version([3, 4, 25]), "8"),
    (Version([3, 4, 28]), "9.3"),
    (Version([3, 4, 29]), "11"),
    (Version([3, 4, 30]), "12"),
    (Version([3, 4, 31]), "13"),
    (Version([3, 4, 32]), "13.2"),
    (Version([3, 4, 33]), "14"),
    (Version([3, 4, 34]), "15"),
];
/// The minor versions of glibc whose manylinux tags promise these symbols of libstdc++.
const MANYLINUX: [(Version, u32); 7] = [
    (Version([3, 4, 19]), 17),
    (Version([3, 4, 24]), 28),
    (Version([3, 4, 28]), 31),
    (Version([3, 4, 29]), 34),
    (Version([3, 4, 30]), 35),
    (Version([3, 4, 32]), 39),
    (Version([3, 4, 33]), 40),
];

/// A version of up to three numbers.
#[derive(Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Debug, Default)]
pub(crate) struct Version([u32; 3]);

impl Version {
    fn parse(text: &str) -> Option<Self> {
        let mut numbers = [0; 3];
        let parts: Vec<&str> = text.split('.').collect();
        if parts.len() > numbers.len() {
            return None;
        }
        for (number, part) in numbers.iter_mut().zip(parts) {
            *number = part.parse().ok()?;
        }
        Some(Self(numbers))
    }
}

/// What a binary asks of shared libraries.
#[derive(Debug, Default)]
pub(crate) struct Elf {
    machine: String,
    /// Libraries that the loader must find.
    pub(crate) libraries: BTreeSet<String>,
    /// Libraries with the symbol versions that are asked of them.
    pub(crate) versions: BTreeSet<(String, String)>,
}

impl Elf {
    /// Asks `readelf` about a file.
    pub(crate) fn read(file: &Path, machine: Machine) -> anyhow::Result<Self> {
        let output = Command::new("readelf")
            .args(["--wide", "--file-header", "--dynamic", "--version-info"])
            .arg(file)
            .env("LC_ALL", "C")
            .output()
            .context("cannot run readelf\nhint: install binutils")?;
        if !output.status.success() {
            bail!("readelf cannot read {}: {}", file.display(), String::from_utf8_lossy(&output.stderr).trim());
        }
        let elf = Self::parse(&String::from_utf8_lossy(&output.stdout));
        if !elf.machine.contains(machine.elf()) {
            bail!(
                "{} is for {:?}, and the packages are for Linux on {}\nhint: --arch names the machine of a binary",
                file.display(),
                if elf.machine.is_empty() { "an unknown machine" } else { &elf.machine },
                machine.words()
            );
        }
        Ok(elf)
    }

    fn parse(text: &str) -> Self {
        let mut elf = Self::default();
        let mut library = String::new();
        for line in text.lines() {
            if let Some(machine) = line.trim_start().strip_prefix("Machine:") {
                elf.machine = machine.trim().to_owned();
            }
            if line.contains("(NEEDED)")
                && let Some((_, name)) = line.split_once('[')
            {
                elf.libraries.insert(name.trim_end_matches(']').to_owned());
            }
            // The table of needed versions: a line for each library, with lines for its versions below it.
            if let Some((_, rest)) = line.split_once(" File: ") {
                library = rest.split_whitespace().next().unwrap_or_default().to_owned();
            } else if let Some((_, rest)) = line.split_once("  Name: ")
                && line.contains("Flags:")
                && !library.is_empty()
                && let Some(version) = rest.split_whitespace().next()
            {
                elf.versions.insert((library.clone(), version.to_owned()));
            }
        }
        elf
    }

    /// The highest version of a family of symbols, such as `GLIBC`.
    fn highest(&self, family: &str) -> Option<Version> {
        let names = self.versions.iter().filter_map(|(_, name)| name.strip_prefix(family)?.strip_prefix('_'));
        // Relocations in the packed form came with glibc 2.36; the name has no number.
        let packed = (family == "GLIBC" && self.versions.iter().any(|(_, name)| name == "GLIBC_ABI_DT_RELR"))
            .then_some(Version([2, 36, 0]));
        names.filter_map(Version::parse).chain(packed).max()
    }

    fn glibc(&self) -> anyhow::Result<Version> {
        self.highest("GLIBC").context("the binary asks for no version of glibc\nhint: it must be linked with glibc")
    }

    /// What a Debian package of the binary depends on.
    pub(crate) fn debian_depends(&self) -> anyhow::Result<Vec<String>> {
        let Version([major, minor, _]) = self.glibc()?;
        let mut depends = BTreeSet::from([format!("libc6 (>= {major}.{minor})")]);
        for library in &self.libraries {
            match library.as_str() {
                // All of glibc's.
                "libc.so.6"
                | "libm.so.6"
                | "libdl.so.2"
                | "libpthread.so.0"
                | "librt.so.1"
                | "ld-linux-x86-64.so.2"
                | "ld-linux-aarch64.so.1" => {}
                "libgcc_s.so.1" => {
                    let Version([major, minor, _]) = self.highest("GCC").unwrap_or_default();
                    depends.insert(format!("libgcc-s1 (>= {major}.{minor})"));
                }
                "libstdc++.so.6" => {
                    depends.insert(format!("libstdc++6 (>= {})", self.gcc_of_libstdcxx()?));
                }
                other => bail!(
                    "the binary needs {other}, and no Debian package is known for it\n\
                     hint: link it statically, or add its package to `debian_depends` in crates/xtask/src/elf.rs"
                ),
            }
        }
        Ok(depends.into_iter().collect())
    }

    fn gcc_of_libstdcxx(&self) -> anyhow::Result<&'static str> {
        let asked = self.highest("GLIBCXX").unwrap_or_default();
        let found = LIBSTDCXX.iter().find(|(version, _)| *version >= asked);
        found.map(|(_, gcc)| *gcc).with_context(|| {
            format!("no GCC is known for GLIBCXX {asked:?}\nhint: add it to LIBSTDCXX in crates/xtask/src/elf.rs")
        })
    }

    /// What an rpm of the binary requires, in the form of rpm's own dependency generator.
    #[cfg(any(feature = "rpm", test))]
    pub(crate) fn rpm_requires(&self) -> Vec<String> {
        let plain = self.libraries.iter().map(|library| format!("{library}()(64bit)"));
        let versions = self.versions.iter().map(|(library, version)| format!("{library}({version})(64bit)"));
        plain.chain(versions).collect()
    }

    /// The tag of a wheel that holds the binary (PEP 600): the oldest glibc that has all symbols, and a libstdc++ of that time.
    pub(crate) fn manylinux(&self, machine: Machine) -> anyhow::Result<String> {
        let Version([major, minor, _]) = self.glibc()?;
        let asked = self.highest("GLIBCXX").unwrap_or_default();
        let found = MANYLINUX.iter().find(|(version, _)| *version >= asked);
        let (_, least) = found.with_context(|| {
            format!(
                "no manylinux tag is known for GLIBCXX {asked:?}\nhint: add it to MANYLINUX in crates/xtask/src/elf.rs"
            )
        })?;
        Ok(format!("manylinux_{major}_{}_{}", minor.max(*least), machine.uname()))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const TEXT: &str = "
  Machine:                           Advanced Micro Devices X86-64
 0x0000000000000001 (NEEDED)             Shared library: [libstdc++.so.6]
 0x0000000000000001 (NEEDED)             Shared library: [libgcc_s.so.1]
 0x0000000000000001 (NEEDED)             Shared library: [libc.so.6]
Version symbols section '.gnu.version' contains 9 entries:
  000:   0 (*local*)       2 (GLIBC_2.99)
Version needs section '.gnu.version_r' contains 3 entries:
  000000: Version: 1  File: libgcc_s.so.1  Cnt: 1
  0x0010:   Name: GCC_4.2.0  Flags: none  Version: 29
  0x0020: Version: 1  File: libc.so.6  Cnt: 2
  0x0030:   Name: GLIBC_2.9  Flags: none  Version: 2
  0x0040:   Name: GLIBC_2.28  Flags: none  Version: 3
  0x0050: Version: 1  File: libstdc++.so.6  Cnt: 1
  0x0060:   Name: GLIBCXX_3.4.29  Flags: none  Version: 4
";

    #[test]
    fn packages_follow_from_libraries_and_versions() {
        let elf = Elf::parse(TEXT);
        assert_eq!(elf.debian_depends().unwrap(), ["libc6 (>= 2.28)", "libgcc-s1 (>= 4.2)", "libstdc++6 (>= 11)"]);
        assert!(elf.rpm_requires().contains(&"libc.so.6(GLIBC_2.28)(64bit)".to_owned()));
        assert!(elf.rpm_requires().contains(&"libgcc_s.so.1()(64bit)".to_owned()));
        // glibc alone would allow 2.28, but libstdc++ of GCC 11 came with the systems of glibc 2.34.
        assert_eq!(elf.manylinux(Machine::X86).unwrap(), "manylinux_2_34_x86_64");
        assert_eq!(elf.manylinux(Machine::Arm).unwrap(), "manylinux_2_34_aarch64");
    }

    #[test]
    fn unknown_libraries_and_packed_relocations_are_not_passed_over() {
        let elf = Elf::parse(&TEXT.replace("[libc.so.6]", "[libfoo.so.1]"));
        assert!(elf.debian_depends().unwrap_err().to_string().contains("libfoo.so.1"));
        let elf = Elf::parse(&TEXT.replace("GLIBC_2.9 ", "GLIBC_ABI_DT_RELR "));
        assert_eq!(elf.manylinux(Machine::X86).unwrap(), "manylinux_2_36_x86_64");
        let elf = Elf::parse(&TEXT.replace("GLIBCXX_3.4.29", "GLIBCXX_3.4.99"));
        assert!(elf.debian_depends().is_err() && elf.manylinux(Machine::X86).is_err());
    }
}
