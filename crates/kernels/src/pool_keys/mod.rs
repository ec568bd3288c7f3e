//! `pool_keys`: one row for each finished block of a sequence's tokens, made of what a cache keeps of them: the mean of every channel, weighed
//! by a softmax over the tokens of the block. Blocks may reach back over the block before.

pub mod cases;
mod reference;

use kiln_gguf::TensorType;
use kiln_gpu::{Address, Caps, Shader};

use crate::flash_attention::Pages;
use crate::formats;
use crate::host::HostMemory;
use crate::operation::{
    Choice, Invalid, Operation, Path, Unsupported, Work, grid, maybe, only_scalar, require, within_32_bits, word,
};
use crate::tensor::Tensor;

const NAME: &str = "pool_keys";

/// One line for the registry.
pub const SUMMARY: &str = "the rows of a block of tokens as one: the mean of each channel, weighed by a softmax";

/// Operands of `pool_keys`.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Call {
    /// What is averaged: rows of a cache, `[width, rows of the cache]`, any format, dense rows. With `overlaps` the first half of a row counts
    /// for the block behind the token's own, the second half for the token's own.
    pub values: Tensor,
    /// The weights before the softmax, as `values`, and of the same format. Without them all tokens count the same.
    pub weights: Option<Tensor>,
    /// F32 `[width, size]`, dense: added to the weights by the place of a token in its block. Only with `weights`.
    pub places: Option<Tensor>,
    /// I32 `[rows]`: the position of each row's token. A row gets the mean of the block that its token finishes, else zeros.
    pub positions: Tensor,
    /// Where the tokens of each sequence lie.
    pub pages: Pages,
    /// I32 `[rows]`: the sequence of each row. Without it all are of the only one, or row i is of sequence i.
    pub sequences: Option<Tensor>,
    /// Tokens of a block.
    pub size: usize,
    /// Whether the tokens of the block before count as well. The first block has none before.
    pub overlaps: bool,
    /// F32 `[width, rows]`, half as wide with `overlaps`, dense.
    pub y: Tensor,
}

kiln_gpu::params! {
    struct Params {
        values: Address,
        weights: Address,
        places: Address,
        positions: Address,
        table: Address,
        sequences: Address,
        y: Address,
        stride: u32,
        rows: u32,
    }
}

/// Threads of a workgroup.
const THREADS: usize = 64;

impl Call {
    fn sequence(&self, sequences: Option<&[f64]>, row: usize) -> usize {
        match sequences {
            Some(sequences) => sequences[row] as usize,
            None if self.pages.table.shape[1] == 1 => 0,
            None => row,
        }
    }

    fn check_pages(&self) -> Result<(), Invalid> {
        let (rows, Pages { table, size }) = (self.y.shape[1], self.pages);
        let fits = size > 0 && table.ty == TensorType::I32 && table.is_dense() && table.rows() == table.shape[1];
        require(fits, NAME, || format!("pages of {size} rows in {table}, want I32[pages, sequences]"))?;
        let known = self.sequences.is_some() || table.shape[1] == 1 || table.shape[1] == rows;
        require(known, NAME, || format!("{rows} rows of {} sequences: which is whose?", table.shape[1]))?;
        let whole = |t: &Tensor| t.ty == TensorType::I32 && t.is_dense() && t.shape == [rows, 1, 1, 1];
        for (what, t) in [("positions", Some(&self.positions)), ("sequences", self.sequences.as_ref())] {
            require(t.is_none_or(whole), NAME, || format!("{what} are not I32[{rows}]"))?;
        }
        Ok(())
    }
}

