//! `gated_delta_net`: a state that maps keys to values, decays, and is corrected towards each token's value: Z = e^g Z, then
//! Z += k beta (v - Z k), y = Z q. The decay is one for each head, or one for each key (Kimi delta attention).

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
use crate::recurrence::{Form, Sequences, check_slots, lanes};
use crate::ssm_scan::has_dense_tokens;
use crate::tensor::Tensor;

const NAME: &str = "gated_delta_net";

/// One line for the registry.
pub const SUMMARY: &str =
    "Z = e^g Z, Z += k beta (v - Z k), y = scale Z q: the gated delta rule, one decay a head or a key";

/// Keys that a thread keeps in registers.
const LANE_KEYS: usize = 16;
/// Most tokens of a chunk where every key has its own decay: each pair of tokens has a sum over all keys to itself.
const MOST_CHUNK_OF_VECTORS: usize = 16;

/// What becomes of `g`: the decay is e to the power of it.
#[derive(Clone, Copy, Debug, PartialEq)]
pub enum Gate {
    /// g itself.
    Log,
    /// a softplus(g + bias).
    Softplus {
        /// `[heads]`, dense.
        a: Tensor,
        /// As `g` of one token, dense.
        bias: Tensor,
    },
    /// bound sigmoid(a (g + bias)).
    Bounded {
        /// `[heads]`, dense.
        a: Tensor,
        /// As `g` of one token, dense.
        bias: Tensor,
        /// The least that comes of it, below 0.
        bound: f32,
    },
}

impl Gate {
    /// a and bias, where there are some.
    fn operands(self) -> impl Iterator<Item = Tensor> {
        let both = match self {
            Gate::Log => None,
            Gate::Softplus { a, bias } | Gate::Bounded { a, bias, .. } => Some([a, bias]),
        };
        both.into_iter().flatten()
    }
}

/// Operands of `gated_delta_net`, all F32. The elements of a token are dense in each, and tokens any multiple of 4 bytes apart.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Call {
    /// What is read, `[S, key_heads, tokens]`.
    pub q: Tensor,
    /// Keys, as `q`; of length one in trained models.
    pub k: Tensor,
    /// Values `[S, heads, tokens]`.
    pub v: Tensor,
    /// What decays depend on, `[1, heads, tokens]` or `[S, heads, tokens]`.
    pub g: Tensor,
    /// What becomes of `g`.
    pub gate: Gate,
    /// How far a state is corrected, before the sigmoid, `[heads, tokens]`.
    pub beta: Tensor,
    /// `[S keys, S values, heads, sequences]`, or any number of them with slots. Dense, at a multiple of 16 bytes; updated in place.
    pub state: Tensor,
    /// Results, as `v`, dense.
    pub y: Tensor,
    /// Factor of `y`.
    pub scale: f32,
    /// Which heads share a head of keys: neighbours, else those a number of key heads apart.
    pub grouped: bool,
    /// Which tokens belong together. Results of tokens of no sequence are left alone.
    pub sequences: Sequences,
    /// I32 `[sequences]`, dense: where each sequence's state lies. A negative one is padding: the sequence starts from zeros, and its state
    /// goes nowhere.
    pub slots: Option<Tensor>,
    /// The way through the tokens.
    pub form: Form,
}

kiln_gpu::params! {
    struct Params {
        q: Address,
        k: Address,
        v: Address,
        g: Address,
        beta: Address,
        a: Address,
        bias: Address,
        state: Address,
        y: Address,
        starts: Address,
        slots: Address,
        heads: u32,
        tokens: u32,
        sequences: u32,
        states: u32,
        q_stride: u32,
        k_stride: u32,
        v_stride: u32,
        g_stride: u32,
        beta_stride: u32,
        scale: f32,
    }
}

impl Call {
    /// The head of keys of a head.
    fn key_head(&self, head: usize) -> usize {
        let [_, heads, ..] = self.v.shape;
        let [_, key_heads, ..] = self.q.shape;
        if self.grouped { head / (heads / key_heads) } else { head % key_heads }
    }

    /// beta as `[heads, 1, tokens]`.
    fn rates(&self) -> Tensor {
        self.beta.permute([0, 2, 1, 3])
    }

    /// Whether every key has its own decay.
    fn has_vectors(&self) -> bool {
        self.g.shape[0] > 1
    }

    fn task(&self) -> Task {
        let [size, heads, tokens, _] = self.v.shape;
        let (states, longest) = (self.sequences.count() * heads, self.sequences.longest(tokens));
        let (most_chunk, from) =
            if self.has_vectors() { (MOST_CHUNK_OF_VECTORS, "vectors") } else { (usize::MAX, "from") };
        Task { operation: NAME, columns: size, states, longest, most_chunk, from }
    }

