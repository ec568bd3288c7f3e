//! `/set`: the sampler's settings inside a conversation.

use anyhow::{Context as _, bail};
use kiln_engine::sampler::Sampling;
use kiln_system::text::shown;
use serde_json::Value;

use super::Chat;
use crate::output::say;

impl Chat<'_> {
    /// Shows settings, or changes one and says what it is now.
    pub(super) fn set(&mut self, rest: &str) -> anyhow::Result<()> {
        let Some((name, value)) = rest.split_once(char::is_whitespace) else { return self.show_settings(rest) };
        let (name, value) = (full_name(name), value.trim());
        match name.as_str() {
            "limit" => {
                let wrong = || format!("limit must be a number of tokens above 0, or none; not {}", shown(value));
                self.limit = match value {
                    "none" | "-1" => None,
                    number => Some(number.parse().ok().filter(|n| *n > 0).with_context(wrong)?),
                };
            }
            "think" => {
                self.thinking.on = match value {
                    "on" => true,
                    "off" => false,
                    _ => bail!("think must be on or off, not {}", shown(value)),
                };
            }
            _ => {
                let sampling = changed(&self.sampling, &name, value)?;
                sampling.check(self.loaded.model.config.vocab)?;
                self.sampling = sampling;
            }
        }
        self.show_settings(&name)
    }

    /// All settings, or one of them.
    fn show_settings(&self, name: &str) -> anyhow::Result<()> {
        let name = full_name(name);
        let all = serde_json::to_value(&self.sampling)?;
        let sampler = all.as_object().into_iter().flatten().map(|(key, value)| (key.clone(), plain(value)));
        let limit = self.limit.map_or("none".to_owned(), |limit| limit.to_string());
        let think = if self.thinking.on { "on" } else { "off" };
        let own = [("limit".to_owned(), limit), ("think".to_owned(), think.to_owned())];
        let lines: Vec<String> = sampler
            .chain(own)
            .filter(|(key, _)| name.is_empty() || *key == name)
            .map(|(key, value)| format!("{key} {value}"))
            .collect();
        if lines.is_empty() {
            return Err(no_setting(&name));
        }
        say(&lines.join("\n"));
        Ok(())
    }
}

fn no_setting(name: &str) -> anyhow::Error {
    anyhow::anyhow!("there is no setting {}\nhint: /set shows all of them", shown(name))
}

/// The name of a setting, by any that users of llama.cpp type.
fn full_name(name: &str) -> String {
    let name = name.replace('-', "_").to_lowercase();
    let full = match name.as_str() {
        "temp" => "temperature",
        "typical" => "typical_p",
        "top_nsigma" => "top_n_sigma",
        "n_predict" | "num_predict" => "limit",
        other => other,
    };
    full.to_owned()
}

/// A value as it would be typed: numbers are of 32 bits, and their shortest form is the one that was meant.
fn plain(value: &Value) -> String {
    match value {
        Value::Null => "none".to_owned(),
        Value::Number(number) if number.is_f64() => (number.as_f64().unwrap_or_default() as f32).to_string(),
        other => other.to_string(),
    }
}

/// The settings with one of them changed.
fn changed(sampling: &Sampling, name: &str, text: &str) -> anyhow::Result<Sampling> {
    let mut all = serde_json::to_value(sampling)?;
    let usual = serde_json::to_value(Sampling::default())?;
    let Some(place) = all.get_mut(name) else { return Err(no_setting(name)) };
    let none = text == "none" || (name == "seed" && text == "-1");
    let value = if none { Value::Null } else { serde_json::from_str(text).unwrap_or_else(|_| Value::from(text)) };
    let want = match &usual[name] {
        _ if name == "seed" => "a number from 0 on, or -1 for a new one each time".to_owned(),
        Value::Number(number) if number.is_f64() => format!("a number, such as {}", plain(&usual[name])),
        Value::Number(number) => format!("a whole number, such as {number}"),
        Value::Array(_) => "a list as JSON has it, such as [\"top_k\", \"temperature\"]".to_owned(),
        other => format!("like {other}"),
    };
    *place = value;
    serde_json::from_value(all).map_err(|_| anyhow::anyhow!("{name} must be {want}; not {}", shown(text)))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn settings_are_changed_by_plain_words() {
        let usual = Sampling::default();
        let set = |name: &str, value: &str| changed(&usual, &full_name(name), value);
        assert_eq!(set("temp", "0.5").unwrap().temperature, 0.5);
        assert_eq!(set("top-k", "3").unwrap().top_k, 3);
        assert_eq!((set("seed", "9").unwrap().seed, set("seed", "-1").unwrap().seed), (Some(9), None));
        for (name, value, words) in [
            ("temp", "abc", "temperature must be a number, such as 0.8; not abc"),
            ("top_k", "many", "top_k must be a whole number, such as 40; not many"),
            ("seed", "-2", "seed must be a number from 0 on, or -1"),
            ("nonsense", "1", "there is no setting nonsense"),
        ] {
            let why = set(name, value).unwrap_err().to_string();
            assert!(why.contains(words), "{why}");
        }
        assert_eq!(plain(&serde_json::to_value(usual.top_p).unwrap()), "0.95");
    }
}
