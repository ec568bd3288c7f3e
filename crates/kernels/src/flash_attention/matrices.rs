//! The paths with matrices: how `coopmat.comp`, `coopmat2.comp` and `coopmat2_rows.comp` divide their work.

use kiln_gpu::{Caps, Component, CoopmatShape, FlexibleShape, Scope, Shader, SubgroupRequest};

use super::plan::{SPLIT_KEYS, number, shader, unsupported, wide_halves, with_combine, within};
use super::{Call, Mask};
use crate::formats;
use crate::operation::{Choice, Path, Unsupported};

/// How a workgroup of the coopmat path divides its work; see `coopmat.comp`.
#[derive(Clone, Copy, Debug)]
struct Matrices {
    /// Size of the matrices, all three ways.
    size: usize,
    /// Threads of a subgroup.
    subgroup: usize,
    /// Groups of `size` rows.
    row_groups: usize,
    /// Subgroups that share a group of rows.
    column_groups: usize,
    /// Keys of a round.
    keys: usize,
    /// Columns of K and V that are staged at once.
    slices: [usize; 2],
    /// Whether queries stay in shared memory, where they are too wide for registers.
    shared_queries: bool,
    /// Threads that share a row of logits.
    lanes: usize,
    /// Whether loops over products are unrolled and loads run ahead: a software GPU takes minutes to compile that.
    unroll: bool,
}

impl Matrices {
    /// The division for this many rows. Rounds depend on the head sizes alone, so that the bits of a row do not depend
    /// on how many others there are.
    fn new(call: &Call, caps: &Caps, rows: usize) -> Result<Matrices, Unsupported> {
        let square = |s: &&CoopmatShape| {
            let types = s.a == Component::F16 && s.b == s.a && s.c == Component::F32 && s.result == s.c;
            types && s.m == s.n && s.n == s.k && matches!(s.m, 8 | 16) && !s.saturating && s.scope == Scope::Subgroup
        };
        let shape = caps.coopmat.iter().find(square);
        let shape = shape.ok_or_else(|| unsupported("no 16x16x16 or 8x8x8 matrices of F16 with F32 sums".into()))?;
        if !caps.float16 || !caps.subgroups.full {
            return Err(unsupported("matrices need F16 arithmetic and full subgroups".into()));
        }
        let (hsk, hsv) = (call.k.shape[0], call.v.shape[0]);
        let (size, subgroup) = (shape.m as usize, caps.subgroups.size as usize);
        // Registers hold the result: at most 128 columns of it for each subgroup.
        let widest = [4, 2, 1].into_iter().find(|n| hsv.div_ceil(4 / n) <= 128).unwrap_or(1);
        // A software GPU compiles every product of a subgroup on its own: few of them there.
        let widest = if caps.is_cpu { if hsv <= 64 { 2 } else { 1 } } else { widest };
        let lanes = if caps.subgroups.shuffle { (subgroup / size).clamp(1, 2) } else { 1 };
        let tables =
            [&call.k, &call.v].map(|t| formats::format(t.ty).map_or(0, |f| f.shared_bytes)).iter().sum::<usize>();
        let limit = (caps.limits.max_shared_bytes as usize).saturating_sub(tables);
        let division = |row_groups: usize, keys: usize| {
            let column_groups = (4 / row_groups).min(keys / size);
            let slice = |width: usize, unit: usize| width.div_ceil(width.div_ceil(128)).next_multiple_of(unit);
            let slices = [slice(hsk, size), slice(hsv, size * column_groups)];
            let shared_queries = caps.is_cpu || hsk > 128;
            let unroll = !caps.is_cpu;
            Matrices { size, subgroup, row_groups, column_groups, keys, slices, shared_queries, lanes, unroll }
        };
        let rounds: &[usize] = if caps.is_cpu { &[32] } else { &[64, 32] };
        for &keys in rounds {
            for most in [4, 2, 1].into_iter().filter(|&n| n <= widest) {
                let wide_enough = hsv.div_ceil(division(most, keys).column_groups) <= 128;
                if wide_enough && division(most, keys).shared_bytes(hsk) <= limit {
                    let row_groups = rows.div_ceil(size).next_power_of_two().min(most);
                    return Ok(division(row_groups, keys));
                }
            }
        }
        Err(unsupported(format!("heads of {hsk} and {hsv} need more than {limit} bytes of shared memory")))
    }

    fn rows(&self) -> usize {
        self.row_groups * self.size
    }

