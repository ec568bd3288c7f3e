//! A device that fails when a test wants it to: the CPU executor behind a counter.

#![allow(clippy::unwrap_used, reason = "a test that cannot go on should stop")]
#![allow(dead_code, unreachable_pub, reason = "each test uses what it needs")]

use std::sync::atomic::{AtomicIsize, Ordering};
use std::sync::{Arc, Mutex};
use std::time::Duration;

use kiln_engine::Error;
use kiln_engine::executor::{Arithmetic, CpuExecutor, Executor, Memory, PlanId, Progress, Range, Ticket};
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

    fn error(&self) -> Error {
        match self.fault {
            Fault::Lost => GpuError::DeviceLost { during: "a step".into() }.into(),
            Fault::Hung => GpuError::Timeout { what: "a step".into(), after: Duration::from_secs(1) }.into(),
            Fault::Once => Error::Run { why: "a step failed".into() },
        }
    }

    /// A step ends, or fails.
    fn step(&self) -> Result<(), Error> {
        let left = self.left.fetch_sub(1, Ordering::Relaxed);
        if left == 0 || (left < 0 && self.fault != Fault::Once) { Err(self.error()) } else { Ok(()) }
    }

    /// Everything else that a device is asked for.
    fn ask(&self) -> Result<(), Error> {
        let lost = self.fault != Fault::Once && self.left.load(Ordering::Relaxed) < 0;
        if lost { Err(self.error()) } else { Ok(()) }
    }
}

/// The CPU executor, until it fails. What is given up and what is not is counted.
pub(crate) struct Frail {
    pub(crate) inner: CpuExecutor,
    pub(crate) trigger: Trigger,
    /// Steps on their way, plans that are ready, bytes that were read of the largest result.
    pub(crate) held: Arc<Mutex<[isize; 3]>>,
    /// Bytes that it says are free.
    pub(crate) memory: u64,
}

impl Frail {
    pub(crate) fn counted(trigger: &Trigger) -> (Box<dyn Executor>, Arc<Mutex<[isize; 3]>>) {
        let held = Arc::new(Mutex::new([0; 3]));
        let inner = CpuExecutor::new(Arithmetic::Fast);
        (Box::new(Frail { inner, trigger: trigger.clone(), held: Arc::clone(&held), memory: 1 << 40 }), held)
    }

    fn count(&self, which: usize, by: isize) {
        self.held.lock().unwrap()[which] += by;
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
        self.count(1, 1);
        Ok(plan)
    }

    fn write(&mut self, plan: PlanId, tensor: &Tensor, bytes: &[u8]) -> Result<(), Error> {
        self.trigger.ask()?;
        self.inner.write(plan, tensor, bytes)
    }

    fn run(&mut self, plan: PlanId) -> Result<(), Error> {
        self.trigger.step()?;
        self.inner.run(plan)
    }

    fn submit(&mut self, plan: PlanId) -> Result<Ticket, Error> {
        self.trigger.ask()?;
        self.count(0, 1);
        self.inner.submit(plan)
    }

    fn wait(&mut self, ticket: Ticket) -> Result<(), Error> {
        self.count(0, -1);
        self.trigger.step()?;
        self.inner.wait(ticket)
    }

    fn read(&mut self, plan: PlanId, tensor: &Tensor, bytes: &mut [u8]) -> Result<(), Error> {
        self.trigger.ask()?;
        let most = &mut self.held.lock().unwrap()[2];
        *most = (*most).max(bytes.len() as isize);
        self.inner.read(plan, tensor, bytes)
    }

    fn forget(&mut self, plan: PlanId) {
        self.count(1, -1);
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

    fn memory(&self) -> Option<Memory> {
        Some(Memory { free: self.memory, total: self.memory, place: "on the device" })
    }

    fn choices(&self, plan: PlanId) -> Vec<String> {
        self.inner.choices(plan)
    }
}
