//! The header agrees with the library, and a C program that uses it compiles, links and runs.
#![allow(clippy::unwrap_used, clippy::print_stderr, reason = "a test that cannot go on should stop")]

use std::path::{Path, PathBuf};
use std::process::Command;

use kiln_engine::quantise_recipe::Recipe;
use kiln_engine::synth::{Preset, Synth};

fn here(path: &str) -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR")).join(path)
}

/// A type of Rust as C writes it.
fn in_c(rust: &str) -> &str {
    match rust.trim() {
        "" => "void",
        "*mut Model" => "kiln_model *",
        "*const c_char" => "const char *",
        "*mut c_char" => "char *",
        "*mut c_void" => "void *",
        "*mut f32" => "float *",
        "*mut u32" => "uint32_t *",
        "*const u32" => "const uint32_t *",
        "Piece" => "kiln_piece",
        "c_int" => "int",
        "u64" => "uint64_t",
        "i64" => "int64_t",
        "usize" => "size_t",
        other => panic!("the type {other:?} has no word in C here"),
    }
}

/// `int kiln_cancel(kiln_model *, uint64_t)` of every function of the library.
fn of_library(source: &str) -> Vec<String> {
    let functions = source.split("extern \"C\" fn ").skip(1).filter(|rest| rest.starts_with("kiln_"));
    let mut found: Vec<String> = functions
        .map(|rest| {
            let (name, rest) = rest.split_once('(').unwrap();
            let (arguments, rest) = rest.split_once(')').unwrap();
            let result = rest.split_once('{').unwrap().0.trim().trim_start_matches("->");
            let types = arguments.split(',').filter(|one| !one.trim().is_empty());
            let types: Vec<&str> = types.map(|one| in_c(one.split_once(':').unwrap().1)).collect();
            let types = if types.is_empty() { "void".to_owned() } else { types.join(", ") };
            format!("{} {name}({types})", in_c(result)).replace("* ", "*")
        })
        .collect();
    found.sort();
    found
}

/// The same of every declaration of the header.
fn of_header(header: &str) -> Vec<String> {
    let without_comments: String =
        header.split("/*").map(|part| part.split_once("*/").map_or(part, |(_, code)| code)).collect();
    let lines = without_comments.lines().filter(|line| !line.starts_with(['#', 't'])).collect::<Vec<_>>().join(" ");
    let mut found: Vec<String> = lines
        .split(';')
        .filter(|one| one.contains("kiln_") && one.contains('('))
        .map(|one| {
            let one = one.trim().rsplit('{').next().unwrap().trim();
            let (before, arguments) = one.split_once('(').unwrap();
            let names = arguments.trim_end_matches(')').split(',').map(|one| {
                let one = one.trim();
                if one == "void" {
                    return one.to_owned();
                }
                one.trim_end_matches(|c: char| c.is_ascii_alphanumeric() || c == '_').trim().to_owned()
            });
            format!("{before}({})", names.collect::<Vec<_>>().join(", "))
        })
        .collect();
    found.sort();
    found
}

#[test]
fn header_and_library_agree() {
    let source = std::fs::read_to_string(here("src/lib.rs")).unwrap();
    let header = std::fs::read_to_string(here("include/kiln.h")).unwrap();
    let library = of_library(&source);
    assert!(library.len() >= 10, "{library:?}");
    assert_eq!(library, of_header(&header));
    let changed = header.replace("uint64_t id, const char *request", "int id, const char *request");
    assert_ne!(library, of_header(&changed), "the comparison sees a changed type");
}

/// The folder with libkiln.so.
fn library_folder() -> PathBuf {
    // Not the running executable: on a software GPU that is the dynamic loader.
    let program = PathBuf::from(std::env::args_os().next().unwrap()).canonicalize().unwrap();
    let deps = program.parent().unwrap().to_owned();
    let folders = [deps.clone(), deps.parent().unwrap().to_owned()];
    let found = folders.into_iter().find(|folder| folder.join("libkiln.so").exists());
    found.expect("cargo builds libkiln.so for the test")
}

#[test]
fn the_example_compiles_and_runs() {
    let folder = tempfile::tempdir().unwrap();
    let model = folder.path().join("tiny.gguf");
    let synth = Synth::new(Preset::from_name("tiny-llama").unwrap(), Recipe::from_name("Q8_0").unwrap(), 1);
    std::fs::write(&model, synth.to_bytes().unwrap()).unwrap();
    let (program, libraries) = (folder.path().join("chat"), library_folder());
    let compiler = std::env::var("CC").unwrap_or_else(|_| "cc".to_owned());
    let compiled = Command::new(compiler)
        .args(["-std=c11", "-Wall", "-Wextra", "-Werror", "-I"])
        .arg(here("include"))
        .arg(here("examples/chat.c"))
        .arg("-L")
        .arg(&libraries)
        .args(["-lkiln", "-o"])
        .arg(&program)
        .output()
        .unwrap();
    assert!(compiled.status.success(), "{}", String::from_utf8_lossy(&compiled.stderr));
    let options = r#"{"device": "cpu", "context": 256, "parallel": 2, "chat_template": "chatml"}"#;
    let ran = Command::new(&program)
        .arg(&model)
        .args(["What is a kiln?", options])
        .env("LD_LIBRARY_PATH", &libraries)
        .output()
        .unwrap();
    let (out, err) = (String::from_utf8_lossy(&ran.stdout), String::from_utf8_lossy(&ran.stderr));
    assert!(ran.status.success(), "{out}\n{err}");
    assert!(out.contains("\"type\":\"end\",\"finish_reason\":\"length\""), "{out}");
    assert!(out.contains("Hello: ") && out.contains("tokens of 256"), "{out}");
    let missing = Command::new(&program).arg("no-such.gguf").env("LD_LIBRARY_PATH", &libraries).output().unwrap();
    let err = String::from_utf8_lossy(&missing.stderr);
    assert!(!missing.status.success() && err.contains("open: ") && err.contains("no-such.gguf"), "{err}");
}

/// The program of the book, which is to be pasted.
#[test]
fn the_program_of_the_book_compiles() {
    let page = std::fs::read_to_string(here("../../docs/c.md")).unwrap();
    let programs: Vec<&str> =
        page.split("```c\n").skip(1).filter_map(|rest| rest.split_once("```")).map(|(code, _)| code).collect();
    assert_eq!(programs.len(), 1, "each program of the page is compiled");
    let folder = tempfile::tempdir().unwrap();
    let file = folder.path().join("book.c");
    std::fs::write(&file, programs[0]).unwrap();
    let compiler = std::env::var("CC").unwrap_or_else(|_| "cc".to_owned());
    // `show` has no use for what it is handed, and says so by no word.
    let flags = ["-std=c11", "-Wall", "-Wextra", "-Wno-unused-parameter", "-Werror", "-fsyntax-only", "-I"];
    let compiled = Command::new(compiler).args(flags).arg(here("include")).arg(&file).output().unwrap();
    assert!(compiled.status.success(), "{}", String::from_utf8_lossy(&compiled.stderr));
}
