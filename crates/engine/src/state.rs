//! The form of a saved state: a magic, a text that describes the model, the tokens, then what was remembered of them.
//! The texts must be the same, so a state never enters another model.

use crate::Error;
use crate::model::{Model, names};

const MAGIC: &[u8; 8] = b"KILNST02";
/// Bytes of the embeddings that stand for all weights: enough to tell apart models of the same name and shape.
const SAMPLE: usize = 1 << 16;

/// A saved state of these tokens.
pub(crate) fn write(model: &Model, tokens: &[u32], remembered: &[u8]) -> Vec<u8> {
    let text = description(model);
    let mut bytes = MAGIC.to_vec();
    bytes.extend((text.len() as u64).to_le_bytes());
    bytes.extend(text.as_bytes());
    bytes.extend((tokens.len() as u64).to_le_bytes());
    bytes.extend(tokens.iter().flat_map(|t| t.to_le_bytes()));
    bytes.extend(remembered);
    bytes
}

/// Checks a saved state against a model; gives its tokens and what was remembered of them, which has the length that `needed` says.
pub(crate) fn open<'b>(
    model: &Model,
    bytes: &'b [u8],
    needed: &dyn Fn(usize) -> usize,
) -> Result<(Vec<u32>, &'b [u8]), Error> {
    let refuse = |why: &str| Error::SavedState { why: why.to_owned() };
    let rest = bytes.strip_prefix(MAGIC).ok_or_else(|| refuse("it does not begin like one"))?;
    let cut_short = || refuse("it ends inside its header");
    let (text_len, rest) = rest.split_first_chunk().ok_or_else(cut_short)?;
    let text_len = usize::try_from(u64::from_le_bytes(*text_len)).map_err(|_| cut_short())?;
    let (text, rest) = rest.split_at_checked(text_len).ok_or_else(cut_short)?;
    let want = description(model);
    if text != want.as_bytes() {
        return Err(Error::SavedState { why: format!("it was saved with another model than {}", want.trim_end()) });
    }
    let (count, rest) = rest.split_first_chunk().ok_or_else(cut_short)?;
    let count = usize::try_from(u64::from_le_bytes(*count)).map_err(|_| cut_short())?;
    let (tokens, rest) = count.checked_mul(4).and_then(|n| rest.split_at_checked(n)).ok_or_else(cut_short)?;
    let expected = needed(count);
    if rest.len() != expected {
        return Err(Error::SavedState { why: format!("it holds {} bytes of state, want {expected}", rest.len()) });
    }
    let tokens: Vec<u32> = tokens.chunks_exact(4).map(|b| u32::from_le_bytes([b[0], b[1], b[2], b[3]])).collect();
    let vocab = model.config.vocab;
    match tokens.iter().find(|t| **t as usize >= vocab) {
        Some(token) => Err(Error::SavedState { why: format!("it holds token {token}, the vocabulary has {vocab}") }),
        None => Ok((tokens, rest)),
    }
}

fn description(model: &Model) -> String {
    let name = model.gguf.metadata().get_str_or("general.name", "unnamed").unwrap_or("unnamed");
    let embedding = model.gguf.find(names::TOKEN_EMBEDDING).map_or(&[][..], |info| model.gguf.data(info));
    let sum = checksum(&embedding[..embedding.len().min(SAMPLE)]);
    format!("{} {name:?} {sum:016x}\n", model.config.architecture.name())
}

/// FNV-1a: the same in every process and version, which the standard hasher does not promise.
fn checksum(bytes: &[u8]) -> u64 {
    bytes.iter().fold(0xcbf2_9ce4_8422_2325, |sum, b| (sum ^ u64::from(*b)).wrapping_mul(0x0000_0100_0000_01b3))
}
