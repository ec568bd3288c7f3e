//! The commands inside a conversation.

use anyhow::{Context as _, bail};
use kiln_engine::sampler::Sampling;
use kiln_engine::text::Message;
use kiln_system::files::{Output, Overwrite};
use kiln_system::text::shown;
use serde::{Deserialize, Serialize};
use serde_json::Value;

use super::input::at_home;
use super::{Chat, Loaded};
use crate::output::{print, say};
use crate::speaker::name;

/// What comes after a command.
pub(super) enum Next {
    /// The next turn.
    Go,
    /// The next turn, with this text in the line already.
    Edit(String),
    /// Nothing.
    Quit,
}

const HELP: &str = "\
/help                 this list
/system [TEXT]        what the model should be and do; without a text: what is said now
/set [NAME VALUE]     settings: temperature, top_k, top_p, min_p, seed, repeat_penalty ..., limit, think; without: all of them
/retry                another answer to the last message
/edit [TEXT]          change the last message and have it answered anew
/clear                forget the conversation, not the system's message
/save FILE            keep the conversation in a file (--force FILE overwrites)
/load FILE            go on with a conversation that was saved
/model [FILE]         talk to another model; without a file: which one this is
/stats                speeds and the context used
/thoughts             what the model thought before its last answer
/quit                 end, as Ctrl-D
\"\"\" begins and ends a text of several lines, a backslash at the end of a line asks for one more, @path puts a file in";

/// A conversation in a file.
#[derive(Serialize, Deserialize)]
struct Saved {
    #[serde(default, skip_serializing_if = "Option::is_none")]
    system: Option<String>,
    messages: Vec<Message>,
}

