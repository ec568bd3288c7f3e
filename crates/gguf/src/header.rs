//! Parses everything of a GGUF file before its tensor data, and checks the tensor table against the file's length.
//! Every count and length is compared with the bytes that are left before anything is allocated for it.

use std::collections::HashMap;
use std::fmt;

use crate::TensorType;
use crate::error::{Error, Result, ShapeError};
use crate::metadata::Metadata;
use crate::tensor::{MAX_DIMS, TensorInfo, layout};
use crate::value::{ARRAY_ID, Array, Strings, Value};

/// Most bytes of a key or a tensor name; the format's own bound for keys.
pub(crate) const MAX_NAME_BYTES: u64 = 65_535;
/// Deepest nesting of arrays.
const MAX_ARRAY_DEPTH: usize = 4;
const DEFAULT_ALIGNMENT: u64 = 32;
/// The format asks for a multiple of 8.
const MIN_ALIGNMENT: u64 = 8;
const MAX_ALIGNMENT: u64 = 1 << 20;

/// Bytes of the shortest metadata entry: an empty key, a type and one byte.
const MIN_ENTRY_BYTES: u64 = 8 + 4 + 1;
/// Bytes of the shortest tensor entry: an empty name, the dimensions' count, one dimension, a type and an offset.
const MIN_TENSOR_BYTES: u64 = 8 + 4 + 8 + 4 + 8;
/// Bytes of the shortest array: element type and count.
const MIN_ARRAY_BYTES: u64 = 4 + 8;

/// Everything of a GGUF file before its tensor data.
#[derive(Clone, Debug)]
pub struct Header {
    /// The version of the format: 2 or 3.
    pub version: u32,
    /// Keys and values.
    pub metadata: Metadata,
    /// The tensor table, in the order of the file. Every tensor lies inside the file and touches no other.
    pub tensors: Vec<TensorInfo>,
    /// The alignment of tensor data.
    pub alignment: u64,
    /// Where tensor data starts in the file.
    pub data_offset: u64,
}

impl Header {
    /// Parses the header of a file. `bytes` is the whole file: the tensors are checked against its length.
    pub fn parse(bytes: &[u8]) -> Result<Header> {
        if bytes.is_empty() {
            return Err(Error::Empty);
        }
        let mut cursor = Cursor { bytes, pos: 0, owner: Owner::Header };
        let version = cursor.version()?;
        let at_tensors = cursor.offset();
        let n_tensors = cursor.u64("tensor count")?;
        let at_entries = cursor.offset();
        let n_entries = cursor.u64("metadata count")?;
        cursor.check_count("metadata entries", at_entries, n_entries, MIN_ENTRY_BYTES)?;
        cursor.check_count("tensors", at_tensors, n_tensors, MIN_TENSOR_BYTES)?;

        let mut metadata = Metadata::new();
        for _ in 0..n_entries {
            let offset = cursor.offset();
            let (key, value) = cursor.entry()?;
            if metadata.contains(key) {
                return Err(Error::DuplicateKey { key: key.to_owned(), offset });
            }
            metadata.set(key, value);
        }
        let alignment = alignment(&metadata)?;

        cursor.owner = Owner::Header;
        // A second look, now that the metadata is known to be out of the way.
        cursor.check_count("tensors", at_tensors, n_tensors, MIN_TENSOR_BYTES)?;
        let mut entries = Vec::with_capacity(n_tensors as usize);
        for _ in 0..n_tensors {
            entries.push(cursor.tensor()?);
        }
        let data_offset = cursor.offset().next_multiple_of(alignment);
        let file_bytes = bytes.len() as u64;
        let mut names: HashMap<&str, ()> = HashMap::with_capacity(entries.len());
        let mut tensors = Vec::with_capacity(entries.len());
        for entry in entries {
            if names.insert(entry.name, ()).is_some() {
                return Err(Error::DuplicateTensor { name: entry.name.to_owned(), offset: entry.offset });
            }
            tensors.push(entry.place(data_offset, alignment, file_bytes)?);
        }
        check_overlap(&tensors)?;
        Ok(Header { version, metadata, tensors, alignment, data_offset })
    }
}

