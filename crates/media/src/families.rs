//! How each family of encoders wants its pictures, by the name of its projector in model files. One row a family.

use crate::filters::Filter;
use crate::fit::{Fit, Placing};
use crate::prepare::{Layout, Preprocessing};
use crate::sizes::{Halves, PixelLimits, Size};

/// What a model file says about its pictures; `None` where it says nothing.
#[derive(Clone, Debug, Default, PartialEq)]
pub struct Keys {
    /// Side of a picture, or of a tile.
    pub image_size: usize,
    /// Side of a patch.
    pub patch: usize,
    /// Subtracted from each channel.
    pub mean: [f32; 3],
    /// Divides the difference.
    pub std: [f32; 3],
    /// Patches of a side that become one token, under the first of its two names.
    pub spatial_merge: Option<usize>,
    /// The same under the other name.
    pub scale_factor: Option<usize>,
    /// Fewest pixels.
    pub min_pixels: Option<usize>,
    /// Most pixels.
    pub max_pixels: Option<usize>,
    /// The longer side of a picture.
    pub longest: Option<usize>,
    /// Fewest tiles.
    pub min_tiles: Option<usize>,
    /// Most tiles.
    pub max_tiles: Option<usize>,
    /// Most slices.
    pub max_slices: Option<usize>,
    /// Name of a filter.
    pub filter: Option<String>,
    /// Sizes that tiles may make up.
    pub candidates: Vec<Size>,
}

/// The colour that CLIP's mean stands for, and the middle of all greys.
const CLIP_MEAN: [u8; 3] = [122, 116, 104];
const GREY: [u8; 3] = [127; 3];
/// Slices of MiniCPM-V where the file does not say how many.
const SLICES: usize = 9;

impl Keys {
    /// Pixels of so many tokens.
    fn tokens(&self, merge: usize, least: usize, most: usize) -> PixelLimits {
        let area = (self.patch * merge).saturating_mul(self.patch * merge);
        PixelLimits { least: least.saturating_mul(area), most: most.saturating_mul(area) }
    }

    /// The limits of the file, where it has both.
    fn pixels(&self) -> Option<PixelLimits> {
        Some(PixelLimits { least: self.min_pixels?, most: self.max_pixels? })
    }

    fn dynamic(&self, merge: usize, limits: PixelLimits) -> Layout {
        Layout::Dynamic { align: self.patch * merge, limits }
    }

    fn fixed_or_tiles(&self) -> Layout {
        if self.candidates.is_empty() {
            Layout::Fixed { side: self.image_size }
        } else {
            Layout::Candidates { side: self.image_size, sizes: self.candidates.clone() }
        }
    }

    /// Columns and rows of tiles, column by column.
    fn grids(&self, grids: impl Iterator<Item = [usize; 2]>) -> Layout {
        let side = self.image_size;
        let sizes = grids.map(|[columns, rows]| Size { width: columns * side, height: rows * side }).collect();
        Layout::Candidates { side, sizes }
    }

    /// Patches of a side that become one token, in this family.
    pub fn merge(&self, projector: &str) -> usize {
        let (scale, spatial) = (self.scale_factor, self.spatial_merge);
        match projector {
            "gemma3" | "minicpmv4_6" | "step3vl" => scale.unwrap_or(4),
            "gemma4v" | "gemma4uv" => scale.unwrap_or(3),
            "qwen2vl_merger" | "qwen2.5vl_merger" | "qwen3vl_merger" | "glm4v" | "exaone4_5" | "mimovl"
            | "hunyuanvl" | "minimax_m3" | "youtuvl" => spatial.unwrap_or(2),
            "pixtral" | "lightonocr" => spatial.unwrap_or(1),
            "paddleocr" => 2,
            "nemotron_v2_vl" | "kimivl" | "kimik25" | "idefics3" | "internvl" | "llama4" | "lfm2" | "dots_ocr" => {
                scale.unwrap_or(1)
            }
            _ => 1,
        }
    }

