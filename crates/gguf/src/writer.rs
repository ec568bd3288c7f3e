//! Writes GGUF version 3: all at once, or the table first and then the data of one tensor after the other.
//! Files appear under their name only when they are complete.

use std::borrow::Cow;
use std::collections::HashSet;
use std::io::{self, BufWriter, Write};
use std::path::Path;

use kiln_system::files::{Output, Overwrite};

use crate::TensorType;
use crate::error::{Error, Result};
use crate::header::{MAX_NAME_BYTES, alignment};
use crate::metadata::Metadata;
use crate::tensor::layout;
use crate::value::{Array, Value};

const VERSION: u32 = 3;

/// Collects what a file shall hold.
///
/// Give tensors with their data ([`Writer::add`]) and [`Writer::save`] the file, or only [`Writer::declare`] them and
/// [`Writer::start`] a [`Stream`] that takes the data in the same order: then only one piece of it is ever in memory.
/// The key `general.alignment`, if set, is honoured.
#[derive(Clone, Debug, Default)]
pub struct Writer<'a> {
    metadata: Metadata,
    tensors: Vec<Declared<'a>>,
    names: HashSet<String>,
}

#[derive(Clone, Debug)]
struct Declared<'a> {
    name: String,
    dims: Vec<usize>,
    ty: TensorType,
    bytes: usize,
    data: Option<Cow<'a, [u8]>>,
}

impl<'a> Writer<'a> {
    /// A file with this metadata and no tensors yet.
    pub fn new(metadata: Metadata) -> Writer<'a> {
        Writer { metadata, ..Writer::default() }
    }

    /// The metadata, to change it.
    pub fn metadata_mut(&mut self) -> &mut Metadata {
        &mut self.metadata
    }

    /// Adds a tensor whose data comes later, through a [`Stream`]. `dims` has the innermost dimension first.
    pub fn declare(&mut self, name: &str, dims: &[usize], ty: TensorType) -> Result<()> {
        self.push(name, dims, ty, None)
    }

    /// Adds a tensor with its data. `dims` has the innermost dimension first.
    pub fn add(&mut self, name: &str, dims: &[usize], ty: TensorType, data: impl Into<Cow<'a, [u8]>>) -> Result<()> {
        self.push(name, dims, ty, Some(data.into()))
    }

    fn push(&mut self, name: &str, dims: &[usize], ty: TensorType, data: Option<Cow<'a, [u8]>>) -> Result<()> {
        check_name("tensor name", name)?;
        let wide: Vec<u64> = dims.iter().map(|&len| len as u64).collect();
        let (_, bytes) = layout(ty, &wide).map_err(|why| Error::WriteShape { name: name.to_owned(), why })?;
        if let Some(data) = &data {
            check_length(name, bytes, data.len())?;
        }
        if !self.names.insert(name.to_owned()) {
            return Err(Error::WriteTwice { what: "tensor", name: name.to_owned() });
        }
        self.tensors.push(Declared { name: name.to_owned(), dims: dims.to_vec(), ty, bytes, data });
        Ok(())
    }

    /// Writes the file with the data given so far, over a regular file of this name. Every tensor must have come with its
    /// data.
    pub fn save(&self, path: impl AsRef<Path>) -> Result<()> {
        self.save_to(Output::create(path.as_ref(), Overwrite::Yes, &[])?)
    }

    /// As [`Writer::save`], to a file that was opened for it.
    pub fn save_to(&self, output: Output) -> Result<()> {
        let mut stream = self.start_on(output)?;
        for tensor in &self.tensors {
            stream.write_tensor(&tensor.name, tensor.data.as_deref().unwrap_or_default())?;
        }
        stream.finish()
    }

    /// The file with the data given so far, in memory. Every tensor must have come with its data.
    pub fn to_bytes(&self) -> Result<Vec<u8>> {
        let (mut bytes, alignment) = self.header()?;
        for tensor in &self.tensors {
            let data = tensor.data.as_deref().unwrap_or_default();
            check_length(&tensor.name, tensor.bytes, data.len())?;
            bytes.extend_from_slice(data);
            bytes.resize(bytes.len().next_multiple_of(alignment), 0);
        }
        Ok(bytes)
    }

    /// Starts the file, over a regular file of this name: writes everything but the tensor data.
    pub fn start(&self, path: impl AsRef<Path>) -> Result<Stream> {
        self.start_on(Output::create(path.as_ref(), Overwrite::Yes, &[])?)
    }

    /// As [`Writer::start`], in a file that was opened for it.
    pub fn start_on(&self, output: Output) -> Result<Stream> {
        let (header, alignment) = self.header()?;
        let sizes = self.tensors.iter().map(|tensor| (tensor.name.clone(), tensor.bytes)).collect();
        let out = BufWriter::with_capacity(1 << 20, output);
        let mut stream = Stream { out, alignment, sizes, current: 0, written: 0 };
        stream.put(&header)?;
        Ok(stream)
    }

    /// Everything before the tensor data, padded, and the alignment.
    fn header(&self) -> Result<(Vec<u8>, usize)> {
        let alignment = alignment(&self.metadata)?;
        let mut out = Vec::new();
        out.extend_from_slice(b"GGUF");
        out.extend_from_slice(&VERSION.to_le_bytes());
        put_len(&mut out, self.tensors.len());
        put_len(&mut out, self.metadata.len());
        for (key, value) in self.metadata.iter() {
            check_name("metadata key", key)?;
            put_string(&mut out, key.as_bytes());
            out.extend_from_slice(&value.type_id().to_le_bytes());
            put_value(&mut out, value);
        }
        let mut start = 0_u64;
        for tensor in &self.tensors {
            put_string(&mut out, tensor.name.as_bytes());
            out.extend_from_slice(&(tensor.dims.len() as u32).to_le_bytes());
            tensor.dims.iter().for_each(|&len| put_len(&mut out, len));
            out.extend_from_slice(&tensor.ty.id().to_le_bytes());
            out.extend_from_slice(&start.to_le_bytes());
            start = start.saturating_add((tensor.bytes as u64).next_multiple_of(alignment));
        }
        let alignment = alignment as usize;
        out.resize(out.len().next_multiple_of(alignment), 0);
        Ok((out, alignment))
    }
}

