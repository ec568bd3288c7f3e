//! What a plan is lowered for: the facts about a device that passes decide by. Numbers that were measured on one card stand
//! here and in the kernels' tuning tables, and nowhere else in the engine.

use kiln_gguf::TensorType;
use kiln_gpu::{Caps, Component};
use kiln_kernels::mul_mat::{MAX_GEMV_N, Product};
use kiln_kernels::tensor::{Slot, Tensor};
use kiln_kernels::{Call, mul_mm};

use super::packed_b::PackB;
use super::rounding::Rounds;
use super::weights::{DequantCache, Packing, Weights};

/// Integer products take 53 us for 5 activations of Q4_K and 77 for 8, matrix units 55 for 8 (NVIDIA H200, 14336 x 4096:
/// `docs/ladder/mul_mat_vec.md`, `docs/ladder/mul_mm.md`).
const SKINNY_N: usize = 5;
/// On the fragment path a product takes as long for two activations as for three or four. With two on integer products a step of two sequences
/// took 3.41 ms, one of three on that path 3.19, one of four 3.18 (8B, Q4_K_M, NVIDIA H200: `docs/ladder/mul_mat_vec.md`).
const SKINNY_N_BESIDE_FRAGMENT: usize = 1;
/// About as many cores as a large GPU has, which attention of few tokens keeps busy by splitting the keys: splits of a power
/// of two take rounds of keys more evenly (`docs/ladder/flash_attention.md`).
const CORES: usize = 128;
/// Prompts of fewer tokens read latents: what is saved is little beside the steps that expanding takes. A guess.
const EXPANDS_FROM: usize = 32;
/// Sequences from which on attention is on the path that serves several together (`docs/ladder/flash_attention.md`).
const SHARES_FROM: usize = 8;
/// A single activation vector of more elements may not fit the memory of a workgroup.
const LONG_ACTIVATION: usize = 8192;

/// Facts about the device that a plan is for.
#[derive(Clone, Debug)]
pub struct Target {
    /// What the device can do; `None` for the CPU, which runs every step.
    pub caps: Option<Caps>,
    /// Largest N of a product that are few: those go to `mul_mat_vec`, more to `mul_mm`.
    pub skinny_n: usize,
    /// The same for products that `mul_mm` takes on its path for small N.
    pub skinny_n_fragment: usize,
    /// Cores that attention of few tokens should keep busy; 0 where splitting the keys gains nothing.
    pub cores: usize,
    /// Single activations of more elements need memory of their own.
    pub long_activation: usize,
    /// Fewest tokens of a prompt for which latents become keys and values of all heads.
    pub expands_from: usize,
    /// Fewest sequences for which pages that they have in common are read once for several of them.
    pub shares_from: usize,
    /// Batch-invariant: every row uses the kernels and reduction order of a single row, so its bits do not depend on the batch.
    pub batch_invariant: bool,
    /// Prefer recomputing small work (an RMS norm per consumer, expert top-k in the router) over an extra dispatch.
    pub saves_steps: bool,
    /// How weights lie there.
    pub weights: Weights,
    /// Who leaves activations rounded for the products that take them.
    pub rounds: Rounds,
    /// Which producers emit activations in fragment order.
    pub pack_b: PackB,
    /// Whether steps are put together. Where they are not, what every product multiplies can be looked at.
    pub fuses: bool,
    /// Whether plans are cut into parts that are lowered each for a target of its own: only passes that look at a plan as a
    /// whole are run before.
    pub in_parts: bool,
}

impl Target {
    /// The CPU executor.
    pub fn cpu() -> Target {
        Target {
            caps: None,
            skinny_n: MAX_GEMV_N,
            skinny_n_fragment: MAX_GEMV_N,
            cores: 0,
            long_activation: usize::MAX,
            expands_from: EXPANDS_FROM,
            shares_from: usize::MAX,
            batch_invariant: false,
            saves_steps: false,
            weights: Weights::as_they_are(),
            rounds: Rounds::ByTable,
            pack_b: PackB::ByPath,
            fuses: true,
            in_parts: false,
        }
    }

    /// A GPU with these capabilities.
    pub fn gpu(caps: &Caps) -> Target {
        let matrices = caps.coopmat_shape(Component::F16, Component::F32).is_some() && caps.subgroups.full;
        let skinny_n = if matrices && !caps.is_cpu { SKINNY_N } else { MAX_GEMV_N };
        let skinny_n_fragment = if caps.is_cpu { skinny_n } else { SKINNY_N_BESIDE_FRAGMENT };
        Target {
            caps: Some(caps.clone()),
            skinny_n,
            skinny_n_fragment,
            cores: CORES,
            long_activation: LONG_ACTIVATION,
            expands_from: EXPANDS_FROM,
            shares_from: if caps.fragment_layout.is_some() { SHARES_FROM } else { usize::MAX },
            batch_invariant: false,
            saves_steps: !caps.is_cpu,
            // How much memory there is for weights that are kept decoded is known to whoever holds it.
            weights: Weights { packing: Packing::Faster, f16_cache: DequantCache::WhenRoom, ..Weights::as_they_are() },
            rounds: Rounds::ByTable,
            pack_b: PackB::ByPath,
            fuses: true,
            in_parts: false,
        }
    }

    /// Whether a product of N activations has few for its weights; with experts, this many of them are `used` for each activation vector. Matrix
    /// units do not take F32. Where each token has its own experts, they gain nothing: the weights of an expert are read for one activation vector, and
    /// lists, activations and sums come on top. So activations are few while an expert gets no more than one on the average: 12 and 16 sequences of a
    /// mixture with 8 of 128 experts were written 24 % and 12 % faster without matrix units, 32 sequences 34 % faster with them (NVIDIA H200).
    pub fn is_skinny(&self, product: &Product, columns: usize, used: Option<usize>) -> bool {
        let apart = |used: usize| columns * used <= product.a.shape[2];
        let skinny_n = match &self.caps {
            _ if product.a.ty == TensorType::F32 => MAX_GEMV_N,
            Some(caps) if used.is_none() && mul_mm::prefers_fragment(product, caps) => self.skinny_n_fragment,
            _ => self.skinny_n,
        };
        columns <= skinny_n || used.is_some_and(apart)
    }

    /// Whether steps may become this one.
    pub fn joins(&self, call: &Call) -> bool {
        self.fuses && self.runs(call)
    }

    /// Whether the operands of a call fit together and the device can run it, given all the memory it may ask for.
    pub fn runs(&self, call: &Call) -> bool {
        let mut call = call.clone();
        if let Call::MulMm(product) = &mut call {
            *product = with_ample_memory(product);
        }
        // Activations that are treated alike are cut later, into as many as a device takes.
        if let Call::MulMatVec(product) = &mut call
            && product.batch_invariant
            && product.experts.is_none()
        {
            *product = product.columns(0, product.product.b.shape[1].min(MAX_GEMV_N));
        }
        let operation = call.operation();
        operation.check().is_ok() && self.caps.as_ref().is_none_or(|caps| operation.pick(caps, None).is_ok())
    }
}

/// A product of large N with all the memory that it may ask for, which no plan has.
pub(super) fn with_ample_memory(call: &mul_mm::Call) -> mul_mm::Call {
    let words = call.ample_scratch_bytes().div_ceil(4).max(1);
    let memory = Tensor::dense(Slot(u32::MAX), TensorType::I32, [words, 1, 1, 1]);
    mul_mm::Call { scratch: Some(memory), ..call.clone() }
}
