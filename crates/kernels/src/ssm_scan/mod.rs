//! `ssm_scan`: the selective scan of state-space models, s = exp(D a) s + D x b and y = s c with D = softplus(dt). Mamba 1 has a decay for
//! each element of a state, Mamba 2 one for each head.

pub mod cases;
mod cpu;
mod reference;

use kiln_gguf::TensorType;
use kiln_gpu::{Address, Caps, Shader};

use crate::chunks::{self, Division, Task};
use crate::host::HostMemory;
use crate::operation::{
    Choice, Invalid, Operation, Path, Unsupported, Work, grid, maybe, require, within_32_bits, word,
};
use crate::recurrence::{Form, Sequences, check_slots};
use crate::tensor::Tensor;

const NAME: &str = "ssm_scan";

/// One line for the registry.
pub const SUMMARY: &str =
    "s = exp(D a) s + D x b, y = s c + skip x, D = softplus(dt + bias): the scan of state-space models";

/// Elements of a state that kernels have registers for: this many in each lane, in at most this many lanes.
const LANE_ELEMENTS: usize = 16;
const MOST_STATES: usize = 256;

/// Operands of `ssm_scan`, all F32.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Call {
    /// Inputs `[channels, heads, tokens]`; those of a token are dense. Mamba 1 has heads of one channel.
    pub x: Tensor,
    /// How much each head takes in, before softplus, `[heads, tokens]`; those of a token are dense.
    pub dt: Tensor,
    /// Added to `dt`, `[heads]`, dense.
    pub dt_bias: Option<Tensor>,
    /// Decays, `[states, heads]` or `[1, heads]`, dense. Not above 0 in trained models.
    pub a: Tensor,
    /// Where an input is written in the state, `[states, groups, tokens]`; those of a token are dense. Consecutive heads share a group.
    pub b: Tensor,
    /// What is read from the state, as `b`.
    pub c: Tensor,
    /// How much of the input is added to the result, `[heads]`, dense.
    pub skip: Option<Tensor>,
    /// `[states, channels, heads, sequences]`, or any number of them with slots. Dense, at a multiple of 16 bytes; updated in place.
    pub state: Tensor,
    /// Results, as `x`, dense.
    pub y: Tensor,
    /// Which tokens belong together. Results of tokens of no sequence are left alone.
    pub sequences: Sequences,
    /// I32 `[sequences]`, dense: where each sequence's state lies. A negative one is padding: the sequence starts from zeros, and its state
    /// goes nowhere.
    pub slots: Option<Tensor>,
    /// The way through the tokens. Chunks are for decays that are one for each head, and for heads of a multiple of 16 channels.
    pub form: Form,
}

kiln_gpu::params! {
    struct Params {
        x: Address,
        dt: Address,
        dt_bias: Address,
        a: Address,
        b: Address,
        c: Address,
        skip: Address,
        state: Address,
        y: Address,
        starts: Address,
        slots: Address,
        channels: u32,
        heads: u32,
        groups: u32,
        tokens: u32,
        sequences: u32,
        states: u32,
        x_stride: u32,
        dt_stride: u32,
        b_stride: u32,
        c_stride: u32,
    }
}

/// `[a, b, tokens]` whose a * b elements of a token are dense.
pub(crate) fn has_dense_tokens(t: &Tensor) -> bool {
    let dense = t.shape[1] == 1 || t.stride[1] == 4 * t.shape[0];
    t.ty == TensorType::F32
        && t.has_dense_rows()
        && dense
        && t.stride[2].is_multiple_of(4)
        && t.offset.is_multiple_of(4)
}

impl Call {
    /// dt as `[heads, 1, tokens]`.
    fn steps(&self) -> Tensor {
        self.dt.permute([0, 2, 1, 3])
    }

    /// Whether there are kernels of the chunked form for such shapes.
    fn can_be_chunked(&self) -> bool {
        self.a.shape[0] == 1 && self.x.shape[0].is_multiple_of(chunks::UNIT)
    }

    fn task(&self) -> Task {
        let [channels, heads, tokens, _] = self.x.shape;
        let (states, longest) = (self.sequences.count() * heads, self.sequences.longest(tokens));
        Task { operation: NAME, columns: channels, states, longest, most_chunk: usize::MAX, from: "from" }
    }

    /// What both kernels are told.
    fn shader(&self, name: &str, file: &'static str) -> Shader {
        Shader::new(name, file, Params::glsl())
            .define("N", self.b.shape[0])
            .define("BIAS", u32::from(self.dt_bias.is_some()))
            .define("SKIP", u32::from(self.skip.is_some()))
    }

