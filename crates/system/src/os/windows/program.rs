//! Programs in a job of their own: what a program starts belongs to its job, and the system ends all of it at once.

use std::io;
use std::os::windows::io::{AsRawHandle as _, FromRawHandle as _, OwnedHandle};
use std::process::{Child, Command};

use windows_sys::Win32::System::JobObjects::{
    AssignProcessToJobObject, CreateJobObjectW, JOB_OBJECT_LIMIT_KILL_ON_JOB_CLOSE,
    JOBOBJECT_EXTENDED_LIMIT_INFORMATION, JobObjectExtendedLimitInformation, SetInformationJobObject,
    TerminateJobObject,
};

use crate::os::Ended;

/// Variables of the environment that every program needs.
pub const PROGRAM_VARIABLES: &[&str] = &[
    "APPDATA",
    "COMSPEC",
    "HOMEDRIVE",
    "HOMEPATH",
    "LOCALAPPDATA",
    "PATH",
    "PATHEXT",
    "PROCESSOR_ARCHITECTURE",
    "PROGRAMDATA",
    "PROGRAMFILES",
    "SYSTEMDRIVE",
    "SYSTEMROOT",
    "TEMP",
    "TMP",
    "USERNAME",
    "USERPROFILE",
];

/// A program that ends with everything that it has started, but for what it starts in the moment before it is put into its job.
#[derive(Debug)]
pub struct Program {
    child: Child,
    job: OwnedHandle,
}

/// A job that ends with its handle, thus with this process at the latest.
fn new_job() -> io::Result<OwnedHandle> {
    // SAFETY: neither attributes nor a name are given.
    let job = unsafe { CreateJobObjectW(std::ptr::null(), std::ptr::null()) };
    if job.is_null() {
        return Err(io::Error::last_os_error());
    }
    // SAFETY: the handle was just made, and nothing else closes it.
    let job = unsafe { OwnedHandle::from_raw_handle(job) };
    // SAFETY: all of the structure's fields are numbers, for which zeros are right.
    let mut limits: JOBOBJECT_EXTENDED_LIMIT_INFORMATION = unsafe { std::mem::zeroed() };
    limits.BasicLimitInformation.LimitFlags = JOB_OBJECT_LIMIT_KILL_ON_JOB_CLOSE;
    let size = size_of_val(&limits) as u32;
    // SAFETY: the handle is open, and the system reads a structure of the kind and the size that it is told.
    let set = unsafe {
        SetInformationJobObject(
            job.as_raw_handle(),
            JobObjectExtendedLimitInformation,
            (&raw const limits).cast(),
            size,
        )
    };
    if set == 0 { Err(io::Error::last_os_error()) } else { Ok(job) }
}

impl Program {
    /// Starts a program.
    pub fn start(command: &mut Command) -> io::Result<Program> {
        let job = new_job()?;
        let mut child = command.spawn()?;
        // SAFETY: both handles are open.
        let assigned = unsafe { AssignProcessToJobObject(job.as_raw_handle(), child.as_raw_handle()) };
        // One that has ended already belongs to no job.
        if assigned == 0 && child.try_wait()?.is_none() {
            let why = io::Error::last_os_error();
            let _ = child.kill();
            let _ = child.wait();
            return Err(why);
        }
        Ok(Program { child, job })
    }

    /// The process, of which the caller may take the pipes.
    pub fn child(&mut self) -> &mut Child {
        &mut self.child
    }

    /// How it has ended, if it has. Its number goes to no other process as long as this is there.
    pub fn ended(&mut self) -> Option<Ended> {
        match self.child.try_wait() {
            Ok(status) => Some(status?.code().map_or(Ended::Unknown, Ended::Status)),
            Err(_) => Some(Ended::Unknown),
        }
    }

    /// Ends it with everything that it has started.
    pub fn end(&mut self) {
        // SAFETY: the handle is open.
        unsafe { TerminateJobObject(self.job.as_raw_handle(), 1) };
        let _ = self.child.kill();
        let _ = self.child.wait();
    }
}
