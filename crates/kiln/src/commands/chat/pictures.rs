//! Pictures in a conversation: `@picture.png`, `/image FILE` and `--image`, and what becomes of them when turns are taken back.

use std::collections::BTreeMap;
use std::path::PathBuf;
use std::sync::Arc;

use anyhow::{Context as _, bail};
use kiln_engine::model::Model;
use kiln_engine::text::Message;
use kiln_engine::vision::prompt::Marker;
use kiln_engine::vision::{Arranged, Encoder, Joined, Shown, Vision};
use kiln_media::{Limits, decode};
use kiln_system::text::shown;

use super::Chat;
use super::files::at_home;
use crate::commands::pictures::{open_encoder, read_picture};
use crate::generate::Prompt;
use crate::model::ModelFlags;
use crate::output::say;

/// Flags of pictures in a conversation.
#[derive(clap::Args, Clone, Debug, Default)]
pub(super) struct EyesFlags {
    /// Encoder of pictures that belongs to the model, usually called mmproj-*.gguf: @picture.png and /image show pictures then
    #[arg(long, value_name = "FILE")]
    mmproj: Option<PathBuf>,
    /// Talk without pictures, also where --mmproj stands before it or in the config file
    #[arg(long, overrides_with = "mmproj")]
    no_mmproj: bool,
    /// Picture to show with the first message; several are shown in this order. Needs --mmproj
    #[arg(long, value_name = "FILE")]
    image: Vec<PathBuf>,
}

impl EyesFlags {
    /// The encoder that was named, loaded, if the model can be shown pictures by it.
    pub(super) fn open(&self, model: &Model, flags: &ModelFlags) -> anyhow::Result<Option<Eyes>> {
        let Some(path) = self.mmproj.as_ref().filter(|_| !self.no_mmproj) else {
            if !self.image.is_empty() {
                bail!("--image needs the encoder of the model\nhint: --mmproj FILE names it");
            }
            return Ok(None);
        };
        let vision = open_encoder(path, model)?;
        let encoder = flags.encoder(&vision)?;
        Ok(Some(Eyes { vision, encoder }))
    }

    /// The pictures of the first message.
    pub(super) fn first(&self) -> anyhow::Result<Vec<Picture>> {
        self.image.iter().map(|path| Picture::read(&path.display().to_string())).collect()
    }
}

/// What a model is shown pictures by.
pub(super) struct Eyes {
    vision: Arc<Vision>,
    encoder: Encoder,
}

/// A picture that somebody showed.
#[derive(Clone, Debug)]
pub(super) struct Picture {
    /// As it was named.
    pub(super) name: String,
    pub(super) bytes: Arc<Vec<u8>>,
}

impl Picture {
    /// Reads it, and looks whether it is one.
    pub(super) fn read(name: &str) -> anyhow::Result<Picture> {
        Ok(Picture { name: name.to_owned(), bytes: Arc::new(read_picture(&at_home(name))?) })
    }

    /// The same of bytes that were read already.
    pub(super) fn of(name: &str, bytes: Vec<u8>) -> anyhow::Result<Picture> {
        decode(&bytes, &Limits::default()).with_context(|| format!("cannot show {}", shown(name)))?;
        Ok(Picture { name: name.to_owned(), bytes: Arc::new(bytes) })
    }
}

/// The pictures of a conversation.
#[derive(Default)]
pub(super) struct Gallery {
    marker: Marker,
    /// Those of each message that has some, by its number.
    of: BTreeMap<usize, Vec<Picture>>,
    /// Those of the next message.
    next: Vec<Picture>,
}

impl Gallery {
    /// With pictures for the first message.
    pub(super) fn new(next: Vec<Picture>) -> Gallery {
        Gallery { next, ..Gallery::default() }
    }

    /// Shows pictures with the next message.
    pub(super) fn wait(&mut self, pictures: Vec<Picture>) {
        self.next.extend(pictures);
    }

    /// A text that becomes message `number`, with the pictures that wait for it.
    pub(super) fn hang(&mut self, number: usize, text: &str) -> String {
        let pictures = std::mem::take(&mut self.next);
        let text = self.marker.text().repeat(pictures.len()) + text;
        if !pictures.is_empty() {
            self.of.insert(number, pictures);
        }
        text
    }

    /// The messages from this number on are gone; gives the pictures of the first of them.
    pub(super) fn take_back(&mut self, number: usize) -> Vec<Picture> {
        self.of.split_off(&number).remove(&number).unwrap_or_default()
    }

    /// The message is as it was again.
    pub(super) fn put_back(&mut self, number: usize, pictures: Vec<Picture>) {
        if !pictures.is_empty() {
            self.of.insert(number, pictures);
        }
    }

    /// Nothing was ever shown.
    pub(super) fn clear(&mut self) {
        (self.of, self.next) = (BTreeMap::new(), Vec::new());
    }

    /// The words of a message, without what stands for its pictures.
    pub(super) fn words(&self, message: &Message) -> String {
        message.content.to_text().replace(self.marker.text(), "")
    }

    /// A message as a file keeps it: in the place of pictures stand their names.
    pub(super) fn kept(&self, number: usize, message: &Message) -> Message {
        let Some(pictures) = self.of.get(&number) else { return message.clone() };
        let names: String = pictures.iter().map(|picture| format!("[picture: {}]\n", picture.name)).collect();
        Message { content: (names + &self.words(message)).into(), ..message.clone() }
    }

