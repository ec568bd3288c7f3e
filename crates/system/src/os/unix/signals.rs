//! SIGINT, SIGTERM and SIGHUP: heard on a thread of their own.

use signal_hook::consts::{SIGHUP, SIGINT, SIGTERM};
use signal_hook::low_level;

use crate::os::{Ending, Heard};

/// Has every signal that asks the process to end heard. Where it is to end, `end` is called, and the process ends as it would without this.
/// Starts a thread. Signals that the process was told to ignore (`nohup`) stay ignored.
pub(crate) fn on_endings(
    hear: impl Fn(Ending) -> Heard + Send + Sync + 'static,
    end: impl Fn(Ending) + Send + Sync + 'static,
) {
    let wanted = [SIGINT, SIGTERM, SIGHUP].into_iter().filter(|signal| !is_ignored(*signal));
    let Ok(mut signals) = signal_hook::iterator::Signals::new(wanted) else { return };
    let wait = move || {
        let Some(signal) = signals.forever().find(|signal| hear(ending(*signal)) == Heard::Ends) else { return };
        end(ending(signal));
        let _ = low_level::emulate_default_handler(signal);
    };
    let _ = std::thread::Builder::new().name("signals".into()).spawn(wait);
}

fn ending(signal: i32) -> Ending {
    match signal {
        SIGINT => Ending::Interrupt,
        SIGHUP => Ending::HangUp,
        _ => Ending::Terminate,
    }
}

/// Whether the process was started with this signal ignored.
fn is_ignored(signal: i32) -> bool {
    // SAFETY: without a new action the function only tells the present one, which is written to memory that is ours and large enough.
    #[allow(unsafe_code)]
    unsafe {
        let mut action: libc::sigaction = std::mem::zeroed();
        libc::sigaction(signal, std::ptr::null(), &mut action) == 0 && action.sa_sigaction == libc::SIG_IGN
    }
}

/// Ends the process as Ctrl-C does. Shells tell by the signal that a loop is to end as well: an exit code would let it go on.
pub(crate) fn end_by_interrupt() -> ! {
    let _ = low_level::emulate_default_handler(SIGINT);
    // Where the signal is blocked.
    std::process::exit(130)
}

/// Ends the process, whatever its threads are doing.
pub(crate) fn exit_at_once(code: i32) -> ! {
    low_level::exit(code)
}

/// Signals for programs that are made of tasks.
#[cfg(feature = "tasks")]
pub mod tasks {
    use tokio::signal::unix::{Signal, SignalKind, signal};

    /// SIGHUP, as often as it comes.
    #[derive(Debug)]
    pub struct HangUps(Option<Signal>);

    impl HangUps {
        /// Heard from now on; the process does not end by it any more. Why it cannot be heard, where it cannot.
        pub fn new() -> (HangUps, Option<std::io::Error>) {
            match signal(SignalKind::hangup()) {
                Ok(signal) => (HangUps(Some(signal)), None),
                Err(why) => (HangUps(None), Some(why)),
            }
        }

        /// Waits for the next one.
        pub async fn next(&mut self) {
            if let Some(signal) = &mut self.0
                && signal.recv().await.is_some()
            {
                return;
            }
            std::future::pending().await
        }
    }

    /// Waits until the process is asked to end: by Ctrl-C or SIGTERM. `failed` hears why one of them cannot be heard.
    pub async fn asked_to_end(failed: impl FnOnce(std::io::Error)) {
        let interrupted = tokio::signal::ctrl_c();
        match signal(SignalKind::terminate()) {
            Ok(mut terminated) => {
                tokio::select! {
                    _ = interrupted => {}
                    _ = terminated.recv() => {}
                }
                return;
            }
            Err(why) => failed(why),
        }
        let _ = interrupted.await;
    }
}