    /// What both kernels are told.
    fn shader(&self, name: &str, file: &'static str) -> Shader {
        let (gate, bound) = match self.gate {
            Gate::Log => (0u32, 0.0),
            Gate::Softplus { .. } => (1, 0.0),
            Gate::Bounded { bound, .. } => (2, bound),
        };
        Shader::new(name, file, Params::glsl())
            .define("S", self.v.shape[0])
            .define("VECTOR", u32::from(self.has_vectors()))
            .define("GATE", gate)
            // What is the same for a whole model is part of the shader: 128 bytes of parameters hold no more.
            .define("BOUND", format!("uintBitsToFloat({}u)", bound.to_bits()))
            .define("KEY_HEADS", self.q.shape[1])
            .define("GROUPED", u32::from(self.grouped))
    }

    /// One token after the other.
    fn sequential(&self, caps: &Caps) -> Choice {
        let [size, heads, ..] = self.v.shape;
        let per_value = size / LANE_KEYS;
        let limit = caps.limits.max_workgroup_invocations.min(caps.limits.max_workgroup_size[0]).min(256) as usize;
        let mut cols = size.min(limit / per_value);
        // Few heads are spread over more workgroups, for the price of staging their keys more than once.
        let cores = if caps.is_cpu { 1 } else { caps.cores_or_guess() as usize };
        while cols > 16 && self.sequences.count() * heads * (size / cols) < 4 * cores {
            cols /= 2;
        }
        let threads = per_value * cols;
        let staged = (2 + usize::from(self.has_vectors())) * size;
        let floats = |step: usize| step * (staged + cols + threads + 2) + threads;
        let budget = caps.limits.max_shared_bytes.min(24 << 10) as usize;
        let step = [16, 8, 4].into_iter().find(|&step| 4 * floats(step) <= budget).unwrap_or(2);
        let shader = self.shader(NAME, "gated_delta_net/gated_delta_net.comp");
        let shader = shader.define("COLS", cols).define("STEP", step).define("WG", threads);
        let groups = grid(self.sequences.count() * heads * (size / cols), caps);
        Choice::one(Path::Scalar, lanes(shader, per_value, threads, caps), groups)
    }

    /// In chunks on a path, or what is missing.
    fn chunked(&self, caps: &Caps, path: Path) -> Result<Choice, String> {
        let size = self.v.shape[0];
        let task = self.task();
        let vectors = self.has_vectors();
        let shared = |d: &Division| {
            let later = d.operand(d.chunk, d.chunk) + d.operand(2 * d.chunk, d.cols);
            let queries = d.operand(d.chunk, size).max(later);
            let sums = 2 * (Division::floats(d.chunk, d.chunk) + Division::floats(d.chunk, d.cols));
            let of_gates =
                if vectors { d.operand(2 * d.chunk, size) + 4 * size * (d.chunk + d.tile) } else { 8 * d.chunk };
            queries + d.operand(d.chunk + d.cols, size) + sums + of_gates + 4 * d.chunk + 16
        };
        let division = Division::new(&task, caps, path, shared)?;
        // Four elements at once, where they lie so that a device can read them.
        let aligned = [self.q, self.k, self.v, self.y]
            .iter()
            .all(|t| t.offset.is_multiple_of(16) && t.stride[2].is_multiple_of(16));
        let name = format!("{NAME}.chunked.{}", path.name());
        let shader = self.shader(&name, "gated_delta_net/chunked.comp").define("ALIGNED", u32::from(aligned));
        let groups = grid(task.states * task.columns.div_ceil(division.cols), caps);
        Ok(Choice::one(path, division.defines(shader, caps), groups))
    }
}

