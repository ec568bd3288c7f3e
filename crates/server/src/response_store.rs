//! Responses that clients come back to (`previous_response_id`, `GET /v1/responses/ID`): kept in memory, for a time, bounded in number and
//! bytes. Each belongs to the key that asked for it, and no other key can find it.

use std::collections::HashMap;
use std::hash::{BuildHasher as _, RandomState};
use std::sync::{Mutex, MutexGuard, PoisonError};
use std::time::{Duration, Instant};

use serde_json::Value;

/// How much is kept.
#[derive(Clone, Copy, Debug)]
pub struct StoredResponses {
    /// Responses at most.
    pub count: usize,
    /// Bytes of all of them at most, as JSON; 0 keeps none.
    pub bytes: usize,
    /// How long each stays after it was last used.
    pub life: Duration,
}

impl Default for StoredResponses {
    fn default() -> StoredResponses {
        StoredResponses { count: 4096, bytes: 64 << 20, life: Duration::from_secs(24 * 3600) }
    }
}

/// Whose a response is: a number made from the secret of a key, so that it means the same key even where keys are read again.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub(crate) struct Owner(u64);

/// A response and what it was asked with.
pub(crate) struct Turn {
    pub(crate) response: Value,
    /// The items that this request brought, without those of the responses before.
    pub(crate) input: Vec<Value>,
    pub(crate) previous: Option<String>,
}

struct Entry {
    /// As JSON, so that its bytes can be counted.
    response: String,
    input: String,
    previous: Option<String>,
    used: Instant,
}

impl Entry {
    fn bytes(&self) -> usize {
        self.response.len() + self.input.len()
    }

    fn input(&self) -> Vec<Value> {
        serde_json::from_str(&self.input).unwrap_or_default()
    }

    fn response(&self) -> Value {
        serde_json::from_str(&self.response).unwrap_or_default()
    }

    /// What was asked and what was answered.
    fn items(&self) -> Vec<Value> {
        let mut items = self.input();
        if let Some(Value::Array(output)) = self.response().get_mut("output").map(Value::take) {
            items.extend(output);
        }
        items
    }
}

#[derive(Default)]
struct Kept {
    entries: HashMap<(Owner, String), Entry>,
    bytes: usize,
}

impl Kept {
    fn remove(&mut self, key: &(Owner, String)) -> bool {
        let removed = self.entries.remove(key);
        self.bytes -= removed.as_ref().map_or(0, Entry::bytes);
        removed.is_some()
    }

    /// The chain of responses that ends with `id`, the last first; nothing where one of them is gone. All of them are used by this.
    fn chain(&mut self, owner: Owner, id: &str) -> Option<Vec<String>> {
        let (mut ids, mut next) = (Vec::new(), Some(id.to_owned()));
        while let Some(id) = next {
            let entry = self.entries.get_mut(&(owner, id.clone()))?;
            entry.used = Instant::now();
            next = entry.previous.clone();
            ids.push(id);
        }
        Some(ids)
    }
}

/// All responses that are kept.
pub(crate) struct ResponseStore {
    limits: StoredResponses,
    hasher: RandomState,
    kept: Mutex<Kept>,
}

impl ResponseStore {
    pub(crate) fn new(limits: StoredResponses) -> ResponseStore {
        ResponseStore { limits, hasher: RandomState::new(), kept: Mutex::default() }
    }

    /// Whether anything is kept.
    pub(crate) fn keeps(&self) -> bool {
        self.limits.bytes > 0 && self.limits.count > 0
    }

    /// Whose responses a key finds; without keys there is one owner.
    pub(crate) fn owner(&self, secret: Option<&str>) -> Owner {
        Owner(self.hasher.hash_one(secret))
    }

