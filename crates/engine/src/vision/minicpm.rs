//! MiniCPM-V: positions by buckets of a table of 70 x 70; up to 4.5 a few learnt queries read the patches, 4.6 joins blocks, once between
//! its layers where it joins four by four.

use kiln_kernels::tensor::Tensor;
use kiln_kernels::unary::Function;
use kiln_media::Keys;

use super::Family;
use super::parts::{Positions, Projector, Stem};
use super::sheet::{Grid, Sheet};
use super::vit::{Coordinates, NormKind, Places, Sizes, Spec, Vit, attended, norm, width_of};
use crate::Error;
use crate::model::Loader;
use crate::plan::{Linear, Norm};

/// Buckets of a side of the table.
const BUCKETS: usize = 70;
/// Width of the heads that read patches, whatever a file says about its layers.
const HEAD: usize = 128;

/// The row of the table for every patch.
fn buckets(grid: Grid) -> impl Iterator<Item = usize> {
    let bucket = |at: usize, of: usize| (BUCKETS as f64 * at as f64 / of as f64).floor() as usize;
    (0..grid.patches())
        .map(move |i| bucket(i / grid.columns, grid.rows) * BUCKETS + bucket(i % grid.columns, grid.columns))
}

fn spec(sizes: &Sizes) -> Spec {
    Spec { swapped: true, ..Spec::plain(sizes, NormKind::Layer) }
}

struct Resampler {
    stem: Stem,
    positions: Positions,
    vit: Vit,
    query: Tensor,
    rows: usize,
    keys: Linear,
    norms: [Norm; 3],
    /// Of queries, keys, values and results.
    matrices: [Linear; 4],
    projection: Linear,
}

/// MiniCPM-V up to 4.5.
pub(super) fn load(l: &mut Loader<'_>, _: &Keys) -> Result<Box<dyn Family>, Error> {
    let sizes = Sizes::read(l)?;
    let missing = |name: &str| Error::MissingTensor { name: name.to_owned() };
    let query = l.shape("resampler.query").ok_or_else(|| missing("resampler.query"))?;
    let [width, rows, ..] = query;
    let fits = width.is_multiple_of(HEAD);
    l.keys.require(fits, "vision.projection_dim", width, &format!("a multiple of {HEAD}"))?;
    l.ignore("resampler.pos_embed_k");
    let out = width_of(l, "resampler.proj")?;
    let mut of = |name: &str| norm(l, &format!("resampler.ln_{name}"), width, NormKind::Layer, sizes.eps);
    let norms = [of("q")?, of("kv")?, of("post")?];
    let mut matrix = |name: &str| l.linear(&format!("resampler.attn.{name}"), &[width, width]);
    let matrices = [matrix("q")?, matrix("k")?, matrix("v")?, matrix("out")?];
    Ok(Box::new(Resampler {
        stem: Stem::load(l, &sizes)?,
        positions: Positions::load(l, sizes.width, BUCKETS * BUCKETS)?,
        vit: Vit::load(l, sizes, spec(&sizes))?,
        query: l.vector("resampler.query", &[width, rows])?,
        rows,
        keys: l.linear("resampler.kv", &[sizes.width, width])?,
        norms,
        matrices,
        projection: l.linear("resampler.proj", &[width, out])?,
    }))
}

impl Resampler {
    /// Sines and cosines of the column, then of the row, each at falling frequencies.
    fn places(s: &mut Sheet, width: usize) -> Tensor {
        let quarter = width / 4;
        let waves = |at: usize| {
            let angle = move |i: usize| at as f64 / 10_000_f64.powf(i as f64 / quarter as f64);
            (0..quarter).map(move |i| angle(i).sin()).chain((0..quarter).map(move |i| angle(i).cos()))
        };
        let grid = s.grid;
        let row = |i: usize| waves(i % grid.columns).chain(waves(i / grid.columns)).map(|v| v as f32);
        let values: Vec<f32> = (0..grid.patches()).flat_map(row).collect();
        s.floats("places", &values, [width, grid.patches()])
    }
}

impl Family for Resampler {
    fn build(&self, s: &mut Sheet) -> Tensor {
        let patches = s.raster();
        let grid = s.grid;
        let x = self.stem.build(s, patches);
        let x = self.positions.add(s, x, buckets(grid));
        let x = self.vit.build(s, x, &Places::default());
        s.b.at("resampler");
        let width = self.query.shape[0];
        let [q_norm, kv_norm, post_norm] = &self.norms;
        let query = s.b.norm("q_norm", self.query, q_norm);
        let values = s.b.linear("kv", x, &self.keys);
        let values = s.b.norm("kv_norm", values, kv_norm);
        let places = Self::places(s, width);
        let keys = s.b.add("places", values, places);
        let [q, k, v, out] = &self.matrices;
        let heads = |t: Tensor| t.heads(0, HEAD, width / HEAD);
        let q = heads(s.b.linear("q", query, q));
        let k = heads(s.b.linear("k", keys, k));
        let v = heads(s.b.linear("v", values, v));
        let y = attended(s, [q, k, v], 1.0 / (HEAD as f32).sqrt(), None);
        let y = s.b.linear("out", y, out);
        let y = s.b.norm("post_norm", y, post_norm);
        s.b.linear("projection", y, &self.projection)
    }

