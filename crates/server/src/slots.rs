//! The slots of llama-server's API: numbers under which the last texts can be found again, saved to a file and brought back. Nothing
//! is computed in them; what the engine remembers of a text, it finds by its tokens.

use std::path::{Path, PathBuf};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::Instant;

use kiln_engine::run::{Engine, Entry, Request, StopRule, Wanted};
use kiln_engine::sampler::Sampling;
use kiln_system::files::{Output, Overwrite};
use kiln_system::os;
use serde_json::{Value, json};
use sha2::{Digest as _, Sha256};

use crate::api_error::{ApiError, Kind};
use crate::prep_pool::release;
use crate::registry::Loaded;

/// Tokens that are fed at once where some are no longer remembered.
const PIECE: usize = 512;

/// The last text under one number.
#[derive(Clone, Default)]
struct Slot {
    owner: u64,
    tokens: Vec<u32>,
    /// Texts begun before this one, of all slots.
    number: u64,
    /// What the text was asked for.
    wish: Option<Wish>,
    /// It is being read or written.
    running: bool,
    /// Tokens of it that the model has written.
    written: usize,
}

/// A text's claim to a slot. It ends when another text takes the slot, or when the slot is erased or restored.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct SlotClaim {
    pub(crate) at: usize,
    number: u64,
}

/// What a text was asked for.
#[derive(Clone)]
pub(crate) struct Wish {
    pub(crate) sampling: Sampling,
    pub(crate) limit: Option<usize>,
    pub(crate) stop: StopRule,
}

/// A slot as others may see it.
pub(crate) struct Seen {
    /// The number of its text; none before the first one.
    pub(crate) task: Option<u64>,
    pub(crate) running: bool,
    pub(crate) written: usize,
    /// What the text was asked for, if the one who looks has asked.
    pub(crate) wish: Option<Wish>,
}

/// All slots of a model.
pub(crate) struct Slots(Mutex<Vec<Slot>>);

impl Slots {
    pub(crate) fn new(count: usize) -> Slots {
        Slots(Mutex::new(vec![Slot::default(); count]))
    }

    fn all(&self) -> MutexGuard<'_, Vec<Slot>> {
        self.0.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// A text begins: under the number that is wanted, else under the one that was used the longest time ago, which is one of a text that
    /// is over where there is any.
    pub(crate) fn begin(&self, wanted: Option<usize>, request: &Request) -> SlotClaim {
        let mut slots = self.all();
        let oldest = slots.iter().enumerate().min_by_key(|(_, slot)| (slot.running, slot.number));
        let at = wanted.filter(|at| *at < slots.len()).or(oldest.map(|(at, _)| at)).unwrap_or(0);
        let number = next_number(&slots);
        if let Some(slot) = slots.get_mut(at) {
            let wish = Wish { sampling: request.sampling.clone(), limit: request.limit, stop: request.stop.clone() };
            let (owner, tokens) = (request.owner, request.prompt.clone());
            *slot = Slot { owner, tokens, number, wish: Some(wish), running: true, written: 0 };
        }
        SlotClaim { at, number }
    }

    /// A sequence continues. Its tokens are kept while the slot is its own.
    pub(crate) fn push(&self, claim: SlotClaim, token: u32) {
        if let Some(slot) = self.all().get_mut(claim.at).filter(|slot| slot.number == claim.number) {
            slot.tokens.push(token);
            slot.written += 1;
        }
    }

    /// Texts are over, however they ended.
    pub(crate) fn end(&self, claims: &[SlotClaim]) {
        let mut slots = self.all();
        for claim in claims {
            if let Some(slot) = slots.get_mut(claim.at).filter(|slot| slot.number == claim.number) {
                slot.running = false;
            }
        }
    }

    /// All slots, as an owner may see them.
    pub(crate) fn seen(&self, owner: u64) -> Vec<Seen> {
        let seen = |slot: &Slot| Seen {
            task: Some(slot.number).filter(|number| *number > 0),
            running: slot.running,
            written: slot.written,
            // What ends a text is something that its owner has said.
            wish: slot.wish.clone().filter(|_| slot.owner == owner),
        };
        self.all().iter().map(seen).collect()
    }

    fn tokens(&self, at: usize, owner: u64) -> Result<Vec<u32>, ApiError> {
        let slots = self.all();
        let slot = slots
            .get(at)
            .ok_or_else(|| ApiError::new(Kind::Invalid, format!("there are slots 0 to {}", slots.len() - 1)))?;
        // What others have written is not there.
        Ok(if slot.owner == owner { slot.tokens.clone() } else { Vec::new() })
    }

