//! What Kiln links is what `deny.toml` and `docs/dependencies.md` say: licences, one version of each crate, one source, a reason for each.

#![allow(clippy::unwrap_used, reason = "a test may fail by it, in its helping functions too")]

use std::collections::{BTreeMap, BTreeSet};
use std::path::{Path, PathBuf};
use std::process::Command;

use serde_json::Value;

fn root() -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR")).join("../..")
}

fn read(file: &str) -> String {
    std::fs::read_to_string(root().join(file)).unwrap()
}

/// All crates of others that are built for Linux.
fn crates() -> Vec<Value> {
    let mut cargo = Command::new(env!("CARGO"));
    cargo.args(["metadata", "--format-version", "1", "--locked", "--filter-platform", "x86_64-unknown-linux-gnu"]);
    let output = cargo.current_dir(root()).output().unwrap();
    assert!(output.status.success(), "{}", String::from_utf8_lossy(&output.stderr));
    let metadata: Value = serde_json::from_slice(&output.stdout).unwrap();
    let all = metadata["packages"].as_array().unwrap().iter();
    all.filter(|one| !one["source"].is_null()).cloned().collect()
}

/// A list of strings, or of tables with a name, in a table of `deny.toml`.
fn listed(table: &str, key: &str) -> BTreeSet<String> {
    let deny: toml_edit::DocumentMut = read("deny.toml").parse().unwrap();
    let name = |one: &toml_edit::Value| {
        let named = one.as_inline_table().and_then(|one| one.get("name")).unwrap_or(one);
        named.as_str().unwrap().to_owned()
    };
    deny[table][key].as_array().unwrap().iter().map(name).collect()
}

/// Whether a licence of each part of an expression is allowed.
fn is_allowed(expression: &str, allowed: &BTreeSet<String>) -> bool {
    let plain = expression.replace(['(', ')'], "").replace('/', " OR ");
    plain.split(" AND ").all(|part| part.split(" OR ").any(|one| allowed.contains(one.trim())))
}

#[test]
fn licences_are_read_as_they_are_meant() {
    let allowed = BTreeSet::from(["MIT".to_owned(), "Unicode-3.0".to_owned()]);
    for (expression, is) in [
        ("MIT", true),
        ("GPL-3.0", false),
        ("GPL-3.0 OR MIT", true),
        ("Apache-2.0/MIT", true),
        ("MIT AND GPL-3.0", false),
        ("(MIT OR Apache-2.0) AND Unicode-3.0", true),
        ("", false),
    ] {
        assert_eq!(is_allowed(expression, &allowed), is, "{expression}");
    }
}

#[test]
fn dependencies_are_what_the_rules_allow() {
    let (crates, allowed, twice) = (crates(), listed("licenses", "allow"), listed("bans", "skip"));
    assert!(crates.len() > 100, "{} crates", crates.len());
    let mut versions: BTreeMap<&str, BTreeSet<&str>> = BTreeMap::new();
    for one in &crates {
        let text = |key: &str| one[key].as_str().unwrap_or_default();
        let name = text("name");
        assert!(is_allowed(text("license"), &allowed), "{name}: {}", text("license"));
        let is_released = text("source") == "registry+https://github.com/rust-lang/crates.io-index";
        assert!(is_released, "{name} comes from {}", text("source"));
        versions.entry(name).or_default().insert(text("version"));
    }
    let several: BTreeSet<String> =
        versions.iter().filter(|(_, all)| all.len() > 1).map(|(name, _)| (*name).to_owned()).collect();
    assert_eq!(several, twice, "crates of several versions, and those that deny.toml lists");
}

#[test]
fn each_dependency_has_a_reason() {
    let manifest: toml_edit::DocumentMut = read("Cargo.toml").parse().unwrap();
    let page = read("docs/dependencies.md");
    let listed: BTreeSet<&str> =
        page.lines().filter_map(|line| line.strip_prefix("| `")?.split_once("` | ")).map(|(name, _)| name).collect();
    let named = manifest["workspace"]["dependencies"].as_table().unwrap();
    let named: BTreeSet<&str> = named.iter().map(|(name, _)| name).filter(|name| !name.starts_with("kiln-")).collect();
    assert_eq!(named, listed, "crates of Cargo.toml, and those of docs/dependencies.md");
}
