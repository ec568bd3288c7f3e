//! `mul_mat_vec`: a matrix of any format times one to sixteen activations. The decode kernel: a generated token is mostly
//! this, so it is bound by reading the weights once. What comes before and after a product can be part of it.

mod block;
pub mod cases;
mod check;
pub(crate) mod cpu;
#[cfg(arm_dotprod)]
mod cpu_bytes;
#[cfg_attr(not(target_arch = "x86_64"), path = "cpu_not_interleaved.rs")]
pub(crate) mod cpu_interleaved;
#[cfg(target_arch = "x86_64")]
mod cpu_interleaved_dots;
mod cpu_ints;
#[cfg(all(arm_dotprod, arm_i8mm))]
mod cpu_matrices;
#[cfg(target_arch = "aarch64")]
mod cpu_neon;
mod cpu_quants;
mod cpu_rows;
#[cfg(target_arch = "x86_64")]
mod cpu_spans;
#[cfg(target_arch = "x86_64")]
mod cpu_spans_blocks;
#[cfg(target_arch = "x86_64")]
mod cpu_spans_grids;
#[cfg(target_arch = "x86_64")]
mod cpu_spans_k;
#[cfg(target_arch = "x86_64")]
mod cpu_tiles;
#[cfg(target_arch = "x86_64")]
mod cpu_wide;
mod fuse;
mod pick;
mod reference;
mod ring_cases;
mod rounding;
mod rounding_cases;
pub mod search;
pub mod tuning;

use kiln_gpu::{Address, Caps};

use crate::compiled::Excuse;
use crate::glu::Gate;
use crate::host::HostMemory;
use crate::mul_mat::{Epilogue, Product};
use crate::operation::{Choice, Invalid, Operation, Path, Touches, Unsupported, Work};
use crate::rounded::{Rounded, Rounding};
use crate::tensor::Tensor;
use crate::unary::Function;

pub use crate::mul_mat::{FusedProduct, Norm};
pub(crate) use fuse::gated;
use tuning::Tuning;

pub(crate) const NAME: &str = "mul_mat_vec";

/// Spills that are known and left.
pub(crate) const EXCUSED: &[Excuse] = &[Excuse {
    shader: "mul_mat_vec.q4_1.int_dot",
    most: 32.0,
    reason: "scalar registers go to lanes of vector registers; a split of the tests, a thread for each row, that no line has",
}];

/// One line for the registry.
pub const SUMMARY: &str = "d = scale * a^T b + bias + residual, for 1 to 16 columns and every weight format, with rms_norm \
                           before, a function, a gate, factors, fused products or experts";

/// A second matrix: d = activation(product with `a`) * (product with `up`).
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Gated {
    /// The activation.
    pub kind: Gate,
    /// Format, extents and strides of `a`.
    pub up: Tensor,
    /// As the epilogue's bias, for `up`.
    pub bias: Option<Tensor>,
}

/// A gate that is known already: d = function(gate) * (the product and what belongs to it) + residual.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Factor {
    /// The function of the gate.
    pub function: Function,
    /// F32 with the extents of `d`.
    pub gate: Tensor,
}

/// Which expert's matrix multiplies which activation vector. `a` is `[K, M, experts]`, `b` `[K, used or 1, tokens]` (1: all slots of a
/// token share its activation vector), `d` `[M, used, tokens]`, biases `[M, experts]`.
///
/// Summed over the experts of a token, `b` is `[K, used, tokens]` with the activations of a token side by side, and `d` `[M, tokens]`:
/// the rows of a token's experts are one long row. There is neither a norm, a function nor a gate then.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Experts {
    /// I32 `[used, tokens]`: experts, in any order, repeats allowed.
    pub ids: Tensor,
    /// F32 `[used, tokens]`: factors of the results, before they are summed and a residual is added.
    pub weights: Option<Tensor>,
    /// Whether the results of a token are summed.
    pub summed: bool,
}

