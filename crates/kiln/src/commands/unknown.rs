//! What `kiln inspect` says of a file whose architecture Kiln does not know: the nearest known one, and what is new.

use kiln_engine::arch::{Likeness, REFUSED, TABLE, nearest};
use kiln_gguf::Gguf;
use kiln_system::text::shown;
use serde_json::json;

use crate::output::print;

/// Names that are listed of one kind.
const LISTED: usize = 12;

/// A file of an architecture that Kiln does not know.
pub(super) struct Unknown {
    name: String,
    nearest: Option<Likeness>,
}

impl Unknown {
    /// None where Kiln knows the architecture, or the file has no model.
    pub(super) fn of(model: &Gguf) -> kiln_gguf::Result<Option<Unknown>> {
        let name = model.metadata().get_str_or("general.architecture", "")?;
        let known = TABLE.iter().any(|row| row.name == name) || REFUSED.iter().any(|(refused, _)| *refused == name);
        if known || name.is_empty() || model.tensors().is_empty() {
            return Ok(None);
        }
        Ok(Some(Unknown { name: name.to_owned(), nearest: nearest(model, name) }))
    }

    pub(super) fn json(&self) -> serde_json::Value {
        self.nearest.as_ref().map_or(serde_json::Value::Null, |of| {
            json!({
                "architecture": of.known.name,
                "tensors_read": of.read,
                "tensors": of.tensors,
                "unread_tensors": of.unread,
                "unread_keys": of.unasked,
                "stops": of.stops,
            })
        })
    }

    pub(super) fn describe(&self) {
        print("");
        print(&format!("Kiln does not know architecture \"{}\"", shown(&self.name)));
        let Some(of) = &self.nearest else {
            print("  no known one reads any of its tensors");
            return;
        };
        let (known, models) = (of.known.name, of.known.models);
        print(&format!("  nearest: {known} ({models}), which reads {} of {} tensors", of.read, of.tensors));
        let list = |what: &str, names: &[String]| {
            if names.is_empty() {
                return;
            }
            let some: Vec<String> = names.iter().take(LISTED).map(|name| shown(name)).collect();
            let more = if names.len() > LISTED { format!(", ... {} in all", names.len()) } else { String::new() };
            print(&format!("  {what} that it does not read: {}{more}", some.join(", ")));
        };
        list("tensors", &of.unread);
        list("keys", &of.unasked);
        if let Some(why) = &of.stops {
            print(&format!("  it stops there: {}", shown(why)));
        } else if of.unread.is_empty() {
            print(&format!("  it reads the whole file: --as {known} runs it, for experiments"));
        }
        print("  docs/internals/model-day.md goes from here to a judged architecture");
    }
}
