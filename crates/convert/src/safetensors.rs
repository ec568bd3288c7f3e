//! Safetensors: a length, a JSON header with type, extents and place of every tensor, and the bytes. Nothing the header says is
//! believed before it was held against the length of the file.

use std::collections::BTreeMap;
use std::fs::File;
use std::io::Read as _;
use std::path::{Path, PathBuf};

use kiln_gguf::TensorType;
use serde::Deserialize;

use crate::error::{Error, Result};
use crate::names::bare;

/// The longest header that is read.
const MOST_HEADER: u64 = 100 << 20;

#[derive(Deserialize)]
struct Entry {
    dtype: String,
    shape: Vec<usize>,
    data_offsets: [u64; 2],
}

/// A tensor in a file.
#[derive(Clone, Debug)]
pub(crate) struct Stored {
    file: usize,
    at: u64,
    bytes: u64,
    /// Extents, outermost first.
    pub(crate) shape: Vec<usize>,
    dtype: String,
}

/// All tensors of a folder.
pub(crate) struct Weights {
    files: Vec<(PathBuf, File)>,
    /// By name.
    pub(crate) tensors: BTreeMap<String, Stored>,
}

impl Weights {
    pub(crate) fn open(folder: &Path) -> Result<Weights> {
        let io = |why| Error::Io { path: folder.to_owned(), why };
        let entries = std::fs::read_dir(folder).map_err(io)?.flatten().map(|entry| entry.path());
        let mut paths: Vec<PathBuf> =
            entries.filter(|path| path.extension().is_some_and(|e| e == "safetensors")).collect();
        // Some folders have the whole beside its parts, in another program's names.
        let parts: Vec<PathBuf> = paths
            .iter()
            .filter(|path| path.file_name().is_some_and(|n| n.to_string_lossy().starts_with("model")))
            .cloned()
            .collect();
        if !parts.is_empty() {
            paths = parts;
        }
        paths.sort();
        if paths.is_empty() {
            let why = std::io::Error::new(std::io::ErrorKind::NotFound, "there is no .safetensors file in it");
            return Err(Error::Io { path: folder.to_owned(), why });
        }
        let mut all = Weights { files: Vec::new(), tensors: BTreeMap::new() };
        for path in paths {
            all.add(path)?;
        }
        Ok(all)
    }

    fn add(&mut self, path: PathBuf) -> Result<()> {
        let damaged = |why: &str| Error::Damaged { path: path.clone(), why: why.to_owned() };
        let io = |why| Error::Io { path: path.clone(), why };
        let mut file = File::open(&path).map_err(io)?;
        let length = file.metadata().map_err(io)?.len();
        let mut head = [0; 8];
        file.read_exact(&mut head).map_err(io)?;
        let header = u64::from_le_bytes(head);
        let data = length.checked_sub(8).and_then(|rest| rest.checked_sub(header)).filter(|_| header <= MOST_HEADER);
        let data = data.ok_or_else(|| damaged("its header is longer than the file"))?;
        let mut text = vec![0; header as usize];
        file.read_exact(&mut text).map_err(io)?;
        let entries: BTreeMap<String, serde_json::Value> =
            serde_json::from_slice(&text).map_err(|why| damaged(&why.to_string()))?;
        for (name, value) in entries.into_iter().filter(|(name, _)| name != "__metadata__") {
            let entry: Entry = serde_json::from_value(value).map_err(|why| damaged(&format!("{name}: {why}")))?;
            let [from, to] = entry.data_offsets;
            let elements = entry.shape.iter().try_fold(1u64, |n, len| n.checked_mul(*len as u64));
            let width = float_type(&entry.dtype).map_or(1, |ty| ty.block_bytes() as u64);
            let known = float_type(&entry.dtype).is_some();
            let fits =
                from <= to && to <= data && elements.is_some_and(|n| !known || n.checked_mul(width) == Some(to - from));
            if !fits {
                return Err(damaged(&format!("{name} does not lie in the file as its header says")));
            }
            let Entry { shape, dtype, .. } = entry;
            let stored = Stored { file: self.files.len(), at: 8 + header + from, bytes: to - from, shape, dtype };
            if self.tensors.insert(bare(&name), stored).is_some() {
                return Err(damaged(&format!("{name} is in two files")));
            }
        }
        self.files.push((path, file));
        Ok(())
    }

