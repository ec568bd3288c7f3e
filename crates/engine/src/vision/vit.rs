//! The base of all encoders of pictures, and of many of sounds: a transformer whose patches, or moments, see each other. What a family does differently is a switch of
//! [`Spec`]; tensors that a file may or may not have count where they are there.

use kiln_gguf::TensorType;
use kiln_kernels::flash_attention::{self, Mask, Pages};
use kiln_kernels::glu::Gate;
use kiln_kernels::rope::{self, RopeParams, RopeStyle};
use kiln_kernels::tensor::Tensor;
use kiln_kernels::unary::Function;

use super::clamped::Clamped;
use super::sheet::Sheet;
use crate::Error;
use crate::model::{Loader, MOST_LAYERS};
use crate::plan::Norm;

/// Widest that an encoder may be, and most that one of its layers has inside.
const MOST_WIDTH: usize = 1 << 16;

/// Sizes of an encoder, checked.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Sizes {
    /// Width of a patch's vector.
    pub width: usize,
    /// Heads of queries.
    pub heads: usize,
    /// Heads of keys and values.
    pub kv_heads: usize,
    /// Width of a head.
    pub head: usize,
    /// Layers of the file.
    pub layers: usize,
    /// What norms add.
    pub eps: f32,
    /// Between the matrices of a layer.
    pub activation: Function,
    /// Side of a patch in pixels.
    pub patch: usize,
}

impl Sizes {
    /// Reads and checks those of an encoder of pictures.
    pub(super) fn read(l: &Loader<'_>) -> Result<Sizes, Error> {
        let patch = l.keys.count("vision.patch_size", 1 << 10)?;
        Ok(Sizes { patch, ..Sizes::of(l, "vision")? })
    }

    /// The same of an encoder of either kind, which keys name.
    pub(crate) fn of(l: &Loader<'_>, kind: &str) -> Result<Sizes, Error> {
        let keys = l.keys;
        let key = |suffix: &str| format!("{kind}.{suffix}");
        let width = keys.count(&key("embedding_length"), MOST_WIDTH)?;
        let heads = keys.count(&key("attention.head_count"), 1 << 12)?;
        let kv_heads = keys.count_opt(&key("attention.head_count_kv"), 1 << 12)?.unwrap_or(heads);
        let fits = heads.is_multiple_of(kv_heads);
        keys.require(fits, &key("attention.head_count_kv"), kv_heads, &format!("a divisor of the {heads} heads"))?;
        let head = match keys.count_opt(&key("attention.head_dim"), 4096)? {
            Some(head) => head,
            None => {
                let want = format!("a divisor of the width {width}");
                keys.require(width.is_multiple_of(heads), &key("attention.head_count"), heads, &want)?;
                width / heads
            }
        };
        let (gelu, silu) = (keys.flag("use_gelu", false)?, keys.flag("use_silu", false)?);
        keys.require(!(gelu && silu), "use_silu", 1, "false where use_gelu is true")?;
        let activation = match (gelu, silu) {
            (true, _) => Function::Gelu,
            (_, true) => Function::Silu,
            _ => Function::GeluQuick,
        };
        Ok(Sizes {
            width,
            heads,
            kv_heads,
            head,
            layers: keys.count_opt(&key("block_count"), MOST_LAYERS)?.unwrap_or(0),
            eps: keys.eps(&key("attention.layer_norm_epsilon"))?,
            activation,
            patch: 1,
        })
    }
}

/// Which norm a family has at all places.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum NormKind {
    /// To mean 0 and variance 1.
    Layer,
    /// By the mean square.
    Rms,
}

/// How patches are turned by their place.
#[derive(Clone, Copy, Debug, PartialEq)]
pub(crate) enum Turning {
    /// Not at all.
    Still,
    /// The first half of the pairs by the row, the second by the column.
    Pairs,
    /// The first half of a head by one coordinate, the second by the other.
    Halves {
        /// Which one turns the first half.
        first: Axis,
        /// Which elements form a pair.
        style: RopeStyle,
        /// Base of the frequencies.
        base: f32,
        /// Whether the halves take even and odd members of one series of frequencies.
        interleaved: bool,
    },
}

/// A coordinate of a patch.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Axis {
    /// Its row.
    Row,
    /// Its column.
    Column,
}

