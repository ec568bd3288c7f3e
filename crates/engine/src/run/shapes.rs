//! The sizes of batches: few enough that plans are met again, close enough that padding costs little.

use crate::arch::{BatchShape, Pictures};

/// Rounds a number up to one of four in each power of two: 1 to 8, 10, 12, 14, 16, 20, 24, 28, 32, 40 and so on.
pub(super) fn fine(n: usize) -> usize {
    if n <= 8 { n } else { n.next_multiple_of(1 << ((n - 1).ilog2() - 2)) }
}

/// Prompt tokens of a step beside so many sequences that decode, such that its rows are at most `n` and as many as its shape has.
pub(crate) fn full_beside(decode: usize, n: usize) -> usize {
    full(n).saturating_sub(coarse(decode))
}

/// The largest number up to `n` that [`fine`] leaves as it is: a chunk of a prompt that ends there has no padding.
pub(super) fn full(n: usize) -> usize {
    if n <= 8 {
        return n;
    }
    let step = 1 << (n.ilog2() - 2);
    n / step * step
}

/// A number of wanted rows, rounded up likewise.
pub(crate) fn some(n: usize, exact: bool) -> usize {
    if exact { n } else { fine(n) }
}

/// Rounds a number up to a power of two.
fn coarse(n: usize) -> usize {
    if n == 0 { 0 } else { n.next_power_of_two() }
}

/// Rounds a number of prompts up: one has kernels of its own, several cost little more than as many as there may be. 1, 4, 16, 64 and so on.
fn few(prompts: usize) -> usize {
    match prompts {
        0 | 1 => prompts,
        _ => 1 << prompts.next_power_of_two().ilog2().next_multiple_of(2),
    }
}

/// Tokens of a prompt as clients send them who are alone.
const USUAL_PROMPT: usize = 512;
/// Rows of the smallest mixed step whose kernels are compiled beforehand.
const LEAST_MIXED: usize = 32;

/// The shape that holds so many rows. An executor that prepares nothing by shape gets exactly those.
pub(crate) fn shape([decode, prompt, pieces]: [usize; 3], all_logits: bool, exact: bool) -> BatchShape {
    let (decode, prompt) = match exact {
        true => (decode, prompt),
        // Products run over all rows at once and are fastest where their number is round, so that is what the prompts' rows fill up.
        // Few rows of padding cost little beside many, and steps of both kinds meet fewer pairs of sizes.
        false if prompt > 0 && 4 * fine(coarse(decode) + prompt) <= 5 * (decode + prompt) => {
            (coarse(decode), fine(coarse(decode) + prompt) - coarse(decode))
        }
        false => (fine(decode), fine(prompt)),
    };
    let pieces = if exact { pieces } else { few(pieces) };
    let outputs = if all_logits { decode + prompt } else { decode + pieces };
    BatchShape { decode, prompt, pieces, outputs, expands: false, shares: false, pictures: Pictures::default() }
}

/// The batch shapes that concurrent requests meet, the likeliest first: sequences that decode, prompts alone, and both together.
pub(super) fn expected(sequences: usize, batch: usize) -> Vec<BatchShape> {
    let fines = |from: usize, to: usize| {
        std::iter::successors(Some(fine(from)), |n| Some(fine(n + 1))).take_while(move |n| *n <= fine(to))
    };
    let powers = || std::iter::successors(Some(1), |n| Some(2 * n)).take_while(|n| *n <= coarse(sequences));
    let of = |decode, prompt, chunks| shape([decode, prompt, chunks], false, false);
    let largest_beside = |decode| of(decode, full_beside(decode, batch).max(1), sequences);
    // The largest first: a batch whose own shape has no kernels yet takes them.
    let mut all: Vec<BatchShape> = (sequences > 1).then(|| largest_beside(coarse(sequences))).into_iter().collect();
    all.extend([of(0, batch, sequences), of(coarse(sequences), 0, 0), of(0, batch.min(USUAL_PROMPT), 1), of(1, 0, 0)]);
    all.extend(powers().map(|decode| of(decode, 0, 0)));
    let prompts: Vec<usize> = fines(2, batch).collect();
    all.extend(prompts.iter().rev().map(|prompt| of(0, *prompt, 1)));
    all.extend(fines(1, sequences).map(|decode| of(decode, 0, 0)));
    if sequences > 1 {
        all.extend(powers().map(largest_beside));
        let rows = || prompts.iter().copied().rev().filter(|rows| *rows >= LEAST_MIXED);
        // Where fewer than half of the rows are of prompts, sizes are others.
        let beside = |rows: usize| powers().filter(move |decode| 2 * decode <= rows);
        let mixed = rows().flat_map(|rows| beside(rows).map(move |decode| (decode, rows - decode)));
        all.extend(mixed.clone().map(|(decode, prompt)| of(decode, prompt, 2)));
        all.extend(mixed.map(|(decode, prompt)| of(decode, prompt, 1)));
        all.extend(rows().map(|prompt| of(0, prompt, 2)));
    }
    let mut seen = std::collections::HashSet::new();
    all.retain(|shape| shape.rows() <= fine(batch) && seen.insert(*shape));
    all
}

