//! One file from one address: in pieces side by side, resumed where the last try ended, checked before it gets its name.
//!
//! Bytes go to `NAME.kiln-part` beside the target, and a journal (`NAME.kiln-part.json`) tells which pieces are there. Both
//! stay when the download breaks off. The part is locked while a process fetches it, so that two do not write to one file.

use std::fs::{self, File};
use std::io;
use std::path::{Path, PathBuf};
use std::sync::atomic::{AtomicUsize, Ordering};
use std::sync::{Mutex, MutexGuard, PoisonError};

use kiln_system::files::{Output, Overwrite};
use kiln_system::os;
use serde::{Deserialize, Serialize};

use crate::Watch;
use crate::digest::{Digest, hash_file};
use crate::error::{Error, Result};
use crate::http::{Answer, Client, Failure, Request, bare, host};
use crate::settings::Settings;

const SUFFIX: &str = "kiln-part";
/// Bytes that one request asks for: enough that a round trip does not count, few enough to lose.
const PIECES: (u64, u64) = (8 << 20, 64 << 20);

/// What to fetch.
#[derive(Clone, Debug)]
pub(crate) struct Remote {
    /// For people.
    pub(crate) name: String,
    pub(crate) url: String,
    pub(crate) token: Option<String>,
    /// What a registry says of the file.
    pub(crate) bytes: Option<u64>,
    pub(crate) sha256: Option<Digest>,
    /// What the store has recorded of the file, where nothing else says what it must be.
    pub(crate) recorded: Option<Digest>,
    /// The variable that names another folder, for the message where the disk is full.
    pub(crate) variable: &'static str,
}

/// What was fetched.
#[derive(Clone, Debug)]
pub(crate) struct Fetched {
    pub(crate) bytes: u64,
    pub(crate) sha256: Digest,
    /// Whether it was there before.
    pub(crate) was_there: bool,
}

/// Downloads of this process that the next one can resume.
static RESUMABLE: AtomicUsize = AtomicUsize::new(0);

/// Whether a download is running that resumes where it stops now.
pub fn is_resumable() -> bool {
    RESUMABLE.load(Ordering::Relaxed) > 0
}

/// Refuses a file that is no whole GGUF file: an error page, or a file that was cut.
pub(crate) fn check_gguf(name: &str, path: &Path) -> Result<()> {
    // The path of a file that gets another name, or none, says nothing to users.
    let prefix = format!("{}: ", path.display());
    let why = |why: kiln_gguf::Error| {
        let why = why.to_string();
        Error::NotGguf { name: name.to_owned(), why: why.strip_prefix(&prefix).unwrap_or(&why).to_owned() }
    };
    kiln_gguf::check_file(path).map_err(why)
}

/// A download that broke off.
#[derive(Clone, Debug)]
pub struct Incomplete {
    /// The file that it would have become.
    pub path: PathBuf,
    /// Bytes that are there.
    pub done: u64,
    /// Bytes that it will have.
    pub total: u64,
}

/// Downloads in a folder that broke off.
pub(crate) fn incomplete(folder: &Path) -> Vec<Incomplete> {
    let entries = fs::read_dir(folder).into_iter().flatten().flatten().map(|entry| entry.path());
    let parts = entries.filter(|path| path.extension().is_some_and(|end| end == SUFFIX));
    parts
        .map(|part| {
            let journal = Journal::read(&part);
            let total = journal.as_ref().map_or(0, |journal| journal.bytes);
            let done = journal.map_or(0, |journal| journal.done());
            Incomplete { path: part.with_extension(""), done, total }
        })
        .collect()
}

/// Removes what a download left behind.
pub(crate) fn discard(path: &Path) -> io::Result<()> {
    let part = part_path(path);
    let _ = fs::remove_file(journal_path(&part));
    fs::remove_file(part)
}

fn part_path(path: &Path) -> PathBuf {
    let mut name = path.as_os_str().to_owned();
    name.push(format!(".{SUFFIX}"));
    name.into()
}

