//! Text, words, pictures and sounds become one prompt: its tokens are known, and can be counted, before anything is encoded. Every piece
//! of text becomes tokens by itself.

use std::sync::Arc;

use kiln_media::{Limits, Prepared, Spectrogram, decode, decode_sound, is_picture, is_sound};
use sha2::{Digest as _, Sha256};

use super::Mmproj;
use super::encode::{Encoder, Input};
use super::prompt::PromptPart;
use crate::Error;
use crate::run::{Span, Standing, Vectors, numbers};
use crate::tokenizer::{AddSpecial, ParseSpecial, Tokenizer};

/// What is encoded.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Medium {
    /// A picture.
    Picture,
    /// A sound.
    Sound,
}

impl Medium {
    /// What bytes are, by their beginning; none for text and everything else.
    pub fn of(bytes: &[u8]) -> Option<Medium> {
        match bytes {
            _ if is_picture(bytes) => Some(Medium::Picture),
            _ if is_sound(bytes) => Some(Medium::Sound),
            _ => None,
        }
    }

    /// The word for one.
    pub fn name(self) -> &'static str {
        match self {
            Medium::Picture => "picture",
            Medium::Sound => "sound",
        }
    }

    /// The word for several.
    pub fn plural(self) -> &'static str {
        match self {
            Medium::Picture => "pictures",
            Medium::Sound => "sounds",
        }
    }
}

/// What is ready to be encoded.
#[derive(Clone, Debug)]
enum Ready {
    Picture(Prepared),
    Sound(Vec<Spectrogram>),
}

impl Ready {
    /// Its inputs: tiles before the overview, pieces in their order.
    fn inputs(&self) -> Vec<Input<'_>> {
        match self {
            Ready::Picture(prepared) => prepared.tiles.iter().chain(&prepared.overview).map(Input::Picture).collect(),
            Ready::Sound(pieces) => pieces.iter().map(Input::Sound).collect(),
        }
    }
}

/// A picture that is decoded, resized and cut, or a sound that is decoded and turned into spectrograms, and not encoded yet.
#[derive(Clone, Debug)]
pub struct Shown {
    ready: Ready,
    parts: Vec<PromptPart<usize>>,
    inputs: Vec<Of>,
}

/// What is known of one input of the encoder.
#[derive(Clone, Debug)]
struct Of {
    /// A hash of all that its vectors depend on.
    key: [u8; 32],
    rows: usize,
    standing: Standing,
}

impl Shown {
    /// Rows of the context that its vectors take.
    pub fn rows(&self) -> usize {
        self.inputs.iter().map(|input| input.rows).sum()
    }
}

impl Mmproj {
    /// The picture in these bytes, the one of this number in its prompt, from 0.
    pub fn show(&self, bytes: &[u8], number: usize) -> Result<Shown, Error> {
        let vision = self.needs_vision()?;
        let prepared = vision.prepare(&decode(bytes, &Limits::default())?)?;
        let parts = vision.pieces(&prepared, number);
        self.shown(bytes, Ready::Picture(prepared), parts)
    }

    /// The sound in these bytes.
    pub fn hear(&self, bytes: &[u8]) -> Result<Shown, Error> {
        let audio = self.needs_audio()?;
        let sound = decode_sound(bytes, &audio.limits()).map_err(kiln_media::Error::from)?;
        let pieces = audio.prepare(sound);
        let parts = audio.pieces(pieces.len());
        self.shown(bytes, Ready::Sound(pieces), parts)
    }

    /// The picture or the sound in these bytes.
    pub fn take(&self, medium: Medium, bytes: &[u8], number: usize) -> Result<Shown, Error> {
        match medium {
            Medium::Picture => self.show(bytes, number),
            Medium::Sound => self.hear(bytes),
        }
    }

