//! What the tokens of a vocabulary stand for, in one piece of memory, and tokens by their text. How a file spells them is not kept: it
//! follows from what they stand for, but for a few.

use std::borrow::Cow;
use std::hash::{BuildHasher as _, Hasher as _};

use hashbrown::HashTable;

use super::bytes;
use super::error::TokenizerError;
use super::hash::FoldState;
use super::rwkv;
use super::vocab::{TokenType, Vocab};

/// How a vocabulary spells the tokens that are text.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Spelling {
    /// In the printable alphabet of byte-level BPE.
    ByteLevel,
    /// With U+2581 for spaces.
    Marked,
    /// With the escapes of a Python literal.
    Escaped,
}

impl Spelling {
    /// What a token stands for that is spelled so. A byte-level token outside of the alphabet stands for itself.
    fn read(self, id: usize, token: &[u8]) -> Result<Vec<u8>, TokenizerError> {
        Ok(match self {
            Spelling::ByteLevel => bytes::decode_byte_level(token).unwrap_or_else(|| token.to_vec()),
            Spelling::Marked => bytes::unmark_spaces(token),
            Spelling::Escaped => rwkv::unescape(id, token)?,
        })
    }

    /// How a token is spelled as a rule.
    fn write(self, piece: &[u8]) -> Cow<'_, [u8]> {
        match self {
            Spelling::ByteLevel => Cow::Owned(bytes::encode_byte_level(piece).into_bytes()),
            Spelling::Marked => Cow::Owned(bytes::mark_spaces_in(piece)),
            // There is more than one way to escape.
            Spelling::Escaped => Cow::Borrowed(piece),
        }
    }
}

/// The bytes that each token stands for; of a control token, its spelling.
pub(super) struct Pieces {
    bytes: Box<[u8]>,
    /// Where each token ends in `bytes`, of which a vocabulary has less than 2^32.
    ends: Box<[u32]>,
    spelling: Spelling,
    /// Spellings that are not as the rule has them, by token, in order.
    odd: Vec<(u32, Box<[u8]>)>,
}

impl Pieces {
    /// The pieces of a vocabulary that was checked.
    pub(super) fn new(vocab: &Vocab, spelling: Spelling) -> Result<Self, TokenizerError> {
        let (mut joined, mut ends) = (Vec::new(), Vec::with_capacity(vocab.tokens.len()));
        for ((id, token), kind) in vocab.tokens.iter().enumerate().zip(&vocab.token_types) {
            match (kind, bytes::parse_byte_token(token)) {
                (TokenType::Byte, Some(byte)) => joined.push(byte),
                (TokenType::Normal | TokenType::Unused, _) => joined.extend(spelling.read(id, token)?),
                _ => joined.extend_from_slice(token),
            }
            ends.push(joined.len() as u32);
        }
        let mut pieces =
            Self { bytes: joined.into_boxed_slice(), ends: ends.into_boxed_slice(), spelling, odd: Vec::new() };
        for ((token, kind), id) in vocab.tokens.iter().zip(&vocab.token_types).zip(0..) {
            if pieces.spelled(id, *kind).as_deref() != Some(token) {
                pieces.odd.push((id, token.into()));
            }
        }
        Ok(pieces)
    }

    /// How many tokens there are.
    pub(super) fn len(&self) -> usize {
        self.ends.len()
    }

    /// What a token stands for.
    pub(super) fn get(&self, id: u32) -> Option<&[u8]> {
        let id = id as usize;
        let end = *self.ends.get(id)?;
        let start = if id == 0 { 0 } else { self.ends[id - 1] };
        Some(&self.bytes[start as usize..end as usize])
    }

    /// Every piece, in order.
    pub(super) fn iter(&self) -> impl Iterator<Item = &[u8]> {
        (0..).map_while(|id| self.get(id))
    }

    /// How the file spells a token of this kind.
    pub(super) fn spelled(&self, id: u32, kind: TokenType) -> Option<Cow<'_, [u8]>> {
        if let Ok(at) = self.odd.binary_search_by_key(&id, |(id, _)| *id) {
            return Some(Cow::Borrowed(&self.odd[at].1));
        }
        let piece = self.get(id)?;
        Some(match (kind, piece) {
            (TokenType::Byte, [byte]) => Cow::Owned(format!("<0x{byte:02X}>").into_bytes()),
            (TokenType::Normal | TokenType::Unused, _) => self.spelling.write(piece),
            _ => Cow::Borrowed(piece),
        })
    }

    /// The first token that the file spells so.
    pub(super) fn find(&self, spelling: &[u8], kinds: &[TokenType]) -> Option<u32> {
        // What such a token can stand for: only those are spelled to be compared.
        let text = self.spelling.read(0, spelling).ok();
        let byte = bytes::parse_byte_token(spelling).map(|byte| vec![byte]);
        let may_be = |piece: &[u8]| [text.as_deref(), byte.as_deref(), Some(spelling)].contains(&Some(piece));
        let is = |id: &u32| self.spelled(*id, kinds[*id as usize]).as_deref() == Some(spelling);
        self.iter().zip(0..).filter(|(piece, _)| may_be(piece)).map(|(_, id)| id).find(is)
    }

    /// Whether a text is this token, a text in which spaces are marked where tokens have them marked.
    pub(super) fn reads(&self, id: u32, text: &[u8]) -> bool {
        let Some(piece) = self.get(id) else { return false };
        match self.spelling {
            Spelling::Marked => bytes::is_marked(text, piece),
            Spelling::ByteLevel | Spelling::Escaped => text == piece,
        }
    }
}

