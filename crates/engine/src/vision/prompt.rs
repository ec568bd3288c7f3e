//! Pictures in a prompt: which words stand around and between their vectors, and how these stand, by family.

use kiln_media::Prepared;

use super::{Grid, Vision};
use crate::media::PromptPart;
use crate::media::prompt::around;
use crate::run::Standing;

/// Families whose vectors see those behind them inside a picture, and their text models.
pub(crate) const BOTH_WAYS: [(&str, &str); 2] = [("gemma3", "gemma3"), ("gemma4v", "gemma4")];
/// Families whose pictures are grids in models whose tokens have several positions, with the patches on each side of what becomes one vector.
const GRIDS: [&str; 4] = ["glm4v", "qwen2vl_merger", "qwen2.5vl_merger", "qwen3vl_merger"];
const GRID_BLOCK: usize = 2;
/// Families whose pictures are cut into tiles, which stand as text does.
const TILES: [&str; 5] = ["idefics3", "internvl", "llama4", "minicpmv4_6", "resampler"];

impl Vision {
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
    pub fn pieces(&self, prepared: &Prepared, number: usize) -> Vec<PromptPart<usize>> {
        let projector = self.row.projector;
        let (before, after) = around(projector);
        let before =
            if projector == "minicpmv4_6" { format!("<image_id>{number}</image_id>") } else { before.to_owned() };
        let tiles = tiles(projector, prepared, self.old_slices);
        let overview =
            prepared.overview.as_ref().map(|_| overview(projector, prepared.tiles.len())).unwrap_or_default();
        let first = matches!(projector, "resampler" | "minicpmv4_6");
        let inner = if first { [overview, tiles] } else { [tiles, overview] };
        let words = |text: &str| vec![PromptPart::Words(text.to_owned())];
        let all = [words(&before), inner.concat(), words(after)].concat();
        all.into_iter().filter(|piece| !matches!(piece, PromptPart::Words(text) if text.is_empty())).collect()
    }
}

/// The overview with the words around it.
fn overview(projector: &str, input: usize) -> Vec<PromptPart<usize>> {
    let words = |text: &str| PromptPart::Words(text.to_owned());
    match projector {
        "idefics3" => vec![
            words("\n\n<fake_token_around_image><global-img>"),
            PromptPart::Input(input),
            words("<fake_token_around_image>"),
        ],
        "resampler" | "minicpmv4_6" => vec![words("<image>"), PromptPart::Input(input), words("</image>")],
        _ => vec![PromptPart::Input(input)],
    }
}

/// The tiles row by row with the words around them; `old` for slices of the first MiniCPM-V.
fn tiles(projector: &str, prepared: &Prepared, old: bool) -> Vec<PromptPart<usize>> {
    let words = |text: &str| PromptPart::Words(text.to_owned());
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
        out.push(PromptPart::Input(tile));
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
