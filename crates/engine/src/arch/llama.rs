//! Llama: per layer, attention with rotary positions and grouped key-value heads, then a gated feed-forward layer,
//! each on the normed residual stream and added back to it. Few tokens take fused steps, because each dependent step
//! costs as much as reading megabytes of weights; many tokens take one step for matrices that multiply
//! the same columns, norms and gates included.

use kiln_gguf::{Gguf, TensorType};
use kiln_kernels::flash_attention::{self, Mask, Pages, Split, good_splits};
use kiln_kernels::glu::Gate;
use kiln_kernels::mul_mat::{Epilogue, MOST_COLUMNS, Product};
use kiln_kernels::mul_mat_vec::{self, Gated, Norm, Sibling};
use kiln_kernels::mul_mm::{self, Before};
use kiln_kernels::tensor::Tensor;
use kiln_kernels::{get_rows, kv_write, rope};

use super::{BatchShape, Graph, PAGE, Room, WeightTable};
use crate::Error;
use crate::model::{Config, names};
use crate::plan::{Builder, Fixed, Plan, Ports, SlotKind};

/// About as many cores as a large GPU has, which attention of few tokens keeps busy by splitting the keys: splits of a power of
/// two take rounds of keys more evenly (`docs/ladder/flash_attention.md`).
const CORES: usize = 128;

/// The weights and caches of one layer.
struct Layer {
    attention_norm: Tensor,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    output: Tensor,
    feed_forward_norm: Tensor,
    gate: Tensor,
    up: Tensor,
    down: Tensor,
    k_cache: Tensor,
    v_cache: Tensor,
}

/// A Llama model with its slots.
pub(super) struct Llama {
    config: Config,
    room: Room,
    fixed: Fixed,
    embedding: Tensor,
    layers: Vec<Layer>,
    output_norm: Tensor,
    output: Tensor,
    turns: Tensor,
    /// Zero between runs: how attention's splits know which of them finishes last.
    counters: Tensor,
}

impl Llama {
    pub(super) fn new(config: &Config, gguf: &Gguf, room: &Room) -> Result<Llama, Error> {
        let mut table = WeightTable { gguf, fixed: Fixed::default() };
        let Config { hidden, vocab, feed_forward, .. } = *config;
        let q_width = config.heads * config.head_dim;
        let kv_width = config.kv_heads * config.head_dim;
        let embedding = table.weight(names::TOKEN_EMBEDDING, &[hidden, vocab])?;
        let cache = |fixed: &mut Fixed, name: String, ty: TensorType| {
            fixed.add(name, SlotKind::Cache, ty, [kv_width, room.pages * PAGE, 1, 1])
        };
        let mut layers = Vec::with_capacity(config.layers);
        for i in 0..config.layers {
            let mut weight = |name: &str, want: &[usize]| table.weight(&names::layer(name, i), want);
            let layer = Layer {
                attention_norm: weight("attn_norm.weight", &[hidden])?,
                q: weight("attn_q.weight", &[hidden, q_width])?,
                k: weight("attn_k.weight", &[hidden, kv_width])?,
                v: weight("attn_v.weight", &[hidden, kv_width])?,
                output: weight("attn_output.weight", &[q_width, hidden])?,
                feed_forward_norm: weight("ffn_norm.weight", &[hidden])?,
                gate: weight("ffn_gate.weight", &[hidden, feed_forward])?,
                up: weight("ffn_up.weight", &[hidden, feed_forward])?,
                down: weight("ffn_down.weight", &[feed_forward, hidden])?,
                k_cache: cache(&mut table.fixed, format!("{i}.k_cache"), room.k_type),
                v_cache: cache(&mut table.fixed, format!("{i}.v_cache"), room.v_type),
            };
            layers.push(layer);
        }
        let output_norm = table.weight(names::OUTPUT_NORM, &[hidden])?;
        // Many small models use the embeddings as the output matrix.
        let output = table.optional(names::OUTPUT, &[hidden, vocab])?.unwrap_or(embedding);
        let factors = gguf.find(names::ROPE_FACTORS).map(|info| floats(gguf.data(info)));
        let turns = config.rope.turns(factors.as_deref()).map_err(|e| Error::Kernel(e.into()))?;
        let turns = table.constant("rope.turns", &turns, [2, config.rope.pairs(), 1, 1]);
        let n_counters = config.heads * MOST_COLUMNS.max(room.sequences);
        let counters = table.fixed.add("attention.counters", SlotKind::Zeroed, TensorType::I32, [n_counters, 1, 1, 1]);
        Ok(Llama {
            config: config.clone(),
            room: *room,
            fixed: table.fixed,
            embedding,
            layers,
            output_norm,
            output,
            turns,
            counters,
        })
    }

