//! Files that Kiln writes: whole or not at all, and never over what is not its own to overwrite. Everything that writes
//! a file goes through [`Output`].
//!
//! The bytes go to a file beside the target first, with a name that cannot be guessed, and take the target's name when they are
//! complete. That file goes away when the writing fails, and on signals where [`remove_on_signals`] was called; it is
//! locked while it is written, so that [`stale`] can tell what a killed process left behind.

use std::collections::HashSet;
use std::fs::{self, File};
use std::io::{self, Write};
use std::path::{Path, PathBuf};
use std::process::{Child, Command, ExitStatus};
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, LazyLock, Mutex, MutexGuard, PoisonError};
use std::time::{Duration, Instant};

use tempfile::NamedTempFile;

use crate::os::{self, Ending, Heard};

/// How the names of incomplete files begin and end.
const PREFIX: &str = ".kiln-";
const SUFFIX: &str = ".tmp";

/// Whether a file that is there may be replaced.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Overwrite {
    /// It stays.
    No,
    /// It goes, if it is a regular file.
    Yes,
}

impl Overwrite {
    /// `Yes` where a user said `--force`.
    pub fn if_forced(force: bool) -> Overwrite {
        if force { Overwrite::Yes } else { Overwrite::No }
    }
}

/// Why a file is not written.
#[derive(Debug, thiserror::Error)]
#[allow(missing_docs, reason = "the message of each variant says what its fields are")]
pub enum WriteError {
    #[error("{} is there already\nhint: --force overwrites it", path.display())]
    Exists { path: PathBuf },
    #[error("{} is the file that is read\nhint: name another file to write", path.display())]
    IsInput { path: PathBuf },
    #[error("{} is a folder\nhint: name a file in it", path.display())]
    Folder { path: PathBuf },
    #[error("{} is {what}, which Kiln does not write to\nhint: name a file", path.display())]
    Special { path: PathBuf, what: &'static str },
    #[error("{} is a link to {}, which is not there\nhint: remove the link, or make what it points to", path.display(), to.display())]
    DeadLink { path: PathBuf, to: PathBuf },
    #[error("there is no folder {}\nhint: make it first (mkdir -p)", folder.display())]
    NoFolder { folder: PathBuf },
    #[error("cannot write {}: {why}{}", path.display(), hint(why))]
    Io { path: PathBuf, why: io::Error },
}

impl WriteError {
    /// What went wrong when a complete file was to get its name.
    fn of_naming(path: PathBuf, why: io::Error) -> WriteError {
        match why.kind() {
            io::ErrorKind::AlreadyExists => WriteError::Exists { path },
            _ => WriteError::Io { path, why },
        }
    }
}

/// What helps, where the error alone does not say.
fn hint(why: &io::Error) -> &'static str {
    match why.kind() {
        io::ErrorKind::StorageFull => "\nhint: the disk is full; nothing of the file was kept",
        _ => "",
    }
}

/// A file being written. What is in it is seen under its name after [`Output::finish`]; dropped before, it leaves nothing.
#[derive(Debug)]
pub struct Output {
    /// As the caller named it, for messages.
    name: PathBuf,
    to: To,
}

#[derive(Debug)]
enum To {
    /// A regular file: the incomplete one, the name it gets, and whether it may replace another.
    Place(Temporary, PathBuf, Overwrite),
    /// What is no regular file takes the bytes as they come: a pipe, a terminal, `/dev/null`.
    Through(File),
}

