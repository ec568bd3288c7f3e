//! Qwen VL: patches in blocks of two by two, turned by their rows and columns. Qwen 2.5 lets most layers see windows alone; Qwen 3 adds
//! rows of some layers for the first layers of the model.

use kiln_kernels::tensor::Tensor;
use kiln_kernels::unary::Function;
use kiln_media::Keys;

use super::Family;
use super::grids::{Between, Table};
use super::parts::{Projector, Stem, square_table};
use super::sheet::{Grid, Sheet};
use super::vit::{NormKind, Places, Sizes, Spec, Turning, Vit, Windows, norm};
use crate::Error;
use crate::model::Loader;
use crate::plan::Norm;

/// Patches of a side of a block, which becomes one row.
const BLOCK: usize = 2;
/// Pixels of a side of a window.
const WINDOW: usize = 112;

struct Qwen {
    stem: Stem,
    positions: Option<Table>,
    vit: Vit,
    /// One of so many layers sees everything, the others see windows.
    every: Option<usize>,
    /// Rows that are made of the results of layers, besides.
    deep: Vec<(usize, Norm, Projector)>,
    projector: Projector,
}

/// Qwen 2 VL.
pub(super) fn load2(l: &mut Loader<'_>, keys: &Keys) -> Result<Box<dyn Family>, Error> {
    Ok(Box::new(body(l, keys, NormKind::Layer)?))
}

/// Qwen 2.5 VL.
pub(super) fn load25(l: &mut Loader<'_>, keys: &Keys) -> Result<Box<dyn Family>, Error> {
    let every = l.keys.count_opt("vision.n_wa_pattern", 1 << 10)?;
    Ok(Box::new(Qwen { every, ..body(l, keys, NormKind::Rms)? }))
}

/// Qwen 3 VL.
pub(super) fn load3(l: &mut Loader<'_>, keys: &Keys) -> Result<Box<dyn Family>, Error> {
    let mut qwen = body(l, keys, NormKind::Layer)?;
    let Sizes { width, layers, eps, .. } = qwen.vit.sizes;
    let positions = square_table(l, width)?;
    qwen.positions = Some(positions.ok_or_else(|| Error::MissingTensor { name: "v.position_embd.weight".to_owned() })?);
    let joined = BLOCK * BLOCK * width;
    for layer in 0..layers {
        l.part(format!("v.deepstack.{layer}."));
        if l.has("fc1.weight") {
            let norm = norm(l, "norm", joined, NormKind::Layer, eps)?;
            qwen.deep.push((layer, norm, Projector::load(l, ["fc1", "fc2"], joined, Function::Gelu)?));
        }
    }
    l.whole();
    Ok(Box::new(qwen))
}

fn body(l: &mut Loader<'_>, keys: &Keys, kind: NormKind) -> Result<Qwen, Error> {
    let sizes = Sizes::read(l)?;
    let merge = keys.merge("qwen2vl_merger");
    l.keys.require(merge == BLOCK, "vision.spatial_merge_size", merge, "2")?;
    let spec = Spec { turning: Turning::Pairs, swapped: true, ..Spec::plain(&sizes, kind) };
    Ok(Qwen {
        stem: Stem::load(l, &sizes)?,
        positions: None,
        vit: Vit::load(l, sizes, spec)?,
        every: None,
        deep: Vec::new(),
        projector: Projector::load(l, ["mm.0", "mm.2"], BLOCK * BLOCK * sizes.width, Function::Gelu)?,
    })
}

/// Blocks window by window, and how many each window has.
struct WindowOrder {
    blocks: Vec<usize>,
    counts: Vec<usize>,
}

