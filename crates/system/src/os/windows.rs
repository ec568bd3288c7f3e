//! Windows: what the C library and `/proc` tell elsewhere is asked of the system by its own calls.
#![allow(unsafe_code, reason = "calls of the system, each with its reason")]

use std::fs::{self, DirBuilder, File, Metadata, OpenOptions};
use std::io;
use std::ops::Range;
use std::os::windows::ffi::OsStrExt as _;
use std::os::windows::fs::{FileExt as _, OpenOptionsExt as _};
use std::os::windows::io::AsRawHandle as _;
use std::path::Path;

use memmap2::Mmap;
use windows_sys::Win32::Foundation::{ERROR_LOCK_VIOLATION, HANDLE};
use windows_sys::Win32::Storage::FileSystem::{
    BY_HANDLE_FILE_INFORMATION, FILE_SHARE_DELETE, FILE_SHARE_READ, FILE_TYPE_DISK, FILE_TYPE_PIPE,
    GetDiskFreeSpaceExW, GetFileInformationByHandle, GetFileType, LOCKFILE_EXCLUSIVE_LOCK, LOCKFILE_FAIL_IMMEDIATELY,
    LockFileEx,
};
use windows_sys::Win32::System::IO::OVERLAPPED;

mod machine;
mod program;
mod shared_folder;
mod signals;
mod terminal;

pub(crate) use machine::{
    available_memory, most_files, physical_cores, taken_memory, threads, total_memory, usable_cpus, usage,
};
pub use program::{PROGRAM_VARIABLES, Program};
pub use shared_folder::SharedFolder;
#[cfg(feature = "tasks")]
pub use signals::tasks;
pub(crate) use signals::{end_by_interrupt, exit_at_once, on_endings};
pub(crate) use terminal::{Modes, columns_of_stderr, columns_of_stdout, key, quiet_terminal, set_terminal};

/// Whether memory that is left is known.
pub const TELLS_MEMORY: bool = true;

/// Names of the library that finds Vulkan drivers, best first.
pub const VULKAN_LOADERS: &[&str] = &["vulkan-1.dll"];

/// Whether Vulkan is a layer above another interface here, and lists its devices only to programs that ask for such ones.
pub const PORTABILITY_DRIVERS: bool = false;

/// Whether a server that is started again may have the port of the one that has just ended. It may without asking; the option would let
/// two servers have one port at the same time.
pub const REUSE_ADDRESSES: bool = false;

/// The number of an open file on its disk.
fn id(file: &File) -> Option<(u32, u32, u32)> {
    // SAFETY: all of the structure's fields are numbers, for which zeros are right.
    let mut told: BY_HANDLE_FILE_INFORMATION = unsafe { std::mem::zeroed() };
    // SAFETY: the file is open, and the system fills a structure that is ours.
    let done = unsafe { GetFileInformationByHandle(file.as_raw_handle(), &mut told) };
    (done != 0).then_some((told.dwVolumeSerialNumber, told.nFileIndexHigh, told.nFileIndexLow))
}

/// Whether two names are those of one file.
pub(crate) fn same_file(one: &Path, other: &Path) -> bool {
    let id = |path| File::open(path).ok().and_then(|file| id(&file));
    id(one).is_some_and(|one| Some(one) == id(other))
}

/// Whether an open file still has this name.
pub fn is_open_as(file: &File, path: &Path) -> bool {
    let named = File::open(path).ok().and_then(|named| id(&named));
    named.is_some() && named == id(file)
}

/// What a file is that nothing is written to. Disks and sockets have no names among files here.
pub(crate) fn special_kind(_: &Metadata) -> Option<&'static str> {
    None
}

/// Temporary files have the rights of other files: those of their folder.
pub(crate) fn with_usual_rights<'a, 'b, 'c>(
    builder: &'c mut tempfile::Builder<'a, 'b>,
) -> &'c mut tempfile::Builder<'a, 'b> {
    builder
}

/// Makes a folder, with those above it. Its rights are those of the folder above, which in a user's own folders are that user's alone.
pub fn make_private_folder(path: &Path) -> io::Result<()> {
    DirBuilder::new().recursive(true).create(path)
}

/// Files have the rights of their folder.
pub fn private_file(options: &mut OpenOptions) -> &mut OpenOptions {
    options
}

/// Files have the rights of their folder.
pub fn make_private(path: &Path) -> io::Result<()> {
    fs::metadata(path).map(drop)
}

/// Reads from a place of a file. The file's own position moves, which no caller relies on.
pub fn read_exact_at(file: &File, mut bytes: &mut [u8], mut at: u64) -> io::Result<()> {
    while !bytes.is_empty() {
        match file.seek_read(bytes, at) {
            Ok(0) => return Err(io::ErrorKind::UnexpectedEof.into()),
            Ok(n) => {
                bytes = &mut bytes[n..];
                at += n as u64;
            }
            Err(why) if why.kind() == io::ErrorKind::Interrupted => {}
            Err(why) => return Err(why),
        }
    }
    Ok(())
}

