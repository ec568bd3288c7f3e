//! An open model file, or all parts of a split one: metadata, tensor table and the data behind it.

use std::collections::HashMap;
use std::ops::{Deref, Range};
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::time::Instant;

use crate::error::{Error, Result};
use crate::header::Header;
use crate::map::{PAGE, Source};
use crate::metadata::Metadata;
use crate::split;
use crate::tensor::TensorInfo;
use crate::value::Value;

/// Threads that bring files into memory, and bytes that each takes at once.
const FETCHING: usize = 4;
const FETCHED_AT_ONCE: usize = 32 << 20;

/// The pieces that a file is brought into memory in.
fn fetched(part: &Arc<Part>) -> impl Iterator<Item = (Arc<Part>, Range<usize>)> {
    let (part, bytes) = (Arc::clone(part), part.source.bytes().len());
    (0..bytes).step_by(FETCHED_AT_ONCE).map(move |start| (Arc::clone(&part), start..bytes.min(start + FETCHED_AT_ONCE)))
}

/// An open GGUF model: one file, or all the parts of a split one. Data is mapped, not read.
#[derive(Debug)]
pub struct Gguf {
    version: u32,
    alignment: u64,
    metadata: Metadata,
    tensors: Vec<TensorInfo>,
    index: HashMap<String, usize>,
    parts: Vec<Arc<Part>>,
}

/// The bytes of a tensor where they lie in the file. They stay readable when the model is closed.
#[derive(Clone, Debug)]
pub struct Shared {
    part: Arc<Part>,
    range: Range<usize>,
}

impl Shared {
    /// Lets the system reuse the memory of these bytes. Reading them again reads the file.
    pub fn forget(&self) {
        self.part.source.forget(self.range.clone());
    }

    /// The same for many: neighbours are released together. Pages that also hold other bytes stay: reading those would bring the page
    /// back, with what the system reads ahead.
    pub fn forget_all(all: &[Shared]) {
        for (part, run) in runs(all) {
            part.source.forget_within(run);
        }
    }
}

/// Ranges of files that hold these bytes. What lies between two of them is padding where it is less than a page.
fn runs(all: &[Shared]) -> Vec<(&Arc<Part>, Range<usize>)> {
    let mut sorted: Vec<&Shared> = all.iter().collect();
    sorted.sort_unstable_by_key(|shared| (Arc::as_ptr(&shared.part).addr(), shared.range.start));
    let mut runs: Vec<(&Arc<Part>, Range<usize>)> = Vec::new();
    for Shared { part, range } in sorted {
        match runs.last_mut() {
            Some((last, run)) if Arc::ptr_eq(last, part) && range.start.saturating_sub(run.end) < PAGE => {
                run.end = run.end.max(range.end);
            }
            _ => runs.push((part, range.clone())),
        }
    }
    runs
}

impl Deref for Shared {
    type Target = [u8];

    fn deref(&self) -> &[u8] {
        &self.part.source.bytes()[self.range.clone()]
    }
}

/// One file with its bytes.
#[derive(Debug)]
pub(crate) struct Part {
    pub(crate) path: PathBuf,
    source: Source,
}

impl Part {
    pub(crate) fn open(path: &Path) -> Result<(Part, Header)> {
        let source = Source::open(path)?;
        let header = Header::parse(source.bytes()).map_err(|why| why.in_file(path))?;
        // All of it was copied, and a vocabulary takes megabytes.
        source.forget(0..(header.data_offset as usize).min(source.bytes().len()));
        Ok((Part { path: path.to_owned(), source }, header))
    }
}

/// Checks that one file is whole: the header can be read, and every tensor of it lies inside the file. A part of a split model is
/// checked by itself.
pub fn check_file(path: impl AsRef<Path>) -> Result<()> {
    Part::open(path.as_ref()).map(drop)
}

impl Gguf {
    /// Opens a model. Any part of a split model (`name-00001-of-00003.gguf`) opens all of them.
    pub fn open(path: impl AsRef<Path>) -> Result<Gguf> {
        let path = path.as_ref();
        let (part, header) = Part::open(path)?;
        match split::position(&header).map_err(|why| why.in_file(path))? {
            None => Gguf::join(vec![(part, header)]),
            Some(position) => Gguf::join(split::open_all(position, part, header)?),
        }
    }

    /// Opens a single file that is already in memory.
    pub fn from_bytes(bytes: Vec<u8>) -> Result<Gguf> {
        let header = Header::parse(&bytes)?;
        Gguf::join(vec![(Part { path: PathBuf::new(), source: Source::Memory(bytes) }, header)])
    }

