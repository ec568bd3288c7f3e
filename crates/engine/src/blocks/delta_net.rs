//! Delta nets: a state that maps keys to values, decays, and is corrected towards each token's value. Qwen's has one decay for each head,
//! Kimi's one for each key.

use kiln_gguf::TensorType;
use kiln_kernels::gated_delta_net::{self, Gate};
use kiln_kernels::recurrence::Form;
use kiln_kernels::tensor::Tensor;
use kiln_kernels::unary::Function;
use kiln_kernels::{copy, glu, l2_norm};

use super::mixer::{Convolution, Mixer, taps};
use crate::Error;
use crate::arch::Batch;
use crate::model::Loader;
use crate::plan::{Builder, Linear, Norm};

/// What gates the result of a delta net.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum OutputGate {
    /// x sigmoid(x) of it.
    Silu,
    /// Its sigmoid.
    Sigmoid,
}

/// What the heads of queries and keys are divided by.
#[derive(Clone, Copy, Debug)]
enum Length {
    /// Their length, but no less than this.
    AtLeast(f32),
    /// The root of the sum of their squares and this.
    Added {
        eps: f32,
        /// One over the root of the number of elements, for each element.
        weight: Tensor,
    },
}

impl Length {
    fn added(l: &mut Loader<'_>, eps: f32, size: usize) -> Length {
        let each = vec![1.0 / (size as f32).sqrt(); size];
        Length::Added { eps, weight: l.constant("delta.unit", &each, [size, 1, 1, 1]) }
    }
}

/// The rows of a delta net that come from one token.
struct Operands {
    /// Normed, as `k`.
    q: Tensor,
    k: Tensor,
    v: Tensor,
    g: Tensor,
    beta: Tensor,
    /// `[size * heads, tokens]`.
    gate: Tensor,
}

/// What all of them end with: the recurrence, a norm of each head, a gate, a matrix.
struct Core {
    size: usize,
    heads: usize,
    grouped: bool,
    /// What queries and keys are divided by.
    length: Length,
    decay: Gate,
    state: Tensor,
    norm: Norm,
    output_gate: OutputGate,
    output: Linear,
}

impl Core {
    /// Heads of length one.
    fn normed(&self, b: &mut Builder, name: &str, x: Tensor) -> Tensor {
        match self.length {
            Length::AtLeast(eps) => {
                let y = b.like(name, x);
                b.step(name, l2_norm::Call { x, y, eps });
                y
            }
            // The root of the mean square is that of the sum of squares over that of the number of elements.
            Length::Added { eps, weight } => {
                b.norm(name, x, &Norm::Rms { weight: Some(weight), eps: eps / self.size as f32 })
            }
        }
    }

    fn build(&self, b: &mut Builder, batch: &Batch, of: Operands) -> Tensor {
        let Core { size, heads, .. } = *self;
        let y = b.like("delta", of.v);
        let (sequences, slots) = batch.recurrence();
        b.step(
            "delta",
            gated_delta_net::Call {
                q: of.q,
                k: of.k,
                v: of.v,
                g: of.g,
                gate: self.decay,
                beta: of.beta,
                state: self.state,
                y,
                scale: 1.0 / (size as f32).sqrt(),
                grouped: self.grouped,
                sequences,
                slots,
                form: Form::Auto,
            },
        );
        let y = b.norm("heads_norm", y, &self.norm).reshape([size * heads, y.shape[2], 1, 1]);
        let y = match self.output_gate {
            OutputGate::Silu => b.gated("gated", glu::Gate::Swiglu, of.gate, y),
            OutputGate::Sigmoid => {
                let gate = b.function("gate.sigmoid", of.gate, Function::Sigmoid);
                b.multiply("gated", y, gate)
            }
        };
        b.linear("out", y, &self.output)
    }
}

