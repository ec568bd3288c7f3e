//! Encoders of pictures and sounds, in files of their own beside a model's (`mmproj`). A file may have one of each; they share weights'
//! memory, one executor and one prompt. Families are in [`crate::vision`] and [`crate::sound`].

mod arrange;
mod budget;
mod encode;
mod kept;
pub(crate) mod prompt;

use std::path::Path;
use std::sync::Arc;

use kiln_gguf::Gguf;
use kiln_kernels::tensor::Tensor;

pub use arrange::{Arranged, Joined, Medium, Shown};
pub use encode::{Encoder, Input, Reopen, Rows};
pub use prompt::{Marker, PromptPart};

use crate::Error;
use crate::arch::Room;
use crate::model::Loader;
use crate::plan::{Fixed, Plan, Ports};
use crate::sound::Audio;
use crate::vision::sheet::{Given, Sheet};
use crate::vision::{Grid, Vision};

/// How large an input is: there is a plan for each size.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Extent {
    /// Patches of a picture.
    Picture(Grid),
    /// Frames of a sound.
    Sound(usize),
}

/// A plan for inputs of one size.
#[derive(Debug)]
pub struct Drawing {
    /// The plan, not lowered yet; its result is the port of logits: `[width, rows]`.
    pub plan: Plan,
    /// F32 `[features, columns]`: where the host writes each input.
    pub input: Tensor,
    pub(crate) order: Vec<usize>,
    pub(crate) given: Vec<Given>,
}

/// An open file of encoders.
pub struct Mmproj {
    /// The file.
    pub gguf: Arc<Gguf>,
    vision: Result<Vision, Lack>,
    audio: Result<Audio, Lack>,
    width: usize,
    fixed: Fixed,
    identity: [u8; 32],
}

/// Why a file does not encode something.
#[derive(Clone, Debug)]
enum Lack {
    /// It has no encoder of the kind.
    None,
    /// It has one of a family that is not run.
    Unknown(String),
}

impl std::fmt::Debug for Mmproj {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        let vision = self.vision().map(|vision| vision.row.projector);
        let audio = self.audio().map(|audio| audio.row.projector);
        write!(f, "Mmproj({vision:?}, {audio:?}, width {})", self.width)
    }
}

/// The projector that a file names for one of its encoders; none where it has none of the kind.
fn projector(gguf: &Gguf, kind: &str) -> Result<Option<String>, Error> {
    let metadata = gguf.metadata();
    if !metadata.get_bool_or(&format!("clip.has_{kind}_encoder"), false)? {
        return Ok(None);
    }
    let kind = if kind == "audio" { "clip.audio.projector_type" } else { "clip.vision.projector_type" };
    let name = match metadata.get_str_opt("clip.projector_type")? {
        Some(name) => name,
        None => metadata
            .get_str_opt(kind)?
            .ok_or_else(|| Error::NoEncoder { why: "it does not name its projector".to_owned() })?,
    };
    Ok(Some(match (name, kind) {
        ("qwen2.5o", "clip.audio.projector_type") => "qwen2a".to_owned(),
        ("qwen2.5o", _) => "qwen2.5vl_merger".to_owned(),
        ("mlp", _) if gguf.find("mm.3.weight").is_some() => "mlp_norm".to_owned(),
        (other, _) => other.to_owned(),
    }))
}

/// Whether a tensor belongs to an encoder of sound.
fn is_of_sound(name: &str) -> bool {
    name.starts_with("a.") || name.starts_with("mm.a.")
}

impl Mmproj {
    /// Opens a file and reads everything but the weights.
    pub fn open(path: impl AsRef<Path>) -> Result<Mmproj, Error> {
        Mmproj::new(Gguf::open(path)?)
    }

