//! What a user says of a model in the place of its file: other values of keys, another scaling of its rotary embeddings, another
//! architecture. All of it becomes keys before anything is read, so that whatever depends on keys (saved states, cached prefixes, stages on
//! other hosts) depends on it.

use std::str::FromStr;

use kiln_gguf::{Gguf, Metadata, Value};
use kiln_system::text::shown;

use crate::Error;
use crate::arch;

/// Beginning of the keys that say how rotary embeddings are scaled, whatever the file says.
pub(super) const ROPE: &str = "kiln.rope";
/// Longest key, and longest text, as llama.cpp has them.
const LONGEST: usize = 127;

/// A value for a key.
#[derive(Clone, Debug, PartialEq)]
pub struct KeyValue {
    /// The key, with its prefix.
    pub key: String,
    /// What it is to be.
    pub value: Scalar,
}

/// A value that a user can give.
#[derive(Clone, Debug, PartialEq)]
pub enum Scalar {
    /// A whole number.
    Int(i64),
    /// A number with a fraction.
    Float(f64),
    /// A switch.
    Bool(bool),
    /// A text.
    Text(String),
}

impl Scalar {
    fn name(&self) -> &'static str {
        match self {
            Scalar::Int(_) => "int",
            Scalar::Float(_) => "float",
            Scalar::Bool(_) => "bool",
            Scalar::Text(_) => "str",
        }
    }

    /// Whether a value of a file is of this type.
    fn is_type_of(&self, value: &Value) -> bool {
        match self {
            Scalar::Int(_) => value.as_int().is_some(),
            Scalar::Float(_) => value.as_float().is_some(),
            Scalar::Bool(_) => matches!(value, Value::Bool(_)),
            Scalar::Text(_) => value.as_bytes().is_some(),
        }
    }

    fn value(&self) -> Value {
        match self {
            Scalar::Int(n) => (*n).into(),
            Scalar::Float(x) => (*x).into(),
            Scalar::Bool(on) => (*on).into(),
            Scalar::Text(text) => text.clone().into(),
        }
    }
}

impl FromStr for KeyValue {
    type Err = String;

    /// `KEY=TYPE:VALUE`.
    fn from_str(text: &str) -> Result<KeyValue, String> {
        let form = || format!("{text:?} is not KEY=TYPE:VALUE, such as tokenizer.ggml.add_bos_token=bool:false");
        let (key, rest) = text.split_once('=').ok_or_else(form)?;
        let (kind, value) = rest.split_once(':').ok_or_else(form)?;
        if key.is_empty() || key.len() > LONGEST {
            return Err(format!("a key has 1 to {LONGEST} bytes, this one has {}", key.len()));
        }
        let bad = |want: &str| format!("{key} is to be {value:?}, which is not {want}");
        let value = match kind {
            "int" => Scalar::Int(value.parse().map_err(|_| bad("a whole number of 64 bits"))?),
            "float" => {
                let number: f64 = value.parse().map_err(|_| bad("a number"))?;
                if !number.is_finite() {
                    return Err(bad("a finite number"));
                }
                Scalar::Float(number)
            }
            "bool" => match value {
                "true" => Scalar::Bool(true),
                "false" => Scalar::Bool(false),
                _ => return Err(bad("true or false")),
            },
            "str" if value.len() > LONGEST => {
                return Err(format!("a text has up to {LONGEST} bytes, that of {key} has {}", value.len()));
            }
            "str" => Scalar::Text(value.to_owned()),
            other => return Err(format!("{other:?} is no type of keys; they are int, float, bool and str")),
        };
        Ok(KeyValue { key: key.to_owned(), value })
    }
}

/// How rotary embeddings are scaled.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum RopeScaling {
    /// Not at all.
    None,
    /// All frequencies by the same factor.
    Linear,
    /// Low frequencies by the factor, high ones not.
    Yarn,
}

impl RopeScaling {
    /// All of them.
    pub const ALL: [RopeScaling; 3] = [RopeScaling::None, RopeScaling::Linear, RopeScaling::Yarn];

    /// As files and llama.cpp call it.
    pub fn name(self) -> &'static str {
        match self {
            RopeScaling::None => "none",
            RopeScaling::Linear => "linear",
            RopeScaling::Yarn => "yarn",
        }
    }
}

