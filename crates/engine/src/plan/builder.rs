//! Builds plain plans: every result gets a slot of its own, and one step writes it. Only states, caches and control slots are
//! written in place. What is fused, split or shared is decided later (`crate::lower`).

use std::collections::HashMap;

use kiln_gguf::TensorType;
use kiln_kernels::binary::{self, Operator};
use kiln_kernels::glu::{self, Gate};
use kiln_kernels::mul_mat::{Epilogue, Product};
use kiln_kernels::mul_mat_vec::{self, Experts};
use kiln_kernels::tensor::Tensor;
use kiln_kernels::unary::{self, Function};
use kiln_kernels::{Call, concat, copy, gated_add, get_rows, norm, rms_norm, scale, set_rows, sum_rows};

use super::{Fixed, Plan, Ports, SlotInfo, SlotKind, Step, add};
use crate::Error;

/// A matrix with what belongs to it: scale * (weight x) + bias.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Linear {
    /// `[in, out]`, any format.
    pub weight: Tensor,
    /// F32 `[out]`.
    pub bias: Option<Tensor>,
    /// Factor of the product.
    pub scale: f32,
}

impl Linear {
    /// A matrix alone.
    pub fn plain(weight: Tensor) -> Linear {
        Linear { weight, bias: None, scale: 1.0 }
    }

    /// Some of the rows: a part of the results.
    pub fn rows(&self, start: usize, len: usize) -> Linear {
        let bias = self.bias.map(|bias| bias.narrow(0, start, len));
        Linear { weight: self.weight.narrow(1, start, len), bias, scale: self.scale }
    }
}

/// How the columns of a token are normed.
#[derive(Clone, Copy, Debug, PartialEq)]
pub enum Norm {
    /// Divided by the root of their mean square, times the weight.
    Rms {
        /// `[width]`.
        weight: Option<Tensor>,
        /// Added to the mean square.
        eps: f32,
    },
    /// The same, plus the bias.
    RmsBias {
        /// `[width]`.
        weight: Tensor,
        /// `[width]`.
        bias: Tensor,
        /// Added to the mean square.
        eps: f32,
    },
    /// Each of so many slices of the width divided by the root of its mean square, all times the weight.
    RmsSlices {
        /// Number of slices.
        slices: usize,
        /// `[width]`.
        weight: Tensor,
        /// Added to the mean square.
        eps: f32,
    },
    /// Brought to mean 0 and variance 1, times the weight, plus the bias.
    Layer {
        /// `[width]`.
        weight: Option<Tensor>,
        /// `[width]`.
        bias: Option<Tensor>,
        /// Added to the variance.
        eps: f32,
    },
}

/// Builds a plan step by step.
pub struct Builder {
    slots: Vec<SlotInfo>,
    n_fixed: usize,
    steps: Vec<Step>,
    place: String,
    /// What layers left for those behind them: a number and tensors, by name.
    notes: HashMap<&'static str, (usize, Vec<Tensor>)>,
}

impl Builder {
    /// A plan on top of the shared slots.
    pub fn new(fixed: &Fixed) -> Builder {
        Builder {
            slots: fixed.slots.clone(),
            n_fixed: fixed.slots.len(),
            steps: Vec::new(),
            place: String::new(),
            notes: HashMap::new(),
        }
    }

    /// Leaves a number and tensors for layers behind this one, in the place of what was left under the name before.
    pub fn remember(&mut self, name: &'static str, number: usize, tensors: Vec<Tensor>) {
        self.notes.insert(name, (number, tensors));
    }

    /// What was left last.
    pub fn remembered(&self, name: &str) -> Option<(usize, &[Tensor])> {
        self.notes.get(name).map(|(number, tensors)| (*number, &tensors[..]))
    }

    /// Says where in the model the next steps stand: `3.attention`. Labels begin with it.
    pub fn at(&mut self, place: impl Into<String>) {
        self.place = place.into();
    }

    fn label(&self, name: &str) -> String {
        match (self.place.is_empty(), name.is_empty()) {
            (true, _) => name.to_owned(),
            (_, true) => self.place.clone(),
            _ => format!("{}.{name}", self.place),
        }
    }

    /// A slot of this plan that the host touches.
    pub fn slot(&mut self, name: &str, kind: SlotKind, ty: TensorType, shape: [usize; 4]) -> Tensor {
        add(&mut self.slots, name.to_owned(), kind, ty, shape)
    }

