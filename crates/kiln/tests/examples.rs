//! Every example of every `--help`, and every command of the book, is pasted into a shell, on a machine that has the default model and a
//! text or two.

#![allow(clippy::unwrap_used, reason = "a test may fail by it, in its helping functions too")]

use std::fs;
use std::io::{Read as _, Seek as _, SeekFrom};
use std::path::Path;
use std::process::{Command, Output, Stdio};

use kiln_gguf::{Gguf, Writer};

/// Examples that need what a test has not got, by how they begin, and why. They may fail, but not by a flag that is not there.
const NEEDS_MORE: &[(&str, &str)] = &[
    ("kiln pull ", "a network"),
    ("kiln rerank ", "a reranker"),
    ("kiln embed minilm.gguf ", "a model of its kind"),
    ("kiln run t5.gguf ", "a model of its kind"),
    ("kiln run smolvlm.gguf ", "a model of its kind, its encoder and a photograph"),
    ("kiln chat smolvlm.gguf ", "a model of its kind and its encoder"),
    ("kiln run voxtral.gguf ", "a model of its kind, its encoder and a recording"),
    ("kiln chat qwen.gguf ", "a model of its kind, and servers of tools"),
    ("kiln run dream.gguf ", "a model of its kind"),
    ("kiln logits t5.gguf ", "a model of its kind"),
    ("kiln convert ", "a folder of Hugging Face"),
    ("kiln quantize big.gguf", "what was converted"),
    ("kiln bench ", "a GPU, or minutes"),
    ("kiln selftest ", "a GPU"),
    ("kiln tune ", "a GPU"),
    ("kiln doctor", "a GPU"),
    ("kiln devices", "a GPU"),
    ("kiln plan smollm2 --gpu-layers", "a GPU"),
    ("kiln plan smollm2 --estimates", "a GPU"),
    ("kiln inspect smollm2 --fit", "heads of more than 16 elements"),
    ("kiln serve", "somebody who ends it"),
    ("kiln stage", "somebody who ends it"),
    ("kiln top", "a server"),
    ("kiln launch ", "a server"),
    ("kiln update ", "a network"),
    ("kiln synth llama-8b", "five gigabytes"),
    ("source <(kiln completions zsh)", "another shell"),
    ("kiln man | man", "the program man"),
    ("kiln man run | man", "the program man"),
];

/// The same for commands of the book.
const BOOK_NEEDS_MORE: &[(&str, &str)] = &[
    ("kiln pull ", "a network"),
    ("kiln chat hf:", "a network"),
    ("kiln chat ollama:", "a network"),
    ("kiln rerank ", "a reranker"),
    ("kiln convert ", "a folder of Hugging Face"),
    ("kiln run SmolVLM", "a model with an encoder and a photograph"),
    ("kiln chat SmolVLM", "a model with an encoder"),
    ("kiln run Voxtral", "a model with an encoder and a recording"),
    ("kiln chat gemma-4.gguf", "a model with an encoder"),
    ("kiln chat qwen.gguf", "a model of its kind, and servers of tools"),
    ("kiln stage ", "certificates of several hosts"),
    ("--draft-model", "two models of one family"),
    ("kiln bench ", "a GPU, or minutes"),
    ("kiln selftest", "a GPU"),
    ("kiln tune", "a GPU"),
    ("kiln doctor", "a GPU"),
    ("kiln devices", "a GPU"),
    ("kiln plan model.gguf --diff", "a GPU"),
    ("kiln chat model.gguf --gpu-layers", "a GPU"),
    ("kiln chat model.gguf --device", "a GPU"),
    ("kiln chat model.gguf --place", "a GPU"),
    ("kiln chat model.gguf --memory-limit", "a GPU"),
    ("kiln chat mixture.gguf", "a GPU"),
    ("kiln inspect model.gguf --fit", "heads of more than 16 elements"),
    ("kiln inspect SmolLM2", "a real model"),
    ("kiln synth llama-8b", "five gigabytes"),
    ("kiln inspect shape.gguf", "what would be made there"),
    ("kiln serve", "somebody who ends it"),
    ("kiln run model.gguf \"Review this:\"", "something to review"),
    ("mkdir -p parts; kiln split", "a file of several gigabytes"),
    ("kiln tokenize model.gguf \"Hello\"; kiln detokenize", "a large vocabulary"),
    ("kiln show ", "a model that was fetched"),
    (
        "kiln perplexity smollm2 text.md --cpu --chunks 12 --against base.logits --cache-type-k",
        "heads of more than 16 elements",
    ),
];

