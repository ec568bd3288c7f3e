//! Which kernels a call runs on a device: one function for each path, best path first.

use kiln_gguf::TensorType;
use kiln_gpu::{Caps, FragmentLayout, IntDot, Shader};

use super::matrix::{Place, config_for, coopmat, coopmat2, rows_at};
use super::memory::{padded, prepared_columns};
use super::params::{ColumnParams, ExpertParams, ListParams, Params, SplitParams};
use super::tuning::{TileConfig, of_all_devices, table};
use super::{Call, Kernel, NAME, Prologue, fragment};
use crate::formats;
use crate::fragment_layout;
use crate::mul_mat::Product;
use crate::operation::{Choice, Launch, Operation, Path, Unsupported, element_functions, grid, reduce_defines};
use crate::tensor::Tensor;
use crate::unary::Function;

/// Most experts whose counts fit into the shared memory that every device has.
const MOST_EXPERTS: usize = 2048;

/// The best path for a call, or the one asked for.
pub(super) fn pick(call: &Call, caps: &Caps, want: Option<Path>) -> Result<Choice, Unsupported> {
    call.alone().iter().try_for_each(addressable)?;
    let table = table(caps).map_err(|reason| Unsupported { operation: NAME, reason })?;
    let on = |path: Path| on(call, caps, path, None);
    match want {
        None if call.wants_fragments() => on(Path::Fragment),
        Some(path) if call.wants_fragments() && path != Path::Fragment => {
            unsupported(format!("gates and packed activations, in or out, are not for the path {}", path.name()))
        }
        Some(path) => on(path),
        // Software GPUs only imitate matrix units.
        None if caps.is_cpu => on(Path::Scalar),
        None => {
            let preferred = table.paths(call.product.a.ty, columns_each(call), call.ids.is_some());
            let integers = if caps.int_dot == IntDot::Accelerated { Path::IntDot } else { Path::Scalar };
            let order = preferred.chain([Path::Coopmat2, Path::Coopmat, integers]);
            order.into_iter().find_map(|path| on(path).ok()).map_or_else(|| on(Path::Scalar), Ok)
        }
    }
}

/// A path with this cut, whatever the table has.
pub(super) fn with_config(call: &Call, caps: &Caps, path: Path, config: TileConfig) -> Result<Choice, Unsupported> {
    call.alone().iter().try_for_each(addressable)?;
    on(call, caps, path, Some(config))
}

