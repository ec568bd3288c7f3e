//! `sample`: from logits to a token, for rows that each ask for something else. The draw is the largest of logits with Gumbel
//! numbers added, thresholds are found with whole numbers, and ties go to the lowest id: so the CPU and every GPU give the same
//! token, whatever else is in the batch.

pub mod cases;
mod cpu;
mod numbers;
mod reference;
mod row;

use kiln_gguf::TensorType;
use kiln_gpu::{Address, Caps, Shader};

use crate::host::HostMemory;
use crate::operation::{
    Choice, Invalid, Launch, Operation, Path, Touches, Unsupported, Work, grid, maybe, only_scalar, require, word,
};
use crate::rows::reachable;
use crate::tensor::Tensor;

pub use cpu::draw;
pub use numbers::{MOST_GUMBEL, gumbel, gumbel_of, score, stream};
pub use row::{Row, WORDS};

const NAME: &str = "sample";

/// One line for the registry.
pub const SUMMARY: &str = "token = a draw from each row of logits, by the row's settings";

/// Tokens of a workgroup of the first launch.
const CHUNK: usize = 1024;
/// Words that such a workgroup leaves.
const CHUNK_WORDS: usize = 8;
/// Tokens that a row's list holds; where more are left, the whole row is looked through again.
const LIST: usize = 16384;
/// Sums of this many weights, cut in parts of ten bits, fit 32 bits.
const MOST_TOKENS: usize = 1 << 21;

/// Numbers added to single logits.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Bias {
    /// I32 `[n, rows]`, dense: tokens; [`Row::biases`] says how many count. Ids outside of the vocabulary are ignored; of
    /// several entries of a token the last one counts.
    pub ids: Tensor,
    /// F32 `[n, rows]`, dense; minus infinity forbids a token.
    pub values: Tensor,
}

/// Log-probabilities, of the logits as they came in.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Logprobs {
    /// F32 `[rows]`, dense: that of the token taken.
    pub chosen: Tensor,
    /// I32 `[n, rows]`, dense: the most likely tokens, best first, of equal ones the lowest id first. n may be 0.
    pub ids: Tensor,
    /// F32 `[n, rows]`, dense: theirs.
    pub values: Tensor,
}

/// Operands of `sample`.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Call {
    /// F32 `[vocab, rows]`, dense rows.
    pub logits: Tensor,
    /// I32 `[WORDS, rows]`, dense: [`Row::encode`] of each row.
    pub settings: Tensor,
    /// I32 `[rows]`, dense: the position of the token that the logits follow. A negative one marks padding: the row's token
    /// is 0, and nothing of it is read.
    pub positions: Tensor,
    /// I32 `[window, rows]`, dense, for penalties: the token at position q lies at q % window; -1 is none.
    pub recent: Option<Tensor>,
    /// Numbers added to single logits.
    pub bias: Option<Bias>,
    /// I32 `[ceil(vocab / 32), rows]`, dense: bit i % 32 of word i / 32 allows token i. Counts for rows with [`Row::masked`].
    pub mask: Option<Tensor>,
    /// Result I32 `[rows]`, dense. -1 where a logit is NaN or no token is allowed; log-probabilities and ids are 0 then.
    pub token: Tensor,
    /// Log-probabilities, where they are wanted.
    pub logprobs: Option<Logprobs>,
    /// I32 `[scratch_words(vocab), rows]`, dense.
    pub scratch: Tensor,
    /// Whether rows may ask for cuts ([`Row::cuts`]). Where no row does, the launch is smaller; a row that does all the same
    /// gets token -1.
    pub cuts: bool,
}

/// Words of scratch memory for each row.
pub fn scratch_words(vocab: usize) -> usize {
    vocab + vocab.div_ceil(CHUNK) * CHUNK_WORDS + LIST
}

kiln_gpu::params! {
    struct Params {
        logits: Address,
        settings: Address,
        positions: Address,
        recent: Address,
        bias_ids: Address,
        bias_values: Address,
        mask: Address,
        token: Address,
        chosen: Address,
        top_ids: Address,
        top_values: Address,
        scratch: Address,
        vocab: u32,
        rows: u32,
        logits_stride: u32,
        scratch_words: u32,
        window: u32,
        biases: u32,
        n_top: u32,
    }
}