/// A file whose header is written and whose tensor data follows, in the declared order. Nothing is seen under the file's
/// name before [`Stream::finish`]; dropped before, it leaves nothing behind.
#[derive(Debug)]
pub struct Stream {
    out: BufWriter<Output>,
    alignment: usize,
    /// Name and bytes of every tensor.
    sizes: Vec<(String, usize)>,
    /// The tensor that is being written.
    current: usize,
    /// How much of it is.
    written: usize,
}

impl Stream {
    /// Writes the data of the next tensor, which must have this name.
    pub fn write_tensor(&mut self, name: &str, data: &[u8]) -> Result<()> {
        let next = self.sizes.get(self.current);
        if let Some((expected, bytes)) = next.filter(|(expected, _)| expected == name) {
            check_length(expected, *bytes, data.len())?;
        }
        self.write_piece(name, data)
    }

    /// Writes the next piece of the data of a tensor; the next tensor follows when all its bytes have come.
    pub fn write_piece(&mut self, name: &str, piece: &[u8]) -> Result<()> {
        let (expected, bytes) = match self.sizes.get(self.current) {
            Some((expected, bytes)) if expected == name => (expected, *bytes),
            other => {
                let expected = other.map_or("the end of the file", |(expected, _)| expected).to_owned();
                return Err(Error::WriteOrder { expected, got: name.to_owned() });
            }
        };
        if piece.len() > bytes - self.written {
            let got = self.written.saturating_add(piece.len());
            return Err(Error::WriteLength { name: expected.clone(), expected: bytes, got });
        }
        self.put(piece)?;
        self.written += piece.len();
        if self.written == bytes {
            let padding = bytes.next_multiple_of(self.alignment) - bytes;
            io::copy(&mut io::Read::take(io::repeat(0), padding as u64), &mut self.out)
                .map_err(|why| self.failed(why))?;
            (self.current, self.written) = (self.current + 1, 0);
        }
        Ok(())
    }

