//! Programs in a process group of their own.

use std::io;
use std::os::unix::process::{CommandExt as _, ExitStatusExt as _};
use std::process::{Child, Command, ExitStatus};

use rustix::process::{Pid, Signal, WaitId, WaitIdOptions, kill_process_group, waitid};

use crate::os::Ended;

/// Variables of the environment that every program needs.
pub const PROGRAM_VARIABLES: &[&str] = &[
    "HOME",
    "LANG",
    "LC_ALL",
    "LOGNAME",
    "PATH",
    "SHELL",
    "TERM",
    "TMPDIR",
    "TZ",
    "USER",
    "XDG_CACHE_HOME",
    "XDG_RUNTIME_DIR",
];

/// A program that ends with everything that it has started, unless that has left its process group.
#[derive(Debug)]
pub struct Program {
    child: Child,
    /// How it ended, once the system has forgotten it and may give its number to others.
    over: Option<ExitStatus>,
}

impl Program {
    /// Starts a program.
    pub fn start(command: &mut Command) -> io::Result<Program> {
        Ok(Program { child: command.process_group(0).spawn()?, over: None })
    }

    /// The process, of which the caller may take the pipes.
    pub fn child(&mut self) -> &mut Child {
        &mut self.child
    }

    /// How it has ended, if it has. It stays with the system until [`Program::end`], so that its number goes to no other process yet.
    pub fn ended(&mut self) -> Option<Ended> {
        if let Some(status) = self.over {
            return Some(
                status.code().map(Ended::Status).or(status.signal().map(Ended::Signal)).unwrap_or(Ended::Unknown),
            );
        }
        let options = WaitIdOptions::EXITED | WaitIdOptions::NOHANG | WaitIdOptions::NOWAIT;
        match waitid(WaitId::Pid(self.pid()?), options) {
            Ok(status) => {
                let status = status?;
                let signal = || status.terminating_signal().map(Ended::Signal);
                Some(status.exit_status().map(Ended::Status).or_else(signal).unwrap_or(Ended::Unknown))
            }
            // Somebody has waited for it.
            Err(_) => Some(Ended::Unknown),
        }
    }

    /// Ends it with everything that it has started.
    pub fn end(&mut self) {
        if self.over.is_some() {
            return;
        }
        if let Some(group) = self.pid() {
            // The group is gone where the program has ended with all of it.
            let _ = kill_process_group(group, Signal::KILL);
        }
        let _ = self.child.kill();
        self.over = self.child.wait().ok();
    }

    fn pid(&self) -> Option<Pid> {
        i32::try_from(self.child.id()).ok().and_then(Pid::from_raw)
    }
}
