//! From a call to launches: which path, how many rows and keys a workgroup takes, and the parameter blocks.

use kiln_gguf::TensorType;
use kiln_gpu::{Address, Caps, Component, CoopmatShape, FlexibleShape, Scope, Shader, SubgroupRequest};

use super::{Call, Mask, NAME};
use crate::formats;
use crate::operation::{Choice, Launch, Path, Unsupported};
use crate::tensor::Tensor;

// What depends on the model alone (head sizes, heads, scale, window) is compiled in: a parameter block has 128 bytes.
// Strides are in bytes. Without a page table, `pages` holds the batch strides of K and V.
kiln_gpu::params! {
    struct Params {
        q: Address,
        k: Address,
        v: Address,
        result: Address,
        sinks: Address,
        scratch: Address,
        counters: Address,
        pages: Address,
        tokens: u32,
        keys: u32,
        splits: u32,
        q_stride: [u32; 3],
        k_stride: [u32; 2],
        v_stride: [u32; 2],
        positions: Address,
        lengths: Address,
        sequences: Address,
    }
}

kiln_gpu::params! {
    struct MaskParams {
        q: Address,
        k: Address,
        v: Address,
        result: Address,
        sinks: Address,
        scratch: Address,
        counters: Address,
        pages: Address,
        tokens: u32,
        keys: u32,
        splits: u32,
        q_stride: [u32; 3],
        k_stride: [u32; 2],
        v_stride: [u32; 2],
        mask: Address,
        mask_stride: [u32; 3],
        mask_shape: u32,
    }
}

fn unsupported(reason: String) -> Unsupported {
    Unsupported { operation: NAME, reason }
}

/// A float as GLSL reads it back bit for bit.
fn bits(x: f32) -> String {
    format!("uintBitsToFloat({:#x}u)", x.to_bits())
}

/// The shader of a path with everything that all paths share.
fn shader(call: &Call, path: Path, file: &'static str) -> Result<Shader, Unsupported> {
    let [hsk, _, heads, batch] = call.q.shape;
    let [hsv, _, kv_heads, kv_batch] = call.v.shape;
    let explicit = matches!(call.mask, Mask::Explicit(_));
    let params = if explicit { MaskParams::glsl() } else { Params::glsl() };
    let name = format!("{NAME}.{}.{}.{}", call.k.ty, call.v.ty, path.name()).to_lowercase();
    let (causal, window, lengths) = match call.mask {
        Mask::Causal { length, window, .. } => (1, window.unwrap_or(0), length.len()),
        _ => (0, 0, 1),
    };
    // Sequences share a cache in runs where there are more of them than caches.
    let shared_by = if call.pages.is_some() { 1 } else { call.sequence_count() / kv_batch };
    let shader = Shader::new(name, file, params)
        .define("HSK", hsk)
        .define("HSV", hsv)
        .define("HEADS", heads)
        .define("RATIO", heads / kv_heads)
        .define("BATCH", batch)
        .define("CAUSAL", causal)
        .define("WINDOW", window)
        .define("LENGTHS", u32::from(lengths > 1))
        .define("SHARED_BY", shared_by)
        .define("MASK", u32::from(explicit))
        .define("SINKS", u32::from(call.sinks.is_some()))
        .define("SCALE", bits(call.scale))
        .define("SOFTCAP", u32::from(call.logit_softcap != 0.0))
        .define("CAP", bits(call.logit_softcap))
        .define("ALIBI", u32::from(call.max_bias > 0.0))
        .define("MAX_BIAS", bits(call.max_bias))
        .define("SEQUENCES", u32::from(call.sequences.is_some()))
        .define("SPLIT", call.split.map_or(0, |s| if s.counters.is_some() { 2 } else { 1 }))
        // Loads of partial results that are on their way at once.
        .define("COMBINE", 8)
        .define("PAGE", call.pages.map_or(0, |p| p.size))
        .define("PAGES", call.pages.map_or(0, |p| p.table.shape[0]));
    let shader = formats::define(shader, "K", call.k.ty)?;
    let shader = formats::define(shader, "V", call.v.ty)?;
    Ok(shader.define("K_HALVES", u32::from(wide_halves(&call.k))).define("V_HALVES", u32::from(wide_halves(&call.v))))
}

/// Whether rows are of F16 and lie at multiples of 16 bytes, so that a thread may read eight elements at once. Slots
/// begin at multiples of 256.
fn wide_halves(t: &Tensor) -> bool {
    let aligned = |bytes: usize| bytes.is_multiple_of(16);
    t.ty == TensorType::F16 && aligned(t.offset) && (1..4).all(|d| t.shape[d] == 1 || aligned(t.stride[d]))
}

