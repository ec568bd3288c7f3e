//! GLM 4.1V and its kin: Qwen's blocks with a norm of the patches, a convolution over each block, and a gated layer behind it.

use kiln_kernels::tensor::Tensor;
use kiln_kernels::unary::Function;
use kiln_media::Keys;

use super::Family;
use super::grids::{Between, Table};
use super::parts::{Stem, square_table};
use super::sheet::{Grid, Sheet};
use super::vit::{NormKind, Places, Sizes, Spec, Turning, Vit, gate_of, norm, norm_opt, width_of};
use crate::Error;
use crate::model::Loader;
use crate::plan::{Linear, Norm};

struct Glm {
    stem: Stem,
    patch_norm: Option<Norm>,
    positions: Option<Table>,
    vit: Vit,
    merge: usize,
    merger: Linear,
    matrix: Linear,
    norm: Norm,
    up: Linear,
    gate: Linear,
    down: Linear,
}

pub(super) fn load(l: &mut Loader<'_>, keys: &Keys) -> Result<Box<dyn Family>, Error> {
    let sizes = Sizes::read(l)?;
    let (width, merge) = (sizes.width, keys.merge("glm4v"));
    let spec = Spec { turning: Turning::Pairs, ..Spec::plain(&sizes, NormKind::Rms) };
    let missing = |name: &str| Error::MissingTensor { name: name.to_owned() };
    let name = "mm.patch_merger.weight";
    let inside = l.shape(name).ok_or_else(|| missing(name))?[3];
    let kernel = l.tensor(name, &[merge, merge, width, inside])?.reshape([merge * merge * width, inside, 1, 1]);
    let bias = l.vector_opt("mm.patch_merger.bias", &[inside])?;
    let (out, hidden, last) = (width_of(l, "mm.model.fc")?, width_of(l, "mm.up")?, width_of(l, "mm.down")?);
    Ok(Box::new(Glm {
        stem: Stem::load(l, &sizes)?,
        patch_norm: norm_opt(l, "v.norm_embd", width, NormKind::Rms, sizes.eps)?,
        positions: square_table(l, width)?,
        vit: Vit::load(l, sizes, spec)?,
        merge,
        merger: Linear { bias, ..Linear::plain(kernel) },
        matrix: l.linear("mm.model.fc", &[inside, out])?,
        norm: norm(l, "mm.post_norm", out, NormKind::Layer, 1e-5)?,
        up: l.linear("mm.up", &[out, hidden])?,
        gate: l.linear("mm.gate", &[out, hidden])?,
        down: l.linear("mm.down", &[hidden, last])?,
    }))
}

impl Family for Glm {
    fn build(&self, s: &mut Sheet) -> Tensor {
        let (grid, Sizes { width, eps, activation, .. }) = (s.grid, self.vit.sizes);
        let order: Vec<usize> = grid.by_blocks(self.merge).flatten().collect();
        let patches = s.patches(order.clone());
        let x = self.stem.build(s, patches);
        let bare = Norm::Rms { weight: None, eps };
        let mut x = s.b.norm("norm", x, &self.patch_norm.unwrap_or(bare));
        if let Some(table) = &self.positions {
            let resized = table.resized(grid, Between::Cubic);
            let values: Vec<f32> = order.iter().flat_map(|i| &resized[i * width..][..width]).copied().collect();
            let positions = s.floats("positions", &values, [width, order.len()]);
            x = s.b.add("positions", x, positions);
        }
        let x = self.vit.build(s, x, &Places::of(&order, grid.columns));
        s.b.at("projector");
        let patches = self.merge * self.merge;
        let joined = s.by_channel(x.reshape([patches * width, order.len() / patches, 1, 1]), width);
        let x = s.b.linear("merger", joined, &self.merger);
        let x = s.b.linear("matrix", x, &self.matrix);
        let x = s.b.norm("post_norm", x, &self.norm);
        let x = s.b.function("activation", x, Function::GeluErf);
        let up = s.b.linear("up", x, &self.up);
        let gate = s.b.linear("gate", x, &self.gate);
        let inner = s.b.gated("gated", gate_of(activation), gate, up);
        s.b.linear("down", inner, &self.down)
    }

    fn rows(&self, grid: Grid) -> usize {
        grid.blocks(self.merge).patches()
    }
}