    fn threads(&self) -> usize {
        self.row_groups * self.column_groups * self.subgroup
    }

    fn shared_bytes(&self, hsk: usize) -> usize {
        let [k, v] = self.slices;
        let staged = if self.shared_queries { self.keys } else { self.keys.max(self.rows()) };
        let queries = if self.shared_queries { self.rows() * (hsk.next_multiple_of(k) / 4 + 2) * 8 } else { 0 };
        let tiles = self.rows() * ((self.keys / 4 + 1) * 16 + (self.keys / 4 + 2) * 8);
        staged * (k.max(v) / 4 + 2) * 8 + queries + tiles + self.rows() * 16 + 16
    }

    fn defines(&self, shader: Shader, caps: &Caps) -> Shader {
        let request = if caps.subgroups.size_control {
            SubgroupRequest::Size(caps.subgroups.size)
        } else {
            SubgroupRequest::Full
        };
        shader
            .subgroup(request)
            .define("WG", self.threads())
            .define("MM", self.size)
            .define("NR", self.row_groups)
            .define("NC", self.column_groups)
            .define("BC", self.keys)
            .define("RUN", SPLIT_KEYS / self.keys)
            .define("K_SLICE", self.slices[0])
            .define("V_SLICE", self.slices[1])
            .define("PREFETCH", u32::from(self.unroll))
            .define("STEP_LOOP", if self.unroll { "[[unroll]]" } else { "[[dont_unroll]]" })
            .define("Q_SHARED", u32::from(self.shared_queries))
            .define("LANES", self.lanes)
    }
}

/// Biases of distances are read score by score, which threads that own single scores do.
fn without_distances(call: &Call) -> Result<(), Unsupported> {
    match call.distances {
        Some(_) => Err(unsupported("biases of distances are the scalar path's".into())),
        None => Ok(()),
    }
}

pub(super) fn coopmat(call: &Call, caps: &Caps) -> Result<Choice, Unsupported> {
    without_distances(call)?;
    if call.sequences.is_some() && call.split.is_some() {
        return Err(unsupported("tiles of several sequences have no splits on this path".into()));
    }
    let [_, tokens, heads, batch] = call.q.shape;
    let kv_heads = call.k.shape[2];
    let rows = tokens * heads / kv_heads;
    let plan = Matrices::new(call, caps, rows)?;
    let splits = call.split.map_or(1, |s| s.count);
    let groups = within([rows.div_ceil(plan.rows()) * splits, kv_heads, batch], caps)?;
    let first = plan.defines(shader(call, caps, Path::Coopmat, "flash_attention/coopmat.comp")?, caps);
    with_combine(call, caps, Choice::one(Path::Coopmat, first, groups))
}

/// The widest head of `coopmat2.comp`.
const WIDEST_WORKGROUP_HEAD: usize = 256;

/// Tiles of the coopmat2 path: rows, keys, threads and padded head sizes.
fn coopmat2_tile(call: &Call, caps: &Caps, rows: usize) -> Result<([usize; 3], [usize; 2]), Unsupported> {
    let (hsk, hsv) = (call.k.shape[0], call.v.shape[0]);
    // An NVIDIA driver (580.159) took 80 s to compile heads of 576 and 512, 17 s for 256 (`kiln selftest -v`): wider ones are the coopmat path's.
    if hsk.max(hsv) > WIDEST_WORKGROUP_HEAD {
        return Err(unsupported(format!("heads of {hsk} and {hsv}, at most {WIDEST_WORKGROUP_HEAD}")));
    }
    let narrow = hsk.max(hsv) <= 128;
    let threads = if narrow { number(call, caps, Path::Coopmat2, "threads")? } else { 128 };
    let most = if narrow { number(call, caps, Path::Coopmat2, "rows")? } else { 64 };
    let tile_rows: usize = if rows <= 32 || hsv > 256 { 32 } else { most };
    // Rounds depend on the head sizes alone, so that the bits of a row do not depend on how many others there are.
    let keys: usize = if narrow { number(call, caps, Path::Coopmat2, "keys")? } else { 32 };
    let fits = |s: &&FlexibleShape| {
        let types = s.a == Component::F16 && s.b == s.a && s.c == Component::F32 && s.result == s.c && !s.saturating;
        let divides = [(tile_rows, s.m), (keys, s.n), (keys, s.k)].iter().all(|&(n, by)| n.is_multiple_of(by as usize));
        types && s.scope == Scope::Workgroup && s.workgroup == threads as u32 && divides
    };
    let shape = caps.coopmat2.shapes.iter().find(fits);
    let shape = shape.ok_or_else(|| unsupported(format!("no matrices of {tile_rows} rows for {threads} threads")))?;
    let pad = [hsk.next_multiple_of(shape.k as usize), hsv.next_multiple_of(shape.n as usize)];
    if pad.iter().any(|&n| n > caps.coopmat2.max_dimension as usize) {
        return Err(unsupported(format!("heads of {pad:?}, matrices have at most {}", caps.coopmat2.max_dimension)));
    }
    Ok(([tile_rows, keys, threads], pad))
}

