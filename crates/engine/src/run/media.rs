//! Rows of a sequence that are vectors of an encoder, in the place of embeddings of tokens. In the sequence a number stands for each of them
//! that no token has and that depends on the content: beginnings are found again and shared as those of tokens are.

use std::sync::Arc;

use sha2::{Digest as _, Sha256};

use super::engine::{Engine, Entry, Ready, SequenceId};
use crate::Error;
use crate::vision::Rows;

/// Numbers from here on stand for vectors; no vocabulary is as large.
const FIRST: u32 = 1 << 31;

/// Whether a number stands for a vector.
pub(crate) fn is_vector(token: u32) -> bool {
    token >= FIRST
}

/// What stands for the vectors of some content, before there are any.
pub(crate) fn numbers(key: &[u8], count: usize) -> impl Iterator<Item = u32> {
    (0..count as u64).map(move |row| {
        let digest = Sha256::new().chain_update(key).chain_update(row.to_le_bytes()).finalize();
        FIRST | u32::from_le_bytes([digest[0], digest[1], digest[2], digest[3]])
    })
}

/// Vectors with the content that they were made of.
#[derive(Clone, Debug)]
pub struct Vectors {
    rows: Arc<Rows>,
    tokens: Vec<u32>,
}

impl Vectors {
    /// `key` is a hash of all that the vectors depend on: the bytes of a picture, and which of its inputs this is.
    pub fn new(key: &[u8], rows: Arc<Rows>) -> Vectors {
        let tokens = numbers(key, rows.values.len() / rows.width.max(1)).collect();
        Vectors { rows, tokens }
    }

    /// What stands for them in a prompt, one number each.
    pub fn tokens(&self) -> &[u32] {
        &self.tokens
    }

    fn row(&self, at: usize) -> &[f32] {
        &self.rows.values[at * self.rows.width..][..self.rows.width]
    }
}

/// Vectors at their place in a sequence.
#[derive(Clone, Debug)]
pub struct Span {
    /// Tokens before them.
    pub start: usize,
    /// The vectors.
    pub vectors: Vectors,
}

/// The vector that stands at this position under this number.
fn find(spans: &[Span], position: usize, token: u32) -> Option<&[f32]> {
    let after = spans.partition_point(|span| span.start <= position);
    let span = &spans[after.checked_sub(1)?];
    let at = position - span.start;
    (span.vectors.tokens.get(at) == Some(&token)).then(|| span.vectors.row(at))
}

/// The first number of a prompt that is neither a token nor stands for a vector at its place.
pub(super) fn unknown(tokens: &[u32], start: usize, spans: &[Span], vocab: usize) -> Option<u32> {
    let is_known = |(position, token): (usize, u32)| (token as usize) < vocab || find(spans, position, token).is_some();
    (start..).zip(tokens.iter().copied()).find(|known| !is_known(*known)).map(|(_, token)| token)
}

/// Rows of a batch that belong to one sequence: the first of them, their numbers, and the position of the first.
pub(super) struct Placed<'t> {
    pub(super) sequence: SequenceId,
    pub(super) row: usize,
    pub(super) tokens: &'t [u32],
    pub(super) position: usize,
}

impl Engine {
    /// Says which vectors a sequence will have, in the order of their places, before the numbers that stand for them are fed.
    pub fn attach(&mut self, id: SequenceId, spans: &[Span]) -> Result<(), Error> {
        let hidden = self.model().config.hidden;
        if self.reads_whole() && !spans.is_empty() {
            return Err(Error::NoSequence { why: "the model reads a text as a whole, and takes no vectors" });
        }
        if let Some(span) = spans.iter().find(|span| span.vectors.rows.width != hidden) {
            return Err(Error::VectorWidth { width: span.vectors.rows.width, hidden });
        }
        let sequence = self.sequence_mut(id)?;
        sequence.spans.extend_from_slice(spans);
        sequence.spans.sort_by_key(|span| span.start);
        Ok(())
    }

    /// The same for a sequence of which nothing is left where it cannot be.
    pub(super) fn attach_or_close(&mut self, id: SequenceId, spans: &[Span]) -> Result<(), Error> {
        self.attach(id, spans).inspect_err(|_| self.close(id))
    }

    /// Whether any of these entries has a vector.
    pub(super) fn has_vectors(entries: &[Entry<'_>]) -> bool {
        entries.iter().any(|entry| entry.tokens.iter().any(|token| is_vector(*token)))
    }

    /// Writes the vectors of a batch, in plans that ask for them; rows of tokens have zeros.
    pub(super) fn write_vectors(
        &mut self,
        Ready { plan, ports, .. }: Ready,
        parts: &[Placed<'_>],
    ) -> Result<(), Error> {
        let Some(input) = ports.vectors else { return Ok(()) };
        let width = input.shape[0];
        let mut values = vec![0.0_f32; input.len()];
        for part in parts {
            let spans = &self.sequence(part.sequence)?.spans;
            for (k, token) in part.tokens.iter().enumerate() {
                if let Some(vector) = find(spans, part.position + k, *token) {
                    values[(part.row + k) * width..][..width].copy_from_slice(vector);
                }
            }
        }
        self.executor.write(plan, &input, bytemuck::cast_slice(&values))
    }
}
