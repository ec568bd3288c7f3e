//! `flash_attention`: attention of queries over a cache of keys and values, without the matrix of scores in memory.
//! The contract is here; what each path launches is in `plan.rs`, the definition in `reference.rs`.

pub mod cases;
mod cpu;
mod cpu_one;
mod emit_packed_b;
mod fragment;
mod fragment_prefill;
mod kv_append;
mod kv_append_cases;
mod matrices;
mod plan;
mod reference;
mod rounding;
mod threads;
mod tuning;

pub use kv_append::KvAppend;
pub(crate) use tuning::check as check_tuning;

use kiln_gguf::TensorType;
use kiln_gpu::{Address, Caps};

use crate::host::HostMemory;
use crate::operation::{Choice, Invalid, Operation, Path, Unsupported, Work, require};
use crate::packed_b::PackedB;
use crate::rounded::Rounding;
use crate::tensor::Tensor;

const NAME: &str = "flash_attention";

/// One line for the registry.
pub const SUMMARY: &str =
    "softmax(scale * Q K^T + mask) V over a cache, with GQA, pages, ALiBi, biases of distances, softcap and sinks";

/// Which keys a query sees.
#[derive(Clone, Copy, Debug, PartialEq)]
pub enum Mask {
    /// All of them.
    None,
    /// F16 `[keys, tokens or more, m2, m3]`, dense rows, added to the scores: head h of batch b uses `(h % m2, b % m3)`.
    /// Minus infinity hides a key; its rows of K and V are read all the same and must hold finite numbers.
    Explicit(Tensor),
    /// Key j, whose position is j, is seen by the query at position p where `j <= p`, `j < length` and, with a window,
    /// j lies in it: `p - j < window`, or in chunks `j / window = p / window`. Rows of the cache from `length` on are never read. With ALiBi the score gets `slope * (j - p)`.
    /// With `both`, keys after the query are seen like those before it: `0 <= p`, `j < length` and `|p - j| < window`, and ALiBi
    /// gives `-slope * |j - p|`.
    Causal {
        /// I32, one for each token of each batch (`[tokens * batch]`): the absolute position of each query. With a second column (`[tokens * batch,
        /// 2]`) that says which key is the last that each query sees, at its position or behind it: `j <= last` takes the place of `j <= p`.
        positions: Tensor,
        /// I32 `[1]`, or one for each sequence: the number of valid keys, read on the device.
        length: Tensor,
        /// Which of the keys before it a query sees.
        window: Option<Window>,
        /// Whether keys after the query are seen, too.
        both: bool,
    },
}

/// What a query sees of the keys before it.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Window {
    /// Those of the last positions, its own included; how many.
    Last(usize),
    /// Those of its chunk: positions are cut into chunks of this size.
    Chunk(usize),
}

impl Window {
    /// Most keys a query sees up to itself.
    pub fn size(self) -> usize {
        let (Window::Last(size) | Window::Chunk(size)) = self;
        size
    }

    /// The first position that a query at `p` sees.
    pub(crate) fn first(self, p: i64) -> i64 {
        match self {
            Window::Last(size) => (p + 1 - size as i64).max(0),
            Window::Chunk(size) => p.max(0) / size as i64 * size as i64,
        }
    }
}

/// Where the rows of a cache lie that is cut into pages: key j of sequence s is row
/// `table[j / size, s] * size + j % size` of K and V, which then have batch extent 1.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Pages {
    /// I32 `[pages of a sequence, sequences]`. Entries of pages past a sequence's length are never read.
    pub table: Tensor,
    /// Rows of a page.
    pub size: usize,
}

/// Splits over keys, for few queries over many keys: workgroups take a run of keys each, and their partial results are
/// added up in the order of the runs.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Split {
    /// Most runs of the keys of a sequence; [`Call::good_splits`] knows a good number.
    pub count: usize,
    /// This many of them may be short, 1 to `count`, with 128 keys each; a sequence is cut into more only if it has more keys than others.
    pub short: usize,
    /// F32, dense, at least [`Call::scratch_bytes`]: the partial results.
    pub scratch: Tensor,
    /// I32, dense, at least [`Call::counters`]: zero before the call and zero again after it. The last workgroup to
    /// finish then adds the partial results up; without counters a second dispatch does.
    pub counters: Option<Tensor>,
}

