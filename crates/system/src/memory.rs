//! How much memory a process may still take: the least of what the machine has left, what a container leaves and what
//! `ulimit -v` leaves. How that is found out is in `os`.

use crate::os;

/// Bytes, and what sets the bound.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Available {
    /// Bytes that can still be taken.
    pub bytes: u64,
    /// What would refuse more.
    pub bound: Bound,
}

/// What bounds the memory of a process.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Bound {
    /// The memory of the machine.
    Machine,
    /// The limit of a container or another group of processes.
    Group,
    /// The address space that `ulimit -v` allows.
    AddressSpace,
}

impl Bound {
    /// For messages: where the bytes are available.
    pub fn name(self) -> &'static str {
        match self {
            Bound::Machine => "on this machine",
            Bound::Group => "within the limit of this container (cgroup)",
            Bound::AddressSpace => "within the limit of `ulimit -v`",
        }
    }
}

/// What this process may still take; `None` where the system does not tell.
pub fn available() -> Option<Available> {
    os::available_memory()
}

/// Bytes of memory that this process takes now; `None` where the system does not tell.
pub fn taken() -> Option<u64> {
    os::taken_memory()
}

/// Bytes that a bound of the memory is about in all, taken or not; `None` where the system does not tell.
pub fn total(bound: Bound) -> Option<u64> {
    os::total_memory(bound)
}

/// Bytes as people read them.
pub fn size(bytes: u64) -> String {
    let units = ["B", "KiB", "MiB", "GiB", "TiB"];
    let mut value = bytes as f64;
    let mut unit = 0;
    while value >= 1024.0 && unit + 1 < units.len() {
        value /= 1024.0;
        unit += 1;
    }
    if unit == 0 { format!("{bytes} B") } else { format!("{value:.1} {}", units[unit]) }
}

/// Bytes that a text such as `16GiB`, `800 MiB` or `24GB` means.
pub fn bytes_of(text: &str) -> Result<u64, String> {
    let text = text.trim();
    let (number, unit) = text.split_at(text.find(|c: char| c.is_ascii_alphabetic()).unwrap_or(text.len()));
    let factor = match unit.to_ascii_lowercase().as_str() {
        "" | "b" => 1.0,
        "kib" | "k" => 1024.0,
        "mib" | "m" => 1024.0 * 1024.0,
        "gib" | "g" => 1024.0 * 1024.0 * 1024.0,
        "tib" | "t" => 1024.0 * 1024.0 * 1024.0 * 1024.0,
        "kb" => 1e3,
        "mb" => 1e6,
        "gb" => 1e9,
        "tb" => 1e12,
        _ => 0.0,
    };
    let bytes = number.trim().parse::<f64>().ok().map(|n| n * factor).filter(|n| (1.0..1e18).contains(n));
    bytes.map(|n| n as u64).ok_or_else(|| "want a size such as 16GiB or 800MiB".to_owned())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn this_machine_tells() {
        if os::TELLS_MEMORY {
            assert!(available().is_some_and(|a| a.bytes > 1 << 20), "{:?}", available());
        }
    }

    #[test]
    fn sizes_are_understood() {
        for (text, bytes) in
            [("16GiB", 16 << 30), ("1.5 MiB", 3 << 19), ("24gb", 24_000_000_000), ("4096", 4096), ("8G", 8 << 30)]
        {
            assert_eq!(bytes_of(text), Ok(bytes), "{text}");
        }
        for text in ["", "GiB", "-1GiB", "16 giga", "0", "1e30TiB", "nan"] {
            assert!(bytes_of(text).is_err(), "{text}");
        }
    }

    #[test]
    fn sizes_read_well() {
        assert_eq!((size(17), size(1 << 20), size(5 << 29)), ("17 B".into(), "1.0 MiB".into(), "2.5 GiB".into()));
    }
}
