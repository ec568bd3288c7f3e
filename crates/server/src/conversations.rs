//! Conversations of the page in a folder: a file for each, written whole or not at all, in a folder for each key. The first line of a file is what
//! the list shows, so that a list of thousands reads a line of each. One server has the folder.

use std::collections::HashMap;
use std::fs::File;
use std::io::{BufRead as _, BufReader, Read as _};
use std::path::{Path, PathBuf};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

use kiln_system::files::{Output, Overwrite};
use serde_json::{Value, json};
use sha2::{Digest as _, Sha256};

use crate::api_error::{ApiError, Kind};

/// How much is kept for each key.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct ConversationLimits {
    /// Conversations at most.
    pub count: usize,
    /// Bytes of all of them at most.
    pub bytes: u64,
}

impl Default for ConversationLimits {
    fn default() -> ConversationLimits {
        ConversationLimits { count: 20_000, bytes: 1 << 30 }
    }
}

/// Letters of an id, and of a title that the list shows.
const LONGEST_ID: usize = 200;
const LONGEST_TITLE: usize = 400;
/// Bytes of the first line of a file.
const LONGEST_HEAD: u64 = 16 << 10;
const ENDING: &str = "kiln-chat";

/// What the list shows of a conversation, and the bytes of its file.
struct Head {
    shown: Value,
    bytes: u64,
}

impl Head {
    fn changed(&self) -> f64 {
        self.shown.get("changed").and_then(Value::as_f64).unwrap_or(0.0)
    }
}

/// The conversations of one key.
struct KeyFolder {
    folder: PathBuf,
    heads: HashMap<String, Head>,
    bytes: u64,
}

/// All conversations.
pub(crate) struct Conversations {
    folder: PathBuf,
    limits: ConversationLimits,
    by_key: Mutex<HashMap<String, Arc<Mutex<KeyFolder>>>>,
}

/// What became of a conversation that was to be kept.
#[derive(Debug, PartialEq, Eq)]
pub(crate) enum Kept {
    Yes,
    /// The one that is there was changed later; it stays.
    Newer,
}

fn lock<T>(mutex: &Mutex<T>) -> MutexGuard<'_, T> {
    mutex.lock().unwrap_or_else(PoisonError::into_inner)
}

fn hex(bytes: &[u8]) -> String {
    bytes.iter().map(|byte| format!("{byte:02x}")).collect()
}

/// The name of a conversation's file: ids are the page's, or whatever an import brought.
fn file_name(id: &str) -> String {
    format!("{}.{ENDING}", hex(&Sha256::digest(id.as_bytes())[..16]))
}

/// What the list shows of a conversation.
fn head_of(id: &str, talk: &Value) -> Value {
    let number = |name: &str| talk.get(name).and_then(Value::as_f64).filter(|n| n.is_finite()).unwrap_or(0.0);
    let title: String =
        talk.get("title").and_then(Value::as_str).unwrap_or_default().chars().take(LONGEST_TITLE).collect();
    let tags: Vec<String> = talk
        .get("tags")
        .and_then(Value::as_array)
        .into_iter()
        .flatten()
        .take(8)
        .filter_map(|tag| Some(tag.as_str()?.chars().take(30).collect()))
        .collect();
    json!({
        "id": id, "title": title, "tags": tags, "made": number("made"), "changed": number("changed"),
        "pinned": talk.get("pinned") == Some(&Value::Bool(true)),
    })
}

/// Reads what the list shows of a file; nothing where it is none of ours.
fn read_head(path: &Path) -> Option<(String, Head)> {
    let file = File::open(path).ok()?;
    let bytes = file.metadata().ok().filter(std::fs::Metadata::is_file)?.len();
    let mut line = String::new();
    BufReader::new(file.take(LONGEST_HEAD)).read_line(&mut line).ok()?;
    let shown: Value = serde_json::from_str(&line).ok()?;
    let id = shown.get("id")?.as_str()?.to_owned();
    (path.file_name()?.to_str()? == file_name(&id)).then_some((id, Head { shown, bytes }))
}

