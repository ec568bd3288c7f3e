//! Producers write activations in cooperative-matrix fragment order ([`kiln_kernels::packed_b`]), so that skinny GEMMs skip the pack step.
//! Attention does so, and gate and up become one step that emits gated activations. Scales come from the previous layer's magnitudes,
//! so the first layer only records them. For GEMM -> RMSNorm -> GEMM the first kernel writes x * gamma and accumulates sum(x^2); 1/rms is
//! applied in the second kernel's epilogue.

use kiln_gguf::TensorType;
use kiln_gpu::{Caps, FragmentLayout};
use kiln_kernels::Call;
use kiln_kernels::mul_mat::{Norm, Product};
use kiln_kernels::mul_mm::{self, Gated, Prologue};
use kiln_kernels::operation::{Operation, Path};
use kiln_kernels::packed_b::{self, MagnitudeProbe, PackedB};
use kiln_kernels::tensor::Tensor;

use super::Target;
use super::target::with_ample_memory;
use crate::plan::def_use::DefUse;
use crate::plan::{Plan, SlotKind, Step};

/// Which products take activations that come packed.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum PackB {
    /// Those that would be on the fragment path without, too.
    #[default]
    ByPath,
    /// All that can be.
    Always,
    /// None: a model's activations left the range of an f16.
    Never,
}

