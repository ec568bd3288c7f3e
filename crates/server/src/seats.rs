//! How many requests are prepared at once: their templates, tokens and grammars. That is work for processors, of which there are few; and
//! what each thread has ever allocated stays with it, so that a thread for every request would keep the memory of the longest prompts of
//! all of them.

use std::cell::RefCell;
use std::sync::Arc;

use tokio::sync::{OwnedSemaphorePermit, Semaphore};

use crate::app::App;
use crate::refusal::Refusal;

/// Few enough for memory, and enough that some requests with large schemas keep nobody waiting.
const LEAST: usize = 4;
const MOST: usize = 8;

pub(crate) struct Seats(Arc<Semaphore>);

impl Default for Seats {
    fn default() -> Seats {
        let processors = std::thread::available_parallelism().map_or(LEAST, std::num::NonZero::get);
        Seats(Arc::new(Semaphore::new(processors.clamp(LEAST, MOST))))
    }
}

thread_local! {
    /// The seat of the request that this thread prepares.
    static OWN: RefCell<Option<OwnedSemaphorePermit>> = const { RefCell::new(None) };
}

/// Whoever waits for something else than a processor, as for a model to be loaded, lets others go before.
pub(crate) fn stand_up() {
    OWN.with_borrow_mut(|seat| drop(seat.take()));
}

/// Runs something that takes time off the threads that serve connections.
pub(crate) async fn blocking<T: Send + 'static>(
    app: &Arc<App>,
    work: impl FnOnce(&Arc<App>) -> Result<T, Refusal> + Send + 'static,
) -> Result<T, Refusal> {
    let app = Arc::clone(app);
    // The semaphore is never closed.
    let seat = Arc::clone(&app.seats.0).acquire_owned().await.ok();
    let work = move || {
        OWN.replace(seat);
        let done = std::panic::catch_unwind(std::panic::AssertUnwindSafe(|| work(&app)));
        stand_up();
        done
    };
    let done = tokio::task::spawn_blocking(work).await.map_err(|error| Refusal::internal(&error))?;
    done.unwrap_or_else(|_| Err(Refusal::internal(&"a panic while a request was prepared")))
}
