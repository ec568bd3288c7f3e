//! Kernels of the batch shapes that a server will meet, compiled on threads of their own while requests run. Until a shape has its kernels, a
//! batch takes the next larger shape that has ([`BackgroundKernels::lacks`]), so that no request waits for a compiler.

use std::collections::HashSet;
use std::sync::atomic::{AtomicBool, AtomicUsize, Ordering};
use std::sync::{Arc, Mutex, PoisonError};
use std::thread::JoinHandle;
use std::time::Instant;

use super::draw::End;
use super::making::{Key, make};
use crate::arch::{BatchShape, Graph};
use crate::executor::Warmer;
use crate::lower::Target;

/// What kernels an end takes: draws that cut have one of their own, which the first keys bring, and logits are a draw without it.
fn kernels(end: End) -> End {
    match end {
        End::Logits | End::Tokens { .. } => End::Tokens { cuts: false },
        End::NextStep { .. } => End::NextStep { cuts: false },
        End::Vectors | End::Source | End::Draft | End::DraftTokens { .. } => end,
    }
}

/// Threads that compile beside the engine's: a driver takes one core for each kernel.
const MOST_THREADS: usize = 4;

/// What the threads and the engine share.
struct Shared {
    graph: Arc<Graph>,
    target: Target,
    warmer: Warmer,
    keys: Vec<Key>,
    /// The number of the next key.
    next: AtomicUsize,
    ready: Mutex<HashSet<Key>>,
    stop: AtomicBool,
    finished: AtomicBool,
}

/// The threads that compile. Dropping it ends them after the plan that each is at.
pub(super) struct BackgroundKernels {
    shared: Arc<Shared>,
    thread: Option<JoinHandle<()>>,
}

impl BackgroundKernels {
    /// Compiles the kernels of these keys, in this order.
    pub(super) fn start(graph: Arc<Graph>, target: Target, warmer: Warmer, keys: Vec<Key>) -> BackgroundKernels {
        let (next, ready) = (AtomicUsize::new(0), Mutex::default());
        let (stop, finished) = (AtomicBool::new(false), AtomicBool::new(false));
        let shared = Arc::new(Shared { graph, target, warmer, keys, next, ready, stop, finished });
        let work = Arc::clone(&shared);
        let thread = std::thread::Builder::new().name("kiln kernels".into()).spawn(move || work.compile());
        // Without the thread kernels are compiled when a batch needs them.
        let thread = thread.inspect_err(|error| log::warn!("kernels are not compiled beforehand: {error}")).ok();
        if thread.is_none() {
            shared.finished.store(true, Ordering::Release);
        }
        BackgroundKernels { shared, thread }
    }

    /// Whether nothing is left to compile.
    pub(super) fn has_finished(&self) -> bool {
        self.shared.finished.load(Ordering::Acquire)
    }

    /// Whether a batch should not wait for the kernels of this key: they are missing, and such kernels take long here because no earlier
    /// process has stored them.
    pub(super) fn lacks(&self, (shape, end, by_row): &Key) -> bool {
        !self.has_finished() && self.shared.warmer.has_compiled() && !self.ready(*end, *by_row).contains(shape)
    }

    /// The shapes of plans with this end whose kernels are there.
    pub(super) fn ready(&self, end: End, by_row: bool) -> Vec<BatchShape> {
        let same = |key: &&Key| kernels(key.1) == kernels(end) && key.2 == by_row;
        let ready = self.shared.ready.lock().unwrap_or_else(PoisonError::into_inner);
        ready.iter().filter(same).map(|key| key.0).collect()
    }
}

impl Drop for BackgroundKernels {
    fn drop(&mut self) {
        self.shared.stop.store(true, Ordering::Relaxed);
        if let Some(thread) = self.thread.take() {
            // A panic was reported by its thread.
            let _ = thread.join();
        }
    }
}

impl Shared {
    /// Compiles all keys on a few threads.
    fn compile(&self) {
        let (start, before) = (Instant::now(), self.warmer.kernels());
        let cores = std::thread::available_parallelism().map_or(1, usize::from);
        std::thread::scope(|scope| {
            for _ in 1..(cores / 4).clamp(1, MOST_THREADS) {
                scope.spawn(|| self.compile_some());
            }
            self.compile_some();
        });
        self.finished.store(true, Ordering::Release);
        if self.stop.load(Ordering::Relaxed) {
            return;
        }
        self.warmer.store();
        let ready = self.ready.lock().unwrap_or_else(PoisonError::into_inner).len();
        let (made, seconds) = (self.warmer.kernels() - before, start.elapsed().as_secs_f64());
        let all = self.keys.len();
        log::info!("kernels of {ready} of {all} batch shapes are ready: {made} new ones in {seconds:.1} s");
    }

    /// Takes keys until there are no more.
    fn compile_some(&self) {
        while let Some(key) = self.keys.get(self.next.fetch_add(1, Ordering::Relaxed)) {
            if self.stop.load(Ordering::Relaxed) {
                return;
            }
            match make(&self.graph, &self.target, *key).and_then(|made| self.warmer.compile(&made.plan)) {
                Ok(()) => {
                    self.ready.lock().unwrap_or_else(PoisonError::into_inner).insert(*key);
                }
                // It fails again, and is reported, where a batch needs it.
                Err(why) => log::debug!("no kernels for {:?}: {why}", key.0),
            }
        }
    }
}