pub(super) fn run(plan: &mut Plan, target: &Target) {
    // Batch-invariant plans use the single-token kernels.
    let Some(caps) = target.caps.as_ref().filter(|_| !target.batch_invariant && target.fuses) else { return };
    let Some(order) = caps.fragment_layout.filter(|_| target.pack_b != PackB::Never) else { return };
    let steps: Vec<Option<Step>> = plan.steps.iter().cloned().map(Some).collect();
    // Steps keep their positions, so def-use chains stay valid: a step that reads less leaves no new reader behind.
    let def_use = DefUse::of(plan.slots.len(), &steps);
    let mut passing = Passing { target, caps, order, gated: None, normed: None, overflow: None };
    for at in 0..plan.steps.len() {
        let Call::MulMm(product) = &plan.steps[at].call else { continue };
        if !passing.prefers_fragment(product) {
            continue;
        }
        let product = product.clone();
        let result = |t: &Tensor| plan.slots[t.slot.0 as usize].kind == SlotKind::Scratch;
        let made = |t: &Tensor| def_use.writer(t.slot).filter(|writer| *writer < at && result(t));
        let alone = |t: &Tensor| made(t).filter(|_| def_use.reader(t.slot) == Some(at));
        match product.prologue {
            Some(Prologue::Gate { up, .. }) => {
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
            Some(Prologue::Norm(norm)) => {
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
    order: FragmentLayout,
    /// Magnitudes of the gated activations of the last layer that left them, and their extents.
    gated: Option<(MagnitudeProbe, [usize; 2])>,
    /// The same of activations that a norm followed.
    normed: Option<Normed>,
    /// What steps set where activations or sums of squares are out of range.
    overflow: Option<Tensor>,
}

/// What the last product left that a norm followed.
#[derive(Clone, Copy)]
struct Normed {
    /// Its magnitudes.
    magnitude_probe: MagnitudeProbe,
    /// Extents of its results. Those of others are of another stream, whose magnitudes say nothing of these.
    extents: [usize; 2],
    /// Where the next such step adds up squares.
    sums: Tensor,
}

impl Passing<'_> {
    /// Whether a product is one of small N that lanes multiply.
    fn prefers_fragment(&self, call: &mul_mm::Call) -> bool {
        let piece = mul_mm::piece(call.product.a.ty);
        let same_piece = call.others.iter().all(|other| mul_mm::piece(other.a.ty) == piece);
        let whole = same_piece && call.ids.is_none() && call.product.b.shape[0].is_multiple_of(packed_b::CHUNK);
        let path = || with_ample_memory(call).pick(self.caps, None).map(|choice| choice.path);
        whole && call.product.b.shape[1] > 1 && (self.target.pack_b == PackB::Always || path() == Ok(Path::Fragment))
    }

    /// Memory for the activations of a product.
    fn memory(&self, plan: &mut Plan, name: &str, call: &mul_mm::Call) -> PackedB {
        let [k, n, ..] = call.product.b.shape;
        let halves = plan.add(
            format!("{name}.packed").as_str(),
            SlotKind::Scratch,
            TensorType::F16,
            [packed_b::len(k, n), 1, 1, 1],
        );
        PackedB { halves, layout: self.order, piece: mul_mm::piece(call.product.a.ty), factors: None, squares: None }
    }

    /// Puts calls instead of steps, if the device runs all of them.
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
        if !same || b.shape[..2] != attention.columns() || attention.kv_append.is_some() {
            return;
        }
        // Only where the fragment path would be taken without, too.
        let path = || attention.pick(self.caps, None).map(|choice| choice.path);
        if self.target.pack_b != PackB::Always && path() != Ok(Path::Fragment) {
            return;
        }
        let slots = plan.slots.len();
        let name = plan.steps[first].label.clone();
        let packed_b = Some(self.memory(plan, &name, &product));
        let calls = [
            (first, kiln_kernels::flash_attention::Call { emit_packed_b: packed_b, ..attention }.into()),
            (last, mul_mm::Call { packed_b, ..product }.into()),
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
        let Some(Prologue::Gate { kind, up }) = product.prologue else { return };
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
        let magnitude_probe = self.magnitude_probe(plan, &label, [m, n]);
        let scale_hint =
            self.gated.filter(|(_, extents)| *extents == [m, n]).map(|(magnitude_probe, _)| magnitude_probe);
        // It has one already where it applies a norm from squares.
        let overflow = both.overflow.or_else(|| scale_hint.map(|_| self.flag(plan)));
        let mut gated = mul_mm::Call {
            product: Product { d, ..both.product },
            others: Vec::new(),
            gate: Some(gate),
            magnitude_probe: Some(magnitude_probe),
            ..both
        };
        let mut taken = mul_mm::Call { product: Product { b: d, ..product.product }, prologue: None, ..product };
        if scale_hint.is_some() {
            let factors = Some(plan.add(&format!("{label}.factors"), SlotKind::Scratch, TensorType::F32, [n, 1, 1, 1]));
            let packed_b = Some(PackedB { factors, ..self.memory(plan, &label, &taken) });
            gated = mul_mm::Call { emit_packed_b: packed_b, scale_hint, overflow, ..gated };
            taken = mul_mm::Call { packed_b, ..taken };
        }
        if self.replace(plan, vec![(first, gated.into()), (last, taken.into())]) {
            self.gated = Some((magnitude_probe, [m, n]));
            self.overflow = self.overflow.or(overflow);
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
        let bare = product.others.is_empty() && product.gate.is_none() && product.magnitude_probe.is_none();
        // Magnitudes of a layer tell those of the next one where both add to the same stream.
        let is_of_stream = product.epilogue.residual.is_some();
        let whole = bare && is_of_stream && d.ty == TensorType::F32 && d.is_dense();
        let aligned = weight.ty == TensorType::F32 && weight.is_dense() && weight.offset.is_multiple_of(16);
        if !(whole && aligned && weight.len() == d.shape[0] && d == taken.product.b && self.prefers_fragment(product)) {
            return;
        }
        let (product, taken) = (product.clone(), taken.clone());
        let (slots, label, [m, n, ..]) = (plan.slots.len(), plan.steps[first].label.clone(), d.shape);
        let magnitude_probe = self.magnitude_probe(plan, &label, [m, n]);
        let mut calls = Vec::new();
        let before = self.normed.filter(|normed| normed.extents == [m, n]);
        let overflow = before.map(|_| self.flag(plan));
        let sums = if let Some(Normed { magnitude_probe: scale_hint, sums, .. }) = before {
            // They were set to zero by the step before, and those of the next lie behind them.
            let factors = Some(plan.add(&format!("{label}.factors"), SlotKind::Scratch, TensorType::F32, [n, 1, 1, 1]));
            let packed_b = PackedB { factors, ..self.memory(plan, &label, &taken) };
            let squares = Some(sums.narrow(2, 0, 1).reshape([n, 2, 1, 1]));
            calls.push((
                first,
                mul_mm::Call {
                    emit_packed_b: Some(packed_b),
                    emit_weight: Some(weight),
                    scale_hint: Some(scale_hint),
                    magnitude_probe: Some(magnitude_probe),
                    sums: Some(sums),
                    overflow,
                    ..product
                },
            ));
            calls.push((last, mul_mm::Call { packed_b: Some(PackedB { squares, ..packed_b }), overflow, ..taken }));
            sums
        } else {
            // As many as there could be.
            let all = [n, 2, plan.steps.len() + 2, 1];
            let sums = plan.add("squares", SlotKind::Scratch, TensorType::I32, all).narrow(2, 0, 2);
            calls.push((first, mul_mm::Call { magnitude_probe: Some(magnitude_probe), sums: Some(sums), ..product }));
            sums
        };
        if self.replace(plan, calls.into_iter().map(|(at, call)| (at, call.into())).collect()) {
            let sums = Tensor { offset: sums.offset + sums.stride[2], ..sums };
            self.normed = Some(Normed { magnitude_probe, extents: [m, n], sums });
            self.overflow = self.overflow.or(overflow);
        } else {
            plan.slots.truncate(slots);
        }
    }

    /// The flag of the plan.
    fn flag(&self, plan: &mut Plan) -> Tensor {
        self.overflow.unwrap_or_else(|| plan.add("out of range", SlotKind::Flag, TensorType::I32, [1; 4]))
    }

    /// Memory for the magnitudes of activations of these extents.
    fn magnitude_probe(&self, plan: &mut Plan, label: &str, [m, n]: [usize; 2]) -> MagnitudeProbe {
        let rows = packed_b::rows(self.order);
        let shape = [n, MagnitudeProbe::tiles(m, rows).1, 1, 1];
        MagnitudeProbe {
            sums: plan.add(&format!("{label}.magnitudes"), SlotKind::Scratch, TensorType::F32, shape),
            rows,
        }
    }
}
