//! A model file in other tensor types: tensor after tensor, on all cores, with one piece of one tensor in memory at a
//! time. Which type a tensor gets is decided in `quantise_recipe.rs`.

use kiln_gguf::{Gguf, Metadata, TensorInfo, TensorType, Writer, quant};
use kiln_system::files::Output;
use rayon::prelude::*;

use crate::importance::{Importance, Seen};
use crate::quantise_recipe::Recipe;

/// Values of a piece that is made and written at once.
const PIECE: usize = 16 << 20;
/// Values of a task of one thread: small enough that the floats between reading and packing stay in its cache.
const TASK: usize = 1 << 14;

/// Why a model could not be written in other types.
#[derive(Debug, thiserror::Error)]
pub enum RequantiseError {
    /// A file could not be read or written.
    #[error(transparent)]
    Gguf(#[from] kiln_gguf::Error),
    /// A weight is no number.
    #[error(
        "tensor `{}` holds NaN or infinity (element {element}), which no quantised type can\nhint: the file is damaged or its conversion failed; fetch or convert it again",
        kiln_system::text::shown(tensor)
    )]
    NotFinite {
        /// The tensor.
        tensor: String,
        /// The first such value.
        element: usize,
    },
    /// The importance is another model's.
    #[error("{why}\nhint: make one of this very model with `kiln imatrix`")]
    Importance {
        /// What does not fit.
        why: String,
    },
    /// A tensor could not be converted.
    #[error("cannot convert tensor `{}` from {from} to {to}: {why}", kiln_system::text::shown(tensor))]
    Quant {
        /// The tensor.
        tensor: String,
        /// Its type in the file.
        from: TensorType,
        /// The type it should get.
        to: TensorType,
        /// Why not.
        why: quant::QuantError,
    },
}

/// What becomes of a model: the new type of every tensor, in the order of the file.
#[derive(Clone, Debug)]
pub struct Conversion<'a> {
    model: &'a Gguf,
    recipe: Recipe,
    /// The new types.
    pub types: Vec<TensorType>,
    importance: Option<&'a Importance>,
}

