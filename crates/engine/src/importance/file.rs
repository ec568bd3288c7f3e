//! Importance matrices in files, as other programs write and read them: GGUF with the tensors `NAME.in_sum2` and `NAME.counts`, and
//! the older layout without a header, which is read alone.

use std::path::Path;

use kiln_gguf::{Gguf, Metadata, Strings, TensorType, Writer, quant};
use kiln_system::files::Output;
use kiln_system::text::shown;

use super::{Importance, Seen};

const SUMS: &str = ".in_sum2";
const COUNTS: &str = ".counts";

/// Why an importance matrix cannot be read.
#[derive(Debug, thiserror::Error)]
pub enum ImportanceError {
    /// The file.
    #[error(transparent)]
    Gguf(#[from] kiln_gguf::Error),
    /// What is in it.
    #[error("{} is no importance matrix: {why}\nhint: `kiln imatrix` makes one", path.display())]
    Damaged {
        /// The file.
        path: std::path::PathBuf,
        /// What is wrong with it.
        why: String,
    },
    /// The disk.
    #[error("cannot read {}: {why}", path.display())]
    Io {
        /// The file.
        path: std::path::PathBuf,
        /// What the system says.
        why: std::io::Error,
    },
}

impl Importance {
    /// Writes a file.
    pub fn save(&self, output: Output) -> kiln_gguf::Result<()> {
        let mut metadata = Metadata::new();
        metadata.set("general.type", "imatrix");
        metadata.set("imatrix.datasets", self.datasets.iter().collect::<Strings>());
        metadata.set("imatrix.chunk_count", self.chunks[0]);
        metadata.set("imatrix.chunk_size", self.chunks[1]);
        let mut writer = Writer::new(metadata);
        let bytes = |values: &[f32]| values.iter().flat_map(|value| value.to_le_bytes()).collect::<Vec<u8>>();
        for (name, seen) in &self.tensors {
            let matrices = seen.matrices();
            writer.add(&format!("{name}{SUMS}"), &[seen.columns, matrices], TensorType::F32, bytes(&seen.sums))?;
            writer.add(&format!("{name}{COUNTS}"), &[1, matrices], TensorType::F32, bytes(&seen.counts))?;
        }
        writer.save_to(output)
    }

    /// Reads a file of either layout.
    pub fn open(path: &Path) -> Result<Importance, ImportanceError> {
        let io = |why| ImportanceError::Io { path: path.to_owned(), why };
        let mut magic = [0; 4];
        let read = std::fs::File::open(path).and_then(|mut file| std::io::Read::read(&mut file, &mut magic));
        if read.map_err(io)? == 4 && magic == *b"GGUF" {
            return Importance::from_gguf(&Gguf::open(path)?, path);
        }
        let bytes = std::fs::read(path).map_err(io)?;
        let read = older(&bytes).filter(|found| !found.tensors.is_empty() && found.is_sound());
        let why = "it is neither GGUF nor of the older layout, or cut short";
        read.ok_or_else(|| ImportanceError::Damaged { path: path.to_owned(), why: why.into() })
    }

    fn from_gguf(gguf: &Gguf, path: &Path) -> Result<Importance, ImportanceError> {
        let damaged = |why: String| ImportanceError::Damaged { path: path.to_owned(), why };
        let m = gguf.metadata();
        let mut found = Importance {
            chunks: [m.get_u32_or("imatrix.chunk_count", 0)?, m.get_u32_or("imatrix.chunk_size", 0)?],
            ..Importance::default()
        };
        if let Some(list) = m.get_str_array_opt("imatrix.datasets")? {
            found.datasets = (0..list.len()).map(|i| list.text(i).unwrap_or_default().into_owned()).collect();
        }
        for info in gguf.tensors() {
            let Some(name) = info.name.strip_suffix(SUMS) else { continue };
            let counts = gguf.tensor(&format!("{name}{COUNTS}"))?;
            let floats = |info: &kiln_gguf::TensorInfo| {
                let mut values = vec![0.0; info.n_elements()];
                let read = quant::dequantise(info.ty, gguf.data(info), &mut values);
                read.map(|()| values).map_err(|why| damaged(why.to_string()))
            };
            let seen = Seen { columns: info.cols(), sums: floats(info)?, counts: floats(counts)? };
            found.tensors.insert(name.to_owned(), seen);
        }
        if found.tensors.is_empty() {
            return Err(damaged("there is no tensor whose name ends with .in_sum2".into()));
        }
        if !found.is_sound() {
            return Err(damaged("sums and counts do not fit together, or one is no number".into()));
        }
        Ok(found)
    }

