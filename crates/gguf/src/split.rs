//! Models split over several files: how the parts are named, and the checks that they belong together.

use std::path::{Path, PathBuf};

use crate::error::{Error, Result};
use crate::header::Header;
use crate::reader::Part;

/// The key of a part's number, from 0.
pub const KEY_NO: &str = "split.no";
/// The key of the number of parts.
pub const KEY_COUNT: &str = "split.count";
/// The key of the number of tensors in all parts.
pub const KEY_TENSORS: &str = "split.tensors.count";

/// Which part of how many a file says it is.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct Position {
    /// From 0.
    no: u64,
    count: u64,
}

/// The place of a file in a split model, or `None` if it stands alone. Tools that join parts leave a count of 0 behind.
pub(crate) fn position(header: &Header) -> Result<Option<Position>> {
    // The format stores 16 bits; more would also overflow the five digits of the name.
    let count = header.metadata.get_u32_or(KEY_COUNT, 0)?.into();
    if count <= 1 {
        return Ok(None);
    }
    if count > u16::MAX.into() {
        return Err(Error::SplitMismatch { key: KEY_COUNT, expected: u16::MAX.into(), got: count });
    }
    let no = header.metadata.get_u32(KEY_NO)?.into();
    if no >= count {
        return Err(Error::SplitMismatch { key: KEY_NO, expected: count - 1, got: no });
    }
    Ok(Some(Position { no, count }))
}

/// The name of a part (from 0) of a split model: `prefix-00001-of-00003.gguf`.
pub fn part_name(prefix: &str, no: u64, count: u64) -> String {
    format!("{prefix}-{:05}-of-{count:05}.gguf", no + 1)
}

/// Opens the other parts beside the one at hand and checks that they belong together.
pub(crate) fn open_all(position: Position, part: Part, header: Header) -> Result<Vec<(Part, Header)>> {
    let paths = part_paths(&part.path, position)
        .ok_or(Error::SplitName { part: position.no + 1, count: position.count })
        .map_err(|why| why.in_file(&part.path))?;
    let missing: Vec<PathBuf> = paths.iter().filter(|path| !path.exists()).cloned().collect();
    if !missing.is_empty() {
        return Err(Error::MissingParts { count: position.count, missing }.in_file(&part.path));
    }

    let n_tensors = header.metadata.get_u64(KEY_TENSORS).map_err(|why| why.in_file(&part.path))?;
    let mut at_hand = Some((part, header));
    let mut parts = Vec::with_capacity(paths.len());
    for (no, path) in (0..).zip(&paths) {
        let opened = match at_hand.take_if(|_| no == position.no) {
            Some(opened) => opened,
            None => Part::open(path)?,
        };
        check(&opened.1, Position { no, ..position }, n_tensors).map_err(|why| why.in_file(path))?;
        parts.push(opened);
    }

    let found = parts.iter().map(|(_, header)| header.tensors.len() as u64).sum();
    if found != n_tensors {
        let mismatch = Error::SplitMismatch { key: KEY_TENSORS, expected: found, got: n_tensors };
        return Err(mismatch.in_file(&paths[0]));
    }
    Ok(parts)
}

fn check(header: &Header, expected: Position, n_tensors: u64) -> Result<()> {
    let metadata = &header.metadata;
    for (key, expected) in [(KEY_NO, expected.no), (KEY_COUNT, expected.count), (KEY_TENSORS, n_tensors)] {
        let got = metadata.get_u64(key)?;
        if got != expected {
            return Err(Error::SplitMismatch { key, expected, got });
        }
    }
    Ok(())
}

/// The paths of all parts, or `None` where the file is not named as the part it is.
fn part_paths(path: &Path, position: Position) -> Option<Vec<PathBuf>> {
    let suffix = part_name("", position.no, position.count);
    let prefix = path.file_name()?.to_str()?.strip_suffix(&suffix)?;
    Some((0..position.count).map(|no| path.with_file_name(part_name(prefix, no, position.count))).collect())
}
