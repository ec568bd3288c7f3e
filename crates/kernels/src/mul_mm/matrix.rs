//! The two paths on matrix units: which cut of the table a call takes on a device.

use kiln_gguf::TensorType;
use kiln_gpu::{Caps, Component, CoopmatShape, FlexibleShape, Scope, Shader, SubgroupRequest};

use super::params::SplitParams;
use super::pick::{PackActivations, columns, columns_each, launches, shader, shared_launches, unsupported};
use super::tuning::{TileConfig, table};
use super::{Call, Kernel, NAME};
use crate::formats;
use crate::mul_mat::Product;
use crate::operation::{Launch, Path, Unsupported, element_functions};
use crate::tensor::Tensor;

/// A device, and the rows of all matrices that it multiplies at the same time.
#[derive(Clone, Copy)]
pub(super) struct Place<'c> {
    pub caps: &'c Caps,
    pub rows: usize,
    /// Whether this is the last of these matrices, whose tiles are computed when those of the others are under way.
    pub last: bool,
    /// The cut to take instead of the table's.
    pub config: Option<TileConfig>,
}

/// The first cut that fits the device and has tiles for nearly every core, or the last that fits.
pub(super) fn config_for(
    call: &Call,
    path: Path,
    Place { caps, rows, config, .. }: Place<'_>,
    fits: impl Fn(&TileConfig) -> bool,
) -> Result<Option<TileConfig>, Unsupported> {
    if let Some(config) = config {
        return Ok(Some(config).filter(fits));
    }
    let d = &call.product.d;
    let n = columns_each(call);
    let split_k = call.split(path).map_or(1, |split| split.count);
    let products = d.rows().div_ceil(n.max(1));
    let cores = caps.cores_or_guess() as usize;
    let min_waves = |config: &&TileConfig| {
        let tiles = rows.div_ceil(config.tile[0]) * n.div_ceil(config.tile[1]) * products * split_k;
        // A few idle cores cost less than tiles of half the size: 112 tiles of 14336 rows on 132 cores are faster than 448.
        config.min_waves == 0 || (4 * tiles >= 3 * cores * config.min_waves && n > config.tile[1] / 2)
    };
    let table = table(caps).map_err(|reason| Unsupported { operation: NAME, reason })?;
    // Where the order of sums depends on the cut, parts of a batch are cut as the whole is.
    let columns = call.whole.filter(|_| path == Path::Fragment).unwrap_or(n);
    let configs = table.configs(path, call.product.a.ty, columns, caps);
    let fitting: Vec<TileConfig> =
        configs.filter(|config| !config.tail && (call.ids.is_some() || !config.experts)).filter(fits).collect();
    Ok(fitting.iter().find(min_waves).or(fitting.last()).copied())
}

/// Workgroups of a cut that a device computes at the same time; 0 where that is not known.
fn places_of(config: &TileConfig, caps: &Caps) -> usize {
    caps.cores_or_guess() as usize * config.occupancy / subgroups_of(config)
}

fn subgroups_of(config: &TileConfig) -> usize {
    config.tile[0] / config.warp[0] * (config.tile[1] / config.warp[1])
}

/// The first row of those that the last round of tiles would have, and a cut for them, where that round would leave many places empty: lower
/// tiles, as many as there are places, are done sooner. 512 activations of 14336 rows are 448 tiles of 128 x 128, and an H200 has 264 places: a
/// round of 184 tiles took as long as a full one. Where no more than every second place has a tile, each has a core for itself, is faster for
/// that, and stays as it is.
fn tail_for(
    call: &Call,
    place: Place<'_>,
    config: &TileConfig,
    fits: impl Fn(&TileConfig) -> bool,
) -> Option<(usize, TileConfig)> {
    let Product { a, d, .. } = &call.product;
    let (rows, n, places) = (a.shape[1], d.shape[1], places_of(config, place.caps));
    // The launch of the rest says nothing of what it writes, which a residual in the same memory would have to wait for.
    let plain =
        call.ids.is_none() && call.epilogue.residual.is_none() && d.shape[2..] == [1, 1] && a.ty.block_len() == 1;
    if !(plain && place.last && places > 0) || call.split(Path::Coopmat).is_some() {
        return None;
    }
    let across = n.div_ceil(config.tile[1]);
    let tiles = place.rows.div_ceil(config.tile[0]) * across;
    let left = tiles % places;
    if tiles < places || 2 * left <= places || 10 * left > 9 * places {
        return None;
    }
    let from = (rows.div_ceil(config.tile[0]).checked_sub(left.div_ceil(across))?) * config.tile[0];
    let has_room = |config: &TileConfig| {
        (rows - from).div_ceil(config.tile[0]) * n.div_ceil(config.tile[1]) <= places_of(config, place.caps)
    };
    let mut configs = table(place.caps)
        .ok()?
        .configs(Path::Coopmat, a.ty, n, place.caps)
        .filter(|config| config.tail && fits(config));
    Some((from, configs.find(has_room)?)).filter(|&(from, _)| from > 0)
}

