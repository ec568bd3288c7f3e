//! Ctrl-C that ends what is being done and not the program. Works where [`crate::files::remove_on_signals`] was called.

use std::sync::atomic::{AtomicBool, Ordering};

/// A command ended early because of Ctrl-C that it caught. The process ends by [`crate::files::end_by_interrupt`] then.
#[derive(Debug, thiserror::Error)]
#[error("Interrupted: {left}")]
pub struct Interrupted {
    /// What is left of the work, and a hint.
    pub left: &'static str,
}

static CATCHING: AtomicBool = AtomicBool::new(false);
static HAPPENED: AtomicBool = AtomicBool::new(false);

/// As long as this lives, the first Ctrl-C is only noted. A second one before anybody took notice ends the process as
/// usual.
#[derive(Debug)]
pub struct Catch(());

impl Catch {
    /// Catches from now on. One at a time.
    pub fn new() -> Catch {
        HAPPENED.store(false, Ordering::SeqCst);
        CATCHING.store(true, Ordering::SeqCst);
        Catch(())
    }

    /// Whether Ctrl-C was pressed.
    pub fn happened(&self) -> bool {
        HAPPENED.load(Ordering::SeqCst)
    }
}

impl Default for Catch {
    fn default() -> Catch {
        Catch::new()
    }
}

impl Drop for Catch {
    fn drop(&mut self) {
        CATCHING.store(false, Ordering::SeqCst);
    }
}

/// Asked when Ctrl-C comes: whether somebody catches it.
pub(crate) fn note() -> bool {
    CATCHING.load(Ordering::SeqCst) && !HAPPENED.swap(true, Ordering::SeqCst)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_first_is_noted_and_the_second_is_not() {
        assert!(!note(), "no handler");
        let catch = Catch::new();
        assert!(!catch.happened());
        assert!(note() && catch.happened());
        assert!(!note(), "impatient users are let go");
        drop(catch);
        assert!(!note());
        assert!(!Catch::new().happened(), "what was before is forgotten");
    }
}
