//! Adds turns to a plain plan: of what is multiplied with weights that were turned before they were rounded, and of rows of such tables.
//! Weights that read the same input share its turn, and passes treat these steps as all others.

use kiln_gguf::TensorType;
use kiln_kernels::hadamard::{self, Direction};
use kiln_kernels::tensor::Tensor;
use kiln_kernels::{Call, copy};

use super::{Plan, SlotKind, Step};
use crate::Error;
use crate::model::turned::{Regroup, Turn, Turned};

/// Adds the steps. A step that reads such a weight in another way is an error.
pub(crate) fn turn(plan: &mut Plan, turned: &Turned) -> Result<(), Error> {
    let mut turning = Turning { block: turned.block, known: Vec::new(), steps: Vec::new(), plan };
    for mut step in std::mem::take(&mut turning.plan.steps) {
        match &mut step.call {
            Call::MulMatVec(call) if turned.inputs.contains_key(&call.product.a.slot) && call.experts.is_none() => {
                let of = turned.inputs[&call.product.a.slot];
                call.product.b = turning.input(&step.label, call.product.b, of);
                turning.steps.push(step);
            }
            Call::GetRows(call) if turned.rows.contains_key(&call.src.slot) => {
                let signs = turned.rows[&call.src.slot];
                let y = call.dst;
                let x = turning.fresh(&format!("{}.turned", step.label), y.shape);
                call.dst = x;
                let label = step.label.clone();
                turning.steps.push(step);
                turning.push(label, hadamard::Call { x, signs, y, block: turned.block, direction: Direction::Back });
            }
            call => {
                let operation = call.operation();
                if let Some(weight) = operation.reads().into_iter().find(|tensor| turned.has(tensor.slot)) {
                    let name = turning.plan.slot_name(&weight).to_owned();
                    let why =
                        format!("`{name}` is turned (prism.hadamard), and {} takes it as it is", operation.name());
                    return Err(Error::Plan { step: step.label, why });
                }
                turning.steps.push(step);
            }
        }
    }
    turning.plan.steps = turning.steps;
    turning.plan.check()
}

struct Turning<'p> {
    plan: &'p mut Plan,
    block: usize,
    /// Inputs that were turned, how, and what came of it. Every result of a plain plan is written once.
    known: Vec<(Tensor, Turn, Tensor)>,
    steps: Vec<Step>,
}

impl Turning<'_> {
    fn push(&mut self, label: String, call: impl Into<Call>) {
        self.steps.push(Step { label, call: call.into() });
    }

    fn fresh(&mut self, label: &str, shape: [usize; 4]) -> Tensor {
        self.plan.add(label, SlotKind::Scratch, TensorType::F32, shape)
    }

    /// The turned form of an input.
    fn input(&mut self, label: &str, x: Tensor, of: Turn) -> Tensor {
        if let Some((.., turned)) = self.known.iter().find(|(known, how, _)| *known == x && *how == of) {
            return *turned;
        }
        let label = format!("{label}.turn");
        let ordered = of.regroup.map_or(x, |regroup| self.regrouped(&label, x, regroup));
        let y = self.fresh(&label, x.shape);
        let (signs, block) = (of.signs, self.block);
        self.push(label, hadamard::Call { x: ordered, signs, y, block, direction: Direction::Turn });
        self.known.push((x, of, y));
        y
    }

    /// Heads that share a head of keys side by side.
    fn regrouped(&mut self, label: &str, x: Tensor, Regroup { groups, ratio }: Regroup) -> Tensor {
        let label = format!("{label}.heads");
        let y = self.fresh(&label, x.shape);
        let [width, tokens, ..] = x.shape;
        let size = width / (groups * ratio);
        let src = x.reshape([size, groups, ratio, tokens]).permute([0, 2, 1, 3]);
        self.push(label, copy::Call { src, dst: y.reshape([size, ratio, groups, tokens]) });
        y
    }
}
