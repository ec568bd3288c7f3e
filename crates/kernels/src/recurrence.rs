//! What the recurrences (`wkv6`, `wkv7`, `gla`, and in part `ssm_scan` and `gated_delta_net`) have in common: how sequences lie among the tokens, in which form they
//! run, and what they ask of their operands. `glsl/recurrence.glsl` is the other half.

use kiln_gguf::TensorType;
use kiln_gpu::{Address, Caps, Shader, SubgroupRequest};

use crate::host::HostMemory;
use crate::operation::{Choice, Invalid, Launch, Path, Unsupported, require, within_32_bits};
use crate::tensor::Tensor;

/// The way through the tokens of a sequence.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum Form {
    /// Chunked where that was measured to be faster and there is scratch memory, sequential otherwise.
    #[default]
    Auto,
    /// One token after the other.
    Sequential,
    /// Matrix products inside chunks of tokens. The chunks of `wkv6`, `wkv7` and `gla` run all at once: they need scratch memory, and decays
    /// of at most one in magnitude, as products of larger ones may overflow where the sequential form does not.
    Chunked,
}

/// Which tokens belong together. Those of a sequence are neighbours.
#[derive(Clone, Copy, Debug, PartialEq)]
pub enum Sequences {
    /// This many sequences of the same length.
    Equal(usize),
    /// Sequences of any length, also 0.
    Ragged {
        /// I32 `[sequences + 1]`, dense: the first token of each sequence, then the end of the last one. Tokens outside
        /// of all sequences are left alone.
        starts: Tensor,
        /// No sequence is longer: decides the form, without a look at `starts`.
        longest: usize,
    },
}

impl Sequences {
    /// Number of sequences.
    pub fn count(&self) -> usize {
        match self {
            Sequences::Equal(n) => *n,
            Sequences::Ragged { starts, .. } => starts.shape[0].saturating_sub(1),
        }
    }

    /// The sequences' tensor, if they have one.
    pub(crate) fn tensor(&self) -> Option<Tensor> {
        match self {
            Sequences::Equal(_) => None,
            Sequences::Ragged { starts, .. } => Some(*starts),
        }
    }

    /// Whether this many tokens can be divided like this.
    pub(crate) fn check(self, operation: &'static str, tokens: usize) -> Result<(), Invalid> {
        match self {
            Sequences::Equal(n) => require(n > 0 && tokens.is_multiple_of(n), operation, || {
                format!("{tokens} tokens are no {n} sequences of equal length")
            }),
            Sequences::Ragged { starts, longest } => {
                let fits = starts.ty == TensorType::I32 && starts.is_dense() && starts.rows() == 1;
                require(fits && starts.shape[0] > 0 && starts.offset.is_multiple_of(4), operation, || {
                    format!("starts are {starts}, want dense I32[sequences + 1]")
                })?;
                require(longest <= tokens, operation, || format!("longest is {longest} but there are {tokens} tokens"))
            }
        }
    }

    /// The tokens of each sequence, with its number.
    pub(crate) fn ranges(&self, tokens: usize, memory: &HostMemory) -> Vec<(usize, std::ops::Range<usize>)> {
        let starts: Vec<usize> = match self {
            Sequences::Equal(n) => (0..=*n).map(|b| tokens / (*n).max(1) * b).collect(),
            Sequences::Ragged { starts, .. } => {
                memory.read(starts).into_iter().map(|t| t.clamp(0.0, tokens as f64) as usize).collect()
            }
        };
        starts.windows(2).map(|w| w[0]..w[1]).enumerate().collect()
    }

    /// Tokens of the longest sequence.
    pub(crate) fn longest(&self, tokens: usize) -> usize {
        match self {
            Sequences::Equal(n) => tokens / (*n).max(1),
            Sequences::Ragged { longest, .. } => *longest,
        }
    }

    /// Sequence number `b` alone, and the view of its tokens.
    pub(crate) fn alone(&self, b: usize) -> (Sequences, impl Fn(Tensor) -> Tensor + use<>) {
        let (alone, count) = match self {
            Sequences::Equal(n) => (Sequences::Equal(1), Some(*n)),
            Sequences::Ragged { starts, longest } => {
                (Sequences::Ragged { starts: starts.narrow(0, b, 2), longest: *longest }, None)
            }
        };
        // Starts count from the first token, so ragged sequences keep the whole tensors.
        let view = move |t: Tensor| match count {
            Some(n) => t.narrow(2, t.shape[2] / n * b, t.shape[2] / n),
            None => t,
        };
        (alone, view)
    }
}