/// Operands of `flash_attention`.
///
/// Sequences of different lengths go into one call in two ways. For decode, the batch is the sequence: q
/// `[head, 1, heads, sequences]`. For ragged prefill, batch is 1 and `sequences` names the sequence of each token.
/// Either way sequence s has its own entry in `length` and its own column in the page table, or without pages its own
/// batch of K and V.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Call {
    /// Queries, F32 `[HSK, tokens, heads, batch]`, dense rows.
    pub q: Tensor,
    /// Keys `[HSK, rows, kv_heads, kv_batch]`, dense rows; heads and batch are multiples of kv_heads and kv_batch.
    pub k: Tensor,
    /// Values `[HSV, rows, kv_heads, kv_batch]`, dense rows; may be a view of `k`.
    pub v: Tensor,
    /// Result, F32 `[HSV, heads, tokens, batch]`, dense. A query that sees no key gets zeros.
    pub out: Tensor,
    /// Which keys a query sees.
    pub mask: Mask,
    /// F32 `[heads]`: one more logit per head, which takes part in maximum and sum but has no value.
    pub sinks: Option<Tensor>,
    /// F32 `[heads, 2 * reach + 1]`, dense: what the score of a key gets by its distance from the query, after scale and softcap. Key j
    /// of the query at position p has row `j - p + reach`; those further away have the first row or the last. Needs a causal mask,
    /// and neither ALiBi nor sinks.
    pub distances: Option<Tensor>,
    /// Factor of the scores.
    pub scale: f32,
    /// Steepness of ALiBi; 0 for none. Needs a mask.
    pub max_bias: f32,
    /// With c > 0, scores become `c * tanh(score / c)` before the mask is added; 0 for none.
    pub logit_softcap: f32,
    /// The page table; needs a causal mask.
    pub pages: Option<Pages>,
    /// I32 `[tokens]`: the sequence of each token, for batch 1 and a causal mask; without it the batch is the sequence.
    pub sequences: Option<Tensor>,
    /// Splits over keys.
    pub split: Option<Split>,
    /// Fused KV append: applies RoPE to Q and K and writes this token's K and V to the caches before it attends.
    pub kv_append: Option<KvAppend>,
    /// How the result of one token is left rounded for the product that reads it.
    pub rounding: Option<Rounding>,
    /// Also emits the results of single tokens in fragment order for the GEMM that reads them.
    pub emit_packed_b: Option<PackedB>,
    /// Batch-invariant: same kernel and reduction order for any batch size.
    pub batch_invariant: bool,
    /// Cascade: neighbouring sequences share prefix pages, and paths that can read these once for several sequences.
    pub shares: bool,
}

/// Keys of the shortest run that is worth a workgroup of its own.
const SHORTEST_RUN: usize = 128;

/// Keys of the shortest run where there are enough workgroups without splits, and all that a split is for is a sequence much longer
/// than others.
const LONG_RUN: usize = 1024;
/// Workgroups that keep a large GPU busy: a sequence is cut where it has more keys than each of them would have of all.
const GOOD_GROUPS: usize = 256;
/// Most workgroups of a call with long runs: those without keys leave at once, but each takes its moment.
const MOST_WORKGROUPS: usize = 2048;

/// Rows of the matrices of single tokens.
const MATRIX_ROWS: usize = 16;

/// Rows that a team of threads serves at once: a whole subgroup for a wide head has more keys on their way with fewer of them.
fn team_rows(head: usize) -> usize {
    if head > 128 { 2 } else { 4 }
}

/// Most rows that teams serve: more fill a matrix, those of wide heads keep enough threads at work (`docs/ladder/flash_attention.md`).
fn few_rows(head: usize) -> usize {
    if head > 128 { 16 } else { 8 }
}

/// A good number of splits for this many rows (tokens times heads that share a kv head) of this many kv heads, on a device with this
/// many cores: two workgroups for each of them, runs of at least 128 keys; 1 where the rows alone are enough work.
pub fn good_splits([rows, kv_heads]: [usize; 2], head: usize, keys: usize, cores: usize) -> usize {
    (2 * cores / (kv_heads * row_tiles(rows, head)).max(1)).min(keys / SHORTEST_RUN).clamp(1, 256)
}

/// Tiles of the rows of a kv head: matrices take 64 at once.
fn row_tiles(rows: usize, head: usize) -> usize {
    rows.div_ceil(if rows <= few_rows(head) { team_rows(head) } else { 64 })
}

