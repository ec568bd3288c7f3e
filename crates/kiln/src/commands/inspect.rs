//! `kiln inspect`: what is in a model file, and how much memory it needs.

use std::collections::BTreeMap;
use std::path::PathBuf;
use std::process::ExitCode;

use kiln_gguf::{Array, Gguf, Metadata, TensorType, Value};
use kiln_system::text::{shown, shown_within};
use serde_json::{Map, json};

use super::encoder::Encoder;
use super::unknown::Unknown;
use crate::model::{ModelFlags, resolve};
use crate::output::{print, say, size};

/// Flags of `kiln inspect`.
#[derive(clap::Args)]
#[command(after_help = "Examples:
  kiln inspect smollm2 --tensors
  kiln inspect smollm2 --fit --sequences 8 -ctk q8_0 -ctv q8_0")]
pub(crate) struct Arguments {
    /// The model: a file (any part of a split one) or a name, as `kiln pull` takes them
    model: PathBuf,
    /// List every tensor
    #[arg(long)]
    tensors: bool,
    /// Say how much of the device's memory the model takes, and how long its texts can be there
    #[arg(long)]
    fit: bool,
    /// Texts at once, with --fit
    #[arg(long, default_value_t = 1, requires = "fit")]
    sequences: usize,
    /// Print JSON
    #[arg(long)]
    json: bool,
    #[command(flatten)]
    flags: ModelFlags,
}

impl Arguments {
    /// Whether anything of a device is told.
    pub(crate) fn asks_a_device(&self) -> bool {
        self.fit
    }
}

/// Elements of an array that are shown.
const SHOWN: usize = 6;
/// Characters of a value that are shown: chat templates have thousands, hostile files millions.
const LONGEST: usize = 300;
/// Context lengths that memory is told for, as far as the model goes.
const CONTEXTS: [u64; 5] = [2048, 8192, 32_768, 131_072, 1_048_576];

/// Tensors of one type.
#[derive(Default)]
struct Kind {
    count: usize,
    elements: u64,
    bytes: u64,
}

/// Bytes that a running model keeps beside its weights, with F16 caches.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum State {
    /// Grows by this many bytes with every token.
    PerToken(u64),
    /// Has this many bytes, however long the text.
    Fixed(u64),
}

/// Runs the command.
pub(crate) fn run(arguments: &Arguments) -> anyhow::Result<ExitCode> {
    let path = resolve(Some(&arguments.model))?;
    if arguments.fit {
        return super::fit::run(&path, &arguments.flags, arguments.sequences, arguments.json);
    }
    let mut model = Gguf::open(&path)?;
    for why in arguments.flags.keys.overlay().apply(&mut model)? {
        say(&format!("note: {why}"));
    }
    let mut kinds: BTreeMap<TensorType, Kind> = BTreeMap::new();
    for info in model.tensors() {
        let kind = kinds.entry(info.ty).or_default();
        kind.count += 1;
        kind.elements += info.n_elements() as u64;
        kind.bytes += info.bytes as u64;
    }
    let state = state(model.metadata())?;
    let encoder = Encoder::open(model.metadata().get_str_or("general.architecture", "")?, &path);
    let unknown = Unknown::of(&model)?;
    if arguments.json {
        let mut told = as_json(&model, &kinds, state, arguments.tensors);
        if let Some(encoder) = encoder {
            told["encoder"] = encoder.json();
        }
        if let Some(unknown) = &unknown {
            told["nearest"] = unknown.json();
        }
        print(&serde_json::to_string_pretty(&told)?);
    } else {
        describe(&model, &kinds, state, arguments.tensors);
        if let Some(encoder) = encoder {
            encoder.describe();
        }
        if let Some(unknown) = &unknown {
            unknown.describe();
        }
    }
    Ok(ExitCode::SUCCESS)
}

fn parameters(kinds: &BTreeMap<TensorType, Kind>) -> u64 {
    kinds.values().map(|k| k.elements).sum()
}

fn bits_per_weight(bytes: u64, elements: u64) -> f64 {
    if elements == 0 { 0.0 } else { 8.0 * bytes as f64 / elements as f64 }
}

