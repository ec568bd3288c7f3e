//! From a call to launches: which path, what all of them share, and the parameter blocks. How a workgroup divides its work
//! is in `threads.rs` and `matrices.rs`.

use kiln_gguf::TensorType;
use kiln_gpu::{Address, Caps, IntDot, Shader};

use super::fragment::{self, fragment};
use super::fragment_prefill::{self, fragment_prefill};
use super::matrices::{coopmat, coopmat2};
use super::threads::{scalar, teams};
use super::{Call, GOOD_GROUPS, LONG_RUN, Mask, NAME, Window, emit_packed_b, few_rows, kv_append, rounding, tuning};
use crate::formats;
use crate::operation::{Choice, Launch, Path, Unsupported};
use crate::tensor::Tensor;

// What depends on the model alone (head sizes, heads, scale, window) is compiled in: a parameter block has 128 bytes.
// Strides are in bytes. Without a page table, `pages` holds the batch strides of K and V. Biases of distances, which no call has
// beside sinks, lie where `sinks` says.
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

/// No split has fewer keys than this, unless there is only one.
pub(super) const SPLIT_KEYS: usize = 128;

pub(super) fn unsupported(reason: String) -> Unsupported {
    Unsupported { operation: NAME, reason }
}

/// A float as GLSL reads it back bit for bit.
fn bits(x: f32) -> String {
    format!("uintBitsToFloat({:#x}u)", x.to_bits())
}