/// The alignment that the metadata asks for.
pub(crate) fn alignment(metadata: &Metadata) -> Result<u64> {
    let value = metadata.get_u64_or("general.alignment", DEFAULT_ALIGNMENT)?;
    if !value.is_power_of_two() || !(MIN_ALIGNMENT..=MAX_ALIGNMENT).contains(&value) {
        return Err(Error::Alignment { value, least: MIN_ALIGNMENT, most: MAX_ALIGNMENT });
    }
    Ok(value)
}

fn check_overlap(tensors: &[TensorInfo]) -> Result<()> {
    let mut by_offset: Vec<&TensorInfo> = tensors.iter().collect();
    by_offset.sort_unstable_by_key(|info| info.offset);
    for pair in by_offset.windows(2) {
        if pair[0].offset + pair[0].bytes as u64 > pair[1].offset {
            let (first, second) = (pair[0].name.clone(), pair[1].name.clone());
            return Err(Error::TensorOverlap { first, second, offset: pair[1].offset });
        }
    }
    Ok(())
}

/// A row of the tensor table as the file has it.
struct Entry<'a> {
    name: &'a str,
    /// Where the row is in the file.
    offset: u64,
    shape: [usize; MAX_DIMS],
    n_dims: usize,
    ty: TensorType,
    bytes: usize,
    /// From the start of the data.
    start: u64,
}

impl Entry<'_> {
    fn place(self, data_offset: u64, alignment: u64, file_bytes: u64) -> Result<TensorInfo> {
        let Entry { offset, start, bytes, .. } = self;
        let name = self.name.to_owned();
        if !start.is_multiple_of(alignment) {
            return Err(Error::TensorMisaligned { name, offset, start, alignment });
        }
        let first = data_offset.checked_add(start);
        match first.and_then(|first| first.checked_add(bytes as u64)) {
            Some(end) if end <= file_bytes => {}
            _ => return Err(Error::TensorOutOfFile { name, offset, start, bytes: bytes as u64, file_bytes }),
        }
        let offset = first.expect("the sum should have been checked just above");
        Ok(TensorInfo { name, shape: self.shape, n_dims: self.n_dims, ty: self.ty, part: 0, offset, bytes })
    }
}

/// Whose bytes are being read, for errors.
#[derive(Clone, Copy)]
enum Owner<'a> {
    Header,
    Key(&'a str),
    Tensor(&'a str),
}

impl fmt::Display for Owner<'_> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Owner::Header => f.write_str("the header"),
            Owner::Key(key) => write!(f, "metadata key `{key}`"),
            Owner::Tensor(name) => write!(f, "tensor `{name}`"),
        }
    }
}

/// Reads little-endian numbers and strings; never past the end.
struct Cursor<'a> {
    bytes: &'a [u8],
    pos: usize,
    owner: Owner<'a>,
}

impl<'a> Cursor<'a> {
    fn offset(&self) -> u64 {
        self.pos as u64
    }

    fn left(&self) -> u64 {
        (self.bytes.len() - self.pos) as u64
    }

