//! Errors by audience: what is wrong with the files, and what is wrong with the devices. Messages name no flags: a program that has some adds
//! its own hints.

use std::path::PathBuf;

use crate::chat::ChatError;

/// What can go wrong with a model, by who can help it: whoever gave the file, the machine, or the request.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum Error {
    /// The model's file, or an adapter's.
    #[error(transparent)]
    Load(#[from] LoadError),
    /// A device, or how the model was to be placed on several.
    #[error(transparent)]
    Device(#[from] DeviceError),
    /// What a request asks for.
    #[error(transparent)]
    Request(#[from] RequestError),
    /// The engine.
    #[error(transparent)]
    Engine(#[from] kiln_engine::Error),
}

/// What is wrong with a request.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum RequestError {
    /// The conversation cannot be continued, or its format cannot be kept.
    #[error(transparent)]
    Chat(#[from] ChatError),
    /// A conversation without messages.
    #[error("the conversation has no messages")]
    NoMessages,
    /// A field of a request in JSON.
    #[error("`{field}` {why}")]
    Field {
        /// The field.
        field: String,
        /// What is wrong with it.
        why: String,
    },
    /// A request that is no JSON, or has an unknown field.
    #[error("the request is not understood: {why}")]
    Json {
        /// What is wrong.
        why: String,
    },
}

impl From<ChatError> for Error {
    fn from(why: ChatError) -> Error {
        match why {
            ChatError::Engine(why) => Error::Engine(why),
            why => Error::Request(RequestError::Chat(why)),
        }
    }
}

/// What is wrong with a file.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum LoadError {
    /// The file cannot be read. The cause names it.
    #[error("cannot run the model: {0}")]
    File(kiln_gguf::Error),
    /// The file holds no model that runs.
    #[error("cannot run {}: {why}", path.display())]
    Model {
        /// The file.
        path: PathBuf,
        /// Why not.
        why: kiln_engine::Error,
    },
    /// The file is an adapter.
    #[error("{} is a LoRA adapter, not a model\nhint: open the model it was made for, with the adapter on it", path.display())]
    IsAdapter {
        /// The file.
        path: PathBuf,
    },
    /// The file has no weights.
    #[error("{} holds only a vocabulary, no weights\nhint: `kiln tokenize` can use it; to run a model, give its own file", path.display())]
    NoWeights {
        /// The file.
        path: PathBuf,
    },
    /// An adapter cannot be used. The cause names its file.
    #[error(transparent)]
    AdapterFile(kiln_engine::Error),
    /// An adapter cannot be used.
    #[error("cannot use the adapter {}: {why}", path.display())]
    Adapter {
        /// The file.
        path: PathBuf,
        /// Why not.
        why: kiln_engine::Error,
    },
}

/// What is wrong with a device or with what was asked of it.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum DeviceError {
    /// The device cannot be opened or used.
    #[error(transparent)]
    Gpu(#[from] kiln_gpu::Error),
    /// The model cannot be placed as it was asked for.
    #[error(transparent)]
    Placing(#[from] PlacingError),
    /// A variable of the environment has a value that makes no sense.
    #[error("{0}")]
    Setting(String),
}

/// Why a model cannot be placed as it was asked for.
#[derive(Clone, Debug, PartialEq, thiserror::Error)]
#[non_exhaustive]
pub enum PlacingError {
    /// All shares are zero.
    #[error("the split {split:?} gives no device a share")]
    NoShares {
        /// What was given.
        split: Vec<f64>,
    },
    /// A rule without a device.
    #[error("the placing rule {rule:?} names no device\nhint: write PATTERN=DEVICE, as 'blk.*.ffn_.*_exps=cpu'")]
    NoDeviceNamed {
        /// The rule as it was written.
        rule: String,
    },
    /// A rule for a device that is not open.
    #[error("the placing rule {rule:?}: there is no device {device:?} here, only {there}")]
    NoSuchDevice {
        /// The rule as it was written.
        rule: String,
        /// The device that it names.
        device: String,
        /// The devices that are there.
        there: String,
    },
    /// All layers were to be on GPUs, and there is none.
    #[error("all layers on GPUs needs a GPU, and the CPU alone would run this model")]
    LayersNeedGpu,
    /// Shares were given, and there is no GPU.
    #[error("a split needs a GPU, and the CPU alone would run this model")]
    SplitNeedsGpu,
    /// Layers of other hosts are shared out by their own split.
    #[error("layers that lie on several hosts are placed by the split of the hosts alone")]
    NotWithStages,
    /// Shares for another number of devices than there are.
    #[error("{given} shares were given for {devices} devices: those of this machine, then one for each stage")]
    StageShares {
        /// Shares.
        given: usize,
        /// Devices.
        devices: usize,
    },
    /// A rule names a GPU, and there is none.
    #[error("the placing rule {rule:?} needs a GPU, and the CPU alone would run this model")]
    RuleNeedsGpu {
        /// The rule as it was written.
        rule: String,
    },
}

impl From<kiln_gpu::Error> for Error {
    fn from(why: kiln_gpu::Error) -> Error {
        Error::Device(DeviceError::Gpu(why))
    }
}

impl From<PlacingError> for Error {
    fn from(why: PlacingError) -> Error {
        Error::Device(DeviceError::Placing(why))
    }
}
