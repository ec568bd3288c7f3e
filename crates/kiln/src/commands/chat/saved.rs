//! Conversations in files: `/save`, `/load` and `/list`.

use std::path::{Path, PathBuf};

use anyhow::{Context as _, bail};
use etcetera::BaseStrategy as _;
use kiln_engine::text::Message;
use kiln_system::files::{Output, Overwrite};
use kiln_system::text::shown;
use serde::{Deserialize, Serialize};
use serde_json::Value;

use super::Chat;
use super::files::at_home;
use crate::output::say;

/// A conversation in a file.
#[derive(Debug, Serialize, Deserialize)]
struct Saved {
    #[serde(default, skip_serializing_if = "Option::is_none")]
    system: Option<String>,
    messages: Vec<Message>,
}

/// Who may speak in a conversation.
const ROLES: [&str; 4] = ["user", "assistant", "system", "tool"];

impl Saved {
    /// Reads a file that `/save` wrote; what is wrong with another one is said in plain words.
    fn parse(text: &str) -> anyhow::Result<Saved> {
        let value: Value =
            serde_json::from_str(text).map_err(|why| anyhow::anyhow!("line {} is no JSON", why.line()))?;
        let Some(messages) = value.get("messages").and_then(Value::as_array) else {
            bail!("there is no list `messages` in it");
        };
        if value.get("system").is_some_and(|system| !system.is_string() && !system.is_null()) {
            bail!("`system` is no text");
        }
        for (number, message) in messages.iter().enumerate().map(|(at, message)| (at + 1, message)) {
            let role =
                message.get("role").and_then(Value::as_str).with_context(|| format!("message {number} has no role"))?;
            if !ROLES.contains(&role) {
                bail!("message {number} has the role {:?}; it must be {}", shown(role), ROLES.join(", "));
            }
            if serde_json::from_value::<Message>(message.clone()).is_err() {
                bail!("message {number} has no text as its `content`");
            }
        }
        serde_json::from_value(value).context("it has another form than /save writes")
    }

    fn read(path: &Path) -> anyhow::Result<Saved> {
        // A device or a pipe might never end.
        if path.exists() && !path.is_file() {
            bail!("{} is no regular file", shown(&path.to_string_lossy()));
        }
        let text =
            std::fs::read_to_string(path).with_context(|| format!("cannot read {}", shown(&path.to_string_lossy())))?;
        Saved::parse(&text)
            .with_context(|| format!("{} is no conversation that /save wrote", shown(&path.to_string_lossy())))
    }
}

/// The folder of conversations that were saved under a name.
fn folder() -> anyhow::Result<PathBuf> {
    let dirs =
        etcetera::choose_base_strategy().context("no home folder\nhint: name a file, as in /save ./talk.json")?;
    Ok(dirs.data_dir().join("kiln/chats"))
}

/// Where a conversation is: a name alone is among the saved ones, what has a dot or a slash is a file.
fn place(name: &str) -> anyhow::Result<PathBuf> {
    if name.contains(['.', '/']) {
        return Ok(at_home(name));
    }
    Ok(folder()?.join(format!("{name}.json")))
}

impl Chat<'_> {
    pub(super) fn save(&self, rest: &str) -> anyhow::Result<()> {
        let (overwrite, name) = match rest.strip_prefix("--force ") {
            Some(name) => (Overwrite::Yes, name.trim()),
            None => (Overwrite::No, rest),
        };
        if name.is_empty() {
            bail!("/save needs a name or a file, as in /save monday or /save ./monday.json");
        }
        let path = place(name)?;
        if let (Some(parent), false) = (path.parent(), name.contains(['.', '/'])) {
            std::fs::create_dir_all(parent).with_context(|| format!("cannot make {}", parent.display()))?;
        }
        let messages = self.messages.iter().enumerate().map(|(number, message)| self.gallery.kept(number, message));
        let saved = Saved { system: self.system.clone(), messages: messages.collect() };
        Output::write(&path, overwrite, serde_json::to_string_pretty(&saved)?.as_bytes())?;
        say(&format!("{} messages saved to {}", self.messages.len(), shown(&path.to_string_lossy())));
        if self.gallery.count() > 0 {
            say("note: pictures and sounds are not saved, only their names");
        }
        Ok(())
    }

    pub(super) fn load(&mut self, name: &str) -> anyhow::Result<()> {
        if name.is_empty() {
            bail!("/load needs a name or a file\nhint: /list shows the saved conversations");
        }
        let saved = Saved::read(&place(name)?)?;
        (self.system, self.messages) = (saved.system, saved.messages);
        (self.left_out, self.last) = (0, None);
        self.gallery.clear();
        say(&format!("{} messages loaded", self.messages.len()));
        Ok(())
    }

    pub(super) fn list(&self) -> anyhow::Result<()> {
        let folder = folder()?;
        let names = saved_in(&folder);
        if names.is_empty() {
            say(&format!("no conversation is saved in {}\nhint: /save NAME saves this one", folder.display()));
        }
        for name in names {
            let count = match Saved::read(&folder.join(format!("{name}.json"))) {
                Ok(saved) => format!("{} messages", saved.messages.len()),
                Err(_) => "damaged".to_owned(),
            };
            say(&format!("{:20}  {count}", shown(&name)));
        }
        Ok(())
    }
}

/// The names of the conversations in a folder, sorted.
fn saved_in(folder: &Path) -> Vec<String> {
    let entries = std::fs::read_dir(folder).into_iter().flatten().flatten();
    let name = |entry: std::fs::DirEntry| Some(entry.file_name().to_str()?.strip_suffix(".json")?.to_owned());
    let mut names: Vec<String> = entries.filter_map(name).collect();
    names.sort();
    names
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn damaged_conversations_are_refused_in_plain_words() {
        assert_eq!(Saved::parse(r#"{"messages": [{"role": "user", "content": "hi"}]}"#).unwrap().messages.len(), 1);
        for (text, words) in [
            ("{\n\"messages\": [", "line 2 is no JSON"),
            ("[]", "no list `messages`"),
            (r#"{"messages": [], "system": 7}"#, "`system` is no text"),
            (r#"{"messages": [{"content": "hi"}]}"#, "message 1 has no role"),
            (r#"{"messages": [{"role": "evil", "content": "hi"}]}"#, "message 1 has the role \"evil\""),
            (r#"{"messages": [{"role": "user", "content": 7}]}"#, "message 1 has no text"),
        ] {
            let why = Saved::parse(text).unwrap_err().to_string();
            assert!(why.contains(words), "{why}");
        }
    }
}