/// The launches of every matrix of a call on one path. Weights are decoded first and activations prepared once for all, so that
/// the products wait for nothing in between and fill the device together. Where products of neighbouring matrices fill it
/// by themselves, the second's weights are decoded after the first product instead: on cores that its last tiles leave idle.
fn on(call: &Call, caps: &Caps, path: Path, config: Option<TileConfig>) -> Result<Choice, Unsupported> {
    if path != Path::Scalar && !call.can_prepare() {
        return unsupported("no scratch memory for the columns");
    }
    if let Some((made, call)) = call.on_floats(path) {
        let mut choice = on(&call, caps, path, config)?;
        let first = made.operation().pick(caps, Some(Path::Scalar))?;
        choice.launches.splice(0..0, Kernel::Materialise.all(first));
        return Ok(choice);
    }
    let alone = call.alone();
    let rows = alone.iter().map(|one| one.product.d.shape[0]).sum();
    let decoded = call.decoded().into_iter().map(|decode| decode.filter(|_| path >= Path::Coopmat));
    let (mut decodes, mut prepares, mut products, mut sums) = (Vec::new(), Vec::new(), Vec::new(), Vec::new());
    let mut tail = None;
    for (i, (one, decode)) in alone.iter().zip(decoded).enumerate() {
        let place = Place { caps, rows, last: i + 1 == alone.len(), config };
        let of = decode.map(|decode| one.with_weights(decode.dst));
        let one = of.as_ref().unwrap_or(one);
        let mut launches = match path {
            Path::Scalar => scalar(one, place, call.can_prepare())?,
            Path::IntDot => int_dot(one, caps)?,
            Path::Coopmat => coopmat(one, place)?,
            Path::Fragment => fragment::fragment(one, place)?,
            Path::FragmentPrefill => return unsupported("lanes have no other kernel for many columns"),
            Path::Coopmat2 => coopmat2(one, place)?,
        };
        // Sums that are added afterwards wait for all products together.
        sums.extend(launches.pop_if(|launch| Kernel::of(launch) == Kernel::Sums));
        tail = launches.pop_if(|launch| Kernel::of(launch) == Kernel::Tail);
        products.extend(launches.pop());
        prepares.push(launches);
        let first = decode.map(|decode| decode.pick(caps, Some(Path::Scalar))).transpose()?;
        decodes.push(first.map_or_else(Vec::new, |choice| Kernel::Decode.all(choice)));
    }
    let cores = u64::from(caps.cores_or_guess());
    let fills = |launch: &Launch| launch.groups.iter().map(|&n| u64::from(n)).product::<u64>() >= cores;
    let late = products.windows(2).position(|pair| pair.iter().all(fills)).map_or(products.len(), |i| i + 1);
    let mut launches: Vec<Launch> = decodes.drain(..late).flatten().collect();
    let mut prepared = &Vec::new();
    for (i, product) in products.into_iter().enumerate() {
        // What was prepared for the matrix before serves this one too, unless it wants another type.
        if prepares[i] != *prepared {
            launches.extend(prepares[i].iter().cloned());
            prepared = &prepares[i];
        }
        if i >= late {
            launches.append(&mut decodes[i - late]);
        }
        launches.push(product);
    }
    launches.extend(tail);
    launches.append(&mut sums);
    Ok(Choice { path, launches })
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
        .define("SORTED", u32::from(call.ids.is_some() && path == Path::Coopmat2))
        .define("STORE_D", store);
    let shader = formats::define(shader, "A", a.ty)?;
    // The other paths get prepared activations, whose type is theirs.
    if path == Path::Scalar { formats::define(shader, "B", b.ty) } else { Ok(shader) }
}

/// The launches around the kernel itself: with experts the list of tiles comes first.
pub(super) fn launches(call: &Call, caps: &Caps, kernel: (Kernel, Shader), tile: [usize; 2]) -> Vec<Launch> {
    shared_launches(call, caps, kernel, tile, 1)
}

/// The same with several workgroups to a tile.
pub(super) fn shared_launches(
    call: &Call,
    caps: &Caps,
    (what, kernel): (Kernel, Shader),
    tile: [usize; 2],
    share: usize,
) -> Vec<Launch> {
    let Product { a, d, .. } = &call.product;
    let rows = a.shape[1].div_ceil(tile[0]);
    let Some(ids) = &call.ids else {
        let columns = d.shape[1].div_ceil(tile[1]) * d.shape[2] * d.shape[3];
        return vec![what.launch(kernel, grid(rows * columns * share, caps))];
    };
    let experts = a.shape[2];
    let threads = caps.limits.max_workgroup_invocations.min(if caps.is_cpu { 8 } else { 512 });
    let list = Shader::new(format!("{NAME}.experts"), "mul_mm/experts.comp", ListParams::glsl())
        .define("WG", threads)
        .define("TILE_N", tile[1])
        .define("N_EXPERTS", experts);
    // How many tiles there are is known on the device only: those past the last leave at once.
    let most = ids.len().min(ids.len() / tile[1] + experts);
    vec![Kernel::List.launch(list, [1, 1, 1]), what.launch(kernel, grid(rows * most, caps))]
}

/// How activations are prepared.
#[derive(Clone, Copy)]
pub(super) struct PackActivations {
    /// With experts one for each pair, in the order of experts.
    pub sorted: bool,
    /// For sums of 16 bits, which large values would leave.
    pub half_sums: bool,
    /// As lanes hold them in matrices, with this many elements in a piece.
    pub order: Option<(FragmentLayout, usize)>,
}

