//! Convolutions as products: the sources of each place of the result stand in one row, and the kernel is a matrix.

use kiln_gguf::TensorType;
use kiln_kernels::tensor::Tensor;

use crate::Error;
use crate::model::Loader;
use crate::plan::Linear;
use crate::vision::Grid;
use crate::vision::sheet::Sheet;

/// Sources of a place in a plane: three rows of three columns.
pub(super) const PLACES: usize = 9;
/// Features of the first convolution, of one channel: the nine sources, and zeros up to a length that all kernels of products take.
pub(super) const FIRST: usize = 16;

/// The length of what a convolution with stride 2 makes, which sees one more on either side.
pub(super) fn length(before: usize) -> usize {
    before.div_ceil(2)
}

/// The same in a plane.
pub(super) fn plane(before: Grid) -> Grid {
    Grid { rows: length(before.rows), columns: length(before.columns) }
}

/// What a place of the result is made of, row by row; none beyond the edges.
pub(super) fn sources(before: Grid, [row, column]: [usize; 2]) -> impl Iterator<Item = Option<usize>> {
    (0..PLACES).map(move |nth| {
        let row = (2 * row + nth / 3).checked_sub(1).filter(|row| *row < before.rows)?;
        let column = (2 * column + nth % 3).checked_sub(1).filter(|column| *column < before.columns)?;
        Some(row * before.columns + column)
    })
}

/// The places of a plane, row by row.
pub(super) fn places(grid: Grid) -> impl Iterator<Item = [usize; 2]> {
    (0..grid.patches()).map(move |i| [i / grid.columns, i % grid.columns])
}

/// What a convolution over time with stride 2 reads, `[taps * width, half]`: the moments of a result one after the other.
pub(super) fn through_time(s: &mut Sheet, name: &str, x: Tensor, taps: usize) -> Tensor {
    let [width, rows, ..] = x.shape;
    let half = length(rows);
    let read = (0..half).flat_map(|t| (0..taps).map(move |tap| (2 * t + tap).checked_sub(1).filter(|at| *at < rows)));
    s.gather(name, x, read).reshape([taps * width, half, 1, 1])
}

/// A kernel of one channel as a matrix of [`FIRST`] columns.
pub(super) fn first_kernel(l: &mut Loader<'_>, name: &str, channels: usize) -> Result<Linear, Error> {
    let weight = format!("{name}.weight");
    let values = small_kernel(l, &weight, channels)?;
    let row = |kernel: &[f32]| kernel.iter().copied().chain([0.0; FIRST - PLACES]).collect::<Vec<_>>();
    let padded: Vec<f32> = values.chunks_exact(PLACES).flat_map(row).collect();
    let matrix = l.constant(&weight, &padded, [FIRST, channels, 1, 1]);
    Ok(Linear { bias: l.vector_opt(&format!("{name}.bias"), &[channels])?, ..Linear::plain(matrix) })
}

/// The numbers of a kernel of one channel.
fn small_kernel(l: &mut Loader<'_>, name: &str, channels: usize) -> Result<Vec<f32>, Error> {
    let missing = || Error::MissingTensor { name: name.to_owned() };
    let shape = l.shape(name).ok_or_else(missing)?;
    if shape != [3, 3, 1, channels] {
        return Err(Error::TensorShape { name: name.to_owned(), got: shape.to_vec(), want: vec![3, 3, 1, channels] });
    }
    l.values(name)?.ok_or_else(missing)
}

/// A kernel of all channels as a matrix.
pub(super) fn kernel(l: &mut Loader<'_>, name: &str, [from, to]: [usize; 2]) -> Result<Linear, Error> {
    let kernel = l.tensor(&format!("{name}.weight"), &[3, 3, from, to])?;
    let bias = l.vector_opt(&format!("{name}.bias"), &[to])?;
    Ok(Linear { bias, ..Linear::plain(kernel.reshape([PLACES * from, to, 1, 1])) })
}

/// Channels that a kernel makes: the last extent of its tensor.
pub(super) fn channels(l: &Loader<'_>, name: &str) -> Result<usize, Error> {
    let name = format!("{name}.weight");
    l.shape(&name).map(|shape| shape[3]).ok_or(Error::MissingTensor { name })
}

/// Factors of the moments or places that each channel is summed over by itself, `[channels, taps]`; files have the taps fastest.
pub(super) fn factors(l: &mut Loader<'_>, name: &str, [taps, channels]: [usize; 2]) -> Result<Tensor, Error> {
    let full = l.full(name);
    let missing = || Error::MissingTensor { name: full.clone() };
    let shape = l.shape(name).ok_or_else(missing)?;
    let values = l.values(name)?.ok_or_else(missing)?;
    if shape.iter().product::<usize>() != taps * channels || !matches!(shape[0], n if n == taps || n * n == taps) {
        return Err(Error::TensorShape { name: full, got: shape.to_vec(), want: vec![taps, channels] });
    }
    let turned: Vec<f32> =
        (0..taps).flat_map(|t| (0..channels).map(move |c| c * taps + t)).map(|i| values[i]).collect();
    Ok(l.constant(&full, &turned, [channels, taps, 1, 1]))
}

/// Each channel summed over its own sources: `x [width, rows]` by row numbers, so many for each result.
pub(super) fn depthwise(
    s: &mut Sheet,
    x: Tensor,
    read: impl Iterator<Item = Option<usize>>,
    factors: Tensor,
) -> Tensor {
    let [width, taps, ..] = factors.shape;
    let read = s.gather("sources", x, read);
    let rows = read.shape[1] / taps;
    let weighed = s.b.multiply("weighed", read.reshape([width, taps, rows, 1]), factors);
    s.sums(weighed.reshape([width, taps * rows, 1, 1]), taps, width)
}

/// A dense copy of a view.
pub(super) fn dense(s: &mut Sheet, name: &str, view: Tensor) -> Tensor {
    let dst = s.b.fresh(name, TensorType::F32, view.shape);
    s.b.copy(name, view, dst);
    dst
}
