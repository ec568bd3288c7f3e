//! Text, words, pictures and sounds become one prompt: its tokens are known, and can be counted, before anything is encoded. Every piece
//! of text becomes tokens by itself.

use std::sync::Arc;

use kiln_media::{Limits, Prepared, Spectrogram, decode, decode_sound, is_picture, is_sound};
use sha2::{Digest as _, Sha256};

use super::Mmproj;
use super::budget::{Budget, Held};
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
#[derive(Debug)]
enum Ready {
    Picture(Prepared),
    Sound(Vec<Spectrogram>),
}

impl Ready {
    /// Bytes of the numbers in it.
    fn bytes(&self) -> usize {
        let one = |input: &Input<'_>| match input {
            Input::Picture(pixels) => size_of_val(&pixels.values[..]),
            Input::Sound(heard) => size_of_val(&heard.values[..]),
        };
        self.inputs().iter().map(one).sum()
    }

    /// Its inputs: tiles before the overview, pieces in their order.
    fn inputs(&self) -> Vec<Input<'_>> {
        match self {
            Ready::Picture(prepared) => prepared.tiles.iter().chain(&prepared.overview).map(Input::Picture).collect(),
            Ready::Sound(pieces) => pieces.iter().map(Input::Sound).collect(),
        }
    }
}

/// Prepared inputs that all prompts of the process hold before they are encoded. A picture of a hundred bytes becomes megabytes, and a prompt may
/// have hundreds: what finds no room here is prepared again when it is encoded.
static PREPARED: Budget = Budget::new(128 << 20);

/// A picture or a sound that can be decoded, and is not encoded yet.
#[derive(Clone, Debug)]
pub struct Shown {
    medium: Medium,
    bytes: Arc<[u8]>,
    /// Decoded, resized and cut, or turned into spectrograms, where there was room for that.
    ready: Option<Arc<(Ready, Held)>>,
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

    /// Bytes that it holds until it is encoded, beside those that it came in.
    pub fn held(&self) -> usize {
        self.ready.as_ref().map_or(0, |ready| ready.1.bytes())
    }
}

impl Mmproj {
    /// The picture in these bytes, the one of this number in its prompt, from 0.
    pub fn show(&self, bytes: &[u8], number: usize) -> Result<Shown, Error> {
        self.take(Medium::Picture, bytes, number)
    }

    /// The sound in these bytes.
    pub fn hear(&self, bytes: &[u8]) -> Result<Shown, Error> {
        self.take(Medium::Sound, bytes, 0)
    }

    /// Decodes bytes, and makes what an encoder takes of them.
    fn ready(&self, medium: Medium, bytes: &[u8]) -> Result<Ready, Error> {
        Ok(match medium {
            Medium::Picture => Ready::Picture(self.needs_vision()?.prepare(&decode(bytes, &Limits::default())?)?),
            Medium::Sound => {
                let audio = self.needs_audio()?;
                let sound = decode_sound(bytes, &audio.limits()).map_err(kiln_media::Error::from)?;
                Ready::Sound(audio.prepare(sound))
            }
        })
    }

    /// The picture or the sound in these bytes, the one of this number among the pictures of its prompt, from 0.
    pub fn take(&self, medium: Medium, bytes: &[u8], number: usize) -> Result<Shown, Error> {
        let ready = self.ready(medium, bytes)?;
        let parts = match &ready {
            Ready::Picture(prepared) => self.needs_vision()?.pieces(prepared, number),
            Ready::Sound(pieces) => self.needs_audio()?.pieces(pieces.len()),
        };
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
        let held = PREPARED.hold(ready.bytes());
        let ready = held.map(|held| Arc::new((ready, held)));
        Ok(Shown { medium, bytes: bytes.into(), ready, parts, inputs })
    }
}

impl Encoder {
    /// The vectors of one input. Those that were made last are kept: conversations show their pictures and sounds again with each question.
    pub fn vectors(&mut self, shown: &Shown, input: usize) -> Result<Vectors, Error> {
        let Of { key, standing, .. } = shown.inputs[input];
        if let Some(rows) = self.kept().find(&key) {
            return Ok(Vectors::new(&key, rows).standing_as(standing));
        }
        let prepared;
        let ready = match &shown.ready {
            Some(ready) => &ready.0,
            None => {
                prepared = self.mmproj().ready(shown.medium, &shown.bytes)?;
                &prepared
            }
        };
        let none = || Error::NoEncoder { why: format!("there is no input {input}") };
        // What was prepared for this is dropped after it, so the inputs behind this one are encoded, too.
        let all = if shown.ready.is_some() { input..input + 1 } else { input..shown.inputs.len() };
        let inputs = ready.inputs();
        let mut rows = None;
        for at in all {
            let made = Arc::new(self.encode(*inputs.get(at).ok_or_else(none)?)?);
            self.kept().keep(shown.inputs[at].key, Arc::clone(&made));
            rows = if at == input { Some(made) } else { rows };
        }
        Ok(Vectors::new(&key, rows.ok_or_else(none)?).standing_as(standing))
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
