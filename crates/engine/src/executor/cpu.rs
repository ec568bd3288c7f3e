//! The CPU executor: runs each step by the operation's own CPU code, which is its reference where nothing faster is
//! needed.

use std::sync::Arc;
use std::time::Instant;

use kiln_gguf::{Gguf, Shared, TensorType, quant};
use kiln_gpu::StepTime;
use kiln_kernels::Call;
use kiln_kernels::host::{HostMemory, Place, Repacker, Spare};
use kiln_kernels::tensor::{Slot, Tensor};
use kiln_system::{allocator, code};

use super::threads::Threads;
use super::{BATCH, Executor, FORGOTTEN, INVARIANT_BATCH, Memory, PlanId, Progress, Range, Ticket};
use crate::Error;
use crate::lower::Target;
use crate::plan::{Fixed, Plan, SlotInfo, SlotKind, Step};
use crate::run::Pulse;
use crate::weights;

/// Which code runs the steps.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Arithmetic {
    /// The fast code where there is some.
    Fast,
    /// The definition of each operation, in f64: the judge of every other result.
    Reference,
}

/// Runs plans on the CPU.
pub struct CpuExecutor {
    arithmetic: Arithmetic,
    reproducible: bool,
    threads: Threads,
    memory: HostMemory,
    n_fixed: usize,
    plans: Vec<Option<Prepared>>,
    /// Where scratch slots of plans lie.
    arena: Arena,
    /// Whether code of loading is still in memory, and that of a first prompt.
    fresh: bool,
    /// Weights that are no longer read where they lie in the file, until the system has been told so for the last time.
    unread: Vec<Shared>,
    /// Who wants to see that it gets on.
    pulse: Arc<Pulse>,
}

/// This many small runs in a row give back what a large one computed in: a prompt is followed by a text.
const SETTLED: usize = 8;

/// Bytes up to which a weight is copied out of the file. Systems map half a megabyte around a byte that is read, so that the norms of a
/// model would keep a large part of its file in memory.
const SMALL: usize = 64 << 10;

/// Memory that all plans compute in, one at a time: as large as the largest needs that ran lately.
#[derive(Default)]
struct Arena {
    bytes: Vec<u8>,
    /// Runs in a row that needed far less than there is.
    small_runs: usize,
}

impl Arena {
    /// Has room for a plan that needs so much.
    fn grow(&mut self, needed: usize) {
        if self.bytes.len() < needed {
            self.bytes = vec![0; needed];
        }
    }

    /// A plan that needs so much has run: says whether memory was given back. What it wrote stays where it is.
    fn settle(&mut self, needed: usize) -> bool {
        self.small_runs = if 4 * needed < self.bytes.len() { self.small_runs + 1 } else { 0 };
        let settled = self.small_runs == SETTLED;
        if settled {
            self.bytes.truncate(needed);
            self.bytes.shrink_to_fit();
            self.small_runs = 0;
        }
        settled
    }
}

struct Prepared {
    plan: Plan,
    /// The plan's own slots while it does not run; they join the shared ones for the run.
    own: Vec<Vec<u8>>,
}

impl CpuExecutor {
    /// An executor without a model.
    pub fn new(arithmetic: Arithmetic) -> CpuExecutor {
        let memory = HostMemory::default();
        let (plans, arena, pulse) = (Vec::new(), Arena::default(), Arc::default());
        let (threads, unread) = (Threads::default(), Vec::new());
        CpuExecutor {
            arithmetic,
            reproducible: false,
            threads,
            memory,
            n_fixed: 0,
            plans,
            arena,
            fresh: true,
            unread,
            pulse,
        }
    }

    /// Computes on this many threads of its own.
    pub fn threads(mut self, threads: usize) -> Result<CpuExecutor, Error> {
        self.threads = Threads::new(threads)?;
        Ok(self)
    }

    /// Works on a thread of the pool, so that no step has to wake one to begin.
    fn pooled<T: Send>(&mut self, work: impl FnOnce(&mut CpuExecutor) -> T + Send) -> T {
        self.threads.clone().run(|| work(self))
    }

    /// Every row goes the way that it would go alone ([`Target::batch_invariant`]), if `yes`.
    pub fn reproducible(mut self, yes: bool) -> CpuExecutor {
        self.reproducible = yes;
        self
    }

