//! The definition of `choose_keys`.

use super::{Call, Rule};
use crate::host::HostMemory;

/// Scores of all keys that are there, and the best of them.
pub(crate) fn reference(call: &Call, memory: &mut HostMemory) {
    let [width, heads, rows, _] = call.q.shape;
    let (q, k, positions) = (memory.read(&call.q), memory.read(&call.k), memory.read(&call.positions));
    let weights = call.weights.map(|w| memory.read(&w));
    let sequences = call.sequences.map(|s| memory.read(&s));
    let table = memory.read(&call.pages.table);
    let mut lists = Vec::new();
    for row in 0..rows {
        let seen = (positions[row] as i64 + 1).max(0) as usize;
        let place = Places::of(call, &table, call.sequence(sequences.as_deref(), row));
        let product = |head: usize, key: usize| -> f64 {
            let (q, k) = (&q[(row * heads + head) * width..][..width], &k[place.key(key) * width..][..width]);
            q.iter().zip(k).map(|(a, b)| a * b).sum()
        };
        let weight = |head: usize| weights.as_ref().map_or(1.0, |w| w[row * heads + head]);
        let keys = 0..seen / call.rule.per_key;
        for group in 0..call.groups() {
            let score = |key: usize| match call.each {
                true => product(group, key),
                false => (0..heads).map(|head| weight(head) * product(head, key).max(0.0)).sum(),
            };
            let scores: Vec<f64> = keys.clone().map(score).collect();
            let tokens = chosen(&call.rule, &scores, seen);
            lists.push(tokens.into_iter().map(|token| place.token(token) * call.groups() + group).collect());
        }
    }
    write(call, &lists, memory);
}

/// Where the tokens of a sequence and their keys lie.
pub(super) struct Places<'a> {
    pages: &'a [f64],
    size: usize,
    per_key: usize,
}

impl Places<'_> {
    pub(super) fn of<'a>(call: &Call, table: &'a [f64], sequence: usize) -> Places<'a> {
        let count = call.pages.table.shape[0];
        Places { pages: &table[sequence * count..][..count], size: call.pages.size, per_key: call.rule.per_key }
    }

    fn row(&self, n: usize, size: usize) -> usize {
        self.pages[n / size] as usize * size + n % size
    }

    pub(super) fn token(&self, token: usize) -> usize {
        self.row(token, self.size)
    }

    pub(super) fn key(&self, key: usize) -> usize {
        self.row(key, self.size / self.per_key)
    }
}

/// The chosen ones of the first `seen` tokens, in order, given the scores of their keys.
pub(super) fn chosen(rule: &Rule, scores: &[f64], seen: usize) -> Vec<usize> {
    let best = |keys: &[f64]| keys.iter().copied().fold(f64::NEG_INFINITY, f64::max);
    let mut blocks: Vec<(usize, f64)> = scores.chunks(rule.block).map(best).enumerate().collect();
    let count = blocks.len();
    blocks[count.saturating_sub(rule.near)..].iter_mut().for_each(|(_, score)| *score = f64::INFINITY);
    // The order of equal ones stays as it is.
    blocks.sort_by(|a, b| b.1.partial_cmp(&a.1).unwrap_or(std::cmp::Ordering::Equal));
    blocks.truncate(rule.most);
    blocks.sort_by_key(|(block, _)| *block);
    let size = rule.tokens_of_block();
    let of_blocks = blocks.into_iter().flat_map(|(block, _)| block * size..seen.min((block + 1) * size));
    let behind = if rule.tail { scores.len() * rule.per_key..seen } else { 0..0 };
    of_blocks.chain(behind).collect()
}

pub(super) fn write(call: &Call, lists: &[Vec<usize>], memory: &mut HostMemory) {
    let room = call.list.shape[0];
    let mut all = vec![0.0; call.list.len()];
    for (to, list) in all.chunks_exact_mut(room).zip(lists) {
        to.iter_mut().zip(list).for_each(|(to, row)| *to = *row as f64);
    }
    let counts: Vec<f64> = lists.iter().map(|list| list.len() as f64).collect();
    memory.write(&call.list, &all);
    memory.write(&call.counts, &counts);
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_best_are_chosen_and_stay_in_order() {
        let scores = [3.0, 1.0, 4.0, 1.0, 5.0];
        assert_eq!(chosen(&Rule::tokens(3), &scores, 5), [0, 2, 4]);
        // Of equal ones the first.
        assert_eq!(chosen(&Rule::tokens(4), &scores, 5), [0, 1, 2, 4]);
        assert_eq!(chosen(&Rule::tokens(9), &scores, 5), [0, 1, 2, 3, 4]);
        assert!(chosen(&Rule::tokens(9), &[], 0).is_empty());
    }

    #[test]
    fn blocks_go_by_their_best_and_the_last_is_always_there() {
        let scores = [3.0, 1.0, 4.0, 1.0, 5.0, 0.0, -9.0];
        let rule = Rule { per_key: 1, block: 2, most: 2, near: 0, tail: false };
        assert_eq!(chosen(&rule, &scores, 7), [2, 3, 4, 5]);
        assert_eq!(chosen(&Rule { near: 1, ..rule }, &scores, 7), [4, 5, 6]);
        // Keys of two tokens, and a token that none stands for.
        let rule = Rule { per_key: 2, block: 1, most: 1, near: 0, tail: true };
        assert_eq!(chosen(&rule, &[1.0, 2.0], 5), [2, 3, 4]);
    }
}