/// Runs the binary in a folder that stands for a user's machine.
fn machine(folder: &Path, program: &str) -> Command {
    let nowhere = folder.join("no-such-manifest.json");
    let bin = Path::new(env!("CARGO_BIN_EXE_kiln")).parent().unwrap();
    let path = format!("{}:{}", bin.display(), std::env::var("PATH").unwrap());
    let mut command = Command::new(program);
    command.env("VK_DRIVER_FILES", &nowhere).env("VK_ICD_FILENAMES", &nowhere).env_remove("KILN_DEVICE");
    command.env("KILN_MODELS", folder.join("store")).env("HF_HOME", folder.join("hf")).env("HOME", folder);
    command.env("KILN_CONFIG", folder.join("config.toml")).env("KILN_CACHE_DIR", folder.join("cache"));
    command.env("HF_ENDPOINT", "http://127.0.0.1:9").env("KILN_OLLAMA_REGISTRY", "http://127.0.0.1:9");
    command.env("COLUMNS", "80").env("PATH", path).stdin(Stdio::null()).current_dir(folder.join("here"));
    command
}

fn help(folder: &Path, command: &[&str]) -> String {
    let output = machine(folder, env!("CARGO_BIN_EXE_kiln")).args(command).arg("--help").output().unwrap();
    assert!(output.status.success(), "{command:?}");
    String::from_utf8(output.stdout).unwrap()
}

/// The commands that a page of help lists.
fn commands(help: &str) -> Vec<String> {
    let listed = help.lines().skip_while(|line| *line != "Commands:").skip(1).take_while(|line| !line.is_empty());
    let names = listed.filter(|line| line.starts_with("  ") && !line.starts_with("   "));
    names.filter_map(|line| line.split_whitespace().next()).filter(|name| *name != "help").map(str::to_owned).collect()
}

/// The lines between `Examples:` and the next empty one.
fn examples(help: &str) -> Vec<String> {
    let is_head = |line: &&str| !matches!(*line, "Example:" | "Examples:");
    help.lines().skip_while(is_head).skip(1).take_while(|line| !line.is_empty()).map(|l| l.trim().to_owned()).collect()
}

/// A user's folder, with a tiny model where the default one would be.
fn settle(folder: &Path, model: &[u8]) {
    for name in ["here", "store"] {
        let _ = fs::remove_dir_all(folder.join(name));
        fs::create_dir(folder.join(name)).unwrap();
    }
    // A model with random weights does not know when to end.
    let config = "model = \"smollm2\"\n[run]\nn-predict = 8\n[chat]\nn-predict = 8\n";
    fs::write(folder.join("config.toml"), config).unwrap();
    fs::write(folder.join("store/smollm2.gguf"), model).unwrap();
    fs::write(folder.join("here/book.txt"), "It was a dark night, and many words were said. ".repeat(60)).unwrap();
    fs::write(folder.join("here/titles.txt"), "A cat sits\nA dog runs\n").unwrap();
}

/// Runs what a user pasted. What it leaves in the background ends with it: a server would hold pipes open for ever, so output goes to files.
fn paste(folder: &Path, example: &str, seconds: &str) -> Output {
    let said = [tempfile::tempfile().unwrap(), tempfile::tempfile().unwrap()];
    let [stdout, stderr] = said.each_ref().map(|file| file.try_clone().unwrap());
    let mut command = machine(folder, "timeout");
    let mut child = command.args([seconds, "bash", "-c", example]).stdout(stdout).stderr(stderr).spawn().unwrap();
    let status = child.wait().unwrap();
    // `timeout` leads a process group of its own.
    let group = format!("kill -KILL -- -{}", child.id());
    Command::new("bash").args(["-c", &group]).stderr(Stdio::null()).status().unwrap();
    let [stdout, stderr] = said.map(|mut file| {
        let mut bytes = Vec::new();
        file.seek(SeekFrom::Start(0)).unwrap();
        file.read_to_end(&mut bytes).unwrap();
        bytes
    });
    Output { status, stdout, stderr }
}

/// A tiny Llama with random weights and room for more than a few words.
fn tiny_model(folder: &Path) -> Vec<u8> {
    let made = paste(folder, "kiln synth tiny-llama Q8_0 tiny.gguf", "60");
    assert!(made.status.success(), "{}", String::from_utf8_lossy(&made.stderr));
    let tiny = Gguf::open(folder.join("here/tiny.gguf")).unwrap();
    let mut metadata = tiny.metadata().clone();
    metadata.set("llama.context_length", 8192u32);
    let mut writer = Writer::new(metadata);
    for info in tiny.tensors() {
        writer.add(&info.name, info.dims(), info.ty, tiny.data(info)).unwrap();
    }
    writer.to_bytes().unwrap()
}

