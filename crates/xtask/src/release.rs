//! `cargo xtask release`: the binary with its manual in every form of package, checksums and a bill of materials.

use std::io::Write as _;
use std::path::{Path, PathBuf};

use anyhow::{Context as _, bail};
use sha2::{Digest as _, Sha256};

use crate::archive::{Entry, Files, below, gzip, hex, tar, xz};
use crate::elf::Elf;
use crate::machine::Machine;
use crate::project::{BINARY, Project, output};
use crate::{deb, licences, npm, sbom, wheel};

/// Flags of `cargo xtask release`.
#[derive(clap::Args)]
pub(crate) struct Arguments {
    /// The machine that the packages are for; another one's binary is built by the cross compiler of `scripts/test-arm` [default: this one]
    #[arg(long, value_name = "MACHINE")]
    arch: Option<Machine>,
    /// Package this binary instead of building one
    #[arg(long, value_name = "FILE")]
    binary: Option<PathBuf>,
    /// The folder for the packages
    #[arg(long, value_name = "FOLDER", default_value = "dist")]
    out: PathBuf,
    /// A folder with man1/*.1 and completions/{kiln.bash,_kiln,kiln.fish}, for a binary that does not run here
    #[arg(long, value_name = "FOLDER")]
    manual: Option<PathBuf>,
    /// How well archives are compressed; 0 is fast
    #[arg(long, value_name = "LEVEL", default_value_t = 9, value_parser = clap::value_parser!(u32).range(0..=9))]
    level: u32,
}

/// Makes the packages and tells of each.
pub(crate) fn run(arguments: &Arguments) -> anyhow::Result<()> {
    let machine = arguments.arch.or(Machine::own());
    let machine = machine.context("packages are for x86-64 and 64-bit ARM\nhint: --arch names one of them")?;
    let project = Project::read(machine)?;
    let built = match &arguments.binary {
        Some(file) => file.clone(),
        None => build(&project)?,
    };
    let work = tempfile::tempdir()?;
    let stripped = work.path().join(BINARY);
    std::fs::copy(&built, &stripped).with_context(|| format!("cannot copy {}", built.display()))?;
    let elf = Elf::read(&stripped, machine)?;
    output(machine.strip(&project.root).arg("--strip-all").arg(&stripped))
        .context("cannot strip the binary\nhint: install binutils")?;
    let binary = std::fs::read(&stripped)?;
    if arguments.manual.is_none() {
        same_version(&project, &stripped)?;
    }
    let manual = match &arguments.manual {
        Some(folder) => folder.clone(),
        None => write_manual(&project, &stripped, &work.path().join("manual"))?,
    };
    let licences = licence_files(&project)?;
    let tree = tree(&project, &binary, &manual, &licences)?;
    let level = arguments.level;
    let tag = elf.manylinux(machine)?;
    let version = &project.version;

    let mut made: Vec<(String, Vec<u8>)> = Vec::new();
    let top = format!("kiln-{version}-{}-linux", machine.uname());
    let archive = xz(&tar(&below(&top, &tree), "", true, project.time)?, level)?;
    made.push((format!("{top}.tar.xz"), archive));
    let system = system_tree(&tree, "share/zsh/vendor-completions/_kiln")?;
    made.push((
        format!("kiln_{}_{}.deb", deb::debian_version(version), machine.debian()),
        deb::package(&project, &elf, &system, level)?,
    ));
    #[cfg(feature = "rpm")]
    {
        let system = system_tree(&tree, "share/zsh/site-functions/_kiln")?;
        let bytes = crate::rpm_package::package(&project, &elf, &system, level)?;
        made.push((format!("kiln-{}-1.{}.rpm", deb::debian_version(version), machine.uname()), bytes));
    }
    made.push((wheel::file_name(&project, &tag), wheel::wheel(&project, &tag, &binary, &licences, level)?));
    made.extend(npm::packages(&project, &binary, &licences, level)?);
    made.push((
        format!("kiln-{version}-{}.cdx.json", machine.uname()),
        sbom::bill(&project, &hex(&Sha256::digest(&binary)))?,
    ));
    made.push(("install.sh".to_owned(), project.file("deploy/install.sh")?));
    made.sort();
    write(&arguments.out, &project, made)
}