/// Writes to a place of a file. The file's own position moves, which no caller relies on.
pub fn write_all_at(file: &File, mut bytes: &[u8], mut at: u64) -> io::Result<()> {
    while !bytes.is_empty() {
        match file.seek_write(bytes, at) {
            Ok(0) => return Err(io::ErrorKind::WriteZero.into()),
            Ok(n) => {
                bytes = &bytes[n..];
                at += n as u64;
            }
            Err(why) if why.kind() == io::ErrorKind::Interrupted => {}
            Err(why) => return Err(why),
        }
    }
    Ok(())
}

/// Bytes that this process may still write to the disk of a folder; none where the system does not tell.
pub fn free_bytes(folder: &Path) -> Option<u64> {
    let name: Vec<u16> = folder.as_os_str().encode_wide().chain([0]).collect();
    let mut free = 0;
    // SAFETY: the name ends with a zero, and the system writes one number to memory that is ours; it may be told that others are not wanted.
    let done = unsafe { GetDiskFreeSpaceExW(name.as_ptr(), &mut free, std::ptr::null_mut(), std::ptr::null_mut()) };
    (done != 0).then_some(free)
}

/// Gives what `target` leads to, seen from the folder of `path`, the name `path`. Links need a right that few users have: without it the file
/// gets a second name, and on disks that know no such names it is copied.
pub fn link(target: &str, path: &Path) -> io::Result<()> {
    let linked = std::os::windows::fs::symlink_file(target.replace('/', "\\"), path);
    match linked {
        Ok(()) => return Ok(()),
        Err(why) if why.kind() == io::ErrorKind::AlreadyExists => return Err(why),
        Err(_) => {}
    }
    let from = path.parent().unwrap_or(Path::new(".")).join(target);
    fs::hard_link(&from, path).or_else(|why| match why.kind() {
        io::ErrorKind::AlreadyExists | io::ErrorKind::NotFound => Err(why),
        _ => fs::copy(&from, path).map(drop),
    })
}

/// A byte behind all that files hold. Locks forbid others to read and write what is locked; with this one they only tell each other.
fn lock_byte() -> OVERLAPPED {
    // SAFETY: the structure is made of numbers and a handle, for which zeros are right.
    let mut place: OVERLAPPED = unsafe { std::mem::zeroed() };
    place.Anonymous.Anonymous.Offset = u32::MAX - 1;
    place.Anonymous.Anonymous.OffsetHigh = u32::MAX >> 1;
    place
}

/// Locks a file against other processes that do the same, unless one of them has it: whether it is ours now. It can be read and written as
/// before.
pub fn try_lock(file: &File) -> io::Result<bool> {
    match lock_with(file, LOCKFILE_EXCLUSIVE_LOCK | LOCKFILE_FAIL_IMMEDIATELY) {
        Ok(()) => Ok(true),
        Err(why) if why.raw_os_error() == Some(ERROR_LOCK_VIOLATION as i32) => Ok(false),
        Err(why) => Err(why),
    }
}

/// The same, and waits until it is ours.
pub fn lock(file: &File) -> io::Result<()> {
    lock_with(file, LOCKFILE_EXCLUSIVE_LOCK)
}

fn lock_with(file: &File, flags: u32) -> io::Result<()> {
    let mut place = lock_byte();
    // SAFETY: the file is open, and `place` lives until the call returns, which waits: files of the standard library do so.
    let done = unsafe { LockFileEx(file.as_raw_handle(), flags, 0, 1, 0, &mut place) };
    if done == 0 { Err(io::Error::last_os_error()) } else { Ok(()) }
}

/// Opens a file that is to be mapped into memory. Others may read and rename it meanwhile, but not change it: a mapped file that is cut short
/// would end this process.
pub fn open_to_map(path: &Path) -> io::Result<File> {
    OpenOptions::new().read(true).share_mode(FILE_SHARE_READ | FILE_SHARE_DELETE).open(path)
}

/// Whether it is a device that is read byte by byte. Those have no names among files here.
pub fn is_char_device(_: &Metadata) -> bool {
    false
}

/// The group that a file belongs to: there are lists of rights in place of it.
pub fn group_of(_: &Metadata) -> Option<u32> {
    None
}

/// Whether stdin is a file or a pipe: a terminal or `NUL` has nothing to add.
pub fn stdin_has_data() -> bool {
    let handle: HANDLE = io::stdin().as_raw_handle();
    // SAFETY: the function tells the kind of any handle, also of none.
    let kind = unsafe { GetFileType(handle) };
    kind == FILE_TYPE_DISK || kind == FILE_TYPE_PIPE
}

/// Asks the system to forget what it holds of a file. There is no such call.
pub fn forget_file(_: &File) -> bool {
    false
}

/// Pages of mapped files are given back by the system itself, when others need memory.
pub fn forget_mapped(_: &Mmap, _: Range<usize>) {}

/// Keeps a part of a mapped file in small pages. Files are mapped in pages of one size here.
pub fn small_pages(_: &Mmap, _: Range<usize>) {}

/// Has the system bring a part of a mapped file into this process's memory. It comes page by page as it is read.
pub fn populate_mapped(_: &Mmap, _: Range<usize>) -> bool {
    false
}

/// Nothing: a file that is opened by [`open_to_map`] cannot be cut short.
pub fn end_on_cut_files(_: impl FnOnce() + Send + 'static) {}
