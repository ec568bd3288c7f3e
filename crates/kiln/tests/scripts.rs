//! The scripts that people run by hand, with programs that answer as the real ones do.

use std::collections::BTreeSet;
use std::fs;
use std::os::unix::fs::PermissionsExt;
use std::path::{Path, PathBuf};
use std::process::Command;

fn program(folder: &Path, name: &str, text: &str) -> PathBuf {
    let path = folder.join(name);
    fs::write(&path, format!("#!/bin/sh\n{text}\n")).expect("a writable folder");
    fs::set_permissions(&path, fs::Permissions::from_mode(0o755)).expect("its own file");
    path
}

/// What `scripts/bench/compare` prints for an operation, line by line.
fn compare(kiln: &Path, peer: &Path, rounds: &str, operation: &str) -> Vec<String> {
    let script = Path::new(env!("CARGO_MANIFEST_DIR")).join("../../scripts/bench/compare");
    let mut command = Command::new("python3");
    command.arg(script).arg("--kiln").arg(kiln).arg("--peer").arg(peer).args(["--rounds", rounds, "ops", operation]);
    let output = command.output().expect("python3");
    assert!(output.status.success(), "{}", String::from_utf8_lossy(&output.stderr));
    String::from_utf8(output.stdout).expect("UTF-8").lines().map(str::to_owned).collect()
}

#[test]
fn compare_prints_a_row_for_each_case_both_have_timed() {
    let folder = Path::new(env!("CARGO_TARGET_TMPDIR")).join("compare");
    fs::create_dir_all(&folder).unwrap();
    let rows = r#"{"rows": [
        {"case": "mul_mat_vec Q4_0x8 k=64 m=32 n=1 exact", "dependent_seconds": 1e-5},
        {"case": "mul_mat_vec Q4_0 k=64 m=32 n=1", "dependent_seconds": 5e-6},
        {"case": "mul_mat_vec Q8_0x8 k=64 m=32 n=1 exact", "dependent_seconds": 1e-5},
        {"case": "flash_attention F16/F16 head [64, 64] 1 tokens, 64/8 heads, batch 1/1, 7680 keys, Mask([1, 1]), 16 splits",
         "dependent_seconds": 4e-5}]}"#;
    let kiln = program(&folder, "kiln", &format!("cat <<'END'\n{rows}\nEND"));
    // Takes 20 us for each line of its file but those of Q8_0, which it does not know.
    let answer =
        r#"grep -v " 8 64 32 " "$4" | sed 's/.* \(case[0-9]*\)$/  MUL_MAT(name=\1,n=1): 9 runs - 20.00 us\/run/'"#;
    let peer = program(&folder, "peer", answer);
    let want = [
        "| f16, heads of 64, 64/8, 1 tokens, 7680 keys | 40.0 |  | 20.0 | 0.50 |  |",
        "| q4_0 k=64 m=32 n=1 | 5.0 | 10.0 | 20.0 | 4.00 | 2.00 |",
    ];
    for rounds in ["1", "2"] {
        assert_eq!(compare(&kiln, &peer, rounds, "mul_mat_vec")[2..], want, "{rounds} rounds");
    }
}

/// A script with arguments: whether it ends well, and all it says.
fn script(name: &str, arguments: &[&str]) -> (bool, String) {
    let script = Path::new(env!("CARGO_MANIFEST_DIR")).join("../../scripts").join(name);
    let output = Command::new(script).args(arguments).output().expect("bash");
    let said = [output.stdout, output.stderr].concat();
    (output.status.success(), String::from_utf8(said).expect("UTF-8"))
}

#[test]
fn null_gpu_names_what_it_knows_where_it_does_not_know_a_family() {
    let (well, said) = script("null-gpu", &["navi99", "true"]);
    assert!(!well && said.contains("no family 'navi99'") && said.contains("gfx1201"), "{said}");
    let (well, said) = script("null-gpu", &["--frobnicate"]);
    assert!(!well && said.contains("unknown option"), "{said}");
    let (well, families) = script("null-gpu", &["--families"]);
    assert!(well && families.lines().count() > 10 && families.contains("raphael_mendocino "), "{families}");
}

