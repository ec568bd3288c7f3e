//! Which kernels a call runs on a device: one function for each path, best path first.

use kiln_gguf::TensorType;
use kiln_gpu::{Caps, Component, CoopmatShape, FlexibleShape, IntDot, Scope, Shader, SubgroupRequest};

use super::{Call, ColumnParams, ExpertParams, ListParams, NAME, Params, prepared_columns};
use crate::formats;
use crate::mul_mat::Product;
use crate::operation::{Choice, Launch, Operation, Path, Unsupported, element_functions, grid, reduce_defines};
use crate::tensor::Tensor;

/// Most experts whose counts fit into the shared memory that every device has.
const MOST_EXPERTS: usize = 2048;

/// The best path for a call, or the one asked for.
pub(super) fn pick(call: &Call, caps: &Caps, want: Option<Path>) -> Result<Choice, Unsupported> {
    addressable(call)?;
    match want {
        // Software GPUs only imitate matrix units.
        None if caps.is_cpu => scalar(call, caps),
        None => with_decoding(call, caps, coopmat2)
            .or_else(|_| with_decoding(call, caps, coopmat))
            .or_else(|_| if caps.int_dot == IntDot::Accelerated { int_dot(call, caps) } else { scalar(call, caps) })
            .or_else(|_| scalar(call, caps)),
        Some(Path::Scalar) => scalar(call, caps),
        Some(Path::Coopmat) => with_decoding(call, caps, coopmat),
        Some(Path::Coopmat2) => with_decoding(call, caps, coopmat2),
        Some(Path::IntDot) => int_dot(call, caps),
    }
}

fn unsupported<T>(reason: impl Into<String>) -> Result<T, Unsupported> {
    Err(Unsupported { operation: NAME, reason: reason.into() })
}

fn addressable(call: &Call) -> Result<(), Unsupported> {
    let Product { a, b, d } = call.product;
    if matches!(a.ty, TensorType::I8 | TensorType::I16 | TensorType::I32 | TensorType::I64) {
        return unsupported(format!("weights of {}", a.ty));
    }
    formats::readable(NAME, &a)?;
    let tensors: Vec<Tensor> = [b, d].into_iter().chain(call.epilogue.residual).chain(call.ids).collect();
    formats::rows_reachable(NAME, &tensors)?;
    // Of weights only the strides are 32 bits wide; elements are counted within a row.
    let far = (1..4).find(|&i| a.shape[i] > 1 && u32::try_from(a.stride[i]).is_err());
    if let Some(i) = far {
        return unsupported(format!("{a}: a stride of {} bytes, beyond 32 bits", a.stride[i]));
    }
    if call.ids.is_some() && a.shape[2] > MOST_EXPERTS {
        return unsupported(format!("{} experts, at most {MOST_EXPERTS}", a.shape[2]));
    }
    Ok(())
}

/// The defines that every kernel of the operation takes.
fn shader(call: &Call, path: Path, file: &'static str) -> Result<Shader, Unsupported> {
    let Product { a, b, d } = call.product;
    let name = format!("{NAME}.{}.{}", a.ty, path.name()).to_lowercase();
    let params = if call.ids.is_some() { ExpertParams::glsl() } else { Params::glsl() };
    let (_, store) = element_functions(NAME, d.ty)?;
    let shader = Shader::new(name, file, params)
        .define("EXPERTS", u32::from(call.ids.is_some()))
        .define("BIAS", u32::from(call.epilogue.bias.is_some()))
        .define("RESIDUAL", u32::from(call.epilogue.residual.is_some()))
        .define("PREPARED", u32::from(path >= Path::Coopmat))
        .define("STORE_D", store);
    let shader = formats::define(shader, "A", a.ty)?;
    // The other paths get prepared columns, whose type is theirs.
    if path == Path::Scalar { formats::define(shader, "B", b.ty) } else { Ok(shader) }
}

/// The launches around the kernel itself: with experts the list of tiles comes first.
fn launches(call: &Call, caps: &Caps, kernel: Shader, tile: [usize; 2]) -> Vec<Launch> {
    let Product { a, d, .. } = &call.product;
    let rows = a.shape[1].div_ceil(tile[0]);
    let Some(ids) = &call.ids else {
        let columns = d.shape[1].div_ceil(tile[1]) * d.shape[2] * d.shape[3];
        return vec![Launch { shader: kernel, groups: grid(rows * columns, caps) }];
    };
    let experts = a.shape[2];
    let threads = caps.limits.max_workgroup_invocations.min(if caps.is_cpu { 8 } else { 512 });
    let list = Shader::new(format!("{NAME}.experts"), "mul_mm/experts.comp", ListParams::glsl())
        .define("WG", threads)
        .define("TILE_N", tile[1])
        .define("N_EXPERTS", experts);
    // How many tiles there are is known on the device only: those past the last leave at once.
    let most = ids.len().min(ids.len() / tile[1] + experts);
    vec![Launch { shader: list, groups: [1, 1, 1] }, Launch { shader: kernel, groups: grid(rows * most, caps) }]
}

