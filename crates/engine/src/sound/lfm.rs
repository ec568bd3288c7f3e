//! LFM 2's encoder of sounds: a conformer whose scores have a part that belongs to the distance, as in Transformer-XL.

use kiln_gguf::TensorType;
use kiln_kernels::mul_mat::Product;
use kiln_kernels::tensor::Tensor;
use kiln_kernels::unary::Function;
use kiln_kernels::{mul_mat_vec, soft_max};
use kiln_media::{SoundKeys, Spectrogram};

use super::Family;
use super::conformer::{gated_halves, half_step, over_time};
use super::unfold::{FIRST, PLACES, channels, dense, depthwise, factors, first_kernel, places, plane, sources};
use crate::Error;
use crate::model::Loader;
use crate::plan::{Linear, Norm};
use crate::vision::Grid;
use crate::vision::parts::Projector;
use crate::vision::sheet::Sheet;
use crate::vision::vit::{NormKind, Sizes, norm, width_of};

/// What norms add, whatever the file says.
const EPS: f32 = 1e-5;
/// Sines and cosines of a distance.
const WAVES: usize = 512;
/// Moments that the convolution of a layer sums over.
const TAPS: usize = 9;

struct Lfm {
    sizes: Sizes,
    bins: usize,
    first: Linear,
    narrow: [Narrow; 2],
    out: Linear,
    blocks: Vec<Block>,
    norm: Norm,
    projector: Projector,
}

/// Each channel convolved by itself, then all of a place multiplied.
struct Narrow {
    factors: Tensor,
    bias: Tensor,
    matrix: Linear,
}

struct Block {
    feed_forward: [FeedForward; 2],
    norm: Norm,
    q: Linear,
    k: Linear,
    v: Linear,
    out: Linear,
    /// What the content and the place of a key add to a query, by head.
    biases: [Tensor; 2],
    places: Linear,
    convolution: Convolution,
    last: Norm,
}

struct FeedForward {
    norm: Norm,
    up: Linear,
    down: Linear,
}

struct Convolution {
    norm: Norm,
    both: Linear,
    factors: Tensor,
    bias: Tensor,
    scale: Tensor,
    shift: Tensor,
    down: Linear,
}

fn layer_norm(l: &mut Loader<'_>, name: &str, width: usize) -> Result<Norm, Error> {
    norm(l, name, width, NormKind::Layer, EPS)
}

pub(super) fn load(l: &mut Loader<'_>, keys: &SoundKeys) -> Result<Box<dyn Family>, Error> {
    let sizes = Sizes::of(l, "audio")?;
    let width = sizes.width;
    let count = channels(l, "a.conv1d.0")?;
    let first = first_kernel(l, "a.conv1d.0", count)?;
    let narrow = [Narrow::load(l, [2, 3], count)?, Narrow::load(l, [5, 6], count)?];
    let [.., last] = planes(0, keys.bins);
    let out = l.linear("a.pre_encode.out", &[count * last.columns, width])?;
    let mut blocks = Vec::with_capacity(sizes.layers);
    for layer in 0..sizes.layers {
        l.part(format!("a.blk.{layer}."));
        blocks.push(Block::load(l, &sizes)?);
    }
    l.whole();
    // Places are distances; a table that files have is not read.
    l.ignore("a.position_embd.weight");
    Ok(Box::new(Lfm {
        sizes,
        bins: keys.bins,
        first,
        narrow,
        out,
        blocks,
        norm: layer_norm(l, "mm.a.mlp.0", width)?,
        projector: Projector::load(l, ["mm.a.mlp.1", "mm.a.mlp.3"], width, Function::GeluErf)?,
    }))
}

/// The planes before and behind the convolutions: moments are rows, bands columns.
fn planes(frames: usize, bins: usize) -> [Grid; 4] {
    let whole = Grid { rows: frames, columns: bins };
    [whole, plane(whole), plane(plane(whole)), plane(plane(plane(whole)))]
}

