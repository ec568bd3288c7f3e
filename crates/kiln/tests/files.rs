//! Commands that take files and give numbers: convert, quantize, split, perplexity, logits, tokenize, embed, bench. No GPU is needed.

#![allow(clippy::unwrap_used, reason = "a test may fail by it, in its helping functions too")]

use std::io::Write as _;
use std::path::Path;
use std::process::{Command, Output, Stdio};

use kiln_gguf::{Gguf, Metadata, TensorType, Writer};
use tempfile::TempDir;

/// A folder with a tiny model in it (`m.gguf`).
struct Folder(TempDir);

impl Folder {
    fn new() -> Folder {
        let folder = Folder(tempfile::tempdir().unwrap());
        folder.good(&["synth", "tiny-llama", "F32", "m.gguf"]);
        folder
    }

    fn command(&self, arguments: &[&str]) -> Command {
        let nowhere = self.0.path().join("no-such-manifest.json");
        let mut command = Command::new(env!("CARGO_BIN_EXE_kiln"));
        command.args(arguments).current_dir(self.0.path()).stdin(Stdio::null());
        command.env("VK_DRIVER_FILES", &nowhere).env("VK_ICD_FILENAMES", &nowhere).env_remove("KILN_DEVICE");
        command.env("KILN_MODELS", self.0.path().join("store"));
        command
    }

    fn good(&self, arguments: &[&str]) -> Output {
        let output = self.command(arguments).output().unwrap();
        assert_eq!(output.status.code(), Some(0), "{arguments:?}: {}", String::from_utf8_lossy(&output.stderr));
        output
    }

    fn json(&self, arguments: &[&str]) -> serde_json::Value {
        serde_json::from_slice(&self.good(&[arguments, &["--json"]].concat()).stdout).unwrap()
    }

    /// What a command says that fails with this code.
    fn bad(&self, code: i32, arguments: &[&str], words: &[&str]) -> String {
        let output = self.command(arguments).output().unwrap();
        let said = String::from_utf8(output.stderr).unwrap();
        assert_eq!(output.status.code(), Some(code), "{arguments:?}: {said}");
        words.iter().for_each(|word| assert!(said.contains(word), "{arguments:?}: {word:?} is not in: {said}"));
        said
    }

    /// The output of a command with this on stdin.
    fn piped(&self, arguments: &[&str], input: &str) -> Output {
        let mut command = self.command(arguments);
        command.stdin(Stdio::piped()).stdout(Stdio::piped()).stderr(Stdio::piped());
        let mut child = command.spawn().unwrap();
        child.stdin.take().unwrap().write_all(input.as_bytes()).unwrap();
        child.wait_with_output().unwrap()
    }

    /// The tiny model with these keys changed, and its tensors or none.
    fn changed(&self, name: &str, tensors: bool, change: impl FnOnce(&mut Metadata)) {
        let model = Gguf::open(self.0.path().join("m.gguf")).unwrap();
        let mut metadata = model.metadata().clone();
        change(&mut metadata);
        let mut writer = Writer::new(metadata);
        for info in model.tensors().iter().filter(|_| tensors) {
            writer.add(&info.name, info.dims(), info.ty, model.data(info)).unwrap();
        }
        writer.save(self.0.path().join(name)).unwrap();
    }

    fn write(&self, name: &str, text: &str) {
        std::fs::write(self.0.path().join(name), text).unwrap();
    }
}

fn said(output: &Output) -> String {
    String::from_utf8_lossy(&output.stderr).into_owned()
}

#[test]
fn files_that_are_no_models_are_told_apart() {
    let folder = Folder::new();
    folder.changed("vocab.gguf", false, |_| {});
    folder.changed("adapter.gguf", true, |metadata| metadata.set("general.type", "adapter"));
    for command in [&["run", "vocab.gguf", "hi", "--cpu"][..], &["quantize", "vocab.gguf", "o.gguf", "Q8_0"]] {
        folder.bad(1, command, &["vocab.gguf holds only a vocabulary", "hint:"]);
    }
    folder.bad(1, &["embed", "vocab.gguf", "hi", "--pooling", "mean", "--cpu"], &["holds only a vocabulary"]);
    for command in [&["run", "adapter.gguf", "hi", "--cpu"][..], &["quantize", "adapter.gguf", "o.gguf", "Q8_0"]] {
        folder.bad(1, command, &["adapter.gguf is a LoRA adapter", "--lora"]);
    }
    assert!(!Path::new("o.gguf").exists());
    assert!(!folder.good(&["tokenize", "vocab.gguf", "hi"]).stdout.is_empty(), "a vocabulary is enough for this");
}