/// The columns of b as 16-bit floats: F16 (`half`) with a factor for each, or BF16.
fn columns(call: &Call, caps: &Caps, half: bool) -> Result<Launch, Unsupported> {
    let b = &call.product.b;
    let to = if half { "f16" } else { "bf16" };
    let shader = Shader::new(
        format!("{NAME}.columns.{}.{to}", b.ty).to_lowercase(),
        "mul_mm/columns.comp",
        ColumnParams::glsl(),
    )
    .define("HALF", u32::from(half))
    .define("EXPERTS", u32::from(call.ids.is_some()))
    .define("VECTORS_B", u32::from(formats::is_aligned(b) && b.shape[0].is_multiple_of(4)));
    let shader = reduce_defines(formats::define(shader, "B", b.ty)?, b.shape[0], caps);
    Ok(Launch { shader, groups: grid(prepared_columns(&call.product, call.ids.as_ref()), caps) })
}

fn scalar(call: &Call, caps: &Caps) -> Result<Choice, Unsupported> {
    let Product { a, b, .. } = &call.product;
    let vectors = |t: &Tensor| formats::is_aligned(t);
    if caps.is_cpu && vectors(a) && vectors(b) {
        // Two rows and 16 columns a thread keep 32 sums in registers; docs/ladder/mul_mm.md has the others.
        let (threads, rows, columns) = (caps.subgroups.size.max(1) as usize, 2, 16);
        let shader = shader(call, Path::Scalar, "mul_mm/rows.comp")?
            .define("WG", threads)
            .define("ROWS", rows)
            .define("TILE_N", columns);
        let launches = launches(call, caps, shader, [rows * threads, columns]);
        return Ok(Choice { path: Path::Scalar, launches });
    }
    let fours = a.shape[0].is_multiple_of(4);
    let shader = shader(call, Path::Scalar, "mul_mm/tile.comp")?
        .define("VECTORS_A", u32::from(fours && vectors(a)))
        .define("VECTORS_B", u32::from(fours && vectors(b)));
    Ok(Choice { path: Path::Scalar, launches: launches(call, caps, shader, [64, 64]) })
}

/// Columns from which weights are decoded once before the product, not once for every tile of columns: then writing and
/// reading them as F16 costs less than a tenth of the product.
const DECODE_FIRST: usize = 512;

/// Whether matrix units get the weights decoded beforehand, given the memory.
pub(super) fn decodes_first(product: &Product, ids: Option<&Tensor>) -> bool {
    ids.is_none() && product.a.ty.is_quantised() && product.b.shape[1] >= DECODE_FIRST
}

/// The product of a matrix path, and all that goes before it: lists, columns and, where it is worth it, weights.
fn with_decoding(
    call: &Call,
    caps: &Caps,
    path: fn(&Call, &Caps) -> Result<Choice, Unsupported>,
) -> Result<Choice, Unsupported> {
    let Some(decode) = call.decoded() else { return path(call, caps) };
    let mut choice = path(&call.with_weights(decode.dst), caps)?;
    let first = decode.pick(caps, Some(Path::Scalar))?;
    choice.launches.splice(0..0, first.launches);
    Ok(choice)
}

fn int_dot(call: &Call, caps: &Caps) -> Result<Choice, Unsupported> {
    if caps.int_dot == IntDot::None {
        return unsupported("the device has no integer dot products");
    }
    if call.exact {
        return unsupported("integer products round the columns, the call wants them exact");
    }
    if !call.product.a.ty.is_quantised() {
        return unsupported(format!("{} has no integer codes", call.product.a.ty));
    }
    let Some(integers) = call.integers() else { return unsupported("no scratch memory for the columns") };
    // A software GPU compiles longest where it unrolls most.
    let (tile, thread) = if caps.is_cpu { ([8, 16], [1, 1]) } else { ([64, 64], [8, 4]) };
    let shader = shader(call, Path::IntDot, "mul_mm/int_dot.comp")?
        .define("TILE_M", tile[0])
        .define("TILE_N", tile[1])
        .define("THREAD_M", thread[0])
        .define("THREAD_N", thread[1]);
    let mut launches = launches(call, caps, shader, tile);
    let round = integers.pick(caps, Some(Path::Scalar))?;
    launches.splice(0..0, round.launches);
    Ok(Choice { path: Path::IntDot, launches })
}

/// How a workgroup of cooperative matrices is cut: its tile, and what of it one subgroup keeps, in rows and columns.
#[derive(Clone, Copy, Debug)]
struct Cut {
    tile: [usize; 2],
    warp: [usize; 2],
    /// Elements of k in shared memory at a time.
    depth: usize,
}

