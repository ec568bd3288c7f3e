//! Pixtral, Mistral 3 and LightOnOCR: rotary positions in both directions, gates, and a vector behind every row of patches.

use kiln_kernels::rope::RopeStyle;
use kiln_kernels::tensor::Tensor;
use kiln_kernels::unary::Function;
use kiln_media::Keys;

use super::Family;
use super::parts::{Projector, Stem};
use super::sheet::{Grid, Sheet};
use super::vit::{Axis, NormKind, Places, Sizes, Spec, Turning, Vit, norm, width_of};
use crate::Error;
use crate::model::Loader;
use crate::plan::{Linear, Norm};

struct Pixtral {
    stem: Stem,
    vit: Vit,
    merge: usize,
    merger: Option<(Norm, Linear)>,
    projector: Projector,
    /// What stands behind a row.
    line_break: Option<Tensor>,
}

/// Pixtral and Mistral 3.
pub(super) fn load(l: &mut Loader<'_>, keys: &Keys) -> Result<Box<dyn Family>, Error> {
    let mut pixtral = body(l, keys)?;
    let width = width_of(l, "mm.2")?;
    pixtral.line_break = l.vector_opt("v.token_embd.img_break", &[width])?;
    Ok(Box::new(pixtral))
}

/// LightOnOCR, which has nothing behind its rows.
pub(super) fn load_plain(l: &mut Loader<'_>, keys: &Keys) -> Result<Box<dyn Family>, Error> {
    Ok(Box::new(body(l, keys)?))
}

fn body(l: &mut Loader<'_>, keys: &Keys) -> Result<Pixtral, Error> {
    let sizes = Sizes::read(l)?;
    let first = Axis::Row;
    let turning = Turning::Halves { first, style: RopeStyle::Normal, base: 10_000.0, interleaved: true };
    let spec = Spec { turning, ..Spec::plain(&sizes, NormKind::Rms) };
    let (width, side) = (sizes.width, keys.merge("pixtral"));
    let merger = if l.has("mm.patch_merger.weight") {
        let norm = norm(l, "mm.input_norm", width, NormKind::Rms, sizes.eps)?;
        Some((norm, l.linear("mm.patch_merger", &[side * side * width, width])?))
    } else {
        None
    };
    let merge = if merger.is_some() { side } else { 1 };
    Ok(Pixtral {
        stem: Stem::load(l, &sizes)?,
        vit: Vit::load(l, sizes, spec)?,
        merge,
        merger,
        projector: Projector::load(l, ["mm.1", "mm.2"], width, Function::Gelu)?,
        line_break: None,
    })
}

impl Family for Pixtral {
    fn build(&self, s: &mut Sheet) -> Tensor {
        let patches = s.raster();
        let (grid, order) = (s.grid, s.order.clone());
        let x = self.stem.build(s, patches);
        let mut x = self.vit.build(s, x, &Places::of(&order, grid.columns));
        if let Some((norm, matrix)) = &self.merger {
            s.b.at("merger");
            let normed = s.b.norm("norm", x, norm);
            let joined = s.merged_by_channel(normed, self.merge);
            x = s.b.linear("matrix", joined, matrix);
        }
        let x = self.projector.build(s, x);
        let Some(line_break) = self.line_break else { return x };
        let Grid { rows, columns } = grid.blocks(self.merge);
        let all = s.below("breaks", x, line_break.reshape([line_break.shape[0], 1, 1, 1]));
        let line = |row: usize| (row * columns..(row + 1) * columns).chain((row + 1 < rows).then_some(rows * columns));
        s.gather("lines", all, (0..rows).flat_map(line).map(Some))
    }

    fn rows(&self, grid: Grid) -> usize {
        let Grid { rows, columns } = grid.blocks(self.merge);
        rows * columns + if self.line_break.is_some() { rows - 1 } else { 0 }
    }
}
