//! Slots in host memory: what the references compute on, and where cases keep their data.

use std::ops::Range;
use std::sync::Arc;

use half::{bf16, f16};
use kiln_gguf::{Shared, TensorType, quant};
use kiln_system::pages::Pages;

use crate::mul_mat_vec::cpu_interleaved::Interleaved;
use crate::operation::rows_apart;
use crate::rope::Angles;
use crate::tensor::{Slot, Tensor};

/// The bytes of every slot, by slot number.
#[derive(Clone, Debug, Default)]
pub struct HostMemory {
    /// The bytes of each slot.
    pub slots: Vec<Vec<u8>>,
    /// Slots that are pieces of others, by slot number; shorter than `slots` where the last ones are not.
    pub places: Vec<Option<Place>>,
    /// Slots whose bytes lie in a file and are only read, by slot number; shorter than `slots` where the last ones do not.
    pub files: Vec<Option<Shared>>,
    /// Vectors that operations compute in, kept for the next one.
    pub spare: Spare,
    /// The matrices of slots whose rows were interleaved.
    pub interleaved: InterleavedSlots,
    /// Angles that the next layer may need again.
    pub angles: KeptAngles,
}

/// The RoPE angles of the last call.
#[derive(Clone, Debug, Default)]
pub struct KeptAngles(pub(crate) Option<Arc<Angles>>);

/// Matrices whose rows were interleaved, by slot number ([`HostMemory::interleave`]).
#[derive(Clone, Debug, Default)]
pub struct InterleavedSlots(Vec<Option<Arc<Interleaved>>>);

/// Interleaves the rows of several slots into one piece of memory: small matrices of their own would lie in small pages.
#[derive(Debug, Default)]
pub struct Repacker {
    pages: Option<Pages>,
    used: usize,
    /// Slots that were interleaved, the type and length of their rows, and where these lie.
    made: Vec<(Slot, TensorType, usize, Range<usize>)>,
}

impl Repacker {
    /// Bytes that a slot takes whose rows have `k` elements, if it is interleaved on this machine; else none.
    pub fn room(ty: TensorType, k: usize, bytes: usize) -> usize {
        Interleaved::room(ty, k, bytes).unwrap_or(0)
    }

    /// Room for slots that take this many bytes together. Where there is none, nothing will be interleaved.
    pub fn new(room: usize) -> Repacker {
        Repacker { pages: if room > 0 { Pages::new(room) } else { None }, ..Repacker::default() }
    }

    /// Interleaves the rows of a slot, if products of its type are faster so on this machine and there is room: says whether it did.
    pub fn interleave(&mut self, slot: Slot, ty: TensorType, k: usize, bytes: &[u8]) -> bool {
        let (Some(room), Some(pages)) = (Interleaved::room(ty, k, bytes.len()), &mut self.pages) else { return false };
        let range = self.used..self.used + room;
        let Some(to) = pages.bytes_mut().get_mut(range.clone()) else { return false };
        Interleaved::interleave(ty, k, bytes, to);
        self.used = range.end;
        self.made.push((slot, ty, k, range));
        true
    }
}

/// Vectors that were used and may be used again: pages of new ones are made and cleared by the system one by one, which takes
/// a tenth of a prompt's time.
#[derive(Clone, Debug, Default)]
pub struct Spare(Vec<Vec<f32>>);

impl Spare {
    /// The most vectors that are kept.
    const MOST: usize = 24;

    /// A vector of this length; it holds anything.
    pub(crate) fn take(&mut self, len: usize) -> Vec<f32> {
        match self.0.iter().position(|vector| vector.len() == len) {
            Some(found) => self.0.swap_remove(found),
            None => vec![0.0; len],
        }
    }

    /// Keeps a vector; the one that was kept longest goes where there are too many.
    pub(crate) fn give(&mut self, vector: Vec<f32>) {
        if self.0.len() == Self::MOST {
            self.0.remove(0);
        }
        self.0.push(vector);
    }
}

/// A piece of a slot that stands for another one.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Place {
    /// The slot it lies in, which is no piece itself.
    pub slot: Slot,
    /// Its first byte there.
    pub offset: usize,
    /// Number of bytes.
    pub bytes: usize,
}

impl HostMemory {
    /// Interleaves rows of a slot together, of `k` elements each, if products of its type are faster so on this machine: says whether it
    /// did. Products and rows that are read as floats come from there then; other operations read
    /// the slot's bytes, which stay as they are.
    pub fn interleave(&mut self, slot: Slot, ty: TensorType, k: usize) -> bool {
        let mut repacker = Repacker::new(Repacker::room(ty, k, self.bytes(slot).len()));
        let done = repacker.interleave(slot, ty, k, self.bytes(slot));
        self.put_interleaved(repacker);
        done
    }

    /// The same with what was interleaved with others.
    pub fn put_interleaved(&mut self, repacker: Repacker) {
        let Repacker { pages: Some(pages), made, .. } = repacker else { return };
        let (pages, InterleavedSlots(slots)) = (Arc::new(pages), &mut self.interleaved);
        for (Slot(slot), ty, k, range) in made {
            let at = slot as usize;
            slots.resize(slots.len().max(at + 1), None);
            slots[at] = Some(Arc::new(Interleaved::new(ty, k, Arc::clone(&pages), range)));
        }
    }

