//! The terminal that a person sits at: its size, a mode in which typed keys wait unseen, and single keys.

use std::io::{IsTerminal as _, Write as _};
use std::sync::{Mutex, PoisonError};
use std::time::Duration;

use crate::os;

/// The modes to go back to while a [`Quiet`] lives.
static BEFORE: Mutex<Option<os::Modes>> = Mutex::new(None);

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
        *before = Some(os::quiet_terminal()?);
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
        os::set_terminal(&modes);
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
    os::key(within)
}

/// Columns of the terminal at stderr, where there is one. Terminals that do not know say 0.
pub fn columns_of_stderr() -> Option<usize> {
    os::columns_of_stderr().filter(|columns| *columns > 0)
}

/// Columns of the terminal at stdout, where there is one.
pub fn columns_of_stdout() -> Option<usize> {
    os::columns_of_stdout().filter(|columns| *columns > 0)
}