/// Where a sequence's state lies among `count` of them; none for padding.
pub(crate) fn place(slots: Option<Tensor>, sequence: usize, count: usize, memory: &HostMemory) -> Option<usize> {
    let Some(slots) = slots else { return Some(sequence) };
    let slot = memory.read(&slots.narrow(0, sequence, 1))[0];
    (slot >= 0.0 && (slot as usize) < count).then_some(slot as usize)
}

/// The slots of sequence `b` alone, and the view of the states that goes with them.
pub(crate) fn part_of_states(slots: Option<Tensor>, b: usize) -> (Option<Tensor>, impl Fn(Tensor) -> Tensor) {
    let view = move |t: Tensor| if slots.is_some() { t } else { t.narrow(3, b, 1) };
    (slots.map(|slots| slots.narrow(0, b, 1)), view)
}

/// Whether there is a slot for each sequence.
pub(crate) fn check_slots(operation: &'static str, slots: Tensor, sequences: Sequences) -> Result<(), Invalid> {
    let n = sequences.count();
    let fits = slots.ty == TensorType::I32 && slots.shape == [n, 1, 1, 1] && slots.is_dense();
    require(fits && slots.offset.is_multiple_of(4), operation, || format!("slots are {slots}, want dense I32[{n}]"))
}

/// Fewest tokens of a chunk, which scratch memory is sized for.
const LEAST_CHUNK: usize = 16;

/// Longest sequences whose heads are mixed inside the sequential kernel. Calculated for a large GPU, not measured: a launch
/// that waits is 3 to 4 us, a token 0.14 us with the columns of a head on four cores, so at most 0.4 us more on one.
const MOST_MIXED: usize = 8;

/// The sizes of one call.
#[derive(Clone, Copy, Debug, PartialEq)]
pub(crate) struct Layout {
    pub(crate) operation: &'static str,
    pub(crate) head_size: usize,
    pub(crate) heads: usize,
    pub(crate) tokens: usize,
    pub(crate) sequences: Sequences,
    /// Where each sequence's state lies.
    pub(crate) slots: Option<Tensor>,
}

/// Value columns of a workgroup of the chunked form.
pub(crate) fn tile(head_size: usize) -> usize {
    head_size.min(64)
}

impl Layout {
    /// The sizes that `y` and the sequences give.
    pub(crate) fn new(operation: &'static str, y: &Tensor, sequences: Sequences, slots: Option<Tensor>) -> Layout {
        let [head_size, heads, tokens, _] = y.shape;
        Layout { operation, head_size, heads, tokens, sequences, slots }
    }

    /// The rules of the operands: `per_token` of `[head_size, heads, tokens]`, states of
    /// `[head_size, head_size, heads, sequences]`, before and after; or of any number of slots, in place.
    pub(crate) fn check(&self, per_token: &[(&str, Tensor)], states: [Tensor; 2]) -> Result<(), Invalid> {
        let &Layout { operation, head_size, heads, tokens, sequences, slots } = self;
        let fits = |t: &Tensor, shape: [usize; 4]| {
            t.ty == TensorType::F32 && t.shape == shape && t.offset.is_multiple_of(16) && t.is_dense()
        };
        let shape = [head_size, heads, tokens, 1];
        for (name, t) in per_token {
            require(fits(t, shape), operation, || {
                format!("{name} is {t} at byte {}, want dense F32{shape:?} at a multiple of 16", t.offset)
            })?;
        }
        if let Some(slots) = slots {
            check_slots(operation, slots, sequences)?;
            require(states[0] == states[1] && states[0].shape[3] > 0, operation, || {
                format!("state_in is {}, state_out {}: with slots both are one tensor", states[0], states[1])
            })?;
        }
        let shape = [head_size, head_size, heads, slots.map_or(sequences.count(), |_| states[0].shape[3])];
        for (name, t) in ["state_in", "state_out"].into_iter().zip(states) {
            let one = Tensor { shape: [head_size, head_size, heads, 1], ..t };
            let fits = t.shape == shape && fits(&one, one.shape) && t.stride[3].is_multiple_of(16);
            require(fits, operation, || {
                format!("{name} is {t} at byte {}, want F32{shape:?} of dense states at multiples of 16", t.offset)
            })?;
        }
        sequences.check(operation, tokens)
    }