#[test]
fn a_report_holds_what_every_step_said_and_names_those_that_failed() {
    let folder = Path::new(env!("CARGO_TARGET_TMPDIR")).join("report");
    let _ = fs::remove_dir_all(&folder);
    fs::create_dir_all(&folder).unwrap();
    let kiln = program(&folder, "kiln", r#"echo "$@"; [ "$1 $2" != "bench device" ]"#);
    let into = folder.join("out");
    let (well, said) = script("gpu/report", &[&kiln.to_string_lossy(), &into.to_string_lossy()]);
    assert!(!well && said.contains("failed: device.txt") && said.contains("out.tar.gz"), "{said}");
    let compiled = fs::read_to_string(into.join("compiled.json")).unwrap();
    assert_eq!(compiled, "selftest --compile --chosen --json\n");
    assert!(folder.join("out.tar.gz").exists());
}

#[test]
fn resident_memory_is_held_against_file_and_cache() {
    let folder = Path::new(env!("CARGO_TARGET_TMPDIR")).join("resident");
    fs::create_dir_all(&folder).unwrap();
    let model = folder.join("model.gguf");
    fs::write(&model, [0; 100_000]).unwrap();
    // Writes more than is waited for, and goes on until it is ended. It stays the program that it is: one that takes another's place has no memory
    // for a moment.
    let kiln = |name: &str, cache: u32| {
        let fit = format!(r#"echo '{{"cache_bytes": {cache}, "state_bytes": 0}}'"#);
        program(
            &folder,
            name,
            &format!(r#"[ "$1" = run ] || {{ {fit}; exit; }}; printf %099d 7; while :; do sleep 0.1; done"#),
        )
    };
    let model = model.to_string_lossy();
    let (well, said) = script("bench/resident", &[&kiln("large", 999_900_000).to_string_lossy(), &model]);
    assert!(well && said.contains("| model.gguf | 0.1 | 999.9 | 1100.0 | "), "{said}");
    let (well, said) = script("bench/resident", &[&kiln("small", 0).to_string_lossy(), &model, "--parts"]);
    assert!(!well && said.contains("| model.gguf | 0.1 | 0.0 | 0.1 | ") && said.contains(" MB  "), "{said}");
    let (well, said) = script("bench/resident", &["/bin/false", &model]);
    assert!(!well && said.contains("inspect"), "{said}");
}

#[test]
fn the_software_gpu_runs_beside_drivers_layers_and_sdk_variables_of_the_machine() {
    if std::env::var_os("KILN_SOFTWARE_GPU_RUN").is_none() {
        println!("no software GPU, test passed over: run it by scripts/software-gpu");
        return;
    }
    // What Mesa's packages install for every program: a layer that Vulkan loads unless it is told not to, and a word of the loader
    // about it. And what an SDK's set-up script or a person may have put into the environment.
    let folder = tempfile::tempdir().expect("a temporary folder");
    let layers = folder.path().join("vulkan/implicit_layer.d");
    fs::create_dir_all(&layers).expect("a writable folder");
    let layer = serde_json::json!({
        "file_format_version": "1.0.0",
        "layer": {
            "name": "VK_LAYER_MESA_device_select", "type": "GLOBAL", "library_path": "libVkLayer_MESA_device_select.so",
            "api_version": "1.4.0", "implementation_version": "1", "description": "chooses a device",
            "disable_environment": {"NODEVICE_SELECT": "1"},
        },
    });
    fs::write(layers.join("VkLayer_MESA_device_select.json"), layer.to_string()).expect("a writable folder");
    let script = Path::new(env!("CARGO_MANIFEST_DIR")).join("../../scripts/software-gpu");
    let mut command = Command::new(script);
    command.arg(env!("CARGO_BIN_EXE_kiln")).args(["selftest", "rms_norm", "--device", "llvmpipe"]);
    command.env("KILN_VALIDATION", "1").env("XDG_DATA_HOME", folder.path()).env("VULKAN_SDK", folder.path());
    command.env("VK_ADD_LAYER_PATH", &layers).env("VK_INSTANCE_LAYERS", "VK_LAYER_LUNARG_api_dump");
    command.env("VK_LOADER_DRIVERS_DISABLE", "*").env("VK_ADD_DRIVER_FILES", folder.path().join("none.json"));
    command.env("VK_LOADER_DEBUG", "all").env_remove("KILN_LAYER_PATH");
    let output = command.output().expect("bash");
    let said = String::from_utf8_lossy(&[output.stdout, output.stderr].concat()).into_owned();
    assert!(output.status.success() && !said.contains("device_select"), "{said}");
}

/// Numbers of the README, the results page and the page of slower cases are those of the data, and drawings are those of their script.
#[test]
fn results_and_drawings_are_made_by_their_scripts() {
    for name in ["docs/results", "docs/drawings"] {
        let (well, said) = script(name, &["--check"]);
        assert!(well, "{said}");
    }
}

/// `scripts/bench/publish` writes what both programs said, with spread, commands and commit, and keeps what an earlier run had.
#[test]
fn a_published_run_holds_values_of_both_engines_and_their_commands() {
    let folder = Path::new(env!("CARGO_TARGET_TMPDIR")).join("publish");
    let _ = fs::remove_dir_all(&folder);
    fs::create_dir_all(&folder).unwrap();
    let tests = r#"{"device": "a device (driver 1)", "tests": [
        {"test": "pp2048", "runs": [90, 100, 110]}, {"test": "tg128", "runs": [20, 20, 20]}]}"#;
    let kiln = format!("case $1 in --version) echo kiln 9.9;; synth) : > $4;; *) cat <<'END'\n{tests}\nEND\nesac");
    let theirs = r#"[{"n_prompt": 2048, "n_gen": 0, "samples_ts": [50], "build_number": 7, "build_commit": "abc", "backends": "Vulkan"},
        {"n_prompt": 0, "n_gen": 128, "samples_ts": [40], "build_number": 7, "build_commit": "abc", "backends": "Vulkan"}]"#;
    let (kiln, peer) =
        (program(&folder, "kiln", &kiln), program(&folder, "peer", &format!("cat <<'END'\n{theirs}\nEND")));
    let out = folder.join("out.json");
    let before = r#"{"device": "x", "driver": "0", "date": "then", "commit": null, "repetitions": "few", "provenance": "old", "engines": {"cuda": "CUDA"},
        "series": [{"id": "decode", "rows": [{"label": "Tiny F32", "cuda": 30}]}, {"id": "serving", "rows": []}]}"#;
    fs::write(&out, before).unwrap();
    let (kiln, peer) = (kiln.to_string_lossy().into_owned(), peer.to_string_lossy().into_owned());
    let (out_name, models) = (out.to_string_lossy().into_owned(), folder.join("models").to_string_lossy().into_owned());
    let fixed = ["--name", "Device", "--commit", "123abc", "--models", "tiny:F32:Tiny", "--only", "decode"];
    let words = [&[out_name.as_str(), &models, "--kiln", &kiln, "--peer", &peer], &fixed[..]].concat();
    let (well, said) = script("bench/publish", &words);
    assert!(well, "{said}");
    let made: serde_json::Value = serde_json::from_str(&fs::read_to_string(&out).unwrap()).unwrap();
    assert_eq!((made["commit"].as_str(), made["driver"].as_str()), (Some("123abc"), Some("driver 1")));
    let series =
        |id: &str| made["series"].as_array().unwrap().iter().find(|series| series["id"] == id).unwrap().clone();
    let prefill = &series("prefill")["rows"][0];
    assert_eq!((prefill["kiln"]["value"].as_f64(), prefill["kiln"]["spread"].as_f64()), (Some(100.0), Some(10.0)));
    assert_eq!(prefill["peer"]["value"].as_f64(), Some(50.0));
    assert_eq!(series("decode")["rows"][0]["cuda"].as_f64(), Some(30.0), "values of other engines stay");
    assert!(series("serving")["measured"].as_str().unwrap().starts_with("then, driver 0, commit not recorded"));
    let commands = series("decode")["commands"].to_string();
    assert!(commands.contains("kiln bench tiny-f32.gguf -p 2048") && commands.contains("llama-bench"), "{commands}");
}