const fn cut(tile: [usize; 2], warp: [usize; 2], depth: usize) -> Cut {
    Cut { tile, warp, depth }
}

/// Largest first: each halves the rows or the columns of the one before.
const CUTS: [Cut; 5] = [
    cut([128, 128], [64, 64], 32),
    cut([128, 64], [64, 32], 32),
    cut([64, 64], [32, 32], 32),
    cut([64, 32], [32, 16], 32),
    cut([32, 32], [16, 16], 32),
];

/// Threads of a software GPU wait for each other one by one, so the fewest are best; and it compiles for longer than it
/// runs, so little is unrolled.
const SOFTWARE_CUT: Cut = cut([16, 16], [8, 8], 16);

/// Columns that one product has: those of b, or what an expert gets on the average.
fn columns_each(call: &Call) -> usize {
    match &call.ids {
        Some(ids) => ids.len().div_ceil(call.product.a.shape[2]),
        None => call.product.d.shape[1],
    }
}

/// The largest cut that has a tile for every core, and does not waste more than half of its columns.
fn cut_for(call: &Call, caps: &Caps, shape: &CoopmatShape, table_bytes: usize) -> Result<Cut, Unsupported> {
    let d = &call.product.d;
    let n = columns_each(call);
    let products = d.rows().div_ceil(n.max(1));
    let cores = caps.cores.unwrap_or(32) as usize;
    let fits = |cut: &&Cut| {
        let lines = cut.depth / 8 + 1;
        let bytes = 2 * (cut.tile[0] + cut.tile[1]) * lines * 16 + table_bytes;
        let threads = cut.tile[0] / cut.warp[0] * (cut.tile[1] / cut.warp[1]) * caps.subgroups.size as usize;
        bytes <= caps.limits.max_shared_bytes as usize
            && threads <= caps.limits.max_workgroup_invocations as usize
            && cut.depth.is_multiple_of(shape.k as usize)
            && cut.warp[0].is_multiple_of(shape.m as usize)
            && cut.warp[1].is_multiple_of(shape.n as usize)
    };
    let busy = |cut: &&&Cut| {
        let tiles = d.shape[0].div_ceil(cut.tile[0]) * n.div_ceil(cut.tile[1]) * products;
        tiles >= cores && n > cut.tile[1] / 2
    };
    let cuts = if caps.is_cpu { std::slice::from_ref(&SOFTWARE_CUT) } else { &CUTS[..] };
    let fitting: Vec<&Cut> = cuts.iter().filter(fits).collect();
    match fitting.iter().find(busy).or(fitting.last()) {
        Some(cut) => Ok(**cut),
        None => unsupported(format!(
            "no tile of {}x{} matrices fits {} bytes of shared memory",
            shape.m, shape.n, caps.limits.max_shared_bytes
        )),
    }
}

/// The component type of a matrix of these weights, if 16 bits hold them, and whether it is F16.
fn element_of(a: &Tensor) -> Result<(Component, bool), Unsupported> {
    match a.ty {
        // Its own range and precision would be lost in 16 bits.
        TensorType::F32 => unsupported("F32 weights are multiplied in f32, not by 16-bit matrix units"),
        TensorType::BF16 => Ok((Component::Bf16, false)),
        _ => Ok((Component::F16, true)),
    }
}

fn element_name(half: bool) -> &'static str {
    if half { "float16_t" } else { "bfloat16_t" }
}

fn coopmat(call: &Call, caps: &Caps) -> Result<Choice, Unsupported> {
    let a = &call.product.a;
    let format = formats::format(a.ty).map_or(0, |f| f.shared_bytes);
    let (element, half) = element_of(a)?;
    let Some(shape) = caps.coopmat_shape(element, Component::F32) else {
        return unsupported(format!("the driver lists no {element:?} matrices with F32 sums"));
    };
    // Tiles are addressed by vectors of eight elements.
    if !(shape.k.is_multiple_of(8) && shape.m.is_multiple_of(4)) {
        return unsupported(format!("matrices of {}x{}x{}", shape.m, shape.n, shape.k));
    }
    if !caps.subgroups.full {
        return unsupported("subgroups may be partly empty");
    }
    if !call.can_prepare() {
        return unsupported("no scratch memory for the columns");
    }
    let Cut { tile, warp, depth } = cut_for(call, caps, shape, format)?;
    let vectors = formats::is_aligned(a) && a.shape[0].is_multiple_of(4);
    let shader = shader(call, Path::Coopmat, "mul_mm/coopmat.comp")?
        .define("HALF", u32::from(half))
        .define("ELEMENT", element_name(half))
        .define("VECTORS_A", u32::from(vectors))
        .define("TILE_M", tile[0])
        .define("TILE_N", tile[1])
        .define("WARP_M", warp[0])
        .define("WARP_N", warp[1])
        .define("DEPTH", depth)
        .define("MM", shape.m)
        .define("MN", shape.n)
        .define("MK", shape.k)
        .define("SG", caps.subgroups.size)
        .subgroup(SubgroupRequest::Full);
    let mut launches = launches(call, caps, shader, tile);
    launches.insert(launches.len() - 1, columns(call, caps, half)?);
    Ok(Choice { path: Path::Coopmat, launches })
}