fn check_operands(call: &Call) -> Result<(), Unsupported> {
    for (t, what) in [(&call.k, "k"), (&call.v, "v")] {
        if !t.shape[0].is_multiple_of(8) {
            return Err(unsupported(format!("{what} is {t}: head sizes must be multiples of 8")));
        }
        formats::readable(NAME, t)?;
        if !formats::is_aligned(t) {
            let (offset, stride) = (t.offset, t.stride);
            return Err(unsupported(format!("{what} is {t}: offset {offset}, strides {stride:?} are not aligned")));
        }
    }
    if !formats::is_aligned(&call.q) || !formats::is_aligned(&call.out) {
        return Err(unsupported(format!(
            "rows of q {} and out {} must lie at multiples of 16 bytes",
            call.q, call.out
        )));
    }
    let mut tensors = vec![call.q, call.k, call.v, call.out];
    if let Mask::Explicit(mask) = call.mask {
        tensors.push(mask);
    }
    if let Some(split) = call.split {
        tensors.push(split.scratch);
    }
    if let Mask::Explicit(m) = call.mask
        && m.shape[2..].iter().any(|&n| n > 0xffff)
    {
        return Err(unsupported(format!("mask {m}: more than 65535 heads or batches")));
    }
    for t in tensors {
        let strides = (1..4).filter(|&d| t.shape[d] > 1).map(|d| t.stride[d]);
        if let Some(n) = strides.chain(t.shape).find(|&n| u32::try_from(n).is_err()) {
            return Err(unsupported(format!("{t} needs the number {n}, beyond 32 bits")));
        }
    }
    Ok(())
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
            .define("KEY_LANES", self.key_lanes)
            .define("VALUE_LANES", self.value_lanes)
            .define("ROW_LANES", self.row_lanes)
    }
}

fn scalar(call: &Call, caps: &Caps) -> Result<Choice, Unsupported> {
    let plan = Scalar::new(call, caps)?;
    let [_, tokens, heads, batch] = call.q.shape;
    let kv_heads = call.k.shape[2];
    let splits = call.split.map_or(1, |s| s.count);
    let groups = [tokens, kv_heads * (heads / kv_heads).div_ceil(plan.rows) * splits, batch];
    let first = plan.defines(shader(call, Path::Scalar, "flash_attention/scalar.comp")?);
    with_combine(call, caps, Choice::one(Path::Scalar, first, within(groups, caps)?))
}

/// Adds the launch that adds up the splits, where they do not do it themselves.
fn with_combine(call: &Call, caps: &Caps, mut choice: Choice) -> Result<Choice, Unsupported> {
    if call.split.is_some_and(|s| s.counters.is_none()) {
        let [_, tokens, heads, batch] = call.q.shape;
        let threads = (call.v.shape[0] / 4).next_power_of_two().clamp(32, 128);
        let shader = shader(call, choice.path, "flash_attention/combine.comp")?.define("WG", threads).define("BC", 1);
        choice.launches.push(Launch { shader, groups: within([tokens, heads, batch], caps)? });
    }
    Ok(choice)
}

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
            .define("K_SLICE", self.slices[0])
            .define("V_SLICE", self.slices[1])
            .define("PREFETCH", u32::from(self.unroll))
            .define("STEP_LOOP", if self.unroll { "[[unroll]]" } else { "[[dont_unroll]]" })
            .define("Q_SHARED", u32::from(self.shared_queries))
            .define("LANES", self.lanes)
    }
}

fn coopmat(call: &Call, caps: &Caps) -> Result<Choice, Unsupported> {
    if call.sequences.is_some() && call.split.is_some() {
        return Err(unsupported("tiles of several sequences have no splits on this path".into()));
    }
    let [_, tokens, heads, batch] = call.q.shape;
    let kv_heads = call.k.shape[2];
    let rows = tokens * heads / kv_heads;
    let plan = Matrices::new(call, caps, rows)?;
    let splits = call.split.map_or(1, |s| s.count);
    let groups = within([rows.div_ceil(plan.rows()) * splits, kv_heads, batch], caps)?;
    let first = plan.defines(shader(call, Path::Coopmat, "flash_attention/coopmat.comp")?, caps);
    with_combine(call, caps, Choice::one(Path::Coopmat, first, groups))
}