    /// The same from a file that is already open.
    pub fn new(gguf: Gguf) -> Result<Mmproj, Error> {
        let architecture = gguf.metadata().get_str_opt("general.architecture")?.unwrap_or("nothing");
        if architecture != "clip" {
            let named = kiln_system::text::shown(architecture);
            return Err(Error::NoEncoder { why: format!("its architecture is {named}, where encoders have clip") });
        }
        let (of_pictures, of_sounds) = (projector(&gguf, "vision")?, projector(&gguf, "audio")?);
        let vision = of_pictures.as_deref().map(|name| crate::vision::row(name).ok_or(name));
        let audio = of_sounds.as_deref().map(|name| crate::sound::row(name).ok_or(name));
        match (&vision, &audio) {
            (None, None) => {
                let why = "it says that it encodes neither pictures nor sounds".to_owned();
                return Err(Error::NoEncoder { why });
            }
            // One that is not known does not stand in the way of the other.
            (Some(Err(name)), None | Some(Err(_))) | (None, Some(Err(name))) => {
                return Err(Error::Projector { name: (*name).to_owned(), known: known() });
            }
            _ => {}
        }
        let mut l = Loader::new(&gguf, "clip", &Room::one(1));
        let ignored = |name: &String| match is_of_sound(name) {
            true => !matches!(audio, Some(Ok(_))),
            false => matches!(vision, Some(Err(_))),
        };
        l.names().iter().filter(|name| ignored(name)).for_each(|name| l.ignore(name));
        let vision = match vision {
            Some(Ok(row)) => Ok(Vision::load(&mut l, row, gguf.metadata())?),
            Some(Err(name)) => Err(Lack::Unknown(name.to_owned())),
            None => Err(Lack::None),
        };
        let audio = match audio {
            Some(Ok(row)) => Ok(Audio::load(&mut l, row)?),
            Some(Err(name)) => Err(Lack::Unknown(name.to_owned())),
            None => Err(Lack::None),
        };
        let (fixed, _) = l.finish(&[])?;
        let identity = crate::state::file_hash(&gguf);
        let mut file = Mmproj { vision, audio, width: 0, fixed, identity, gguf: Arc::new(gguf) };
        // A plan of each is built now, so that what does not fit is said before anything is loaded.
        let usual = [
            file.vision().map(|vision| Extent::Picture(vision.usual())),
            file.audio().map(|audio| Extent::Sound(audio.usual())),
        ];
        for extent in usual.into_iter().flatten() {
            file.width = file.draw(extent)?.plan.ports.logits.shape[0].max(file.width);
        }
        Ok(file)
    }

    /// The encoder of pictures.
    pub fn vision(&self) -> Option<&Vision> {
        self.vision.as_ref().ok()
    }

    /// The encoder of sounds.
    pub fn audio(&self) -> Option<&Audio> {
        self.audio.as_ref().ok()
    }

    /// The same where pictures are there to be encoded.
    pub fn needs_vision(&self) -> Result<&Vision, Error> {
        self.vision.as_ref().map_err(|lack| lack.refuse(Medium::Picture))
    }

    /// The same where sounds are there to be encoded.
    pub fn needs_audio(&self) -> Result<&Audio, Error> {
        self.audio.as_ref().map_err(|lack| lack.refuse(Medium::Sound))
    }

    /// Width of the rows that come out: that of the model, times one more for each deepstack layer.
    pub fn width(&self) -> usize {
        self.width
    }

    /// A hash of what makes the file this one: pages of prompts outlive the process, and another file makes other vectors.
    pub(crate) fn identity(&self) -> &[u8; 32] {
        &self.identity
    }

    /// The slots that all plans share.
    pub fn fixed(&self) -> &Fixed {
        &self.fixed
    }

    /// The plan for inputs of one size.
    pub fn draw(&self, extent: Extent) -> Result<Drawing, Error> {
        let (s, rows) = match extent {
            Extent::Picture(grid) => self.needs_vision()?.build(&self.fixed, grid),
            Extent::Sound(frames) => self.needs_audio()?.build(&self.fixed, frames),
        };
        let none = || Error::NoEncoder { why: "its plan reads no input".to_owned() };
        let input = s.port().ok_or_else(none)?;
        let Sheet { b, order, given, .. } = s;
        let plan = b.finish(Ports::all(input), rows)?;
        Ok(Drawing { plan, input, order, given })
    }
}

/// The projectors of all families.
fn known() -> String {
    let pictures = crate::vision::TABLE.iter().map(|row| row.projector);
    pictures.chain(crate::sound::TABLE.iter().map(|row| row.projector)).collect::<Vec<_>>().join(", ")
}

impl Lack {
    fn refuse(&self, medium: Medium) -> Error {
        match self {
            Lack::None => Error::LacksEncoder { of: medium.plural() },
            Lack::Unknown(name) => Error::Projector { name: name.clone(), known: known() },
        }
    }
}
