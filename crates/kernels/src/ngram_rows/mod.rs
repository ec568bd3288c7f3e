//! `ngram_rows`: which rows of a table stand for the last tokens of a text: runs of two and more tokens are hashed, several times each, with
//! whole numbers of 64 bits.

pub mod cases;
mod reference;

use kiln_gguf::TensorType;
use kiln_gpu::{Address, Caps, Shader};

use crate::host::HostMemory;
use crate::operation::{
    Choice, Invalid, Operation, Path, Unsupported, grid, only_scalar, require, within_32_bits, word,
};
use crate::tensor::Tensor;

const NAME: &str = "ngram_rows";

/// One line for the registry.
pub const SUMMARY: &str = "rows of a table for hashes of the last two and more tokens";

/// Operands of `ngram_rows`. The hash of a run is the exclusive or of its tokens, the last one first, each times its multiplier; head i of a run
/// takes the row `hash mod sizes[i] + offsets[i]`.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Call {
    /// F32 `[longest run, rows]`, dense: the last tokens up to each row's own, which stands last, each plus 1; 0 where there is none.
    pub tokens: Tensor,
    /// I32 `[2, longest run]`, dense: the low and the high word of each multiplier, that of the row's own token first.
    pub multipliers: Tensor,
    /// I32 `[heads, longest run - 1]`, dense: the heads of runs of two tokens, then those of three; numbers above 0.
    pub sizes: Tensor,
    /// As `sizes`: the first row of each head.
    pub offsets: Tensor,
    /// The token that ends a text: what stands there and before counts as this one, unless it is the row's own.
    pub end: u32,
    /// I32 `[heads * (longest run - 1), rows]`, dense.
    pub rows: Tensor,
}

kiln_gpu::params! {
    struct Params {
        tokens: Address,
        multipliers: Address,
        sizes: Address,
        offsets: Address,
        rows: Address,
        end: u32,
        count: u32,
    }
}

const THREADS: usize = 32;
/// Longest run: a thread holds one in its registers.
pub const MOST: usize = 8;

impl Operation for Call {
    fn name(&self) -> &'static str {
        NAME
    }

    fn reads(&self) -> Vec<Tensor> {
        vec![self.tokens, self.multipliers, self.sizes, self.offsets]
    }

    fn writes(&self) -> Vec<Tensor> {
        vec![self.rows]
    }

    fn check(&self) -> Result<(), Invalid> {
        let Call { tokens, multipliers, sizes, offsets, rows, .. } = *self;
        let [n, count, ..] = tokens.shape;
        let fits = (2..=MOST).contains(&n) && tokens.shape == [n, count, 1, 1] && tokens.ty == TensorType::F32;
        require(fits && tokens.is_dense() && count > 0, NAME, || {
            format!("tokens are {tokens}, want F32[2 to {MOST}, rows]")
        })?;
        let whole = |t: &Tensor, shape: [usize; 4]| t.ty == TensorType::I32 && t.is_dense() && t.shape == shape;
        require(whole(&multipliers, [2, n, 1, 1]), NAME, || {
            format!("multipliers are {multipliers}, want I32[2, {n}]")
        })?;
        let heads = sizes.shape[0];
        let fits = heads > 0 && [sizes, offsets].iter().all(|t| whole(t, [heads, n - 1, 1, 1]));
        require(fits, NAME, || format!("sizes are {sizes}, offsets {offsets}, want I32[heads, {}]", n - 1))?;
        require(whole(&rows, [heads * (n - 1), count, 1, 1]), NAME, || {
            format!("rows are {rows}, want I32[{}, {count}]", heads * (n - 1))
        })
    }

    fn pick(&self, caps: &Caps, want: Option<Path>) -> Result<Choice, Unsupported> {
        only_scalar(NAME, want)?;
        within_32_bits(NAME, [self.rows.len()])?;
        let shader = Shader::new(NAME, "ngram_rows/ngram_rows.comp", Params::glsl())
            .define("WG", THREADS)
            .define("N", self.tokens.shape[0])
            .define("HEADS", self.sizes.shape[0]);
        Ok(Choice::one(Path::Scalar, shader, grid(self.rows.len().div_ceil(THREADS), caps)))
    }

    fn params(&self, _: &Choice, _: usize, at: &dyn Fn(&Tensor) -> Address) -> Vec<u8> {
        Params {
            tokens: at(&self.tokens),
            multipliers: at(&self.multipliers),
            sizes: at(&self.sizes),
            offsets: at(&self.offsets),
            rows: at(&self.rows),
            end: self.end,
            count: word(self.rows.len()),
        }
        .bytes()
    }

    fn reference(&self, memory: &mut HostMemory) {
        reference::reference(self, memory);
    }

    fn parts(&self) -> Vec<crate::Call> {
        let part =
            |i: usize| Call { tokens: self.tokens.narrow(1, i, 1), rows: self.rows.narrow(1, i, 1), ..*self }.into();
        (0..self.tokens.shape[1]).map(part).collect()
    }
}