impl Call {
    fn vocab(&self) -> usize {
        self.logits.shape[0]
    }

    fn rows(&self) -> usize {
        self.logits.shape[1]
    }

    fn chunks(&self) -> usize {
        self.vocab().div_ceil(CHUNK)
    }

    /// Every tensor but the logits with its name, type and extents.
    fn operands(&self) -> Vec<(&'static str, Tensor, TensorType, [usize; 2])> {
        use TensorType::{F32, I32};
        let (vocab, rows) = (self.vocab(), self.rows());
        let any = |t: Tensor| t.shape[0];
        let mut all = vec![
            ("settings", self.settings, I32, [WORDS, rows]),
            ("positions", self.positions, I32, [rows, 1]),
            ("token", self.token, I32, [rows, 1]),
            ("scratch", self.scratch, I32, [scratch_words(vocab), rows]),
        ];
        all.extend(self.recent.map(|t| ("recent", t, I32, [any(t), rows])));
        all.extend(self.mask.map(|t| ("mask", t, I32, [vocab.div_ceil(32), rows])));
        if let Some(Bias { ids, values }) = self.bias {
            all.extend([("bias.ids", ids, I32, [any(ids), rows]), ("bias.values", values, F32, [any(ids), rows])]);
        }
        if let Some(Logprobs { chosen, ids, values }) = self.logprobs {
            all.push(("logprobs.chosen", chosen, F32, [rows, 1]));
            all.extend([
                ("logprobs.ids", ids, I32, [any(ids), rows]),
                ("logprobs.values", values, F32, [any(ids), rows]),
            ]);
        }
        all
    }

    fn shader(&self, stem: &str, caps: &Caps) -> Shader {
        let file = if stem == "adjust" { "sample/adjust.comp" } else { "sample/choose.comp" };
        Shader::new(format!("{NAME}.{stem}"), file, Params::glsl())
            .define("WORDS", WORDS)
            .define("CHUNK", CHUNK)
            .define("CHUNK_WORDS", CHUNK_WORDS)
            .define("LIST", LIST)
            .define("CUTS", u32::from(self.cuts))
            .define("LOGPROBS", u32::from(self.logprobs.is_some()))
            .define("SUBGROUPS", u32::from(caps.subgroups.arithmetic))
    }
}

