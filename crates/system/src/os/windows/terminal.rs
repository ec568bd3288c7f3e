//! Modes, size and keys of a console.

use std::time::{Duration, Instant};

use windows_sys::Win32::Foundation::WAIT_OBJECT_0;
use windows_sys::Win32::System::Console::{
    CONSOLE_MODE, CONSOLE_SCREEN_BUFFER_INFO, ENABLE_ECHO_INPUT, ENABLE_LINE_INPUT, GetConsoleMode,
    GetConsoleScreenBufferInfo, GetStdHandle, INPUT_RECORD, KEY_EVENT, ReadConsoleInputW, STD_ERROR_HANDLE, STD_HANDLE,
    STD_INPUT_HANDLE, STD_OUTPUT_HANDLE, SetConsoleMode,
};
use windows_sys::Win32::System::Threading::WaitForSingleObject;

/// Modes of the console at stdin.
pub(crate) type Modes = CONSOLE_MODE;

/// Stops the echo of the console at stdin, and gives every key to its reader at once. Tells the modes to go back to; none where that cannot
/// be done. Ctrl-C still interrupts.
pub(crate) fn quiet_terminal() -> Option<Modes> {
    let mut modes = 0;
    // SAFETY: the functions may be asked of any handle, also of none, and write to memory that is ours.
    unsafe {
        let input = GetStdHandle(STD_INPUT_HANDLE);
        if GetConsoleMode(input, &mut modes) == 0
            || SetConsoleMode(input, modes & !(ENABLE_ECHO_INPUT | ENABLE_LINE_INPUT)) == 0
        {
            return None;
        }
    }
    Some(modes)
}

/// Sets the modes of the console at stdin.
pub(crate) fn set_terminal(modes: &Modes) {
    // SAFETY: the functions may be asked of any handle, also of none.
    unsafe { SetConsoleMode(GetStdHandle(STD_INPUT_HANDLE), *modes) };
}

/// The next byte that is typed within this time. What is no single byte, such as an arrow key, is passed over.
pub(crate) fn key(within: Duration) -> Option<u8> {
    let end = Instant::now() + within;
    // SAFETY: the function may be asked for any of the three.
    let input = unsafe { GetStdHandle(STD_INPUT_HANDLE) };
    loop {
        let left = u32::try_from(end.saturating_duration_since(Instant::now()).as_millis()).unwrap_or(u32::MAX - 1);
        // SAFETY: the handle stays open as long as the process.
        if unsafe { WaitForSingleObject(input, left) } != WAIT_OBJECT_0 {
            return None;
        }
        let (mut event, mut count) = (INPUT_RECORD::default(), 0);
        // SAFETY: there is room for one event, and no more are asked for.
        if unsafe { ReadConsoleInputW(input, &mut event, 1, &mut count) } == 0 || count == 0 {
            return None;
        }
        if u32::from(event.EventType) != KEY_EVENT {
            continue;
        }
        // SAFETY: the type says that it is a key, and all keys have a character, which may be 0.
        let (down, unit) = unsafe { (event.Event.KeyEvent.bKeyDown, event.Event.KeyEvent.uChar.UnicodeChar) };
        match u8::try_from(unit) {
            Ok(byte) if down != 0 && byte != 0 => return Some(byte),
            _ => {}
        }
    }
}

/// Columns of the console at stderr, where there is one.
pub(crate) fn columns_of_stderr() -> Option<usize> {
    columns(STD_ERROR_HANDLE)
}

/// Columns of the console at stdout, where there is one.
pub(crate) fn columns_of_stdout() -> Option<usize> {
    columns(STD_OUTPUT_HANDLE)
}

fn columns(of: STD_HANDLE) -> Option<usize> {
    let mut told = CONSOLE_SCREEN_BUFFER_INFO::default();
    // SAFETY: the functions may be asked of any handle, also of none, and write to memory that is ours.
    if unsafe { GetConsoleScreenBufferInfo(GetStdHandle(of), &mut told) } == 0 {
        return None;
    }
    usize::try_from(told.srWindow.Right - told.srWindow.Left + 1).ok()
}
