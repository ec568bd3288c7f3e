//! What a person types, or a pipe sends: one turn at a time.

use std::io::{BufRead as _, IsTerminal as _};
use std::path::PathBuf;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::Duration;

use anyhow::{Context as _, bail};
use etcetera::BaseStrategy as _;
use kiln_system::terminal::{Quiet, key};
use rustyline::error::ReadlineError;
use rustyline::{
    Cmd, ConditionalEventHandler, DefaultEditor, Event, EventContext, EventHandler, KeyCode, KeyEvent, Modifiers,
};

/// Begins and ends a text of several lines.
const QUOTES: &str = "\"\"\"";

/// What came in.
#[derive(Debug, PartialEq, Eq)]
pub(super) enum Turn {
    /// A line as it was typed: a command or a message. Backslashes at the ends of lines make it several lines.
    Line(String),
    /// A message between three quotes, whatever it begins with.
    Quoted(String),
    /// A message that was pasted, whatever it begins with.
    Pasted(String),
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
    pasted: Arc<AtomicBool>,
    /// What was typed before a question came, and so is no answer to it: it stands in the next line.
    kept: String,
}

/// Notes that a line begins with pasted text.
struct PasteWatch(Arc<AtomicBool>);

impl ConditionalEventHandler for PasteWatch {
    fn handle(&self, _: &Event, _: u16, _: bool, context: &EventContext<'_>) -> Option<Cmd> {
        if context.line().trim().is_empty() {
            self.0.store(true, Ordering::Relaxed);
        }
        // The editor puts the text in as it always does.
        None
    }
}

impl Input {
    pub(super) fn new() -> anyhow::Result<Input> {
        if !std::io::stdin().is_terminal() || !std::io::stdout().is_terminal() {
            return Ok(Input { editor: None, history: None, pasted: Arc::default(), kept: String::new() });
        }
        let mut editor = DefaultEditor::new().context("cannot use the terminal")?;
        let pasted = Arc::<AtomicBool>::default();
        editor.bind_sequence(
            KeyEvent(KeyCode::BracketedPasteStart, Modifiers::NONE),
            EventHandler::Conditional(Box::new(PasteWatch(Arc::clone(&pasted)))),
        );
        let history = etcetera::choose_base_strategy().ok().map(|dirs| dirs.data_dir().join("kiln/history"));
        if let Some(path) = history.as_ref().filter(|path| path.exists())
            && let Err(why) = editor.load_history(path)
        {
            log::warn!("cannot read the history in {}: {why}", path.display());
        }
        Ok(Input { editor: Some(editor), history, pasted, kept: String::new() })
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
        if let (Turn::Line(text) | Turn::Quoted(text) | Turn::Pasted(text), Some(editor)) = (&turn, &mut self.editor)
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

    /// Keeps a text for the next turn.
    pub(super) fn keep(&mut self, text: &str) {
        if !self.kept.is_empty() {
            self.kept.push('\n');
        }
        self.kept += text;
    }

    /// Keeps what was typed until now for the next turn, so that it does not answer a question that was not there yet.
    pub(super) fn set_aside(&mut self) {
        let Some(_quiet) = self.is_terminal().then(Quiet::begin).flatten() else { return };
        let mut bytes = Vec::new();
        while let Some(byte) = key(Duration::ZERO) {
            bytes.push(byte);
        }
        let text = typed(&bytes);
        if !text.is_empty() {
            self.keep(&text);
        }
    }

    /// Asks something at the terminal; nothing where the answer is Ctrl-C or Ctrl-D.
    pub(super) fn ask(&mut self, question: &str) -> anyhow::Result<Option<String>> {
        let Some(editor) = &mut self.editor else { return Ok(None) };
        match editor.readline(question) {
            Ok(text) => Ok(Some(text)),
            Err(ReadlineError::Interrupted | ReadlineError::Eof) => Ok(None),
            Err(why) => Err(anyhow::Error::new(why).context("cannot read from the terminal")),
        }
    }

    fn line(&mut self, prompt: &str, initial: &str) -> anyhow::Result<Turn> {
        let Some(editor) = &mut self.editor else { return piped_line() };
        let initial = [std::mem::take(&mut self.kept).as_str(), initial].concat();
        let initial = initial.as_str();
        self.pasted.store(false, Ordering::Relaxed);
        // More lines at once can only be shown; they are edited as one text.
        match editor.readline_with_initial(prompt, (initial, "")) {
            Ok(line) if self.pasted.load(Ordering::Relaxed) => Ok(Turn::Pasted(line)),
            Ok(line) => Ok(Turn::Line(line)),
            Err(ReadlineError::Interrupted) => Ok(Turn::Interrupted),
            Err(ReadlineError::Eof) => Ok(Turn::End),
            Err(why) => Err(anyhow::Error::new(why).context("cannot read from the terminal")),
        }
    }
}

/// What keys mean as text: lines end as lines do, marks of pastes are gone, and so are other keys than letters.
fn typed(bytes: &[u8]) -> String {
    let text = String::from_utf8_lossy(bytes).replace("\x1b[200~", "").replace("\x1b[201~", "").replace('\r', "\n");
    text.chars().filter(|c| *c == '\n' || !c.is_control()).collect::<String>().trim_end_matches('\n').to_owned()
}

fn piped_line() -> anyhow::Result<Turn> {
    let mut line = Vec::new();
    if std::io::stdin().lock().read_until(b'\n', &mut line).context("cannot read stdin")? == 0 {
        return Ok(Turn::End);
    }
    let line = String::from_utf8(line)
        .ok()
        .context("stdin is not UTF-8 text\nhint: convert it first, for example with iconv")?;
    Ok(Turn::Line(line.strip_suffix('\n').unwrap_or(&line).trim_end_matches('\r').to_owned()))
}

/// Puts a turn together from lines: a backslash at the end of a line, or three quotes at its beginning, ask for more. Pasted text is
/// complete as it is.
fn whole_turn(line: &mut dyn FnMut(&str, bool) -> anyhow::Result<Turn>) -> anyhow::Result<Turn> {
    let mut first = match line(">>> ", true)? {
        Turn::Line(text) => text,
        other => return Ok(other),
    };
    if let Some(rest) = first.trim_start().strip_prefix(QUOTES) {
        let mut text = rest.to_owned();
        while !text.trim_end().ends_with(QUOTES) {
            match line("... ", false)? {
                Turn::Line(more) | Turn::Quoted(more) | Turn::Pasted(more) => text = text + "\n" + &more,
                Turn::Interrupted => return Ok(Turn::Interrupted),
                Turn::End => bail!("the text in {QUOTES} has no end"),
            }
        }
        let text = text.trim_end();
        return Ok(Turn::Quoted(text[..text.len() - QUOTES.len()].trim_matches('\n').to_owned()));
    }
    while let Some(start) = first.strip_suffix('\\') {
        match line("... ", false)? {
            Turn::Line(more) | Turn::Quoted(more) | Turn::Pasted(more) => first = format!("{start}\n{more}"),
            Turn::Interrupted => return Ok(Turn::Interrupted),
            Turn::End => {
                first.pop();
                break;
            }
        }
    }
    Ok(Turn::Line(first))
}

#[cfg(test)]
mod tests {
    use super::*;

