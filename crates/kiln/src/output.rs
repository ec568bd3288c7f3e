//! Where text goes: data to stdout, the rest to stderr. A closed pipe ends the program quietly, a full disk with an
//! error. Text of files and models reaches a terminal without the commands that may be in it.

use std::io::{ErrorKind, IsTerminal as _, Write as _};
use std::sync::OnceLock;
use std::sync::atomic::{AtomicBool, AtomicU8, Ordering};
use std::time::Instant;

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

/// What happened, with its facts: a word, and an object of JSON behind it.
const FACTS: &str = "kiln::facts";

/// Lines of the log are objects of JSON.
static AS_JSON: AtomicBool = AtomicBool::new(false);

/// From now on the log is for programs: an object of JSON a line.
pub(crate) fn log_as_json() {
    AS_JSON.store(true, Ordering::Relaxed);
    VERBOSE.fetch_max(1, Ordering::Relaxed);
}

/// A line of the log for programs.
fn json_line(level: &str, target: &str, text: &str) -> String {
    let time = std::time::SystemTime::now().duration_since(std::time::UNIX_EPOCH).unwrap_or_default();
    let mut line = serde_json::json!({"time": time.as_millis() as f64 / 1e3, "level": level});
    let facts = text.split_once(' ').filter(|_| target == FACTS);
    match facts.and_then(|(what, facts)| Some((what, serde_json::from_str::<serde_json::Value>(facts).ok()?))) {
        Some((what, serde_json::Value::Object(facts))) => {
            line["event"] = what.into();
            if let Some(line) = line.as_object_mut() {
                line.extend(facts);
            }
        }
        _ => line["message"] = text.into(),
    }
    line.to_string()
}

/// Facts as a person reads them: `request id=... status=200`.
fn facts_line(text: &str) -> String {
    let Some((what, facts)) = text.split_once(' ') else { return text.to_owned() };
    let Ok(serde_json::Value::Object(facts)) = serde_json::from_str(facts) else { return text.to_owned() };
    let fact = |(name, value): (&String, &serde_json::Value)| match value.as_str() {
        Some(word) if !word.is_empty() && !word.contains([' ', '"', '=']) => format!(" {name}={word}"),
        _ => format!(" {name}={value}"),
    };
    what.to_owned() + &facts.iter().map(fact).collect::<String>()
}

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
            let level = if record.target() == NOTE { "note" } else { &level };
            let text = record.args().to_string();
            match (AS_JSON.load(Ordering::Relaxed), record.target()) {
                (true, target) => {
                    let _ = writeln!(std::io::stderr().lock(), "{}", json_line(level, target, &text));
                }
                (false, FACTS) => say(&format!("{level}: {}", facts_line(&text))),
                (false, _) if VERBOSE.load(Ordering::Relaxed) > 1 => {
                    say(&format!("{level}: {:.3} s: {text}", since_start()))
                }
                (false, _) => say(&format!("{level}: {text}")),
            }
        }
    }

    fn flush(&self) {}
}

/// When the log was started.
static START: OnceLock<Instant> = OnceLock::new();

/// Seconds since the log was started: with `-vv` every line says when it was.
fn since_start() -> f64 {
    START.get_or_init(Instant::now).elapsed().as_secs_f64()
}

/// Warnings and notes are always shown, more with `-v`.
pub(crate) fn start_log(verbose: u8) {
    since_start();
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

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn logs_are_for_people_or_for_programs() {
        let facts = r#"request {"id":"req_1","path":"/a b","status":200}"#;
        assert_eq!(facts_line(facts), r#"request id=req_1 path="/a b" status=200"#);
        let line: serde_json::Value = serde_json::from_str(&json_line("info", FACTS, facts)).unwrap();
        assert_eq!(
            (line["event"].as_str(), line["status"].as_u64(), line["level"].as_str()),
            (Some("request"), Some(200), Some("info"))
        );
        let line: serde_json::Value = serde_json::from_str(&json_line("warn", "kiln", "two\nlines {")).unwrap();
        assert_eq!(line["message"], "two\nlines {");
    }
}
