//! Idefics 3 and SmolVLM: SigLIP, whose patches are joined in blocks.

use kiln_kernels::tensor::Tensor;
use kiln_media::Keys;

use super::Family;
use super::parts::{Positions, Stem, own_patches};
use super::sheet::{Grid, Sheet};
use super::vit::{NormKind, Places, Sizes, Spec, Vit, width_of};
use crate::Error;
use crate::model::Loader;
use crate::plan::Linear;

struct Idefics {
    stem: Stem,
    positions: Positions,
    vit: Vit,
    merge: usize,
    projection: Linear,
}

pub(super) fn load(l: &mut Loader<'_>, keys: &Keys) -> Result<Box<dyn Family>, Error> {
    let sizes = Sizes::read(l)?;
    let merge = keys.merge("idefics3");
    let spec = Spec { swapped: true, ..Spec::plain(&sizes, NormKind::Layer) };
    let out = width_of(l, "mm.model.fc")?;
    Ok(Box::new(Idefics {
        stem: Stem::load(l, &sizes)?,
        positions: Positions::load(l, sizes.width, own_patches(keys))?,
        vit: Vit::load(l, sizes, spec)?,
        merge,
        projection: l.linear("mm.model.fc", &[merge * merge * sizes.width, out])?,
    }))
}

impl Family for Idefics {
    fn build(&self, s: &mut Sheet) -> Tensor {
        let patches = s.raster();
        let x = self.stem.build(s, patches);
        let x = self.positions.add(s, x, 0..x.shape[1]);
        let x = self.vit.build(s, x, &Places::default());
        s.b.at("projector");
        let x = s.merged(x, self.merge);
        s.b.linear("projection", x, &self.projection)
    }

    fn rows(&self, grid: Grid) -> usize {
        grid.blocks(self.merge).patches()
    }
}
