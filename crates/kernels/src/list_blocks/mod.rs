//! `list_blocks`: the cache rows that attention over blocks sees: rows of blocks that stand for many tokens each, and those of the last tokens
//! by themselves. The result is a list for each row, which `flash_attention` takes for a table of pages of one row.

pub mod cases;
mod reference;

use kiln_gguf::TensorType;
use kiln_gpu::{Address, Caps, Shader};

use crate::flash_attention::Pages;
use crate::host::HostMemory;
use crate::operation::{
    Choice, Invalid, Operation, Path, Unsupported, grid, maybe, only_scalar, require, within_32_bits, word,
};
use crate::tensor::Tensor;

const NAME: &str = "list_blocks";

/// One line for the registry.
pub const SUMMARY: &str = "the cache rows of finished blocks of tokens, all or chosen ones, and of the last tokens";

/// How the rows of tokens and of blocks share the pages of a cache: that of a block lies behind that of its last token, so that the first tokens of
/// a page and what they have finished are the first rows.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Layout {
    /// Tokens of a block: a divisor of a page, or a multiple of it.
    pub block: usize,
    /// Rows of a page beside those of its tokens.
    pub spare: usize,
    /// Last tokens that are seen by themselves.
    pub window: usize,
}

/// Operands of `list_blocks`.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Call {
    /// I32 `[rows]`: the position of each row's token, which sees blocks that end there or before. Nothing where it is below 0.
    pub positions: Tensor,
    /// Where the tokens of each sequence lie, in a cache without blocks.
    pub pages: Pages,
    /// I32 `[rows]`: the sequence of each row. Without it all are of the only one, or row i is of sequence i.
    pub sequences: Option<Tensor>,
    /// The blocks that are seen, as `choose_keys` lists them: cache rows of all their tokens, I32 `[room, rows]`, and how many there are, I32
    /// `[rows]`. Without it all finished blocks are.
    pub chosen: Option<[Tensor; 2]>,
    /// Where blocks and tokens lie.
    pub layout: Layout,
    /// I32 `[room, rows]`, dense: rows of blocks, then rows of tokens, then zeros.
    pub list: Tensor,
    /// I32 `[rows]`: how many there are.
    pub counts: Tensor,
}

kiln_gpu::params! {
    struct Params {
        positions: Address,
        table: Address,
        sequences: Address,
        chosen: Address,
        chosen_counts: Address,
        list: Address,
        counts: Address,
        rows: u32,
    }
}

const THREADS: usize = 64;

impl Call {
    /// Most rows of a list.
    pub fn room(pages: Pages, layout: Layout, chosen: Option<usize>) -> usize {
        let tokens = pages.table.shape[0] * pages.size;
        chosen.unwrap_or(tokens) / layout.block + layout.window.min(tokens)
    }

    fn sequence(&self, sequences: Option<&[f64]>, row: usize) -> usize {
        match sequences {
            Some(sequences) => sequences[row] as usize,
            None if self.pages.table.shape[1] == 1 => 0,
            None => row,
        }
    }

    fn rows(&self) -> usize {
        self.positions.shape[0]
    }
}

