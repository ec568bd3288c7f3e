//! The plan: a list of steps over named slots. It is data: it can be printed, checked, compared and run by either
//! executor. Architectures build plain plans ([`Builder`]); [`crate::lower`] turns them into plans for a device.

pub(crate) mod adapt;
mod builder;
mod check;
pub mod def_use;
pub(crate) mod turn;

use std::fmt::Write as _;
use std::sync::Arc;

use kiln_gguf::TensorType;
use kiln_kernels::Call;
use kiln_kernels::advance::Places;
use kiln_kernels::tensor::{Slot, Tensor};

use crate::arch::{BatchShape, Coordinates, Room};

pub use builder::{Builder, Linear, Norm};

/// What fills a slot.
#[derive(Clone, Debug, PartialEq)]
pub enum SlotKind {
    /// A tensor of the model file.
    Weight,
    /// The weights of another slot in the format that the device reads: packed, or dequantised to F16. The executor fills it when it
    /// prepares the plan.
    WeightVariant(Slot),
    /// Bytes that are computed when the model is loaded.
    Constant(Arc<[u8]>),
    /// Rows of keys or values of all sequences, in pages, kept from run to run.
    Cache,
    /// The same of layers that see the last tokens alone: pages of their own, given back once no token can see them.
    WindowCache,
    /// Kept from run to run: what recurrent layers remember of each sequence, states side by side.
    State,
    /// Kept from run to run: states of the last tokens of each sequence, which a draft head takes, rows side by side.
    Carried,
    /// Zero before every run and zero again after it.
    Zeroed,
    /// A word that is zero at first. Steps set it where a result is out of range, and executors look at it after each run.
    Flag,
    /// Written by the host before each run.
    Input,
    /// Written by the host before the first of several runs, and by each of them for the next.
    Control,
    /// Written and read by steps of one run.
    Scratch,
    /// Read by the host after each run.
    Output,
    /// Added to by each of several runs, and read by the host.
    Log,
    /// Written by an earlier part on another device, and copied here before each run.
    Recv,
    /// Weights of this shared slot, which another device holds and which are copied here before each run.
    StreamedWeight(Slot),
    /// Written here for later parts on other devices, and copied to them after each run.
    Send,
    /// Written or received here by one part and read by later parts on the same device: stays there between them.
    Resident,
    /// A cache or state owned by another device, copied into staging buffer `n` here for the parts that need it. Layers share buffers.
    StagedCache(usize),
    /// A shared slot that other devices hold and this one does not use.
    Remote,
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
    /// The type of what fills it.
    pub ty: TensorType,
    /// The extents of what fills it.
    pub shape: [usize; 4],
    /// Where it lies in the plan's arena, for scratch slots of a lowered plan. Slots whose contents are needed at different
    /// times may lie in the same place.
    pub place: Option<usize>,
}

/// One step.
#[derive(Clone, Debug, PartialEq)]
pub struct Step {
    /// Where in the model it stands: `3.attention.q`.
    pub label: String,
    /// The operation with its operands.
    pub call: Call,
}

/// The slots all plans of a model share: weights, constants, caches and states. Their numbers are the same in every plan.
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

    /// The slots that are not on other devices only.
    pub fn here(&self) -> impl Iterator<Item = &SlotInfo> {
        self.slots.iter().filter(|slot| !matches!(slot.kind, SlotKind::Remote | SlotKind::StagedCache(_)))
    }

    /// Bytes of all slots of a kind that `wanted` accepts.
    pub fn bytes(&self, wanted: impl Fn(&SlotKind) -> bool) -> usize {
        self.slots.iter().filter(|s| wanted(&s.kind)).map(|s| s.bytes).sum()
    }
}