/// The shape of so many rows that each go the way of one alone; the logits of some of them are wanted.
pub(crate) fn batch_invariant(rows: usize, wanted: usize, exact: bool) -> BatchShape {
    if wanted == rows {
        return shape([rows, 0, 0], false, exact);
    }
    // Batches would meet too many pairs of fine sizes.
    let round = |n: usize| if exact { n } else { n.next_power_of_two() };
    BatchShape { outputs: round(wanted.max(1)), ..shape([round(rows), 0, 0], false, true) }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn rounding_wastes_at_most_a_quarter_and_keeps_round_numbers() {
        for n in 1..5000 {
            let to = fine(n);
            assert!(to >= n && 4 * (to - n) <= n, "{n} became {to}");
            assert_eq!(fine(to), to);
        }
        assert_eq!([9, 33, 512, 2048, 300].map(fine), [10, 40, 512, 2048, 320]);
    }

    #[test]
    fn a_full_chunk_has_no_padding_and_is_the_largest_such() {
        for n in 1..5000 {
            let to = full(n);
            assert!(to <= n && fine(to) == to, "{n} became {to}");
            assert!((to + 1..=n).all(|larger| fine(larger) != larger), "{n} became {to}");
        }
    }

    #[test]
    fn steps_of_both_kinds_waste_at_most_a_quarter_of_their_rows() {
        let mut met = std::collections::HashSet::new();
        for decode in 0..=64 {
            for prompt in (1..100).chain((100..2048).step_by(7)) {
                let shape = shape([decode, prompt, 1], false, false);
                let (rows, asked) = (shape.decode + shape.prompt, decode + prompt);
                assert!(shape.decode >= decode && shape.prompt >= prompt);
                assert!(4 * (rows - asked) <= asked, "{decode} and {prompt} became {shape:?}");
                if prompt >= 512 {
                    met.insert((shape.decode, shape.prompt));
                }
            }
        }
        // Mostly powers of two of sequences beside four sizes of chunks in each power of two.
        assert!(met.len() <= 90, "{} pairs", met.len());
    }

    #[test]
    fn numbers_of_prompts_are_one_or_powers_of_four() {
        assert_eq!([0, 1, 2, 4, 5, 16, 17, 64, 65].map(few), [0, 1, 4, 4, 16, 16, 64, 64, 256]);
    }

    #[test]
    fn every_batch_of_a_server_has_a_shape_that_is_compiled_beforehand_or_a_larger_one_that_is() {
        let (sequences, batch) = (64, 2048);
        let all = expected(sequences, batch);
        let holds = |large: &BatchShape, small: &BatchShape| {
            large.decode >= small.decode && large.prompt >= small.prompt && large.pieces >= small.pieces
        };
        for decode in 0..=sequences {
            for prompt in [0, 1, 2, 31, 64, 500, 1024, batch - sequences] {
                for chunks in [1, 2, sequences - decode].into_iter().filter(|n| *n <= prompt && n + decode <= sequences)
                {
                    let chunks = if prompt == 0 { 0 } else { chunks };
                    let asked = shape([decode, prompt, chunks], false, false);
                    if asked.rows() > 0 && asked.rows() <= batch {
                        assert!(all.iter().any(|large| holds(large, &asked)), "{asked:?}");
                    }
                }
            }
        }
        assert!(all.len() < 500, "{} shapes", all.len());
        // A server for one sequence meets no steps of several.
        assert!(expected(1, 512).iter().all(|shape| shape.sequences() == 1));
    }

    #[test]
    fn every_sequence_has_an_output() {
        // 112 rows in all, four to an octave.
        let mixed = shape([3, 100, 2], false, false);
        assert_eq!((mixed.decode, mixed.prompt, mixed.pieces, mixed.outputs), (4, 108, 4, 8));
        let exact = shape([3, 100, 2], true, true);
        assert_eq!((exact.decode, exact.prompt, exact.pieces, exact.outputs), (3, 100, 2, 103));
    }
}
