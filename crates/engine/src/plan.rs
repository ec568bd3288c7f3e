//! The plan: a list of steps over named slots. It is data: it can be printed, checked, compared and run by either
//! executor. It names no device.

use std::fmt::Write as _;

use kiln_gguf::TensorType;
use kiln_kernels::mul_mat::{MOST_COLUMNS, Product};
use kiln_kernels::tensor::{Slot, Tensor};
use kiln_kernels::{Call, mul_mat_vec, mul_mm};

use crate::Error;
use crate::arch::{BatchShape, Room};

/// A single column of more elements may not fit the memory of a workgroup.
const LONG_COLUMN: usize = 8192;

/// What fills a slot.
#[derive(Clone, Debug, PartialEq)]
pub enum SlotKind {
    /// A tensor of the model file.
    Weight,
    /// Bytes that are computed when the model is loaded.
    Constant(Vec<u8>),
    /// Rows of keys or values of all sequences, in pages, kept from run to run.
    Cache,
    /// Kept from run to run: what recurrent layers remember of each sequence, states side by side.
    State,
    /// Zero before every run and zero again after it.
    Zeroed,
    /// Written by the host before each run.
    Input,
    /// Written and read by steps of one run.
    Scratch,
    /// Read by the host after each run.
    Output,
}

/// A named piece of memory.
#[derive(Clone, Debug, PartialEq)]
pub struct SlotInfo {
    /// Its name; for weights the tensor's name in the file.
    pub name: String,
    /// What fills it.
    pub kind: SlotKind,
    /// Its size.
    pub bytes: usize,
}

/// One step.
#[derive(Clone, Debug, PartialEq)]
pub struct Step {
    /// Where in the model it stands: `3.attention.q`.
    pub label: String,
    /// The operation with its operands.
    pub call: Call,
}

/// The slots all plans of a model share: weights, constants and state. Their numbers are the same in every plan.
#[derive(Clone, Debug, Default)]
pub struct Fixed {
    /// The slots, by number.
    pub slots: Vec<SlotInfo>,
}

impl Fixed {
    /// Adds a dense tensor in a slot of its own.
    pub fn add(&mut self, name: impl Into<String>, kind: SlotKind, ty: TensorType, shape: [usize; 4]) -> Tensor {
        add(&mut self.slots, name.into(), kind, ty, shape)
    }

    /// Bytes of all slots of a kind that `wanted` accepts.
    pub fn bytes(&self, wanted: impl Fn(&SlotKind) -> bool) -> usize {
        self.slots.iter().filter(|s| wanted(&s.kind)).map(|s| s.bytes).sum()
    }
}

fn add(slots: &mut Vec<SlotInfo>, name: String, kind: SlotKind, ty: TensorType, shape: [usize; 4]) -> Tensor {
    let slot = Slot(u32::try_from(slots.len()).expect("plans have far fewer slots than 2^32"));
    let tensor = Tensor::dense(slot, ty, shape);
    slots.push(SlotInfo { name, kind, bytes: tensor.span().1 });
    tensor
}

/// A plan for one batch shape.
#[derive(Clone, Debug)]
pub struct Plan {
    /// Every slot: first those of [`Fixed`], then the plan's own.
    pub slots: Vec<SlotInfo>,
    /// How many of them are shared by all plans of the model.
    pub n_fixed: usize,
    /// The steps, in an order in which they may run.
    pub steps: Vec<Step>,
    /// Where the host writes and reads.
    pub ports: Ports,
}