/// The component type of a matrix of these weights, if 16 bits hold them, and whether it is F16.
pub(super) fn element_of(a: &Tensor) -> Result<(Component, bool), Unsupported> {
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

/// Shared memory of `finish.glsl`.
pub(super) fn finish_bytes(config: &TileConfig) -> usize {
    4 * config.tile[0] + 20 * config.tile[1]
}

/// Whether rows of a tensor lie at multiples of this many bytes.
pub(super) fn rows_at(t: &Tensor, bytes: usize) -> bool {
    t.offset.is_multiple_of(bytes) && (1..4).all(|i| t.shape[i] == 1 || t.stride[i].is_multiple_of(bytes))
}

/// What both paths define.
fn config_shader(
    call: &Call,
    path: Path,
    file: &'static str,
    config: &TileConfig,
    half: bool,
) -> Result<Shader, Unsupported> {
    let mut shader = shader(call, path, file)?
        .define("HALF", u32::from(half))
        .define("ELEMENT", element_name(half))
        .define("TILE_M", config.tile[0])
        .define("TILE_N", config.tile[1])
        .define("DEPTH", config.depth);
    if config.swizzle > 0 && call.ids.is_none() {
        shader = shader.define("SWIZZLE", config.swizzle);
    }
    Ok(shader)
}

fn fits_coopmat(config: &TileConfig, caps: &Caps, shape: &CoopmatShape, a: TensorType) -> bool {
    let table_bytes = formats::format(a).map_or(0, |f| f.shared_bytes);
    let subgroups = subgroups_of(config);
    // Tiles of vectors of eight, or the sums of a row of matrices of each subgroup (`FINISHED`).
    let tiles = config.stages * (config.tile[0] + config.tile[1]) * (config.depth / 8 + 1);
    let vectors = tiles.max(subgroups * config.warp[1] * shape.m as usize / 4);
    let bytes = 16 * vectors + table_bytes + finish_bytes(config);
    let threads = subgroups * caps.matrix_lanes(shape) as usize;
    let rows = config.warp[0] / shape.m as usize;
    bytes <= caps.limits.max_shared_bytes as usize
        && threads <= caps.limits.max_workgroup_invocations as usize
        && config.depth.is_multiple_of(shape.k as usize)
        // Blocks are decoded by groups of 32.
        && (!a.is_quantised() || config.depth >= 32)
        && config.warp[0].is_multiple_of(shape.m as usize)
        && config.warp[1].is_multiple_of(shape.n as usize)
        // At most as many as are written out in `coopmat.comp`.
        && (1..=8).contains(&rows)
}

pub(super) fn coopmat(call: &Call, place: Place<'_>) -> Result<Vec<Launch>, Unsupported> {
    let caps = place.caps;
    let Product { a, .. } = &call.product;
    let (element, half) = element_of(a)?;
    let half_sums = caps.coopmat_shape(element, Component::F16).filter(|_| call.half_sums && half);
    let Some(shape) = half_sums.or_else(|| caps.coopmat_shape(element, Component::F32)) else {
        return unsupported(format!("the driver lists no {element:?} matrices with F32 sums"));
    };
    // Tiles are addressed by vectors of eight elements.
    if !(shape.k.is_multiple_of(8) && shape.m.is_multiple_of(4)) {
        return unsupported(format!("matrices of {}x{}x{}", shape.m, shape.n, shape.k));
    }
    if !caps.subgroups.full {
        return unsupported("subgroups may be partly empty");
    }
    let fits = |config: &TileConfig| fits_coopmat(config, caps, shape, a.ty);
    let Some(config) = config_for(call, Path::Coopmat, place, fits)? else {
        return unsupported(format!(
            "no tile of {}x{} matrices fits {} bytes of shared memory",
            shape.m, shape.n, caps.limits.max_shared_bytes
        ));
    };
    let columns =
        columns(call, caps, half, PackActivations { sorted: false, half_sums: half_sums.is_some(), order: None })?;
    let shader = |config: &TileConfig| coopmat_shader(call, caps, shape, config);
    if let Some((from, tail)) = tail_for(call, place, &config, fits) {
        let part = |kernel: Kernel, config: &TileConfig, rows: [usize; 2]| {
            let launches = launches(&call.of_rows(rows), caps, (kernel, shader(config)?), config.tile);
            Ok(launches.into_iter().map(move |launch| launch.of_part(rows)))
        };
        let (first, tail) = (part(Kernel::Matrix, &config, [0, from])?, part(Kernel::Tail, &tail, [from, a.shape[1]])?);
        return Ok(std::iter::once(columns).chain(first).chain(tail).collect());
    }
    let (kernel, split_k) = match call.split(Path::Coopmat) {
        Some(split) => {
            let shader = Shader { params: SplitParams::glsl(), ..shader(&config)?.define("SPLIT", 1) };
            ((Kernel::Split, shader), split.count)
        }
        None => ((Kernel::Matrix, shader(&config)?), 1),
    };
    let mut launches = shared_launches(call, caps, kernel, config.tile, split_k);
    launches.insert(launches.len() - 1, columns);
    Ok(launches)
}

/// `coopmat.comp` for a cut.
fn coopmat_shader(call: &Call, caps: &Caps, shape: &CoopmatShape, config: &TileConfig) -> Result<Shader, Unsupported> {
    let Product { a, d, .. } = &call.product;
    let (k, lanes) = (a.shape[0], caps.matrix_lanes(shape));
    let (_, store) = element_functions(NAME, d.ty)?;
    let half = shape.a == Component::F16;
    Ok(config_shader(call, Path::Coopmat, "mul_mm/coopmat.comp", config, half)?
        .define("VECTORS_A", u32::from(formats::is_aligned(a) && k.is_multiple_of(4)))
        .define("WIDE_A", u32::from(a.ty.block_len() == 1 && k.is_multiple_of(8) && rows_at(a, 16)))
        .define("VECTORS_D", u32::from(rows_at(d, 4 * d.ty.block_bytes())))
        .define("PUT4_D", store.replace("store", "put4"))
        .define("WARP_M", config.warp[0])
        .define("WARP_N", config.warp[1])
        .define("HALF_SUMS", u32::from(shape.c == Component::F16))
        .define("HALF_SCALE", u32::from(caps.float16 && formats::has_half_scales(a.ty)))
        .define("STAGES", config.stages)
        .define("PREFETCH", config.prefetch)
        // A software GPU takes long to compile every product of a tile.
        .define("STEP_LOOP", if caps.is_cpu { "[[dont_unroll]]" } else { "[[unroll]]" })
        .define("MM", shape.m)
        .define("MN", shape.n)
        .define("MK", shape.k)
        .define("SG", lanes)
        .subgroup(if lanes == caps.subgroups.size { SubgroupRequest::Full } else { SubgroupRequest::Size(lanes) }))
}

pub(super) fn coopmat2(call: &Call, place: Place<'_>) -> Result<Vec<Launch>, Unsupported> {
    let caps = place.caps;
    let Product { a, d, .. } = &call.product;
    let has = &caps.coopmat2;
    if !has.is_complete() {
        return unsupported("the driver has not all of NV cooperative matrices 2");
    }
    let (element, half) = element_of(a)?;
    let format = formats::format(a.ty).map_or(0, |f| f.shared_bytes);
    // Layouts count whole blocks from row to row.
    if (1..4).any(|i| a.shape[i] > 1 && !a.stride[i].is_multiple_of(a.ty.block_bytes())) {
        return unsupported(format!("strides {:?} of {a} split blocks", a.stride));
    }
    let granularity = |config: &TileConfig| {
        let fits = |s: &&FlexibleShape| {
            let types = s.a == element && s.b == element && s.c == Component::F32 && s.result == Component::F32;
            let sizes = config.tile[0].is_multiple_of(s.m as usize)
                && config.tile[1].is_multiple_of(s.n as usize)
                && config.depth.is_multiple_of(s.k as usize);
            types && !s.saturating && s.scope == Scope::Workgroup && s.workgroup == config.threads && sizes
        };
        has.shapes.iter().find(fits)
    };
    let room = (caps.limits.max_shared_bytes as usize).saturating_sub(has.reserved_shared_bytes as usize + format);
    let fits = |config: &TileConfig| granularity(config).is_some() && finish_bytes(config) <= room;
    let chosen = config_for(call, Path::Coopmat2, place, fits)?;
    let Some((config, shape)) = chosen.and_then(|config| granularity(&config).map(|shape| (config, shape))) else {
        return unsupported(format!(
            "the driver lists no {element:?} tile for a workgroup with F32 sums, or {format} bytes of tables do not fit"
        ));
    };
    let aligned = |t: &Tensor| rows_at(t, 8 * t.ty.block_bytes().max(2));
    let shader = config_shader(call, Path::Coopmat2, "mul_mm/coopmat2.comp", &config, half)?
        .define("D_ELEMENT", if d.ty == TensorType::F16 { "float16_t" } else { "float" })
        .define("D_BYTES", d.ty.block_bytes())
        .define("STORE_TENSOR", u32::from(call.ids.is_none()))
        .define("ALIGNED_A", u32::from(a.ty.block_len() == 1 && aligned(a)))
        .define("ALIGNED_D", u32::from(aligned(d)))
        .define("WG", config.threads)
        .define("UNROLL", config.unroll)
        .define("LEAST_N", shape.n);
    let mut launches = launches(call, caps, (Kernel::Matrix, shader), config.tile);
    launches.insert(
        launches.len() - 1,
        columns(call, caps, half, PackActivations { sorted: true, half_sums: false, order: None })?,
    );
    Ok(launches)
}
