//! `--lora` and `--lora-scaled`: adapters put on a model when it is opened.

use std::path::Path;

use anyhow::Context as _;
use kiln_llm::AdapterFile;
use kiln_server::NamedAdapter;

use crate::store::resolve;

/// Adapters that go on top of a model.
#[derive(clap::Args, Clone, Debug, Default)]
pub(crate) struct LoraFlags {
    /// Apply a LoRA adapter (GGUF), with an optional scale. May be given
    /// several times, or as a list with commas
    #[arg(long, value_name = "FILE[=SCALE]")]
    lora: Vec<String>,
    /// The same in llama.cpp's form
    #[arg(long, value_name = "FILE:SCALE")]
    lora_scaled: Vec<String>,
    /// Load an adapter that counts only for requests whose `model` is this name, in `kiln serve`; may be given several times, or as a list
    /// with commas
    #[arg(long, value_name = "NAME=FILE", value_delimiter = ',')]
    lora_modules: Vec<String>,
}

/// `NAME=FILE`.
fn module(words: &str) -> anyhow::Result<(&str, &str)> {
    let parts = words.split_once('=').filter(|(name, file)| !name.is_empty() && !file.is_empty());
    parts.with_context(|| {
        format!("--lora-modules {words:?} names no file\nhint: write NAME=FILE, as sql=sql-adapter.gguf")
    })
}

impl LoraFlags {
    /// Whether there are any.
    pub(crate) fn is_empty(&self) -> bool {
        self.lora.is_empty() && self.lora_scaled.is_empty() && self.lora_modules.is_empty()
    }

    /// The files of the adapters: names are looked up in the store.
    pub(crate) fn files(&self) -> anyhow::Result<Vec<AdapterFile>> {
        let is_file = |name: &str| Path::new(name).exists();
        let found = |asked: AdapterFile| Ok(AdapterFile { path: resolve(Some(&asked.path))?, ..asked });
        self.asked(is_file)?.into_iter().map(found).collect()
    }

    /// The adapters that requests pick by name, by their numbers: they stand behind all others.
    pub(crate) fn named(&self) -> anyhow::Result<Vec<NamedAdapter>> {
        let first = self.asked(|name| Path::new(name).exists())?.len() - self.lora_modules.len();
        let mut named: Vec<NamedAdapter> = Vec::new();
        for (number, words) in self.lora_modules.iter().enumerate() {
            let (name, _) = module(words)?;
            if named.iter().any(|other| other.name == name) {
                anyhow::bail!("two adapters are called {name:?}\nhint: --lora-modules NAME=FILE wants a name for each");
            }
            named.push(NamedAdapter { name: name.to_owned(), number: first + number });
        }
        Ok(named)
    }

    /// What was asked for, in the order in which adapters are numbered: first all of --lora.
    fn asked(&self, is_file: impl Fn(&str) -> bool) -> anyhow::Result<Vec<AdapterFile>> {
        let plain = self.lora.iter().flat_map(|words| split(words, &is_file)).map(|word| match word.rsplit_once('=') {
            Some((file, scale)) if !is_file(word) => scaled(file, scale),
            _ => Ok(AdapterFile { path: word.into(), scale: 1.0 }),
        });
        let others = self.lora_scaled.iter().flat_map(|words| split(words, &is_file)).map(|word| {
            let Some((file, scale)) = word.rsplit_once(':') else {
                anyhow::bail!(
                    "--lora-scaled {word:?} has no scale\nhint: --lora-scaled FILE:SCALE, or --lora FILE=SCALE"
                );
            };
            scaled(file, scale)
        });
        // They do not count where no request says so.
        let modules = self.lora_modules.iter().map(|words| {
            let (_, file) = module(words)?;
            Ok(AdapterFile { path: file.into(), scale: 0.0 })
        });
        plain.chain(others).chain(modules).collect()
    }
}

/// The words of a list, unless there is a file of that whole name.
fn split(words: &str, is_file: impl Fn(&str) -> bool) -> Vec<&str> {
    if is_file(words) { vec![words] } else { words.split(',').collect() }
}

fn scaled(file: &str, scale: &str) -> anyhow::Result<AdapterFile> {
    let number = scale.parse().ok().filter(|n: &f32| n.is_finite());
    let Some(scale) = number else {
        anyhow::bail!("the adapter {file} has the scale {scale:?}, which is no number\nhint: --lora {file}=0.5");
    };
    Ok(AdapterFile { path: file.into(), scale })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn adapters_with_names_stand_behind_all_others() {
        let text = |list: &[&str]| list.iter().map(|text| (*text).to_owned()).collect::<Vec<_>>();
        let flags = |modules: &[&str]| LoraFlags {
            lora: text(&["a.gguf,b.gguf"]),
            lora_scaled: text(&["c.gguf:2"]),
            lora_modules: text(modules),
        };
        let named = flags(&["sql=x.gguf", "law=y=z.gguf"]).named().unwrap();
        assert_eq!(named.iter().map(|n| (n.name.as_str(), n.number)).collect::<Vec<_>>(), [("sql", 3), ("law", 4)]);
        let asked = flags(&["sql=x.gguf"]).asked(|_| false).unwrap();
        assert_eq!(asked.last().map(|a| (a.path.display().to_string(), a.scale)), Some(("x.gguf".into(), 0.0)));
        for wrong in [&["sql"][..], &["=x"], &["sql="], &["a=x", "a=y"]] {
            assert!(flags(wrong).named().is_err(), "{wrong:?}");
        }
    }

    #[test]
    fn adapters_are_named_as_people_do() {
        let text = |list: &[&str]| list.iter().map(|text| (*text).to_owned()).collect::<Vec<_>>();
        let asked = |lora: &[&str], scaled: &[&str]| {
            let flags = LoraFlags { lora: text(lora), lora_scaled: text(scaled), lora_modules: Vec::new() };
            let found = flags.asked(|name| name == "odd=1,name.gguf");
            found.map(|all| all.into_iter().map(|a| (a.path.display().to_string(), a.scale)).collect::<Vec<_>>())
        };
        let one = |name: &str, scale: f32| (name.to_owned(), scale);
        assert_eq!(asked(&["a.gguf"], &[]).unwrap(), [one("a.gguf", 1.0)]);
        assert_eq!(
            asked(&["a=0.5,b", "c=-1"], &["d:2"]).unwrap(),
            [one("a", 0.5), one("b", 1.0), one("c", -1.0), one("d", 2.0)]
        );
        assert_eq!(asked(&["odd=1,name.gguf"], &[]).unwrap(), [one("odd=1,name.gguf", 1.0)]);
        for (lora, scaled, word) in
            [(&["a=x"][..], &[][..], "\"x\""), (&["a=inf"], &[], "inf"), (&[], &["a"], "no scale")]
        {
            let error = asked(lora, scaled).unwrap_err().to_string();
            assert!(error.contains(word), "{error}");
        }
    }
}