    /// Makes one model of its parts, the first of which has the metadata.
    fn join(parts: Vec<(Part, Header)>) -> Result<Gguf> {
        let mut model = Gguf {
            version: 0,
            alignment: 0,
            metadata: Metadata::new(),
            tensors: Vec::new(),
            index: HashMap::new(),
            parts: Vec::with_capacity(parts.len()),
        };
        for (number, (part, header)) in parts.into_iter().enumerate() {
            if number == 0 {
                (model.version, model.alignment, model.metadata) = (header.version, header.alignment, header.metadata);
            }
            for mut info in header.tensors {
                info.part = number;
                if model.index.insert(info.name.clone(), model.tensors.len()).is_some() {
                    let duplicate = Error::DuplicateTensor { name: info.name, offset: info.offset };
                    return Err(duplicate.in_file(&part.path));
                }
                model.tensors.push(info);
            }
            model.parts.push(Arc::new(part));
        }
        Ok(model)
    }

    /// The version of the format: 2 or 3.
    pub fn version(&self) -> u32 {
        self.version
    }

    /// The alignment of tensor data in the (first) file.
    pub fn alignment(&self) -> u64 {
        self.alignment
    }

    /// Keys and values; those of the first part of a split model.
    pub fn metadata(&self) -> &Metadata {
        &self.metadata
    }

    /// Takes a value out of the metadata: for those who have made something else of one that takes much memory.
    pub fn take(&mut self, key: &str) -> Option<Value> {
        self.metadata.remove(key)
    }

    /// Gives a key another value, or adds it: for what a user says instead of the file, which stays as it is.
    pub fn set(&mut self, key: &str, value: Value) {
        self.metadata.set(key, value);
    }

    /// All tensors, in the order of the files.
    pub fn tensors(&self) -> &[TensorInfo] {
        &self.tensors
    }

    /// The tensor of this name.
    pub fn tensor(&self, name: &str) -> Result<&TensorInfo> {
        self.find(name).ok_or_else(|| Error::MissingTensor { name: name.to_owned() })
    }

    /// The tensor of this name, if there is one.
    pub fn find(&self, name: &str) -> Option<&TensorInfo> {
        self.index.get(name).map(|&index| &self.tensors[index])
    }

    /// The bytes of a tensor. Panics if `info` is not a tensor of this model.
    pub fn data(&self, info: &TensorInfo) -> &[u8] {
        let start = info.offset as usize;
        self.parts
            .get(info.part)
            .and_then(|part| part.source.bytes().get(start..start.checked_add(info.bytes)?))
            .expect("the tensor should be one of this model, which was checked against the file")
    }

    /// The same bytes, to be kept without a copy. Panics if `info` is not a tensor of this model.
    pub fn shared(&self, info: &TensorInfo) -> Shared {
        let start = info.offset as usize;
        Shared { part: Arc::clone(&self.parts[info.part]), range: start..start + self.data(info).len() }
    }

    /// Has the system bring all files into this process's memory on threads of their own, from the first byte to the last, while something
    /// else is done. Nothing waits for these threads: reading a part that has not arrived yet waits for that part alone.
    pub fn fetch(&self) {
        let pieces: Vec<(Arc<Part>, Range<usize>)> = self.parts.iter().flat_map(fetched).collect();
        let (pieces, next) = (Arc::new(pieces), Arc::new(AtomicUsize::new(0)));
        for _ in 0..FETCHING {
            let (pieces, next) = (Arc::clone(&pieces), Arc::clone(&next));
            let start = Instant::now();
            let work = move || {
                while let Some((part, range)) = pieces.get(next.fetch_add(1, Ordering::Relaxed)) {
                    // A system that cannot do it reads page by page, as before.
                    if !part.source.fetch(range.clone()) {
                        return;
                    }
                }
                log::debug!("a part of the file was brought into memory in {:.0?}", start.elapsed());
            };
            // Without such a thread pages come as they are read.
            let _ = std::thread::Builder::new().name("fetch".into()).spawn(work);
        }
    }

    /// The files of the model, in the order of [`TensorInfo::part`]; an empty path for one in memory.
    pub fn paths(&self) -> impl ExactSizeIterator<Item = &Path> {
        self.parts.iter().map(|part| part.path.as_path())
    }

    /// Bytes of all tensor data.
    pub fn data_bytes(&self) -> u64 {
        self.tensors.iter().map(|info| info.bytes as u64).sum()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn neighbours_are_forgotten_as_one() {
        let part = || Arc::new(Part { path: PathBuf::new(), source: Source::Memory(vec![0; 9 * PAGE]) });
        let (one, other) = (part(), part());
        let shared = |part: &Arc<Part>, range: Range<usize>| Shared { part: Arc::clone(part), range };
        let all = [
            shared(&one, 3 * PAGE..4 * PAGE),
            shared(&one, 10..20),
            shared(&other, 20..30),
            shared(&one, 32..2 * PAGE),
        ];
        let mut found: Vec<(bool, Range<usize>)> =
            runs(&all).into_iter().map(|(part, run)| (Arc::ptr_eq(part, &one), run)).collect();
        found.sort_by_key(|(of_one, run)| (*of_one, run.start));
        assert_eq!(found, [(false, 20..30), (true, 10..2 * PAGE), (true, 3 * PAGE..4 * PAGE)]);
    }
}
