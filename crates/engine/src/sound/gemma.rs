//! Gemma 4's encoder of sounds: a conformer whose moments see the last twelve, with scores by distance; and the projection of bare samples
//! that small models have instead.

use half::f16;
use kiln_gguf::TensorType;
use kiln_kernels::flash_attention::{self, Mask};
use kiln_kernels::tensor::Tensor;
use kiln_kernels::unary::Function;
use kiln_media::{SoundKeys, Spectrogram};

use super::Family;
use super::conformer::{gated_halves, half_step, over_time};
use super::unfold::{FIRST, PLACES, channels, factors, first_kernel, kernel, places, plane, sources};
use crate::Error;
use crate::model::Loader;
use crate::plan::{Linear, Norm};
use crate::vision::Grid;
use crate::vision::clamped::Clamped;
use crate::vision::sheet::Sheet;
use crate::vision::vit::{NormKind, Sizes, norm, norm_opt, width_of};

/// What norms add, whatever the file says.
const EPS: f32 = 1e-6;
/// Moments that each one sees, its own included.
const SEEN: usize = 12;
/// What scores stay below.
const SOFTCAP: f32 = 50.0;
/// Moments that the convolution of a layer sums over.
const TAPS: usize = 5;

struct Gemma4 {
    sizes: Sizes,
    bins: usize,
    convolutions: [Linear; 2],
    convolution_norms: [Option<Norm>; 2],
    input: Clamped,
    blocks: Vec<Block>,
    /// Sines and cosines of the distances, `[width, SEEN]`.
    distances: Tensor,
    out: Option<Clamped>,
    norm: Norm,
    projection: Clamped,
}

struct Block {
    feed_forward: [FeedForward; 2],
    norm: Norm,
    q: Clamped,
    k: Clamped,
    v: Clamped,
    /// Factors of each element of a head.
    q_factor: Tensor,
    k_factor: Tensor,
    by_distance: Linear,
    out: Clamped,
    post_norm: Option<Norm>,
    convolution: Convolution,
    last: Option<Norm>,
}

struct FeedForward {
    norm: Norm,
    up: Clamped,
    down: Clamped,
    post_norm: Norm,
}

struct Convolution {
    norm: Norm,
    both: Clamped,
    factors: Tensor,
    middle: Norm,
    down: Clamped,
}

fn rms(l: &mut Loader<'_>, name: &str, width: usize) -> Result<Norm, Error> {
    norm(l, name, width, NormKind::Rms, EPS)
}

fn rms_opt(l: &mut Loader<'_>, name: &str, width: usize) -> Result<Option<Norm>, Error> {
    norm_opt(l, name, width, NormKind::Rms, EPS)
}

pub(super) fn load(l: &mut Loader<'_>, keys: &SoundKeys) -> Result<Box<dyn Family>, Error> {
    let sizes = Sizes::of(l, "audio")?;
    let (width, names) = (sizes.width, ["a.conv1d.0", "a.conv1d.1"]);
    let [first, second] = [channels(l, names[0])?, channels(l, names[1])?];
    let norms = [(names[0], first), (names[1], second)];
    let [first_norm, second_norm] =
        norms.map(|(name, count)| norm_opt(l, &format!("{name}.norm"), count, NormKind::Layer, EPS));
    let convolutions = [first_kernel(l, names[0], first)?, kernel(l, names[1], [first, second])?];
    let bands = planes(0, keys.bins)[2].columns;
    let input = Clamped::load(l, "a.input_projection", [bands * second, width])?;
    let mut blocks = Vec::with_capacity(sizes.layers);
    for layer in 0..sizes.layers {
        l.part(format!("a.blk.{layer}."));
        blocks.push(Block::load(l, &sizes)?);
    }
    l.whole();
    let out = match l.has("a.pre_encode.out.weight") {
        true => {
            let to = width_of(l, "a.pre_encode.out")?;
            Some((Clamped::load(l, "a.pre_encode.out", [width, to])?, to))
        }
        false => None,
    };
    let last = out.as_ref().map_or(width, |(_, to)| *to);
    let model = width_of(l, "mm.a.input_projection")?;
    Ok(Box::new(Gemma4 {
        sizes,
        bins: keys.bins,
        convolutions,
        convolution_norms: [first_norm?, second_norm?],
        input,
        blocks,
        distances: distances(l, width),
        out: out.map(|(matrix, _)| matrix),
        norm: rms_opt(l, "mm.a.soft_emb_norm", last)?.unwrap_or(Norm::Rms { weight: None, eps: EPS }),
        projection: Clamped::load(l, "mm.a.input_projection", [last, model])?,
    }))
}

/// The planes before and behind the convolutions: moments are rows, bands columns.
fn planes(frames: usize, bins: usize) -> [Grid; 3] {
    let whole = Grid { rows: frames, columns: bins };
    [whole, plane(whole), plane(plane(whole))]
}

