//! Text to token ids and back, from the vocabulary inside a model file. Each kind of vocabulary has its own file; special
//! tokens and decoding are the same for all. Chat templates do not live here.
//!
//! ```
//! use kiln_engine::tokenizer::{AddSpecial, ParseSpecial, ShowSpecial, Tokenizer, Vocab};
//!
//! let mut vocab = Vocab { model: "gpt2".into(), pre: "gpt-2".into(), ..Vocab::default() };
//! vocab.tokens = ["h", "i", "hi", "Ġ"].into_iter().collect();
//! vocab.merges = ["h i"].into_iter().collect();
//! let tokenizer = Tokenizer::new(vocab)?;
//! let ids = tokenizer.encode("hi hi", AddSpecial::Yes, ParseSpecial::No)?;
//! assert_eq!(ids, [2, 3, 2]);
//! assert_eq!(tokenizer.decode(&ids, ShowSpecial::No)?, "hi hi");
//! # Ok::<(), kiln_engine::tokenizer::TokenizerError>(())
//! ```

mod bpe;
mod bytes;
mod error;
mod hash;
mod limit;
mod merge;
mod merges;
mod patterns;
mod pieces;
mod pre;
mod rwkv;
mod special;
mod spm;
mod stream;
mod trie;
mod ugm;
mod vocab;
mod wpm;

pub use error::TokenizerError;
pub use limit::EncodeLimit;
pub use stream::TextStream;
pub(crate) use vocab::LISTS;
pub use vocab::{TokenType, Vocab};

use std::borrow::Cow;
use std::ops::Range;

use kiln_gguf::{Metadata, Strings};

use bpe::{Alphabet, Bpe};
use pieces::{Pieces, Spelling};
use rwkv::Rwkv;
use special::{Part, SpecialTokens};
use spm::Spm;
use ugm::Ugm;
use wpm::Wpm;

/// Whether BOS and EOS are put around a text where the vocabulary wants them.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum AddSpecial {
    /// As the vocabulary says.
    Yes,
    /// Never: the text is a part of something, or has them already (a rendered chat template has).
    No,
}

/// Whether control tokens are recognised in a text.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum ParseSpecial {
    /// `<|im_end|>` becomes the token. Only for text that the user cannot forge.
    Yes,
    /// `<|im_end|>` is ten characters of text.
    No,
}

/// Whether control tokens are written when tokens become text.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum ShowSpecial {
    /// They are written as they are spelled.
    Yes,
    /// They are left out.
    No,
}

/// What becomes of the space that a SentencePiece text begins with.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum LeadingSpace {
    /// It stays: the text continues another.
    Keep,
    /// It goes, if the vocabulary is of the kind that puts one there: the text stands alone.
    Strip,
}

enum Model {
    Bpe(Box<Bpe>),
    Spm(Box<Spm>),
    Rwkv(Box<Rwkv>),
    Wpm(Box<Wpm>),
    Ugm(Box<Ugm>),
}

/// A vocabulary ready for use. It can be shared between threads.
pub struct Tokenizer {
    /// Without the lists that everything below was made of: they take as much memory again.
    vocab: Vocab,
    model: Model,
    special: SpecialTokens,
    pieces: Pieces,
    end_ids: Vec<u32>,
    /// Bytes of the longest token.
    longest: usize,
}

/// Positions in a text are 32-bit numbers, and marking spaces can make a text three times as long.
const MAX_TEXT_BYTES: usize = 1 << 30;
/// How much longer a text may be than its longest tokens, where parts of it may vanish.
const VANISHING: usize = 64;

impl Tokenizer {
    /// Builds the tokenizer of a model file.
    pub fn from_gguf(metadata: &Metadata) -> Result<Self, TokenizerError> {
        Self::new(Vocab::from_gguf(metadata)?)
    }

    /// For a model that is only given ids of tokens: each is spelled by its number, and texts mean nothing to it.
    pub fn of_ids(tokens: usize) -> Result<Self, TokenizerError> {
        let mut vocab = Vocab { model: "llama".into(), ..Vocab::default() };
        let spelled: Vec<String> = (0..tokens).map(|id| format!("<{id}>")).collect();
        vocab.tokens = spelled.iter().map(String::as_str).collect();
        Self::new(vocab)
    }

