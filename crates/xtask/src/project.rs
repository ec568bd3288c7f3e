//! What cargo and git know of the project: its version, its time, and the crates that the binary is made of.

use std::collections::{BTreeMap, BTreeSet};
use std::path::{Path, PathBuf};
use std::process::Command;

use anyhow::{Context as _, bail};
use serde_json::Value;

use crate::machine::Machine;

/// The crate of the binary, and the binary.
pub(crate) const BINARY: &str = "kiln";

/// A crate that is linked into the binary.
pub(crate) struct Crate {
    pub(crate) name: String,
    pub(crate) version: String,
    /// As an SPDX expression.
    pub(crate) licence: Option<String>,
    pub(crate) folder: PathBuf,
    /// Whether it is one of Kiln's own.
    pub(crate) is_own: bool,
    pub(crate) checksum: Option<String>,
    /// Names and versions of those it uses, of those that are linked in.
    pub(crate) uses: BTreeSet<(String, String)>,
}

/// The project.
pub(crate) struct Project {
    pub(crate) root: PathBuf,
    pub(crate) target_folder: PathBuf,
    pub(crate) version: String,
    pub(crate) description: String,
    pub(crate) licence: String,
    /// The one that packages are made for.
    pub(crate) machine: Machine,
    /// Of every file in every archive, in seconds since 1970: SOURCE_DATE_EPOCH, or that of the commit.
    pub(crate) time: u64,
    /// In order of their names; the binary's own crate is among them.
    pub(crate) crates: Vec<Crate>,
}

impl Project {
    /// Asks cargo and git.
    pub(crate) fn read(machine: Machine) -> anyhow::Result<Self> {
        let root = Path::new(env!("CARGO_MANIFEST_DIR")).ancestors().nth(2).context("xtask lies in crates/xtask")?;
        let arguments = ["metadata", "--format-version", "1", "--locked", "--filter-platform", machine.target()];
        let text = output(Command::new(cargo()).args(arguments).current_dir(root))?;
        let metadata: Value = serde_json::from_str(&text).context("cargo metadata is no JSON")?;
        let lock = std::fs::read_to_string(root.join("Cargo.lock")).context("cannot read Cargo.lock")?;
        let crates = linked(&metadata, &checksums(&lock))?;
        let own = crates.iter().find(|one| one.name == BINARY).context("the workspace has no crate `kiln`")?;
        let packages = metadata["packages"].as_array().context("no packages")?;
        let package = packages.iter().find(|package| package["name"] == BINARY).context("no crate `kiln`")?;
        Ok(Self {
            root: root.to_owned(),
            target_folder: text_of(&metadata["target_directory"])?.into(),
            version: own.version.clone(),
            description: text_of(&package["description"])?,
            licence: text_of(&package["license"])?,
            machine,
            time: time(root)?,
            crates,
        })
    }

    /// Reads a file of the repository.
    pub(crate) fn file(&self, path: &str) -> anyhow::Result<Vec<u8>> {
        std::fs::read(self.root.join(path)).with_context(|| format!("cannot read {path}"))
    }
}

pub(crate) fn cargo() -> std::ffi::OsString {
    std::env::var_os("CARGO").unwrap_or_else(|| "cargo".into())
}

/// What a program prints, if it ends well.
pub(crate) fn output(command: &mut Command) -> anyhow::Result<String> {
    let output = command.output().with_context(|| format!("cannot run {}", command.get_program().display()))?;
    if !output.status.success() {
        let said = String::from_utf8_lossy(&output.stderr);
        bail!("{} failed ({}): {}", command.get_program().display(), output.status, said.trim());
    }
    String::from_utf8(output.stdout).with_context(|| format!("{}: no UTF-8", command.get_program().display()))
}

fn time(root: &Path) -> anyhow::Result<u64> {
    if let Ok(text) = std::env::var("SOURCE_DATE_EPOCH") {
        return text.parse().with_context(|| format!("SOURCE_DATE_EPOCH is {text:?}; it must be seconds since 1970"));
    }
    let git = output(Command::new("git").args(["log", "-1", "--format=%ct"]).current_dir(root));
    let git = git.context("the time of the commit is unknown\nhint: set SOURCE_DATE_EPOCH to seconds since 1970")?;
    git.trim().parse().context("git told no time")
}

