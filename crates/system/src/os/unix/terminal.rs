//! Modes, size and keys of a terminal.

use std::time::Duration;

use rustix::event::{PollFd, PollFlags, Timespec, poll};
use rustix::stdio::{stderr, stdin, stdout};
use rustix::termios::{InputModes, LocalModes, OptionalActions, Termios, tcgetattr, tcgetwinsize, tcsetattr};

/// Modes of the terminal at stdin.
pub(crate) type Modes = Termios;

/// Stops the echo of the terminal at stdin, and gives every byte to its reader at once. Tells the modes to go back to; none where that
/// cannot be done.
pub(crate) fn quiet_terminal() -> Option<Modes> {
    let modes = tcgetattr(stdin()).ok()?;
    let mut quiet = modes.clone();
    quiet.local_modes -= LocalModes::ECHO | LocalModes::ECHONL | LocalModes::ICANON;
    quiet.local_modes |= LocalModes::NOFLSH;
    // Enter stays what line editors expect of it.
    quiet.input_modes -= InputModes::ICRNL;
    tcsetattr(stdin(), OptionalActions::Now, &quiet).ok()?;
    Some(modes)
}

/// Sets the modes of the terminal at stdin.
pub(crate) fn set_terminal(modes: &Modes) {
    let _ = tcsetattr(stdin(), OptionalActions::Now, modes);
}

/// The next byte that is typed within this time.
pub(crate) fn key(within: Duration) -> Option<u8> {
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
pub(crate) fn columns_of_stderr() -> Option<usize> {
    Some(tcgetwinsize(stderr()).ok()?.ws_col.into())
}

/// Columns of the terminal at stdout, where there is one.
pub(crate) fn columns_of_stdout() -> Option<usize> {
    Some(tcgetwinsize(stdout()).ok()?.ws_col.into())
}