/// Tiles of the coopmat2 path: rows, keys, threads and padded head sizes.
fn coopmat2_tile(call: &Call, caps: &Caps, rows: usize) -> Result<([usize; 3], [usize; 2]), Unsupported> {
    if !caps.coopmat2.is_complete() || !caps.float16 {
        return Err(unsupported("no cooperative matrices 2".into()));
    }
    let (hsk, hsv) = (call.k.shape[0], call.v.shape[0]);
    let threads = 128;
    let tile_rows: usize = if rows <= 32 || hsv > 256 { 32 } else { 64 };
    // Rounds depend on the head sizes alone, so that the bits of a row do not depend on how many others there are.
    let keys: usize = if hsk.max(hsv) > 128 { 32 } else { 64 };
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

fn coopmat2(call: &Call, caps: &Caps) -> Result<Choice, Unsupported> {
    let [_, tokens, heads, batch] = call.q.shape;
    let kv_heads = call.k.shape[2];
    let rows = tokens * heads / kv_heads;
    let ([tile_rows, keys, threads], pad) = coopmat2_tile(call, caps, rows)?;
    if call.sequences.is_some() {
        return Err(unsupported("tiles of several sequences are the coopmat path's".into()));
    }
    if let Some(pages) = call.pages
        && !pages.size.is_multiple_of(keys)
    {
        return Err(unsupported(format!("pages of {} rows, {keys} keys must lie side by side", pages.size)));
    }
    let mut first = shader(call, Path::Coopmat2, "flash_attention/coopmat2.comp")?;
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
        .define("HSK_PAD", pad[0])
        .define("HSV_PAD", pad[1])
        .subgroup(SubgroupRequest::Full);
    let splits = call.split.map_or(1, |s| s.count);
    let groups = within([rows.div_ceil(tile_rows) * splits, kv_heads, batch], caps)?;
    with_combine(call, caps, Choice::one(Path::Coopmat2, first, groups))
}

/// The grid, where the device accepts it.
fn within(groups: [usize; 3], caps: &Caps) -> Result<[u32; 3], Unsupported> {
    let limit = caps.limits.max_workgroup_count;
    match (0..3).find(|&d| groups[d] > limit[d] as usize) {
        Some(d) => {
            Err(unsupported(format!("{} workgroups in dimension {d}, the device takes {}", groups[d], limit[d])))
        }
        None => Ok(groups.map(|n| n as u32)),
    }
}

pub(super) fn pick(call: &Call, caps: &Caps, want: Option<Path>) -> Result<Choice, Unsupported> {
    check_operands(call)?;
    match want {
        // Few rows do not fill a matrix, and a software GPU takes a second or two to compile each matrix kernel.
        None if !caps.is_cpu && call.q.shape[1] * call.q.shape[2] / call.k.shape[2] > 8 => {
            coopmat2(call, caps).or_else(|_| coopmat(call, caps)).or_else(|_| scalar(call, caps))
        }
        None | Some(Path::Scalar) => scalar(call, caps),
        Some(Path::Coopmat) => coopmat(call, caps),
        Some(Path::Coopmat2) => coopmat2(call, caps),
        Some(other) => Err(unsupported(format!("no {} path", other.name()))),
    }
}

pub(super) fn params(call: &Call, at: &dyn Fn(&Tensor) -> Address) -> Vec<u8> {
    let narrow = |n: usize| u32::try_from(n).expect("pick refuses numbers past 32 bits");
    let optional = |t: Option<Tensor>| t.as_ref().map_or(Address::default(), at);
    let [k_row, k_head, k_batch] = formats::row_strides(&call.k);
    let [v_row, v_head, v_batch] = formats::row_strides(&call.v);
    let batch_strides = Address(u64::from(k_batch) | u64::from(v_batch) << 32);
    let (positions, lengths) = match call.mask {
        Mask::Causal { positions, length, .. } => (at(&positions), at(&length)),
        _ => Default::default(),
    };
    let causal = Params {
        q: at(&call.q),
        k: at(&call.k),
        v: at(&call.v),
        result: at(&call.out),
        sinks: optional(call.sinks),
        scratch: optional(call.split.map(|s| s.scratch)),
        counters: optional(call.split.and_then(|s| s.counters)),
        pages: call.pages.map_or(batch_strides, |p| at(&p.table)),
        tokens: narrow(call.q.shape[1]),
        keys: narrow(call.keys()),
        splits: narrow(call.split.map_or(1, |s| s.count)),
        q_stride: formats::row_strides(&call.q),
        k_stride: [k_row, k_head],
        v_stride: [v_row, v_head],
        positions,
        lengths,
        sequences: optional(call.sequences),
    };
    let Mask::Explicit(mask) = call.mask else { return causal.bytes() };
    let Params { q, k, v, result, sinks, scratch, counters, pages, .. } = causal;
    let Params { tokens, keys, splits, q_stride, k_stride, v_stride, .. } = causal;
    let mask_shape = narrow(mask.shape[2] | mask.shape[3] << 16);
    let mask_stride = formats::row_strides(&mask);
    let mask = at(&mask);
    MaskParams {
        q,
        k,
        v,
        result,
        sinks,
        scratch,
        counters,
        pages,
        tokens,
        keys,
        splits,
        q_stride,
        k_stride,
        v_stride,
        mask,
        mask_stride,
        mask_shape,
    }
    .bytes()
}
