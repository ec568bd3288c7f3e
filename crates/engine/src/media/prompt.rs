//! Pictures and sounds in a prompt: which words stand around their vectors, by family, and which models can be given some.

use std::hash::{BuildHasher as _, Hasher as _, RandomState};

use super::{Medium, Mmproj};
use crate::Error;
use crate::model::Model;
use crate::vision::prompt::BOTH_WAYS;

/// A part of what a picture or a sound becomes in a prompt.
#[derive(Clone, Debug)]
pub enum PromptPart<T> {
    /// Words of the family, control tokens among them.
    Words(String),
    /// One of its inputs.
    Input(T),
}

/// What stands for a picture or a sound in the text of a conversation. It is drawn anew for each program, so that nobody can write it.
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
/// Text models that multiply vectors of encoders by the factor of their embeddings, as no other does.
const SCALED: [&str; 6] = ["granite", "granite_swa", "granitehybrid", "granitemoe", "minicpm", "minicpm3"];

impl Mmproj {
    /// Whether what it encodes can stand in prompts of a model.
    pub fn check_model(&self, model: &Model) -> Result<(), Error> {
        let pictures = self.vision().map(|vision| (Medium::Picture, vision.row.projector));
        let sounds = self.audio().map(|audio| (Medium::Sound, audio.row.projector));
        let width = model.config.hidden * (1 + model.facts.deepstack);
        for (medium, projector) in pictures.into_iter().chain(sounds) {
            fits(model, medium, projector)?;
        }
        // Vectors of sounds have no parts for further layers.
        let narrow = self.vision().is_none() && self.width() == model.config.hidden;
        if self.width() != width && !narrow {
            return Err(Error::VectorWidth { width: self.width(), hidden: width });
        }
        Ok(())
    }
}

fn fits(model: &Model, medium: Medium, projector: &'static str) -> Result<(), Error> {
    let architecture = model.config.architecture.name;
    let refuse = |why: &'static str| Err(Error::Misplaced { of: medium.plural(), architecture, projector, why });
    let facts = &model.facts;
    if facts.sees_all || facts.fills || facts.encodes || facts.start.is_some() {
        return refuse("it does not continue a text");
    }
    if SCALED.contains(&architecture) {
        return refuse("it multiplies their rows by the factor of its embeddings, which is missing");
    }
    if medium == Medium::Sound {
        return Ok(());
    }
    if OTHER_PLACES.contains(&architecture) {
        return refuse("its tokens have several positions, of which pictures have others than rows and columns");
    }
    if BOTH_WAYS.iter().any(|(mutual, reader)| *mutual == projector && *reader != architecture) {
        return refuse("the rows of a picture see each other in both directions, which only its own text model does");
    }
    Ok(())
}

/// Words before and behind a picture or a sound.
pub(crate) fn around(projector: &str) -> (&'static str, &'static str) {
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
        "qwen2a" => ("<|audio_bos|>", "<|audio_eos|>"),
        "qwen3a" => ("<|audio_start|>", "<|audio_end|>"),
        "gemma4a" | "gemma4ua" => ("<|audio>", "<audio|>"),
        "voxtral" => ("[BEGIN_AUDIO]", ""),
        "musicflamingo" => ("<sound>", ""),
        _ => ("", ""),
    }
}
