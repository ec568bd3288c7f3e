//! Which kind of GGUF file was given where a model is wanted: files without weights and adapters are told apart by a plain sentence.

use std::path::Path;

use kiln_gguf::Gguf;

use crate::LoadError;

/// Refuses what is no model: a vocabulary alone, a LoRA adapter.
pub fn check_model(gguf: &Gguf, path: &Path) -> Result<(), LoadError> {
    if gguf.metadata().get_str_or("general.type", "").is_ok_and(|kind| kind == "adapter") {
        return Err(LoadError::IsAdapter { path: path.to_owned() });
    }
    if gguf.tensors().is_empty() {
        return Err(LoadError::NoWeights { path: path.to_owned() });
    }
    Ok(())
}