impl Output {
    /// Opens a file for writing; the target is checked now, before hours of work go into it. `inputs` are files that are
    /// being read and must not be replaced, whatever `overwrite` says.
    pub fn create(path: &Path, overwrite: Overwrite, inputs: &[&Path]) -> Result<Output, WriteError> {
        let name = path.to_owned();
        let failed = |why| WriteError::Io { path: path.to_owned(), why };
        if fs::symlink_metadata(path).is_ok_and(|m| m.is_symlink()) && fs::metadata(path).is_err() {
            let to = fs::read_link(path).map_err(failed)?;
            return Err(WriteError::DeadLink { path: name, to });
        }
        let place = match fs::metadata(path) {
            Err(e) if e.kind() == io::ErrorKind::NotFound => path.to_owned(),
            Err(e) => return Err(failed(e)),
            Ok(there) => {
                let kind = there.file_type();
                if kind.is_file() && inputs.iter().any(|input| os::same_file(input, path)) {
                    return Err(WriteError::IsInput { path: name });
                }
                if kind.is_dir() {
                    return Err(WriteError::Folder { path: name });
                }
                if let Some(what) = os::special_kind(&there) {
                    return Err(WriteError::Special { path: name, what });
                }
                if !kind.is_file() {
                    let file = File::options().write(true).open(path).map_err(failed)?;
                    return Ok(Output { name, to: To::Through(file) });
                }
                if overwrite == Overwrite::No {
                    return Err(WriteError::Exists { path: name });
                }
                // A link stays one: what it points to is replaced.
                fs::canonicalize(path).map_err(failed)?
            }
        };
        let folder = place.parent().filter(|p| !p.as_os_str().is_empty()).unwrap_or(Path::new("."));
        let temporary = Temporary::in_folder(folder).map_err(|why| match why.kind() {
            io::ErrorKind::NotFound => WriteError::NoFolder { folder: folder.to_owned() },
            // The name of the incomplete file, which the error holds, says nothing to users.
            kind => failed(why.raw_os_error().map_or_else(|| kind.into(), io::Error::from_raw_os_error)),
        })?;
        Ok(Output { name, to: To::Place(temporary, place, overwrite) })
    }

    /// The path, as the caller named it.
    pub fn path(&self) -> &Path {
        &self.name
    }

    /// Where the bytes are before the file has its name, for those who check them first; none where they go straight through.
    pub fn incomplete_path(&self) -> Option<&Path> {
        match &self.to {
            To::Place(temporary, ..) => temporary.0.as_ref().map(NamedTempFile::path),
            To::Through(_) => None,
        }
    }

    /// The error of writing this file.
    pub fn failed(&self, why: io::Error) -> WriteError {
        WriteError::Io { path: self.name.clone(), why }
    }

    /// Gives the file its name, when all of it is safe on the disk.
    pub fn finish(self) -> Result<(), WriteError> {
        Output::finish_all(vec![self])
    }

    /// Gives files that belong together their names: all of them, or none. Ctrl-C waits while it is done.
    pub fn finish_all(outputs: Vec<Output>) -> Result<(), WriteError> {
        for output in &outputs {
            if let To::Place(temporary, ..) = &output.to {
                temporary.sync().map_err(|why| output.failed(why))?;
            }
        }
        // What could not be named goes away when no lock is held any more.
        let (mut named, mut rest) = (Vec::new(), outputs.into_iter());
        let mut incomplete = incomplete();
        let failed = rest.by_ref().find_map(|output| {
            let Output { name, to } = output;
            let done = match to {
                To::Through(mut file) => file.flush(),
                To::Place(temporary, place, overwrite) => {
                    let done = temporary.name_as(&place, overwrite, &mut incomplete);
                    named.extend(done.is_ok().then_some(place));
                    done
                }
            };
            done.err().map(|why| WriteError::of_naming(name, why))
        });
        if failed.is_some() {
            named.iter().for_each(|place| drop(fs::remove_file(place)));
        }
        drop(incomplete);
        failed.map_or(Ok(()), Err)
    }

    /// Writes a whole file at once.
    pub fn write(path: &Path, overwrite: Overwrite, bytes: &[u8]) -> Result<(), WriteError> {
        let mut output = Output::create(path, overwrite, &[])?;
        output.write_all(bytes).map_err(|why| output.failed(why))?;
        output.finish()
    }
}

impl Write for Output {
    fn write(&mut self, bytes: &[u8]) -> io::Result<usize> {
        match &mut self.to {
            To::Place(temporary, ..) => temporary.file().write(bytes),
            To::Through(file) => file.write(bytes),
        }
    }

    fn flush(&mut self) -> io::Result<()> {
        match &mut self.to {
            To::Place(temporary, ..) => temporary.file().flush(),
            To::Through(file) => file.flush(),
        }
    }
}

