//! Fragment path: lanes decode weights straight into register fragments of cooperative matrices, so that skinny GEMMs run at the speed of
//! memory. Needs a known fragment layout.

use kiln_gguf::TensorType;
use kiln_gpu::{Caps, Component, SubgroupRequest};

use super::matrix::{Place, config_for, element_of, finish_bytes, rows_at};
use super::params::LaneParams;
use super::pick::{PackActivations, columns, launches, shader, unsupported};
use super::tuning::{TileConfig, table};
use super::{Call, Kernel, NAME};
use crate::formats;
use crate::fragment_layout;
use crate::mul_mat::Product;
use crate::operation::{Launch, Path, Unsupported, element_functions};
use crate::tensor::Tensor;

/// Largest N that the path is for: from here on tiles of other paths waste little.
const MAX_FRAGMENT_N: usize = 128;
/// Elements of a row that one lane decodes together: rows are whole pieces.
const PIECE: usize = 64;
/// Prepared activations are padded with zeros to whole chunks of the deepest matrices.
const CHUNK: usize = 4 * PIECE;
/// Activations of the widest matrices.
const WIDEST: usize = 16;
/// Subgroups that keep a large GPU busy. The same for every device.
const ENOUGH: usize = 2112;

/// The formats that software GPUs have here. They only prove the path, and take a second to compile it for each.
const ON_SOFTWARE: [TensorType; 10] = {
    use TensorType::*;
    [F16, Q4_0, Q8_0, Q4_K, Q5_K, Q6_K, IQ4_XS, MXFP4, NVFP4, Q6_Kx8]
};

/// Elements of a prepared activation vector.
pub(super) fn padded(product: &Product) -> usize {
    product.b.shape[0].next_multiple_of(CHUNK)
}

/// Bytes of the activations that a call has prepared for this path, on whatever device; 0 where it is not for the path.
pub(super) fn columns_bytes(product: &Product, ids: Option<&Tensor>) -> usize {
    if refusal(product, ids).is_some() {
        return 0;
    }
    let columns = match ids {
        // Tiles of experts are not full: each has room for all the activations that it could have.
        Some(ids) => {
            let (wide, experts) = (expert_tile(ids, product.a.shape[2]), product.a.shape[2]);
            wide * ids.len().min(ids.len() / wide + experts)
        }
        None => product.b.rows().next_multiple_of(WIDEST),
    };
    2 * columns * padded(product)
}

/// Activations of a tile of one expert, by what an expert gets on the average.
fn expert_tile(ids: &Tensor, experts: usize) -> usize {
    let each = ids.len().div_ceil(experts.max(1));
    each.next_multiple_of(WIDEST).clamp(WIDEST, 4 * WIDEST)
}

/// Why a product is not for this path, whatever the device.
fn refusal(product: &Product, ids: Option<&Tensor>) -> Option<String> {
    let Product { a, b, .. } = product;
    let [k, n, ..] = b.shape;
    let columns = match ids {
        Some(ids) => ids.len().div_ceil(a.shape[2].max(1)),
        None if b.shape[2] * b.shape[3] != 1 => return Some("batches go to other paths".into()),
        None => n,
    };
    if columns > MAX_FRAGMENT_N {
        return Some(format!("{columns} columns, at most {MAX_FRAGMENT_N}"));
    }
    if !k.is_multiple_of(PIECE) || k == 0 {
        return Some(format!("rows of {k} elements, want whole pieces of {PIECE}"));
    }
    if a.ty.block_len() == 1 && !rows_at(a, 16) {
        return Some(format!("rows of {a} do not lie at multiples of 16 bytes"));
    }
    None
}

/// Whether a product without experts takes this path on a device.
pub fn prefers_fragment(product: &Product, caps: &Caps) -> bool {
    let Product { a, b, .. } = product;
    let element = element_of(a).is_ok_and(|(_, half)| half || caps.bf16_shares_layout);
    let preferred = table(caps).is_ok_and(|table| table.preferred(a.ty, b.shape[1]).0 == Path::Fragment);
    element && preferred && caps.fragment_layout.is_some() && caps.float16 && refusal(product, None).is_none()
}

