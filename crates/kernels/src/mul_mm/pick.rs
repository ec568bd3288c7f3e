//! Which kernels a call runs on a device: one function for each path, best path first.

use kiln_gpu::{Caps, Shader};

use super::{Call, ExpertParams, ListParams, NAME, Params};
use crate::formats;
use crate::mul_mat::Product;
use crate::operation::{Choice, Launch, Path, Unsupported, element_functions, grid};
use crate::tensor::Tensor;

/// Most experts whose counts fit into the shared memory that every device has.
const MOST_EXPERTS: usize = 2048;

/// The best path for a call, or the one asked for.
pub(super) fn pick(call: &Call, caps: &Caps, want: Option<Path>) -> Result<Choice, Unsupported> {
    addressable(call)?;
    match want {
        None | Some(Path::Scalar) => scalar(call, caps),
        Some(other) => Err(Unsupported { operation: NAME, reason: format!("no {} path", other.name()) }),
    }
}

fn addressable(call: &Call) -> Result<(), Unsupported> {
    let Product { a, b, d } = call.product;
    formats::readable(NAME, &a)?;
    let tensors: Vec<Tensor> = [b, d].into_iter().chain(call.epilogue.residual).chain(call.ids).collect();
    formats::rows_reachable(NAME, &tensors)?;
    // Of weights only the strides are 32 bits wide; elements are counted within a row.
    let far = (1..4).find(|&i| a.shape[i] > 1 && u32::try_from(a.stride[i]).is_err());
    if let Some(i) = far {
        let reason = format!("{a}: a stride of {} bytes, beyond 32 bits", a.stride[i]);
        return Err(Unsupported { operation: NAME, reason });
    }
    if call.ids.is_some() && a.shape[2] > MOST_EXPERTS {
        let reason = format!("{} experts, at most {MOST_EXPERTS}", a.shape[2]);
        return Err(Unsupported { operation: NAME, reason });
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
        .define("STORE_D", store);
    formats::define(formats::define(shader, "A", a.ty)?, "B", b.ty)
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

fn scalar(call: &Call, caps: &Caps) -> Result<Choice, Unsupported> {
    let Product { a, b, .. } = &call.product;
    let vectors = |t: &Tensor| formats::is_aligned(t);
    if caps.is_cpu && vectors(a) && vectors(b) {
        let threads = caps.subgroups.size.max(1) as usize;
        let columns = if b.shape[1] > 16 || call.ids.is_some() { 32 } else { 16 };
        let shader = shader(call, Path::Scalar, "mul_mm/rows.comp")?.define("WG", threads).define("TILE_N", columns);
        let launches = launches(call, caps, shader, [threads, columns]);
        return Ok(Choice { path: Path::Scalar, launches });
    }
    let fours = a.shape[0].is_multiple_of(4);
    let shader = shader(call, Path::Scalar, "mul_mm/tile.comp")?
        .define("VECTORS_A", u32::from(fours && vectors(a)))
        .define("VECTORS_B", u32::from(fours && vectors(b)));
    Ok(Choice { path: Path::Scalar, launches: launches(call, caps, shader, [64, 64]) })
}