/// An incomplete file, known to [`remove_on_signals`] as long as it is there.
#[derive(Debug)]
struct Temporary(Option<NamedTempFile>);

impl Temporary {
    fn in_folder(folder: &Path) -> io::Result<Temporary> {
        // Held while the file is made: a signal that comes between would miss it.
        let mut incomplete = incomplete();
        let mut builder = tempfile::Builder::new();
        let file = os::with_usual_rights(builder.prefix(PREFIX).suffix(SUFFIX).rand_bytes(16)).tempfile_in(folder)?;
        // Best effort: not every file system knows locks.
        let _ = os::try_lock(file.as_file());
        incomplete.insert(file.path().to_owned());
        Ok(Temporary(Some(file)))
    }

    fn file(&mut self) -> &mut File {
        self.0.as_mut().expect("only `persist` takes the file away, and it consumes this").as_file_mut()
    }

    /// Waits until all bytes are safe on the disk.
    fn sync(&self) -> io::Result<()> {
        self.0.as_ref().map_or(Ok(()), |file| file.as_file().sync_all())
    }

    /// Gives the file its name. The files that are known to be incomplete are held meanwhile, so that no signal comes between.
    fn name_as(mut self, place: &Path, overwrite: Overwrite, incomplete: &mut HashSet<PathBuf>) -> io::Result<()> {
        let Some(file) = self.0.take() else { return Ok(()) };
        incomplete.remove(file.path());
        if let Ok(old) = fs::metadata(place) {
            file.as_file().set_permissions(old.permissions())?;
        }
        match overwrite {
            Overwrite::Yes => file.persist(place).map_err(|e| e.error)?,
            // Another process may have made the file since it was looked for.
            Overwrite::No => file.persist_noclobber(place).map_err(|e| e.error)?,
        };
        Ok(())
    }
}

impl Drop for Temporary {
    fn drop(&mut self) {
        if let Some(file) = self.0.take() {
            let path = file.path().to_owned();
            // A failure to remove cannot be reported here; `kiln doctor` will name the file.
            drop(file);
            incomplete().remove(&path);
        }
    }
}

/// A folder for what is on its way (a download), with a name of its own. It goes away with all in it when it is dropped,
/// and on signals as incomplete files do.
#[derive(Debug)]
pub struct Workspace(Option<tempfile::TempDir>);

impl Workspace {
    /// A new folder in this one.
    pub fn in_folder(folder: &Path) -> io::Result<Workspace> {
        let mut incomplete = incomplete();
        let made = tempfile::Builder::new().prefix(PREFIX).suffix(SUFFIX).rand_bytes(16).tempdir_in(folder)?;
        incomplete.insert(made.path().to_owned());
        Ok(Workspace(Some(made)))
    }

    /// Where it is.
    pub fn path(&self) -> &Path {
        self.0.as_ref().map_or(Path::new(""), |made| made.path())
    }
}

impl Drop for Workspace {
    fn drop(&mut self) {
        if let Some(made) = self.0.take() {
            let path = made.path().to_owned();
            drop(made);
            incomplete().remove(&path);
        }
    }
}

/// Every incomplete file of this process.
fn incomplete() -> MutexGuard<'static, HashSet<PathBuf>> {
    static FILES: LazyLock<Mutex<HashSet<PathBuf>>> = LazyLock::new(Mutex::default);
    FILES.lock().unwrap_or_else(PoisonError::into_inner)
}

/// From now on Ctrl-C, `kill` and a closed terminal remove incomplete files before they end the process as usual. `tell` says
/// that it was Ctrl-C. Starts a thread. Signals that the process was told to ignore (`nohup`) stay ignored.
pub fn remove_on_signals(tell: fn()) {
    let hear = |ending| {
        let left = if ending == Ending::HangUp { &HANG_UPS_LEFT } else { &LEFT };
        match ending {
            _ if left.load(Ordering::Relaxed) => Heard::Left,
            Ending::Interrupt if crate::interrupt::note() => Heard::Caught,
            _ => Heard::Ends,
        }
    };
    os::on_endings(hear, move |ending| {
        ENDING.store(true, Ordering::Relaxed);
        end_helpers();
        remove_incomplete();
        crate::terminal::restore();
        if ending == Ending::Interrupt {
            tell_at_most(tell);
        }
    });
}