    pub(crate) fn paths(&self) -> Vec<PathBuf> {
        self.files.iter().map(|(path, _)| path.clone()).collect()
    }

    /// Rows of a matrix, if it is there.
    pub(crate) fn rows(&self, name: &str) -> Option<usize> {
        self.tensors.get(name)?.shape.first().copied()
    }

    /// Values `from..to` of a tensor.
    pub(crate) fn read(&self, name: &str, from: usize, to: usize) -> Result<Vec<f32>> {
        let stored = self.tensors.get(name).ok_or_else(|| Error::MissingTensor { name: name.to_owned() })?;
        let ty = float_type(&stored.dtype);
        let ty = ty.ok_or_else(|| Error::Type { name: name.to_owned(), dtype: stored.dtype.clone() })?;
        let (path, file) = &self.files[stored.file];
        let width = ty.block_bytes();
        let mut bytes = vec![0; (to - from) * width];
        debug_assert!((to * width) as u64 <= stored.bytes);
        kiln_system::os::read_exact_at(file, &mut bytes, stored.at + (from * width) as u64)
            .map_err(|why| Error::Io { path: path.clone(), why })?;
        let mut values = vec![0.0; to - from];
        let read = kiln_gguf::quant::dequantise(ty, &bytes, &mut values);
        read.map_err(|why| Error::Damaged { path: path.clone(), why: why.to_string() })?;
        Ok(values)
    }
}

fn float_type(dtype: &str) -> Option<TensorType> {
    match dtype {
        "F32" => Some(TensorType::F32),
        "F16" => Some(TensorType::F16),
        "BF16" => Some(TensorType::BF16),
        "F64" => Some(TensorType::F64),
        _ => None,
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn write(folder: &Path, header: &str, data: &[u8]) {
        let mut bytes = (header.len() as u64).to_le_bytes().to_vec();
        bytes.extend_from_slice(header.as_bytes());
        bytes.extend_from_slice(data);
        std::fs::write(folder.join("model.safetensors"), bytes).unwrap();
    }

    #[test]
    fn values_are_read_and_headers_that_lie_are_refused() {
        let folder = tempfile::tempdir().unwrap();
        let good = r#"{"__metadata__":{"format":"pt"},"a":{"dtype":"BF16","shape":[2,1],"data_offsets":[0,4]}}"#;
        write(folder.path(), good, &[0x80, 0x3f, 0x00, 0xc0]);
        let weights = Weights::open(folder.path()).unwrap();
        assert_eq!((weights.rows("a"), weights.read("a", 0, 2).unwrap()), (Some(2), vec![1.0, -2.0]));
        assert!(weights.read("b", 0, 1).is_err());
        for bad in [
            good.replace("[0,4]", "[0,5]"),
            good.replace("[0,4]", "[4,0]"),
            good.replace("[2,1]", "[3,1]"),
            good.replace("[2,1]", "[4294967296,4294967296,4294967296]"),
            good.replace("\"BF16\"", "1"),
            "{".into(),
        ] {
            write(folder.path(), &bad, &[0; 4]);
            let error = Weights::open(folder.path()).err().unwrap().to_string();
            assert!(error.contains("model.safetensors is damaged"), "{error}");
        }
        std::fs::write(folder.path().join("model.safetensors"), [0xff; 64]).unwrap();
        assert!(Weights::open(folder.path()).is_err());
        write(folder.path(), &good.replace("BF16", "F8_E4M3").replace("[2,1]", "[4]"), &[0; 4]);
        let error = Weights::open(folder.path()).unwrap().read("a", 0, 1).unwrap_err().to_string();
        assert!(error.contains("F8_E4M3"), "{error}");
    }
}
