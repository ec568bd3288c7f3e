//! The sizes of batches: few enough that plans are met again, close enough that padding costs little.

use crate::arch::{BatchShape, Pictures};

/// Rounds a number up to one of four in each power of two: 1 to 8, 10, 12, 14, 16, 20, 24, 28, 32, 40 and so on.
fn fine(n: usize) -> usize {
    if n <= 8 { n } else { n.next_multiple_of(1 << ((n - 1).ilog2() - 2)) }
}

/// The largest number up to `n` that [`fine`] leaves as it is: a chunk of a prompt that ends there has no padding.
pub(crate) fn full(n: usize) -> usize {
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

/// The shape that holds so many rows. An executor that prepares nothing by shape gets exactly those.
pub(crate) fn shape([decode, prompt, pieces]: [usize; 3], all_logits: bool, exact: bool) -> BatchShape {
    let coarse = |n: usize| if n == 0 { 0 } else { n.next_power_of_two() };
    let (decode, prompt) = match exact {
        true => (decode, prompt),
        // Beside a long prompt few rows of padding cost little, and steps of both kinds meet fewer pairs of sizes.
        false if prompt > 0 && 4 * (coarse(decode) + fine(prompt)) <= 5 * (decode + prompt) => {
            (coarse(decode), fine(prompt))
        }
        false => (fine(decode), fine(prompt)),
    };
    let pieces = if exact { pieces } else { coarse(pieces) };
    let outputs = if all_logits { decode + prompt } else { decode + pieces };
    BatchShape { decode, prompt, pieces, outputs, expands: false, shares: false, pictures: Pictures::default() }
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
        assert!(met.len() <= 75, "{} pairs", met.len());
    }

    #[test]
    fn every_sequence_has_an_output() {
        let mixed = shape([3, 100, 2], false, false);
        assert_eq!((mixed.decode, mixed.prompt, mixed.pieces, mixed.outputs), (4, 112, 2, 6));
        let exact = shape([3, 100, 2], true, true);
        assert_eq!((exact.decode, exact.prompt, exact.pieces, exact.outputs), (3, 100, 2, 103));
    }
}
