//! Constrained output: which tokens may come next so that the answer fits a JSON schema, a regex or a grammar. The work is
//! done by `llguidance`; here are the vocabulary, the limits and the errors.
//!
//! ```no_run
//! # fn main() -> Result<(), Box<dyn std::error::Error>> {
//! # let tokenizer: std::sync::Arc<kiln_engine::tokenizer::Tokenizer> = unreachable!();
//! use kiln_engine::text::constraint::{Constraints, Rule};
//!
//! let constraints = Constraints::new(tokenizer, None, &[])?;
//! let mut constraint = constraints.compile(&Rule::Choice(vec!["yes".into(), "no".into()]))?;
//! let allowed = constraint.mask()?;
//! # Ok(())
//! # }
//! ```

mod gbnf;
mod schema;

use std::collections::HashMap;
use std::panic::{AssertUnwindSafe, catch_unwind};
use std::sync::Arc;

use llguidance::api::TopLevelGrammar;
use llguidance::earley::SlicedBiasComputer;
use llguidance::{Matcher, ParserFactory};
use serde_json::Value as Json;
use toktrie::{InferenceCapabilities, TokEnv, TokRxInfo, TokTrie, TokenizerEnv};

use crate::tokenizer::{AddSpecial, ParseSpecial, TokenType, Tokenizer, TokenizerError};

/// What an answer must be.
#[derive(Clone, Debug, PartialEq)]
pub enum Rule {
    /// Any JSON object.
    JsonObject,
    /// JSON that fits a schema (draft 2020-12).
    JsonSchema(Json),
    /// Text that a regex matches as a whole.
    Regex(String),
    /// A grammar in `llguidance`'s Lark.
    Lark(String),
    /// A grammar as llama.cpp writes it.
    Gbnf(String),
    /// One of these texts.
    Choice(Vec<String>),
}