/// Sines, then cosines of each distance, slower from one to the next.
fn distances(l: &mut Loader<'_>, width: usize) -> Tensor {
    let scales = width / 2;
    let slower = 10_000.0_f64.ln() / (scales.saturating_sub(1).max(1)) as f64;
    let turn = |distance: usize, scale: usize| distance as f64 * (-(scale as f64) * slower).exp();
    let row = |distance: usize| {
        let sines = (0..scales).map(move |scale| turn(distance, scale).sin() as f32);
        sines.chain((0..scales).map(move |scale| turn(distance, scale).cos() as f32))
    };
    let values: Vec<f32> = (0..SEEN).flat_map(row).collect();
    l.constant("a.distances", &values, [2 * scales, SEEN, 1, 1])
}

impl Block {
    fn load(l: &mut Loader<'_>, sizes: &Sizes) -> Result<Block, Error> {
        let Sizes { width, head, heads, .. } = *sizes;
        let all = [width, heads * head];
        let mut feed_forward = |end: &str| -> Result<FeedForward, Error> {
            let (up, down) = (format!("ffn_up{end}"), format!("ffn_down{end}"));
            let inside = width_of(l, &up)?;
            Ok(FeedForward {
                norm: rms(l, &format!("ffn_norm{end}"), width)?,
                up: Clamped::load(l, &up, [width, inside])?,
                down: Clamped::load(l, &down, [inside, width])?,
                post_norm: rms(l, &format!("ffn_post_norm{end}"), width)?,
            })
        };
        let feed_forward = [feed_forward("")?, feed_forward("_1")?];
        let first = if l.has("attn_pre_norm.weight") { "attn_pre_norm" } else { "ln1" };
        let mut factor = |name: &str, base: f64| -> Result<Tensor, Error> {
            let name = format!("{name}.weight");
            let given = l.values(&name)?.unwrap_or_else(|| vec![1.0; head]);
            if given.len() != head {
                return Err(Error::TensorShape { name: l.full(&name), got: vec![given.len()], want: vec![head] });
            }
            let values: Vec<f32> = given.iter().map(|v| (f64::from(*v) * base) as f32).collect();
            let name = l.full(&name);
            Ok(l.constant(&name, &values, [head, 1, 1, 1]))
        };
        let q_factor = factor("per_dim_scale", 1.0 / (head as f64).sqrt() / std::f64::consts::LN_2)?;
        let k_factor = factor("per_dim_k_scale", (1.0 + std::f64::consts::E).log2())?;
        Ok(Block {
            feed_forward,
            norm: rms(l, first, width)?,
            q: Clamped::load(l, "attn_q", all)?,
            k: Clamped::load(l, "attn_k", all)?,
            v: Clamped::load(l, "attn_v", all)?,
            q_factor,
            k_factor,
            by_distance: l.linear("attn_k_rel", &all)?,
            out: Clamped::load(l, "attn_out", [heads * head, width])?,
            post_norm: rms_opt(l, "attn_post_norm", width)?,
            convolution: Convolution {
                // The names of the two norms are exchanged in files.
                norm: rms(l, "conv_norm", width)?,
                both: Clamped::load(l, "conv_pw1", [width, 2 * width])?,
                factors: factors(l, "conv_dw.weight", [TAPS, width])?,
                middle: rms(l, "norm_conv", width)?,
                down: Clamped::load(l, "conv_pw2", [width, width])?,
            },
            last: rms_opt(l, "ln2", width)?,
        })
    }
}

impl FeedForward {
    fn build(&self, s: &mut Sheet, x: Tensor) -> Tensor {
        let h = s.b.norm("norm", x, &self.norm);
        let h = self.up.build(s, "up", h);
        let h = s.b.function("activation", h, Function::Silu);
        let h = self.down.build(s, "down", h);
        let h = s.b.norm("post_norm", h, &self.post_norm);
        half_step(s, x, h)
    }
}

impl Convolution {
    fn build(&self, s: &mut Sheet, x: Tensor) -> Tensor {
        let h = s.b.norm("norm", x, &self.norm);
        let h = self.both.build(s, "both", h);
        let h = gated_halves(s, h);
        let h = over_time(s, h, TAPS - 1, self.factors);
        let h = s.b.norm("middle", h, &self.middle);
        let h = s.b.function("activation", h, Function::Silu);
        let h = self.down.build(s, "down", h);
        s.b.add("residual", x, h)
    }
}

