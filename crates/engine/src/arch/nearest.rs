//! Which known architecture a file of an unknown one is nearest to: each of them reads the file, and whoever gets furthest is it. What that
//! one leaves unread is what is new.

use std::cell::RefCell;
use std::collections::BTreeSet;

use kiln_gguf::Gguf;

use super::{ArchEntry, HARMLESS, Room, TABLE};
use crate::model::Loader;

/// Whoever makes something new begins with it most often, and several others have the same tensors.
const USUAL: &str = "llama";

/// How far a known architecture gets with a file.
#[derive(Debug)]
pub struct Likeness {
    /// The architecture.
    pub known: &'static ArchEntry,
    /// Tensors of the file that it reads.
    pub read: usize,
    /// Tensors of the file in all.
    pub tensors: usize,
    /// Tensors that it leaves, with `*` for the numbers of layers.
    pub unread: Vec<String>,
    /// Keys of the file's architecture that it does not ask for.
    pub unasked: Vec<String>,
    /// Where it stops, if it does.
    pub stops: Option<String>,
}

/// The nearest known architecture to that of a file; none where the file has no tensors that any of them reads.
pub fn nearest(gguf: &Gguf, architecture: &str) -> Option<Likeness> {
    let all = TABLE.iter().map(|known| likeness(gguf, architecture, known));
    // Those that read everything first, then those that read most; of equals the one that leaves the fewest keys, then
    // the usual one, then the first.
    let usual = |of: &Likeness| of.known.name == USUAL;
    let rank = |of: &Likeness| (of.read, of.stops.is_none(), std::cmp::Reverse(of.unasked.len()), usual(of));
    all.reduce(|best, next| if rank(&next) > rank(&best) { next } else { best }).filter(|best| best.read > 0)
}

fn likeness(gguf: &Gguf, architecture: &str, known: &'static ArchEntry) -> Likeness {
    let asked = RefCell::new(BTreeSet::new());
    let room = Room::one(1);
    let mut loader = Loader::new(gguf, architecture, &room);
    loader.keys = loader.keys.noting(&asked);
    let stops = (known.load)(&mut loader).err().map(|why| why.to_string());
    let harmless = HARMLESS.iter().find(|(name, _)| *name == known.name).map_or(&[][..], |(_, parts)| parts);
    let names = gguf.tensors().iter().map(|info| info.name.as_str());
    let (read, unread): (Vec<&str>, Vec<&str>) =
        names.partition(|name| loader.has_read(name) || harmless.iter().any(|part| name.contains(part)));
    let of_layers: BTreeSet<String> = unread.into_iter().map(any_layer).collect();
    let prefix = format!("{architecture}.");
    let keys = gguf.metadata().iter().map(|(key, _)| key).filter(|key| key.starts_with(&prefix));
    let unasked = keys.filter(|key| !asked.borrow().contains(*key)).map(str::to_owned).collect();
    Likeness {
        known,
        read: read.len(),
        tensors: gguf.tensors().len(),
        unread: of_layers.into_iter().collect(),
        unasked,
        stops: stops.map(|why| why.lines().next().unwrap_or_default().to_owned()),
    }
}

/// The name of a tensor without the number of its layer.
fn any_layer(name: &str) -> String {
    let star = |(number, rest): (&str, &str)| {
        number.bytes().all(|byte| byte.is_ascii_digit()).then(|| format!("blk.*.{rest}"))
    };
    name.strip_prefix("blk.").and_then(|rest| rest.split_once('.')).and_then(star).unwrap_or_else(|| name.to_owned())
}

#[cfg(test)]
mod tests {
    use kiln_gguf::{TensorType, Writer};

    use super::*;
    use crate::quantise_recipe::Recipe;
    use crate::synth::{Preset, Synth};

    /// A file of a preset under another name, with a further key and a further tensor in each layer.
    fn unknown(preset: &str, prefix: &str) -> Gguf {
        let synth = Synth::new(Preset::from_name(preset).unwrap(), Recipe::from_name("F32").unwrap(), 1);
        let gguf = Gguf::from_bytes(synth.to_bytes().unwrap()).unwrap();
        let mut metadata = kiln_gguf::Metadata::new();
        for (key, value) in gguf.metadata().iter() {
            metadata.set(key.replacen(prefix, "newest.", usize::from(key.starts_with(prefix))), value.clone());
        }
        metadata.set("general.architecture", "newest");
        metadata.set("newest.attention.wobble", 3u32);
        let mut writer = Writer::new(metadata);
        for info in gguf.tensors() {
            writer.add(&info.name, info.dims(), info.ty, gguf.data(info).to_vec()).unwrap();
        }
        for layer in 0..2 {
            writer.add(&format!("blk.{layer}.attn_wobble.weight"), &[4], TensorType::F32, vec![0; 16]).unwrap();
        }
        Gguf::from_bytes(writer.to_bytes().unwrap()).unwrap()
    }

    #[test]
    fn what_is_new_is_what_the_nearest_leaves() {
        for (preset, prefix, want) in
            [("tiny-llama", "llama.", "llama"), ("tiny-gemma2", "gemma2.", "gemma2"), ("tiny-rwkv7", "rwkv7.", "rwkv7")]
        {
            let gguf = unknown(preset, prefix);
            let found = nearest(&gguf, "newest").unwrap();
            assert_eq!(found.known.name, want);
            assert_eq!(found.stops, None, "{want}");
            assert_eq!(found.read + 2, found.tensors, "{want}");
            assert_eq!(found.unread, ["blk.*.attn_wobble.weight"], "{want}");
            assert!(found.unasked.contains(&"newest.attention.wobble".to_owned()), "{:?}", found.unasked);
            assert!(!found.unasked.contains(&"newest.embedding_length".to_owned()), "{:?}", found.unasked);
        }
    }
}