/// What a family does differently.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Spec {
    /// Its norm.
    pub norm: NormKind,
    /// How patches are turned.
    pub turning: Turning,
    /// Layers that run.
    pub layers: usize,
    /// Whether old files have `ffn_up` and `ffn_down` exchanged.
    pub swapped: bool,
    /// Factor of the scores.
    pub scale: f32,
    /// Whether values are normed.
    pub normed_values: bool,
}

impl Spec {
    /// All layers, scores by the root of the head's width, nothing turned.
    pub(crate) fn plain(sizes: &Sizes, norm: NormKind) -> Spec {
        let scale = 1.0 / (sizes.head as f32).sqrt();
        Spec { norm, turning: Turning::Still, layers: sizes.layers, swapped: false, scale, normed_values: false }
    }
}

/// Row and column of every token, in the order in which tokens go in.
#[derive(Clone, Debug, Default)]
pub(super) struct Places {
    /// Rows.
    pub rows: Vec<i32>,
    /// Columns.
    pub columns: Vec<i32>,
}

impl Places {
    /// Those of patches with these raster numbers.
    pub(super) fn of(order: &[usize], columns: usize) -> Places {
        let number = |i: usize| i as i32;
        Places {
            rows: order.iter().map(|i| number(i / columns)).collect(),
            columns: order.iter().map(|i| number(i % columns)).collect(),
        }
    }
}

/// The coordinates as a plan has them.
#[derive(Clone, Copy)]
pub(crate) enum Coordinates {
    Still,
    /// `[tokens, 4]`: rows, columns.
    Pairs(Tensor),
    /// `[tokens]` for each half of a head.
    Halves([Tensor; 2]),
}

/// Tokens that see those of their own window alone.
#[derive(Clone, Copy)]
pub(super) struct Windows {
    /// I32 `[tokens]`: the window of each.
    pub owners: Tensor,
    /// I32 `[most, windows]`: the tokens of each window.
    pub members: Tensor,
    /// I32 `[windows]`: how many there are.
    pub counts: Tensor,
    /// I32 `[tokens]`: zeros, as order does not count.
    pub positions: Tensor,
}

struct Block {
    norms: [Norm; 2],
    q: Projection,
    k: Projection,
    v: Projection,
    out: Clamped,
    q_norm: Option<Norm>,
    k_norm: Option<Norm>,
    attention_norm: Option<Norm>,
    ffn_norm: Option<Norm>,
    attention_factor: Option<Tensor>,
    ffn_factor: Option<Tensor>,
    factor: Option<Tensor>,
    up: Clamped,
    gate: Option<Clamped>,
    down: Clamped,
}

/// Queries, keys or values of a layer.
enum Projection {
    /// By a matrix of their own.
    Own(Clamped),
    /// Elements of a shared product from this one on.
    Part(Clamped, usize),
}

/// The layers of an encoder.
pub(crate) struct Vit {
    pub(crate) sizes: Sizes,
    spec: Spec,
    pre: Option<Norm>,
    post: Option<Norm>,
    blocks: Vec<Block>,
    freqs: Vec<(RopeParams, Tensor)>,
}

/// Reads the norm `NAME`, where the file has it.
pub(crate) fn norm_opt(
    l: &mut Loader<'_>,
    name: &str,
    width: usize,
    kind: NormKind,
    eps: f32,
) -> Result<Option<Norm>, Error> {
    let Some(weight) = l.vector_opt(&format!("{name}.weight"), &[width])? else { return Ok(None) };
    let bias = l.vector_opt(&format!("{name}.bias"), &[width])?;
    Ok(Some(match (kind, bias) {
        (NormKind::Layer, bias) => Norm::Layer { weight: Some(weight), bias, eps },
        (NormKind::Rms, None) => Norm::Rms { weight: Some(weight), eps },
        (NormKind::Rms, Some(bias)) => Norm::RmsBias { weight, bias, eps },
    }))
}

/// The same where it must be there.
pub(crate) fn norm(l: &mut Loader<'_>, name: &str, width: usize, kind: NormKind, eps: f32) -> Result<Norm, Error> {
    norm_opt(l, name, width, kind, eps)?.ok_or_else(|| Error::MissingTensor { name: l.full(&format!("{name}.weight")) })
}

/// The second extent of a matrix: the width of its results.
pub(crate) fn width_of(l: &Loader<'_>, name: &str) -> Result<usize, Error> {
    let name = format!("{name}.weight");
    let shape = l.shape(&name).ok_or_else(|| Error::MissingTensor { name: l.full(&name) })?;
    Ok(shape[1])
}

