//! Pictures and sounds in a conversation: `@picture.png`, `@sound.wav`, `/image`, `/audio`, `--image` and `--audio`, and what becomes of them
//! when turns are taken back.

use std::collections::BTreeMap;
use std::path::PathBuf;
use std::sync::Arc;

use anyhow::{Context as _, bail};
use kiln_engine::media::{Arranged, Encoder, Joined, Marker, Medium, Mmproj, Shown};
use kiln_engine::model::Model;
use kiln_engine::text::Message;
use kiln_system::text::shown;

use super::Chat;
use super::files::at_home;
use crate::commands::media::{check_decodes, check_encodes, open_encoder, read_medium};
use crate::generate::Prompt;
use crate::model::ModelFlags;
use crate::output::say;

/// Flags of pictures and sounds in a conversation.
#[derive(clap::Args, Clone, Debug, Default)]
pub(super) struct SenseFlags {
    /// Encoders of pictures and sounds that belong to the model, in a file usually called mmproj-*.gguf, named as models are: @picture.png, @sound.wav, /image and /audio work then
    #[arg(long, value_name = "FILE")]
    mmproj: Option<PathBuf>,
    /// Talk without pictures and sounds, also where --mmproj stands before it or in the config file
    #[arg(long, overrides_with = "mmproj")]
    no_mmproj: bool,
    /// Picture to show with the first message; several are shown in this order. Needs --mmproj
    #[arg(long, value_name = "FILE")]
    image: Vec<PathBuf>,
    /// Sound to play with the first message, behind all pictures; several are played in this order. Needs --mmproj
    #[arg(long, value_name = "FILE")]
    audio: Vec<PathBuf>,
}

impl SenseFlags {
    /// The encoders that were named, loaded, if the model can be given what they encode.
    pub(super) fn open(&self, model: &Model, flags: &ModelFlags) -> anyhow::Result<Option<Senses>> {
        let Some(path) = self.mmproj.as_ref().filter(|_| !self.no_mmproj) else {
            for (flag, named) in [("--image", &self.image), ("--audio", &self.audio)] {
                if !named.is_empty() {
                    bail!("{flag} needs the encoder of the model\nhint: --mmproj FILE names it");
                }
            }
            return Ok(None);
        };
        let mmproj = open_encoder(path, model)?;
        for (medium, named) in [(Medium::Picture, &self.image), (Medium::Sound, &self.audio)] {
            if !named.is_empty() {
                check_encodes(&mmproj, medium).with_context(|| format!("cannot use {} here", path.display()))?;
            }
        }
        let encoder = flags.encoder(&mmproj)?;
        Ok(Some(Senses { mmproj, encoder }))
    }

    /// The pictures and sounds of the first message.
    pub(super) fn first(&self) -> anyhow::Result<Vec<Attached>> {
        let pictures = self.image.iter().map(|path| (Medium::Picture, path));
        let all = pictures.chain(self.audio.iter().map(|path| (Medium::Sound, path)));
        all.map(|(medium, path)| Attached::read(medium, &path.display().to_string())).collect()
    }
}

/// What a model sees and hears by.
pub(super) struct Senses {
    mmproj: Arc<Mmproj>,
    encoder: Encoder,
}

/// A picture or a sound that somebody attached.
#[derive(Clone, Debug)]
pub(super) struct Attached {
    pub(super) medium: Medium,
    /// As it was named.
    pub(super) name: String,
    pub(super) bytes: Arc<Vec<u8>>,
}

impl Attached {
    /// Reads it, and looks whether it is one.
    pub(super) fn read(medium: Medium, name: &str) -> anyhow::Result<Attached> {
        Ok(Attached { medium, name: name.to_owned(), bytes: Arc::new(read_medium(medium, &at_home(name))?) })
    }

    /// The same of bytes that were read already.
    pub(super) fn of(medium: Medium, name: &str, bytes: Vec<u8>) -> anyhow::Result<Attached> {
        check_decodes(medium, &bytes).with_context(|| format!("cannot attach {}", shown(name)))?;
        Ok(Attached { medium, name: name.to_owned(), bytes: Arc::new(bytes) })
    }
}

/// The pictures and sounds of a conversation.
#[derive(Default)]
pub(super) struct Gallery {
    marker: Marker,
    /// Those of each message that has some, by its number.
    of: BTreeMap<usize, Vec<Attached>>,
    /// Those of the next message.
    next: Vec<Attached>,
}

impl Gallery {
    /// With some for the first message.
    pub(super) fn new(next: Vec<Attached>) -> Gallery {
        Gallery { next, ..Gallery::default() }
    }

    /// Attaches some to the next message.
    pub(super) fn wait(&mut self, attached: Vec<Attached>) {
        self.next.extend(attached);
    }

    /// A text that becomes message `number`, with the pictures and sounds that wait for it.
    pub(super) fn hang(&mut self, number: usize, text: &str) -> String {
        let attached = std::mem::take(&mut self.next);
        let text = self.marker.text().repeat(attached.len()) + text;
        if !attached.is_empty() {
            self.of.insert(number, attached);
        }
        text
    }

