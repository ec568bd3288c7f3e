//! A device that fails when a test wants it to: the CPU executor behind a counter.

#![allow(clippy::unwrap_used, reason = "a test that cannot go on should stop")]
#![allow(dead_code, unreachable_pub, reason = "each test uses what it needs")]

use std::sync::atomic::{AtomicIsize, Ordering};
use std::sync::{Arc, Mutex, MutexGuard};
use std::time::Duration;

use kiln_engine::Error;
use kiln_engine::executor::{Arithmetic, CpuExecutor, Executor, Memory, PlanId, Progress, Range, Ticket};
use kiln_engine::lower::Target;
use kiln_engine::plan::{Fixed, Plan};
use kiln_gguf::Gguf;
use kiln_gpu::Error as GpuError;
use kiln_kernels::tensor::Tensor;

/// How a device fails.
#[derive(Clone, Copy, PartialEq)]
pub(crate) enum Fault {
    /// For good, by the driver's word.
    Lost,
    /// For good: it finishes nothing any more.
    Hung,
    /// Once.
    Once,
    /// Once, and only in what it computed: kernels waited for each other in vain.
    Stall,
    /// Activations left their range: every plan that was prepared before says so until it is forgotten.
    Range,
    /// By a panic, once.
    Panic,
}

/// Fails after so many steps have ended: what is on its way then never ends.
#[derive(Clone)]
pub(crate) struct Trigger {
    fault: Fault,
    left: Arc<AtomicIsize>,
}

impl Trigger {
    pub(crate) fn after(fault: Fault, steps: isize) -> Trigger {
        Trigger { fault, left: Arc::new(AtomicIsize::new(steps)) }
    }

    /// Fails after so many steps from now on.
    pub(crate) fn set(&self, steps: isize) {
        self.left.store(steps, Ordering::Relaxed);
    }

    fn error(&self) -> Error {
        match self.fault {
            Fault::Lost => GpuError::DeviceLost { during: "a step".into() }.into(),
            Fault::Hung => GpuError::Timeout { what: "a step".into(), after: Duration::from_secs(1) }.into(),
            Fault::Once => Error::Run { why: "a step failed".into() },
            Fault::Stall => Error::Stalled,
            Fault::Range => Error::OutOfRange,
            Fault::Panic => panic!("the device panics, as the test wants it"),
        }
    }

    /// A step ends, or fails.
    fn step(&self) -> Result<(), Error> {
        let left = self.left.fetch_sub(1, Ordering::Relaxed);
        if left == 0 || (left < 0 && self.is_final()) { Err(self.error()) } else { Ok(()) }
    }

    fn is_final(&self) -> bool {
        matches!(self.fault, Fault::Lost | Fault::Hung)
    }

    /// Everything else that a device is asked for.
    fn ask(&self) -> Result<(), Error> {
        let lost = self.is_final() && self.left.load(Ordering::Relaxed) < 0;
        if lost { Err(self.error()) } else { Ok(()) }
    }
}

/// What a device was asked for.
#[derive(Clone, Copy, Debug, Default)]
pub(crate) struct Counts {
    /// Steps that were submitted and not waited for.
    pub(crate) on_their_way: usize,
    /// Plans that are prepared, and those that ever were.
    pub(crate) plans: usize,
    pub(crate) prepared: usize,
    /// Bytes of the largest result that was read.
    pub(crate) largest_read: usize,
    /// Steps that the host made, and those that were submitted ahead.
    pub(crate) runs: usize,
    pub(crate) submits: usize,
}

/// The CPU executor, until it fails. It takes padded shapes alone, as a GPU does. What is given up and what is not is counted.
pub(crate) struct Frail {
    pub(crate) inner: CpuExecutor,
    pub(crate) trigger: Trigger,
    pub(crate) held: Arc<Mutex<Counts>>,
    /// Bytes that it says are free.
    pub(crate) memory: u64,
    /// Plans that are ready, and whether each says that activations left their range.
    pub(crate) ready: Vec<(PlanId, bool)>,
    /// Sequences from which on attention reads common pages once.
    pub(crate) shares_from: usize,
}

impl Frail {
    pub(crate) fn new(trigger: &Trigger) -> Frail {
        let inner = CpuExecutor::new(Arithmetic::Fast);
        let (held, ready) = (Arc::default(), Vec::new());
        Frail { inner, trigger: trigger.clone(), held, memory: 1 << 40, ready, shares_from: usize::MAX }
    }

