//! The form of a saved state: a magic, a fingerprint of the model, the tokens, what was remembered of them, and a checksum
//! over all of it. Only the form: which bytes are remembered is the business of whoever holds the memory.
//!
//! Little endian: magic `[8]`, fingerprint `[32]`, words about the model (`u32` and bytes), rows of a page `u32`, number of
//! tokens `u64`, number of remembered bytes `u64`, tokens `u32` each, remembered bytes, SHA-256 of all before `[32]`.

use std::io::Read;
use std::path::Path;

use kiln_gguf::{Gguf, Metadata, Value};
use kiln_system::memory::size;
use kiln_system::text::shown;
use sha2::{Digest as _, Sha256};

use crate::Error;
use crate::arch::PAGE;
use crate::model::Model;
use crate::run::is_vector;

const MAGIC: &[u8; 8] = b"KILNST04";
/// How all versions begin.
const FAMILY: &[u8; 6] = b"KILNST";
/// Most bytes of the words about the model: a bound for what is read before anything is known of the file.
const MOST_WORDS: usize = 1 << 12;
/// Bytes of each sample of a tensor, and samples of a tensor: fine-tunes of one base differ everywhere.
const SAMPLE: usize = 64;
const SAMPLES: usize = 5;

/// What a state says about itself first.
#[derive(Clone, Copy, Debug)]
struct Header {
    /// Its own bytes in the file.
    bytes: usize,
    tokens: usize,
    remembered: usize,
}

impl Header {
    /// Most bytes of a header.
    const MOST: usize = 8 + 32 + 4 + MOST_WORDS + 4 + 8 + 8;

    /// Bytes of the whole file.
    fn file_bytes(self) -> u64 {
        self.bytes as u64 + 4 * self.tokens as u64 + self.remembered as u64 + 32
    }

    /// Whether a file of so many bytes is all of the state, and nothing more.
    fn fits(&self, bytes: u64) -> Result<(), Error> {
        let want = self.file_bytes();
        let what = match bytes.cmp(&want) {
            std::cmp::Ordering::Equal => return Ok(()),
            std::cmp::Ordering::Less => "cut short",
            std::cmp::Ordering::Greater => "too long",
        };
        Err(damaged(format!("it is {what}: it has {bytes} bytes, {want} belong there")))
    }
}

fn refuse(why: impl Into<String>) -> Error {
    let hint = "a state goes on with the very model file that it was saved with";
    Error::SavedState { why: why.into(), hint }
}

fn damaged(why: impl Into<String>) -> Error {
    Error::SavedState { why: why.into(), hint: "the file is damaged; save the state again" }
}

/// The state of these tokens, with adapters that count as strongly as `scales` say.
pub(crate) fn write(model: &Model, scales: &[f32], tokens: &[u32], remembered: &[u8]) -> Vec<u8> {
    let about = about(model);
    let mut bytes = MAGIC.to_vec();
    bytes.extend(fingerprint(model, scales));
    bytes.extend((about.len() as u32).to_le_bytes());
    bytes.extend(about.as_bytes());
    bytes.extend((PAGE as u32).to_le_bytes());
    bytes.extend((tokens.len() as u64).to_le_bytes());
    bytes.extend((remembered.len() as u64).to_le_bytes());
    bytes.extend(tokens.iter().flat_map(|t| t.to_le_bytes()));
    bytes.extend(remembered);
    let sum = Sha256::digest(&bytes);
    bytes.extend(sum);
    bytes
}

