//! Results that products of few columns multiply leave their step as matrix units take them ([`kiln_kernels::ready`]): the product takes them as they
//! are, and no pass stands between the two. Attention leaves its results so. Gate and up become one step, which leaves gated columns: their factors
//! go by the magnitudes of the layer before, so the first layer of a plan has none and only leaves its own. So do products whose results a norm
//! follows: what they leave is multiplied by its weights, and its factor behind the next product.

use kiln_gguf::TensorType;
use kiln_gpu::{Caps, MatrixOrder};
use kiln_kernels::Call;
use kiln_kernels::mul_mat::{Norm, Product};
use kiln_kernels::mul_mm::{self, Before, Gated};
use kiln_kernels::operation::{Operation, Path};
use kiln_kernels::ready::{self, Ready, Samples};
use kiln_kernels::tensor::Tensor;

use super::Target;
use super::target::with_ample_memory;
use crate::plan::uses::Uses;
use crate::plan::{Plan, SlotKind, Step};

/// Which products take columns that come ready.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum Readies {
    /// Those that would be on the path of lanes without, too.
    #[default]
    ByPath,
    /// All that can be.
    Always,
}

pub(super) fn run(plan: &mut Plan, target: &Target) {
    // Rows that must not depend on their company go one way, whoever makes them.
    let Some(caps) = target.caps.as_ref().filter(|_| !target.alike && target.fuses) else { return };
    let Some(order) = caps.matrix_order else { return };
    let steps: Vec<Option<Step>> = plan.steps.iter().cloned().map(Some).collect();
    // Steps stay where they are; what they no longer touch nobody else does.
    let uses = Uses::of(plan.slots.len(), &steps);
    let mut passing = Passing { target, caps, order, gated: None, normed: None };
    for at in 0..plan.steps.len() {
        let Call::MulMm(product) = &plan.steps[at].call else { continue };
        if !passing.in_lanes(product) {
            continue;
        }
        let product = product.clone();
        let result = |t: &Tensor| plan.slots[t.slot.0 as usize].kind == SlotKind::Scratch;
        let made = |t: &Tensor| uses.writer(t.slot).filter(|writer| *writer < at && result(t));
        let alone = |t: &Tensor| made(t).filter(|_| uses.reader(t.slot) == Some(at));
        match product.before {
            Some(Before::Gate { up, .. }) => {
                if let (Some(first), Some(second)) = (alone(&product.product.b), alone(&up))
                    && first == second
                {
                    passing.gate(plan, first, at);
                }
            }
            None => {
                if let Some(first) = made(&product.product.b) {
                    passing.attention(plan, first, at);
                }
            }
            Some(Before::Norm(norm)) => {
                if let Some(first) = made(&product.product.b) {
                    passing.norm(plan, norm, first, at);
                }
            }
        }
    }
}

struct Passing<'t> {
    target: &'t Target,
    caps: &'t Caps,
    order: MatrixOrder,
    /// Magnitudes of the gated columns of the last layer that left them.
    gated: Option<Samples>,
    /// The same of columns that a norm followed, and the sums of squares of the next such step.
    normed: Option<(Samples, Tensor)>,
}