/// All Rust sources of a folder as one text, with strings that continue on the next line in one piece.
fn sources(folder: &Path, into: &mut String) {
    for entry in fs::read_dir(folder).expect("a readable folder") {
        let path = entry.expect("a readable folder").path();
        if path.is_dir() {
            sources(&path, into);
        } else if path.extension().is_some_and(|end| end == "rs") {
            let text = fs::read_to_string(&path).expect("UTF-8");
            into.push_str(&text.split("\\\n").map(str::trim_start).collect::<String>());
        }
    }
}

/// The page of environment variables has every one that the program reads under a name of Kiln's.
#[test]
fn the_page_of_variables_has_all_of_them() {
    let root = Path::new(env!("CARGO_MANIFEST_DIR")).join("../..");
    let page = fs::read_to_string(root.join("docs/environment.md")).expect("the page");
    let mut all = String::new();
    for part in fs::read_dir(root.join("crates")).expect("the crates") {
        sources(&part.expect("a crate").path().join("src"), &mut all);
    }
    let is_name = |text: &&str| text.chars().all(|c| c.is_ascii_uppercase() || c.is_ascii_digit() || c == '_');
    let texts = all.split("\"KILN_").skip(1).filter_map(|rest| rest.split('"').next());
    let read: BTreeSet<&str> = texts.filter(is_name).collect();
    assert!(read.len() > 10, "{read:?}");
    let lacks: Vec<_> = read.iter().filter(|name| !page.contains(&format!("`KILN_{name}`"))).collect();
    assert!(lacks.is_empty(), "docs/environment.md lacks {lacks:?}");
}

/// The messages that the troubleshooting page quotes are those that the program prints.
#[test]
fn troubleshooting_quotes_messages_as_they_are() {
    let root = Path::new(env!("CARGO_MANIFEST_DIR")).join("../..");
    let page = fs::read_to_string(root.join("docs/troubleshooting.md")).expect("the page");
    // Every second piece between quotation marks.
    let headings = page.lines().filter(|line| line.starts_with("### \""));
    let quoted: Vec<&str> = headings.flat_map(|line| line.split('"').skip(1).step_by(2)).collect();
    assert!(quoted.len() > 30, "{quoted:?}");
    let mut all = String::new();
    for part in fs::read_dir(root.join("crates")).expect("the crates") {
        sources(&part.expect("a crate").path().join("src"), &mut all);
    }
    let unknown: Vec<&&str> = quoted.iter().filter(|words| !all.contains(**words)).collect();
    assert!(unknown.is_empty(), "no source has {unknown:?}");
}