impl Conversations {
    pub(crate) fn new(folder: &Path, limits: ConversationLimits) -> Conversations {
        Conversations { folder: folder.to_owned(), limits, by_key: Mutex::default() }
    }

    /// The folder of a key, by a number made of its secret; without keys there is one.
    fn of_key(&self, owner: Option<u64>) -> Result<Arc<Mutex<KeyFolder>>, ApiError> {
        let name = owner.map_or_else(|| "everybody".to_owned(), |owner| format!("key-{owner:016x}"));
        let mut by_key = lock(&self.by_key);
        if let Some(known) = by_key.get(&name) {
            return Ok(Arc::clone(known));
        }
        let folder = self.folder.join(&name);
        kiln_system::os::make_private_folder(&folder)
            .map_err(|why| ApiError::internal(&format!("{}: {why}", folder.display())))?;
        let files =
            std::fs::read_dir(&folder).map_err(|why| ApiError::internal(&format!("{}: {why}", folder.display())))?;
        let heads: HashMap<String, Head> = files.flatten().filter_map(|file| read_head(&file.path())).collect();
        let bytes = heads.values().map(|head| head.bytes).sum();
        let kept = Arc::new(Mutex::new(KeyFolder { folder, heads, bytes }));
        by_key.insert(name, Arc::clone(&kept));
        Ok(kept)
    }

    /// What the list shows of all conversations of a key.
    pub(crate) fn list(&self, owner: Option<u64>) -> Result<Vec<Value>, ApiError> {
        let kept = self.of_key(owner)?;
        Ok(lock(&kept).heads.values().map(|head| head.shown.clone()).collect())
    }

    /// A whole conversation, as JSON.
    pub(crate) fn find(&self, owner: Option<u64>, id: &str) -> Result<Option<String>, ApiError> {
        let kept = self.of_key(owner)?;
        let kept = lock(&kept);
        if !kept.heads.contains_key(id) {
            return Ok(None);
        }
        let path = kept.folder.join(file_name(id));
        let text =
            std::fs::read_to_string(&path).map_err(|why| ApiError::internal(&format!("{}: {why}", path.display())))?;
        Ok(text.split_once('\n').map(|(_, talk)| talk.to_owned()))
    }

    /// Keeps a conversation instead of the one with its id, unless that was changed later.
    pub(crate) fn keep(&self, owner: Option<u64>, id: &str, talk: &Value) -> Result<Kept, ApiError> {
        if id.is_empty() || id.len() > LONGEST_ID || id.chars().any(char::is_control) {
            return Err(ApiError::invalid("id", format!("an id is 1 to {LONGEST_ID} letters")));
        }
        if !talk.get("nodes").is_some_and(Value::is_object) || talk.get("id").and_then(Value::as_str) != Some(id) {
            return Err(ApiError::invalid("nodes", "a conversation has `nodes`, and the `id` of its address"));
        }
        let head = Head { shown: head_of(id, talk), bytes: 0 };
        let text = format!("{}\n{talk}", head.shown);
        let head = Head { bytes: text.len() as u64, ..head };
        let kept = self.of_key(owner)?;
        let mut kept = lock(&kept);
        let before = kept.heads.get(id);
        if before.is_some_and(|before| before.changed() > head.changed()) {
            return Ok(Kept::Newer);
        }
        let freed = before.map_or(0, |before| before.bytes);
        let (count, bytes) = (kept.heads.len() + usize::from(before.is_none()), kept.bytes - freed + head.bytes);
        if count > self.limits.count || bytes > self.limits.bytes {
            let message = format!(
                "the conversations of this key are {} with {} bytes, and may be {} with {}; delete some",
                kept.heads.len(),
                kept.bytes,
                self.limits.count,
                self.limits.bytes
            );
            return Err(ApiError::new(Kind::TooLarge, message));
        }
        let path = kept.folder.join(file_name(id));
        Output::write(&path, Overwrite::Yes, text.as_bytes()).map_err(|why| ApiError::internal(&why))?;
        kept.bytes = bytes;
        kept.heads.insert(id.to_owned(), head);
        Ok(Kept::Yes)
    }