impl<'a> Conversion<'a> {
    /// Decides the types.
    pub fn new(model: &'a Gguf, recipe: Recipe) -> kiln_gguf::Result<Conversion<'a>> {
        Ok(Conversion { model, recipe, types: recipe.types_of(model)?, importance: None })
    }

    /// Weighs errors by how much each column counts.
    pub fn with_importance(self, importance: &'a Importance) -> Conversion<'a> {
        Conversion { importance: Some(importance), ..self }
    }

    /// What is known of a tensor's columns.
    fn seen(&self, info: &TensorInfo) -> Result<Option<&'a Seen>, RequantiseError> {
        let Some(importance) = self.importance else { return Ok(None) };
        let matrices = info.dims().iter().skip(2).product();
        importance.of(&info.name, info.cols(), matrices).map_err(|why| RequantiseError::Importance { why })
    }

    /// Tensors that will be quantised, though nothing is known of their columns.
    pub fn n_unknown(&self) -> usize {
        let Some(importance) = self.importance else { return 0 };
        let unknown = |(info, ty): &(&TensorInfo, TensorType)| {
            ty.is_quantised() && info.ty != *ty && !importance.tensors.contains_key(&info.name)
        };
        self.tensors().filter(unknown).count()
    }

    /// Tensors with their new types.
    pub fn tensors(&self) -> impl Iterator<Item = (&'a TensorInfo, TensorType)> {
        self.model.tensors().iter().zip(self.types.iter().copied())
    }

    /// Bytes of tensor data in the new file.
    pub fn data_bytes(&self) -> u64 {
        self.tensors().map(|(info, ty)| (info.n_elements() / ty.block_len() * ty.block_bytes()) as u64).sum()
    }

    /// Tensors that are quantised already and would be quantised again, which costs quality.
    pub fn n_requantised(&self) -> usize {
        self.tensors().filter(|(info, ty)| info.ty.is_quantised() && ty.is_quantised() && info.ty != *ty).count()
    }

    /// Writes the new file, which appears under its name when it is complete. `done` is told the bytes of each piece.
    pub fn save(&self, output: Output, done: &dyn Fn(u64)) -> Result<(), RequantiseError> {
        let mut metadata = self.model.metadata().clone();
        // The result is one file, whatever the parts of the model were.
        for key in ["split.no", "split.count", "split.tensors.count"] {
            metadata.remove(key);
        }
        metadata.set("general.file_type", self.recipe.file_type);
        metadata.set("general.quantization_version", 2u32);
        let mut writer = Writer::new(metadata);
        if let Some(importance) = self.importance {
            metadata_of(importance, writer.metadata_mut());
        }
        for (info, ty) in self.tensors() {
            writer.declare(&info.name, info.dims(), ty)?;
        }
        let mut stream = writer.start_on(output)?;
        let mut packed = Vec::new();
        for (info, ty) in self.tensors() {
            let data = self.model.data(info);
            if let Some(element) = quant::first_not_finite(info.ty, data) {
                return Err(RequantiseError::NotFinite { tensor: info.name.clone(), element });
            }
            if info.ty == ty {
                for piece in data.chunks(PIECE) {
                    stream.write_piece(&info.name, piece)?;
                    done(piece.len() as u64);
                }
                continue;
            }
            let row_bytes = data.len() / info.rows();
            let rows = (PIECE / info.cols()).max(1);
            let weights = self.seen(info)?.map(|seen| Weights::new(info, seen));
            for (at, piece) in data.chunks(rows * row_bytes).enumerate() {
                convert(info, ty, piece, weights.as_ref().map(|weights| (weights, at * rows)), &mut packed)?;
                stream.write_piece(&info.name, &packed)?;
                done(packed.len() as u64);
            }
        }
        Ok(stream.finish()?)
    }
}

/// How much the columns of each matrix of a tensor count.
struct Weights {
    /// Of each matrix; one speaks for all where there is only one.
    means: Vec<Vec<f32>>,
    /// Rows of a matrix.
    rows: usize,
}

impl Weights {
    fn new(info: &TensorInfo, seen: &Seen) -> Weights {
        let rows = info.dims().get(1).copied().unwrap_or(1);
        Weights { means: (0..seen.matrices()).map(|matrix| seen.means(matrix)).collect(), rows }
    }

    /// The weights of the matrix that a row is in, and how many rows of it are left from there on.
    fn of(&self, row: usize) -> (&[f32], usize) {
        let matrix = (row / self.rows).min(self.means.len() - 1);
        let left = if self.means.len() == 1 { usize::MAX } else { self.rows - row % self.rows };
        (&self.means[matrix], left)
    }
}

/// Tells readers of the file what its errors were weighed by.
fn metadata_of(importance: &Importance, metadata: &mut Metadata) {
    metadata.set("quantize.imatrix.entries_count", importance.tensors.len() as u32);
    metadata.set("quantize.imatrix.chunks_count", importance.chunks[0]);
    if let Some(dataset) = importance.datasets.first() {
        metadata.set("quantize.imatrix.dataset", dataset.as_str());
    }
}

/// Converts whole rows of a tensor into `packed`; with weights comes the number of the first of these rows.
fn convert(
    info: &TensorInfo,
    to: TensorType,
    data: &[u8],
    weights: Option<(&Weights, usize)>,
    packed: &mut Vec<u8>,
) -> Result<(), RequantiseError> {
    let (cols, from) = (info.cols(), info.ty);
    let failed = |why| RequantiseError::Quant { tensor: info.name.clone(), from, to, why };
    let whole = |ty: TensorType| {
        let partial = quant::QuantError::PartialBlock { ty, len: cols, block_len: ty.block_len() };
        ty.row_bytes(cols).ok_or(partial).map_err(failed)
    };
    let (row_in, row_out) = (whole(from)?, whole(to)?);
    packed.resize(data.len() / row_in * row_out, 0);
    let rows = (TASK / cols).max(1);
    data.par_chunks(rows * row_in).zip(packed.par_chunks_mut(rows * row_out)).enumerate().try_for_each_init(
        Vec::new,
        |plain, (task, (data, out))| {
            plain.resize(data.len() / row_in * cols, 0.0);
            quant::dequantise(from, data, plain).map_err(failed)?;
            let Some((weights, first)) = weights else {
                return quant::quantise(to, plain, cols, None, out).map_err(failed);
            };
            // Rows of a task may belong to several matrices.
            let (all, mut at) = (plain.len() / cols, 0);
            while at < all {
                let (means, left) = weights.of(first + task * rows + at);
                let end = all.min(at.saturating_add(left));
                let (values, out) = (&plain[at * cols..end * cols], &mut out[at * row_out..end * row_out]);
                quant::quantise(to, values, cols, Some(means), out).map_err(failed)?;
                at = end;
            }
            Ok(())
        },
    )
}

#[cfg(test)]
mod tests {
    use kiln_system::files::Overwrite;

