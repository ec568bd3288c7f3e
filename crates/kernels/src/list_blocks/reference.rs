//! The definition of `list_blocks`.

use super::{Call, Layout};
use crate::host::HostMemory;

/// Of each row the rows of its blocks and of its last tokens.
pub(super) fn reference(call: &Call, memory: &mut HostMemory) {
    let (positions, table) = (memory.read(&call.positions), memory.read(&call.pages.table));
    let sequences = call.sequences.map(|s| memory.read(&s));
    let chosen = call.chosen.map(|both| both.map(|t| memory.read(&t)));
    let Layout { block, spare, window } = call.layout;
    let (room, size) = (call.list.shape[0], call.pages.size);
    let (mut lists, mut counts) = (vec![0.0; call.list.len()], Vec::new());
    // Where token i of a page lies, and the block whose last token it is.
    let token = |page: usize, i: usize| page * (size + spare) + i + i / block;
    let of_block = |page: usize, i: usize| token(page, i) + 1;
    for (row, list) in lists.chunks_exact_mut(room).enumerate() {
        let seen = (positions[row] as i64 + 1).max(0) as usize;
        let pages = &table[call.sequence(sequences.as_deref(), row) * call.pages.table.shape[0]..];
        let at = |t: usize| (pages[t / size] as usize, t % size);
        let blocks: Vec<usize> = match (&chosen, call.chosen) {
            (Some([rows, counts]), Some([t, _])) => {
                let own = &rows[row * t.shape[0]..][..counts[row] as usize];
                own.chunks(block).map(|rows| rows[block - 1] as usize).map(|r| of_block(r / size, r % size)).collect()
            }
            _ => (1..=seen / block).map(|j| at(j * block - 1)).map(|(page, i)| of_block(page, i)).collect(),
        };
        let last = (seen.saturating_sub(window)..seen).map(at).map(|(page, i)| token(page, i));
        let all: Vec<usize> = blocks.into_iter().chain(last).collect();
        list.iter_mut().zip(&all).for_each(|(to, row)| *to = *row as f64);
        counts.push(all.len() as f64);
    }
    memory.write(&call.list, &lists);
    memory.write(&call.counts, &counts);
}
