//! Where the prompt comes from: an argument, a flag, a file, stdin, or one of them with stdin behind it.

use std::io::{IsTerminal as _, Read as _};
use std::path::{Path, PathBuf};
use std::sync::mpsc::{RecvTimeoutError, channel};
use std::time::Duration;

use anyhow::{Context as _, bail};

use crate::output::say;
use crate::store::is_model;

/// What was said about model and prompt.
pub(crate) struct PromptArgs<'a> {
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
pub(crate) struct Resolved {
    /// The file; `None` for the default model.
    pub(crate) model: Option<PathBuf>,
    /// The text.
    pub(crate) prompt: Option<String>,
}

/// Sorts out what was said.
pub(crate) fn asked(said: &PromptArgs<'_>) -> anyhow::Result<Resolved> {
    asked_beside(said, with_stdin)
}

/// The same; `whole` adds to a prompt what else was given.
fn asked_beside(said: &PromptArgs<'_>, whole: impl Fn(String) -> anyhow::Result<String>) -> anyhow::Result<Resolved> {
    let (model, word) = match (said.model, said.words) {
        (Some(model), [prompt, None]) => (Some(model.to_owned()), prompt),
        (Some(_), [Some(first), Some(second)]) => {
            bail!(
                "--model names the model already, but both {first:?} and {second:?} are given\nhint: leave one of them out"
            )
        }
        (None, [Some("-"), None]) => (None, Some("-")),
        (None, [Some(only), None]) if is_prompt(only) => {
            log::info!("no model is named, so the default model gets the prompt");
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
        (Some(text), _) => Some(whole(text.to_owned())?),
        (None, Some(path)) if path == Path::new("-") => Some(stdin()?),
        (None, Some(path)) => Some(whole(file_text(path)?)?),
        (None, None) if std::io::stdin().is_terminal() => None,
        (None, None) => Some(stdin()?).filter(|text| !text.is_empty()),
    };
    Ok(Resolved { model, prompt })
}

/// Whether a word that names no file looks like something said to a model. Addresses and names of the store have no spaces.
fn is_prompt(word: &str) -> bool {
    let is_file = Path::new(word).exists() || word.to_lowercase().ends_with(".gguf");
    !is_file && word.trim().contains(char::is_whitespace)
}

/// A prompt with what is piped or redirected to stdin behind it, after an empty line.
fn with_stdin(prompt: String) -> anyhow::Result<String> {
    if !kiln_system::os::stdin_has_data() {
        return Ok(prompt);
    }
    // If the other end stays open and silent, say what Kiln waits for.
    let (done, waits) = channel::<()>();
    std::thread::spawn(move || {
        if waits.recv_timeout(Duration::from_secs(2)) == Err(RecvTimeoutError::Timeout) {
            say("note: waiting for the end of stdin, which is added to the prompt (`</dev/null` leaves it out)");
        }
    });
    let more = stdin()?;
    drop(done);
    Ok(joined(prompt, &more))
}

fn joined(prompt: String, more: &str) -> String {
    if more.trim().is_empty() { prompt } else { format!("{prompt}\n\n{more}") }
}

/// The text of a file; `-` is stdin.
pub(crate) fn file_text(path: &Path) -> anyhow::Result<String> {
    if path == Path::new("-") {
        return stdin();
    }
    let bytes = std::fs::read(path).with_context(|| format!("cannot read {}", path.display()))?;
    text(bytes, &path.display().to_string())
}

/// The same with every byte of it, the last newline too; stdin without a path.
pub(crate) fn whole_text(path: Option<&Path>) -> anyhow::Result<String> {
    match path.filter(|path| *path != Path::new("-")) {
        None => utf8(stdin_bytes()?, "stdin"),
        Some(path) => {
            let bytes = std::fs::read(path).with_context(|| format!("cannot read {}", path.display()))?;
            utf8(bytes, &path.display().to_string())
        }
    }
}

/// The text on stdin.
pub(crate) fn stdin() -> anyhow::Result<String> {
    text(stdin_bytes()?, "stdin")
}

fn stdin_bytes() -> anyhow::Result<Vec<u8>> {
    let mut bytes = Vec::new();
    std::io::stdin().lock().read_to_end(&mut bytes).context("cannot read stdin")?;
    Ok(bytes)
}

fn utf8(bytes: Vec<u8>, from: &str) -> anyhow::Result<String> {
    String::from_utf8(bytes).map_err(|why| {
        let at = why.utf8_error().valid_up_to();
        anyhow::anyhow!(
            "{from} is not UTF-8 text: byte {at} does not fit\nhint: convert it first, for example with iconv"
        )
    })
}

/// A text without the newline that editors and `echo` put behind it.
fn text(bytes: Vec<u8>, from: &str) -> anyhow::Result<String> {
    let mut text = utf8(bytes, from)?;
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
            asked_beside(&PromptArgs { words, model: model.map(Path::new), prompt, file: None }, Ok)
        };
        let got = |model: Option<&str>, prompt: &str| Resolved {
            model: model.map(PathBuf::from),
            prompt: Some(prompt.into()),
        };
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
    fn words_with_spaces_are_prompts_and_stdin_comes_behind_them() {
        for prompt in ["hi there", "https://example.org is what?", "hf: what is it?", "ollama: who?"] {
            assert!(is_prompt(prompt), "{prompt}");
        }
        for name in ["hi", "hf:a/b", "my model.gguf", "Cargo.toml"] {
            assert!(!is_prompt(name), "{name}");
        }
        assert_eq!(joined("What is it?".into(), "a list"), "What is it?\n\na list");
        assert_eq!(joined("What is it?".into(), " \n"), "What is it?");
    }

    #[test]
    fn one_newline_at_the_end_is_not_part_of_the_text() {
        assert_eq!(text(b"a\n\n".to_vec(), "x").unwrap(), "a\n");
        assert_eq!(text(b"a\r\n".to_vec(), "x").unwrap(), "a");
        assert!(text(b"ab\xff".to_vec(), "x").unwrap_err().to_string().contains("x is not UTF-8 text: byte 2"));
    }
}