impl Block {
    fn load(l: &mut Loader<'_>, sizes: &Sizes, spec: &Spec) -> Result<Block, Error> {
        let Sizes { width, heads, kv_heads, head, eps, .. } = *sizes;
        let kind = spec.norm;
        let bare = match kind {
            NormKind::Layer => Norm::Layer { weight: None, bias: None, eps },
            NormKind::Rms => Norm::Rms { weight: None, eps },
        };
        let first = norm_opt(l, "ln1", width, kind, eps)?.unwrap_or(bare);
        let second = norm_opt(l, "ln2", width, kind, eps)?.unwrap_or(bare);
        let (queries, keys) = (heads * head, kv_heads * head);
        let [q, k, v] = if l.has("attn_qkv.weight") {
            let all = Clamped::load(l, "attn_qkv", [width, queries + 2 * keys])?;
            [0, queries, queries + keys].map(|start| Projection::Part(all, start))
        } else {
            [
                Projection::Own(Clamped::load(l, "attn_q", [width, queries])?),
                Projection::Own(Clamped::load(l, "attn_k", [width, keys])?),
                Projection::Own(Clamped::load(l, "attn_v", [width, keys])?),
            ]
        };
        // Norms of queries and keys are those of heads, or of whole rows.
        let mut of_heads = |name: &str, row: usize| {
            let by_head = l.shape(&format!("{name}.weight")).is_none_or(|shape| shape[0] == head);
            norm_opt(l, name, if by_head { head } else { row }, kind, eps)
        };
        let (q_norm, k_norm) = (of_heads("attn_q_norm", queries)?, of_heads("attn_k_norm", keys)?);
        let out = Clamped::load(l, "attn_out", [queries, width])?;
        let exchanged = spec.swapped && l.shape("ffn_down.weight").is_some_and(|shape| shape[0] == width);
        let (up, down) = if exchanged { ("ffn_down", "ffn_up") } else { ("ffn_up", "ffn_down") };
        let inside = width_of(l, up)?;
        let factor = match l.shape("out_scale.weight") {
            Some(shape) if shape[0] == 1 => l.vector_opt("out_scale.weight", &[1])?,
            _ => l.vector_opt("out_scale.weight", &[width])?,
        };
        let gate = if l.has("ffn_gate.weight") { Some(Clamped::load(l, "ffn_gate", [width, inside])?) } else { None };
        Ok(Block {
            norms: [first, second],
            q,
            k,
            v,
            out,
            q_norm,
            k_norm,
            attention_norm: norm_opt(l, "attn_post_norm", width, kind, eps)?,
            ffn_norm: norm_opt(l, "ffn_post_norm", width, kind, eps)?,
            attention_factor: l.vector_opt("ls1.weight", &[width])?,
            ffn_factor: l.vector_opt("ls2.weight", &[width])?,
            factor,
            up: Clamped::load(l, up, [width, inside])?,
            gate,
            down: Clamped::load(l, down, [inside, width])?,
        })
    }
}

impl Vit {
    /// Reads the layers that run; the others may be there.
    pub(super) fn load(l: &mut Loader<'_>, sizes: Sizes, spec: Spec) -> Result<Vit, Error> {
        Vit::load_of(l, "v", sizes, spec)
    }

    /// The same of tensors whose names begin with this letter.
    pub(crate) fn load_of(l: &mut Loader<'_>, letter: &str, sizes: Sizes, spec: Spec) -> Result<Vit, Error> {
        l.whole();
        let pre = norm_opt(l, &format!("{letter}.pre_ln"), sizes.width, spec.norm, sizes.eps)?;
        let post = norm_opt(l, &format!("{letter}.post_ln"), sizes.width, spec.norm, sizes.eps)?;
        let mut blocks = Vec::with_capacity(spec.layers);
        for layer in 0..spec.layers {
            l.part(format!("{letter}.blk.{layer}."));
            blocks.push(Block::load(l, &sizes, &spec)?);
        }
        l.whole();
        let freqs = freqs(l, &sizes, spec.turning)?;
        Ok(Vit { sizes, spec, pre, post, blocks, freqs })
    }

    /// Layers that run.
    pub(super) fn layers(&self) -> usize {
        self.blocks.len()
    }