    fn shown(&self, bytes: &[u8], ready: Ready, parts: Vec<PromptPart<usize>>) -> Result<Shown, Error> {
        let content = Sha256::new_with_prefix(self.identity()).chain_update(Sha256::digest(bytes));
        let of = |(at, input): (usize, &Input<'_>)| -> Result<Of, Error> {
            let key = content.clone().chain_update((at as u64).to_le_bytes()).finalize().into();
            let (rows, standing) = match input {
                Input::Picture(pixels) => {
                    let vision = self.needs_vision()?;
                    let grid = vision.grid(pixels.size);
                    (vision.rows(grid), vision.standing(grid))
                }
                Input::Sound(heard) => (self.needs_audio()?.rows(heard.frames()), Standing::default()),
            };
            Ok(Of { key, rows, standing })
        };
        let inputs = ready.inputs().iter().enumerate().map(of).collect::<Result<_, _>>()?;
        Ok(Shown { ready, parts, inputs })
    }
}

impl Encoder {
    /// The vectors of one input. Those that were made last are kept: conversations show their pictures and sounds again with each question.
    pub fn vectors(&mut self, shown: &Shown, input: usize) -> Result<Vectors, Error> {
        let Of { key, standing, .. } = shown.inputs[input];
        if let Some(rows) = self.kept().find(&key) {
            return Ok(Vectors::new(&key, rows).standing_as(standing));
        }
        let inputs = shown.ready.inputs();
        let none = || Error::NoEncoder { why: format!("there is no input {input}") };
        let rows = Arc::new(self.encode(*inputs.get(input).ok_or_else(none)?)?);
        self.kept().keep(key, Arc::clone(&rows));
        Ok(Vectors::new(&key, rows).standing_as(standing))
    }
}

/// Where an input stands in a prompt.
#[derive(Clone, Copy, Debug)]
struct Place {
    start: usize,
    /// Number of the picture or sound.
    shown: usize,
    input: usize,
}

/// A prompt with pictures and sounds that are not encoded yet.
#[derive(Clone, Debug)]
pub struct Arranged {
    /// Its tokens, and what stands for vectors among them.
    pub tokens: Vec<u32>,
    shown: Vec<Shown>,
    places: Vec<Place>,
}

/// A prompt with pictures and sounds: what stands for them among its tokens, and where they stand.
#[derive(Clone, Debug, Default)]
pub struct Joined {
    /// The tokens.
    pub tokens: Vec<u32>,
    /// The vectors.
    pub spans: Vec<Span>,
}

impl Arranged {
    /// Puts pictures and sounds between the parts of a text, of which there must be one more.
    pub fn new(tokenizer: &Tokenizer, parts: Vec<Vec<u32>>, shown: Vec<Shown>) -> Result<Arranged, Error> {
        if parts.len() != shown.len() + 1 {
            let (found, given) = (parts.len().saturating_sub(1), shown.len());
            return Err(Error::LostMedia { found, given });
        }
        let (mut tokens, mut places) = (Vec::new(), Vec::new());
        for (number, part) in parts.into_iter().enumerate() {
            tokens.extend(part);
            let Some(one) = shown.get(number) else { continue };
            for piece in &one.parts {
                match piece {
                    PromptPart::Words(text) => {
                        tokens.extend(tokenizer.encode(text, AddSpecial::No, ParseSpecial::Yes)?);
                    }
                    PromptPart::Input(input) => {
                        places.push(Place { start: tokens.len(), shown: number, input: *input });
                        let Of { key, rows, .. } = &one.inputs[*input];
                        tokens.extend(numbers(key, *rows));
                    }
                }
            }
        }
        Ok(Arranged { tokens, shown, places })
    }

    /// The prompt with its vectors, which `encode` makes of an input.
    pub fn join<E>(self, mut encode: impl FnMut(&Shown, usize) -> Result<Vectors, E>) -> Result<Joined, E> {
        let mut spans = Vec::with_capacity(self.places.len());
        for Place { start, shown, input } in self.places {
            spans.push(Span { start, vectors: encode(&self.shown[shown], input)? });
        }
        Ok(Joined { tokens: self.tokens, spans })
    }
}
