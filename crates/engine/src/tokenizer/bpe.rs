//! Byte-pair encoding by a list of merges: over bytes (`gpt2`), or over characters with byte fallback (`gemma4`).

use super::bytes::{self, decode_byte_level};
use super::error::TokenizerError;
use super::hash::FastMap;
use super::limit::EncodeLimit;
use super::merge::{MAX_CACHE_ENTRIES, MAX_CACHED_WORD, Merger, NONE, Span, WordCache};
use super::merges::Merges;
use super::patterns::WholeWords;
use super::pieces::{Index, Pieces};
use super::pre::PreTokenizer;
use super::vocab::{TokenType, Vocab};

/// What a word is made of before any merge.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Alphabet {
    /// Every byte is a symbol; tokens are written in the printable alphabet of byte-level BPE.
    Bytes,
    /// Every character is a symbol; spaces are written U+2581; what has no token becomes byte tokens.
    Characters,
}

/// Symbols are token ids; pieces that only merges name, and bytes without a token, come after the last token.
pub(super) struct Bpe {
    alphabet: Alphabet,
    pre: PreTokenizer,
    n_tokens: u32,
    symbols: Symbols,
    byte_symbols: [u32; 256],
    byte_tokens: [u32; 256],
    merges: Merges,
}

/// Symbols by their spelling: those that texts look up.
#[derive(Default)]
struct Symbols {
    tokens: Index,
    /// Symbols that are no tokens, and tokens that are found by another text than they stand for.
    others: FastMap<Vec<u8>, u32>,
}

impl Symbols {
    fn get(&self, pieces: &Pieces, text: &[u8]) -> Option<u32> {
        self.tokens.get(pieces, text).or_else(|| self.others.get(text).copied())
    }
}

/// Every symbol by its spelling, while the tables are built.
type All = FastMap<Vec<u8>, u32>;

impl Bpe {
    /// Builds the tables of a vocabulary.
    pub(super) fn new(vocab: &Vocab, pieces: &Pieces, alphabet: Alphabet) -> Result<Self, TokenizerError> {
        if vocab.merges.is_empty() {
            return Err(TokenizerError::NoMerges { model: vocab.model.clone() });
        }
        let pre = PreTokenizer::new(match alphabet {
            Alphabet::Bytes => &vocab.pre,
            Alphabet::Characters => "gemma4",
        })?;
        let n_tokens = vocab.tokens.len() as u32;
        let mut bpe = Self {
            alphabet,
            pre,
            n_tokens,
            symbols: Symbols::default(),
            byte_symbols: [NONE; 256],
            byte_tokens: [NONE; 256],
            merges: Merges::new(Vec::new()),
        };
        let mut all = All::default();
        bpe.add_tokens(vocab, &mut all);
        bpe.merges = bpe.merges_of(vocab, &mut all)?;
        bpe.keep(all, pieces);
        Ok(bpe)
    }

    /// Keeps the symbols that texts look up: characters and whole words. Where merges alone make tokens of bytes, these are none.
    fn keep(&mut self, mut all: All, pieces: &Pieces) {
        let characters = self.alphabet == Alphabet::Characters;
        if !characters && self.pre.whole_words != WholeWords::Take {
            return;
        }
        let n_tokens = self.n_tokens;
        let is_character = |text: &[u8]| std::str::from_utf8(text).is_ok_and(|text| text.chars().count() == 1);
        all.retain(|text, symbol| *symbol < n_tokens || (characters && is_character(text)));
        self.symbols.tokens = Index::new(pieces, all.iter().map(|(text, symbol)| (*symbol, text.as_slice())));
        all.retain(|text, symbol| self.symbols.tokens.get(pieces, text) != Some(*symbol));
        all.shrink_to_fit();
        self.symbols.others = all;
    }

    fn spell(&self, piece: &[u8]) -> Option<Vec<u8>> {
        match self.alphabet {
            Alphabet::Bytes => decode_byte_level(piece),
            Alphabet::Characters => Some(piece.to_vec()),
        }
    }

    fn add_tokens(&mut self, vocab: &Vocab, all: &mut All) {
        for ((token, kind), id) in vocab.tokens.iter().zip(&vocab.token_types).zip(0..) {
            if let (Alphabet::Characters, Some(byte)) = (self.alphabet, bytes::parse_byte_token(token)) {
                self.byte_tokens[usize::from(byte)] = id;
            }
            // Control tokens must never come from plain text.
            if matches!(kind, TokenType::Normal | TokenType::UserDefined | TokenType::Unused)
                && let Some(bytes) = self.spell(token).filter(|bytes| !bytes.is_empty())
            {
                all.entry(bytes).or_insert(id);
            }
        }
        if self.alphabet == Alphabet::Bytes {
            for byte in 0..=255u8 {
                let symbol = self.intern(all, vec![byte]);
                self.byte_symbols[usize::from(byte)] = symbol;
                if symbol < self.n_tokens {
                    self.byte_tokens[usize::from(byte)] = symbol;
                }
            }
        }
    }