    /// Every (token, head) of a sequence in an order that keeps that of the tokens, for references.
    pub(crate) fn steps(&self, sequence: usize, memory: &HostMemory) -> Vec<[usize; 2]> {
        let (_, tokens) = self.sequences.ranges(self.tokens, memory).swap_remove(sequence);
        tokens.flat_map(|t| (0..self.heads).map(move |h| [t, h])).collect()
    }

    /// The state of a sequence before its first token.
    pub(crate) fn load(&self, state_in: &Tensor, sequence: usize, memory: &HostMemory) -> Vec<f64> {
        match place(self.slots, sequence, state_in.shape[3], memory) {
            Some(place) => memory.read(&state_in.narrow(3, place, 1)),
            None => vec![0.0; self.head_size * self.head_size * self.heads],
        }
    }

    /// The state of a sequence after its last token.
    pub(crate) fn store(&self, state_out: &Tensor, sequence: usize, state: &[f64], memory: &mut HostMemory) {
        if let Some(place) = place(self.slots, sequence, state_out.shape[3], memory) {
            memory.write(&state_out.narrow(3, place, 1), state);
        }
    }

    /// The addresses and numbers by which kernels find states: with slots, those of `state_out` stand for the slots.
    pub(crate) fn state_params(
        &self,
        states: [&Tensor; 2],
        at: &dyn Fn(&Tensor) -> Address,
    ) -> ([Address; 2], [u32; 2]) {
        let [state_in, state_out] = states;
        let in_stride = self.number(state_in.stride[3] / 4);
        match self.slots {
            Some(slots) => ([at(state_in), at(&slots)], [in_stride, self.number(state_in.shape[3])]),
            None => ([at(state_in), at(state_out)], [in_stride, self.number(state_out.stride[3] / 4)]),
        }
    }

    /// Whether the scratch memory, where there is one, is large enough.
    pub(crate) fn check_scratch(&self, scratch: Option<Tensor>, form: Form, bytes: usize) -> Result<(), Invalid> {
        let operation = self.operation;
        require(scratch.is_some() || form != Form::Chunked, operation, || {
            "the chunked form needs scratch memory, see scratch_bytes".into()
        })?;
        let has = scratch.map_or(bytes, |s| if s.is_dense() && s.offset.is_multiple_of(16) { s.span().1 } else { 0 });
        require(has >= bytes, operation, || {
            format!("{has} bytes of dense scratch memory at a multiple of 16, want {bytes}")
        })
    }

    /// Refuses head sizes without kernels, and more than 32-bit numbers reach.
    pub(crate) fn supported(&self, states: &[Tensor]) -> Result<(), Unsupported> {
        let operation = self.operation;
        if !matches!(self.head_size, 32 | 64 | 128) {
            let reason = format!("heads of {} (32, 64 and 128 are supported)", self.head_size);
            return Err(Unsupported { operation, reason });
        }
        let row = self.head_size * self.heads * 4;
        let units = self.sequences.count().max(self.chunks(LEAST_CHUNK)).saturating_mul(row);
        let strides = states.iter().map(|t| t.stride[3]).max().unwrap_or(0);
        within_32_bits(operation, [row * self.head_size, self.tokens, units, strides])
    }

    /// Whether the call runs in chunks, on a device where they fit. Chunks are worth it from `from` tokens on.
    pub(crate) fn is_chunked(&self, form: Form, scratch: Option<Tensor>, from: usize) -> bool {
        match form {
            Form::Auto => scratch.is_some() && self.sequences.longest(self.tokens) >= from,
            Form::Sequential => false,
            Form::Chunked => true,
        }
    }

    /// Numbers of chunks of this many tokens: at most one for each sequence stands for no whole chunk.
    pub(crate) fn chunks(&self, chunk: usize) -> usize {
        self.tokens / chunk + self.sequences.count()
    }

    /// Numbers of chunks of a choice; 0 for the sequential form.
    pub(crate) fn chunks_of(&self, choice: &Choice) -> usize {
        let defined = choice.launches[0].shader.defines.iter().find(|(name, _)| name == "CHUNK");
        let tokens = defined.map(|(_, n)| n.parse().expect("`pick` should have defined a number of tokens"));
        tokens.map_or(0, |n| self.chunks(n))
    }

    /// The chunked form where it was asked for and has launches, else the sequential one.
    pub(crate) fn choice(
        &self,
        form: Form,
        caps: &Caps,
        launches: Option<Vec<Launch>>,
        sequential: impl FnOnce() -> Choice,
    ) -> Result<Choice, Unsupported> {
        match launches {
            Some(launches) => Ok(Choice { path: Path::Scalar, launches }),
            None if form == Form::Chunked => {
                let (size, shared) = (self.head_size, caps.limits.max_shared_bytes);
                let threads = caps.limits.max_workgroup_invocations;
                let reason = format!("no chunk of heads of {size} fits {shared} shared bytes and {threads} threads");
                Err(Unsupported { operation: self.operation, reason })
            }
            None => Ok(sequential()),
        }
    }

