//! Executors of the same plan: the GPU records it into command buffers, the CPU runs it step by step, and several of them run parts
//! of it.

mod cpu;
mod crossings;
mod gpu;
mod options;
mod pipeline;
mod stage;
mod staging;
mod threads;
mod upload;
mod warm;

use std::sync::Arc;

use kiln_gguf::Gguf;
use kiln_gpu::StepTime;
use kiln_kernels::tensor::{Slot, Tensor};

pub use crate::lower::{DequantCache, PackB, Packing, Rounds};
pub use cpu::{Arithmetic, CpuExecutor};
pub use gpu::{GpuExecutor, batch_on};
pub use options::{Options, Order, Sums};
pub use pipeline::PipelineExecutor;
pub use stage::{
    About, FromStage, Link, Make, PIECE, PartKey, RemoteExecutor, Seat, SlotRange, StageHost, ToStage, Wrong,
};
pub use threads::Threads;
pub use warm::Warmer;

use crate::Error;
use crate::lower::cut::Part;
use crate::lower::{Target, lower_until};
use crate::plan::{Fixed, Plan};
use crate::run::Pulse;

/// A plan an executor has made ready.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub struct PlanId(pub(crate) usize);

/// The memory of an executor.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Memory {
    /// Bytes that nobody uses now.
    pub free: u64,
    /// Bytes in all.
    pub total: u64,
    /// Whose they are, for messages: `on the device`.
    pub place: &'static str,
}

/// What one device of an executor has.
#[derive(Clone, Debug)]
pub struct Share {
    /// What the device is, for people.
    pub name: String,
    /// What of the model it has, for people; nothing where it has all.
    pub part: Option<String>,
    /// Its memory, where anybody can tell.
    pub memory: Option<Memory>,
    /// Which shared slots it holds, by number; all where that is not said.
    pub holds: Option<Vec<bool>>,
    /// The place of each shared slot of others that it has while a part of a plan needs it; none where nothing is said.
    pub staging: Vec<Option<usize>>,
}

/// A plan on its way.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Ticket {
    plan: PlanId,
    /// Where there is a device: its point in time.
    submission: Option<kiln_gpu::Submission>,
}

impl Ticket {
    /// The plan that is on its way.
    pub fn plan(&self) -> PlanId {
        self.plan
    }
}

/// What holds of every plan that an executor is asked for.
const FORGOTTEN: &str = "nobody should use a plan after it was given up";

/// Puts a prepared plan into the first free place.
fn keep<P>(plans: &mut Vec<Option<P>>, prepared: P) -> PlanId {
    let place = plans.iter().position(Option::is_none).unwrap_or_else(|| {
        plans.push(None);
        plans.len() - 1
    });
    plans[place] = Some(prepared);
    PlanId(place)
}

/// A piece of a shared slot.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Range {
    /// The slot.
    pub slot: Slot,
    /// First byte; a multiple of four.
    pub offset: usize,
    /// Number of bytes; a multiple of four.
    pub bytes: usize,
}

impl Range {
    /// A piece of slot number `slot`.
    pub fn new(slot: u32, offset: usize, bytes: usize) -> Range {
        Range { slot: Slot(slot), offset, bytes }
    }
}

/// Bytes that are being read back: waits for them.
pub type Fetched = Box<dyn FnOnce() -> Result<Vec<u8>, Error> + Send>;

/// Tokens of a prompt that go through a model at once, where nothing speaks for more.
pub const BATCH: usize = 512;
/// The same where every row goes the way of one alone: more rows at once would gain nothing.
pub(crate) const INVARIANT_BATCH: usize = 64;

/// Told how far loading has come: bytes done, bytes in all.
pub type Progress<'a> = &'a mut dyn FnMut(u64, u64);

/// Runs plans of one model.
pub trait Executor: Send {
    /// Where it runs, for people.
    fn describe(&self) -> String;

