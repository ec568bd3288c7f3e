//! The form of a saved state: a magic, a text that describes the model and its state slots, the number of tokens, then
//! the bytes of every slot in order. The texts must be the same, so a state never enters another model.

use std::fmt::Write as _;

use kiln_kernels::tensor::Slot;

use crate::Error;
use crate::model::{Model, names};
use crate::plan::{Fixed, SlotKind};

const MAGIC: &[u8; 8] = b"KILNST01";
/// Bytes of the embeddings that stand for all weights: enough to tell apart models of the same name and shape.
const SAMPLE: usize = 1 << 16;

/// The slots that hold what a model remembers.
pub(crate) fn slots(fixed: &Fixed) -> Vec<Slot> {
    (0..).zip(&fixed.slots).filter(|(_, s)| s.kind == SlotKind::State).map(|(i, _)| Slot(i)).collect()
}

/// Everything that comes before the slots' bytes.
pub(crate) fn header(model: &Model, fixed: &Fixed, length: usize) -> Vec<u8> {
    let text = description(model, fixed);
    let mut bytes = MAGIC.to_vec();
    bytes.extend((text.len() as u64).to_le_bytes());
    bytes.extend(text.as_bytes());
    bytes.extend((length as u64).to_le_bytes());
    bytes
}

/// Checks the header against a model; gives the number of tokens and the slots' bytes, which have the right length.
pub(crate) fn open<'b>(model: &Model, fixed: &Fixed, bytes: &'b [u8]) -> Result<(usize, &'b [u8]), Error> {
    let refuse = |why: &str| Error::SavedState { why: why.to_owned() };
    let rest = bytes.strip_prefix(MAGIC).ok_or_else(|| refuse("it does not begin like one"))?;
    let cut_short = || refuse("it ends inside its header");
    let (text_len, rest) = rest.split_first_chunk().ok_or_else(cut_short)?;
    let text_len = usize::try_from(u64::from_le_bytes(*text_len)).map_err(|_| cut_short())?;
    let (text, rest) = rest.split_at_checked(text_len).ok_or_else(cut_short)?;
    let want = description(model, fixed);
    if text != want.as_bytes() {
        let got = String::from_utf8_lossy(text);
        let (got, want) = got.lines().zip(want.lines()).find(|(g, w)| g != w).unwrap_or(("other slots", "these slots"));
        return Err(Error::SavedState { why: format!("it is of `{got}`, the model is `{want}`") });
    }
    let (length, rest) = rest.split_first_chunk().ok_or_else(cut_short)?;
    let length = usize::try_from(u64::from_le_bytes(*length)).map_err(|_| refuse("its number of tokens is absurd"))?;
    let expected = fixed.bytes(|kind| *kind == SlotKind::State);
    if rest.len() != expected {
        return Err(Error::SavedState { why: format!("it holds {} bytes of state, want {expected}", rest.len()) });
    }
    Ok((length, rest))
}

/// One line for the model, one for each slot.
fn description(model: &Model, fixed: &Fixed) -> String {
    let name = model.gguf.metadata().get_str_or("general.name", "unnamed").unwrap_or("unnamed");
    let embedding = model.gguf.find(names::TOKEN_EMBEDDING).map_or(&[][..], |info| model.gguf.data(info));
    let sum = checksum(&embedding[..embedding.len().min(SAMPLE)]);
    let mut text = format!("{} {name:?} {sum:016x}\n", model.config.architecture.name());
    for slot in slots(fixed) {
        let slot = &fixed.slots[slot.0 as usize];
        let _ = writeln!(text, "{} {}", slot.name, slot.bytes);
    }
    text
}

/// FNV-1a: the same in every process and version, which the standard hasher does not promise.
fn checksum(bytes: &[u8]) -> u64 {
    bytes.iter().fold(0xcbf2_9ce4_8422_2325, |sum, b| (sum ^ u64::from(*b)).wrapping_mul(0x0000_0100_0000_01b3))
}