fn add(slots: &mut Vec<SlotInfo>, name: String, kind: SlotKind, ty: TensorType, shape: [usize; 4]) -> Tensor {
    let slot = Slot(u32::try_from(slots.len()).expect("plans have far fewer slots than 2^32"));
    let tensor = Tensor::dense(slot, ty, shape);
    slots.push(SlotInfo { name, kind, bytes: tensor.span().1, ty, shape, place: None });
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
    /// Bytes of the memory that scratch slots with a place lie in. Before places are given: those that are taken by what is kept from part
    /// to part, and 0 in a plan that is not cut.
    pub arena: usize,
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
    /// The same for the caches of layers with a window, where those have pages of their own. Entries of `table` for pages that no
    /// token of the batch sees name any page of the sequence.
    pub windows: Option<Places>,
    /// Where the keys of the text lie that each sequence answers, in models that read one first and write another.
    pub source: Option<Source>,
    /// `[sequences]`: number of keys in the cache once this batch is written.
    pub lengths: Tensor,
    /// `[pages of a sequence, sequences]`: key j of sequence s is cache row `table[j / PAGE, s] * PAGE + j % PAGE`.
    pub table: Tensor,
    /// `[prompt]`: the chunk that each prefill row belongs to. Unused if there is one chunk.
    pub owners: Tensor,
    /// `[pieces + 1]`: first prefill row of each chunk, then the end of the last. Rows after it are padding.
    pub starts: Tensor,
    /// `[sequences + 1]`: first row of each sequence, then the end of the last. Rows after it are padding.
    pub firsts: Tensor,
    /// `[sequences]`: the state of each sequence, in models with recurrent layers.
    pub states: Tensor,
    /// `[outputs]`: the rows whose logits are wanted.
    pub wanted: Tensor,
    /// F32 `[vocab, outputs]`: their logits.
    pub logits: Tensor,
    /// F32 `[rows, adapters]`: how strongly each adapter counts for each token, in plans where that differs.
    pub scales: Option<Tensor>,
    /// What rows that are vectors bring, in plans where there may be some.
    pub vectors: Option<VectorRows>,
    /// `[rows]` or `[rows, 4]`: by what heads are turned, in plans where that is not the position.
    pub coordinates: Option<Tensor>,
    /// `[prompt, 2]`: position of each prefill row and that of the last key that it sees, in plans where some see ahead.
    pub seen: Option<Tensor>,
    /// Where states of tokens come from and go to, in models with a draft head.
    pub carried: Option<CarriedRows>,
}

/// How states of tokens reach a draft head, which reads each token with the state of the one before. All are `[rows]`.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct CarriedRows {
    /// The row of the batch with the token before; -1 where that is not in the batch.
    pub inside: Tensor,
    /// The kept state of the token before; -1 where that is in the batch, or nowhere.
    pub before: Tensor,
    /// Where the state of the token is kept; -1 for nowhere.
    pub keep: Tensor,
}

/// Rows that are vectors. Such a row has token -1, whose embedding is zeros; rows of tokens have zeros here.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct VectorRows {
    /// F32 `[hidden * (1 + deepstack), rows]`: the first part is added to the embedding of each row, the others behind the first layers.
    pub values: Tensor,
    /// `[rows]`: tokens whose vectors the rows have in tables of single layers.
    pub stand_ins: Tensor,
}

/// Where the keys of the texts lie that sequences answer, as `table` and `lengths` of [`Ports`] say it of the sequences themselves.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Source {
    /// `[pages of a sequence, sequences]`.
    pub table: Tensor,
    /// `[sequences]`.
    pub lengths: Tensor,
}

impl Ports {
    /// The same for a model whose sequences answer texts.
    #[must_use]
    pub fn with_source(self, b: &mut Builder) -> Ports {
        let mut like = |name: &str, t: Tensor| b.slot(name, SlotKind::Input, TensorType::I32, t.shape);
        let source = Source { table: like("source.table", self.table), lengths: like("source.lengths", self.lengths) };
        Ports { source: Some(source), ..self }
    }

    /// The same for a batch whose rows may be vectors of this width.
    #[must_use]
    pub fn with_vectors(self, b: &mut Builder, width: usize) -> Ports {
        let shape = [width, self.tokens.shape[0], 1, 1];
        let values = b.slot("vectors", SlotKind::Input, TensorType::F32, shape);
        let stand_ins = b.slot("vectors.stand_ins", SlotKind::Input, TensorType::I32, self.tokens.shape);
        Ports { vectors: Some(VectorRows { values, stand_ins }), ..self }
    }

