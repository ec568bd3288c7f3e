//! What can be wrong with a GGUF file. Every message says where, by name and byte, and what the user can do about it.
//! Causes are part of the message and not of the `source` chain, so that nothing is printed twice.

use std::path::PathBuf;

use kiln_system::text::shown;

use crate::TensorType;

/// The result of everything that touches a file.
pub type Result<T, E = Error> = std::result::Result<T, E>;

/// What can be wrong with a GGUF file, or with what one asks of it.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
#[allow(missing_docs, reason = "the message of each variant says what its fields are")]
pub enum Error {
    #[error("cannot {action} {}: {why}", path.display())]
    Io { action: &'static str, path: PathBuf, why: std::io::Error },
    #[error(transparent)]
    Write(#[from] kiln_system::files::WriteError),
    #[error("{}: {why}", path.display())]
    InFile { path: PathBuf, why: Box<Error> },

    #[error("the file is empty: a download that failed leaves such files; fetch it again")]
    Empty,
    #[error("not a GGUF file: it starts with \"{start}\" instead of \"GGUF\"; {hint}", start = shown(start))]
    Magic { start: String, hint: &'static str },
    #[error(
        "GGUF version 1 is not supported (byte 4): its lengths have 32 bits; convert the model again with a newer converter"
    )]
    Version1,
    #[error("big-endian GGUF (version {version}, byte 4) is not supported; convert the model again as little-endian")]
    BigEndian { version: u32 },
    #[error("GGUF version {version} is not known (byte 4; versions 2 and 3 are); a newer Kiln may know it")]
    Version { version: u32 },

    #[error(
        "the file ends inside {what} of {owner}: {needed} bytes needed at byte {offset}, {left} left; it is cut short or \
         damaged: fetch it again", owner = shown(owner))]
    Truncated { what: &'static str, owner: String, offset: u64, needed: u64, left: u64 },
    #[error(
        "{owner} claims {count} {what} at byte {offset}, but the {left} bytes after it hold at most {most}; the file is cut \
         short or damaged: fetch it again", owner = shown(owner))]
    TooMany { what: &'static str, owner: String, offset: u64, count: u64, left: u64, most: u64 },
    #[error("the {what} at byte {offset} has {len} bytes, the most is {most}; the file is damaged: fetch it again")]
    NameTooLong { what: &'static str, offset: u64, len: u64, most: u64 },
    #[error("the {what} at byte {offset} is not UTF-8 (\"{text}\"); the file is damaged: fetch or convert it again", text = shown(text))]
    NameNotUtf8 { what: &'static str, offset: u64, text: String },

    #[error("metadata key `{key}` occurs a second time at byte {offset}; convert the model again", key = shown(key))]
    DuplicateKey { key: String, offset: u64 },
    #[error(
        "metadata key `{key}` has unknown value type {id} at byte {offset}; the file is damaged or newer than Kiln", key = shown(key))]
    ValueType { key: String, offset: u64, id: u32 },
    #[error(
        "metadata key `{key}` holds {value} at byte {offset} where a bool (0 or 1) belongs; convert the model again", key = shown(key))]
    NotBool { key: String, offset: u64, value: u8 },
    #[error("metadata key `{key}` nests arrays deeper than {most} at byte {offset}; convert the model again", key = shown(key))]
    TooDeep { key: String, offset: u64, most: usize },
    #[error(
        "metadata key `general.alignment` is {value}; a power of two from {least} to {most} belongs there: convert the model \
         again"
    )]
    Alignment { value: u64, least: u64, most: u64 },

    #[error("metadata key `{key}` is missing; the file is not a complete model of its kind: convert it again", key = shown(key))]
    MissingKey { key: String },
    #[error("metadata key `{key}` should be {expected} but is {got}; convert the model again", key = shown(key), got = shown(got))]
    WrongType { key: String, expected: &'static str, got: String },
    #[error("metadata key `{key}` has {got} entries where {expected} belong; convert the model again", key = shown(key))]
    WrongLength { key: String, expected: usize, got: usize },

    #[error("tensor `{name}` has unknown type id {id} (byte {offset}); it was removed from GGUF or is newer than Kiln", name = shown(name))]
    TensorType { name: String, offset: u64, id: u32 },
    #[error("tensor `{name}` at byte {offset}: {why}; the file is damaged: fetch or convert it again", name = shown(name))]
    TensorShape { name: String, offset: u64, why: ShapeError },
    #[error("tensor `{name}` occurs a second time at byte {offset}; convert the model again", name = shown(name))]
    DuplicateTensor { name: String, offset: u64 },
    #[error("tensor `{name}` starts at data offset {start} (byte {offset}), no multiple of the alignment {alignment}", name = shown(name))]
    TensorMisaligned { name: String, offset: u64, start: u64, alignment: u64 },
    #[error(
        "tensor `{name}` (byte {offset}) claims {bytes} bytes at data offset {start}, past the end of the file ({file_bytes} \
         bytes); the file is cut short or damaged: fetch it again", name = shown(name))]
    TensorOutOfFile { name: String, offset: u64, start: u64, bytes: u64, file_bytes: u64 },
    #[error(
        "tensors `{first}` and `{second}` overlap at byte {offset}; the file is damaged: fetch or convert it again", first = shown(first), second = shown(second))]
    TensorOverlap { first: String, second: String, offset: u64 },
    #[error("tensor `{name}` is missing; the file is not a complete model of its kind: convert it again", name = shown(name))]
    MissingTensor { name: String },

    #[error(
        "this is part {part} of {count}, but its file name does not end in `-{part:05}-of-{count:05}.gguf`, so the other \
         parts cannot be found; give it its name back"
    )]
    SplitName { part: u64, count: u64 },
    #[error("{} of the model's {count} parts are missing: {}; put them beside it", missing.len(), list(missing))]
    MissingParts { count: u64, missing: Vec<PathBuf> },
    #[error("`{key}` is {got} where {expected} belongs; the parts are of different models: fetch them again")]
    SplitMismatch { key: &'static str, expected: u64, got: u64 },

    #[error("cannot write tensor `{name}`: {why}", name = shown(name))]
    WriteShape { name: String, why: ShapeError },
    #[error("cannot write {what} `{name}` twice", name = shown(name))]
    WriteTwice { what: &'static str, name: String },
    #[error("cannot write the {what} `{name}`: it has {len} bytes, the most is {most}", name = shown(name))]
    WriteName { what: &'static str, name: String, len: usize, most: u64 },
    #[error("tensor `{name}` has {expected} bytes, but {got} were given", name = shown(name))]
    WriteLength { name: String, expected: usize, got: usize },
    #[error("tensor `{expected}` is next to be written, not `{got}`", expected = shown(expected), got = shown(got))]
    WriteOrder { expected: String, got: String },
}

/// Why a tensor of this type cannot have this shape.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
#[allow(missing_docs, reason = "the message of each variant says what its fields are")]
pub enum ShapeError {
    #[error("it has {n_dims} dimensions, 1 to 4 are possible")]
    Dims { n_dims: u64 },
    #[error("dimension {dim} is 0")]
    Zero { dim: usize },
    #[error("its size with shape {shape:?} does not fit 63 bits")]
    TooLarge { shape: Vec<u64> },
    #[error("its rows of {len} elements are no whole number of {ty} blocks of {block}")]
    Block { ty: TensorType, len: u64, block: usize },
    #[error("files hold no {ty}, which only devices know; use {}", ty.base())]
    Packed { ty: TensorType },
}

impl Error {
    pub(crate) fn in_file(self, path: &std::path::Path) -> Error {
        Error::InFile { path: path.to_owned(), why: Box::new(self) }
    }
}

/// The first few paths; a hostile part count must not make a message of megabytes.
fn list(paths: &[PathBuf]) -> String {
    const SHOWN: usize = 8;
    let mut text = paths.iter().take(SHOWN).map(|path| path.display().to_string()).collect::<Vec<_>>().join(", ");
    if paths.len() > SHOWN {
        text.push_str(&format!(" and {} more", paths.len() - SHOWN));
    }
    text
}