    /// Puts other tokens into a slot. A text that is being written there loses it.
    fn set(&self, at: usize, owner: u64, tokens: Vec<u32>) {
        let mut slots = self.all();
        let number = next_number(&slots);
        if let Some(slot) = slots.get_mut(at) {
            *slot = Slot { owner, tokens, number, ..Slot::default() };
        }
    }
}

fn next_number(slots: &[Slot]) -> u64 {
    slots.iter().map(|slot| slot.number).max().unwrap_or(0) + 1
}

/// Where the slots of one client are saved: clients with different keys have different folders, so that none can read or replace what
/// another has saved.
pub(crate) struct Folder(Option<PathBuf>);

/// Files that one client may have.
const MOST_FILES: usize = 64;

impl Folder {
    /// The folder of the client with this key; without one, or where all keys share, the one that all share.
    pub(crate) fn of(folder: Option<&Path>, secret: Option<&str>) -> Folder {
        // Keys may change their order and names; the secret is what makes a client the same.
        let own = |secret: &str| {
            let hash = Sha256::digest([b"kiln slots ", secret.as_bytes()].concat());
            format!("key-{}", hash.iter().take(12).map(|byte| format!("{byte:02x}")).collect::<String>())
        };
        Folder(folder.map(|folder| secret.map_or(folder.to_owned(), |secret| folder.join(own(secret)))))
    }

    /// Writes a file that only the server's user can read.
    fn write(&self, path: &Path, bytes: &[u8]) -> Result<(), ApiError> {
        let failed = |error: &dyn std::fmt::Display| ApiError::internal(error);
        let Some(folder) = &self.0 else { return Err(ApiError::internal(&"slots are saved nowhere")) };
        os::make_private_folder(folder).map_err(|error| failed(&error))?;
        let files = std::fs::read_dir(folder).map_err(|error| failed(&error))?;
        let others = files.flatten().filter(|file| file.path() != path && file.path().is_file()).count();
        if others >= MOST_FILES {
            let message = format!("{others} slots are saved already, which is all that a client may have");
            return Err(ApiError::invalid("filename", format!("{message}; save over one of them")));
        }
        Output::write(path, Overwrite::Yes, bytes).map_err(|error| failed(&error))?;
        os::make_private(path).map_err(|error| failed(&error))
    }
}

/// A file of the folder for states. Names that lead out of it are refused.
fn file(folder: &Folder, name: &str) -> Result<PathBuf, ApiError> {
    let folder = folder.0.as_ref().ok_or_else(|| {
        ApiError::new(Kind::CannotDo, "slots are not saved here\nhint: start the server with --slot-save-path FOLDER")
    })?;
    let plain = |c: char| c.is_alphanumeric() || matches!(c, '.' | '-' | '_' | ' ');
    if name.is_empty() || name.len() > 200 || name.starts_with('.') || !name.chars().all(plain) {
        return Err(ApiError::invalid("filename", "`filename` must be a name of letters, digits, `-`, `_` and `.`"));
    }
    Ok(folder.join(name))
}

/// Everything that the engine remembers of a text; what it has forgotten is computed again.
fn remembered(engine: &mut Engine, owner: u64, tokens: &[u32]) -> Result<Vec<u8>, kiln_engine::Error> {
    let sequence = engine.open(owner)?;
    let mut work = || {
        let cached = engine.reuse(sequence, tokens)?;
        for piece in tokens[cached..].chunks(PIECE) {
            engine.feed(&[Entry { sequence, tokens: piece, wanted: Wanted::Nothing }])?;
        }
        engine.save_state(sequence)
    };
    let saved = work();
    engine.close(sequence);
    saved
}

/// Writes a slot to a file.
pub(crate) fn save(loaded: &Loaded, at: usize, owner: u64, folder: &Folder, name: &str) -> Result<Value, ApiError> {
    let (path, start) = (file(folder, name)?, Instant::now());
    let tokens = loaded.slots.tokens(at, owner)?;
    if tokens.is_empty() {
        return Err(ApiError::new(Kind::Invalid, format!("slot {at} holds nothing")));
    }
    let count = tokens.len();
    release();
    let bytes = loaded.scheduler.with_engine(move |engine| remembered(engine, owner, &tokens))??;
    folder.write(&path, &bytes)?;
    let took = start.elapsed().as_secs_f64() * 1e3;
    Ok(json!({
        "id_slot": at, "filename": name, "n_saved": count, "n_written": bytes.len(), "timings": {"save_ms": took},
    }))
}

