//! Which kind of GGUF file was given where a model is wanted: files without weights and adapters are told apart by a plain sentence.

use std::path::Path;

use anyhow::bail;
use kiln_gguf::Gguf;

/// Refuses what is no model: a vocabulary alone, a LoRA adapter.
pub(crate) fn check_model(gguf: &Gguf, path: &Path) -> anyhow::Result<()> {
    let path = path.display();
    if gguf.metadata().get_str_or("general.type", "").is_ok_and(|kind| kind == "adapter") {
        bail!(
            "{path} is a LoRA adapter, not a model\nhint: give the model it was made for, and the adapter with --lora"
        );
    }
    if gguf.tensors().is_empty() {
        bail!(
            "{path} holds only a vocabulary, no weights\nhint: `kiln tokenize` can use it; to run a model, give its own file"
        );
    }
    Ok(())
}
