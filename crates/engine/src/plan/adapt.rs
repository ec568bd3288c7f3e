//! Adds low-rank adapters to a plain plan: where a changed weight multiplies x, steps add scale * B (A x). The weights stay as they
//! are, in whatever format, and passes fuse these steps as they fuse all others.

use std::collections::{HashMap, HashSet};

use kiln_gguf::TensorType;
use kiln_kernels::binary::{self, Operator};
use kiln_kernels::mul_mat::{Epilogue, Product};
use kiln_kernels::mul_mat_vec::{self, Experts};
use kiln_kernels::tensor::{Slot, Tensor};
use kiln_kernels::{Call, get_rows};

use super::{Plan, SlotKind, Step};

/// What an adapter does to one weight.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Change {
    /// The adapter, by number.
    pub(crate) adapter: usize,
    /// `[in, rank]`, of experts one each; of embeddings `[rank, vocab]`.
    pub(crate) a: Tensor,
    /// `[rank, out]`, of experts one each.
    pub(crate) b: Tensor,
    /// alpha / rank.
    pub(crate) scale: f32,
    /// Rows are taken of the weight, in the place of a product with it.
    pub(crate) embeds: bool,
}

/// The changes of all adapters, by the slot of the weight.
pub(crate) type Changes = HashMap<Slot, Vec<Change>>;

/// How strongly adapters count.
#[derive(Clone, Copy, Debug)]
pub(crate) enum Scales<'a> {
    /// Each the same for all tokens.
    Same(&'a [f32]),
    /// Of so many adapters each as an input says, for each token.
    ByRow(usize),
}

/// Adds the steps. Gives the weights that were changed.
pub(crate) fn adapt(plan: &mut Plan, changes: &Changes, scales: Scales<'_>) -> HashSet<Slot> {
    let mut adapting = Adapting { by_row: None, steps: Vec::new(), scales, plan };
    if let Scales::ByRow(adapters) = scales {
        let rows = adapting.plan.ports.tokens.shape[0];
        let input = adapting.plan.add("lora.scales", SlotKind::Input, TensorType::F32, [rows, adapters, 1, 1]);
        (adapting.by_row, adapting.plan.ports.scales) = (Some(input), Some(input));
    }
    let mut changed = HashSet::new();
    for step in std::mem::take(&mut adapting.plan.steps) {
        let (slot, embeds) = match &step.call {
            Call::MulMatVec(call) => (call.product.a.slot, false),
            Call::GetRows(call) => (call.src.slot, true),
            _ => {
                adapting.steps.push(step);
                continue;
            }
        };
        let mine: Vec<Change> = changes.get(&slot).into_iter().flatten().copied().collect();
        let mine: Vec<Change> = mine.into_iter().filter(|c| c.embeds == embeds && adapting.counts(c)).collect();
        if mine.is_empty() {
            adapting.steps.push(step);
        } else if adapting.change(step, &mine) {
            changed.insert(slot);
        }
    }
    adapting.plan.steps = adapting.steps;
    changed
}

struct Adapting<'p, 'a> {
    plan: &'p mut Plan,
    scales: Scales<'a>,
    /// F32 `[rows, adapters]`.
    by_row: Option<Tensor>,
    steps: Vec<Step>,
}

/// A product with a weight, or rows of it.
struct Changed {
    /// What is multiplied; of embeddings the tokens.
    x: Tensor,
    /// Where the result goes.
    d: Tensor,
    /// What the product is multiplied by.
    scale: f32,
    experts: Option<Experts>,
    /// Which rows of the weight: first and number.
    rows: (usize, usize),
}

impl Adapting<'_, '_> {
    fn counts(&self, change: &Change) -> bool {
        match self.scales {
            Scales::Same(scales) => scales[change.adapter] != 0.0,
            Scales::ByRow(_) => true,
        }
    }

    fn push(&mut self, label: String, call: impl Into<Call>) {
        self.steps.push(Step { label, call: call.into() });
    }

    fn fresh(&mut self, label: &str, shape: [usize; 4]) -> Tensor {
        self.plan.add(label, SlotKind::Scratch, TensorType::F32, shape)
    }

