//! LLaVA and its kin: CLIP without its last layer, or several of its layers side by side. As in llama.cpp, which the results are judged by,
//! the class token stands behind the patches, positions are counted from the first patch, and the rows from the second on go out.

use kiln_kernels::tensor::Tensor;
use kiln_kernels::unary::Function;
use kiln_media::Keys;

use super::Family;
use super::parts::{Positions, Stem, own_patches};
use super::sheet::{Grid, Sheet};
use super::vit::{Coordinates, NormKind, Sizes, Spec, Vit, norm, width_of};
use crate::Error;
use crate::model::Loader;
use crate::plan::{Linear, Norm};

struct Clip {
    stem: Stem,
    class: Option<Tensor>,
    positions: Positions,
    vit: Vit,
    /// Which inputs of layers go out side by side; the last one is the result.
    features: Vec<usize>,
    matrices: Vec<Linear>,
    norms: Vec<Norm>,
}

/// LLaVA.
pub(super) fn load(l: &mut Loader<'_>, keys: &Keys) -> Result<Box<dyn Family>, Error> {
    let (mut clip, width) = body(l, keys)?;
    let inside = width_of(l, "mm.0")?;
    clip.matrices.push(l.linear("mm.0", &[width, inside])?);
    if l.has("mm.2.weight") {
        let out = width_of(l, "mm.2")?;
        clip.matrices.push(l.linear("mm.2", &[inside, out])?);
    }
    Ok(Box::new(clip))
}

/// Yi-VL: a norm behind each matrix.
pub(super) fn load_normed(l: &mut Loader<'_>, keys: &Keys) -> Result<Box<dyn Family>, Error> {
    let (mut clip, width) = body(l, keys)?;
    let eps = clip.vit.sizes.eps;
    let (inside, out) = (width_of(l, "mm.0")?, width_of(l, "mm.3")?);
    clip.matrices = vec![l.linear("mm.0", &[width, inside])?, l.linear("mm.3", &[inside, out])?];
    clip.norms = vec![norm(l, "mm.1", inside, NormKind::Layer, eps)?, norm(l, "mm.4", out, NormKind::Layer, eps)?];
    Ok(Box::new(clip))
}

/// All but the projector, and the width that this takes.
fn body(l: &mut Loader<'_>, keys: &Keys) -> Result<(Clip, usize), Error> {
    let sizes = Sizes::read(l)?;
    let mut features = l.keys.list("vision.feature_layer", 64)?;
    features.sort_unstable();
    features.dedup();
    let layers = features.last().copied().unwrap_or(sizes.layers.saturating_sub(1));
    l.keys.require(layers <= sizes.layers, "vision.feature_layer", layers, &format!("0 to {}", sizes.layers))?;
    let spec = Spec { layers, swapped: true, ..Spec::plain(&sizes, NormKind::Layer) };
    // Layers behind the last one that runs, and separators of LLaVA 1.6, which go unused.
    let unused = |name: &str| {
        let layer = name.strip_prefix("v.blk.").and_then(|rest| rest.split('.').next()?.parse::<usize>().ok());
        layer.is_some_and(|layer| layer >= layers) || name == "v.image_newline"
    };
    l.names().into_iter().filter(|name| unused(name)).for_each(|name| l.ignore(&name));
    let class = l.vector_opt("v.class_embd", &[sizes.width])?;
    let least = own_patches(keys) + usize::from(class.is_some());
    let clip = Clip {
        stem: Stem::load(l, &sizes)?,
        class,
        positions: Positions::load(l, sizes.width, least)?,
        vit: Vit::load(l, sizes, spec)?,
        matrices: Vec::new(),
        norms: Vec::new(),
        features: features.clone(),
    };
    Ok((clip, sizes.width * features.len().max(1)))
}

impl Clip {
    /// The layers; with features their inputs side by side.
    fn layers(&self, s: &mut Sheet, x: Tensor) -> Tensor {
        let mut x = self.vit.begin(s, x);
        let mut kept = Vec::new();
        for layer in 0..self.vit.layers() {
            if self.features.contains(&layer) {
                kept.push(x);
            }
            x = self.vit.layer(s, layer, x, &Coordinates::Still, None);
        }
        let last = self.vit.end(s, x);
        let mut all = kept.into_iter().chain([last]);
        let first = all.next().unwrap_or(last);
        all.fold(first, |joined, next| s.b.concat("features", joined, next))
    }
}

impl Family for Clip {
    fn build(&self, s: &mut Sheet) -> Tensor {
        let patches = s.raster();
        let count = s.grid.patches();
        let mut x = self.stem.build(s, patches);
        if let Some(class) = self.class {
            x = s.below("class", x, class.reshape([class.shape[0], 1, 1, 1]));
        }
        let x = self.positions.add(s, x, 0..x.shape[1]);
        let x = self.layers(s, x);
        let mut x = x.narrow(1, usize::from(self.class.is_some()), count);
        s.b.at("projector");
        for (nth, matrix) in self.matrices.iter().enumerate() {
            x = s.b.linear(&format!("matrix.{nth}"), x, matrix);
            if let Some(norm) = self.norms.get(nth) {
                x = s.b.norm(&format!("norm.{nth}"), x, norm);
            }
            if nth == 0 {
                x = s.b.function("activation", x, Function::Gelu);
            }
        }
        x
    }

    fn rows(&self, grid: Grid) -> usize {
        grid.patches()
    }
}