    /// Builds the tokenizer of a vocabulary.
    pub fn new(mut vocab: Vocab) -> Result<Self, TokenizerError> {
        vocab.check()?;
        let end_ids = special::end_ids(&mut vocab);
        let spelling = match vocab.model.as_str() {
            "gpt2" => Spelling::ByteLevel,
            "gemma4" | "llama" | "bert" | "t5" => Spelling::Marked,
            "rwkv" => Spelling::Escaped,
            _ => return Err(TokenizerError::UnknownModel { model: vocab.model }),
        };
        let pieces = Pieces::new(&vocab, spelling)?;
        let model = match vocab.model.as_str() {
            "gpt2" => Model::Bpe(Box::new(Bpe::new(&vocab, &pieces, Alphabet::Bytes)?)),
            "gemma4" => Model::Bpe(Box::new(Bpe::new(&vocab, &pieces, Alphabet::Characters)?)),
            "llama" => Model::Spm(Box::new(Spm::new(&vocab, &pieces))),
            "bert" => Model::Wpm(Box::new(Wpm::new(&vocab)?)),
            "t5" => Model::Ugm(Box::new(Ugm::new(&vocab)?)),
            _ => Model::Rwkv(Box::new(Rwkv::new(&vocab, pieces.iter()))),
        };
        let special = SpecialTokens::new(&vocab);
        (vocab.tokens, vocab.merges) = (Strings::default(), Strings::default());
        (vocab.scores, vocab.charsmap) = (Vec::new(), Vec::new());
        let longest = pieces.iter().map(|piece| piece.len()).max().unwrap_or(1).max(1);
        Ok(Self { vocab, model, special, pieces, end_ids, longest })
    }

    /// The tokens of a text.
    pub fn encode(&self, text: &str, add: AddSpecial, parse: ParseSpecial) -> Result<Vec<u32>, TokenizerError> {
        self.encode_within(text, add, parse, &EncodeLimit::default())
    }

    /// The same, as far as a limit lets it.
    pub fn encode_within(
        &self,
        text: &str,
        add: AddSpecial,
        parse: ParseSpecial,
        limit: &EncodeLimit,
    ) -> Result<Vec<u32>, TokenizerError> {
        self.encode_parts(text, add, parse, &[], limit)
    }

    /// The tokens of a text that has parts of others in it, in order: no control token comes of these.
    pub fn encode_with_foreign(
        &self,
        text: &str,
        foreign: &[Range<usize>],
        limit: &EncodeLimit,
    ) -> Result<Vec<u32>, TokenizerError> {
        self.encode_parts(text, AddSpecial::No, ParseSpecial::Yes, foreign, limit)
    }

    /// The parts of a text that spell a control token, or would together with what may stand before or behind it: in order.
    pub(crate) fn spelled_controls(&self, text: &str) -> Vec<Range<usize>> {
        self.special.spelled(text)
    }

    fn encode_parts(
        &self,
        text: &str,
        add: AddSpecial,
        parse: ParseSpecial,
        foreign: &[Range<usize>],
        limit: &EncodeLimit,
    ) -> Result<Vec<u32>, TokenizerError> {
        if text.len() > MAX_TEXT_BYTES {
            return Err(TokenizerError::TextTooLong { got: text.len(), limit: MAX_TEXT_BYTES });
        }
        let mut ids = Vec::with_capacity((text.len() / 4).min(limit.tokens.unwrap_or(usize::MAX)) + 2);
        let add = |wanted: bool, id: Option<u32>| id.filter(|_| wanted && add == AddSpecial::Yes);
        ids.extend(add(self.vocab.add_bos, self.vocab.bos));
        let mut after_special = true;
        for part in self.special.split(text, parse, foreign) {
            match part {
                Part::Token(id) => ids.push(id),
                Part::Text(text) => self.encode_text(text, after_special, limit, &mut ids)?,
            }
            limit.check(ids.len())?;
            after_special = matches!(part, Part::Token(_));
        }
        ids.extend(add(self.vocab.add_eos, self.vocab.eos));
        Ok(ids)
    }

    fn encode_text(
        &self,
        text: &str,
        after_special: bool,
        limit: &EncodeLimit,
        ids: &mut Vec<u32>,
    ) -> Result<(), TokenizerError> {
        match &self.model {
            Model::Bpe(bpe) => bpe.encode(text, &self.pieces, limit, ids)?,
            Model::Rwkv(rwkv) => rwkv.encode(text, ids),
            Model::Wpm(wpm) => wpm.encode(text, limit, ids)?,
            Model::Ugm(ugm) => ugm.encode(text, ids),
            Model::Spm(spm) => {
                let mut marked = String::with_capacity(text.len() + text.len() / 2);
                if self.vocab.add_space_prefix && after_special {
                    marked.push(bytes::SPACE_MARK);
                }
                bytes::mark_spaces(text, &mut marked);
                spm.encode(&marked, &self.pieces, limit, ids)?;
            }
        }
        Ok(())
    }