#[test]
fn a_folder_that_is_missing_is_named_and_nothing_else() {
    let folder = Folder::new();
    for command in [
        &["quantize", "m.gguf", "no/o.gguf", "Q8_0"][..],
        &["split", "m.gguf", "no/part", "--max-tensors", "7"],
        &["logits", "m.gguf", "-p", "hi", "-o", "no/l.gguf", "--cpu"],
        &["run", "m.gguf", "--raw", "hi", "-n", "0", "--save-state", "no/state", "--cpu"],
    ] {
        let said = folder.bad(1, command, &["there is no folder no\n", "mkdir"]);
        assert!(!said.contains(".kiln-"), "{said}");
    }
}

#[test]
fn parts_are_never_larger_than_asked_for() {
    let folder = Folder::new();
    let said = folder.bad(1, &["split", "m.gguf", "part", "--max-size", "1"], &["alone has", "tensors are not split"]);
    // What the hint says works.
    let size = said.rsplit("--max-size ").next().unwrap().split(' ').next().unwrap();
    folder.good(&["split", "m.gguf", "part", "--max-size", size]);
    let size: u64 = size.parse().unwrap();
    for entry in std::fs::read_dir(folder.0.path()).unwrap().flatten() {
        if entry.file_name().to_string_lossy().starts_with("part-") {
            let part = kiln_gguf::Header::parse(&std::fs::read(entry.path()).unwrap()).unwrap();
            assert!(part.tensors.iter().map(|info| info.bytes as u64).sum::<u64>() <= size, "{entry:?}");
        }
    }
}

#[test]
fn convert_takes_the_types_that_its_help_names() {
    let folder = Folder::new();
    for ty in ["IQ2_XXS", "Q4_K_M", "Q5_0", "nothing"] {
        folder.bad(2, &["convert", "folder", "o.gguf", "--type", ty], &["F32, F16, BF16, Q8_0", "kiln quantize"]);
    }
    folder.bad(1, &["convert", "folder", "o.gguf", "--type", "q8_0"], &["there is no folder folder"]);
}

#[test]
fn the_context_size_is_the_chunk_of_perplexity() {
    let folder = Folder::new();
    folder.write("t.txt", &"hello the world and the end of it ".repeat(40));
    let run =
        |more: &[&str]| folder.json(&[&["perplexity", "m.gguf", "t.txt", "--cpu", "--chunks", "2"], more].concat());
    let (by_chunk, by_context) = (run(&["--chunk", "32"]), run(&["-c", "32"]));
    assert_eq!(by_context["chunk"], 32);
    assert_eq!(by_chunk["perplexity"], by_context["perplexity"]);
    let base = ["perplexity", "m.gguf", "t.txt", "--cpu"];
    folder.bad(1, &[&base[..], &["-c", "32", "--chunk", "64"]].concat(), &["both set the tokens of a chunk"]);
    folder.bad(1, &[&base[..], &["-c", "32", "--chunks", "0"]].concat(), &["--chunks must be 1 or more"]);
    // A file with fewer chunks is compared as far as it goes; what else differs is named.
    let small = ["-c", "32", "--chunks", "1", "--save-logits", "one.logits"];
    folder.good(&[&base[..], &small].concat());
    let against = [&base[..], &["-c", "32", "--chunks", "3", "--against", "one.logits"]].concat();
    let output = folder.good(&[&against[..], &["--json"]].concat());
    assert!(said(&output).contains("one.logits holds 1 of the 3 chunks"), "{}", said(&output));
    let found: serde_json::Value = serde_json::from_slice(&output.stdout).unwrap();
    assert_eq!(found["chunks"], 1);
    assert!(found["against"]["mean_divergence"].as_f64().unwrap() < 1e-5, "{found}");
    let other = [&base[..], &["-c", "64", "--against", "one.logits"]].concat();
    folder.bad(1, &other, &["has chunks of 32 tokens; here they have 64", "--chunk 32"]);
    folder.write("u.txt", &"HELLO THE WORLD AND THE END OF IT ".repeat(40));
    let other = ["perplexity", "m.gguf", "u.txt", "--cpu", "-c", "32", "--against", "one.logits"];
    folder.bad(1, &other, &["one.logits is of another text"]);
}

#[test]
fn logits_of_ids_need_no_vocabulary() {
    let folder = Folder::new();
    folder.changed("bare.gguf", true, |metadata| metadata.set("tokenizer.ggml.add_bos_token", false));
    folder.bad(1, &["logits", "bare.gguf", "-p", "", "-o", "l.gguf", "--cpu"], &["the prompt is empty"]);
    folder.changed("odd.gguf", true, |metadata| metadata.set("tokenizer.ggml.model", "test"));
    folder.changed("none.gguf", true, |metadata| {
        let keys: Vec<String> = metadata.iter().map(|(key, _)| key.to_owned()).collect();
        keys.iter().filter(|key| key.starts_with("tokenizer.")).for_each(|key| drop(metadata.remove(key)));
    });
    folder.good(&["logits", "m.gguf", "--tokens", "1,2,3", "-o", "m-l.gguf", "--cpu"]);
    let logits = |name: &str| {
        let file = Gguf::open(folder.0.path().join(name)).unwrap();
        let info = file.tensor("logits").unwrap();
        assert_eq!(info.ty, TensorType::F32);
        file.data(info).to_vec()
    };
    for name in ["odd.gguf", "none.gguf"] {
        let out = format!("l-{name}");
        folder.good(&["logits", name, "--tokens", "1,2,3", "-o", &out, "--cpu"]);
        assert_eq!(logits(&out), logits("m-l.gguf"), "{name}");
        folder.bad(1, &["logits", name, "-p", "hi", "-o", "p.gguf", "--cpu"], &["tokenizer"]);
    }
}

