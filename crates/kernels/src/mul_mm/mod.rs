//! `mul_mm`: a matrix of any format times large N, and the same with a matrix for each expert. The prompt kernel:
//! bound by arithmetic, so its paths differ in which units of the device multiply.

pub mod cases;
mod cpu;
mod fragment;
mod fuse;
mod matrix;
mod memory;
mod packed_b;
mod packed_b_cases;
mod params;
mod pick;
mod prologue;
mod reference;
pub mod search;
mod tuning;

pub use fragment::{piece, prefers_fragment};
pub use packed_b::Gated;
pub use prologue::Prologue;
pub(crate) use tuning::check as check_tuning;

use kiln_gguf::TensorType;
use kiln_gpu::{Address, Caps, Shader};

use crate::host::HostMemory;
use crate::mul_mat::{Epilogue, FusedProduct, Product};
use crate::operation::{Choice, Invalid, Launch, Operation, Path, Touches, Unsupported, Work, require};
use crate::packed_b::{MagnitudeProbe, PackedB};
use crate::tensor::Tensor;
use crate::{dequantise, quantise_q8_1};

use memory::{Layout, Split};

const NAME: &str = "mul_mm";

/// One line for the registry.
pub const SUMMARY: &str = "d = scale * a^T b + bias + residual, for any number of columns, with rms_norm or a gate before, \
                           fused products, or with an expert for each";

/// Operands of `mul_mm`.
#[derive(Clone, Debug, PartialEq)]
pub struct Call {
    /// The product. Without `ids`: `a [K, M, A2, A3]`, `b [K, N, B2, B3]`, `d [M, N, B2, B3]`. With `ids`:
    /// `a [K, M, experts]`, `b [K, used or 1, tokens]`, `d [M, used, tokens]`. `b` is F32, F16 or BF16; `d` is F32 or F16.
    pub product: Product,
    /// What follows it. With `ids` the bias is `[M, experts]`.
    pub epilogue: Epilogue,
    /// What makes the activations on their way to the product; wants scratch memory.
    pub prologue: Option<Prologue>,
    /// More matrices for the same activations, which are prepared once; not with batches or a residual. The epilogue's
    /// scale is theirs too. With `ids` they have as many experts. They do not wait for each other.
    pub others: Vec<FusedProduct>,
    /// I32 `[used, tokens]`, dense rows: the expert of each activation vector; d\[:, slot, token\] = a\[ids\[slot, token\]\] * b.
    pub ids: Option<Tensor>,
    /// Memory between launches, I32, dense, of [`Call::ample_scratch_bytes`]. Needed with `ids`; without it the fastest paths stay
    /// closed.
    pub scratch: Option<Tensor>,
    /// Whether activations keep their precision: integer products would round them to 8 bits and a scale per 32 values.
    pub exact: bool,
    /// Whether sums of 16 bits will do, where matrix units have them: they lose about `K / 10^8` of NMSE, and results beyond
    /// 65504 times the largest value of an activation vector become infinite.
    pub half_sums: bool,
    /// Activations of the batch that these are a part of, where they are: sums are cut as the whole's are, so that activations
    /// computed apart have the same bits. Small grids are split over k by N.
    pub whole: Option<usize>,
    /// A second matrix for the same activations: d = activation(a b) * (up b).
    pub gate: Option<Gated>,
    /// b in fragment order, as its producer emitted it; `b` names the floats.
    pub packed_b: Option<PackedB>,
    /// Also emits d in fragment order, with scales from `scale_hint`: for gated activations, or ones that a norm follows.
    pub emit_packed_b: Option<PackedB>,
    /// F32 `[M]`: the weights of that norm.
    pub emit_weight: Option<Tensor>,
    /// I32 `[1]`: set to 1 where emitted activations are beyond the range of an f16, or sums of squares beyond theirs. What this call or the
    /// next one computed is wrong then. No kernel sets it back.
    pub overflow: Option<Tensor>,
    /// I32 `[activations, 2, 2]`: where the squares of activations that are left are added up ([`PackedB::squares`]), and behind them the sums of the next step
    /// that does so, which are set to zero.
    pub sums: Option<Tensor>,
    /// Magnitudes of an earlier layer, from which the scales of emitted activations are predicted.
    pub scale_hint: Option<MagnitudeProbe>,
    /// Where this step writes its own magnitudes.
    pub magnitude_probe: Option<MagnitudeProbe>,
}

