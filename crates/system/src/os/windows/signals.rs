//! Ctrl-C, Ctrl-Break, a console that is closed and a session that ends: the system calls a function for each, on a thread that it makes.

use std::sync::OnceLock;

use windows_sys::Win32::Foundation::STATUS_CONTROL_C_EXIT;
use windows_sys::Win32::System::Console::{CTRL_BREAK_EVENT, CTRL_C_EVENT, SetConsoleCtrlHandler};
use windows_sys::Win32::System::Threading::{GetCurrentProcess, TerminateProcess};
use windows_sys::core::BOOL;

use crate::os::{Ending, Heard};

type Hear = Box<dyn Fn(Ending) -> Heard + Send + Sync>;
type End = Box<dyn Fn(Ending) + Send + Sync>;

/// Who hears of endings.
static HEARER: OnceLock<(Hear, End)> = OnceLock::new();

/// Has everything heard that asks the process to end. Where it is to end, `end` is called before.
pub(crate) fn on_endings(
    hear: impl Fn(Ending) -> Heard + Send + Sync + 'static,
    end: impl Fn(Ending) + Send + Sync + 'static,
) {
    if HEARER.set((Box::new(hear), Box::new(end))).is_ok() {
        // SAFETY: the function may be called by any thread at any time, and stays as long as the process.
        unsafe { SetConsoleCtrlHandler(Some(on_event), 1) };
    }
}

/// Called by the system. Answers whether others need not be asked.
unsafe extern "system" fn on_event(event: u32) -> BOOL {
    let Some((hear, end)) = HEARER.get() else { return 0 };
    let ending = match event {
        CTRL_C_EVENT | CTRL_BREAK_EVENT => Ending::Interrupt,
        _ => Ending::Terminate,
    };
    match hear(ending) {
        Heard::Left => 0,
        Heard::Caught => 1,
        Heard::Ends => {
            end(ending);
            exit_at_once(if ending == Ending::Interrupt { STATUS_CONTROL_C_EXIT } else { 1 })
        }
    }
}

/// Ends the process as Ctrl-C does: shells tell by this number that a script is to end as well.
pub(crate) fn end_by_interrupt() -> ! {
    exit_at_once(STATUS_CONTROL_C_EXIT)
}

/// Ends the process, whatever its threads are doing.
pub(crate) fn exit_at_once(code: i32) -> ! {
    // SAFETY: the handle names this process, of which nothing remains to be used.
    unsafe { TerminateProcess(GetCurrentProcess(), code.cast_unsigned()) };
    std::process::exit(code)
}

/// Signals for programs that are made of tasks.
#[cfg(feature = "tasks")]
pub mod tasks {
    use tokio::signal::windows::{ctrl_break, ctrl_c, ctrl_close, ctrl_shutdown};

    /// SIGHUP, which does not come here.
    #[derive(Debug)]
    pub struct HangUps(());

    impl HangUps {
        /// Heard from now on. Why it cannot be heard, where it cannot.
        pub fn new() -> (HangUps, Option<std::io::Error>) {
            (HangUps(()), None)
        }

        /// Waits for the next one.
        pub async fn next(&mut self) {
            std::future::pending().await
        }
    }

    /// Waits until the process is asked to end: by Ctrl-C, Ctrl-Break, a console that is closed or a session that ends. `failed` hears why
    /// one of them cannot be heard.
    pub async fn asked_to_end(failed: impl FnOnce(std::io::Error)) {
        let heard = || Ok::<_, std::io::Error>((ctrl_c()?, ctrl_break()?, ctrl_close()?, ctrl_shutdown()?));
        match heard() {
            Ok((mut interrupt, mut stop, mut close, mut shutdown)) => {
                tokio::select! {
                    _ = interrupt.recv() => {}
                    _ = stop.recv() => {}
                    _ = close.recv() => {}
                    _ = shutdown.recv() => {}
                }
            }
            Err(why) => {
                failed(why);
                std::future::pending().await
            }
        }
    }
}
