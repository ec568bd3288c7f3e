//! Encoders of pictures, in files of their own beside a model's (`mmproj`): one table, one row and one short file a family, put
//! together from one transformer (`vit.rs`). They make plain plans as architectures do, and rows of the model's width come out.

mod arrange;
mod clamped;
mod clip;
mod encode;
mod gemma;
mod glm;
mod grids;
mod idefics;
mod internvl;
mod kept;
mod kimi;
mod llama4;
mod minicpm;
mod parts;
mod pixtral;
pub mod prompt;
mod qwen;
mod sheet;
mod vit;

use std::path::Path;
use std::sync::Arc;

use kiln_gguf::Gguf;
use kiln_kernels::tensor::Tensor;
use kiln_media::{Keys, Picture, Prepared, Preprocessing, Size};

pub use arrange::{Arranged, Joined, Shown};
pub use encode::{Encoder, Rows};
pub use sheet::Grid;

use crate::Error;
use crate::arch::Room;
use crate::model::Loader;
use crate::plan::{Fixed, Plan, Ports};
use sheet::{Given, Sheet};

/// One family.
pub struct Row {
    /// The name of its projector in files.
    pub projector: &'static str,
    /// Which models are of this kind.
    pub models: &'static str,
    load: Load,
}

/// Reads the keys and tensors of a file.
type Load = fn(&mut Loader<'_>, &Keys) -> Result<Box<dyn Family>, Error>;

/// Every family whose pictures are encoded.
pub const TABLE: &[Row] = &[
    row("gemma3", "Gemma 3", gemma::load3),
    row("gemma4v", "Gemma 4", gemma::load4),
    row("glm4v", "GLM 4.1V, GLM 4.5V, GLM-OCR", glm::load),
    row("idefics3", "Idefics 3, SmolVLM, Granite Docling", idefics::load),
    row("internvl", "InternVL", internvl::load),
    row("kimik25", "Kimi K2.5", kimi::load25),
    row("kimivl", "Kimi VL", kimi::load),
    row("lightonocr", "LightOnOCR", pixtral::load_plain),
    row("llama4", "Llama 4", llama4::load),
    row("minicpmv4_6", "MiniCPM-V 4.6", minicpm::load46),
    row("mlp", "LLaVA 1.5 and 1.6, Granite Vision 3", clip::load),
    row("mlp_norm", "Yi-VL", clip::load_normed),
    row("pixtral", "Pixtral, Mistral Small 3, Ministral 3", pixtral::load),
    row("qwen2.5vl_merger", "Qwen 2.5 VL", qwen::load25),
    row("qwen2vl_merger", "Qwen 2 VL", qwen::load2),
    row("qwen3vl_merger", "Qwen 3 VL, Qwen 3.5", qwen::load3),
    row("resampler", "MiniCPM-V up to 4.5", minicpm::load),
];

const fn row(projector: &'static str, models: &'static str, load: Load) -> Row {
    Row { projector, models, load }
}

/// A family with the tensors of a file: builds plans for any size of its input.
trait Family: Send + Sync {
    /// Adds the steps from patches to rows of the model's width.
    fn build(&self, s: &mut Sheet) -> Tensor;

    /// Rows of the result and their width, for a grid of patches.
    fn rows(&self, grid: Grid) -> usize;
}

/// An open encoder.
pub struct Vision {
    /// The file.
    pub gguf: Arc<Gguf>,
    /// Its family.
    pub row: &'static Row,
    keys: Keys,
    preprocessing: Preprocessing,
    /// Width of the rows that come out.
    width: usize,
    fixed: Fixed,
    family: Box<dyn Family>,
    identity: [u8; 32],
}

impl std::fmt::Debug for Vision {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        write!(f, "Vision({}, width {})", self.row.projector, self.width)
    }
}

/// A plan for pictures of one size.
pub struct Drawing {
    /// The plan, not lowered yet; its result is the port of logits: `[width, rows]`.
    pub plan: Plan,
    /// F32 `[3 * patch * patch, patches]`: where the host writes each picture.
    pub patches: Tensor,
    order: Vec<usize>,
    given: Vec<Given>,
}

