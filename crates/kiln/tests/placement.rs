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
    on_cpu(&["--gpu-layers", "2"], &["--gpu-layers 2 needs a GPU", "hint:"]);
    on_cpu(&["-ngl", "all"], &["--gpu-layers all needs a GPU"]);
    on_cpu(&["--tensor-split", "1,2"], &["--tensor-split needs a GPU"]);
    on_cpu(&["--place", "blk.0.*=0"], &["blk.0.*=0", "needs a GPU"]);
    on_cpu(&["--gpu-layers", "many"], &["want a number, `auto` or `all`"]);
    on_cpu(&["--tensor-split", "1,-2"], &["not negative"]);
    assert!(said(&["inspect", &model, "--fit", "--cpu", "--gpu-layers", "0"]).contains("CPU"));
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
    on("0", &["-ngl", "7"], &["--gpu-layers 7: the model has 2 layers", "0 to 3"]);
    on("0", &["--cpu-moe"], &["no experts"]);
    on("0,0", &["--tensor-split", "1,2,3"], &["3 numbers for 2 GPUs"]);
    on("0", &["--tensor-split", "0"], &["nobody a share"]);
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
    let fit = said(&["inspect", &model, "--fit", "--device", "0", "-ngl", "2", "-c", "128"]);
    assert!(fit.contains("layer 1 and the output") && fit.contains("the embedding and layer 0"), "{fit}");
    let plan = said(&["plan", &model, "--device", "0", "-ngl", "2"]);
    assert!(plan.contains("in 2 parts") && plan.contains("arrive") && plan.contains("[1: cpu]"), "{plan}");
    // What fits a limit is found by itself.
    let auto = said(&["inspect", &model, "--fit", "--device", "0", "-c", "128", "--memory-limit", "1MiB"]);
    assert!(auto.contains("CPU"), "{auto}");
}
