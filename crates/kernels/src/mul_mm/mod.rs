//! `mul_mm`: a matrix of any format times many columns, and the same with a matrix for each expert. The prompt kernel:
//! bound by arithmetic, so its paths differ in which units of the device multiply.

pub mod cases;
mod cpu;
mod matrix;
mod pick;
mod reference;
mod tuning;

pub(crate) use tuning::check as check_tuning;

use kiln_gguf::TensorType;
use kiln_gpu::{Address, Caps, Shader};

use crate::formats::row_strides;
use crate::host::HostMemory;
use crate::mul_mat::{Epilogue, Product};
use crate::operation::{Choice, Invalid, Launch, Operation, Path, Unsupported, Work, require};
use crate::tensor::Tensor;
use crate::{dequantise, quantise_q8_1};

const NAME: &str = "mul_mm";

/// One line for the registry.
pub const SUMMARY: &str = "d = scale * a^T b + bias + residual, for any number of columns, or with an expert for each";

/// Operands of `mul_mm`.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Call {
    /// The product. Without `ids`: `a [K, M, A2, A3]`, `b [K, N, B2, B3]`, `d [M, N, B2, B3]`. With `ids`:
    /// `a [K, M, experts]`, `b [K, used or 1, tokens]`, `d [M, used, tokens]`. `b` is F32, F16 or BF16; `d` is F32 or F16.
    pub product: Product,
    /// What follows it. With `ids` the bias is `[M, experts]`.
    pub epilogue: Epilogue,
    /// I32 `[used, tokens]`, dense rows: the expert of each column; d\[:, slot, token\] = a\[ids\[slot, token\]\] * b.
    pub ids: Option<Tensor>,
    /// Memory between launches, I32, dense, of [`scratch_bytes`]. Needed with `ids`; without it the fastest paths stay
    /// closed.
    pub scratch: Option<Tensor>,
    /// Whether columns keep their precision: integer products would round them to 8 bits and a scale per 32 values.
    pub exact: bool,
    /// Columns of the batch that these are a part of, where they are: sums are cut as the whole's are, so that columns
    /// computed apart have the same bits. Small grids are split over k by the number of columns.
    pub whole: Option<usize>,
}

impl Call {
    /// The product alone.
    pub fn plain(product: Product) -> Call {
        Call { product, epilogue: Epilogue::default(), ids: None, scratch: None, exact: false, whole: None }
    }
}

/// Fewest columns of a tile of any path: bounds the list of tiles.
const LEAST_TILE_N: usize = 16;

/// Words of the list of tiles of so many (token, slot) pairs: their number, then three words each.
fn tile_words(pairs: usize, experts: usize) -> usize {
    (1 + 3 * pairs.min(pairs / LEAST_TILE_N + experts)).next_multiple_of(4)
}

/// Prepared columns are padded with zeros to whole tiles of the deepest kernel.
const PADDED: usize = 64;

/// What lies where in the scratch memory: byte offsets of each part, then of the end.
#[derive(Clone, Copy, Debug)]
struct Layout {
    /// Number of tiles, then three words each. Empty without experts.
    tiles: usize,
    /// (token, slot) pairs by expert.
    pairs: usize,
    /// The list alone ends here: enough for the plain path.
    lists_end: usize,
    /// A factor for each column.
    factors: usize,
    /// The columns as 16-bit floats.
    halves: usize,
    /// Counters of tiles and sums of workgroups that share one. Empty where they are not split.
    counters: usize,
    partials: usize,
    end: usize,
    /// The weights as F16, where there is room.
    weights: usize,
}