/// How Qwen's delta net is read.
#[derive(Clone, Copy, Debug)]
pub struct DeltaSpec {
    /// Width of the tokens.
    pub hidden: usize,
    /// What norms add.
    pub eps: f32,
    /// Whether neighbouring heads share a head of keys, and the rates come with the decays in `ssm_ba`: Qwen 3 Next.
    pub grouped: bool,
    /// What gates the result.
    pub output_gate: OutputGate,
    /// Whether queries and keys are divided by the root of the sum of their squares and what norms add, not by no less than that.
    pub adds: bool,
}

/// Where queries, keys, values and gates of Qwen's delta net come from.
enum Source {
    /// Queries, keys and values in one matrix, gates in another.
    Two(Linear, Linear),
    /// All in one: of each head of keys its query, its key, then the values and the gates of its heads.
    One(Linear),
}

/// Where the rates and decays come from.
enum Rates {
    /// Two matrices, rates first.
    Two(Linear, Linear),
    /// One matrix: of each head of keys the rates of its heads, then their decays.
    One(Linear),
}

/// Qwen's delta net of one layer.
pub struct DeltaNet {
    key_heads: usize,
    source: Source,
    rates: Rates,
    convolution: Convolution,
    core: Core,
}

impl DeltaNet {
    /// Reads it; `layer` names its states.
    pub fn load(l: &mut Loader<'_>, spec: &DeltaSpec, layer: usize) -> Result<DeltaNet, Error> {
        let DeltaSpec { hidden, eps, grouped, output_gate, adds } = *spec;
        let keys = l.keys;
        let size = keys.count("ssm.state_size", 1 << 12)?;
        let (key_heads, heads) = (keys.count("ssm.group_count", 1 << 12)?, keys.count("ssm.time_step_rank", 1 << 12)?);
        let fits = heads.is_multiple_of(key_heads);
        keys.require(
            fits,
            "ssm.group_count",
            key_heads,
            &format!("a divisor of the {heads} heads (ssm.time_step_rank)"),
        )?;
        let inner = keys.count("ssm.inner_size", 1 << 20)?;
        keys.require(inner == heads * size, "ssm.inner_size", inner, &format!("{heads} heads of {size}"))?;
        let taps = taps(l, "ssm.conv_kernel")?;
        let wide = 2 * key_heads * size + inner;
        // Qwen 3 Next takes no factors of its matrices.
        let read = |l: &mut Loader<'_>, name: &str, shape: &[usize]| {
            if grouped { l.unscaled(name, shape) } else { l.linear(name, shape) }
        };
        let source = if grouped && !l.has("attn_qkv.weight") {
            Source::One(l.unscaled("ssm_in", &[hidden, wide + inner])?)
        } else {
            l.ignore_matrix("ssm_in");
            Source::Two(read(l, "attn_qkv", &[hidden, wide])?, read(l, "attn_gate", &[hidden, inner])?)
        };
        let rates = if grouped {
            Rates::One(l.unscaled("ssm_ba", &[hidden, 2 * heads])?)
        } else {
            Rates::Two(read(l, "ssm_beta", &[hidden, heads])?, read(l, "ssm_alpha", &[hidden, heads])?)
        };
        let core = Core {
            size,
            heads,
            grouped,
            length: if adds { Length::added(l, eps, size) } else { Length::AtLeast(eps) },
            decay: Gate::Softplus { a: l.vector("ssm_a", &[heads])?, bias: l.vector("ssm_dt.bias", &[heads])? },
            state: l.state(&format!("{layer}.delta.state"), &[size, size, heads]),
            norm: Norm::Rms { weight: Some(l.vector("ssm_norm.weight", &[size])?), eps },
            output_gate,
            output: read(l, "ssm_out", &[inner, hidden])?,
        };
        let convolution = Convolution::load(l, "ssm_conv1d", layer, [taps, wide], (false, true))?;
        Ok(DeltaNet { key_heads, source, rates, convolution, core })
    }

    /// Queries, keys and values in one column, and gates.
    fn sources(&self, b: &mut Builder, x: Tensor) -> (Tensor, Tensor) {
        let Core { size, heads, .. } = self.core;
        let (key_heads, tokens) = (self.key_heads, x.shape[1]);
        match &self.source {
            Source::Two(qkv, gate) => (b.linear("qkv", x, qkv), b.linear("gate", x, gate)),
            Source::One(all) => {
                let ratio = heads / key_heads;
                let all = b.linear("in", x, all).heads(0, (2 + 2 * ratio) * size, key_heads);
                let wide = (2 * key_heads + heads) * size;
                let qkv = b.fresh("qkv", TensorType::F32, [wide, tokens, 1, 1]);
                let gate = b.fresh("gate", TensorType::F32, [heads * size, tokens, 1, 1]);
                let parts = [
                    ("q", 0, 1, qkv.heads(0, size, key_heads)),
                    ("k", 1, 1, qkv.heads(key_heads * size, size, key_heads)),
                    ("v", 2, ratio, qkv.heads(2 * key_heads * size, ratio * size, key_heads)),
                    ("z", 2 + ratio, ratio, gate.heads(0, ratio * size, key_heads)),
                ];
                for (name, from, n, dst) in parts {
                    b.step(name, copy::Call { src: all.narrow(0, from * size, n * size), dst });
                }
                (qkv, gate)
            }
        }
    }

    /// Rates `[heads, tokens]` and what decays depend on, `[1, heads, tokens]`.
    fn rates(&self, b: &mut Builder, x: Tensor) -> (Tensor, Tensor) {
        let heads = self.core.heads;
        match &self.rates {
            Rates::Two(beta, alpha) => {
                let (beta, alpha) = (b.linear("beta", x, beta), b.linear("alpha", x, alpha));
                (beta, alpha.heads(0, 1, heads))
            }
            Rates::One(both) => {
                let ratio = heads / self.key_heads;
                let (key_heads, tokens) = (self.key_heads, x.shape[1]);
                let both = b.linear("ba", x, both).reshape([ratio, 2, key_heads, tokens]);
                let dst = b.fresh("beta+alpha", TensorType::F32, [ratio, key_heads, 2, tokens]);
                b.copy("beta+alpha", both, dst.permute([0, 2, 1, 3]));
                let dst = dst.reshape([2 * heads, tokens, 1, 1]);
                (dst.narrow(0, 0, heads), dst.heads(heads, 1, heads))
            }
        }
    }
}