    fn is_sound(&self) -> bool {
        let number = |value: &f32| value.is_finite() && *value >= 0.0;
        self.tensors.values().all(|seen| {
            let fits = seen.columns > 0 && seen.columns.checked_mul(seen.matrices()) == Some(seen.sums.len());
            fits && seen.sums.iter().chain(&seen.counts).all(number)
        })
    }

    /// What was seen of a tensor, if it fits its shape.
    pub fn of(&self, name: &str, columns: usize, matrices: usize) -> Result<Option<&Seen>, String> {
        let Some(seen) = self.tensors.get(name) else { return Ok(None) };
        if seen.columns != columns || (seen.matrices() != matrices && seen.matrices() != 1) {
            return Err(format!(
                "the importance of `{}` is for {} matrices of {} columns, and the model has {matrices} of {columns}",
                shown(name),
                seen.matrices(),
                seen.columns
            ));
        }
        Ok(Some(seen))
    }
}

/// The older layout: a number of entries; for each the length of its name, the name, calls, values, and the values.
fn older(bytes: &[u8]) -> Option<Importance> {
    let mut rest = bytes;
    let mut take = |n: usize| {
        let (piece, behind) = rest.split_at_checked(n)?;
        rest = behind;
        Some(piece)
    };
    let number = |piece: &[u8]| usize::try_from(i32::from_le_bytes(piece.try_into().ok()?)).ok();
    let entries = number(take(4)?)?;
    let mut found = Importance::default();
    for _ in 0..entries {
        let length = number(take(4)?)?;
        let name = String::from_utf8(take(length)?.to_vec()).ok()?;
        let calls = number(take(4)?)?.max(1);
        let columns = number(take(4)?)?;
        let values = take(columns.checked_mul(4)?)?.as_chunks::<4>().0;
        // Sums of means: over the calls they are means again.
        let sums = values.iter().map(|bytes| f32::from_le_bytes(*bytes)).collect();
        found.tensors.insert(name, Seen { columns, sums, counts: vec![calls as f32] });
    }
    Some(found)
}

#[cfg(test)]
mod tests {
    use kiln_system::files::Overwrite;

    use super::*;

    fn example() -> Importance {
        let seen = Seen { columns: 2, sums: vec![1.0, 2.0, 3.0, 4.0], counts: vec![1.0, 0.0] };
        let tensors = [("blk.0.ffn_down_exps.weight".to_owned(), seen)].into();
        Importance { tensors, datasets: vec!["a.txt".into()], chunks: [3, 512] }
    }

    #[test]
    fn what_is_written_is_read_back() {
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().join("x.gguf");
        example().save(Output::create(&path, Overwrite::No, &[]).unwrap()).unwrap();
        let read = Importance::open(&path).unwrap();
        assert_eq!(read, example());
        let name = "blk.0.ffn_down_exps.weight";
        assert!(read.of(name, 2, 2).unwrap().is_some() && read.of("other", 2, 2).unwrap().is_none());
        assert!(read.of(name, 3, 2).unwrap_err().contains("2 matrices of 2 columns"));
        let bytes = std::fs::read(&path).unwrap();
        std::fs::write(&path, &bytes[..bytes.len() / 2]).unwrap();
        Importance::open(&path).unwrap_err();
    }

    #[test]
    fn the_older_layout_is_read_too_and_rubbish_is_refused() {
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().join("x.dat");
        let mut bytes = 1i32.to_le_bytes().to_vec();
        for piece in [
            &3i32.to_le_bytes()[..],
            b"abc",
            &2i32.to_le_bytes(),
            &2i32.to_le_bytes(),
            &4f32.to_le_bytes(),
            &6f32.to_le_bytes(),
        ] {
            bytes.extend_from_slice(piece);
        }
        std::fs::write(&path, &bytes).unwrap();
        let read = Importance::open(&path).unwrap();
        assert_eq!(read.tensors["abc"].means(0), [2.0, 3.0]);
        for bad in [&bytes[..bytes.len() - 1], b"", b"hello", &[0xff; 64]] {
            std::fs::write(&path, bad).unwrap();
            let error = Importance::open(&path).unwrap_err().to_string();
            assert!(error.contains("x.dat") && error.contains("hint:"), "{error}");
        }
    }
}