impl Layout {
    fn of(product: &Product, ids: Option<&Tensor>, whole: Option<usize>) -> Layout {
        let rows = prepared_columns(product, ids);
        let (tile_bytes, pair_bytes) =
            ids.map_or((0, 0), |ids| (4 * tile_words(ids.len(), product.a.shape[2]), 4 * ids.len()));
        let lists_end = tile_bytes + pair_bytes;
        let factors = lists_end.next_multiple_of(256);
        let halves = (factors + 4 * rows).next_multiple_of(256);
        // Columns of integers take the place of those of 16-bit floats.
        let integers = factors + 4 * product.b.rows() * quantise_q8_1::words(product.b.shape[0]);
        let counters = (halves + 2 * rows * padded(product)).max(integers).next_multiple_of(256);
        let (partials, end) = match Split::of(product, ids, whole) {
            Some(split) => {
                let partials = (counters + 4 * n_counters(product)).next_multiple_of(256);
                (partials, partials + 4 * split.count * rows * product.a.shape[1].next_multiple_of(4))
            }
            None => (counters, counters),
        };
        let weights = end.next_multiple_of(256);
        Layout { tiles: 0, pairs: tile_bytes, lists_end, factors, halves, counters, partials, end, weights }
    }
}

/// Tiles of the smallest kind: bounds the counters of a split product.
fn n_counters(product: &Product) -> usize {
    product.a.shape[1].div_ceil(LEAST_TILE_N) * product.b.shape[1].div_ceil(LEAST_TILE_N)
}

/// How the sums of a product with few tiles are cut: workgroups that share a tile, and elements of k of each.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
struct Split {
    count: usize,
    chunk: usize,
}

impl Split {
    /// Tiles of 64 x 64 that keep a large GPU busy: few columns wait for memory, so every core has several at once. The
    /// same for every device: so are the bits and the memory.
    const ENOUGH: usize = 528;
    /// A workgroup with fewer elements of k costs more than it saves.
    const SHORTEST: usize = 256;

    fn of(product: &Product, ids: Option<&Tensor>, whole: Option<usize>) -> Option<Split> {
        let Product { a, b, .. } = product;
        if ids.is_some() || b.shape[2] * b.shape[3] != 1 || a.ty == TensorType::F32 {
            return None;
        }
        let [k, m, ..] = a.shape;
        let columns = whole.unwrap_or(b.shape[1]);
        let tiles = m.div_ceil(64) * columns.div_ceil(64);
        let count = (Split::ENOUGH / tiles.max(1)).min(tuning::most_splits(columns)).min(k / Split::SHORTEST);
        // Chunks of whole tiles of every depth.
        let chunk = k.div_ceil(count.max(1)).next_multiple_of(PADDED);
        let count = k.div_ceil(chunk.max(1));
        (count > 1).then_some(Split { count, chunk })
    }
}

/// Prepared columns: those of b, or with experts one for each pair.
fn prepared_columns(product: &Product, ids: Option<&Tensor>) -> usize {
    ids.map_or(product.b.rows(), Tensor::len)
}

/// Elements of a prepared column.
fn padded(product: &Product) -> usize {
    product.b.shape[0].next_multiple_of(PADDED)
}

/// Bytes of scratch memory that let every path run.
pub fn scratch_bytes(product: &Product, ids: Option<&Tensor>) -> usize {
    Layout::of(product, ids, None).end
}

/// Bytes of scratch memory that also hold the weights as F16: with so much, many columns (see `pick`) are multiplied with
/// weights that are decoded once instead of once for every tile. The same as [`scratch_bytes`] where that is no use.
pub fn ample_scratch_bytes(product: &Product, ids: Option<&Tensor>) -> usize {
    let layout = Layout::of(product, ids, None);
    if pick::decodes_first(product, ids) { layout.weights + 2 * product.a.len() } else { layout.end }
}

kiln_gpu::params! {
    struct Params {
        a: Address,
        b: Address,
        factors: Address,
        d: Address,
        bias: Address,
        residual: Address,
        a_stride: [u32; 3],
        b_stride: [u32; 3],
        d_stride: [u32; 3],
        residual_stride: [u32; 3],
        batches: [u32; 2],
        share: [u32; 2],
        k: u32,
        m: u32,
        n: u32,
        scale: f32,
    }
}