    fn with_plan<T>(&mut self, plan: PlanId, work: impl FnOnce(&Plan, &mut HostMemory) -> T) -> T {
        let prepared = self.plans[plan.0].as_mut().expect(FORGOTTEN);
        self.memory.slots.append(&mut prepared.own);
        self.arena.grow(prepared.plan.arena);
        // Scratch slots are pieces of an arena that all plans share; it stands behind the plan's own slots.
        let arena = Slot(u32::try_from(self.memory.slots.len()).expect("far fewer slots than 2^32"));
        self.memory.slots.push(std::mem::take(&mut self.arena.bytes));
        let place = |s: &SlotInfo| s.place.map(|offset| Place { slot: arena, offset, bytes: s.bytes });
        self.memory.places = prepared.plan.slots.iter().map(place).collect();
        let result = work(&prepared.plan, &mut self.memory);
        self.memory.places.clear();
        self.arena.bytes = self.memory.slots.pop().unwrap_or_default();
        prepared.own = self.memory.slots.split_off(self.n_fixed);
        result
    }

    /// Gives memory back that only longer runs needed. What the plan that has just run has in the arena stays there.
    fn settle(&mut self, plan: PlanId) {
        let needed = self.plans[plan.0].as_ref().expect(FORGOTTEN).plan.arena;
        if self.arena.settle(needed) {
            self.memory.spare = Spare::default();
            allocator::give_back();
            self.threads.each(allocator::give_back_end);
            if std::mem::take(&mut self.fresh) {
                code::give_back();
                // By now all weights that are used as they lie have been read, and what lies around them came with them.
                Shared::forget_all(&std::mem::take(&mut self.unread));
            }
        }
    }
}

impl Executor for CpuExecutor {
    fn describe(&self) -> String {
        let threads = self.threads.count();
        match self.arithmetic {
            Arithmetic::Fast => format!("CPU, {threads} threads"),
            Arithmetic::Reference => format!("CPU reference in f64, {threads} threads"),
        }
    }

    fn load(&mut self, fixed: &Fixed, gguf: &Gguf, progress: Progress<'_>) -> Result<(), Error> {
        let total = fixed.here().map(|s| s.bytes as u64).sum();
        has_room("the model with its caches", total)?;
        let mut done = 0;
        self.memory = HostMemory::default();
        let mut unread = Vec::new();
        let weights = fixed.slots.iter().filter(|slot| slot.kind == SlotKind::Weight);
        let room = weights.map(|slot| Repacker::room(slot.ty, slot.shape[0], slot.bytes)).sum();
        let mut repacker = Repacker::new(if self.arithmetic == Arithmetic::Fast { room } else { 0 });
        for (i, slot) in fixed.slots.iter().enumerate() {
            let (mut bytes, mut file) = (Vec::new(), None);
            match &slot.kind {
                SlotKind::Weight => {
                    // Weights are used as they lie in the file, without a copy, where no other order makes products faster.
                    let info = gguf.tensor(&slot.name)?;
                    let data = weights::data(gguf, info)?;
                    let shared = gguf.shared(info);
                    let interleaved =
                        self.threads.run(|| repacker.interleave(Slot(i as u32), slot.ty, slot.shape[0], data));
                    if interleaved {
                        shared.forget();
                    }
                    if interleaved || data.len() <= SMALL {
                        unread.push(shared.clone());
                    }
                    if interleaved || data.len() > SMALL {
                        file = Some(shared);
                    } else {
                        bytes = data.to_vec();
                    }
                }
                SlotKind::Constant(values) => bytes = values.to_vec(),
                SlotKind::Remote | SlotKind::StagedCache(_) => {}
                _ => bytes = vec![0; slot.bytes],
            }
            done += if slot.kind == SlotKind::Remote { 0 } else { slot.bytes as u64 };
            self.memory.slots.push(bytes);
            self.memory.files.push(file);
            progress(done, total);
        }
        // Whoever reads the first page of a tensor gets some pages before it, too, which were given back already.
        Shared::forget_all(&unread);
        self.unread = unread;
        self.memory.put_interleaved(repacker);
        self.n_fixed = fixed.slots.len();
        Ok(())
    }

