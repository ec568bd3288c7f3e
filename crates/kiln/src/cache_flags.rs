//! Where prefixes are kept that the device has no room for: flags of commands that serve many turns.

use std::path::PathBuf;
use std::sync::Once;

use kiln_engine::run::{Engine, Scheduler};

use crate::commands::serve::bytes;
use crate::output::say;

/// Memory for prefixes beyond the device's.
#[derive(clap::Args, Clone, Debug)]
#[command(next_help_heading = "Prefix cache")]
pub(crate) struct CacheFlags {
    /// Host memory for cached prefixes that the device has no room for, as 8G; a number alone is MiB; 0 for none
    /// [default: none for pages, an eighth of the free memory for states of recurrent models]
    #[arg(long, value_name = "SIZE", value_parser = ram)]
    pub(crate) cache_ram: Option<u64>,
    /// Folder that finished prompts and answers are kept in, so that they need not be computed again after a restart. It holds
    /// what users wrote, in a form that only the same model reads; only its owner can open it
    #[arg(long, value_name = "FOLDER")]
    pub(crate) cache_disk: Option<PathBuf>,
    /// Most bytes of that folder, for all models together; what was not used for longest goes first
    #[arg(long, value_name = "SIZE", default_value = "16G", value_parser = bytes, requires = "cache_disk")]
    pub(crate) cache_disk_size: u64,
}

impl CacheFlags {
    /// Gives an engine the memory that was asked for. A folder that cannot be used is said once, and gone without.
    pub(crate) fn apply(&self, engine: &mut Engine) {
        static SAID: Once = Once::new();
        if let Some(bytes) = self.cache_ram {
            engine.limit_host_cache(usize::try_from(bytes).unwrap_or(usize::MAX));
        }
        let opened = self.cache_disk.as_ref().map(|folder| engine.open_disk_cache(folder, self.cache_disk_size));
        if let Some(Err(why)) = opened {
            SAID.call_once(|| say(&format!("note: nothing is kept on disk: {why}")));
        }
    }

    /// The same for an engine that runs.
    pub(crate) fn apply_to(&self, scheduler: &Scheduler) -> anyhow::Result<()> {
        let flags = self.clone();
        Ok(scheduler.with_engine(move |engine| flags.apply(engine))?)
    }
}

/// A size of memory; numbers alone are MiB, as in llama.cpp.
fn ram(text: &str) -> Result<u64, String> {
    if !text.is_empty() && text.bytes().all(|byte| byte.is_ascii_digit()) {
        return bytes(&format!("{text}M"));
    }
    bytes(text)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_number_alone_is_mebibytes() {
        assert_eq!(["0", "512", "512K", "2G"].map(ram), [Ok(0), Ok(512 << 20), Ok(512 << 10), Ok(2 << 30)]);
        assert!(ram("").is_err() && ram("-1").is_err() && ram("much").is_err());
    }
}
