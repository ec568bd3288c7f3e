//! The values of GGUF metadata: scalars, strings and arrays. How keys find them lives in [`crate::metadata`].
//!
//! Strings are bytes: keys and tensor names must be UTF-8, but real vocabularies hold tokens that are cut inside a
//! character, and a file must not be refused for them.

use std::borrow::Cow;
use std::fmt;
use std::sync::Arc;

/// One metadata value, with the type it has in the file.
#[derive(Clone, Debug, PartialEq)]
#[allow(missing_docs, reason = "the names are the format's own")]
pub enum Value {
    U8(u8),
    I8(i8),
    U16(u16),
    I16(i16),
    U32(u32),
    I32(i32),
    F32(f32),
    Bool(bool),
    Str(Vec<u8>),
    Array(Array),
    U64(u64),
    I64(i64),
    F64(f64),
}

/// An array value; all elements have one type, which an empty array has too.
#[derive(Clone, Debug, PartialEq)]
#[allow(missing_docs, reason = "the names are the format's own")]
pub enum Array {
    U8(Vec<u8>),
    I8(Vec<i8>),
    U16(Vec<u16>),
    I16(Vec<i16>),
    U32(Vec<u32>),
    I32(Vec<i32>),
    F32(Vec<f32>),
    Bool(Vec<bool>),
    Str(Strings),
    Array(Vec<Array>),
    U64(Vec<u64>),
    I64(Vec<i64>),
    F64(Vec<f64>),
}

/// Many strings in one allocation: a vocabulary has a quarter of a million of them. Those who clone it share it.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Strings(Arc<Joined>);

#[derive(Clone, Debug, Default, PartialEq, Eq)]
struct Joined {
    bytes: Vec<u8>,
    /// Where each string ends in `bytes`.
    ends: Vec<usize>,
}

impl Strings {
    pub(crate) fn with_capacity(strings: usize) -> Strings {
        Strings(Arc::new(Joined { bytes: Vec::new(), ends: Vec::with_capacity(strings) }))
    }

    /// Adds a string at the end.
    pub fn push(&mut self, string: &[u8]) {
        let joined = Arc::make_mut(&mut self.0);
        joined.bytes.extend_from_slice(string);
        joined.ends.push(joined.bytes.len());
    }

    /// How many strings there are.
    pub fn len(&self) -> usize {
        self.0.ends.len()
    }

    /// Whether there are none.
    pub fn is_empty(&self) -> bool {
        self.0.ends.is_empty()
    }

    /// The bytes of string `index`; not always UTF-8.
    pub fn get(&self, index: usize) -> Option<&[u8]> {
        let Joined { bytes, ends } = &*self.0;
        let end = *ends.get(index)?;
        let start = if index == 0 { 0 } else { ends[index - 1] };
        Some(&bytes[start..end])
    }

    /// String `index`, with U+FFFD for bytes that are not UTF-8.
    pub fn text(&self, index: usize) -> Option<Cow<'_, str>> {
        self.get(index).map(String::from_utf8_lossy)
    }

    /// The bytes of every string, in order.
    pub fn iter(&self) -> impl ExactSizeIterator<Item = &[u8]> {
        (0..self.len()).map(|index| self.get(index).expect("index should be below len"))
    }
}

impl<S: AsRef<[u8]>> FromIterator<S> for Strings {
    fn from_iter<I: IntoIterator<Item = S>>(strings: I) -> Strings {
        let mut all = Strings::default();
        strings.into_iter().for_each(|string| all.push(string.as_ref()));
        all
    }
}

pub(crate) const ARRAY_ID: u32 = 9;

impl Value {
    /// The id of the value's type in a file.
    pub(crate) fn type_id(&self) -> u32 {
        match self {
            Value::U8(_) => 0,
            Value::I8(_) => 1,
            Value::U16(_) => 2,
            Value::I16(_) => 3,
            Value::U32(_) => 4,
            Value::I32(_) => 5,
            Value::F32(_) => 6,
            Value::Bool(_) => 7,
            Value::Str(_) => 8,
            Value::Array(_) => ARRAY_ID,
            Value::U64(_) => 10,
            Value::I64(_) => 11,
            Value::F64(_) => 12,
        }
    }

    /// The value as an integer, if it is one of any width.
    pub fn as_int(&self) -> Option<i128> {
        Some(match *self {
            Value::U8(v) => v.into(),
            Value::I8(v) => v.into(),
            Value::U16(v) => v.into(),
            Value::I16(v) => v.into(),
            Value::U32(v) => v.into(),
            Value::I32(v) => v.into(),
            Value::U64(v) => v.into(),
            Value::I64(v) => v.into(),
            _ => return None,
        })
    }

    /// The value as a number with a fraction, if it is a float of either width.
    pub fn as_float(&self) -> Option<f64> {
        match *self {
            Value::F32(v) => Some(v.into()),
            Value::F64(v) => Some(v),
            _ => None,
        }
    }

    /// The bytes of a string value.
    pub fn as_bytes(&self) -> Option<&[u8]> {
        if let Value::Str(bytes) = self { Some(bytes) } else { None }
    }

    /// The array, if the value is one.
    pub fn as_array(&self) -> Option<&Array> {
        if let Value::Array(array) = self { Some(array) } else { None }
    }

