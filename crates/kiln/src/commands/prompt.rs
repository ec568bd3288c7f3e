//! Where the prompt comes from: an argument, a flag, a file, or stdin.

use std::io::{IsTerminal as _, Read as _};
use std::path::{Path, PathBuf};

use anyhow::{Context as _, bail};

use crate::output::say;
use crate::store::is_model;

/// What was said about model and prompt.
pub(crate) struct Said<'a> {
    /// Words of the command line without a flag: a model, a prompt, or both.
    pub(crate) words: [Option<&'a str>; 2],
    /// `--model`
    pub(crate) model: Option<&'a Path>,
    /// `--prompt`
    pub(crate) prompt: Option<&'a str>,
    /// `--file`
    pub(crate) file: Option<&'a Path>,
}

/// Which model, and what to say to it; no prompt where only a terminal could give one.
#[derive(Debug, PartialEq, Eq)]
pub(crate) struct Asked {
    /// The file; `None` for the default model.
    pub(crate) model: Option<PathBuf>,
    /// The text.
    pub(crate) prompt: Option<String>,
}

/// Sorts out what was said.
pub(crate) fn asked(said: &Said<'_>) -> anyhow::Result<Asked> {
    let (model, word) = match (said.model, said.words) {
        (Some(model), [prompt, None]) => (Some(model.to_owned()), prompt),
        (Some(_), [Some(first), Some(second)]) => {
            bail!(
                "--model names the model already, but both {first:?} and {second:?} are given\nhint: leave one of them out"
            )
        }
        (None, [Some("-"), None]) => (None, Some("-")),
        (None, [Some(only), None]) if is_prompt(only) => {
            say("note: there is no file of that name: it is taken as the prompt, for the default model");
            (None, Some(only))
        }
        (None, [model, prompt]) => {
            if let Some(name) = model.filter(|name| !is_model(name)) {
                bail!(
                    "cannot open the model {name:?}: there is no such file, and none of that name in the store\n\
                     hint: `kiln run -p {name:?}` asks the default model; `kiln run MODEL.gguf PROMPT` another one; \
                     `kiln list` shows the names there are"
                );
            }
            (model.map(PathBuf::from), prompt)
        }
        (Some(model), [None, Some(_)]) => (Some(model.to_owned()), None),
    };
    if [word.is_some(), said.prompt.is_some(), said.file.is_some()].iter().filter(|given| **given).count() > 1 {
        bail!("the prompt is given more than once\nhint: as an argument, with -p or with -f");
    }
    let prompt = match (word.or(said.prompt), said.file) {
        (Some("-"), _) => Some(stdin()?),
        (Some(text), _) => Some(text.to_owned()),
        (None, Some(path)) => Some(file_text(path)?),
        (None, None) if std::io::stdin().is_terminal() => None,
        (None, None) => Some(stdin()?).filter(|text| !text.is_empty()),
    };
    Ok(Asked { model, prompt })
}

/// Whether a word that names no file looks like something said to a model.
fn is_prompt(word: &str) -> bool {
    let is_name = is_model(word) || word.to_lowercase().ends_with(".gguf");
    !is_name && word.trim().contains(char::is_whitespace)
}

/// The text of a file; `-` is stdin.
pub(crate) fn file_text(path: &Path) -> anyhow::Result<String> {
    if path == Path::new("-") {
        return stdin();
    }
    let bytes = std::fs::read(path).with_context(|| format!("cannot read {}", path.display()))?;
    text(bytes, &path.display().to_string())
}

/// The text on stdin.
pub(crate) fn stdin() -> anyhow::Result<String> {
    let mut bytes = Vec::new();
    std::io::stdin().lock().read_to_end(&mut bytes).context("cannot read stdin")?;
    text(bytes, "stdin")
}

/// A text without the newline that editors and `echo` put behind it.
fn text(bytes: Vec<u8>, from: &str) -> anyhow::Result<String> {
    let mut text = String::from_utf8(bytes).map_err(|why| {
        let at = why.utf8_error().valid_up_to();
        anyhow::anyhow!(
            "{from} is not UTF-8 text: byte {at} does not fit\nhint: convert it first, for example with iconv"
        )
    })?;
    if text.ends_with('\n') {
        text.pop();
        if text.ends_with('\r') {
            text.pop();
        }
    }
    Ok(text)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn words_are_models_or_prompts() {
        let said = |words, model: Option<&'static str>, prompt| {
            asked(&Said { words, model: model.map(Path::new), prompt, file: None })
        };
        let got =
            |model: Option<&str>, prompt: &str| Asked { model: model.map(PathBuf::from), prompt: Some(prompt.into()) };
        let file = "Cargo.toml";
        assert_eq!(said([Some(file), Some("hi")], None, None).unwrap(), got(Some(file), "hi"));
        assert_eq!(said([Some(file), None], None, Some("hi")).unwrap(), got(Some(file), "hi"));
        assert_eq!(said([Some("Hello there"), None], None, None).unwrap(), got(None, "Hello there"));
        assert_eq!(said([Some("hi"), None], Some(file), None).unwrap(), got(Some(file), "hi"));
        assert_eq!(said([None, None], None, Some("hi")).unwrap(), got(None, "hi"));
        for (words, model, prompt) in [
            ([Some("Hello"), None], None, None),
            ([Some("my model.gguf"), None], None, None),
            ([Some("no-such-file"), Some("hi")], None, None),
            ([Some(file), Some("hi")], None, Some("hi")),
            ([Some("a"), Some("b")], Some(file), None),
        ] {
            let error = said(words, model, prompt).unwrap_err().to_string();
            assert!(error.contains("hint:"), "{error}");
        }
    }

    #[test]
    fn one_newline_at_the_end_is_not_part_of_the_text() {
        assert_eq!(text(b"a\n\n".to_vec(), "x").unwrap(), "a\n");
        assert_eq!(text(b"a\r\n".to_vec(), "x").unwrap(), "a");
        assert!(text(b"ab\xff".to_vec(), "x").unwrap_err().to_string().contains("x is not UTF-8 text: byte 2"));
    }
}