/// The projector that the file names for pictures.
fn projector(gguf: &Gguf) -> Result<String, Error> {
    let metadata = gguf.metadata();
    let missing = |why: &str| Error::NoEncoder { why: why.to_owned() };
    let architecture = metadata.get_str_opt("general.architecture")?.unwrap_or("nothing");
    if architecture != "clip" {
        let named = kiln_system::text::shown(architecture);
        return Err(Error::NoEncoder { why: format!("its architecture is {named}, where encoders have clip") });
    }
    if !metadata.get_bool_or("clip.has_vision_encoder", false)? {
        return Err(missing("it encodes sound and no pictures"));
    }
    let both = metadata.get_str_opt("clip.projector_type")?;
    let own = metadata.get_str_opt("clip.vision.projector_type")?;
    let name = both.or(own).ok_or_else(|| missing("it does not name its projector"))?;
    Ok(match name {
        "qwen2.5o" => "qwen2.5vl_merger".to_owned(),
        "mlp" if gguf.find("mm.3.weight").is_some() => "mlp_norm".to_owned(),
        other => other.to_owned(),
    })
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
    /// Opens a file and reads everything but the weights.
    pub fn open(path: impl AsRef<Path>) -> Result<Vision, Error> {
        Vision::new(Gguf::open(path)?)
    }

    /// The same from a file that is already open.
    pub fn new(gguf: Gguf) -> Result<Vision, Error> {
        let name = projector(&gguf)?;
        let known = || TABLE.iter().map(|row| row.projector).collect::<Vec<_>>().join(", ");
        let row = TABLE.iter().find(|row| row.projector == name);
        let row = row.ok_or_else(|| Error::Projector { name: name.clone(), known: known() })?;
        let mut l = Loader::new(&gguf, "clip", &Room::one(1));
        // A file may have an encoder of sound beside this one.
        let of_sound = |name: &str| name.starts_with("a.") || name.starts_with("mm.a.");
        l.names().into_iter().filter(|name| of_sound(name)).for_each(|name| l.ignore(&name));
        let keys = keys(&l)?;
        let preprocessing = keys.preprocessing(row.projector);
        let incomplete =
            || Error::NoEncoder { why: format!("keys of {name} that say how pictures are prepared are missing") };
        let preprocessing = preprocessing.ok_or_else(incomplete)?;
        let family = (row.load)(&mut l, &keys)?;
        let (fixed, _) = l.finish(&[])?;
        let identity = crate::state::file_hash(&gguf);
        let mut vision = Vision { row, keys, preprocessing, width: 0, fixed, family, identity, gguf: Arc::new(gguf) };
        // One plan is built now, so that what does not fit is said before anything is loaded.
        let usual = vision.grid(Size::square(vision.keys.image_size));
        vision.width = vision.draw(usual)?.plan.ports.logits.shape[0];
        Ok(vision)
    }

    /// Width of the rows that come out: that of the model, times one more for each deepstack layer.
    pub fn width(&self) -> usize {
        self.width
    }

    /// A hash of what makes the file this one: pages of prompts outlive the process, and another file makes other vectors.
    fn identity(&self) -> &[u8; 32] {
        &self.identity
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

    /// The slots that all plans share.
    pub fn fixed(&self) -> &Fixed {
        &self.fixed
    }

    /// The plan for a grid of patches.
    pub fn draw(&self, grid: Grid) -> Result<Drawing, Error> {
        let mut s = Sheet::new(&self.fixed, grid, self.keys.patch);
        let rows = self.family.build(&mut s);
        let none = || Error::NoEncoder { why: "its plan reads no patches".to_owned() };
        let patches = s.port().ok_or_else(none)?;
        let Sheet { b, order, given, .. } = s;
        let plan = b.finish(Ports::all(patches), rows)?;
        Ok(Drawing { plan, patches, order, given })
    }
}
