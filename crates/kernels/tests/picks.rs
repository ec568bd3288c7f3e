//! What the operations that matter most choose on GPUs that are not at hand: from capabilities that were dumped from their
//! drivers into `tests/devices` (`scripts/null-gpu FAMILY kiln devices --json`, the field `capabilities`), to a text beside
//! them. With `KILN_BLESS=1` the texts are written anew; read what changed before it is kept.

#![allow(clippy::unwrap_used, reason = "a test may fail by it, in its helping functions too")]

use std::collections::HashSet;
use std::fs;
use std::path::{Path, PathBuf};

use kiln_gpu::{Caps, Shader, SubgroupRequest};
use kiln_kernels::case::{Case, Level};
use kiln_kernels::operation::Launch;
use kiln_kernels::{Call, KERNELS};

const OPERATIONS: [&str; 4] = ["mul_mat_vec", "mul_mm", "flash_attention", "wkv6"];
/// What says how the work of a kernel is divided.
const SIZES: [&str; 16] = [
    "WG",
    "ROW_GROUP",
    "ROWS",
    "COLS",
    "PREFETCH",
    "PERSISTENT",
    "TILE_M",
    "TILE_N",
    "DEPTH",
    "WARP_M",
    "WARP_N",
    "STAGES",
    "THREAD_M",
    "THREAD_N",
    "BC",
    "CHUNK",
];

fn folder() -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR")).join("tests/devices")
}

/// Every device: its name and what it can do.
fn devices() -> Vec<(String, Caps)> {
    let files = fs::read_dir(folder()).unwrap().map(|entry| entry.unwrap().path());
    let read = |file: PathBuf| {
        let name = file.file_stem().unwrap().to_string_lossy().into_owned();
        let caps = serde_json::from_str(&fs::read_to_string(&file).unwrap());
        (name, caps.unwrap_or_else(|e| panic!("{}: {e}", file.display())))
    };
    let mut all: Vec<_> = files.filter(|file| file.extension().is_some_and(|e| e == "json")).map(read).collect();
    all.sort_by(|a, b| a.0.cmp(&b.0));
    all
}

fn division(shader: &Shader) -> String {
    let defines = shader.defines.iter().filter(|(name, value)| SIZES.contains(&name.as_str()) && value != "0");
    let subgroup = match shader.subgroup {
        SubgroupRequest::Any => String::new(),
        SubgroupRequest::Full => " full subgroups".to_owned(),
        SubgroupRequest::Size(n) => format!(" subgroups of {n}"),
    };
    let sizes: Vec<String> = defines.map(|(name, value)| format!("{}={value}", name.to_lowercase())).collect();
    format!("{}: {}{subgroup}", shader.name, sizes.join(" "))
}

/// The timed cases of formats that people use.
fn calls() -> Vec<(String, Call)> {
    let kernels = KERNELS.iter().filter(|kernel| OPERATIONS.contains(&kernel.name));
    let usual =
        |case: &Case| ["Q4_K", "Q6_K", "Q4_0", "Q8_0", "F16", "wkv6"].iter().any(|name| case.name.contains(name));
    let cases = kernels.flat_map(|kernel| (kernel.cases)(Level::Bench)).filter(usual);
    cases.map(|case| (case.name.clone(), case.call())).collect()
}

/// One line for each kernel that they reach, with the first case that does.
fn picks(calls: &[(String, Call)], caps: &Caps) -> String {
    let mut seen = HashSet::new();
    let mut lines = Vec::new();
    for (name, call) in calls {
        let line = match call.operation().pick(caps, None) {
            Ok(choice) => {
                let each = |launch: &Launch| format!("  {}", division(&launch.shader));
                choice.launches.iter().map(each).collect::<Vec<_>>().join("\n")
            }
            Err(e) => format!("  {e}"),
        };
        if seen.insert(line.clone()) {
            lines.push(format!("{name}\n{line}\n"));
        }
    }
    lines.concat()
}

#[test]
fn devices_choose_what_was_agreed() {
    let bless = std::env::var_os("KILN_BLESS").is_some();
    let (all, calls) = (devices(), calls());
    assert!(all.len() >= 5, "capabilities of {} devices", all.len());
    for (name, caps) in &all {
        let file = folder().join(format!("{name}.txt"));
        let got = picks(&calls, caps);
        if bless {
            fs::write(&file, &got).unwrap();
        }
        let want = fs::read_to_string(&file).unwrap_or_default();
        let first = got.lines().zip(want.lines()).position(|(got, want)| got != want);
        let at = first.unwrap_or(got.lines().count().min(want.lines().count()));
        let line = |text: &str| text.lines().nth(at).unwrap_or("(nothing)").to_owned();
        assert!(got == want, "{name}, line {}: {}\n  was {}\n(KILN_BLESS=1 keeps it)", at + 1, line(&got), line(&want));
    }
}

/// Capabilities survive the way into a file and back.
#[test]
fn capabilities_are_read_as_they_are_written() {
    for caps in [Caps::least(), Caps::example_nvidia()] {
        let text = serde_json::to_string(&caps).unwrap();
        assert_eq!(serde_json::from_str::<Caps>(&text).unwrap(), caps);
    }
}