impl WindowOrder {
    /// Windows and the blocks in them are in raster order; windows at the edges have fewer blocks.
    fn new(grid: Grid, patch: usize) -> WindowOrder {
        let side = (WINDOW / patch / BLOCK).max(1);
        let (windows, mut blocks, mut counts) = (grid.blocks(side), Vec::new(), Vec::new());
        for window in 0..windows.patches() {
            let (top, left) = (window / windows.columns * side, window % windows.columns * side);
            let before = blocks.len();
            for row in top..(top + side).min(grid.rows) {
                blocks.extend((left..(left + side).min(grid.columns)).map(|column| row * grid.columns + column));
            }
            counts.push(blocks.len() - before);
        }
        WindowOrder { blocks, counts }
    }

    /// What attention needs: patches of a window stand one after the other.
    fn windows(&self, s: &mut Sheet) -> Windows {
        let patches: Vec<usize> = self.counts.iter().map(|blocks| blocks * BLOCK * BLOCK).collect();
        let (tokens, most) = (patches.iter().sum(), patches.iter().copied().max().unwrap_or(1));
        let (mut owners, mut members, mut first) = (Vec::new(), Vec::new(), 0);
        for (window, &count) in patches.iter().enumerate() {
            owners.extend(std::iter::repeat_n(window as i32, count));
            members.extend((0..most).map(|i| (first + i.min(count - 1)) as i32));
            first += count;
        }
        let counts: Vec<i32> = patches.iter().map(|count| *count as i32).collect();
        Windows {
            owners: s.ints("windows.owners", &owners, [tokens, 1]),
            members: s.ints("windows.members", &members, [most, counts.len()]),
            counts: s.ints("windows.counts", &counts, [counts.len(), 1]),
            positions: s.ints("windows.positions", &vec![0; tokens], [tokens, 1]),
        }
    }
}

impl Family for Qwen {
    fn build(&self, s: &mut Sheet) -> Tensor {
        let (grid, width) = (s.grid, self.vit.sizes.width);
        let by_blocks: Vec<usize> = grid.by_blocks(BLOCK).flatten().collect();
        let window_order = self.every.map(|_| WindowOrder::new(grid.blocks(BLOCK), s.patch));
        let order: Vec<usize> = match &window_order {
            None => by_blocks,
            Some(w) => {
                let patches = |block: &usize| by_blocks[block * BLOCK * BLOCK..][..BLOCK * BLOCK].to_vec();
                w.blocks.iter().flat_map(patches).collect()
            }
        };
        let patches = s.patches(order.clone());
        let mut x = self.stem.build(s, patches);
        if let Some(table) = &self.positions {
            let resized = table.resized(grid, Between::Corners);
            let values: Vec<f32> = order.iter().flat_map(|i| &resized[i * width..][..width]).copied().collect();
            let positions = s.floats("positions", &values, [width, order.len()]);
            x = s.b.add("positions", x, positions);
        }
        let windows = window_order.as_ref().map(|w| w.windows(s));
        let at = self.vit.coordinates(s, &Places::of(&order, grid.columns));
        let joined = |x: Tensor| x.reshape([BLOCK * BLOCK * width, order.len() / (BLOCK * BLOCK), 1, 1]);
        let mut x = self.vit.begin(s, x);
        let mut deep = Vec::new();
        for layer in 0..self.vit.layers() {
            let whole = self.every.is_none_or(|every| (layer + 1).is_multiple_of(every));
            x = self.vit.layer(s, layer, x, &at, windows.as_ref().filter(|_| !whole));
            if let Some((_, norm, projector)) = self.deep.iter().find(|(of, ..)| *of == layer) {
                s.b.at(format!("{layer}.deepstack"));
                let normed = s.b.norm("norm", joined(x), norm);
                deep.push(projector.at(s, normed));
            }
        }
        let x = self.vit.end(s, x);
        let x = self.projector.build(s, joined(x));
        let x = deep.into_iter().fold(x, |all, rows| s.b.concat("deepstack", all, rows));
        let Some(w) = window_order else { return x };
        let mut back = vec![None; w.blocks.len()];
        w.blocks.iter().enumerate().for_each(|(at, block)| back[*block] = Some(at));
        s.gather("raster", x, back.into_iter())
    }

    fn rows(&self, grid: Grid) -> usize {
        grid.blocks(BLOCK).patches()
    }
}