/// Operands of `mul_mat_vec`. In this order: the activations are normed, multiplied and scaled, the bias is added, the function
/// or the gate applied, the expert's weight or the factor multiplied, the residual added.
#[derive(Clone, Debug, PartialEq)]
pub struct Call {
    /// The product; `b` is F32 or F16, `d` is F32. Devices take up to 16 activations (any number with experts), the CPU any
    /// number: plans hold their products in this form until they are lowered for a device.
    pub product: Product,
    /// What follows it.
    pub epilogue: Epilogue,
    /// What comes before it.
    pub norm: Option<Norm>,
    /// What every result becomes; not with a gate or more matrices.
    pub function: Option<Function>,
    /// A second matrix whose product is gated.
    pub gate: Option<Gated>,
    /// What every result is multiplied by; not with batches, more matrices or experts.
    pub factor: Option<Factor>,
    /// More matrices for the same activations; not with batches, a gate, a factor, a residual or experts.
    pub others: Vec<FusedProduct>,
    /// The activations choose their matrices; not with batches in dimension 3.
    pub experts: Option<Experts>,
    /// The activations must not be rounded to 8 bits: integer products take 16 bits of them.
    pub exact: bool,
    /// Batch-invariant: every activation vector uses the path and work split of N = 1, so its bits do not depend on N. Needs `scratch` where
    /// activations are quantised.
    pub batch_invariant: bool,
    /// The only activation vector of `b`, times the norm's weight, as who made it left it rounded (I8, [`crate::rounded`]): what integer products
    /// take in its place. Exact ones alone; neither with experts nor batch-invariant.
    pub rounded: Option<Tensor>,
    /// How the only activation vector of `d` is left rounded for the product that reads it; neither with more matrices nor with experts.
    pub rounding: Option<Rounding>,
    /// Memory for rounded activations ([`Call::scratch_bytes`] of I8), for integer products of a larger N than fit shared
    /// memory.
    pub scratch: Option<Tensor>,
    /// A split of the work other than the table's: for cases, benches and tuning.
    pub split: Option<Tuning>,
}

impl Call {
    /// The product alone, with exact activations.
    pub fn plain(product: Product) -> Call {
        Call {
            product,
            epilogue: Epilogue::default(),
            norm: None,
            function: None,
            gate: None,
            factor: None,
            others: Vec::new(),
            experts: None,
            exact: true,
            batch_invariant: false,
            rounded: None,
            rounding: None,
            scratch: None,
            split: None,
        }
    }

    /// Bytes of `scratch` for these activations, rounded or exact, and a factor for each activation vector.
    pub fn scratch_bytes(b: &Tensor) -> usize {
        b.rows() * (activation_bytes(b, true) + 4)
    }

    /// The same for some of the activations. Scratch memory stays as it is.
    pub fn columns(&self, first: usize, count: usize) -> Call {
        let cut = |t: Tensor| t.narrow(1, first, count);
        let Product { a, b, d } = self.product;
        Call {
            product: Product { a, b: cut(b), d: cut(d) },
            epilogue: Epilogue { residual: self.epilogue.residual.map(cut), ..self.epilogue },
            factor: self.factor.map(|factor| Factor { gate: cut(factor.gate), ..factor }),
            others: self.others.iter().map(|other| FusedProduct { d: cut(other.d), ..*other }).collect(),
            ..self.clone()
        }
    }

    /// Where results of experts are summed: the same with a result for each of them, and without what follows the sum. Its `d` says
    /// how they lie and has no memory.
    fn apart(&self) -> Option<Call> {
        let experts = self.experts.filter(|experts| experts.summed)?;
        let [used, tokens, ..] = experts.ids.shape;
        let d = self.product.d;
        let d = Tensor::dense(d.slot, d.ty, [d.shape[0], used, tokens, 1]);
        let epilogue = Epilogue { residual: None, ..self.epilogue };
        let experts = Some(Experts { summed: false, ..experts });
        Some(Call { product: Product { d, ..self.product }, epilogue, experts, ..self.clone() })
    }

    /// Experts whose results are summed; 1 where nothing is.
    fn summands(&self) -> usize {
        self.experts.filter(|experts| experts.summed).map_or(1, |experts| experts.ids.shape[0])
    }

    /// Leaves the result rounded as well, if it is to be.
    fn round(&self, memory: &mut HostMemory) {
        if let Some(rounding) = self.rounding {
            rounding.reference(&self.product.d, memory);
        }
    }

