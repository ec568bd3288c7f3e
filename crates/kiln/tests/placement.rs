//! Where a model lies, as users say it: flags that make sense give the same text everywhere, all others one clear line with numbers.

#![allow(clippy::unwrap_used, clippy::print_stdout, reason = "a test may fail by it, in its helping functions too")]

use std::process::{Command, Output};

use tempfile::TempDir;

/// Runs the binary on the machine as it is.
fn kiln(arguments: &[&str]) -> Output {
    let kiln = env!("CARGO_BIN_EXE_kiln");
    // The software GPU comes with a loader of its own, which every program is started by.
    let mut command = match std::env::var_os("KILN_SOFTWARE_GPU_RUN") {
        Some(run) => {
            let mut command = Command::new(run);
            command.arg(kiln);
            command
        }
        None => Command::new(kiln),
    };
    command.args(arguments).output().unwrap()
}

fn text(bytes: &[u8]) -> String {
    String::from_utf8_lossy(bytes).into_owned()
}

/// What a command says on stdout.
fn said(arguments: &[&str]) -> String {
    let output = kiln(arguments);
    assert!(output.status.success(), "{arguments:?}: {}", text(&output.stderr));
    text(&output.stdout)
}

/// Asserts that a command fails with a message that has all these words in it.
fn refused(arguments: &[&str], words: &[&str]) {
    let output = kiln(arguments);
    let error = text(&output.stderr);
    assert!(!output.status.success() && !error.contains("panicked"), "{arguments:?}: {error}");
    words.iter().for_each(|word| assert!(error.contains(word), "{word:?} is not in: {error}"));
}

fn model(folder: &TempDir, preset: &str) -> String {
    let path = folder.path().join(format!("{preset}.gguf")).to_string_lossy().into_owned();
    said(&["synth", preset, "F32", &path]);
    path
}

/// An adapter that changes the output of both layers of a tiny model's attention.
fn adapter(folder: &TempDir, model: &str) -> String {
    let gguf = kiln_gguf::Gguf::open(model).unwrap();
    let mut metadata = kiln_gguf::Metadata::new();
    let architecture = gguf.metadata().get_str("general.architecture").unwrap();
    for (key, value) in [("general.type", "adapter"), ("adapter.type", "lora"), ("general.architecture", architecture)]
    {
        metadata.set(key, value);
    }
    metadata.set("adapter.lora.alpha", kiln_gguf::Value::F32(4.0));
    let mut writer = kiln_gguf::Writer::new(metadata);
    for layer in 0..2 {
        let weight = format!("blk.{layer}.attn_output.weight");
        let [input, output, ..] = gguf.tensor(&weight).unwrap().shape;
        for (end, dims) in [("lora_a", [input, 2]), ("lora_b", [2, output])] {
            let values: Vec<u8> =
                (0..dims[0] * dims[1]).flat_map(|i| ((i % 7) as f32 * 0.3 - 0.9).to_le_bytes()).collect();
            writer.add(&format!("{weight}.{end}"), &dims, kiln_gguf::TensorType::F32, values).unwrap();
        }
    }
    let path = folder.path().join("adapter.gguf");
    writer.save(&path).unwrap();
    path.to_string_lossy().into_owned()
}

/// Whether there is a GPU; the software one will do.
fn has_device() -> bool {
    let there = kiln(&["devices", "--json"]).status.success();
    assert!(there || std::env::var_os("KILN_TESTS_NEED_DEVICE").is_none(), "no device");
    if !there {
        println!("no device, test passed over");
    }
    there
}

#[test]
fn without_a_gpu_flags_that_need_one_say_so() {
    let folder = tempfile::tempdir().unwrap();
    let model = model(&folder, "tiny-llama");
    let on_cpu =
        |flags: &[&str], words: &[&str]| refused(&[&["inspect", &model, "--fit", "--cpu"], flags].concat(), words);
    on_cpu(&["-ngl", "all"], &["--gpu-layers all needs a GPU"]);
    on_cpu(&["--tensor-split", "1,2"], &["--tensor-split needs a GPU"]);
    on_cpu(&["--place", "blk.0.*=0"], &["blk.0.*=0", "needs a GPU"]);
    on_cpu(&["--gpu-layers", "many"], &["want a number, `auto` or `all`"]);
    on_cpu(&["--tensor-split", "1,-2"], &["not negative"]);
    assert!(said(&["inspect", &model, "--fit", "--cpu", "--gpu-layers", "0"]).contains("CPU"));
    // Scripts give a number for any machine.
    let output = kiln(&["run", &model, "--raw", "x", "-n", "1", "--cpu", "-ngl", "99", "--place", "zzz=cpu"]);
    let notes = text(&output.stderr);
    assert!(output.status.success() && notes.contains("--gpu-layers 99 is ignored"), "{notes}");
    assert!(notes.contains("\"zzz=cpu\" matches no tensor"), "{notes}");
}

