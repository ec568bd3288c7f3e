//! Rows of a sequence that are vectors of an encoder, in the place of embeddings of tokens. In the sequence a number stands for each of them
//! that no token has and that depends on the content: beginnings are found again and shared as those of tokens are.

use std::sync::Arc;

use sha2::{Digest as _, Sha256};

use super::batch::position;
use super::engine::{Engine, Entry, Ready, Sequence, SequenceId};
use super::places::{Seen, Standing};
use crate::Error;
use crate::arch::Pictures;
use crate::media::Rows;
use crate::plan::VectorRows;

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
    standing: Standing,
}

impl Vectors {
    /// `key` is a hash of all that the vectors depend on: the bytes of a picture, and which of its inputs this is.
    pub fn new(key: &[u8], rows: Arc<Rows>) -> Vectors {
        let tokens = numbers(key, rows.values.len() / rows.width.max(1)).collect();
        Vectors { rows, tokens, standing: Standing::default() }
    }

    /// The same where they stand otherwise than tokens do. How they stand depends on the content alone.
    #[must_use]
    pub fn standing_as(self, standing: Standing) -> Vectors {
        Vectors { standing, ..self }
    }

    /// Elements of each of them.
    pub fn width(&self) -> usize {
        self.rows.width
    }

    /// How they stand in a sequence.
    pub fn standing(&self) -> Standing {
        self.standing
    }

    /// What stands for them in a prompt, one number each.
    pub fn tokens(&self) -> &[u32] {
        &self.tokens
    }

    /// The vectors, one after the other.
    pub fn values(&self) -> &[f32] {
        &self.rows.values
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
    /// All tokens of the sequence that are being fed, these among them.
    pub(super) fed: &'t [u32],
}

impl Sequence {
    /// Whether it holds pictures that nobody showed: those of a saved state, until a request says what stands where.
    pub(super) fn find_lost_pictures(&mut self) {
        let Sequence { cache, spans, .. } = self;
        let mut all = cache.tokens.iter().enumerate();
        self.lost_pictures = all.any(|(at, token)| is_vector(*token) && find(spans, at, *token).is_none());
    }
}

impl Engine {
    /// Says which vectors a sequence will have, in the order of their places, before the numbers that stand for them are fed.
    pub fn attach(&mut self, id: SequenceId, spans: &[Span]) -> Result<(), Error> {
        if spans.is_empty() {
            return Ok(());
        }
        let model = self.model();
        let width = model.config.hidden * (1 + model.facts.deepstack);
        if self.reads_whole() {
            return Err(Error::NoSequence { why: "the model reads a text as a whole, and takes no vectors" });
        }
        // Vectors of sounds have no parts for further layers, which get zeros.
        let fits = |span: &&Span| [width, model.config.hidden].contains(&span.vectors.rows.width);
        if let Some(span) = spans.iter().find(|span| !fits(span)) {
            return Err(Error::VectorWidth { width: span.vectors.rows.width, hidden: width });
        }
        if self.batch_invariant && spans.iter().any(|span| span.vectors.standing.both_ways) {
            let why = "rows of such a picture see each other, and a reproducible run reads every row by itself";
            return Err(Error::NoSequence { why });
        }
        let sequence = self.sequence_mut(id)?;
        for span in spans {
            // A sequence that goes on from another one has that one's already.
            sequence.spans.retain(|known| known.start != span.start);
            sequence.spans.push(span.clone());
        }
        sequence.spans.sort_by_key(|span| span.start);
        sequence.find_lost_pictures();
        Ok(())
    }

    /// The same for a sequence of which nothing is left where it cannot be.
    pub(super) fn attach_or_close(&mut self, id: SequenceId, spans: &[Span]) -> Result<(), Error> {
        self.attach(id, spans).inspect_err(|_| self.close(id))
    }

    /// A sequence with what is being fed to it.
    fn seen<'s>(&'s self, id: SequenceId, fed: &'s [u32]) -> Result<Seen<'s>, Error> {
        let Sequence { spans, cache, .. } = self.sequence(id)?;
        Ok(Seen { spans, before: &cache.tokens, fed })
    }