/// Writes a message unless that would block: a terminal that was stopped must not keep the process alive.
fn tell_at_most(tell: fn()) {
    let (told, done) = std::sync::mpsc::channel();
    let say = move || {
        tell();
        let _ = told.send(());
    };
    if std::thread::Builder::new().spawn(say).is_ok() {
        let _ = done.recv_timeout(Duration::from_millis(500));
    }
}

/// Ends the process as Ctrl-C does, without incomplete files. Shells tell by it that a loop is to end as well.
pub fn end_by_interrupt() -> ! {
    remove_incomplete();
    crate::terminal::restore();
    os::end_by_interrupt()
}

type Helpers = Vec<Arc<Mutex<Child>>>;

/// Programs that work for this process.
fn helpers() -> MutexGuard<'static, Helpers> {
    static HELPERS: Mutex<Helpers> = Mutex::new(Vec::new());
    HELPERS.lock().unwrap_or_else(PoisonError::into_inner)
}

/// Runs a program that does not outlive this process where a signal ends it.
pub fn run_helper(command: &mut Command) -> io::Result<ExitStatus> {
    // Held while it is started: a signal that comes between would miss it.
    let mut all = helpers();
    let helper = Arc::new(Mutex::new(command.spawn()?));
    all.push(Arc::clone(&helper));
    drop(all);
    let status = wait_for(&helper, None);
    helpers().retain(|other| !Arc::ptr_eq(other, &helper));
    // Without a limit it always has one.
    let status = status?.ok_or(io::ErrorKind::TimedOut)?;
    if !status.success() {
        wait_if_ending();
    }
    Ok(status)
}

/// Whether a signal ends this process now.
static ENDING: AtomicBool = AtomicBool::new(false);

/// Ctrl-C goes to a helper and to this process: where it ends both, the thread that sees to signals speaks, and not who waited for
/// the helper. That thread may need a moment to hear of it.
fn wait_if_ending() {
    let start = Instant::now();
    while ENDING.load(Ordering::Relaxed) || start.elapsed() < Duration::from_millis(100) {
        std::thread::sleep(Duration::from_millis(10));
    }
}

/// Waits for a helper, so long at most.
fn wait_for(helper: &Mutex<Child>, limit: Option<Duration>) -> io::Result<Option<ExitStatus>> {
    let start = Instant::now();
    loop {
        let ended = helper.lock().unwrap_or_else(PoisonError::into_inner).try_wait()?;
        if ended.is_some() || limit.is_some_and(|limit| start.elapsed() > limit) {
            return Ok(ended);
        }
        std::thread::sleep(Duration::from_millis(10));
    }
}

/// Ends the helpers of this process, which starts no more from now on. Most have heard of Ctrl-C themselves and are tidying up.
fn end_helpers() {
    let all = helpers();
    for helper in &*all {
        if !wait_for(helper, Some(Duration::from_secs(1))).is_ok_and(|ended| ended.is_some()) {
            let mut helper = helper.lock().unwrap_or_else(PoisonError::into_inner);
            let _ = helper.kill().and_then(|()| helper.wait());
        }
    }
    // Never given back.
    std::mem::forget(all);
}

/// Removes every incomplete file of this process, which makes no more from now on.
fn remove_incomplete() {
    let files = incomplete();
    files.iter().for_each(|file| drop(fs::remove_file(file).or_else(|_| fs::remove_dir_all(file))));
    // Never given back.
    std::mem::forget(files);
}

/// Ends the process with this message, whatever its threads are doing, and without incomplete files.
pub fn end_at_once(message: &str) {
    remove_incomplete();
    crate::terminal::restore();
    let _ = io::stderr().write_all(message.as_bytes());
    os::exit_at_once(1);
}

