//! Why a model cannot be had.

use std::io;
use std::path::PathBuf;

use kiln_system::files::WriteError;
use kiln_system::memory::size;

use crate::digest::Digest;

/// As usual.
pub type Result<T, E = Error> = std::result::Result<T, E>;

/// Why a model cannot be had. Every message ends with what to do.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
#[allow(missing_docs, reason = "the message of each variant says what its fields are")]
pub enum Error {
    #[error(
        "{name:?} names no model: {why}\n\
         hint: a file, a name that `kiln list` shows, hf:OWNER/REPO[:QUANT], ollama:NAME[:TAG], https://HOST/FILE.gguf or pypi:PACKAGE"
    )]
    Name { name: String, why: String },
    #[error("{name:?} is neither a file nor a model of the store{}\nhint: {hint}", near(similar))]
    Unknown { name: String, similar: Vec<String>, hint: String },
    #[error("{name:?} is the name of several models: {}\nhint: name one by its source", sources.join(", "))]
    Ambiguous { name: String, sources: Vec<String> },
    #[error("{what}\nhint: {hint}")]
    Refused { what: String, hint: String },
    #[error("{} is a file outside the store\nhint: delete it yourself; `kiln inspect` shows what is in it", path.display())]
    NotStored { path: PathBuf },
    #[error(
        "the record of {name} names {}, which is no model file of the store\n\
         hint: Kiln does not touch that file; remove the record {} and pull the model again",
        path.display(), record.display()
    )]
    Outside { name: String, path: PathBuf, record: PathBuf },
    #[error(
        "{name}: SHA-256 mismatch: expected {want}, the file has {got}. Nothing was stored.\n\
         hint: check the hash that you expect; if it is right, the source has another file"
    )]
    Mismatch { name: String, want: Digest, got: Digest },
    #[error(
        "{name} is no whole GGUF file: {why}\nNothing was stored.\nhint: open the address in a browser, or try again later"
    )]
    NotGguf { name: String, why: String },
    #[error("{url} answered with status {status}{}", status_hint(*status))]
    Status { url: String, status: u16 },
    #[error("{host} cannot be reached: {why}\nhint: is there a network? HTTPS_PROXY and SSL_CERT_FILE are honoured")]
    Unreachable { host: String, why: String },
    #[error(
        "{name} broke off at {} of {}: {why}\nhint: {}",
        size(*done), size(*total), broken_hint(*done)
    )]
    BrokenOff { name: String, done: u64, total: u64, why: String },
    #[error("{name} came damaged: {why}\nhint: nothing of it was kept; try again")]
    Damaged { name: String, why: String },
    #[error("{host} said something that makes no sense: {why}\nhint: is it the right kind of registry?")]
    Nonsense { host: String, why: String },
    #[error(
        "not enough disk space: {} has {} free, and {name} needs {}\nhint: free some space, or name another folder ({variable})",
        folder.display(), size(*free), size(*needed)
    )]
    NoRoom { name: String, folder: PathBuf, free: u64, needed: u64, variable: &'static str },
    #[error("disk full: {} has no space left for {name}\nhint: free some space, or name another folder (KILN_MODELS)", folder.display())]
    DiskFull { name: String, folder: PathBuf },
    #[error("{name} is not on this machine, and HF_HUB_OFFLINE is set\nhint: unset it to fetch the model")]
    Offline { name: String },
    #[error("there is no home folder\nhint: name a folder for models with KILN_MODELS")]
    NoHome,
    #[error("{}: {why}", path.display())]
    Io { path: PathBuf, why: io::Error },
    #[error(transparent)]
    Write(#[from] WriteError),
}

impl Error {
    pub(crate) fn io(path: impl Into<PathBuf>) -> impl FnOnce(io::Error) -> Error {
        let path = path.into();
        move |why| Error::Io { path, why }
    }

    /// What happened, without the hint.
    pub(crate) fn brief(&self) -> String {
        self.to_string().lines().next().unwrap_or_default().to_owned()
    }
}

fn near(similar: &[String]) -> String {
    if similar.is_empty() { String::new() } else { format!(" (there is {})", similar.join(", ")) }
}

/// A download without a single piece begins again.
fn broken_hint(done: u64) -> &'static str {
    if done > 0 { "the same command resumes there" } else { "nothing was kept; try again" }
}

fn status_hint(status: u16) -> &'static str {
    match status {
        401 | 403 => "\nhint: it wants a key that Kiln does not have",
        404 | 410 => "\nhint: is the name spelled right?",
        416 => "\nhint: the file at this address is empty",
        429 => "\nhint: it wants fewer requests; wait a while",
        500..=599 => "\nhint: the server has a problem of its own; try again later",
        _ => "",
    }
}
