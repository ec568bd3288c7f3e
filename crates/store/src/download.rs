//! One file from one address: in pieces side by side, resumed where the last try ended, checked before it gets its name.
//!
//! Bytes go to `NAME.kiln-part` beside the target, and a journal (`NAME.kiln-part.json`) tells which pieces are there. Both
//! stay when the download breaks off. The part is locked while a process fetches it, so that two do not write to one file.

use std::fs::{self, File};
use std::io;
use std::os::unix::fs::{FileExt as _, MetadataExt as _};
use std::path::{Path, PathBuf};
use std::sync::{Mutex, MutexGuard, PoisonError};

use kiln_system::files::{Output, Overwrite};
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
    /// The variable that names another folder, for the message where the disk is full.
    pub(crate) variable: &'static str,
}

/// What was fetched.
#[derive(Clone, Debug)]
pub(crate) struct Fetched {
    pub(crate) bytes: u64,
    pub(crate) sha256: Digest,
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

/// Fetches files for one store.
pub(crate) struct Downloader<'a> {
    pub(crate) client: &'a Client,
    pub(crate) settings: &'a Settings,
    pub(crate) watch: &'a dyn Watch,
}

impl Downloader<'_> {
    /// Fetches a file to this path. One that is there already is left as it is.
    pub(crate) fn fetch(&self, remote: &Remote, to: &Path) -> Result<Fetched> {
        let folder = to.parent().unwrap_or(Path::new("."));
        fs::create_dir_all(folder).map_err(Error::io(folder))?;
        let part = part_path(to);
        let file = self.lock(remote, &part, to)?;
        if let Ok(there) = fs::metadata(to) {
            // Another process was faster.
            let sha256 = hash_file(to, &mut |_| {})?;
            let _ = discard(to);
            return Ok(Fetched { bytes: there.len(), sha256 });
        }
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
            if matches!(why, Error::Damaged { .. }) {
                let _ = discard(to);
            }
        })?;
        file.sync_all().map_err(Error::io(&part))?;
        fs::rename(&part, to).map_err(Error::io(to))?;
        let _ = fs::remove_file(journal_path(&part));
        Ok(Fetched { bytes, sha256 })
    }

    /// The part file, which no other process writes to while this one has it.
    fn lock(&self, remote: &Remote, part: &Path, to: &Path) -> Result<File> {
        loop {
            let open = File::options().create(true).read(true).write(true).truncate(false).open(part);
            let file = open.map_err(Error::io(part))?;
            if let Err(fs::TryLockError::WouldBlock) = file.try_lock() {
                self.watch.say(&format!("another process fetches {}; waiting for it", remote.name));
                let _ = file.lock();
            }
            // The other one may have given the file its name, or thrown it away.
            let same = fs::metadata(part).is_ok_and(|m| file.metadata().is_ok_and(|own| own.ino() == m.ino()));
            if same || to.exists() {
                return Ok(file);
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
                Err(Failure::Passing(why, wait)) => Some((why, wait)),
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
            file.write_all_at(&buffer[..n], *from).map_err(|why| self.disk(why))?;
            *from += n as u64;
            self.watch.advance(n as u64);
        }
        Ok(None)
    }

    fn disk(&self, why: io::Error) -> Error {
        let what = format!("cannot write the download: {why}");
        let hint = "make room on the disk; the same command goes on from here".into();
        Error::Refused { what, hint }
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
                        let why = format!("{why}, and the server cannot go on in the middle");
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
        let folder = part.parent().unwrap_or(Path::new("."));
        // Best effort: a disk that does not tell fails when it is full.
        let Ok(disk) = rustix::fs::statvfs(folder) else { return Ok(()) };
        let free = disk.f_bavail.saturating_mul(disk.f_frsize);
        if free < needed {
            let (name, folder, variable) = (remote.name.clone(), folder.to_owned(), remote.variable);
            return Err(Error::NoRoom { name, folder, free, needed, variable });
        }
        Ok(())
    }

    /// The hash of what came, which must be the one that was announced.
    fn check(&self, remote: &Remote, part: &Path) -> Result<Digest> {
        let bytes = fs::metadata(part).map_err(Error::io(part))?.len();
        self.watch.start("checking", bytes, 0);
        let got = hash_file(part, &mut |n| self.watch.advance(n));
        self.watch.end();
        let got = got?;
        match &remote.sha256 {
            Some(want) if *want != got => {
                Err(Error::Damaged { name: remote.name.clone(), why: format!("its SHA-256 is {got}, want {want}") })
            }
            _ => Ok(got),
        }
    }
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
