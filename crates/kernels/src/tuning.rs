//! Tuning lines: how the work of an operation is split, as text, so that splits can be tried on a machine without Rust.
//! A file named by `KILN_TUNING` goes before the built-in lines. Its lines may begin with the name of their operation;
//! without one they are `mul_mat_vec`'s.

use std::path::PathBuf;
use std::sync::OnceLock;

use kiln_gguf::TensorType;
use kiln_gpu::Caps;

/// The environment variable that names a file of lines that go before the built-in ones.
pub const FILE: &str = "KILN_TUNING";

const OPERATIONS: [&str; 5] = ["mul_mat_vec", "mul_mm", "flash_attention", "ssm_scan", "gated_delta_net"];

/// The lines of an operation in a file: the number of each, and its words. `#` begins a comment.
pub fn lines<'a>(text: &'a str, operation: &'a str) -> impl Iterator<Item = (usize, Vec<&'a str>)> {
    text.lines().enumerate().filter_map(move |(i, line)| {
        let mut words: Vec<&str> = line.split('#').next().unwrap_or("").split_whitespace().collect();
        let owner = match OPERATIONS.iter().find(|name| words.first() == Some(name)) {
            Some(name) => {
                words.remove(0);
                name
            }
            None => OPERATIONS[0],
        };
        (!words.is_empty() && owner == operation).then_some((i + 1, words))
    })
}

/// The name and the text of the file that `KILN_TUNING` names; nothing where it names none.
fn file() -> Result<(String, String), String> {
    let Some(file) = kiln_system::environment::variable(FILE) else { return Ok(Default::default()) };
    let name = kiln_system::text::shown(&file.to_string_lossy());
    match std::fs::read_to_string(&file) {
        Ok(text) => Ok((name, text)),
        Err(e) => Err(format!("{FILE}={name}: {e}")),
    }
}

static KEPT: OnceLock<PathBuf> = OnceLock::new();

/// Names the file of lines that `kiln tune` found on the device of this process. It need not exist. To be called before the first call is
/// picked; later ones change nothing.
pub fn use_file(file: PathBuf) {
    let _ = KEPT.set(file);
}

/// What `parse` makes of the lines that `kiln tune` kept. They can be made again: a file that cannot be read, or was spoilt, costs speed
/// only.
pub(crate) fn kept<T>(parse: impl Fn(&str) -> Result<T, String>) -> Option<T> {
    let text = KEPT.get().and_then(|file| std::fs::read_to_string(file).ok())?;
    parse(&text).inspect_err(|e| log::warn!("what `kiln tune` kept is ignored: {e}")).ok()
}

/// What `parse` makes of that file; of an empty one where there is none.
pub fn of_file<T>(parse: impl Fn(&str) -> Result<T, String>) -> Result<T, String> {
    let (name, text) = file()?;
    parse(&text).map_err(|e| format!("{FILE}={name}: {e}"))
}

/// Whether every line of the file that `KILN_TUNING` names can be read, by the operation it is for. Without this look, a
/// path whose lines cannot be read would only seem to be missing.
pub fn check() -> Result<(), String> {
    let products = [crate::mul_mat_vec::tuning::check, crate::mul_mm::check_tuning];
    let tables = products.into_iter().chain([crate::flash_attention::check_tuning, crate::chunks::check_tuning]);
    let tables: Vec<_> = tables.collect();
    of_file(|text| tables.iter().try_for_each(|table| table(text)))
}

/// Words for kinds of devices.
pub const DEVICES: [&str; 4] = ["cpu", "gpu", "wide", "*"];

/// Whether a word stands for this kind of device: `cpu`, `gpu`, `*`, or `wide` for GPUs whose subgroups have 64 lanes, as
/// AMD's have unless a kernel asks for 32: twice as many threads share a row, and each of them has half of the registers.
pub fn names_device(word: &str, caps: &Caps) -> bool {
    match word {
        "*" => true,
        "cpu" => caps.is_cpu,
        "gpu" => !caps.is_cpu,
        "wide" => !caps.is_cpu && caps.subgroups.size >= 64,
        _ => false,
    }
}

/// Whether a word stands for a format: its name in small letters, `*` for every one, `blocks` for every quantised one,
/// `packed` for every one that is packed for devices, `k/*` for every other one with blocks of 256.
pub fn names_format(word: &str, ty: TensorType) -> bool {
    match word {
        "*" => true,
        "blocks" => ty.is_quantised(),
        "packed" => ty.is_packed(),
        "k/*" => ty.block_len() == 256 && !ty.is_packed(),
        name => name == ty.name().to_lowercase(),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn every_operation_gets_its_own_lines() {
        let text = "# a comment\n\ngpu q4_k\nmul_mm * f16 # more\nmul_mat_vec cpu *\n";
        assert_eq!(Vec::from_iter(lines(text, "mul_mm")), [(4, vec!["*", "f16"])]);
        assert_eq!(Vec::from_iter(lines(text, "mul_mat_vec")), [(3, vec!["gpu", "q4_k"]), (5, vec!["cpu", "*"])]);
    }

    #[test]
    fn formats_are_named_alone_or_together() {
        let q4 = TensorType::Q4_K;
        assert!(["*", "blocks", "k/*", "q4_k"].iter().all(|word| names_format(word, q4)));
        let packed = TensorType::Q8_0x8;
        assert!(["*", "blocks", "packed", "q8_0x8"].iter().all(|word| names_format(word, packed)));
        assert!(!names_format("k/*", packed) && !names_format("q8_0", packed) && !names_format("packed", q4));
        assert!(!names_format("blocks", TensorType::F16) && !names_format("k/*", TensorType::Q8_0));
    }
}
