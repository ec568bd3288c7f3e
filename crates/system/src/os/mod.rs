//! What differs between operating systems, behind one set of functions: each system's file offers all of them, and no other crate asks which
//! system it is built for. A system that cannot do a thing says so by its answer (`None`, `false`), and the caller does without.
//!
//! Linux and Android are in `linux.rs`, macOS in `macos.rs`, other Unixes in `other.rs`, with what they share in `unix.rs`; Windows is in
//! `windows.rs`.

use std::io;

#[cfg(any(target_os = "linux", target_os = "android"))]
mod linux;
#[cfg(target_os = "macos")]
mod macos;
#[cfg(not(any(target_os = "linux", target_os = "android", target_os = "macos", windows)))]
mod other;
#[cfg(unix)]
mod unix;
#[cfg(windows)]
mod windows;

#[cfg(any(target_os = "linux", target_os = "android"))]
use linux as own;
#[cfg(target_os = "macos")]
use macos as own;
#[cfg(not(any(target_os = "linux", target_os = "android", target_os = "macos", windows)))]
use other as own;
#[cfg(windows)]
use windows as own;

// Facts.
pub use own::{PORTABILITY_DRIVERS, REUSE_ADDRESSES, TELLS_MEMORY, VULKAN_LOADERS};
pub(crate) use own::{
    available_memory, most_files, physical_cores, taken_memory, threads, total_memory, usable_cpus, usage,
};
// Files and folders.
pub use own::SharedFolder;
pub use own::{
    forget_file, free_bytes, group_of, is_char_device, is_open_as, link, lock, make_private, make_private_folder,
    open_to_map, private_file, read_exact_at, stdin_has_data, try_lock, write_all_at,
};
pub(crate) use own::{same_file, special_kind, with_usual_rights};
// Programs that are started.
pub use own::{PROGRAM_VARIABLES, Program};
// Memory maps of files.
pub use own::{end_on_cut_files, forget_mapped, populate_mapped, small_pages};
// Signals and terminals.
#[cfg(feature = "tasks")]
pub use own::tasks;
pub(crate) use own::{
    Modes, columns_of_stderr, columns_of_stdout, end_by_interrupt, exit_at_once, key, on_endings, quiet_terminal,
    set_terminal,
};

/// A file or a folder in a [`SharedFolder`].
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct SharedEntry {
    /// Its name.
    pub name: String,
    /// Whether it is a folder.
    pub is_folder: bool,
}

/// Why something in a [`SharedFolder`] was not opened.
#[derive(Debug)]
pub enum NotOpened {
    /// There is none of this name.
    Missing,
    /// It is a link, which is not followed.
    Link,
    /// What should be a folder is a file, or a link.
    NoFolder,
    /// The system did not.
    Failed(io::Error),
}

impl From<io::Error> for NotOpened {
    fn from(why: io::Error) -> NotOpened {
        match why.kind() {
            io::ErrorKind::NotFound => NotOpened::Missing,
            io::ErrorKind::NotADirectory => NotOpened::NoFolder,
            _ => NotOpened::Failed(why),
        }
    }
}

/// Whether this is the name of something in a folder, and not a way to somewhere else.
fn is_one_name(part: &str) -> bool {
    !part.is_empty() && part != "." && part != ".." && !part.contains(['/', '\0'])
}

/// How a [`Program`] ended.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Ended {
    /// By itself.
    Status(i32),
    /// By a signal.
    Signal(i32),
    /// The system does not know any more.
    Unknown,
}

/// What asks a process to end.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Ending {
    /// Ctrl-C.
    Interrupt,
    /// `kill`, the end of a session, a window that is closed.
    Terminate,
    /// SIGHUP: the terminal went away, or a server is to read its files again.
    HangUp,
}

/// What becomes of an [`Ending`].
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Heard {
    /// Others see to it.
    Left,
    /// It was noted, and the process continues.
    Caught,
    /// The process ends.
    Ends,
}

#[cfg(test)]
mod tests {
    use std::fs::{self, File};
    use std::io::{Read as _, Write as _};

    use super::*;

