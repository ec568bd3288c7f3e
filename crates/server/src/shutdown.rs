//! How the server goes down: it says so and serves on, then takes nothing new, then ends what is left, with an answer for each.

use std::sync::atomic::{AtomicUsize, Ordering};

use tokio::sync::watch;

use crate::api_error::{ApiError, Kind};

/// How far the server has gone down.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
enum Down {
    /// Not at all.
    Up,
    /// It says that it is not ready, and serves whoever still comes.
    Leaving,
    /// It takes no new requests; those that run may end.
    Draining,
    /// What still runs is ended.
    Over,
}

/// The way down.
pub(crate) struct Shutdown {
    now: watch::Sender<Down>,
    /// Requests that were ended before they were answered.
    cut_off: AtomicUsize,
}

impl Default for Shutdown {
    fn default() -> Shutdown {
        Shutdown { now: watch::Sender::new(Down::Up), cut_off: AtomicUsize::new(0) }
    }
}

impl Shutdown {
    fn reach(&self, stage: Down) {
        self.now.send_modify(|now| *now = stage.max(*now));
    }

    /// From now on probes say that the server goes down, and connections end with their answers.
    pub(crate) fn leave(&self) {
        self.reach(Down::Leaving);
    }

    /// No new requests; those that run may finish.
    pub(crate) fn drain(&self) {
        self.reach(Down::Draining);
    }

    /// Ends what still runs.
    pub(crate) fn end(&self) {
        self.reach(Down::Over);
    }

    pub(crate) fn is_leaving(&self) -> bool {
        *self.now.borrow() >= Down::Leaving
    }

    pub(crate) fn is_draining(&self) -> bool {
        *self.now.borrow() >= Down::Draining
    }

    /// Waits until what still runs is ended; gives what its client is told, which counts it.
    pub(crate) async fn over(&self) -> ApiError {
        // The sender is here: this ends with the right value alone.
        let _ = self.now.subscribe().wait_for(|now| *now == Down::Over).await;
        self.cut_off.fetch_add(1, Ordering::Relaxed);
        let message = "the server went down before the answer was finished; send the request again";
        ApiError::new(Kind::Leaving, message)
    }

    /// Requests that were ended before they were answered.
    pub(crate) fn cut_off(&self) -> usize {
        self.cut_off.load(Ordering::Relaxed)
    }
}
