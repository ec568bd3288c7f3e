//! What a caller may want to tell its user while a model is opened. Nothing here is a failure.

use std::fmt;
use std::sync::Arc;

/// A fact about how a model was opened. `Display` puts it into words; a program with flags may use its own.
#[derive(Clone, Debug, PartialEq)]
#[non_exhaustive]
pub enum Note {
    /// There is no GPU, and none was asked for: the CPU runs the model.
    NoGpu {
        /// Why, in words.
        why: String,
        /// There is a Vulkan device, but it is a software one, as on every machine that has Mesa and no GPU.
        only_software: bool,
    },
    /// The CPU reads memory faster than the integrated GPU beside it.
    CpuIsFaster {
        /// The GPU.
        gpu: String,
    },
    /// Not one layer fits on the GPU: the CPU runs the model.
    NoLayerFits {
        /// The GPU.
        gpu: String,
    },
    /// GPU layers were asked for, and there is no GPU.
    LayersIgnored {
        /// As many as were asked for.
        asked: usize,
    },
    /// More GPU layers were asked for than the model has.
    MoreLayersThan {
        /// As many as were asked for.
        asked: usize,
        /// As many as there are.
        layers: usize,
    },
    /// A placing rule fits the name of no tensor.
    RuleFitsNothing {
        /// The rule.
        rule: String,
    },
    /// A key of the file keeps its value, though another one was given.
    KeyStays {
        /// Which, and why.
        why: String,
    },
    /// Vectors of norms in an adapter are not applied.
    NormsLeftOut {
        /// How many.
        count: usize,
        /// The adapter's file.
        path: String,
    },
}

impl fmt::Display for Note {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Note::NoGpu { why, .. } => {
                write!(f, "running on the CPU: {}", why.lines().next().unwrap_or_default())
            }
            Note::CpuIsFaster { gpu } => write!(f, "running on the CPU, which reads memory faster than {gpu}"),
            Note::NoLayerFits { gpu } => write!(f, "running on the CPU: not one layer fits on {gpu}"),
            Note::LayersIgnored { asked } => {
                write!(f, "{asked} GPU layers are ignored: the CPU alone runs the model")
            }
            Note::MoreLayersThan { asked, layers } => {
                write!(f, "{asked} GPU layers: the model has {layers} layers, and all of them are offloaded")
            }
            Note::RuleFitsNothing { rule } => write!(f, "{rule:?} matches no tensor of the model"),
            Note::KeyStays { why } => f.write_str(why),
            Note::NormsLeftOut { count, path } => {
                write!(f, "{count} vectors of norms in the adapter {path} are left out")
            }
        }
    }
}

/// Hears of notes while a model is opened.
#[derive(Clone)]
pub struct Watch(Arc<dyn Fn(Note) + Send + Sync>);

impl Watch {
    /// Passes each note to a function.
    pub fn new(hear: impl Fn(Note) + Send + Sync + 'static) -> Watch {
        Watch(Arc::new(hear))
    }

    pub(crate) fn note(&self, note: Note) {
        (self.0)(note);
    }
}

impl Default for Watch {
    /// Notes go to the log.
    fn default() -> Watch {
        Watch::new(|note| log::info!("{note}"))
    }
}

impl fmt::Debug for Watch {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("Watch")
    }
}