#[test]
fn the_last_newline_is_a_part_of_what_is_tokenized() {
    let folder = Folder::new();
    folder.write("t.txt", "Hello\n");
    let flags = ["--ids", "--no-bos"];
    let by_argument = folder.good(&[&["tokenize", "m.gguf", "Hello\n"][..], &flags].concat()).stdout;
    let by_file = folder.good(&[&["tokenize", "m.gguf", "-f", "t.txt"][..], &flags].concat()).stdout;
    let by_stdin = folder.piped(&[&["tokenize", "m.gguf"][..], &flags].concat(), "Hello\n").stdout;
    assert_eq!(by_argument, by_file);
    assert_eq!(by_argument, by_stdin);
    assert_ne!(by_argument, folder.good(&[&["tokenize", "m.gguf", "Hello"][..], &flags].concat()).stdout);
}

#[test]
fn every_line_that_is_embedded_keeps_its_place() {
    let folder = Folder::new();
    let flags = ["--pooling", "mean", "--cpu", "--json"];
    let embed = |more: &[&str], input: &str| folder.piped(&[&["embed", "m.gguf"][..], &flags, more].concat(), input);
    let rows = |output: &Output| -> serde_json::Value { serde_json::from_slice(&output.stdout).unwrap() };
    let whole = rows(&embed(&[], "one\n\nthree\n\n"));
    assert_eq!(whole["data"].as_array().unwrap().len(), 4, "{whole}");
    let alone = rows(&embed(&["three"], ""));
    let vector = |rows: &serde_json::Value, nth: usize| -> Vec<f64> {
        rows["data"][nth]["embedding"].as_array().unwrap().iter().map(|value| value.as_f64().unwrap()).collect()
    };
    let cosine = |nth: usize| -> f64 { vector(&whole, nth).iter().zip(vector(&alone, 0)).map(|(a, b)| a * b).sum() };
    assert!(cosine(2) > 0.9999 && cosine(1) < 0.999, "{} {}", cosine(2), cosine(1));
    // A text that is longer than the context stops the rest only where nothing is said.
    let long = format!("one\n{}\nthree\n", "many words ".repeat(400));
    let output = embed(&["-c", "64"], &long);
    assert_eq!(output.status.code(), Some(1));
    let words = said(&output);
    assert!(words.contains("text 2 has") && words.contains("--truncate") && words.contains("-c goes up to"), "{words}");
    let output = embed(&["-c", "64", "--truncate"], &long);
    let cut = rows(&output);
    assert!(said(&output).contains("1 of 3 texts are truncated to 64 tokens"), "{}", said(&output));
    assert_eq!((&cut["data"][1]["tokens"], cut["data"].as_array().unwrap().len()), (&64.into(), 3));
    // A model without a token before every text makes nothing of an empty line.
    folder.changed("bare.gguf", true, |metadata| metadata.set("tokenizer.ggml.add_bos_token", false));
    let output = folder.piped(&[&["embed", "bare.gguf"][..], &flags].concat(), "one\n\nthree\n");
    assert!(!output.status.success() && said(&output).contains("text 2 is empty"), "{}", said(&output));
}

#[test]
fn benches_take_several_values_and_fit_the_model() {
    let folder = Folder::new();
    let found = folder.json(&["bench", "-m", "m.gguf", "--cpu", "-p", "4,8", "-n", "2,3", "-r", "1"]);
    let tests: Vec<&str> = found["tests"].as_array().unwrap().iter().map(|row| row["test"].as_str().unwrap()).collect();
    assert_eq!(tests, ["pp4", "pp8", "tg2", "tg3"]);
    let several = ["bench", "m.gguf", "--cpu", "-p", "4,8", "--sequences", "1"];
    folder.bad(1, &several, &["--sequences takes one value of -p, 2 are given"]);
    folder.changed("short.gguf", true, |metadata| metadata.set("llama.context_length", 64u32));
    let output = folder.good(&["bench", "short.gguf", "--cold", "--cpu", "--json"]);
    assert!(said(&output).contains("the prompt has 62 tokens"), "{}", said(&output));
    let found: serde_json::Value = serde_json::from_slice(&output.stdout).unwrap();
    assert_eq!(found["prompt"], 62);
}

#[test]
fn a_selftest_without_a_case_proves_nothing() {
    let folder = Folder::new();
    folder.bad(1, &["selftest", "rms_norm", "--case", "zzz"], &["no case fits --case zzz", "hint:"]);
}
