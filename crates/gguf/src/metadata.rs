//! The metadata of a file: an ordered map from key to [`Value`], with getters whose errors name the key.

use std::collections::HashMap;

use crate::error::{Error, Result};
use crate::value::{Array, Strings, Value};

/// Keys and values in the order of the file.
#[derive(Clone, Debug, Default)]
pub struct Metadata {
    entries: Vec<(String, Value)>,
    index: HashMap<String, usize>,
}

impl Metadata {
    /// No keys at all.
    pub fn new() -> Metadata {
        Metadata::default()
    }

    /// How many keys there are.
    pub fn len(&self) -> usize {
        self.entries.len()
    }

    /// Whether there are none.
    pub fn is_empty(&self) -> bool {
        self.entries.is_empty()
    }

    /// Every key and value, in the order of the file.
    pub fn iter(&self) -> impl ExactSizeIterator<Item = (&str, &Value)> {
        self.entries.iter().map(|(key, value)| (key.as_str(), value))
    }

    /// Whether the key is there.
    pub fn contains(&self, key: &str) -> bool {
        self.index.contains_key(key)
    }

    /// The value of a key, of whatever type.
    pub fn value(&self, key: &str) -> Option<&Value> {
        self.index.get(key).map(|&index| &self.entries[index].1)
    }

    /// Sets a key: in its place if it is there, else at the end.
    pub fn set(&mut self, key: impl Into<String>, value: impl Into<Value>) {
        let key = key.into();
        match self.index.get(&key) {
            Some(&index) => self.entries[index].1 = value.into(),
            None => {
                self.index.insert(key.clone(), self.entries.len());
                self.entries.push((key, value.into()));
            }
        }
    }

    /// Removes a key and gives its value back.
    pub fn remove(&mut self, key: &str) -> Option<Value> {
        let removed = self.index.remove(key)?;
        self.index.values_mut().filter(|index| **index > removed).for_each(|index| *index -= 1);
        Some(self.entries.remove(removed).1)
    }

    /// The value of a key through `convert`, which gives `None` for a value of the wrong type.
    fn convert<'a, T>(
        &'a self,
        key: &str,
        expected: &'static str,
        convert: impl FnOnce(&'a Value) -> Option<T>,
    ) -> Result<Option<T>> {
        let Some(value) = self.value(key) else { return Ok(None) };
        convert(value).map(Some).ok_or_else(|| Error::WrongType { key: key.to_owned(), expected, got: describe(value) })
    }

    /// A string that must be UTF-8.
    pub fn get_str(&self, key: &str) -> Result<&str> {
        self.get_str_opt(key)?.ok_or_else(|| missing(key))
    }

    /// As [`Metadata::get_str`], or the default where the key is missing.
    pub fn get_str_or<'a>(&'a self, key: &str, default: &'a str) -> Result<&'a str> {
        Ok(self.get_str_opt(key)?.unwrap_or(default))
    }

    /// As [`Metadata::get_str`], or `None` where the key is missing.
    pub fn get_str_opt(&self, key: &str) -> Result<Option<&str>> {
        self.convert(key, "a UTF-8 string", |value| std::str::from_utf8(value.as_bytes()?).ok())
    }

    /// An array of strings. They are bytes: vocabularies hold tokens that are not UTF-8.
    pub fn get_str_array(&self, key: &str) -> Result<&Strings> {
        self.get_str_array_opt(key)?.ok_or_else(|| missing(key))
    }

    /// As [`Metadata::get_str_array`], or `None` where the key is missing.
    pub fn get_str_array_opt(&self, key: &str) -> Result<Option<&Strings>> {
        self.convert(key, "an array of strings", |value| match value.as_array()? {
            Array::Str(strings) => Some(strings),
            _ => None,
        })
    }