    /// Attention of one layer, added to the residual stream `x`.
    fn attention(&self, b: &mut Builder, i: usize, layer: &Layer, x: Tensor, work: &Work) {
        let Config { heads, kv_heads, head_dim, .. } = self.config;
        let rows = x.shape[1];
        self.projections(b, i, layer, x, work);
        let by_head = |t: Tensor, heads: usize| t.reshape([head_dim, heads, rows, 1]);
        let write = kv_write::Call {
            q: self.rope(by_head(work.q, heads), work.ports.positions),
            k: by_head(work.k, kv_heads),
            v: by_head(work.v, kv_heads),
            ids: work.ports.rows,
            k_cache: layer.k_cache,
            v_cache: layer.v_cache,
        };
        b.step(format!("{i}.attention.kv_write"), write);
        if work.shape.decode > 0 {
            b.step(format!("{i}.attention"), self.attend(layer, work, Part::Decode));
        }
        if work.shape.prompt > 0 {
            b.step(format!("{i}.attention.prompt"), self.attend(layer, work, Part::Prompt));
        }
        linear_onto(b, format!("{i}.attention.output"), Product { a: layer.output, b: work.attended, d: x }, work);
    }

    /// The rows of a batch that go on by one token, or those of prompts, over the keys of their sequences.
    fn attend(&self, layer: &Layer, work: &Work, part: Part) -> flash_attention::Call {
        let Config { heads, kv_heads, head_dim, .. } = self.config;
        let BatchShape { decode, prompt, pieces, .. } = work.shape;
        // Among rows that go on, each is a sequence of its own; those of prompts lie one after the other.
        let (first, first_sequence, tokens, sequences) = match part {
            Part::Decode => (0, 0, 1, decode),
            Part::Prompt => (decode, decode, prompt, pieces),
        };
        let batch = if part == Part::Decode { decode } else { 1 };
        let by_head = |t: Tensor| t.narrow(1, first, tokens * batch).reshape([head_dim, heads, tokens, batch]);
        // A cache row holds all heads of a token; attention wants [head_dim, keys, heads].
        let cached = layer.k_cache.shape[1];
        let keys = |cache: Tensor| cache.reshape([head_dim, kv_heads, cached, 1]).permute([0, 2, 1, 3]);
        let split = match part {
            Part::Decode => work.decode_split,
            Part::Prompt => work.prompt_split,
        };
        flash_attention::Call {
            mask: Mask::Causal {
                positions: work.ports.positions.narrow(0, first, tokens * batch),
                length: work.ports.lengths.narrow(0, first_sequence, sequences),
                window: None,
            },
            pages: Some(Pages { table: work.ports.table.narrow(1, first_sequence, sequences), size: PAGE }),
            sequences: (part == Part::Prompt && pieces > 1).then_some(work.ports.owners),
            split: split.map(|(count, scratch)| Split { count, scratch, counters: Some(self.counters) }),
            ..flash_attention::Call::plain(
                by_head(work.q).permute([0, 2, 1, 3]),
                keys(layer.k_cache),
                keys(layer.v_cache),
                by_head(work.attended),
                1.0 / (head_dim as f32).sqrt(),
            )
        }
    }

    /// Queries, keys and values of the normed stream.
    fn projections(&self, b: &mut Builder, i: usize, layer: &Layer, x: Tensor, work: &Work) {
        let product = Product { a: layer.q, b: x, d: work.q };
        let others = [(layer.k, work.k), (layer.v, work.v)].map(|(a, d)| Sibling { a, d, bias: None }).to_vec();
        let norm = self.norm(layer.attention_norm);
        let label = format!("{i}.attention.qkv");
        if b.is_few(&layer.q, x.shape[1]) {
            b.step(label, mul_mat_vec::Call { norm: Some(norm), others, ..mul_mat_vec::Call::plain(product) });
        } else {
            let (before, scratch) = (Some(Before::Norm(norm)), work.scratch.ahead);
            b.step(label, mul_mm::Call { before, others, scratch, ..mul_mm::Call::plain(product) });
        }
    }

