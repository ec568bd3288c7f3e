//! Which kernels a call runs on a device: one function for each path, best path first.

use kiln_gguf::TensorType;
use kiln_gpu::{Caps, IntDot, Shader};

use super::matrix::{coopmat, coopmat2};
use super::tuning::table;
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
    let table = table().map_err(|reason| Unsupported { operation: NAME, reason })?;
    let on = |path: Path| match path {
        Path::Scalar => scalar(call, caps),
        Path::IntDot => int_dot(call, caps),
        Path::Coopmat => with_decoding(call, caps, coopmat),
        Path::Coopmat2 => with_decoding(call, caps, coopmat2),
    };
    match want {
        Some(path) => on(path),
        // Software GPUs only imitate matrix units.
        None if caps.is_cpu => scalar(call, caps),
        None => {
            let (preferred, _) = table.preferred(call.product.a.ty, columns_each(call));
            let integers = if caps.int_dot == IntDot::Accelerated { Path::IntDot } else { Path::Scalar };
            let order = [preferred, Path::Coopmat2, Path::Coopmat, integers];
            order.into_iter().find_map(|path| on(path).ok()).map_or_else(|| scalar(call, caps), Ok)
        }
    }
}

pub(super) fn unsupported<T>(reason: impl Into<String>) -> Result<T, Unsupported> {
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
pub(super) fn shader(call: &Call, path: Path, file: &'static str) -> Result<Shader, Unsupported> {
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
pub(super) fn launches(call: &Call, caps: &Caps, kernel: Shader, tile: [usize; 2]) -> Vec<Launch> {
    shared_launches(call, caps, kernel, tile, 1)
}

/// The same with several workgroups to a tile.
pub(super) fn shared_launches(call: &Call, caps: &Caps, kernel: Shader, tile: [usize; 2], share: usize) -> Vec<Launch> {
    let Product { a, d, .. } = &call.product;
    let rows = a.shape[1].div_ceil(tile[0]);
    let Some(ids) = &call.ids else {
        let columns = d.shape[1].div_ceil(tile[1]) * d.shape[2] * d.shape[3];
        return vec![Launch { shader: kernel, groups: grid(rows * columns * share, caps) }];
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
pub(super) fn columns(call: &Call, caps: &Caps, half: bool) -> Result<Launch, Unsupported> {
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

/// Whether matrix units get the weights decoded beforehand, given the memory: once, not once for every tile of columns.
pub(super) fn decodes_first(product: &Product, ids: Option<&Tensor>) -> bool {
    // A table that cannot be read is told by `pick`.
    ids.is_none() && table().is_ok_and(|t| t.preferred(product.a.ty, product.b.shape[1]).1)
}

/// Columns that one product has: those of b, or what an expert gets on the average.
pub(super) fn columns_each(call: &Call) -> usize {
    match &call.ids {
        Some(ids) => ids.len().div_ceil(call.product.a.shape[2]),
        None => call.product.d.shape[1],
    }
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