    /// The same for a model with a draft head.
    #[must_use]
    pub fn with_carried(self, b: &mut Builder) -> Ports {
        let mut ints = |name: &str| b.slot(name, SlotKind::Input, TensorType::I32, self.tokens.shape);
        let carried =
            CarriedRows { inside: ints("carried.inside"), before: ints("carried.before"), keep: ints("carried.keep") };
        Ports { carried: Some(carried), ..self }
    }

    /// The same for a batch with rows that do not stand or see as their positions say.
    #[must_use]
    pub fn with_places(self, b: &mut Builder, shape: &BatchShape) -> Ports {
        let mut ints = |name: &str, n: usize, m: usize| b.slot(name, SlotKind::Input, TensorType::I32, [n, m, 1, 1]);
        let coordinates = match shape.pictures.coordinates {
            Coordinates::Positions => None,
            Coordinates::Each => Some(ints("coordinates", shape.rows(), 1)),
            Coordinates::Four => Some(ints("coordinates", shape.rows(), 4)),
        };
        let sees_ahead = shape.pictures.sees_ahead && shape.prompt > 0;
        Ports { coordinates, seen: sees_ahead.then(|| ints("seen", shape.prompt, 2)), ..self }
    }

    /// The inputs. The logits are those that the last step makes ([`Builder::finish`]).
    pub fn new(b: &mut Builder, shape: &BatchShape, room: &Room) -> Ports {
        let mut ints = |name: &str, extents: [usize; 2]| {
            // Some shapes have no use for an input: a slot of one element stands for it.
            let [n, m] = extents.map(|n| n.max(1));
            b.slot(name, SlotKind::Input, TensorType::I32, [n, m, 1, 1])
        };
        let (rows, sequences) = (shape.rows(), shape.sequences());
        let tokens = ints("tokens", [rows, 1]);
        let windows = (room.window_pages > 0).then(|| Places {
            table: ints("windows.table", [room.pages_of_a_sequence(), sequences]),
            rows: ints("windows.rows", [rows, 1]),
        });
        Ports {
            windows,
            source: None,
            tokens,
            positions: ints("positions", [rows, 1]),
            rows: ints("rows", [rows, 1]),
            lengths: ints("lengths", [sequences, 1]),
            table: ints("table", [room.pages_of_a_sequence(), sequences]),
            owners: ints("owners", [shape.prompt, 1]),
            starts: ints("starts", [shape.pieces + 1, 1]),
            firsts: ints("firsts", [sequences + 1, 1]),
            states: ints("states", [sequences, 1]),
            wanted: ints("wanted", [shape.outputs, 1]),
            logits: tokens,
            scales: None,
            vectors: None,
            coordinates: None,
            seen: None,
            carried: None,
        }
    }
}

impl Ports {
    /// The same tensor for every port, for plans that know no sequences.
    pub(crate) fn all(t: Tensor) -> Ports {
        Ports {
            tokens: t,
            positions: t,
            rows: t,
            windows: None,
            source: None,
            lengths: t,
            table: t,
            owners: t,
            starts: t,
            firsts: t,
            states: t,
            wanted: t,
            logits: t,
            scales: None,
            vectors: None,
            coordinates: None,
            seen: None,
            carried: None,
        }
    }
}

impl Plan {
    /// Adds a slot of this plan alone.
    pub fn add(&mut self, name: &str, kind: SlotKind, ty: TensorType, shape: [usize; 4]) -> Tensor {
        add(&mut self.slots, name.to_owned(), kind, ty, shape)
    }

    /// Bytes of the slots that belong to this plan alone: those in the arena are shared by all plans, and weights in another form lie
    /// where the weights lie.
    pub fn own_bytes(&self) -> usize {
        let apart = |slot: &&SlotInfo| slot.place.is_none() && !matches!(slot.kind, SlotKind::WeightVariant(_));
        self.slots[self.n_fixed..].iter().filter(apart).map(|slot| slot.bytes).sum()
    }

    /// What fills the slot of a tensor.
    pub fn kind(&self, tensor: &Tensor) -> &SlotKind {
        &self.slots[tensor.slot.0 as usize].kind
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
