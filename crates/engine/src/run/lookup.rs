//! Drafts by lookup: what followed the last tokens of a sequence where they stood before is likely to follow again. A step verifies the
//! drafted tokens as rows of the same sequence, and only those stay that the request would have drawn anyway.

use super::media::is_vector;

/// Lengths of the pattern that is looked up: a long one first, because what follows it is surer.
const PATTERNS: [usize; 2] = [8, 4];

/// Tokens of a sequence that are searched at most, the latest ones.
const SEARCHED: usize = 1 << 16;

/// Drafts by lookup have one of these lengths, so that steps meet few shapes.
pub(super) const LENGTHS: [usize; 4] = [1, 3, 7, 15];

/// Whether tokens are drafted by lookup.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum Lookup {
    /// Where a step's rows are known to cost less together than one by one, and no device runs ahead: on the CPU.
    #[default]
    Auto,
    /// Wherever the model can take tokens back, whatever steps cost.
    On,
    /// Never.
    Off,
}

/// Where a sequence was last found to repeat itself: its token number `length` would be a copy of number `from`.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct Place {
    pub(super) from: usize,
    pub(super) length: usize,
}

/// A copy that has parted from its original is found again within so many tokens of where it would be.
const NEAR: usize = 16;

/// What probably follows `tokens` and `last`: at most `most` tokens, and where they stand. `before` is where the last draft was found.
pub(super) fn draft(tokens: &[u32], last: u32, most: usize, before: Option<Place>) -> Option<(Place, &[u32])> {
    let from = tokens.len().saturating_sub(SEARCHED);
    let found = PATTERNS.iter().find_map(|n| Some(from + follows(&tokens[from..], last, *n)?));
    let at = found.or_else(|| rejoins(tokens, last, before?))?;
    // A picture cannot be drawn.
    let found = &tokens[at..tokens.len().min(at + most)];
    let drawable = found.iter().position(|token| is_vector(*token)).unwrap_or(found.len());
    (drawable > 0).then(|| (Place { from: at, length: tokens.len() + 1 }, &found[..drawable]))
}

/// The number of the token behind the latest earlier place of the last `n` tokens.
fn follows(tokens: &[u32], last: u32, n: usize) -> Option<usize> {
    let before = tokens.len().checked_sub(n - 1)?;
    let pattern = &tokens[before..];
    let stands = |end: &usize| tokens[*end] == last && *end + 1 >= n && tokens[*end + 1 - n..*end] == *pattern;
    (0..tokens.len()).rev().find(stands).map(|end| end + 1).filter(|at| *at < tokens.len())
}

/// Where a copy goes on with its original behind a change: the nearest place of the last two tokens, or of the last one.
fn rejoins(tokens: &[u32], last: u32, before: Place) -> Option<usize> {
    let expected = before.from + (tokens.len() + 1).checked_sub(before.length)?;
    if expected - before.from > 2 * NEAR {
        return None;
    }
    let first = before.from.saturating_sub(1).max(2);
    let places = || first..tokens.len().min(expected + NEAR);
    let nearest =
        |stands: &dyn Fn(usize) -> bool| places().filter(|at| stands(*at)).min_by_key(|at| at.abs_diff(expected));
    let second = *tokens.last()?;
    let one = |at: usize| tokens[at - 1] == last;
    nearest(&|at| one(at) && tokens[at - 2] == second).or_else(|| nearest(&one))
}

/// What follows in a text that somebody predicts, where `generated` was generated so far: at most `most` tokens.
pub(super) fn predicted<'p>(prediction: &'p [u32], generated: &[u32], most: usize) -> &'p [u32] {
    let place = |n: &usize| {
        let pattern = &generated[generated.len().checked_sub(*n)?..];
        let ends = (*n..=prediction.len()).filter(|end| prediction[end - n..*end] == *pattern);
        // Of several places the one that is about as far from the beginning.
        ends.min_by_key(|end| end.abs_diff(generated.len()))
    };
    let whole = prediction.starts_with(generated).then_some(generated.len());
    let end = whole.or_else(|| PATTERNS.iter().find_map(place)).unwrap_or(prediction.len());
    &prediction[end..(end + most).min(prediction.len())]
}

#[cfg(test)]
mod tests {
    use super::*;

