//! Pictures in a prompt: which words stand around their vectors and between them, by family, and which models can be shown some.

use std::hash::{BuildHasher as _, Hasher as _, RandomState};

use kiln_media::Prepared;

use super::{Grid, Vision};
use crate::Error;
use crate::model::Model;
use crate::run::Standing;

/// A part of what a picture becomes in a prompt.
#[derive(Clone, Debug)]
pub enum PicturePart<T> {
    /// Words of the family, control tokens among them.
    Words(String),
    /// One of its inputs.
    Input(T),
}

/// What stands for a picture in the text of a conversation. It is drawn anew for each program, so that nobody can write it.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Marker(String);

impl Default for Marker {
    fn default() -> Marker {
        let drawn = || RandomState::new().build_hasher().finish();
        Marker(format!("<__media_{:016x}{:016x}__>", drawn(), drawn()))
    }
}

impl Marker {
    /// Its text.
    pub fn text(&self) -> &str {
        &self.0
    }
}

/// Text models whose pictures stand otherwise than by rows and columns.
const OTHER_PLACES: [&str; 1] = ["hunyuan_vl"];
/// Text models that multiply vectors of pictures by the factor of their embeddings, as no other does.
const SCALED: [&str; 6] = ["granite", "granite_swa", "granitehybrid", "granitemoe", "minicpm", "minicpm3"];
/// Families whose vectors see those behind them inside a picture, and their text models.
const BOTH_WAYS: [(&str, &str); 2] = [("gemma3", "gemma3"), ("gemma4v", "gemma4")];
/// Families whose pictures are grids in models whose tokens have several positions, with the patches on each side of what becomes one vector.
const GRIDS: [&str; 4] = ["glm4v", "qwen2vl_merger", "qwen2.5vl_merger", "qwen3vl_merger"];
const GRID_BLOCK: usize = 2;
/// Families whose pictures are cut into tiles, which stand as text does.
const TILES: [&str; 5] = ["idefics3", "internvl", "llama4", "minicpmv4_6", "resampler"];

impl Vision {
    /// Whether pictures can stand in prompts of a model.
    pub fn check_model(&self, model: &Model) -> Result<(), Error> {
        let (architecture, projector) = (model.config.architecture.name, self.row.projector);
        let refuse = |why: &'static str| Err(Error::NoPictures { architecture, projector, why });
        let facts = &model.facts;
        if facts.sees_all || facts.fills || facts.encodes || facts.start.is_some() {
            return refuse("it does not continue a text");
        }
        if OTHER_PLACES.contains(&architecture) {
            return refuse("its tokens have several positions, of which pictures have others than rows and columns");
        }
        if SCALED.contains(&architecture) {
            return refuse("it multiplies rows of pictures by the factor of its embeddings, which is missing");
        }
        if BOTH_WAYS.iter().any(|(mutual, reader)| *mutual == projector && *reader != architecture) {
            return refuse(
                "the rows of a picture see each other in both directions, which only its own text model does",
            );
        }
        let width = model.config.hidden * (1 + facts.deepstack);
        if self.width() != width {
            return Err(Error::VectorWidth { width: self.width(), hidden: width });
        }
        Ok(())
    }

    /// How the vectors of an input with these patches stand in a sequence.
    pub fn standing(&self, grid: Grid) -> Standing {
        let projector = self.row.projector;
        let tiled = TILES.contains(&projector) || !self.keys.candidates.is_empty();
        let grid = match GRIDS.contains(&projector) {
            true => Some(grid.blocks(GRID_BLOCK)),
            // Others are one long row, where tokens have several positions.
            false => (!tiled).then(|| Grid { rows: 1, columns: self.rows(grid) }),
        };
        Standing { grid, both_ways: BOTH_WAYS.iter().any(|(mutual, _)| *mutual == projector) }
    }

