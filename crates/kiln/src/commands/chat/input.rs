//! What a person types, or a pipe sends: one turn at a time.

use std::io::{BufRead as _, IsTerminal as _};
use std::path::PathBuf;

use anyhow::{Context as _, bail};
use etcetera::BaseStrategy as _;
use kiln_system::text::shown;
use rustyline::DefaultEditor;
use rustyline::error::ReadlineError;

/// Begins and ends a text of several lines.
const QUOTES: &str = "\"\"\"";

/// What came in.
#[derive(Debug, PartialEq, Eq)]
pub(super) enum Turn {
    /// A text, of one line or several.
    Text(String),
    /// Ctrl-C at an empty or unfinished line.
    Interrupted,
    /// Nothing more will come.
    End,
}

/// Where turns come from.
pub(super) struct Input {
    /// Where a person sits at a terminal.
    editor: Option<DefaultEditor>,
    history: Option<PathBuf>,
}

impl Input {
    pub(super) fn new() -> anyhow::Result<Input> {
        if !std::io::stdin().is_terminal() || !std::io::stdout().is_terminal() {
            return Ok(Input { editor: None, history: None });
        }
        let mut editor = DefaultEditor::new().context("cannot use the terminal")?;
        let history = etcetera::choose_base_strategy().ok().map(|dirs| dirs.data_dir().join("kiln/history"));
        if let Some(path) = history.as_ref().filter(|path| path.exists())
            && let Err(why) = editor.load_history(path)
        {
            log::warn!("cannot read the history in {}: {why}", path.display());
        }
        Ok(Input { editor: Some(editor), history })
    }

    /// Whether a person is there.
    pub(super) fn is_terminal(&self) -> bool {
        self.editor.is_some()
    }

    /// Columns and rows of the terminal.
    pub(super) fn size(&mut self) -> Option<(usize, usize)> {
        let (columns, rows) = self.editor.as_mut()?.dimensions()?;
        Some((usize::from(columns), usize::from(rows)))
    }

    /// The next turn; `initial` stands in the line already.
    pub(super) fn turn(&mut self, initial: &str) -> anyhow::Result<Turn> {
        let turn = whole_turn(&mut |prompt, first| self.line(prompt, if first { initial } else { "" }))?;
        if let (Turn::Text(text), Some(editor)) = (&turn, &mut self.editor)
            && !text.trim().is_empty()
        {
            let _ = editor.add_history_entry(text);
            if let Some(path) = &self.history {
                let folder = path.parent().map_or(Ok(()), std::fs::create_dir_all);
                // A history that cannot be kept is no reason to stop.
                if let Err(why) = folder.map_err(ReadlineError::from).and_then(|()| editor.save_history(path)) {
                    log::info!("cannot keep the history in {}: {why}", path.display());
                    self.history = None;
                }
            }
        }
        Ok(turn)
    }

    fn line(&mut self, prompt: &str, initial: &str) -> anyhow::Result<Turn> {
        let Some(editor) = &mut self.editor else { return piped_line() };
        // More lines at once can only be shown; they are edited as one text.
        match editor.readline_with_initial(prompt, (initial, "")) {
            Ok(line) => Ok(Turn::Text(line)),
            Err(ReadlineError::Interrupted) => Ok(Turn::Interrupted),
            Err(ReadlineError::Eof) => Ok(Turn::End),
            Err(why) => Err(anyhow::Error::new(why).context("cannot read from the terminal")),
        }
    }
}

fn piped_line() -> anyhow::Result<Turn> {
    let mut line = Vec::new();
    if std::io::stdin().lock().read_until(b'\n', &mut line).context("cannot read stdin")? == 0 {
        return Ok(Turn::End);
    }
    let line = String::from_utf8(line)
        .ok()
        .context("stdin is not UTF-8 text\nhint: convert it first, for example with iconv")?;
    Ok(Turn::Text(line.strip_suffix('\n').unwrap_or(&line).trim_end_matches('\r').to_owned()))
}

/// Puts a turn together from lines: a backslash at the end of a line, or three quotes at its beginning, ask for more.
fn whole_turn(line: &mut dyn FnMut(&str, bool) -> anyhow::Result<Turn>) -> anyhow::Result<Turn> {
    let mut first = match line(">>> ", true)? {
        Turn::Text(text) => text,
        other => return Ok(other),
    };
    if let Some(rest) = first.trim_start().strip_prefix(QUOTES) {
        let mut text = rest.to_owned();
        while !text.trim_end().ends_with(QUOTES) {
            match line("... ", false)? {
                Turn::Text(more) => text = text + "\n" + &more,
                Turn::Interrupted => return Ok(Turn::Interrupted),
                Turn::End => bail!("the text in {QUOTES} has no end"),
            }
        }
        let text = text.trim_end();
        return Ok(Turn::Text(text[..text.len() - QUOTES.len()].trim_matches('\n').to_owned()));
    }
    while let Some(start) = first.strip_suffix('\\') {
        match line("... ", false)? {
            Turn::Text(more) => first = format!("{start}\n{more}"),
            Turn::Interrupted => return Ok(Turn::Interrupted),
            Turn::End => {
                first.pop();
                break;
            }
        }
    }
    Ok(Turn::Text(first))
}

