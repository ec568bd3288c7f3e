//! The threads that the CPU computes on. They sleep while nothing runs, and stay awake for a moment when something has: a token is
//! hundreds of steps of some microseconds each, with parts on other devices in between, and waking threads takes longer than many of
//! these steps.

use std::cell::Cell;
use std::hint::spin_loop;
use std::sync::Arc;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::time::{Duration, Instant};

use rayon::{ThreadPool, ThreadPoolBuilder, Yield};

use crate::Error;

/// How long threads look for more work before they sleep. What other devices do between two parts of the CPU takes less as a rule.
const AWAKE: Duration = Duration::from_micros(500);
/// Looks for work between two looks at the clock.
const LOOKS: usize = 16;

thread_local! {
    /// Whether this thread looks for work, or does work that others wait for: it should not begin to look for more.
    static BUSY: Cell<bool> = const { Cell::new(false) };
}

/// Threads of the CPU.
#[derive(Clone, Default)]
pub struct Threads {
    /// Threads of their own; those of the whole process without.
    pool: Option<Arc<ThreadPool>>,
    /// Threads that stay awake.
    awake: Arc<AtomicUsize>,
}

impl Threads {
    /// This many threads.
    pub fn new(threads: usize) -> Result<Threads, Error> {
        let pool = ThreadPoolBuilder::new().num_threads(threads).thread_name(|i| format!("kiln-cpu-{i}")).build();
        let pool = pool.map_err(|why| Error::Threads { threads, why: why.to_string() })?;
        Ok(Threads { pool: Some(Arc::new(pool)), awake: Arc::default() })
    }

    /// How many there are.
    pub fn count(&self) -> usize {
        self.pool.as_ref().map_or_else(rayon::current_num_threads, |pool| pool.current_num_threads())
    }

    /// Works on one of them; the others stay awake to take a share.
    pub fn run<T: Send>(&self, work: impl FnOnce() -> T + Send) -> T {
        let here = || {
            let before = BUSY.replace(true);
            let result = work();
            BUSY.set(before);
            result
        };
        let count = self.count();
        // The calling thread is never counted as a spinner, or it is a spinner now running this closure.
        if count > 1 && self.awake.load(Ordering::Relaxed) + 1 < count {
            let awake = Arc::clone(&self.awake);
            let stay = move |_: rayon::BroadcastContext<'_>| stay_awake(&awake);
            match &self.pool {
                Some(pool) => pool.spawn_broadcast(stay),
                None => rayon::spawn_broadcast(stay),
            }
        }
        match &self.pool {
            Some(pool) => pool.install(here),
            None => rayon::scope(|_| here()),
        }
    }

    /// Does the same on each of them, and waits until all have done it.
    pub(super) fn each(&self, work: impl Fn() + Sync) {
        match &self.pool {
            Some(pool) => pool.broadcast(|_| work()),
            None => rayon::broadcast(|_| work()),
        };
    }
}

/// Does what there is to do on this thread until there has been nothing for a while.
fn stay_awake(awake: &AtomicUsize) {
    if BUSY.replace(true) {
        return;
    }
    awake.fetch_add(1, Ordering::Relaxed);
    let mut last = Instant::now();
    loop {
        let mut found = false;
        for _ in 0..LOOKS {
            match rayon::yield_now() {
                Some(Yield::Executed) => found = true,
                _ => (0..32).for_each(|_| spin_loop()),
            }
        }
        if found {
            last = Instant::now();
        } else if last.elapsed() > AWAKE {
            break;
        } else {
            // With more threads than cores, threads that have work go first.
            std::thread::yield_now();
        }
    }
    awake.fetch_sub(1, Ordering::Relaxed);
    BUSY.set(false);
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn threads_stay_awake_for_a_moment_and_sleep_then() {
        let threads = Threads::new(3).unwrap();
        assert_eq!(threads.count(), 3);
        for round in 0..50 {
            let sum: u64 = threads.run(|| {
                use rayon::prelude::*;
                (0..1000u32).into_par_iter().with_max_len(1).map(|i| u64::from(i) * round).sum()
            });
            assert_eq!(sum, round * 499_500);
        }
        // Work within work stays on its thread.
        let inner = threads.run(|| threads.run(|| std::thread::current().name().map(str::to_owned)));
        assert!(inner.unwrap().starts_with("kiln-cpu-"));
        let start = Instant::now();
        while threads.awake.load(Ordering::Relaxed) > 0 {
            assert!(start.elapsed() < Duration::from_secs(20), "threads should sleep when there is nothing to do");
            std::thread::sleep(AWAKE);
        }
    }
}
