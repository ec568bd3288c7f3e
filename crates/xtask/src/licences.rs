//! The licences of the crates that are linked into the binary, in one text: most of them ask that their text goes with copies.

use std::collections::{BTreeMap, BTreeSet};
use std::fmt::Write as _;
use std::path::Path;

use anyhow::Context as _;

use crate::project::Project;

/// The text, with each licence once and the crates that it belongs to above it.
pub(crate) fn text(project: &Project) -> anyhow::Result<Vec<u8>> {
    let mut crates_of: BTreeMap<String, BTreeSet<String>> = BTreeMap::new();
    let mut without = BTreeSet::new();
    for one in project.crates.iter().filter(|one| !one.is_own) {
        let name = format!("{} {} ({})", one.name, one.version, one.licence.as_deref().unwrap_or("see below"));
        let mut texts = licence_files(&one.folder)?;
        // The C++ inside the crate has licences of its own.
        let inside = one.folder.join("native/glslang");
        if one.name == "glslang-sys" {
            texts.extend(licence_files(&inside)?);
        }
        if texts.is_empty() {
            without.insert(name.clone());
        }
        for text in texts {
            crates_of.entry(text).or_default().insert(name.clone());
        }
    }
    let mut all =
        "Kiln is licensed under MIT or Apache-2.0 (LICENSE-MIT, LICENSE-APACHE). It contains the crates below.\n"
            .to_owned();
    if !without.is_empty() {
        all += "\nThese come without a text of their own; the licence in brackets is what they declare:\n\n";
        without.iter().for_each(|name| all += &format!("    {name}\n"));
    }
    // In the order of the first crate, so that the file changes little between releases.
    let mut sections: Vec<(BTreeSet<String>, String)> =
        crates_of.into_iter().map(|(text, names)| (names, text)).collect();
    sections.sort();
    for (names, text) in sections {
        let names: Vec<&str> = names.iter().map(String::as_str).collect();
        write!(all, "\n{}\n{}\n\n{}\n", "-".repeat(100), names.join("\n"), text.trim())?;
    }
    Ok(all.into_bytes())
}

fn licence_files(folder: &Path) -> anyhow::Result<Vec<String>> {
    let entries = std::fs::read_dir(folder).with_context(|| format!("cannot read {}", folder.display()))?;
    let mut texts = BTreeMap::new();
    for entry in entries {
        let path = entry?.path();
        let name = path.file_name().unwrap_or_default().to_string_lossy().to_uppercase();
        let starts = ["LICENSE", "LICENCE", "COPYING", "COPYRIGHT", "NOTICE", "UNLICENSE"];
        if path.is_file() && starts.iter().any(|start| name.starts_with(start)) {
            let bytes = std::fs::read(&path).with_context(|| format!("cannot read {}", path.display()))?;
            texts.insert(name, String::from_utf8_lossy(&bytes).replace("\r\n", "\n"));
        }
    }
    Ok(texts.into_values().collect())
}
