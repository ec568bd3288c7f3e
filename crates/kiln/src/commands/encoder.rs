//! What `kiln inspect` tells of an encoder of pictures: its family, the width of its rows, and how many rows pictures become.

use std::path::Path;

use kiln_engine::vision::Vision;
use kiln_media::Size;
use serde_json::{Value, json};

use crate::output::print;

/// Pictures that rows are counted for: a thumbnail, a screen, a photograph, a tall page.
const PICTURES: [[usize; 2]; 4] = [[224, 224], [1280, 720], [1600, 1200], [850, 1700]];

/// An encoder, or why it does not run.
pub(super) struct Encoder {
    vision: Result<Vision, String>,
}

impl Encoder {
    /// Reads the file again as an encoder, where it says that it is one.
    pub(super) fn open(architecture: &str, path: &Path) -> Option<Encoder> {
        (architecture == "clip")
            .then(|| Encoder { vision: Vision::open(path).map_err(|error| first_line(&error.to_string())) })
    }

    /// For people.
    pub(super) fn describe(&self) {
        print("");
        let vision = match &self.vision {
            Ok(vision) => vision,
            Err(why) => return print(&format!("encoder: {why}")),
        };
        print(&format!(
            "encoder of pictures: {} ({}), rows of {} numbers for a model of that width",
            vision.row.projector,
            vision.row.models,
            vision.width()
        ));
        for (size, rows) in counted(vision) {
            let parts = if rows.len() == 1 { "1 input".to_owned() } else { format!("{} inputs", rows.len()) };
            print(&format!(
                "  a picture of {:>11} pixels {:>6} rows  ({parts})",
                size.to_string(),
                rows.iter().sum::<usize>()
            ));
        }
    }

    /// For programs.
    pub(super) fn json(&self) -> Value {
        match &self.vision {
            Err(why) => json!({"runs": false, "why": why}),
            Ok(vision) => {
                let pictures: Vec<Value> = counted(vision)
                    .map(|(size, rows)| json!({"width": size.width, "height": size.height, "rows": rows}))
                    .collect();
                let row = vision.row;
                json!({"runs": true, "projector": row.projector, "models": row.models, "width": vision.width(), "pictures": pictures})
            }
        }
    }
}

/// Without the hint, which says where this is told.
fn first_line(message: &str) -> String {
    message.lines().next().unwrap_or_default().to_owned()
}

/// The rows of each input that a picture becomes, where its size can be encoded.
fn counted(vision: &Vision) -> impl Iterator<Item = (Size, Vec<usize>)> {
    let sizes = PICTURES.into_iter().map(|[width, height]| Size { width, height });
    sizes.filter_map(|size| vision.rows_of(size).ok().map(|rows| (size, rows)))
}
