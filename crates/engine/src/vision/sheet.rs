//! The plan of one input size while it is built: the grid of patches of a picture, the steps, and what the host writes once before the plan
//! runs.

use half::f16;
use kiln_gguf::TensorType;
use kiln_kernels::concat;
use kiln_kernels::sum_rows;
use kiln_kernels::tensor::Tensor;

use crate::plan::{Builder, Fixed, SlotKind};

/// Rows and columns of patches.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub struct Grid {
    /// Rows.
    pub rows: usize,
    /// Columns.
    pub columns: usize,
}

impl Grid {
    /// Patches in all.
    pub fn patches(self) -> usize {
        self.rows * self.columns
    }

    /// The grid of blocks of `side` patches; those at the edges may lack some.
    pub fn blocks(self, side: usize) -> Grid {
        Grid { rows: self.rows.div_ceil(side), columns: self.columns.div_ceil(side) }
    }

    /// Raster numbers of the patches, block by block of `side` patches, both in raster order; none where a block lacks a patch.
    pub fn by_blocks(self, side: usize) -> impl Iterator<Item = Option<usize>> {
        let blocks = self.blocks(side);
        let inner = Grid { rows: side, columns: side };
        let corners = (0..blocks.patches()).map(move |i| [i / blocks.columns * side, i % blocks.columns * side]);
        corners.flat_map(move |[row, column]| {
            (0..inner.patches()).map(move |i| {
                let (row, column) = (row + i / side, column + i % side);
                (row < self.rows && column < self.columns).then_some(row * self.columns + column)
            })
        })
    }
}

/// Bytes that the host writes to an input before the first run.
pub(crate) type Given = (Tensor, Vec<u8>);

/// A plan on its way.
pub(crate) struct Sheet {
    /// Its steps.
    pub b: Builder,
    /// The patches of the input.
    pub grid: Grid,
    /// Side of a patch in pixels.
    pub patch: usize,
    /// Raster numbers of the patches in the order in which they go in.
    pub order: Vec<usize>,
    /// What the host writes once.
    pub given: Vec<Given>,
    input: Option<Tensor>,
}

impl Sheet {
    pub(crate) fn new(fixed: &Fixed, grid: Grid, patch: usize) -> Sheet {
        Sheet { b: Builder::new(fixed), grid, patch, order: Vec::new(), given: Vec::new(), input: None }
    }

    /// What the host writes for each input, `[features, columns]`. All encoders ask for it once.
    pub(crate) fn input(&mut self, features: usize, columns: usize) -> Tensor {
        let x = self.b.slot("input", SlotKind::Input, TensorType::F32, [features, columns, 1, 1]);
        self.input = Some(x);
        x
    }

    /// The patches as they go in, `[3 * patch * patch, patches]`: planes of channels, each row by row.
    pub(crate) fn patches(&mut self, order: Vec<usize>) -> Tensor {
        let x = self.input(3 * self.patch * self.patch, order.len());
        self.order = order;
        x
    }

    /// The same in raster order.
    pub(crate) fn raster(&mut self) -> Tensor {
        self.patches((0..self.grid.patches()).collect())
    }

    /// Where the host writes each input.
    pub(crate) fn port(&self) -> Option<Tensor> {
        self.input
    }

    /// Whole numbers of this plan.
    pub(crate) fn ints(&mut self, name: &str, values: &[i32], [n, m]: [usize; 2]) -> Tensor {
        let t = self.b.slot(name, SlotKind::Input, TensorType::I32, [n, m, 1, 1]);
        self.given.push((t, values.iter().flat_map(|v| v.to_le_bytes()).collect()));
        t
    }

    /// Floats of this plan.
    pub(crate) fn floats(&mut self, name: &str, values: &[f32], [n, m]: [usize; 2]) -> Tensor {
        let t = self.b.slot(name, SlotKind::Input, TensorType::F32, [n, m, 1, 1]);
        self.given.push((t, values.iter().flat_map(|v| v.to_le_bytes()).collect()));
        t
    }

