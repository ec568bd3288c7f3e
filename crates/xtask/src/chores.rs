//! Chores that call cargo and the scripts: `check`, `test`, `docs`. They need nothing but the standard library, so that
//! `cargo xtask check` does not first build crates that make packages.

use std::path::Path;
use std::process::{Command, ExitCode};
use std::time::Instant;

use crate::say;

/// What `cargo xtask` without a chore prints.
pub(crate) const USAGE: &str = "\
Chores of the project.

Usage: cargo xtask CHORE

  check              formatting, lints, the tidy tests of the repository: before every commit
  test               `check` and all tests, with caches as they are: some minutes
  test --full        what continuous integration runs: empty caches, every kernel on the software GPU, clients, fuzzing
  test --release     the same, then what needs a network or an hour: frameworks, the page, 64-bit ARM, deployment files
  docs [serve]       tables, charts and drawings, the book (target/book), the crates' documentation (target/doc)
  release            build Kiln and make its packages; `cargo xtask release --help` has its flags
";

/// A command line with the variables that it wants.
type Step = (&'static [(&'static str, &'static str)], &'static [&'static str]);

const CHECK: &[Step] = &[
    (&[], &["cargo", "fmt", "--all", "--check"]),
    (&[], &["cargo", "clippy", "--workspace", "--all-targets", "--", "-D", "warnings"]),
    (&[], &["cargo", "test", "--quiet", "-p", "kiln", "--test", "tidy", "--test", "book"]),
];
const DOCS: &[Step] = &[
    (&[], &["scripts/docs/results"]),
    (&[], &["scripts/docs/drawings"]),
    (&[], &["scripts/docs/book"]),
    (&[("RUSTDOCFLAGS", "-D warnings")], &["cargo", "doc", "--workspace", "--no-deps"]),
];

/// Runs a chore; `None` where its name or its flags are unknown.
pub(crate) fn run(words: &[&str]) -> Option<ExitCode> {
    let steps: &[Step] = match words {
        ["check"] => CHECK,
        ["test"] => &[(&[], &["scripts/test", "--quick"])],
        ["test", "--full"] => &[(&[], &["scripts/test"])],
        ["test", "--release"] => &[(&[], &["scripts/test", "--release"])],
        ["docs"] => DOCS,
        ["docs", "serve"] => &[(&[], &["scripts/docs/book", "serve"])],
        ["help" | "-h" | "--help"] => {
            say(USAGE.trim_end());
            return Some(ExitCode::SUCCESS);
        }
        _ => return None,
    };
    Some(if steps.iter().all(step) { ExitCode::SUCCESS } else { ExitCode::FAILURE })
}

/// Runs a command in the root of the repository, and tells what it was and how long it took.
fn step((variables, words): &Step) -> bool {
    let line = words.join(" ");
    say(&format!("== {line}"));
    let began = Instant::now();
    let root = Path::new(env!("CARGO_MANIFEST_DIR")).join("../..");
    // A relative program would be looked for in the caller's folder.
    let program = if words[0].contains('/') { root.join(words[0]) } else { words[0].into() };
    let mut command = Command::new(program);
    command.args(&words[1..]).envs(variables.iter().copied()).current_dir(&root);
    match command.status() {
        Ok(status) if status.success() => {
            say(&format!("   {} s", began.elapsed().as_secs()));
            true
        }
        Ok(status) => {
            say(&format!("error: {line}: {status}"));
            false
        }
        Err(why) => {
            say(&format!("error: {line}: {why}"));
            false
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn unknown_chores_are_refused() {
        for words in [&["tests"][..], &["test", "--quick"], &["check", "now"], &[]] {
            assert!(run(words).is_none(), "{words:?}");
        }
    }

    #[test]
    fn programs_of_the_chores_exist() {
        let root = Path::new(env!("CARGO_MANIFEST_DIR")).join("../..");
        for (_, words) in CHECK.iter().chain(DOCS) {
            assert!(words[0] == "cargo" || root.join(words[0]).exists(), "{words:?}");
        }
    }
}