    /// How many pictures the conversation shows.
    pub(super) fn count(&self) -> usize {
        self.of.values().map(Vec::len).sum()
    }

    /// What stands for a picture, where messages from this number on show some.
    pub(super) fn between(&self, from: usize) -> Option<&str> {
        self.of.range(from..).next().map(|_| self.marker.text())
    }

    /// The pictures of messages from this number on, decoded.
    fn shown(&self, from: usize, vision: &Vision) -> anyhow::Result<Vec<Shown>> {
        let pictures = self.of.range(from..).flat_map(|(_, pictures)| pictures).enumerate();
        let show = |(number, picture): (usize, &Picture)| {
            vision.show(&picture.bytes, number).with_context(|| format!("cannot show {}", shown(&picture.name)))
        };
        pictures.map(show).collect()
    }
}

/// A conversation as the model reads it, with the pictures that are not encoded yet.
pub(super) struct Asked {
    pub(super) prompt: Prompt,
    arranged: Arranged,
}

impl Asked {
    /// Tokens and rows of pictures in all.
    pub(super) fn length(&self) -> usize {
        self.arranged.tokens.len()
    }

    /// The tokens with the vectors of the pictures.
    pub(super) fn join(self, eyes: Option<&mut Eyes>) -> anyhow::Result<(Prompt, Joined)> {
        let joined = match eyes {
            Some(eyes) => self.arranged.join(|picture, input| eyes.encoder.vectors(picture, input))?,
            None => Joined { tokens: self.arranged.tokens, ..Joined::default() },
        };
        Ok((self.prompt, joined))
    }
}

impl Chat<'_> {
    /// Puts the pictures of the messages that the model still sees into a prompt.
    pub(super) fn arranged(&self, mut prompt: Prompt) -> anyhow::Result<Asked> {
        let shown = match (&self.loaded.eyes, self.gallery.between(self.left_out)) {
            (_, None) => Vec::new(),
            (Some(eyes), Some(_)) => self.gallery.shown(self.left_out, &eyes.vision)?,
            (None, Some(_)) => bail!(
                "the conversation shows pictures, and this model is talked to without an encoder of pictures\nhint: /clear starts over; `kiln chat MODEL --mmproj FILE` shows pictures"
            ),
        };
        let parts = std::mem::take(&mut prompt.parts);
        Ok(Asked { prompt, arranged: Arranged::new(&self.loaded.model.tokenizer, parts, shown)? })
    }

    /// Refuses pictures that could not be shown.
    pub(super) fn needs_eyes(&self, name: &str) -> anyhow::Result<()> {
        if self.loaded.eyes.is_none() {
            bail!(
                "{} is a picture, and there is no encoder of pictures\nhint: `kiln chat MODEL --mmproj FILE` names the one that belongs to the model, usually called mmproj-*.gguf",
                shown(name)
            );
        }
        Ok(())
    }

    /// `/image`: shows a picture with the next message, or says which will be shown.
    pub(super) fn image(&mut self, name: &str) -> anyhow::Result<()> {
        if !name.is_empty() {
            self.needs_eyes(name)?;
            self.gallery.wait(vec![Picture::read(name.trim_matches(['"', '\'']))?]);
        }
        let names: Vec<String> = self.gallery.next.iter().map(|picture| shown(&picture.name)).collect();
        match names.is_empty() {
            true => say("no picture waits for the next message\nhint: /image FILE shows one with it"),
            false => say(&format!("with the next message: {}", names.join(", "))),
        }
        Ok(())
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn picture(name: &str) -> Picture {
        Picture { name: name.to_owned(), bytes: Arc::default() }
    }

    #[test]
    fn pictures_stay_with_their_messages() {
        let mut gallery = Gallery::new(vec![picture("a.png")]);
        let first = gallery.hang(0, "what is it?");
        assert!(first.ends_with("__>what is it?") && gallery.between(0).is_some());
        gallery.wait(vec![picture("b.png"), picture("c.png")]);
        let second = Message::new("user", gallery.hang(2, "and these?"));
        assert_eq!((gallery.count(), gallery.words(&second).as_str()), (3, "and these?"));
        assert_eq!(gallery.kept(2, &second).content.to_text(), "[picture: b.png]\n[picture: c.png]\nand these?");
        assert_eq!(gallery.kept(1, &Message::new("assistant", "x")).content.to_text(), "x");
        // A turn that is taken back takes its pictures along, and gives them to who says it anew.
        let back = gallery.take_back(2);
        assert_eq!((back.len(), gallery.count()), (2, 1));
        assert!(gallery.between(1).is_none(), "later messages show nothing");
        gallery.put_back(2, back);
        assert_eq!(gallery.count(), 3);
        assert_eq!(gallery.take_back(0).len(), 1);
        assert_eq!(gallery.count(), 0);
        // Who types a marker types text: another one is drawn for each program.
        assert_ne!(Gallery::new(vec![picture("a.png")]).hang(0, "what is it?"), first);
        assert!(gallery.words(&Message::new("user", "<__media__>")).contains("<__media__>"));
    }
}
