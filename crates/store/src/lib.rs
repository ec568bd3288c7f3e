//! Models from anywhere. A [`Name`] says where a model comes from; [`Store`] finds it on this machine or fetches it,
//! keeps a record of it, and can list, check and remove what was fetched.
//!
//! One file for each registry (`hub.rs`, `ollama.rs`, `pip.rs`), one for the downloads they share (`download.rs`). Nothing
//! that a server says is used as a path or believed as a length: names are checked when they come in, bytes are hashed
//! before they get their name. Nothing here knows how a model is run.

mod digest;
mod download;
mod error;
mod http;
mod hub;
mod name;
mod ollama;
mod pip;
mod place;
mod quants;
mod record;
mod settings;
mod store;

pub use digest::{Digest, hash_file};
pub use download::{Incomplete, is_resumable};
pub use error::{Error, Result};
pub use name::Name;
pub use record::{Kept, Record};
pub use settings::Settings;
pub use store::{Checked, DEFAULT_NAME, Left, Removed, Stays, Store, is_default};

/// The text at an address: a short one, as servers list what they have.
pub fn text_at(url: &str) -> Result<String> {
    let client = http::Client::new(&Settings { tries: 2, ..Settings::from_environment()? })?;
    client.text(&http::Request::new(url))
}

/// Receives the progress of a download: a progress bar, or [`Silent`].
pub trait Watch: Sync {
    /// One line for the user.
    fn say(&self, line: &str);
    /// A file of `total` bytes begins, of which `there` are on disk already.
    fn start(&self, what: &str, total: u64, there: u64);
    /// `bytes` more have arrived.
    fn advance(&self, bytes: u64);
    /// The file is complete, or was given up.
    fn end(&self);
}

/// Reports nothing.
#[derive(Clone, Copy, Debug)]
pub struct Silent;

impl Watch for Silent {
    fn say(&self, _: &str) {}
    fn start(&self, _: &str, _: u64, _: u64) {}
    fn advance(&self, _: u64) {}
    fn end(&self) {}
}