    #[test]
    fn bytes_are_read_and_written_at_their_place() {
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().join("x");
        let file = File::options().create_new(true).read(true).write(true).open(&path).unwrap();
        write_all_at(&file, b"world", 6).unwrap();
        write_all_at(&file, b"hello ", 0).unwrap();
        let mut five = [0; 5];
        read_exact_at(&file, &mut five, 6).unwrap();
        assert_eq!(&five, b"world");
        assert!(read_exact_at(&file, &mut five, 7).is_err(), "the file ends before");
        assert_eq!(fs::read(&path).unwrap(), b"hello world");
    }

    #[test]
    fn a_file_is_itself_under_any_name() {
        let folder = tempfile::tempdir().unwrap();
        let [one, hard, other] = ["one", "hard", "other"].map(|name| folder.path().join(name));
        fs::write(&one, b"1").unwrap();
        fs::hard_link(&one, &hard).unwrap();
        fs::write(&other, b"1").unwrap();
        assert!(same_file(&one, &hard) && !same_file(&one, &other) && !same_file(&one, &folder.path().join("gone")));
        let open = File::open(&one).unwrap();
        assert!(is_open_as(&open, &hard) && !is_open_as(&open, &other));
    }

    #[test]
    fn a_locked_file_can_be_read_and_is_locked_once() {
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().join("x");
        let mut mine = File::create(&path).unwrap();
        assert!(try_lock(&mine).unwrap());
        mine.write_all(b"written under a lock").unwrap();
        let mut theirs = File::open(&path).unwrap();
        assert!(!try_lock(&theirs).unwrap());
        let mut text = String::new();
        theirs.read_to_string(&mut text).unwrap();
        assert_eq!(text, "written under a lock");
        drop(mine);
        lock(&theirs).unwrap();
    }

    #[test]
    fn a_shared_folder_stays_the_same_and_nothing_leads_out_of_it() {
        let outside = tempfile::tempdir().unwrap();
        let root = outside.path().join("root");
        fs::create_dir_all(root.join("sub")).unwrap();
        fs::write(root.join("sub/file"), b"inside").unwrap();
        fs::write(outside.path().join("secret"), b"outside").unwrap();
        link("../secret", &root.join("link")).unwrap();
        let shared = SharedFolder::open(&root).unwrap();
        let mut text = String::new();
        shared.file(&["sub", "file"]).unwrap().read_to_string(&mut text).unwrap();
        assert_eq!(text, "inside");
        let entry = |name: &str, is_folder| SharedEntry { name: name.to_owned(), is_folder };
        assert_eq!(shared.entries(&[], 100).unwrap(), [entry("sub", true)]);
        assert_eq!(shared.entries(&["sub"], 100).unwrap(), [entry("file", false)]);
        assert!(matches!(shared.file(&["link"]), Err(NotOpened::Link)));
        assert!(matches!(shared.file(&["sub", "file", "x"]), Err(NotOpened::NoFolder)));
        assert!(matches!(shared.entries(&["sub", "file"], 100), Err(NotOpened::NoFolder)));
        for parts in [&[".."][..], &["sub", "..", "..", "secret"], &["../secret"], &["gone"], &["a\0b"], &[""]] {
            assert!(matches!(shared.file(parts), Err(NotOpened::Missing)), "{parts:?}");
        }
        assert!(SharedFolder::open(&root.join("sub/file")).is_err());
        assert!(SharedFolder::open(&root.join("gone")).is_err());
    }

    #[test]
    fn a_link_leads_to_its_target() {
        let folder = tempfile::tempdir().unwrap();
        fs::create_dir(folder.path().join("blobs")).unwrap();
        fs::create_dir(folder.path().join("names")).unwrap();
        fs::write(folder.path().join("blobs/b"), b"bytes").unwrap();
        let name = folder.path().join("names/n");
        link("../blobs/b", &name).unwrap();
        assert_eq!(fs::read(&name).unwrap(), b"bytes");
        assert_eq!(link("../blobs/b", &name).unwrap_err().kind(), std::io::ErrorKind::AlreadyExists);
    }

    #[test]
    fn a_disk_has_some_room_and_a_missing_folder_none() {
        let folder = tempfile::tempdir().unwrap();
        assert!(free_bytes(folder.path()).is_some_and(|bytes| bytes > 0));
        assert_eq!(free_bytes(&folder.path().join("gone")), None);
    }
}
