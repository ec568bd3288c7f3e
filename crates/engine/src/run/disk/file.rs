//! The files of the disk tier. Little endian: magic `[8]`, number of bytes `u64`, the bytes, and a checksum `[32]` that is keyed by
//! the folder's secret and covers the file's name: a file of another installation, or under another name, is not taken.

use std::fs::File;
use std::io::{Read as _, Write as _};
use std::path::Path;

use kiln_system::files::{Output, Overwrite, WriteError};
use sha2::{Digest as _, Sha256};

const MAGIC: &[u8; 8] = b"KILNKV01";
/// Bytes beside the contents.
const FRAME: usize = 8 + 8 + 32;

/// Why a file gives nothing.
#[derive(Debug)]
pub(super) enum Unreadable {
    /// It is not there.
    Gone,
    /// It cannot be read.
    Io(std::io::Error),
    /// It holds something else.
    Damaged(&'static str),
}

/// Bytes of a file with contents of this many bytes.
pub(super) fn file_bytes(contents: usize) -> u64 {
    (contents + FRAME) as u64
}

fn checksum(key: &[u8; 32], name: &str, contents: &[u8]) -> [u8; 32] {
    let inner = Sha256::new_with_prefix(key)
        .chain_update((name.len() as u64).to_le_bytes())
        .chain_update(name.as_bytes())
        .chain_update(contents)
        .finalize();
    Sha256::new_with_prefix(key).chain_update(inner).finalize().into()
}

/// Writes a file, whole or not at all.
pub(super) fn write(path: &Path, key: &[u8; 32], name: &str, contents: &[u8]) -> Result<(), WriteError> {
    let mut output = Output::create(path, Overwrite::Yes, &[])?;
    let length = (contents.len() as u64).to_le_bytes();
    let parts: [&[u8]; 4] = [MAGIC, &length, contents, &checksum(key, name, contents)];
    parts.iter().try_for_each(|part| output.write_all(part)).map_err(|why| output.failed(why))?;
    output.finish()
}

/// Reads what a file holds.
pub(super) fn read(path: &Path, key: &[u8; 32], name: &str) -> Result<Vec<u8>, Unreadable> {
    let failed = |why: std::io::Error| match why.kind() {
        std::io::ErrorKind::NotFound => Unreadable::Gone,
        _ => Unreadable::Io(why),
    };
    let mut file = File::open(path).map_err(failed)?;
    let size = file.metadata().map_err(failed)?.len();
    let mut head = [0; 16];
    file.read_exact(&mut head).map_err(|_| Unreadable::Damaged("it is cut short"))?;
    let (magic, length) = head.split_at(8);
    if magic != MAGIC {
        return Err(Unreadable::Damaged("it is no file of this cache"));
    }
    let length = u64::from_le_bytes(length.try_into().expect("eight bytes"));
    if size.checked_sub(FRAME as u64) != Some(length) {
        return Err(Unreadable::Damaged("its length is not what it says"));
    }
    let mut contents = vec![0; usize::try_from(length).map_err(|_| Unreadable::Damaged("its length is absurd"))?];
    let mut sum = [0; 32];
    file.read_exact(&mut contents).and_then(|()| file.read_exact(&mut sum)).map_err(failed)?;
    if checksum(key, name, &contents) != sum {
        return Err(Unreadable::Damaged("its checksum does not fit"));
    }
    Ok(contents)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn every_flipped_bit_every_cut_and_every_other_name_and_key_is_seen() {
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().join("a.kv");
        let (key, contents) = ([7; 32], [1, 2, 3, 4, 5]);
        write(&path, &key, "a", &contents).unwrap();
        assert_eq!(read(&path, &key, "a").unwrap(), contents);
        assert!(matches!(read(&path, &key, "b"), Err(Unreadable::Damaged(_))), "another name");
        assert!(matches!(read(&path, &[8; 32], "a"), Err(Unreadable::Damaged(_))), "another installation");
        let whole = std::fs::read(&path).unwrap();
        assert_eq!(whole.len() as u64, file_bytes(contents.len()));
        for at in 0..whole.len() {
            let mut wrong = whole.clone();
            wrong[at] ^= 1 << (at % 8);
            std::fs::write(&path, &wrong).unwrap();
            assert!(matches!(read(&path, &key, "a"), Err(Unreadable::Damaged(_))), "byte {at}");
            std::fs::write(&path, &whole[..at]).unwrap();
            assert!(matches!(read(&path, &key, "a"), Err(Unreadable::Damaged(_))), "cut at {at}");
        }
        assert!(matches!(read(&folder.path().join("none"), &key, "a"), Err(Unreadable::Gone)));
    }
}