/// The activations of b as 16-bit floats: F16 (`half`) with a factor for each, or BF16.
pub(super) fn columns(
    call: &Call,
    caps: &Caps,
    half: bool,
    PackActivations { sorted, half_sums, order }: PackActivations,
) -> Result<Launch, Unsupported> {
    let b = &call.product.b;
    let to = if half { "f16" } else { "bf16" };
    let shader = Shader::new(
        format!("{NAME}.columns.{}.{to}", b.ty).to_lowercase(),
        "mul_mm/pack_activations.comp",
        ColumnParams::glsl(),
    )
    .define("HALF", u32::from(half))
    .define("TOP", if half_sums { 0 } else { 14 })
    .define("SORTED", u32::from(sorted && call.ids.is_some()))
    .define("VECTORS_B", u32::from(formats::is_aligned(b) && b.shape[0].is_multiple_of(4)));
    let mut shader = reduce_defines(formats::define(shader, "B", b.ty)?, b.shape[0], caps);
    shader.name += match call.prologue {
        None => "",
        Some(Prologue::Norm(_)) => ".normed",
        Some(Prologue::Gate { .. }) => ".gated",
    };
    let other = call.prologue.and_then(Prologue::operand);
    if order.is_some() {
        shader = shader.define("SLOTTED", u32::from(call.ids.is_some()));
    }
    let held = held(&shader, if order.is_some() { fragment::padded } else { padded }(&call.product));
    if let Some((order, piece)) = order {
        shader.name += ".fragment";
        shader = shader.define("FRAGMENT_LAYOUT", fragment_layout::number(order)).define("PIECE", piece);
    }
    shader = shader
        .define("NORMED", u32::from(call.prologue.is_some_and(|prologue| prologue.norm().is_some())))
        .define("OTHER", u32::from(other.is_some()))
        .define("VECTORS_O", u32::from(other.is_some_and(|o| formats::is_aligned(&o) && o.shape[0].is_multiple_of(4))))
        .define("HELD", held);
    if let Some(other) = other {
        formats::rows_reachable(NAME, &[other])?;
        shader = formats::define(shader, "O", other.ty)?;
    }
    if let Some(Prologue::Gate { kind, .. }) = call.prologue {
        shader = shader.define("GATE", kind.function().map_or("silu", Function::glsl));
    }
    let kernel = match (sorted && call.ids.is_some(), order) {
        (true, _) => Kernel::PackSorted,
        (false, Some(_)) => Kernel::PackFragments,
        (false, None) => Kernel::PackActivations,
    };
    let columns = prepared_columns(&call.product, call.ids.as_ref().filter(|_| sorted || order.is_some()));
    Ok(kernel.launch(shader, grid(columns, caps)))
}

/// Vectors of four elements that each thread keeps in registers, if an activation vector so long fits them; else 0, and they are read
/// again for every pass. Few sizes keep the number of pipelines small.
fn held(shader: &Shader, padded_k: usize) -> usize {
    let threads = shader.defines.iter().find(|(name, _)| name == "WG").and_then(|(_, n)| n.parse::<usize>().ok());
    let vectors = padded_k.div_ceil(4 * threads.unwrap_or(1)).next_power_of_two();
    if vectors <= 8 { vectors } else { 0 }
}

/// `shares`: the scratch memory has room for the sums of workgroups that share a tile.
fn scalar(call: &Call, place: Place<'_>, shares: bool) -> Result<Vec<Launch>, Unsupported> {
    let (Product { a, b, .. }, caps) = (&call.product, place.caps);
    let vectors = |t: &Tensor| formats::is_aligned(t);
    // A single activation vector of many that lie askew would have vectors, and other sums than the rest: it stays with them.
    let askew = b.stride[1..].iter().any(|bytes| !bytes.is_multiple_of(4 * b.ty.block_bytes()));
    if caps.is_cpu && vectors(a) && vectors(b) && !askew {
        // Two rows and 16 activations a thread keep 32 sums in registers; docs/ladder/mul_mm.md has the others.
        let (threads, rows, columns) = (caps.subgroups.size.max(1) as usize, 2, 16);
        let shader = shader(call, Path::Scalar, "mul_mm/rows.comp")?
            .define("WG", threads)
            .define("ROWS", rows)
            .define("TILE_N", columns);
        return Ok(launches(call, caps, (Kernel::Plain, shader), [rows * threads, columns]));
    }
    tiles(call, place, shares)
}