pub(super) fn coopmat2(call: &Call, caps: &Caps) -> Result<Choice, Unsupported> {
    without_distances(call)?;
    if !caps.coopmat2.is_complete() || !caps.float16 {
        return Err(unsupported("no cooperative matrices 2".into()));
    }
    if call.sequences.is_some() {
        return Err(unsupported("tiles of several sequences are the coopmat path's".into()));
    }
    let by_rows = match number(call, caps, Path::Coopmat2, "subgroups")? {
        0 => Err(unsupported("matrices of subgroups are not wanted".into())),
        most => coopmat2_rows(call, caps, most),
    };
    by_rows.or_else(|_| coopmat2_workgroup(call, caps))
}

/// The widest head of `coopmat2_rows.comp`.
const WIDEST_ROWS_HEAD: usize = 256;

/// Matrices of subgroups, at most `most` of them in a workgroup. The sums of heads of 128 fit in registers; of wider ones two
/// subgroups have half of the columns each.
fn coopmat2_rows(call: &Call, caps: &Caps, most: usize) -> Result<Choice, Unsupported> {
    let wanted = |s: &&CoopmatShape| {
        let types = s.a == Component::F16 && s.b == s.a && s.c == Component::F32 && s.result == s.c && !s.saturating;
        types && (s.m, s.n, s.k) == (16, 16, 16) && s.scope == Scope::Subgroup
    };
    let (hsk, hsv) = (call.k.shape[0], call.v.shape[0]);
    if !caps.coopmat.iter().any(|s| wanted(&s)) || !caps.subgroups.full || hsk.max(hsv) > WIDEST_ROWS_HEAD {
        return Err(unsupported(format!("no matrices of subgroups for heads of {hsk} and {hsv}")));
    }
    let parts = if hsk.max(hsv) > 128 { 2 } else { 1 };
    let [_, tokens, heads, batch] = call.q.shape;
    let kv_heads = call.k.shape[2];
    let rows = tokens * heads / kv_heads;
    let blocks = number(call, caps, Path::Coopmat2, "blocks")?.clamp(1, if parts == 1 { 2 } else { 1 });
    // Rounds depend on the head sizes alone, so that the bits of a row do not depend on how many others there are.
    // Each part has whole matrices of them.
    let keys = number(call, caps, Path::Coopmat2, "keys")?.next_multiple_of(16 * parts);
    let keys = keys.min(if parts == 1 { 128 } else { 32 });
    let pad = [hsk.next_multiple_of(16), hsv.next_multiple_of(16 * parts)];
    let tables: usize = [&call.k, &call.v].map(|t| formats::format(t.ty).map_or(0, |f| f.shared_bytes)).iter().sum();
    let limit = caps.limits.max_shared_bytes as usize;
    let shared = |subgroups: usize, mask: bool| {
        let tile_rows = subgroups / parts * blocks * 16;
        let mask = if mask { tile_rows * (keys + 8) * 2 } else { 0 };
        let parts = if parts > 1 { subgroups * 16 * 4 + tile_rows * (keys + 8) * 2 } else { 0 };
        let values = (keys * (pad[1] + 8) * 2).max(subgroups * 1024);
        keys * (pad[0] + 8) * 2 + values + tile_rows * 16 + 16 + tables + mask + parts
    };
    // Subgroups without rows still help to load: alone, a thread would have too many loads for its registers.
    let mut subgroups = (parts * rows.div_ceil(16 * blocks)).next_power_of_two().max(4).min(most.next_power_of_two());
    // An explicit mask passes through shared memory, with fewer rows where all of them do not fit. Slopes are by the row.
    let mask = staged_mask(call, caps);
    while mask.is_some() && subgroups > 4 && shared(subgroups, true) > limit {
        subgroups /= 2;
    }
    let mask = mask.filter(|_| shared(subgroups, true) <= limit);
    let shared = shared(subgroups, mask.is_some());
    let tile_rows = subgroups / parts * blocks * 16;
    let threads = subgroups * caps.subgroups.size as usize;
    if shared > limit || threads > caps.limits.max_workgroup_invocations as usize {
        return Err(unsupported(format!("{threads} threads and {shared} bytes of shared memory, it has {limit}")));
    }
    // Narrow heads of block formats took 1.6 times as long on an H200 with both ends in shared memory, thought to cost the registers
    // with which two workgroups run on a core (docs/ladder/flash_attention.md).
    let narrow_blocks = hsk.max(hsv) <= 64 && [&call.k, &call.v].iter().any(|t| t.ty.is_quantised());
    let first = shader(call, caps, Path::Coopmat2, "flash_attention/coopmat2_rows.comp")?
        .define("STAGED_ENDS", u32::from(!narrow_blocks))
        .define("WG", threads)
        .define("NW", subgroups)
        .define("MM", 16)
        .define("RB", blocks)
        .define("PARTS", parts)
        .define("MASK_STAGED", u32::from(mask.is_some()))
        .define("MASK_WIDE", u32::from(mask == Some(true)))
        .define("BC", keys)
        .define("RUN", SPLIT_KEYS.div_ceil(keys))
        .define("HSK_PAD", pad[0])
        .define("HSV_PAD", pad[1])
        .subgroup(SubgroupRequest::Size(caps.subgroups.size));
    let splits = call.split.map_or(1, |s| s.count);
    let groups = within([rows.div_ceil(tile_rows) * splits, kv_heads, batch], caps)?;
    with_combine(call, caps, Choice::one(Path::Coopmat2, first, groups))
}