    /// Removes a conversation; says whether it was there.
    pub(crate) fn remove(&self, owner: Option<u64>, id: &str) -> Result<bool, ApiError> {
        let kept = self.of_key(owner)?;
        let mut kept = lock(&kept);
        let Some(head) = kept.heads.get(id) else { return Ok(false) };
        let (bytes, path) = (head.bytes, kept.folder.join(file_name(id)));
        match std::fs::remove_file(&path) {
            Err(why) if why.kind() != std::io::ErrorKind::NotFound => {
                return Err(ApiError::internal(&format!("{}: {why}", path.display())));
            }
            _ => {}
        }
        kept.heads.remove(id);
        kept.bytes -= bytes;
        Ok(true)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn talk(id: &str, changed: u64, text: &str) -> Value {
        json!({"id": id, "title": "T", "made": 1, "changed": changed, "nodes": {"n": {"id": "n", "content": text}}})
    }

    #[test]
    fn conversations_outlast_the_server_and_belong_to_a_key() {
        let folder = std::env::temp_dir().join(format!("kiln-conversations-{}", std::process::id()));
        let open = |limits| Conversations::new(&folder, limits);
        let first = open(ConversationLimits::default());
        let odd = "../../etc/passwd";
        for id in ["a", "b", odd] {
            assert_eq!(first.keep(Some(1), id, &talk(id, 5, "hi")).expect("kept"), Kept::Yes);
        }
        assert!(first.list(Some(2)).expect("read").is_empty() && first.find(Some(2), "a").expect("read").is_none());
        assert!(first.list(None).expect("read").is_empty());
        // Another server finds them, and nothing that is none of them.
        let own = folder.join("key-0000000000000001");
        std::fs::write(own.join("junk.kiln-chat"), "no JSON").expect("written");
        std::fs::write(own.join(file_name("c")), "{\"id\": \"another\"}\n{}").expect("written");
        let again = open(ConversationLimits::default());
        let mut ids: Vec<String> = again
            .list(Some(1))
            .expect("read")
            .iter()
            .map(|head| head["id"].as_str().unwrap_or_default().to_owned())
            .collect();
        ids.sort();
        assert_eq!(ids, [odd, "a", "b"]);
        let found: Value =
            serde_json::from_str(&again.find(Some(1), odd).expect("read").expect("there")).expect("JSON");
        assert_eq!(found, talk(odd, 5, "hi"));
        // An older one does not take the place of a newer one; a newer one does.
        assert_eq!(again.keep(Some(1), "a", &talk("a", 4, "old")).expect("looked at"), Kept::Newer);
        assert_eq!(again.keep(Some(1), "a", &talk("a", 6, "new")).expect("kept"), Kept::Yes);
        assert!(again.find(Some(1), "a").expect("read").expect("there").contains("new"));
        assert!(again.remove(Some(1), "b").expect("removed") && !again.remove(Some(1), "b").expect("looked for"));
        // What does not fit is refused, and what was there stays.
        let full = open(ConversationLimits { count: 2, bytes: 2000 });
        assert_eq!(full.keep(Some(1), "d", &talk("d", 1, "x")).expect_err("too many").kind, Kind::TooLarge);
        assert_eq!(
            full.keep(Some(1), "a", &talk("a", 9, &"x".repeat(3000))).expect_err("too large").kind,
            Kind::TooLarge
        );
        assert!(full.find(Some(1), "a").expect("read").expect("there").contains("new"));
        for (id, wrong) in [
            ("", talk("", 1, "x")),
            ("e", json!({"id": "e"})),
            ("e", talk("f", 1, "x")),
            ("a\nb", talk("a\nb", 1, "x")),
        ] {
            assert_eq!(full.keep(None, id, &wrong).expect_err("refused").kind, Kind::Invalid, "{id:?}");
        }
        std::fs::remove_dir_all(&folder).expect("removed");
    }
}
