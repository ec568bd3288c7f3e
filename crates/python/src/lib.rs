//! The module `kiln._kiln`: a model, and the pieces of its answers, for the package `kiln` in `python`, which speaks as `llama-cpp-python`
//! does. Requests and pieces are JSON, as in the interface for C; vectors and logits are bytes of `float32`.
//!
//! Nothing here holds Python's lock while it waits, and whatever waits looks for Ctrl-C several times a second.

mod hook;
mod model;
mod pieces;
mod wake;

use std::io::ErrorKind;
use std::time::Duration;

use pyo3::exceptions::{PyFileNotFoundError, PyRuntimeError, PyValueError};
use pyo3::prelude::*;

/// How long to wait for the engine before looking for Ctrl-C.
const PATIENCE: Duration = Duration::from_millis(50);

/// What went wrong, as Python's own kinds of errors: a missing file, a wrong request, or what happened while it was answered.
fn error(why: &kiln_llm::Error) -> PyErr {
    use kiln_llm::{Error, LoadError};
    let said = why.to_string();
    match why {
        Error::Load(LoadError::File(kiln_gguf::Error::Io { why, .. })) if why.kind() == ErrorKind::NotFound => {
            PyFileNotFoundError::new_err(said)
        }
        Error::Load(_) | Error::Request(_) => PyValueError::new_err(said),
        _ => PyRuntimeError::new_err(said),
    }
}

#[pymodule]
mod _kiln {
    #[pymodule_export]
    use super::model::Model;
    #[pymodule_export]
    use super::pieces::{AsyncPieces, Pieces};

    #[pymodule_export]
    const VERSION: &str = env!("CARGO_PKG_VERSION");
}