#[test]
fn every_example_of_every_help_runs_as_it_is_pasted() {
    let folder = tempfile::tempdir().unwrap();
    let folder = folder.path();
    settle(folder, b"");
    let model = tiny_model(folder);
    let main = help(folder, &[]);
    let mut pages: Vec<Vec<String>> = vec![Vec::new()];
    for command in commands(&main) {
        let more = commands(&help(folder, &[&command]));
        pages.push(vec![command.clone()]);
        // `kiln config` says it all on its own page.
        pages.extend(more.into_iter().filter(|_| command != "config").map(|inner| vec![command.clone(), inner]));
    }
    assert!(pages.len() > 30, "{pages:?}");
    let (mut ran, mut failed) = (0, Vec::new());
    for page in pages {
        let words: Vec<&str> = page.iter().map(String::as_str).collect();
        let examples = examples(&help(folder, &words));
        assert!(!examples.is_empty(), "kiln {} has no example", words.join(" "));
        settle(folder, &model);
        for example in examples {
            assert!(example.contains("kiln"), "{example:?} of {words:?} is no command, or is cut by narrow terminals");
            let lacks = NEEDS_MORE.iter().any(|(start, _)| example.starts_with(start));
            // The shell here is another one.
            let example = example.replace("fish | source", "fish > fish");
            assert!(!example.contains(" & "), "{example:?} leaves a process behind, which this test would wait for");
            let output = paste(folder, &example, if lacks { "1" } else { "120" });
            let said = String::from_utf8_lossy(&output.stderr);
            let nonsense = output.status.code() == Some(2) || said.contains("panicked");
            if nonsense || !(lacks || output.status.success()) {
                failed.push(format!("{example}: {:?} {said}", output.status));
            }
            ran += usize::from(!lacks);
        }
    }
    assert!(failed.is_empty(), "{}", failed.join("\n"));
    assert!(ran > 40, "{ran} ran");
}

/// The commands of a page: indented lines, and lines of blocks for shells, in which `kiln` is called.
fn commands_of_page(page: &str) -> Vec<String> {
    let mut fence: Option<bool> = None;
    let mut found = Vec::new();
    for line in page.lines() {
        if let Some(kind) = line.strip_prefix("```") {
            fence = if fence.is_some() { None } else { Some(matches!(kind, "sh" | "bash" | "console")) };
            continue;
        }
        let is_code = fence.unwrap_or(line.starts_with("    "));
        let command = line.trim().trim_start_matches("$ ").split("   #").next().unwrap_or_default().trim();
        let calls = |part: &str| part.trim().starts_with("kiln ");
        let names_it = command.split([';', '|', '&', '(']).any(calls);
        if is_code && names_it && !command.contains("--help") {
            found.push(command.to_owned());
        }
    }
    found
}

#[test]
fn every_command_of_the_book_runs_as_it_is_pasted() {
    let root = Path::new(env!("CARGO_MANIFEST_DIR")).join("../..");
    let folder = tempfile::tempdir().unwrap();
    let folder = folder.path();
    settle(folder, b"");
    let model = tiny_model(folder);
    let made = paste(folder, "kiln synth bert-tiny F32 minilm.gguf", "60");
    assert!(made.status.success(), "{}", String::from_utf8_lossy(&made.stderr));
    let embedder = fs::read(folder.join("here/minilm.gguf")).unwrap();
    let mut pages = vec![root.join("README.md")];
    let folders = ["docs", "docs/serving", "docs/internals"];
    for inner in folders.iter().flat_map(|name| fs::read_dir(root.join(name)).unwrap()) {
        let path = inner.unwrap().path();
        // The results are commands of another machine.
        if path.extension().is_some_and(|end| end == "md") && !path.ends_with("results.md") {
            pages.push(path);
        }
    }
    pages.sort();
    let (mut ran, mut failed) = (0, Vec::new());
    for page in pages {
        let commands = commands_of_page(&fs::read_to_string(&page).unwrap());
        settle(folder, &model);
        let here = folder.join("here");
        for name in ["model.gguf", "model-F16.gguf", "model-f16.gguf", "MODEL.gguf", "mixture.gguf", "a.gguf", "b.gguf"]
        {
            fs::write(here.join(name), &model).unwrap();
        }
        fs::write(here.join("minilm.gguf"), &embedder).unwrap();
        let text = fs::read(here.join("book.txt")).unwrap();
        for name in ["text.txt", "text.md", "calibration.md"] {
            fs::write(here.join(name), &text).unwrap();
        }
        fs::write(here.join("city.json"), r#"{"type": "string"}"#).unwrap();
        for command in commands {
            let lacks = BOOK_NEEDS_MORE.iter().any(|(start, _)| command.contains(start));
            // A page shows the making of a file that it uses further up.
            let words: Vec<&str> = command.split_whitespace().collect();
            let made = match words.get(1) {
                Some(&"quantize" | &"imatrix") => words.get(if words[1] == "imatrix" { 4 } else { 3 }),
                _ => words.iter().skip_while(|word| **word != "--save-logits").nth(1),
            };
            if let Some(made) = made.filter(|_| !words.contains(&"--dry-run")) {
                let _ = fs::remove_file(here.join(made));
            }
            let output = paste(folder, &command, if lacks { "1" } else { "120" });
            let said = String::from_utf8_lossy(&output.stderr);
            let nonsense = output.status.code() == Some(2) || said.contains("panicked");
            if nonsense || !(lacks || output.status.success()) {
                failed.push(format!("{}: {command}: {:?} {said}", page.display(), output.status));
            }
            ran += usize::from(!lacks);
        }
    }
    assert!(failed.is_empty(), "{}", failed.join("\n"));
    assert!(ran > 20, "{ran} ran");
}