    fn take(&mut self, what: &'static str, needed: u64) -> Result<&'a [u8]> {
        let left = self.left();
        if needed > left {
            return Err(Error::Truncated { what, owner: self.owner.to_string(), offset: self.offset(), needed, left });
        }
        let taken = &self.bytes[self.pos..self.pos + needed as usize];
        self.pos += taken.len();
        Ok(taken)
    }

    fn array<const N: usize>(&mut self, what: &'static str) -> Result<[u8; N]> {
        let bytes = self.take(what, N as u64)?;
        Ok(bytes.try_into().expect("take should give as many bytes as it is asked for"))
    }

    fn u32(&mut self, what: &'static str) -> Result<u32> {
        Ok(u32::from_le_bytes(self.array(what)?))
    }

    fn u64(&mut self, what: &'static str) -> Result<u64> {
        Ok(u64::from_le_bytes(self.array(what)?))
    }

    fn string(&mut self, what: &'static str) -> Result<&'a [u8]> {
        let len = self.u64(what)?;
        self.take(what, len)
    }

    /// Refuses a count of items that the remaining bytes cannot hold, at `bytes` bytes each.
    fn check_count(&self, what: &'static str, offset: u64, count: u64, least_bytes: u64) -> Result<()> {
        let (left, most) = (self.left(), self.left() / least_bytes);
        if count > most {
            return Err(Error::TooMany { what, owner: self.owner.to_string(), offset, count, left, most });
        }
        Ok(())
    }

    fn version(&mut self) -> Result<u32> {
        let magic: [u8; 4] = self.array("magic")?;
        if &magic != b"GGUF" {
            let start = &self.bytes[..self.bytes.len().min(16)];
            return Err(Error::Magic { start: String::from_utf8_lossy(start).into_owned(), hint: what_else(start) });
        }
        match self.u32("version")? {
            version @ 2..=3 => Ok(version),
            1 => Err(Error::Version1),
            // A small number read in the wrong order has its low half empty.
            swapped if swapped != 0 && swapped & 0xffff == 0 => Err(Error::BigEndian { version: swapped.swap_bytes() }),
            version => Err(Error::Version { version }),
        }
    }

    /// A key or a tensor name.
    fn name(&mut self, what: &'static str) -> Result<&'a str> {
        let offset = self.offset();
        let len = self.u64(what)?;
        if len > MAX_NAME_BYTES {
            return Err(Error::NameTooLong { what, offset, len, most: MAX_NAME_BYTES });
        }
        let bytes = self.take(what, len)?;
        std::str::from_utf8(bytes).map_err(|_| Error::NameNotUtf8 {
            what,
            offset,
            text: String::from_utf8_lossy(bytes).into_owned(),
        })
    }

    fn entry(&mut self) -> Result<(&'a str, Value)> {
        self.owner = Owner::Header;
        let key = self.name("metadata key")?;
        self.owner = Owner::Key(key);
        let offset = self.offset();
        let value = match self.u32("value type")? {
            0 => Value::U8(u8::from_le_bytes(self.array("value")?)),
            1 => Value::I8(i8::from_le_bytes(self.array("value")?)),
            2 => Value::U16(u16::from_le_bytes(self.array("value")?)),
            3 => Value::I16(i16::from_le_bytes(self.array("value")?)),
            4 => Value::U32(u32::from_le_bytes(self.array("value")?)),
            5 => Value::I32(i32::from_le_bytes(self.array("value")?)),
            6 => Value::F32(f32::from_le_bytes(self.array("value")?)),
            7 => Value::Bool(self.bools(key, 1)?[0]),
            8 => Value::Str(self.string("string")?.to_vec()),
            ARRAY_ID => Value::Array(self.value_array(key, 1)?),
            10 => Value::U64(u64::from_le_bytes(self.array("value")?)),
            11 => Value::I64(i64::from_le_bytes(self.array("value")?)),
            12 => Value::F64(f64::from_le_bytes(self.array("value")?)),
            id => return Err(Error::ValueType { key: key.to_owned(), offset, id }),
        };
        Ok((key, value))
    }

    fn value_array(&mut self, key: &str, depth: usize) -> Result<Array> {
        let offset = self.offset();
        if depth > MAX_ARRAY_DEPTH {
            return Err(Error::TooDeep { key: key.to_owned(), offset, most: MAX_ARRAY_DEPTH });
        }
        let id = self.u32("array type")?;
        let at_count = self.offset();
        let count = self.u64("array length")?;
        let least_bytes = match id {
            0 | 1 | 7 => 1,
            2 | 3 => 2,
            4..=6 => 4,
            8 | 10..=12 => 8,
            ARRAY_ID => MIN_ARRAY_BYTES,
            id => return Err(Error::ValueType { key: key.to_owned(), offset, id }),
        };
        self.check_count("array elements", at_count, count, least_bytes)?;
        Ok(match id {
            0 => Array::U8(self.numbers(count, u8::from_le_bytes)?),
            1 => Array::I8(self.numbers(count, i8::from_le_bytes)?),
            2 => Array::U16(self.numbers(count, u16::from_le_bytes)?),
            3 => Array::I16(self.numbers(count, i16::from_le_bytes)?),
            4 => Array::U32(self.numbers(count, u32::from_le_bytes)?),
            5 => Array::I32(self.numbers(count, i32::from_le_bytes)?),
            6 => Array::F32(self.numbers(count, f32::from_le_bytes)?),
            7 => Array::Bool(self.bools(key, count)?),
            8 => {
                let mut strings = Strings::with_capacity(count as usize);
                for _ in 0..count {
                    strings.push(self.string("string")?);
                }
                Array::Str(strings)
            }
            10 => Array::U64(self.numbers(count, u64::from_le_bytes)?),
            11 => Array::I64(self.numbers(count, i64::from_le_bytes)?),
            12 => Array::F64(self.numbers(count, f64::from_le_bytes)?),
            // Only arrays are left of the types that passed above.
            _ => Array::Array((0..count).map(|_| self.value_array(key, depth + 1)).collect::<Result<_>>()?),
        })
    }

    /// `count` must have been checked against the bytes left.
    fn numbers<T, const N: usize>(&mut self, count: u64, decode: fn([u8; N]) -> T) -> Result<Vec<T>> {
        let bytes = self.take("array", count * N as u64)?;
        Ok(bytes.as_chunks::<N>().0.iter().map(|chunk| decode(*chunk)).collect())
    }

    fn bools(&mut self, key: &str, count: u64) -> Result<Vec<bool>> {
        let start = self.offset();
        let bytes = self.take("bool", count)?;
        if let Some(index) = bytes.iter().position(|&byte| byte > 1) {
            return Err(Error::NotBool { key: key.to_owned(), offset: start + index as u64, value: bytes[index] });
        }
        Ok(bytes.iter().map(|&byte| byte == 1).collect())
    }

    fn tensor(&mut self) -> Result<Entry<'a>> {
        let offset = self.offset();
        self.owner = Owner::Header;
        let name = self.name("tensor name")?;
        self.owner = Owner::Tensor(name);
        let shape_error = |why| Error::TensorShape { name: name.to_owned(), offset, why };
        let n_dims = self.u32("dimension count")?;
        if n_dims as usize > MAX_DIMS {
            return Err(shape_error(ShapeError::Dims { n_dims: n_dims.into() }));
        }
        let n_dims = n_dims as usize;
        let mut dims = [0; MAX_DIMS];
        for dim in &mut dims[..n_dims] {
            *dim = self.u64("dimension")?;
        }
        let at_type = self.offset();
        let id = self.u32("tensor type")?;
        let ty =
            TensorType::from_id(id).ok_or_else(|| Error::TensorType { name: name.to_owned(), offset: at_type, id })?;
        let start = self.u64("data offset")?;
        let (shape, bytes) = layout(ty, &dims[..n_dims]).map_err(shape_error)?;
        Ok(Entry { name, offset, shape, n_dims, ty, bytes, start })
    }
}

/// What a file that is no GGUF probably is, from its first bytes.
fn what_else(start: &[u8]) -> &'static str {
    match start {
        [b'v', b'e', b'r', b's', b'i', b'o', b'n', b' ', ..] => {
            "it looks like a Git LFS pointer: fetch the real file with `git lfs pull`"
        }
        [b'<', ..] => "it looks like a web page: fetch the file itself, not the page about it",
        [b'P', b'K', ..] => "it looks like a PyTorch or zip file: convert the model to GGUF",
        [b'l' | b't' | b'f', b'm' | b'j', b'g' | b'l' | b'a', b'g' | b'm', ..] => {
            "it looks like an older GGML file: convert the model to GGUF"
        }
        [_, _, _, _, _, _, _, _, b'{', ..] => "it looks like a safetensors file: convert the model to GGUF",
        _ => "convert the model to GGUF, or fetch the file again",
    }
}
