//! Vectors that stand for the last two and more tokens: rows of a table, found by hashes, are compared with the streams and added to them, once as
//! they are and once through a convolution.

use kiln_gguf::TensorType;
use kiln_kernels::ngram_rows;
use kiln_kernels::tensor::Tensor;
use kiln_kernels::unary::Function;

use super::low_rank_streams::normed;
use super::mixer::{Convolution, taps};
use super::streams::same;
use crate::Error;
use crate::arch::Batch;
use crate::model::Loader;
use crate::plan::{Builder, Linear};

/// Least number that a root is taken of.
const LEAST: f32 = 1e-6;

/// How n-grams are hashed: for the whole model.
#[derive(Clone, Debug)]
pub struct NgramSpec {
    /// Width of a stream, and the number of streams.
    pub streams: [usize; 2],
    /// What norms add.
    pub eps: f32,
    /// Longest run of tokens.
    size: usize,
    /// Rows that each length of runs finds.
    heads: usize,
    /// The token that ends a text.
    end: u32,
    /// Width of a row of the table.
    row: usize,
    multipliers: Vec<u64>,
    sizes: Vec<u64>,
    offsets: Vec<u64>,
}

impl NgramSpec {
    /// Reads the keys `ple.*`.
    pub fn read(l: &Loader<'_>, streams: [usize; 2], eps: f32, vocab: usize) -> Result<NgramSpec, Error> {
        let keys = l.keys;
        let size = keys.count("ple.ngram_size", ngram_rows::MOST)?;
        keys.require(size > 1, "ple.ngram_size", size, &format!("2 to {}", ngram_rows::MOST))?;
        let heads = keys.count("ple.heads_per_ngram", 1 << 10)?;
        let all = heads * (size - 1);
        let end = keys.start_token("ple.eos_token_id", vocab)?;
        let (sizes, offsets) =
            (keys.long_array("ple.head_vocab_sizes", all)?, keys.long_array("ple.head_offsets", all)?);
        for (&size, &offset) in sizes.iter().zip(&offsets) {
            let fits = size > 0 && size.checked_add(offset).is_some_and(|end| end < 1 << 31);
            keys.require(fits, "ple.head_vocab_sizes", size as usize, "1 to 2147483647 with its offset")?;
        }
        let multipliers = keys.long_array("ple.layer_multipliers", size)?;
        let row = keys.count("embedding_length_per_layer_input", 1 << 17)?;
        Ok(NgramSpec { streams, eps, size, heads, end, row, multipliers, sizes, offsets })
    }
}

/// What one layer adds to its streams.
#[derive(Clone, Debug)]
pub struct Ngrams {
    spec: NgramSpec,
    before: Convolution,
    /// Multipliers, sizes and offsets of heads.
    hashes: [Tensor; 3],
    table: Tensor,
    key: Linear,
    value: Linear,
    /// Of keys, of streams, and of what the convolution reads: `[hidden, count]` each.
    norms: [Tensor; 3],
    convolution: Convolution,
}

impl Ngrams {
    /// Reads it; `layer` names its states.
    pub fn load(l: &mut Loader<'_>, spec: &NgramSpec, layer: usize) -> Result<Ngrams, Error> {
        let NgramSpec { streams: [hidden, count], size, heads, row, .. } = *spec;
        let all = heads * (size - 1);
        let words: Vec<i32> =
            spec.multipliers.iter().flat_map(|m| [*m as u32 as i32, (m >> 32) as u32 as i32]).collect();
        let ints = |values: &[u64]| -> Vec<i32> { values.iter().map(|v| *v as i32).collect() };
        let hashes = [
            l.whole_constant("ngrams.multipliers", &words, [2, size, 1, 1]),
            l.whole_constant("ngrams.sizes", &ints(&spec.sizes), [heads, size - 1, 1, 1]),
            l.whole_constant("ngrams.offsets", &ints(&spec.offsets), [heads, size - 1, 1, 1]),
        ];
        let rows = spec.sizes.iter().zip(&spec.offsets).map(|(size, offset)| size + offset).max().unwrap_or(0) as usize;
        l.whole();
        let name = "per_layer_token_embd.weight";
        let shape = l.shape(name).ok_or_else(|| Error::MissingTensor { name: name.to_owned() })?;
        if shape[1] < rows {
            return Err(Error::TensorShape { name: name.to_owned(), got: shape[..2].to_vec(), want: vec![row, rows] });
        }
        let table = l.tensor(name, &[row, shape[1]])?;
        l.layer(layer);
        let taps = taps(l, "ple.conv_kernel")?;
        let most = kiln_kernels::ssm_conv::MOST_TAPS;
        let reach = (taps - 1) * size + 1;
        l.keys.require(
            reach <= most,
            "ple.conv_kernel",
            taps,
            &format!("taps that reach {most} tokens back, {size} apart"),
        )?;
        let mut norm = |name: &str| l.vector(&format!("ple_norm_{name}.weight"), &[hidden, count]);
        let norms = [norm("key")?, norm("query")?, norm("conv")?];
        Ok(Ngrams {
            before: Convolution::delays(l, &format!("{layer}.ngrams"), [size, 1]),
            hashes,
            table,
            key: l.unscaled("ple_key", &[row * all, count * hidden])?,
            value: l.unscaled("ple_value", &[row * all, hidden])?,
            norms,
            convolution: Convolution::spread(l, "ple_conv1d", layer, [taps, count * hidden], size)?,
            spec: spec.clone(),
        })
    }

