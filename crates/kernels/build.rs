//! Lists every GLSL file of the crate, so that the binary embeds them all and a new operation needs no extra line. For ARM it asks
//! the compiler which instructions it has names for.

use std::fmt::Write as _;
use std::io::Write as _;
use std::path::{Path, PathBuf};
use std::process::{Command, Stdio};

/// Instructions of ARM that older compilers have no safe functions for: the condition of code that uses them, the compiler's feature
/// while they are not stable, the processor's feature, and a line that calls one.
const INSTRUCTIONS: [[&str; 4]; 2] = [
    ["arm_dotprod", "stdarch_neon_dotprod", "dotprod", "vdotq_s32(vdupq_n_s32(0), vdupq_n_s8(1), vdupq_n_s8(1))"],
    ["arm_i8mm", "stdarch_neon_i8mm", "i8mm", "vmmlaq_s32(vdupq_n_s32(0), vdupq_n_s8(1), vdupq_n_s8(1))"],
];

/// Whether a library of these lines compiles.
fn compiles(text: &str) -> bool {
    let variable = |name: &str| std::env::var(name).expect("cargo sets the variables of build scripts");
    let mut compiler = Command::new(variable("RUSTC"));
    compiler.args(["--edition=2024", "--crate-type=lib", "--crate-name=probe", "--emit=metadata"]);
    compiler.args(["--target", &variable("TARGET"), "--out-dir", &variable("OUT_DIR"), "-"]);
    let child = compiler.stdin(Stdio::piped()).stdout(Stdio::null()).stderr(Stdio::null()).spawn();
    let Ok(mut child) = child else { return false };
    let written = child.stdin.take().is_some_and(|mut input| input.write_all(text.as_bytes()).is_ok());
    child.wait().is_ok_and(|status| status.success()) && written
}

/// Says for each of [`INSTRUCTIONS`] whether it can be used, and whether that takes a feature of an unstable compiler.
fn probe_instructions() {
    let is_arm = std::env::var("CARGO_CFG_TARGET_ARCH").is_ok_and(|arch| arch == "aarch64");
    println!("cargo::rerun-if-env-changed=RUSTC_BOOTSTRAP");
    for [condition, unstable, feature, call] in INSTRUCTIONS {
        println!("cargo::rustc-check-cfg=cfg({condition}, {condition}_unstable)");
        let library = format!(
            "#![no_std]\nuse core::arch::aarch64::*;\n#[target_feature(enable = \"neon,{feature}\")]\npub fn probe() -> int32x4_t {{ {call} }}\n"
        );
        if is_arm && compiles(&library) {
            println!("cargo::rustc-cfg={condition}");
        } else if is_arm && compiles(&format!("#![feature({unstable})]\n{library}")) {
            println!("cargo::rustc-cfg={condition}\ncargo::rustc-cfg={condition}_unstable");
        }
    }
}

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
    probe_instructions();
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