/// Elements that lie together in a row and that one lane gets, which the order of prepared activations depends on: as many as keep
/// what lanes load at once together.
pub fn piece(ty: TensorType) -> usize {
    if ty.block_len() == 1 { 8 } else { PIECE }
}

/// The middle of the codes of formats with a minimum.
fn middle(ty: TensorType) -> usize {
    match ty.base() {
        TensorType::Q2_K => 2,
        TensorType::Q5_1 | TensorType::Q5_K => 16,
        _ => 8,
    }
}

/// Subgroups that share the k of a row of matrices, which have `side` rows and elements of k. By rows and k of the product and by the cut,
/// which is that of the whole batch, so that activations computed apart have the same bits. Without `cores` (experts, whose batches have no
/// whole) by rows and k alone.
fn split_k(config: &TileConfig, product: &Product, side: usize, cores: Option<usize>) -> usize {
    let [k, m, ..] = product.a.shape;
    let chunks = k.div_ceil(side / 4 * PIECE).max(1);
    let floor = |n: usize| 1 << n.max(1).ilog2();
    let [least, most] = config.split_k;
    let by_rows = floor(ENOUGH / m.div_ceil(side).max(1)).clamp(least, most).min(floor(chunks));
    let Some(cores) = cores else { return floor(by_rows) };
    if config.occupancy == 0 {
        return by_rows;
    }
    // Every subgroup takes about the same time for a chunk, whatever runs next to it. So what counts is how many chunks come one after the other: those
    // of a subgroup, in this many rounds as workgroups need which do not find a place at once.
    // A tile that is lower than a matrix is refused later.
    let (groups, rows) = (m.div_ceil(config.tile[0]), (config.tile[0] / side).max(1));
    let rounds = |split_k: usize| groups.div_ceil(cores * (config.occupancy / (split_k * rows)).max(1));
    (least..=most).min_by_key(|&split_k| rounds(split_k) * chunks.div_ceil(split_k)).unwrap_or(least).min(chunks)
}