    /// The responses that are still there.
    fn kept(&self) -> MutexGuard<'_, Kept> {
        let mut kept = self.kept.lock().unwrap_or_else(PoisonError::into_inner);
        let is_old = |entry: &Entry| entry.used.elapsed() > self.limits.life;
        let old: Vec<_> = kept.entries.iter().filter(|(_, entry)| is_old(entry)).map(|(key, _)| key.clone()).collect();
        for key in old {
            kept.remove(&key);
        }
        kept
    }

    /// Keeps a response. Those that were not used for longest make room.
    pub(crate) fn keep(&self, owner: Owner, turn: &Turn) {
        let Some(id) = turn.response["id"].as_str() else { return };
        let input = Value::Array(turn.input.clone()).to_string();
        let (response, previous) = (turn.response.to_string(), turn.previous.clone());
        let entry = Entry { response, input, previous, used: Instant::now() };
        if !self.keeps() || entry.bytes() > self.limits.bytes {
            return;
        }
        let mut kept = self.kept();
        while kept.entries.len() >= self.limits.count || kept.bytes + entry.bytes() > self.limits.bytes {
            let oldest = kept.entries.iter().min_by_key(|(_, entry)| entry.used).map(|(key, _)| key.clone());
            let Some(oldest) = oldest else { break };
            kept.remove(&oldest);
        }
        kept.bytes += entry.bytes();
        kept.entries.insert((owner, id.to_owned()), entry);
    }

    /// A response.
    pub(crate) fn response(&self, owner: Owner, id: &str) -> Option<Value> {
        self.kept().entries.get(&(owner, id.to_owned())).map(Entry::response)
    }

    /// Forgets a response; whether it was there.
    pub(crate) fn remove(&self, owner: Owner, id: &str) -> bool {
        self.kept().remove(&(owner, id.to_owned()))
    }

    /// All items of a conversation up to a response, its own among them; nothing where it, or one before it, is gone.
    pub(crate) fn conversation(&self, owner: Owner, id: &str) -> Option<Vec<Value>> {
        let mut kept = self.kept();
        let ids = kept.chain(owner, id)?;
        let entries = ids.into_iter().rev().filter_map(|id| kept.entries.get(&(owner, id)));
        Some(entries.flat_map(Entry::items).collect())
    }

    /// The items that a response was made from.
    pub(crate) fn input(&self, owner: Owner, id: &str) -> Option<Vec<Value>> {
        let (own, previous) = {
            let kept = self.kept();
            let entry = kept.entries.get(&(owner, id.to_owned()))?;
            (entry.input(), entry.previous.clone())
        };
        // Those before it may be gone: its own are still true.
        let mut items = previous.and_then(|id| self.conversation(owner, &id)).unwrap_or_default();
        items.extend(own);
        Some(items)
    }

    /// An item of any conversation of an owner.
    pub(crate) fn item(&self, owner: Owner, id: &str) -> Option<Value> {
        let kept = self.kept();
        // Its id stands in the text of its response; only those that have it are taken apart.
        let quoted = Value::from(id).to_string();
        let may_have = |entry: &&Entry| entry.response.contains(&quoted) || entry.input.contains(&quoted);
        let own = kept.entries.iter().filter(|((of, _), _)| *of == owner).map(|(_, entry)| entry);
        own.filter(may_have).flat_map(Entry::items).find(|item| item["id"] == id)
    }
}

#[cfg(test)]
mod tests {
    use serde_json::json;

    use super::*;

    fn turn(id: &str, asked: &str, previous: Option<&str>) -> Turn {
        let response = json!({"id": id, "output": [{"id": format!("{id}-out"), "said": asked}]});
        Turn { response, input: vec![json!({"id": format!("{id}-in")})], previous: previous.map(str::to_owned) }
    }

    #[test]
    fn conversations_are_found_whole_or_not_at_all_and_by_their_owner_alone() {
        let store = ResponseStore::new(StoredResponses::default());
        let [alice, bob, open] = [Some("alice"), Some("bob"), None].map(|secret| store.owner(secret));
        store.keep(alice, &turn("a", "1", None));
        store.keep(alice, &turn("b", "2", Some("a")));
        let ids = |items: Vec<Value>| {
            items.iter().map(|item| item["id"].as_str().unwrap_or_default().to_owned()).collect::<Vec<_>>()
        };
        assert_eq!(ids(store.conversation(alice, "b").expect("kept")), ["a-in", "a-out", "b-in", "b-out"]);
        assert_eq!(ids(store.input(alice, "b").expect("kept")), ["a-in", "a-out", "b-in"]);
        assert!(store.item(alice, "a-out").is_some_and(|item| item["said"] == "1"));
        for other in [bob, open] {
            assert!(store.conversation(other, "b").is_none() && store.response(other, "a").is_none());
            assert!(store.item(other, "a-out").is_none() && !store.remove(other, "a"));
        }
        assert!(store.remove(alice, "a") && !store.remove(alice, "a"));
        assert!(store.response(alice, "b").is_some() && store.conversation(alice, "b").is_none());
    }

    #[test]
    fn number_bytes_and_time_are_bounded() {
        let limits = StoredResponses { count: 3, bytes: 1000, life: Duration::from_secs(60) };
        let store = ResponseStore::new(limits);
        let owner = store.owner(None);
        for id in ["a", "b", "c"] {
            store.keep(owner, &turn(id, "x", None));
        }
        // Using one keeps it: the others go first.
        assert!(store.conversation(owner, "a").is_some());
        store.keep(owner, &turn("d", "x", None));
        let there = |id: &str| store.response(owner, id).is_some();
        assert_eq!(["a", "b", "c", "d"].map(there), [true, false, true, true]);
        store.keep(owner, &turn("e", &"x".repeat(920), None));
        assert_eq!(["a", "c", "d", "e"].map(there), [false, false, false, true]);
        store.keep(owner, &turn("f", &"x".repeat(2000), None));
        assert_eq!(["e", "f"].map(there), [true, false]);
        let brief = ResponseStore::new(StoredResponses { life: Duration::ZERO, ..limits });
        brief.keep(owner, &turn("a", "x", None));
        std::thread::sleep(Duration::from_millis(2));
        assert!(brief.response(owner, "a").is_none());
        let none = ResponseStore::new(StoredResponses { bytes: 0, ..limits });
        none.keep(owner, &turn("a", "x", None));
        assert!(!none.keeps() && none.response(owner, "a").is_none());
    }
}