/// What can be wrong with a rule, or with keeping to it.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
#[allow(missing_docs, reason = "the message of each variant says what its fields are")]
pub enum ConstraintError {
    #[error("Kiln cannot enforce this JSON schema{}: {}", place(pointer), in_words(what))]
    Schema { pointer: String, what: String },
    #[error("Kiln cannot enforce this {kind}: {what}")]
    Grammar { kind: &'static str, what: String },
    #[error("the {kind} is {bytes} bytes long, more than the limit of {limit}")]
    TooLong { kind: &'static str, bytes: usize, limit: usize },
    #[error("the vocabulary cannot be constrained: {0}")]
    Vocabulary(String),
    #[error("the constraint failed while text was written: {0}")]
    Broken(String),
    #[error(transparent)]
    Tokenizer(#[from] TokenizerError),
}

/// Where in a schema something is; nothing for all of it.
fn place(pointer: &str) -> String {
    if pointer.is_empty() { String::new() } else { format!(", at `{pointer}`") }
}

/// What the compiler says of keywords that it does not know, as a sentence.
fn in_words(what: &str) -> String {
    let Some(list) = what.strip_prefix("Unimplemented keys: ") else { return what.to_owned() };
    let keys: Vec<String> = list.split('"').skip(1).step_by(2).map(|key| format!("`{key}`")).collect();
    match keys.as_slice() {
        [key] => format!("the keyword {key} is not supported"),
        keys => format!("the keywords {} are not supported", keys.join(", ")),
    }
}

const MAX_REGEX: usize = 64 << 10;
const MAX_GRAMMAR: usize = 1 << 20;
const MAX_CHOICES: usize = 10_000;
/// The trie counts parents in ten bits.
const MAX_TOKEN: usize = 1000;

/// The tokenizer as `llguidance` wants it.
struct Environment {
    trie: TokTrie,
    tokenizer: Arc<Tokenizer>,
}

impl TokenizerEnv for Environment {
    fn tok_trie(&self) -> &TokTrie {
        &self.trie
    }

    fn tokenize_bytes(&self, bytes: &[u8]) -> Vec<u32> {
        let plain = |text: &str| self.tokenizer.encode(text, AddSpecial::No, ParseSpecial::No).ok();
        let ids = std::str::from_utf8(bytes).ok().and_then(plain);
        // A text in the middle gets no space in front, which some vocabularies would add; then the trie's own way is right.
        ids.filter(|ids| self.trie.decode(ids) == bytes).unwrap_or_else(|| self.trie.greedy_tokenize(bytes))
    }
}

/// Compiles rules for one vocabulary.
pub struct Constraints {
    factory: ParserFactory,
    /// Tokens that stand for the same bytes as an earlier one: `(token, the earlier one)`.
    doubles: Arc<HashMap<u32, u32>>,
    n_vocab: usize,
}

impl Constraints {
    /// Prepares a vocabulary; takes some tenths of a second. `n_vocab` is the number of logits where it is not the number
    /// of tokens; `ends` are the tokens that end a text, beside those of the vocabulary.
    pub fn new(tokenizer: Arc<Tokenizer>, n_vocab: Option<usize>, ends: &[u32]) -> Result<Self, ConstraintError> {
        let n_vocab = n_vocab.unwrap_or(tokenizer.n_tokens());
        let mut words: Vec<Vec<u8>> = Vec::with_capacity(n_vocab);
        let (mut first, mut doubles) = (HashMap::new(), HashMap::new());
        for id in 0..n_vocab as u32 {
            let word = word(&tokenizer, id)?;
            if word.is_empty() {
                words.push(word);
            } else if let Some(&earlier) = first.get(&word) {
                doubles.insert(id, earlier);
                words.push(Vec::new());
            } else {
                first.insert(word.clone(), id);
                words.push(word);
            }
        }
        let mut ends = ends.to_vec();
        ends.extend_from_slice(tokenizer.end_ids());
        ends.retain(|id| (*id as usize) < n_vocab);
        ends.sort_unstable();
        ends.dedup();
        let eos = tokenizer.vocab().eos.filter(|id| ends.contains(id)).or(ends.first().copied());
        let eos = eos.ok_or_else(|| ConstraintError::Vocabulary("it has no token that ends a text".into()))?;
        let factory = catch_unwind(AssertUnwindSafe(|| {
            let trie = TokTrie::from(&TokRxInfo::new(n_vocab as u32, eos), &words).with_eos_tokens(&ends);
            let env: TokEnv = Arc::new(Environment { trie, tokenizer });
            let capabilities = InferenceCapabilities { ff_tokens: true, ..InferenceCapabilities::default() };
            ParserFactory::new(&env, capabilities, &SlicedBiasComputer::general_slices())
        }));
        let mut factory = factory
            .map_err(|_| ConstraintError::Vocabulary("its tokens do not fit into a trie".into()))?
            .map_err(|error| ConstraintError::Vocabulary(error.to_string()))?;
        factory.quiet();
        let limits = factory.limits_mut();
        limits.max_lexer_states = 50_000;
        // Every key that may come next is a few of these.
        limits.max_items_in_row = 8 * schema::MAX_KEYS;
        // The message would hold what was written so far.
        limits.verbose_errors = false;
        Ok(Self { factory, doubles: Arc::new(doubles), n_vocab })
    }

    /// Compiles a rule.
    pub fn compile(&self, rule: &Rule) -> Result<Constraint, ConstraintError> {
        let grammar = |kind, what| ConstraintError::Grammar { kind, what };
        match rule {
            Rule::JsonObject => self.compile_schema(&serde_json::json!({"type": "object"})),
            Rule::JsonSchema(schema) => self.compile_schema(schema),
            Rule::Regex(regex) => {
                limit("regex", regex.len(), MAX_REGEX)?;
                self.matcher(TopLevelGrammar::from_regex(regex)).map_err(|what| grammar("regex", about_regex(what)))
            }
            Rule::Lark(lark) => {
                limit("grammar", lark.len(), MAX_GRAMMAR)?;
                self.matcher(TopLevelGrammar::from_lark(lark.clone())).map_err(|what| grammar("grammar", what))
            }
            Rule::Gbnf(source) => {
                limit("grammar", source.len(), MAX_GRAMMAR)?;
                let lark = gbnf::to_lark(source).map_err(|what| grammar("grammar", what))?;
                self.matcher(TopLevelGrammar::from_lark(lark)).map_err(|what| grammar("grammar", what))
            }
            Rule::Choice(choices) => {
                if choices.is_empty() || choices.len() > MAX_CHOICES {
                    let what = format!("it has {} choices, 1 to {MAX_CHOICES} are allowed", choices.len());
                    return Err(grammar("choice", what));
                }
                limit("choice", choices.iter().map(String::len).sum(), MAX_GRAMMAR)?;
                let quoted: Vec<String> = choices.iter().map(|text| Json::from(text.as_str()).to_string()).collect();
                let lark = format!("start: CHOICE\nCHOICE: {}\n", quoted.join(" | "));
                self.matcher(TopLevelGrammar::from_lark(lark)).map_err(|what| grammar("choice", what))
            }
        }
    }

    fn compile_schema(&self, schema: &Json) -> Result<Constraint, ConstraintError> {
        let error = |problem: schema::Problem| ConstraintError::Schema { pointer: problem.pointer, what: problem.what };
        schema::check(schema).map_err(error)?;
        let compile = |schema: &Json| self.matcher(TopLevelGrammar::from_json_schema(schema::prepared(schema)));
        compile(schema).map_err(|what| error(schema::locate(schema, what, |part| compile(part).err())))
    }

    fn matcher(&self, grammar: TopLevelGrammar) -> Result<Constraint, String> {
        let parser = catch_unwind(AssertUnwindSafe(|| self.factory.create_parser(grammar)));
        let parser = parser.map_err(|_| "the compiler gave up".to_owned())?;
        let matcher = Matcher::new(parser);
        if let Some(error) = matcher.get_error() {
            return Err(one_line(&error));
        }
        let mut constraint = Constraint { matcher, doubles: Arc::clone(&self.doubles), n_vocab: self.n_vocab };
        // A rule that nothing fits is told before anything is written.
        match constraint.mask() {
            Ok(_) => Ok(constraint),
            Err(ConstraintError::Broken(why)) if why.starts_with("NoExtension") => Err("no text fits it".into()),
            Err(error) => Err(error.to_string()),
        }
    }
}

/// What is wrong with a regex, without its place in the grammar that was made of it, which nobody wrote.
fn about_regex(what: String) -> String {
    match what.rsplit_once("regex parse error: ") {
        Some((_, why)) => why.to_owned(),
        None => what,
    }
}

fn limit(kind: &'static str, bytes: usize, limit: usize) -> Result<(), ConstraintError> {
    match bytes > limit {
        true => Err(ConstraintError::TooLong { kind, bytes, limit }),
        false => Ok(()),
    }
}

/// Texts as grammars in Lark have them. Control tokens are no letters there: they stand for themselves, by their numbers.
pub struct Words {
    /// The control tokens, the longest first: one may be the beginning of another.
    controls: Vec<(String, u32)>,
}

impl Words {
    /// For the texts of one vocabulary.
    pub fn new(tokenizer: &Tokenizer) -> Self {
        let is_control = |(id, kind): (usize, &TokenType)| (*kind == TokenType::Control).then_some(id as u32);
        let ids = tokenizer.vocab().token_types.iter().enumerate().filter_map(is_control);
        let text = |id: u32| String::from_utf8(tokenizer.piece(id).ok()?.to_vec()).ok().filter(|text| !text.is_empty());
        let mut controls: Vec<(String, u32)> = ids.filter_map(|id| Some((text(id)?, id))).collect();
        controls.sort_by_key(|(text, _)| std::cmp::Reverse(text.len()));
        Self { controls }
    }

    /// A text that is to be written as it is.
    pub fn write(&self, text: &str) -> String {
        let (mut parts, mut plain, mut at) = (Vec::new(), 0, 0);
        while let Some(next) = text[at..].chars().next() {
            // Of those that begin here the longest, which comes first.
            let Some((control, id)) = self.controls.iter().find(|(control, _)| text[at..].starts_with(control)) else {
                at += next.len_utf8();
                continue;
            };
            if at > plain {
                parts.push(Json::from(&text[plain..at]).to_string());
            }
            parts.push(format!("<[{id}]>"));
            at += control.len();
            plain = at;
        }
        if plain < text.len() || parts.is_empty() {
            parts.push(Json::from(&text[plain..]).to_string());
        }
        parts.join(" ")
    }
}

/// Errors come with contexts of many lines.
fn one_line(error: &str) -> String {
    let mut lines = error.lines().map(str::trim).filter(|line| !line.is_empty());
    let line = lines.next().unwrap_or("unknown");
    // What is wrong with a regex stands below a picture of it.
    let reason = lines.find_map(|line| line.strip_prefix("error: ")).filter(|_| line.ends_with(':'));
    [line, reason.unwrap_or_default()].join(" ").trim_end().chars().take(300).collect()
}

/// The bytes of a token for the trie: control tokens behind a mark, so that no text makes them; nothing for tokens that
/// are never written.
fn word(tokenizer: &Tokenizer, id: u32) -> Result<Vec<u8>, ConstraintError> {
    if id as usize >= tokenizer.n_tokens() {
        return Ok(Vec::new());
    }
    let piece = tokenizer.piece(id)?;
    if piece.len() > MAX_TOKEN {
        return Ok(Vec::new());
    }
    Ok(match tokenizer.vocab().token_types[id as usize] {
        TokenType::Normal | TokenType::UserDefined | TokenType::Byte => piece.to_vec(),
        TokenType::Control | TokenType::Unknown => [&[TokTrie::SPECIAL_TOKEN_MARKER], piece].concat(),
        TokenType::Unused => Vec::new(),
    })
}

/// A rule, and how far a text has come in it.
pub struct Constraint {
    matcher: Matcher,
    doubles: Arc<HashMap<u32, u32>>,
    n_vocab: usize,
}

impl Constraint {
    /// The tokens that may come next, one bit each, the lowest first. End tokens are among them once the text may end.
    pub fn mask(&mut self) -> Result<Vec<u32>, ConstraintError> {
        let mask = self.matcher.compute_mask_or_eos().map_err(broken)?;
        let mut words = mask.as_slice().to_vec();
        words.resize(self.n_vocab.div_ceil(32), 0);
        for (double, earlier) in self.doubles.iter() {
            let bit = words[*earlier as usize / 32] >> (earlier % 32) & 1;
            words[*double as usize / 32] |= bit << (double % 32);
        }
        if words.iter().all(|word| *word == 0) {
            return Err(ConstraintError::Broken("no token of the vocabulary can continue it".into()));
        }
        Ok(words)
    }

    /// A token was chosen.
    pub fn accept(&mut self, token: u32) -> Result<(), ConstraintError> {
        let token = self.doubles.get(&token).copied().unwrap_or(token);
        if self.matcher.is_stopped() && self.matcher.get_error().is_none() {
            // After the end only end tokens come.
            return Ok(());
        }
        self.matcher.consume_token(token).map_err(broken)?;
        let reason = self.matcher.stop_reason();
        match reason.is_ok() {
            true => Ok(()),
            false => Err(ConstraintError::Broken(reason.to_string())),
        }
    }

    /// Tokens that must come next whatever the model thinks; they can be taken without asking it. Each is still to be
    /// accepted.
    pub fn forced(&mut self) -> Vec<u32> {
        self.matcher.compute_ff_tokens()
    }

    /// How many of these tokens would be accepted, one after the other.
    pub fn check(&mut self, tokens: &[u32]) -> Result<usize, ConstraintError> {
        let tokens: Vec<u32> = tokens.iter().map(|token| self.doubles.get(token).copied().unwrap_or(*token)).collect();
        self.matcher.validate_tokens(&tokens).map_err(broken)
    }

    /// Takes back the last tokens.
    pub fn rollback(&mut self, tokens: usize) -> Result<(), ConstraintError> {
        self.matcher.rollback(tokens).map_err(broken)
    }

    /// Whether nothing more may come but an end token.
    pub fn is_done(&self) -> bool {
        self.matcher.is_stopped()
    }

    /// Whether the text may end here.
    pub fn may_end(&mut self) -> bool {
        self.matcher.is_accepting().unwrap_or(false)
    }

    /// The same rule at the same place, for another text on another thread.
    pub fn fork(&self) -> Self {
        Self { matcher: self.matcher.deep_clone(), doubles: Arc::clone(&self.doubles), n_vocab: self.n_vocab }
    }
}

fn broken(error: impl std::fmt::Display) -> ConstraintError {
    ConstraintError::Broken(one_line(&error.to_string()))
}

/// What a request of the scheduler takes.
impl crate::run::Constraint for Constraint {
    fn mask(&mut self) -> Result<Vec<u32>, String> {
        Self::mask(self).map_err(|error| error.to_string())
    }

    fn accept(&mut self, token: u32) -> Result<(), String> {
        Self::accept(self, token).map_err(|error| error.to_string())
    }

    fn forced(&mut self) -> Vec<u32> {
        Self::forced(self)
    }

    fn is_complete(&mut self) -> bool {
        self.is_done()
    }

    fn fork(&self) -> Box<dyn crate::run::Constraint> {
        Box::new(Self::fork(self))
    }
}

#[cfg(test)]
mod tests;
