//! Where text goes: data to stdout, the rest to stderr. A closed pipe ends the program quietly.

use std::io::Write as _;

/// One line of data.
pub(crate) fn print(line: &str) {
    if writeln!(std::io::stdout().lock(), "{line}").is_err() {
        // The reader has gone (`kiln devices | head -1`): nobody is left to tell.
        std::process::exit(0);
    }
}

/// One line for the person at the terminal.
pub(crate) fn say(line: &str) {
    let _ = writeln!(std::io::stderr().lock(), "{line}");
}

struct Log;

impl log::Log for Log {
    fn enabled(&self, metadata: &log::Metadata<'_>) -> bool {
        metadata.target().starts_with("kiln")
    }

    fn log(&self, record: &log::Record<'_>) {
        if self.enabled(record.metadata()) {
            say(&format!("{}: {}", record.level().as_str().to_lowercase(), record.args()));
        }
    }

    fn flush(&self) {}
}

/// Warnings are always shown, more with `-v`.
pub(crate) fn start_log(verbose: u8) {
    static LOG: Log = Log;
    if log::set_logger(&LOG).is_ok() {
        log::set_max_level(match verbose {
            0 => log::LevelFilter::Warn,
            1 => log::LevelFilter::Info,
            _ => log::LevelFilter::Debug,
        });
    }
}

/// Bytes as people read them.
pub(crate) fn size(bytes: u64) -> String {
    let units = ["B", "KiB", "MiB", "GiB", "TiB"];
    let mut value = bytes as f64;
    let mut unit = 0;
    while value >= 1024.0 && unit + 1 < units.len() {
        value /= 1024.0;
        unit += 1;
    }
    if unit == 0 { format!("{bytes} B") } else { format!("{value:.1} {}", units[unit]) }
}

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
