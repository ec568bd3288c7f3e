//! One model in several files, or in one: tensors are copied as they are, in their order.

use kiln_system::files::Output;

use crate::error::Result;
use crate::metadata::Metadata;
use crate::reader::Gguf;
use crate::split::{KEY_COUNT, KEY_NO, KEY_TENSORS};
use crate::tensor::TensorInfo;
use crate::value::Value;
use crate::writer::Writer;

/// Bytes that are copied at once.
const PIECE: usize = 16 << 20;

/// Where a model is cut.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Cut {
    /// After this many tensors.
    Tensors(usize),
    /// Before a part exceeds this many bytes of tensors. One tensor that is larger is a part of its own.
    Bytes(u64),
}

/// The tensors of each part.
pub fn cut(model: &Gguf, at: Cut) -> Vec<Vec<&TensorInfo>> {
    let mut parts: Vec<Vec<&TensorInfo>> = vec![Vec::new()];
    let mut bytes = 0;
    for tensor in model.tensors() {
        let padded = (tensor.bytes as u64).next_multiple_of(model.alignment());
        let last = parts.last().map_or(0, Vec::len);
        let full = match at {
            Cut::Tensors(most) => last >= most.max(1),
            Cut::Bytes(most) => last > 0 && bytes + padded > most,
        };
        if full {
            parts.push(Vec::new());
            bytes = 0;
        }
        bytes += padded;
        if let Some(part) = parts.last_mut() {
            part.push(tensor);
        }
    }
    parts
}

/// What the keys of a model are without those that tell of parts.
fn whole(model: &Gguf) -> Metadata {
    let mut metadata = model.metadata().clone();
    for key in [KEY_NO, KEY_COUNT, KEY_TENSORS] {
        metadata.remove(key);
    }
    metadata
}

/// Writes a model as one file. `done` is told the bytes of each piece.
pub fn merge(model: &Gguf, output: Output, done: &dyn Fn(u64)) -> Result<()> {
    let tensors: Vec<&TensorInfo> = model.tensors().iter().collect();
    Ok(write(model, whole(model), &tensors, output, done)?.finish()?)
}

/// Writes part `no` (from 0) of a model that [`cut`] has cut. The keys of the model are in the first part. The part has no name
/// yet: parts get theirs together, by [`Output::finish_all`].
pub fn write_part(
    model: &Gguf,
    parts: &[Vec<&TensorInfo>],
    no: usize,
    output: Output,
    done: &dyn Fn(u64),
) -> Result<Output> {
    let mut metadata = if no == 0 { whole(model) } else { Metadata::new() };
    if let (true, Some(alignment)) = (no > 0, model.metadata().value("general.alignment")) {
        metadata.set("general.alignment", alignment.clone());
    }
    // The types that other readers look for.
    metadata.set(KEY_NO, Value::U16(no as u16));
    metadata.set(KEY_COUNT, Value::U16(parts.len() as u16));
    metadata.set(KEY_TENSORS, Value::I32(model.tensors().len() as i32));
    write(model, metadata, &parts[no], output, done)
}

fn write(
    model: &Gguf,
    metadata: Metadata,
    tensors: &[&TensorInfo],
    output: Output,
    done: &dyn Fn(u64),
) -> Result<Output> {
    let mut writer = Writer::new(metadata);
    for tensor in tensors {
        writer.declare(&tensor.name, tensor.dims(), tensor.ty)?;
    }
    let mut stream = writer.start_on(output)?;
    for tensor in tensors {
        for piece in model.data(tensor).chunks(PIECE) {
            stream.write_piece(&tensor.name, piece)?;
            done(piece.len() as u64);
        }
    }
    stream.complete()
}
