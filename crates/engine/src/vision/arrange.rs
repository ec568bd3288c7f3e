//! Text, words and pictures become one prompt: its tokens are known, and can be counted, before anything is encoded. Every piece of text
//! becomes tokens by itself.

use std::sync::Arc;

use kiln_media::{Limits, Prepared, decode};
use sha2::{Digest as _, Sha256};

use super::prompt::PicturePart;
use super::{Encoder, Vision};
use crate::Error;
use crate::run::{Span, Standing, Vectors, numbers};
use crate::tokenizer::{AddSpecial, ParseSpecial, Tokenizer};

/// A picture that is decoded, resized and cut, and not encoded yet.
#[derive(Clone, Debug)]
pub struct Shown {
    prepared: Prepared,
    parts: Vec<PicturePart<usize>>,
    inputs: Vec<Input>,
}

/// One input of the encoder.
#[derive(Clone, Debug)]
struct Input {
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

impl Vision {
    /// The picture in these bytes, the one of this number in its prompt, from 0.
    pub fn show(&self, bytes: &[u8], number: usize) -> Result<Shown, Error> {
        let prepared = self.prepare(&decode(bytes, &Limits::default())?)?;
        let content = Sha256::new_with_prefix(self.identity()).chain_update(Sha256::digest(bytes));
        let inputs = prepared.tiles.iter().chain(&prepared.overview).enumerate().map(|(at, pixels)| Input {
            key: content.clone().chain_update((at as u64).to_le_bytes()).finalize().into(),
            rows: self.rows(self.grid(pixels.size)),
            standing: self.standing(self.grid(pixels.size)),
        });
        Ok(Shown { inputs: inputs.collect(), parts: self.pieces(&prepared, number), prepared })
    }
}

impl Encoder {
    /// The vectors of one input of a picture. Those that were made last are kept: conversations show their pictures again with each
    /// question.
    pub fn vectors(&mut self, picture: &Shown, input: usize) -> Result<Vectors, Error> {
        let Input { key, standing, .. } = picture.inputs[input];
        if let Some(rows) = self.kept().find(&key) {
            return Ok(Vectors::new(&key, rows).standing_as(standing));
        }
        let mut pixels = picture.prepared.tiles.iter().chain(&picture.prepared.overview);
        let none = || Error::NoEncoder { why: format!("a picture has no input {input}") };
        let rows = Arc::new(self.encode(pixels.nth(input).ok_or_else(none)?)?);
        self.kept().keep(key, Arc::clone(&rows));
        Ok(Vectors::new(&key, rows).standing_as(standing))
    }
}

/// Where an input of a picture stands in a prompt.
#[derive(Clone, Copy, Debug)]
struct Place {
    start: usize,
    picture: usize,
    input: usize,
}

/// A prompt with pictures that are not encoded yet.
#[derive(Clone, Debug)]
pub struct Arranged {
    /// Its tokens, and what stands for vectors among them.
    pub tokens: Vec<u32>,
    pictures: Vec<Shown>,
    places: Vec<Place>,
}

/// A prompt with pictures: what stands for them among its tokens, and where they stand.
#[derive(Clone, Debug, Default)]
pub struct Joined {
    /// The tokens.
    pub tokens: Vec<u32>,
    /// The vectors.
    pub spans: Vec<Span>,
}

impl Arranged {
    /// Puts pictures between the parts of a text, of which there must be one more.
    pub fn new(tokenizer: &Tokenizer, parts: Vec<Vec<u32>>, pictures: Vec<Shown>) -> Result<Arranged, Error> {
        if parts.len() != pictures.len() + 1 {
            let (found, given) = (parts.len().saturating_sub(1), pictures.len());
            return Err(Error::LostPictures { found, given });
        }
        let (mut tokens, mut places) = (Vec::new(), Vec::new());
        for (picture, part) in parts.into_iter().enumerate() {
            tokens.extend(part);
            let Some(shown) = pictures.get(picture) else { continue };
            for piece in &shown.parts {
                match piece {
                    PicturePart::Words(text) => {
                        tokens.extend(tokenizer.encode(text, AddSpecial::No, ParseSpecial::Yes)?);
                    }
                    PicturePart::Input(input) => {
                        places.push(Place { start: tokens.len(), picture, input: *input });
                        let Input { key, rows, .. } = &shown.inputs[*input];
                        tokens.extend(numbers(key, *rows));
                    }
                }
            }
        }
        Ok(Arranged { tokens, pictures, places })
    }

    /// The prompt with its vectors, which `encode` makes of an input of a picture.
    pub fn join<E>(self, mut encode: impl FnMut(&Shown, usize) -> Result<Vectors, E>) -> Result<Joined, E> {
        let mut spans = Vec::with_capacity(self.places.len());
        for Place { start, picture, input } in self.places {
            spans.push(Span { start, vectors: encode(&self.pictures[picture], input)? });
        }
        Ok(Joined { tokens: self.tokens, spans })
    }
}
