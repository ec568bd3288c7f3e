//! What lies where in the scratch memory of a call, and how small products are cut over k.

use kiln_gguf::TensorType;

use super::{Call, fragment, pick, tuning};
use crate::mul_mat::Product;
use crate::operation::Path;
use crate::quantise_q8_1;
use crate::tensor::Tensor;

/// Smallest N of a tile of any path: bounds the list of tiles.
const LEAST_TILE_N: usize = 16;

/// Prepared activations are padded with zeros to whole tiles of the deepest kernel.
const PADDED: usize = 64;

/// Words of the tile list for `pairs` (token, slot) pairs: the number of tiles, then three words each.
fn tile_words(pairs: usize, experts: usize) -> usize {
    (1 + 3 * pairs.min(pairs / LEAST_TILE_N + experts)).next_multiple_of(4)
}

/// What lies where in the scratch memory: byte offsets of each part, then of the end.
#[derive(Clone, Debug)]
pub(super) struct Layout {
    /// Number of tiles, then three words each. Empty without experts.
    pub tiles: usize,
    /// (token, slot) pairs by expert.
    pub pairs: usize,
    /// The place of each pair among the activations of all tiles.
    pub slots: usize,
    /// The list alone ends here: enough for the plain path.
    pub lists_end: usize,
    /// A factor for each activation vector.
    pub factors: usize,
    /// The activations as 16-bit floats.
    pub halves: usize,
    /// The activations as they are made by what comes before the product, for paths that take floats. Other paths have other
    /// things there.
    pub floats: usize,
    /// Counters of tiles that several workgroups share, of all matrices, and their number.
    pub counters: usize,
    pub n_counters: usize,
    /// What each matrix has for itself.
    pub matrices: Vec<Places>,
    /// Bytes with which every path runs.
    pub end: usize,
    /// Bytes with which weights can be dequantised beforehand too.
    pub ample_end: usize,
}

/// Parts of the scratch memory that belong to one matrix of a call.
#[derive(Clone, Copy, Debug, Default)]
pub(super) struct Places {
    /// Counters of tiles and sums of workgroups that share one. Empty where they are not split.
    pub counters: usize,
    pub n_counters: usize,
    pub partials: usize,
    pub partials_end: usize,
    /// The same sums on the scalar path, which takes the activations as they are: there other paths have other things.
    pub plain_sums: usize,
    pub plain_sums_end: usize,
    /// The weights as F16, where they are decoded beforehand.
    pub weights: Option<usize>,
}

impl Layout {
    pub(super) fn of(call: &Call) -> Layout {
        let (product, ids) = (&call.product, call.ids.as_ref());
        let rows = prepared_columns(product, ids);
        let (tile_bytes, pair_bytes) =
            ids.map_or((0, 0), |ids| (4 * tile_words(ids.len(), product.a.shape[2]), 4 * ids.len()));
        let slots = tile_bytes + pair_bytes;
        let lists_end = slots + pair_bytes;
        let factors = lists_end.next_multiple_of(256);
        let halves = (factors + 4 * rows).next_multiple_of(256);
        // Activations of integers take the place of those of 16-bit floats.
        let integers = factors + 4 * product.b.rows() * quantise_q8_1::words(product.b.shape[0]);
        let halves_end = halves + (2 * rows * padded(product)).max(fragment::columns_bytes(product, ids));
        let counters = halves_end.max(integers).next_multiple_of(256);
        let floats = integers.next_multiple_of(256);
        // The call on activations that were made there has them for its b.
        let made = call.prologue.is_some() || call.scratch.is_some_and(|s| s.slot == product.b.slot);
        let floats_end = if made { floats + 4 * product.b.len() } else { 0 };
        let products = call.products();
        let splits: Vec<Option<Split>> =
            products.iter().map(|p| Split::of(Path::Coopmat, p, ids, call.whole)).collect();
        // The counters of all matrices lie side by side: one pass sets them to zero.
        let mut end = counters;
        let mut matrices = Vec::new();
        for (product, split) in products.iter().zip(&splits) {
            let n_counters = split.map_or(0, |_| n_counters(product));
            matrices.push(Places { counters: end, n_counters, ..Places::default() });
            end += 4 * n_counters;
        }
        let n_counters = (end - counters) / 4;
        for ((product, split), places) in products.iter().zip(&splits).zip(&mut matrices) {
            places.partials = if split.is_some() { end.next_multiple_of(256) } else { end };
            places.partials_end = places.partials + split.map_or(0, |split| split.sums_bytes(product));
            end = places.partials_end;
        }
        let mut plain_end = floats_end;
        for (product, places) in products.iter().zip(&mut matrices) {
            let Some(split) = Split::of(Path::Scalar, product, ids, call.whole) else { continue };
            places.plain_sums = plain_end.next_multiple_of(256);
            places.plain_sums_end = places.plain_sums + split.sums_bytes(product);
            plain_end = places.plain_sums_end;
        }
        let mut ample_end = end;
        for (product, places) in products.iter().zip(&mut matrices) {
            if pick::decodes_first(product, ids) {
                let weights = ample_end.next_multiple_of(256);
                places.weights = Some(weights);
                ample_end = weights + 2 * product.a.len();
            }
        }
        Layout {
            tiles: 0,
            pairs: tile_bytes,
            slots,
            lists_end,
            factors,
            halves,
            floats,
            counters,
            n_counters,
            matrices,
            end: end.max(plain_end),
            ample_end: ample_end.max(plain_end),
        }
    }
}

