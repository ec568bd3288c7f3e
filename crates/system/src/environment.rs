//! Variables of the environment. One that is empty counts as not set: `KILN_MODELS= kiln run` means the usual folder,
//! not the current one.

use std::ffi::OsString;
use std::path::PathBuf;

/// The value of a variable that is set and not empty.
pub fn variable(name: &str) -> Option<OsString> {
    std::env::var_os(name).filter(|value| !value.is_empty())
}

/// The same as text; bytes that are no UTF-8 are replaced.
pub fn text(name: &str) -> Option<String> {
    variable(name).map(|value| value.to_string_lossy().into_owned())
}

/// The same as a path.
pub fn path(name: &str) -> Option<PathBuf> {
    variable(name).map(PathBuf::from)
}

/// Whether a switch is on: set, not empty and not `0`.
pub fn is_on(name: &str) -> bool {
    variable(name).is_some_and(|value| value != "0")
}
