//! What the server holds on behalf of a request while it is prepared: the bytes of its body, and the model that it is for. Handlers need
//! not hand it on: it belongs to the task that serves the request.

use std::sync::{Arc, Mutex, MutexGuard, OnceLock, PoisonError};
use std::time::Duration;

use tokio::sync::{OwnedSemaphorePermit, Semaphore};

use crate::api_error::{ApiError, Kind};

/// A body of more bytes makes a request a long one: it waits for other long ones, and short ones pass it.
pub(crate) const LONG: usize = 64 << 10;
/// Bytes of short bodies, and of the beginnings of long ones, that the server holds at once.
const SHORT_BYTES: usize = 64 << 20;
/// Bytes that values of long bodies may take together, however small the limit of bodies is.
const LEAST_PARSED: usize = 32 << 20;
/// How long a body may wait for its share of the memory.
const PATIENCE: Duration = Duration::from_secs(5);

/// The memory that bodies of requests in flight may take together. What is made of a long body by parsing it has a share of its own, so
/// that bodies which hold all of the other cannot wait for each other.
pub(crate) struct BodyBudget {
    short: Arc<Semaphore>,
    long: Arc<Semaphore>,
    parsed: Arc<Semaphore>,
    long_bytes: usize,
}

impl BodyBudget {
    /// A budget that holds two of the longest bodies.
    pub(crate) fn new(body_limit: usize) -> BodyBudget {
        let long_bytes = body_limit.saturating_mul(2).clamp(LONG, Semaphore::MAX_PERMITS);
        let budget = |bytes: usize| Arc::new(Semaphore::new(bytes));
        BodyBudget {
            short: budget(SHORT_BYTES),
            long: budget(long_bytes),
            parsed: budget(long_bytes.max(LEAST_PARSED)),
            long_bytes,
        }
    }

    /// Bytes that the values of one body may take.
    pub(crate) fn most_parsed(&self) -> usize {
        self.long_bytes.max(LEAST_PARSED)
    }

    /// Bytes of bodies that the server holds.
    pub(crate) fn held(&self) -> usize {
        let free = self.short.available_permits() + self.long.available_permits();
        (SHORT_BYTES + self.long_bytes).saturating_sub(free)
    }
}

/// What is held for one request.
#[derive(Default)]
pub(crate) struct Scope {
    body: Mutex<HeldBody>,
    model: OnceLock<String>,
}

#[derive(Default)]
struct HeldBody {
    permits: Vec<OwnedSemaphorePermit>,
    bytes: usize,
}

tokio::task_local! {
    static CURRENT: Arc<Scope>;
}

/// Runs the work of a request with a scope of its own.
pub(crate) async fn scoped<T>(work: impl Future<Output = T>) -> T {
    CURRENT.scope(Arc::default(), work).await
}

/// The scope of the request that this task serves; an empty one outside of requests.
pub(crate) fn current() -> Arc<Scope> {
    CURRENT.try_with(Arc::clone).unwrap_or_default()
}

impl Scope {
    fn body(&self) -> MutexGuard<'_, HeldBody> {
        self.body.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Whether the request has a long body.
    pub(crate) fn is_long(&self) -> bool {
        self.body().bytes > LONG
    }

    /// Takes the share of some more bytes of the body. Where others hold the memory it waits, but not for long.
    pub(crate) async fn take(&self, budget: &BodyBudget, bytes: usize) -> Result<(), ApiError> {
        self.take_within(budget, bytes, PATIENCE).await
    }

    async fn take_within(&self, budget: &BodyBudget, bytes: usize, patience: Duration) -> Result<(), ApiError> {
        let before = self.body().bytes;
        let semaphore = if before + bytes > LONG { &budget.long } else { &budget.short };
        self.acquire(budget, semaphore, bytes, patience).await?;
        self.body().bytes += bytes;
        Ok(())
    }

    /// Takes the share of the values that the body is parsed into: at most [`BodyBudget::most_parsed`] bytes.
    pub(crate) async fn take_parsed(&self, budget: &BodyBudget, bytes: usize) -> Result<(), ApiError> {
        let semaphore = if self.is_long() { &budget.parsed } else { &budget.short };
        self.acquire(budget, semaphore, bytes, PATIENCE).await
    }

    async fn acquire(
        &self,
        budget: &BodyBudget,
        semaphore: &Arc<Semaphore>,
        bytes: usize,
        patience: Duration,
    ) -> Result<(), ApiError> {
        let permits = u32::try_from(bytes).unwrap_or(u32::MAX);
        let taken = Arc::clone(semaphore).acquire_many_owned(permits);
        match tokio::time::timeout(patience, taken).await {
            Ok(Ok(permit)) => {
                self.body().permits.push(permit);
                Ok(())
            }
            // The semaphore is never closed.
            Ok(Err(_)) => Ok(()),
            Err(_) => {
                let held = budget.held();
                let message = format!("bodies of other requests take {held} bytes, which is all this server holds");
                Err(ApiError::new(Kind::Unavailable, message))
            }
        }
    }

    /// The body is no longer held: the request is prepared.
    pub(crate) fn release(&self) {
        self.body().permits.clear();
    }

    /// Says which model the request names.
    pub(crate) fn set_model(&self, name: &str) {
        // The first body that was read says it.
        let _ = self.model.set(name.to_owned());
    }

    pub(crate) fn model(&self) -> Option<&str> {
        self.model.get().map(String::as_str)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn bodies_share_a_budget_and_short_ones_have_their_own() {
        let runtime = tokio::runtime::Builder::new_current_thread().enable_time().build().unwrap();
        runtime.block_on(async {
            let short = Duration::from_millis(20);
            let budget = BodyBudget::new(LONG);
            let (first, second, third) = (Scope::default(), Scope::default(), Scope::default());
            assert!(first.take(&budget, LONG).await.is_ok() && !first.is_long());
            assert!(first.take(&budget, LONG).await.is_ok() && first.is_long());
            assert!(
                second.take_within(&budget, LONG + 1, short).await.is_err(),
                "{LONG} bytes are left for long bodies"
            );
            assert!(third.take(&budget, 10).await.is_ok(), "a short body does not wait for long ones");
            assert_eq!(budget.held(), 2 * LONG + 10);
            first.release();
            assert!(second.take(&budget, LONG + 1).await.is_ok());
            drop((second, third));
            assert_eq!(budget.held(), 0);
            // A body that holds all of the long share is still parsed.
            let (first, second) = (Scope::default(), Scope::default());
            assert!(first.take(&budget, 2 * LONG).await.is_ok());
            assert!(first.take_parsed(&budget, budget.most_parsed()).await.is_ok());
            assert!(second.take(&budget, 10).await.is_ok());
            assert!(second.take_parsed(&budget, 1000).await.is_ok(), "a short body does not wait for long ones");
            assert_eq!(budget.held(), 2 * LONG + 10 + 1000);
            first.release();
            assert_eq!(budget.parsed.available_permits(), budget.most_parsed());
        });
    }
}