/// Whether an explicit mask can be added as matrices: then, whether it can be read by eights.
fn staged_mask(call: &Call, caps: &Caps) -> Option<bool> {
    let Mask::Explicit(mask) = &call.mask else { return None };
    let halves =
        |s: &CoopmatShape| s.c == Component::F16 && (s.m, s.n, s.k) == (16, 16, 16) && s.scope == Scope::Subgroup;
    if call.max_bias > 0.0 || !caps.coopmat.iter().any(halves) {
        return None;
    }
    let aligned = |bytes: usize| bytes.is_multiple_of(16);
    let rows = (1..4).all(|d| mask.shape[d] == 1 || aligned(mask.stride[d]));
    Some(rows && aligned(mask.offset) && call.keys().is_multiple_of(8))
}

/// Matrices of the whole workgroup.
fn coopmat2_workgroup(call: &Call, caps: &Caps) -> Result<Choice, Unsupported> {
    let [_, tokens, heads, batch] = call.q.shape;
    let kv_heads = call.k.shape[2];
    let rows = tokens * heads / kv_heads;
    let ([tile_rows, keys, threads], pad) = coopmat2_tile(call, caps, rows)?;
    if let Some(pages) = call.pages
        && !pages.size.is_multiple_of(keys)
    {
        return Err(unsupported(format!("pages of {} rows, {keys} keys must lie side by side", pages.size)));
    }
    let mut first = shader(call, caps, Path::Coopmat2, "flash_attention/coopmat2.comp")?;
    for (t, letter) in [(&call.k, "K"), (&call.v, "V")] {
        let bytes = t.ty.block_bytes();
        if !t.stride[1].is_multiple_of(bytes) {
            return Err(unsupported(format!("rows of {t} are {} bytes apart, no multiple of {bytes}", t.stride[1])));
        }
        first = first
            .define(&format!("{letter}_BYTES"), bytes)
            .define(&format!("{letter}_ELEMENTS"), t.ty.block_len())
            .define(&format!("{letter}_DIRECT"), u32::from(wide_halves(t)));
    }
    let first = first
        .define("WG", threads)
        .define("ROWS", tile_rows)
        .define("BC", keys)
        .define("RUN", SPLIT_KEYS.div_ceil(keys))
        .define("EARLY", number(call, caps, Path::Coopmat2, "early")?)
        .define("HSK_PAD", pad[0])
        .define("HSV_PAD", pad[1])
        // Columns of matrices that hold one number for each row.
        .define("NARROW", if threads > 128 { 32 } else { 16 })
        .subgroup(SubgroupRequest::Full);
    let splits = call.split.map_or(1, |s| s.count);
    let groups = within([rows.div_ceil(tile_rows) * splits, kv_heads, batch], caps)?;
    with_combine(call, caps, Choice::one(Path::Coopmat2, first, groups))
}
