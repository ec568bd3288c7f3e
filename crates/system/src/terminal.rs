//! The terminal that a person sits at: its size, a mode in which typed keys wait unseen, and single keys.

use std::io::{IsTerminal as _, Write as _};
use std::sync::{Mutex, PoisonError};
use std::time::Duration;

use rustix::event::{PollFd, PollFlags, Timespec, poll};
use rustix::stdio::{stderr, stdin, stdout};
use rustix::termios::{InputModes, LocalModes, OptionalActions, Termios, tcgetattr, tcgetwinsize, tcsetattr};

/// The modes to go back to while a [`Quiet`] lives.
static BEFORE: Mutex<Option<Termios>> = Mutex::new(None);

/// Asks the terminal to mark pasted text, and to stop marking it.
const MARK_PASTES: &str = "\x1b[?2004h";
const NO_MARKS: &str = "\x1b[?2004l";

/// As long as this lives, the terminal does not echo what is typed and keeps every byte for the next reader: without the limit of a
/// line, and behind Ctrl-C as well. Ctrl-C and Ctrl-Z still send their signals.
#[derive(Debug)]
pub struct Quiet(());

impl Quiet {
    /// Begins now; nothing where stdin is no terminal, or is quiet already.
    pub fn begin() -> Option<Quiet> {
        let mut before = BEFORE.lock().unwrap_or_else(PoisonError::into_inner);
        if before.is_some() || !std::io::stdin().is_terminal() {
            return None;
        }
        let modes = tcgetattr(stdin()).ok()?;
        let mut quiet = modes.clone();
        quiet.local_modes -= LocalModes::ECHO | LocalModes::ECHONL | LocalModes::ICANON;
        quiet.local_modes |= LocalModes::NOFLSH;
        // Enter stays what line editors expect of it.
        quiet.input_modes -= InputModes::ICRNL;
        tcsetattr(stdin(), OptionalActions::Now, &quiet).ok()?;
        *before = Some(modes);
        mark_pastes(MARK_PASTES);
        Some(Quiet(()))
    }
}

impl Drop for Quiet {
    fn drop(&mut self) {
        restore();
    }
}

/// Gives the terminal back as a [`Quiet`] found it. For the end of the process, too: a shell should not start without echo.
pub fn restore() {
    if let Some(modes) = BEFORE.lock().unwrap_or_else(PoisonError::into_inner).take() {
        let _ = tcsetattr(stdin(), OptionalActions::Now, &modes);
        mark_pastes(NO_MARKS);
    }
}

/// Text that is pasted during an answer stays one message where the terminal knows marks.
fn mark_pastes(request: &str) {
    let is_plain = std::env::var_os("TERM").is_none_or(|term| term.is_empty() || term == "dumb");
    if std::io::stdout().is_terminal() && !is_plain {
        let mut out = std::io::stdout().lock();
        let _ = out.write_all(request.as_bytes()).and_then(|()| out.flush());
    }
}

/// The next byte that is typed within this time. For the time of a [`Quiet`]: otherwise keys come when their line is complete.
pub fn key(within: Duration) -> Option<u8> {
    let input = stdin();
    let limit = Timespec { tv_sec: within.as_secs() as _, tv_nsec: within.subsec_nanos().into() };
    let mut waits = [PollFd::new(&input, PollFlags::IN)];
    if poll(&mut waits, Some(&limit)).ok()? == 0 {
        return None;
    }
    let mut byte = [0];
    (rustix::io::read(input, &mut byte).ok()? == 1).then_some(byte[0])
}

/// Columns of the terminal at stderr, where there is one.
pub fn columns_of_stderr() -> Option<usize> {
    columns(tcgetwinsize(stderr()).ok()?.ws_col)
}

/// Columns of the terminal at stdout, where there is one.
pub fn columns_of_stdout() -> Option<usize> {
    columns(tcgetwinsize(stdout()).ok()?.ws_col)
}

/// Terminals that do not know say 0.
fn columns(told: u16) -> Option<usize> {
    Some(usize::from(told)).filter(|columns| *columns > 0)
}