/// What the model keeps while it runs, where its keys tell.
fn state(m: &Metadata) -> kiln_gguf::Result<Option<State>> {
    let architecture = m.get_str_or("general.architecture", "")?.to_owned();
    let key = |name: &str| format!("{architecture}.{name}");
    let Some(layers) = m.get_usize_opt(&key("block_count"))? else { return Ok(None) };
    // A bound for what the file claims; no model comes near it.
    if layers > 1 << 16 {
        return Ok(None);
    }
    let hidden = m.get_u64_or(&key("embedding_length"), 0)?;
    if let Some(head) = m.get_u64_opt(&key("wkv.head_size"))? {
        // One matrix a head and two shifted rows a layer, in f32.
        let bytes = (layers as u64).saturating_mul(hidden).saturating_mul(head.saturating_add(2)).saturating_mul(4);
        return Ok(Some(State::Fixed(bytes)));
    }
    let Some(heads) = m.get_u32_per_layer_opt(&key("attention.head_count"), layers)? else { return Ok(None) };
    let kv_heads = m.get_u32_per_layer_opt(&key("attention.head_count_kv"), layers)?.unwrap_or_else(|| heads.clone());
    let first = heads.iter().copied().max().unwrap_or(0);
    let usual = hidden.checked_div(u64::from(first)).unwrap_or(0);
    let width = m
        .get_u64_or(&key("attention.key_length"), usual)?
        .saturating_add(m.get_u64_or(&key("attention.value_length"), usual)?);
    let rows: u64 = kv_heads.iter().map(|&n| u64::from(n)).sum();
    Ok(Some(State::PerToken(rows.saturating_mul(width).saturating_mul(2))))
}

/// Context lengths worth telling: those below the model's own, and that one.
fn contexts(m: &Metadata) -> Vec<u64> {
    let architecture = m.get_str_or("general.architecture", "").unwrap_or_default();
    let most = m.get_u64_opt(&format!("{architecture}.context_length")).ok().flatten().filter(|&n| n > 0);
    let most = most.unwrap_or(CONTEXTS[2]);
    CONTEXTS.into_iter().filter(|&n| n < most).chain([most]).collect()
}

fn describe(model: &Gguf, kinds: &BTreeMap<TensorType, Kind>, state: Option<State>, tensors: bool) {
    let parts = model.paths().len();
    let files = if parts > 1 { format!(", {parts} files") } else { String::new() };
    print(&format!("GGUF version {}, alignment {}{files}", model.version(), model.alignment()));
    print("");
    print("metadata");
    for (key, value) in model.metadata().iter() {
        print(&format!("  {:44} {}", shown(key), shorten(value)));
    }
    print("");
    print(&format!("{:10} {:>8} {:>18} {:>12} {:>8}", "type", "tensors", "parameters", "size", "bits"));
    for (ty, k) in kinds {
        let bits = bits_per_weight(k.bytes, k.elements);
        print(&format!("{:10} {:>8} {:>18} {:>12} {bits:>8.2}", ty.name(), k.count, k.elements, size(k.bytes)));
    }
    let (all, bytes, count) = (parameters(kinds), model.data_bytes(), model.tensors().len());
    let bits = bits_per_weight(bytes, all);
    print(&format!("{:10} {count:>8} {all:>18} {:>12} {bits:>8.2}", "in all", size(bytes)));
    if let Some(state) = state {
        print("");
        print("memory: weights and state (caches in F16), without working memory");
        match state {
            State::Fixed(state) => {
                print(&format!("  any length {:>12}  ({} of state)", size(bytes.saturating_add(state)), size(state)));
            }
            State::PerToken(each) => {
                for n in contexts(model.metadata()) {
                    let cache = each.saturating_mul(n);
                    print(&format!("  {n:>10} {:>12}  ({} of cache)", size(bytes.saturating_add(cache)), size(cache)));
                }
            }
        }
    }
    if tensors {
        print("");
        for info in model.tensors() {
            let shape = info.dims().iter().map(ToString::to_string).collect::<Vec<_>>().join(" x ");
            let name = shown(&info.name);
            print(&format!("{name:48} {shape:>24}  {:8} {:>12}", info.ty.name(), size(info.bytes as u64)));
        }
    }
}

/// A value on one line; of an array the first few elements.
fn shorten(value: &Value) -> String {
    let Value::Array(array) = value else { return shown_within(&value.to_string(), LONGEST) };
    let shown: Vec<String> = elements(array, SHOWN).iter().map(|e| shown_within(&e.to_string(), LONGEST)).collect();
    let more = if array.len() > SHOWN { format!(", ... {} in all", array.len()) } else { String::new() };
    format!("[{}{more}]", shown.join(", "))
}