impl Narrow {
    fn load(l: &mut Loader<'_>, [first, second]: [usize; 2], count: usize) -> Result<Narrow, Error> {
        let (first, second) = (format!("a.conv1d.{first}"), format!("a.conv1d.{second}"));
        let matrix = l.tensor(&format!("{second}.weight"), &[1, 1, count, count])?;
        let bias = l.vector_opt(&format!("{second}.bias"), &[count])?;
        Ok(Narrow {
            factors: factors(l, &format!("{first}.weight"), [PLACES, count])?,
            bias: l.vector(&format!("{first}.bias"), &[count])?,
            matrix: Linear { bias, ..Linear::plain(matrix.reshape([count, count, 1, 1])) },
        })
    }

    fn build(&self, s: &mut Sheet, x: Tensor, [before, after]: [Grid; 2]) -> Tensor {
        let read = places(after).flat_map(|place| sources(before, place));
        let x = depthwise(s, x, read, self.factors);
        let x = s.b.add("bias", x, self.bias);
        let x = s.b.linear("matrix", x, &self.matrix);
        s.b.function("activation", x, Function::Relu)
    }
}

impl Block {
    fn load(l: &mut Loader<'_>, sizes: &Sizes) -> Result<Block, Error> {
        let Sizes { width, head, heads, .. } = *sizes;
        let all = [width, heads * head];
        let mut feed_forward = |end: &str| -> Result<FeedForward, Error> {
            let (up, down) = (format!("ffn_up{end}"), format!("ffn_down{end}"));
            let inside = width_of(l, &up)?;
            Ok(FeedForward {
                norm: layer_norm(l, &format!("ffn_norm{end}"), width)?,
                up: l.linear(&up, &[width, inside])?,
                down: l.linear(&down, &[inside, width])?,
            })
        };
        Ok(Block {
            feed_forward: [feed_forward("")?, feed_forward("_1")?],
            norm: layer_norm(l, "ln1", width)?,
            q: l.linear("attn_q", &all)?,
            k: l.linear("attn_k", &all)?,
            v: l.linear("attn_v", &all)?,
            out: l.linear("attn_out", &[heads * head, width])?,
            biases: [l.vector("pos_bias_u", &[head, heads])?, l.vector("pos_bias_v", &[head, heads])?],
            places: l.linear("linear_pos", &[WAVES, heads * head])?,
            convolution: Convolution {
                norm: layer_norm(l, "norm_conv", width)?,
                both: l.linear("conv_pw1", &[width, 2 * width])?,
                factors: factors(l, "conv_dw.weight", [TAPS, width])?,
                bias: l.vector("conv_dw.bias", &[width])?,
                scale: l.vector("conv_norm.weight", &[width])?,
                shift: l.vector("conv_norm.bias", &[width])?,
                down: l.linear("conv_pw2", &[width, width])?,
            },
            last: layer_norm(l, "ln2", width)?,
        })
    }
}

impl FeedForward {
    fn build(&self, s: &mut Sheet, x: Tensor) -> Tensor {
        let h = s.b.norm("norm", x, &self.norm);
        let h = s.b.linear("up", h, &self.up);
        let h = s.b.function("activation", h, Function::Silu);
        let h = s.b.linear("down", h, &self.down);
        half_step(s, x, h)
    }
}

impl Convolution {
    fn build(&self, s: &mut Sheet, x: Tensor) -> Tensor {
        let h = s.b.norm("norm", x, &self.norm);
        let h = s.b.linear("both", h, &self.both);
        let h = gated_halves(s, h);
        let h = over_time(s, h, TAPS / 2, self.factors);
        let h = s.b.add("bias", h, self.bias);
        let h = s.b.multiply("scale", h, self.scale);
        let h = s.b.add("shift", h, self.shift);
        let h = s.b.function("activation", h, Function::Silu);
        let h = s.b.linear("down", h, &self.down);
        s.b.add("residual", x, h)
    }
}

/// Sines and cosines of every distance that moments have, from the largest ahead to the largest behind.
fn waves(moments: usize) -> Vec<f32> {
    let slower = 10_000.0_f64.ln() / WAVES as f64 * 2.0;
    let turn = |row: usize, wave: usize| (moments as f64 - 1.0 - row as f64) * (-(wave as f64) * slower).exp();
    let row =
        |row: usize| (0..WAVES / 2).map(move |wave| turn(row, wave)).flat_map(|at| [at.sin() as f32, at.cos() as f32]);
    (0..2 * moments - 1).flat_map(row).collect()
}