impl Passing<'_> {
    /// Whether a product is one of few columns that lanes multiply.
    fn in_lanes(&self, call: &mul_mm::Call) -> bool {
        let piece = mul_mm::piece(call.product.a.ty);
        let alike = call.others.iter().all(|other| mul_mm::piece(other.a.ty) == piece);
        let whole = alike && call.ids.is_none() && call.product.b.shape[0].is_multiple_of(ready::CHUNK);
        let path = || with_ample_memory(call).pick(self.caps, None).map(|choice| choice.path);
        whole && call.product.b.shape[1] > 1 && (self.target.readies == Readies::Always || path() == Ok(Path::Lanes))
    }

    /// Memory for the columns of a product.
    fn memory(&self, plan: &mut Plan, name: &str, call: &mul_mm::Call) -> Ready {
        let [k, n, ..] = call.product.b.shape;
        let halves =
            plan.add(format!("{name}.ready").as_str(), SlotKind::Scratch, TensorType::F16, [ready::len(k, n), 1, 1, 1]);
        Ready { halves, order: self.order, piece: mul_mm::piece(call.product.a.ty), factors: None, squares: None }
    }

    /// Puts calls in the place of steps, if the device runs all of them.
    fn replace(&self, plan: &mut Plan, calls: Vec<(usize, Call)>) -> bool {
        let runs = calls.iter().all(|(_, call)| self.target.runs(call));
        if runs {
            for (at, call) in calls {
                plan.steps[at].call = call;
            }
        }
        runs
    }

    /// Attention at `first` whose results the product at `last` reads.
    fn attention(&self, plan: &mut Plan, first: usize, last: usize) {
        let (Call::FlashAttention(attention), Call::MulMm(product)) = (&plan.steps[first].call, &plan.steps[last].call)
        else {
            return;
        };
        let (attention, product) = (*attention, product.clone());
        let b = product.product.b;
        let alone = product.others.is_empty();
        let same = alone
            && b.slot == attention.out.slot
            && b.offset == attention.out.offset
            && b.is_dense()
            && attention.out.is_dense();
        if !same || b.shape[..2] != attention.columns() || attention.arriving.is_some() {
            return;
        }
        // Only where the path of lanes would be taken without, too.
        let path = || attention.pick(self.caps, None).map(|choice| choice.path);
        if self.target.readies != Readies::Always && path() != Ok(Path::Lanes) {
            return;
        }
        let slots = plan.slots.len();
        let name = plan.steps[first].label.clone();
        let ready = Some(self.memory(plan, &name, &product));
        let calls = [
            (first, kiln_kernels::flash_attention::Call { ready, ..attention }.into()),
            (last, mul_mm::Call { ready, ..product }.into()),
        ];
        if !self.replace(plan, calls.into()) {
            plan.slots.truncate(slots);
        }
    }

    /// Gate and up at `first`, between whose results the product at `last` has its gate.
    fn gate(&mut self, plan: &mut Plan, first: usize, last: usize) {
        let (Call::MulMm(both), Call::MulMm(product)) = (&plan.steps[first].call, &plan.steps[last].call) else {
            return;
        };
        let Some(Before::Gate { kind, up }) = product.before else { return };
        let [other] = both.others.as_slice() else { return };
        if both.product.d != product.product.b
            || other.d != up
            || other.bias.is_some()
            || both.product.a.shape != other.a.shape
        {
            return;
        }
        let (slots, label) = (plan.slots.len(), plan.steps[first].label.clone());
        let (both, product, gate) = (both.clone(), product.clone(), Gated { kind, up: other.a });
        let [m, n, ..] = both.product.d.shape;
        let d = plan.add(&format!("{label}.gated"), SlotKind::Scratch, TensorType::F32, both.product.d.shape);
        let samples = self.samples(plan, &label, [m, n]);
        let reference = self.gated.filter(|samples| samples.sums.shape[0] == n);
        let mut gated = mul_mm::Call {
            product: Product { d, ..both.product },
            others: Vec::new(),
            gate: Some(gate),
            samples: Some(samples),
            ..both
        };
        let mut taken = mul_mm::Call { product: Product { b: d, ..product.product }, before: None, ..product };
        if reference.is_some() {
            let factors = Some(plan.add(&format!("{label}.factors"), SlotKind::Scratch, TensorType::F32, [n, 1, 1, 1]));
            let ready = Some(Ready { factors, ..self.memory(plan, &label, &taken) });
            gated = mul_mm::Call { leaving: ready, reference, ..gated };
            taken = mul_mm::Call { ready, ..taken };
        }
        if self.replace(plan, vec![(first, gated.into()), (last, taken.into())]) {
            self.gated = Some(samples);
        } else {
            plan.slots.truncate(slots);
        }
    }

    /// A product at `first` whose results those at `last` read behind a norm.
    fn norm(&mut self, plan: &mut Plan, norm: Norm, first: usize, last: usize) {
        let (Call::MulMm(product), Call::MulMm(taken)) = (&plan.steps[first].call, &plan.steps[last].call) else {
            return;
        };
        let (Some(weight), d) = (norm.weight, product.product.d) else { return };
        let bare = product.others.is_empty() && product.gate.is_none() && product.samples.is_none();
        let whole = bare && d.ty == TensorType::F32 && d.is_dense();
        let aligned = weight.ty == TensorType::F32 && weight.is_dense() && weight.offset.is_multiple_of(16);
        if !(whole && aligned && weight.len() == d.shape[0] && d == taken.product.b && self.in_lanes(product)) {
            return;
        }
        let (product, taken) = (product.clone(), taken.clone());
        let (slots, label, [m, n, ..]) = (plan.slots.len(), plan.steps[first].label.clone(), d.shape);
        let samples = self.samples(plan, &label, [m, n]);
        let mut calls = Vec::new();
        let sums = if let Some((reference, sums)) = self.normed.filter(|(samples, _)| samples.sums.shape[0] == n) {
            // They were set to zero by the step before, and those of the next lie behind them.
            let factors = Some(plan.add(&format!("{label}.factors"), SlotKind::Scratch, TensorType::F32, [n, 1, 1, 1]));
            let ready = Ready { factors, ..self.memory(plan, &label, &taken) };
            let squares = Some(sums.narrow(2, 0, 1).reshape([n, 2, 1, 1]));
            calls.push((
                first,
                mul_mm::Call {
                    leaving: Some(ready),
                    left_weight: Some(weight),
                    reference: Some(reference),
                    samples: Some(samples),
                    sums: Some(sums),
                    ..product
                },
            ));
            calls.push((last, mul_mm::Call { ready: Some(Ready { squares, ..ready }), ..taken }));
            sums
        } else {
            // As many as there could be.
            let all = [n, 2, plan.steps.len() + 2, 1];
            let sums = plan.add("squares", SlotKind::Scratch, TensorType::I32, all).narrow(2, 0, 2);
            calls.push((first, mul_mm::Call { samples: Some(samples), sums: Some(sums), ..product }));
            sums
        };
        if self.replace(plan, calls.into_iter().map(|(at, call)| (at, call.into())).collect()) {
            self.normed = Some((samples, Tensor { offset: sums.offset + sums.stride[2], ..sums }));
        } else {
            plan.slots.truncate(slots);
        }
    }

    /// Memory for the magnitudes of columns of these extents.
    fn samples(&self, plan: &mut Plan, label: &str, [m, n]: [usize; 2]) -> Samples {
        let rows = ready::rows(self.order);
        let shape = [n, Samples::tiles(m, rows).1, 1, 1];
        Samples { sums: plan.add(&format!("{label}.magnitudes"), SlotKind::Scratch, TensorType::F32, shape), rows }
    }
}
