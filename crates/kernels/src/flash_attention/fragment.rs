//! The path on matrix units whose lanes write the components of matrices themselves: single tokens of heads that share keys, where the
//! order of components is known. See `fragment.comp`.

use kiln_gguf::TensorType;
use kiln_gpu::{Caps, Component, FragmentLayout, Shader, SubgroupRequest};

use super::plan::{SPLIT_KEYS, grid, number, shader, unsupported, wide_halves, with_combine, within};
use super::{Call, Mask, emit_packed_b};
use crate::fragment_layout;
use crate::operation::{Choice, Path, Unsupported};
use crate::tensor::Tensor;

/// Splits begin at multiples of this many keys: those of the largest matrices.
const TILE: usize = 16;

/// Bits of a code of the formats that lanes decode; 0 for half floats.
fn codes(ty: TensorType) -> Option<u32> {
    match ty {
        TensorType::F16 => Some(0),
        TensorType::Q8_0 => Some(8),
        TensorType::Q4_0 => Some(4),
        _ => None,
    }
}

/// Whether rows and blocks of keys or values can be loaded in the words that the kernel loads.
fn is_loaded(t: &Tensor) -> bool {
    let aligned = |bytes: usize| bytes.is_multiple_of(8);
    let blocks = || t.shape[0].is_multiple_of(128) && (1..4).all(|d| t.shape[d] == 1 || aligned(t.stride[d]));
    match t.ty {
        TensorType::F16 => t.shape[0].is_multiple_of(64) && wide_halves(t),
        _ => blocks() && aligned(t.offset),
    }
}

/// Why a call is not for the path, on whatever device.
fn refusal(call: &Call) -> Option<String> {
    let types = (call.k.ty, call.v.ty);
    if types.0 != types.1 || codes(types.0).is_none() {
        return Some(format!("no lanes for keys of {} and values of {}", types.0, types.1));
    }
    if !is_loaded(&call.k) || !is_loaded(&call.v) {
        return Some(format!("rows of k {} and v {} are not loaded as words", call.k, call.v));
    }
    let widest = call.k.shape[0].max(call.v.shape[0]);
    if widest > 256 {
        return Some(format!("heads of {widest} do not fit the registers of lanes"));
    }
    if call.q.shape[1] > 1 {
        return Some(format!("{} tokens of a sequence are the rows of other paths' matrices", call.q.shape[1]));
    }
    if matches!(call.mask, Mask::Explicit(_)) || call.max_bias > 0.0 || call.distances.is_some() {
        return Some("masks and biases of keys are other paths'".into());
    }
    match call.pages {
        Some(pages) if !pages.size.is_multiple_of(TILE) => {
            Some(format!("pages of {} keys are no whole tiles of {TILE}", pages.size))
        }
        _ => None,
    }
}

/// Sequences whose heads fill the rows of one matrix, where they may have a beginning in common; 1 where they do not, where keys have no
/// pages, and where sequences do not see all earlier keys.
fn together(call: &Call, rows: usize) -> usize {
    let ratio = call.q.shape[2] / call.k.shape[2];
    let causal = matches!(call.mask, Mask::Causal { window: None, both: false, .. });
    let several = call.shares && causal && call.pages.is_some() && call.sequences.is_none();
    if several { (rows / ratio).min(call.q.shape[3]).max(1) } else { 1 }
}

/// How lanes hold the matrices of halves and their sums, on a device that has all that kernels of lanes use.
pub(super) fn known_layout(caps: &Caps) -> Result<FragmentLayout, Unsupported> {
    let has_all = caps.accumulator_is_a_fragment && caps.float16 && caps.subgroups.shuffle && caps.subgroups.vote;
    let known =
        caps.fragment_layout.filter(|_| has_all && caps.coopmat_shape(Component::F16, Component::F32).is_some());
    known.ok_or_else(|| unsupported("how lanes hold fragments and their sums is not known".into()))
}