    /// How pictures are made ready for a family; `None` for one that is not known, or whose keys are not there or 0.
    pub fn preprocessing(&self, projector: &str) -> Option<Preprocessing> {
        let merge = self.merge(projector);
        if [self.image_size, self.patch, merge].contains(&0) {
            return None;
        }
        let (mut single, mut tiles, mut overview) =
            (Fit::pad(Filter::Bicubic), Fit::pad(Filter::Bicubic), Fit::stretch(Filter::Bicubic));
        let layout = match projector {
            "mlp" | "mlp_norm" | "ldp" | "ldpv2" | "cogvlm" => {
                single.placing = Placing::Pad(CLIP_MEAN);
                self.fixed_or_tiles()
            }
            "adapter" => self.fixed_or_tiles(),
            "janus_pro" => {
                single.placing = Placing::Pad(GREY);
                self.fixed_or_tiles()
            }
            "gemma3" => {
                single.filter = Filter::Bilinear;
                Layout::Fixed { side: self.image_size }
            }
            "nemotron_v2_vl" => Layout::Fixed { side: self.image_size },
            "gemma4v" | "gemma4uv" => self.dynamic(merge, self.tokens(merge, 70, 1120)),
            "qwen2vl_merger" | "qwen2.5vl_merger" | "qwen3vl_merger" | "glm4v" => {
                self.dynamic(merge, self.tokens(merge, 8, 4096))
            }
            "pixtral" | "kimivl" => self.dynamic(merge, self.tokens(merge, 8, 1024)),
            "kimik25" => {
                let given = self.pixels().filter(|limits| limits.least > 0 && limits.most > 0);
                self.dynamic(merge, given.unwrap_or(self.tokens(merge, 2, 4096)))
            }
            "lightonocr" => {
                Layout::Longest { align: self.patch * merge, edge: self.longest.unwrap_or(self.image_size) }
            }
            "idefics3" => {
                (tiles, overview) = (Fit::stretch(Filter::Lanczos), Fit::stretch(Filter::Lanczos));
                Layout::LongestTiles { side: self.image_size, edge: self.longest? }
            }
            "internvl" => {
                let (least, most) = (self.min_tiles.unwrap_or(1), self.max_tiles.unwrap_or(12));
                let rows = move |columns: usize| (least.div_ceil(columns).max(least), (most / columns).min(most));
                let grids = move |columns: usize| (rows(columns).0..=rows(columns).1).map(move |r| [columns, r]);
                self.grids((least.max(1)..=most).flat_map(grids))
            }
            "llama4" => {
                let grids = (1..=3).flat_map(|columns| (1..=3).map(move |rows| [columns, rows]));
                self.grids(grids.filter(|grid| *grid != [1, 1]))
            }
            "resampler" => Layout::Slices {
                side: self.image_size,
                align: self.patch,
                most: self.max_slices.unwrap_or(SLICES),
                halves: Halves::Away,
            },
            "minicpmv4_6" => {
                tiles.placing = Placing::Stretch;
                // Four patches also where two are merged.
                let (side, align) = (self.image_size, 4 * self.patch);
                Layout::Slices { side, align, most: self.max_slices.unwrap_or(SLICES), halves: Halves::Even }
            }
            "lfm2" => {
                let filter = self.filter.as_deref().map_or(Some(Filter::Bilinear), Filter::from_name)?;
                (tiles.filter, overview.filter) = (filter, filter);
                let limits = self.tokens(merge, 64, 256);
                Layout::LargeTiles { align: self.patch * merge, patch: self.patch, limits }
            }
            "phi4" => {
                single.filter = Filter::Bilinear;
                self.dynamic(merge, self.pixels()?)
            }
            "paddleocr" | "dots_ocr" | "exaone4_5" | "mimovl" => self.dynamic(merge, self.pixels()?),
            "hunyuanvl" => {
                single = Fit::stretch(Filter::Lanczos);
                let usual = self.tokens(merge, 256, 16384);
                let least = self.min_pixels.unwrap_or(usual.least);
                self.dynamic(merge, PixelLimits { least, most: self.max_pixels.unwrap_or(usual.most) })
            }
            "minimax_m3" => {
                single.placing = Placing::Stretch;
                self.dynamic(merge, self.tokens(merge, 8, 576))
            }
            "deepseekocr" => {
                overview.placing = Placing::PadNearest(GREY);
                tiles.placing = Placing::Stretch;
                Layout::Rows { tiles: [self.min_tiles.unwrap_or(2), self.max_tiles.unwrap_or(9)] }
            }
            "youtuvl" => {
                single = Fit::stretch(Filter::Bilinear);
                let most = self.tokens(merge, 1, 62500).most / (self.patch * self.patch).max(1);
                Layout::Steps { align: self.patch * merge, patch: self.patch, most }
            }
            "step3vl" => Layout::Windows { side: self.image_size, edge: self.longest.unwrap_or(3024) },
            _ => return None,
        };
        Some(Preprocessing { layout, single, tiles, overview, mean: self.mean, std: self.std })
    }
}
