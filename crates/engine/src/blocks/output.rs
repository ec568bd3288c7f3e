//! The two ends of a model: tokens to vectors, vectors to logits.

use kiln_kernels::tensor::Tensor;
use kiln_kernels::unary::Function;

use super::norms::NormKind;
use crate::Error;
use crate::arch::Batch;
use crate::model::{Loader, names};
use crate::plan::{Builder, Linear, Norm};

/// Which matrix makes the logits.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Head {
    /// `output`, or the embeddings where the file has none.
    Tied,
    /// `output`, which must be there.
    Own,
    /// The embeddings, whatever the file has.
    Embedding,
    /// `output`, whose rows are the last tokens of the vocabulary; the others get minus infinity.
    Rear,
    /// None: the model gives a vector for each token, and no logits.
    Nothing,
}

/// Tokens to vectors.
#[derive(Clone, Debug)]
pub struct Embedding {
    /// `[hidden, vocab]`.
    pub weight: Tensor,
    /// Factor of the vectors.
    pub scale: f32,
    /// Norm of the vectors.
    pub norm: Option<Norm>,
    /// `[hidden, context]`: added by position.
    pub positions: Option<Tensor>,
    /// `[hidden]`: added to every token, the vector of the first kind of tokens.
    pub kind: Option<Tensor>,
}

impl Embedding {
    /// Reads the embeddings alone.
    pub fn load(l: &mut Loader<'_>, hidden: usize, vocab: usize) -> Result<Embedding, Error> {
        l.whole();
        let weight = l.tensor(names::TOKEN_EMBEDDING, &[hidden, vocab])?;
        Ok(Embedding { weight, scale: 1.0, norm: None, positions: None, kind: None })
    }

    /// Reads `token_types`, of which texts that stand alone have the first.
    pub fn read_kind(&mut self, l: &mut Loader<'_>) -> Result<(), Error> {
        let (name, hidden) = ("token_types.weight", self.weight.shape[0]);
        let Some(shape) = l.shape(name) else { return Ok(()) };
        let values = l.values(name)?.unwrap_or_default();
        if shape[0] != hidden {
            let (got, want) = (shape.to_vec(), vec![hidden, shape[1]]);
            return Err(Error::TensorShape { name: name.to_owned(), got, want });
        }
        self.kind = Some(l.constant("token_types.first", &values[..hidden], [hidden, 1, 1, 1]));
        Ok(())
    }

    /// Adds the steps.
    pub fn build(&self, b: &mut Builder, batch: &Batch) -> Tensor {
        b.at("embedding");
        let mut x = b.rows("", self.weight, batch.ports.tokens);
        if self.scale != 1.0 {
            x = b.scale("scale", x, self.scale);
        }
        if let Some(rows) = batch.ports.vectors {
            // They come from an encoder as the layers take them: the factor is that of tokens.
            x = b.add("vectors", x, rows.values.narrow(0, 0, x.shape[0]));
        }
        if let Some(kind) = self.kind {
            x = b.add("kind", x, kind);
        }
        if let Some(positions) = self.positions {
            // Rows without a token have position -1: they get zeros.
            let places = b.rows("positions", positions, batch.ports.positions);
            x = b.add("position", x, places);
        }
        match &self.norm {
            Some(norm) => b.norm("norm", x, norm),
            None => x,
        }
    }
}

/// Vectors to logits.
#[derive(Clone, Debug)]
pub struct Output {
    norm: Option<Norm>,
    /// Nothing where a model gives vectors alone.
    matrix: Option<Linear>,
    /// F32 `[tokens]`: logits of the tokens that the matrix has no rows for.
    front: Option<Tensor>,
    /// F32 `[vocab]`: added to the logits; minus infinity for tokens that are never drawn, 0 for all others.
    hidden: Option<Tensor>,
    /// Factor of the logits.
    pub scale: f32,
    /// With c > 0, logits become c * tanh(logit / c).
    pub softcap: f32,
}

impl Output {
    /// Reads it; `embedding` are the embeddings.
    pub fn load(l: &mut Loader<'_>, norm: (NormKind, f32), head: Head, embedding: &Embedding) -> Result<Output, Error> {
        Output::load_named(l, "output_norm", norm, head, embedding)
    }