/// Tiles of the smallest kind: bounds the counters of a split product.
fn n_counters(product: &Product) -> usize {
    product.a.shape[1].div_ceil(LEAST_TILE_N) * product.b.shape[1].div_ceil(LEAST_TILE_N)
}

/// Prepared activations: those of b, or with experts one for each pair.
pub(super) fn prepared_columns(product: &Product, ids: Option<&Tensor>) -> usize {
    ids.map_or(product.b.rows(), Tensor::len)
}

/// Elements of a prepared activation vector.
pub(super) fn padded(product: &Product) -> usize {
    product.b.shape[0].next_multiple_of(PADDED)
}

/// How the sums of a product with few tiles are cut: workgroups that share a tile, and elements of k of each.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct Split {
    pub count: usize,
    pub chunk: usize,
}

impl Split {
    /// Tiles of 64 x 64 that keep a large GPU busy: small N wait for memory, so every core has several at once. The
    /// same for every device: so are the bits and the memory.
    const ENOUGH: usize = 528;
    /// A workgroup with fewer elements of k costs more than it saves: matrix units.
    const SHORTEST: usize = 256;
    /// The same in plain arithmetic, which is some 15 times slower.
    const SHORTEST_PLAIN: usize = 128;

    /// How the sums of a product are cut on a path. By rows, depth and activations alone, so that the bits depend on nothing else.
    pub(super) fn of(path: Path, product: &Product, ids: Option<&Tensor>, whole: Option<usize>) -> Option<Split> {
        let Product { a, b, .. } = product;
        let shortest = match path {
            Path::Scalar => Split::SHORTEST_PLAIN,
            // F32 weights do not go to matrix units.
            Path::Coopmat if a.ty != TensorType::F32 => Split::SHORTEST,
            _ => return None,
        };
        if ids.is_some() || b.shape[2] * b.shape[3] != 1 {
            return None;
        }
        let [k, m, ..] = a.shape;
        let columns = whole.unwrap_or(b.shape[1]);
        let tiles = m.div_ceil(64) * columns.div_ceil(64);
        let count = (Split::ENOUGH / tiles.max(1)).min(tuning::most_splits(path, columns)).min(k / shortest);
        // Chunks of whole tiles of every depth.
        let chunk = k.div_ceil(count.max(1)).next_multiple_of(PADDED);
        let count = k.div_ceil(chunk.max(1));
        (count > 1).then_some(Split { count, chunk })
    }

    /// Memory for the sums of all workgroups: rows are rounded up to whole vectors.
    fn sums_bytes(&self, product: &Product) -> usize {
        4 * self.count * product.b.rows() * product.a.shape[1].next_multiple_of(4)
    }
}