    fn reserve(&mut self, _bytes: usize) -> Result<(), Error> {
        // All plans share one arena here, which can grow under them.
        Ok(())
    }

    fn prepare(&mut self, plan: Plan) -> Result<PlanId, Error> {
        assert_eq!(plan.n_fixed, self.n_fixed, "the plan should stand on the slots that were loaded");
        let alone = |s: &SlotInfo| if s.place.is_some() { 0 } else { s.bytes };
        let own = &plan.slots[plan.n_fixed..];
        let needed = own.iter().map(alone).sum::<usize>() + plan.arena.saturating_sub(self.arena.bytes.len());
        has_room("reading so many tokens at once", needed as u64)?;
        let own = own.iter().map(|s| match s.kind {
            SlotKind::WeightVariant(of) => form(&plan.slots[of.0 as usize], self.memory.bytes(of), s),
            _ => Ok(vec![0; alone(s)]),
        });
        let own = own.collect::<Result<Vec<_>, _>>()?;
        Ok(super::keep(&mut self.plans, Prepared { plan, own }))
    }

    fn write(&mut self, plan: PlanId, tensor: &Tensor, bytes: &[u8]) -> Result<(), Error> {
        self.with_plan(plan, |_, memory| {
            memory.bytes_mut(tensor.slot)[tensor.offset..tensor.offset + bytes.len()].copy_from_slice(bytes);
        });
        Ok(())
    }

    fn run(&mut self, plan: PlanId) -> Result<(), Error> {
        let (arithmetic, pulse) = (self.arithmetic, Arc::clone(&self.pulse));
        self.pooled(|executor| {
            executor.with_plan(plan, |plan, memory| {
                for step in &plan.steps {
                    // A long prompt of a large model may take minutes.
                    pulse.beat();
                    run_call(&step.call, arithmetic, memory);
                }
            });
        });
        self.settle(plan);
        Ok(())
    }

    fn watch(&mut self, pulse: &Arc<Pulse>) {
        self.pulse = Arc::clone(pulse);
    }

    fn submit(&mut self, plan: PlanId) -> Result<Ticket, Error> {
        self.run(plan)?;
        Ok(Ticket { plan, submission: None })
    }

    fn wait(&mut self, _ticket: Ticket) -> Result<(), Error> {
        Ok(())
    }

    fn read(&mut self, plan: PlanId, tensor: &Tensor, bytes: &mut [u8]) -> Result<(), Error> {
        self.with_plan(plan, |_, memory| {
            bytes.copy_from_slice(&memory.bytes(tensor.slot)[tensor.offset..tensor.offset + bytes.len()]);
        });
        Ok(())
    }

    fn forget(&mut self, plan: PlanId) {
        self.plans[plan.0] = None;
    }

    fn rest(&mut self) {
        (self.arena, self.memory.spare) = (Arena::default(), Spare::default());
        self.threads.each(allocator::give_back_end);
    }

    fn gather(&mut self, from: &[Range], bytes: &mut [u8]) -> Result<(), Error> {
        let mut rest = bytes;
        for range in from {
            let (own, others) = rest.split_at_mut(range.bytes);
            own.copy_from_slice(&self.memory.bytes(range.slot)[range.offset..range.offset + range.bytes]);
            rest = others;
        }
        Ok(())
    }

    fn scatter(&mut self, to: &[Range], bytes: &[u8]) -> Result<(), Error> {
        let mut rest = bytes;
        for range in to {
            let (own, others) = rest.split_at(range.bytes);
            self.memory.bytes_mut(range.slot)[range.offset..range.offset + range.bytes].copy_from_slice(own);
            rest = others;
        }
        Ok(())
    }

    fn copy(&mut self, pairs: &[(Range, Range)]) -> Result<(), Error> {
        for (from, to) in pairs {
            let bytes = self.memory.bytes(from.slot)[from.offset..from.offset + from.bytes].to_vec();
            self.scatter(&[*to], &bytes)?;
        }
        Ok(())
    }

    fn zero(&mut self, ranges: &[Range]) -> Result<(), Error> {
        for range in ranges {
            self.memory.bytes_mut(range.slot)[range.offset..range.offset + range.bytes].fill(0);
        }
        Ok(())
    }

