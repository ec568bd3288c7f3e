//! The Debian package: an `ar` archive of two tar archives. No maintainer scripts, so that removing it leaves nothing.

use md5::Md5;
use sha2::Digest as _;

use crate::archive::{Entry, Files, ar, hex, tar, xz};
use crate::elf::Elf;
use crate::project::Project;

/// The package with these files, whose paths are relative to `/`.
pub(crate) fn package(project: &Project, elf: &Elf, files: &Files, level: u32) -> anyhow::Result<Vec<u8>> {
    let kilobytes: usize = files.values().map(|entry| entry.bytes.len().div_ceil(1024)).sum();
    let control = format!(
        "Package: kiln\nVersion: {}\nArchitecture: {}\nMaintainer: Kiln contributors <kiln@localhost>\n\
         Installed-Size: {kilobytes}\nDepends: {}\nRecommends: libvulkan1, mesa-vulkan-drivers, ca-certificates\n\
         Section: science\nPriority: optional\nDescription: runs large language models (not Kiln AI)\n \
         {}.\n One binary: chat, server, conversion and benchmarks.\n",
        debian_version(&project.version),
        project.machine.debian(),
        elf.debian_depends()?.join(", "),
        project.description,
    );
    let sums: String =
        files.iter().map(|(path, entry)| format!("{}  {path}\n", hex(&Md5::digest(&entry.bytes)))).collect();
    let about =
        Files::from([("control".to_owned(), Entry::plain(control)), ("md5sums".to_owned(), Entry::plain(sums))]);
    let members = [
        ("debian-binary", b"2.0\n".to_vec()),
        ("control.tar.xz", xz(&tar(&about, "./", true, project.time)?, level)?),
        ("data.tar.xz", xz(&tar(files, "./", true, project.time)?, level)?),
    ];
    Ok(ar(&members, project.time))
}

/// `1.0.0-rc.1` comes before `1.0.0`, which Debian writes with a tilde.
pub(crate) fn debian_version(version: &str) -> String {
    version.replacen('-', "~", 1)
}
