//! Why a model cannot be had.

use std::io;
use std::path::PathBuf;

use kiln_system::files::WriteError;
use kiln_system::memory::size;

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
    #[error("{url} answered with status {status}{}", status_hint(*status))]
    Status { url: String, status: u16 },
    #[error("{host} cannot be reached: {why}\nhint: is there a network? HTTPS_PROXY and SSL_CERT_FILE are honoured")]
    Unreachable { host: String, why: String },
    #[error(
        "{name} broke off at {} of {}: {why}\nhint: the same command goes on from there",
        size(*done), size(*total)
    )]
    BrokenOff { name: String, done: u64, total: u64, why: String },
    #[error("{name} came damaged: {why}\nhint: nothing of it was kept; try again")]
    Damaged { name: String, why: String },
    #[error("{host} said something that makes no sense: {why}\nhint: is it the right kind of registry?")]
    Nonsense { host: String, why: String },
    #[error(
        "{} has {} of room, and {name} needs {}\nhint: make room, or name another folder ({variable})",
        folder.display(), size(*free), size(*needed)
    )]
    NoRoom { name: String, folder: PathBuf, free: u64, needed: u64, variable: &'static str },
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
}

fn near(similar: &[String]) -> String {
    if similar.is_empty() { String::new() } else { format!(" (there is {})", similar.join(", ")) }
}

fn status_hint(status: u16) -> &'static str {
    match status {
        401 | 403 => "\nhint: it wants a key that Kiln does not have",
        404 | 410 => "\nhint: is the name spelled right?",
        429 => "\nhint: it wants fewer requests; wait a while",
        _ => "",
    }
}