    /// A length in bytes of which no longer text becomes this many tokens or fewer. Where a vocabulary lets parts of a text vanish, or
    /// has one token for unknown words of any length, it is one that no sensible text exceeds.
    pub fn most_bytes(&self, tokens: usize) -> usize {
        let keeps_every_byte = match &self.model {
            Model::Bpe(bpe) => bpe.keeps_every_byte(),
            Model::Spm(spm) => spm.keeps_every_byte(),
            Model::Rwkv(_) => true,
            Model::Wpm(_) | Model::Ugm(_) => false,
        };
        let spare = if keeps_every_byte { 1 } else { VANISHING };
        tokens.saturating_mul(self.longest).saturating_mul(spare).min(MAX_TEXT_BYTES)
    }

    /// The text of some tokens, from its beginning. Bytes that are not UTF-8 become U+FFFD.
    pub fn decode(&self, ids: &[u32], show: ShowSpecial) -> Result<String, TokenizerError> {
        let bytes = self.decode_bytes(ids, show)?;
        Ok(String::from_utf8(bytes).unwrap_or_else(|error| String::from_utf8_lossy(error.as_bytes()).into_owned()))
    }

    /// The bytes of some tokens, from the beginning of a text.
    pub fn decode_bytes(&self, ids: &[u32], show: ShowSpecial) -> Result<Vec<u8>, TokenizerError> {
        let mut bytes = Vec::with_capacity(ids.len() * 4);
        let mut leading = LeadingSpace::Strip;
        for &id in ids {
            self.push_piece(id, show, &mut leading, &mut bytes)?;
        }
        Ok(bytes)
    }

    /// Appends what a token stands for.
    fn push_piece(
        &self,
        id: u32,
        show: ShowSpecial,
        leading: &mut LeadingSpace,
        out: &mut Vec<u8>,
    ) -> Result<(), TokenizerError> {
        let mut piece = self.piece(id)?;
        match self.vocab.token_types[id as usize] {
            TokenType::Control | TokenType::Unknown | TokenType::Unused if show == ShowSpecial::No => return Ok(()),
            TokenType::Control | TokenType::Unknown | TokenType::Unused => {}
            TokenType::Normal | TokenType::UserDefined | TokenType::Byte => {
                if *leading == LeadingSpace::Strip && self.vocab.add_space_prefix {
                    piece = piece.strip_prefix(b" ").unwrap_or(piece);
                }
                *leading = LeadingSpace::Keep;
            }
        }
        out.extend_from_slice(piece);
        Ok(())
    }

    /// The bytes that a token stands for; of a control token, its spelling.
    pub fn piece(&self, id: u32) -> Result<&[u8], TokenizerError> {
        let out_of_range = || TokenizerError::IdOutOfRange { id, tokens: self.pieces.len() };
        self.pieces.get(id).ok_or_else(out_of_range)
    }

    /// The token that is spelled so in the model file, if there is one.
    pub fn token_id(&self, spelling: &str) -> Option<u32> {
        self.pieces.find(spelling.as_bytes(), &self.vocab.token_types)
    }

    /// How the model file spells a token; not always UTF-8.
    pub fn spelling(&self, id: u32) -> Option<Cow<'_, [u8]>> {
        self.pieces.spelled(id, *self.vocab.token_types.get(id as usize)?)
    }

    /// Whether this token ends a generation.
    pub fn is_end(&self, id: u32) -> bool {
        self.end_ids.binary_search(&id).is_ok()
    }

    /// All tokens that end a generation, sorted.
    pub fn end_ids(&self) -> &[u32] {
        &self.end_ids
    }

    /// How many tokens there are.
    pub fn n_tokens(&self) -> usize {
        self.pieces.len()
    }

    /// The vocabulary, with the gaps of the file filled in. It has no texts of tokens, merges and scores any more, nor the table that
    /// normalises a text: what was made of them takes their place.
    pub fn vocab(&self) -> &Vocab {
        &self.vocab
    }
}
