//! An MCP server that is a program: a line of JSON is a message, on its stdin and its stdout. It runs with the rights of the user, and what
//! it has started ends with it.

use std::collections::HashMap;
use std::io::{BufRead, BufReader, Read, Write as _};
use std::path::PathBuf;
use std::process::{ChildStdin, Command};
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::sync::mpsc::{Receiver, RecvTimeoutError, Sender, SyncSender, channel, sync_channel};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::{Duration, Instant};

use kiln_system::os::{self, Ended, PROGRAM_VARIABLES};
use kiln_system::text::{shown, shown_bytes};
use serde_json::{Value, json};

use super::link::Link;
use super::rpc::{Answer, Failure, Incoming, incoming, notification, request};
use crate::limits::Wait;

/// Messages that may wait for a server to read them.
const WAITING: usize = 64;
/// Bytes of its stderr that are logged.
const MOST_LOGGED: usize = 256 << 10;
/// How long a server may take to end when its stdin is closed.
const FAREWELL: Duration = Duration::from_millis(500);

/// A program to start.
pub(crate) struct Program<'a> {
    pub(crate) name: &'a str,
    pub(crate) program: &'a str,
    pub(crate) arguments: &'a [String],
    pub(crate) variables: &'a [(String, String)],
    pub(crate) folder: Option<&'a PathBuf>,
    /// Bytes that it may send while it is asked one thing.
    pub(crate) most: usize,
}

/// What the threads of a connection share.
#[derive(Default)]
struct Shared {
    waiting: Mutex<HashMap<u64, Sender<Answer>>>,
    /// Bytes since something was last asked.
    received: AtomicU64,
    changed: AtomicBool,
    end: Mutex<Option<Failure>>,
    /// The last that was said on stderr.
    last_words: Mutex<String>,
}

fn lock<T>(mutex: &Mutex<T>) -> MutexGuard<'_, T> {
    mutex.lock().unwrap_or_else(PoisonError::into_inner)
}

impl Shared {
    /// Nothing more comes: all who wait are told why.
    fn finish(&self, why: Failure) {
        lock(&self.end).get_or_insert_with(|| why.clone());
        for (_, waiting) in lock(&self.waiting).drain() {
            let _ = waiting.send(Err(why.clone()));
        }
    }
}

/// A program that runs.
pub(crate) struct Stdio {
    shared: Arc<Shared>,
    /// To its stdin; none when it is to end.
    to: Option<SyncSender<Vec<u8>>>,
    child: Arc<Mutex<os::Program>>,
    next: AtomicU64,
}

impl Stdio {
    pub(crate) fn start(program: &Program<'_>) -> Result<Stdio, Failure> {
        let mut command = Command::new(program.program);
        command.args(program.arguments).env_clear();
        // The others may hold keys, and are none of its business.
        command.envs(PROGRAM_VARIABLES.iter().filter_map(|name| Some((name, std::env::var_os(name)?))));
        command.envs(program.variables.iter().map(|(name, value)| (name, value)));
        if let Some(folder) = program.folder {
            command.current_dir(folder);
        }
        let pipe = std::process::Stdio::piped;
        command.stdin(pipe()).stdout(pipe()).stderr(pipe());
        let failed =
            |why: std::io::Error| Failure::Gone(format!("{} cannot be started: {why}", shown(program.program)));
        let mut child = os::Program::start(&mut command).map_err(failed)?;
        let shared = Arc::<Shared>::default();
        let (to, from) = sync_channel(WAITING);
        let of = child.child();
        let pipes = (of.stdin.take(), of.stdout.take(), of.stderr.take());
        let child = Arc::new(Mutex::new(child));
        let stdio = Stdio {
            shared: Arc::clone(&shared),
            to: Some(to.clone()),
            child: Arc::clone(&child),
            next: AtomicU64::new(1),
        };
        let (Some(stdin), Some(stdout), Some(stderr)) = pipes else {
            return Err(Failure::Gone("has no pipes".to_owned()));
        };
        let thread = |name: &str| std::thread::Builder::new().name(format!("mcp {name}"));
        let (told, most) = (Arc::clone(&shared), program.most);
        thread("writer").spawn(move || write(stdin, &from)).map_err(failed)?;
        let reader = move || {
            let why = read(BufReader::new(stdout), &told, &to, most);
            if why != Failure::Gone(String::new()) {
                lock(&child).end();
            }
            told.finish(why);
            // The writer holds the stdin of the program; an empty message is its end.
            let _ = to.try_send(Vec::new());
        };
        thread("reader").spawn(reader).map_err(failed)?;
        let name = program.name.to_owned();
        thread("log").spawn(move || log_lines(&name, BufReader::new(stderr), &shared)).map_err(failed)?;
        Ok(stdio)
    }

    fn send(&self, message: &Value) -> Result<(), Failure> {
        if let Some(why) = lock(&self.shared.end).clone() {
            return Err(self.in_words(why));
        }
        let bytes = format!("{message}\n").into_bytes();
        let sent = self.to.as_ref().is_some_and(|to| to.try_send(bytes).is_ok());
        if sent { Ok(()) } else { Err(Failure::Gone("reads nothing of what it is sent".to_owned())) }
    }

    /// A failure as it is told: the reader knows that the program has closed its stdout, and not how it ended.
    fn in_words(&self, why: Failure) -> Failure {
        match why {
            Failure::Gone(words) if words.is_empty() => {
                // Its last words come beside its end.
                std::thread::sleep(Duration::from_millis(50));
                let status = ended(&mut lock(&self.child)).unwrap_or_else(|| "closed its stdout".to_owned());
                let words = lock(&self.shared.last_words).clone();
                Failure::Gone(if words.is_empty() { status } else { format!("{status}: {words}") })
            }
            why => why,
        }
    }
}