fn journal_path(part: &Path) -> PathBuf {
    let mut name = part.as_os_str().to_owned();
    name.push(".json");
    name.into()
}

/// What is there of a file.
#[derive(Debug, Serialize, Deserialize)]
struct Journal {
    url: String,
    etag: Option<String>,
    bytes: u64,
    piece: u64,
    /// Which pieces are complete.
    there: Vec<bool>,
}

impl Journal {
    fn read(part: &Path) -> Option<Journal> {
        let journal: Journal = serde_json::from_slice(&fs::read(journal_path(part)).ok()?).ok()?;
        let fits = journal.piece > 0 && journal.there.len() as u64 == journal.bytes.div_ceil(journal.piece);
        fits.then_some(journal)
    }

    fn write(&self, part: &Path) -> Result<()> {
        let text = serde_json::to_vec(self).map_err(|why| Error::Io { path: part.into(), why: why.into() })?;
        Ok(Output::write(&journal_path(part), Overwrite::Yes, &text)?)
    }

    fn range(&self, piece: usize) -> (u64, u64) {
        let from = piece as u64 * self.piece;
        (from, (from + self.piece).min(self.bytes))
    }

    fn done(&self) -> u64 {
        let there = self.there.iter().enumerate().filter(|(_, there)| **there);
        there.map(|(piece, _)| self.range(piece)).map(|(from, to)| to - from).sum()
    }
}

/// What the workers share.
struct Shared<'a> {
    journal: Journal,
    part: &'a Path,
    /// The next piece to look at.
    next: usize,
    failed: Option<Error>,
}

/// Who fetches a file.
enum Locked {
    /// This process does, into this part.
    Mine(File),
    /// Another process did.
    Done(Fetched),
}

/// Counts a download among those that can be resumed.
struct Resumable;

impl Resumable {
    fn begin() -> Resumable {
        RESUMABLE.fetch_add(1, Ordering::Relaxed);
        Resumable
    }
}

impl Drop for Resumable {
    fn drop(&mut self) {
        RESUMABLE.fetch_sub(1, Ordering::Relaxed);
    }
}

/// Fetches files for one store.
pub(crate) struct Downloader<'a> {
    pub(crate) client: &'a Client,
    pub(crate) settings: &'a Settings,
    pub(crate) watch: &'a dyn Watch,
}

