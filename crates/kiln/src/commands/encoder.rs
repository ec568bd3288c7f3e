//! What `kiln inspect` tells of encoders of pictures and sounds: their families, the width of their rows, and how many rows pictures and sounds
//! become.

use std::path::Path;

use kiln_engine::media::Mmproj;
use kiln_engine::sound::Audio;
use kiln_engine::vision::Vision;
use kiln_media::Size;
use serde_json::{Value, json};

use crate::output::print;

/// Pictures that rows are counted for: a thumbnail, a screen, a photograph, a tall page.
const PICTURES: [[usize; 2]; 4] = [[224, 224], [1280, 720], [1600, 1200], [850, 1700]];

/// Seconds of sounds that rows are counted for: a question, a short message, a piece of talk.
const SOUNDS: [usize; 3] = [5, 25, 120];

/// A file of encoders, or why it does not run.
pub(super) struct Encoder {
    mmproj: Result<Mmproj, String>,
}

impl Encoder {
    /// Reads the file again as one of encoders, where it says that it is one.
    pub(super) fn open(architecture: &str, path: &Path) -> Option<Encoder> {
        (architecture == "clip")
            .then(|| Encoder { mmproj: Mmproj::open(path).map_err(|error| first_line(&error.to_string())) })
    }

    /// For people.
    pub(super) fn describe(&self) {
        print("");
        let mmproj = match &self.mmproj {
            Ok(mmproj) => mmproj,
            Err(why) => return print(&format!("encoder: {why}")),
        };
        let line = |of: &str, projector: &str, models: &str| {
            let width = mmproj.width();
            print(&format!(
                "encoder of {of}: {projector} ({models}), rows of {width} numbers for a model of that width"
            ));
        };
        let parts =
            |rows: &[usize]| if rows.len() == 1 { "1 input".to_owned() } else { format!("{} inputs", rows.len()) };
        if let Some(vision) = mmproj.vision() {
            line("pictures", vision.row.projector, vision.row.models);
            for (size, rows) in pictures(vision) {
                let (size, sum) = (size.to_string(), rows.iter().sum::<usize>());
                print(&format!("  a picture of {size:>11} pixels {sum:>6} rows  ({})", parts(&rows)));
            }
        }
        if let Some(audio) = mmproj.audio() {
            line("sounds", audio.row.projector, audio.row.models);
            for (seconds, rows) in sounds(audio) {
                let sum = rows.iter().sum::<usize>();
                print(&format!("  a sound of {seconds:>3} seconds {sum:>6} rows  ({})", parts(&rows)));
            }
        }
    }

    /// For programs.
    pub(super) fn json(&self) -> Value {
        let mmproj = match &self.mmproj {
            Err(why) => return json!({"runs": false, "why": why}),
            Ok(mmproj) => mmproj,
        };
        let mut told = json!({"runs": true});
        if let Some(vision) = mmproj.vision() {
            let counted: Vec<Value> = pictures(vision)
                .map(|(size, rows)| json!({"width": size.width, "height": size.height, "rows": rows}))
                .collect();
            told["projector"] = json!(vision.row.projector);
            told["models"] = json!(vision.row.models);
            told["pictures"] = json!(counted);
        }
        if let Some(audio) = mmproj.audio() {
            let counted: Vec<Value> =
                sounds(audio).map(|(seconds, rows)| json!({"seconds": seconds, "rows": rows})).collect();
            told["audio"] = json!({"projector": audio.row.projector, "models": audio.row.models, "sounds": counted});
        }
        told["width"] = json!(mmproj.width());
        told
    }
}

/// Without the hint, which says where this is told.
fn first_line(message: &str) -> String {
    message.lines().next().unwrap_or_default().to_owned()
}

/// The rows of each input that a picture becomes, where its size can be encoded.
fn pictures(vision: &Vision) -> impl Iterator<Item = (Size, Vec<usize>)> {
    let sizes = PICTURES.into_iter().map(|[width, height]| Size { width, height });
    sizes.filter_map(|size| vision.rows_of(size).ok().map(|rows| (size, rows)))
}

/// The rows of each input that a sound becomes.
fn sounds(audio: &Audio) -> impl Iterator<Item = (usize, Vec<usize>)> {
    SOUNDS.into_iter().map(|seconds| (seconds, audio.rows_of(seconds)))
}