impl Operation for Call {
    fn name(&self) -> &'static str {
        NAME
    }

    fn reads(&self) -> Vec<Tensor> {
        let operands = [self.q, self.k, self.v, self.g, self.beta, self.state];
        let places = self.sequences.tensor().into_iter().chain(self.slots);
        operands.into_iter().chain(self.gate.operands()).chain(places).collect()
    }

    fn writes(&self) -> Vec<Tensor> {
        vec![self.y, self.state]
    }

    fn check(&self) -> Result<(), Invalid> {
        let [size, heads, tokens, more] = self.v.shape;
        let key_heads = self.q.shape[1];
        require(more == 1 && !self.v.is_empty(), NAME, || format!("v is {}, want [S, heads, tokens]", self.v))?;
        require(key_heads > 0 && heads.is_multiple_of(key_heads), NAME, || {
            format!("{heads} heads are no multiple of {key_heads} heads of keys")
        })?;
        let gates = if self.g.shape[0] == 1 { 1 } else { size };
        let by_token = [
            ("q", self.q, [size, key_heads, tokens, 1]),
            ("k", self.k, [size, key_heads, tokens, 1]),
            ("v", self.v, [size, heads, tokens, 1]),
            ("g", self.g, [gates, heads, tokens, 1]),
            ("beta", self.rates(), [heads, 1, tokens, 1]),
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
        let dense = [("state", self.state, [size, size, heads, count], 16), ("y", self.y, [size, heads, tokens, 1], 4)];
        for (name, t, shape, unit) in dense {
            let fits = t.ty == TensorType::F32 && t.is_dense() && t.shape == shape && t.offset.is_multiple_of(unit);
            require(fits, NAME, || format!("{name} is {t} at byte {}, want dense F32{shape:?}", t.offset))?;
        }
        for ((name, len), t) in [("a", heads), ("bias", gates * heads)].into_iter().zip(self.gate.operands()) {
            let fits = t.ty == TensorType::F32 && t.is_dense() && t.len() == len && t.offset.is_multiple_of(4);
            require(fits, NAME, || format!("{name} is {t}, want {len} dense F32"))?;
        }
        Ok(())
    }

    fn pick(&self, caps: &Caps, want: Option<Path>) -> Result<Choice, Unsupported> {
        let [size, heads, tokens, _] = self.v.shape;
        if !matches!(size, 16 | 32 | 64 | 128) {
            let reason = format!("heads of {size} (16, 32, 64 and 128 are supported)");
            return Err(Unsupported { operation: NAME, reason });
        }
        let strides = [self.q, self.k, self.v, self.g, self.rates()].map(|t| t.stride[2]);
        let numbers = [tokens, 4 * size * size * heads, self.sequences.count() * heads * size];
        within_32_bits(NAME, numbers.into_iter().chain(strides))?;
        let chunked = |path| self.chunked(caps, path);
        chunks::choose(&self.task(), caps, (self.form, want), chunked, || self.sequential(caps))
    }

    fn params(&self, _: &Choice, _: usize, at: &dyn Fn(&Tensor) -> Address) -> Vec<u8> {
        let maybe = maybe(at);
        let stride = |t: Tensor| word(t.stride[2] / 4);
        let mut of_gate = self.gate.operands();
        Params {
            q: at(&self.q),
            k: at(&self.k),
            v: at(&self.v),
            g: at(&self.g),
            beta: at(&self.beta),
            a: maybe(of_gate.next()),
            bias: maybe(of_gate.next()),
            state: at(&self.state),
            y: at(&self.y),
            starts: maybe(self.sequences.tensor()),
            slots: maybe(self.slots),
            heads: word(self.v.shape[1]),
            tokens: word(self.v.shape[2]),
            sequences: word(self.sequences.count()),
            states: word(self.state.shape[3]),
            q_stride: stride(self.q),
            k_stride: stride(self.k),
            v_stride: stride(self.v),
            g_stride: stride(self.g),
            beta_stride: stride(self.rates()),
            scale: self.scale,
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
        let tokens = [self.q, self.k, self.v, self.g, self.beta, self.y].iter().map(Tensor::len).sum::<usize>();
        let bytes = 4 * tokens + 8 * states * self.sequences.count();
        Work { bytes: bytes as f64, flops: (7 * states * self.v.shape[2]) as f64 }
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
            q: tensor(0, [16, 2, 3, 1]),
            k: tensor(1, [16, 2, 3, 1]),
            v: tensor(2, [16, 4, 3, 1]),
            g: tensor(3, [1, 4, 3, 1]),
            gate: Gate::Log,
            beta: tensor(4, [4, 3, 1, 1]),
            state: tensor(5, [16, 16, 4, 1]),
            y: tensor(6, [16, 4, 3, 1]),
            scale: 0.25,
            grouped: false,
            sequences: Sequences::Equal(1),
            slots: None,
            form: Form::Auto,
        };
        assert_eq!(good.check(), Ok(()));
        let reason = |call: Call| call.check().unwrap_err().reason;
        assert!(reason(Call { q: tensor(0, [16, 3, 3, 1]), ..good }).contains("4 heads"));
        assert!(reason(Call { k: tensor(1, [8, 2, 3, 1]), ..good }).contains("k is"));
        assert!(reason(Call { g: tensor(3, [8, 4, 3, 1]), ..good }).contains("want F32[16, 4, 3, 1]"));
        assert!(reason(Call { beta: tensor(4, [3, 3, 1, 1]), ..good }).contains("beta is"));
        assert!(reason(Call { state: tensor(5, [16, 16, 4, 2]), ..good }).contains("state is"));
        let gate = Gate::Softplus { a: tensor(7, [4, 1, 1, 1]), bias: tensor(8, [5, 1, 1, 1]) };
        assert!(reason(Call { gate, ..good }).contains("bias is"));
    }
}
