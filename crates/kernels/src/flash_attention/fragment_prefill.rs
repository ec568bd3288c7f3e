//! The path on matrix units whose lanes write the components of matrices themselves, for many rows: prompts, where the order of
//! components is known. See `fragment_prefill.comp`.

use kiln_gguf::TensorType;
use kiln_gpu::{Caps, FragmentLayout, Shader, SubgroupRequest};

use super::fragment::known_layout;
use super::plan::{SPLIT_KEYS, number, shader, unsupported, wide_halves, with_combine, within};
use super::{Call, Mask};
use crate::formats;
use crate::fragment_layout;
use crate::operation::{Choice, Path, Unsupported};
use crate::tensor::Tensor;

/// Elements of a head that lanes take together.
const HEAD_UNIT: usize = 64;
/// Keys of the largest matrices: pages have whole numbers of them.
const TILE: usize = 16;
/// The widest head whose sums fit into registers.
const WIDEST: usize = 256;

/// Why a call is not for the path, on whatever device.
fn refusal(call: &Call) -> Option<String> {
    let heads = [call.k.shape[0], call.v.shape[0]];
    if heads.iter().any(|head| !head.is_multiple_of(HEAD_UNIT) || *head > WIDEST) {
        return Some(format!("heads of {heads:?}, want multiples of {HEAD_UNIT} up to {WIDEST}"));
    }
    if call.max_bias > 0.0 || call.distances.is_some() {
        return Some("biases of keys are other paths'".into());
    }
    if call.sequences.is_some() && call.split.is_some() {
        return Some("tiles of several sequences have no splits on this path".into());
    }
    if let Mask::Explicit(mask) = &call.mask {
        let words = |bytes: usize| bytes.is_multiple_of(4);
        let rows = (1..4).all(|d| mask.shape[d] == 1 || words(mask.stride[d]));
        if !rows || !words(mask.offset) || !call.keys().is_multiple_of(2) {
            return Some(format!("rows of the mask {mask} are no whole words"));
        }
    }
    match call.pages {
        Some(pages) if !pages.size.is_multiple_of(TILE) => {
            Some(format!("pages of {} keys are no whole tiles of {TILE}", pages.size))
        }
        _ => None,
    }
}

/// Elements of a head that the lanes of a subgroup load at once: two matrices' worth.
fn chunk(order: FragmentLayout) -> usize {
    2 * fragment_layout::extents(order)[2] as usize
}

/// Bits of the codes of a format that is loaded in words and decoded late; 0 for all else.
fn codes(t: &Tensor) -> u32 {
    let words = |bytes: usize| bytes.is_multiple_of(4);
    let rows = words(t.offset) && (1..4).all(|d| t.shape[d] == 1 || words(t.stride[d]));
    match t.ty {
        TensorType::Q8_0 if rows => 8,
        TensorType::Q4_0 if rows => 4,
        _ => 0,
    }
}

/// How a workgroup divides its work.
#[derive(Clone, Copy, Debug)]
struct Rows {
    order: FragmentLayout,
    subgroups: usize,
    /// Blocks of rows of a subgroup.
    blocks: usize,
    /// Keys of a round.
    keys: usize,
    /// Whether keys, and whether values, pass through shared memory.
    staged: [bool; 2],
    /// Chunks of the queries that are kept in shared memory: an eighth of a head of 256 each.
    shared_queries: usize,
}