/// The scalar path with tiles in shared memory. Where workgroups share a tile over k, a last launch adds their sums.
fn tiles(call: &Call, place: Place<'_>, shares: bool) -> Result<Vec<Launch>, Unsupported> {
    let (Product { a, b, d }, caps) = (&call.product, place.caps);
    let format = formats::format(a.ty).map_or(0, |f| f.shared_bytes);
    let threads = |config: &TileConfig| config.tile[0] / config.warp[0] * (config.tile[1] / config.warp[1]);
    let fits = |config: &TileConfig| {
        let bytes = 4 * config.depth * (config.tile[0] + config.tile[1]) + format;
        bytes <= caps.limits.max_shared_bytes as usize
            && threads(config) <= caps.limits.max_workgroup_invocations as usize
    };
    let Some(config) = config_for(call, Path::Scalar, place, fits)? else {
        let bytes = caps.limits.max_shared_bytes;
        return unsupported(format!("no tile fits {bytes} bytes of shared memory, {format} of them for tables"));
    };
    let fours = a.shape[0].is_multiple_of(4);
    let vectors = |t: &Tensor| u32::from(fours && formats::is_aligned(t));
    let (_, store) = element_functions(NAME, d.ty)?;
    // What the product and the sums of a split one have in common.
    let ends = |shader: Shader| {
        shader
            .define("VECTORS_D", u32::from(rows_at(d, 4 * d.ty.block_bytes())))
            .define("PUT4_D", store.replace("store", "put4"))
            .define("TILE_M", config.tile[0])
            .define("TILE_N", config.tile[1])
    };
    let shader = ends(shader(call, Path::Scalar, "mul_mm/tile.comp")?)
        .define("VECTORS_A", vectors(a))
        .define("VECTORS_B", vectors(b))
        .define("DEPTH", config.depth)
        .define("THREAD_M", config.warp[0])
        .define("THREAD_N", config.warp[1]);
    let Some(split) = call.split(Path::Scalar).filter(|_| shares) else {
        return Ok(launches(call, caps, (Kernel::Plain, shader), config.tile));
    };
    let product = Shader { params: SplitParams::glsl(), ..shader.define("SPLIT", 1) };
    let sums = Shader::new(format!("{NAME}.sums"), "mul_mm/sums.comp", SplitParams::glsl())
        .define("EXPERTS", 0)
        .define("BIAS", u32::from(call.epilogue.bias.is_some()))
        .define("RESIDUAL", u32::from(call.epilogue.residual.is_some()))
        .define("PREPARED", 0)
        .define("SPLIT", 1)
        .define("STORE_D", store)
        .define("WG", threads(&config));
    let both = [(Kernel::PlainSplit, product), (Kernel::Sums, ends(sums))];
    let launches = both.map(|kernel| shared_launches(call, caps, kernel, config.tile, split.count));
    Ok(launches.concat())
}

/// Whether matrix units get the weights decoded beforehand, given the memory: once, not once for every tile of activations.
pub(super) fn decodes_first(product: &Product, ids: Option<&Tensor>) -> bool {
    // A table that cannot be read is told by `pick`.
    ids.is_none() && of_all_devices().is_ok_and(|t| t.preferred(product.a.ty, product.b.shape[1]).1)
}

/// Activations that one product has: those of b, or what an expert gets on the average.
pub(super) fn columns_each(call: &Call) -> usize {
    match &call.ids {
        Some(ids) => ids.len().div_ceil(call.product.a.shape[2]),
        None => call.product.d.shape[1],
    }
}

fn int_dot(call: &Call, caps: &Caps) -> Result<Vec<Launch>, Unsupported> {
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
    let mut launches = launches(call, caps, (Kernel::Plain, shader), tile);
    let round = integers.pick(caps, Some(Path::Scalar))?;
    launches.splice(0..0, Kernel::Integers.all(round));
    Ok(launches)
}

