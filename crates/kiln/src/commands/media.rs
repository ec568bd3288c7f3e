//! Pictures and sounds on the command line: read and looked at before any weights are loaded, then encoded by the file that belongs to the
//! model.

use std::path::{Path, PathBuf};
use std::sync::Arc;

use anyhow::{Context as _, bail};
use kiln_engine::media::{Arranged, Joined, Marker, Medium, Mmproj};
use kiln_engine::model::Model;
use kiln_media::{Limits, SoundLimits, decode, decode_sound};

use crate::model::ModelFlags;
use crate::store::resolve;

/// Bytes of a file that is read as a picture or a sound: more than any photograph has, and an hour of speech without loss.
const MOST_BYTES: u64 = 256 << 20;

/// The encoders of a file, if the model can be given what they encode. It is named as models are: it may be a file, an address, or a name in the
/// store.
pub(crate) fn open_encoder(named: &Path, model: &Model) -> anyhow::Result<Arc<Mmproj>> {
    let path = resolve(Some(named)).with_context(|| format!("cannot use {} as an encoder", named.display()))?;
    let mmproj = Mmproj::open(&path).with_context(|| format!("cannot use {}", path.display()))?;
    mmproj.check_model(model).with_context(|| format!("cannot use {} here", path.display()))?;
    Ok(Arc::new(mmproj))
}

/// Refuses what a file of encoders does not encode.
pub(crate) fn check_encodes(mmproj: &Mmproj, medium: Medium) -> anyhow::Result<()> {
    match medium {
        Medium::Picture => mmproj.needs_vision().map(|_| ())?,
        Medium::Sound => mmproj.needs_audio().map(|_| ())?,
    }
    Ok(())
}

/// Looks whether bytes can be decoded.
pub(crate) fn check_decodes(medium: Medium, bytes: &[u8]) -> anyhow::Result<()> {
    match medium {
        Medium::Picture => _ = decode(bytes, &Limits::default())?,
        Medium::Sound => _ = decode_sound(bytes, &SoundLimits::default())?,
    }
    Ok(())
}

/// The bytes of a picture or a sound that can be decoded.
pub(crate) fn read_medium(medium: Medium, path: &Path) -> anyhow::Result<Vec<u8>> {
    let unread = || format!("cannot read the {} {}", medium.name(), path.display());
    let bytes = std::fs::metadata(path).with_context(unread)?.len();
    if bytes > MOST_BYTES {
        bail!("the {} {} has {bytes} bytes; at most {MOST_BYTES} are read", medium.name(), path.display());
    }
    let bytes = std::fs::read(path).with_context(unread)?;
    check_decodes(medium, &bytes).with_context(unread)?;
    Ok(bytes)
}

/// Flags of commands that show pictures and play sounds to a model.
#[derive(clap::Args, Clone, Debug, Default)]
pub(crate) struct MediaFlags {
    /// Encoders of pictures and sounds that belong to the model, in a file usually called mmproj-*.gguf; named as models are
    #[arg(long, value_name = "FILE")]
    mmproj: Option<PathBuf>,
    /// Give it no pictures and sounds, also where --mmproj stands before it or in the config file
    #[arg(long, overrides_with = "mmproj")]
    no_mmproj: bool,
    /// Picture to show before the prompt: PNG, JPEG, WebP, GIF, BMP or TIFF; several are shown in this order. Needs --mmproj
    #[arg(long, value_name = "FILE", conflicts_with_all = ["save_state", "load_state"])]
    image: Vec<PathBuf>,
    /// Sound to play before the prompt, behind all pictures: WAV, MP3, FLAC or OGG; several are played in this order. Needs --mmproj
    #[arg(long, value_name = "FILE", conflicts_with_all = ["save_state", "load_state"])]
    audio: Vec<PathBuf>,
}

/// Pictures and sounds that will be encoded.
pub(crate) struct Media {
    mmproj: Arc<Mmproj>,
    files: Vec<(Medium, Vec<u8>)>,
    marker: Marker,
}

impl MediaFlags {
    /// The pictures and sounds that were named, if the model can be given some.
    pub(crate) fn open(&self, model: &Model) -> anyhow::Result<Option<Media>> {
        let named = self.mmproj.as_ref().filter(|_| !self.no_mmproj);
        let pictures = self.image.iter().map(|path| (Medium::Picture, path));
        let asked: Vec<(Medium, &PathBuf)> =
            pictures.chain(self.audio.iter().map(|path| (Medium::Sound, path))).collect();
        let Some((first, _)) = asked.first() else {
            if named.is_some() {
                bail!(
                    "--mmproj is for pictures and sounds\nhint: --image FILE shows a picture, --audio FILE plays a sound"
                );
            }
            return Ok(None);
        };
        let Some(path) = named else {
            let flag = if *first == Medium::Picture { "--image" } else { "--audio" };
            bail!(
                "{flag} needs the encoder of the model\nhint: --mmproj FILE names it; it is usually called mmproj-*.gguf and lies beside the model; hf:OWNER/REPO:mmproj-F16.gguf fetches one"
            );
        };
        let mmproj = open_encoder(path, model)?;
        let read = |(medium, file): (Medium, &PathBuf)| -> anyhow::Result<(Medium, Vec<u8>)> {
            check_encodes(&mmproj, medium).with_context(|| format!("cannot use {} here", path.display()))?;
            Ok((medium, read_medium(medium, file)?))
        };
        let files = asked.into_iter().map(read).collect::<anyhow::Result<_>>()?;
        Ok(Some(Media { mmproj, files, marker: Marker::default() }))
    }
}

impl Media {
    /// What stands for a picture or a sound in a text.
    pub(crate) fn marker(&self) -> &str {
        self.marker.text()
    }

    /// A prompt with the pictures and sounds before it.
    pub(crate) fn before(&self, prompt: &str) -> String {
        self.marker.text().repeat(self.files.len()) + prompt
    }

    /// The tokens of a prompt whose parts the pictures and sounds stand between, with their vectors.
    pub(crate) fn join(&self, model: &Model, flags: &ModelFlags, parts: Vec<Vec<u32>>) -> anyhow::Result<Joined> {
        let shown =
            self.files.iter().enumerate().map(|(number, (medium, bytes))| self.mmproj.take(*medium, bytes, number));
        let arranged = Arranged::new(&model.tokenizer, parts, shown.collect::<Result<_, _>>()?)?;
        let mut encoder = flags.encoder(&self.mmproj)?;
        Ok(arranged.join(|shown, input| encoder.vectors(shown, input))?)
    }
}
