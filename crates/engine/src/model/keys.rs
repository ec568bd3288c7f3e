//! Reads the hyper-parameters of an architecture from a file's metadata. Every value is bounded: the file is not trusted.

use std::cell::RefCell;
use std::collections::BTreeSet;

use kiln_gguf::{Gguf, Metadata};

use crate::Error;

/// Most layers of a model.
pub const MOST_LAYERS: usize = 1024;

/// The keys of one architecture.
#[derive(Clone, Copy)]
pub struct Keys<'a> {
    metadata: &'a Metadata,
    prefix: &'a str,
    /// Names of all keys that were asked for, where somebody wants to know.
    asked: Option<&'a RefCell<BTreeSet<String>>>,
}

impl<'a> Keys<'a> {
    /// The keys of a file whose architecture is called `prefix`.
    pub fn new(gguf: &'a Gguf, prefix: &'a str) -> Keys<'a> {
        Keys { metadata: gguf.metadata(), prefix, asked: None }
    }

    /// Keys of the same file that begin with another word.
    pub fn of(&self, prefix: &'a str) -> Keys<'a> {
        Keys { prefix, ..*self }
    }

    /// The same keys; the names of those that are asked for are written down.
    #[must_use]
    pub fn noting(self, asked: &'a RefCell<BTreeSet<String>>) -> Keys<'a> {
        Keys { asked: Some(asked), ..self }
    }

    /// The name of a key: `llama.block_count` for `block_count`.
    pub fn name(&self, suffix: &str) -> String {
        let name = format!("{}.{suffix}", self.prefix);
        if let Some(asked) = self.asked {
            asked.borrow_mut().insert(name.clone());
        }
        name
    }

    fn refuse<T>(&self, suffix: &str, value: impl std::fmt::Display, want: String) -> Result<T, Error> {
        Err(Error::Hyperparameter { key: self.name(suffix), value: value.to_string(), want })
    }

    /// A number from 1 to `most` that must be there.
    pub fn count(&self, suffix: &str, most: usize) -> Result<usize, Error> {
        let value = self.metadata.get_usize(&self.name(suffix))?;
        self.bounded(suffix, value, 1, most)
    }

    /// A number from 1 to `most`; `None` where it is missing or 0, by which files say that there is none.
    pub fn count_opt(&self, suffix: &str, most: usize) -> Result<Option<usize>, Error> {
        match self.metadata.get_usize_opt(&self.name(suffix))? {
            None | Some(0) => Ok(None),
            Some(value) => self.bounded(suffix, value, 1, most).map(Some),
        }
    }

    /// The number of a token, where the file says it here or, for the token that texts begin with, among the keys of its tokenizer.
    pub fn start_token(&self, suffix: &str, vocab: usize) -> Result<u32, Error> {
        let found = match self.metadata.get_usize_opt(&self.name(suffix))? {
            Some(token) => token,
            None => self.metadata.get_usize("tokenizer.ggml.bos_token_id")?,
        };
        let token = self.bounded(suffix, found, 0, vocab.saturating_sub(1))?;
        u32::try_from(token).or_else(|_| self.refuse(suffix, token, "a number of 32 bits".to_owned()))
    }

    fn bounded(&self, suffix: &str, value: usize, least: usize, most: usize) -> Result<usize, Error> {
        if (least..=most).contains(&value) {
            Ok(value)
        } else {
            self.refuse(suffix, value, format!("{least} to {most}"))
        }
    }

    /// A number from `least` to `most` for each layer: one for all, or an array.
    pub fn per_layer(
        &self,
        suffix: &str,
        layers: usize,
        [least, most]: [usize; 2],
    ) -> Result<Option<Vec<usize>>, Error> {
        let Some(values) = self.metadata.get_u32_per_layer_opt(&self.name(suffix), layers)? else { return Ok(None) };
        values.into_iter().map(|v| self.bounded(suffix, v as usize, least, most)).collect::<Result<_, _>>().map(Some)
    }

    /// A switch.
    pub fn flag(&self, suffix: &str, default: bool) -> Result<bool, Error> {
        Ok(self.metadata.get_bool_or(&self.name(suffix), default)?)
    }

    /// A word.
    pub fn text(&self, suffix: &str) -> Result<Option<&'a str>, Error> {
        let key = self.name(suffix);
        Ok(self.metadata.get_str_opt(&key)?)
    }

    /// A number within these bounds, or the default. Infinities and what is not a number are refused whatever the bounds.
    pub fn float(&self, suffix: &str, default: f32, [least, most]: [f32; 2]) -> Result<f32, Error> {
        let value = self.metadata.get_f32_or(&self.name(suffix), default)?;
        if value.is_finite() && (least..=most).contains(&value) {
            Ok(value)
        } else {
            self.refuse(suffix, value, format!("a number from {least} to {most}"))
        }
    }

    /// A number within these bounds for each layer: one for all, or an array.
    pub fn floats(&self, suffix: &str, layers: usize, bounds: [f32; 2]) -> Result<Vec<f32>, Error> {
        if !self.is_array(suffix) {
            return Ok(vec![self.float(suffix, 0.0, bounds)?; layers]);
        }
        let values = self.metadata.get_f32_array(&self.name(suffix))?;
        self.require(values.len() >= layers, suffix, values.len(), &format!("a number for each of {layers} layers"))?;
        match values.iter().find(|v| !v.is_finite() || !(bounds[0]..=bounds[1]).contains(*v)) {
            Some(value) => self.refuse(suffix, value, format!("numbers from {} to {}", bounds[0], bounds[1])),
            None => Ok(values),
        }
    }

    /// The same where they must be there.
    pub fn required_floats(&self, suffix: &str, layers: usize, bounds: [f32; 2]) -> Result<Vec<f32>, Error> {
        if !self.is_array(suffix) {
            self.metadata.get_f32(&self.name(suffix))?;
        }
        self.floats(suffix, layers, bounds)
    }

    /// A factor above 0; `None` where it is missing or 0, by which files say that there is none.
    pub fn factor(&self, suffix: &str) -> Result<Option<f32>, Error> {
        let value = self.float(suffix, 0.0, [0.0, 1e9])?;
        Ok((value != 0.0).then_some(value))
    }

    /// The small number that norms add, which must be there.
    pub fn eps(&self, suffix: &str) -> Result<f32, Error> {
        self.metadata.get_f32(&self.name(suffix))?;
        self.float(suffix, 0.0, [0.0, 1.0])
    }

    /// Whole numbers of a short array, as many as there are.
    pub fn small_array(&self, suffix: &str, len: usize) -> Result<Option<Vec<usize>>, Error> {
        self.per_layer(suffix, len, [0, 1 << 20])
    }

    /// Whole numbers of an array of any length up to `most`; none where the key is missing.
    pub fn list(&self, suffix: &str, most: usize) -> Result<Vec<usize>, Error> {
        if !self.is_array(suffix) {
            return Ok(Vec::new());
        }
        let values = self.metadata.get_i32_array(&self.name(suffix))?;
        self.require(values.len() <= most, suffix, values.len(), &format!("at most {most} numbers"))?;
        let whole = |v: i32| usize::try_from(v).or_else(|_| self.refuse(suffix, v, "numbers of 0 and more".to_owned()));
        values.into_iter().map(whole).collect()
    }

    /// Exactly so many whole numbers of 64 bits.
    pub fn long_array(&self, suffix: &str, len: usize) -> Result<Vec<u64>, Error> {
        let values = self.metadata.get_u64_array(&self.name(suffix))?;
        self.require(values.len() == len, suffix, values.len(), &format!("{len} numbers"))?;
        Ok(values)
    }

    /// Numbers of tokens of an array; none where the key is missing.
    pub fn tokens(&self, suffix: &str, vocab: usize) -> Result<Vec<usize>, Error> {
        let tokens = self.list(suffix, vocab)?;
        match tokens.iter().find(|token| **token >= vocab) {
            Some(token) => self.refuse(suffix, token, format!("tokens of 0 to {}", vocab.saturating_sub(1))),
            None => Ok(tokens),
        }
    }

    /// Switches of an array of bools or of whole numbers.
    pub fn flags(&self, suffix: &str) -> Result<Vec<bool>, Error> {
        let key = self.name(suffix);
        if let Ok(flags) = self.metadata.get_bool_array(&key) {
            return Ok(flags);
        }
        Ok(self.metadata.get_i32_array(&key)?.into_iter().map(|flag| flag != 0).collect())
    }

    /// Whether a key is an array.
    pub fn is_array(&self, suffix: &str) -> bool {
        matches!(self.metadata.value(&self.name(suffix)), Some(kiln_gguf::Value::Array(_)))
    }

    /// `Err` naming the key unless `holds`.
    pub fn require(&self, holds: bool, suffix: &str, value: usize, want: &str) -> Result<(), Error> {
        if holds { Ok(()) } else { self.refuse(suffix, value, want.to_owned()) }
    }
}
