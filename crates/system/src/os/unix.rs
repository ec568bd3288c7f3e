//! What Linux, macOS and other Unixes do in the same way.

use std::fs::{self, DirBuilder, File, Metadata, OpenOptions};
use std::io;
use std::ops::Range;
use std::os::unix::fs::{
    DirBuilderExt as _, FileExt as _, FileTypeExt as _, MetadataExt as _, OpenOptionsExt as _, PermissionsExt as _,
};
use std::path::Path;

use memmap2::{Mmap, UncheckedAdvice};

mod program;
mod shared_folder;
mod signals;
mod terminal;

pub use program::{PROGRAM_VARIABLES, Program};
pub use shared_folder::SharedFolder;
#[cfg(feature = "tasks")]
pub use signals::tasks;
pub(crate) use signals::{end_by_interrupt, exit_at_once, on_endings};
pub(crate) use terminal::{Modes, columns_of_stderr, columns_of_stdout, key, quiet_terminal, set_terminal};

/// Whether a server that is started again may have the port of the one that has just ended. Without this the system holds the port for a
/// minute.
pub const REUSE_ADDRESSES: bool = true;

/// CPUs that this process may run on at once: within its affinity and, on Linux, the quotas of both versions of cgroups.
pub(crate) fn usable_cpus() -> usize {
    std::thread::available_parallelism().map_or(1, usize::from)
}

/// Whether two names are those of one file.
pub(crate) fn same_file(one: &Path, other: &Path) -> bool {
    let id = |path| fs::metadata(path).ok().map(|there| (there.dev(), there.ino()));
    id(one).is_some_and(|one| Some(one) == id(other))
}

/// Whether an open file still has this name.
pub fn is_open_as(file: &File, path: &Path) -> bool {
    let id = |there: Metadata| (there.dev(), there.ino());
    file.metadata().is_ok_and(|own| fs::metadata(path).is_ok_and(|there| id(there) == id(own)))
}

/// What a file is that nothing is written to; none for others.
pub(crate) fn special_kind(metadata: &Metadata) -> Option<&'static str> {
    let kind = metadata.file_type();
    match kind.is_socket() {
        true => Some("a socket"),
        false => kind.is_block_device().then_some("a disk"),
    }
}

/// Temporary files get the rights of other files: the user's umask takes away from these what it takes from every file.
pub(crate) fn with_usual_rights<'a, 'b, 'c>(
    builder: &'c mut tempfile::Builder<'a, 'b>,
) -> &'c mut tempfile::Builder<'a, 'b> {
    builder.permissions(fs::Permissions::from_mode(0o666))
}

/// Makes a folder, with those above it, that only its user can look into; one that is there stays as it is.
pub fn make_private_folder(path: &Path) -> io::Result<()> {
    DirBuilder::new().recursive(true).mode(0o700).create(path)
}

/// Files that are made with these options can be read by their user alone.
pub fn private_file(options: &mut OpenOptions) -> &mut OpenOptions {
    options.mode(0o600)
}

/// Lets only its user read a file.
pub fn make_private(path: &Path) -> io::Result<()> {
    fs::set_permissions(path, fs::Permissions::from_mode(0o600))
}

/// Reads from a place of a file, wherever others read it.
pub fn read_exact_at(file: &File, bytes: &mut [u8], at: u64) -> io::Result<()> {
    file.read_exact_at(bytes, at)
}

/// Writes to a place of a file, wherever others write to it.
pub fn write_all_at(file: &File, bytes: &[u8], at: u64) -> io::Result<()> {
    file.write_all_at(bytes, at)
}

/// Bytes that this process may still write to the disk of a folder; none where the system does not tell.
pub fn free_bytes(folder: &Path) -> Option<u64> {
    let disk = rustix::fs::statvfs(folder).ok()?;
    Some(disk.f_bavail.saturating_mul(disk.f_frsize))
}

/// Gives what `target` leads to, seen from the folder of `path`, the name `path`: by a link.
pub fn link(target: &str, path: &Path) -> io::Result<()> {
    std::os::unix::fs::symlink(target, path)
}

/// Locks a file against other processes that do the same, unless one of them has it: whether it is ours now. It can be read and written as
/// before.
pub fn try_lock(file: &File) -> io::Result<bool> {
    match file.try_lock() {
        Ok(()) => Ok(true),
        Err(fs::TryLockError::WouldBlock) => Ok(false),
        Err(fs::TryLockError::Error(why)) => Err(why),
    }
}

/// The same, and waits until it is ours.
pub fn lock(file: &File) -> io::Result<()> {
    file.lock()
}

/// Opens a file that is to be mapped into memory.
pub fn open_to_map(path: &Path) -> io::Result<File> {
    File::open(path)
}

/// Whether it is a device that is read byte by byte, as GPUs and terminals are.
pub fn is_char_device(metadata: &Metadata) -> bool {
    metadata.file_type().is_char_device()
}

/// The group that a file belongs to.
pub fn group_of(metadata: &Metadata) -> Option<u32> {
    Some(metadata.gid())
}

/// Whether stdin is a file, a pipe or a socket: a terminal or `/dev/null` has nothing to add.
pub fn stdin_has_data() -> bool {
    let kind = rustix::fs::fstat(rustix::stdio::stdin()).map(|stat| rustix::fs::FileType::from_raw_mode(stat.st_mode));
    kind.is_ok_and(|kind| kind.is_file() || kind.is_fifo() || kind.is_socket())
}

/// Gives the memory of a part of a mapped file back, until it is read again.
pub fn forget_mapped(map: &Mmap, range: Range<usize>) {
    // SAFETY: a `Mmap` is read-only, and this crate's callers map files alone: the bytes are the same when they are read again.
    #[allow(unsafe_code)]
    let forgotten = unsafe { map.unchecked_advise_range(UncheckedAdvice::DontNeed, range.start, range.len()) };
    // A system that keeps them has them in memory, as before.
    let _ = forgotten;
}