impl Call {
    /// Whether the call decodes its weights to F16 on a device before it multiplies them, each time it runs.
    pub fn decodes(&self, caps: &Caps) -> bool {
        let decode = |launch: &Launch| Kernel::of(launch) == Kernel::Decode;
        self.pick(caps, None).is_ok_and(|choice| choice.launches.iter().any(decode))
    }

    /// The product alone, with exact activations.
    pub fn plain(product: Product) -> Call {
        let (others, epilogue) = (Vec::new(), Epilogue::default());
        Call {
            product,
            epilogue,
            prologue: None,
            others,
            ids: None,
            scratch: None,
            exact: true,
            half_sums: false,
            whole: None,
            gate: None,
            packed_b: None,
            emit_packed_b: None,
            emit_weight: None,
            overflow: None,
            sums: None,
            scale_hint: None,
            magnitude_probe: None,
        }
    }

    /// Bytes of scratch memory that let every path run.
    pub fn scratch_bytes(&self) -> usize {
        self.layout().end
    }

    /// Bytes of scratch memory that also hold the weights as F16: with so much, large N (see `pick`) are multiplied
    /// with weights that are decoded once instead of once for every tile. The same as [`Call::scratch_bytes`] where that is
    /// no use.
    pub fn ample_scratch_bytes(&self) -> usize {
        self.layout().ample_end
    }

    /// The product of each matrix.
    fn products(&self) -> Vec<Product> {
        let others = self.others.iter().map(|&FusedProduct { a, d, .. }| Product { a, d, ..self.product });
        std::iter::once(self.product).chain(others).collect()
    }

    /// The call of each matrix alone.
    fn alone(&self) -> Vec<Call> {
        let first = Call { others: Vec::new(), ..self.clone() };
        let other = |&FusedProduct { a, d, bias }: &FusedProduct| Call {
            product: Product { a, d, ..self.product },
            epilogue: Epilogue { bias, ..self.epilogue },
            ..first.clone()
        };
        let others: Vec<Call> = self.others.iter().map(other).collect();
        std::iter::once(first).chain(others).collect()
    }

    fn check_others(&self) -> Result<(), Invalid> {
        let Product { a, b, .. } = self.product;
        let fits = self.epilogue.residual.is_none() && (self.ids.is_some() || b.shape[2..] == [1, 1]);
        require(fits, NAME, || format!("more matrices want no residual or batches; b is {b}"))?;
        for other in &self.alone()[1..] {
            let d = other.product.d;
            require(matches!(d.ty, TensorType::F32 | TensorType::F16), NAME, || format!("d is {d}, not F32 or F16"))?;
            if let Some(ids) = &self.ids {
                let (one, all) = (other.product.a.shape[2], a.shape[2]);
                require(one == all, NAME, || format!("a matrix of {one} experts beside one of {all}"))?;
                other.check_experts(ids)?;
            } else {
                other.product.check(NAME, &other.epilogue)?;
            }
        }
        Ok(())
    }

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
        let bytes = self.layout().lists_end;
        require(has >= bytes, NAME, || format!("{has} bytes of scratch memory, want {bytes}"))
    }

    fn layout(&self) -> Layout {
        Layout::of(self)
    }

    /// How workgroups of a path share tiles of the first matrix over k, given the memory.
    fn split(&self, path: Path) -> Option<Split> {
        Split::of(path, &self.product, self.ids.as_ref(), self.whole)
    }

    /// Whether the scratch memory has room for prepared activations and for sums of workgroups that share a tile.
    fn can_prepare(&self) -> bool {
        self.scratch.is_some_and(|s| s.span().1 >= self.layout().end)
    }

    /// For each matrix the call that puts its weights as F16 into the scratch memory, if this is worth it and all fit.
    fn decoded(&self) -> Vec<Option<dequantise::Call>> {
        let layout = self.layout();
        let scratch = self.scratch.filter(|s| s.span().1 >= layout.ample_end);
        let decode = |(product, places): (Product, &memory::Places)| {
            let (scratch, weights) = (scratch?, places.weights?);
            let dense = Tensor::dense(scratch.slot, TensorType::F16, product.a.shape);
            Some(dequantise::Call { src: product.a, dst: dense.at(scratch.offset + weights) })
        };
        self.products().into_iter().zip(&layout.matrices).map(decode).collect()
    }

    /// The activations as 8-bit integers in the scratch memory: the call that puts them there.
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
        Call { product: Product { a, ..self.product }, ..self.clone() }
    }

    /// The same call for some of the rows of its only matrix.
    fn of_rows(&self, [from, to]: [usize; 2]) -> Call {
        let some = |t: Tensor| t.narrow(0, from, to - from);
        let Product { a, b, d } = self.product;
        let product = Product { a: a.narrow(1, from, to - from), b, d: some(d) };
        let Epilogue { bias, residual, scale } = self.epilogue;
        let epilogue = Epilogue { bias: bias.map(some), residual: residual.map(some), scale };
        Call { product, epilogue, ..self.clone() }
    }

    /// What a launch does, and to which matrix.
    fn job(&self, choice: &Choice, launch: usize) -> Job {
        let kernel = |i: usize| Kernel::of(&choice.launches[i]);
        let decoded = if choice.path >= Path::Coopmat { self.decoded() } else { vec![None; 1 + self.others.len()] };
        let of = kernel(launch);
        let earlier = |like: &dyn Fn(Kernel) -> bool| (0..launch).filter(|&i| like(kernel(i))).count();
        // Decoding launches, products and sums are each in the order of the matrices.
        let matrix = match of {
            Kernel::Decode => {
                let mut decoding = (0..decoded.len()).filter(|&i| decoded[i].is_some());
                decoding.nth(earlier(&|k| k == Kernel::Decode)).expect("`pick` should decode what `decoded` names")
            }
            Kernel::Sums => {
                let products = (0..choice.launches.len()).map(kernel).filter(|k| k.multiplies());
                let mut shared = products.enumerate().filter(|&(_, k)| k == Kernel::PlainSplit).map(|(i, _)| i);
                shared.nth(earlier(&|k| k == Kernel::Sums)).expect("`pick` should add what it has split")
            }
            _ if of.multiplies() => earlier(&Kernel::multiplies),
            Kernel::Tail => self.others.len(),
            _ => 0,
        };
        Job { kernel: of, matrix, decode: decoded[matrix] }
    }

    /// Some bytes of the scratch memory.
    fn piece(&self, from: usize, to: usize) -> Option<Tensor> {
        let scratch = self.scratch.filter(|_| to > from)?;
        Some(Tensor::dense(scratch.slot, TensorType::I32, [(to - from) / 4, 1, 1, 1]).at(scratch.offset + from))
    }
}