    /// Takes in the shared slots: weights from the file, constants, empty state.
    fn load(&mut self, fixed: &Fixed, gguf: &Gguf, progress: Progress<'_>) -> Result<(), Error>;

    /// Takes the memory that steps of all plans compute in, once: this many bytes are enough for those that will come.
    fn reserve(&mut self, bytes: usize) -> Result<(), Error>;

    /// The same on one of several devices.
    fn reserve_on(&mut self, _device: usize, bytes: usize) -> Result<(), Error> {
        self.reserve(bytes)
    }

    /// What a plan that was not lowered yet becomes here: one part for each stay on a device, in the order in which they run. Each is
    /// as it is after the pass of this name, or after all of them.
    fn parts(&self, plan: Plan, last: Option<&str>) -> Result<Vec<Part>, Error> {
        Ok(vec![Part { device: 0, plan: lower_until(plan, &self.target(), last)? }])
    }

    /// What the parts of each device are lowered for.
    fn targets(&self) -> Vec<Target> {
        vec![self.target()]
    }

    /// What each device has.
    fn shares(&self) -> Vec<Share> {
        vec![Share { name: self.describe(), part: None, memory: self.memory(), holds: None, staging: Vec::new() }]
    }

    /// Makes a plan ready to run again and again.
    fn prepare(&mut self, plan: Plan) -> Result<PlanId, Error>;

    /// The same for a plan that others could make by themselves of this key, as stages do.
    fn prepare_keyed(&mut self, plan: Plan, _key: &PartKey) -> Result<PlanId, Error> {
        self.prepare(plan)
    }

    /// Says what all plans will stand on, before anything is loaded. Stages load by it.
    fn seat(&mut self, _seat: &Seat) {}

    /// Whether it is on another host: it makes its plans by itself and has its own copy of the model.
    fn is_remote(&self) -> bool {
        false
    }

    /// Makes kernels of plans that will be asked for, on any thread, while weights are loaded; none where kernels take no time.
    fn warmer(&self) -> Option<Warmer> {
        None
    }

    /// Writes a whole tensor from the host.
    fn write(&mut self, plan: PlanId, tensor: &Tensor, bytes: &[u8]) -> Result<(), Error>;

    /// The same for many of them at once.
    fn write_all(&mut self, plan: PlanId, tensors: &[(Tensor, &[u8])]) -> Result<(), Error> {
        tensors.iter().try_for_each(|(tensor, bytes)| self.write(plan, tensor, bytes))
    }

    /// Runs every step and waits.
    fn run(&mut self, plan: PlanId) -> Result<(), Error>;

    /// Sends a plan on its way behind those before it, and does not wait. Its inputs must stay as they are until it has ended.
    fn submit(&mut self, plan: PlanId) -> Result<Ticket, Error>;

    /// Waits for a plan on its way, and all before it.
    fn wait(&mut self, ticket: Ticket) -> Result<(), Error>;

    /// Reads a dense tensor back.
    fn read(&mut self, plan: PlanId, tensor: &Tensor, bytes: &mut [u8]) -> Result<(), Error>;

    /// Gives up a plan that was made ready.
    fn forget(&mut self, plan: PlanId);

    /// Gives back memory that it takes again when it runs next, where that costs little.
    fn rest(&mut self) {}

    /// Has somebody who wants to see that it gets on with plans that take long. Where waiting has a limit of its own, nobody need watch.
    fn watch(&mut self, _pulse: &Arc<Pulse>) {}

    /// Reads pieces of shared slots back, one after the other: what a model remembers.
    fn gather(&mut self, from: &[Range], bytes: &mut [u8]) -> Result<(), Error>;

    /// Writes pieces of shared slots from the host, one after the other.
    fn scatter(&mut self, to: &[Range], bytes: &[u8]) -> Result<(), Error>;

    /// Sends such pieces on their way behind the plans before them, and does not wait.
    fn send(&mut self, to: &[Range], bytes: &[u8]) -> Result<(), Error> {
        self.scatter(to, bytes)
    }

    /// Begins to read pieces of shared slots, as plans that were sent on their way before leave them.
    fn fetch(&mut self, from: &[Range]) -> Result<Fetched, Error> {
        let mut bytes = vec![0; from.iter().map(|range| range.bytes).sum()];
        self.gather(from, &mut bytes)?;
        Ok(Box::new(move || Ok(bytes)))
    }

    /// Copies pieces of shared slots; those of a pair have the same length and lie apart.
    fn copy(&mut self, pairs: &[(Range, Range)]) -> Result<(), Error>;

    /// Fills pieces of shared slots with zeros.
    fn zero(&mut self, ranges: &[Range]) -> Result<(), Error>;

    /// Runs one step alone and waits: for comparing executors.
    fn run_step(&mut self, plan: PlanId, step: usize) -> Result<(), Error>;

    /// Runs every step and waits, taking the time of each on the executor's own clock.
    fn profile(&mut self, plan: PlanId) -> Result<Vec<StepTime>, Error>;

    /// Bytes a second that its memory can be read at, where it can tell.
    fn read_ceiling(&mut self) -> Option<f64> {
        None
    }

    /// Operations a second that it can do at best, by the name of what does them.
    fn arithmetic_ceilings(&mut self) -> Vec<(String, f64)> {
        Vec::new()
    }

    /// Tokens of a prompt that should go through the model at once: more share the reading of weights, and take more
    /// memory.
    fn batch(&self) -> usize {
        BATCH
    }

    /// What orders the steps of generating, for people.
    fn order(&mut self) -> Result<&'static str, Error> {
        Ok("one step after the other")
    }

    /// What plans are lowered for.
    fn target(&self) -> Target {
        Target::cpu()
    }

    /// What memory there is for weights, caches and results, where anybody can tell.
    fn memory(&self) -> Option<Memory> {
        None
    }

    /// Whether a plan costs nothing to make ready, so that no batch need be padded to a size that was met before.
    fn takes_any_shape(&self) -> bool {
        false
    }

    /// The threads of the CPU that it computes on, where it does.
    fn threads(&self) -> Option<Threads> {
        None
    }

    /// How the steps of a plan are carried out here: path and variant of each.
    fn choices(&self, plan: PlanId) -> Vec<String>;
}