    /// The interleaved rows of a tensor's slot, if all of its matrices are whole parts of that.
    pub(crate) fn interleaved(&self, tensor: &Tensor) -> Option<&Interleaved> {
        let interleaved = self.interleaved.0.get(tensor.slot.0 as usize)?.as_deref()?;
        let (row, part) = (tensor.row_bytes(), 16 * tensor.row_bytes());
        let outer = |d: usize| tensor.shape[d] == 1 || tensor.stride[d].is_multiple_of(part);
        let whole = tensor.stride[1] == row && tensor.shape[1].is_multiple_of(16) && tensor.offset.is_multiple_of(part);
        (interleaved.is_of(tensor.ty, tensor.shape[0]) && whole && outer(2) && outer(3)).then_some(interleaved)
    }

    /// The bytes of a slot.
    pub fn bytes(&self, slot: Slot) -> &[u8] {
        if let Some(Some(file)) = self.files.get(slot.0 as usize) {
            return file;
        }
        match self.places.get(slot.0 as usize) {
            Some(Some(place)) => &self.slots[place.slot.0 as usize][place.offset..][..place.bytes],
            _ => &self.slots[slot.0 as usize],
        }
    }

    /// The bytes of a slot, to be written.
    pub fn bytes_mut(&mut self, slot: Slot) -> &mut [u8] {
        match self.places.get(slot.0 as usize) {
            Some(Some(place)) => &mut self.slots[place.slot.0 as usize][place.offset..][..place.bytes],
            _ => &mut self.slots[slot.0 as usize],
        }
    }

    /// Every element in index order (dimension 0 fastest), dequantised. Integers are given as they are.
    pub fn read(&self, tensor: &Tensor) -> Vec<f64> {
        let mut out = Vec::with_capacity(tensor.len());
        self.for_each_row(tensor, |row, stride| read_row(tensor, row, stride, &mut out));
        out
    }

    /// Writes every element in index order, converted to the tensor's type.
    pub fn write(&mut self, tensor: &Tensor, values: &[f64]) {
        assert_eq!(values.len(), tensor.len(), "write: values for every element of {tensor}");
        let bytes = self.bytes_mut(tensor.slot);
        let mut values = values.chunks_exact(tensor.shape[0].max(1));
        for i in rows_apart(tensor.shape) {
            let row = values.next().expect("one chunk for every row");
            write_row(tensor, &mut bytes[tensor.row_offset(i)..], row);
        }
    }

    fn for_each_row(&self, tensor: &Tensor, mut each: impl FnMut(&[u8], usize)) {
        let bytes = self.bytes(tensor.slot);
        for i in rows_apart(tensor.shape) {
            each(&bytes[tensor.row_offset(i)..], tensor.stride[0]);
        }
    }
}

fn read_row(tensor: &Tensor, row: &[u8], stride: usize, out: &mut Vec<f64>) {
    let n = tensor.shape[0];
    let at = |i: usize, len: usize| &row[i * stride..i * stride + len];
    match tensor.ty {
        TensorType::F32 => out.extend((0..n).map(|i| f64::from(f32::from_le_bytes(array(at(i, 4)))))),
        TensorType::F16 => out.extend((0..n).map(|i| f64::from(f16::from_le_bytes(array(at(i, 2)))))),
        TensorType::BF16 => out.extend((0..n).map(|i| f64::from(bf16::from_le_bytes(array(at(i, 2)))))),
        TensorType::F64 => out.extend((0..n).map(|i| f64::from_le_bytes(array(at(i, 8))))),
        TensorType::I8 => out.extend((0..n).map(|i| f64::from(i8::from_le_bytes(array(at(i, 1)))))),
        TensorType::I16 => out.extend((0..n).map(|i| f64::from(i16::from_le_bytes(array(at(i, 2)))))),
        TensorType::I32 => out.extend((0..n).map(|i| f64::from(i32::from_le_bytes(array(at(i, 4)))))),
        TensorType::I64 => out.extend((0..n).map(|i| i64::from_le_bytes(array(at(i, 8))) as f64)),
        block => {
            assert_eq!(stride, block.block_bytes(), "blocks of a {block} row lie side by side");
            let mut values = vec![0.0f32; n];
            quant::dequantise(block, &row[..tensor.row_bytes()], &mut values).expect("a row of whole blocks");
            out.extend(values.into_iter().map(f64::from));
        }
    }
}

fn write_row(tensor: &Tensor, row: &mut [u8], values: &[f64]) {
    let stride = tensor.stride[0];
    let mut put = |i: usize, bytes: &[u8]| row[i * stride..i * stride + bytes.len()].copy_from_slice(bytes);
    for (i, &v) in values.iter().enumerate() {
        match tensor.ty {
            TensorType::F32 => put(i, &(v as f32).to_le_bytes()),
            TensorType::F16 => put(i, &f16::from_f64(v).to_le_bytes()),
            TensorType::BF16 => put(i, &bf16::from_f64(v).to_le_bytes()),
            TensorType::F64 => put(i, &v.to_le_bytes()),
            TensorType::I8 => put(i, &(v as i8).to_le_bytes()),
            TensorType::I16 => put(i, &(v as i16).to_le_bytes()),
            TensorType::I32 => put(i, &(v as i32).to_le_bytes()),
            TensorType::I64 => put(i, &(v as i64).to_le_bytes()),
            block => {
                let values: Vec<f32> = values.iter().map(|&v| v as f32).collect();
                let out = &mut row[..tensor.row_bytes()];
                quant::quantise(block, &values, values.len(), None, out).expect("a type with a quantiser");
                return;
            }
        }
    }
}

fn array<const N: usize>(bytes: &[u8]) -> [u8; N] {
    bytes.try_into().expect("a slice of N bytes")
}