impl Link for Stdio {
    fn ask(&self, method: &str, params: &Value, wait: &Wait<'_>) -> Answer {
        let id = self.next.fetch_add(1, Ordering::Relaxed);
        let (answered, answer) = channel();
        lock(&self.shared.waiting).insert(id, answered);
        self.shared.received.store(0, Ordering::Relaxed);
        let forget = || drop(lock(&self.shared.waiting).remove(&id));
        if let Err(why) = self.send(&request(id, method, params)) {
            forget();
            return Err(why);
        }
        loop {
            let given_up = match (wait.slice(), (wait.cancelled)()) {
                (_, true) => Failure::Cancelled,
                (None, _) => Failure::Late,
                (Some(slice), false) => match answer.recv_timeout(slice) {
                    Ok(answer) => return answer.map_err(|why| self.in_words(why)),
                    Err(RecvTimeoutError::Timeout) => continue,
                    Err(RecvTimeoutError::Disconnected) => return Err(self.in_words(Failure::Gone(String::new()))),
                },
            };
            forget();
            let reason = json!({"requestId": id, "reason": given_up.to_string()});
            // It may be past hearing that.
            let _ = self.tell("notifications/cancelled", &reason);
            return Err(given_up);
        }
    }

    fn tell(&self, method: &str, params: &Value) -> Result<(), Failure> {
        self.send(&notification(method, params))
    }

    fn speaks(&self, _: &str) {}

    fn end(&self) -> Option<String> {
        let end = lock(&self.shared.end).clone()?;
        Some(self.in_words(end).to_string())
    }

    fn take_changed(&self) -> bool {
        self.shared.changed.swap(false, Ordering::Relaxed)
    }
}

impl Drop for Stdio {
    fn drop(&mut self) {
        // A program that reads its stdin learns by its end that it is no longer needed.
        self.shared.finish(Failure::Gone("was ended".to_owned()));
        if let Some(to) = self.to.take() {
            let _ = to.try_send(Vec::new());
        }
        let until = Instant::now() + FAREWELL;
        while Instant::now() < until && lock(&self.child).ended().is_none() {
            std::thread::sleep(Duration::from_millis(10));
        }
        lock(&self.child).end();
    }
}

/// How a program has ended, if it has.
fn ended(child: &mut os::Program) -> Option<String> {
    Some(match child.ended()? {
        Ended::Status(code) => format!("has ended with status {code}"),
        Ended::Signal(signal) => format!("was ended by signal {signal}"),
        Ended::Unknown => "has ended".to_owned(),
    })
}

/// Writes what is to be sent, until nobody has anything to send or the program reads no more.
fn write(mut stdin: ChildStdin, from: &Receiver<Vec<u8>>) {
    while let Ok(bytes) = from.recv() {
        if bytes.is_empty() || stdin.write_all(&bytes).and_then(|()| stdin.flush()).is_err() {
            return;
        }
    }
}

/// A line of the program, with its end; empty where there are no more.
fn line(stdout: &mut impl BufRead, received: &AtomicU64, most: usize) -> Result<Vec<u8>, Failure> {
    let mut line = Vec::new();
    loop {
        // How it ended is found out by those who tell: the process may not be over when its pipe is.
        let bytes = stdout.fill_buf().map_err(|_| Failure::Gone(String::new()))?;
        let end = bytes.iter().position(|byte| *byte == b'\n');
        let count = end.map_or(bytes.len(), |end| end + 1);
        line.extend_from_slice(&bytes[..count]);
        stdout.consume(count);
        if received.fetch_add(count as u64, Ordering::Relaxed) + count as u64 > most as u64 {
            return Err(Failure::TooMuch(most));
        }
        if end.is_some() || count == 0 {
            return Ok(line);
        }
    }
}

/// Reads messages until the program ends or says too much.
fn read(mut stdout: impl BufRead, shared: &Shared, to: &SyncSender<Vec<u8>>, most: usize) -> Failure {
    loop {
        let line = match line(&mut stdout, &shared.received, most) {
            Ok(line) if line.is_empty() => return Failure::Gone(String::new()),
            Ok(line) => line,
            Err(why) => return why,
        };
        let Ok(value) = serde_json::from_slice::<Value>(&line) else {
            if !line.trim_ascii().is_empty() {
                log::debug!("an MCP server writes what is no message: {}", shown_bytes(&line));
            }
            continue;
        };
        match incoming(&value) {
            Incoming::Answer(id, answer) => {
                if let Some(waiting) = lock(&shared.waiting).remove(&id) {
                    let _ = waiting.send(answer);
                }
            }
            Incoming::Asked(told) => drop(to.try_send(format!("{told}\n").into_bytes())),
            Incoming::ToolsChanged => shared.changed.store(true, Ordering::Relaxed),
            Incoming::Other => {}
        }
    }
}

/// Logs what the program says on stderr.
fn log_lines(name: &str, mut stderr: impl BufRead, shared: &Shared) {
    let mut logged = 0;
    loop {
        let mut line = Vec::new();
        match stderr.by_ref().take(4096).read_until(b'\n', &mut line) {
            Ok(0) | Err(_) => return,
            // All is read, so that the program is not held up; nobody reads logs without end.
            Ok(count) => logged += count,
        }
        let line = line.trim_ascii();
        if line.is_empty() || logged > MOST_LOGGED {
            continue;
        }
        log::debug!("{name}: {}", shown_bytes(line));
        *lock(&shared.last_words) = shown_bytes(line);
    }
}