impl Call {
    /// A call that sees every key, without any extras.
    pub fn plain(q: Tensor, k: Tensor, v: Tensor, out: Tensor, scale: f32) -> Call {
        Call {
            q,
            k,
            v,
            out,
            mask: Mask::None,
            sinks: None,
            distances: None,
            scale,
            max_bias: 0.0,
            logit_softcap: 0.0,
            pages: None,
            sequences: None,
            split: None,
            kv_append: None,
            rounding: None,
            emit_packed_b: None,
            batch_invariant: false,
            shares: false,
        }
    }

    /// Bytes of scratch for this many splits: two floats and a row of values for each row of the result and each split.
    pub fn scratch_bytes(&self, splits: usize) -> usize {
        let partials = self.out.rows() * splits;
        (2 * partials).next_multiple_of(4) * 4 + partials * self.out.shape[0] * 4
    }

    /// Number of counters.
    pub fn counters(&self) -> usize {
        self.out.rows()
    }

    /// A good number of short splits for a device with this many cores ([`good_splits`]).
    pub fn good_splits(&self, cores: Option<u32>) -> usize {
        let ([rows, kv_heads], head) = self.rows_and_head();
        good_splits([rows, kv_heads], head, self.keys(), cores.unwrap_or(16) as usize)
    }

    /// Splits for several sequences, given those that may be short: the keys of a long one are shared out, too, where others are short.
    pub fn most_splits(&self, short: usize) -> usize {
        let ([rows, kv_heads], head) = self.rows_and_head();
        let room = MOST_WORKGROUPS / (kv_heads * row_tiles(rows, head)).max(1);
        if self.q.shape[3] > 1 { short.max(room.min(self.keys() / LONG_RUN)).min(256) } else { short }
    }

    /// Rows of a kv head, kv heads of all sequences, and elements of a head. Sequences that share pages are served together.
    fn rows_and_head(&self) -> ([usize; 2], usize) {
        let [_, tokens, heads, batch] = self.q.shape;
        let kv_heads = self.k.shape[2];
        let ratio = heads / kv_heads;
        let batches = if self.shares { batch.div_ceil((MATRIX_ROWS / ratio).max(1)) } else { batch };
        ([tokens * ratio, kv_heads * batches], self.k.shape[0].max(self.v.shape[0]))
    }

    /// Whether some queries see keys behind them, each up to one of its own.
    pub fn sees_ahead(&self) -> bool {
        matches!(self.mask, Mask::Causal { positions, .. } if positions.shape[1] == 2)
    }

    /// Most keys a query can see.
    pub fn keys(&self) -> usize {
        self.pages.map_or(self.k.shape[1], |p| p.table.shape[0] * p.size)
    }

    /// Number of sequences: of the page table, of K's batch for ragged tokens, else of the batch.
    fn sequence_count(&self) -> usize {
        match (self.sequences, self.pages) {
            (_, Some(pages)) => pages.table.shape[1],
            (Some(_), None) => self.k.shape[3],
            (None, None) => self.q.shape[3],
        }
    }

    fn check_shapes(&self) -> Result<(), Invalid> {
        let Call { q, k, v, out, .. } = self;
        let [hsk, tokens, heads, batch] = q.shape;
        let [hsv, rows, kv_heads, kv_batch] = v.shape;
        require(k.shape == [hsk, rows, kv_heads, kv_batch], NAME, || format!("k is {k} for q {q} and v {v}"))?;
        require(out.shape == [hsv, heads, tokens, batch], NAME, || {
            format!("out is {out}, want F32[{hsv}, {heads}, {tokens}, {batch}]")
        })?;
        require([q, k, v].iter().all(|t| !t.is_empty()), NAME, || format!("empty operands: q {q}, k {k}, v {v}"))?;
        require(heads % kv_heads == 0, NAME, || format!("{heads} heads are no multiple of {kv_heads} of the cache"))?;
        require(q.ty == TensorType::F32 && out.ty == TensorType::F32, NAME, || {
            format!("q is {q}, out {out}: F32 both")
        })?;
        require([q, k, v].iter().all(|t| t.has_dense_rows()), NAME, || "rows of q, k and v must be dense".into())?;
        require(out.is_dense(), NAME, || format!("out {out} must be dense"))?;
        let sequences = self.sequence_count();
        match self.pages {
            Some(_) => require(kv_batch == 1, NAME, || format!("k is {k}: a cache of pages has batch 1"))?,
            None => require(sequences.is_multiple_of(kv_batch), NAME, || {
                format!("{sequences} sequences are no multiple of the cache's {kv_batch}")
            })?,
        }
        if self.sequences.is_none() && self.pages.is_some() {
            require(sequences == batch, NAME, || format!("{sequences} sequences of pages for a batch of {batch}"))?;
        }
        Ok(())
    }

