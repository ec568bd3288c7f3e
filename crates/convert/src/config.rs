//! `config.json`: settings of a model, asked for by name. Models that also see or hear keep those of the language model in
//! `text_config`.

use std::cell::RefCell;
use std::collections::BTreeSet;
use std::path::Path;

use serde_json::{Map, Value};

use crate::error::{Error, Result};

/// The settings.
pub(crate) struct Config {
    /// The class of the model, as `transformers` calls it.
    pub(crate) class: String,
    all: Map<String, Value>,
    /// What was asked for: the rest must be known to change nothing.
    asked: RefCell<BTreeSet<String>>,
}

/// Reads a JSON file of a folder; `None` where it is not there.
pub(crate) fn json(folder: &Path, name: &str) -> Result<Option<Value>> {
    let path = folder.join(name);
    let bytes = match std::fs::read(&path) {
        Ok(bytes) => bytes,
        Err(why) if why.kind() == std::io::ErrorKind::NotFound => return Ok(None),
        Err(why) => return Err(Error::Io { path, why }),
    };
    serde_json::from_slice(&bytes).map(Some).map_err(|why| Error::Damaged { path, why: why.to_string() })
}

impl Config {
    pub(crate) fn read(folder: &Path) -> Result<Config> {
        let path = folder.join("config.json");
        if !folder.is_dir() {
            return Err(Error::NoFolder { folder: folder.to_owned() });
        }
        let missing = || Error::NoConfig { folder: folder.to_owned() };
        let Value::Object(mut all) = json(folder, "config.json")?.ok_or_else(missing)? else {
            return Err(Error::Damaged { path, why: "it is no object".into() });
        };
        let class = all.get("architectures").and_then(|list| list.get(0)).and_then(Value::as_str).map(str::to_owned);
        let class =
            class.ok_or_else(|| Error::Config { what: "it does not name the class in `architectures`".into() })?;
        if let Some(Value::Object(text)) = all.remove("text_config") {
            all.extend(text);
        }
        Ok(Config { class, all, asked: RefCell::default() })
    }

    pub(crate) fn value(&self, key: &str) -> Option<&Value> {
        let (key, value) = self.all.get_key_value(key)?;
        self.asked.borrow_mut().insert(key.clone());
        Some(value).filter(|value| !value.is_null())
    }

    /// Settings that nothing asked for, with their values.
    pub(crate) fn unasked(&self) -> Vec<(&str, &Value)> {
        let asked = self.asked.borrow();
        let rest = self.all.iter().filter(|(key, _)| !asked.contains(*key));
        rest.map(|(key, value)| (key.as_str(), value)).collect()
    }

    /// A whole number that may be left out.
    pub(crate) fn count_opt(&self, key: &str) -> Result<Option<usize>> {
        let wrong = |value: &Value| Error::Config { what: format!("{key} is {value}, which is no size") };
        let Some(value) = self.value(key) else { return Ok(None) };
        let number = value.as_u64().filter(|n| *n <= 1 << 32).ok_or_else(|| wrong(value))?;
        Ok(Some(number as usize))
    }

    /// A whole number.
    pub(crate) fn count(&self, key: &str) -> Result<usize> {
        let found = self.count_opt(key)?.filter(|n| *n > 0);
        found.ok_or_else(|| Error::Config { what: format!("{key} is missing, or zero") })
    }

    /// A number that may be left out.
    pub(crate) fn float(&self, key: &str) -> Option<f32> {
        self.value(key)?.as_f64().map(|value| value as f32)
    }

    pub(crate) fn switch(&self, key: &str) -> bool {
        self.value(key).and_then(Value::as_bool).unwrap_or(false)
    }

    /// Settings of the rotary embedding, in any of the places they have been in; those of full attention, where layers differ.
    pub(crate) fn rope(&self, key: &str) -> Option<&Value> {
        let found = |object: &'_ Value| object.get(key).is_some_and(|value| !value.is_null());
        let parameters = self.value("rope_parameters");
        let full = parameters.and_then(|all| all.get("full_attention"));
        let places = [full, parameters, self.value("rope_scaling")];
        let inside = places.into_iter().flatten().find(|object| found(object));
        inside.and_then(|object| object.get(key)).or_else(|| self.value(key))
    }

    /// The kind of scaling of the rotary embedding, where there is one.
    pub(crate) fn rope_kind(&self) -> Option<&str> {
        let kind = self.rope("rope_type").or_else(|| self.rope("type"))?.as_str()?;
        (kind != "default").then_some(kind)
    }

    pub(crate) fn rope_float(&self, key: &str) -> Option<f32> {
        self.rope(key)?.as_f64().map(|value| value as f32)
    }

    /// Width of a head.
    pub(crate) fn head_dim(&self) -> Result<usize> {
        match self.count_opt("head_dim")? {
            Some(given) => Ok(given),
            None => Ok(self.count("hidden_size")? / self.count("num_attention_heads")?),
        }
    }

    pub(crate) fn kv_heads(&self) -> Result<usize> {
        Ok(self.count_opt("num_key_value_heads")?.unwrap_or(self.count("num_attention_heads")?))
    }
}