    /// What the picture of this number becomes, from 0: words and inputs, counted in the order tiles, overview.
    pub fn pieces(&self, prepared: &Prepared, number: usize) -> Vec<PicturePart<usize>> {
        let projector = self.row.projector;
        let (before, after) = around(projector);
        let before =
            if projector == "minicpmv4_6" { format!("<image_id>{number}</image_id>") } else { before.to_owned() };
        let old = projector == "resampler" && self.old_slices();
        let tiles = tiles(projector, prepared, old);
        let overview =
            prepared.overview.as_ref().map(|_| overview(projector, prepared.tiles.len())).unwrap_or_default();
        let first = matches!(projector, "resampler" | "minicpmv4_6");
        let inner = if first { [overview, tiles] } else { [tiles, overview] };
        let words = |text: &str| vec![PicturePart::Words(text.to_owned())];
        let all = [words(&before), inner.concat(), words(after)].concat();
        all.into_iter().filter(|piece| !matches!(piece, PicturePart::Words(text) if text.is_empty())).collect()
    }

    /// Whether slices stand as those of the first MiniCPM-V do.
    fn old_slices(&self) -> bool {
        let version = self.gguf.metadata().get_i32_or("clip.minicpmv_version", 2);
        matches!(version, Ok(0 | 2))
    }
}

/// Words before and behind a picture.
fn around(projector: &str) -> (&'static str, &'static str) {
    match projector {
        "pixtral" => ("", "[IMG_END]"),
        "lightonocr" => ("<|im_start|>", "<|im_end|>"),
        "internvl" => ("<img>", "</img>"),
        "llama4" => ("<|image_start|>", "<|image_end|>"),
        "kimivl" => ("<|media_start|>", "<|media_end|>"),
        "kimik25" => ("<|media_begin|>", "<|media_end|>"),
        "glm4v" => ("<|begin_of_image|>", "<|end_of_image|>"),
        "gemma3" => ("<start_of_image>", "<end_of_image>"),
        "gemma4v" => ("<|image>", "<image|>"),
        "qwen2vl_merger" | "qwen2.5vl_merger" | "qwen3vl_merger" => ("<|vision_start|>", "<|vision_end|>"),
        _ => ("", ""),
    }
}

/// The overview with the words around it.
fn overview(projector: &str, input: usize) -> Vec<PicturePart<usize>> {
    let words = |text: &str| PicturePart::Words(text.to_owned());
    match projector {
        "idefics3" => vec![
            words("\n\n<fake_token_around_image><global-img>"),
            PicturePart::Input(input),
            words("<fake_token_around_image>"),
        ],
        "resampler" | "minicpmv4_6" => vec![words("<image>"), PicturePart::Input(input), words("</image>")],
        _ => vec![PicturePart::Input(input)],
    }
}

/// The tiles row by row with the words around them; `old` for slices of the first MiniCPM-V.
fn tiles(projector: &str, prepared: &Prepared, old: bool) -> Vec<PicturePart<usize>> {
    let words = |text: &str| PicturePart::Words(text.to_owned());
    let (count, columns) = (prepared.tiles.len(), prepared.grid.width.max(1));
    let slices = matches!(projector, "resampler" | "minicpmv4_6");
    let mut out = Vec::new();
    if old && count > 0 {
        out.push(words("<slice>"));
    }
    for tile in 0..count {
        let (row, column) = (tile / columns + 1, tile % columns + 1);
        match projector {
            "idefics3" => out.push(words(&format!("<fake_token_around_image><row_{row}_col_{column}>"))),
            _ if slices => out.push(words(if old { "<image>" } else { "<slice>" })),
            _ => {}
        }
        out.push(PicturePart::Input(tile));
        if slices {
            out.push(words(if old { "</image>" } else { "</slice>" }));
        }
        let ends_row = column == columns && tile + 1 < count;
        if ends_row && (slices || projector == "idefics3") {
            out.push(words("\n"));
        }
    }
    if old && count > 0 {
        out.push(words("</slice>"));
    }
    out
}