/// What is said of rotary embeddings; none for what the file says.
#[derive(Clone, Copy, Debug, Default, PartialEq)]
pub struct RopeOptions {
    /// The kind of scaling.
    pub scaling: Option<RopeScaling>,
    /// Base of the frequencies.
    pub freq_base: Option<f32>,
    /// Factor of the frequencies.
    pub freq_scale: Option<f32>,
    /// YaRN: tokens of context of the model before it was stretched.
    pub yarn_orig_ctx: Option<u32>,
    /// YaRN: how much of the high frequencies stays; 0 for none, below 0 for what the kind of scaling says.
    pub yarn_ext_factor: Option<f32>,
    /// Factor of turned heads without YaRN.
    pub yarn_attn_factor: Option<f32>,
    /// YaRN: pairs that turn less often than this are scaled.
    pub yarn_beta_slow: Option<f32>,
    /// YaRN: pairs that turn more often than this stay.
    pub yarn_beta_fast: Option<f32>,
}

impl RopeOptions {
    fn write(&self, metadata: &mut Metadata) {
        let numbers = [
            ("freq_base", self.freq_base),
            ("freq_scale", self.freq_scale),
            ("yarn_ext_factor", self.yarn_ext_factor),
            ("yarn_attn_factor", self.yarn_attn_factor),
            ("yarn_beta_slow", self.yarn_beta_slow),
            ("yarn_beta_fast", self.yarn_beta_fast),
        ];
        for (name, number) in numbers {
            if let Some(number) = number {
                metadata.set(format!("{ROPE}.{name}"), number);
            }
        }
        if let Some(context) = self.yarn_orig_ctx {
            metadata.set(format!("{ROPE}.yarn_orig_ctx"), context);
        }
        if let Some(scaling) = self.scaling {
            metadata.set(format!("{ROPE}.scaling"), scaling.name());
        }
    }
}

/// All that a user says of a model.
#[derive(Clone, Debug, Default, PartialEq)]
pub struct Overlay {
    /// Values of keys. The first one of a key counts.
    pub keys: Vec<KeyValue>,
    /// Scaling of rotary embeddings.
    pub rope: RopeOptions,
    /// The architecture that the file is read as: its keys are taken for those of this one.
    pub read_as: Option<String>,
}

impl Overlay {
    /// Whether the file is read as it is.
    pub fn is_empty(&self) -> bool {
        *self == Overlay::default()
    }

    /// Changes the keys of an open file. Gives what to tell: keys that stay as they are.
    pub fn apply(&self, gguf: &mut Gguf) -> Result<Vec<String>, Error> {
        // A file says nothing under the names that options have.
        let own: Vec<String> =
            gguf.metadata().iter().map(|(key, _)| key.to_owned()).filter(|key| key.starts_with(ROPE)).collect();
        own.iter().for_each(|key| drop(gguf.take(key)));
        let mut notes = Vec::new();
        let mut seen: Vec<&str> = Vec::new();
        for KeyValue { key, value } in &self.keys {
            if seen.contains(&&**key) {
                continue;
            }
            seen.push(key);
            match gguf.metadata().value(key) {
                Some(there) if !value.is_type_of(there) => notes.push(format!(
                    "key `{}` stays as it is: the file has {} there, and {} was given",
                    shown(key),
                    there.type_name(),
                    value.name()
                )),
                _ => gguf.set(key, value.value()),
            }
        }
        if let Some(name) = &self.read_as {
            rename(gguf, arch::find(name)?.name)?;
        }
        let mut rope = Metadata::new();
        self.rope.write(&mut rope);
        rope.iter().for_each(|(key, value)| gguf.set(key, value.clone()));
        Ok(notes)
    }
}

