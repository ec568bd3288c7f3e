//! A request on its way through the engine, and where its events go.

use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::Instant;

use super::awaited::Awaited;
use super::request::{Event, Request};
use crate::Error;

/// Where the events of a request go. `false`: nobody listens any more.
pub(crate) type Sink = Box<dyn FnMut(Event) -> bool + Send>;

/// A request on its way through the engine.
pub(crate) struct Job {
    pub(crate) request: Request,
    pub(crate) sink: Sink,
    pub(crate) cancelled: Arc<AtomicBool>,
    pub(crate) came: Instant,
    /// While it waits: what another request reads for both.
    pub(super) awaited: Option<Awaited>,
}

impl Job {
    /// A request that has just come.
    pub(crate) fn new(request: Request, sink: Sink, cancelled: Arc<AtomicBool>) -> Job {
        Job { request, sink, cancelled, came: Instant::now(), awaited: None }
    }

    pub(super) fn is_cancelled(&self) -> bool {
        self.cancelled.load(Ordering::Relaxed)
    }

    pub(super) fn tell(&mut self, event: Event) {
        if !(self.sink)(event) {
            self.cancelled.store(true, Ordering::Relaxed);
        }
    }

    /// Tells that the request failed, and nothing more: it leaves when the next step begins.
    pub(super) fn fail(&mut self, error: Error) {
        self.tell(Event::Failed(error));
        self.cancelled.store(true, Ordering::Relaxed);
        self.sink = Box::new(|_| false);
    }
}