kiln_gpu::params! {
    struct ColumnParams {
        b: Address,
        factors: Address,
        halves: Address,
        stride: [u32; 3],
        shape: [u32; 3],
        pairs: Address,
        counters: Address,
        n_counters: u32,
        used: u32,
        columns: u32,
        k: u32,
        padded_k: u32,
    }
}

kiln_gpu::params! {
    struct SplitParams {
        a: Address,
        b: Address,
        factors: Address,
        d: Address,
        bias: Address,
        residual: Address,
        partials: Address,
        counters: Address,
        a_stride: [u32; 1],
        b_stride: [u32; 1],
        d_stride: [u32; 1],
        residual_stride: [u32; 1],
        k: u32,
        m: u32,
        n: u32,
        scale: f32,
        chunk: u32,
        splits: u32,
    }
}

kiln_gpu::params! {
    struct ListParams {
        ids: Address,
        tiles: Address,
        pairs: Address,
        ids_stride: u32,
        used: u32,
        pairs_in_all: u32,
    }
}

kiln_gpu::params! {
    struct ExpertParams {
        a: Address,
        b: Address,
        factors: Address,
        d: Address,
        bias: Address,
        residual: Address,
        tiles: Address,
        pairs: Address,
        a_stride: [u32; 2],
        b_stride: [u32; 2],
        d_stride: [u32; 2],
        residual_stride: [u32; 2],
        k: u32,
        m: u32,
        used: u32,
        b_slots: u32,
        pairs_in_all: u32,
        scale: f32,
    }
}

fn count(n: usize) -> u32 {
    u32::try_from(n).expect("`pick` should have refused larger numbers")
}

impl Call {
    fn check_experts(&self, ids: &Tensor) -> Result<(), Invalid> {
        let Product { a, b, d } = &self.product;
        let [used, tokens, i2, i3] = ids.shape;
        let fits = ids.ty == TensorType::I32 && i2 * i3 == 1 && ids.has_dense_rows() && ids.stride[1].is_multiple_of(4);
        require(fits, NAME, || format!("ids are {ids}, want dense rows of I32[used, tokens]"))?;
        require(a.shape[0] == b.shape[0] && a.shape[3] == 1, NAME, || format!("a is {a} but b is {b}"))?;
        let slots = b.shape[1];
        let fits = (slots == used || slots == 1) && b.shape[2..] == [tokens, 1];
        require(fits, NAME, || format!("b is {b}, want [{}, {used} or 1, {tokens}]", a.shape[0]))?;
        let want = [a.shape[1], used, tokens, 1];
        require(d.shape == want, NAME, || format!("d is {d}, want {want:?}"))?;
        let dense = [a, b, d].iter().all(|t| t.has_dense_rows());
        require(dense, NAME, || "rows must be dense".into())?;
        if let Some(bias) = self.epilogue.bias {
            let want = [a.shape[1], a.shape[2], 1, 1];
            let fits = bias.ty == TensorType::F32 && bias.is_dense() && bias.shape == want;
            require(fits, NAME, || format!("bias is {bias}, want F32{want:?}"))?;
        }
        if let Some(residual) = self.epilogue.residual {
            let fits = residual.ty == TensorType::F32 && residual.has_dense_rows() && residual.shape == d.shape;
            require(fits, NAME, || format!("residual is {residual}, want the extents of {d}"))?;
        }
        let has = self.scratch.map_or(0, |s| s.span().1);
        let bytes = Layout::of(&self.product, Some(ids), None).lists_end;
        require(has >= bytes, NAME, || format!("{has} bytes of scratch memory, want {bytes}"))
    }

    fn layout(&self) -> Layout {
        Layout::of(&self.product, self.ids.as_ref(), self.whole)
    }

    fn split(&self) -> Option<Split> {
        Split::of(&self.product, self.ids.as_ref(), self.whole)
    }

    /// Whether the scratch memory has room for prepared columns.
    fn can_prepare(&self) -> bool {
        self.scratch.is_some_and(|s| s.span().1 >= self.layout().end)
    }