    fn rows(&self, _: Grid) -> usize {
        self.rows
    }
}

/// What joins two by two patches between the layers.
struct Inner {
    /// Layers before it.
    layers: usize,
    norm: Norm,
    /// Of queries, keys, values and results, inside of each block.
    matrices: [Linear; 4],
    joined_norm: Norm,
    ffn: Projector,
}

struct MiniCpm46 {
    stem: Stem,
    positions: Positions,
    vit: Vit,
    inner: Option<Inner>,
    norm: Norm,
    projector: Projector,
}

/// MiniCPM-V 4.6.
pub(super) fn load46(l: &mut Loader<'_>, keys: &Keys) -> Result<Box<dyn Family>, Error> {
    let sizes = Sizes::read(l)?;
    let Sizes { width, eps, layers, .. } = sizes;
    let inner = if keys.merge("minicpmv4_6") == 4 {
        let at = l.keys.list("vision.wa_layer_indexes", 64)?.first().copied().unwrap_or(0) + 1;
        l.keys.require(at <= layers, "vision.wa_layer_indexes", at - 1, &format!("below {layers}"))?;
        l.part("v.vit_merger.".to_owned());
        let mut matrix = |name: &str| l.linear(&format!("attn_{name}"), &[width, width]);
        let matrices = [matrix("q")?, matrix("k")?, matrix("v")?, matrix("out")?];
        let inner = Inner {
            layers: at,
            norm: norm(l, "ln1", width, NormKind::Layer, eps)?,
            matrices,
            joined_norm: norm(l, "ds_ln", 4 * width, NormKind::Layer, eps)?,
            ffn: Projector::load(l, ["ds_ffn_up", "ds_ffn_down"], 4 * width, Function::Gelu)?,
        };
        l.whole();
        Some(inner)
    } else {
        None
    };
    Ok(Box::new(MiniCpm46 {
        stem: Stem::load(l, &sizes)?,
        positions: Positions::load(l, width, BUCKETS * BUCKETS)?,
        vit: Vit::load(l, sizes, spec(&sizes))?,
        inner,
        norm: norm(l, "mm.input_norm", 4 * width, NormKind::Layer, eps)?,
        projector: Projector::load(l, ["mm.up", "mm.down"], 4 * width, Function::GeluErf)?,
    }))
}

impl Inner {
    /// Blocks of two by two patches see themselves, and become one row each.
    fn build(&self, s: &mut Sheet, x: Tensor, sizes: &Sizes) -> Tensor {
        s.b.at("inner");
        let Sizes { width, heads, head, .. } = *sizes;
        let blocks = s.grid.blocks(2).patches();
        let x = s.gather("blocks", x, s.grid.by_blocks(2));
        let h = s.b.norm("norm", x, &self.norm);
        let [q, k, v, out] = &self.matrices;
        // Every block is a batch of its own.
        let by_block = |t: Tensor| t.reshape([head, heads, 4, blocks]);
        let (q, k, v) = (s.b.linear("q", h, q), s.b.linear("k", h, k), s.b.linear("v", h, v));
        let y = in_batches(s, [by_block(q), by_block(k), by_block(v)], 1.0 / (head as f32).sqrt());
        let y = s.b.linear("out", y.reshape([width, 4 * blocks, 1, 1]), out);
        let x = s.b.add("residual", x, y);
        let joined = x.reshape([4 * width, blocks, 1, 1]);
        let sums = s.sums(x, 4, width);
        let means = s.b.scale("mean", sums, 0.25);
        let h = s.b.norm("joined_norm", joined, &self.joined_norm);
        let y = self.ffn.at(s, h);
        s.b.add("joined", means, y)
    }
}

/// Attention of the tokens of each batch over each other: `[width, heads, tokens, batches]` in and out.
fn in_batches(s: &mut Sheet, [q, k, v]: [Tensor; 3], scale: f32) -> Tensor {
    let out = s.b.like("attended", q);
    let by_head = |t: Tensor| t.permute([0, 2, 1, 3]);
    s.b.step("", kiln_kernels::flash_attention::Call::plain(by_head(q), by_head(k), by_head(v), out, scale));
    out
}

impl Family for MiniCpm46 {
    fn build(&self, s: &mut Sheet) -> Tensor {
        let patches = s.raster();
        let (whole, grid) = (s.grid, s.grid);
        let x = self.stem.build(s, patches);
        let x = self.positions.add(s, x, buckets(grid));
        let mut x = self.vit.begin(s, x);
        for layer in 0..self.vit.layers() {
            x = self.vit.layer(s, layer, x, &Coordinates::Still, None);
            if let Some(inner) = self.inner.as_ref().filter(|inner| inner.layers == layer + 1) {
                x = inner.build(s, x, &self.vit.sizes);
                s.grid = s.grid.blocks(2);
            }
        }
        let x = self.vit.end(s, x);
        s.b.at("projector");
        let joined = s.merged(x, 2);
        s.grid = whole;
        let x = s.b.norm("norm", joined, &self.norm);
        self.projector.build(s, x)
    }

    fn rows(&self, grid: Grid) -> usize {
        let grid = if self.inner.is_some() { grid.blocks(2) } else { grid };
        grid.blocks(2).patches()
    }
}