static LEFT: AtomicBool = AtomicBool::new(false);
static HANG_UPS_LEFT: AtomicBool = AtomicBool::new(false);

/// From now on Ctrl-C and `kill` do not end the process: a program that finishes its work first sees to them itself.
pub fn leave_endings_to_the_program() {
    LEFT.store(true, Ordering::Relaxed);
}

/// From now on SIGHUP does not end the process: a program that reads its files again then sees to it itself.
pub fn leave_hang_ups_to_the_program() {
    HANG_UPS_LEFT.store(true, Ordering::Relaxed);
}

/// Incomplete files in a folder that no process writes any more, with their sizes: killed processes left them.
pub fn stale(folder: &Path) -> Vec<(PathBuf, u64)> {
    let is_ours = |path: &PathBuf| {
        let name = path.file_name().unwrap_or_default().to_string_lossy();
        name.starts_with(PREFIX) && name.ends_with(SUFFIX)
    };
    let entries = fs::read_dir(folder).into_iter().flatten().flatten().map(|entry| entry.path());
    let size = |path: PathBuf| {
        let metadata = fs::symlink_metadata(&path).ok()?;
        if metadata.is_dir() {
            // A folder has no lock; what was touched within the hour may be at work.
            let idle = metadata.modified().ok()?.elapsed().is_ok_and(|age| age.as_secs() > 3600);
            let inside = fs::read_dir(&path).into_iter().flatten().flatten();
            return idle.then(|| (path, inside.filter_map(|e| Some(e.metadata().ok()?.len())).sum()));
        }
        if !metadata.is_file() {
            return None;
        }
        // Where files cannot be locked, nothing tells that they are being written.
        let free = os::try_lock(&File::open(&path).ok()?).unwrap_or(true);
        free.then_some((path, metadata.len()))
    };
    let mut found: Vec<_> = entries.filter(is_ours).filter_map(size).collect();
    found.sort();
    found
}

#[cfg(test)]
mod tests {
    use super::*;

    fn names(folder: &Path) -> Vec<String> {
        let entries = fs::read_dir(folder).unwrap();
        let mut names: Vec<_> = entries.map(|e| e.unwrap().file_name().to_string_lossy().into_owned()).collect();
        names.sort();
        names
    }

    #[test]
    fn a_file_is_there_as_a_whole_or_not_at_all() {
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().join("x");
        let mut output = Output::create(&path, Overwrite::No, &[]).unwrap();
        output.write_all(b"half").unwrap();
        assert_eq!(names(folder.path()).len(), 1, "only the incomplete file is there");
        assert!(stale(folder.path()).is_empty(), "and it is being written");
        drop(output);
        assert!(names(folder.path()).is_empty());
        Output::write(&path, Overwrite::No, b"whole").unwrap();
        assert_eq!(names(folder.path()), ["x"]);
        fs::write(folder.path().join(".kiln-left.tmp"), b"1234").unwrap();
        assert_eq!(stale(folder.path()), [(folder.path().join(".kiln-left.tmp"), 4)]);
    }

    #[test]
    fn a_workspace_goes_away_with_all_in_it() {
        let folder = tempfile::tempdir().unwrap();
        let workspace = Workspace::in_folder(folder.path()).unwrap();
        fs::write(workspace.path().join("x"), b"1").unwrap();
        assert!(stale(folder.path()).is_empty(), "it is at work");
        drop(workspace);
        assert!(names(folder.path()).is_empty());
    }