/// Builds the binary, without paths of this machine in it.
fn build(project: &Project) -> anyhow::Result<PathBuf> {
    let home = std::env::var_os("CARGO_HOME").map(PathBuf::from);
    let home = home.or_else(|| Some(PathBuf::from(std::env::var_os("HOME")?).join(".cargo")));
    let homes: Vec<(PathBuf, &str)> =
        [(project.root.clone(), ".")].into_iter().chain(home.map(|home| (home, "cargo"))).collect();
    let mut flags: Vec<String> =
        homes.iter().map(|(from, to)| format!("--remap-path-prefix={}={to}", from.display())).collect();
    if let Ok(given) = std::env::var("RUSTFLAGS") {
        flags.extend(given.split_whitespace().map(str::to_owned));
    }
    // The C++ of others tells the names of its files, too.
    let named: String = homes.iter().map(|(from, to)| format!(" -ffile-prefix-map={}={to}", from.display())).collect();
    let c_flags = |name: &str| std::env::var(name).unwrap_or_default() + &named;
    let target = project.machine.target();
    let (mut cargo, folder) = project.machine.cargo(&project.root, &project.target_folder);
    let status = cargo
        .args(["build", "--release", "--locked", "--package", BINARY, "--target", target])
        .current_dir(&project.root)
        .env_remove("RUSTFLAGS")
        .env("CARGO_ENCODED_RUSTFLAGS", flags.join("\u{1f}"))
        .env("CFLAGS", c_flags("CFLAGS"))
        .env("CXXFLAGS", c_flags("CXXFLAGS"))
        .env("SOURCE_DATE_EPOCH", project.time.to_string())
        .status()
        .context("cannot run cargo")?;
    if !status.success() {
        bail!("the build failed ({status})");
    }
    Ok(folder.join(target).join("release").join(BINARY))
}

/// A binary of another version would give packages that lie about theirs.
fn same_version(project: &Project, binary: &Path) -> anyhow::Result<()> {
    let version = &project.version;
    let hint = "hint: a binary that does not run here needs --manual FOLDER";
    let said = output(project.machine.run(&project.root, binary).arg("--version")).context(hint)?;
    if said.trim() != format!("kiln {version}") {
        bail!("the binary says {:?}, but this is version {version}\nhint: build it from this source", said.trim());
    }
    Ok(())
}

/// Lets the binary write its man pages and completions.
fn write_manual(project: &Project, binary: &Path, folder: &Path) -> anyhow::Result<PathBuf> {
    let kiln = || project.machine.run(&project.root, binary);
    output(kiln().arg("man").arg("--out").arg(folder.join("man1")))?;
    std::fs::create_dir_all(folder.join("completions"))?;
    for (shell, name) in [("bash", "kiln.bash"), ("zsh", "_kiln"), ("fish", "kiln.fish")] {
        let text = output(kiln().args(["completions", shell]))?;
        std::fs::write(folder.join("completions").join(name), text)?;
    }
    Ok(folder.to_owned())
}

fn licence_files(project: &Project) -> anyhow::Result<Files> {
    Ok(Files::from([
        ("LICENSE-APACHE".to_owned(), Entry::plain(project.file("LICENSE-APACHE")?)),
        ("LICENSE-MIT".to_owned(), Entry::plain(project.file("LICENSE-MIT")?)),
        ("THIRD-PARTY-LICENSES".to_owned(), Entry::plain(licences::text(project)?)),
    ]))
}

/// What is installed below a prefix such as `~/.local` or `/usr`.
fn tree(project: &Project, binary: &[u8], manual: &Path, licences: &Files) -> anyhow::Result<Files> {
    let mut files = below("share/doc/kiln", licences);
    for name in ["README.md", "CHANGELOG.md"] {
        files.insert(format!("share/doc/kiln/{name}"), Entry::plain(project.file(name)?));
    }
    files.insert("share/doc/kiln/examples/kiln.service".into(), Entry::plain(project.file("deploy/kiln.service")?));
    files.insert("bin/kiln".into(), Entry::program(binary));
    let read = |path: PathBuf| std::fs::read(&path).with_context(|| format!("cannot read {}", path.display()));
    let completions = [
        ("kiln.bash", "bash-completion/completions/kiln"),
        ("_kiln", "zsh/site-functions/_kiln"),
        ("kiln.fish", "fish/vendor_completions.d/kiln.fish"),
    ];
    for (name, path) in completions {
        files.insert(format!("share/{path}"), Entry::plain(read(manual.join("completions").join(name))?));
    }
    let pages = manual.join("man1");
    let mut count = 0;
    for entry in std::fs::read_dir(&pages).with_context(|| format!("cannot read {}", pages.display()))? {
        let path = entry?.path();
        let name = path.file_name().unwrap_or_default().to_string_lossy().into_owned();
        if name.ends_with(".1") {
            files.insert(format!("share/man/man1/{name}"), Entry::plain(read(path)?));
            count += 1;
        }
    }
    anyhow::ensure!(count > 0, "{} has no man pages (*.1)", pages.display());
    Ok(files)
}

