//! The binary as users meet it: arguments, files, exit codes, what is said where. No GPU is needed.

#![allow(clippy::unwrap_used, reason = "a test may fail by it, in its helping functions too")]

use std::path::{Path, PathBuf};
use std::process::{Command, Output};

use kiln_gguf::{Gguf, Metadata, TensorType, Writer, quant};

/// A folder that goes away with the test.
struct Folder(PathBuf);

impl Folder {
    fn new(name: &str) -> Folder {
        let path = std::env::temp_dir().join(format!("kiln-cli-{name}-{}", std::process::id()));
        std::fs::create_dir_all(&path).unwrap();
        Folder(path)
    }

    fn file(&self, name: &str) -> String {
        self.0.join(name).to_string_lossy().into_owned()
    }

    fn names(&self) -> Vec<String> {
        let entries = std::fs::read_dir(&self.0).unwrap();
        let mut names: Vec<_> = entries.map(|e| e.unwrap().file_name().to_string_lossy().into_owned()).collect();
        names.sort();
        names
    }
}

impl Drop for Folder {
    fn drop(&mut self) {
        let _ = std::fs::remove_dir_all(&self.0);
    }
}

/// Runs the binary on a machine without any Vulkan driver.
fn kiln(arguments: &[&str]) -> Output {
    kiln_with(arguments, &[])
}

/// The same with variables of the environment.
fn kiln_with(arguments: &[&str], variables: &[(&str, &str)]) -> Output {
    let nowhere = std::env::temp_dir().join("kiln-cli-no-such-manifest.json");
    Command::new(env!("CARGO_BIN_EXE_kiln"))
        .args(arguments)
        .env("VK_DRIVER_FILES", &nowhere)
        .env("VK_ICD_FILENAMES", &nowhere)
        .env_remove("KILN_DEVICE")
        .env_remove("KILN_VALIDATION")
        .envs(variables.iter().copied())
        .output()
        .unwrap()
}

fn text(bytes: &[u8]) -> String {
    String::from_utf8(bytes.to_vec()).unwrap()
}

/// Asserts a failure with this code whose message holds all these words, says nothing on stdout and does not panic.
fn assert_fails(output: &Output, code: i32, words: &[&str]) {
    let error = text(&output.stderr);
    assert_eq!(output.status.code(), Some(code), "{error}");
    assert!(output.stdout.is_empty(), "{}", text(&output.stdout));
    assert!(!error.contains("panicked"), "{error}");
    words.iter().for_each(|word| assert!(error.contains(word), "{word:?} is not in: {error}"));
}

fn assert_succeeds(output: &Output) {
    assert_eq!(output.status.code(), Some(0), "{}", text(&output.stderr));
}

fn json(output: &Output) -> serde_json::Value {
    serde_json::from_slice(&output.stdout).unwrap_or_else(|e| panic!("{e}: {}", text(&output.stdout)))
}

fn synth(folder: &Folder, preset: &str, ty: &str) -> String {
    let path = folder.file(&format!("{preset}-{ty}.gguf"));
    assert_succeeds(&kiln(&["synth", preset, ty, &path]));
    path
}

#[test]
fn wrong_arguments_exit_with_2() {
    assert_fails(&kiln(&["nonsense"]), 2, &["nonsense"]);
    assert_fails(&kiln(&["inspect"]), 2, &["MODEL"]);
    assert_fails(&kiln(&["quantize", "a", "b"]), 2, &["TYPE"]);
    assert_fails(&kiln(&["quantize", "a", "b", "Q8_0", "--threads", "0"]), 2, &["threads"]);
    assert_fails(&kiln(&["synth", "tiny-llama"]), 2, &["TYPE"]);
    assert_fails(&kiln(&["bench"]), 2, &["device"]);
}