/// How a workgroup divides its work.
#[derive(Clone, Copy, Debug)]
struct FragmentPlan {
    order: FragmentLayout,
    /// Threads.
    threads: usize,
    /// Heads it serves, of each of its sequences.
    rows: usize,
    /// Sequences it serves.
    together: usize,
}

impl FragmentPlan {
    fn new(call: &Call, caps: &Caps) -> Result<FragmentPlan, Unsupported> {
        if let Some(why) = refusal(call) {
            return Err(unsupported(why));
        }
        let order = known_layout(caps)?;
        let [most, lanes, _] = fragment_layout::extents(order).map(|n| n as usize);
        let ratio = call.q.shape[2] / call.k.shape[2];
        let rows = ratio.div_ceil(ratio.div_ceil(most));
        let threads = number(call, caps, Path::Fragment, "threads")?.next_multiple_of(lanes);
        let threads = threads.min(caps.limits.max_workgroup_size[0] as usize);
        let together = if caps.subgroups.ballot { together(call, most) } else { 1 };
        let mut plan = FragmentPlan { order, threads, rows, together };
        while plan.shared_bytes(call, lanes) > caps.limits.max_shared_bytes as usize && plan.threads > lanes {
            plan.threads = (plan.threads / 2).next_multiple_of(lanes);
        }
        let bytes = plan.shared_bytes(call, lanes);
        if bytes > caps.limits.max_shared_bytes as usize {
            return Err(unsupported(format!(
                "{rows} heads of {} need {bytes} bytes of shared memory",
                call.v.shape[0]
            )));
        }
        Ok(plan)
    }

    /// Sums of the subgroups with their maxima and weights, and a flag.
    fn shared_bytes(&self, call: &Call, lanes: usize) -> usize {
        let subgroups = self.threads / lanes;
        let rows = self.rows * self.together;
        let sums = (subgroups * rows * call.v.shape[0] / 4).max(self.threads) * 16;
        sums + (subgroups * rows).max(self.threads) * 8 + 16
    }

    fn defines(&self, shader: Shader, call: &Call) -> Shader {
        // Threads that share four elements of the result when partial results are added up.
        let rows = self.rows * self.together;
        let parts = (self.threads / (rows * call.v.shape[0] / 4).next_power_of_two()).clamp(1, 8);
        shader
            .subgroup(SubgroupRequest::Full)
            .define("FRAGMENT_LAYOUT", fragment_layout::number(self.order))
            .define("WG", self.threads)
            .define("ROWS", self.rows)
            .define("TOGETHER", self.together)
            .define("PARTS", parts)
            .define("BC", TILE)
            .define("RUN", SPLIT_KEYS / TILE)
            .define("CODES", codes(call.k.ty).unwrap_or(0))
    }
}

/// Heads that share keys from which on it has been timed: with fewer, threads have less to do for each element, and lanes no less.
const LEAST_SHARING: usize = 4;

/// Whether the path is taken unless another one is wished for: from this many sequences on, and for fewer from this many keys on.
pub(super) fn is_preferred(call: &Call, caps: &Caps) -> bool {
    let from = |name| number(call, caps, Path::Fragment, name).ok().filter(|least| *least > 0);
    let keys = from("least").is_some_and(|least| call.keys() >= least);
    let sequences = from("sequences").is_some_and(|least| call.q.shape[3] >= least);
    let sharing = call.q.shape[2] / call.k.shape[2] >= LEAST_SHARING;
    !call.batch_invariant && sharing && (keys || sequences) && FragmentPlan::new(call, caps).is_ok()
}

pub(super) fn fragment(call: &Call, caps: &Caps) -> Result<Choice, Unsupported> {
    let plan = FragmentPlan::new(call, caps)?;
    let groups = grid(call, plan.rows, plan.together);
    let first = emit_packed_b::defines(
        plan.defines(shader(call, caps, Path::Fragment, "flash_attention/fragment.comp")?, call),
        call,
    );
    with_combine(call, caps, Choice::one(Path::Fragment, first, within(groups, caps)?))
}
