//! Chores of the project that are more than a command of cargo: `cargo xtask release` makes the packages of a release.

mod archive;
mod deb;
mod elf;
mod licences;
mod npm;
mod project;
mod release;
#[cfg(feature = "rpm")]
mod rpm_package;
mod sbom;
mod wheel;

use std::io::Write as _;
use std::process::ExitCode;

use clap::Parser as _;

/// Chores of the project.
#[derive(clap::Parser)]
#[command(name = "cargo xtask")]
enum Chore {
    /// Build Kiln, and make its packages for Linux on x86-64
    Release(release::Arguments),
}

fn main() -> ExitCode {
    let Chore::Release(arguments) = Chore::parse();
    match release::run(&arguments) {
        Ok(()) => ExitCode::SUCCESS,
        Err(why) => {
            let _ = writeln!(std::io::stderr(), "error: {why:#}");
            ExitCode::FAILURE
        }
    }
}