impl Mixer for DeltaNet {
    fn build(&self, b: &mut Builder, batch: &Batch, x: Tensor) -> Tensor {
        let Core { size, heads, .. } = self.core;
        let key_heads = self.key_heads;
        let (qkv, gate) = self.sources(b, x);
        let (beta, g) = self.rates(b, x);
        let mixed = self.convolution.build(b, batch, "conv", qkv);
        let both = self.core.normed(b, "qk_norm", mixed.heads(0, size, 2 * key_heads));
        let [q, k] = [0, key_heads].map(|first| both.narrow(1, first, key_heads));
        let v = mixed.heads(2 * key_heads * size, size, heads);
        self.core.build(b, batch, Operands { q, k, v, g, beta, gate })
    }
}

/// How Kimi's delta net makes its decays.
#[derive(Clone, Copy, Debug, PartialEq)]
pub enum KimiDecay {
    /// a softplus(f + bias), a below 0.
    Softplus,
    /// bound sigmoid(a (f + bias)), a above 0.
    Bounded {
        /// The least that comes of it, below 0.
        bound: f32,
        /// Whether the file holds -a.
        negated: bool,
    },
}

/// How Kimi's delta net is read.
#[derive(Clone, Copy, Debug)]
pub struct KimiSpec {
    /// Width of the tokens.
    pub hidden: usize,
    /// Heads.
    pub heads: usize,
    /// What norms add, and the least length of queries and keys.
    pub eps: f32,
    /// Added to the squares of queries and keys, in the place of a least length.
    pub added: Option<f32>,
    /// What becomes of the decays.
    pub decay: KimiDecay,
}

/// Kimi's delta net of one layer: a decay for each key.
pub struct KimiDelta {
    /// Queries, keys, values, each with its convolution.
    parts: [(Linear, Convolution); 3],
    /// What decays depend on: one matrix, or two small ones.
    decays: Vec<Linear>,
    rates: Linear,
    gates: Vec<Linear>,
    core: Core,
}