    /// The name of the value's type.
    pub fn type_name(&self) -> &'static str {
        match self {
            Value::Array(array) => array.type_name(),
            scalar => SCALAR_NAMES[scalar.type_id() as usize],
        }
    }
}

/// By type id; the entry for arrays stands for arrays of arrays.
const SCALAR_NAMES: [&str; 13] =
    ["u8", "i8", "u16", "i16", "u32", "i32", "f32", "bool", "a string", "an array", "u64", "i64", "f64"];
const ARRAY_NAMES: [&str; 13] = [
    "an array of u8",
    "an array of i8",
    "an array of u16",
    "an array of i16",
    "an array of u32",
    "an array of i32",
    "an array of f32",
    "an array of bool",
    "an array of strings",
    "an array of arrays",
    "an array of u64",
    "an array of i64",
    "an array of f64",
];

impl Array {
    /// The id of the elements' type in a file.
    pub(crate) fn type_id(&self) -> u32 {
        match self {
            Array::U8(_) => 0,
            Array::I8(_) => 1,
            Array::U16(_) => 2,
            Array::I16(_) => 3,
            Array::U32(_) => 4,
            Array::I32(_) => 5,
            Array::F32(_) => 6,
            Array::Bool(_) => 7,
            Array::Str(_) => 8,
            Array::Array(_) => ARRAY_ID,
            Array::U64(_) => 10,
            Array::I64(_) => 11,
            Array::F64(_) => 12,
        }
    }

    /// The name of the array's type.
    pub fn type_name(&self) -> &'static str {
        ARRAY_NAMES[self.type_id() as usize]
    }

    /// How many elements it has.
    pub fn len(&self) -> usize {
        match self {
            Array::U8(v) => v.len(),
            Array::I8(v) => v.len(),
            Array::U16(v) => v.len(),
            Array::I16(v) => v.len(),
            Array::U32(v) => v.len(),
            Array::I32(v) => v.len(),
            Array::F32(v) => v.len(),
            Array::Bool(v) => v.len(),
            Array::Str(v) => v.len(),
            Array::Array(v) => v.len(),
            Array::U64(v) => v.len(),
            Array::I64(v) => v.len(),
            Array::F64(v) => v.len(),
        }
    }

    /// Whether it has none.
    pub fn is_empty(&self) -> bool {
        self.len() == 0
    }

    /// The elements as integers of one width, or `None` where they are no integers or one does not fit.
    pub fn to_ints<T: TryFrom<i128>>(&self) -> Option<Vec<T>> {
        fn cast<S: Copy + Into<i128>, T: TryFrom<i128>>(elements: &[S]) -> Option<Vec<T>> {
            elements.iter().map(|&element| T::try_from(element.into()).ok()).collect()
        }
        match self {
            Array::U8(v) => cast(v),
            Array::I8(v) => cast(v),
            Array::U16(v) => cast(v),
            Array::I16(v) => cast(v),
            Array::U32(v) => cast(v),
            Array::I32(v) => cast(v),
            Array::U64(v) => cast(v),
            Array::I64(v) => cast(v),
            _ => None,
        }
    }

    /// The elements as f32, or `None` where they are no floats.
    pub fn to_f32(&self) -> Option<Vec<f32>> {
        match self {
            Array::F32(v) => Some(v.clone()),
            Array::F64(v) => Some(v.iter().map(|&element| element as f32).collect()),
            _ => None,
        }
    }
}

/// Scalars and short strings in full; long strings cut; arrays only by type and length.
impl fmt::Display for Value {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        const SHOWN: usize = 64;
        match self {
            Value::F32(v) => v.fmt(f),
            Value::F64(v) => v.fmt(f),
            Value::Bool(v) => v.fmt(f),
            Value::Str(bytes) if bytes.len() > SHOWN => {
                write!(f, "{:?}... ({} bytes)", String::from_utf8_lossy(&bytes[..SHOWN]), bytes.len())
            }
            Value::Str(bytes) => write!(f, "{:?}", String::from_utf8_lossy(bytes)),
            Value::Array(array) => write!(f, "{} of length {}", array.type_name(), array.len()),
            integer => integer.as_int().expect("every other type should be an integer").fmt(f),
        }
    }
}

macro_rules! from {
    ($($from:ty => |$v:ident| $value:expr;)*) => {
        $(impl From<$from> for Value {
            fn from($v: $from) -> Value {
                $value
            }
        })*
    };
}

from! {
    u8 => |v| Value::U8(v);
    i8 => |v| Value::I8(v);
    u16 => |v| Value::U16(v);
    i16 => |v| Value::I16(v);
    u32 => |v| Value::U32(v);
    i32 => |v| Value::I32(v);
    f32 => |v| Value::F32(v);
    bool => |v| Value::Bool(v);
    u64 => |v| Value::U64(v);
    i64 => |v| Value::I64(v);
    f64 => |v| Value::F64(v);
    &str => |v| Value::Str(v.as_bytes().to_vec());
    String => |v| Value::Str(v.into_bytes());
    Array => |v| Value::Array(v);
    Strings => |v| Value::Array(Array::Str(v));
    Vec<u32> => |v| Value::Array(Array::U32(v));
    Vec<i32> => |v| Value::Array(Array::I32(v));
    Vec<f32> => |v| Value::Array(Array::F32(v));
    Vec<bool> => |v| Value::Array(Array::Bool(v));
}
