//! The commands inside a conversation.

use std::io::{IsTerminal as _, Write as _};

use anyhow::{Context as _, bail};
use base64::Engine as _;
use kiln_engine::media::Medium;
use kiln_engine::text::Message;

use super::files::at_home;
use super::media::Attached;
use super::{Chat, Loaded};
use crate::generate::name;
use crate::output::say;

/// What comes after a command.
pub(super) enum Next {
    /// The next turn.
    Go,
    /// The next turn, with this text in the line already.
    Edit(String),
    /// Nothing.
    Quit,
}

/// What a typed line is.
#[derive(Debug, PartialEq, Eq)]
pub(super) enum Typed<'a> {
    /// A command and what stands behind it.
    Command(&'a str, &'a str),
    /// A single word behind a slash that is no command.
    Unknown(&'a str),
    /// A message.
    Message(&'a str),
}

/// Every command, with its other names.
const COMMANDS: [&[&str]; 18] = [
    &["help", "?"],
    &["system"],
    &["set"],
    &["retry"],
    &["edit"],
    &["undo"],
    &["copy"],
    &["clear"],
    &["save"],
    &["load"],
    &["list"],
    &["model"],
    &["image"],
    &["audio"],
    &["tools"],
    &["stats"],
    &["thoughts"],
    &["quit", "exit", "bye"],
];

const HELP: &str = "\
/help                 this list
/system [TEXT]        set the system prompt; without TEXT: show it
/set [NAME VALUE]     change a setting: temperature, top_k, top_p, min_p, seed, repeat_penalty ..., limit, think; without NAME: show all
/retry                generate another answer to the last message
/edit [TEXT]          change the last message and answer it again
/undo                 remove the last message and its answer
/copy                 copy the last answer to the clipboard (OSC 52)
/clear                forget the conversation, but not the system prompt
/save NAME            save the conversation under a name, or to a file if NAME has a dot or a slash (--force overwrites)
/load NAME            continue a saved conversation
/list                 list the saved conversations
/model [MODEL]        switch to another model; without MODEL: show which one this is
/image [FILE]         show a picture with the next message; without FILE: say what it will have
/audio [FILE]         play a sound with the next message; without FILE: say what it will have
/tools                list the tools that the model may call
/stats                speeds and the context used
/thoughts             show the reasoning before the last answer
/quit                 end, as Ctrl-D does
\"\"\" begins and ends a message of several lines, and a backslash at the end of a line continues it.
@path attaches a text file, a picture or a sound: @notes.txt, @photo.jpg, @talk.mp3, @\"my notes.txt\", @main.c:1-200 (these lines). \\@ is a plain @.
Only these words are commands: /usr/bin or /* are messages, //help sends \"/help\", and what is pasted or between \"\"\" is never a command.
What you type during an answer is kept for the next message. Ctrl-C stops the answer.";

impl<'a> Typed<'a> {
    /// Tells commands from messages. Paths, comments and the like begin with a slash, too: only words of the list are commands, and a
    /// word alone that may be one with a slip is not sent. A second slash sends either.
    pub(super) fn of(line: &'a str) -> Typed<'a> {
        let Some(rest) = line.strip_prefix('/') else { return Typed::Message(line) };
        if rest.starts_with('/') {
            return match Typed::of(rest) {
                Typed::Message(_) => Typed::Message(line),
                _ => Typed::Message(rest),
            };
        }
        let (word, behind) = rest.split_once(char::is_whitespace).unwrap_or((rest, ""));
        match COMMANDS.iter().any(|names| names.contains(&word)) {
            true => Typed::Command(word, behind.trim()),
            false if is_word(word) && behind.trim().is_empty() => Typed::Unknown(word),
            false => Typed::Message(line),
        }
    }
}

/// Whether a word could be meant as a command.
fn is_word(word: &str) -> bool {
    !word.is_empty() && word.bytes().all(|b| b.is_ascii_alphabetic())
}

/// What is wrong with a command that is not there.
pub(super) fn unknown(word: &str) -> anyhow::Error {
    let names = COMMANDS.iter().flat_map(|names| names.iter().copied());
    let nearest = names.min_by_key(|name| strsim::osa_distance(name, word));
    let meant =
        nearest.filter(|name| strsim::osa_distance(name, word) <= 2).map(|name| format!("did you mean /{name}? "));
    anyhow::anyhow!(
        "there is no command /{word}\nhint: {}/help lists the commands; //{word} sends it as a message",
        meant.unwrap_or_default()
    )
}

impl Chat<'_> {
    /// Does what a command says.
    pub(super) fn command(&mut self, command: &str, rest: &str) -> anyhow::Result<Next> {
        match command {
            "help" | "?" => say(HELP),
            "quit" | "exit" | "bye" => return Ok(Next::Quit),
            "system" => self.set_system(rest),
            "set" => self.set(rest)?,
            "retry" => self.retry()?,
            "edit" => return self.edit(rest),
            "undo" => self.undo()?,
            "copy" => self.copy()?,
            "clear" => {
                (self.left_out, self.last) = (0, None);
                self.messages.clear();
                self.gallery.clear();
                say("the conversation is forgotten");
            }
            "save" => self.save(rest)?,
            "load" => self.load(rest)?,
            "list" => self.list()?,
            "model" => self.change_model(rest)?,
            "image" => self.attach(Medium::Picture, rest)?,
            "audio" => self.attach(Medium::Sound, rest)?,
            "tools" => self.list_tools()?,
            "stats" => self.stats(),
            "thoughts" => match self.last.as_ref().map(|answer| &answer.thoughts).filter(|text| !text.is_empty()) {
                Some(text) => say(text),
                None => say("the last answer had no reasoning"),
            },
            _ => return Err(unknown(command)),
        }
        Ok(Next::Go)
    }

    fn set_system(&mut self, text: &str) {
        if text.is_empty() {
            return say(self.system.as_deref().unwrap_or("(no system prompt; the chat template may have its own)"));
        }
        self.system = Some(text.to_owned());
        say("the system prompt is changed, from the next message on");
    }

    /// Takes the last answer back; gives the message that it answered, with its pictures and sounds.
    fn take_back(&mut self) -> anyhow::Result<(Message, Vec<Attached>)> {
        let Some(at) = self.messages.iter().rposition(|message| message.role == "user") else {
            bail!("nothing was said yet");
        };
        let message = self.messages[at].clone();
        self.messages.truncate(at);
        self.left_out = self.left_out.min(at);
        Ok((message, self.gallery.take_back(at)))
    }

    fn retry(&mut self) -> anyhow::Result<()> {
        let (message, pictures) = self.take_back()?;
        self.gallery.put_back(self.messages.len(), pictures);
        self.messages.push(message);
        self.answer()
    }

    fn edit(&mut self, text: &str) -> anyhow::Result<Next> {
        let (message, pictures) = self.take_back()?;
        if !text.is_empty() {
            self.gallery.wait(pictures);
            self.say_to_model(text, super::Source::Line)?;
            return Ok(Next::Go);
        }
        if !self.input.is_terminal() {
            self.gallery.put_back(self.messages.len(), pictures);
            self.messages.push(message);
            bail!("/edit needs the new text where stdin is no terminal");
        }
        self.gallery.wait(pictures);
        Ok(Next::Edit(self.gallery.words(&message)))
    }

    fn undo(&mut self) -> anyhow::Result<()> {
        let (message, _) = self.take_back()?;
        self.last = None;
        let first = kiln_system::text::shown_within(&self.gallery.words(&message), 40);
        say(&format!("removed \"{first}\" and its answer; {} messages are left", self.messages.len()));
        Ok(())
    }

    /// Asks the terminal to put the last answer into the clipboard: it works through SSH as well.
    fn copy(&self) -> anyhow::Result<()> {
        let last = self.messages.iter().rev().find(|message| message.role == "assistant");
        let text = last.context("there is no answer yet")?.content.to_text();
        let mut out = std::io::stdout().lock();
        if !out.is_terminal() {
            bail!("/copy needs a terminal, and stdout is none");
        }
        let coded = base64::engine::general_purpose::STANDARD.encode(&text);
        write!(out, "\x1b]52;c;{coded}\x07").and_then(|()| out.flush()).context("cannot write to the terminal")?;
        drop(out);
        say(&format!("{} characters sent to the clipboard, if the terminal allows it (OSC 52)", text.chars().count()));
        Ok(())
    }

    fn change_model(&mut self, path: &str) -> anyhow::Result<()> {
        if path.is_empty() {
            say(&format!("{} on {}", name(&self.loaded.model), self.loaded.scheduler.describe()));
            return Ok(());
        }
        // The old one stays until the new one is there: a wrong name must not end the conversation.
        let loaded = Loaded::open(Some(&at_home(path)), self.arguments, false)?;
        self.sampling.check(loaded.model.config.vocab)?;
        self.arguments.sampling.constraint(&loaded.setup)?;
        self.loaded = loaded;
        (self.left_out, self.last) = (0, None);
        say(&format!("{} on {}", name(&self.loaded.model), self.loaded.scheduler.describe()));
        Ok(())
    }

    fn stats(&self) {
        say(&format!("{} on {}", name(&self.loaded.model), self.loaded.scheduler.describe()));
        say(&format!("{} messages, {} of them no longer in the context", self.messages.len(), self.left_out));
        let Some(answer) = &self.last else { return };
        let ([reading, writing], usage) = (answer.rates(), &answer.usage);
        say(&format!("context: {}", self.context_used(answer)));
        say(&format!(
            "prompt: {} tokens ({} of them cached), {reading:.1} tokens/s; generated: {} tokens, {writing:.1} tokens/s",
            usage.prompt_tokens, usage.cached_tokens, usage.generated_tokens,
        ));
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn only_words_of_the_list_are_commands() {
        for (line, want) in [
            ("/help", Typed::Command("help", "")),
            ("/set temp 0.5", Typed::Command("set", "temp 0.5")),
            ("/?", Typed::Command("?", "")),
            ("/hlep", Typed::Unknown("hlep")),
            ("/nonsense", Typed::Unknown("nonsense")),
            ("hello /help", Typed::Message("hello /help")),
            ("/* c comment */ int x;", Typed::Message("/* c comment */ int x;")),
            ("/usr/bin is what?", Typed::Message("/usr/bin is what?")),
            ("/tmp is full", Typed::Message("/tmp is full")),
            ("// a comment", Typed::Message("// a comment")),
            ("//help", Typed::Message("/help")),
            ("//x", Typed::Message("/x")),
            ("/", Typed::Message("/")),
            ("/ two", Typed::Message("/ two")),
        ] {
            assert_eq!(Typed::of(line), want, "{line}");
        }
        assert!(unknown("hlep").to_string().contains("did you mean /help?"));
        assert!(!unknown("photograph").to_string().contains("did you mean"));
    }

    #[test]
    fn help_lists_every_command() {
        let listed: Vec<&str> =
            HELP.lines().filter_map(|line| line.strip_prefix('/')?.split([' ', '[']).next()).collect();
        for names in COMMANDS {
            assert!(listed.contains(&names[0]), "{}", names[0]);
        }
        assert_eq!(listed.len(), COMMANDS.len());
    }
}
