//! The files of one folder, to be listed and read. Every part of a path is opened from the folder above it and no link is followed, so that
//! nothing outside can be reached, whatever happens to the folder meanwhile.

use std::fs::File;
use std::io::{Read as _, Seek as _, SeekFrom};
use std::path::Path;

use kiln_system::os::{NotOpened, SharedFolder};
use kiln_system::text::shown;

/// Entries of a folder that are told.
const MOST_ENTRIES: usize = 500;
/// Entries that are looked at.
const MOST_SEEN: usize = 100_000;
/// Parts of a path at most.
const DEEPEST: usize = 64;

/// A folder that is shared.
pub(crate) struct Folder(SharedFolder);

/// The parts of a path, none of which leads up.
fn parts(path: &str) -> Result<Vec<&str>, String> {
    let parts: Vec<&str> = path.split('/').filter(|part| !part.is_empty() && *part != ".").collect();
    if path.contains('\0') || parts.contains(&"..") {
        return Err(format!("{} leads out of the folder", shown(path)));
    }
    match parts.len() {
        count if count > DEEPEST => Err(format!("the path has {count} parts, at most {DEEPEST} are followed")),
        _ => Ok(parts),
    }
}

fn not_opened(path: &str, why: NotOpened) -> String {
    match why {
        NotOpened::Missing => format!("there is no {}", shown(path)),
        NotOpened::Link => format!("{} is a link, which is not followed", shown(path)),
        NotOpened::NoFolder => format!("{} is no folder, or leads through a link or a file", shown(path)),
        NotOpened::Failed(why) => format!("{} cannot be opened: {why}", shown(path)),
    }
}

impl Folder {
    pub(crate) fn open(path: &Path) -> std::io::Result<Folder> {
        SharedFolder::open(path).map(Folder)
    }

    /// The names in a folder, one a line, sorted.
    pub(crate) fn list(&self, path: &str) -> Result<String, String> {
        let entries = self.0.entries(&parts(path)?, MOST_SEEN).map_err(|why| not_opened(path, why))?;
        let mut names: Vec<String> =
            entries.into_iter().map(|entry| entry.name + if entry.is_folder { "/" } else { "" }).collect();
        names.sort();
        let all = names.len();
        names.truncate(MOST_ENTRIES);
        let rest = if all > MOST_ENTRIES { format!("\n({} more)", all - MOST_ENTRIES) } else { String::new() };
        Ok(if all == 0 { "(the folder is empty)".to_owned() } else { names.join("\n") + &rest })
    }

    /// The text of a file from an offset on, at most `most` bytes of it.
    pub(crate) fn read(&self, path: &str, offset: u64, most: usize) -> Result<String, String> {
        let failed = |why: std::io::Error| format!("{} cannot be read: {why}", shown(path));
        let mut file: File = self.0.file(&parts(path)?).map_err(|why| not_opened(path, why))?;
        let metadata = file.metadata().map_err(failed)?;
        if !metadata.is_file() {
            return Err(format!("{} is no file", shown(path)));
        }
        let size = metadata.len();
        if offset > size {
            return Err(format!("{} has {size} bytes, which is less than the offset {offset}", shown(path)));
        }
        file.seek(SeekFrom::Start(offset)).map_err(failed)?;
        // The note behind the text has room, too.
        let most = most.saturating_sub(200).max(1);
        let mut bytes = Vec::new();
        file.take(most as u64).read_to_end(&mut bytes).map_err(failed)?;
        let (start, text) = text_of(&bytes).ok_or_else(|| format!("{} is no text", shown(path)))?;
        let (offset, end) = (offset + start as u64, offset + (start + text.len()) as u64);
        Ok(match end < size {
            true => format!("{text}\n[the file has {size} bytes; these are {offset} to {end}]"),
            false => text.to_owned(),
        })
    }
}

/// Bytes as text; an end within a letter is left out, and so is a beginning within one: its bytes are counted.
fn text_of(bytes: &[u8]) -> Option<(usize, &str)> {
    let start = bytes.iter().take(3).take_while(|byte| (0x80..0xc0).contains(*byte)).count();
    let text = match std::str::from_utf8(&bytes[start..]) {
        Ok(text) => text,
        Err(why) if why.error_len().is_none() => std::str::from_utf8(&bytes[start..start + why.valid_up_to()]).ok()?,
        Err(_) => return None,
    };
    (!text.contains('\0')).then_some((start, text))
}

#[cfg(test)]
mod tests {
    use std::os::unix::fs::symlink;

    use rustix::fs::{CWD, FileType, Mode};

    use super::*;

    #[test]
    fn files_of_the_folder_are_listed_and_read_and_no_others() {
        let outside = tempfile::tempdir().unwrap();
        let root = outside.path().join("shared");
        std::fs::create_dir_all(root.join("sub/deep")).unwrap();
        std::fs::write(outside.path().join("secret.txt"), "secret").unwrap();
        std::fs::write(root.join("a.txt"), "höllo").unwrap();
        std::fs::write(root.join("sub/b.txt"), "inside").unwrap();
        std::fs::write(root.join("bytes"), [0xff, 0xfe, 0, 1]).unwrap();
        symlink(outside.path().join("secret.txt"), root.join("link.txt")).unwrap();
        symlink(outside.path(), root.join("up")).unwrap();
        let folder = Folder::open(&root).unwrap();
        assert_eq!(folder.list("").unwrap(), "a.txt\nbytes\nsub/");
        assert_eq!(folder.list("sub/").unwrap(), "b.txt\ndeep/");
        assert_eq!(folder.list("sub/deep").unwrap(), "(the folder is empty)");
        assert_eq!(folder.read("./sub//b.txt", 0, 1000).unwrap(), "inside");
        for path in ["../secret.txt", "sub/../../secret.txt", "link.txt", "up/secret.txt", "sub", "no", "bytes", "a\0b"]
        {
            let why = folder.read(path, 0, 1000).unwrap_err();
            assert!(!why.contains("secret\n") && !why.is_empty(), "{path}: {why}");
        }
        assert!(folder.list("up").is_err() && folder.list("..").is_err() && folder.list("a.txt").is_err());
        // An absolute path is one within the folder.
        assert!(folder.read("/etc/passwd", 0, 1000).unwrap_err().contains("no /etc/passwd"));
    }

    #[test]
    fn long_files_come_in_pieces() {
        let root = tempfile::tempdir().unwrap();
        std::fs::write(root.path().join("long"), "é".repeat(1000)).unwrap();
        let folder = Folder::open(root.path()).unwrap();
        let first = folder.read("long", 0, 501).unwrap();
        assert!(first.ends_with("[the file has 2000 bytes; these are 0 to 300]"), "{first}");
        assert_eq!(folder.read("long", 1999, 500).unwrap(), "");
        assert_eq!(folder.read("long", 1990, 500).unwrap(), "é".repeat(5));
        assert!(folder.read("long", 2001, 500).unwrap_err().contains("2000 bytes"));
    }

    #[test]
    fn a_pipe_holds_nobody_up() {
        let root = tempfile::tempdir().unwrap();
        let path = root.path().join("pipe");
        rustix::fs::mknodat(CWD, &path, FileType::Fifo, Mode::from_raw_mode(0o600), 0).unwrap();
        let folder = Folder::open(root.path()).unwrap();
        assert!(folder.read("pipe", 0, 100).unwrap_err().contains("is no file"));
        assert_eq!(folder.list("").unwrap(), "(the folder is empty)");
    }
}