    pub(crate) fn counted(trigger: &Trigger) -> (Box<dyn Executor>, Arc<Mutex<Counts>>) {
        let frail = Frail::new(trigger);
        let held = Arc::clone(&frail.held);
        (Box::new(frail), held)
    }

    /// A run of a plan ends, or fails.
    fn step(&mut self, plan: PlanId) -> Result<(), Error> {
        let ended = self.trigger.step();
        if matches!(ended, Err(Error::OutOfRange)) {
            self.ready.iter_mut().for_each(|(_, says)| *says = true);
        }
        match self.ready.contains(&(plan, true)) {
            true => Err(Error::OutOfRange),
            false => ended,
        }
    }

    fn counts(&self) -> MutexGuard<'_, Counts> {
        self.held.lock().unwrap()
    }
}

impl Executor for Frail {
    fn describe(&self) -> String {
        "a frail device".into()
    }

    fn load(&mut self, fixed: &Fixed, gguf: &Gguf, progress: Progress<'_>) -> Result<(), Error> {
        self.inner.load(fixed, gguf, progress)
    }

    fn reserve(&mut self, bytes: usize) -> Result<(), Error> {
        self.inner.reserve(bytes)
    }

    fn prepare(&mut self, plan: Plan) -> Result<PlanId, Error> {
        self.trigger.ask()?;
        let plan = self.inner.prepare(plan)?;
        self.ready.push((plan, false));
        let mut counts = self.counts();
        counts.plans += 1;
        counts.prepared += 1;
        Ok(plan)
    }

    fn write(&mut self, plan: PlanId, tensor: &Tensor, bytes: &[u8]) -> Result<(), Error> {
        self.trigger.ask()?;
        self.inner.write(plan, tensor, bytes)
    }

    fn run(&mut self, plan: PlanId) -> Result<(), Error> {
        self.counts().runs += 1;
        let step = self.step(plan);
        // A step that stalls has changed what it should have changed, to no good.
        if matches!(step, Ok(()) | Err(Error::Stalled | Error::OutOfRange)) {
            self.inner.run(plan)?;
        }
        step
    }

    fn submit(&mut self, plan: PlanId) -> Result<Ticket, Error> {
        self.trigger.ask()?;
        let mut counts = self.counts();
        counts.on_their_way += 1;
        counts.submits += 1;
        drop(counts);
        self.inner.submit(plan)
    }

    fn wait(&mut self, ticket: Ticket) -> Result<(), Error> {
        self.counts().on_their_way -= 1;
        let step = self.step(ticket.plan());
        if matches!(step, Ok(()) | Err(Error::Stalled | Error::OutOfRange)) {
            self.inner.wait(ticket)?;
        }
        step
    }

    fn read(&mut self, plan: PlanId, tensor: &Tensor, bytes: &mut [u8]) -> Result<(), Error> {
        self.trigger.ask()?;
        let mut counts = self.counts();
        counts.largest_read = counts.largest_read.max(bytes.len());
        drop(counts);
        self.inner.read(plan, tensor, bytes)
    }

    fn forget(&mut self, plan: PlanId) {
        self.counts().plans -= 1;
        self.ready.retain(|(other, _)| *other != plan);
        self.inner.forget(plan);
    }

    fn gather(&mut self, from: &[Range], bytes: &mut [u8]) -> Result<(), Error> {
        self.trigger.ask()?;
        self.inner.gather(from, bytes)
    }

    fn scatter(&mut self, to: &[Range], bytes: &[u8]) -> Result<(), Error> {
        self.trigger.ask()?;
        self.inner.scatter(to, bytes)
    }

    fn copy(&mut self, pairs: &[(Range, Range)]) -> Result<(), Error> {
        self.trigger.ask()?;
        self.inner.copy(pairs)
    }

    fn zero(&mut self, ranges: &[Range]) -> Result<(), Error> {
        self.trigger.ask()?;
        self.inner.zero(ranges)
    }

    fn run_step(&mut self, plan: PlanId, step: usize) -> Result<(), Error> {
        self.inner.run_step(plan, step)
    }

    fn profile(&mut self, plan: PlanId) -> Result<Vec<kiln_gpu::StepTime>, Error> {
        self.inner.profile(plan)
    }

    fn target(&self) -> Target {
        Target { shares_from: self.shares_from, ..Target::cpu() }
    }

    fn memory(&self) -> Option<Memory> {
        Some(Memory { free: self.memory, total: self.memory, place: "on the device" })
    }

    fn choices(&self, plan: PlanId) -> Vec<String> {
        self.inner.choices(plan)
    }
}