fn text_of(value: &Value) -> anyhow::Result<String> {
    Ok(value.as_str().with_context(|| format!("{value} should be a text"))?.to_owned())
}

/// Checksums of Cargo.lock, by name and version.
fn checksums(lock: &str) -> BTreeMap<(String, String), String> {
    let field = |block: &str, name: &str| {
        let line = block.lines().find_map(|line| line.strip_prefix(name)?.strip_prefix(" = "))?;
        Some(line.trim_matches('"').to_owned())
    };
    let blocks = lock.split("[[package]]").skip(1);
    blocks
        .filter_map(|block| Some(((field(block, "name")?, field(block, "version")?), field(block, "checksum")?)))
        .collect()
}

/// The crates that the binary is linked from: those it reaches by dependencies that are neither for tests nor for build scripts.
fn linked(metadata: &Value, checksums: &BTreeMap<(String, String), String>) -> anyhow::Result<Vec<Crate>> {
    let packages = metadata["packages"].as_array().context("no packages")?;
    let by_id: BTreeMap<&str, &Value> =
        packages.iter().filter_map(|package| Some((package["id"].as_str()?, package))).collect();
    let nodes = metadata["resolve"]["nodes"].as_array().context("no dependencies")?;
    let uses: BTreeMap<&str, Vec<&str>> =
        nodes.iter().filter_map(|node| Some((node["id"].as_str()?, normal(node)))).collect();
    let start = packages.iter().find(|package| package["name"] == BINARY).and_then(|package| package["id"].as_str());
    let mut reached = BTreeSet::new();
    let mut next = vec![start.context("the workspace has no crate `kiln`")?];
    while let Some(id) = next.pop() {
        // A procedural macro runs in the compiler; neither it nor what it uses is in the binary.
        let package = by_id.get(id).with_context(|| format!("cargo does not know {id}"))?;
        let kinds = package["targets"].as_array().into_iter().flatten();
        let is_macro = kinds.flat_map(|target| target["kind"].as_array()).flatten().any(|kind| kind == "proc-macro");
        if !is_macro && reached.insert(id) {
            next.extend(uses.get(id).into_iter().flatten());
        }
    }
    let key = |id: &str| Some((text_of(&by_id.get(id)?["name"]).ok()?, text_of(&by_id.get(id)?["version"]).ok()?));
    let mut crates = Vec::new();
    for &id in &reached {
        let package = by_id[id];
        let (name, version) = key(id).with_context(|| format!("{id} has no name"))?;
        let manifest = PathBuf::from(text_of(&package["manifest_path"])?);
        crates.push(Crate {
            checksum: checksums.get(&(name.clone(), version.clone())).cloned(),
            licence: package["license"].as_str().map(str::to_owned),
            folder: manifest.parent().context("a manifest lies in a folder")?.to_owned(),
            is_own: package["source"].is_null(),
            uses: uses
                .get(id)
                .into_iter()
                .flatten()
                .filter(|id| reached.contains(*id))
                .filter_map(|id| key(id))
                .collect(),
            name,
            version,
        });
    }
    crates.sort_by(|a, b| (&a.name, &a.version).cmp(&(&b.name, &b.version)));
    Ok(crates)
}

/// What a node uses when it runs.
fn normal(node: &Value) -> Vec<&str> {
    let deps = node["deps"].as_array().into_iter().flatten();
    let is_normal = |dep: &&Value| dep["dep_kinds"].as_array().into_iter().flatten().any(|kind| kind["kind"].is_null());
    deps.filter(is_normal).filter_map(|dep| dep["pkg"].as_str()).collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_binary_is_linked_from_its_crates_and_not_from_those_of_tests_and_macros() {
        let project = Project::read(Machine::X86).unwrap();
        let named = |name: &str| project.crates.iter().find(|one| one.name == name);
        assert!(named("kiln-engine").is_some_and(|one| one.is_own && one.checksum.is_none()));
        assert!(named("glslang-sys").is_some_and(|one| !one.is_own && one.checksum.is_some()));
        let kiln = named("kiln").unwrap();
        assert!(kiln.uses.iter().any(|(name, _)| name == "kiln-server"));
        for absent in ["xtask", "proptest", "syn", "cc", "serde_derive"] {
            assert!(named(absent).is_none(), "{absent} is not in the binary");
        }
    }
}