/// The shader of a path with everything that all paths share.
pub(super) fn shader(call: &Call, caps: &Caps, path: Path, file: &'static str) -> Result<Shader, Unsupported> {
    let [hsk, _, heads, batch] = call.q.shape;
    let [hsv, _, kv_heads, kv_batch] = call.v.shape;
    let explicit = matches!(call.mask, Mask::Explicit(_));
    let more = [
        call.rounding.map(|_| rounding::Params::fields()),
        call.emit_packed_b.map(|_| emit_packed_b::Params::fields()),
        call.kv_append.map(|_| kv_append::Params::fields()),
    ];
    let params = if explicit {
        MaskParams::glsl()
    } else {
        kiln_gpu::params::block(&[Some(Params::fields())].into_iter().chain(more).flatten().collect::<Vec<_>>())
    };
    let name = format!("{NAME}.{}.{}.{}", call.k.ty, call.v.ty, path.name()).to_lowercase();
    let (causal, window, lengths, both) = match call.mask {
        Mask::Causal { length, window, both, .. } => (1, window, length.len(), both),
        _ => (0, None, 1, false),
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
        .define("WINDOW", window.map_or(0, Window::size))
        .define("CHUNKED", u32::from(matches!(window, Some(Window::Chunk(_)))))
        .define("BOTH", u32::from(both))
        .define("SEES_AHEAD", u32::from(call.sees_ahead()))
        .define("LENGTHS", u32::from(lengths > 1))
        .define("SHARED_BY", shared_by)
        .define("MASK", u32::from(explicit))
        .define("SINKS", u32::from(call.sinks.is_some()))
        .define("SCALE", bits(call.scale))
        .define("SOFTCAP", u32::from(call.logit_softcap != 0.0))
        .define("CAP", bits(call.logit_softcap))
        .define("ALIBI", u32::from(call.max_bias > 0.0))
        .define("MAX_BIAS", bits(call.max_bias))
        .define("DISTANCES", u32::from(call.distances.is_some()))
        .define("REACH", call.reach().unwrap_or(0))
        .define("SEQUENCES", u32::from(call.sequences.is_some()))
        .define("SPLIT", call.split.map_or(0, |s| if s.counters.is_some() { 2 } else { 1 }))
        .define("SHORT_SPLITS", call.split.map_or(1, |s| s.short))
        .define("LONG_RUN", LONG_RUN)
        .define("GOOD_GROUPS", GOOD_GROUPS)
        // Loads of partial results that are on their way at once.
        .define("COMBINE", number(call, caps, path, "combine")?)
        .define("PAGE", call.pages.map_or(0, |p| p.size))
        .define("PAGES", call.pages.map_or(0, |p| p.table.shape[0]));
    let shader = formats::define(shader, "K", call.k.ty)?;
    let shader = formats::define(shader, "V", call.v.ty)?;
    Ok(shader.define("K_HALVES", u32::from(wide_halves(&call.k))).define("V_HALVES", u32::from(wide_halves(&call.v))))
}

/// Whether rows are of F16 and lie at multiples of 16 bytes, so that a thread may read eight elements at once. Slots
/// begin at multiples of 256.
pub(super) fn wide_halves(t: &Tensor) -> bool {
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

/// A number of the tuning table.
pub(super) fn number(call: &Call, caps: &Caps, path: Path, name: &str) -> Result<usize, Unsupported> {
    let missing = || unsupported(format!("the tuning table has no {name} for {}", path.name()));
    tuning::table()
        .map_err(unsupported)?
        .find(caps, (call.k.ty, call.k.shape[0].max(call.v.shape[0])), path, name)
        .ok_or_else(missing)
}

/// Adds the launch that adds up the splits, where they do not do it themselves.
pub(super) fn with_combine(call: &Call, caps: &Caps, mut choice: Choice) -> Result<Choice, Unsupported> {
    if call.split.is_some_and(|s| s.counters.is_none()) {
        let [_, tokens, heads, batch] = call.q.shape;
        let threads = (call.v.shape[0] / 4).next_power_of_two().clamp(32, 128);
        let shader = shader(call, caps, choice.path, "flash_attention/combine.comp")?
            .define("WG", threads)
            .define("BC", 1)
            .define("RUN", 1);
        choice.launches.push(Launch::new(shader, within([tokens, heads, batch], caps)?));
    }
    Ok(choice)
}

/// Workgroups for tokens, kv heads by groups of this many of the heads that share them, and runs of keys of this many sequences together. A sequence may have fewer
/// runs than there is room for, and the workgroups of the others leave at once. Those of all first runs come first: where every
/// fourth workgroup had keys, a device that deals workgroups out in turn gave them to every fourth core.
pub(super) fn grid(call: &Call, rows: usize, together: usize) -> [usize; 3] {
    let [_, tokens, heads, batch] = call.q.shape;
    let kv_heads = call.k.shape[2];
    [tokens, kv_heads * (heads / kv_heads).div_ceil(rows), batch.div_ceil(together) * call.split.map_or(1, |s| s.count)]
}

/// The grid, where the device accepts it.
pub(super) fn within(groups: [usize; 3], caps: &Caps) -> Result<[u32; 3], Unsupported> {
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
    if let Some(kv_append) = &call.kv_append {
        return kv_append::pick(call, kv_append, caps, want);
    }
    if call.rounding.is_some() {
        return rounding::pick(call, caps, want);
    }
    if let Some(of) = &call.emit_packed_b {
        return emit_packed_b::pick(call, of, caps, want);
    }
    let rows = call.q.shape[1] * call.q.shape[2] / call.k.shape[2];
    let few = few_rows(call.k.shape[0].max(call.v.shape[0]));
    match want {
        None if rows > few && fragment_prefill::is_preferred(call, caps, rows) => fragment_prefill(call, caps),
        // A software GPU takes a second or two to compile each matrix kernel.
        None if !caps.is_cpu && rows > few => {
            let matrices = if rows <= 64 {
                coopmat(call, caps).or_else(|_| coopmat2(call, caps))
            } else {
                coopmat2(call, caps).or_else(|_| coopmat(call, caps))
            };
            matrices.or_else(|_| scalar(call, caps))
        }
        None if fragment::is_preferred(call, caps) => fragment(call, caps),
        // Integer products of a quantised K, where they are not emulated, save most of the arithmetic of a score.
        None if caps.int_dot == IntDot::Accelerated => teams(call, caps, Path::IntDot).or_else(|_| scalar(call, caps)),
        None | Some(Path::Scalar) => scalar(call, caps),
        Some(Path::IntDot) => teams(call, caps, Path::IntDot),
        Some(Path::Coopmat) => coopmat(call, caps),
        Some(Path::Fragment) => fragment(call, caps),
        Some(Path::FragmentPrefill) => fragment_prefill(call, caps),
        Some(Path::Coopmat2) => coopmat2(call, caps),
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
        sinks: optional(call.sinks.or(call.distances)),
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
    let Mask::Explicit(mask) = call.mask else {
        let rounding = call.rounding.map(|rounding| rounding::params(&rounding, at).bytes());
        let emit_packed_b = call.emit_packed_b.map(|emit_packed_b| emit_packed_b::params(&emit_packed_b, at).bytes());
        let kv_append = call.kv_append.map(|kv_append| kv_append::params(call, &kv_append, at).bytes());
        return [
            causal.bytes(),
            rounding.unwrap_or_default(),
            emit_packed_b.unwrap_or_default(),
            kv_append.unwrap_or_default(),
        ]
        .concat();
    };
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
