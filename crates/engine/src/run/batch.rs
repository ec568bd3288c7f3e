//! The inputs of one run: which token stands in which row, where it is written, and which keys its sequence has.

use super::cache::{Carried, EncoderContext, KINDS, PageTable, Runs};
use super::media::is_vector;
use crate::arch::{BatchShape, PAGE};
use crate::plan::{Ports, Source};
use kiln_kernels::advance::Places;
use kiln_kernels::tensor::Tensor;

/// What a batch takes of one sequence.
pub(crate) struct Taken<'a> {
    pub(crate) tokens: &'a [u32],
    /// Tokens of the sequence before these.
    pub(crate) start: usize,
    /// Its pages, those of these tokens included; none where the model has no such caches.
    pub(crate) tables: &'a [PageTable; KINDS],
    /// What the encoder left for it, in encoder-decoder models.
    pub(crate) encoder: Option<&'a EncoderContext>,
    /// Its state, where the model has recurrent layers.
    pub(crate) state: Option<u32>,
    /// Whether the result of the first of these tokens is wanted, where one is; else that of the last.
    pub(crate) first: bool,
    /// How states reach the model's draft head, where it has one.
    pub(crate) carry: Option<Carry>,
}

/// How states of tokens come from and go to what is kept for a draft head.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Carry {
    /// What is kept of the sequence.
    pub(crate) carried: Carried,
    /// Who runs.
    pub(crate) runs: Runs,
    /// Where the tokens begin that are read of the sequence, in this run and those before it.
    pub(crate) start: usize,
    /// Where the tokens end that this run takes of it.
    pub(crate) end: usize,
}

/// The inputs of a draft head, row by row.
struct CarriedInputs {
    inside: Vec<i32>,
    before: Vec<i32>,
    keep: Vec<i32>,
    /// The sequence and the position of the row before.
    last: Option<(Carry, usize)>,
}

impl CarriedInputs {
    fn new(rows: usize) -> CarriedInputs {
        CarriedInputs { inside: vec![-1; rows], before: vec![-1; rows], keep: vec![-1; rows], last: None }
    }

    /// The token at `position` stands in this row.
    fn set(&mut self, row: usize, carry: Option<Carry>, position: usize) {
        let before = std::mem::replace(&mut self.last, carry.map(|carry| (carry, position)));
        let Some(carry) = carry else { return };
        let [before_row, keep] = carry.carried.rows(carry.runs, position, carry.start..carry.end);
        let is_next = |(last, at): (Carry, usize)| last.carried == carry.carried && at + 1 == position;
        if carry.runs == Runs::Model && before.is_some_and(is_next) {
            self.inside[row] = int(row - 1);
        } else {
            self.before[row] = before_row.map_or(-1, int);
        }
        self.keep[row] = keep.map_or(-1, int);
    }
}

/// The inputs as the executor takes them.
pub(crate) struct Inputs {
    values: Vec<(Tensor, Vec<i32>)>,
    /// First row of each sequence, in the order in which they were given.
    pub(crate) first_row: Vec<usize>,
}

/// Page tables and lengths of the encoder contexts of sequences. Sequences without one see no key.
fn sources(shape: &BatchShape, width: usize, decode: &[Taken<'_>], prompts: &[Taken<'_>]) -> (Vec<i32>, Vec<i32>) {
    let (mut tables, mut lengths) = (vec![0; width * shape.sequences()], vec![0; shape.sequences()]);
    let places = (0..shape.decode).zip(decode).chain((shape.decode..).zip(prompts));
    for (sequence, taken) in places {
        let Some(encoder) = taken.encoder else { continue };
        lengths[sequence] = int(encoder.tokens);
        let column = &mut tables[sequence * width..][..width];
        column.iter_mut().zip(encoder.table.entries()).for_each(|(to, page)| *to = int(page as usize));
    }
    (tables, lengths)
}

/// Positions begin again after so many tokens. No context is as long; a recurrence has no context.
const MOST_POSITIONS: usize = 1 << 30;

fn int(n: usize) -> i32 {
    i32::try_from(n).expect("tokens, positions and rows fit 31 bits")
}

/// A position as devices count it.
pub(crate) fn position(at: usize) -> i32 {
    int(at % MOST_POSITIONS)
}