    /// The weights as F16 in the scratch memory, and the call that puts them there, if this is worth it and they fit.
    fn decoded(&self) -> Option<dequantise::Call> {
        let (product, ids) = (&self.product, self.ids.as_ref());
        let scratch = self.scratch.filter(|s| s.span().1 >= ample_scratch_bytes(product, ids))?;
        let dense = Tensor::dense(scratch.slot, TensorType::F16, product.a.shape);
        let dst = dense.at(scratch.offset + self.layout().weights);
        pick::decodes_first(product, ids).then_some(dequantise::Call { src: product.a, dst })
    }

    /// The columns as 8-bit integers in the scratch memory: the call that puts them there.
    fn integers(&self) -> Option<quantise_q8_1::Call> {
        let b = self.product.b;
        let scratch = self.scratch.filter(|_| self.can_prepare())?;
        let [k, n1, n2, n3] = b.shape;
        let dense = Tensor::dense(scratch.slot, TensorType::I32, [quantise_q8_1::words(k), n1, n2, n3]);
        let y = dense.at(scratch.offset + self.layout().factors);
        Some(quantise_q8_1::Call { x: b, y })
    }

    /// The same call with other weights.
    fn with_weights(&self, a: Tensor) -> Call {
        Call { product: Product { a, ..self.product }, ..*self }
    }

    fn params_of(&self, kernel: Kernel, at: &dyn Fn(&Tensor) -> Address) -> Vec<u8> {
        let Product { a, b, d } = self.product;
        let Epilogue { bias, residual, scale } = self.epilogue;
        let layout = self.layout();
        let place = |offset: usize| self.scratch.map_or(Address::default(), |s| at(&s).offset(offset as u64));
        let optional = |t: &Option<Tensor>| t.as_ref().map_or(Address::default(), at);
        let two = |s: [u32; 3]| [s[0], s[1]];
        let padded_bytes = 2 * padded(&self.product);
        // Prepared columns lie one after the other in the order of b's rows.
        let (b_at, b_stride) = if matches!(kernel, Kernel::Matrix | Kernel::Split) {
            let [_, n, n2, _] = b.shape;
            (place(layout.halves), [1, n, n * n2].map(|rows| count(rows * padded_bytes)))
        } else {
            (at(&b), row_strides(&b))
        };
        let residual_stride = residual.as_ref().map_or([0; 3], row_strides);
        match (kernel, &self.ids) {
            (Kernel::List, ids) => ListParams {
                ids: optional(ids),
                tiles: place(layout.tiles),
                pairs: place(layout.pairs),
                ids_stride: ids.as_ref().map_or(0, |ids| row_strides(ids)[0]),
                used: ids.map_or(1, |ids| count(ids.shape[0])),
                pairs_in_all: ids.map_or(0, |ids| count(ids.len())),
            }
            .bytes(),
            (Kernel::Columns, _) => ColumnParams {
                b: at(&b),
                factors: place(layout.factors),
                halves: place(layout.halves),
                stride: row_strides(&b),
                shape: [1, 2, 3].map(|d| count(b.shape[d])),
                pairs: place(layout.pairs),
                used: self.ids.map_or(1, |ids| count(ids.shape[0])),
                counters: place(layout.counters),
                n_counters: self.split().map_or(0, |_| count(n_counters(&self.product))),
                columns: count(prepared_columns(&self.product, self.ids.as_ref())),
                k: count(b.shape[0]),
                padded_k: count(padded(&self.product)),
            }
            .bytes(),
            (_, Some(ids)) => ExpertParams {
                a: at(&a),
                b: b_at,
                factors: place(layout.factors),
                d: at(&d),
                bias: optional(&bias),
                residual: optional(&residual),
                tiles: place(layout.tiles),
                pairs: place(layout.pairs),
                a_stride: two(row_strides(&a)),
                b_stride: two(b_stride),
                d_stride: two(row_strides(&d)),
                residual_stride: two(residual_stride),
                k: count(a.shape[0]),
                m: count(a.shape[1]),
                used: count(ids.shape[0]),
                b_slots: count(b.shape[1]),
                pairs_in_all: count(ids.len()),
                scale,
            }
            .bytes(),
            (Kernel::Split, None) => {
                let split = self.split().expect("only split products have this kernel");
                SplitParams {
                    a: at(&a),
                    b: b_at,
                    factors: place(layout.factors),
                    d: at(&d),
                    bias: optional(&bias),
                    residual: optional(&residual),
                    partials: place(layout.partials),
                    counters: place(layout.counters),
                    a_stride: [row_strides(&a)[0]],
                    b_stride: [b_stride[0]],
                    d_stride: [row_strides(&d)[0]],
                    residual_stride: [residual_stride[0]],
                    k: count(a.shape[0]),
                    m: count(a.shape[1]),
                    n: count(b.shape[1]),
                    scale,
                    chunk: count(split.chunk),
                    splits: count(split.count),
                }
                .bytes()
            }
            (_, None) => Params {
                a: at(&a),
                b: b_at,
                factors: place(layout.factors),
                d: at(&d),
                bias: optional(&bias),
                residual: optional(&residual),
                a_stride: row_strides(&a),
                b_stride,
                d_stride: row_strides(&d),
                residual_stride,
                batches: [count(b.shape[2]), count(b.shape[3])],
                share: [count(b.shape[2] / a.shape[2]), count(b.shape[3] / a.shape[3])],
                k: count(a.shape[0]),
                m: count(a.shape[1]),
                n: count(b.shape[1]),
                scale,
            }
            .bytes(),
        }
    }
}