    /// A slot for a result of the next step.
    pub fn fresh(&mut self, name: &str, ty: TensorType, shape: [usize; 4]) -> Tensor {
        let name = self.label(name);
        add(&mut self.slots, name, SlotKind::Scratch, ty, shape)
    }

    /// F32 with the extents of another tensor.
    pub fn like(&mut self, name: &str, x: Tensor) -> Tensor {
        self.fresh(name, TensorType::F32, x.shape)
    }

    /// Adds a step.
    pub fn step(&mut self, name: &str, call: impl Into<Call>) {
        let label = self.label(name);
        self.steps.push(Step { label, call: call.into() });
    }

    /// scale * (weight x) + bias.
    pub fn linear(&mut self, name: &str, x: Tensor, linear: &Linear) -> Tensor {
        let [_, m, ..] = linear.weight.shape;
        let y = self.fresh(name, TensorType::F32, [m, x.shape[1], x.shape[2], x.shape[3]]);
        let product = Product { a: linear.weight, b: x, d: y };
        let epilogue = Epilogue { scale: linear.scale, bias: linear.bias, residual: None };
        self.step(name, mul_mat_vec::Call { epilogue, ..mul_mat_vec::Call::plain(product) });
        y
    }

    /// The product of each column with the matrix of its expert: `x [in, used or 1, tokens]`, `ids [used, tokens]`, the
    /// weight `[in, out, experts]`, its bias `[out, experts]`.
    pub fn experts(&mut self, name: &str, x: Tensor, linear: &Linear, ids: Tensor) -> Tensor {
        let [_, m, ..] = linear.weight.shape;
        let [used, tokens, ..] = ids.shape;
        let y = self.fresh(name, TensorType::F32, [m, used, tokens, 1]);
        let product = Product { a: linear.weight, b: x, d: y };
        let epilogue = Epilogue { scale: linear.scale, bias: linear.bias, residual: None };
        let experts = Some(Experts { ids, weights: None, summed: false });
        self.step(name, mul_mat_vec::Call { epilogue, experts, ..mul_mat_vec::Call::plain(product) });
        y
    }

    /// Every row normed.
    pub fn norm(&mut self, name: &str, x: Tensor, how: &Norm) -> Tensor {
        match *how {
            Norm::Rms { weight, eps } => self.rms_norm(name, x, weight, eps),
            Norm::RmsBias { weight, bias, eps } => {
                let y = self.rms_norm(name, x, Some(weight), eps);
                self.add(&format!("{name}.bias"), y, bias)
            }
            Norm::RmsSlices { slices, weight, eps } => {
                let [width, rows, ..] = x.shape;
                let y = self.rms_norm(name, x.reshape([width / slices, slices, rows, 1]), None, eps);
                self.multiply(&format!("{name}.weight"), y.reshape(x.shape), weight)
            }
            Norm::Layer { weight, bias, eps } => {
                let y = self.like(name, x);
                self.step(name, norm::Call { x, weight, bias, y, eps });
                y
            }
        }
    }

    fn rms_norm(&mut self, name: &str, x: Tensor, weight: Option<Tensor>, eps: f32) -> Tensor {
        let y = self.like(name, x);
        self.step(name, rms_norm::Call { x, weight, y, eps });
        y
    }

    fn binary(&mut self, name: &str, operator: Operator, a: Tensor, b: Tensor) -> Tensor {
        let dst = self.like(name, a);
        self.step(name, binary::Call { operator, a, b, dst });
        dst
    }

    /// x + y, with y repeated.
    pub fn add(&mut self, name: &str, x: Tensor, y: Tensor) -> Tensor {
        self.binary(name, Operator::Add, x, y)
    }

    /// x - y, with y repeated.
    pub fn subtract(&mut self, name: &str, x: Tensor, y: Tensor) -> Tensor {
        self.binary(name, Operator::Sub, x, y)
    }

    /// x * y element by element, with y repeated.
    pub fn multiply(&mut self, name: &str, x: Tensor, y: Tensor) -> Tensor {
        self.binary(name, Operator::Mul, x, y)
    }

    /// x / y element by element, with y repeated.
    pub fn divide(&mut self, name: &str, x: Tensor, y: Tensor) -> Tensor {
        self.binary(name, Operator::Div, x, y)
    }