    /// One token after the other.
    fn sequential(&self, caps: &Caps) -> Choice {
        let [channels, heads, ..] = self.x.shape;
        let [states, groups, ..] = self.b.shape;
        let lanes = states / LANE_ELEMENTS;
        let columns = channels * heads / groups;
        let limit = caps.limits.max_workgroup_invocations.min(caps.limits.max_workgroup_size[0]).min(256) as usize;
        let mut cols = (limit / lanes).min(columns.next_power_of_two());
        // Few columns are spread over more workgroups, for the price of staging b and c more than once.
        let cores = if caps.is_cpu { 1 } else { caps.cores_or_guess() as usize };
        while cols * lanes > 32 && self.sequences.count() * groups * columns.div_ceil(cols) < 2 * cores {
            cols /= 2;
        }
        let threads = lanes * cols;
        let floats = |step: usize| step * (2 * states + 3 * cols + threads);
        let budget = caps.limits.max_shared_bytes.min(24 << 10) as usize;
        let step = [16, 8, 4].into_iter().find(|&step| 4 * floats(step) <= budget).unwrap_or(2);
        let shader = self
            .shader(NAME, "ssm_scan/ssm_scan.comp")
            .define("PER_STATE", u32::from(self.a.shape[0] > 1))
            .define("LANES", lanes)
            .define("COLS", cols)
            .define("STEP", step)
            .define("WG", threads);
        let groups = self.sequences.count() * groups * columns.div_ceil(cols);
        Choice::one(Path::Scalar, shader, grid(groups, caps))
    }

    /// In chunks on a path, or what is missing.
    fn chunked(&self, caps: &Caps, path: Path) -> Result<Choice, String> {
        let states = self.b.shape[0];
        let task = self.task();
        let shared = |d: &Division| {
            let of_states = d.operand(2 * d.chunk + d.cols, states);
            let of_tokens = d.operand(2 * d.chunk, d.cols) + d.operand(d.chunk, d.chunk);
            let sums = Division::floats(d.chunk, d.cols) + Division::floats(d.chunk, d.cols.max(d.chunk));
            of_states + of_tokens + sums + 8 * d.chunk + 16
        };
        let division = Division::new(&task, caps, path, shared)?;
        // Four elements at once, where they lie so that a device can read them.
        let aligned = [self.x, self.b, self.c, self.y]
            .iter()
            .all(|t| t.offset.is_multiple_of(16) && t.stride[2].is_multiple_of(16));
        let name = format!("{NAME}.chunked.{}", path.name());
        let shader = self.shader(&name, "ssm_scan/chunked.comp").define("ALIGNED", u32::from(aligned));
        let groups = grid(task.states * task.columns.div_ceil(division.cols), caps);
        Ok(Choice::one(path, division.defines(shader, caps), groups))
    }
}