/// What a launch does.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Kernel {
    /// Sorts pairs by expert.
    List,
    /// Turns columns into 16-bit floats.
    Columns,
    /// Rounds columns to integers: `quantise_q8_1`.
    Integers,
    /// Turns weights into F16: `dequantise`.
    Decode,
    /// Multiplies prepared columns.
    Matrix,
    /// The same, several workgroups to a tile.
    Split,
    /// Multiplies the columns as they are.
    Plain,
}

impl Kernel {
    fn of(shader: &Shader) -> Kernel {
        match shader.file {
            "mul_mm/experts.comp" => Kernel::List,
            "mul_mm/columns.comp" => Kernel::Columns,
            "quantise_q8_1/quantise_q8_1.comp" => Kernel::Integers,
            "dequantise/dequantise.comp" => Kernel::Decode,
            "mul_mm/coopmat.comp" if shader.params == SplitParams::glsl() => Kernel::Split,
            "mul_mm/coopmat.comp" | "mul_mm/coopmat2.comp" => Kernel::Matrix,
            _ => Kernel::Plain,
        }
    }
}

impl Operation for Call {
    fn name(&self) -> &'static str {
        NAME
    }

    fn reads(&self) -> Vec<Tensor> {
        self.product.reads(&self.epilogue).into_iter().chain(self.ids).collect()
    }

    fn writes(&self) -> Vec<Tensor> {
        vec![self.product.d]
    }

    fn scratch(&self) -> Vec<Tensor> {
        self.scratch.into_iter().collect()
    }

    fn check(&self) -> Result<(), Invalid> {
        let Product { b, d, .. } = &self.product;
        let floats = matches!(b.ty, TensorType::F32 | TensorType::F16 | TensorType::BF16);
        require(floats, NAME, || format!("b is {b}, not of floats (F32, F16, BF16)"))?;
        require(matches!(d.ty, TensorType::F32 | TensorType::F16), NAME, || format!("d is {d}, not F32 or F16"))?;
        if let Some(s) = self.scratch {
            let fits = s.is_dense() && s.offset.is_multiple_of(16);
            require(fits, NAME, || "scratch memory must be dense and at a multiple of 16".into())?;
        }
        tuning::table().map_err(|reason| Invalid { operation: NAME, reason })?;
        match &self.ids {
            Some(ids) => self.check_experts(ids),
            None => self.product.check(NAME, &self.epilogue),
        }
    }

    fn pick(&self, caps: &Caps, want: Option<Path>) -> Result<Choice, Unsupported> {
        pick::pick(self, caps, want)
    }

    fn params(&self, choice: &Choice, launch: usize, at: &dyn Fn(&Tensor) -> Address) -> Vec<u8> {
        let file = |launch: &Launch| Kernel::of(&launch.shader);
        let decodes = choice.launches.iter().any(|launch| file(launch) == Kernel::Decode);
        let kernel = file(&choice.launches[launch]);
        if let Some(integers) = self.integers().filter(|_| choice.path == Path::IntDot) {
            return match kernel {
                Kernel::Integers => integers.params(choice, launch, at),
                Kernel::List => self.params_of(kernel, at),
                _ => Call { product: Product { b: integers.y, ..self.product }, ..*self }.params_of(kernel, at),
            };
        }
        match self.decoded().filter(|_| decodes) {
            Some(decode) if kernel == Kernel::Decode => decode.params(choice, launch, at),
            Some(decode) => self.with_weights(decode.dst).params_of(kernel, at),
            None => self.params_of(kernel, at),
        }
    }

    fn reference(&self, memory: &mut HostMemory) {
        reference::reference(self, memory);
    }

    fn cpu(&self, memory: &mut HostMemory) {
        cpu::compute(self, memory);
    }

    fn work(&self) -> Work {
        match self.ids {
            None => self.product.work(),
            Some(_) => {
                let Product { a, b, d } = &self.product;
                let bytes = |t: &Tensor| (t.rows() * t.row_bytes()) as f64;
                // Experts that nobody chose are not read.
                let read = bytes(a) * (d.rows() as f64 / a.shape[2] as f64).min(1.0);
                Work { bytes: read + bytes(b) + bytes(d), flops: 2.0 * a.shape[0] as f64 * d.len() as f64 }
            }
        }
    }

    fn parts(&self) -> Vec<crate::Call> {
        // Columns (tokens) in a few runs of different lengths: a column's bits depend on nothing beside it.
        let dim = if self.ids.is_some() { 2 } else { 1 };
        let n = self.product.d.shape[dim];
        let mut parts = Vec::new();
        let mut start = 0;
        while start < n {
            let len = (parts.len() * 7 + 1).min(n - start);
            let cut = |t: Tensor| t.narrow(dim, start, len);
            let product = Product { a: self.product.a, b: cut(self.product.b), d: cut(self.product.d) };
            let epilogue = Epilogue { residual: self.epilogue.residual.map(cut), ..self.epilogue };
            let ids = self.ids.map(|t| t.narrow(1, start, len));
            let whole = self.whole.or(Some(n)).filter(|_| self.ids.is_none());
            parts.push(Call { product, epilogue, ids, whole, ..*self }.into());
            start += len;
        }
        parts
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::tensor::Slot;

    #[test]
    fn parameters_fit_every_device() {
        let t = |ty, shape| Tensor::dense(Slot(0), ty, shape);
        let product = Product {
            a: t(TensorType::F32, [4, 5, 6, 1]),
            b: t(TensorType::F32, [4, 2, 7, 1]),
            d: t(TensorType::F32, [5, 2, 7, 1]),
        };
        let ids = t(TensorType::I32, [2, 7, 1, 1]);
        let words = scratch_bytes(&product, Some(&ids)) / 4;
        let scratch = Some(t(TensorType::I32, [words, 1, 1, 1]));
        let call = Call { ids: Some(ids), scratch, ..Call::plain(product) };
        assert_eq!(call.check(), Ok(()));
        let choice = call.pick(&Caps::least(), None).unwrap();
        for launch in 0..choice.launches.len() {
            assert!(call.params(&choice, launch, &|_| Address(0)).len() <= 128);
        }
        assert!(Call { scratch: None, ..call }.check().is_err());
        let plain = Call { ids: None, ..call };
        assert!(plain.params_of(Kernel::Matrix, &|_| Address(0)).len() <= 128);
    }
}
