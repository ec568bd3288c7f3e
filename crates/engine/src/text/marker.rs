//! Markers in text that arrives in pieces: which comes first, and where one may be on its way.

/// Where `text` ends in a beginning of `marker` that is not the whole of it: the earliest such place.
fn unfinished(text: &str, marker: &str) -> Option<usize> {
    let most = marker.len().saturating_sub(1).min(text.len());
    let fits = |len: &usize| {
        let at = text.len() - len;
        text.is_char_boundary(at) && marker.as_bytes().starts_with(&text.as_bytes()[at..])
    };
    (1..=most).rev().find(fits).map(|len| text.len() - len)
}

/// Where `text` must be held back because one of the markers may begin there.
pub(super) fn hold_from<'a>(text: &str, markers: impl IntoIterator<Item = &'a str>) -> usize {
    markers.into_iter().filter_map(|marker| unfinished(text, marker)).min().unwrap_or(text.len())
}

/// The marker that begins first, the longest of those: its place and its index.
pub(super) fn find_first<'a>(text: &str, markers: impl IntoIterator<Item = &'a str>) -> Option<(usize, usize)> {
    let found = |(index, marker): (usize, &str)| Some((text.find(marker)?, marker.len(), index));
    let all = markers.into_iter().enumerate().filter_map(found);
    all.min_by_key(|&(at, len, _)| (at, std::cmp::Reverse(len))).map(|(at, _, index)| (at, index))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_first_wins_and_the_longest_of_those() {
        assert_eq!(find_first("xabcd", ["b", "abc", "ab"]), Some((1, 1)));
        assert_eq!(find_first("x", ["b"]), None);
    }

    #[test]
    fn beginnings_are_held_back() {
        for (text, marker, from) in [
            ("a<", "<b>", 1),
            ("a<b", "<b>", 1),
            ("a<b>", "<b>", 4),
            ("aab", "aabaaab", 0),
            ("oä", "ähm", 1),
            ("x", "<", 1),
        ] {
            assert_eq!(hold_from(text, [marker]), from, "{text} {marker}");
        }
        assert_eq!(hold_from("ab", ["bc", "abc"]), 0);
        assert_eq!(hold_from("", ["bc"]), 0);
    }
}