    /// Runs of keys and room for their results, where few tokens of so many sequences attend to many keys.
    fn split(&self, b: &mut Builder, name: &str, tokens: usize, sequences: usize) -> Option<(usize, Tensor)> {
        let Config { heads, kv_heads, head_dim, .. } = self.config;
        // Enough workgroups for a large GPU; runs that turn out empty leave at once.
        let rows = tokens * heads / kv_heads;
        let count = good_splits([rows, kv_heads * sequences], head_dim, self.room.context, CORES);
        if count < 2 || tokens == 0 || sequences == 0 || tokens > MOST_COLUMNS {
            return None;
        }
        let rows = heads * tokens * sequences * count;
        let floats = (2 * rows).next_multiple_of(4) + rows * head_dim;
        Some((count, b.slot(name, SlotKind::Scratch, TensorType::F32, [floats, 1, 1, 1])))
    }

    /// Room for the largest matrix products of a plan of many tokens.
    fn scratch(&self, b: &mut Builder, shape: BatchShape) -> Scratch {
        let bytes = |weights: &[Tensor], columns: usize| {
            if columns <= shape.few {
                return 0;
            }
            let float = |width: usize| Tensor::dense(weights[0].slot, TensorType::F32, [width, columns, 1, 1]);
            let [k, m, ..] = weights[0].shape;
            let others = weights[1..].iter().map(|w| Sibling { a: *w, d: float(w.shape[1]), bias: None }).collect();
            // As much as a norm a gate takes as well.
            let before = Some(Before::Norm(Norm { weight: None, eps: 0.0 }));
            let plain = mul_mm::Call::plain(Product { a: weights[0], b: float(k), d: float(m) });
            mul_mm::Call { before, others, ..plain }.ample_scratch_bytes()
        };
        let rows = shape.rows();
        let ahead = |l: &Layer| bytes(&[l.q, l.k, l.v], rows).max(bytes(&[l.gate, l.up], rows));
        let back = |l: &Layer| bytes(&[l.output], rows).max(bytes(&[l.down], rows));
        let output = bytes(&[self.output], shape.outputs);
        let largest = |bytes: &dyn Fn(&Layer) -> usize| self.layers.iter().map(bytes).max().unwrap_or(0);
        let mut room = |name: &str, bytes: usize| {
            let words = bytes.div_ceil(4);
            (words > 0).then(|| b.slot(name, SlotKind::Scratch, TensorType::I32, [words, 1, 1, 1]))
        };
        Scratch {
            ahead: room("products.ahead", largest(&ahead).max(output)),
            back: room("products.back", largest(&back)),
        }
    }

    /// The feed-forward layer, added to the residual stream `x`.
    fn feed_forward(&self, b: &mut Builder, i: usize, layer: &Layer, x: Tensor, work: &Work) {
        let norm = self.norm(layer.feed_forward_norm);
        let product = Product { a: layer.gate, b: x, d: work.gate };
        let down = Product { a: layer.down, b: work.gate, d: x };
        let label = format!("{i}.feed_forward.down");
        if b.is_few(&layer.gate, x.shape[1]) {
            let gate = Some(Gated { kind: Gate::Swiglu, up: layer.up, bias: None });
            let fused = mul_mat_vec::Call { norm: Some(norm), gate, ..mul_mat_vec::Call::plain(product) };
            b.step(format!("{i}.feed_forward.gated"), fused);
            linear_onto(b, label, down, work);
        } else {
            let (before, scratch) = (Some(Before::Norm(norm)), work.scratch.ahead);
            let others = vec![Sibling { a: layer.up, d: work.up, bias: None }];
            let both = mul_mm::Call { before, others, scratch, ..mul_mm::Call::plain(product) };
            b.step(format!("{i}.feed_forward.gate_up"), both);
            let (before, scratch) = (Some(Before::Gate { kind: Gate::Swiglu, up: work.up }), work.scratch.back);
            let epilogue = Epilogue { residual: Some(x), ..Epilogue::default() };
            b.step(label, mul_mm::Call { before, epilogue, scratch, ..mul_mm::Call::plain(down) });
        }
    }

    fn norm(&self, weight: Tensor) -> Norm {
        Norm { weight: Some(weight), eps: self.config.rms_eps }
    }

    /// How heads are turned in place by their positions.
    fn rope(&self, x: Tensor, positions: Tensor) -> rope::Call {
        let rope = &self.config.rope;
        rope::Call {
            x,
            positions,
            turns: self.turns,
            y: x,
            style: rope.style,
            n_dims: rope.n_dims,
            offset: 0,
            sections: rope.sections,
            magnitude: rope.magnitude(),
            backward: false,
        }
    }
}