pub(super) fn fragment(call: &Call, place: Place<'_>) -> Result<Vec<Launch>, Unsupported> {
    let caps = place.caps;
    let Product { a, d, .. } = &call.product;
    let (element, half) = element_of(a)?;
    let Some(order) = caps.fragment_layout else {
        return unsupported("how lanes hold fragments is not known, or not in an order that kernels know");
    };
    let [rows, lanes, deep] = fragment_layout::extents(order);
    let [m, n, k] = [rows, rows, deep];
    let listed = caps.coopmat_shape(element, Component::F32);
    if listed.is_none_or(|s| [s.m, s.n, s.k] != [m, n, k]) || caps.subgroups.size != lanes || !caps.subgroups.full {
        return unsupported(format!("no {element:?} matrices of {m}x{n}x{k} in {lanes} lanes"));
    }
    if !(caps.float16 && (half || caps.bf16_shares_layout)) {
        return unsupported(format!(
            "{element:?} matrices do not have the fragment layout of those of F16, or there are none"
        ));
    }
    let lists = if call.ids.is_some() { 16 * a.shape[2] } else { 0 };
    if lists > caps.limits.max_shared_bytes as usize {
        return unsupported(format!("{} experts want {lists} bytes of shared memory for their list", a.shape[2]));
    }
    if caps.is_cpu && !ON_SOFTWARE.contains(&a.ty) {
        return unsupported(format!("{} on software GPUs", a.ty));
    }
    if let Some(reason) = refusal(&call.product, call.ids.as_ref()) {
        return unsupported(reason);
    }
    if call.packed_b.is_some_and(|packed_b| packed_b.piece != piece(a.ty)) {
        return unsupported(format!("packed activations in other pieces than those of {}", a.ty));
    }
    if call.wants_fragments() && !half {
        return unsupported("packed activations and gates beside weights of BF16");
    }
    // How many tiles experts have is not known here.
    let cores = call.ids.is_none().then(|| caps.cores_or_guess() as usize);
    let split_k_of = |config: &TileConfig| split_k(config, &call.product, k as usize, cores);
    let tables = formats::format(a.ty).map_or(0, |f| f.shared_bytes);
    let fits = |config: &TileConfig| {
        let subgroups = split_k_of(config) * config.tile[0] / m as usize;
        let bytes = 4 * subgroups * (m * n) as usize
            + tables
            + finish_bytes(config)
            + call.gate_bytes(config.tile[1], m as usize);
        bytes <= caps.limits.max_shared_bytes as usize
            && subgroups * lanes as usize <= caps.limits.max_workgroup_invocations as usize
            && config.tile[0].is_multiple_of(m as usize)
            && config.tile[1].is_multiple_of(n as usize)
    };
    let Some(config) = config_for(call, Path::Fragment, place, fits)? else {
        return unsupported(format!(
            "no tile of {m}x{n} matrices fits {} bytes of shared memory",
            caps.limits.max_shared_bytes
        ));
    };
    let column_tiles = match &call.ids {
        Some(ids) => expert_tile(ids, a.shape[2]) / n as usize,
        None => d.shape[1].div_ceil(n as usize).clamp(1, config.tile[1] / n as usize),
    };
    let (_, store) = element_functions(NAME, d.ty)?;
    let mut shader = shader(call, Path::Fragment, "mul_mm/fragment.comp")?
        .define("HALF", u32::from(half))
        .define("FRAGMENT_LAYOUT", fragment_layout::number(order))
        .define("PIECE", piece(a.ty))
        .define("ROW_TILES", config.tile[0] / m as usize)
        .define("COLUMN_TILES", column_tiles)
        .define("SPLIT_K", split_k_of(&config))
        .define("PREFETCH", config.prefetch)
        .define("OFFSETS", u32::from(config.offsets))
        // A software GPU takes long to compile every step.
        .define("STEP_LOOP", if caps.is_cpu { "[[dont_unroll]]" } else { "[[unroll]]" })
        .define("SLOTTED", u32::from(call.ids.is_some()))
        .define("A_MIDDLE", middle(a.ty))
        .define("VECTORS_D", u32::from(rows_at(d, 4 * d.ty.block_bytes())))
        .define("PUT4_D", store.replace("store", "put4"))
        .subgroup(SubgroupRequest::Full);
    let kernel = if call.ids.is_some() { Kernel::Matrix } else { Kernel::Fragment };
    if kernel == Kernel::Fragment {
        shader = call.define_packed_b(shader.define("FLAT", 1), caps, [config.tile[0], m as usize])?;
        shader.params = LaneParams::glsl();
    }
    let mut launches = launches(call, caps, (kernel, shader), [config.tile[0], column_tiles * n as usize]);
    if call.packed_b.is_some() {
        return Ok(launches);
    }
    if call.ids.is_some() {
        // The list comes first.
        launches[0].shader = launches[0].shader.clone().define("SLOTS", 1);
    }
    let prepared = PackActivations { sorted: false, half_sums: false, order: Some((order, piece(a.ty))) };
    launches.insert(launches.len() - 1, columns(call, caps, half, prepared)?);
    Ok(launches)
}

#[cfg(test)]
mod tests {
    use super::super::Kernel::{self, Fragment, List, Matrix, PackFragments};
    use super::*;
    use crate::mul_mat::FusedProduct;
    use crate::operation::Operation;
    use crate::tensor::Slot;

    fn dense(ty: TensorType, shape: [usize; 4]) -> Tensor {
        Tensor::dense(Slot(0), ty, shape)
    }

    fn call(ty: TensorType, [k, m, n]: [usize; 3]) -> Call {
        let (a, b) = (dense(ty, [k, m, 1, 1]), dense(TensorType::F32, [k, n, 1, 1]));
        Call::plain(Product { a, b, d: dense(TensorType::F32, [m, n, 1, 1]) })
    }