impl Chat<'_> {
    /// Does what a line that began with a slash says.
    pub(super) fn command(&mut self, line: &str) -> anyhow::Result<Next> {
        let (command, rest) = line.split_once(char::is_whitespace).unwrap_or((line, ""));
        let rest = rest.trim();
        match command {
            "help" | "?" => print(HELP),
            "quit" | "exit" | "bye" => return Ok(Next::Quit),
            "system" => self.set_system(rest),
            "set" => self.set(rest)?,
            "retry" => self.retry()?,
            "edit" => return self.edit(rest),
            "clear" => {
                (self.left_out, self.last) = (0, None);
                self.messages.clear();
                say("the conversation is forgotten");
            }
            "save" => self.save(rest)?,
            "load" => self.load(rest)?,
            "model" => self.change_model(rest)?,
            "stats" => self.stats(),
            "thoughts" => match self.last.as_ref().map(|answer| &answer.thoughts).filter(|text| !text.is_empty()) {
                Some(text) => print(text),
                None => say("there was no thought before the last answer"),
            },
            _ => bail!(
                "there is no command /{}\nhint: /help lists them; a message cannot begin with a slash",
                shown(command)
            ),
        }
        Ok(Next::Go)
    }

    fn set_system(&mut self, text: &str) {
        if text.is_empty() {
            return print(self.system.as_deref().unwrap_or("(nothing; the template may have words of its own)"));
        }
        self.system = Some(text.to_owned());
        say("from the next message on");
    }

    fn set(&mut self, rest: &str) -> anyhow::Result<()> {
        let mut all = serde_json::to_value(&self.sampling)?;
        let Some((name, value)) = rest.split_once(char::is_whitespace) else {
            let settings = all.as_object().into_iter().flatten().filter(|(key, _)| rest.is_empty() || *key == rest);
            settings.for_each(|(key, value)| print(&format!("{key} {value}")));
            let limit = self.limit.map_or("none".to_owned(), |limit| limit.to_string());
            if rest.is_empty() {
                print(&format!("limit {limit}\nthink {}", if self.think { "on" } else { "off" }));
            }
            return Ok(());
        };
        let (name, value) = (name.replace('-', "_").to_lowercase(), value.trim());
        match name.as_str() {
            "limit" | "n_predict" => {
                let wrong = || format!("limit is a number of tokens, or none; not {value:?}");
                self.limit = match value {
                    "none" | "-1" => None,
                    number => Some(number.parse().ok().filter(|n| *n > 0).with_context(wrong)?),
                };
                return Ok(());
            }
            "think" => {
                self.think = match value {
                    "on" => true,
                    "off" => false,
                    _ => bail!("think is on or off, not {value:?}"),
                };
                return Ok(());
            }
            _ => {}
        }
        let name = match name.as_str() {
            "temp" => "temperature",
            "typical" => "typical_p",
            "top_nsigma" => "top_n_sigma",
            other => other,
        };
        let Some(place) = all.get_mut(name) else {
            bail!("there is no setting {:?}\nhint: /set shows all of them", shown(name));
        };
        let value = if value == "none" { "null" } else { value };
        *place = serde_json::from_str(value).unwrap_or_else(|_| Value::from(value));
        let sampling: Sampling =
            serde_json::from_value(all).with_context(|| format!("{name} cannot be {}", shown(value)))?;
        sampling.check(self.loaded.model.config.vocab)?;
        self.sampling = sampling;
        Ok(())
    }

    /// Takes the last answer back; gives the message that it answered.
    fn take_back(&mut self) -> anyhow::Result<Message> {
        let Some(at) = self.messages.iter().rposition(|message| message.role == "user") else {
            bail!("nothing was said yet");
        };
        let message = self.messages[at].clone();
        self.messages.truncate(at);
        self.left_out = self.left_out.min(at);
        Ok(message)
    }

    fn retry(&mut self) -> anyhow::Result<()> {
        let message = self.take_back()?;
        self.messages.push(message);
        self.answer()
    }

    fn edit(&mut self, text: &str) -> anyhow::Result<Next> {
        let message = self.take_back()?;
        if !text.is_empty() {
            self.say_to_model(text)?;
            return Ok(Next::Go);
        }
        if !self.input.is_terminal() {
            self.messages.push(message);
            bail!("/edit needs the new text where nobody sits at a terminal");
        }
        Ok(Next::Edit(message.content.to_text()))
    }

    fn save(&self, rest: &str) -> anyhow::Result<()> {
        let (overwrite, path) = match rest.strip_prefix("--force ") {
            Some(path) => (Overwrite::Yes, path.trim()),
            None => (Overwrite::No, rest),
        };
        if path.is_empty() {
            bail!("/save needs the name of a file");
        }
        let saved = Saved { system: self.system.clone(), messages: self.messages.clone() };
        Output::write(&at_home(path), overwrite, serde_json::to_string_pretty(&saved)?.as_bytes())?;
        say(&format!("{}: {} messages", shown(path), self.messages.len()));
        Ok(())
    }

    fn load(&mut self, path: &str) -> anyhow::Result<()> {
        if path.is_empty() {
            bail!("/load needs the name of a file");
        }
        let file = at_home(path);
        // A device or a pipe might never end.
        if file.exists() && !file.is_file() {
            bail!("{} is no regular file", shown(path));
        }
        let text = std::fs::read_to_string(&file).with_context(|| format!("cannot read {}", shown(path)))?;
        let saved: Saved = serde_json::from_str(&text)
            .with_context(|| format!("{} is no conversation that /save wrote", shown(path)))?;
        (self.system, self.messages) = (saved.system, saved.messages);
        (self.left_out, self.last) = (0, None);
        say(&format!("{} messages", self.messages.len()));
        Ok(())
    }

    fn change_model(&mut self, path: &str) -> anyhow::Result<()> {
        if path.is_empty() {
            print(&format!("{} on {}", name(&self.loaded.model), self.loaded.scheduler.describe()));
            return Ok(());
        }
        // The old one stays until the new one is there: a wrong name must not end the conversation.
        let loaded = Loaded::open(Some(&at_home(path)), &self.arguments.flags)?;
        self.sampling.check(loaded.model.config.vocab)?;
        self.arguments.sampling.constraint(&loaded.model, &loaded.ends)?;
        self.loaded = loaded;
        (self.left_out, self.last) = (0, None);
        say(&format!("{} on {}", name(&self.loaded.model), self.loaded.scheduler.describe()));
        Ok(())
    }

    fn stats(&self) {
        print(&format!("{} on {}", name(&self.loaded.model), self.loaded.scheduler.describe()));
        print(&format!("{} messages, {} of them out of the model's sight", self.messages.len(), self.left_out));
        let Some(answer) = &self.last else { return };
        let ([reading, writing], usage) = (answer.rates(), &answer.usage);
        print(&format!("context: {}", self.context_used(answer)));
        print(&format!(
            "prompt: {} tokens ({} of them remembered), {reading:.1} tokens/s; generated: {} tokens, {writing:.1} tokens/s",
            usage.prompt_tokens, usage.cached_tokens, usage.generated_tokens,
        ));
    }
}
