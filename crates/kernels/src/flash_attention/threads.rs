//! The paths without matrices: how `teams.comp` (scalar and integer) and `scalar.comp` divide their work.

use kiln_gguf::TensorType;
use kiln_gpu::{Caps, IntDot, Shader, SubgroupRequest};

use super::plan::{SPLIT_KEYS, grid, number, shader, unsupported, with_combine, within};
use super::{Call, kv_append, rounding, team_rows};
use crate::formats;
use crate::operation::{Choice, Path, Unsupported};
use crate::tensor::Tensor;

/// Whether rows are of Q8_0, a whole number of 128 elements, and lie at multiples of 8 bytes: then a thread may read the
/// codes of eight elements with two loads of 8 bytes.
fn wide_bytes(t: &Tensor) -> bool {
    let aligned = |bytes: usize| bytes.is_multiple_of(8);
    let rows = aligned(t.offset) && (1..4).all(|d| t.shape[d] == 1 || aligned(t.stride[d]));
    t.ty == TensorType::Q8_0 && t.shape[0].is_multiple_of(128) && rows
}

/// How a workgroup of the scalar path divides its work.
#[derive(Clone, Copy, Debug)]
struct Scalar {
    /// Threads.
    threads: usize,
    /// Query heads it serves.
    rows: usize,
    /// Keys of a round.
    keys: usize,
    /// Whether loops over the keys of a round are unrolled.
    unroll: bool,
    /// Threads that share a key.
    key_lanes: usize,
    /// Threads that share a value row.
    value_lanes: usize,
    /// Threads that share a row of scores.
    row_lanes: usize,
}

impl Scalar {
    fn new(call: &Call, caps: &Caps) -> Result<Scalar, Unsupported> {
        let (hsk, hsv) = (call.k.shape[0], call.v.shape[0]);
        let ratio = call.q.shape[2] / call.k.shape[2];
        let limit = caps.limits.max_workgroup_invocations.min(caps.limits.max_workgroup_size[0]).min(128) as usize;
        // Shuffles need subgroups whose lanes are all there, and threads whose numbers follow the lanes.
        let subgroup = caps.subgroups.size as usize;
        let shuffles = caps.subgroups.shuffle && caps.subgroups.full && limit.is_multiple_of(subgroup);
        let lanes = if shuffles { subgroup } else { 1 };
        let threads = if caps.is_cpu { lanes.max(32) } else { limit };
        let keys = if caps.is_cpu { 32 } else { 64 };
        let key_lanes = lanes.min(1 << (hsk / 8).ilog2()).min(16);
        let value_lanes = (hsv / 8).next_power_of_two().min(threads);
        let most = 8;
        for rows in (1..=ratio.div_ceil(ratio.div_ceil(most))).rev() {
            let row_lanes = lanes.min(1 << (threads / rows).ilog2());
            let plan = Scalar { threads, rows, keys, unroll: !caps.is_cpu, key_lanes, value_lanes, row_lanes };
            if plan.shared_bytes(hsk) <= caps.limits.max_shared_bytes as usize {
                return Ok(plan);
            }
        }
        Err(unsupported(format!("heads of {hsk} and {hsv} need more than {} bytes", caps.limits.max_shared_bytes)))
    }

    /// Scores, factors, and in one place queries first and sums of the result later.
    fn shared_bytes(&self, hsk: usize) -> usize {
        4 * (self.rows * self.keys + 2 * self.rows + (self.rows * hsk).max(8 * self.threads))
    }

    fn defines(&self, shader: Shader) -> Shader {
        let shader = if self.key_lanes > 1 { shader.subgroup(SubgroupRequest::Full) } else { shader };
        shader
            .define("WG", self.threads)
            // Unrolled loops keep many loads on their way; a software GPU only has more to compile.
            .define("KEY_LOOP", if self.unroll { "[[unroll]]" } else { "[[dont_unroll]]" })
            .define("ROWS", self.rows)
            .define("BC", self.keys)
            .define("RUN", SPLIT_KEYS / self.keys)
            .define("KEY_LANES", self.key_lanes)
            .define("VALUE_LANES", self.value_lanes)
            .define("ROW_LANES", self.row_lanes)
    }
}

pub(super) fn scalar(call: &Call, caps: &Caps) -> Result<Choice, Unsupported> {
    if let Ok(choice) = teams(call, caps, Path::Scalar) {
        return Ok(choice);
    }
    let plan = Scalar::new(call, caps)?;
    let groups = grid(call, plan.rows, 1);
    let first = plan.defines(shader(call, caps, Path::Scalar, "flash_attention/scalar.comp")?);
    with_combine(call, caps, Choice::one(Path::Scalar, first, within(groups, caps)?))
}

/// How a workgroup of `teams.comp` divides its work.
#[derive(Clone, Copy, Debug)]
struct Teams {
    /// Threads.
    threads: usize,
    /// Threads of a subgroup.
    subgroup: usize,
    /// Threads of a team.
    lanes: usize,
    /// Query heads it serves.
    rows: usize,
    /// Keys a team has under way.
    prefetch: usize,
    /// Whether the next keys are loaded before the values of these are used.
    ahead: bool,
}