    /// Adds a step and what adapters add to its result. `false`: it is of a kind that they do not know.
    fn change(&mut self, mut step: Step, changes: &[Change]) -> bool {
        let Some(found) = found(&step.call) else {
            self.steps.push(step);
            return false;
        };
        let label = step.label.clone();
        let mut sum = self.fresh(&format!("{label}.base"), found.d.shape);
        match &mut step.call {
            Call::MulMatVec(call) => call.product.d = sum,
            Call::GetRows(call) => call.dst = sum,
            _ => {}
        }
        self.steps.push(step);
        for (i, change) in changes.iter().enumerate() {
            let label = format!("{label}.lora{}", change.adapter);
            let added = self.low_rank(&label, &found, change);
            let to = if i + 1 == changes.len() { found.d } else { self.fresh(&label, found.d.shape) };
            self.push(label, binary::Call { operator: Operator::Add, a: sum, b: added, dst: to });
            sum = to;
        }
        true
    }

    /// scale * B (A x).
    fn low_rank(&mut self, label: &str, found: &Changed, change: &Change) -> Tensor {
        let factor = match self.scales {
            Scales::Same(scales) => scales[change.adapter],
            Scales::ByRow(_) => 1.0,
        };
        let scale = change.scale * found.scale * factor;
        let [_, n1, n2, _] = found.d.shape;
        let name = format!("{label}.a");
        let rank = change.b.shape[0];
        let mut low = self.fresh(&name, [rank, n1, n2, 1]);
        // Rows of embeddings have no factor of their own: it comes with the second product.
        let late = if change.embeds { scale } else { 1.0 };
        if change.embeds {
            self.push(name, get_rows::Call { src: change.a, ids: found.x, dst: low });
        } else {
            self.product(name, [change.a, found.x, low], scale, found.experts);
        }
        if let Some(scales) = self.by_row {
            low = self.times_rows(label, low, scales.narrow(1, change.adapter, 1), found.experts.is_some());
        }
        let name = format!("{label}.b");
        let up = self.fresh(&name, found.d.shape);
        let b = change.b.narrow(1, found.rows.0, found.rows.1);
        self.product(name, [b, low, up], late, found.experts);
        up
    }

    fn product(&mut self, label: String, [a, b, d]: [Tensor; 3], scale: f32, experts: Option<Experts>) {
        let epilogue = Epilogue { scale, bias: None, residual: None };
        let plain = mul_mat_vec::Call::plain(Product { a, b, d });
        self.push(label, mul_mat_vec::Call { epilogue, experts, ..plain });
    }

    /// Every column times the factor of its token.
    fn times_rows(&mut self, label: &str, low: Tensor, scales: Tensor, experts: bool) -> Tensor {
        let name = format!("{label}.scaled");
        let rows = scales.shape[0];
        // Columns of experts lie behind their token, all others are one for each row; the output takes rows that are wanted.
        let factors = match experts {
            true => scales.reshape([1, 1, rows, 1]),
            false if low.shape[1] == rows => scales.reshape([1, rows, 1, 1]),
            false => self.of_outputs(scales),
        };
        let dst = self.fresh(&name, low.shape);
        self.push(name, binary::Call { operator: Operator::Mul, a: low, b: factors, dst });
        dst
    }

    fn of_outputs(&mut self, scales: Tensor) -> Tensor {
        let (ids, rows) = (self.plan.ports.wanted, scales.shape[0]);
        let name = "lora.scales.wanted";
        let dst = self.fresh(name, [1, ids.shape[0], 1, 1]);
        self.push(name.to_owned(), get_rows::Call { src: scales.reshape([1, rows, 1, 1]), ids, dst });
        dst
    }
}

/// What an adapter must know of a step; none if it is of a kind that adapters do not know.
fn found(call: &Call) -> Option<Changed> {
    match call {
        Call::GetRows(call) => {
            let rows = (0, call.dst.shape[0]);
            Some(Changed { x: call.ids, d: call.dst, scale: 1.0, experts: None, rows })
        }
        Call::MulMatVec(call) => {
            let Product { a, b, d } = call.product;
            let plain = mul_mat_vec::Call::plain(call.product);
            let plain = mul_mat_vec::Call { epilogue: call.epilogue, experts: call.experts, ..plain };
            let weighted = call.experts.is_some_and(|experts| experts.weights.is_some());
            let batched = call.experts.is_none() && b.shape[2..] != [1, 1];
            let start = a.offset / a.stride[1];
            let whole_rows = a.offset.is_multiple_of(a.stride[1]) && a.has_dense_rows();
            (plain == *call && !weighted && !batched && whole_rows).then_some(Changed {
                x: b,
                d,
                scale: call.epilogue.scale,
                experts: call.experts,
                rows: (start, a.shape[1]),
            })
        }
        _ => None,
    }
}
