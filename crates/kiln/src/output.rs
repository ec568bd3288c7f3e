//! Where text goes: data to stdout, the rest to stderr. A closed pipe ends the program quietly, a full disk with an
//! error. Text of files and models reaches a terminal without the commands that may be in it.

use std::io::{ErrorKind, IsTerminal as _, Write as _};
use std::sync::atomic::{AtomicBool, AtomicU8, Ordering};

use kiln_system::text::for_terminal;

/// Whether the last thing on stdout did not end its line: what goes to stderr next begins a new one.
static MID_LINE: AtomicBool = AtomicBool::new(false);

/// One line of data.
pub(crate) fn print(line: &str) {
    print_piece(line);
    print_piece("\n");
}

/// Data as it comes.
pub(crate) fn print_piece(text: &str) {
    let safe = if std::io::stdout().is_terminal() { for_terminal(text) } else { text.into() };
    write_out(&safe, text);
}

/// Writes what was made of a text.
fn write_out(bytes: &str, text: &str) {
    let Some(last) = text.chars().next_back() else { return };
    let mut out = std::io::stdout().lock();
    match out.write_all(bytes.as_bytes()).and_then(|()| out.flush()) {
        Ok(()) => MID_LINE.store(last != '\n', Ordering::Relaxed),
        // The reader has gone (`kiln devices | head -1`): nobody is left to tell.
        Err(e) if e.kind() == ErrorKind::BrokenPipe => std::process::exit(0),
        Err(e) => {
            say(&format!("error: cannot write the output: {e}"));
            std::process::exit(1);
        }
    }
}

/// Whether stdout is a terminal whose user has nothing against colours.
pub(crate) fn has_style() -> bool {
    std::io::stdout().is_terminal() && std::env::var_os("NO_COLOR").is_none_or(|value| value.is_empty())
}

/// Whether the person at stderr wants to read more than errors: it is a terminal, or `-v` was said.
pub(crate) fn is_watched() -> bool {
    std::io::stderr().is_terminal() || VERBOSE.load(Ordering::Relaxed) > 0
}

/// Data as it comes, in a style of the terminal (`1` bold, `2` dim) where it has one.
pub(crate) fn print_styled(text: &str, style: &str) {
    if text.is_empty() || style.is_empty() || !has_style() {
        return print_piece(text);
    }
    // Only what is between the marks was written by others.
    let marked = format!("\x1b[{style}m{}\x1b[0m", for_terminal(text));
    write_out(&marked, text);
}

/// Takes back the line of the cursor and so many above it, on a terminal.
pub(crate) fn erase_lines(above: usize) {
    let up = if above > 0 { format!("\x1b[{above}A") } else { String::new() };
    write_out(&format!("\r{up}\x1b[J"), "\n");
}

/// One line for the person at the terminal.
pub(crate) fn say(line: &str) {
    let start = if MID_LINE.swap(false, Ordering::Relaxed) { "\n" } else { "" };
    let _ = writeln!(std::io::stderr().lock(), "{start}{}", for_terminal(line));
}

/// One line for the person who has just pressed a key: the terminal shows the key, or a progress bar, where the cursor is.
pub(crate) fn say_beside_key(line: &str) {
    MID_LINE.fetch_or(std::io::stderr().is_terminal(), Ordering::Relaxed);
    say(line);
}

struct Log;

/// Messages of libraries that everybody should see go to this target, at the level of information.
const NOTE: &str = "kiln::note";

/// How much is said: 0 to 2.
static VERBOSE: AtomicU8 = AtomicU8::new(0);

impl log::Log for Log {
    fn enabled(&self, metadata: &log::Metadata<'_>) -> bool {
        let most = match VERBOSE.load(Ordering::Relaxed) {
            0 => log::Level::Warn,
            1 => log::Level::Info,
            _ => log::Level::Debug,
        };
        metadata.target() == NOTE || (metadata.target().starts_with("kiln") && metadata.level() <= most)
    }

    fn log(&self, record: &log::Record<'_>) {
        if self.enabled(record.metadata()) {
            let level = record.level().as_str().to_lowercase();
            say(&format!("{}: {}", if record.target() == NOTE { "note" } else { &level }, record.args()));
        }
    }

    fn flush(&self) {}
}

/// Warnings and notes are always shown, more with `-v`.
pub(crate) fn start_log(verbose: u8) {
    static LOG: Log = Log;
    VERBOSE.store(verbose, Ordering::Relaxed);
    if log::set_logger(&LOG).is_ok() {
        log::set_max_level(if verbose > 1 { log::LevelFilter::Debug } else { log::LevelFilter::Info });
    }
}

pub(crate) use kiln_system::memory::size;

/// A progress bar on stderr; drawn only where stderr is a terminal.
pub(crate) fn progress(total: u64, what: &str) -> indicatif::ProgressBar {
    let bar = indicatif::ProgressBar::new(total);
    let style = indicatif::ProgressStyle::with_template("{msg:18} {bar:32} {pos}/{len} {eta}");
    bar.set_style(style.unwrap_or_else(|_| indicatif::ProgressStyle::default_bar()));
    bar.set_message(what.to_owned());
    bar
}

/// A progress bar that counts bytes.
pub(crate) fn byte_progress(total: u64, what: &str) -> indicatif::ProgressBar {
    let bar = progress(total, what);
    let style =
        indicatif::ProgressStyle::with_template("{msg:18} {bar:32} {bytes}/{total_bytes} {bytes_per_sec} {eta}");
    bar.set_style(style.unwrap_or_else(|_| indicatif::ProgressStyle::default_bar()));
    bar
}