/// The first few elements of an array as JSON.
fn elements(array: &Array, most: usize) -> Vec<serde_json::Value> {
    fn take<T: Copy + Into<serde_json::Value>>(all: &[T], most: usize) -> Vec<serde_json::Value> {
        all.iter().take(most).map(|&element| element.into()).collect()
    }
    match array {
        Array::U8(v) => take(v, most),
        Array::I8(v) => take(v, most),
        Array::U16(v) => take(v, most),
        Array::I16(v) => take(v, most),
        Array::U32(v) => take(v, most),
        Array::I32(v) => take(v, most),
        Array::F32(v) => take(v, most),
        Array::Bool(v) => take(v, most),
        Array::U64(v) => take(v, most),
        Array::I64(v) => take(v, most),
        Array::F64(v) => take(v, most),
        Array::Str(v) => (0..v.len().min(most)).map(|i| v.text(i).unwrap_or_default().into()).collect(),
        Array::Array(v) => v.iter().take(most).map(|inner| elements(inner, most).into()).collect(),
    }
}

/// A value as JSON; long arrays give their length and their first elements.
fn value_json(value: &Value) -> serde_json::Value {
    match value {
        Value::U8(v) => json!(v),
        Value::I8(v) => json!(v),
        Value::U16(v) => json!(v),
        Value::I16(v) => json!(v),
        Value::U32(v) => json!(v),
        Value::I32(v) => json!(v),
        Value::F32(v) => json!(v),
        Value::Bool(v) => json!(v),
        Value::Str(v) => json!(String::from_utf8_lossy(v)),
        Value::U64(v) => json!(v),
        Value::I64(v) => json!(v),
        Value::F64(v) => json!(v),
        Value::Array(array) if array.len() <= 64 => json!(elements(array, 64)),
        Value::Array(array) => json!({"length": array.len(), "first": elements(array, SHOWN)}),
    }
}

fn as_json(model: &Gguf, kinds: &BTreeMap<TensorType, Kind>, state: Option<State>, tensors: bool) -> serde_json::Value {
    let metadata: Map<String, serde_json::Value> =
        model.metadata().iter().map(|(key, value)| (key.to_owned(), value_json(value))).collect();
    let types: Map<String, serde_json::Value> = kinds
        .iter()
        .map(|(ty, k)| (ty.name().to_owned(), json!({"tensors": k.count, "parameters": k.elements, "bytes": k.bytes})))
        .collect();
    let bytes = model.data_bytes();
    let all = parameters(kinds);
    let memory: Vec<serde_json::Value> = match state {
        None => Vec::new(),
        Some(State::Fixed(state)) => {
            vec![json!({"context": null, "state_bytes": state, "bytes": bytes.saturating_add(state)})]
        }
        Some(State::PerToken(each)) => contexts(model.metadata())
            .into_iter()
            .map(|n| {
                let cache = each.saturating_mul(n);
                json!({"context": n, "state_bytes": cache, "bytes": bytes.saturating_add(cache)})
            })
            .collect(),
    };
    let mut out = json!({
        "version": model.version(),
        "alignment": model.alignment(),
        "files": model.paths().map(|path| path.to_string_lossy()).collect::<Vec<_>>(),
        "metadata": metadata,
        "types": types,
        "parameters": all,
        "data_bytes": bytes,
        "bits_per_weight": bits_per_weight(bytes, all),
        "memory": memory,
    });
    if tensors {
        let row = |t: &kiln_gguf::TensorInfo| json!({"name": t.name, "shape": t.dims(), "type": t.ty.name(), "offset": t.offset, "bytes": t.bytes});
        out["tensors"] = model.tensors().iter().map(row).collect();
    }
    out
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_cache_is_counted_by_layer_and_head() {
        let mut m = Metadata::new();
        m.set("general.architecture", "llama");
        assert_eq!(state(&m).unwrap(), None);
        m.set("llama.block_count", 32u32);
        m.set("llama.embedding_length", 4096u32);
        m.set("llama.attention.head_count", 32u32);
        m.set("llama.attention.head_count_kv", 8u32);
        // 128 KiB a token, the known figure of an 8B Llama 3.
        assert_eq!(state(&m).unwrap(), Some(State::PerToken(131_072)));
        m.set("llama.context_length", 10_000u32);
        assert_eq!(contexts(&m), [2048, 8192, 10_000]);
    }

    #[test]
    fn long_arrays_are_shortened() {
        let long = Value::from((0..100u32).collect::<Vec<_>>());
        assert_eq!(shorten(&long), "[0, 1, 2, 3, 4, 5, ... 100 in all]");
        assert_eq!(value_json(&long)["length"], 100);
        assert_eq!(shorten(&Value::from(vec![1u32, 2])), "[1, 2]");
    }
}
