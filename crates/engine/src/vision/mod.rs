//! Encoders of pictures: one table, one row and one short file a family, put together from one transformer (`vit.rs`). They make plain plans
//! as architectures do, and rows of the model's width come out. [`crate::media`] opens their files and runs them.

pub(crate) mod clamped;
mod clip;
mod gemma;
mod glm;
mod grids;
mod idefics;
mod internvl;
mod kimi;
mod llama4;
mod minicpm;
pub(crate) mod parts;
mod pixtral;
pub(crate) mod prompt;
mod qwen;
pub(crate) mod sheet;
pub(crate) mod vit;

use kiln_gguf::Metadata;
use kiln_kernels::tensor::Tensor;
use kiln_media::{Keys, Picture, Prepared, Preprocessing, Size};

pub use sheet::Grid;

use crate::Error;
use crate::model::Loader;
use crate::plan::Fixed;
use sheet::Sheet;

/// One family.
pub struct VisionEntry {
    /// The name of its projector in files.
    pub projector: &'static str,
    /// Which models are of this kind.
    pub models: &'static str,
    load: Load,
}

/// Reads the keys and tensors of a file.
type Load = fn(&mut Loader<'_>, &Keys) -> Result<Box<dyn Family>, Error>;

/// Every family whose pictures are encoded.
pub const TABLE: &[VisionEntry] = &[
    of("gemma3", "Gemma 3", gemma::load3),
    of("gemma4v", "Gemma 4", gemma::load4),
    of("glm4v", "GLM 4.1V, GLM 4.5V, GLM-OCR", glm::load),
    of("idefics3", "Idefics 3, SmolVLM, Granite Docling", idefics::load),
    of("internvl", "InternVL", internvl::load),
    of("kimik25", "Kimi K2.5", kimi::load25),
    of("kimivl", "Kimi VL", kimi::load),
    of("lightonocr", "LightOnOCR", pixtral::load_plain),
    of("llama4", "Llama 4", llama4::load),
    of("minicpmv4_6", "MiniCPM-V 4.6", minicpm::load46),
    of("mlp", "LLaVA 1.5 and 1.6, Granite Vision 3", clip::load),
    of("mlp_norm", "Yi-VL", clip::load_normed),
    of("pixtral", "Pixtral, Mistral Small 3, Ministral 3", pixtral::load),
    of("qwen2.5vl_merger", "Qwen 2.5 VL", qwen::load25),
    of("qwen2vl_merger", "Qwen 2 VL", qwen::load2),
    of("qwen3vl_merger", "Qwen 3 VL, Qwen 3.5", qwen::load3),
    of("resampler", "MiniCPM-V up to 4.5", minicpm::load),
];

const fn of(projector: &'static str, models: &'static str, load: Load) -> VisionEntry {
    VisionEntry { projector, models, load }
}

/// A family with the tensors of a file: builds plans for any size of its input.
trait Family: Send + Sync {
    /// Adds the steps from patches to rows of the model's width.
    fn build(&self, s: &mut Sheet) -> Tensor;

    /// Rows of the result and their width, for a grid of patches.
    fn rows(&self, grid: Grid) -> usize;
}

/// An encoder of pictures.
pub struct Vision {
    /// Its family.
    pub row: &'static VisionEntry,
    keys: Keys,
    preprocessing: Preprocessing,
    family: Box<dyn Family>,
    /// Whether slices stand as those of the first MiniCPM-V do.
    old_slices: bool,
}

/// The row of a projector.
pub(crate) fn row(projector: &str) -> Option<&'static VisionEntry> {
    TABLE.iter().find(|row| row.projector == projector)
}

/// What the file says about its pictures, bounded.
fn keys(l: &Loader<'_>) -> Result<Keys, Error> {
    let k = l.keys;
    let three = |suffix: &str, bounds: [f32; 2]| -> Result<[f32; 3], Error> {
        let values = k.floats(suffix, 3, bounds)?;
        Ok([values[0], values[1], values[2]])
    };
    let pins = k.list("vision.image_grid_pinpoints", 256)?;
    let candidates = pins.chunks_exact(2).map(|pin| Size { width: pin[0], height: pin[1] }).collect();
    let pixels = 1 << 26;
    Ok(Keys {
        image_size: k.count("vision.image_size", 8192)?,
        patch: k.count("vision.patch_size", 1 << 10)?,
        mean: three("vision.image_mean", [-10.0, 10.0])?,
        std: three("vision.image_std", [1e-4, 100.0])?,
        spatial_merge: k.count_opt("vision.spatial_merge_size", 16)?,
        scale_factor: k.count_opt("vision.projector.scale_factor", 16)?,
        min_pixels: k.count_opt("vision.image_min_pixels", pixels)?,
        max_pixels: k.count_opt("vision.image_max_pixels", pixels)?,
        longest: k.count_opt("vision.preproc_image_size", 8192)?,
        min_tiles: k.count_opt("vision.preproc_min_tiles", 64)?,
        max_tiles: k.count_opt("vision.preproc_max_tiles", 64)?,
        max_slices: k.count_opt("vision.max_slice_nums", 64)?,
        filter: k.text("vision.image_resize_algo")?.map(str::to_owned),
        candidates,
    })
}

impl Vision {
    /// Reads the keys and tensors of pictures.
    pub(crate) fn load(l: &mut Loader<'_>, row: &'static VisionEntry, metadata: &Metadata) -> Result<Vision, Error> {
        let keys = keys(l)?;
        let preprocessing = keys.preprocessing(row.projector);
        let name = row.projector;
        let incomplete =
            || Error::NoEncoder { why: format!("keys of {name} that say how pictures are prepared are missing") };
        let preprocessing = preprocessing.ok_or_else(incomplete)?;
        let family = (row.load)(l, &keys)?;
        let version = metadata.get_i32_or("clip.minicpmv_version", 2);
        let old_slices = name == "resampler" && matches!(version, Ok(0 | 2));
        Ok(Vision { row, keys, preprocessing, family, old_slices })
    }

    /// The patches of a picture of the size that the file names.
    pub(crate) fn usual(&self) -> Grid {
        self.grid(Size::square(self.keys.image_size))
    }

    /// Side of a patch in pixels.
    pub fn patch(&self) -> usize {
        self.keys.patch
    }

    /// How pictures are made ready.
    pub fn preprocessing(&self) -> &Preprocessing {
        &self.preprocessing
    }

    /// The inputs that a picture becomes.
    pub fn prepare(&self, picture: &Picture) -> Result<Prepared, Error> {
        Ok(self.preprocessing.prepare(picture)?)
    }

    /// The patches of an input of this size.
    pub fn grid(&self, size: Size) -> Grid {
        Grid { rows: size.height / self.keys.patch, columns: size.width / self.keys.patch }
    }

    /// Rows that come out for a grid of patches.
    pub fn rows(&self, grid: Grid) -> usize {
        self.family.rows(grid)
    }

    /// Rows of each input that a picture of this size becomes.
    pub fn rows_of(&self, size: Size) -> Result<Vec<usize>, Error> {
        let prepared = self.prepare(&Picture::filled(size, [0; 3]))?;
        Ok(prepared.tiles.iter().chain(&prepared.overview).map(|input| self.rows(self.grid(input.size))).collect())
    }

    /// The plan for a grid of patches on its way, and its result.
    pub(crate) fn build(&self, fixed: &Fixed, grid: Grid) -> (Sheet, Tensor) {
        let mut s = Sheet::new(fixed, grid, self.keys.patch);
        let rows = self.family.build(&mut s);
        (s, rows)
    }
}