    /// Gives the file its name, when all data has come and is safe on the disk.
    pub fn finish(self) -> Result<()> {
        Ok(self.complete()?.finish()?)
    }

    /// The file with all data in it, still without its name: for several that belong together ([`Output::finish_all`]).
    pub fn complete(mut self) -> Result<Output> {
        if let Some((name, expected)) = self.sizes.get(self.current) {
            return Err(Error::WriteLength { name: name.clone(), expected: *expected, got: self.written });
        }
        self.out.flush().map_err(|why| self.failed(why))?;
        let (output, _) = self.out.into_parts();
        Ok(output)
    }

    fn put(&mut self, bytes: &[u8]) -> Result<()> {
        self.out.write_all(bytes).map_err(|why| self.failed(why))
    }

    fn failed(&self, why: io::Error) -> Error {
        self.out.get_ref().failed(why).into()
    }
}

fn check_name(what: &'static str, name: &str) -> Result<()> {
    if name.len() as u64 > MAX_NAME_BYTES {
        return Err(Error::WriteName { what, name: name.to_owned(), len: name.len(), most: MAX_NAME_BYTES });
    }
    Ok(())
}

fn check_length(name: &str, expected: usize, got: usize) -> Result<()> {
    if expected != got {
        return Err(Error::WriteLength { name: name.to_owned(), expected, got });
    }
    Ok(())
}

fn put_len(out: &mut Vec<u8>, len: usize) {
    out.extend_from_slice(&(len as u64).to_le_bytes());
}

fn put_string(out: &mut Vec<u8>, string: &[u8]) {
    put_len(out, string.len());
    out.extend_from_slice(string);
}

/// The value without its type.
fn put_value(out: &mut Vec<u8>, value: &Value) {
    match value {
        Value::U8(v) => out.push(*v),
        Value::I8(v) => out.extend_from_slice(&v.to_le_bytes()),
        Value::U16(v) => out.extend_from_slice(&v.to_le_bytes()),
        Value::I16(v) => out.extend_from_slice(&v.to_le_bytes()),
        Value::U32(v) => out.extend_from_slice(&v.to_le_bytes()),
        Value::I32(v) => out.extend_from_slice(&v.to_le_bytes()),
        Value::F32(v) => out.extend_from_slice(&v.to_le_bytes()),
        Value::Bool(v) => out.push((*v).into()),
        Value::Str(v) => put_string(out, v),
        Value::Array(v) => put_array(out, v),
        Value::U64(v) => out.extend_from_slice(&v.to_le_bytes()),
        Value::I64(v) => out.extend_from_slice(&v.to_le_bytes()),
        Value::F64(v) => out.extend_from_slice(&v.to_le_bytes()),
    }
}

/// The elements' type, their count and the elements.
fn put_array(out: &mut Vec<u8>, array: &Array) {
    fn put<T: Copy, const N: usize>(out: &mut Vec<u8>, elements: &[T], encode: fn(T) -> [u8; N]) {
        elements.iter().for_each(|&element| out.extend_from_slice(&encode(element)));
    }
    out.extend_from_slice(&array.type_id().to_le_bytes());
    put_len(out, array.len());
    match array {
        Array::U8(v) => out.extend_from_slice(v),
        Array::I8(v) => put(out, v, i8::to_le_bytes),
        Array::U16(v) => put(out, v, u16::to_le_bytes),
        Array::I16(v) => put(out, v, i16::to_le_bytes),
        Array::U32(v) => put(out, v, u32::to_le_bytes),
        Array::I32(v) => put(out, v, i32::to_le_bytes),
        Array::F32(v) => put(out, v, f32::to_le_bytes),
        Array::Bool(v) => put(out, v, |element| [u8::from(element)]),
        Array::Str(v) => v.iter().for_each(|string| put_string(out, string)),
        Array::Array(v) => v.iter().for_each(|inner| put_array(out, inner)),
        Array::U64(v) => put(out, v, u64::to_le_bytes),
        Array::I64(v) => put(out, v, i64::to_le_bytes),
        Array::F64(v) => put(out, v, f64::to_le_bytes),
    }
}