/// Brings a slot back from a file: prompts that begin as it does need not be computed.
pub(crate) fn restore(loaded: &Loaded, at: usize, owner: u64, folder: &Folder, name: &str) -> Result<Value, ApiError> {
    let (path, start) = (file(folder, name)?, Instant::now());
    loaded.slots.tokens(at, owner)?;
    let model = Arc::clone(loaded.scheduler.model());
    let bytes = kiln_engine::state::read(&path, &model).map_err(|error| {
        log::warn!("{error}");
        ApiError::invalid("filename", format!("{name:?} is no saved slot of this model"))
    })?;
    let length = bytes.len();
    release();
    let tokens = loaded.scheduler.with_engine(move |engine| {
        let sequence = engine.open(owner)?;
        let loaded = engine.load_state(sequence, &bytes).map(|()| engine.tokens(sequence).to_vec());
        // Its full pages stay in the prefix cache until their memory is needed.
        engine.close(sequence);
        loaded
    })??;
    let count = tokens.len();
    loaded.slots.set(at, owner, tokens);
    let took = start.elapsed().as_secs_f64() * 1e3;
    Ok(json!({
        "id_slot": at, "filename": name, "n_restored": count, "n_read": length, "timings": {"restore_ms": took},
    }))
}

/// Forgets a slot.
pub(crate) fn erase(loaded: &Loaded, at: usize, owner: u64) -> Result<Value, ApiError> {
    let tokens = loaded.slots.tokens(at, owner)?;
    loaded.slots.set(at, owner, Vec::new());
    Ok(json!({"id_slot": at, "n_erased": tokens.len()}))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn files_stay_in_their_folder() {
        let folder = &Folder::of(Some(Path::new("/f")), None);
        assert_eq!(file(folder, "a-1.bin").expect("fine"), Path::new("/f/a-1.bin"));
        let own = |secret| file(&Folder::of(Some(Path::new("/f")), Some(secret)), "a").expect("fine");
        assert!(own("alice") != own("bob") && own("alice") == own("alice"));
        assert!(!own("alice").to_string_lossy().contains("alice"), "the key stays secret");
        for bad in ["", "..", "../a", "a/b", "a\\b", ".hidden", "a\0b", &"x".repeat(300)] {
            assert_eq!(file(folder, bad).expect_err("refused").kind, Kind::Invalid, "{bad}");
        }
        assert_eq!(file(&Folder::of(None, None), "a").expect_err("refused").kind, Kind::CannotDo);
    }

    fn begin(slots: &Slots, wanted: Option<usize>, owner: u64, token: u32) -> SlotClaim {
        slots.begin(wanted, &Request { owner, ..Request::new(vec![token]) })
    }

    #[test]
    fn texts_take_the_slot_they_want_or_the_oldest() {
        let slots = Slots::new(2);
        assert_eq!(begin(&slots, None, 1, 1).at, 0);
        let second = begin(&slots, None, 1, 2);
        assert_eq!(second.at, 1);
        assert_eq!(begin(&slots, None, 2, 3).at, 0, "both are in use");
        slots.end(&[second]);
        assert_eq!(begin(&slots, None, 2, 3).at, 1, "its text is over");
        let wanted = begin(&slots, Some(0), 1, 4);
        assert_eq!(wanted.at, 0);
        slots.push(wanted, 5);
        slots.end(&[wanted]);
        assert_eq!(begin(&slots, Some(9), 1, 6).at, 0, "a number that there is not is no wish");
        let wanted = begin(&slots, Some(0), 1, 4);
        slots.push(wanted, 5);
        slots.end(&[wanted]);
        let seen =
            |owner| slots.seen(owner).iter().map(|s| (s.running, s.written, s.wish.is_some())).collect::<Vec<_>>();
        assert_eq!(seen(1), [(false, 1, true), (true, 0, false)], "the second is of somebody else");
        assert_eq!(seen(2), [(false, 1, false), (true, 0, true)]);
        assert_eq!(slots.tokens(0, 1).expect("there"), [4, 5]);
        assert!(slots.tokens(0, 2).expect("there").is_empty(), "of somebody else");
        assert!(slots.tokens(2, 1).is_err());
    }

    #[test]
    fn a_text_that_has_lost_its_slot_writes_nothing_into_it() {
        let slots = Slots::new(1);
        // More texts than slots, of two clients.
        let (alice, bob) = (begin(&slots, None, 1, 10), begin(&slots, None, 2, 20));
        assert_eq!((alice.at, bob.at), (0, 0));
        slots.push(alice, 11);
        slots.push(bob, 21);
        slots.end(&[alice]);
        let seen = slots.seen(2).remove(0);
        assert!((seen.running, seen.written) == (true, 1), "bob's text goes on");
        assert_eq!(slots.tokens(0, 2).expect("there"), [20, 21]);
        // A slot that is restored meanwhile holds what was in the file.
        slots.set(0, 2, vec![30, 31]);
        slots.push(bob, 22);
        slots.end(&[bob]);
        assert_eq!(slots.tokens(0, 2).expect("there"), [30, 31]);
    }
}