    use super::*;
    use crate::synth::{Preset, Synth};

    fn synth(recipe: &str) -> Gguf {
        let preset = Preset::from_name("tiny-llama-256").unwrap();
        Gguf::from_bytes(Synth::new(preset, Recipe::from_name(recipe).unwrap(), 5).to_bytes().unwrap()).unwrap()
    }

    #[test]
    fn a_converted_file_equals_one_made_in_that_type() {
        let path = std::env::temp_dir().join(format!("kiln-requantise-{}.gguf", std::process::id()));
        let plain = synth("F32");
        for recipe in ["Q8_0", "Q4_K_M", "F16"] {
            let conversion = Conversion::new(&plain, Recipe::from_name(recipe).unwrap()).unwrap();
            conversion.save(Output::create(&path, Overwrite::Yes, &[]).unwrap(), &|_| {}).unwrap();
            let (got, want) = (Gguf::open(&path).unwrap(), synth(recipe));
            assert_eq!(got.data_bytes(), conversion.data_bytes());
            for info in want.tensors() {
                let tensor = got.tensor(&info.name).unwrap();
                assert_eq!(tensor.ty, info.ty, "{recipe} {}", info.name);
                assert!(got.data(tensor) == want.data(info), "{recipe} {}", info.name);
            }
            assert_eq!(
                got.metadata().get_u32("general.file_type").unwrap(),
                Recipe::from_name(recipe).unwrap().file_type
            );
        }
        std::fs::remove_file(path).unwrap();
    }

    #[test]
    fn weights_that_are_no_numbers_are_refused() {
        let preset = Preset::from_name("tiny-llama-256").unwrap();
        for recipe in ["F16", "Q8_0"] {
            let mut bytes = Synth::new(preset, Recipe::from_name(recipe).unwrap(), 5).to_bytes().unwrap();
            let info = Gguf::from_bytes(bytes.clone()).unwrap().tensor("blk.1.attn_k.weight").unwrap().clone();
            bytes[info.offset as usize..][..2].fill(0xff);
            let model = Gguf::from_bytes(bytes).unwrap();
            // Converted, and copied as it is.
            for to in ["Q4_0", recipe] {
                let folder = tempfile::tempdir().unwrap();
                let output = Output::create(&folder.path().join("x"), Overwrite::No, &[]).unwrap();
                let conversion = Conversion::new(&model, Recipe::from_name(to).unwrap()).unwrap();
                let error = conversion.save(output, &|_| {}).unwrap_err().to_string();
                assert!(error.contains("blk.1.attn_k.weight") && error.contains("element 0"), "{error}");
                assert_eq!(std::fs::read_dir(folder.path()).unwrap().count(), 0);
            }
        }
    }

    #[test]
    fn quantising_twice_is_counted() {
        let eight = synth("Q8_0");
        assert!(Conversion::new(&eight, Recipe::from_name("Q4_0").unwrap()).unwrap().n_requantised() > 0);
        assert_eq!(Conversion::new(&eight, Recipe::from_name("F16").unwrap()).unwrap().n_requantised(), 0);
        assert_eq!(Conversion::new(&eight, Recipe::from_name("Q8_0").unwrap()).unwrap().n_requantised(), 0);
    }
}
