//! Special tokens: finding them in a text before anything else happens to it, and telling which of them end a generation.

use std::ops::Range;

use super::ParseSpecial;
use super::trie::Trie;
use super::vocab::{TokenType, Vocab};

/// A part of a text.
#[derive(Debug, PartialEq, Eq)]
pub(super) enum Part<'t> {
    /// Text without special tokens.
    Text(&'t str),
    /// A special token.
    Token(u32),
}

#[derive(Clone, Copy)]
struct Special {
    id: u32,
    /// User-defined tokens are text and found always; the others only when asked for.
    is_text: bool,
    trim_after: bool,
}

/// Finds special tokens, at each place the longest.
pub(super) struct SpecialTokens {
    trie: Trie<Special>,
    /// What is left of control tokens behind the signs that they begin with: `|im_end|>` and `im_end|>` of `<|im_end|>`. A template
    /// that writes `<` before a text of others would make a token of it.
    rests: Trie<()>,
    /// The longest spelling in bytes.
    longest: usize,
}

/// Whether a text is a plain word. Words are parts of many control tokens, and templates compare them.
fn is_word(text: &str) -> bool {
    text.chars().all(|c| c.is_alphanumeric() || matches!(c, '_' | '-' | ' '))
}

impl SpecialTokens {
    /// Collects the special tokens of a vocabulary.
    pub(super) fn new(vocab: &Vocab) -> Self {
        let (mut trie, mut rests, mut longest) = (Trie::new(), Trie::new(), 0);
        for ((token, kind), id) in vocab.tokens.iter().zip(&vocab.token_types).zip(0..) {
            let is_text = match kind {
                TokenType::UserDefined => true,
                TokenType::Control | TokenType::Unknown => false,
                TokenType::Normal | TokenType::Unused | TokenType::Byte => continue,
            };
            // A token that is not text cannot occur in one, and matching it could cut a character in two.
            if let Ok(text) = std::str::from_utf8(token) {
                longest = longest.max(text.len());
                let signs = text.char_indices().take_while(|(_, c)| !c.is_alphanumeric() && !is_text);
                signs.for_each(|(at, c)| rests.insert(&token[at + c.len_utf8()..], ()));
                let trim_after = vocab.trim_after_special && !matches!(token, b"<unk>" | b"<s>" | b"<|endoftext|>");
                trie.insert(token, Special { id, is_text, trim_after });
            }
        }
        Self { trie, rests, longest }
    }

    /// The parts of a text that spell a control token, or would together with what may stand before or behind the text: in order,
    /// apart from each other.
    pub(super) fn spelled(&self, text: &str) -> Vec<Range<usize>> {
        let bytes = text.as_bytes();
        let mut spans: Vec<Range<usize>> = Vec::new();
        let rest = match self.rests.begins_longer(bytes) {
            true => Some(bytes.len()),
            false => self.rests.longest(bytes, |_, ()| true).map(|(len, ())| len),
        };
        spans.extend(rest.filter(|len| !is_word(&text[..*len])).map(|len| 0..len));
        let mut at = 0;
        while at < bytes.len() {
            let found = self.trie.longest(&bytes[at..], |_, special: Special| !special.is_text);
            let len = found.map(|(len, _)| len);
            spans.extend(len.map(|len| at..at + len));
            at += len.unwrap_or(1);
        }
        let near = (bytes.len().saturating_sub(self.longest)..bytes.len()).filter(|at| text.is_char_boundary(*at));
        let begins = |at: &usize| self.trie.begins_longer(&bytes[*at..]) && !is_word(&text[*at..]);
        spans.extend(near.into_iter().find(begins).map(|at| at..bytes.len()));
        // The first may reach over others, and so may the last.
        let mut apart: Vec<Range<usize>> = Vec::with_capacity(spans.len());
        spans.sort_by_key(|span| span.start);
        for span in spans {
            match apart.last_mut().filter(|last| span.start < last.end) {
                Some(last) => last.end = last.end.max(span.end),
                None => apart.push(span),
            }
        }
        apart
    }