/// What a launch does, and to which matrix of the call.
struct Job {
    kernel: Kernel,
    matrix: usize,
    /// How the weights of this matrix become F16, where they do.
    decode: Option<dequantise::Call>,
}

/// What a launch does.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Kernel {
    /// Sorts pairs by expert.
    List,
    /// Converts activations to 16-bit floats.
    PackActivations,
    /// The same, in the order of experts.
    PackSorted,
    /// The same, in fragment order.
    PackFragments,
    /// Materialises the prologue as floats: `rms_norm` or `glu`.
    Materialise,
    /// Rounds activations to integers: `quantise_q8_1`.
    Integers,
    /// Turns weights into F16: `dequantise`.
    Decode,
    /// Multiplies prepared activations.
    Matrix,
    /// The same in fragment order, without experts.
    Fragment,
    /// Tail launch: rows of the last partial wave, with smaller tiles.
    Tail,
    /// The same, several workgroups to a tile.
    Split,
    /// Multiplies the activations as they are.
    Plain,
    /// The same, several workgroups to a tile.
    PlainSplit,
    /// Adds the sums that those left.
    Sums,
}

impl Kernel {
    const ALL: [Kernel; 14] = [
        Kernel::List,
        Kernel::PackActivations,
        Kernel::PackSorted,
        Kernel::PackFragments,
        Kernel::Materialise,
        Kernel::Integers,
        Kernel::Decode,
        Kernel::Matrix,
        Kernel::Fragment,
        Kernel::Tail,
        Kernel::Split,
        Kernel::Plain,
        Kernel::PlainSplit,
        Kernel::Sums,
    ];

    /// What a launch was made for.
    fn of(launch: &Launch) -> Kernel {
        Kernel::ALL[usize::from(launch.tag)]
    }

    /// A launch that does this.
    fn launch(self, shader: Shader, groups: [u32; 3]) -> Launch {
        Launch::new(shader, groups).tagged(self as u8)
    }

    /// The launches of another operation that do this.
    fn all(self, choice: Choice) -> Vec<Launch> {
        choice.launches.into_iter().map(|launch| launch.tagged(self as u8)).collect()
    }

    fn multiplies(self) -> bool {
        matches!(self, Kernel::Matrix | Kernel::Fragment | Kernel::Split | Kernel::Plain | Kernel::PlainSplit)
    }
}