    /// The messages from this number on are gone; gives the pictures and sounds of the first of them.
    pub(super) fn take_back(&mut self, number: usize) -> Vec<Attached> {
        self.of.split_off(&number).remove(&number).unwrap_or_default()
    }

    /// The message is as it was again.
    pub(super) fn put_back(&mut self, number: usize, attached: Vec<Attached>) {
        if !attached.is_empty() {
            self.of.insert(number, attached);
        }
    }

    /// Nothing was ever attached.
    pub(super) fn clear(&mut self) {
        (self.of, self.next) = (BTreeMap::new(), Vec::new());
    }

    /// The words of a message, without what stands for its pictures and sounds.
    pub(super) fn words(&self, message: &Message) -> String {
        message.content.to_text().replace(self.marker.text(), "")
    }

    /// A message as a file keeps it: in the place of pictures and sounds stand their names.
    pub(super) fn kept(&self, number: usize, message: &Message) -> Message {
        let Some(attached) = self.of.get(&number) else { return message.clone() };
        let names: String = attached.iter().map(|one| format!("[{}: {}]\n", one.medium.name(), one.name)).collect();
        Message { content: (names + &self.words(message)).into(), ..message.clone() }
    }

    /// How many pictures and sounds the conversation has.
    pub(super) fn count(&self) -> usize {
        self.of.values().map(Vec::len).sum()
    }

    /// What stands for a picture or a sound, where messages from this number on have some.
    pub(super) fn between(&self, from: usize) -> Option<&str> {
        self.of.range(from..).next().map(|_| self.marker.text())
    }

    /// The pictures and sounds of messages from this number on, decoded.
    fn shown(&self, from: usize, mmproj: &Mmproj) -> anyhow::Result<Vec<Shown>> {
        let attached = self.of.range(from..).flat_map(|(_, attached)| attached).enumerate();
        let show = |(number, one): (usize, &Attached)| {
            let taken = mmproj.take(one.medium, &one.bytes, number);
            taken.with_context(|| format!("cannot attach {}", shown(&one.name)))
        };
        attached.map(show).collect()
    }
}

/// A conversation as the model reads it, with the pictures and sounds that are not encoded yet.
pub(super) struct Asked {
    pub(super) prompt: Prompt,
    arranged: Arranged,
}

impl Asked {
    /// Tokens, and rows of pictures and sounds, in all.
    pub(super) fn length(&self) -> usize {
        self.arranged.tokens.len()
    }

    /// The tokens with the vectors of the pictures and sounds.
    pub(super) fn join(self, senses: Option<&mut Senses>) -> anyhow::Result<(Prompt, Joined)> {
        let joined = match senses {
            Some(senses) => self.arranged.join(|shown, input| senses.encoder.vectors(shown, input))?,
            None => Joined { tokens: self.arranged.tokens, ..Joined::default() },
        };
        Ok((self.prompt, joined))
    }
}

impl Chat<'_> {
    /// Puts the pictures and sounds of the messages that the model still sees into a prompt.
    pub(super) fn arranged(&self, mut prompt: Prompt) -> anyhow::Result<Asked> {
        let shown = match (&self.loaded.senses, self.gallery.between(self.left_out)) {
            (_, None) => Vec::new(),
            (Some(senses), Some(_)) => self.gallery.shown(self.left_out, &senses.mmproj)?,
            (None, Some(_)) => bail!(
                "the conversation has pictures or sounds, and this model is talked to without an encoder of such\nhint: /clear starts over; `kiln chat MODEL --mmproj FILE` shows pictures and plays sounds"
            ),
        };
        let parts = std::mem::take(&mut prompt.parts);
        Ok(Asked { prompt, arranged: Arranged::new(&self.loaded.model.tokenizer, parts, shown)? })
    }

    /// Refuses pictures and sounds that could not be encoded.
    pub(super) fn needs_encoder(&self, medium: Medium, name: &str) -> anyhow::Result<()> {
        match &self.loaded.senses {
            Some(senses) => {
                check_encodes(&senses.mmproj, medium).with_context(|| format!("cannot attach {}", shown(name)))
            }
            None => bail!(
                "{} is a {}, and there is no encoder of {}\nhint: `kiln chat MODEL --mmproj FILE` names the one that belongs to the model, usually called mmproj-*.gguf",
                shown(name),
                medium.name(),
                medium.plural()
            ),
        }
    }

    /// `/image` and `/audio`: attaches a picture or a sound to the next message, or says what will be attached.
    pub(super) fn attach(&mut self, medium: Medium, name: &str) -> anyhow::Result<()> {
        if !name.is_empty() {
            self.needs_encoder(medium, name)?;
            self.gallery.wait(vec![Attached::read(medium, name.trim_matches(['"', '\'']))?]);
        }
        let names: Vec<String> = self.gallery.next.iter().map(|one| shown(&one.name)).collect();
        match names.is_empty() {
            true => say(
                "nothing waits for the next message\nhint: /image FILE shows a picture with it, /audio FILE plays a sound",
            ),
            false => say(&format!("with the next message: {}", names.join(", "))),
        }
        Ok(())
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn picture(name: &str) -> Attached {
        Attached { medium: Medium::Picture, name: name.to_owned(), bytes: Arc::default() }
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