impl Downloader<'_> {
    /// Fetches a file to this path. One that is there and is what it should be stays; a damaged one is replaced when all of the
    /// new one is there.
    pub(crate) fn fetch(&self, remote: &Remote, to: &Path) -> Result<Fetched> {
        if let Some(fetched) = self.there(remote, to)? {
            return Ok(fetched);
        }
        let folder = to.parent().unwrap_or(Path::new("."));
        fs::create_dir_all(folder).map_err(Error::io(folder))?;
        let part = part_path(to);
        let file = match self.lock(remote, &part, to)? {
            Locked::Mine(file) => file,
            Locked::Done(fetched) => return Ok(fetched),
        };
        let bytes = match self.fill(remote, &file, &part) {
            Ok(bytes) => bytes,
            Err(why) => {
                // Where nothing came, nothing is worth keeping.
                if Journal::read(&part).is_none_or(|journal| journal.done() == 0) {
                    let _ = discard(to);
                }
                return Err(why);
            }
        };
        let sha256 = self.check(remote, &part).inspect_err(|why| {
            if matches!(why, Error::Mismatch { .. } | Error::NotGguf { .. }) {
                let _ = discard(to);
            }
        })?;
        file.sync_all().map_err(Error::io(&part))?;
        fs::rename(&part, to).map_err(Error::io(to))?;
        let _ = fs::remove_file(journal_path(&part));
        Ok(Fetched { bytes, sha256, was_there: false })
    }

    /// The file if it is there and is what it should be. What is wrong with one that is not is said.
    fn there(&self, remote: &Remote, path: &Path) -> Result<Option<Fetched>> {
        let Ok(there) = fs::metadata(path) else { return Ok(None) };
        let again = |why: String| self.watch.say(&format!("{}: {why}; fetching it again", remote.name));
        let bytes = there.len();
        if let Some(want) = remote.bytes.filter(|want| *want != bytes) {
            again(format!("the file here has {bytes} bytes, expected {want}"));
            return Ok(None);
        }
        let got = self.hash(path)?;
        match remote.sha256.as_ref().or(remote.recorded.as_ref()) {
            Some(want) if *want != got => {
                again(format!("SHA-256 mismatch: expected {want}, the file here has {got}"));
                return Ok(None);
            }
            Some(_) => {}
            None => {
                if let Err(why) = check_gguf(&remote.name, path) {
                    again(why.brief());
                    return Ok(None);
                }
            }
        }
        Ok(Some(Fetched { bytes, sha256: got, was_there: true }))
    }

    /// The part file, which no other process writes to while this one has it; or what another process fetched meanwhile.
    fn lock(&self, remote: &Remote, part: &Path, to: &Path) -> Result<Locked> {
        let mut waited = false;
        loop {
            let open = File::options().create(true).read(true).write(true).truncate(false).open(part);
            let file = open.map_err(Error::io(part))?;
            // Best effort: not every file system knows locks.
            if let Ok(false) = os::try_lock(&file) {
                self.watch.say(&format!("another process fetches {}; waiting for it", remote.name));
                let _ = os::lock(&file);
                waited = true;
            }
            // The other one may have given the file its name, or thrown it away.
            let same = os::is_open_as(&file, part);
            if (waited || !same)
                && let Some(fetched) = self.there(remote, to)?
            {
                if same {
                    let _ = discard(to);
                }
                return Ok(Locked::Done(fetched));
            }
            if same {
                return Ok(Locked::Mine(file));
            }
        }
    }

    /// Fetches what is missing.
    fn fill(&self, remote: &Remote, file: &File, part: &Path) -> Result<u64> {
        let first = self.request(remote, Some((0, 1)));
        let answer = self.client.get(&first)?;
        let etag = answer.header("etag").map(str::to_owned);
        let nonsense = |why: String| Error::Nonsense { host: host(&remote.url), why };
        let Some(bytes) = total(&answer) else {
            return Err(nonsense("it does not tell how long the file is".into()));
        };
        if let Some(want) = remote.bytes.filter(|want| *want != bytes) {
            return Err(nonsense(format!("{} has {bytes} bytes where {want} were announced", remote.name)));
        }
        if answer.status == 200 {
            return self.stream(remote, answer, file, part, bytes);
        }
        drop(answer);

        let piece = self.settings.piece.unwrap_or_else(|| (bytes / 64).clamp(PIECES.0, PIECES.1)).max(1);
        // Whatever a server tells of its length, the journal stays small.
        let piece = piece.max(bytes >> 16);
        let old = Journal::read(part).filter(|old| {
            let len = file.metadata().map_or(0, |m| m.len());
            (&old.url, &old.etag, old.bytes, len) == (&bare(&remote.url), &etag, bytes, bytes)
        });
        let fresh = old.is_none();
        self.check_room(remote, part, bytes - old.as_ref().map_or(0, Journal::done))?;
        let journal = old.unwrap_or_else(|| Journal {
            url: bare(&remote.url),
            etag: etag.clone(),
            bytes,
            piece,
            there: vec![false; bytes.div_ceil(piece) as usize],
        });
        let done = journal.done();
        if fresh {
            file.set_len(0).and_then(|()| file.set_len(bytes)).map_err(Error::io(part))?;
            journal.write(part)?;
        }
        let _resumable = Resumable::begin();
        self.watch.start(&remote.name, bytes, done);
        let workers = self.settings.connections.clamp(1, 16).min(journal.there.len());
        let shared = Mutex::new(Shared { journal, part, next: 0, failed: None });
        std::thread::scope(|scope| {
            for _ in 0..workers {
                scope.spawn(|| self.work(remote, etag.as_deref(), file, &shared));
            }
        });
        self.watch.end();
        let shared = shared.into_inner().unwrap_or_else(PoisonError::into_inner);
        match shared.failed {
            Some(why) => Err(why),
            None => Ok(bytes),
        }
    }

    fn request<'a>(&self, remote: &'a Remote, range: Option<(u64, u64)>) -> Request<'a> {
        Request { token: remote.token.as_deref(), range, ..Request::new(&remote.url) }
    }

    /// Takes one missing piece after the other.
    fn work(&self, remote: &Remote, etag: Option<&str>, file: &File, shared: &Mutex<Shared<'_>>) {
        loop {
            let (piece, range) = {
                let mut shared = lock(shared);
                let from = shared.next;
                let missing = shared.journal.there[from..].iter().position(|there| !there);
                let (Some(missing), None) = (missing, &shared.failed) else { return };
                shared.next = from + missing + 1;
                (from + missing, shared.journal.range(from + missing))
            };
            let result = self.piece(remote, etag, file, range, &|| lock(shared).failed.is_some());
            let mut shared = lock(shared);
            let noted = result.and_then(|()| {
                shared.journal.there[piece] = true;
                shared.journal.write(shared.part)
            });
            if let Err(why) = noted {
                let (done, total) = (shared.journal.done(), shared.journal.bytes);
                let why = match why {
                    Error::Unreachable { why, .. } => Error::BrokenOff { name: remote.name.clone(), done, total, why },
                    why => why,
                };
                shared.failed.get_or_insert(why);
                return;
            }
        }
    }

    /// One piece, resumed within itself as long as something comes.
    fn piece(
        &self,
        remote: &Remote,
        etag: Option<&str>,
        file: &File,
        (mut from, to): (u64, u64),
        given_up: &dyn Fn() -> bool,
    ) -> Result<()> {
        let mut tried = 0;
        let mut buffer = vec![0; 1 << 18];
        while from < to && !given_up() {
            let before = from;
            let failure = match self.client.once(&self.request(remote, Some((from, to)))) {
                Err(Failure::Lasting(why)) => return Err(why),
                Err(Failure::Passing(why, wait)) => Some((why.brief(), wait)),
                Ok(answer) => {
                    check_piece(remote, etag, &answer, from)?;
                    let mut reader = answer.body.into_reader();
                    self.pour(&mut reader, file, &mut from, to, &mut buffer)?.map(|why| (why, None))
                }
            };
            let Some((why, wait)) = failure else { continue };
            tried = if from > before { 1 } else { tried + 1 };
            if !self.client.rest(tried, wait) {
                return Err(Error::Unreachable { host: host(&remote.url), why });
            }
        }
        Ok(())
    }

    /// Writes what comes; says why it ended before its time.
    fn pour(
        &self,
        reader: &mut dyn io::Read,
        file: &File,
        from: &mut u64,
        to: u64,
        buffer: &mut [u8],
    ) -> Result<Option<String>> {
        while *from < to {
            let n = match reader.read(buffer) {
                Ok(0) => return Ok(Some("the connection ended early".into())),
                Ok(n) => n,
                Err(why) => return Ok(Some(why.to_string())),
            };
            // More than was asked for is not written over the next piece.
            let n = n.min(usize::try_from(to - *from).unwrap_or(usize::MAX));
            os::write_all_at(file, &buffer[..n], *from).map_err(|why| self.disk(why))?;
            *from += n as u64;
            self.watch.advance(n as u64);
        }
        Ok(None)
    }

    fn disk(&self, why: io::Error) -> Error {
        let what = match why.kind() {
            io::ErrorKind::StorageFull => "disk full: the download cannot be written".to_owned(),
            _ => format!("cannot write the download: {why}"),
        };
        Error::Refused { what, hint: "free some space; the same command resumes there".into() }
    }

    /// A server without ranges: all at once, from the beginning.
    fn stream(&self, remote: &Remote, answer: Answer, file: &File, part: &Path, bytes: u64) -> Result<u64> {
        self.check_room(remote, part, bytes)?;
        let _ = fs::remove_file(journal_path(part));
        self.watch.start(&remote.name, bytes, 0);
        let (mut next, mut tried) = (Some(answer), 0);
        let result = loop {
            let answer = match next.take().map_or_else(|| self.client.get(&self.request(remote, None)), Ok) {
                Ok(answer) => answer,
                Err(why) => break Err(why),
            };
            file.set_len(0).map_err(Error::io(part))?;
            let mut at = 0;
            match self.pour(&mut answer.body.into_reader(), file, &mut at, bytes, &mut vec![0; 1 << 18])? {
                None => break Ok(bytes),
                Some(why) => {
                    tried += 1;
                    if !self.client.rest(tried, None) {
                        let why = format!("{why}, and this server cannot resume a download");
                        break Err(Error::BrokenOff { name: remote.name.clone(), done: 0, total: bytes, why });
                    }
                    self.watch.end();
                    self.watch.start(&remote.name, bytes, 0);
                }
            }
        };
        self.watch.end();
        result
    }

    fn check_room(&self, remote: &Remote, part: &Path, needed: u64) -> Result<()> {
        check_room(&remote.name, part.parent().unwrap_or(Path::new(".")), needed, remote.variable)
    }

    /// The hash of what came, which must be the one that was announced, of a whole GGUF file.
    fn check(&self, remote: &Remote, part: &Path) -> Result<Digest> {
        let got = self.hash(part)?;
        match &remote.sha256 {
            Some(want) if *want != got => Err(Error::Mismatch { name: remote.name.clone(), want: want.clone(), got }),
            _ => check_gguf(&remote.name, part).map(|()| got),
        }
    }

    fn hash(&self, path: &Path) -> Result<Digest> {
        let bytes = fs::metadata(path).map_err(Error::io(path))?.len();
        self.watch.start("checking", bytes, 0);
        let got = hash_file(path, &mut |n| self.watch.advance(n));
        self.watch.end();
        got
    }
}

