//! Lists every GLSL file of the crate, so that the binary embeds them all and a new operation needs no extra line.

use std::fmt::Write as _;
use std::path::{Path, PathBuf};

fn collect(dir: &Path, found: &mut Vec<PathBuf>) {
    let entries = std::fs::read_dir(dir).unwrap_or_else(|e| panic!("{} should be readable: {e}", dir.display()));
    for entry in entries {
        let path = entry.expect("directory entries should be readable").path();
        if path.is_dir() {
            collect(&path, found);
        } else if path.extension().is_some_and(|e| e == "comp" || e == "glsl") {
            found.push(path);
        }
    }
}

fn main() {
    let root = PathBuf::from(std::env::var("CARGO_MANIFEST_DIR").expect("cargo sets CARGO_MANIFEST_DIR"));
    let mut table = String::from("&[\n");
    for base in ["src", "glsl"] {
        let base = root.join(base);
        println!("cargo::rerun-if-changed={}", base.display());
        let mut found = Vec::new();
        collect(&base, &mut found);
        found.sort();
        for path in found {
            let name = path.strip_prefix(&base).expect("collected below base").to_string_lossy().replace('\\', "/");
            writeln!(table, "({name:?}, include_str!({:?})),", path.display().to_string()).expect("strings grow");
        }
    }
    table.push(']');
    let out = PathBuf::from(std::env::var("OUT_DIR").expect("cargo sets OUT_DIR")).join("sources.rs");
    std::fs::write(out, table).expect("OUT_DIR should be writable");
}