    /// A size as the kernels take it.
    pub(crate) fn number(&self, n: usize) -> u32 {
        u32::try_from(n).expect("`supported` should have refused larger sizes")
    }

    /// A shader with what every recurrence defines.
    pub(crate) fn shader(&self, file: &'static str, params: String) -> Shader {
        let stem = file.rsplit('/').next().and_then(|f| f.strip_suffix(".comp")).unwrap_or(file);
        let name = if stem == self.operation { format!("{stem}.f32") } else { format!("{}.{stem}", self.operation) };
        Shader::new(name, file, params).define("S", self.head_size).define("SLOTS", u32::from(self.slots.is_some()))
    }

    /// The same for a sequential kernel with the mix of heads inside.
    pub(crate) fn shader_with_mix(&self, file: &'static str, params: String) -> Shader {
        let mut shader = self.shader(file, params).define("MIX", 1).define("EQUAL", 1);
        shader.name.push_str(".head_mix");
        shader
    }

    /// Lanes of a column and columns of a workgroup for the sequential form.
    pub(crate) fn columns(&self, caps: &Caps) -> (usize, usize) {
        // Sixteen keys a lane: few registers, and four times as many threads as columns. It must not depend on the
        // number of sequences, as the order of additions does.
        let lanes = self.head_size / 16;
        let mut columns = self.head_size.min(most_threads(caps) / lanes);
        // Few heads are spread over more workgroups, for the price of staging their keys more than once.
        let cores = if caps.is_cpu { 1 } else { caps.cores.unwrap_or(64) as usize };
        while columns > 16 && self.sequences.count() * self.heads * (self.head_size / columns) < 4 * cores {
            columns /= 2;
        }
        (lanes, columns)
    }

    /// The same with whole heads in a workgroup, for a mix of heads inside the kernel: where they fit, and where a launch
    /// more costs more than columns on fewer cores do.
    pub(crate) fn whole_heads(&self, caps: &Caps) -> Option<(usize, usize)> {
        let lanes = self.head_size / 16;
        let fits = lanes * self.head_size <= most_threads(caps) && self.sequences.longest(self.tokens) <= MOST_MIXED;
        fits.then_some((lanes, self.head_size))
    }
}

/// Most threads of a workgroup of the sequential form.
fn most_threads(caps: &Caps) -> usize {
    caps.limits.max_workgroup_invocations.min(caps.limits.max_workgroup_size[0]).min(256) as usize
}

/// Bytes of scratch memory of `floats` for each chunk and head.
pub(crate) fn scratch_bytes(heads: usize, tokens: usize, sequences: usize, floats: usize) -> usize {
    4 * floats * heads * (tokens / LEAST_CHUNK + sequences)
}

/// The largest chunk, of at most `most` tokens, whose kernels fit a device; `shared_floats` tells what a chunk needs.
/// Chunks of 64 were slower on a large GPU: few workgroups have room beside each other.
pub(crate) fn chunk(caps: &Caps, most: usize, shared_floats: impl Fn(usize) -> usize) -> Option<usize> {
    let fits = |&chunk: &usize| 4 * shared_floats(chunk) <= caps.limits.max_shared_bytes as usize;
    [32, LEAST_CHUNK].into_iter().filter(|&n| n <= most).find(fits)
}

/// Tells a shader of this many threads how `lanes` of them add up: by subgroups, or through shared memory.
pub(crate) fn lanes(shader: Shader, lanes: usize, threads: usize, caps: &Caps) -> Shader {
    let shader = shader.define("LANES", lanes);
    if shuffles(lanes, threads, caps) {
        shader.define("SHUFFLE", 1).subgroup(SubgroupRequest::Full)
    } else {
        shader.define("SHUFFLE", 0)
    }
}

/// Whether subgroups can add up neighbouring lanes of a workgroup of this many threads.
fn shuffles(lanes: usize, threads: usize, caps: &Caps) -> bool {
    let s = &caps.subgroups;
    let whole = s.max_size > 0 && threads.is_multiple_of(s.max_size as usize);
    lanes > 1 && s.shuffle && s.full && s.min_size as usize >= lanes && whole
}