impl Teams {
    fn new(call: &Call, caps: &Caps, path: Path) -> Result<Teams, Unsupported> {
        let (hsk, hsv) = (call.k.shape[0], call.v.shape[0]);
        let ratio = call.q.shape[2] / call.k.shape[2];
        let subgroup = caps.subgroups.size as usize;
        let limit = caps.limits.max_workgroup_invocations.min(caps.limits.max_workgroup_size[0]) as usize;
        // Shuffles need subgroups whose lanes are all there, and threads whose numbers follow the lanes.
        if !(caps.subgroups.shuffle && caps.subgroups.full && subgroup.is_power_of_two() && subgroup <= limit) {
            return Err(unsupported("no full subgroups that shuffle".into()));
        }
        let lanes = (hsk.max(hsv) / 8).next_power_of_two().min(subgroup);
        let chunks = hsk.div_ceil(8 * lanes) + hsv.div_ceil(8 * lanes);
        let number = |name: &str| number(call, caps, path, name);
        // Queries and sums of a row take 8 registers each for every chunk; software GPUs have no registers to run out of.
        let registers = (128 / (8 * chunks)).clamp(1, 8);
        let registers = if hsk.max(hsv) > 128 { registers.min(team_rows(hsk.max(hsv))) } else { registers };
        let most = if caps.is_cpu { 8 } else { registers }.min(lanes).min(number("rows")?.max(1));
        let rows = ratio.div_ceil(ratio.div_ceil(most));
        let prefetch = number("prefetch")?.next_power_of_two().min(64);
        // Wide heads and many rows have fewer keys under way.
        let room = if caps.is_cpu { prefetch } else { (8 / chunks.div_ceil(2)).max(1).next_power_of_two() };
        let mut plan = Teams {
            threads: number("threads")?.next_power_of_two().clamp(subgroup, limit.max(subgroup)),
            subgroup,
            lanes,
            rows,
            prefetch: prefetch.min(room),
            ahead: number("ahead")? != 0,
        };
        let tables = formats::format(call.k.ty)
            .map_or(0, |f| f.shared_bytes)
            .max(formats::format(call.v.ty).map_or(0, |f| f.shared_bytes));
        while plan.shared_bytes(call) + tables > caps.limits.max_shared_bytes as usize {
            if plan.threads == subgroup {
                let bytes = plan.shared_bytes(call);
                return Err(unsupported(format!("heads of {hsk} and {hsv} need {bytes} bytes of shared memory")));
            }
            plan.threads /= 2;
        }
        Ok(plan)
    }

    fn rows_pad(&self) -> usize {
        self.rows.next_power_of_two()
    }

    /// Weights of the teams, sums of the subgroups with their maxima and weights, and a flag; queries, key and value that arrive, with
    /// factors of their norms.
    fn shared_bytes(&self, call: &Call) -> usize {
        let (hsk, hsv) = (call.k.shape[0], call.v.shape[0]);
        let appended = if call.kv_append.is_some() { 4 * ((self.rows + 1) * (hsk + 1) + hsv) } else { 0 };
        let subgroups = self.threads / self.subgroup;
        let weights = self.threads / self.lanes * (self.prefetch + 1) * self.rows_pad() * 4;
        let sums = (subgroups * self.rows * hsv / 4).max(self.threads) * 16;
        weights + sums + (subgroups * self.rows).max(self.threads) * 8 + 16 + appended
    }

    fn defines(&self, shader: Shader, call: &Call, path: Path) -> Shader {
        let nibbles = |ty: TensorType| {
            use TensorType::{IQ4_NL, Q4_0, Q4_1, Q5_0, Q5_1};
            u32::from(matches!(ty, Q4_0 | Q4_1 | Q5_0 | Q5_1 | IQ4_NL))
        };
        // Threads that share four elements of the result when partial results are added up.
        let parts = (self.threads / (self.rows * call.v.shape[0] / 4).next_power_of_two()).clamp(1, 8);
        rounding::defines(kv_append::defines(shader, call), call)
            .subgroup(SubgroupRequest::Full)
            .define("WG", self.threads)
            .define("SUBGROUP", self.subgroup)
            .define("LANES", self.lanes)
            .define("ROWS", self.rows)
            .define("ROWS_PAD", self.rows_pad())
            .define("PREFETCH", self.prefetch)
            .define("AHEAD", u32::from(self.ahead))
            .define("INT", u32::from(path == Path::IntDot))
            .define("PARTS", parts)
            .define("BC", TEAM_TILE)
            .define("RUN", SPLIT_KEYS / TEAM_TILE)
            .define("K_NIBBLES", nibbles(call.k.ty))
            .define("V_NIBBLES", nibbles(call.v.ty))
            .define("WIDE_K8", u32::from(wide_bytes(&call.k)))
            .define("WIDE_V8", u32::from(wide_bytes(&call.v)))
    }
}

/// Splits of `teams.comp` begin at multiples of this many keys.
const TEAM_TILE: usize = 16;
pub(super) fn teams(call: &Call, caps: &Caps, path: Path) -> Result<Choice, Unsupported> {
    if path == Path::IntDot {
        let codes = formats::format(call.k.ty).is_some_and(|f| f.group == 32) && call.k.ty.block_len() == 32;
        if caps.int_dot == IntDot::None || !codes || caps.subgroups.size < 4 {
            return Err(unsupported(format!("no integer products of {}", call.k.ty)));
        }
    }
    rounding::check(call, caps)?;
    let plan = Teams::new(call, caps, path)?;
    let groups = grid(call, plan.rows, 1);
    let first = plan.defines(shader(call, caps, path, "flash_attention/teams.comp")?, call, path);
    with_combine(call, caps, Choice::one(path, first, within(groups, caps)?))
}