/// Refuses what the disk of a folder has no space for.
pub(crate) fn check_room(name: &str, folder: &Path, needed: u64, variable: &'static str) -> Result<()> {
    // Best effort: a disk that does not tell fails when it is full.
    let Some(free) = os::free_bytes(folder) else { return Ok(()) };
    if free < needed {
        let (name, folder) = (name.to_owned(), folder.to_owned());
        return Err(Error::NoRoom { name, folder, free, needed, variable });
    }
    Ok(())
}

fn lock<'a, 'b>(shared: &'a Mutex<Shared<'b>>) -> MutexGuard<'a, Shared<'b>> {
    shared.lock().unwrap_or_else(PoisonError::into_inner)
}

/// The length of the whole file.
fn total(answer: &Answer) -> Option<u64> {
    match answer.status {
        206 => answer.header("content-range")?.rsplit('/').next()?.trim().parse().ok(),
        _ => answer.header("content-length")?.trim().parse().ok(),
    }
}

/// A piece must be the one that was asked for, of the file that the others are of.
fn check_piece(remote: &Remote, etag: Option<&str>, answer: &Answer, from: u64) -> Result<()> {
    let start = answer
        .header("content-range")
        .and_then(|range| range.trim().strip_prefix("bytes ")?.split('-').next()?.parse::<u64>().ok());
    let same = etag.is_none() || answer.header("etag").is_none() || answer.header("etag") == etag;
    if answer.status == 206 && start == Some(from) && same {
        return Ok(());
    }
    let why = format!("{} changed while it was fetched, or came in another piece than asked for", remote.name);
    Err(Error::Nonsense { host: host(&remote.url), why })
}