/// The tiles of cooperative matrices 2, largest first: rows, columns, depth, threads, and steps of k in one round.
struct Tile2 {
    tile: [usize; 2],
    depth: usize,
    threads: u32,
    unroll: usize,
}

const fn tile2(tile: [usize; 2], depth: usize, threads: u32, unroll: usize) -> Tile2 {
    Tile2 { tile, depth, threads, unroll }
}

const TILES2: [Tile2; 5] = [
    tile2([128, 256], 64, 256, 4),
    tile2([128, 128], 64, 256, 4),
    tile2([128, 64], 64, 128, 4),
    tile2([64, 64], 64, 128, 4),
    tile2([64, 32], 64, 128, 4),
];

fn coopmat2(call: &Call, caps: &Caps) -> Result<Choice, Unsupported> {
    let Product { a, d, .. } = &call.product;
    let has = &caps.coopmat2;
    if !has.is_complete() {
        return unsupported("the driver has not all of NV cooperative matrices 2");
    }
    if !call.can_prepare() {
        return unsupported("no scratch memory for the columns");
    }
    let (element, half) = element_of(a)?;
    let format = formats::format(a.ty).map_or(0, |f| f.shared_bytes);
    if format + has.reserved_shared_bytes as usize > caps.limits.max_shared_bytes as usize {
        return unsupported(format!("{format} bytes of tables beside the {} of the driver", has.reserved_shared_bytes));
    }
    // Layouts count whole blocks from row to row.
    if (1..4).any(|i| a.shape[i] > 1 && !a.stride[i].is_multiple_of(a.ty.block_bytes())) {
        return unsupported(format!("strides {:?} of {a} split blocks", a.stride));
    }
    let granularity = |t: &Tile2| {
        let fits = |s: &&FlexibleShape| {
            let types = s.a == element && s.b == element && s.c == Component::F32 && s.result == Component::F32;
            let sizes = t.tile[0].is_multiple_of(s.m as usize)
                && t.tile[1].is_multiple_of(s.n as usize)
                && t.depth.is_multiple_of(s.k as usize);
            types && !s.saturating && s.scope == Scope::Workgroup && s.workgroup == t.threads && sizes
        };
        has.shapes.iter().find(fits)
    };
    let n = columns_each(call);
    let products = d.rows().div_ceil(n.max(1));
    let cores = caps.cores.unwrap_or(32) as usize;
    let busy = |t: &&(&Tile2, &FlexibleShape)| {
        let tile = t.0.tile;
        d.shape[0].div_ceil(tile[0]) * n.div_ceil(tile[1]) * products >= cores && n > tile[1] / 2
    };
    let fitting: Vec<_> = TILES2.iter().filter_map(|t| granularity(t).map(|s| (t, s))).collect();
    let Some((chosen, shape)) = fitting.iter().find(busy).or(fitting.last()) else {
        return unsupported(format!("the driver lists no {element:?} tile for a workgroup with F32 sums"));
    };
    let aligned = |t: &Tensor| {
        t.offset.is_multiple_of(16)
            && (1..4).all(|i| t.shape[i] == 1 || t.stride[i].is_multiple_of(8 * t.ty.block_bytes().max(2)))
    };
    let shader = shader(call, Path::Coopmat2, "mul_mm/coopmat2.comp")?
        .define("HALF", u32::from(half))
        .define("ELEMENT", element_name(half))
        .define("D_ELEMENT", if d.ty == TensorType::F16 { "float16_t" } else { "float" })
        .define("D_BYTES", d.ty.block_bytes())
        .define("STORE_TENSOR", u32::from(call.ids.is_none()))
        .define("ALIGNED_A", u32::from(a.ty.block_len() == 1 && aligned(a)))
        .define("ALIGNED_D", u32::from(aligned(d)))
        .define("TILE_M", chosen.tile[0])
        .define("TILE_N", chosen.tile[1])
        .define("DEPTH", chosen.depth)
        .define("WG", chosen.threads)
        .define("UNROLL", chosen.unroll)
        .define("LEAST_N", shape.n);
    let mut launches = launches(call, caps, shader, chosen.tile);
    launches.insert(launches.len() - 1, columns(call, caps, half)?);
    Ok(Choice { path: Path::Coopmat2, launches })
}