/// Checks a state against a model; gives its tokens and what was remembered of them.
pub(crate) fn open<'b>(model: &Model, scales: &[f32], bytes: &'b [u8]) -> Result<(Vec<u32>, &'b [u8]), Error> {
    let header = header(model, scales, bytes)?;
    header.fits(bytes.len() as u64)?;
    let (body, sum) = bytes.split_at(bytes.len() - 32);
    if Sha256::digest(body).as_slice() != sum {
        return Err(damaged("its checksum does not fit its bytes"));
    }
    let (tokens, remembered) = body[header.bytes..].split_at(4 * header.tokens);
    let tokens: Vec<u32> = tokens.as_chunks().0.iter().map(|b| u32::from_le_bytes(*b)).collect();
    let vocab = model.config.vocab;
    // What stands for a picture is no token, and where it stands is said by who shows it again.
    match tokens.iter().find(|t| **t as usize >= vocab && !is_vector(**t)) {
        Some(token) => Err(damaged(format!("it holds token {token}, the vocabulary has {vocab}"))),
        None => Ok((tokens, remembered)),
    }
}

/// Reads the file of a state of this model. Its first bytes are looked at before the rest is read: gigabytes of
/// something else are refused at once.
pub fn read(path: &Path, model: &Model) -> Result<Vec<u8>, Error> {
    let failed = |why| kiln_gguf::Error::Io { action: "read", path: path.to_owned(), why };
    let metadata = std::fs::metadata(path).map_err(failed)?;
    if !metadata.is_file() {
        let why = std::io::Error::other("it is a folder, a pipe or a device; states are read from regular files");
        return Err(failed(why).into());
    }
    let mut file = std::fs::File::open(path).map_err(failed)?;
    let mut bytes = Vec::new();
    file.by_ref().take(Header::MOST as u64).read_to_end(&mut bytes).map_err(failed)?;
    let scales = model.scales();
    let header = header(model, &scales, &bytes)?;
    header.fits(metadata.len())?;
    file.read_to_end(&mut bytes).map_err(failed)?;
    open(model, &scales, &bytes)?;
    Ok(bytes)
}

/// Reads what a state says about itself first, and checks that it is of this model.
fn header(model: &Model, scales: &[f32], bytes: &[u8]) -> Result<Header, Error> {
    let Some(rest) = bytes.strip_prefix(MAGIC) else {
        return Err(match bytes.strip_prefix(FAMILY) {
            Some(_) if bytes.len() >= MAGIC.len() => damaged("it was saved by another version of Kiln"),
            _ if MAGIC.starts_with(bytes) => damaged("it is cut short: it ends inside its header"),
            _ => refuse("it is no state that Kiln saved"),
        });
    };
    let mut cursor = Cursor(rest);
    let mark: [u8; 32] = cursor.array()?;
    let saved_with = cursor.words()?;
    if mark != fingerprint(model, scales) {
        let (saved_with, own) = (shown(&saved_with), shown(&about(model)));
        return Err(refuse(if saved_with == own {
            format!("it was saved with another file of {own}: other weights, another quantisation, or other adapters")
        } else {
            format!("it was saved with {saved_with}, and this is {own}")
        }));
    }
    let page = u32::from_le_bytes(cursor.array()?);
    if page as usize != PAGE {
        return Err(damaged("it was saved by another version of Kiln"));
    }
    let (tokens, remembered) = (cursor.number()?, cursor.number()?);
    Ok(Header { bytes: bytes.len() - cursor.0.len(), tokens, remembered })
}

struct Cursor<'b>(&'b [u8]);

impl<'b> Cursor<'b> {
    fn take(&mut self, n: usize) -> Result<&'b [u8], Error> {
        let (taken, rest) =
            self.0.split_at_checked(n).ok_or_else(|| damaged("it is cut short: it ends inside its header"))?;
        self.0 = rest;
        Ok(taken)
    }

    fn array<const N: usize>(&mut self) -> Result<[u8; N], Error> {
        Ok(self.take(N)?.try_into().expect("as many bytes as were asked for"))
    }

    fn number(&mut self) -> Result<usize, Error> {
        let number = u64::from_le_bytes(self.array()?);
        usize::try_from(number).ok().filter(|n| *n < 1 << 48).ok_or_else(|| damaged("its sizes are absurd"))
    }

    fn words(&mut self) -> Result<String, Error> {
        let n = u32::from_le_bytes(self.array()?) as usize;
        if n > MOST_WORDS {
            return Err(damaged("its words about the model are absurdly long"));
        }
        Ok(String::from_utf8_lossy(self.take(n)?).into_owned())
    }
}