    /// The symbol of a piece; a new one past the last token where the vocabulary has none.
    fn intern(&self, all: &mut All, bytes: Vec<u8>) -> u32 {
        let next = self.n_tokens + all.len() as u32;
        *all.entry(bytes).or_insert(next)
    }

    fn merges_of(&self, vocab: &Vocab, all: &mut All) -> Result<Merges, TokenizerError> {
        let mut merges = Vec::with_capacity(vocab.merges.len());
        for (index, merge) in vocab.merges.iter().enumerate() {
            // A piece may itself begin with a space in the alphabet of characters.
            let space = merge.iter().skip(1).position(|&byte| byte == b' ').map(|at| at + 1);
            let bad = || TokenizerError::BadMerge { index, merge: String::from_utf8_lossy(merge).into_owned() };
            let (left, right) = merge.split_at(space.ok_or_else(bad)?);
            // A merge of pieces outside the alphabet can never happen.
            let (Some(left), Some(right)) = (self.spell(left), self.spell(&right[1..])) else { continue };
            let whole = [left.as_slice(), right.as_slice()].concat();
            let (left, right, symbol) = (self.intern(all, left), self.intern(all, right), self.intern(all, whole));
            merges.push((left, right, symbol));
        }
        Ok(Merges::new(merges))
    }

    /// Appends the tokens of a text without special tokens.
    pub(super) fn encode(
        &self,
        text: &str,
        pieces: &Pieces,
        limit: &EncodeLimit,
        ids: &mut Vec<u32>,
    ) -> Result<(), TokenizerError> {
        let mut marked = String::new();
        let text = match self.alphabet {
            Alphabet::Bytes => text,
            Alphabet::Characters => {
                bytes::mark_spaces(text, &mut marked);
                &marked
            }
        };
        let mut merger = Merger::default();
        let mut seen: WordCache = FastMap::default();
        for range in self.pre.split(text, limit)? {
            limit.check(ids.len())?;
            let word = &text[range];
            if let Some(&(start, end)) = seen.get(word) {
                ids.extend_from_within(start as usize..end as usize);
                continue;
            }
            let start = ids.len();
            self.encode_word(word, pieces, limit, &mut merger, ids);
            if word.len() < MAX_CACHED_WORD && seen.len() < MAX_CACHE_ENTRIES {
                seen.insert(word, (start as u32, ids.len() as u32));
            }
        }
        Ok(())
    }

    /// Whether every byte of a text becomes a part of some token: no text vanishes, however long it is.
    pub(super) fn keeps_every_byte(&self) -> bool {
        self.byte_tokens.iter().all(|token| *token != NONE)
    }

    fn encode_word(&self, word: &str, pieces: &Pieces, limit: &EncodeLimit, merger: &mut Merger, ids: &mut Vec<u32>) {
        let take_whole = self.pre.whole_words == WholeWords::Take
            || (self.alphabet == Alphabet::Characters && word.starts_with('\n'));
        let whole = || self.symbols.get(pieces, word.as_bytes()).filter(|symbol| *symbol < self.n_tokens);
        if take_whole && let Some(symbol) = whole() {
            ids.push(symbol);
            return;
        }
        merger.spans.clear();
        match self.alphabet {
            Alphabet::Bytes => merger.spans.extend(word.bytes().zip(0..).map(|(byte, start)| Span {
                symbol: self.byte_symbols[usize::from(byte)],
                start,
                len: 1,
            })),
            Alphabet::Characters => merger.spans.extend(word.char_indices().map(|(start, c)| {
                let character = &word.as_bytes()[start..start + c.len_utf8()];
                let symbol = self.symbols.get(pieces, character).unwrap_or(NONE);
                Span { symbol, start: start as u32, len: c.len_utf8() as u32 }
            })),
        }
        merger.run(limit, |left, right| self.merges.get(left.symbol, right.symbol));
        for span in &merger.spans {
            if span.symbol < self.n_tokens {
                ids.push(span.symbol);
                continue;
            }
            // The piece is no token: its bytes stand for it. A byte that has no token either is outside of what the
            // model can read, and is left out, as the reference tokenizers do.
            let bytes = &word.as_bytes()[span.start as usize..(span.start + span.len) as usize];
            ids.extend(bytes.iter().map(|&byte| self.byte_tokens[usize::from(byte)]).filter(|&id| id != NONE));
        }
    }
}