/// The two kinds of rows of a batch.
#[derive(Clone, Copy, PartialEq, Eq)]
enum Part {
    Decode,
    Prompt,
}

/// What the layers of one plan compute in.
struct Work {
    shape: BatchShape,
    ports: Ports,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    attended: Tensor,
    gate: Tensor,
    up: Tensor,
    /// For few tokens over a long context: number of runs of keys, and memory for their partial results.
    decode_split: Option<(usize, Tensor)>,
    prompt_split: Option<(usize, Tensor)>,
    scratch: Scratch,
}

/// For many tokens: what matrix products keep between their dispatches. Those that begin a block and those that end it have
/// their own, so that weights of the next are decoded while this one still multiplies.
struct Scratch {
    /// Queries, keys and values; gate and up; logits.
    ahead: Option<Tensor>,
    /// Attention's output and down: back onto the residual stream.
    back: Option<Tensor>,
}

impl Graph for Llama {
    fn fixed(&self) -> &Fixed {
        &self.fixed
    }

    fn plan(&self, shape: BatchShape) -> Result<Plan, Error> {
        let Config { hidden, vocab, feed_forward, .. } = self.config;
        let q_width = self.config.heads * self.config.head_dim;
        let kv_width = self.config.kv_heads * self.config.head_dim;
        let mut builder = Builder::new(&self.fixed, shape.few);
        let b = &mut builder;
        let ports = Ports::new(b, &shape, &self.room, vocab);
        let float = |b: &mut Builder, name: &str, kind: SlotKind, width: usize, rows: usize| {
            b.slot(name, kind, TensorType::F32, [width, rows, 1, 1])
        };
        let scratch =
            |b: &mut Builder, name: &str, width: usize| float(b, name, SlotKind::Scratch, width, shape.rows());
        let x = scratch(b, "x", hidden);
        let work = Work {
            shape,
            ports,
            q: scratch(b, "q", q_width),
            k: scratch(b, "k", kv_width),
            v: scratch(b, "v", kv_width),
            attended: scratch(b, "attended", q_width),
            gate: scratch(b, "gate", feed_forward),
            up: scratch(b, "up", feed_forward),
            decode_split: self.split(b, "attention.partials", 1, shape.decode),
            // Pieces of several prompts have no splits.
            prompt_split: self.split(b, "attention.prompt.partials", shape.prompt, usize::from(shape.pieces == 1)),
            scratch: self.scratch(b, shape),
        };
        b.step("embedding", get_rows::Call { src: self.embedding, ids: ports.tokens, dst: x });
        for (i, layer) in self.layers.iter().enumerate() {
            self.attention(b, i, layer, x, &work);
            self.feed_forward(b, i, layer, x, &work);
        }
        // Only the wanted tokens go through the output matrix, the largest of all.
        let last = if shape.outputs == shape.rows() {
            x
        } else {
            let last = float(b, "last", SlotKind::Scratch, hidden, shape.outputs);
            b.step("output.rows", get_rows::Call { src: x, ids: ports.wanted, dst: last });
            last
        };
        let (norm, product) = (self.norm(self.output_norm), Product { a: self.output, b: last, d: ports.logits });
        if b.is_few(&self.output, shape.outputs) {
            b.step("output", mul_mat_vec::Call { norm: Some(norm), ..mul_mat_vec::Call::plain(product) });
        } else {
            let (before, scratch) = (Some(Before::Norm(norm)), work.scratch.ahead);
            b.step("output", mul_mm::Call { before, scratch, ..mul_mm::Call::plain(product) });
        }
        builder.share_column_memory();
        builder.finish(ports)
    }
}

/// d += a b, by the operation made for the number of columns.
fn linear_onto(b: &mut Builder, label: String, product: Product, work: &Work) {
    let epilogue = Epilogue { residual: Some(product.d), ..Epilogue::default() };
    if b.is_few(&product.a, product.b.shape[1]) {
        b.step(label, mul_mat_vec::Call { epilogue, ..mul_mat_vec::Call::plain(product) });
    } else {
        b.step(label, mul_mm::Call { epilogue, scratch: work.scratch.back, ..mul_mm::Call::plain(product) });
    }
}

fn floats(bytes: &[u8]) -> Vec<f32> {
    bytes.chunks_exact(4).map(|b| f32::from_le_bytes([b[0], b[1], b[2], b[3]])).collect()
}
