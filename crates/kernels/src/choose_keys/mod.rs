//! `choose_keys`: which tokens of its text attention sees, where a model has small queries and keys of its own to find that out. The result is a list of
//! cache rows for each query, which `flash_attention` takes for a table of pages of one row.

pub mod cases;
mod cpu;
mod reference;

use kiln_gguf::TensorType;
use kiln_gpu::{Address, Caps, Shader};

use crate::flash_attention::Pages;
use crate::formats;
use crate::host::HostMemory;
use crate::operation::{
    Choice, Invalid, Launch, Operation, Path, Unsupported, Work, grid, maybe, only_scalar, require, within_32_bits,
    word,
};
use crate::tensor::Tensor;

const NAME: &str = "choose_keys";

/// One line for the registry.
pub const SUMMARY: &str = "the cache rows of the keys, or blocks of keys, that fit a query best";

/// What is chosen.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Rule {
    /// Tokens that a key stands for: key j for those from j * per_key on, once the last of them is there. It lies where the
    /// cache is cut into pages of this many fewer rows. More than 1 only with blocks of 1.
    pub per_key: usize,
    /// Keys that are chosen together, for the best of them.
    pub block: usize,
    /// Blocks that are chosen: the best; of equal ones the first.
    pub most: usize,
    /// Of those the last ones, which are always chosen.
    pub near: usize,
    /// Whether tokens that no key stands for yet are seen besides.
    pub tail: bool,
}

impl Rule {
    /// The best this many keys of single tokens.
    pub fn tokens(most: usize) -> Rule {
        Rule { per_key: 1, block: 1, most, near: 0, tail: false }
    }

    /// Tokens of a block.
    pub fn tokens_of_block(&self) -> usize {
        self.per_key * self.block
    }

    /// Most tokens that are chosen.
    pub fn room(&self) -> usize {
        self.most * self.tokens_of_block() + if self.tail { self.per_key - 1 } else { 0 }
    }
}

/// Operands of `choose_keys`. The score of a key is the sum over heads of `weight * max(0, q . k)`; with `each` every head chooses for
/// itself, by `q . k`.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Call {
    /// F32 `[width, heads, rows]`, dense rows.
    pub q: Tensor,
    /// Keys `[width, rows of the cache]`, any format, dense rows.
    pub k: Tensor,
    /// F32 `[heads, rows]`, dense rows; 1 without. Not with `each`.
    pub weights: Option<Tensor>,
    /// Whether every head chooses for itself.
    pub each: bool,
    /// I32 `[rows]`: the position of each query; tokens up to it are there. None where it is below 0.
    pub positions: Tensor,
    /// Where the tokens of each sequence lie.
    pub pages: Pages,
    /// I32 `[rows]`: the sequence of each query. Without it all are of the only one, or query i is of sequence i.
    pub sequences: Option<Tensor>,
    /// What is chosen.
    pub rule: Rule,
    /// I32 `[room, columns]`, dense: the cache rows of the chosen tokens, first token first, then zeros. A column for each query; with
    /// `each` one for each of its heads, and head h of n has numbers `n * row + h`, those of a cache with the rows of all heads side by side.
    pub list: Tensor,
    /// I32 `[columns]`: how many there are.
    pub counts: Tensor,
    /// F32, dense, at least [`Call::scores`]: memory for the scores.
    pub scratch: Tensor,
}

kiln_gpu::params! {
    struct Params {
        q: Address,
        k: Address,
        weights: Address,
        positions: Address,
        table: Address,
        sequences: Address,
        scores: Address,
        list: Address,
        counts: Address,
        q_stride: [u32; 2],
        k_stride: u32,
        weights_stride: u32,
        keys: u32,
        columns: u32,
    }
}

/// Bytes of shared memory for queries.
const HELD_BYTES: usize = 8192;
/// Widest keys: a thread holds one in its registers.
const WIDEST: usize = 256;

impl Call {
    /// Columns of the list for each query.
    fn groups(&self) -> usize {
        if self.each { self.q.shape[1] } else { 1 }
    }

    fn columns(&self) -> usize {
        self.groups() * self.q.shape[2]
    }

    /// Most keys of a sequence.
    fn keys(&self) -> usize {
        self.pages.table.shape[0] * self.pages.size / self.rule.per_key
    }

    /// Number of scores.
    pub fn scores(&self) -> usize {
        self.keys() * self.columns()
    }