    /// Whether the pictures of an entry can be fed as they are.
    pub(super) fn admit_pictures(&self, entry: &Entry<'_>) -> Result<(), Error> {
        let sequence = self.sequence(entry.sequence)?;
        if sequence.lost_pictures && self.model().facts.several_positions {
            return Err(Error::NoSequence { why: "it holds pictures that were not shown again" });
        }
        if !sequence.spans.is_empty() && self.seen(entry.sequence, entry.tokens)?.is_cut() {
            return Err(Error::NoSequence {
                why: "a piece of its prompt ends within a picture whose rows see each other",
            });
        }
        Ok(())
    }

    /// What the pictures of a batch ask of its plan.
    pub(super) fn pictures(&self, entries: &[Entry<'_>]) -> Result<Pictures, Error> {
        let several_positions = self.model().facts.several_positions;
        let with_some = |entry: &&Entry<'_>| self.sequence(entry.sequence).is_ok_and(|s| !s.spans.is_empty());
        entries.iter().filter(with_some).try_fold(Pictures::default(), |all, entry| {
            Ok(all.and(self.seen(entry.sequence, entry.tokens)?.pictures(several_positions)))
        })
    }

    /// Writes what rows of pictures are, where rows stand and what they see, in plans that ask for it.
    pub(super) fn write_pictures(&mut self, ready: Ready, parts: &[Placed<'_>]) -> Result<(), Error> {
        if let Some(rows) = ready.ports.vectors {
            self.write_vectors(ready, rows, parts)?;
        }
        let Ready { plan, ports, .. } = ready;
        if let Some(port) = ports.coordinates {
            let [rows, numbers, ..] = port.shape;
            let mut values = vec![0_i32; port.len()];
            self.each_row(parts, |seen, row, at| {
                let coordinates = seen.coordinates(at);
                (0..numbers).for_each(|i| values[i * rows + row] = coordinates[i]);
            })?;
            self.executor.write(plan, &port, bytemuck::cast_slice(&values))?;
        }
        if let Some(port) = ports.seen {
            let (rows, decode) = (port.shape[0], ports.tokens.shape[0] - port.shape[0]);
            let mut values = vec![-1_i32; port.len()];
            self.each_row(parts, |seen, row, at| {
                if let Some(row) = row.checked_sub(decode) {
                    values[row] = position(at);
                    values[rows + row] = position(seen.last(at));
                }
            })?;
            self.executor.write(plan, &port, bytemuck::cast_slice(&values))?;
        }
        Ok(())
    }

    /// Does something with every row of these parts and its place in its sequence.
    fn each_row(&self, parts: &[Placed<'_>], mut act: impl FnMut(&Seen<'_>, usize, usize)) -> Result<(), Error> {
        for part in parts {
            let seen = self.seen(part.sequence, part.fed)?;
            (0..part.tokens.len()).for_each(|k| act(&seen, part.row + k, part.position + k));
        }
        Ok(())
    }

    /// Writes the vectors of a batch; rows of tokens have zeros.
    fn write_vectors(&mut self, ready: Ready, to: VectorRows, parts: &[Placed<'_>]) -> Result<(), Error> {
        let VectorRows { values: port, stand_ins } = to;
        let width = port.shape[0];
        let mut values = vec![0.0_f32; port.len()];
        let mut tokens = vec![0_i32; stand_ins.len()];
        for part in parts {
            let spans = &self.sequence(part.sequence)?.spans;
            for (k, token) in part.tokens.iter().enumerate() {
                if let Some(vector) = find(spans, part.position + k, *token) {
                    values[(part.row + k) * width..][..vector.len()].copy_from_slice(vector);
                } else {
                    tokens[part.row + k] = i32::try_from(*token).unwrap_or(0);
                }
            }
        }
        self.executor.write(ready.plan, &port, bytemuck::cast_slice(&values))?;
        self.executor.write(ready.plan, &stand_ins, bytemuck::cast_slice(&tokens))
    }
}