    /// The coordinates of tokens, as the layers take them.
    pub(super) fn coordinates(&self, s: &mut Sheet, places: &Places) -> Coordinates {
        let tokens = places.rows.len();
        match self.spec.turning {
            Turning::Still => Coordinates::Still,
            Turning::Pairs => {
                let all = [&places.rows[..], &places.columns, &vec![0; 2 * tokens]].concat();
                Coordinates::Pairs(s.ints("coordinates", &all, [tokens, 4]))
            }
            Turning::Halves { first, .. } => {
                let rows = s.ints("coordinates.rows", &places.rows, [tokens, 1]);
                let columns = s.ints("coordinates.columns", &places.columns, [tokens, 1]);
                Coordinates::Halves(if first == Axis::Row { [rows, columns] } else { [columns, rows] })
            }
        }
    }

    /// What comes before the first layer.
    pub(super) fn begin(&self, s: &mut Sheet, x: Tensor) -> Tensor {
        s.b.at("pre");
        self.pre.map_or(x, |norm| s.b.norm("norm", x, &norm))
    }

    /// What comes behind the last one.
    pub(crate) fn end(&self, s: &mut Sheet, x: Tensor) -> Tensor {
        s.b.at("post");
        self.post.map_or(x, |norm| s.b.norm("norm", x, &norm))
    }

    /// All layers that run, between what comes before and behind them.
    pub(super) fn build(&self, s: &mut Sheet, x: Tensor, places: &Places) -> Tensor {
        let at = self.coordinates(s, places);
        let x = self.before_end(s, x, &at);
        self.end(s, x)
    }

    /// All layers that run, and what comes before them.
    pub(crate) fn before_end(&self, s: &mut Sheet, x: Tensor, at: &Coordinates) -> Tensor {
        let mut x = self.begin(s, x);
        for layer in 0..self.layers() {
            x = self.layer(s, layer, x, at, None);
        }
        x
    }

    /// One layer.
    pub(super) fn layer(
        &self,
        s: &mut Sheet,
        layer: usize,
        x: Tensor,
        at: &Coordinates,
        windows: Option<&Windows>,
    ) -> Tensor {
        let block = &self.blocks[layer];
        s.b.at(format!("{layer}.attention"));
        let h = s.b.norm("norm", x, &block.norms[0]);
        let mut y = self.attention(s, block, h, at, windows);
        if let Some(factor) = block.attention_factor {
            y = s.b.multiply("factor", y, factor);
        }
        if let Some(norm) = block.attention_norm {
            y = s.b.norm("post_norm", y, &norm);
        }
        let x = s.b.add("residual", x, y);
        s.b.at(format!("{layer}.ffn"));
        let h = s.b.norm("norm", x, &block.norms[1]);
        let up = block.up.build(s, "up", h);
        let inner = match &block.gate {
            None => s.b.function("activation", up, self.sizes.activation),
            Some(gate) => {
                let gate = gate.build(s, "gate", h);
                s.b.gated("gated", gate_of(self.sizes.activation), gate, up)
            }
        };
        let mut y = block.down.build(s, "down", inner);
        if let Some(norm) = block.ffn_norm {
            y = s.b.norm("post_norm", y, &norm);
        }
        if let Some(factor) = block.ffn_factor {
            y = s.b.multiply("factor", y, factor);
        }
        let x = s.b.add("residual", x, y);
        block.factor.map_or(x, |factor| s.b.multiply("out_scale", x, factor))
    }

    fn attention(
        &self,
        s: &mut Sheet,
        block: &Block,
        h: Tensor,
        at: &Coordinates,
        windows: Option<&Windows>,
    ) -> Tensor {
        let Sizes { heads, kv_heads, head, eps, .. } = self.sizes;
        let mut shared = None;
        let mut product = |s: &mut Sheet, name: &str, projection: &Projection, heads: usize| match projection {
            Projection::Own(matrix) => matrix.build(s, name, h).heads(0, head, heads),
            Projection::Part(matrix, start) => {
                let all = *shared.get_or_insert_with(|| matrix.build(s, "qkv", h));
                all.heads(*start, head, heads)
            }
        };
        let q = product(s, "q", &block.q, heads);
        let k = product(s, "k", &block.k, kv_heads);
        let v = product(s, "v", &block.v, kv_heads);
        let q = normed(s, "q_norm", q, block.q_norm);
        let q = self.turned(s, "q", q, at);
        let k = normed(s, "k_norm", k, block.k_norm);
        let k = self.turned(s, "k", k, at);
        let v = if self.spec.normed_values { s.b.norm("v_norm", v, &Norm::Rms { weight: None, eps }) } else { v };
        let y = attended(s, [q, k, v], self.spec.scale, windows);
        block.out.build(s, "out", y)
    }