#[cfg(test)]
mod tests {
    use super::super::Kernel::{self, Decode, Matrix, PackActivations, Tail};
    use super::*;
    use crate::mul_mat::FusedProduct;
    use crate::mul_mat_vec;
    use crate::tensor::Slot;

    /// A call of matrices with this many rows of 4096 elements and n activations, with all the scratch memory it can use.
    fn fused_products(rows: &[(TensorType, usize)], n: usize) -> Call {
        let mut slots = 0..;
        let mut dense = |ty, shape| Tensor::dense(Slot(slots.next().unwrap()), ty, shape);
        let mut matrix = |(ty, m): (TensorType, usize)| {
            let (a, d) = (dense(ty, [4096, m, 1, 1]), dense(TensorType::F32, [m, n, 1, 1]));
            FusedProduct { a, d, bias: None }
        };
        let FusedProduct { a, d, .. } = matrix(rows[0]);
        let others = rows[1..].iter().map(|&row| matrix(row)).collect();
        let b = dense(TensorType::F32, [4096, n, 1, 1]);
        let call = Call { others, ..Call::plain(Product { a, b, d }) };
        let words = call.ample_scratch_bytes().div_ceil(4);
        Call { scratch: Some(dense(TensorType::I32, [words, 1, 1, 1])), ..call }
    }

    /// The launches of a call on a large GPU, each with the number of barriers before it.
    fn order(call: &Call) -> Vec<(Kernel, usize)> {
        let choice = call.pick(&Caps::example_nvidia(), None).unwrap();
        let overlap = |a: &[Tensor], b: &[Tensor]| {
            let bytes = |t: &Tensor| (t.slot, t.span().0, t.span().0 + t.span().1);
            let pairs = a.iter().flat_map(|a| b.iter().map(move |b| (bytes(a), bytes(b))));
            pairs.into_iter().any(|(a, b)| a.0 == b.0 && a.1 < b.2 && b.1 < a.2)
        };
        let (mut reads, mut writes, mut barriers) = (Vec::new(), Vec::new(), 0);
        let step = |(i, launch): (usize, &Launch)| {
            let touches = call.touches(&choice, i);
            if overlap(&writes, &touches.reads) || overlap(&writes, &touches.writes) || overlap(&reads, &touches.writes)
            {
                (reads, writes, barriers) = (Vec::new(), Vec::new(), barriers + 1);
            }
            reads.extend(touches.reads);
            writes.extend(touches.writes);
            (Kernel::of(launch), barriers)
        };
        choice.launches.iter().enumerate().map(step).collect()
    }

    /// Prompts keep their precision, whatever the device is fast at: products of models are exact unless they say otherwise.
    #[test]
    fn only_calls_that_allow_it_round_their_columns_to_8_bits() {
        let nvidia = Caps::example_nvidia();
        let without_matrices = Caps { coopmat: Vec::new(), coopmat2: Default::default(), ..nvidia };
        assert_eq!(without_matrices.int_dot, IntDot::Accelerated);
        let call = fused_products(&[(TensorType::Q4_K, 4096)], 512);
        let of_model = mul_mat_vec::Call::plain(call.product);
        let neutral = Call { scratch: call.scratch, ..Call::of_neutral(&of_model).unwrap() };
        let path = |call: &Call| call.pick(&without_matrices, None).unwrap().path;
        assert_eq!([path(&call), path(&neutral)], [Path::Scalar; 2]);
        let rounded = mul_mat_vec::Call { exact: false, ..of_model };
        let rounded = Call { scratch: call.scratch, ..Call::of_neutral(&rounded).unwrap() };
        assert_eq!(path(&rounded), Path::IntDot);
    }