#[test]
fn habits_of_other_programs_are_met() {
    let folder = Folder::new("habits");
    let model = synth(&folder, "tiny-llama", "F32");
    let run = |more: &[&str]| kiln(&[&["run", &model, "hello", "--cpu", "--temp", "0", "-n", "4"], more].concat());
    let plain = run(&[]);
    assert_succeeds(&plain);
    for flags in [
        &["-fa", "on"][..],
        &["-sm", "none", "-mg", "0"],
        &["-md", &model],
        &["--mlock", "--no-mmap"],
        &["-b", "512", "-ub", "64"],
        &["-ngl", "99", "-t", "64"],
        &["--temp", "0.5", "--temp", "0"],
    ] {
        let output = run(flags);
        assert_succeeds(&output);
        assert_eq!(output.stdout, plain.stdout, "{flags:?}");
    }
    assert!(text(&run(&["--mlock"]).stderr).contains("note: --mlock is ignored"));
    assert!(!text(&run(&["-fa", "on"]).stderr).contains("-fa"), "it is as it was asked for");
    assert_succeeds(&kiln(&["run", &model, "hello", "--device", "none", "-n", "1"]));
    assert_fails(&run(&["--mmproj", "x.gguf"]), 1, &["--image"]);
    assert_fails(&run(&["--audio", "x.wav"]), 1, &["--audio", "--mmproj"]);
    assert_fails(&run(&["-cnv"]), 2, &["kiln chat"]);
    // Negative numbers reach the message that says what is wanted; nothing is offered that would not help.
    for (flags, words) in [
        (&["-c", "-1"][..], &["-c", "number of tokens"][..]),
        (&["-t", "-1"], &["-1 is not in 1.."]),
        (&["--gpu-layers", "-5"], &["want a number, `auto` or `all`"]),
        (&["--no-such-flag"], &["--no-such-flag"]),
    ] {
        let output = run(flags);
        assert_fails(&output, 2, words);
        assert!(!text(&output.stderr).contains("as a value"), "{}", text(&output.stderr));
    }
    for (flags, words) in [
        (&["--top-p", "-1"][..], "`top_p` is -1"),
        (&["--top-p", "2"], "`top_p` is 2"),
        (&["--repeat-last-n", "-5"], "`repeat_last_n` is -5"),
        (&["--dry-penalty-last-n", "-7"], "`dry_penalty_last_n` is -7"),
        (&["--dry-base", "0"], "`dry_base` is 0"),
        (
            &["--frequency-penalty", "1e38"],
            "`frequency_penalty` is 1.0e38, it must be -1000000 to 1000000; 0 turns it off",
        ),
        (&["--regex", "("], "unclosed group"),
        (&["--json-schema", r#"{"not": {}}"#], "keyword `not` is not supported"),
    ] {
        assert_fails(&run(flags), 1, &[words]);
    }
    assert_fails(&kiln(&["rnu", "x"]), 2, &["rnu", "'run'"]);
    assert!(text(&kiln(&["run", "--version"]).stdout).contains(env!("CARGO_PKG_VERSION")));
    let help = text(&kiln(&["run", "--help"]).stdout);
    let device = help.split("Device and memory:").nth(1).unwrap();
    for flag in ["--device", "--cpu", "--threads", "--ctx-size", "--lora", "--gpu-layers", "-ngl"] {
        assert!(device.contains(flag), "{flag}");
    }
    let shell = text(&kiln(&["completions", "bash"]).stdout);
    let types = |flag: &str| {
        shell.split(flag).skip(1).any(|behind| behind.chars().take(300).collect::<String>().contains("IQ4_NL"))
    };
    assert!(shell.contains("Q4_K_M") && types("--cache-type-k)"));
}

#[test]
fn help_says_what_flags_do_in_the_words_of_the_field() {
    for (command, words) in [
        ("run", "Drop tokens less likely than this fraction of the top token's probability (0 = off)"),
        ("run", "Subtract this from the logit of every token generated so far (0 = off)"),
        ("run", "Bit-identical output regardless of batching"),
        ("run", "Final timestep of the diffusion schedule (Dream uses 0.001)"),
        ("run", "Context size in tokens"),
        ("tokenize", "Do not add BOS/EOS tokens"),
        ("convert", "Convert a Hugging Face model folder (safetensors) to GGUF"),
        ("bench", "Benchmark a model (tokens/s), the device, or single operations"),
    ] {
        let help = text(&kiln(&[command, "--help"]).stdout).split_whitespace().collect::<Vec<_>>().join(" ");
        assert!(help.contains(words), "{command}: {words:?} is not in: {help}");
    }
    // Every flag that is shown says what it does, under a heading that names its subject.
    for command in ["run", "chat", "serve", "bench", "embed", "quantize", "convert", "perplexity", "pull"] {
        let help = text(&kiln(&[command, "-h"]).stdout);
        let mute = help.lines().zip(help.lines().skip(1).chain([""])).find(|(line, next)| {
            // What a flag does stands two spaces behind it, or in the next line.
            let flag = line.strip_prefix("      --").or(line.strip_prefix("  -"));
            flag.is_some_and(|flag| !flag.contains("  ") && !next.starts_with("          "))
        });
        assert_eq!(mute, None, "{command}");
        for heading in ["Models that fill in texts", "How tokens are chosen"] {
            assert!(!help.contains(heading), "{command}: {heading}");
        }
    }
}

#[test]
fn unknown_names_list_what_there_is() {
    let folder = Folder::new("names");
    let out = folder.file("x.gguf");
    assert_fails(&kiln(&["synth", "gpt-9", "Q8_0", &out]), 1, &["gpt-9", "hint:", "llama-8b"]);
    assert_fails(&kiln(&["synth", "tiny-llama", "Q9_9", &out]), 1, &["Q9_9", "hint:", "Q4_K_M"]);
    assert_fails(&kiln(&["bench", "ops", "sing"]), 1, &["sing", "hint:", "rms_norm"]);
    assert!(folder.names().is_empty());
}

#[test]
fn missing_and_damaged_files_are_errors_that_name_them() {
    let folder = Folder::new("damaged");
    let missing = folder.file("missing.gguf");
    assert_fails(&kiln(&["inspect", &missing]), 1, &["missing.gguf"]);
    let text_file = folder.file("text.gguf");
    std::fs::write(&text_file, "not a model at all").unwrap();
    assert_fails(&kiln(&["inspect", &text_file]), 1, &["text.gguf", "not a GGUF file"]);
    let whole = std::fs::read(synth(&folder, "tiny-llama", "F16")).unwrap();
    let cut = folder.file("cut.gguf");
    std::fs::write(&cut, &whole[..whole.len() / 2]).unwrap();
    assert_fails(&kiln(&["inspect", &cut]), 1, &["cut.gguf", "cut short"]);
    let out = folder.file("out.gguf");
    assert_fails(&kiln(&["quantize", &cut, &out, "Q8_0"]), 1, &["cut.gguf"]);
    assert!(!Path::new(&out).exists());
}

#[test]
fn inspect_tells_types_parameters_and_memory() {
    let folder = Folder::new("inspect");
    let model = synth(&folder, "tiny-llama-256", "Q4_K_M");
    let told = json(&kiln(&["inspect", &model, "--json", "--tensors"]));
    assert_eq!(told["metadata"]["general.architecture"], "llama");
    assert!(told["metadata"]["tokenizer.ggml.tokens"]["length"].as_u64().unwrap() > 256);
    let file = Gguf::open(&model).unwrap();
    let elements: usize = file.tensors().iter().map(|t| t.n_elements()).sum();
    assert_eq!(told["parameters"], elements);
    assert_eq!(told["data_bytes"], file.data_bytes());
    assert_eq!(told["tensors"].as_array().unwrap().len(), file.tensors().len());
    assert!(told["types"]["Q6_K"]["tensors"].as_u64().unwrap() > 0);
    // 2 layers, 2 heads of keys and values, 64 wide, 2 bytes each, 512 tokens.
    assert_eq!(told["memory"][0]["state_bytes"], 2 * 2 * (64 + 64) * 2 * 512);
    let plain = kiln(&["inspect", &model]);
    assert_succeeds(&plain);
    assert!(text(&plain.stdout).contains("bits") && !text(&plain.stdout).contains("blk.0.attn_q.weight"));
}

#[test]
fn quantize_keeps_the_weights_near_and_the_metadata_whole() {
    let folder = Folder::new("quantize");
    let model = synth(&folder, "tiny-llama-256", "F32");
    let (eight, back) = (folder.file("q8.gguf"), folder.file("back.gguf"));
    assert_succeeds(&kiln(&["quantize", &model, &eight, "q8_0", "--threads", "2"]));
    let again = kiln(&["quantize", &eight, &back, "F32", "--json"]);
    assert_eq!(json(&again)["type"], "F32");
    let (want, got) = (Gguf::open(&model).unwrap(), Gguf::open(&back).unwrap());
    assert_eq!(Gguf::open(&eight).unwrap().tensor("blk.0.attn_q.weight").unwrap().ty, TensorType::Q8_0);
    for info in want.tensors() {
        let read = |file: &Gguf| {
            let info = file.tensor(&info.name).unwrap();
            let mut values = vec![0.0; info.n_elements()];
            quant::dequantise(info.ty, file.data(info), &mut values).unwrap();
            values
        };
        let (want, got) = (read(&want), read(&got));
        let error: f32 = want.iter().zip(&got).map(|(a, b)| (a - b).powi(2)).sum();
        let norm: f32 = want.iter().map(|a| a * a).sum();
        assert!(error <= 1e-4 * norm, "{}: {error} of {norm}", info.name);
    }
    let kept = |file: &Gguf| file.metadata().get_str_array("tokenizer.ggml.tokens").unwrap().clone();
    assert_eq!(kept(&want), kept(&got));
    assert_eq!(got.metadata().get_u32("general.file_type").unwrap(), 0);
    // Nothing but the three models: no temporary file is left.
    assert_eq!(folder.names().len(), 3, "{:?}", folder.names());
}

#[test]
fn quantize_destroys_nothing() {
    let folder = Folder::new("destroy");
    let model = synth(&folder, "tiny-llama", "F16");
    let before = std::fs::read(&model).unwrap();
    assert_fails(&kiln(&["quantize", &model, &model, "Q8_0", "--force"]), 1, &["hint:"]);
    let other = folder.file("other.gguf");
    std::fs::write(&other, "precious").unwrap();
    assert_fails(&kiln(&["quantize", &model, &other, "Q8_0"]), 1, &["other.gguf", "--force"]);
    assert_eq!(std::fs::read(&other).unwrap(), b"precious");
    assert_fails(
        &kiln(&["quantize", &model, &folder.file("no/such/folder.gguf"), "Q8_0"]),
        1,
        &["there is no folder", "no/such"],
    );
    assert_succeeds(&kiln(&["quantize", &model, &other, "Q8_0", "--force"]));
    let again = kiln(&["quantize", &other, &folder.file("third.gguf"), "Q4_0"]);
    assert_succeeds(&again);
    assert!(text(&again.stderr).contains("quantised already"), "{}", text(&again.stderr));
    assert_eq!(std::fs::read(&model).unwrap(), before);
    assert_fails(&kiln(&["synth", "tiny-llama", "F16", &model]), 1, &["--force"]);
}

#[test]
fn doctor_without_a_driver_says_so_and_how_to_fix_it() {
    let plain = kiln(&["doctor"]);
    let said = text(&plain.stdout);
    assert_eq!(plain.status.code(), Some(1), "{said}");
    assert!(said.contains("problem: ") && said.contains("fix: "), "{said}");
    assert!(said.contains("kiln-cli-no-such-manifest.json"), "{said}");
    let told = json(&kiln(&["doctor", "--json"]));
    assert_eq!(told["usable"], false);
    assert!(!told["findings"].as_array().unwrap().is_empty());
}

#[test]
fn commands_that_need_a_device_point_to_the_doctor_or_the_loader() {
    for command in [vec!["devices"], vec!["selftest"], vec!["bench", "device"]] {
        assert_fails(&kiln(&command), 1, &["error: ", "hint: "]);
    }
}

#[test]
fn tuning_lines_that_cannot_be_read_are_refused_by_number() {
    let folder = Folder::new("tuning");
    let file = folder.file("lines.txt");
    let run = |lines: &str| {
        std::fs::write(&file, lines).unwrap();
        kiln_with(&["bench", "device"], &[("KILN_TUNING", &file)])
    };
    for wrong in ["gpu q4_k", "mul_mm gpu * coopmat * tile=3", "flash_attention gpu * scalar threads=x"] {
        assert_fails(&run(&format!("# tried\n{wrong}\n")), 1, &["KILN_TUNING", "line 2"]);
    }
    // What can be read is no reason to fail: the missing device is.
    assert_fails(&run("gpu q4_k int_dot 1 64 subgroup 1 1 groups:1\n"), 1, &["no Vulkan"]);
    // Where no device is used, nobody reads it.
    let model = synth(&folder, "tiny-llama", "F16");
    assert_succeeds(&kiln_with(&["inspect", &model], &[("KILN_TUNING", "/no/such/file")]));
    assert_fails(&kiln_with(&["bench", "device"], &[("KILN_TUNING", "")]), 1, &["no Vulkan"]);
}

#[test]
fn a_saved_state_goes_on_where_the_prompt_ended() {
    let folder = Folder::new("state");
    for preset in ["tiny-rwkv6", "tiny-llama"] {
        let (model, state) = (synth(&folder, preset, "F32"), folder.file("prompt.state"));
        let run = |prompt: &str, more: &[&str]| {
            let output = kiln(
                &[&["run", &model, prompt, "--cpu", "-c", "64", "--ignore-eos", "--raw", "--temp", "0"], more].concat(),
            );
            assert_succeeds(&output);
            text(&output.stdout)
        };
        let whole = run("ab cd", &["-n", "12"]);
        assert_eq!(run("ab", &["-n", "0", "--save-state", &state, "--force"]), "");
        let rest = run(" cd", &["-n", "12", "--load-state", &state]);
        assert_eq!(rest, whole, "{preset}");
        assert_ne!(run(" cd", &["-n", "12"]), whole, "{preset}: the state says something");
        assert!(!folder.names().iter().any(|name| name.ends_with(".tmp")));
        std::fs::write(&state, b"not a state").unwrap();
        let output = kiln(&["run", &model, "x", "--cpu", "-c", "64", "--load-state", &state]);
        assert_fails(&output, 1, &["prompt.state"]);
    }
    let nowhere = folder.file("no-such.state");
    let model = folder.file("tiny-llama-F32.gguf");
    assert_fails(&kiln(&["run", &model, "x", "--cpu", "--load-state", &nowhere]), 1, &["no-such.state"]);
}

/// An adapter of one matrix of the tiny model.
fn adapter(folder: &Folder, name: &str, architecture: &str) -> String {
    let mut metadata = Metadata::new();
    for (key, value) in [("general.type", "adapter"), ("adapter.type", "lora"), ("general.architecture", architecture)]
    {
        metadata.set(key, value);
    }
    metadata.set("adapter.lora.alpha", kiln_gguf::Value::F32(4.0));
    let mut writer = Writer::new(metadata);
    for (end, dims) in [("lora_a", [64, 2]), ("lora_b", [2, 64])] {
        let values: Vec<u8> = (0..128).flat_map(|i: u32| (i as f32 / 40.0 - 1.5).to_le_bytes()).collect();
        writer.add(&format!("blk.1.attn_output.weight.{end}"), &dims, TensorType::F32, values).unwrap();
    }
    let path = folder.file(name);
    writer.save(&path).unwrap();
    path
}

#[test]
fn adapters_go_on_a_model_by_flags() {
    let folder = Folder::new("lora");
    let model = synth(&folder, "tiny-llama", "F32");
    let (own, other) = (adapter(&folder, "own.gguf", "llama"), adapter(&folder, "other.gguf", "qwen2"));
    let logits = |name: &str, flags: &[&str]| {
        let out = folder.file(name);
        assert_succeeds(&kiln(&[&["logits", &model, "--cpu", "--tokens", "3,9,27", "-o", &out], flags].concat()));
        let file = Gguf::open(out).unwrap();
        file.data(file.tensor("logits").unwrap()).to_vec()
    };
    let (bare, full) = (logits("bare.gguf", &[]), logits("full.gguf", &["--lora", &own]));
    assert_ne!(bare, full);
    assert_eq!(logits("zero.gguf", &["--lora", &format!("{own}=0")]), bare);
    assert_eq!(logits("scaled.gguf", &["--lora-scaled", &format!("{own}:1.0")]), full);
    assert_ne!(logits("twice.gguf", &["--lora", &format!("{own},{own}=0.5")]), full);
    let plan = text(&kiln(&["plan", &model, "--cpu", "--lora", &own]).stdout);
    assert!(plan.contains("blk.1.attn_output.weight.lora0.a"), "{plan}");
    assert_succeeds(&kiln(&["run", &model, "--cpu", "--lora", &own, "--raw", "a", "-n", "2"]));
    let run = |flag: &str, value: &str| kiln(&["run", &model, "--cpu", flag, value, "--raw", "a"]);
    assert_fails(&run("--lora", &other), 1, &["made for architecture qwen2, the model is llama"]);
    assert_fails(&run("--lora", &model), 1, &["it is no adapter"]);
    assert_fails(&run("--lora", &folder.file("none.gguf")), 1, &["none.gguf"]);
    assert_fails(&run("--lora", &format!("{own}=much")), 1, &["\"much\", which is no number"]);
    assert_fails(&run("--lora-scaled", &own), 1, &["has no scale"]);
    let two = ["serve", &format!("a={model}"), &format!("b={model}"), "--lora", &own];
    assert_fails(&kiln(&two), 1, &["--lora changes one model"]);
}

#[test]
fn benches_are_drawn_and_cold_starts_are_timed() {
    let folder = Folder::new("bench");
    let model = synth(&folder, "tiny-llama", "F32");
    let picture = folder.file("speed.svg");
    let bench = ["bench", &model, "--cpu", "-p", "8", "-n", "4", "-r", "1"];
    assert_succeeds(&kiln(&[&bench[..], &["--plot", &picture, "--sequences", "1,2"]].concat()));
    let drawn = std::fs::read_to_string(&picture).unwrap();
    for head in ["Roofline", "Where the time of tg4 goes", "Texts written together", "One token, step by step"] {
        assert!(drawn.contains(head), "{head}");
    }
    assert!(drawn.ends_with("</svg>\n") && drawn.contains("memory:") && drawn.contains("multiply-add:"), "{drawn}");
    // Refused before anything is timed.
    assert_fails(&kiln(&[&bench[..], &["--plot", &picture]].concat()), 1, &["speed.svg", "--force"]);
    let cold = json(&kiln(&["bench", &model, "--cpu", "-p", "8", "--cold", "-r", "2", "--json"]));
    let phases = cold["seconds"].as_object().unwrap();
    assert_eq!(phases.len(), 7, "{cold}");
    let sum: f64 =
        phases.iter().filter(|(name, _)| *name != "second").map(|(_, seconds)| seconds.as_f64().unwrap()).sum();
    let first = cold["first_token_seconds"].as_f64().unwrap();
    assert!(first > 0.0 && (0.5..2.0).contains(&(sum / first)), "{cold}");
    assert_eq!(cold["runs"].as_array().unwrap().len(), 2);
    assert_fails(&kiln(&["bench", &model, "--cpu", "--cold", "--plot", &picture]), 2, &["cannot be used with"]);
}

#[test]
fn threads_are_counted_and_never_more_than_can_run() {
    let folder = Folder::new("threads");
    let model = synth(&folder, "tiny-llama", "Q8_0");
    let usable = std::thread::available_parallelism().unwrap().get();
    let bench = |threads: &str| {
        kiln(&["bench", &model, "--cpu", "--threads", threads, "-p", "8", "-n", "0", "-r", "1", "--json"])
    };
    for threads in [1, usable] {
        let said = json(&bench(&threads.to_string()));
        assert_eq!(said["device"], format!("CPU, {threads} threads"), "{said}");
    }
    let many = bench(&(usable + 1).to_string());
    assert_eq!(json(&many)["device"], format!("CPU, {usable} threads"));
    let warned = format!("{} threads are more than the {usable} that can run at once", usable + 1);
    assert!(text(&many.stderr).contains(&warned), "{}", text(&many.stderr));
    assert_fails(&bench("0"), 2, &["--threads"]);
    assert_fails(&bench("-1"), 2, &["-1 is not in 1.."]);
}

#[test]
fn numbers_are_asked_for_in_plain_words() {
    for words in [&["run", "m.gguf", "hi", "--temp", "warm"][..], &["chat", "m.gguf", "--top-p", "x"]] {
        let refused = kiln(words);
        assert_fails(&refused, 2, &["it must be a number, such as 0.7"]);
        assert!(!text(&refused.stderr).contains("literal"), "{}", text(&refused.stderr));
    }
}

#[test]
fn a_load_of_concurrent_requests_is_counted() {
    let folder = Folder::new("load");
    let model = synth(&folder, "tiny-llama", "Q8_0");
    let load = |spec: &str| kiln(&["bench", &model, "--cpu", "--load", spec, "-r", "2", "--json"]);
    let said = json(&load("4x2:64+16,2x1:33+8"));
    let rows = said["loads"].as_array().unwrap();
    assert_eq!(rows.iter().map(|row| row["run"].as_u64().unwrap()).collect::<Vec<_>>(), [1, 2, 1, 2]);
    let (first, last) = (&rows[0], &rows[3]);
    assert_eq!((&first["requests"], &last["requests"]), (&8.into(), &2.into()), "{said}");
    assert!(first["seconds"].as_f64().unwrap() > 0.0 && first["share_of_engine"].as_f64().unwrap() > 0.0, "{first}");
    let tokens =
        |row: &serde_json::Value| row["tokens_per_second"].as_f64().unwrap() * row["seconds"].as_f64().unwrap();
    assert!((tokens(first) - 640.0).abs() < 0.5 && (tokens(last) - 82.0).abs() < 0.5, "{said}");
    assert_fails(&load("4x2:64"), 2, &["such as 64x2:512+64"]);
    assert_fails(&load("1x1:4000+16"), 1, &["4016", "512"]);
}