impl Rows {
    fn new(call: &Call, caps: &Caps) -> Result<Rows, Unsupported> {
        if let Some(why) = refusal(call) {
            return Err(unsupported(why));
        }
        let order = known_layout(caps)?;
        let number = |name| number(call, caps, Path::FragmentPrefill, name);
        let [tile, lanes, _] = fragment_layout::extents(order).map(|n| n as usize);
        // Lanes load halves themselves; whatever else keys are becomes halves in shared memory.
        let stage = number("stage")?;
        let staged = [(1, &call.k), (2, &call.v)].map(|(bit, t)| stage & bit != 0 || !wide_halves(t));
        // Rounds depend on heads and formats alone, so that the bits of a row do not depend on how many others there are.
        let keys = number("keys")?.next_multiple_of(tile);
        let blocks = number("blocks")?.clamp(1, 2);
        let shared_queries = number("queries")?.min(call.k.shape[0] / chunk(order));
        let most = number("subgroups")?.clamp(1, caps.limits.max_workgroup_invocations as usize / lanes);
        let mut plan = Rows { order, subgroups: most, blocks, keys, staged, shared_queries };
        let limit = caps.limits.max_shared_bytes as usize;
        while plan.shared_bytes(call) > limit && plan.keys > tile {
            plan.keys = (plan.keys / 2).next_multiple_of(tile);
        }
        while plan.shared_bytes(call) > limit && plan.subgroups > 1 {
            plan.subgroups /= 2;
        }
        let bytes = plan.shared_bytes(call);
        if bytes > limit {
            let Rows { keys, .. } = plan;
            return Err(unsupported(format!(
                "{keys} keys of a round need {bytes} bytes of shared memory, it has {limit}"
            )));
        }
        Ok(plan)
    }

    /// Rows of a tile.
    fn rows(&self) -> usize {
        self.subgroups * self.blocks * fragment_layout::extents(self.order)[0] as usize
    }

    /// Two rounds of what is staged, queries, and a flag.
    fn shared_bytes(&self, call: &Call) -> usize {
        let [tile, lanes, _] = fragment_layout::extents(self.order).map(|n| n as usize);
        // Lanes of a software GPU hold what their neighbours hold, too.
        let copies = match self.order {
            FragmentLayout::Mma16x8 => 1,
            FragmentLayout::Row8 => lanes / 2,
        };
        let [k, v] = [call.k.shape[0], call.v.shape[0]];
        let keys = if self.staged[0] { 2 * self.keys * k * 2 * copies } else { 0 };
        let values = if self.staged[1] { 2 * self.keys * v * 2 } else { 0 };
        let queries = self.rows() * self.shared_queries * chunk(self.order) * 2;
        let tables: usize =
            [&call.k, &call.v].map(|t| formats::format(t.ty).map_or(0, |f| f.shared_bytes)).iter().sum();
        let flag = if call.split.is_some_and(|s| s.counters.is_some()) { 16 } else { 0 };
        debug_assert!(self.keys.is_multiple_of(tile));
        keys + values + queries + tables + flag
    }

    fn defines(&self, shader: Shader, call: &Call) -> Shader {
        let lanes = fragment_layout::extents(self.order)[1] as usize;
        shader
            .subgroup(SubgroupRequest::Full)
            .define("FRAGMENT_LAYOUT", fragment_layout::number(self.order))
            .define("WG", self.subgroups * lanes)
            .define("NW", self.subgroups)
            .define("RB", self.blocks)
            .define("BC", self.keys)
            .define("RUN", SPLIT_KEYS.div_ceil(self.keys))
            .define("K_CODES", codes(&call.k))
            .define("V_CODES", codes(&call.v))
            .define("K_STAGED", u32::from(self.staged[0]))
            .define("V_STAGED", u32::from(self.staged[1]))
            .define("Q_SHARED", self.shared_queries)
    }
}

/// Whether the path is taken unless another one is wished for: for this many rows or more.
pub(super) fn is_preferred(call: &Call, caps: &Caps, rows: usize) -> bool {
    let least = number(call, caps, Path::FragmentPrefill, "least").ok().filter(|least| *least > 0);
    !call.batch_invariant && least.is_some_and(|least| rows >= least) && Rows::new(call, caps).is_ok()
}

pub(super) fn fragment_prefill(call: &Call, caps: &Caps) -> Result<Choice, Unsupported> {
    let plan = Rows::new(call, caps)?;
    let [_, tokens, heads, batch] = call.q.shape;
    let kv_heads = call.k.shape[2];
    let rows = tokens * heads / kv_heads;
    let splits = call.split.map_or(1, |s| s.count);
    let groups = within([rows.div_ceil(plan.rows()) * splits, kv_heads, batch], caps)?;
    let first = plan.defines(shader(call, caps, Path::FragmentPrefill, "flash_attention/fragment_prefill.comp")?, call);
    with_combine(call, caps, Choice::one(Path::FragmentPrefill, first, groups))
}
