//! Two executors of the same plan: the GPU records it into command buffers, the CPU runs it step by step.

mod cpu;
mod gpu;

use std::time::Duration;

use kiln_gguf::Gguf;
use kiln_kernels::mul_mat::MOST_COLUMNS;
use kiln_kernels::tensor::{Slot, Tensor};

pub use cpu::{Arithmetic, CpuExecutor};
pub use gpu::{GpuExecutor, Keep, Options, Packing, Sums};

use crate::Error;
use crate::plan::{Fixed, Plan};

/// A plan an executor has made ready.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub struct PlanId(pub(crate) usize);

/// Tokens of a prompt that go through a model at once, where nothing speaks for more.
pub const BATCH: usize = 512;

/// Told how far loading has come: bytes done, bytes in all.
pub type Progress<'a> = &'a mut dyn FnMut(u64, u64);

/// Runs plans of one model.
pub trait Executor: Send {
    /// Where it runs, for people.
    fn describe(&self) -> String;

    /// Takes in the shared slots: weights from the file, constants, empty state.
    fn load(&mut self, fixed: &Fixed, gguf: &Gguf, progress: Progress<'_>) -> Result<(), Error>;

    /// Makes a plan ready to run again and again.
    fn prepare(&mut self, plan: Plan) -> Result<PlanId, Error>;

    /// Writes a whole tensor from the host.
    fn write(&mut self, plan: PlanId, tensor: &Tensor, bytes: &[u8]) -> Result<(), Error>;

    /// Runs every step and waits.
    fn run(&mut self, plan: PlanId) -> Result<(), Error>;

    /// Reads a dense tensor back.
    fn read(&mut self, plan: PlanId, tensor: &Tensor, bytes: &mut [u8]) -> Result<(), Error>;

    /// Reads a whole shared slot back: what a model remembers.
    fn read_fixed(&mut self, slot: Slot, bytes: &mut [u8]) -> Result<(), Error>;

    /// Writes a whole shared slot from the host.
    fn write_fixed(&mut self, slot: Slot, bytes: &[u8]) -> Result<(), Error>;

    /// Runs one step alone and waits: for comparing executors.
    fn run_step(&mut self, plan: PlanId, step: usize) -> Result<(), Error>;

    /// Runs every step and waits, taking the time of each on the executor's own clock; the step's label comes with it.
    fn profile(&mut self, plan: PlanId) -> Result<Vec<(String, Duration)>, Error>;

    /// Tokens of a prompt that should go through the model at once: more share the reading of weights, and take more
    /// memory.
    fn batch(&self) -> usize {
        BATCH
    }

    /// Most columns of a product that are few here: those go to `mul_mat_vec`, more to `mul_mm`.
    fn few_columns(&self) -> usize {
        MOST_COLUMNS
    }

    /// How the steps of a plan are carried out here: path and variant of each.
    fn choices(&self, plan: PlanId) -> Vec<String>;
}