impl Lfm {
    fn attention(&self, s: &mut Sheet, block: &Block, x: Tensor, table: Tensor) -> Tensor {
        let Sizes { heads, head, .. } = self.sizes;
        let n = x.shape[1];
        let h = s.b.norm("norm", x, &block.norm);
        let [q, k, v] = [("q", &block.q), ("k", &block.k), ("v", &block.v)]
            .map(|(name, matrix)| s.b.linear(name, h, matrix).heads(0, head, heads));
        let r = s.b.linear("places", table, &block.places).heads(0, head, heads);
        let by_head = |t: Tensor| t.permute([0, 2, 1, 3]);
        let mut scores = |name: &str, keys: Tensor, bias: Tensor| {
            let q = s.b.add(&format!("{name}.query"), q, bias);
            let d = s.b.fresh(name, TensorType::F32, [keys.shape[2], n, heads, 1]);
            s.b.step(name, mul_mat_vec::Call::plain(Product { a: by_head(keys), b: by_head(q), d }));
            d
        };
        let by_content = scores("content", k, block.biases[0]);
        let by_place = scores("place", r, block.biases[1]);
        // Row i begins at the place of key 0, n - 1 - i further: rows that are one shorter, from element n - 1 on.
        let [one, row, plane, all] = by_place.stride;
        let shifted =
            Tensor { shape: [n, n, heads, 1], stride: [one, row - one, plane, all], ..by_place.at((n - 1) * one) };
        let x_scores = s.b.add("scores", by_content, shifted);
        let weights = s.b.like("weights", x_scores);
        let scale = 1.0 / (head as f32).sqrt();
        s.b.step("weights", soft_max::Call { x: x_scores, mask: None, sinks: None, y: weights, scale, max_bias: 0.0 });
        let v = dense(s, "v.turned", v.permute([2, 0, 1, 3]));
        let out = s.b.fresh("attended", TensorType::F32, [heads * head, n, 1, 1]);
        let d = by_head(out.heads(0, head, heads));
        s.b.step("attended", mul_mat_vec::Call::plain(Product { a: v, b: weights, d }));
        let y = s.b.linear("out", out, &block.out);
        s.b.add("residual", x, y)
    }
}

impl Family for Lfm {
    fn unfolded(&self, heard: &Spectrogram) -> Vec<f32> {
        let [whole, first, ..] = planes(heard.frames(), self.bins);
        let place = |place| {
            let read = sources(whole, place).map(|at| at.map_or(0.0, |at| heard.values[at]));
            read.chain([0.0; FIRST - PLACES])
        };
        places(first).flat_map(place).collect()
    }

    fn build(&self, s: &mut Sheet, frames: usize) -> Tensor {
        let [_, first, second, third] = planes(frames, self.bins);
        let x = s.input(FIRST, first.patches());
        s.b.at("stem.0");
        let x = s.b.linear("matrix", x, &self.first);
        let x = s.b.function("activation", x, Function::Relu);
        s.b.at("stem.1");
        let x = self.narrow[0].build(s, x, [first, second]);
        s.b.at("stem.2");
        let x = self.narrow[1].build(s, x, [second, third]);
        let channels = x.shape[0];
        let x = s.by_channel(x.reshape([channels * third.columns, third.rows, 1, 1]), channels);
        let mut x = s.b.linear("out", x, &self.out);
        let distances = 2 * third.rows - 1;
        let table = s.floats("distances", &waves(third.rows), [WAVES, distances]);
        for (layer, block) in self.blocks.iter().enumerate() {
            s.b.at(format!("{layer}.first"));
            x = block.feed_forward[0].build(s, x);
            s.b.at(format!("{layer}.attention"));
            x = self.attention(s, block, x, table);
            s.b.at(format!("{layer}.convolution"));
            x = block.convolution.build(s, x);
            s.b.at(format!("{layer}.second"));
            x = block.feed_forward[1].build(s, x);
            x = s.b.norm("last", x, &block.last);
        }
        s.b.at("projector");
        let x = s.b.norm("norm", x, &self.norm);
        self.projector.build(s, x)
    }

    fn rows(&self, frames: usize) -> usize {
        let [.., last] = planes(frames, self.bins);
        last.rows
    }
}
