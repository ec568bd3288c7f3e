//! What kinds of attention share: rotary positions, the operation over the caches of a batch, gates of its result, and factors
//! of queries that grow with the position.

use kiln_gguf::TensorType;
use kiln_kernels::flash_attention::{self, Mask, Pages, Window};
use kiln_kernels::rope;
use kiln_kernels::tensor::Tensor;
use kiln_kernels::unary::Function;

use crate::Error;
use crate::arch::{Batch, PAGE};
use crate::model::Loader;
use crate::model::parts::Rope;
use crate::plan::{Builder, Linear, Source};

/// What is turned by its position.
pub struct Turned {
    /// `[width, heads, rows]`.
    pub x: Tensor,
    /// The result.
    pub y: Tensor,
    /// The table of turns.
    pub freqs: Tensor,
    /// The first turned element of a head.
    pub offset: usize,
}

/// Adds the step that turns heads by their positions, or by their coordinates where those are others.
pub fn turned(b: &mut Builder, batch: &Batch, name: &str, what: Turned, rope: &Rope) {
    let Turned { x, y, freqs, offset } = what;
    let (params, positions) = (&rope.params, batch.ports.coordinates.unwrap_or(batch.ports.positions));
    let (style, sections, positions) = match rope.several {
        Some(several) if positions.shape[1] == 4 => (several.style, several.sections, positions),
        _ => (params.style, params.sections, positions.narrow(1, 0, 1)),
    };
    b.step(
        name,
        rope::Call {
            x,
            positions,
            freqs,
            y,
            style,
            n_dims: params.n_dims,
            offset,
            sections,
            magnitude: params.magnitude(),
            backward: false,
        },
    );
}

/// Attention over a cache: everything but its operands.
#[derive(Clone, Copy, Debug)]
pub struct Attended {
    /// Query heads.
    pub heads: usize,
    /// Key and value heads.
    pub kv_heads: usize,
    /// Width of a head of queries and keys.
    pub head_dim: usize,
    /// Width of a head of values.
    pub value_dim: usize,
    /// Factor of the scores.
    pub scale: f32,
    /// With c > 0, scores become c * tanh(score / c).
    pub softcap: f32,
    /// Steepness of ALiBi; 0 for none.
    pub max_bias: f32,
    /// Number of the last positions a token sees, its own included; of the next ones as well, where it sees those.
    pub window: Option<usize>,
    /// Number of positions in a chunk: tokens see their own chunk alone, up to themselves.
    pub chunk: Option<usize>,
    /// Whether a token sees its sequence up to itself; if not, all of it.
    pub causal: bool,
}

impl Attended {
    /// The window that tokens see through: only what lies behind a token is ever forgotten.
    pub fn kept(&self) -> Option<usize> {
        self.window.or(self.chunk).filter(|_| self.causal)
    }

    /// The rows of a batch that go on by one token, and those of prompts, over the keys of their sequences: `q [width, heads,
    /// rows]`, caches `[width * kv_heads, rows]`. Gives `[value width * heads, rows]`.
    pub fn build(&self, b: &mut Builder, batch: &Batch, q: Tensor, caches: [Tensor; 2], extras: Extras) -> Tensor {
        let shape = batch.shape;
        let out = b.fresh("attended", TensorType::F32, [self.value_dim * self.heads, shape.rows(), 1, 1]);
        let operands = Operands { q, caches, out, extras };
        if shape.decode > 0 {
            let part = Part { rows: 0, sequences: [0, shape.decode], tokens: 1 };
            b.step("", self.part(batch, &operands, part));
        }
        if shape.prompt > 0 {
            let sequences = [shape.decode, shape.pieces];
            let part = Part { rows: shape.decode, sequences, tokens: shape.prompt };
            let mut call = self.part(batch, &operands, part);
            call.sequences = (shape.pieces > 1).then_some(batch.ports.owners);
            if let (Some(seen), Mask::Causal { length, window, both, .. }) = (batch.ports.seen, call.mask) {
                call.mask = Mask::Causal { positions: seen, length, window, both };
            }
            b.step("prompt", call);
        }
        out
    }