    /// Halves of this plan, dense.
    pub(crate) fn halves(&mut self, name: &str, values: &[f16], shape: [usize; 4]) -> Tensor {
        let t = self.b.slot(name, SlotKind::Input, TensorType::F16, shape);
        self.given.push((t, values.iter().flat_map(|v| v.to_le_bytes()).collect()));
        t
    }

    /// Rows of `x [width, rows]` by their numbers; rows of zeros where there is none.
    pub(crate) fn gather(&mut self, name: &str, x: Tensor, rows: impl Iterator<Item = Option<usize>>) -> Tensor {
        let ids: Vec<i32> = rows.map(|row| row.map_or(-1, |row| row as i32)).collect();
        let ids = self.ints(&format!("{name}.ids"), &ids, [ids.len(), 1]);
        self.b.rows(name, x, ids)
    }

    /// Blocks of `side` patches as one row each, `[side * side * width, blocks]`: the patches of a block one after the other. `x` is in
    /// raster order.
    pub(crate) fn merged(&mut self, x: Tensor, side: usize) -> Tensor {
        let (grid, width) = (self.grid, x.shape[0]);
        let blocks = grid.blocks(side).patches();
        let ordered = self.gather("merge", x, grid.by_blocks(side));
        ordered.reshape([side * side * width, blocks, 1, 1])
    }

    /// The same with the channels slowest: number `c * side * side + patch`.
    pub(crate) fn merged_by_channel(&mut self, x: Tensor, side: usize) -> Tensor {
        let (width, merged) = (x.shape[0], self.merged(x, side));
        self.by_channel(merged, width)
    }

    /// Joined rows of patches, `[patches * width, blocks]`, with the channels slowest.
    pub(crate) fn by_channel(&mut self, joined: Tensor, width: usize) -> Tensor {
        let [all, blocks, ..] = joined.shape;
        let (patches, shape) = (all / width, [all / width, width, blocks, 1]);
        let dst = self.b.fresh("by_channel", TensorType::F32, shape);
        self.b.copy("by_channel", joined.reshape([width, patches, blocks, 1]).permute([1, 0, 2, 3]), dst);
        dst.reshape(joined.shape)
    }

    /// The sum of the patches of each whole block, `[width, blocks]`; `x` is in raster order.
    pub(crate) fn block_sums(&mut self, x: Tensor, side: usize) -> Tensor {
        let (width, whole) = (x.shape[0], Grid { rows: self.grid.rows / side, columns: self.grid.columns / side });
        let columns = self.grid.columns;
        let inside = |i: usize| i / columns < whole.rows * side && i % columns < whole.columns * side;
        let ordered = self.grid.by_blocks(side).flatten().filter(|i| inside(*i)).map(Some);
        let ordered = self.gather("pool", x, ordered);
        self.sums(ordered, side * side, width)
    }

    /// The sum of every `count` rows of `x [width, rows]`.
    pub(crate) fn sums(&mut self, x: Tensor, count: usize, width: usize) -> Tensor {
        let rows = x.shape[1] / count;
        let dst = self.b.fresh("pool.sum", TensorType::F32, [1, width, rows, 1]);
        let x = x.reshape([width, count, rows, 1]).permute([1, 0, 2, 3]);
        self.b.step("pool.sum", sum_rows::Call { x, dst, weights: None });
        dst.reshape([width, rows, 1, 1])
    }

    /// The rows of `a`, then those of `b`.
    pub(crate) fn below(&mut self, name: &str, a: Tensor, b: Tensor) -> Tensor {
        let dst = self.b.fresh(name, TensorType::F32, [a.shape[0], a.shape[1] + b.shape[1], 1, 1]);
        self.b.step(name, concat::Call { a, b, dst, dim: 1 });
        dst
    }
}