impl KimiDelta {
    /// Reads it; `layer` names its states.
    pub fn load(l: &mut Loader<'_>, spec: &KimiSpec, layer: usize) -> Result<KimiDelta, Error> {
        let KimiSpec { hidden, heads, eps, added, decay } = *spec;
        let size = l.keys.count("kda.head_dim", 1 << 12)?;
        let length = match added {
            None => Length::AtLeast(eps),
            Some(eps) => Length::added(l, eps, size),
        };
        let (width, taps) = (heads * size, taps(l, "ssm.conv_kernel")?);
        let mut part = |name: &str| -> Result<(Linear, Convolution), Error> {
            let matrix = l.unscaled(&format!("attn_{name}"), &[hidden, width])?;
            let convolution = format!("ssm_conv1d_{name}");
            Ok((matrix, Convolution::load(l, &convolution, layer, [taps, width], (false, true))?))
        };
        let parts = [part("q")?, part("k")?, part("v")?];
        // Through a narrow middle, where the file has a second matrix.
        let pair = |l: &mut Loader<'_>, name: &str| -> Result<Vec<Linear>, Error> {
            let (first, second) = (format!("ssm_{name}_a"), format!("ssm_{name}_b"));
            if !l.has(&format!("{second}.weight")) {
                return Ok(vec![l.unscaled(&first, &[hidden, width])?]);
            }
            Ok(vec![l.unscaled(&first, &[hidden, size])?, l.unscaled(&second, &[size, width])?])
        };
        let decays = pair(l, "f")?;
        let gates = if l.has("ssm_g.weight") { vec![l.unscaled("ssm_g", &[hidden, width])?] } else { pair(l, "g")? };
        let (a, bias) = (l.vector("ssm_a", &[heads])?, l.vector("ssm_dt.bias", &[width])?);
        let core = Core {
            size,
            heads,
            grouped: false,
            length,
            decay: match decay {
                KimiDecay::Softplus => Gate::Softplus { a, bias },
                KimiDecay::Bounded { bound, negated: false } => Gate::Bounded { a, bias, bound },
                KimiDecay::Bounded { bound, negated: true } => {
                    let values: Vec<f32> = l.values("ssm_a")?.unwrap_or_default().iter().map(|a| -a).collect();
                    let a = l.constant(&l.full("ssm_a.negated"), &values, [heads, 1, 1, 1]);
                    Gate::Bounded { a, bias, bound }
                }
            },
            state: l.state(&format!("{layer}.delta.state"), &[size, size, heads]),
            norm: Norm::Rms { weight: Some(l.vector("ssm_norm.weight", &[size])?), eps },
            output_gate: OutputGate::Sigmoid,
            output: l.unscaled("attn_output", &[width, hidden])?,
        };
        Ok(KimiDelta { parts, decays, rates: l.unscaled("ssm_beta", &[hidden, heads])?, gates, core })
    }
}

impl Mixer for KimiDelta {
    fn build(&self, b: &mut Builder, batch: &Batch, x: Tensor) -> Tensor {
        let Core { size, heads, .. } = self.core;
        let [q, k, v] = [0, 1, 2].map(|i| {
            let (matrix, convolution) = &self.parts[i];
            let product = b.linear(["q", "k", "v"][i], x, matrix);
            convolution.build(b, batch, ["q_conv", "k_conv", "v_conv"][i], product).heads(0, size, heads)
        });
        let [q, k] = [("q_norm", q), ("k_norm", k)].map(|(name, x)| self.core.normed(b, name, x));
        let mut through = |names: [&str; 2], matrices: &[Linear]| {
            names.iter().zip(matrices).fold(x, |x, (name, matrix)| b.linear(name, x, matrix))
        };
        let g = through(["decay_a", "decay_b"], &self.decays).heads(0, size, heads);
        let gate = through(["gate_a", "gate_b"], &self.gates);
        let beta = b.linear("beta", x, &self.rates);
        self.core.build(b, batch, Operands { q, k, v, g, beta, gate })
    }
}
