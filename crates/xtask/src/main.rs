//! Chores of the project that are more than a command of cargo: `cargo xtask check`, `test`, `docs` and `release`.
//!
//! The alias in `.cargo/config.toml` builds this without features, which takes a second. `release` needs crates for archives, so the small
//! program builds and runs the large one.

#[cfg(feature = "release")]
mod archive;
mod chores;
#[cfg(feature = "release")]
mod deb;
#[cfg(feature = "release")]
mod elf;
#[cfg(feature = "release")]
mod licences;
#[cfg(feature = "release")]
mod machine;
#[cfg(feature = "release")]
mod npm;
#[cfg(feature = "release")]
mod project;
#[cfg(feature = "release")]
mod release;
#[cfg(feature = "rpm")]
mod rpm_package;
#[cfg(feature = "release")]
mod sbom;
#[cfg(feature = "release")]
mod wheel;

use std::io::Write as _;
use std::process::ExitCode;

fn main() -> ExitCode {
    let words: Vec<String> = std::env::args().skip(1).collect();
    let words: Vec<&str> = words.iter().map(String::as_str).collect();
    if words.first() == Some(&"release") {
        return release(&words);
    }
    chores::run(&words).unwrap_or_else(|| {
        say(chores::USAGE.trim_end());
        ExitCode::from(2)
    })
}

fn say(line: &str) {
    let _ = writeln!(std::io::stderr(), "{line}");
}

#[cfg(feature = "release")]
fn release(_words: &[&str]) -> ExitCode {
    use clap::Parser as _;

    /// Chores of the project.
    #[derive(clap::Parser)]
    #[command(name = "cargo xtask")]
    enum Chore {
        /// Build Kiln, and make its packages for Linux
        Release(release::Arguments),
    }

    let Chore::Release(arguments) = Chore::parse();
    match release::run(&arguments) {
        Ok(()) => ExitCode::SUCCESS,
        Err(why) => {
            say(&format!("error: {why:#}"));
            ExitCode::FAILURE
        }
    }
}

/// Builds this program with all it needs for packages, and hands it the command line.
#[cfg(not(feature = "release"))]
fn release(words: &[&str]) -> ExitCode {
    let cargo = std::env::var_os("CARGO").unwrap_or_else(|| "cargo".into());
    let mut command = std::process::Command::new(cargo);
    command.args(["run", "--quiet", "--package", "xtask", "--features", "rpm", "--"]).args(words);
    match command.status() {
        Ok(status) => ExitCode::from(u8::try_from(status.code().unwrap_or(1)).unwrap_or(1)),
        Err(why) => {
            say(&format!("error: cargo does not start: {why}"));
            ExitCode::FAILURE
        }
    }
}