    fn turns(lines: &[&str]) -> Vec<anyhow::Result<Turn>> {
        let mut lines = lines.iter();
        let mut line = |_: &str, _: bool| Ok(lines.next().map_or(Turn::End, |line| Turn::Line((*line).to_owned())));
        let mut all = Vec::new();
        loop {
            match whole_turn(&mut line) {
                Ok(Turn::End) => return all,
                other => all.push(other),
            }
        }
    }

    #[test]
    fn what_was_typed_before_a_question_becomes_text() {
        assert_eq!(typed(b"always\r\x1b[200~a\rb\x1b[201~\r"), "always\na\nb");
        assert_eq!(typed("\u{3}é\t".as_bytes()), "é");
    }

    #[test]
    fn turns_of_several_lines() {
        let got = turns(&["one", "two\\", "more", "\"\"\"", "a", "  b", "\"\"\"", "\"\"\"x\"\"\"", "end\\"]);
        let got: Vec<Turn> = got.into_iter().map(Result::unwrap).collect();
        let line = |text: &str| Turn::Line(text.into());
        let quoted = |text: &str| Turn::Quoted(text.into());
        assert_eq!(got, [line("one"), line("two\nmore"), quoted("a\n  b"), quoted("x"), line("end")]);
        assert!(turns(&["\"\"\"", "a"])[0].is_err());
        // What was pasted asks for nothing more, whatever its first and last characters are.
        let pasted = Turn::Pasted("\"\"\" and a backslash \\".into());
        let got = whole_turn(&mut |_, first| {
            Ok(if first { Turn::Pasted("\"\"\" and a backslash \\".into()) } else { Turn::End })
        });
        assert_eq!(got.unwrap(), pasted);
    }
}
