//! `--lora` and `--lora-scaled`: adapters put on a model when it is opened.

use std::path::{Path, PathBuf};
use std::sync::Arc;

use kiln_engine::Error;
use kiln_engine::model::{Adapter, Model};

use crate::output::say;
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
}

/// An adapter that was asked for.
#[derive(Clone, Debug, PartialEq)]
struct Asked {
    file: PathBuf,
    scale: f32,
}

impl LoraFlags {
    /// Whether there are any.
    pub(crate) fn is_empty(&self) -> bool {
        self.lora.is_empty() && self.lora_scaled.is_empty()
    }

    /// Puts the adapters on a model.
    pub(crate) fn apply(&self, model: Model) -> anyhow::Result<Arc<Model>> {
        let is_file = |name: &str| Path::new(name).exists();
        let mut adapters = Vec::new();
        for Asked { file, scale } in self.asked(is_file)? {
            let path = resolve(Some(&file))?;
            let adapter = Adapter::open(&path, scale, &model).map_err(|why| match why {
                // These name the file themselves.
                Error::Gguf(_) | Error::Adapter { .. } => anyhow::Error::new(why),
                why => anyhow::Error::new(why).context(format!("cannot use the adapter {}", path.display())),
            })?;
            if adapter.left_out > 0 {
                let (n, path) = (adapter.left_out, &adapter.path);
                say(&format!("note: {n} vectors of norms in the adapter {path} are left out"));
            }
            adapters.push(adapter);
        }
        Ok(Arc::new(model.with_adapters(adapters)?))
    }

    /// What was asked for, in the order in which adapters are numbered: first all of --lora.
    fn asked(&self, is_file: impl Fn(&str) -> bool) -> anyhow::Result<Vec<Asked>> {
        let plain = self.lora.iter().flat_map(|words| split(words, &is_file)).map(|word| match word.rsplit_once('=') {
            Some((file, scale)) if !is_file(word) => scaled(file, scale),
            _ => Ok(Asked { file: word.into(), scale: 1.0 }),
        });
        let others = self.lora_scaled.iter().flat_map(|words| split(words, &is_file)).map(|word| {
            let Some((file, scale)) = word.rsplit_once(':') else {
                anyhow::bail!(
                    "--lora-scaled {word:?} has no scale\nhint: --lora-scaled FILE:SCALE, or --lora FILE=SCALE"
                );
            };
            scaled(file, scale)
        });
        plain.chain(others).collect()
    }
}

/// The words of a list, unless there is a file of that whole name.
fn split(words: &str, is_file: impl Fn(&str) -> bool) -> Vec<&str> {
    if is_file(words) { vec![words] } else { words.split(',').collect() }
}

fn scaled(file: &str, scale: &str) -> anyhow::Result<Asked> {
    let number = scale.parse().ok().filter(|n: &f32| n.is_finite());
    let Some(scale) = number else {
        anyhow::bail!("the adapter {file} has the scale {scale:?}, which is no number\nhint: --lora {file}=0.5");
    };
    Ok(Asked { file: file.into(), scale })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn adapters_are_named_as_people_do() {
        let text = |list: &[&str]| list.iter().map(|text| (*text).to_owned()).collect::<Vec<_>>();
        let asked = |lora: &[&str], scaled: &[&str]| {
            let flags = LoraFlags { lora: text(lora), lora_scaled: text(scaled) };
            let found = flags.asked(|name| name == "odd=1,name.gguf");
            found.map(|all| all.into_iter().map(|a| (a.file.display().to_string(), a.scale)).collect::<Vec<_>>())
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