    /// The rows of the table for each token, side by side: `[width, rows]`.
    fn rows(&self, b: &mut Builder, batch: &Batch) -> Tensor {
        let NgramSpec { size, heads, row, end, .. } = self.spec;
        let tokens = batch.ports.tokens;
        let count = tokens.shape[0];
        let numbers = b.fresh("ngrams.tokens", TensorType::F32, [1, count, 1, 1]);
        b.copy("ngrams.tokens", tokens.reshape([1, count, 1, 1]), numbers);
        // What stands before a text is 0, so that no token may be.
        let numbers = b.affine("ngrams.counted", numbers, 1.0, 1.0);
        let each = b.fresh("ngrams.each", TensorType::F32, [1, size, count, 1]);
        b.copy("ngrams.each", same(numbers, size), each);
        let last = self.before.build(b, batch, "ngrams.last", each.reshape([size, count, 1, 1]));
        let all = heads * (size - 1);
        let rows = b.fresh("ngrams.rows", TensorType::I32, [all, count, 1, 1]);
        let [multipliers, sizes, offsets] = self.hashes;
        b.step("ngrams.rows", ngram_rows::Call { tokens: last, multipliers, sizes, offsets, end, rows });
        b.rows("ngrams", self.table, rows.reshape([all * count, 1, 1, 1])).reshape([row * all, count, 1, 1])
    }

    /// The streams `x [hidden, count, rows]` with what the n-grams add.
    pub fn build(&self, b: &mut Builder, batch: &Batch, x: Tensor) -> Tensor {
        let (NgramSpec { streams: [hidden, count], eps, .. }, rows) = (self.spec.clone(), x.shape[2]);
        let e = self.rows(b, batch);
        let key = b.linear("ngrams.key", e, &self.key).reshape(x.shape);
        let key = normed(b, "ngrams.key_norm", key, (self.norms[0], eps));
        let query = normed(b, "ngrams.query_norm", x, (self.norms[1], eps));
        let product = b.multiply("ngrams.product", key, query);
        let fit = b.sum("ngrams.sum", product);
        let fit = b.scale("ngrams.fit", fit, 1.0 / (hidden as f32).sqrt());
        let size = b.function("ngrams.size", fit, Function::Abs);
        let above = b.affine("ngrams.above", size, 1.0, -LEAST);
        let above = b.function("ngrams.relu", above, Function::Relu);
        let size = b.affine("ngrams.at_least", above, 1.0, LEAST);
        let root = b.function("ngrams.root", size, Function::Sqrt);
        let sign = b.function("ngrams.sign", fit, Function::Sign);
        let gate = b.multiply("ngrams.signed", root, sign);
        let gate = b.function("ngrams.gate", gate, Function::Sigmoid);
        let value = b.linear("ngrams.value", e, &self.value);
        let y = b.fresh("ngrams.values", TensorType::F32, [hidden, count, rows, 1]);
        b.copy("ngrams.values", same(value, count), y);
        let y = b.multiply("ngrams.gated", y, gate);
        let z = normed(b, "ngrams.conv_norm", y, (self.norms[2], eps));
        let z = self.convolution.build(b, batch, "ngrams.conv", z.reshape([hidden * count, rows, 1, 1]));
        let x = b.add("ngrams.add", x, y);
        b.add("ngrams.add_conv", x, z.reshape(x.shape))
    }
}