    #[test]
    #[cfg(unix)]
    fn nothing_is_replaced_unless_told() {
        let folder = tempfile::tempdir().unwrap();
        let (path, link) = (folder.path().join("x"), folder.path().join("link"));
        fs::write(&path, b"precious").unwrap();
        std::os::unix::fs::symlink(&path, &link).unwrap();
        for there in [&path, &link] {
            assert!(matches!(Output::create(there, Overwrite::No, &[]), Err(WriteError::Exists { .. })));
            assert!(matches!(Output::create(there, Overwrite::Yes, &[&path]), Err(WriteError::IsInput { .. })));
        }
        let hard = folder.path().join("hard");
        fs::hard_link(&path, &hard).unwrap();
        assert!(matches!(Output::create(&hard, Overwrite::Yes, &[&path]), Err(WriteError::IsInput { .. })));
        assert_eq!(fs::read(&path).unwrap(), b"precious");
        Output::write(&link, Overwrite::Yes, b"new").unwrap();
        assert!(fs::symlink_metadata(&link).unwrap().is_symlink(), "a link stays a link");
        assert_eq!(fs::read(&path).unwrap(), b"new");
        // A file that appears while another is written stays, too.
        let late = folder.path().join("late");
        let output = Output::create(&late, Overwrite::No, &[]).unwrap();
        fs::write(&late, b"first").unwrap();
        assert!(matches!(output.finish(), Err(WriteError::Exists { .. })));
        assert_eq!(fs::read(&late).unwrap(), b"first");
        assert_eq!(names(folder.path()), ["hard", "late", "link", "x"]);
    }

    #[test]
    fn files_that_belong_together_are_all_there_or_none_is() {
        let folder = tempfile::tempdir().unwrap();
        let create = |name: &str| Output::create(&folder.path().join(name), Overwrite::No, &[]).unwrap();
        let all = ["a", "b", "c"].map(create).into();
        // Another process is faster with one of them.
        fs::write(folder.path().join("b"), b"first").unwrap();
        assert!(matches!(Output::finish_all(all), Err(WriteError::Exists { path }) if path.ends_with("b")));
        assert_eq!(names(folder.path()), ["b"]);
        Output::finish_all(["a", "c"].map(create).into()).unwrap();
        assert_eq!(names(folder.path()), ["a", "b", "c"]);
    }

    #[test]
    #[cfg(unix)]
    fn what_is_no_regular_file_is_written_through_or_refused() {
        use std::os::unix::fs::FileTypeExt as _;
        let folder = tempfile::tempdir().unwrap();
        Output::write(Path::new("/dev/null"), Overwrite::Yes, b"x").unwrap();
        assert!(fs::metadata("/dev/null").unwrap().file_type().is_char_device());
        let error = Output::write(Path::new("/dev/full"), Overwrite::Yes, b"x").unwrap_err().to_string();
        assert!(error.contains("/dev/full") && error.contains("full"), "{error}");
        assert!(matches!(Output::create(folder.path(), Overwrite::Yes, &[]), Err(WriteError::Folder { .. })));
        let link = folder.path().join("link");
        std::os::unix::fs::symlink(folder.path().join("gone"), &link).unwrap();
        assert!(matches!(Output::create(&link, Overwrite::Yes, &[]), Err(WriteError::DeadLink { .. })));
        let socket = folder.path().join("socket");
        let _listening = std::os::unix::net::UnixListener::bind(&socket).unwrap();
        assert!(matches!(Output::create(&socket, Overwrite::Yes, &[]), Err(WriteError::Special { .. })));
        let error = Output::create(&folder.path().join("no/x"), Overwrite::Yes, &[]).unwrap_err().to_string();
        let missing = folder.path().join("no");
        assert!(error.starts_with(&format!("there is no folder {}\n", missing.display())), "{error}");
        assert!(!error.contains(PREFIX), "{error}");
        assert_eq!(names(folder.path()), ["link", "socket"]);
    }

    #[test]
    #[cfg(unix)]
    fn rights_follow_the_umask_and_the_file_that_is_replaced() {
        use std::os::unix::fs::PermissionsExt as _;
        let folder = tempfile::tempdir().unwrap();
        let (path, plain) = (folder.path().join("x"), folder.path().join("plain"));
        Output::write(&path, Overwrite::No, b"1").unwrap();
        fs::write(&plain, b"1").unwrap();
        let mode = |path: &Path| fs::metadata(path).unwrap().permissions().mode();
        assert_eq!(mode(&path), mode(&plain));
        fs::set_permissions(&path, fs::Permissions::from_mode(0o600)).unwrap();
        Output::write(&path, Overwrite::Yes, b"2").unwrap();
        assert_eq!(mode(&path) & 0o777, 0o600);
    }
}
