//! The rpm, for Fedora, openSUSE and those who derive from them.

use anyhow::Context as _;
use rpm::{BuildConfig, CompressionWithLevel, Dependency, FileOptions, PackageBuilder};

use crate::archive::Files;
use crate::deb::debian_version;
use crate::elf::Elf;
use crate::project::Project;

/// The package with these files, whose paths are relative to `/`.
pub(crate) fn package(project: &Project, elf: &Elf, files: &Files, level: u32) -> anyhow::Result<Vec<u8>> {
    let time = u32::try_from(project.time).context("the time does not fit into an rpm")?;
    // Version 4 of the format: the one that rpm reads everywhere.
    let config = BuildConfig::v4().source_date(time).compression(CompressionWithLevel::Gzip(level));
    let version = debian_version(&project.version);
    let summary = "Runs large language models (not Kiln AI)";
    let mut builder = PackageBuilder::new("kiln", &version, &project.licence, project.machine.uname(), summary);
    builder.using_config(config).release("1").description(format!("{}.", project.description)).build_host("localhost");
    for name in elf.rpm_requires() {
        builder.requires(Dependency::any(name));
    }
    for name in ["vulkan-loader", "mesa-vulkan-drivers", "ca-certificates"] {
        builder.recommends(Dependency::any(name));
    }
    for (path, entry) in files {
        let mode = u16::try_from(entry.mode).context("a mode has 12 bits")?;
        let options = FileOptions::new(format!("/{path}")).permissions(mode).user("root").group("root");
        let options = if path.contains("/doc/") { options.doc() } else { options };
        builder.with_file_contents(entry.bytes.clone(), options)?;
    }
    let mut bytes = Vec::new();
    builder.build().context("the rpm could not be made")?.write(&mut bytes)?;
    Ok(bytes)
}