    fn with_scratch(call: Call) -> Call {
        let words = call.ample_scratch_bytes().div_ceil(4);
        Call { scratch: Some(Tensor::dense(Slot(1), TensorType::I32, [words, 1, 1, 1])), ..call }
    }

    fn path(call: Call, caps: &Caps) -> Path {
        with_scratch(call).pick(caps, None).unwrap().path
    }

    #[test]
    fn few_columns_of_blocks_are_for_lanes_and_what_is_not_goes_to_tiles() {
        use TensorType::{BF16, F16, Q4_K, Q6_Kx8};
        let caps = Caps::example_nvidia();
        for n in [2, 16, 64] {
            assert_eq!(path(call(Q4_K, [4096, 1024, n]), &caps), Path::Fragment);
            assert_eq!(path(call(Q6_Kx8, [4096, 1024, n]), &caps), Path::Fragment);
            for ty in [F16, BF16] {
                assert_eq!(path(call(ty, [4096, 1024, n]), &caps), Path::Fragment);
            }
        }
        // Only where matrices of bfloat16 lie as others do.
        let other = Caps { bf16_shares_layout: false, ..caps.clone() };
        assert_eq!([F16, BF16].map(|ty| path(call(ty, [4096, 1024, 16]), &other)), [Path::Fragment, Path::Coopmat]);
        assert_eq!(path(call(Q6_Kx8, [4096, 1024, 97]), &caps), Path::Coopmat);
        assert_eq!(path(call(TensorType::Q4_0, [4096 + 32, 1024, 16]), &caps), Path::Coopmat, "half a piece");
        let unknown = Caps { fragment_layout: None, ..caps };
        assert_eq!(path(call(Q4_K, [4096, 1024, 16]), &unknown), Path::Coopmat);
    }

    #[test]
    fn siblings_share_their_columns_and_experts_get_a_list_first() {
        use TensorType::{I32, Q4_K, Q6_K};
        let caps = Caps::example_nvidia();
        let kernels = |call: Call| -> Vec<Kernel> {
            let choice = with_scratch(call).pick(&caps, Some(Path::Fragment)).unwrap();
            choice.launches.iter().map(Kernel::of).collect()
        };
        let first = call(Q4_K, [4096, 4096, 16]);
        let other = call(Q6_K, [4096, 1024, 16]).product;
        let others = vec![FusedProduct { a: other.a, d: other.d, bias: None }];
        assert_eq!(kernels(Call { others, ..first }), [PackFragments, Fragment, Fragment]);
        let (a, b) = (dense(Q4_K, [2048, 768, 128, 1]), dense(TensorType::F32, [2048, 1, 8, 1]));
        let product = Product { a, b, d: dense(TensorType::F32, [768, 8, 8, 1]) };
        assert_eq!(
            kernels(Call { ids: Some(dense(I32, [8, 8, 1, 1])), ..Call::plain(product) }),
            [List, PackFragments, Matrix]
        );
    }

    #[test]
    fn subgroups_share_a_tile_by_rows_and_depth_alone() {
        let config = |text: &str| super::super::tuning::config_of(Path::Fragment, text).unwrap();
        let of = |k, m, n| {
            split_k(&config("tile=16x64 split_k=4x16"), &call(TensorType::Q4_K, [k, m, n]).product, 16, Some(132))
        };
        assert_eq!([of(4096, 14336, 2), of(4096, 4096, 2), of(4096, 1024, 2), of(512, 1024, 2)], [4, 8, 16, 2]);
        assert_eq!(of(4096, 4096, 64), of(4096, 4096, 2));
        // Where the line says how many have room on a core, as many as leave the fewest chunks one after the other.
        let occupancy = config("tile=16x64 split_k=1x12 occupancy=25");
        let of = |k, m, cores| split_k(&occupancy, &call(TensorType::Q4_K, [k, m, 2]).product, 16, cores);
        assert_eq!([of(4096, 14336, Some(132)), of(14336, 4096, Some(132)), of(4096, 1024, Some(132))], [3, 12, 8]);
        assert_eq!([of(256, 1024, Some(132)), of(4096, 14336, None)], [1, 2]);
    }
}