/// The model in a few words, for messages.
fn about(model: &Model) -> String {
    let name = model.gguf.metadata().get_str_or("general.name", "unnamed").unwrap_or("unnamed");
    let types: std::collections::BTreeMap<_, u64> =
        model.gguf.tensors().iter().fold(Default::default(), |mut all, t| {
            *all.entry(t.ty).or_default() += t.bytes as u64;
            all
        });
    let main = types.iter().max_by_key(|(_, bytes)| **bytes).map_or("", |(ty, _)| ty.name());
    let kept: String = name.chars().take(100).collect();
    format!("{} \"{kept}\" ({main}, {})", model.config.architecture.name, size(model.gguf.data_bytes()))
}

/// The beginning of a model's hash, that of its keys: made when the model is opened, because not all of them are kept.
pub(crate) fn keys_hash(metadata: &Metadata) -> Sha256 {
    let mut hash = Sha256::new();
    for (key, value) in metadata.iter() {
        put(&mut hash, key.as_bytes());
        match value {
            // Vocabularies are long; a model with another one has another shape or other weights as well.
            Value::Array(array) => put(&mut hash, &(array.len() as u64).to_le_bytes()),
            Value::Str(text) => put(&mut hash, text),
            number => put(&mut hash, number.to_string().as_bytes()),
        }
    }
    hash
}

fn put(hash: &mut Sha256, bytes: &[u8]) {
    hash.update((bytes.len() as u64).to_le_bytes());
    hash.update(bytes);
}

/// A hash of everything that makes a model this one: its hyper-parameters, the layout of its tensors, and samples of every
/// tensor, and its adapters.
pub(crate) fn fingerprint(model: &Model, scales: &[f32]) -> [u8; 32] {
    let mut hash = model.keys_hash().clone();
    put_tensors(&mut hash, &model.gguf);
    let mut put = |bytes: &[u8]| put(&mut hash, bytes);
    for (adapter, scale) in model.adapters().iter().zip(scales) {
        put(&scale.to_le_bytes());
        for pair in &adapter.pairs {
            put(pair.weight.as_bytes());
            put(&pair.scale.to_le_bytes());
            samples(&pair.a.bytes).chain(samples(&pair.b.bytes)).for_each(&mut put);
        }
    }
    hash.finalize().into()
}

/// The same, as it was opened: hosts that share a model compare it.
pub fn of_model(model: &Model) -> [u8; 32] {
    fingerprint(model, &model.scales())
}

/// The same of a file that is no model of its own.
pub(crate) fn file_hash(gguf: &Gguf) -> [u8; 32] {
    let mut hash = keys_hash(gguf.metadata());
    put_tensors(&mut hash, gguf);
    hash.finalize().into()
}

/// The layout of tensors, and samples of each.
fn put_tensors(hash: &mut Sha256, gguf: &Gguf) {
    let mut put = |bytes: &[u8]| put(hash, bytes);
    for info in gguf.tensors() {
        put(info.name.as_bytes());
        put(info.ty.name().as_bytes());
        info.dims().iter().for_each(|dim| put(&(*dim as u64).to_le_bytes()));
        samples(gguf.data(info)).for_each(&mut put);
    }
}

/// Pieces of a tensor; all of a small one.
fn samples(data: &[u8]) -> impl Iterator<Item = &[u8]> {
    let small = data.len() <= SAMPLE * SAMPLES;
    let (count, length) = if small { (1, data.len()) } else { (SAMPLES, SAMPLE) };
    (0..count).map(move |i| {
        let at = if small { 0 } else { (data.len() - SAMPLE) / (SAMPLES - 1) * i };
        &data[at..at + length]
    })
}

