//! Where text goes: data to stdout, the rest to stderr. A closed pipe ends the program quietly, a full disk with an
//! error. Text of files and models reaches a terminal without the commands that may be in it.

use std::io::{ErrorKind, IsTerminal as _, Write as _};
use std::sync::OnceLock;
use std::sync::atomic::{AtomicBool, AtomicU8, Ordering};
use std::time::Instant;

use kiln_system::terminal::columns_of_stderr;
use kiln_system::text::for_terminal;
use unicode_width::UnicodeWidthStr as _;

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
        // The reader has gone (`kiln devices | head -1`): there is no one to report to.
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
    std::io::stderr().is_terminal() || is_verbose()
}

/// Whether `-v` was said.
pub(crate) fn is_verbose() -> bool {
    VERBOSE.load(Ordering::Relaxed) > 0
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

/// Clears the line of the cursor and this many above it, on a terminal.
pub(crate) fn erase_lines(above: usize) {
    let up = if above > 0 { format!("\x1b[{above}A") } else { String::new() };
    write_out(&format!("\r{up}\x1b[J"), "\n");
}

/// One line for the person at the terminal.
pub(crate) fn say(line: &str) {
    let start = if MID_LINE.swap(false, Ordering::Relaxed) { "\n" } else { "" };
    let safe = for_terminal(line);
    let shown = match columns_of_stderr() {
        Some(columns) => safe.split('\n').map(|line| wrapped(line, columns)).collect::<Vec<_>>().join("\n").into(),
        None => safe,
    };
    let _ = writeln!(std::io::stderr().lock(), "{start}{shown}");
}

/// A line cut at words to lines of a terminal with this many columns. What stands in columns, with two spaces or more between, stays
/// below its column.
fn wrapped(line: &str, columns: usize) -> String {
    if line.width() <= columns {
        return line.to_owned();
    }
    let gap = line.find("  ").map(|at| at + line[at..].len() - line[at..].trim_start().len());
    let indent = gap.filter(|gap| *gap < columns / 2 && line.is_char_boundary(*gap)).unwrap_or(0);
    let (mut out, mut width) = (line[..indent].to_owned(), line[..indent].width());
    let mut begins = true;
    for word in line[indent..].split(' ') {
        let wide = word.width();
        if !begins && width + 1 + wide > columns {
            out += &format!("\n{}", " ".repeat(indent));
            (width, begins) = (indent, true);
        }
        if !begins {
            out.push(' ');
            width += 1;
        }
        out.push_str(word);
        (width, begins) = (width + wide, false);
    }
    out
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

/// Lines of the log begin with their time.
static TIMED: AtomicBool = AtomicBool::new(false);

/// From now on every line of the log says when it was written: what a server says is read days later.
pub(crate) fn log_with_time() {
    TIMED.store(true, Ordering::Relaxed);
}

/// The time as RFC 3339 has it, in UTC.
fn now() -> String {
    format!("{:.3}", jiff::Timestamp::now())
}

/// A line of the log for programs.
fn json_line(level: &str, target: &str, text: &str) -> String {
    let mut line = serde_json::json!({"time": now(), "level": level});
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
            if AS_JSON.load(Ordering::Relaxed) {
                let _ = writeln!(std::io::stderr().lock(), "{}", json_line(level, record.target(), &text));
                return;
            }
            let text = if record.target() == FACTS { facts_line(&text) } else { text };
            match TIMED.load(Ordering::Relaxed) {
                true => say(&format!("{} {level}: {text}", now())),
                false if VERBOSE.load(Ordering::Relaxed) > 1 => {
                    say(&format!("{level}: {:.3} s: {text}", since_start()));
                }
                false => say(&format!("{level}: {text}")),
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
    styled(total, what, "{pos}/{len} {eta}")
}

/// A progress bar that counts bytes.
pub(crate) fn byte_progress(total: u64, what: &str) -> indicatif::ProgressBar {
    styled(total, what, "{bytes}/{total_bytes} {bytes_per_sec} {eta}")
}

fn styled(total: u64, what: &str, numbers: &str) -> indicatif::ProgressBar {
    let bar = indicatif::ProgressBar::new(total);
    bar.set_style(bar_style(numbers));
    bar.set_message(what.to_owned());
    bar
}

/// A bar that fills what a name and the numbers leave of the line: one that is wider than the terminal would wrap.
fn bar_style(numbers: &str) -> indicatif::ProgressStyle {
    let style = indicatif::ProgressStyle::with_template(&format!("{{msg:18!}} {{wide_bar}} {numbers}"));
    style.unwrap_or_else(|_| indicatif::ProgressStyle::default_bar())
}

#[cfg(test)]
mod tests {
    use super::*;

    /// A terminal of 80 columns that notes what is written.
    #[derive(Clone, Debug, Default)]
    struct Terminal(std::sync::Arc<std::sync::Mutex<Vec<String>>>);

    impl indicatif::TermLike for Terminal {
        fn width(&self) -> u16 {
            80
        }
        fn move_cursor_up(&self, _: usize) -> std::io::Result<()> {
            Ok(())
        }
        fn move_cursor_down(&self, _: usize) -> std::io::Result<()> {
            Ok(())
        }
        fn move_cursor_right(&self, _: usize) -> std::io::Result<()> {
            Ok(())
        }
        fn move_cursor_left(&self, _: usize) -> std::io::Result<()> {
            Ok(())
        }
        fn write_line(&self, line: &str) -> std::io::Result<()> {
            self.write_str(line)
        }
        fn write_str(&self, text: &str) -> std::io::Result<()> {
            self.0.lock().unwrap().push(text.to_owned());
            Ok(())
        }
        fn clear_line(&self) -> std::io::Result<()> {
            Ok(())
        }
        fn flush(&self) -> std::io::Result<()> {
            Ok(())
        }
    }

    #[test]
    fn bars_fit_the_terminal() {
        for bar in [byte_progress(1_073_000_000, "a rather long name of a model.gguf"), progress(12_345_678, "bench")] {
            let terminal = Terminal::default();
            let target = indicatif::ProgressDrawTarget::term_like(Box::new(terminal.clone()));
            bar.set_draw_target(target);
            bar.set_position(1_052_345_678.min(bar.length().unwrap() - 1));
            bar.tick();
            let written = terminal.0.lock().unwrap().clone();
            let longest = written.iter().map(|line| line.trim_end().chars().count()).max().unwrap();
            assert!((40..=80).contains(&longest), "{written:?}");
        }
    }

    #[test]
    fn lines_are_cut_at_words() {
        assert_eq!(wrapped("short", 10), "short");
        assert_eq!(wrapped("one two three four", 9), "one two\nthree\nfour");
        assert_eq!(wrapped("/set   show or change a setting", 20), "/set   show or\n       change a\n       setting");
        assert_eq!(wrapped("averyveryverylongword and", 10), "averyveryverylongword\nand");
        assert_eq!(wrapped("漢字 漢字 漢字", 9), "漢字 漢字\n漢字");
    }

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