    /// One number for each of `len` layers: an array of that length, or a single number that holds for all of them.
    /// The caller bounds `len`: it usually comes from the same file.
    pub fn get_u32_per_layer(&self, key: &str, len: usize) -> Result<Vec<u32>> {
        self.get_u32_per_layer_opt(key, len)?.ok_or_else(|| missing(key))
    }

    /// As [`Metadata::get_u32_per_layer`], or `None` where the key is missing.
    pub fn get_u32_per_layer_opt(&self, key: &str, len: usize) -> Result<Option<Vec<u32>>> {
        if !matches!(self.value(key), Some(Value::Array(_))) {
            return Ok(self.get_u32_opt(key)?.map(|single| vec![single; len]));
        }
        let list = self.get_u32_array(key)?;
        if list.len() != len {
            return Err(Error::WrongLength { key: key.to_owned(), expected: len, got: list.len() });
        }
        Ok(Some(list))
    }
}

fn missing(key: &str) -> Error {
    Error::MissingKey { key: key.to_owned() }
}

/// Type and value, for errors.
fn describe(value: &Value) -> String {
    match value {
        Value::Array(_) => value.to_string(),
        scalar => format!("{} ({scalar})", scalar.type_name()),
    }
}

macro_rules! getters {
    ($($get:ident $or:ident $opt:ident: $ty:ty, $expected:literal, $convert:expr;)*) => {
        impl Metadata {
            $(
                #[doc = concat!("The key's value: ", $expected, ".")]
                pub fn $get(&self, key: &str) -> Result<$ty> {
                    self.$opt(key)?.ok_or_else(|| missing(key))
                }

                #[doc = concat!("As [`Metadata::", stringify!($get), "`], or the default where the key is missing.")]
                pub fn $or(&self, key: &str, default: $ty) -> Result<$ty> {
                    Ok(self.$opt(key)?.unwrap_or(default))
                }

                #[doc = concat!("As [`Metadata::", stringify!($get), "`], or `None` where the key is missing.")]
                pub fn $opt(&self, key: &str) -> Result<Option<$ty>> {
                    self.convert(key, $expected, $convert)
                }
            )*
        }
    };
}

getters! {
    get_u32 get_u32_or get_u32_opt: u32, "an integer that fits u32", |v| v.as_int()?.try_into().ok();
    get_i32 get_i32_or get_i32_opt: i32, "an integer that fits i32", |v| v.as_int()?.try_into().ok();
    get_u64 get_u64_or get_u64_opt: u64, "an integer that fits u64", |v| v.as_int()?.try_into().ok();
    get_i64 get_i64_or get_i64_opt: i64, "an integer that fits i64", |v| v.as_int()?.try_into().ok();
    get_usize get_usize_or get_usize_opt: usize, "an integer that fits usize", |v| v.as_int()?.try_into().ok();
    get_f32 get_f32_or get_f32_opt: f32, "a float", |v| v.as_float().map(|float| float as f32);
    get_f64 get_f64_or get_f64_opt: f64, "a float", |v| v.as_float();
    get_bool get_bool_or get_bool_opt: bool, "a bool", |v| if let Value::Bool(v) = v { Some(*v) } else { None };
    get_u32_array get_u32_array_or get_u32_array_opt: Vec<u32>, "an array of integers that fit u32",
        |v| v.as_array()?.to_ints();
    get_u64_array get_u64_array_or get_u64_array_opt: Vec<u64>, "an array of integers that fit u64",
        |v| v.as_array()?.to_ints();
    get_i32_array get_i32_array_or get_i32_array_opt: Vec<i32>, "an array of integers that fit i32",
        |v| v.as_array()?.to_ints();
    get_f32_array get_f32_array_or get_f32_array_opt: Vec<f32>, "an array of floats", |v| v.as_array()?.to_f32();
    get_bool_array get_bool_array_or get_bool_array_opt: Vec<bool>, "an array of bools",
        |v| if let Array::Bool(v) = v.as_array()? { Some(v.clone()) } else { None };
}