/// The tensors of a plan that the host touches; I32 but for the logits. Sequences and rows are those of
/// [`crate::arch::BatchShape`]. Rows without a token (batches are padded) have position and cache row -1.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Ports {
    /// `[rows]`: token ids.
    pub tokens: Tensor,
    /// `[rows]`: position of each token in its sequence.
    pub positions: Tensor,
    /// `[rows]`: row of the caches that each token is written to.
    pub rows: Tensor,
    /// `[sequences]`: number of keys in the cache once this batch is written.
    pub lengths: Tensor,
    /// `[pages of a sequence, sequences]`: key j of sequence s is cache row `table[j / PAGE, s] * PAGE + j % PAGE`.
    pub table: Tensor,
    /// `[prompt]`: the piece that each row of prompts belongs to. Nobody reads it if there is one piece.
    pub owners: Tensor,
    /// `[pieces + 1]`: first of the prompt rows of each piece, then the end of the last. Rows behind belong to nobody.
    pub starts: Tensor,
    /// `[sequences]`: the state of each sequence, in models with recurrent layers.
    pub states: Tensor,
    /// `[outputs]`: the rows whose logits are wanted.
    pub wanted: Tensor,
    /// F32 `[vocab, outputs]`: their logits.
    pub logits: Tensor,
}

impl Ports {
    /// The inputs, and room for the logits.
    pub fn new(b: &mut Builder, shape: &BatchShape, room: &Room, vocab: usize) -> Ports {
        let mut ints = |name: &str, extents: [usize; 2]| {
            // Some shapes have no use for an input: a slot of one element stands for it.
            let [n, m] = extents.map(|n| n.max(1));
            b.slot(name, SlotKind::Input, TensorType::I32, [n, m, 1, 1])
        };
        let (rows, sequences) = (shape.rows(), shape.sequences());
        Ports {
            tokens: ints("tokens", [rows, 1]),
            positions: ints("positions", [rows, 1]),
            rows: ints("rows", [rows, 1]),
            lengths: ints("lengths", [sequences, 1]),
            table: ints("table", [room.pages_of_a_sequence(), sequences]),
            owners: ints("owners", [shape.prompt, 1]),
            starts: ints("starts", [shape.pieces + 1, 1]),
            states: ints("states", [sequences, 1]),
            wanted: ints("wanted", [shape.outputs, 1]),
            logits: b.slot("logits", SlotKind::Output, TensorType::F32, [vocab, shape.outputs, 1, 1]),
        }
    }
}

/// Builds a plan step by step.
pub struct Builder {
    slots: Vec<SlotInfo>,
    n_fixed: usize,
    steps: Vec<Step>,
    few: usize,
}

impl Builder {
    /// A plan on top of the shared slots, for an executor that has so few columns for `mul_mat_vec`.
    pub fn new(fixed: &Fixed, few: usize) -> Builder {
        Builder { slots: fixed.slots.clone(), n_fixed: fixed.slots.len(), steps: Vec::new(), few }
    }

    /// Whether so many columns are few for these weights. Matrix units do not take F32.
    pub fn is_few(&self, weights: &Tensor, columns: usize) -> bool {
        columns <= if weights.ty == TensorType::F32 { MOST_COLUMNS } else { self.few }
    }

    /// A plain product by the operation made for its number of columns.
    pub fn product(&self, a: Tensor, b: Tensor, d: Tensor) -> Call {
        let product = Product { a, b, d };
        if self.is_few(&a, b.shape[1]) {
            mul_mat_vec::Call::plain(product).into()
        } else {
            mul_mm::Call::plain(product).into()
        }
    }

    /// A slot of this plan alone.
    pub fn slot(&mut self, name: &str, kind: SlotKind, ty: TensorType, shape: [usize; 4]) -> Tensor {
        add(&mut self.slots, name.to_owned(), kind, ty, shape)
    }

    /// Adds a step.
    pub fn step(&mut self, label: impl Into<String>, call: impl Into<Call>) {
        self.steps.push(Step { label: label.into(), call: call.into() });
    }

    /// Gives the products of many columns one piece of memory to share, as large as the largest of them can use: without
    /// it their fastest paths stay closed.
    pub fn share_product_memory(&mut self) {
        let bytes = |step: &Step| match &step.call {
            Call::MulMm(call) => call.ample_scratch_bytes(),
            _ => 0,
        };
        let words = self.steps.iter().map(bytes).max().unwrap_or(0).div_ceil(4);
        if words == 0 {
            return;
        }
        let memory = self.slot("products", SlotKind::Scratch, TensorType::I32, [words, 1, 1, 1]);
        for step in &mut self.steps {
            if let Call::MulMm(call) = &mut step.call {
                call.scratch = Some(memory);
            }
        }
    }

