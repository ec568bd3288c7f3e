//! Llama 4: rotary positions counted from 1, a class token at place 0 behind the patches, patches joined in blocks, and the blocks column by
//! column, as in llama.cpp, which the results are judged by.

use kiln_kernels::rope::RopeStyle;
use kiln_kernels::tensor::Tensor;
use kiln_kernels::unary::Function;
use kiln_media::Keys;

use super::Family;
use super::parts::{Positions, Stem, own_patches};
use super::sheet::{Grid, Sheet};
use super::vit::{Axis, NormKind, Places, Sizes, Spec, Turning, Vit, width_of};
use crate::Error;
use crate::model::Loader;
use crate::plan::Linear;

struct Llama4 {
    stem: Stem,
    class: Tensor,
    positions: Positions,
    vit: Vit,
    merge: usize,
    matrices: [Linear; 3],
}

pub(super) fn load(l: &mut Loader<'_>, keys: &Keys) -> Result<Box<dyn Family>, Error> {
    let sizes = Sizes::read(l)?;
    let merge = keys.merge("llama4");
    let first = Axis::Column;
    let turning = Turning::Halves { first, style: RopeStyle::Normal, base: 10_000.0, interleaved: false };
    let spec = Spec { turning, ..Spec::plain(&sizes, NormKind::Layer) };
    let mut width = merge * merge * sizes.width;
    let mut matrix = |name: &str| {
        let out = width_of(l, name)?;
        let matrix = l.linear(name, &[width, out]);
        width = out;
        matrix
    };
    let matrices = [matrix("mm.model.mlp.1")?, matrix("mm.model.mlp.2")?, matrix("mm.model.fc")?];
    Ok(Box::new(Llama4 {
        stem: Stem::load(l, &sizes)?,
        class: l.vector("v.class_embd", &[sizes.width])?,
        positions: Positions::load(l, sizes.width, own_patches(keys) + 1)?,
        vit: Vit::load(l, sizes, spec)?,
        merge,
        matrices,
    }))
}

impl Family for Llama4 {
    fn build(&self, s: &mut Sheet) -> Tensor {
        let patches = s.raster();
        let (grid, order) = (s.grid, s.order.clone());
        let x = self.stem.build(s, patches);
        let x = s.below("class", x, self.class.reshape([self.class.shape[0], 1, 1, 1]));
        let x = self.positions.add(s, x, 0..x.shape[1]);
        let mut places = Places::of(&order, grid.columns);
        for axis in [&mut places.rows, &mut places.columns] {
            axis.iter_mut().for_each(|place| *place += 1);
            axis.push(0);
        }
        let x = self.vit.build(s, x, &places);
        s.b.at("projector");
        let (width, side) = (x.shape[0], self.merge);
        let ordered: Vec<Option<usize>> = grid.by_blocks(side).collect();
        let blocks = grid.blocks(side);
        let by_columns = (0..blocks.patches()).map(|i| i % blocks.rows * blocks.columns + i / blocks.rows);
        let ordered = by_columns.flat_map(|block| ordered[block * side * side..][..side * side].to_vec());
        let x = s.gather("merge", x, ordered.collect::<Vec<_>>().into_iter());
        let mut x = x.reshape([side * side * width, blocks.patches(), 1, 1]);
        for (nth, matrix) in self.matrices.iter().enumerate() {
            x = s.b.linear(&format!("matrix.{nth}"), x, matrix);
            if nth < 2 {
                x = s.b.function(&format!("activation.{nth}"), x, Function::Gelu);
            }
        }
        x
    }

    fn rows(&self, grid: Grid) -> usize {
        grid.blocks(self.merge).patches()
    }
}
