//! InternVL: a class token behind the patches, factors of each half of a layer, patches joined in blocks.

use kiln_kernels::tensor::Tensor;
use kiln_kernels::unary::Function;
use kiln_media::Keys;

use super::Family;
use super::parts::{Positions, Projector, Stem, own_patches};
use super::sheet::{Grid, Sheet};
use super::vit::{NormKind, Places, Sizes, Spec, Vit, norm};
use crate::Error;
use crate::model::Loader;
use crate::plan::Norm;

struct InternVl {
    stem: Stem,
    class: Tensor,
    positions: Positions,
    vit: Vit,
    merge: usize,
    norm: Norm,
    projector: Projector,
}

pub(super) fn load(l: &mut Loader<'_>, keys: &Keys) -> Result<Box<dyn Family>, Error> {
    let sizes = Sizes::read(l)?;
    let merge = keys.merge("internvl");
    // The encoder of 6 billion weights has another norm than its smaller kin.
    let kind = if [sizes.width, sizes.layers] == [3200, 45] { NormKind::Rms } else { NormKind::Layer };
    let joined = merge * merge * sizes.width;
    Ok(Box::new(InternVl {
        stem: Stem::load(l, &sizes)?,
        class: l.vector("v.class_embd", &[sizes.width])?,
        positions: Positions::load(l, sizes.width, own_patches(keys) + 1)?,
        vit: Vit::load(l, sizes, Spec::plain(&sizes, kind))?,
        merge,
        norm: norm(l, "mm.model.mlp.0", joined, NormKind::Layer, 1e-5)?,
        projector: Projector::load(l, ["mm.model.mlp.1", "mm.model.mlp.3"], joined, Function::Gelu)?,
    }))
}

impl Family for InternVl {
    fn build(&self, s: &mut Sheet) -> Tensor {
        let patches = s.raster();
        let count = s.grid.patches();
        let x = self.stem.build(s, patches);
        let x = s.below("class", x, self.class.reshape([self.class.shape[0], 1, 1, 1]));
        let x = self.positions.add(s, x, 0..x.shape[1]);
        let x = self.vit.build(s, x, &Places::default());
        s.b.at("projector");
        let x = s.merged(x.narrow(1, 0, count), self.merge);
        let x = s.b.norm("norm", x, &self.norm);
        self.projector.build(s, x)
    }

    fn rows(&self, grid: Grid) -> usize {
        grid.blocks(self.merge).patches()
    }
}