    fn check_rule(&self) -> Result<(), Invalid> {
        let Rule { per_key, block, most, near, tail } = self.rule;
        let rule = self.rule;
        let counts = per_key > 0 && block > 0 && most > 0 && near <= most && (per_key == 1 || block == 1);
        require(counts, NAME, || format!("{rule:?} cannot be kept"))?;
        require(!tail || per_key > 1, NAME, || "every token has a key: there is no tail".into())?;
        let size = self.pages.size;
        require(size.is_multiple_of(per_key), NAME, || format!("pages of {size} rows for keys of {per_key} tokens"))?;
        let room = rule.room().min(self.pages.table.shape[0] * size);
        let fits = self.list.shape == [self.list.shape[0], self.columns(), 1, 1] && self.list.shape[0] >= room;
        let (list, columns) = (self.list, self.columns());
        require(fits && list.ty == TensorType::I32 && list.is_dense(), NAME, || {
            format!("list is {list}, want I32[{room} or more, {columns}]")
        })
    }

    fn sequence(&self, sequences: Option<&[f64]>, row: usize) -> usize {
        match sequences {
            Some(sequences) => sequences[row] as usize,
            None if self.pages.table.shape[1] == 1 => 0,
            None => row,
        }
    }

    fn shader(&self, name: &str, file: &'static str) -> Shader {
        let Rule { per_key, block, most, near, tail } = self.rule;
        let [pages, sequences, ..] = self.pages.table.shape;
        Shader::new(format!("{NAME}.{name}"), file, Params::glsl())
            .define("GROUPS", self.groups())
            .define("PAGES", pages)
            .define("PAGE", self.pages.size)
            .define("ONE_SEQUENCE", u32::from(sequences == 1))
            .define("SEQUENCES", u32::from(self.sequences.is_some()))
            .define("PER_KEY", per_key)
            .define("BLOCK", block)
            .define("MOST", most)
            .define("NEAR", near)
            .define("TAIL", u32::from(tail))
            .define("ROOM", self.list.shape[0])
    }
}