    /// Each row over the keys of a list of its own, `lists [room, columns]` and their numbers `[columns]`, where there is a column for each row or
    /// for each head of keys of each row. Otherwise as [`Attended::build`].
    pub fn over_lists(
        &self,
        b: &mut Builder,
        q: Tensor,
        [k_cache, v_cache]: [Tensor; 2],
        sinks: Option<Tensor>,
        [list, counts]: [Tensor; 2],
    ) -> Tensor {
        let Attended { heads, kv_heads, head_dim, value_dim, .. } = *self;
        let (rows, columns) = (q.shape[2], list.shape[1]);
        let groups = columns / rows;
        let out = b.fresh("attended", TensorType::F32, [value_dim * heads, rows, 1, 1]);
        // Where every head of keys has a list, rows of the list are those of single heads.
        let keys_of = |cache: Tensor, width: usize| match groups {
            1 => keys(cache, [width, kv_heads]),
            _ => cache.reshape([width, cache.shape[1] * kv_heads, 1, 1]),
        };
        // The keys of a list are as many as it says, wherever the token stands: the list says what that sees.
        let mask = Mask::Causal { positions: counts, length: counts, window: None, both: true };
        let plain = flash_attention::Call::plain(
            q.reshape([head_dim, 1, heads / groups, columns]),
            keys_of(k_cache, head_dim),
            keys_of(v_cache, value_dim),
            out.reshape([value_dim, heads / groups, 1, columns]),
            self.scale,
        );
        b.step("", flash_attention::Call { mask, pages: Some(Pages { table: list, size: 1 }), sinks, ..plain });
        out
    }

    fn part(&self, batch: &Batch, operands: &Operands, part: Part) -> flash_attention::Call {
        let Attended { heads, kv_heads, head_dim, value_dim, .. } = *self;
        let Part { rows: first, sequences: [sequence, sequences], tokens } = part;
        let Operands { q, caches: [k_cache, v_cache], out, extras } = *operands;
        let Extras { sinks, distances, source } = extras;
        // Among rows that go on, each is a sequence of its own; those of prompts lie one after the other.
        let batches = if tokens == 1 && first == 0 && batch.shape.decode > 0 { sequences } else { 1 };
        let n = tokens * batches;
        let shape = |width: usize| [width, heads, tokens, batches];
        let ports = &batch.ports;
        let own = Source { table: batch.places(self.kept()).table, lengths: ports.lengths };
        let Source { table, lengths } = source.unwrap_or(own);
        flash_attention::Call {
            mask: Mask::Causal {
                positions: ports.positions.narrow(0, first, n),
                length: lengths.narrow(0, sequence, sequences),
                window: self.window.map(Window::Last).or(self.chunk.map(Window::Chunk)),
                both: !self.causal,
            },
            pages: Some(Pages { table: table.narrow(1, sequence, sequences), size: PAGE }),
            sinks,
            distances,
            max_bias: self.max_bias,
            logit_softcap: self.softcap,
            // Layers with a window have pages of their own.
            shares: batch.shape.shares && batches > 1 && self.window.is_none() && self.chunk.is_none(),
            ..flash_attention::Call::plain(
                q.narrow(2, first, n).reshape(shape(head_dim)).permute([0, 2, 1, 3]),
                keys(k_cache, [head_dim, kv_heads]),
                keys(v_cache, [value_dim, kv_heads]),
                out.narrow(1, first, n).reshape(shape(value_dim)),
                self.scale,
            )
        }
    }
}

/// A cache row holds all heads of a token; attention wants `[width, keys, heads]`.
pub fn keys(cache: Tensor, [width, heads]: [usize; 2]) -> Tensor {
    let (rows, ty) = (cache.shape[1], cache.ty);
    let head = ty.row_bytes(width).unwrap_or_default();
    Tensor {
        shape: [width, rows, heads, 1],
        stride: [cache.stride[0], cache.stride[1], head, cache.stride[2]],
        ..cache
    }
}

/// What attention reads and writes.
struct Operands {
    q: Tensor,
    caches: [Tensor; 2],
    out: Tensor,
    extras: Extras,
}

/// What some models have beside queries, keys and values.
#[derive(Clone, Copy, Debug, Default)]
pub struct Extras {
    /// F32 `[heads]`: one more score for each head, which takes part in the sum alone.
    pub sinks: Option<Tensor>,
    /// F32 `[heads, distances]`: what scores get by the distance of keys (`flash_attention::Call::distances`).
    pub distances: Option<Tensor>,
    /// Keys are those of the text that a sequence answers, in the place of its own.
    pub source: Option<Source>,
}