    /// Cuts a text at its special tokens. Control tokens that touch one of `foreign`, parts of the text in order, stay text.
    pub(super) fn split<'t>(&self, text: &'t str, parse: ParseSpecial, foreign: &[Range<usize>]) -> Vec<Part<'t>> {
        let bytes = text.as_bytes();
        let mut parts = Vec::new();
        let (mut done, mut at, mut foreign) = (0, 0, foreign);
        while at < bytes.len() {
            if !self.trie.may_start(bytes[at]) {
                at += 1;
                continue;
            }
            while let [first, rest @ ..] = foreign
                && first.end <= at
            {
                foreign = rest;
            }
            let own = |len: usize| foreign.first().is_none_or(|first| first.start >= at + len);
            let accept = |len, special: Special| special.is_text || (parse == ParseSpecial::Yes && own(len));
            let Some((len, special)) = self.trie.longest(&bytes[at..], accept) else {
                at += 1;
                continue;
            };
            if at > done {
                parts.push(Part::Text(&text[done..at]));
            }
            parts.push(Part::Token(special.id));
            at += len;
            if special.trim_after {
                at = text.len() - text[at..].trim_start().len();
            }
            done = at;
        }
        if done < text.len() {
            parts.push(Part::Text(&text[done..]));
        }
        parts
    }
}

/// Texts of tokens after which every known model is done. Files often name only one of a model's end tokens.
const END_TEXTS: &[&str] = &[
    "<|eot_id|>",
    "<|im_end|>",
    "<|end|>",
    "<|return|>",
    "<|call|>",
    "<|flush|>",
    "<|calls|>",
    "<end_of_turn>",
    "<|endoftext|>",
    "</s>",
    "<|eom_id|>",
    "<EOT>",
    "_<EOT>",
    "[EOT]",
    "[EOS]",
    "<|end_of_text|>",
    "<end_of_utterance>",
    "<eos>",
    "<turn|>",
    "<|tool_response>",
    "<｜end▁of▁sentence｜>",
    "<|fim_pad|>",
    "<|fim_repo|>",
    "<|repo_name|>",
    "<|file_sep|>",
];

/// The ids of all tokens that end a generation, sorted. Tokens that look like an end but are marked as text become
/// control tokens.
pub(super) fn end_ids(vocab: &mut Vocab) -> Vec<u32> {
    let mut ends: Vec<(u32, &str)> = Vec::new();
    for (token, id) in vocab.tokens.iter().zip(0..) {
        let Some(text) = END_TEXTS.iter().find(|text| text.as_bytes() == token) else { continue };
        // These two are also plain text in vocabularies trained on HTML.
        let ambiguous = matches!(*text, "</s>" | "<eos>");
        if !(ambiguous && vocab.token_types[id as usize] == TokenType::Normal) {
            ends.push((id, text));
        }
    }
    let has = |wanted: &str| ends.iter().any(|(_, text)| *text == wanted);
    // Where other tokens end a turn, `<|end|>` ends only one of its messages, and `</s>` is a leftover.
    let end_is_inner = (has("<|return|>") && has("<|call|>")) || (has("<|flush|>") && has("<|calls|>"));
    let s_is_leftover = has("<|tool_response>");
    ends.retain(|(_, text)| match *text {
        "<|end|>" => !end_is_inner,
        "</s>" => !s_is_leftover,
        _ => true,
    });
    let mut ids: Vec<u32> = ends.iter().map(|(id, _)| *id).collect();
    for id in &ids {
        vocab.token_types[*id as usize] = TokenType::Control;
    }
    ids.extend([vocab.eos, vocab.eot, vocab.eom].into_iter().flatten());
    ids.sort_unstable();
    ids.dedup();
    ids
}
