//! The store of models as clients of a server meet it, where `--allow-pull` lets them: registries by name, and nothing else.

use std::path::{Path, PathBuf};
use std::sync::{Mutex, PoisonError};

use kiln_server::{ModelStore, PullProgress};
use kiln_store::{Name, Store, Watch, is_default};

use crate::output::say;

/// Fetches and removes models for clients.
pub(crate) struct Managed {
    pub(crate) store: Store,
    /// Files that are being served; they stay.
    pub(crate) served: Vec<PathBuf>,
}

/// The registry that a client's name means: Ollama's own unless it says another one. Addresses and packages are what the server's machine
/// could be made to ask, or run, for others.
fn registry(name: &str) -> Result<Name, String> {
    let hub = ["hf.co/", "huggingface.co/"].iter().find_map(|host| name.strip_prefix(host));
    let full = match hub {
        Some(rest) => format!("hf:{rest}"),
        None if name.starts_with("hf:") || name.starts_with("ollama:") => name.to_owned(),
        None if name.contains("://") || name.starts_with("pypi:") => {
            return Err(format!(
                "{name:?} is not fetched for clients; models of Ollama and of Hugging Face are (hf.co/OWNER/REPO)"
            ));
        }
        None => format!("ollama:{}", name.strip_prefix("registry.ollama.ai/").unwrap_or(name)),
    };
    Name::parse(&full).map_err(|error| error.to_string())
}

/// A download's progress, for a client.
struct Told<'a> {
    to: &'a (dyn Fn(PullProgress) + Sync),
    now: Mutex<Option<PullProgress>>,
}

impl Told<'_> {
    fn change(&self, change: impl FnOnce(&mut Option<PullProgress>)) {
        let mut now = self.now.lock().unwrap_or_else(PoisonError::into_inner);
        change(&mut now);
        if let Some(progress) = &*now {
            (self.to)(progress.clone());
        }
    }
}

impl Watch for Told<'_> {
    fn say(&self, line: &str) {
        say(line);
    }

    fn start(&self, what: &str, total: u64, there: u64) {
        self.change(|now| *now = Some(PullProgress { file: what.to_owned(), total, completed: there }));
    }

    fn advance(&self, bytes: u64) {
        self.change(|now| {
            if let Some(now) = now {
                now.completed += bytes;
            }
        });
    }

    fn end(&self) {
        *self.now.lock().unwrap_or_else(PoisonError::into_inner) = None;
    }
}

impl ModelStore for Managed {
    fn pull(&self, name: &str, progress: &(dyn Fn(PullProgress) + Sync)) -> Result<(), String> {
        let watch = Told { to: progress, now: Mutex::new(None) };
        let pulled = match is_default(name) {
            true => self.store.default_model(&watch).map(drop),
            false => self.store.pull(&registry(name)?, None, None, &watch).map(drop),
        };
        pulled.map_err(|error| error.to_string())
    }

    fn remove(&self, name: &str) -> Result<bool, String> {
        let plain = name.strip_suffix(":latest").unwrap_or(name);
        let found = [name.to_owned(), plain.to_owned(), format!("ollama:{name}"), format!("ollama:{plain}")];
        let found = found.iter().find_map(|name| self.store.named(name).ok().flatten());
        let Some(record) = found else { return Ok(false) };
        let real = |path: &Path| path.canonicalize().unwrap_or_else(|_| path.to_owned());
        let file = record.path().map(real);
        if self.served.iter().any(|served| Some(real(served)) == file) {
            return Err(format!("{} is being served", record.name));
        }
        self.store.remove(&record).map(|_| true).map_err(|error| error.to_string())
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn clients_name_models_as_ollama_does() {
        for (name, full) in [
            ("llama3.2:1b", "ollama:llama3.2:1b"),
            ("owner/model", "ollama:owner/model"),
            ("hf.co/owner/repo:Q4_K_M", "hf:owner/repo:Q4_K_M"),
            ("hf:owner/repo", "hf:owner/repo"),
        ] {
            assert_eq!(registry(name).unwrap(), Name::parse(full).unwrap(), "{name}");
        }
        for wrong in [
            "http://127.0.0.1/x.gguf",
            "https://example.org/x.gguf",
            "pypi:requests",
            "../../etc/passwd",
            "/etc/passwd",
            "a/b/c/d",
        ] {
            assert!(registry(wrong).is_err(), "{wrong}");
        }
    }
}