    fn check_mask(&self) -> Result<(), Invalid> {
        let [_, tokens, heads, batch] = self.q.shape;
        let whole = |t: &Tensor, n: usize| t.ty == TensorType::I32 && t.is_dense() && t.len() == n && t.shape[0] == n;
        match &self.mask {
            Mask::None => {}
            Mask::Explicit(m) => {
                let repeats = m.shape[2] > 0 && heads % m.shape[2] == 0 && m.shape[3] > 0 && batch % m.shape[3] == 0;
                let fits = m.shape[0] == self.keys() && m.shape[1] >= tokens && repeats && m.has_dense_rows();
                let whole = m.stride.iter().all(|s| s % 2 == 0);
                require(fits && whole && m.ty == TensorType::F16, NAME, || {
                    format!("mask is {m}, want F16[{}, {tokens}, ..] that repeats over {heads}, {batch}", self.keys())
                })?;
            }
            Mask::Causal { positions, length, window, both } => {
                let n = tokens * batch;
                let ahead = positions.shape[1] == 2;
                let fits = positions.ty == TensorType::I32 && positions.is_dense() && positions.rows() <= 2;
                require(fits && positions.shape[0] == n, NAME, || {
                    format!("positions are {positions}, want I32[{n}], or I32[{n}, 2] where queries see ahead")
                })?;
                let n = self.sequence_count();
                let fits = whole(length, 1) || whole(length, n);
                require(fits, NAME, || format!("length is {length}, want I32[1] or I32[{n}]"))?;
                let sees = window.is_none_or(|window| window.size() > 0);
                require(sees, NAME, || "a window of 0 positions sees nothing".into())?;
                let known = !(*both && matches!(window, Some(Window::Chunk(_))));
                require(known, NAME, || "chunks are seen up to the query alone".into())?;
                let plain = !both && !matches!(window, Some(Window::Chunk(_))) && self.max_bias == 0.0;
                require(!ahead || (plain && self.distances.is_none()), NAME, || {
                    "queries that see ahead know neither chunks nor biases, nor do they see everything".into()
                })?;
            }
        }
        let causal = matches!(self.mask, Mask::Causal { .. });
        if let Some(Pages { table, size }) = self.pages {
            require(causal, NAME, || "pages need a causal mask: their number comes from the length".into())?;
            require(
                size > 0 && table.ty == TensorType::I32 && table.is_dense() && table.rows() == table.shape[1],
                NAME,
                || format!("pages of {size} rows in {table}, want I32[pages, sequences]"),
            )?;
        }
        if let Some(s) = self.sequences {
            require(causal && batch == 1 && whole(&s, tokens), NAME, || {
                format!("sequences are {s}, want I32[{tokens}] with a causal mask and batch 1 (it is {batch})")
            })?;
        }
        Ok(())
    }
}

impl Call {
    /// Furthest distance that has a bias of its own.
    pub(crate) fn reach(&self) -> Option<usize> {
        self.distances.map(|t| t.shape[1] / 2)
    }

    fn check_distances(&self) -> Result<(), Invalid> {
        let Some(t) = self.distances else { return Ok(()) };
        let (heads, rows) = (self.q.shape[2], t.shape[1]);
        let fits = t.shape == [heads, rows, 1, 1] && rows % 2 == 1 && t.ty == TensorType::F32 && t.is_dense();
        require(fits, NAME, || format!("distances are {t}, want F32[{heads}, an odd number]"))?;
        let causal = matches!(self.mask, Mask::Causal { .. });
        require(causal, NAME, || "distances need a causal mask: positions come from there".into())?;
        let alone = self.max_bias == 0.0 && self.sinks.is_none();
        require(alone, NAME, || "distances stand with neither ALiBi nor sinks".into())
    }

