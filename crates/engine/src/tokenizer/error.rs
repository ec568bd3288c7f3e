//! What can be wrong with a vocabulary or with a call of the tokenizer.

use kiln_system::text::shown;

use super::pre;

/// An error of building or using a [`Tokenizer`](super::Tokenizer).
#[derive(Debug, thiserror::Error)]
pub enum TokenizerError {
    /// The vocabulary has no tokens at all.
    #[error("the vocabulary has no tokens (`tokenizer.ggml.tokens` is empty or missing)")]
    Empty,
    /// The metadata of the model file lacks a key, or has it in another type.
    #[error(transparent)]
    Metadata(#[from] kiln_gguf::Error),
    /// `tokenizer.ggml.model` names a kind of tokenizer that does not exist here.
    #[error("tokenizer model `{}` is not supported; known are gpt2, gemma4, llama, bert, t5 and rwkv", shown(model))]
    UnknownModel {
        /// The name in the file.
        model: String,
    },
    /// `tokenizer.ggml.pre` names an unknown pre-tokeniser.
    #[error(
        "the way this model splits text (`tokenizer.ggml.pre` is `{}`) is not known, and guessing would give wrong tokens; a \
         newer Kiln may know it. Known: {}",
        shown(name),
        pre::known_names()
    )]
    UnknownPre {
        /// The name in the file.
        name: String,
    },
    /// A byte-level vocabulary does not say how text is split into words.
    #[error(
        "the file does not say how text is split (`tokenizer.ggml.pre` is missing): it was converted by an old program; \
         convert the model again. Known: {}",
        pre::known_names()
    )]
    MissingPre,
    /// A pre-tokeniser pattern could not be compiled.
    #[error("the pattern of pre-tokeniser `{}` does not compile: {reason}", shown(name))]
    Pattern {
        /// The pre-tokeniser.
        name: String,
        /// What the regex engine says.
        reason: String,
    },
    /// The text has more tokens than are wanted of it.
    #[error("the text has more than {limit} tokens")]
    OverLimit {
        /// How many were seen before encoding ended.
        tokens: usize,
        /// How many are wanted at most.
        limit: usize,
    },
    /// Nobody waits for the tokens any more.
    #[error("encoding was cancelled")]
    Cancelled,
    /// A pre-tokeniser pattern gave up on a text.
    #[error("splitting the text into words failed: {reason}")]
    Split {
        /// What the regex engine says.
        reason: String,
    },
    /// A per-token list is shorter than the list of tokens.
    #[error("`{list}` has {got} entries for {tokens} tokens")]
    ListLength {
        /// The metadata key.
        list: &'static str,
        /// Its length.
        got: usize,
        /// The number of tokens.
        tokens: usize,
    },
    /// The vocabulary is larger than an id can count.
    #[error("the vocabulary has {got} {what}, more than the limit of {limit}")]
    TooMany {
        /// Tokens, merges or bytes.
        what: &'static str,
        /// How many.
        got: usize,
        /// How many are allowed.
        limit: usize,
    },
    /// A token is absurdly long.
    #[error("token {id} is {got} bytes long, more than the limit of {limit}")]
    TokenTooLong {
        /// Its id.
        id: usize,
        /// Its length in bytes.
        got: usize,
        /// The limit in bytes.
        limit: usize,
    },
    /// A special token's id is not in the vocabulary.
    #[error("the {role} token has id {id}, but the vocabulary has {tokens} tokens")]
    SpecialOutOfRange {
        /// Which special token.
        role: &'static str,
        /// Its id.
        id: u32,
        /// The number of tokens.
        tokens: usize,
    },
    /// The vocabulary asks for a special token around every text and does not say which.
    #[error("`{flag}` is set, but the vocabulary names no {role} token; convert the model again")]
    NoSpecial {
        /// The flag.
        flag: &'static str,
        /// Which special token.
        role: &'static str,
    },
    /// A byte-level vocabulary has no merges.
    #[error("a `{}` vocabulary needs `tokenizer.ggml.merges`, and it is empty or missing", shown(model))]
    NoMerges {
        /// The tokenizer model.
        model: String,
    },
    /// A merge is not two pieces with a space between.
    #[error("merge {index} is not two pieces with a space between: `{}`", shown(merge))]
    BadMerge {
        /// Its index, which is its rank.
        index: usize,
        /// The text.
        merge: String,
    },
    /// A token of an RWKV vocabulary has a broken escape.
    #[error("token {id} has a broken escape at byte {offset}: `{}`", shown(text))]
    BadEscape {
        /// The token.
        id: usize,
        /// Where the escape begins.
        offset: usize,
        /// The text of the token.
        text: String,
    },
    /// The table that normalises a text is damaged.
    #[error("`tokenizer.ggml.precompiled_charsmap` is damaged: {what}")]
    BadCharsmap {
        /// What is wrong.
        what: String,
    },
    /// A token id is not in the vocabulary.
    #[error("token id {id} is out of range: the vocabulary has {tokens} tokens")]
    IdOutOfRange {
        /// The id.
        id: u32,
        /// The number of tokens.
        tokens: usize,
    },
    /// A text is longer than positions can count.
    #[error("the text is {got} bytes long, more than the limit of {limit}")]
    TextTooLong {
        /// Its length.
        got: usize,
        /// The limit.
        limit: usize,
    },
}
