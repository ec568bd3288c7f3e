//! A vocabulary as plain data, and how it is read from the metadata of a GGUF file. Its checks live here; what is built
//! from it lives in `mod.rs`.

use kiln_gguf::{Metadata, Strings};

use super::bytes;
use super::error::TokenizerError;
use super::pre;

/// What a token is for, as the numbers of `tokenizer.ggml.token_type` say.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum TokenType {
    /// A piece of text.
    Normal,
    /// Stands for what the vocabulary has no token for.
    Unknown,
    /// Steers the model and is no text: BOS, EOS, turn marks.
    Control,
    /// A piece of text that is always taken whole, before anything else.
    UserDefined,
    /// A place in the vocabulary that nothing uses.
    Unused,
    /// One byte, written like `<0x0A>`.
    Byte,
}

impl TokenType {
    /// The type of a number in the file. Numbers without a meaning are unused tokens.
    pub fn from_number(number: i32) -> Self {
        match number {
            1 => Self::Normal,
            2 => Self::Unknown,
            3 => Self::Control,
            4 => Self::UserDefined,
            6 => Self::Byte,
            _ => Self::Unused,
        }
    }
}

/// A vocabulary: everything that decides how text becomes tokens. Fill it by hand or by [`Vocab::from_gguf`].
#[derive(Clone, Debug, Default)]
pub struct Vocab {
    /// The kind of tokenizer: `gpt2`, `gemma4`, `llama`, `bert`, `t5` or `rwkv` (`tokenizer.ggml.model`).
    pub model: String,
    /// How a `gpt2` vocabulary splits text into words (`tokenizer.ggml.pre`).
    pub pre: String,
    /// The tokens, spelled as in the file.
    pub tokens: Strings,
    /// What each token is for; empty if the file does not say.
    pub token_types: Vec<TokenType>,
    /// How willingly each token is formed, for `llama`; empty if the file does not say.
    pub scores: Vec<f32>,
    /// Pairs with a space between, best first, for `gpt2` and `gemma4`.
    pub merges: Strings,
    /// Begins a text.
    pub bos: Option<u32>,
    /// Ends a text.
    pub eos: Option<u32>,
    /// Ends a turn.
    pub eot: Option<u32>,
    /// Ends a message that another message of the same turn follows.
    pub eom: Option<u32>,
    /// Stands for what has no token.
    pub unk: Option<u32>,
    /// Fills up.
    pub pad: Option<u32>,
    /// Stands between two texts.
    pub sep: Option<u32>,
    /// Whether [`AddSpecial::Yes`](super::AddSpecial) puts BOS before a text.
    pub add_bos: bool,
    /// Whether [`AddSpecial::Yes`](super::AddSpecial) puts EOS after a text.
    pub add_eos: bool,
    /// Whether the token between two texts comes as well where one ends the first.
    pub add_sep: bool,
    /// Whether a text gets a space in front, for `llama`.
    pub add_space_prefix: bool,
    /// Whether several spaces count as one, for `t5`.
    pub merge_spaces: bool,
    /// The table that normalises a text, for `t5`; empty if there is none.
    pub charsmap: Vec<u8>,
    /// Whether white space after a special token is dropped, as Phi-3 was trained.
    pub trim_after_special: bool,
}

/// The table of `t5`, which files hold as signed or unsigned bytes.
fn charsmap(metadata: &Metadata) -> Result<Vec<u8>, TokenizerError> {
    const KEY: &str = "tokenizer.ggml.precompiled_charsmap";
    let bytes = match metadata.value(KEY).and_then(kiln_gguf::Value::as_array) {
        None => return Ok(Vec::new()),
        Some(kiln_gguf::Array::I8(bytes)) => bytes.iter().map(|byte| *byte as u8).collect(),
        Some(array) => array
            .to_ints::<u8>()
            .ok_or_else(|| TokenizerError::BadCharsmap { what: "it is no list of bytes".into() })?,
    };
    Ok(bytes)
}

/// The keys of the lists that a vocabulary is made of, which take megabytes. Nobody else reads them.
pub(crate) const LISTS: [&str; 5] = [
    "tokenizer.ggml.tokens",
    "tokenizer.ggml.token_type",
    "tokenizer.ggml.scores",
    "tokenizer.ggml.merges",
    "tokenizer.ggml.precompiled_charsmap",
];

const MAX_TOKENS: usize = 1 << 24;
const MAX_TOKEN_BYTES: usize = 1 << 16;
/// Positions and symbols are 32-bit numbers.
const MAX_TOTAL_BYTES: usize = 1 << 30;