impl Operation for Call {
    fn name(&self) -> &'static str {
        NAME
    }

    fn reads(&self) -> Vec<Tensor> {
        let optional = [self.weights, self.places, self.sequences].into_iter().flatten();
        [self.values, self.positions, self.pages.table].into_iter().chain(optional).collect()
    }

    fn writes(&self) -> Vec<Tensor> {
        vec![self.y]
    }

    fn check(&self) -> Result<(), Invalid> {
        let Call { values, weights, places, size, overlaps, y, .. } = *self;
        let [width, rows, ..] = y.shape;
        let halves = if overlaps { 2 } else { 1 };
        let fits = y.shape == [width, rows, 1, 1] && y.ty == TensorType::F32 && y.is_dense() && !y.is_empty();
        require(fits && size > 0, NAME, || format!("y is {y} of blocks of {size} tokens, want F32[width, rows]"))?;
        let fits = values.shape == [halves * width, values.shape[1], 1, 1] && values.has_dense_rows();
        require(fits, NAME, || format!("values are {values}, want rows of {}", halves * width))?;
        let same = |t: Tensor| t.shape == values.shape && t.ty == values.ty && t.stride == values.stride;
        require(weights.is_none_or(same), NAME, || format!("weights are {weights:?}, values {values}: not the same"))?;
        let fits = |t: Tensor| t.ty == TensorType::F32 && t.is_dense() && t.shape == [halves * width, size, 1, 1];
        require(places.is_none_or(|t| fits(t) && weights.is_some()), NAME, || {
            format!("places are {places:?}, want F32[{}, {size}] beside weights", halves * width)
        })?;
        self.check_pages()
    }

    fn pick(&self, caps: &Caps, want: Option<Path>) -> Result<Choice, Unsupported> {
        only_scalar(NAME, want)?;
        let [width, rows, ..] = self.y.shape;
        let refuse = |reason: String| Err(Unsupported { operation: NAME, reason });
        let aligned = [Some(self.values), self.weights].into_iter().flatten().all(|t| formats::is_aligned(&t));
        if !width.is_multiple_of(4) || !aligned {
            return refuse(format!("rows of {}, want fours of elements at multiples of their size", self.values));
        }
        formats::readable(NAME, &self.values)?;
        within_32_bits(NAME, [self.values.stride[1], self.values.shape[1], self.y.len(), self.pages.table.len()])?;
        let [pages, sequences, ..] = self.pages.table.shape;
        let shader = Shader::new(
            format!("{NAME}.{}", self.values.ty).to_lowercase(),
            "pool_keys/pool_keys.comp",
            Params::glsl(),
        )
        .define("WG", THREADS)
        .define("WIDTH", width)
        .define("SIZE", self.size)
        .define("OVERLAPS", u32::from(self.overlaps))
        .define("WEIGHTS", u32::from(self.weights.is_some()))
        .define("PLACES", u32::from(self.places.is_some()))
        .define("PAGES", pages)
        .define("PAGE", self.pages.size)
        .define("ONE_SEQUENCE", u32::from(sequences == 1))
        .define("SEQUENCES", u32::from(self.sequences.is_some()));
        let shader = formats::define(shader, "K", self.values.ty)?;
        Ok(Choice::one(Path::Scalar, shader, grid((rows * width / 4).div_ceil(THREADS), caps)))
    }

    fn params(&self, _: &Choice, _: usize, at: &dyn Fn(&Tensor) -> Address) -> Vec<u8> {
        let maybe = maybe(at);
        Params {
            values: at(&self.values),
            weights: maybe(self.weights),
            places: maybe(self.places),
            positions: at(&self.positions),
            table: at(&self.pages.table),
            sequences: maybe(self.sequences),
            y: at(&self.y),
            stride: if self.values.shape[1] > 1 { word(self.values.stride[1]) } else { 0 },
            rows: word(self.y.shape[1]),
        }
        .bytes()
    }

    fn reference(&self, memory: &mut HostMemory) {
        reference::reference(self, memory);
    }

    /// Counted for rows that finish a block once in a block.
    fn work(&self) -> Work {
        let tokens = self.y.shape[1] * if self.overlaps { 2 } else { 1 };
        let read = tokens * self.values.row_bytes() * if self.weights.is_some() { 2 } else { 1 };
        Work { bytes: (read + 4 * self.y.len()) as f64, flops: (6 * tokens * self.y.shape[0]) as f64 }
    }

    fn parts(&self) -> Vec<crate::Call> {
        let rows = self.y.shape[1];
        let part = |n: usize| {
            let own = self.sequences.is_none() && self.pages.table.shape[1] > 1;
            let table = if own { self.pages.table.narrow(1, n, 1) } else { self.pages.table };
            Call {
                positions: self.positions.narrow(0, n, 1),
                pages: Pages { table, ..self.pages },
                sequences: self.sequences.map(|s| s.narrow(0, n, 1)),
                y: self.y.narrow(1, n, 1),
                ..*self
            }
            .into()
        };
        if rows == 1 { Vec::new() } else { (0..rows).map(part).collect() }
    }
}
