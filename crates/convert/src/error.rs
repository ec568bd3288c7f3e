//! Why a folder cannot be converted.

use std::path::PathBuf;

use kiln_system::text::shown;

/// As usual.
pub type Result<T, E = Error> = std::result::Result<T, E>;

/// Why a folder cannot be converted.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
#[allow(missing_docs, reason = "the message of each variant says what its fields are")]
pub enum Error {
    #[error("cannot read {}: {why}\nhint: the folder should be one as Hugging Face has it, with config.json", path.display())]
    Io { path: PathBuf, why: std::io::Error },
    #[error("there is no folder {}\nhint: give the folder that `hf download` or `git clone` made", folder.display())]
    NoFolder { folder: PathBuf },
    #[error("there is no config.json in {}\nhint: give the folder that `hf download` or `git clone` made", folder.display())]
    NoConfig { folder: PathBuf },
    #[error(
        "config.json: Kiln does not know the setting {} ({}), which may change what the model computes\n\
         hint: if it does not, remove it from config.json",
        shown(key),
        shown(value)
    )]
    Setting { key: String, value: String },
    #[error("{} is damaged: {why}\nhint: fetch it again", path.display())]
    Damaged { path: PathBuf, why: String },
    #[error("models of the class {} cannot be converted\nhint: these can: {known}", shown(class))]
    Family { class: String, known: String },
    #[error("config.json: {what}\nhint: the model is of a kind that `kiln convert` does not know yet")]
    Config { what: String },
    #[error(
        "the tensor {} has no place in a model of this kind\nhint: the folder may hold an adapter or another model",
        shown(name)
    )]
    UnknownTensor { name: String },
    #[error("the tensor {} is missing\nhint: are all .safetensors files there?", shown(name))]
    MissingTensor { name: String },
    #[error("the tensor {} is {got:?}, want {want}", shown(name))]
    Shape { name: String, got: Vec<usize>, want: String },
    #[error(
        "the tensor {} holds values of the type {}, which is not supported\nhint: a folder with F32, F16 or BF16 weights works",
        shown(name),
        shown(dtype)
    )]
    Type { name: String, dtype: String },
    #[error("{what}\nhint: {hint}")]
    Tokenizer { what: String, hint: String },
    #[error(transparent)]
    Gguf(#[from] kiln_gguf::Error),
}