    fn check_split(&self) -> Result<(), Invalid> {
        let Some(Split { count, short, scratch, counters }) = self.split else { return Ok(()) };
        require((1..=1024).contains(&count), NAME, || format!("{count} splits, want 1 to 1024"))?;
        require((1..=count).contains(&short), NAME, || {
            format!("{short} of {count} splits may be short, want 1 to {count}")
        })?;
        let want = self.scratch_bytes(count) / 4;
        let fits = scratch.ty == TensorType::F32 && scratch.is_dense() && scratch.len() >= want;
        require(fits && scratch.offset % 16 == 0, NAME, || {
            format!("scratch is {scratch}, want F32[{want}], aligned to 16")
        })?;
        if let Some(c) = counters {
            let want = self.counters();
            let fits = c.ty == TensorType::I32 && c.is_dense() && c.len() >= want;
            require(fits, NAME, || format!("counters are {c}, want I32[{want}]"))?;
        }
        Ok(())
    }
}

impl Operation for Call {
    fn name(&self) -> &'static str {
        NAME
    }

    fn reads(&self) -> Vec<Tensor> {
        let mut reads = match self.writing() {
            // Caches that are written as a whole are read as a whole.
            Some(write) => write.reads().into_iter().chain([write.k_cache, write.v_cache]).collect(),
            None => vec![self.q, self.k, self.v],
        };
        match self.mask {
            Mask::None => {}
            Mask::Explicit(mask) => reads.push(mask),
            Mask::Causal { length, .. } if self.kv_append.is_some() => reads.push(length),
            Mask::Causal { positions, length, .. } => reads.extend([positions, length]),
        }
        reads.extend([self.sinks, self.distances, self.sequences, self.pages.map(|p| p.table)].into_iter().flatten());
        reads.extend(self.rounding.and_then(|rounding| rounding.weight));
        reads
    }

    fn writes(&self) -> Vec<Tensor> {
        // Counters are written on the way and end as they were.
        let caches = self.writing().map(|write| [write.k_cache, write.v_cache]);
        let rounded = self.rounding.map(|rounding| rounding.writes(&self.out));
        let first = [Some(self.out), self.split.and_then(|s| s.counters)];
        let more = caches
            .into_iter()
            .flatten()
            .chain(rounded.into_iter().flatten())
            .chain(self.emit_packed_b.map(|emit_packed_b| emit_packed_b.halves));
        first.into_iter().flatten().chain(more).collect()
    }

    /// Where keys lie. Keys themselves are read early too, but only those of tokens before the one that is being written.
    fn early(&self) -> Vec<Tensor> {
        let mut early: Vec<Tensor> = [self.sequences, self.pages.map(|p| p.table)].into_iter().flatten().collect();
        if let Mask::Causal { positions, length, .. } = self.mask {
            early.extend([positions, length]);
        }
        early.extend(self.kv_append.into_iter().flat_map(|a| [a.freqs, a.ids]));
        early
    }

    fn scratch(&self) -> Vec<Tensor> {
        self.split.map(|s| s.scratch).into_iter().collect()
    }

    fn check(&self) -> Result<(), Invalid> {
        self.check_shapes()?;
        self.check_mask()?;
        self.check_split()?;
        if let Some(s) = self.sinks {
            let heads = self.q.shape[2];
            let fits = s.len() == heads && s.ty == TensorType::F32 && s.is_dense();
            require(fits, NAME, || format!("sinks are {s}, want F32[{heads}]"))?;
        }
        self.check_distances()?;
        self.check_kv_append()?;
        self.check_rounding()?;
        self.check_packed_b()?;
        let Call { scale, max_bias, logit_softcap, .. } = *self;
        require(scale.is_finite(), NAME, || format!("scale is {scale}"))?;
        require(max_bias >= 0.0 && max_bias.is_finite(), NAME, || format!("max_bias is {max_bias}, want 0 or more"))?;
        require(max_bias == 0.0 || self.mask != Mask::None, NAME, || format!("max_bias {max_bias} without a mask"))?;
        let fits = logit_softcap >= 0.0 && logit_softcap.is_finite();
        require(fits, NAME, || format!("logit_softcap is {logit_softcap}, want 0 or more"))
    }

    fn pick(&self, caps: &Caps, want: Option<Path>) -> Result<Choice, Unsupported> {
        plan::pick(self, caps, want)
    }

    fn judged(&self, written: &Tensor, values: &[f64]) -> Option<Vec<Vec<f64>>> {
        self.emit_packed_b.and_then(|emit_packed_b| emit_packed_b.by_column(self.columns(), written, values))
    }

    fn params(&self, _: &Choice, _: usize, at: &dyn Fn(&Tensor) -> Address) -> Vec<u8> {
        plan::params(self, at)
    }

    fn reference(&self, memory: &mut HostMemory) {
        self.in_two_steps(memory, |write, memory| write.reference(memory), reference::reference);
        self.round(memory);
        self.write_packed_b(memory);
    }

    fn cpu(&self, memory: &mut HostMemory) {
        self.in_two_steps(memory, |write, memory| write.cpu(memory), cpu::compute);
        self.round(memory);
        self.write_packed_b(memory);
    }

    /// Counted for a full cache; a causal mask hides half of a prefill, and a decoded token sees all.
    fn work(&self) -> Work {
        let [hsk, tokens, heads, batch] = self.q.shape;
        let [hsv, _, kv_heads, _] = self.v.shape;
        let keys = self.keys() as f64;
        let halved = matches!(self.mask, Mask::Causal { both: false, .. });
        let hidden = if halved { 0.5 * (tokens as f64 - 1.0).min(keys) } else { 0.0 };
        let pairs = (heads * batch * tokens) as f64 * (keys - hidden);
        let caches = self.pages.map_or(self.k.shape[3], |p| p.table.shape[1]);
        let cache = |t: &Tensor| keys * (t.row_bytes() * kv_heads * caches) as f64;
        let dense =
            (self.q.len() + self.out.len()) as f64 * 4.0 + self.writing().map_or(0.0, |write| write.work().bytes);
        Work { bytes: dense + cache(&self.k) + cache(&self.v), flops: 2.0 * pairs * (hsk + hsv) as f64 }
    }

    fn parts(&self) -> Vec<crate::Call> {
        // Packed activations lie between each other.
        if self.emit_packed_b.is_some() {
            return Vec::new();
        }
        // Two steps give the same bits.
        if let Some(apart) = self.apart() {
            return apart.to_vec();
        }
        let [_, tokens, _, batch] = self.q.shape;
        // Tokens of one batch alone are not dense in the result, and runs of keys may go by several tokens.
        if batch > 1 || self.split.is_some() || self.sees_ahead() {
            return Vec::new();
        }
        let part = |n: usize| {
            let of_token = |t: Tensor| t.narrow(0, n, 1);
            let mask = match self.mask {
                Mask::None => Mask::None,
                Mask::Explicit(m) => Mask::Explicit(m.narrow(1, n, 1)),
                Mask::Causal { positions, length, window, both } => {
                    Mask::Causal { positions: of_token(positions), length, window, both }
                }
            };
            let sequences = self.sequences.map(of_token);
            let (q, out) = (self.q.narrow(1, n, 1), self.out.narrow(2, n, 1));
            crate::Call::from(Call { q, out, mask, sequences, ..*self })
        };
        if tokens == 1 { Vec::new() } else { (0..tokens).map(part).collect() }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::tensor::Slot;
    use kiln_gguf::TensorType::{F16, F32, I32};

    fn tensor(slot: u32, ty: TensorType, shape: [usize; 4]) -> Tensor {
        Tensor::dense(Slot(slot), ty, shape)
    }

    fn call() -> Call {
        let cache = tensor(1, F16, [64, 128, 2, 1]);
        let (positions, length) = (tensor(4, I32, [9, 1, 1, 1]), tensor(5, I32, [1; 4]));
        let causal = Mask::Causal { positions, length, window: None, both: false };
        let (q, out) = (tensor(0, F32, [64, 9, 8, 1]), tensor(3, F32, [64, 8, 9, 1]));
        Call { mask: causal, ..Call::plain(q, cache, cache, out, 0.125) }
    }

    #[test]
    fn operands_that_do_not_fit_are_named() {
        assert_eq!(call().check(), Ok(()));
        let reason = |call: Call| call.check().unwrap_err().reason;
        assert!(reason(Call { out: tensor(3, F32, [64, 9, 8, 1]), ..call() }).contains("want F32[64, 8, 9, 1]"));
        assert!(reason(Call { k: tensor(1, F16, [64, 127, 2, 1]), ..call() }).contains("127"));
        assert!(reason(Call { mask: Mask::None, max_bias: 8.0, ..call() }).contains("without a mask"));
        assert!(reason(Call { sinks: Some(tensor(6, F32, [7, 1, 1, 1])), ..call() }).contains("want F32[8]"));
        let distances = |rows: usize| Some(tensor(6, F32, [8, rows, 1, 1]));
        assert!(reason(Call { distances: distances(16), ..call() }).contains("F32[8, an odd number]"));
        assert!(reason(Call { distances: distances(17), max_bias: 8.0, ..call() }).contains("neither ALiBi"));
        assert!(reason(Call { distances: distances(17), mask: Mask::None, ..call() }).contains("a causal mask"));
        let ahead = |columns: usize, both: bool| {
            let positions = tensor(4, I32, [9, columns, 1, 1]);
            Mask::Causal { positions, length: tensor(5, I32, [1; 4]), window: None, both }
        };
        assert_eq!(Call { mask: ahead(2, false), ..call() }.check(), Ok(()));
        assert!(reason(Call { mask: ahead(3, false), ..call() }).contains("or I32[9, 2]"));
        assert!(reason(Call { mask: ahead(2, true), ..call() }).contains("see ahead"));
        assert!(reason(Call { mask: ahead(2, false), max_bias: 8.0, ..call() }).contains("see ahead"));
        let mask = Mask::Explicit(tensor(6, F16, [128, 8, 1, 1]));
        assert!(reason(Call { mask, ..call() }).contains("F16[128, 9, ..]"));
        let pages = Some(Pages { table: tensor(6, I32, [8, 1, 1, 1]), size: 16 });
        assert!(reason(Call { mask: Mask::None, pages, ..call() }).contains("causal"));
        let scratch = tensor(7, F32, [100, 1, 1, 1]);
        let split = Some(Split { count: 4, short: 4, scratch, counters: None });
        assert!(reason(Call { split, ..call() }).contains("want F32[19008]"));
        let scratch = tensor(7, F32, [19008, 1, 1, 1]);
        let short = |short: usize| Call { split: Some(Split { count: 4, short, scratch, counters: None }), ..call() };
        assert_eq!([1, 4].map(|n| short(n).check()), [Ok(()), Ok(())]);
        assert!(reason(short(0)).contains("0 of 4 splits may be short"), "no run would have keys");
        assert!(reason(short(5)).contains("5 of 4 splits"));
    }

    #[test]
    fn many_rows_take_the_best_path_and_few_the_scalar_one() {
        let nvidia = Caps::example_nvidia();
        let path = |call: Call, caps: &Caps| call.pick(caps, None).unwrap().path;
        let many = Call { q: tensor(0, F32, [64, 40, 8, 1]), out: tensor(3, F32, [64, 8, 40, 1]), ..call() };
        assert_eq!(path(many, &nvidia), Path::Coopmat2);
        assert_eq!(path(call(), &nvidia), Path::Coopmat, "36 rows");
        assert_eq!(path(call(), &Caps::least()), Path::Scalar);
        let mut khr = nvidia.clone();
        khr.coopmat2 = Default::default();
        assert_eq!(path(many, &khr), Path::Coopmat);
        let (positions, length) = (tensor(4, I32, [1; 4]), tensor(5, I32, [1; 4]));
        let one = Mask::Causal { positions, length, window: None, both: false };
        let decode = Call { q: tensor(0, F32, [64, 1, 8, 1]), out: tensor(3, F32, [64, 8, 1, 1]), mask: one, ..call() };
        assert_eq!(path(decode, &nvidia), Path::Scalar);
        let bytes = tensor(1, TensorType::Q8_0, [64, 128, 2, 1]);
        assert_eq!(path(Call { k: bytes, v: bytes, ..decode }, &nvidia), Path::IntDot);
        // Tiles of several sequences are the coopmat path's.
        let ragged = Call { sequences: Some(tensor(6, I32, [9, 1, 1, 1])), ..call() };
        assert_eq!(path(ragged, &nvidia), Path::Coopmat);
    }

    #[test]
    fn lanes_take_many_sequences_and_long_ones_where_their_order_is_known() {
        let nvidia = Caps::example_nvidia();
        let call = |ty, keys: usize, [heads, sequences]: [usize; 2]| {
            let cache = tensor(1, ty, [128, keys, 2, sequences]);
            let (positions, length) = (tensor(4, I32, [1, sequences, 1, 1]), tensor(5, I32, [sequences, 1, 1, 1]));
            let mask = Mask::Causal { positions, length, window: None, both: false };
            let (q, out) = (tensor(0, F32, [128, 1, heads, sequences]), tensor(3, F32, [128, heads, 1, sequences]));
            Call { mask, ..Call::plain(q, cache, cache, out, 0.1) }
        };
        let path = |call: Call, caps: &Caps| call.pick(caps, None).unwrap().path;
        assert_eq!(path(call(F16, 512, [8, 8]), &nvidia), Path::Fragment);
        assert_eq!(path(Call { batch_invariant: true, ..call(F16, 512, [8, 8]) }, &nvidia), Path::Scalar);
        assert_eq!(path(call(F16, 512, [8, 7]), &nvidia), Path::Scalar);
        assert_eq!(path(call(F16, 512, [4, 8]), &nvidia), Path::Scalar, "two heads share keys");
        assert_eq!(path(call(F16, 16384, [8, 1]), &nvidia), Path::Fragment);
        assert_eq!(path(call(F16, 8192, [8, 1]), &nvidia), Path::Scalar);
        assert_eq!(path(call(TensorType::Q8_0, 8192, [8, 1]), &nvidia), Path::IntDot);
        assert_eq!(path(call(TensorType::Q4_0, 8192, [8, 1]), &nvidia), Path::Fragment);
        let unknown = Caps { fragment_layout: None, ..nvidia };
        assert_eq!(path(call(F16, 512, [8, 8]), &unknown), Path::Scalar);
    }

    #[test]
    fn lanes_take_prompts_of_narrow_heads_where_their_order_is_known() {
        let nvidia = Caps::example_nvidia();
        let prompt = |head: usize, tokens: usize| {
            let cache = tensor(1, F16, [head, 8192, 2, 1]);
            let (positions, length) = (tensor(4, I32, [tokens, 1, 1, 1]), tensor(5, I32, [1; 4]));
            let mask = Mask::Causal { positions, length, window: None, both: false };
            let (q, out) = (tensor(0, F32, [head, tokens, 16, 1]), tensor(3, F32, [head, 16, tokens, 1]));
            Call { mask, ..Call::plain(q, cache, cache, out, 0.1) }
        };
        let path = |call: Call, caps: &Caps| call.pick(caps, None).unwrap().path;
        assert_eq!(path(prompt(64, 512), &nvidia), Path::FragmentPrefill);
        assert_eq!(path(prompt(64, 511), &nvidia), Path::Coopmat2, "fewer rows than were timed");
        assert_eq!(path(Call { batch_invariant: true, ..prompt(64, 512) }, &nvidia), Path::Coopmat2);
        let ragged = Call { sequences: Some(tensor(6, I32, [512, 1, 1, 1])), ..prompt(64, 512) };
        assert_eq!(path(ragged, &nvidia), Path::FragmentPrefill);
        let unknown = Caps { fragment_layout: None, ..nvidia.clone() };
        assert_eq!(path(prompt(64, 512), &unknown), Path::Coopmat2);
        let why = |call: Call| call.pick(&nvidia, Some(Path::FragmentPrefill)).unwrap_err().reason;
        assert!(why(prompt(96, 512)).contains("multiples of 64"));
        assert!(why(prompt(320, 512)).contains("up to 256"));
        assert!(why(Call { max_bias: 8.0, ..prompt(64, 512) }).contains("biases"));
    }

    #[test]
    fn splits_grow_with_cores_and_keys() {
        let decode = Call { q: tensor(0, F32, [64, 1, 8, 1]), ..call() };
        assert_eq!(decode.good_splits(Some(132)), 1);
        let long = tensor(1, F16, [64, 8192, 2, 1]);
        assert_eq!(Call { k: long, v: long, ..decode }.good_splits(Some(132)), 64);
        assert_eq!(Call { k: long, v: long, ..decode }.good_splits(Some(8)), 8);
        // Sixteen rows of a wide head are eight teams' work, four tokens of them a matrix's.
        assert_eq!(good_splits([16, 2], 256, 20_000, 132), 16);
        assert_eq!(good_splits([64, 2], 256, 20_000, 132), 132);
        // So are more than eight rows of a narrow one.
        // Sequences of one batch are enough work, but a long one is cut, too; up to 2,048 workgroups.
        let many = Call { q: tensor(0, F32, [64, 1, 8, 128]), k: long, v: long, ..decode };
        assert_eq!((many.good_splits(Some(132)), many.most_splits(1)), (1, 8));
        assert_eq!(Call { q: tensor(0, F32, [64, 1, 8, 1024]), ..many }.most_splits(1), 1);
        assert_eq!(Call { k: long, v: long, ..decode }.most_splits(64), 64);
        assert_eq!([4, 8, 12].map(|rows| good_splits([rows, 8], 128, 20_000, 132)), [33, 16, 33]);
    }
}
