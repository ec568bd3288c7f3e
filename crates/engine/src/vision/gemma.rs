//! Gemma 3: SigLIP, whose patches are averaged in blocks. Gemma 4: rotary positions in both directions, norms around everything, and
//! matrices with limits.

use kiln_kernels::rope::RopeStyle;
use kiln_kernels::tensor::Tensor;
use kiln_media::Keys;

use super::Family;
use super::clamped::Clamped;
use super::parts::{Positions, Stem, own_patches, table};
use super::sheet::{Grid, Sheet};
use super::vit::{Axis, NormKind, Places, Sizes, Spec, Turning, Vit, norm, width_of};
use crate::Error;
use crate::model::Loader;
use crate::plan::{Linear, Norm};

struct Gemma3 {
    stem: Stem,
    positions: Positions,
    vit: Vit,
    merge: usize,
    norm: Norm,
    projection: Linear,
}

/// Gemma 3.
pub(super) fn load3(l: &mut Loader<'_>, keys: &Keys) -> Result<Box<dyn Family>, Error> {
    let sizes = Sizes::read(l)?;
    let spec = Spec { swapped: true, ..Spec::plain(&sizes, NormKind::Layer) };
    Ok(Box::new(Gemma3 {
        stem: Stem::load(l, &sizes)?,
        positions: Positions::load(l, sizes.width, own_patches(keys))?,
        vit: Vit::load(l, sizes, spec)?,
        merge: keys.merge("gemma3"),
        norm: norm(l, "mm.soft_emb_norm", sizes.width, NormKind::Rms, sizes.eps)?,
        projection: transposed(l, "mm.input_projection.weight", sizes.width)?,
    }))
}

/// A matrix that files store with its rows and columns exchanged.
fn transposed(l: &mut Loader<'_>, name: &str, rows: usize) -> Result<Linear, Error> {
    let missing = || Error::MissingTensor { name: name.to_owned() };
    let shape = l.shape(name).ok_or_else(missing)?;
    let columns = shape[0];
    if shape[1] != rows {
        let want = vec![columns, rows];
        return Err(Error::TensorShape { name: name.to_owned(), got: shape[..2].to_vec(), want });
    }
    let values = l.values(name)?.ok_or_else(missing)?;
    let turned: Vec<f32> =
        (0..columns).flat_map(|c| (0..rows).map(move |r| (r, c))).map(|(r, c)| values[r * columns + c]).collect();
    Ok(Linear::plain(l.constant(name, &turned, [rows, columns, 1, 1])))
}

impl Family for Gemma3 {
    fn build(&self, s: &mut Sheet) -> Tensor {
        let patches = s.raster();
        let x = self.stem.build(s, patches);
        let x = self.positions.add(s, x, 0..x.shape[1]);
        let x = self.vit.build(s, x, &Places::default());
        s.b.at("projector");
        let sums = s.block_sums(x, self.merge);
        let means = s.b.scale("mean", sums, 1.0 / (self.merge * self.merge) as f32);
        let x = s.b.norm("norm", means, &self.norm);
        s.b.linear("projection", x, &self.projection)
    }

    fn rows(&self, grid: Grid) -> usize {
        (grid.rows / self.merge) * (grid.columns / self.merge)
    }
}

struct Gemma4 {
    stem: Stem,
    /// Vectors of columns, then those of rows.
    tables: [Vec<f32>; 2],
    vit: Vit,
    merge: usize,
    shift: Option<[Tensor; 2]>,
    projection: Clamped,
}

/// Gemma 4.
pub(super) fn load4(l: &mut Loader<'_>, keys: &Keys) -> Result<Box<dyn Family>, Error> {
    let sizes = Sizes::read(l)?;
    let first = Axis::Column;
    let turning = Turning::Halves { first, style: RopeStyle::Neox, base: 100.0, interleaved: false };
    let spec = Spec { turning, scale: 1.0, normed_values: true, ..Spec::plain(&sizes, NormKind::Rms) };
    let both = table(l, "v.position_embd.weight", sizes.width)?;
    let (columns, rows) = both.split_at(both.len() / 2);
    let out = width_of(l, "mm.input_projection")?;
    let bias = l.vector_opt("v.std_bias", &[sizes.width])?;
    let scale = l.vector_opt("v.std_scale", &[sizes.width])?;
    Ok(Box::new(Gemma4 {
        stem: Stem::load(l, &sizes)?,
        tables: [columns.to_vec(), rows.to_vec()],
        vit: Vit::load(l, sizes, spec)?,
        merge: keys.merge("gemma4v"),
        shift: bias.zip(scale).map(|(bias, scale)| [bias, scale]),
        projection: Clamped::load(l, "mm.input_projection", [sizes.width, out])?,
    }))
}

impl Family for Gemma4 {
    fn build(&self, s: &mut Sheet) -> Tensor {
        let (width, columns) = (self.vit.sizes.width, s.grid.columns);
        let patches = s.raster();
        let order = s.order.clone();
        // Files have mean 0 and deviation 1: the network brings 0 to 1 to -1 to 1 itself.
        let patches = s.b.affine("centred", patches, 2.0, -1.0);
        let x = self.stem.build(s, patches);
        let row_of = |table: &[f32], at: usize| {
            let at = at.min(table.len() / width - 1);
            table[at * width..][..width].to_vec()
        };
        let sum = |i: &usize| {
            let (by_column, by_row) = (row_of(&self.tables[0], i % columns), row_of(&self.tables[1], i / columns));
            by_column.into_iter().zip(by_row).map(|(a, b)| a + b).collect::<Vec<f32>>()
        };
        let values: Vec<f32> = order.iter().flat_map(sum).collect();
        let positions = s.floats("positions", &values, [width, order.len()]);
        let x = s.b.add("positions", x, positions);
        let x = self.vit.build(s, x, &Places::of(&order, columns));
        s.b.at("projector");
        let sums = s.block_sums(x, self.merge);
        let mut x = s.b.scale("mean", sums, (width as f32).sqrt() / (self.merge * self.merge) as f32);
        if let Some([bias, scale]) = self.shift {
            let shifted = s.b.subtract("shifted", x, bias);
            x = s.b.multiply("scaled", shifted, scale);
        }
        let x = s.b.norm("norm", x, &Norm::Rms { weight: None, eps: self.vit.sizes.eps });
        self.projection.build(s, "projection", x)
    }

    fn rows(&self, grid: Grid) -> usize {
        (grid.rows / self.merge) * (grid.columns / self.merge)
    }
}
