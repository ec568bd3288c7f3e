//! What several families begin or end with: patches to vectors, learnt positions, two matrices with an activation between them.

use kiln_kernels::tensor::Tensor;
use kiln_kernels::unary::Function;
use kiln_media::Keys;

use super::grids::Table;
use super::sheet::{Grid, Sheet};
use super::vit::{Sizes, width_of};
use crate::Error;
use crate::model::Loader;
use crate::plan::Linear;

/// Patches to vectors: a convolution whose stride is its kernel, which is a product.
pub(super) struct Stem {
    kernels: Vec<Linear>,
    bias: Option<Tensor>,
}

impl Stem {
    /// Reads the kernel, and that of a second frame where the file has one: a picture goes through both.
    pub(super) fn load(l: &mut Loader<'_>, sizes: &Sizes) -> Result<Stem, Error> {
        let Sizes { width, patch, .. } = *sizes;
        let features = 3 * patch * patch;
        let mut kernels = Vec::new();
        for name in ["v.patch_embd.weight", "v.patch_embd.weight.1"] {
            let as_matrix = l.shape(name).is_some_and(|shape| shape[0] == features);
            let shape: &[usize] = if as_matrix { &[features, width] } else { &[patch, patch, 3, width] };
            let kernel = if kernels.is_empty() { Some(l.tensor(name, shape)?) } else { l.tensor_opt(name, shape)? };
            kernels.extend(kernel.map(|kernel| Linear::plain(kernel.reshape([features, width, 1, 1]))));
        }
        Ok(Stem { kernels, bias: l.vector_opt("v.patch_embd.bias", &[width])? })
    }

    /// The vectors of patches `[features, patches]`.
    pub(super) fn build(&self, s: &mut Sheet, patches: Tensor) -> Tensor {
        s.b.at("stem");
        let first = Linear { bias: self.bias, ..self.kernels[0] };
        let x = s.b.linear("patches", patches, &first);
        match self.kernels.get(1) {
            None => x,
            Some(second) => {
                let y = s.b.linear("second", patches, second);
                s.b.add("frames", x, y)
            }
        }
    }
}

/// Reads a table of so many vectors that stand in one row, whatever its type.
pub(super) fn table(l: &mut Loader<'_>, name: &str, width: usize) -> Result<Vec<f32>, Error> {
    let missing = || Error::MissingTensor { name: name.to_owned() };
    let shape = l.shape(name).ok_or_else(missing)?;
    if shape[0] != width {
        return Err(Error::TensorShape { name: name.to_owned(), got: shape.to_vec(), want: vec![width] });
    }
    l.values(name)?.ok_or_else(missing)
}

/// The learnt positions of a square grid, where the file has them.
pub(super) fn square_table(l: &mut Loader<'_>, width: usize) -> Result<Option<Table>, Error> {
    let name = "v.position_embd.weight";
    if !l.has(name) {
        return Ok(None);
    }
    let values = table(l, name, width)?;
    let side = (values.len() / width).isqrt();
    if side == 0 || side * side * width != values.len() {
        let (got, want) = (vec![width, values.len() / width], vec![width, side * side]);
        return Err(Error::TensorShape { name: name.to_owned(), got, want });
    }
    Ok(Some(Table { grid: Grid { rows: side, columns: side }, values }))
}

/// Learnt positions of encoders whose inputs have one size: a row for each patch, and one more where there is a class token.
pub(super) struct Positions {
    values: Vec<f32>,
    width: usize,
}

impl Positions {
    /// Reads the table; it must have so many rows at least.
    pub(super) fn load(l: &mut Loader<'_>, width: usize, least: usize) -> Result<Positions, Error> {
        let name = "v.position_embd.weight";
        let values = table(l, name, width)?;
        if values.len() < least * width {
            let (got, want) = (vec![width, values.len() / width], vec![width, least]);
            return Err(Error::TensorShape { name: name.to_owned(), got, want });
        }
        Ok(Positions { values, width })
    }

    /// Adds the rows with these numbers. Numbers behind the last row, which no input of the encoder's own size has, mean that one.
    pub(super) fn add(&self, s: &mut Sheet, x: Tensor, rows: impl Iterator<Item = usize>) -> Tensor {
        let (width, last) = (self.width, self.values.len() / self.width - 1);
        let values: Vec<f32> = rows.flat_map(|row| &self.values[row.min(last) * width..][..width]).copied().collect();
        let positions = s.floats("positions", &values, [width, values.len() / width]);
        s.b.add("positions", x, positions)
    }
}

/// Patches of a picture that has the encoder's own size.
pub(super) fn own_patches(keys: &Keys) -> usize {
    let side = keys.image_size / keys.patch;
    side * side
}

/// Two matrices with an activation between them.
pub(crate) struct Projector {
    first: Linear,
    second: Linear,
    activation: Function,
}

impl Projector {
    /// Reads the matrices of these names, for rows of this width.
    pub(crate) fn load(
        l: &mut Loader<'_>,
        [first, second]: [&str; 2],
        width: usize,
        activation: Function,
    ) -> Result<Projector, Error> {
        let inside = width_of(l, first)?;
        let out = width_of(l, second)?;
        Ok(Projector {
            first: l.linear(first, &[width, inside])?,
            second: l.linear(second, &[inside, out])?,
            activation,
        })
    }

    /// Adds both.
    pub(crate) fn build(&self, s: &mut Sheet, x: Tensor) -> Tensor {
        s.b.at("projector");
        self.at(s, x)
    }

    /// The same at the place where the sheet stands.
    pub(super) fn at(&self, s: &mut Sheet, x: Tensor) -> Tensor {
        let h = s.b.linear("first", x, &self.first);
        let h = s.b.function("activation", h, self.activation);
        s.b.linear("second", h, &self.second)
    }
}