    /// The tokens that follow, where nothing was found before.
    fn draft(tokens: &[u32], last: u32, most: usize) -> &[u32] {
        super::draft(tokens, last, most, None).map_or(&[], |(_, found)| found)
    }

    #[test]
    fn the_latest_place_of_the_longest_pattern_gives_the_draft() {
        let text = [1, 2, 3, 4, 50, 51, 52, 53, 1, 2, 3, 4, 60, 61, 62, 63, 1, 2, 3];
        assert_eq!(draft(&text, 4, 15), [60, 61, 62, 63, 1, 2, 3]);
        assert_eq!(draft(&text, 4, 2), [60, 61]);
        assert_eq!(draft(&text, 4, 0), [0u32; 0]);
        assert_eq!(draft(&text, 5, 15), [0u32; 0]);
        // Eight tokens alike say more than the latest four.
        let text = [9, 8, 7, 6, 1, 2, 3, 4, 70, 71, 72, 5, 1, 2, 3, 4, 80, 81, 82, 9, 8, 7, 6, 1, 2, 3];
        assert_eq!(draft(&text, 4, 7), [70, 71, 72, 5, 1, 2, 3]);
    }

    #[test]
    fn a_text_that_repeats_itself_is_its_own_draft() {
        let text: Vec<u32> = (0..40).map(|i| i % 4).collect();
        assert_eq!(draft(&text, 0, 15), [1, 2, 3]);
        for length in 0..8 {
            assert_eq!(draft(&text[..length.min(3)], 3, 15), [0u32; 0]);
        }
    }

    #[test]
    fn no_vector_is_drafted() {
        let vector = 1u32 << 31;
        let text = [1, 2, 3, 4, 50, vector, 51, 52, 1, 2, 3];
        assert_eq!(draft(&text, 4, 15), [50]);
    }

    #[test]
    fn a_copy_finds_its_original_again_behind_a_change() {
        let original: Vec<u32> = (100..140).collect();
        let text = [&original[..], &[1], &original[..10]].concat();
        let (place, found) = super::draft(&text[..50], text[50], 5, None).expect("ten tokens are the same");
        assert_eq!((place, found), (Place { from: 10, length: 51 }, &original[10..15]));
        // One token for another, then one that is not there, then one left out.
        for (changed, from) in [(&[7, 111][..], 12), (&[7, 8, 110], 11), (&[112], 13)] {
            let text = [&text[..], changed].concat();
            let (last, before) = text.split_last().expect("there are some");
            assert_eq!(super::draft(before, *last, 5, None), None, "{changed:?}");
            let (found, tokens) = super::draft(before, *last, 5, Some(place)).expect("it goes on");
            assert_eq!((found, tokens), (Place { from, length: text.len() }, &original[from..from + 5]));
        }
        // What has nothing to do with it is not followed, nor is a place that is long past.
        assert_eq!(super::draft(&[&text[..], &[7]].concat(), 8, 5, Some(place)), None);
        let long = [&text[..], &[7; 40]].concat();
        assert_eq!(super::draft(&long, 120, 5, Some(place)), None);
    }

    #[test]
    fn a_prediction_is_followed_from_its_beginning_and_found_again_behind_a_change() {
        let prediction = [1, 2, 3, 4, 5, 6, 7, 8, 1, 2, 3, 4, 9];
        assert_eq!(predicted(&prediction, &[1], 3), [2, 3, 4]);
        assert_eq!(predicted(&prediction, &[1, 2, 3], 99), &prediction[3..]);
        // The answer differs: nothing is known until four tokens are as predicted, then the nearer place counts.
        assert_eq!(predicted(&prediction, &[9], 3), [0u32; 0]);
        assert_eq!(predicted(&prediction, &[9, 1, 2, 3], 3), [0u32; 0]);
        assert_eq!(predicted(&prediction, &[9, 1, 2, 3, 4], 2), [5, 6]);
        assert_eq!(predicted(&prediction, &[9, 9, 9, 9, 9, 9, 9, 1, 2, 3, 4], 2), [9]);
        assert_eq!(predicted(&prediction, &prediction, 2), [0u32; 0]);
        assert_eq!(predicted(&[], &[1], 2), [0u32; 0]);
    }
}