impl Operation for Call {
    fn name(&self) -> &'static str {
        NAME
    }

    fn reads(&self) -> Vec<Tensor> {
        let all = [self.q, self.k, self.positions, self.pages.table];
        all.into_iter().chain(self.weights).chain(self.sequences).collect()
    }

    fn writes(&self) -> Vec<Tensor> {
        vec![self.list, self.counts]
    }

    fn scratch(&self) -> Vec<Tensor> {
        vec![self.scratch]
    }

    fn check(&self) -> Result<(), Invalid> {
        let Call { q, k, weights, positions, sequences, counts, scratch, .. } = self;
        let [width, heads, rows, n3] = q.shape;
        let fits = q.ty == TensorType::F32 && q.has_dense_rows() && !q.is_empty() && n3 == 1;
        require(fits, NAME, || format!("q is {q}, want F32[width, heads, rows]"))?;
        let fits = k.shape == [width, k.shape[1], 1, 1] && k.has_dense_rows();
        require(fits, NAME, || format!("k is {k}, want rows of {width}"))?;
        if let Some(w) = weights {
            let fits = w.shape == [heads, rows, 1, 1] && w.ty == TensorType::F32 && w.has_dense_rows() && !self.each;
            require(fits, NAME, || format!("weights are {w}, want F32[{heads}, {rows}] where heads choose together"))?;
        }
        let whole = |t: &Tensor, n: usize| t.ty == TensorType::I32 && t.is_dense() && t.shape == [n, 1, 1, 1];
        for (what, t) in [("positions", Some(positions)), ("sequences", sequences.as_ref())] {
            let fits = t.is_none_or(|t| whole(t, rows));
            require(fits, NAME, || format!("{what} are not I32[{rows}]"))?;
        }
        let Pages { table, size } = self.pages;
        let fits = size > 0 && table.ty == TensorType::I32 && table.is_dense() && table.rows() == table.shape[1];
        require(fits, NAME, || format!("pages of {size} rows in {table}, want I32[pages, sequences]"))?;
        let known = sequences.is_some() || table.shape[1] == 1 || table.shape[1] == rows;
        require(known, NAME, || format!("{rows} queries of {} sequences: which is whose?", table.shape[1]))?;
        let columns = self.columns();
        require(whole(counts, columns), NAME, || format!("counts are {counts}, want I32[{columns}]"))?;
        self.check_rule()?;
        let want = self.scores();
        let fits = scratch.ty == TensorType::F32 && scratch.is_dense() && scratch.len() >= want;
        require(fits, NAME, || format!("scratch is {scratch}, want F32[{want}]"))
    }

    fn pick(&self, caps: &Caps, want: Option<Path>) -> Result<Choice, Unsupported> {
        only_scalar(NAME, want)?;
        let [width, heads, ..] = self.q.shape;
        if !width.is_multiple_of(4) || width > WIDEST || !formats::is_aligned(&self.k) || !formats::is_aligned(&self.q)
        {
            let reason =
                format!("keys of {}, want fours of elements, at most {WIDEST}, at multiples of their size", self.k);
            return Err(Unsupported { operation: NAME, reason });
        }
        formats::readable(NAME, &self.k)?;
        let strides = [self.q.stride[1], self.q.stride[2], self.k.stride[1]];
        let ends = [self.keys(), self.columns(), self.list.len(), self.scores(), self.k.shape[1] * self.groups()];
        within_32_bits(NAME, strides.into_iter().chain(ends))?;
        let most = caps.limits.max_workgroup_invocations.min(caps.limits.max_workgroup_size[0]) as usize;
        // A software GPU runs threads one after the other.
        let threads = |wanted: usize| if caps.is_cpu { 32 } else { wanted.min(most) };
        let (scoring, choosing) = (threads(64), threads(if self.keys() > 1 << 14 { 1024 } else { 256 }));
        let held = (HELD_BYTES / (4 * width)).clamp(1, heads);
        let score = self
            .shader(&format!("{}.scores", self.k.ty).to_lowercase(), "choose_keys/scores.comp")
            .define("WG", scoring)
            .define("WIDTH", width)
            .define("HEADS", heads)
            .define("EACH", u32::from(self.each))
            .define("WEIGHTS", u32::from(self.weights.is_some()))
            .define("HELD", if self.each { 1 } else { held });
        let score = formats::define(score, "K", self.k.ty)?;
        let choose = self.shader("choose", "choose_keys/choose.comp").define("WG", choosing);
        let tiles = self.keys().div_ceil(scoring);
        let launches = vec![
            Launch::new(score, grid(tiles * self.columns(), caps)),
            Launch::new(choose, grid(self.columns(), caps)),
        ];
        Ok(Choice { path: Path::Scalar, launches })
    }

    fn params(&self, _: &Choice, _: usize, at: &dyn Fn(&Tensor) -> Address) -> Vec<u8> {
        let stride = |t: &Tensor, d: usize| if t.shape[d] > 1 { word(t.stride[d]) } else { 0 };
        Params {
            q: at(&self.q),
            k: at(&self.k),
            weights: maybe(at)(self.weights),
            positions: at(&self.positions),
            table: at(&self.pages.table),
            sequences: maybe(at)(self.sequences),
            scores: at(&self.scratch),
            list: at(&self.list),
            counts: at(&self.counts),
            q_stride: [stride(&self.q, 1), stride(&self.q, 2)],
            k_stride: stride(&self.k, 1),
            weights_stride: self.weights.map_or(0, |w| stride(&w, 1)),
            keys: word(self.keys()),
            columns: word(self.columns()),
        }
        .bytes()
    }

    fn reference(&self, memory: &mut HostMemory) {
        reference::reference(self, memory);
    }

    fn cpu(&self, memory: &mut HostMemory) {
        cpu::compute(self, memory);
    }

    /// Counted for full caches.
    fn work(&self) -> Work {
        let [width, heads, rows, _] = self.q.shape;
        let keys = (self.keys() * self.pages.table.shape[1] * self.k.row_bytes()) as f64;
        let flops = (2 * width + 3) as f64 * (heads * rows * self.keys()) as f64;
        Work { bytes: keys + (self.q.len() + self.list.len() + 8 * self.scores()) as f64 * 4.0, flops }
    }

    fn parts(&self) -> Vec<crate::Call> {
        let rows = self.q.shape[2];
        let Call { pages, .. } = *self;
        let part = |n: usize| {
            let own = self.sequences.is_none() && pages.table.shape[1] > 1;
            let table = if own { pages.table.narrow(1, n, 1) } else { pages.table };
            let columns = |t: Tensor, d: usize| t.narrow(d, n * self.groups(), self.groups());
            let call = Call {
                q: self.q.narrow(2, n, 1),
                weights: self.weights.map(|w| w.narrow(1, n, 1)),
                positions: self.positions.narrow(0, n, 1),
                pages: Pages { table, ..pages },
                sequences: self.sequences.map(|s| s.narrow(0, n, 1)),
                list: columns(self.list, 1),
                counts: columns(self.counts, 0),
                ..*self
            };
            call.into()
        };
        if rows == 1 { Vec::new() } else { (0..rows).map(part).collect() }
    }
}
