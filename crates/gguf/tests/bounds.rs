//! Hostile files cost little time and memory, and real vocabularies load fast.

#![allow(clippy::unwrap_used, reason = "a panic is how a test fails, in its helping functions too")]

use std::time::{Duration, Instant};

use kiln_gguf::{Header, Metadata, Strings, Writer};

/// Small files whose counts and lengths claim the world.
fn hostile_files() -> Vec<Vec<u8>> {
    let header = |n_tensors: u64, n_entries: u64, rest: &[&[u8]]| {
        let counts = [n_tensors.to_le_bytes(), n_entries.to_le_bytes()].concat();
        [b"GGUF\x03\0\0\0", counts.as_slice(), &rest.concat()].concat()
    };
    let key = [&3_u64.to_le_bytes()[..], b"key"].concat();
    let mut files = vec![];
    for claim in [1 << 24, 1 << 32, 1 << 60, u64::MAX] {
        let claimed = &claim.to_le_bytes();
        files.push(header(0, claim, &[&[0; 19]]));
        files.push(header(claim, 0, &[&[0; 19]]));
        files.push(header(claim, 1, &[&key, &[0, 0, 0, 0, 1]]));
        files.push(header(0, 1, &[&key, &[8, 0, 0, 0], claimed]));
        files.push(header(0, 1, &[claimed, &[0; 11]]));
        for element in 0..13 {
            files.push(header(0, 1, &[&key, &[9, 0, 0, 0, element, 0, 0, 0], claimed]));
        }
    }
    assert_eq!(files[0].len(), 43);
    files
}

fn refuse_all() {
    for file in hostile_files() {
        let start = Instant::now();
        let error = Header::parse(&file).expect_err("a hostile file should be refused");
        assert!(start.elapsed() < Duration::from_millis(100), "{:?} for {error}", start.elapsed());
    }
}

/// Runs itself a second time with a limit on writable memory: a larger allocation, touched or not, would abort that run.
#[test]
fn hostile_files_are_refused_within_50_mb_and_100_ms() {
    const CHILD: &str = "KILN_GGUF_BOUNDS_CHILD";
    if std::env::var_os(CHILD).is_some() {
        return refuse_all();
    }
    let output = std::process::Command::new("sh")
        .args(["-c", "ulimit -d 51200 && exec \"$0\" --exact hostile_files_are_refused_within_50_mb_and_100_ms"])
        // Not `current_exe`: under `scripts/software-gpu` that is the dynamic loader.
        .arg(std::env::args().next().unwrap())
        .env(CHILD, "1")
        .output()
        .unwrap();
    assert!(output.status.success(), "{output:?}");
    assert!(String::from_utf8_lossy(&output.stdout).contains("1 passed"), "{output:?}");
}

#[test]
fn a_vocabulary_of_262144_tokens_loads_fast() {
    let mut metadata = Metadata::new();
    metadata.set("tokenizer.ggml.tokens", (0..262_144).map(|id| format!("token{id}")).collect::<Strings>());
    metadata.set("tokenizer.ggml.merges", (0..262_144).map(|id| format!("to ken{id}")).collect::<Strings>());
    metadata.set("tokenizer.ggml.scores", vec![0.5_f32; 262_144]);
    metadata.set("tokenizer.ggml.token_type", vec![1_i32; 262_144]);
    let bytes = Writer::new(metadata).to_bytes().unwrap();
    let start = Instant::now();
    let header = Header::parse(&bytes).unwrap();
    let elapsed = start.elapsed();
    println!("{} bytes parsed in {elapsed:?}", bytes.len());
    let tokens = header.metadata.get_str_array("tokenizer.ggml.tokens").unwrap();
    assert_eq!((tokens.len(), tokens.get(262_143)), (262_144, Some(&b"token262143"[..])));
    // Generous: this also runs without optimisation, on busy machines. Optimised it is some milliseconds.
    assert!(elapsed < Duration::from_millis(500), "{elapsed:?}");
}