#[test]
fn devices_and_numbers_that_are_not_there_are_refused() {
    if !has_device() {
        return;
    }
    let folder = tempfile::tempdir().unwrap();
    let model = model(&folder, "tiny-llama");
    let on = |device: &str, flags: &[&str], words: &[&str]| {
        refused(&[&["inspect", &model, "--fit", "--device", device], flags].concat(), words);
    };
    on("0,9", &[], &["\"9\"", "0: "]);
    let many = kiln(&["inspect", &model, "--fit", "--device", "0", "-ngl", "99"]);
    let notes = text(&many.stderr);
    assert!(many.status.success() && notes.contains("--gpu-layers 99: the model has 2 layers"), "{notes}");
    let twice = kiln(&["inspect", &model, "--fit", "--device", "0,0"]);
    assert!(text(&twice.stderr).contains("names 0 twice"), "{}", text(&twice.stderr));
    on("0", &["--cpu-moe"], &["no experts"]);
    on("0,0", &["--tensor-split", "1,2,3"], &["3 numbers for 2 GPUs"]);
    on("0", &["--tensor-split", "0"], &["no device a share"]);
    on("0", &["--place", "blk.0"], &["names no device", "PATTERN=DEVICE"]);
    on("0", &["--place", "blk.0=5"], &["there is no device \"5\" here, only 0, cpu"]);
    on("0", &["--place", "(=cpu"], &["no regular expression"]);
    // Less than one layer: what would be needed, and what there is.
    on("0", &["-ngl", "all", "--memory-limit", "100KiB"], &["2 layers need", "95.0 KiB are there", "hint:"]);
}

#[test]
fn the_same_text_wherever_layers_lie() {
    if !has_device() {
        return;
    }
    let folder = tempfile::tempdir().unwrap();
    let model = model(&folder, "tiny-qwen3moe");
    let run = |flags: &[&str]| {
        said(&[&["run", &model, "--raw", "-p", "abc", "-n", "8", "--temp", "0", "-c", "128"], flags].concat())
    };
    let want = run(&["--cpu"]);
    for flags in [
        &["--device", "0", "-ngl", "1"][..],
        &["--device", "0", "-ngl", "2"],
        &["--device", "0", "--cpu-moe"],
        &["--device", "0,0", "--tensor-split", "1,1"],
        &["--device", "0", "--place", "blk.*.ffn_.*_exps=cpu", "--place", "output=cpu"],
    ] {
        assert_eq!(run(flags), want, "{flags:?}");
    }
    // An adapter adds slots of its own, which every device must number alike.
    let adapter = adapter(&folder, &model);
    let adapted = run(&["--cpu", "--lora", &adapter]);
    assert_ne!(adapted, want);
    for layers in ["1", "2"] {
        assert_eq!(run(&["--device", "0", "-ngl", layers, "--lora", &adapter]), adapted, "{layers} layers on the GPU");
    }
    let fit = said(&["inspect", &model, "--fit", "--device", "0", "-ngl", "2", "-c", "128"]);
    assert!(fit.contains("layer 1 and the output") && fit.contains("the embedding and layer 0"), "{fit}");
    let plan = said(&["plan", &model, "--device", "0", "-ngl", "2"]);
    assert!(plan.contains("in 2 parts") && plan.contains("arrive") && plan.contains("[1: cpu]"), "{plan}");
    // What fits a limit is found by itself.
    let auto = said(&["inspect", &model, "--fit", "--device", "0", "-c", "128", "--memory-limit", "1MiB"]);
    assert!(auto.contains("CPU"), "{auto}");
}