/// A path as people type it: no shell puts the home folder in the place of `~` here.
pub(super) fn at_home(name: &str) -> PathBuf {
    let home = name.strip_prefix("~/").and_then(|rest| Some(etcetera::home_dir().ok()?.join(rest)));
    home.unwrap_or_else(|| name.into())
}

/// A message with the files that it names as `@path` put behind it, and the names of those files.
pub(super) fn with_files(message: &str) -> anyhow::Result<(String, Vec<String>)> {
    let (mut text, mut names) = (message.to_owned(), Vec::new());
    for word in message.split_whitespace() {
        let Some(name) = word.strip_prefix('@').map(|name| name.trim_end_matches([',', '.', ':', ';', '?', '!', ')']))
        else {
            continue;
        };
        if name.is_empty() || names.iter().any(|known| known == name) {
            continue;
        }
        let path = at_home(name);
        if !path.is_file() {
            // Names of people and packages begin with the same sign; what begins as paths do was meant as one.
            if ["/", "./", "../", "~/"].iter().any(|start| name.starts_with(start)) {
                bail!("there is no file {}\nhint: write the word without the @ if it is not to be put in", shown(name));
            }
            continue;
        }
        let bytes = std::fs::read(&path).with_context(|| format!("cannot read {name}"))?;
        let Ok(content) = String::from_utf8(bytes) else { bail!("{name} is not UTF-8 text, so it cannot be put in") };
        // More backticks than the file has in a row.
        let most = content.split(|c| c != '`').map(str::len).max().unwrap_or(0);
        let fence = "`".repeat(most.max(2) + 1);
        text += &format!("\n\n{name}:\n{fence}\n{}\n{fence}", content.trim_end_matches('\n'));
        names.push(name.to_owned());
    }
    Ok((text, names))
}

#[cfg(test)]
mod tests {
    use super::*;

    fn turns(lines: &[&str]) -> Vec<anyhow::Result<Turn>> {
        let mut lines = lines.iter();
        let mut line = |_: &str, _: bool| Ok(lines.next().map_or(Turn::End, |line| Turn::Text((*line).to_owned())));
        let mut all = Vec::new();
        loop {
            match whole_turn(&mut line) {
                Ok(Turn::End) => return all,
                other => all.push(other),
            }
        }
    }

    #[test]
    fn turns_of_several_lines() {
        let got = turns(&["one", "two\\", "more", "\"\"\"", "a", "  b", "\"\"\"", "\"\"\"x\"\"\"", "end\\"]);
        let got: Vec<Turn> = got.into_iter().map(Result::unwrap).collect();
        let want = ["one", "two\nmore", "a\n  b", "x", "end"].map(|text| Turn::Text(text.into()));
        assert_eq!(got, want);
        assert!(turns(&["\"\"\"", "a"])[0].is_err());
    }

    #[test]
    fn files_are_put_behind_the_message() {
        let file = tempfile::Builder::new().suffix(".txt").tempfile().unwrap();
        std::fs::write(file.path(), "a ``` b\n").unwrap();
        let name = file.path().to_str().unwrap();
        let message = format!("What is in @{name}, and @{name}? Ask @nobody");
        let (text, names) = with_files(&message).unwrap();
        assert_eq!(names, [name]);
        assert_eq!(text, format!("{message}\n\n{name}:\n````\na ``` b\n````"));
        std::fs::write(file.path(), b"\xff").unwrap();
        assert!(with_files(&message).unwrap_err().to_string().contains("UTF-8"));
        assert!(with_files("see @./nowhere.txt").unwrap_err().to_string().contains("no file ./nowhere.txt"));
        assert_eq!(with_files("ask @types/node and @me").unwrap().0, "ask @types/node and @me");
        assert_eq!(at_home("~/x/y"), etcetera::home_dir().unwrap().join("x/y"));
        assert_eq!([at_home("~x"), at_home("a/~/b")], [PathBuf::from("~x"), PathBuf::from("a/~/b")]);
    }
}