    /// Heads `[width, heads, tokens]` turned by the place of each token.
    fn turned(&self, s: &mut Sheet, name: &str, x: Tensor, at: &Coordinates) -> Tensor {
        let positions = match at {
            Coordinates::Still => return x,
            Coordinates::Pairs(all) => vec![*all],
            Coordinates::Halves(both) => both.to_vec(),
        };
        let mut x = x;
        for (nth, (positions, (params, freqs))) in positions.into_iter().zip(&self.freqs).enumerate() {
            let name = format!("{name}.turned.{nth}");
            let y = s.b.like(&name, x);
            let (style, n_dims, offset) = (params.style, params.n_dims, nth * params.n_dims);
            let (sections, magnitude) = (params.sections, params.magnitude());
            let call = rope::Call {
                x,
                positions,
                freqs: *freqs,
                y,
                style,
                n_dims,
                offset,
                sections,
                magnitude,
                backward: false,
            };
            s.b.step(&name, call);
            x = y;
        }
        x
    }
}

/// The tables of turns: one for a whole head, or one for each half.
fn freqs(l: &mut Loader<'_>, sizes: &Sizes, turning: Turning) -> Result<Vec<(RopeParams, Tensor)>, Error> {
    let head = sizes.head;
    if turning != Turning::Still {
        let fits = head.is_multiple_of(4);
        l.keys.require(fits, "vision.embedding_length", sizes.width, "such that heads are multiples of 4")?;
    }
    match turning {
        Turning::Still => Ok(Vec::new()),
        Turning::Pairs => {
            let sections = [head / 4, head / 4, 0, 0];
            let params = RopeParams { sections, ..RopeParams::plain(RopeStyle::Vision, head / 2, 10_000.0) };
            Ok(vec![(params, l.freqs(&params, None)?)])
        }
        Turning::Halves { style, base, interleaved, .. } => {
            let params = RopeParams::plain(style, head / 2, base);
            let slower = f64::from(base).powf(2.0 / head as f64) as f32;
            let factors = interleaved.then(|| vec![slower; params.pairs()]);
            let first = l.freqs(&params, None)?;
            Ok(vec![(params, first), (params, l.freqs(&params, factors.as_deref())?)])
        }
    }
}

fn normed(s: &mut Sheet, name: &str, x: Tensor, norm: Option<Norm>) -> Tensor {
    let Some(norm) = norm else { return x };
    let width = match norm {
        Norm::Rms { weight, .. } | Norm::Layer { weight, .. } => weight.map(|w| w.shape[0]),
        Norm::RmsBias { weight, .. } | Norm::RmsSlices { weight, .. } => Some(weight.shape[0]),
    };
    if width.is_none_or(|width| width == x.shape[0]) {
        return s.b.norm(name, x, &norm);
    }
    // Over the whole row, before it is split into heads.
    let [head, heads, tokens, _] = x.shape;
    let row = Tensor { shape: [head * heads, tokens, 1, 1], stride: [x.stride[0], x.stride[2], x.stride[3], 0], ..x };
    s.b.norm(name, row, &norm).heads(0, head, heads)
}

/// Attention of tokens over each other, or over those of their windows: heads `[width, heads, tokens]` in, rows out.
pub(super) fn attended(s: &mut Sheet, [q, k, v]: [Tensor; 3], scale: f32, windows: Option<&Windows>) -> Tensor {
    let [head, heads, tokens, _] = q.shape;
    let out = s.b.fresh("attended", TensorType::F32, [head * heads, tokens, 1, 1]);
    let by_head = |t: Tensor| t.permute([0, 2, 1, 3]);
    let shaped = out.reshape([head, heads, tokens, 1]);
    let plain = flash_attention::Call::plain(by_head(q), by_head(k), by_head(v), shaped, scale);
    let call = match windows {
        None => plain,
        // Every window is a sequence whose pages hold one token each.
        Some(w) => flash_attention::Call {
            mask: Mask::Causal { positions: w.positions, length: w.counts, window: None, both: true },
            pages: Some(Pages { table: w.members, size: 1 }),
            sequences: Some(w.owners),
            ..plain
        },
    };
    s.b.step("", call);
    out
}

/// The gate with this activation.
pub(super) fn gate_of(activation: Function) -> Gate {
    match activation {
        Function::Silu => Gate::Swiglu,
        Function::Gelu => Gate::Geglu,
        Function::GeluErf => Gate::GegluErf,
        _ => Gate::GegluQuick,
    }
}
