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
pub use stream::TextStream;
pub(crate) use vocab::LISTS;
pub use vocab::{TokenType, Vocab};

use std::borrow::Cow;

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
}

/// Positions in a text are 32-bit numbers, and marking spaces can make a text three times as long.
const MAX_TEXT_BYTES: usize = 1 << 30;

impl Tokenizer {
    /// Builds the tokenizer of a model file.
    pub fn from_gguf(metadata: &Metadata) -> Result<Self, TokenizerError> {
        Self::new(Vocab::from_gguf(metadata)?)
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
        Ok(Self { vocab, model, special, pieces, end_ids })
    }

    /// The tokens of a text.
    pub fn encode(&self, text: &str, add: AddSpecial, parse: ParseSpecial) -> Result<Vec<u32>, TokenizerError> {
        if text.len() > MAX_TEXT_BYTES {
            return Err(TokenizerError::TextTooLong { got: text.len(), limit: MAX_TEXT_BYTES });
        }
        let mut ids = Vec::with_capacity(text.len() / 4 + 2);
        let add = |wanted: bool, id: Option<u32>| id.filter(|_| wanted && add == AddSpecial::Yes);
        ids.extend(add(self.vocab.add_bos, self.vocab.bos));
        let mut after_special = true;
        for part in self.special.split(text, parse) {
            match part {
                Part::Token(id) => ids.push(id),
                Part::Text(text) => self.encode_text(text, after_special, &mut ids)?,
            }
            after_special = matches!(part, Part::Token(_));
        }
        ids.extend(add(self.vocab.add_eos, self.vocab.eos));
        Ok(ids)
    }

    fn encode_text(&self, text: &str, after_special: bool, ids: &mut Vec<u32>) -> Result<(), TokenizerError> {
        match &self.model {
            Model::Bpe(bpe) => bpe.encode(text, &self.pieces, ids)?,
            Model::Rwkv(rwkv) => rwkv.encode(text, ids),
            Model::Wpm(wpm) => wpm.encode(text, ids)?,
            Model::Ugm(ugm) => ugm.encode(text, ids),
            Model::Spm(spm) => {
                let mut marked = String::with_capacity(text.len() + text.len() / 2);
                if self.vocab.add_space_prefix && after_special {
                    marked.push(bytes::SPACE_MARK);
                }
                bytes::mark_spaces(text, &mut marked);
                spm.encode(&marked, &self.pieces, ids);
            }
        }
        Ok(())
    }

    /// The text of some tokens, from its beginning. Bytes that are not UTF-8 become U+FFFD.
    pub fn decode(&self, ids: &[u32], show: ShowSpecial) -> Result<String, TokenizerError> {
        let mut bytes = Vec::with_capacity(ids.len() * 4);
        let mut leading = LeadingSpace::Strip;
        for &id in ids {
            self.push_piece(id, show, &mut leading, &mut bytes)?;
        }
        Ok(String::from_utf8(bytes).unwrap_or_else(|error| String::from_utf8_lossy(error.as_bytes()).into_owned()))
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