impl Operation for Call {
    fn name(&self) -> &'static str {
        NAME
    }

    fn reads(&self) -> Vec<Tensor> {
        let bias = self.bias.into_iter().flat_map(|b| [b.ids, b.values]);
        let optional = self.recent.into_iter().chain(bias).chain(self.mask);
        [self.logits, self.settings, self.positions].into_iter().chain(optional).collect()
    }

    fn writes(&self) -> Vec<Tensor> {
        let logprobs = self.logprobs.into_iter().flat_map(|l| [l.chosen, l.ids, l.values]);
        [self.token].into_iter().chain(logprobs).collect()
    }

    fn scratch(&self) -> Vec<Tensor> {
        vec![self.scratch]
    }

    fn check(&self) -> Result<(), Invalid> {
        let logits = &self.logits;
        let [vocab, _, n2, n3] = logits.shape;
        let fits = logits.ty == TensorType::F32 && logits.has_dense_rows() && n2 * n3 == 1;
        require(fits && !logits.is_empty(), NAME, || {
            format!("logits are {logits}, want F32[vocab, rows] of dense rows")
        })?;
        require(vocab <= MOST_TOKENS, NAME, || format!("{vocab} tokens in a row, at most {MOST_TOKENS}"))?;
        require(logits.stride[1].is_multiple_of(4), NAME, || format!("rows of {logits} are no whole floats apart"))?;
        for (name, t, ty, [n, rows]) in self.operands() {
            let fits = t.ty == ty && t.shape == [n, rows, 1, 1] && t.is_dense() && t.offset.is_multiple_of(4);
            require(fits, NAME, || format!("{name} is {t} for logits {logits}, want dense {ty}[{n}, {rows}]"))?;
        }
        if let Some(Logprobs { ids, .. }) = self.logprobs {
            let n = ids.shape[0];
            require(n <= vocab, NAME, || format!("the {n} most likely of {vocab} tokens"))?;
        }
        Ok(())
    }

    fn pick(&self, caps: &Caps, want: Option<Path>) -> Result<Choice, Unsupported> {
        only_scalar(NAME, want)?;
        for t in [self.logits, self.scratch] {
            reachable(NAME, &t)?;
        }
        // A software GPU runs threads one after the other, so more of them than one subgroup only add barriers.
        let limit = caps.limits.max_workgroup_invocations.min(caps.limits.max_workgroup_size[0]);
        let adjust = self
            .shader("adjust", caps)
            .define("WG", limit.min(if caps.is_cpu { 32 } else { 256 }))
            .define("WINDOW", u32::from(self.recent.is_some()))
            .define("BIAS", u32::from(self.bias.is_some()))
            .define("MASK", u32::from(self.mask.is_some()));
        // Rows that are cut are looked through several times by one workgroup; others have one number for each chunk.
        let most = if self.cuts || self.logprobs.is_some() { 1024 } else { 256 };
        let choose = self.shader("choose", caps).define("WG", limit.min(if caps.is_cpu { 32 } else { most }));
        let launches = vec![
            Launch::new(adjust, grid(self.chunks() * self.rows(), caps)),
            Launch::new(choose, grid(self.rows(), caps)),
        ];
        Ok(Choice { path: Path::Scalar, launches })
    }

    fn params(&self, _: &Choice, _: usize, at: &dyn Fn(&Tensor) -> Address) -> Vec<u8> {
        let maybe = maybe(at);
        let first = |t: Option<Tensor>| word(t.map_or(0, |t| t.shape[0]));
        Params {
            logits: at(&self.logits),
            settings: at(&self.settings),
            positions: at(&self.positions),
            recent: maybe(self.recent),
            bias_ids: maybe(self.bias.map(|b| b.ids)),
            bias_values: maybe(self.bias.map(|b| b.values)),
            mask: maybe(self.mask),
            token: at(&self.token),
            chosen: maybe(self.logprobs.map(|l| l.chosen)),
            top_ids: maybe(self.logprobs.map(|l| l.ids)),
            top_values: maybe(self.logprobs.map(|l| l.values)),
            scratch: at(&self.scratch),
            vocab: word(self.vocab()),
            rows: word(self.rows()),
            logits_stride: word(self.logits.stride[1] / 4),
            scratch_words: word(self.scratch.shape[0]),
            window: first(self.recent),
            biases: first(self.bias.map(|b| b.ids)),
            n_top: first(self.logprobs.map(|l| l.ids)),
        }
        .bytes()
    }

    fn touches(&self, _: &Choice, launch: usize) -> Touches {
        match launch {
            0 => Touches { reads: self.reads(), writes: vec![self.scratch] },
            _ => {
                let reads = vec![self.logits, self.settings, self.positions, self.scratch];
                Touches { reads, writes: self.writes().into_iter().chain([self.scratch]).collect() }
            }
        }
    }

    fn reference(&self, memory: &mut HostMemory) {
        reference::reference(self, memory);
    }

    fn cpu(&self, memory: &mut HostMemory) {
        cpu::compute(self, memory);
    }

    fn work(&self) -> Work {
        Work { bytes: 8.0 * self.logits.len() as f64, flops: 64.0 * self.logits.len() as f64 }
    }

    fn parts(&self) -> Vec<crate::Call> {
        let part = |i: usize| {
            let row = |t: Tensor| t.narrow(1, i, 1);
            let one = |t: Tensor| t.narrow(0, i, 1);
            Call {
                logits: row(self.logits),
                settings: row(self.settings),
                positions: one(self.positions),
                recent: self.recent.map(row),
                bias: self.bias.map(|b| Bias { ids: row(b.ids), values: row(b.values) }),
                mask: self.mask.map(row),
                token: one(self.token),
                logprobs: self.logprobs.map(|l| Logprobs {
                    chosen: one(l.chosen),
                    ids: row(l.ids),
                    values: row(l.values),
                }),
                scratch: row(self.scratch),
                cuts: self.cuts,
            }
            .into()
        };
        (0..self.rows()).map(part).collect()
    }
}
