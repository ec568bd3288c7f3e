//! An executor that looks at the columns of every product before it lets another executor multiply them.

use std::collections::HashMap;
use std::sync::{Arc, Mutex, PoisonError};

use kiln_gguf::Gguf;
use kiln_kernels::Call;
use kiln_kernels::tensor::Tensor;

use super::{Importance, Seen};
use crate::Error;
use crate::compare::{read, values};
use crate::executor::{Executor, Memory, PlanId, Progress, Range, Ticket};
use crate::lower::Target;
use crate::plan::{Fixed, Plan, SlotKind};

/// The executor. Plans for it are not fused, so that every product has its columns in memory.
pub struct Observer {
    inner: Box<dyn Executor>,
    plans: HashMap<PlanId, Plan>,
    found: Arc<Mutex<Importance>>,
}

/// One product of a plan: the matrix or the stack of them, the columns, and who chooses among a stack.
struct Product<'a> {
    name: &'a str,
    matrix: Tensor,
    columns: Tensor,
    ids: Option<Tensor>,
}

impl Observer {
    /// Looks at what this executor multiplies; what it sees is added to `found`.
    pub fn new(inner: Box<dyn Executor>, found: Arc<Mutex<Importance>>) -> Observer {
        Observer { inner, plans: HashMap::new(), found }
    }

    fn look(&mut self, id: PlanId, call: &Call, plan: &Plan) -> Result<(), Error> {
        for Product { name, matrix, columns, ids } in products(call, plan) {
            let bytes = read(&mut *self.inner, id, &columns)?;
            let rows = values(&columns, bytes);
            let ids = match ids {
                Some(ids) => Some(values(&ids, read(&mut *self.inner, id, &ids)?)),
                None => None,
            };
            let mut found = self.found.lock().unwrap_or_else(PoisonError::into_inner);
            let (width, matrices) = (matrix.shape[0], matrix.shape[2]);
            let seen = found.tensors.entry(name.to_owned()).or_insert_with(|| Seen::new(width, matrices));
            if seen.columns != width || seen.matrices() != matrices {
                // Another view of the same tensor; the first one speaks for it.
                continue;
            }
            match ids {
                None => rows.chunks_exact(width).for_each(|row| seen.add(0, row.iter().copied())),
                Some(ids) => {
                    // Slots of a token may share its column.
                    let [_, slots, tokens, _] = columns.shape;
                    let used = ids.len() / tokens.max(1);
                    for (at, id) in ids.iter().enumerate() {
                        let (token, slot) = (at / used, at % used);
                        let row = token * slots + slot.min(slots - 1);
                        let expert = *id as usize;
                        if *id >= 0.0 && expert < matrices {
                            seen.add(expert, rows[row * width..(row + 1) * width].iter().copied());
                        }
                    }
                }
            }
        }
        Ok(())
    }
}

/// The products of a call whose matrices are weights of the file.
fn products<'a>(call: &Call, plan: &'a Plan) -> Vec<Product<'a>> {
    let (product, others, ids) = match call {
        Call::MulMatVec(call) => (&call.product, &call.others, call.experts.map(|experts| experts.ids)),
        Call::MulMm(call) => (&call.product, &call.others, call.ids),
        _ => return Vec::new(),
    };
    let matrices = [product.a].into_iter().chain(others.iter().map(|other| other.a));
    matrices
        .filter_map(|matrix| {
            let slot = plan.slots.get(matrix.slot.0 as usize)?;
            let single = ids.is_some() || matrix.shape[2] * matrix.shape[3] == 1;
            let weight = slot.kind == SlotKind::Weight && single;
            weight.then_some(Product { name: &slot.name, matrix, columns: product.b, ids })
        })
        .collect()
}

impl Executor for Observer {
    fn describe(&self) -> String {
        self.inner.describe()
    }

    fn load(&mut self, fixed: &Fixed, gguf: &Gguf, progress: Progress<'_>) -> Result<(), Error> {
        self.inner.load(fixed, gguf, progress)
    }

    fn reserve(&mut self, bytes: usize) -> Result<(), Error> {
        self.inner.reserve(bytes)
    }

    fn prepare(&mut self, plan: Plan) -> Result<PlanId, Error> {
        let id = self.inner.prepare(plan.clone())?;
        self.plans.insert(id, plan);
        Ok(id)
    }

    fn write(&mut self, plan: PlanId, tensor: &Tensor, bytes: &[u8]) -> Result<(), Error> {
        self.inner.write(plan, tensor, bytes)
    }

    fn run(&mut self, id: PlanId) -> Result<(), Error> {
        let Some(plan) = self.plans.remove(&id) else { return self.inner.run(id) };
        let result = plan.steps.iter().enumerate().try_for_each(|(at, step)| {
            self.look(id, &step.call, &plan)?;
            self.inner.run_step(id, at)
        });
        self.plans.insert(id, plan);
        result
    }

    fn submit(&mut self, plan: PlanId) -> Result<Ticket, Error> {
        self.inner.submit(plan)
    }

    fn wait(&mut self, ticket: Ticket) -> Result<(), Error> {
        self.inner.wait(ticket)
    }

    fn read(&mut self, plan: PlanId, tensor: &Tensor, bytes: &mut [u8]) -> Result<(), Error> {
        self.inner.read(plan, tensor, bytes)
    }

    fn forget(&mut self, plan: PlanId) {
        self.plans.remove(&plan);
        self.inner.forget(plan);
    }

    fn gather(&mut self, from: &[Range], bytes: &mut [u8]) -> Result<(), Error> {
        self.inner.gather(from, bytes)
    }

    fn scatter(&mut self, to: &[Range], bytes: &[u8]) -> Result<(), Error> {
        self.inner.scatter(to, bytes)
    }

    fn copy(&mut self, pairs: &[(Range, Range)]) -> Result<(), Error> {
        self.inner.copy(pairs)
    }

    fn zero(&mut self, ranges: &[Range]) -> Result<(), Error> {
        self.inner.zero(ranges)
    }

    fn run_step(&mut self, plan: PlanId, step: usize) -> Result<(), Error> {
        self.inner.run_step(plan, step)
    }

    fn profile(&mut self, plan: PlanId) -> Result<Vec<kiln_gpu::StepTime>, Error> {
        self.inner.profile(plan)
    }

    fn batch(&self) -> usize {
        self.inner.batch()
    }

    fn target(&self) -> Target {
        Target { fuses: false, ..self.inner.target() }
    }

    fn memory(&self) -> Option<Memory> {
        self.inner.memory()
    }

    fn takes_any_shape(&self) -> bool {
        // Rows that only pad a batch would be counted.
        true
    }

    fn choices(&self, plan: PlanId) -> Vec<String> {
        self.inner.choices(plan)
    }
}
