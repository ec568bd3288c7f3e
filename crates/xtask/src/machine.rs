//! The machines that packages are made for, and what each kind of package calls them.

use std::path::Path;
use std::process::Command;

use crate::project::cargo;

/// A machine with Linux and glibc.
#[derive(Clone, Copy, Debug, PartialEq, Eq, clap::ValueEnum)]
pub(crate) enum Machine {
    /// Of Intel and AMD.
    #[value(name = "x86-64", alias = "x86_64", alias = "amd64")]
    X86,
    /// 64-bit ARM.
    #[value(name = "arm64", alias = "aarch64")]
    Arm,
}

impl Machine {
    /// All of them.
    pub(crate) const ALL: [Machine; 2] = [Machine::X86, Machine::Arm];

    /// The one that this program runs on, if it is one of them.
    pub(crate) fn own() -> Option<Machine> {
        Machine::ALL.into_iter().find(|machine| machine.uname() == std::env::consts::ARCH)
    }

    /// What Rust calls it.
    pub(crate) fn target(self) -> &'static str {
        match self {
            Machine::X86 => "x86_64-unknown-linux-gnu",
            Machine::Arm => "aarch64-unknown-linux-gnu",
        }
    }

    /// What `uname -m`, rpm and Python call it.
    pub(crate) fn uname(self) -> &'static str {
        match self {
            Machine::X86 => "x86_64",
            Machine::Arm => "aarch64",
        }
    }

    /// What Debian calls it.
    pub(crate) fn debian(self) -> &'static str {
        match self {
            Machine::X86 => "amd64",
            Machine::Arm => "arm64",
        }
    }

    /// What Node calls it.
    pub(crate) fn node(self) -> &'static str {
        match self {
            Machine::X86 => "x64",
            Machine::Arm => "arm64",
        }
    }

    /// What `readelf` calls it.
    pub(crate) fn elf(self) -> &'static str {
        match self {
            Machine::X86 => "X86-64",
            Machine::Arm => "AArch64",
        }
    }

    /// What people call it.
    pub(crate) fn words(self) -> &'static str {
        match self {
            Machine::X86 => "x86-64",
            Machine::Arm => "64-bit ARM",
        }
    }

    /// Whether its programs run here without an emulator, and are built by this machine's own compilers.
    fn is_own(self) -> bool {
        Machine::own() == Some(self)
    }

    /// Cargo for this machine, and the folder in which it puts what it builds.
    pub(crate) fn cargo(self, root: &Path, target_folder: &Path) -> (Command, std::path::PathBuf) {
        if self.is_own() {
            return (Command::new(cargo()), target_folder.to_owned());
        }
        let mut command = Command::new(root.join("scripts/test-arm"));
        let folder = target_folder.join("arm");
        command.arg("cargo").env("KILN_ARM_TARGET_DIR", &folder);
        (command, folder)
    }

    /// A program that was built for this machine.
    pub(crate) fn run(self, root: &Path, program: &Path) -> Command {
        if self.is_own() {
            return Command::new(program);
        }
        let mut command = Command::new(root.join("scripts/test-arm"));
        command.args(["run", "max"]).arg(program);
        command
    }

    /// The program that takes names and debugging information out of binaries.
    pub(crate) fn strip(self, root: &Path) -> Command {
        if self.is_own() {
            return Command::new("strip");
        }
        let mut command = Command::new(root.join("scripts/test-arm"));
        command.args(["tool", "strip"]);
        command
    }
}