impl Inputs {
    /// Lays out sequences: first all that go on by one token, then prompts, each in the order given.
    pub(crate) fn new(shape: &BatchShape, ports: &Ports, decode: &[Taken<'_>], prompts: &[Taken<'_>]) -> Inputs {
        let rows = shape.rows();
        let mut tokens = vec![0; rows];
        let mut positions = vec![-1; rows];
        let mut lengths = vec![0; shape.sequences()];
        let mut states = vec![-1; shape.sequences()];
        let width = ports.table.shape[0];
        // A step that makes the next one's inputs must not take an entry without a page for one.
        let mut tables: [Vec<i32>; KINDS] = std::array::from_fn(|_| vec![-1; width * shape.sequences()]);
        let mut cache_rows: [Vec<i32>; KINDS] = std::array::from_fn(|_| vec![-1; rows]);
        let mut owners = vec![0; shape.prompt];
        let mut starts = vec![0; shape.pieces + 1];
        // With all logits wanted they come in the order of the rows.
        let all = shape.outputs == rows;
        let mut wanted: Vec<i32> = (0..shape.outputs).map(|row| if all { int(row) } else { 0 }).collect();
        let mut first_row = Vec::with_capacity(decode.len() + prompts.len());
        let mut carried = CarriedInputs::new(rows);

        let mut row = 0;
        for (i, taken) in decode.iter().chain(prompts).enumerate() {
            let piece = i.checked_sub(decode.len());
            if piece == Some(0) {
                row = shape.decode;
            }
            let sequence = piece.map_or(i, |piece| shape.decode + piece);
            first_row.push(row);
            let first = row;
            for (k, &token) in taken.tokens.iter().enumerate() {
                let position = taken.start + k;
                // No embedding has this number: the row is a vector that is written beside it.
                tokens[row + k] = if is_vector(token) { -1 } else { int(token as usize) };
                // A recurrence knows no positions, only draws do, and its sequence may be longer than they could count.
                positions[row + k] = self::position(position);
                carried.set(row + k, taken.carry, position);
                for (table, rows) in taken.tables.iter().zip(&mut cache_rows) {
                    if let Some(page) = table.at(position / PAGE) {
                        rows[row + k] = int(page as usize * PAGE + position % PAGE);
                    }
                }
                if let Some(piece) = piece {
                    owners[row + k - shape.decode] = int(piece);
                }
            }
            if let Some(piece) = piece {
                starts[piece] = int(row - shape.decode);
                starts[piece + 1..].fill(int(row + taken.tokens.len() - shape.decode));
            }
            row += taken.tokens.len();
            for (pages, table) in taken.tables.iter().zip(&mut tables) {
                let column = &mut table[sequence * width..(sequence + 1) * width];
                if pages.is_empty() {
                    // Nobody looks at it, and a step that makes the next one's inputs goes on.
                    column.fill(0);
                    continue;
                }
                lengths[sequence] = int(taken.start + taken.tokens.len());
                column.iter_mut().zip(pages.entries()).for_each(|(to, page)| *to = int(page as usize));
            }
            states[sequence] = taken.state.map_or(-1, |state| int(state as usize));
            // Where few rows are wanted, [`Inputs::want`] says which.
            if !all && shape.outputs >= shape.sequences() {
                wanted[sequence] = int(if taken.first { first } else { row - 1 });
            }
        }
        let firsts = (0..shape.decode).map(int);
        let firsts = firsts.chain(starts.iter().map(|start| int(shape.decode) + start)).collect();
        let ([table, window_table], [rows, window_rows]) = (tables, cache_rows);
        let mut values = vec![
            (ports.tokens, tokens),
            (ports.positions, positions),
            (ports.rows, rows),
            (ports.lengths, lengths),
            (ports.table, table),
            (ports.owners, owners),
            (ports.starts, starts),
            (ports.firsts, firsts),
            (ports.states, states),
            (ports.wanted, wanted),
        ];
        if let Some(Places { table, rows }) = ports.windows {
            values.extend([(table, window_table), (rows, window_rows)]);
        }
        if let Some(Source { table, lengths }) = ports.source {
            let (tables, counts) = sources(shape, width, decode, prompts);
            values.extend([(table, tables), (lengths, counts)]);
        }
        if let Some(ports) = ports.carried {
            values.extend([(ports.inside, carried.inside), (ports.before, carried.before), (ports.keep, carried.keep)]);
        }
        // Inputs without a use in this shape have a slot of one element all the same.
        values.retain(|(_, values)| !values.is_empty());
        Inputs { values, first_row }
    }

    /// Says whose logits are wanted where those are fewer than there are sequences.
    pub(crate) fn want(&mut self, ports: &Ports, rows: &[usize]) {
        for (tensor, values) in &mut self.values {
            if tensor.slot == ports.wanted.slot {
                values.iter_mut().zip(rows).for_each(|(to, row)| *to = int(*row));
            }
        }
    }

    /// Every input with its bytes.
    pub(crate) fn bytes(&self) -> impl Iterator<Item = (&Tensor, &[u8])> {
        self.values.iter().map(|(tensor, values)| (tensor, bytemuck::cast_slice(values)))
    }
}