#[cfg(test)]
mod tests {
    use kiln_gguf::Gguf;

    use super::*;
    use crate::quantise_recipe::Recipe;
    use crate::synth::{Preset, Synth};

    fn bytes_of(recipe: &str, seed: u64) -> Vec<u8> {
        let preset = Preset::from_name("tiny-llama").unwrap();
        Synth::new(preset, Recipe::from_name(recipe).unwrap(), seed).to_bytes().unwrap()
    }

    fn model(recipe: &str, seed: u64) -> Model {
        Model::new(Gguf::from_bytes(bytes_of(recipe, seed)).unwrap()).unwrap()
    }

    const TOKENS: [u32; 3] = [5, 6, 7];

    fn remembered() -> Vec<u8> {
        (0..1300).map(|i| i as u8).collect()
    }

    #[test]
    fn what_is_written_is_read_again() {
        let model = model("Q8_0", 1);
        let bytes = write(&model, &[], &TOKENS, &remembered());
        assert_eq!(open(&model, &[], &bytes).unwrap(), (TOKENS.to_vec(), &remembered()[..]));
        // Numbers from 2^31 on stand for rows of pictures.
        let outside = write(&model, &[], &[(1 << 31) - 1], &[]);
        assert!(open(&model, &[], &outside).unwrap_err().to_string().contains("vocabulary"));
    }

    #[test]
    fn every_flipped_bit_and_every_cut_is_seen() {
        let model = model("Q8_0", 1);
        let bytes = write(&model, &[], &TOKENS, &remembered());
        for at in 0..bytes.len() {
            let mut wrong = bytes.clone();
            wrong[at] ^= 1 << (at % 8);
            assert!(matches!(open(&model, &[], &wrong), Err(Error::SavedState { .. })), "byte {at}");
            assert!(matches!(open(&model, &[], &bytes[..at]), Err(Error::SavedState { .. })), "cut at {at}");
        }
    }

    #[test]
    fn other_quantisations_weights_and_settings_are_other_models() {
        let own = model("Q8_0", 1);
        let bytes = write(&own, &[], &TOKENS, &remembered());
        let why = |other: &Model| open(other, &[], &bytes).unwrap_err().to_string();
        assert!(why(&model("Q8_0", 2)).contains("other weights"), "{}", why(&model("Q8_0", 2)));
        assert!(why(&model("Q4_0", 1)).contains("Q4_0"), "{}", why(&model("Q4_0", 1)));
        // One byte of one tensor near the end of the file, and nothing else.
        let mut file = bytes_of("Q8_0", 1);
        let info = own.gguf.tensor("blk.1.ffn_down.weight").unwrap();
        file[info.offset as usize + (info.bytes - SAMPLE) / (SAMPLES - 1) * 2 + 9] ^= 1;
        let other = Model::new(Gguf::from_bytes(file).unwrap()).unwrap();
        assert!(why(&other).contains("other weights"));
        assert_eq!(fingerprint(&model("Q8_0", 1), &[]), fingerprint(&own, &[]));
    }

    #[test]
    fn something_else_is_refused_before_it_is_read() {
        let model = model("Q8_0", 1);
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().join("x.state");
        for (bytes, word) in [
            (&b"GGUF and more"[..], "no state"),
            (b"", "cut short"),
            (b"KILNST04", "cut short"),
            (b"KILNST01 old", "another version"),
        ] {
            std::fs::write(&path, bytes).unwrap();
            let error = read(&path, &model).unwrap_err().to_string();
            assert!(error.contains(word), "{error}");
        }
        for special in [Path::new("/dev/zero"), folder.path()] {
            assert!(read(special, &model).unwrap_err().to_string().contains("regular files"));
        }
        std::fs::write(&path, write(&model, &[], &TOKENS, &remembered())).unwrap();
        assert_eq!(read(&path, &model).unwrap(), write(&model, &[], &TOKENS, &remembered()));
    }
}