    fn memory(&self) -> Option<Memory> {
        let available = kiln_system::memory::available()?;
        Some(Memory { free: available.bytes, total: available.bytes, place: available.bound.name() })
    }

    fn batch(&self) -> usize {
        if self.reproducible { INVARIANT_BATCH } else { BATCH }
    }

    fn target(&self) -> Target {
        Target { batch_invariant: self.reproducible, ..Target::cpu() }
    }

    fn read_ceiling(&mut self) -> Option<f64> {
        Some(kiln_kernels::ceiling::read())
    }

    fn arithmetic_ceilings(&mut self) -> Vec<(String, f64)> {
        vec![("f32 multiply-add".to_owned(), kiln_kernels::ceiling::multiply_add())]
    }

    fn takes_any_shape(&self) -> bool {
        true
    }

    fn run_step(&mut self, plan: PlanId, step: usize) -> Result<(), Error> {
        let arithmetic = self.arithmetic;
        self.pooled(|executor| {
            executor.with_plan(plan, |plan, memory| run_call(&plan.steps[step].call, arithmetic, memory));
        });
        Ok(())
    }

    fn profile(&mut self, plan: PlanId) -> Result<Vec<StepTime>, Error> {
        let arithmetic = self.arithmetic;
        let times = self.pooled(|executor| {
            executor.with_plan(plan, |plan, memory| {
                let timed = |step: &Step| {
                    let start = Instant::now();
                    run_call(&step.call, arithmetic, memory);
                    let bytes = step.call.operation().work().bytes;
                    StepTime { label: step.label.clone(), time: start.elapsed(), bytes }
                };
                plan.steps.iter().map(timed).collect()
            })
        });
        Ok(times)
    }

    fn threads(&self) -> Option<Threads> {
        Some(self.threads.clone())
    }

    fn choices(&self, plan: PlanId) -> Vec<String> {
        self.plans[plan.0].as_ref().expect(FORGOTTEN).plan.steps.iter().map(|_| "cpu".to_owned()).collect()
    }
}

/// Whether this many bytes can be had. Asked before they are taken: a process that takes too much is ended without a word.
fn has_room(what: &'static str, needed: u64) -> Result<(), Error> {
    match kiln_system::memory::available() {
        Some(available) if available.bytes < needed => Err(Error::Memory { what, needed, available }),
        _ => Ok(()),
    }
}

/// The weights of a slot as a plan for a device has them: packed, or decoded to F16.
fn form(of: &SlotInfo, bytes: &[u8], form: &SlotInfo) -> Result<Vec<u8>, Error> {
    let mut out = vec![0; form.bytes];
    let made = if form.ty == TensorType::F16 {
        let mut values = vec![0.0; form.shape.iter().product()];
        quant::dequantise(of.ty, bytes, &mut values).map(|()| {
            out.copy_from_slice(bytemuck::cast_slice(&values.into_iter().map(half::f16::from_f32).collect::<Vec<_>>()));
        })
    } else {
        quant::pack(form.ty, bytes, &mut out)
    };
    made.map_err(|why| Error::Plan { step: form.name.clone(), why: why.to_string() })?;
    Ok(out)
}

fn run_call(call: &Call, arithmetic: Arithmetic, memory: &mut HostMemory) {
    match arithmetic {
        Arithmetic::Fast => call.operation().cpu(memory),
        Arithmetic::Reference => call.operation().reference(memory),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn memory_of_a_long_run_is_given_back_after_some_short_ones() {
        let mut arena = Arena::default();
        arena.grow(1 << 20);
        assert!(!arena.settle(1 << 20));
        for _ in 1..SETTLED {
            arena.grow(100);
            assert!(!arena.settle(100));
        }
        // A long one in between, and all is as it was.
        arena.grow(1 << 20);
        assert!(!arena.settle(1 << 20) && arena.bytes.len() == 1 << 20);
        arena.bytes[7] = 9;
        let given_back: Vec<usize> = (1..=2 * SETTLED).filter(|_| arena.settle(100)).collect();
        assert_eq!(given_back, [SETTLED]);
        assert!(arena.bytes.capacity() < 1000 && arena.bytes[7] == 9, "{}", arena.bytes.capacity());
        arena.grow(500);
        assert_eq!(arena.bytes.len(), 500);
    }
}