impl Extras {
    /// Sinks alone, where there are some.
    pub fn sinks(sinks: Option<Tensor>) -> Extras {
        Extras { sinks, ..Extras::default() }
    }
}

/// Some rows of a batch: the first one, the first sequence and the number of sequences, tokens of each batch.
struct Part {
    rows: usize,
    sequences: [usize; 2],
    tokens: usize,
}

/// `[width, heads, rows]` as `[width * heads, rows]`.
pub fn flat(t: Tensor) -> Tensor {
    t.reshape([t.shape[0] * t.shape[1], t.shape[2], 1, 1])
}

/// What gates the result of attention before the output matrix: a function of a product of the normed input, `attn_gate`, with
/// one row for each head or for each element.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum ResultGate {
    /// Nothing.
    None,
    /// 1 / (1 + e^-x).
    Sigmoid,
    /// The same; the rows of its matrix stand in `attn_q`, those of each head behind its queries.
    InQueries,
    /// ln(1 + e^x).
    Softplus,
    /// log2(1 + 2^x); the factor of the matrix counts.
    Log2,
}

/// A gate that was read.
#[derive(Clone, Debug)]
pub struct Gated {
    matrix: Linear,
    kind: ResultGate,
    heads: usize,
}

impl ResultGate {
    /// Reads the matrix for a result of so many heads of this width.
    pub fn load(self, l: &mut Loader<'_>, hidden: usize, [heads, width]: [usize; 2]) -> Result<Option<Gated>, Error> {
        if matches!(self, ResultGate::None | ResultGate::InQueries) {
            return Ok(None);
        }
        let by_head = l.shape("attn_gate.weight").is_some_and(|shape| shape[1] == heads);
        let rows = if by_head { heads } else { heads * width };
        let mut matrix = l.matrix("attn_gate", &[hidden, rows])?;
        let scale = l.scale("attn_gate")?;
        if self == ResultGate::Log2 {
            matrix.scale = scale;
        }
        Ok(Some(Gated { matrix, kind: self, heads }))
    }
}

impl Gated {
    /// Gates `y [width * heads, rows]` by the normed input `x`.
    pub fn build(&self, b: &mut Builder, x: Tensor, y: Tensor) -> Tensor {
        let gate = b.linear("gate", x, &self.matrix);
        let gate = match self.kind {
            ResultGate::None | ResultGate::InQueries => return y,
            ResultGate::Sigmoid => b.function("gate.sigmoid", gate, Function::Sigmoid),
            ResultGate::Softplus => b.function("gate.softplus", gate, Function::Softplus),
            ResultGate::Log2 => {
                let natural = b.scale("gate.natural", gate, std::f32::consts::LN_2);
                let gate = b.function("gate.softplus", natural, Function::Softplus);
                b.scale("gate.log2", gate, std::f32::consts::LOG2_E)
            }
        };
        if gate.shape[0] != self.heads {
            return b.multiply("gated", y, gate);
        }
        let [all, rows, ..] = y.shape;
        let heads = y.reshape([all / self.heads, self.heads, rows, 1]);
        flat(b.multiply("gated", heads, gate.reshape([1, self.heads, rows, 1])))
    }
}

/// Factors of queries: 1 + scale * ln(1 + floor((position + offset) / length)).
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Temperature {
    /// How fast they grow.
    pub scale: f32,
    /// Positions of one step.
    pub length: usize,
    /// Added to the position.
    pub offset: usize,
}

impl Temperature {
    /// A table of the factors, one for each position of the context: `[1, positions]`.
    pub fn load(self, l: &mut Loader<'_>) -> Tensor {
        let steps = |p: usize| ((p + self.offset) / self.length) as f32;
        let values: Vec<f32> = (0..l.room.context.max(1)).map(|p| 1.0 + self.scale * steps(p).ln_1p()).collect();
        l.constant("attention.temperature", &values, [1, values.len(), 1, 1])
    }
}

/// Queries `[width, heads, rows]` times the factors of their positions.
pub fn warmed(b: &mut Builder, batch: &Batch, q: Tensor, table: Tensor) -> Tensor {
    let factors = b.rows("temperature", table, batch.ports.positions);
    b.multiply("q_warm", q, factors.reshape([1, 1, q.shape[2], 1]))
}
