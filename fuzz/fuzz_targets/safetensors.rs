//! A folder of Hugging Face with any configuration, any header of weights and any vocabulary is converted or refused.
//! The input is split at zero bytes: config.json, the header of model.safetensors, tokenizer.json.

#![no_main]

use std::sync::LazyLock;

use kiln_convert::{Conversion, Options};
use kiln_gguf::TensorType;
use libfuzzer_sys::fuzz_target;
use tempfile::TempDir;

/// Bytes of weights behind the header: zeros, as a file has them that was only made longer.
const WEIGHTS: u64 = 1 << 20;

static FOLDER: LazyLock<TempDir> = LazyLock::new(|| {
    let memory = std::path::Path::new("/dev/shm");
    let folder = if memory.is_dir() { tempfile::tempdir_in(memory) } else { tempfile::tempdir() };
    folder.expect("a folder should be made")
});

fuzz_target!(|bytes: &[u8]| {
    let mut parts = bytes.splitn(3, |byte| *byte == 0);
    let mut part = || parts.next().unwrap_or_default();
    let (config, header, tokenizer) = (part(), part(), part());
    let write =
        |name: &str, bytes: &[u8]| std::fs::write(FOLDER.path().join(name), bytes).expect("a file should be written");
    write("config.json", config);
    write("tokenizer.json", tokenizer);
    let weights = [&(header.len() as u64).to_le_bytes()[..], header].concat();
    write("model.safetensors", &weights);
    let file = std::fs::File::options().write(true).open(FOLDER.path().join("model.safetensors"));
    file.and_then(|file| file.set_len(weights.len() as u64 + WEIGHTS)).expect("a file should grow");
    let options = Options { ty: TensorType::F16, file_type: 1, pre: None, name: None };
    let Ok(conversion) = Conversion::open(FOLDER.path(), &options) else { return };
    let tensors = conversion.tensors().map(|(_, shape, ty)| {
        let elements = shape.iter().product();
        ty.row_bytes(elements).expect("a tensor that will be written has whole rows") as u64
    });
    assert!(tensors.sum::<u64>() <= conversion.data_bytes(), "more is written than was said");
});