impl Gemma4 {
    /// Every moment is a sequence of its own: a query and the twelve keys that it sees, to each of which what its distance adds is added.
    fn attention(&self, s: &mut Sheet, block: &Block, x: Tensor, mask: Tensor) -> Tensor {
        let Sizes { heads, head, .. } = self.sizes;
        let (moments, wide) = (x.shape[1], heads * head);
        let h = s.b.norm("norm", x, &block.norm);
        let q = block.q.build(s, "q", h).heads(0, head, heads);
        let q = s.b.multiply("q.factor", q, block.q_factor);
        let k = block.k.build(s, "k", h).heads(0, head, heads);
        let k = s.b.multiply("k.factor", k, block.k_factor).reshape([wide, moments, 1, 1]);
        let v = block.v.build(s, "v", h);
        let by_distance = s.b.linear("by_distance", self.distances, &block.by_distance);
        let seen = || (0..moments).flat_map(|at| (0..SEEN).map(move |distance| at.checked_sub(distance)));
        let k = s.gather("k.seen", k, seen()).reshape([wide, SEEN, moments, 1]);
        let k = s.b.add("k.distance", k, by_distance);
        let v = s.gather("v.seen", v, seen());
        let by_head = |t: Tensor| t.reshape([head, heads, SEEN, moments]).permute([0, 2, 1, 3]);
        let out = s.b.fresh("attended", TensorType::F32, [wide, moments, 1, 1]);
        let shaped = out.reshape([head, heads, 1, moments]);
        let q = q.reshape([head, 1, heads, moments]);
        let plain = flash_attention::Call::plain(q, by_head(k), by_head(v), shaped, 1.0);
        s.b.step("attended", flash_attention::Call { mask: Mask::Explicit(mask), logit_softcap: SOFTCAP, ..plain });
        let y = block.out.build(s, "out", out);
        let y = block.post_norm.map_or(y, |norm| s.b.norm("post_norm", y, &norm));
        s.b.add("residual", x, y)
    }
}

impl Family for Gemma4 {
    fn unfolded(&self, heard: &Spectrogram) -> Vec<f32> {
        let [whole, first, _] = planes(heard.frames(), self.bins);
        let place = |place| {
            let read = sources(whole, place).map(|at| at.map_or(0.0, |at| heard.values[at]));
            read.chain([0.0; FIRST - PLACES])
        };
        places(first).flat_map(place).collect()
    }

    fn build(&self, s: &mut Sheet, frames: usize) -> Tensor {
        let [_, first, second] = planes(frames, self.bins);
        let x = s.input(FIRST, first.patches());
        s.b.at("stem");
        let normed = |s: &mut Sheet, name: &str, x: Tensor, norm: &Option<Norm>| {
            let x = norm.map_or(x, |norm| s.b.norm(&format!("{name}.norm"), x, &norm));
            s.b.function(&format!("{name}.activation"), x, Function::Relu)
        };
        let x = s.b.linear("first", x, &self.convolutions[0]);
        let x = normed(s, "first", x, &self.convolution_norms[0]);
        let channels = x.shape[0];
        let read = places(second).flat_map(|place| sources(first, place));
        let x = s.gather("second", x, read).reshape([PLACES * channels, second.patches(), 1, 1]);
        let x = s.by_channel(x, channels);
        let x = s.b.linear("second", x, &self.convolutions[1]);
        let x = normed(s, "second", x, &self.convolution_norms[1]);
        let x = x.reshape([x.shape[0] * second.columns, second.rows, 1, 1]);
        let mut x = self.input.build(s, "input", x);
        // What would lie before the beginning is hidden.
        let hidden = |i: usize| if i % SEEN > i / SEEN { f16::NEG_INFINITY } else { f16::ZERO };
        let hidden: Vec<f16> = (0..second.rows * SEEN).map(hidden).collect();
        let mask = s.halves("seen", &hidden, [SEEN, 1, 1, second.rows]);
        for (layer, block) in self.blocks.iter().enumerate() {
            s.b.at(format!("{layer}.first"));
            x = block.feed_forward[0].build(s, x);
            s.b.at(format!("{layer}.attention"));
            x = self.attention(s, block, x, mask);
            s.b.at(format!("{layer}.convolution"));
            x = block.convolution.build(s, x);
            s.b.at(format!("{layer}.second"));
            x = block.feed_forward[1].build(s, x);
            x = block.last.map_or(x, |norm| s.b.norm("last", x, &norm));
        }
        s.b.at("projector");
        if let Some(out) = &self.out {
            x = out.build(s, "out", x);
        }
        let x = s.b.norm("norm", x, &self.norm);
        self.projection.build(s, "projection", x)
    }

    fn rows(&self, frames: usize) -> usize {
        planes(frames, self.bins)[2].rows
    }
}

/// A matrix over the samples of 40 milliseconds.
struct Samples {
    width: usize,
    projection: Linear,
}

pub(super) fn load_samples(l: &mut Loader<'_>, _: &SoundKeys) -> Result<Box<dyn Family>, Error> {
    let name = "mm.a.input_projection";
    let shape = l.shape(&format!("{name}.weight"));
    let shape = shape.ok_or_else(|| Error::MissingTensor { name: format!("{name}.weight") })?;
    // The samples of a row, as their spectrograms have them.
    let width = 640;
    Ok(Box::new(Samples { width, projection: l.linear(name, &[width, shape[1]])? }))
}

impl Family for Samples {
    fn unfolded(&self, heard: &Spectrogram) -> Vec<f32> {
        heard.values.clone()
    }

    fn build(&self, s: &mut Sheet, frames: usize) -> Tensor {
        let x = s.input(self.width, frames);
        s.b.at("projector");
        let x = s.b.norm("norm", x, &Norm::Rms { weight: None, eps: EPS });
        s.b.linear("projection", x, &self.projection)
    }

    fn rows(&self, frames: usize) -> usize {
        frames
    }
}
