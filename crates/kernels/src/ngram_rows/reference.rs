//! The definition of `ngram_rows`.

use super::Call;
use crate::host::HostMemory;

/// Hashes of the runs that end with each row's token.
pub(super) fn reference(call: &Call, memory: &mut HostMemory) {
    let [n, ..] = call.tokens.shape;
    let heads = call.sizes.shape[0];
    let whole = |t| -> Vec<u32> { memory.read(t).into_iter().map(|v| v as i64 as u32).collect() };
    let (words, sizes, offsets) = (whole(&call.multipliers), whole(&call.sizes), whole(&call.offsets));
    let multiplier = |s: usize| u64::from(words[2 * s]) | u64::from(words[2 * s + 1]) << 32;
    let mut rows = Vec::with_capacity(call.rows.len());
    for tokens in memory.read(&call.tokens).chunks_exact(n) {
        let own = (tokens[n - 1] as i64 - 1).max(0) as u64;
        let (mut hash, mut ended) = (own.wrapping_mul(multiplier(0)), false);
        for s in 1..n {
            let token = tokens[n - 1 - s] as i64 - 1;
            ended |= token < 0 || token == i64::from(call.end);
            let token = if ended { u64::from(call.end) } else { token as u64 };
            hash ^= token.wrapping_mul(multiplier(s));
            let row = |head: usize| {
                hash % u64::from(sizes[(s - 1) * heads + head]) + u64::from(offsets[(s - 1) * heads + head])
            };
            rows.extend((0..heads).map(|head| row(head) as f64));
        }
    }
    memory.write(&call.rows, &rows);
}