impl Operation for Call {
    fn name(&self) -> &'static str {
        NAME
    }

    fn reads(&self) -> Vec<Tensor> {
        let optional = self.sequences.into_iter().chain(self.chosen.into_iter().flatten());
        [self.positions, self.pages.table].into_iter().chain(optional).collect()
    }

    fn writes(&self) -> Vec<Tensor> {
        vec![self.list, self.counts]
    }

    fn check(&self) -> Result<(), Invalid> {
        let Call { positions, pages: Pages { table, size }, sequences, chosen, layout, list, counts } = *self;
        let Layout { block, spare, window } = layout;
        let fits = size > 0 && table.ty == TensorType::I32 && table.is_dense() && table.rows() == table.shape[1];
        require(fits, NAME, || format!("pages of {size} rows in {table}, want I32[pages, sequences]"))?;
        let fits = block > 0 && window > 0 && (size.is_multiple_of(block) || block.is_multiple_of(size));
        require(fits && spare >= (size / block).max(1), NAME, || format!("{layout:?} in pages of {size} rows"))?;
        let rows = positions.shape[0];
        let known = sequences.is_some() || table.shape[1] == 1 || table.shape[1] == rows;
        require(known, NAME, || format!("{rows} rows of {} sequences: which is whose?", table.shape[1]))?;
        let whole = |t: &Tensor, shape: [usize; 4]| t.ty == TensorType::I32 && t.is_dense() && t.shape == shape;
        let columns = [Some(positions), sequences, chosen.map(|[_, counts]| counts), Some(counts)];
        require(columns.iter().flatten().all(|t| whole(t, [rows, 1, 1, 1])), NAME, || {
            format!("positions, sequences and counts are not I32[{rows}]")
        })?;
        let room = chosen.map(|[list, _]| list.shape[0]);
        let fits =
            chosen.is_none_or(|[list, _]| whole(&list, [list.shape[0], rows, 1, 1]) && size.is_multiple_of(block));
        require(fits, NAME, || format!("chosen is {chosen:?}, want I32[room, {rows}] and blocks within pages"))?;
        let least = Call::room(self.pages, layout, room);
        let fits = whole(&list, [list.shape[0], rows, 1, 1]) && list.shape[0] >= least;
        require(fits, NAME, || format!("list is {list}, want I32[{least} or more, {rows}]"))
    }

    fn pick(&self, caps: &Caps, want: Option<Path>) -> Result<Choice, Unsupported> {
        only_scalar(NAME, want)?;
        within_32_bits(NAME, [self.list.len(), self.pages.table.len()])?;
        let [pages, sequences, ..] = self.pages.table.shape;
        let Layout { block, spare, window } = self.layout;
        let shader = Shader::new(NAME, "list_blocks/list_blocks.comp", Params::glsl())
            .define("WG", THREADS)
            .define("PAGES", pages)
            .define("PAGE", self.pages.size)
            .define("ONE_SEQUENCE", u32::from(sequences == 1))
            .define("SEQUENCES", u32::from(self.sequences.is_some()))
            .define("CHOSEN", self.chosen.map_or(0, |[list, _]| list.shape[0]))
            .define("BLOCK", block)
            .define("SPARE", spare)
            .define("WINDOW", window)
            .define("ROOM", self.list.shape[0]);
        Ok(Choice::one(Path::Scalar, shader, grid(self.list.len().div_ceil(THREADS), caps)))
    }

    fn params(&self, _: &Choice, _: usize, at: &dyn Fn(&Tensor) -> Address) -> Vec<u8> {
        let maybe = maybe(at);
        Params {
            positions: at(&self.positions),
            table: at(&self.pages.table),
            sequences: maybe(self.sequences),
            chosen: maybe(self.chosen.map(|[list, _]| list)),
            chosen_counts: maybe(self.chosen.map(|[_, counts]| counts)),
            list: at(&self.list),
            counts: at(&self.counts),
            rows: word(self.rows()),
        }
        .bytes()
    }

    fn reference(&self, memory: &mut HostMemory) {
        reference::reference(self, memory);
    }

    fn parts(&self) -> Vec<crate::Call> {
        let part = |n: usize| {
            let own = self.sequences.is_none() && self.pages.table.shape[1] > 1;
            let table = if own { self.pages.table.narrow(1, n, 1) } else { self.pages.table };
            Call {
                positions: self.positions.narrow(0, n, 1),
                pages: Pages { table, ..self.pages },
                sequences: self.sequences.map(|s| s.narrow(0, n, 1)),
                chosen: self.chosen.map(|[list, counts]| [list.narrow(1, n, 1), counts.narrow(0, n, 1)]),
                list: self.list.narrow(1, n, 1),
                counts: self.counts.narrow(0, n, 1),
                ..*self
            }
            .into()
        };
        if self.rows() == 1 { Vec::new() } else { (0..self.rows()).map(part).collect() }
    }
}