/// The same below `/usr`, as distributions want it: man pages are compressed, and completions of zsh lie where it looks.
fn system_tree(tree: &Files, zsh: &str) -> anyhow::Result<Files> {
    let mut files = Files::new();
    for (path, entry) in tree {
        match path.as_str() {
            "share/zsh/site-functions/_kiln" => files.insert(format!("usr/{zsh}"), entry.clone()),
            path if path.starts_with("share/man/") => {
                files.insert(format!("usr/{path}.gz"), Entry::plain(gzip(&entry.bytes, 9)?))
            }
            path => files.insert(format!("usr/{path}"), entry.clone()),
        };
    }
    let read = |name: &str| tree.get(&format!("share/doc/kiln/{name}")).map_or(&[][..], |entry| &entry.bytes);
    let copyright = [b"Kiln is licensed under MIT or Apache-2.0, as you like.\n\n", read("LICENSE-MIT")].concat();
    files.insert("usr/share/doc/kiln/copyright".into(), Entry::plain(copyright));
    Ok(files)
}

/// Writes the packages, and the checksums of all that is in the folder: packages for another machine and modules may be there already.
fn write(folder: &Path, project: &Project, made: Vec<(String, Vec<u8>)>) -> anyhow::Result<()> {
    std::fs::create_dir_all(folder).with_context(|| format!("cannot make {}", folder.display()))?;
    let mut out = std::io::stdout().lock();
    for (name, bytes) in made {
        let path = folder.join(name);
        std::fs::write(&path, &bytes).with_context(|| format!("cannot write {}", path.display()))?;
        writeln!(out, "{:>10}  {}", bytes.len(), path.display())?;
    }
    let sums = checksums(folder, &project.version)?;
    std::fs::write(folder.join(SUMS), &sums).with_context(|| format!("cannot write {SUMS}"))?;
    writeln!(out, "{:>10}  {}", sums.len(), folder.join(SUMS).display())?;
    Ok(())
}

const SUMS: &str = "SHA256SUMS";

/// The text of SHA256SUMS for a folder. Files of another release would be taken for this one's by those who install from it.
fn checksums(folder: &Path, version: &str) -> anyhow::Result<String> {
    let versions = [version.to_owned(), deb::debian_version(version), wheel::python_version(version)];
    let mut lines = Vec::new();
    for entry in std::fs::read_dir(folder)? {
        let name = entry?.file_name().to_string_lossy().into_owned();
        if name == SUMS {
            continue;
        }
        let is_own = name == "install.sh" || versions.iter().any(|version| name.contains(version.as_str()));
        anyhow::ensure!(
            is_own,
            "{} holds {name}, which is none of release {version}\nhint: empty the folder, or name another one by --out",
            folder.display()
        );
        lines.push(format!("{}  {name}\n", hex(&Sha256::digest(std::fs::read(folder.join(&name))?))));
    }
    lines.sort_by(|a, b| a[64..].cmp(&b[64..]));
    Ok(lines.concat())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn checksums_are_of_all_that_is_there_and_nothing_of_another_release() {
        let folder = tempfile::tempdir().unwrap();
        let write = |name: &str| std::fs::write(folder.path().join(name), name).unwrap();
        for name in
            ["install.sh", "kiln-1.2.3-x86_64-linux.tar.xz", "kiln_llm_python-1.2.3-cp39-abi3-linux_x86_64.whl", SUMS]
        {
            write(name);
        }
        let sums = checksums(folder.path(), "1.2.3").unwrap();
        let names: Vec<&str> = sums.lines().map(|line| &line[66..]).collect();
        assert_eq!(
            names,
            ["install.sh", "kiln-1.2.3-x86_64-linux.tar.xz", "kiln_llm_python-1.2.3-cp39-abi3-linux_x86_64.whl"]
        );
        assert!(sums.starts_with(&hex(&Sha256::digest("install.sh"))), "{sums}");
        write("kiln-1.2.2-x86_64-linux.tar.xz");
        assert!(checksums(folder.path(), "1.2.3").unwrap_err().to_string().contains("kiln-1.2.2"));
    }
}
