//! Pictures on the command line: read and looked at before any weights are loaded, then encoded by the file that belongs to the model.

use std::path::{Path, PathBuf};
use std::sync::Arc;

use anyhow::{Context as _, bail};
use kiln_engine::model::Model;
use kiln_engine::vision::prompt::Marker;
use kiln_engine::vision::{Arranged, Joined, Vision};
use kiln_media::{Limits, decode};

use crate::model::ModelFlags;

/// Bytes of a file that is read as a picture: more than any photograph has.
const MOST_BYTES: u64 = 256 << 20;

/// The encoder of a file, if the model can be shown pictures by it.
pub(crate) fn open_encoder(path: &Path, model: &Model) -> anyhow::Result<Arc<Vision>> {
    let vision = Vision::open(path).with_context(|| format!("cannot use {}", path.display()))?;
    vision.check_model(model).with_context(|| format!("cannot use {} here", path.display()))?;
    Ok(Arc::new(vision))
}

/// The bytes of a picture that can be decoded.
pub(crate) fn read_picture(path: &Path) -> anyhow::Result<Vec<u8>> {
    let unread = || format!("cannot read the picture {}", path.display());
    let bytes = std::fs::metadata(path).with_context(unread)?.len();
    if bytes > MOST_BYTES {
        bail!("the picture {} has {bytes} bytes; at most {MOST_BYTES} are read", path.display());
    }
    let bytes = std::fs::read(path).with_context(unread)?;
    decode(&bytes, &Limits::default()).with_context(unread)?;
    Ok(bytes)
}

/// Flags of commands that show pictures to a model.
#[derive(clap::Args, Clone, Debug, Default)]
pub(crate) struct PictureFlags {
    /// Encoder of pictures that belongs to the model, usually called mmproj-*.gguf
    #[arg(long, value_name = "FILE", requires = "image")]
    mmproj: Option<PathBuf>,
    /// Show no pictures, also where --mmproj stands before it or in the config file
    #[arg(long, overrides_with = "mmproj")]
    no_mmproj: bool,
    /// Picture to show before the prompt: PNG, JPEG, WebP, GIF, BMP or TIFF; several are shown in this order. Needs --mmproj
    #[arg(long, value_name = "FILE", conflicts_with_all = ["save_state", "load_state"])]
    image: Vec<PathBuf>,
}

/// Pictures that will be encoded.
pub(crate) struct Pictures {
    vision: Arc<Vision>,
    files: Vec<Vec<u8>>,
    marker: Marker,
}

impl PictureFlags {
    /// The pictures that were named, if the model can be shown some.
    pub(crate) fn open(&self, model: &Model) -> anyhow::Result<Option<Pictures>> {
        if self.image.is_empty() {
            return Ok(None);
        }
        let Some(path) = self.mmproj.as_ref().filter(|_| !self.no_mmproj) else {
            bail!(
                "--image needs the encoder of the model\nhint: --mmproj FILE names it; it is usually called mmproj-*.gguf and lies beside the model"
            );
        };
        let vision = open_encoder(path, model)?;
        let files = self.image.iter().map(|path| read_picture(path)).collect::<anyhow::Result<_>>()?;
        Ok(Some(Pictures { vision, files, marker: Marker::default() }))
    }
}

impl Pictures {
    /// What stands for a picture in a text.
    pub(crate) fn marker(&self) -> &str {
        self.marker.text()
    }

    /// A prompt with the pictures before it.
    pub(crate) fn before(&self, prompt: &str) -> String {
        self.marker.text().repeat(self.files.len()) + prompt
    }

    /// The tokens of a prompt whose parts the pictures stand between, with their vectors.
    pub(crate) fn join(&self, model: &Model, flags: &ModelFlags, parts: Vec<Vec<u32>>) -> anyhow::Result<Joined> {
        let shown = self.files.iter().enumerate().map(|(number, bytes)| self.vision.show(bytes, number));
        let arranged = Arranged::new(&model.tokenizer, parts, shown.collect::<Result<_, _>>()?)?;
        let mut encoder = flags.encoder(&self.vision)?;
        Ok(arranged.join(|picture, input| encoder.vectors(picture, input))?)
    }
}
