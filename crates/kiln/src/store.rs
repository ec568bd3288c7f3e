//! The store of models as the commands meet it: names on the command line become files, with progress on stderr.

use std::path::{Path, PathBuf};
use std::sync::{Mutex, PoisonError};

use indicatif::ProgressBar;
use kiln_store::{Error, Name, Store, Watch, is_default};

use crate::config;
use crate::output::{byte_progress, say};

/// The store that the environment speaks of.
pub(crate) fn store() -> anyhow::Result<Store> {
    Ok(Store::from_environment()?)
}

/// Shows downloads as progress bars.
#[derive(Default)]
pub(crate) struct Bars(Mutex<Option<ProgressBar>>);

impl Bars {
    fn bar(&self) -> std::sync::MutexGuard<'_, Option<ProgressBar>> {
        self.0.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

impl Watch for Bars {
    fn say(&self, line: &str) {
        say(line);
    }

    fn start(&self, what: &str, total: u64, there: u64) {
        let bar = byte_progress(total, what);
        bar.set_position(there);
        // What was there before says nothing about the rate.
        bar.reset_eta();
        *self.bar() = Some(bar);
    }

    fn advance(&self, bytes: u64) {
        if let Some(bar) = &*self.bar() {
            bar.inc(bytes);
        }
    }

    fn end(&self) {
        if let Some(bar) = self.bar().take() {
            bar.finish_and_clear();
        }
    }
}

/// The file of the model that was named, or of the default one: fetched where it is not on this machine.
pub(crate) fn resolve(model: Option<&Path>) -> anyhow::Result<PathBuf> {
    let chosen = config::default_model().map(Path::new);
    let Some(path) = model.or(chosen) else { return Ok(store()?.default_model(&Bars::default())?) };
    let text = path.to_string_lossy();
    // What is spelled like a file is one; opening it says what is wrong with it.
    let is_file = !Name::parse(&text)?.is_remote() && (text.contains('/') || text.to_lowercase().ends_with(".gguf"));
    if is_file || path.exists() {
        return Ok(path.to_owned());
    }
    Ok(store()?.get(&text, &Bars::default())?)
}

/// Whether a word of the command line names a model: a file, an address of one, or a name in the store.
pub(crate) fn is_model(word: &str) -> bool {
    if Path::new(word).exists() {
        return true;
    }
    match Name::parse(word) {
        Ok(name) if name.is_remote() => true,
        Ok(_) if is_default(word) => true,
        // Where the store has something of this name that it cannot give, looking for it says why.
        Ok(_) => store().is_ok_and(|store| {
            matches!(store.record(word), Ok(_) | Err(Error::Outside { .. } | Error::Ambiguous { .. }))
        }),
        // A name that is spelled wrong: what is wrong with it is said when it is looked for.
        Err(_) => true,
    }
}