impl Operation for Call {
    fn name(&self) -> &'static str {
        NAME
    }

    fn reads(&self) -> Vec<Tensor> {
        let others = self.others.iter().flat_map(|s| [Some(s.a), s.bias]).flatten();
        let prologue = self.prologue.and_then(Prologue::operand);
        self.product
            .reads(&self.epilogue)
            .into_iter()
            .chain(self.ids)
            .chain(prologue)
            .chain(others)
            .chain(self.takes())
            .collect()
    }

    fn writes(&self) -> Vec<Tensor> {
        self.products().iter().map(|product| product.d).chain(self.leaves()).collect()
    }

    fn scratch(&self) -> Vec<Tensor> {
        self.scratch.into_iter().collect()
    }

    fn early(&self) -> Vec<Tensor> {
        // Which expert's weights come first is known by the ids, which others write.
        let known = self.ids.is_none();
        let weights = self.products().iter().map(|product| product.a).filter(|_| known).collect::<Vec<_>>();
        let of_norm = self.prologue.filter(|prologue| prologue.norm().is_some()).and_then(Prologue::operand);
        weights.into_iter().chain(of_norm).chain(self.gate.map(|gate| gate.up)).collect()
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
        tuning::of_all_devices().map_err(|reason| Invalid { operation: NAME, reason })?;
        self.check_before()?;
        self.check_packed_b()?;
        if !self.others.is_empty() {
            self.check_others()?;
        }
        match &self.ids {
            Some(ids) => self.check_experts(ids),
            None => self.product.check(NAME, &self.epilogue),
        }
    }

    fn pick(&self, caps: &Caps, want: Option<Path>) -> Result<Choice, Unsupported> {
        pick::pick(self, caps, want)
    }

    fn judged(&self, written: &Tensor, values: &[f64]) -> Option<Vec<Vec<f64>>> {
        self.emitted_by_column(written, values)
    }

    fn params(&self, choice: &Choice, launch: usize, at: &dyn Fn(&Tensor) -> Address) -> Vec<u8> {
        let Job { kernel, matrix, decode } = self.job(choice, launch);
        // Other operations look at the only launch they know.
        let only = Choice { path: Path::Scalar, launches: vec![choice.launches[launch].clone()] };
        if let Some((made, call)) = self.on_floats(choice.path) {
            let making = kernel == Kernel::Materialise;
            return if making { made.operation().params(&only, 0, at) } else { call.params(choice, launch, at) };
        }
        let layout = self.layout();
        let alone = &self.alone()[matrix];
        let block = |call: &Call| match choice.launches[launch].part {
            Some(rows) => call.of_rows(rows).block(kernel, (&layout, matrix), at),
            None => call.block(kernel, (&layout, matrix), at),
        };
        let integers = self.integers().filter(|_| choice.path == Path::IntDot);
        match (kernel, decode, integers) {
            (Kernel::Decode, Some(decode), _) => decode.params(&only, 0, at),
            (Kernel::Integers, _, Some(integers)) => integers.params(&only, 0, at),
            (Kernel::List | Kernel::PackActivations | Kernel::PackSorted | Kernel::PackFragments, ..) => block(alone),
            (_, Some(decode), _) => block(&alone.with_weights(decode.dst)),
            (_, _, Some(integers)) => {
                block(&Call { product: Product { b: integers.y, ..alone.product }, ..alone.clone() })
            }
            _ => block(alone),
        }
    }

    fn touches(&self, choice: &Choice, launch: usize) -> Touches {
        let Job { kernel, matrix, decode } = self.job(choice, launch);
        if let Some((made, call)) = self.on_floats(choice.path) {
            let making = kernel == Kernel::Materialise;
            return if making { made.operation().touches(choice, launch) } else { call.touches(choice, launch) };
        }
        let layout = self.layout();
        let places = layout.matrices[matrix];
        let Call { product: Product { a, b, d }, epilogue, .. } = &self.alone()[matrix];
        let lists = self.ids.and_then(|_| self.piece(0, layout.lists_end));
        let counters_end = layout.counters + 4 * layout.n_counters;
        let columns = self.piece(layout.factors, layout.counters);
        let plain_sums = self.piece(places.plain_sums, places.plain_sums_end);
        let list = |tensors: &[Option<Tensor>]| tensors.iter().flatten().copied().collect();
        let (reads, writes) = match kernel {
            Kernel::List => (list(&[self.ids]), list(&[lists])),
            Kernel::PackActivations | Kernel::PackSorted | Kernel::PackFragments => {
                let prologue = self.prologue.and_then(Prologue::operand);
                let lists = lists.filter(|_| kernel != Kernel::PackActivations);
                (list(&[Some(*b), prologue, lists]), list(&[self.piece(layout.factors, counters_end)]))
            }
            Kernel::Integers => (list(&[Some(*b)]), list(&[columns])),
            Kernel::Decode => (list(&[Some(*a)]), list(&[decode.map(|decode| decode.dst)])),
            Kernel::PlainSplit => (list(&[Some(*a), Some(*b)]), list(&[plain_sums])),
            Kernel::Sums => (list(&[plain_sums, epilogue.bias, epilogue.residual]), list(&[Some(*d)])),
            _ => {
                let columns =
                    if choice.path == Path::Scalar { Some(*b) } else { columns.filter(|_| self.packed_b.is_none()) };
                let a = decode.map_or(*a, |decode| decode.dst);
                let shared = |piece: Option<Tensor>| piece.filter(|_| kernel == Kernel::Split);
                let counters = shared(self.piece(places.counters, places.counters + 4 * places.n_counters));
                let sums = shared(self.piece(places.partials, places.partials_end));
                // Rows of results lie between each other in memory, so both parts of a matrix would seem to write the same. The first
                // says that it writes all of them, and nothing comes between the two.
                let d = Some(*d).filter(|_| kernel != Kernel::Tail);
                // Counters are set to zero before they are counted up.
                let mut reads: Vec<Tensor> =
                    list(&[Some(a), columns, epilogue.bias, epilogue.residual, lists, counters]);
                let mut writes: Vec<Tensor> = list(&[d, counters, sums]);
                // Setting the flag is the same in any order. If each of several products said that it writes it, they would wait for each other.
                let is_last = launch + 1 == choice.launches.len();
                let is_ordered = |tensor: &Tensor| is_last || Some(*tensor) != self.overflow;
                reads.extend(self.takes().into_iter().filter(is_ordered));
                writes.extend(self.leaves().into_iter().filter(is_ordered));
                (reads, writes)
            }
        };
        Touches { reads, writes }
    }

    fn reference(&self, memory: &mut HostMemory) {
        reference::reference(self, memory);
    }

    fn cpu(&self, memory: &mut HostMemory) {
        cpu::compute(self, memory);
    }

    fn work(&self) -> Work {
        match self.ids {
            None => {
                let b = (self.product.b.rows() * self.product.b.row_bytes()) as f64;
                let both = |x: Work, y: Work| Work { bytes: x.bytes + y.bytes - b, flops: x.flops + y.flops };
                self.products().iter().map(Product::work).reduce(both).unwrap_or_default()
            }
            Some(_) => {
                let bytes = |t: &Tensor| (t.rows() * t.row_bytes()) as f64;
                let mut work = Work { bytes: bytes(&self.product.b), flops: 0.0 };
                for Product { a, d, .. } in self.products() {
                    // Experts that no token chose are not read.
                    work.bytes += bytes(&a) * (d.rows() as f64 / a.shape[2] as f64).min(1.0) + bytes(&d);
                    work.flops += 2.0 * a.shape[0] as f64 * d.len() as f64;
                }
                work
            }
        }
    }

    fn parts(&self) -> Vec<crate::Call> {
        // Packed activations lie between each other.
        if self.wants_fragments() {
            return Vec::new();
        }
        // Activations (tokens) in a few runs of different lengths: an activation vector's bits depend on nothing beside it.
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
            let others = self.others.iter().map(|s| FusedProduct { d: cut(s.d), ..*s }).collect();
            let prologue = self.prologue.map(|prologue| prologue.cut(cut));
            parts.push(Call { product, epilogue, prologue, others, ids, whole, ..self.clone() }.into());
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
        let call = Call { ids: Some(ids), ..Call::plain(product) };
        let scratch = Some(t(TensorType::I32, [call.scratch_bytes() / 4, 1, 1, 1]));
        let call = Call { scratch, ..call };
        assert_eq!(call.check(), Ok(()));
        let choice = call.pick(&Caps::least(), None).unwrap();
        for launch in 0..choice.launches.len() {
            assert!(call.params(&choice, launch, &|_| Address(0)).len() <= 128);
        }
        assert!(Call { scratch: None, ..call.clone() }.check().is_err());
        let plain = Call { ids: None, ..call };
        assert!(plain.block(Kernel::Matrix, (&plain.layout(), 0), &|_| Address(0)).len() <= 128);
    }
}
