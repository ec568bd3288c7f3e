//! Tuning lines: how the work of an operation is split, as text, so that splits can be tried on a machine without Rust.
//! A file named by `KILN_TUNING` goes before all others, for every device. Then come the lines that were found on the device itself
//! ([`Caps::tuned`]): each device of a process has its own. The built-in lines are last. Lines may begin with the name of their operation;
//! without one they are `mul_mat_vec`'s.

use std::path::Path;
use std::sync::{Arc, Mutex, Once, PoisonError};

use kiln_gguf::TensorType;
use kiln_gpu::{Caps, FragmentLayout};

/// The environment variable that names a file of lines that go before the built-in ones.
pub const FILE: &str = "KILN_TUNING";

const OPERATIONS: [&str; 5] = ["mul_mat_vec", "mul_mm", "flash_attention", "ssm_scan", "gated_delta_net"];

/// Words of lines that were renamed, with their present names.
const RENAMED: [(&str, &str); 10] = [
    ("lanes", "fragment"),
    ("lane_rows", "fragment_prefill"),
    ("share", "split_k"),
    ("resident", "occupancy"),
    ("band", "swizzle"),
    ("ahead", "prefetch"),
    ("flight", "prefetch"),
    ("busy", "min_waves"),
    ("rest", "tail"),
    ("loop", "persistent"),
];

/// Tuning lines with every renamed word under its present name: files written for earlier versions keep working. Says once which word
/// replaces which.
pub fn present(text: &str) -> String {
    let mut out = String::with_capacity(text.len());
    for line in text.lines() {
        let (line, comment) = line.split_at(line.find('#').unwrap_or(line.len()));
        let words: Vec<String> = line.split_whitespace().map(present_word).collect();
        out.push_str(&words.join(" "));
        out.push_str(comment);
        out.push('\n');
    }
    out
}

/// One word under its present name: `share=2x8` becomes `split_k=2x8`.
fn present_word(word: &str) -> String {
    static TOLD: Once = Once::new();
    let (name, value) = word.split_at(word.find(['=', ':']).unwrap_or(word.len()));
    match RENAMED.iter().find(|(old, _)| *old == name) {
        Some((old, new)) => {
            TOLD.call_once(|| {
                log::warn!("tuning lines use old words: `{old}` is `{new}` now; `kiln tune` writes new lines")
            });
            format!("{new}{value}")
        }
        None => word.to_owned(),
    }
}

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
        Ok(text) => Ok((name, present(&text))),
        Err(e) => Err(format!("{FILE}={name}: {e}")),
    }
}

/// The lines that `kiln tune` kept for a device, for [`Caps::tuned`]. There need be no such file.
pub fn kept_in(file: &Path) -> Option<Arc<str>> {
    std::fs::read_to_string(file).ok().map(|text| Arc::from(present(&text)))
}

/// The tables of an operation: one for each text of [`Caps::tuned`] that devices of this process have, made when it is first asked for.
pub(crate) struct Tables<T: 'static>(Mutex<Vec<Made<T>>>);

/// The lines that were found on a device, and the table with them.
type Made<T> = (Option<Arc<str>>, Result<&'static T, String>);

impl<T> Tables<T> {
    pub(crate) const fn new() -> Tables<T> {
        Tables(Mutex::new(Vec::new()))
    }

    /// The table with these lines of a device, which `load` makes. It stays for good: a process has few devices.
    pub(crate) fn with(
        &self,
        tuned: Option<&Arc<str>>,
        load: impl FnOnce(Option<&str>) -> Result<T, String>,
    ) -> Result<&'static T, String> {
        let mut all = self.0.lock().unwrap_or_else(PoisonError::into_inner);
        if let Some((_, made)) = all.iter().find(|(of, _)| of.as_ref() == tuned) {
            return made.clone();
        }
        let made = load(tuned.map(AsRef::as_ref)).map(|table| &*Box::leak(Box::new(table)));
        all.push((tuned.cloned(), made.clone()));
        made
    }
}

/// What `parse` makes of the lines that were found on a device. They can be found again: what cannot be read costs speed only.
pub(crate) fn found<T: Default>(tuned: Option<&str>, parse: impl Fn(&str) -> Result<T, String>) -> T {
    let read = |text| parse(text).inspect_err(|e| log::warn!("what `kiln tune` kept is ignored: {e}")).ok();
    tuned.and_then(read).unwrap_or_default()
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
pub const DEVICES: [&str; 5] = ["cpu", "gpu", "wide", "mma", "*"];

/// Whether a word stands for this kind of device: `cpu`, `gpu`, `*`, or `wide` for GPUs whose subgroups have 64 lanes, as
/// AMD's have unless a kernel asks for 32: twice as many threads share a row, and each of them has half of the registers; or `mma` for GPUs
/// whose matrix fragments lie as NVIDIA's do, where what a compiler makes of a kernel was seen.
pub fn names_device(word: &str, caps: &Caps) -> bool {
    match word {
        "*" => true,
        "cpu" => caps.is_cpu,
        "gpu" => !caps.is_cpu,
        "wide" => !caps.is_cpu && caps.subgroups.size >= 64,
        "mma" => !caps.is_cpu && caps.fragment_layout == Some(FragmentLayout::Mma16x8),
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
    fn old_words_of_lines_mean_the_present_ones() {
        let old = "mul_mm gpu q4_k lanes 32 tile=16x128 share=2x8 resident=25 ahead=1 # busy\n\n\
                   mul_mm gpu * coopmat * tile=96x128x32 warp=48x64 band=16 busy=2 rest\n\
                   gpu q4_k int_dot 1 64 subgroup 1 1 groups:1 loop:4\n\
                   flash_attention gpu f16 lane_rows widest=64 keys=64\n";
        let new = "mul_mm gpu q4_k fragment 32 tile=16x128 split_k=2x8 occupancy=25 prefetch=1# busy\n\n\
                   mul_mm gpu * coopmat * tile=96x128x32 warp=48x64 swizzle=16 min_waves=2 tail\n\
                   gpu q4_k int_dot 1 64 subgroup 1 1 groups:1 persistent:4\n\
                   flash_attention gpu f16 fragment_prefill widest=64 keys=64\n";
        assert_eq!(present(old), new);
        assert_eq!(present(new), new);
        crate::mul_mm::check_tuning(new).unwrap();
        crate::mul_mat_vec::tuning::check(new).unwrap();
        crate::flash_attention::check_tuning(new).unwrap();
        assert!(crate::mul_mm::check_tuning(old).is_err(), "only `present` knows the old words");
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