    /// Gives the products of few columns one piece of memory to share, for columns that do not fit a workgroup's memory.
    pub fn share_column_memory(&mut self) {
        fn columns(step: &mut Step) -> Option<&mut mul_mat_vec::Call> {
            let Call::MulMatVec(call) = &mut step.call else { return None };
            let b = &call.product.b;
            (b.rows() > 1 || b.shape[0] > LONG_COLUMN).then_some(call)
        }
        let bytes = |call: &mut mul_mat_vec::Call| mul_mat_vec::Call::scratch_bytes(&call.product.b);
        let Some(bytes) = self.steps.iter_mut().filter_map(columns).map(bytes).max() else { return };
        let memory = self.slot("columns", SlotKind::Scratch, TensorType::I8, [bytes, 1, 1, 1]);
        self.steps.iter_mut().filter_map(columns).for_each(|call| call.scratch = Some(memory));
    }

    /// The finished plan, checked.
    pub fn finish(self, ports: Ports) -> Result<Plan, Error> {
        let plan = Plan { slots: self.slots, n_fixed: self.n_fixed, steps: self.steps, ports };
        plan.check()?;
        Ok(plan)
    }
}

impl Plan {
    /// Whether every call's operands fit together, lie inside their slots, and read only what was written before.
    pub fn check(&self) -> Result<(), Error> {
        let mut written: Vec<bool> =
            self.slots.iter().map(|s| !matches!(s.kind, SlotKind::Scratch | SlotKind::Output)).collect();
        for step in &self.steps {
            let fault = |why: String| Error::Plan { step: step.label.clone(), why };
            let operation = step.call.operation();
            operation.check().map_err(|e| fault(e.to_string()))?;
            let reads = operation.reads();
            let writes = operation.writes();
            for tensor in reads.iter().chain(&writes).chain(&operation.scratch()) {
                let slot = self.slots.get(tensor.slot.0 as usize);
                let slot = slot.ok_or_else(|| fault(format!("there is no slot {}", tensor.slot.0)))?;
                let (first, bytes) = tensor.span();
                if first + bytes > slot.bytes {
                    return Err(fault(format!("{tensor} exceeds slot {} of {} bytes", slot.name, slot.bytes)));
                }
            }
            if let Some(early) = reads.iter().find(|t| !written[t.slot.0 as usize]) {
                let name = &self.slots[early.slot.0 as usize].name;
                return Err(fault(format!("reads {name}, which no step before it writes")));
            }
            for tensor in &writes {
                let slot = &self.slots[tensor.slot.0 as usize];
                if matches!(slot.kind, SlotKind::Weight | SlotKind::Constant(_) | SlotKind::Input) {
                    return Err(fault(format!("writes {}, which is not its to write", slot.name)));
                }
                written[tensor.slot.0 as usize] = true;
            }
        }
        Ok(())
    }

    /// Number of steps; on the GPU each is at least one dispatch.
    pub fn len(&self) -> usize {
        self.steps.len()
    }

    /// Whether there is nothing to do.
    pub fn is_empty(&self) -> bool {
        self.steps.is_empty()
    }

    /// The name of a tensor's slot.
    pub fn slot_name(&self, tensor: &Tensor) -> &str {
        &self.slots[tensor.slot.0 as usize].name
    }

    /// The plan as text: one line a step.
    pub fn print(&self) -> String {
        let mut out = String::new();
        let name = |t: &Tensor| {
            let at = if t.offset == 0 { String::new() } else { format!("+{}", t.offset) };
            format!("{}{at} {t}", self.slot_name(t))
        };
        for step in &self.steps {
            let operation = step.call.operation();
            let list = |tensors: Vec<Tensor>| tensors.iter().map(name).collect::<Vec<_>>().join(", ");
            let (reads, writes) = (list(operation.reads()), list(operation.writes()));
            let _ = writeln!(out, "{:24} {:16} {reads} -> {writes}", step.label, operation.name());
        }
        out
    }
}