    /// The same with another name of the norm.
    pub fn load_named(
        l: &mut Loader<'_>,
        name: &str,
        (norm, eps): (NormKind, f32),
        head: Head,
        embedding: &Embedding,
    ) -> Result<Output, Error> {
        l.whole();
        let [hidden, vocab, ..] = embedding.weight.shape;
        let own = match head {
            Head::Own => Some(l.linear("output", &[hidden, vocab])?),
            Head::Tied => l.linear_opt("output", &[hidden, vocab])?,
            Head::Rear => {
                let rows = l.shape("output.weight").map_or(vocab, |shape| shape[1]).min(vocab);
                Some(l.linear("output", &[hidden, rows])?)
            }
            Head::Nothing => {
                l.encodes();
                let norm = Some(norm.load(l, name, hidden, eps)?);
                return Ok(Output { norm, matrix: None, front: None, hidden: None, scale: 1.0, softcap: 0.0 });
            }
            Head::Embedding => {
                ["output.weight", "output.bias", "output.scale"].iter().for_each(|name| l.ignore(name));
                None
            }
        };
        let mut matrix = own.unwrap_or_else(|| Linear::plain(embedding.weight));
        // Files of some tools carry this factor without using it.
        matrix.scale = 1.0;
        let norm = Some(norm.load(l, name, hidden, eps)?);
        let missing = vocab - matrix.weight.shape[1];
        let front =
            (missing > 0).then(|| l.constant("output.front", &vec![f32::NEG_INFINITY; missing], [missing, 1, 1, 1]));
        Ok(Output { norm, matrix: Some(matrix), front, hidden: None, scale: 1.0, softcap: 0.0 })
    }

    /// The same without a norm: what is read is normed already.
    pub fn load_bare(l: &mut Loader<'_>, embedding: &Embedding) -> Result<Output, Error> {
        l.whole();
        let [hidden, vocab, ..] = embedding.weight.shape;
        let own = l.linear_opt("output", &[hidden, vocab])?;
        let matrix = Linear { scale: 1.0, ..own.unwrap_or_else(|| Linear::plain(embedding.weight)) };
        Ok(Output { norm: None, matrix: Some(matrix), front: None, hidden: None, scale: 1.0, softcap: 0.0 })
    }

    /// Nothing at all: the stream is normed already, and the model gives vectors.
    pub fn nothing(l: &mut Loader<'_>) -> Output {
        l.encodes();
        Output { norm: None, matrix: None, front: None, hidden: None, scale: 1.0, softcap: 0.0 }
    }

    /// Logits of these tokens become minus infinity.
    pub fn hide(&mut self, l: &mut Loader<'_>, tokens: &[usize], vocab: usize) {
        if tokens.is_empty() {
            return;
        }
        let mut values = vec![0.0; vocab];
        tokens.iter().filter(|token| **token < vocab).for_each(|token| values[*token] = f32::NEG_INFINITY);
        self.hidden = Some(l.constant("output.hidden", &values, [vocab, 1, 1, 1]));
    }

    /// Leaves out a bias that the file has.
    pub fn without_bias(mut self) -> Output {
        if let Some(matrix) = &mut self.matrix {
            matrix.bias = None;
        }
        self
    }

    /// Leaves out the norm: the stream is normed already.
    pub fn without_norm(self) -> Output {
        Output { norm: None, ..self }
    }

    /// Adds the steps; gives the logits of the wanted rows, or their vectors where those are wanted.
    pub fn build(&self, b: &mut Builder, batch: &Batch, x: Tensor) -> Tensor {
        b.at("output");
        // Only the wanted tokens go through the output matrix, the largest of all.
        let x = wanted(b, batch, x);
        let x = self.normed(b, x);
        self.product(b, batch, x)
    }

    /// Adds the steps that norm all rows.
    pub fn normed(&self, b: &mut Builder, x: Tensor) -> Tensor {
        match &self.norm {
            Some(norm) => b.norm("norm", x, norm),
            None => x,
        }
    }

    /// As [`Output::build`], of rows that are normed already.
    pub fn build_normed(&self, b: &mut Builder, batch: &Batch, x: Tensor) -> Tensor {
        b.at("output");
        let x = wanted(b, batch, x);
        self.product(b, batch, x)
    }

    /// The same with another norm, and another matrix where there is one.
    #[must_use]
    pub fn with(self, norm: Norm, matrix: Option<Linear>) -> Output {
        Output { norm: Some(norm), matrix: matrix.or(self.matrix), ..self }
    }

    fn product(&self, b: &mut Builder, batch: &Batch, x: Tensor) -> Tensor {
        let matrix = self.matrix.as_ref().filter(|_| batch.results.are_logits());
        let Some(matrix) = matrix else { return x };
        let mut logits = b.linear("", x, matrix);
        let cap = self.softcap;
        let scale = if cap > 0.0 { self.scale / cap } else { self.scale };
        if scale != 1.0 {
            logits = b.scale("scale", logits, scale);
        }
        if cap > 0.0 {
            logits = b.function("tanh", logits, Function::Tanh);
            logits = b.scale("cap", logits, cap);
        }
        if let Some(hidden) = self.hidden {
            logits = b.add("hidden", logits, hidden);
        }
        match self.front {
            Some(front) => {
                // The same for every row: a stride of 0.
                let [tokens, rows, ..] = [front.shape[0], logits.shape[1], 1, 1];
                let front = Tensor { shape: [tokens, rows, 1, 1], stride: [4, 0, 0, 0], ..front };
                b.concat("whole", front, logits)
            }
            None => logits,
        }
    }
}

/// Those of all rows whose logits are wanted.
fn wanted(b: &mut Builder, batch: &Batch, x: Tensor) -> Tensor {
    if batch.shape.outputs == batch.shape.rows() { x } else { b.rows("rows", x, batch.ports.wanted) }
}