/// Keys of the file's architecture become those of another.
fn rename(gguf: &mut Gguf, name: &'static str) -> Result<(), Error> {
    const ARCHITECTURE: &str = "general.architecture";
    let was = format!("{}.", gguf.metadata().get_str(ARCHITECTURE)?);
    let keys: Vec<String> =
        gguf.metadata().iter().map(|(key, _)| key.to_owned()).filter(|key| key.starts_with(&was)).collect();
    for key in keys {
        let Some(value) = gguf.take(&key) else { continue };
        gguf.set(&format!("{name}.{}", &key[was.len()..]), value);
    }
    gguf.set(ARCHITECTURE, name.into());
    Ok(())
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::model::Model;
    use crate::quantise_recipe::Recipe;
    use crate::synth::{Preset, Synth};

    fn llama() -> Gguf {
        let synth = Synth::new(Preset::from_name("tiny-llama").unwrap(), Recipe::from_name("F32").unwrap(), 1);
        Gguf::from_bytes(synth.to_bytes().unwrap()).unwrap()
    }

    fn keys(all: &[&str]) -> Overlay {
        Overlay { keys: all.iter().map(|text| text.parse().unwrap()).collect(), ..Overlay::default() }
    }

    #[test]
    fn values_are_read_with_their_type() {
        let value = |text: &str| text.parse::<KeyValue>().map(|of| of.value);
        assert_eq!(value("a.b=int:-7"), Ok(Scalar::Int(-7)));
        assert_eq!(value("a.b=float:7"), Ok(Scalar::Float(7.0)));
        assert_eq!(value("a.b=bool:true"), Ok(Scalar::Bool(true)));
        assert_eq!(value("a.b=str:x=y:z"), Ok(Scalar::Text("x=y:z".into())));
        for (text, word) in [
            ("a.b", "KEY=TYPE:VALUE"),
            ("a.b=7", "KEY=TYPE:VALUE"),
            ("=int:7", "1 to 127"),
            ("a=u32:7", "int, float, bool and str"),
            ("a=int:7.5", "whole number"),
            ("a=float:nan", "finite"),
            ("a=bool:1", "true or false"),
        ] {
            let why = value(text).unwrap_err();
            assert!(why.contains(word), "{why}");
        }
        assert!(value(&format!("a=str:{}", "x".repeat(128))).unwrap_err().contains("128"));
    }

    #[test]
    fn keys_are_replaced_added_or_stay() {
        let mut gguf = llama();
        let layers = gguf.metadata().get_u32("llama.block_count").unwrap();
        let overlay = keys(&[
            "llama.context_length=int:77",
            "llama.context_length=int:78",
            "llama.block_count=float:1",
            "tokenizer.ggml.tokens=str:x",
            "llama.logit_scale=float:0.5",
        ]);
        let notes = overlay.apply(&mut gguf).unwrap();
        let of = gguf.metadata();
        assert_eq!(of.get_u32("llama.context_length").unwrap(), 77, "the first of two counts");
        assert_eq!(of.get_u32("llama.block_count").unwrap(), layers, "another type does not");
        assert_eq!(of.get_f32("llama.logit_scale").unwrap(), 0.5);
        assert!(of.get_str_array("tokenizer.ggml.tokens").is_ok());
        assert_eq!(notes.len(), 2);
        assert!(notes[0].contains("llama.block_count") && notes[0].contains("float"), "{notes:?}");
        assert!(notes[1].contains("tokenizer.ggml.tokens") && notes[1].contains("an array"), "{notes:?}");
        assert_eq!(Model::new(gguf).unwrap().config.context, 77);
    }

    #[test]
    fn a_file_is_read_as_another_architecture() {
        let mut gguf = llama();
        for (key, value) in
            gguf.metadata().iter().map(|(k, v)| (k.to_owned(), v.clone())).collect::<Vec<_>>().into_iter()
        {
            if let Some(rest) = key.strip_prefix("llama.") {
                gguf.take(&key);
                gguf.set(&format!("llama9.{rest}"), value);
            }
        }
        gguf.set("general.architecture", "llama9".into());
        let read_as = Some("llama".to_owned());
        Overlay { read_as, ..Overlay::default() }.apply(&mut gguf).unwrap();
        assert_eq!(Model::new(gguf).unwrap().config.architecture.name, "llama");
        let nobody = Overlay { read_as: Some("llama9".into()), ..Overlay::default() };
        assert!(nobody.apply(&mut llama()).unwrap_err().to_string().contains("llama9"));
    }

    #[test]
    fn files_do_not_say_what_options_say() {
        let mut gguf = llama();
        gguf.set("kiln.rope.freq_base", 5.0f32.into());
        Overlay::default().apply(&mut gguf).unwrap();
        assert!(!gguf.metadata().contains("kiln.rope.freq_base"));
    }
}