    /// Every matrix with its result and bias: the product's first.
    fn matrices(&self) -> Vec<FusedProduct> {
        let first = FusedProduct { a: self.product.a, d: self.product.d, bias: self.epilogue.bias };
        std::iter::once(first).chain(self.others.iter().copied()).collect()
    }
}

/// Bytes of an activation vector rounded to 8 or, where it is to be exact, 16 bits: factors and codes of 128 elements together.
fn activation_bytes(b: &Tensor, exact: bool) -> usize {
    b.shape[0].div_ceil(128) * if exact { 16 + 256 } else { 16 + 128 }
}

impl Operation for Call {
    fn name(&self) -> &'static str {
        NAME
    }

    fn reads(&self) -> Vec<Tensor> {
        let mut reads = vec![self.product.b];
        for FusedProduct { a, bias, .. } in self.matrices() {
            reads.push(a);
            reads.extend(bias);
        }
        reads.extend(self.epilogue.residual);
        reads.extend(self.norm.and_then(|norm| norm.weight));
        if let Some(gate) = self.gate {
            reads.push(gate.up);
            reads.extend(gate.bias);
        }
        reads.extend(self.factor.map(|factor| factor.gate));
        if let Some(experts) = self.experts {
            reads.push(experts.ids);
            reads.extend(experts.weights);
        }
        reads.extend(self.rounded.iter().flat_map(|memory| Rounded::new(memory, self.product.b.shape[0]).all()));
        reads.extend(self.rounding.and_then(|rounding| rounding.weight));
        reads
    }

    fn writes(&self) -> Vec<Tensor> {
        let results = self.matrices().into_iter().map(|matrix| matrix.d);
        let rounded = self.rounding.map(|rounding| rounding.writes(&self.product.d));
        results.chain(rounded.into_iter().flatten()).collect()
    }

    fn scratch(&self) -> Vec<Tensor> {
        self.scratch.into_iter().collect()
    }

    fn check(&self) -> Result<(), Invalid> {
        check::check(self)
    }

    /// The first weights, unless ids choose them.
    fn early(&self) -> Vec<Tensor> {
        let known = self.experts.is_none();
        let all = self.matrices().into_iter().map(|matrix| matrix.a).chain(self.gate.map(|gate| gate.up));
        all.filter(|_| known).collect()
    }

    fn pick(&self, caps: &Caps, want: Option<Path>) -> Result<Choice, Unsupported> {
        pick::pick(self, caps, want)
    }

    fn params(&self, choice: &Choice, launch: usize, at: &dyn Fn(&Tensor) -> Address) -> Vec<u8> {
        pick::params(self, choice, launch, at)
    }

    fn touches(&self, choice: &Choice, launch: usize) -> Touches {
        pick::touches(self, choice, launch)
    }

    fn reference(&self, memory: &mut HostMemory) {
        reference::reference(self, memory);
        self.round(memory);
    }

    fn cpu(&self, memory: &mut HostMemory) {
        cpu::compute(self, memory);
        self.round(memory);
    }

    fn work(&self) -> Work {
        let Product { a, b, .. } = self.product;
        let bytes = |t: &Tensor| (t.rows() * t.row_bytes()) as f64;
        let matrix = |m: &FusedProduct| {
            // Experts that are not used are not read; a repeated one is read again at worst.
            let read = match &self.experts {
                Some(experts) => bytes(&a) / a.shape[2] as f64 * experts.ids.len().min(a.shape[2]) as f64,
                None => bytes(&m.a),
            };
            Work { bytes: read + bytes(&m.d), flops: 2.0 * a.shape[0] as f64 * m.d.len() as f64 }
        };
        let times = if self.gate.is_some() { 2.0 } else { 1.0 };
        self.matrices().iter().map(matrix).fold(Work { bytes: bytes(&b), flops: 0.0 }, |sum, w| Work {
            bytes: sum.bytes + times * w.bytes,
            flops: sum.flops + times * w.flops,
        })
    }

    fn parts(&self) -> Vec<crate::Call> {
        check::parts(self).into_iter().map(Into::into).collect()
    }
}