/// Tokens by their text, which lies in the pieces.
#[derive(Default)]
pub(super) struct Index {
    table: HashTable<u32>,
    state: FoldState,
}

impl Index {
    /// Of tokens with their texts. Of several that read the same the first is found; one that does not read so is left out.
    pub(super) fn new<'t>(pieces: &Pieces, tokens: impl Iterator<Item = (u32, &'t [u8])>) -> Self {
        let (mut index, mut texts) = (Self::default(), Vec::new());
        for (id, text) in tokens {
            if pieces.reads(id, text) {
                texts.push((id, index.hash(text), text));
            }
        }
        // Made for all at once: a table that grows would need the texts of those that are in it.
        index.table = HashTable::with_capacity(texts.len());
        for (id, hash, text) in texts {
            if index.table.find(hash, |id| pieces.reads(*id, text)).is_none() {
                index.table.insert_unique(hash, id, |_| unreachable!("there should be room for all"));
            }
        }
        index
    }

    fn hash(&self, text: &[u8]) -> u64 {
        let mut hasher = self.state.build_hasher();
        hasher.write(text);
        hasher.finish()
    }

    /// The token of a text.
    pub(super) fn get(&self, pieces: &Pieces, text: &[u8]) -> Option<u32> {
        self.table.find(self.hash(text), |id| pieces.reads(*id, text)).copied()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn vocab(tokens: &[(&[u8], TokenType)]) -> Vocab {
        Vocab {
            tokens: tokens.iter().map(|(token, _)| *token).collect(),
            token_types: tokens.iter().map(|(_, kind)| *kind).collect(),
            ..Vocab::default()
        }
    }

    /// Tokens of every kind, as the rule has them and not.
    const TOKENS: [(&[u8], TokenType); 14] = [
        ("Ġa".as_bytes(), TokenType::Normal),
        ("▁a".as_bytes(), TokenType::Normal),
        (b" a", TokenType::Normal),
        (b"a", TokenType::Unused),
        (b"<0x0a>", TokenType::Byte),
        (b"<0x0A>", TokenType::Byte),
        (b"\n", TokenType::Byte),
        (b"<0x0A>", TokenType::Normal),
        ("▁▁".as_bytes(), TokenType::UserDefined),
        (b"<|end|>", TokenType::Control),
        (b"\\x0a", TokenType::Normal),
        (b"\xE2\x96", TokenType::Normal),
        (b"", TokenType::Unknown),
        ("日".as_bytes(), TokenType::Normal),
    ];

    #[test]
    fn tokens_are_spelled_as_in_the_file() {
        let vocab = vocab(&TOKENS);
        for spelling in [Spelling::ByteLevel, Spelling::Marked, Spelling::Escaped] {
            let pieces = Pieces::new(&vocab, spelling).unwrap();
            assert_eq!(pieces.len(), TOKENS.len());
            for ((token, kind), id) in TOKENS.iter().zip(0..) {
                assert_eq!(pieces.spelled(id, *kind).as_deref(), Some(*token), "{spelling:?} {id}");
                let first = TOKENS.iter().position(|(other, _)| other == token).map(|id| id as u32);
                assert_eq!(pieces.find(token, &vocab.token_types), first, "{spelling:?} {id}");
            }
            assert_eq!(pieces.find(b"missing", &vocab.token_types), None);
            assert_eq!((pieces.get(14), pieces.spelled(14, TokenType::Normal)), (None, None));
        }
    }

    #[test]
    fn few_spellings_are_kept() {
        let odd = |spelling| Pieces::new(&vocab(&TOKENS), spelling).unwrap().odd.iter().map(|(id, _)| *id).collect();
        let bytes_in_other_letters = [4, 6];
        let byte_level: Vec<u32> = odd(Spelling::ByteLevel);
        assert_eq!(byte_level, [&[1, 2][..], &bytes_in_other_letters, &[11, 13]].concat());
        let marked: Vec<u32> = odd(Spelling::Marked);
        assert_eq!(marked, [&[2][..], &bytes_in_other_letters].concat());
    }

    #[test]
    fn texts_find_the_first_token_that_reads_so() {
        let vocab = vocab(&TOKENS);
        let pieces = Pieces::new(&vocab, Spelling::Marked).unwrap();
        let index = Index::new(&pieces, (0..).zip(vocab.tokens.iter()).filter(|(id, _)| *id != 0));
        let get = |text: &str| index.get(&pieces, text.as_bytes());
        // No text has a space in it where spaces are marked.
        assert_eq!((get("▁a"), get(" a"), get("a"), get("▁▁")), (Some(1), None, Some(3), Some(8)));
        assert_eq!((get("Ġa"), get("▁"), get("▁ab"), get("日")), (None, None, None, Some(13)));
    }
}