impl Vocab {
    /// Reads a vocabulary from the metadata of a model file.
    pub fn from_gguf(metadata: &Metadata) -> Result<Self, TokenizerError> {
        let model = metadata.get_str("tokenizer.ggml.model")?.to_owned();
        let pre = metadata.get_str_or("tokenizer.ggml.pre", "")?.to_owned();
        // Converters write -1 for a token that a model does not have.
        let id = |key: &str| metadata.get_i64_opt(key).map(|id| id.and_then(|id| u32::try_from(id).ok()));
        let id = |role: &str| {
            let id = id(&format!("tokenizer.ggml.{role}_token_id"))?.filter(|&id| id != u32::MAX);
            Ok::<_, TokenizerError>(id)
        };
        let (is_spm, is_gemma) = (model == "llama", model == "gemma4");
        let (is_wpm, is_ugm) = (model == "bert", model == "t5");
        let spm_default = |id: u32| Some(id).filter(|_| is_spm);
        let wpm_default = |id: u32| Some(id).filter(|_| is_wpm);
        let ugm_default = |id: u32| Some(id).filter(|_| is_ugm);
        let add_bos = metadata
            .get_bool_or("tokenizer.ggml.add_bos_token", is_spm || is_wpm || (!is_ugm && pre::default_add_bos(&pre)))?;
        let types = metadata.get_i32_array_or("tokenizer.ggml.token_type", Vec::new())?;
        let name = metadata.get_str_or("general.name", "")?.to_lowercase();
        Ok(Self {
            tokens: metadata.get_str_array("tokenizer.ggml.tokens")?.clone(),
            token_types: types.into_iter().map(TokenType::from_number).collect(),
            scores: metadata.get_f32_array_or("tokenizer.ggml.scores", Vec::new())?,
            merges: metadata.get_str_array_opt("tokenizer.ggml.merges")?.cloned().unwrap_or_default(),
            // Encoders begin by their class token and end by their separator.
            bos: id("bos")?.or(id("cls")?.filter(|_| is_wpm)).or(spm_default(1)).or(wpm_default(101)),
            eos: id("eos")?
                .or(id("seperator")?.filter(|_| is_wpm))
                .or(spm_default(2))
                .or(wpm_default(102))
                .or(ugm_default(1)),
            eot: id("eot")?,
            eom: id("eom")?,
            unk: id("unknown")?.or(spm_default(0)).or(wpm_default(100)).or(ugm_default(2)),
            pad: id("padding")?,
            sep: id("seperator")?.or(wpm_default(102)),
            // Files of Gemma 4 say no and mean yes: the model was trained with BOS.
            add_bos: add_bos || is_gemma,
            add_eos: metadata.get_bool_or("tokenizer.ggml.add_eos_token", is_wpm || is_ugm)?,
            // The vocabularies of BERT end every text by the same token.
            add_sep: metadata.get_bool_or("tokenizer.ggml.add_sep_token", false)? && !is_wpm,
            add_space_prefix: metadata.get_bool_or("tokenizer.ggml.add_space_prefix", is_spm)?,
            merge_spaces: metadata.get_bool_or("tokenizer.ggml.remove_extra_whitespaces", false)?,
            charsmap: charsmap(metadata)?,
            trim_after_special: name.contains("phi-3") || name.contains("phi3"),
            model,
            pre,
        })
    }

    /// Checks the sizes and ids, and fills in what a file may leave out.
    pub(super) fn check(&mut self) -> Result<(), TokenizerError> {
        let tokens = self.tokens.len();
        if tokens == 0 {
            return Err(TokenizerError::Empty);
        }
        let limit = |what, got, limit| match got > limit {
            true => Err(TokenizerError::TooMany { what, got, limit }),
            false => Ok(()),
        };
        limit("tokens", tokens, MAX_TOKENS)?;
        limit("merges", self.merges.len(), MAX_TOKENS)?;
        limit("bytes of tokens", self.tokens.iter().map(<[u8]>::len).sum(), MAX_TOTAL_BYTES)?;
        if let Some((id, token)) = self.tokens.iter().enumerate().find(|(_, token)| token.len() > MAX_TOKEN_BYTES) {
            return Err(TokenizerError::TokenTooLong { id, got: token.len(), limit: MAX_TOKEN_BYTES });
        }
        let ids = [
            ("BOS", self.bos),
            ("EOS", self.eos),
            ("EOT", self.eot),
            ("EOM", self.eom),
            ("unknown", self.unk),
            ("padding", self.pad),
            ("separator", self.sep),
        ];
        for (role, id) in ids {
            if let Some(id) = id.filter(|&id| id as usize >= tokens) {
                return Err(TokenizerError::SpecialOutOfRange { role, id, tokens });
            }
        }
        if self.add_bos && self.bos.is_none() {
            return Err(TokenizerError::NoSpecial { flag: "tokenizer.ggml.add_bos_token", role: "BOS" });
        }
        if self.add_eos && self.eos.is_none() {
            return Err(TokenizerError::NoSpecial { flag: "tokenizer.ggml.add_eos_token", role: "EOS" });
        }
        self.check_types()?;
        self.check_scores()
    }

    fn check_types(&mut self) -> Result<(), TokenizerError> {
        let tokens = self.tokens.len();
        if self.token_types.is_empty() {
            let is_byte = |token: &[u8]| self.model != "gpt2" && bytes::parse_byte_token(token).is_some();
            let kind = |token| if is_byte(token) { TokenType::Byte } else { TokenType::Normal };
            let mut types: Vec<TokenType> = self.tokens.iter().map(kind).collect();
            for id in [self.bos, self.eos, self.eot, self.eom, self.pad].into_iter().flatten() {
                types[id as usize] = TokenType::Control;
            }
            self.token_types = types;
        }
        if self.token_types.len() < tokens {
            let got = self.token_types.len();
            return Err(TokenizerError::ListLength { list: "tokenizer.ggml.token_type", got, tokens });
        }
        Ok(())
    }

    fn check_scores(&mut self) -> Result<(), TokenizerError> {
        let tokens = self.tokens.len();
        if self.scores.is_empty() {
            self.scores = vec![0.0; tokens];
        }
        if self.scores.len() < tokens {
            let got = self.scores.len();
            return Err(TokenizerError::ListLength { list: "tokenizer.ggml.scores", got, tokens });
        }
        Ok(())
    }
}
