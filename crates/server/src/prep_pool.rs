//! How many requests are prepared at once: their templates, tokens and grammars. That is work for processors, of which there are few; and
//! what each thread has ever allocated stays with it, so that a thread for every request would keep the memory of the longest prompts of
//! all of them.
//!
//! Requests with long bodies have half of the places, so that a short request never waits for long ones. The work ends soon after its
//! client has gone.

use std::cell::RefCell;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicUsize, Ordering};

use tokio::sync::{OwnedSemaphorePermit, Semaphore};

use crate::api_error::{ApiError, Kind};
use crate::app::App;
use crate::scope::{self, Scope};

/// Few enough for memory, and enough that some requests with large schemas do not delay others.
const LEAST: usize = 4;
const MOST: usize = 8;
/// Requests that may wait to be prepared beside those that may wait for the engine: preparing most of them takes no time.
const MARGIN: usize = 64;

pub(crate) struct PrepPool {
    all: Arc<Semaphore>,
    /// Those that requests with long bodies may have.
    long: Arc<Semaphore>,
    waiting: Queue,
}

impl Default for PrepPool {
    fn default() -> PrepPool {
        let processors = std::thread::available_parallelism().map_or(LEAST, std::num::NonZero::get);
        let count = processors.clamp(LEAST, MOST);
        let [all, long] = [count, count / 2].map(|count| Arc::new(Semaphore::new(count)));
        PrepPool { all, long, waiting: Queue::default() }
    }
}

/// The places of one request.
struct PrepPermit {
    _permits: [Option<OwnedSemaphorePermit>; 2],
}

/// How many requests wait for something.
#[derive(Default)]
pub(crate) struct Queue(AtomicUsize);

/// A request that waits, until it is dropped.
pub(crate) struct Waiting<'a>(&'a AtomicUsize);

impl Drop for Waiting<'_> {
    fn drop(&mut self) {
        self.0.fetch_sub(1, Ordering::Relaxed);
    }
}

impl Queue {
    pub(crate) fn len(&self) -> usize {
        self.0.load(Ordering::Relaxed)
    }

    /// Waits beside at most so many others; `for_what` is told to one more.
    pub(crate) fn enter(&self, most: usize, for_what: &str) -> Result<Waiting<'_>, ApiError> {
        let before = self.0.fetch_add(1, Ordering::Relaxed);
        let waiting = Waiting(&self.0);
        if before >= most {
            let message = format!("{before} requests {for_what}, which is all this server takes");
            return Err(ApiError::new(Kind::QueueFull, message));
        }
        Ok(waiting)
    }
}

impl PrepPool {
    /// Requests that wait to be prepared.
    pub(crate) fn waiting(&self) -> usize {
        self.waiting.len()
    }

    async fn sit(&self, is_long: bool) -> PrepPermit {
        // The semaphores are never closed.
        let long = match is_long {
            true => Arc::clone(&self.long).acquire_owned().await.ok(),
            false => None,
        };
        PrepPermit { _permits: [long, Arc::clone(&self.all).acquire_owned().await.ok()] }
    }

    /// Waits for a place, and for the model where it is being loaded: no thread waits for that.
    async fn prepare(&self, app: &App, scope: &Scope) -> Result<PrepPermit, ApiError> {
        let most = app.settings.queue.saturating_add(MARGIN);
        loop {
            app.registry.until_loaded(scope.model(), most).await?;
            let _waiting = self.waiting.enter(most, "wait to be prepared")?;
            let seat = self.sit(scope.is_long()).await;
            if !app.registry.is_loading(scope.model()) {
                return Ok(seat);
            }
        }
    }
}

thread_local! {
    /// The seat of the request that this thread prepares.
    static OWN: RefCell<Option<PrepPermit>> = const { RefCell::new(None) };
    /// Whether its client has gone.
    static GONE: RefCell<Option<Arc<AtomicBool>>> = const { RefCell::new(None) };
}

/// Releases this request's preparation permit before it blocks on I/O or a model load.
pub(crate) fn release() {
    OWN.with_borrow_mut(|seat| drop(seat.take()));
}

/// Tells long work of the request that this thread prepares when its client has gone.
pub(crate) fn client_gone() -> Option<Arc<AtomicBool>> {
    GONE.with_borrow(Clone::clone)
}

/// Sets its flag when it is dropped, as the future of a request is when its client goes.
pub(crate) struct SetWhenDropped(pub(crate) Arc<AtomicBool>);

impl Drop for SetWhenDropped {
    fn drop(&mut self) {
        self.0.store(true, Ordering::Relaxed);
    }
}

/// Runs something that takes time off the threads that serve connections.
pub(crate) async fn blocking<T: Send + 'static>(
    app: &Arc<App>,
    work: impl FnOnce(&Arc<App>) -> Result<T, ApiError> + Send + 'static,
) -> Result<T, ApiError> {
    let (app, scope) = (Arc::clone(app), scope::current());
    let seat = app.prep_pool.prepare(&app, &scope).await?;
    let gone = Arc::<AtomicBool>::default();
    let _set = SetWhenDropped(Arc::clone(&gone));
    let held = Arc::clone(&scope);
    let work = move || {
        OWN.replace(Some(seat));
        GONE.replace(Some(gone));
        let done = std::panic::catch_unwind(std::panic::AssertUnwindSafe(|| work(&app)));
        GONE.replace(None);
        release();
        // The work itself owns what was made of the body, also when its client has gone.
        drop(held);
        done
    };
    let done = tokio::task::spawn_blocking(work).await.map_err(|error| ApiError::internal(&error))?;
    scope.release();
    done.unwrap_or_else(|_| Err(ApiError::internal(&"a panic while a request was prepared")))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn short_requests_pass_long_ones() {
        let prep_pool = PrepPool::default();
        let runtime = tokio::runtime::Builder::new_current_thread().enable_time().build().unwrap();
        let soon = |is_long| tokio::time::timeout(std::time::Duration::from_millis(50), prep_pool.sit(is_long));
        runtime.block_on(async {
            let mut long = Vec::new();
            while let Ok(seat) = soon(true).await {
                long.push(seat);
            }
            assert!(long.len() >= LEAST / 2, "{} long ones at once", long.len());
            assert!(soon(false).await.is_ok(), "a short one waits for long ones");
        });
    }

    #[test]
    fn only_so_many_wait() {
        let queue = Queue::default();
        let one = queue.enter(1, "wait").unwrap();
        assert_eq!(queue.enter(1, "wait").err().unwrap().kind, Kind::QueueFull);
        assert_eq!(queue.len(), 1);
        drop(one);
        assert_eq!(queue.len(), 0);
    }
}
