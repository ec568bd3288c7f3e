//! Kimi VL and Kimi K2.5: rotary positions beside learnt ones that are brought to the picture's size.

use kiln_kernels::rope::RopeStyle;
use kiln_kernels::tensor::Tensor;
use kiln_kernels::unary::Function;
use kiln_media::Keys;

use super::Family;
use super::grids::{Between, Table};
use super::parts::{Projector, Stem, square_table, table};
use super::sheet::{Grid, Sheet};
use super::vit::{Axis, NormKind, Places, Sizes, Spec, Turning, Vit, norm};
use crate::Error;
use crate::model::Loader;
use crate::plan::Norm;

struct Kimi {
    stem: Stem,
    positions: Table,
    between: Between,
    vit: Vit,
    merge: usize,
    norm: Norm,
    projector: Projector,
}

const POSITIONS: &str = "v.position_embd.weight";

/// Kimi VL: a square table.
pub(super) fn load(l: &mut Loader<'_>, keys: &Keys) -> Result<Box<dyn Family>, Error> {
    let sizes = Sizes::read(l)?;
    let positions = square_table(l, sizes.width)?;
    let positions = positions.ok_or_else(|| Error::MissingTensor { name: POSITIONS.to_owned() })?;
    body(l, keys.merge("kimivl"), sizes, (positions, Between::Antialias), 1e-5)
}

/// Kimi K2.5: a table with sides of its own.
pub(super) fn load25(l: &mut Loader<'_>, keys: &Keys) -> Result<Box<dyn Family>, Error> {
    let sizes = Sizes::read(l)?;
    let shape = l.shape(POSITIONS).unwrap_or([0; 4]);
    let values = table(l, POSITIONS, sizes.width)?;
    let positions = Table { grid: Grid { rows: shape[2], columns: shape[1] }, values };
    body(l, keys.merge("kimik25"), sizes, (positions, Between::Cubic), sizes.eps)
}

fn body(
    l: &mut Loader<'_>,
    merge: usize,
    sizes: Sizes,
    (positions, between): (Table, Between),
    eps: f32,
) -> Result<Box<dyn Family>, Error> {
    let first = Axis::Column;
    let turning = Turning::Halves { first, style: RopeStyle::Normal, base: 10_000.0, interleaved: false };
    let spec = Spec { turning, ..Spec::plain(&sizes, NormKind::Layer) };
    Ok(Box::new(Kimi {
        stem: Stem::load(l, &sizes)?,
        positions,
        between,
        vit: Vit::load(l, sizes, spec)?,
        merge,
        norm: norm(l, "mm.input_norm", sizes.width, NormKind::Layer, eps)?,
        projector: Projector::load(l, ["mm.1", "mm.2"], merge * merge * sizes.width, Function::Gelu)?,
    }))
}

impl Family for Kimi {
    fn build(&self, s: &mut Sheet) -> Tensor {
        let patches = s.raster();
        let (grid, order, width) = (s.grid, s.order.clone(), self.vit.sizes.width);
        let x = self.stem.build(s, patches);
        let positions = self.positions.resized(grid, self.between);
        let positions = s.floats("positions", &positions, [width, grid.patches()]);
        let x = s.b.add("positions", x, positions);
        let x = self.vit.build(s, x, &Places::of(&order, grid.columns));
        s.b.at("projector");
        // Patches are normed one by one, those that fill up blocks too.
        let joined = s.merged(x, self.merge);
        let [all, blocks, ..] = joined.shape;
        let normed = s.b.norm("norm", joined.reshape([width, all / width * blocks, 1, 1]), &self.norm);
        self.projector.build(s, normed.reshape([all, blocks, 1, 1]))
    }

    fn rows(&self, grid: Grid) -> usize {
        grid.blocks(self.merge).patches()
    }
}