impl Operation for Call {
    fn name(&self) -> &'static str {
        NAME
    }

    fn reads(&self) -> Vec<Tensor> {
        let operands = [self.x, self.dt, self.a, self.b, self.c, self.state];
        let places = self.sequences.tensor().into_iter().chain(self.slots);
        operands.into_iter().chain(self.dt_bias).chain(self.skip).chain(places).collect()
    }

    fn writes(&self) -> Vec<Tensor> {
        vec![self.y, self.state]
    }

    fn check(&self) -> Result<(), Invalid> {
        let [channels, heads, tokens, more] = self.x.shape;
        let [states, groups, ..] = self.b.shape;
        require(more == 1 && !self.x.is_empty(), NAME, || format!("x is {}, want [channels, heads, tokens]", self.x))?;
        require(groups > 0 && states > 0 && heads.is_multiple_of(groups), NAME, || {
            format!("b is {}: {heads} heads are no multiple of its groups", self.b)
        })?;
        let by_token = [
            ("x", self.x, [channels, heads, tokens, 1]),
            ("dt", self.steps(), [heads, 1, tokens, 1]),
            ("b", self.b, [states, groups, tokens, 1]),
            ("c", self.c, [states, groups, tokens, 1]),
        ];
        for (name, t, shape) in by_token {
            require(t.shape == shape && has_dense_tokens(&t), NAME, || {
                format!("{name} is {t}, want F32{shape:?} with the elements of a token dense")
            })?;
        }
        self.sequences.check(NAME, tokens)?;
        let count = match self.slots {
            Some(slots) => check_slots(NAME, slots, self.sequences).map(|()| self.state.shape[3].max(1))?,
            None => self.sequences.count(),
        };
        let decays = if self.a.shape[0] == 1 { 1 } else { states };
        let of_heads = [heads, 1, 1, 1];
        let dense = [
            ("a", Some(self.a), [decays, heads, 1, 1]),
            ("dt_bias", self.dt_bias, of_heads),
            ("skip", self.skip, of_heads),
            ("state", Some(self.state), [states, channels, heads, count]),
            ("y", Some(self.y), [channels, heads, tokens, 1]),
        ];
        for (name, t, shape) in dense {
            let Some(t) = t else { continue };
            let unit = if name == "state" { 16 } else { 4 };
            let fits = t.ty == TensorType::F32 && t.is_dense() && t.shape == shape && t.offset.is_multiple_of(unit);
            require(fits, NAME, || format!("{name} is {t} at byte {}, want dense F32{shape:?}", t.offset))?;
        }
        require(self.form != Form::Chunked || self.can_be_chunked(), NAME, || {
            format!("heads of {channels} channels with {decays} decays cannot be scanned in chunks")
        })
    }

    fn pick(&self, caps: &Caps, want: Option<Path>) -> Result<Choice, Unsupported> {
        let [channels, heads, tokens, _] = self.x.shape;
        let states = self.b.shape[0];
        if !states.is_power_of_two() || !(LANE_ELEMENTS..=MOST_STATES).contains(&states) {
            let reason = format!("states of {states} (16, 32, 64, 128 and 256 are supported)");
            return Err(Unsupported { operation: NAME, reason });
        }
        let strides = [self.x, self.steps(), self.b, self.c].map(|t| t.stride[2]);
        let numbers = [tokens, 4 * states * channels * heads, self.sequences.count() * channels * heads];
        within_32_bits(NAME, numbers.into_iter().chain(strides))?;
        let form = if self.can_be_chunked() { self.form } else { Form::Sequential };
        let chunked = |path| self.chunked(caps, path);
        chunks::choose(&self.task(), caps, (form, want), chunked, || self.sequential(caps))
    }

    fn params(&self, _: &Choice, _: usize, at: &dyn Fn(&Tensor) -> Address) -> Vec<u8> {
        let maybe = maybe(at);
        let stride = |t: Tensor| word(t.stride[2] / 4);
        let [channels, heads, tokens, _] = self.x.shape.map(word);
        Params {
            x: at(&self.x),
            dt: at(&self.dt),
            dt_bias: maybe(self.dt_bias),
            a: at(&self.a),
            b: at(&self.b),
            c: at(&self.c),
            skip: maybe(self.skip),
            state: at(&self.state),
            y: at(&self.y),
            starts: maybe(self.sequences.tensor()),
            slots: maybe(self.slots),
            channels,
            heads,
            groups: word(self.b.shape[1]),
            tokens,
            sequences: word(self.sequences.count()),
            states: word(self.state.shape[3]),
            x_stride: stride(self.x),
            dt_stride: stride(self.steps()),
            b_stride: stride(self.b),
            c_stride: stride(self.c),
        }
        .bytes()
    }

    fn reference(&self, memory: &mut HostMemory) {
        reference::reference(self, memory);
    }

    fn cpu(&self, memory: &mut HostMemory) {
        cpu::compute(self, memory);
    }

    fn work(&self) -> Work {
        let states = self.state.len() / self.state.shape[3].max(1);
        let tokens = self.x.len() + self.y.len() + self.dt.len() + self.b.len() + self.c.len();
        let bytes = 4 * tokens + 8 * states * self.sequences.count();
        Work { bytes: bytes as f64, flops: (5 * states * self.x.shape[2]) as f64 }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::tensor::Slot;

    #[test]
    fn operands_that_do_not_fit_are_named() {
        let tensor = |slot, shape| Tensor::dense(Slot(slot), TensorType::F32, shape);
        let good = Call {
            x: tensor(0, [8, 4, 3, 1]),
            dt: tensor(1, [4, 3, 1, 1]),
            dt_bias: Some(tensor(2, [4, 1, 1, 1])),
            a: tensor(3, [1, 4, 1, 1]),
            b: tensor(4, [16, 2, 3, 1]),
            c: tensor(5, [16, 2, 3, 1]),
            skip: None,
            state: tensor(6, [16, 8, 4, 1]),
            y: tensor(7, [8, 4, 3, 1]),
            sequences: Sequences::Equal(1),
            slots: None,
            form: Form::Auto,
        };
        assert_eq!(good.check(), Ok(()));
        let reason = |call: Call| call.check().unwrap_err().reason;
        assert!(reason(Call { b: tensor(4, [16, 3, 3, 1]), ..good }).contains("4 heads"));
        assert!(reason(Call { dt: tensor(1, [3, 3, 1, 1]), ..good }).contains("dt is"));
        assert!(reason(Call { a: tensor(3, [8, 4, 1, 1]), ..good }).contains("want dense F32[16, 4, 1, 1]"));
        assert!(reason(Call { c: tensor(5, [8, 2, 3, 1]), ..good }).contains("c is"));
        assert!(reason(Call { skip: Some(good.x), ..good }).contains("skip is"));
        assert!(reason(Call { state: tensor(6, [16, 8, 4, 2]), ..good }).contains("state is"));
        assert!(reason(Call { form: Form::Chunked, ..good }).contains("heads of 8 channels"));
    }
}