    /// factor * x.
    pub fn scale(&mut self, name: &str, x: Tensor, factor: f32) -> Tensor {
        let dst = self.like(name, x);
        self.step(name, scale::Call { x, dst, factor, bias: 0.0 });
        dst
    }

    /// factor * x + summand.
    pub fn affine(&mut self, name: &str, x: Tensor, factor: f32, summand: f32) -> Tensor {
        let dst = self.like(name, x);
        self.step(name, scale::Call { x, dst, factor, bias: summand });
        dst
    }

    /// x brought within `most` of 0: relu(x + most) - relu(x - most) - most.
    pub fn clamp(&mut self, name: &str, x: Tensor, most: f32) -> Tensor {
        let [above, below, sum] = [".above", ".below", ".sum"].map(|part| format!("{name}{part}"));
        let mut shifted = |name: &str, x: Tensor, bias: f32| {
            let dst = self.like(name, x);
            self.step(name, scale::Call { x, dst, factor: 1.0, bias });
            dst
        };
        let (high, low) = (shifted(&above, x, most), shifted(&below, x, -most));
        let (high, low) = (self.function(&above, high, Function::Relu), self.function(&below, low, Function::Relu));
        let sum = self.subtract(&sum, high, low);
        let dst = self.like(name, sum);
        self.step(name, scale::Call { x: sum, dst, factor: 1.0, bias: -most });
        dst
    }

    /// f(x).
    pub fn function(&mut self, name: &str, x: Tensor, function: Function) -> Tensor {
        let dst = self.like(name, x);
        self.step(name, unary::Call { function, x, dst });
        dst
    }

    /// activation(gate) * up.
    pub fn gated(&mut self, name: &str, kind: Gate, gate: Tensor, up: Tensor) -> Tensor {
        let dst = self.like(name, gate);
        self.step(name, glu::Call { kind, gate, up, dst });
        dst
    }

    /// x + f(gate) * y.
    pub fn gated_add(&mut self, name: &str, x: Tensor, (gate, function): (Tensor, Function), y: Tensor) -> Tensor {
        let dst = self.like(name, x);
        self.step(name, gated_add::Call { function, gate, y, x, dst });
        dst
    }

    /// Rows of one tensor, each followed by the row of another.
    pub fn concat(&mut self, name: &str, a: Tensor, b: Tensor) -> Tensor {
        let [_, n1, n2, n3] = a.shape;
        let dst = self.fresh(name, TensorType::F32, [a.shape[0] + b.shape[0], n1, n2, n3]);
        self.step(name, concat::Call { a, b, dst, dim: 0 });
        dst
    }

    /// Copies elements to another tensor of the same extents.
    pub fn copy(&mut self, name: &str, src: Tensor, dst: Tensor) {
        self.step(name, copy::Call { src, dst });
    }

    /// Rows of a matrix by their numbers.
    pub fn rows(&mut self, name: &str, src: Tensor, ids: Tensor) -> Tensor {
        let dst = self.fresh(name, TensorType::F32, [src.shape[0], ids.shape[0], 1, 1]);
        self.step(name, get_rows::Call { src, ids, dst });
        dst
    }

    /// Writes rows of a cache; rows numbered below 0 are dropped.
    pub fn store(&mut self, name: &str, src: Tensor, ids: Tensor, cache: Tensor) {
        self.step(name, set_rows::Call { src, ids, dst: cache });
    }

    /// The sum of each row.
    pub fn sum(&mut self, name: &str, x: Tensor) -> Tensor {
        let [_, n1, n2, n3] = x.shape;
        let dst = self.fresh(name, TensorType::F32, [1, n1, n2, n3]);
        self.step(name, sum_rows::Call { x, dst, weights: None });
        dst
    }

    /// The finished plan, checked. `logits` is the result that the host reads.
    pub fn finish(mut self, mut ports: Ports, logits: Tensor) -> Result<Plan, Error> {
        let slot = &mut self.slots[logits.slot.0 as usize];
        (slot.name, slot.kind) = ("logits".to_owned(), SlotKind::Output);
        ports.logits = logits;
        let plan = Plan { slots: self.slots, n_fixed: self.n_fixed, steps: self.steps, ports, arena: 0 };
        plan.check()?;
        Ok(plan)
    }
}
