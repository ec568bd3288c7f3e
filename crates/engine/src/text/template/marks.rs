//! Text of others in a prompt: what a request brings is marked on its way into a template, so that no control token comes of it behind.

use std::ops::Range;

use serde_json::Value as Json;

use crate::tokenizer::Tokenizer;

/// Stand before and after what must stay text. Noncharacters: no text has them, and none gets them past [`clean`]. A template that cuts a
/// text between them loses one of the two; that the other is of its own kind keeps the next text from being read inside out.
const OPEN: char = '\u{FDD0}';
const CLOSE: char = '\u{FDD2}';
/// What [`super::prepare`] finds a place by.
pub(super) const PLACE: char = '\u{FDD1}';

/// Whether a character is a mark, which JSON with escapes must not spell out.
pub(super) fn is_mark(c: char) -> bool {
    matches!(c, OPEN | CLOSE | PLACE)
}

/// A text without the characters that have a meaning here.
fn clean(text: &str) -> String {
    text.replace(is_mark, "")
}

/// Marks what texts of others spell like control tokens of a vocabulary.
#[derive(Clone, Copy)]
pub(super) struct Marker<'t> {
    tokenizer: Option<&'t Tokenizer>,
    /// Spellings that stay as they are.
    exempt: [&'static str; 2],
}

impl<'t> Marker<'t> {
    pub(super) fn new(tokenizer: Option<&'t Tokenizer>) -> Self {
        Self { tokenizer, exempt: [""; 2] }
    }

    /// The same, but for spellings that templates look for.
    pub(super) fn except(self, exempt: [&'static str; 2]) -> Self {
        Self { exempt, ..self }
    }

    /// Puts marks around every control token that a text spells, and around what would be one together with its neighbours.
    pub(super) fn mark(&self, text: &str) -> String {
        let text = clean(text);
        let Some(tokenizer) = self.tokenizer else { return text };
        let spans = tokenizer.spelled_controls(&text);
        if spans.is_empty() {
            return text;
        }
        let (mut out, mut done) = (String::with_capacity(text.len() + 8 * spans.len()), 0);
        for span in spans.into_iter().filter(|span| !self.exempt.contains(&&text[span.clone()])) {
            out.push_str(&text[done..span.start]);
            out.push(OPEN);
            out.push_str(&text[span.clone()]);
            out.push(CLOSE);
            done = span.end;
        }
        out.push_str(&text[done..]);
        out
    }

    /// Marks every string of a value, keys as well.
    pub(super) fn mark_json(&self, value: &Json) -> Json {
        match value {
            Json::String(text) => self.mark(text).into(),
            Json::Array(items) => items.iter().map(|item| self.mark_json(item)).collect(),
            Json::Object(map) => {
                Json::Object(map.iter().map(|(key, value)| (self.mark(key), self.mark_json(value))).collect())
            }
            other => other.clone(),
        }
    }
}

/// A text without marks, and which parts of it stood between them.
pub(super) fn unmarked(text: &str) -> (String, Vec<Range<usize>>) {
    let mut plain = String::with_capacity(text.len());
    let (mut foreign, mut opened, mut free) = (Vec::new(), None, 0);
    for piece in text.split_inclusive(is_mark) {
        let mark = piece.chars().next_back().filter(|c| is_mark(*c));
        plain.push_str(piece.strip_suffix(is_mark).unwrap_or(piece));
        let here = plain.len();
        match mark {
            Some(OPEN) => opened = opened.or(Some(here)),
            // Where a template has cut the opening off, all since the last mark may be foreign.
            Some(CLOSE) => {
                foreign.push(opened.take().unwrap_or(free)..here);
                free = here;
            }
            _ => {}
        }
    }
    foreign.extend(opened.map(|from| from..plain.len()));
    foreign.retain(|span: &Range<usize>| !span.is_empty());
    (plain, foreign)
}

/// A text with places like `{query}`, and what belongs there. What people say stays text, however it is spelled.
pub(super) fn filled(source: &str, texts: &[(&str, &str)], tokenizer: &Tokenizer) -> String {
    let marker = Marker::new(Some(tokenizer));
    let (mut out, mut rest) = (String::new(), source);
    // From left to right, so that what was put in is not looked at again.
    loop {
        let places = texts.iter().filter_map(|(place, text)| Some((rest.find(place)?, *place, *text)));
        let Some((at, place, text)) = places.min_by_key(|(at, ..)| *at) else { break };
        out.push_str(&rest[..at]);
        out.push_str(&marker.mark(text));
        rest = &rest[at + place.len()..];
    }
    out.push_str(rest);
    out
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn marks_that_a_template_has_cut_off_defuse_more_and_never_less() {
        for (text, plain, foreign) in [
            ("a\u{FDD0}x\u{FDD2}b", "axb", vec![(1, 2)]),
            ("a\u{FDD0}x", "ax", vec![(1, 2)]),
            ("ax\u{FDD2}b\u{FDD0}y\u{FDD2}c", "axbyc", vec![(0, 2), (3, 4)]),
            ("\u{FDD0}x\u{FDD0}y\u{FDD2}z", "xyz", vec![(0, 2)]),
            ("\u{FDD0}\u{FDD2}plain\u{FDD1}", "plain", vec![]),
        ] {
            let (found, spans) = unmarked(text);
            let spans: Vec<(usize, usize)> = spans.into_iter().map(|span| (span.start, span.end)).collect();
            assert_eq!((found.as_str(), spans), (plain, foreign), "{text:?}");
        }
    }
}