    #[test]
    fn small_siblings_are_multiplied_together_and_large_ones_decoded_in_turn() {
        use TensorType::{F16, Q4_K, Q6_K};
        let qkv = order(&fused_products(&[(Q4_K, 4096), (Q4_K, 1024), (Q6_K, 1024)], 512));
        let decoded = [(Decode, 0), (Decode, 0), (Decode, 0), (PackActivations, 0)];
        assert_eq!(qkv, [&decoded[..], &[(Matrix, 1), (Matrix, 1), (Matrix, 1)]].concat());
        let gate_up = order(&fused_products(&[(Q4_K, 14336), (Q4_K, 14336)], 512));
        assert_eq!(gate_up, [(Decode, 0), (PackActivations, 0), (Matrix, 1), (Decode, 1), (Matrix, 2)]);
        let plain = order(&fused_products(&[(F16, 14336), (F16, 14336)], 512));
        assert_eq!(plain, [(PackActivations, 0), (Matrix, 1), (Matrix, 1)]);
        // Those of the last rows wait for nothing, either.
        let plain = order(&fused_products(&[(F16, 11008), (F16, 11008)], 512));
        assert_eq!(plain, [(PackActivations, 0), (Matrix, 1), (Matrix, 1), (Tail, 1)]);
    }

    #[test]
    fn rows_of_a_last_round_that_is_far_from_full_take_lower_tiles_beside_the_others() {
        let parts = |rows: &[(TensorType, usize)], n: usize| {
            let choice = fused_products(rows, n).pick(&Caps::example_nvidia(), None).unwrap();
            choice.launches.iter().filter_map(|launch| launch.part).collect::<Vec<_>>()
        };
        // 448 tiles of 128 x 128 for 264 places: 184 of them, 46 rows of tiles, are left.
        assert_eq!(parts(&[(TensorType::F16, 14336)], 512), [[0, 66 * 128], [66 * 128, 14336]]);
        // 688 tiles, of which 160 are left.
        assert_eq!(parts(&[(TensorType::F16, 11008); 2], 512), [[0, 46 * 128], [46 * 128, 11008]]);
        // 896 tiles, of which 104 are left, one for a core.
        assert_eq!(parts(&[(TensorType::F16, 14336); 2], 512), [[0; 2]; 0]);
        // 512 tiles leave 16 places empty in the second round.
        assert_eq!(parts(&[(TensorType::F16, 4096)], 2048), [[0; 2]; 0]);
    }

    #[test]
    fn columns_are_prepared_again_for_another_type_only() {
        use TensorType::{BF16, F16};
        let mixed = order(&fused_products(&[(F16, 1024), (F16, 1024), (BF16, 1024)], 512));
        assert_eq!(mixed, [(PackActivations, 0), (Matrix, 1), (Matrix, 1), (PackActivations, 2), (Matrix, 3)]);
    }

    #[test]
    fn sums_of_shared_tiles_wait_once_for_all_products() {
        use super::super::Kernel::{PlainSplit, Sums};
        let ranks = fused_products(&[(TensorType::F32, 64), (TensorType::F32, 160)], 512);
        assert_eq!(order(&ranks), [(PlainSplit, 0), (PlainSplit, 0), (Sums, 1), (Sums, 1)]);
        // 32 times 8 tiles, and 22 times 24.
        let groups = |call: &Call| {
            let choice = call.pick(&Caps::example_nvidia(), None).unwrap();
            choice.launches.iter().map(|launch| launch.groups[0]).collect::<Vec<u32>>()
        };
        assert_eq!(groups(&ranks), [256, 528, 256, 528]);
        // The whole is split less often than its part would be: the part follows.
        let whole = Call { whole: Some(4096), ..ranks };
        assert_eq!(groups(&whole)[0], 8 * 8);
    }

    #[test]
    fn tiles_are_chosen_for_all_matrices_together() {
        let tile = |call: &Call| {
            let choice = call.pick(&Caps::example_nvidia(), None).unwrap();
            let defines = choice.launches.last().unwrap().shader.defines.clone();
            ["TILE_M", "TILE_N"]
                .map(|name| defines.iter().find(|(n, _)| n == name).unwrap().1.parse::<usize>().unwrap())
        };
        let alone = tile(&fused_products(&[(TensorType::F16, 1024)], 512));
        let together = tile(&fused_products(&[(TensorType::F16, 4096), (TensorType::F16, 1024)], 512));
        assert!(alone[0] * alone[1] < together[0] * together[1], "{alone:?} {together:?}");
    }
}
