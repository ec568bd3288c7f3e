//! Where models lie and where they come from: folders and addresses, by the variables that other programs honour too.

use std::path::{Path, PathBuf};
use std::time::Duration;

use etcetera::BaseStrategy as _;
use kiln_system::environment;

use crate::error::{Error, Result};

/// Folders, addresses and manners of a store.
#[derive(Clone, Debug)]
pub struct Settings {
    /// The store's own folder: `KILN_MODELS`, else `kiln/models` in the user's data folder.
    pub folder: PathBuf,
    /// Hugging Face, or a mirror of it: `HF_ENDPOINT`.
    pub hub_endpoint: String,
    /// The cache that all programs share which use Hugging Face.
    pub hub_cache: PathBuf,
    /// The key for private and gated models: `HF_TOKEN`, else the file that `hf auth login` writes.
    pub hub_token: Option<String>,
    /// Nothing is fetched from Hugging Face: `HF_HUB_OFFLINE`.
    pub offline: bool,
    /// Ollama's registry, or a mirror of it: `KILN_OLLAMA_REGISTRY`.
    pub ollama_registry: String,
    /// Models that Ollama has fetched already: `OLLAMA_MODELS`, else `.ollama/models` in the home folder. They are only
    /// read.
    pub ollama_models: Option<PathBuf>,
    /// Pieces of a file that are fetched side by side.
    pub connections: usize,
    /// Bytes of a piece; by the size of the file where nothing is said.
    pub piece: Option<u64>,
    /// Times that a request is made again before anything came of it.
    pub tries: u32,
    /// How long to wait before the second try; twice as long before each one after it.
    pub pause: Duration,
}

impl Settings {
    /// What the environment says.
    pub fn from_environment() -> Result<Settings> {
        let dirs = etcetera::choose_base_strategy().ok();
        let home = dirs.as_ref().map(|dirs| dirs.home_dir().to_owned());
        let folder = match (environment::path("KILN_MODELS"), &dirs) {
            (Some(named), _) => named,
            (None, Some(dirs)) => dirs.data_dir().join("kiln/models"),
            (None, None) => return Err(Error::NoHome),
        };
        // In the order of the programs that share the folder.
        let hub_home = environment::path("HF_HOME")
            .or_else(|| dirs.as_ref().map(|dirs| dirs.cache_dir().join("huggingface")))
            .unwrap_or_else(|| folder.join("huggingface"));
        let hub_cache = environment::path("HF_HUB_CACHE")
            .or_else(|| environment::path("HUGGINGFACE_HUB_CACHE"))
            .unwrap_or_else(|| hub_home.join("hub"));
        let endpoint = |variable: &str, usual: &str| {
            environment::text(variable).map_or_else(|| usual.to_owned(), |text| text.trim_end_matches('/').to_owned())
        };
        Ok(Settings {
            hub_endpoint: endpoint("HF_ENDPOINT", "https://huggingface.co"),
            hub_token: token(&hub_home),
            offline: environment::is_on("HF_HUB_OFFLINE"),
            ollama_registry: endpoint("KILN_OLLAMA_REGISTRY", "https://registry.ollama.ai"),
            ollama_models: environment::path("OLLAMA_MODELS").or_else(|| home.map(|home| home.join(".ollama/models"))),
            ..Settings::new(folder, hub_cache)
        })
    }

    /// The usual ones, with these folders.
    pub fn new(folder: impl Into<PathBuf>, hub_cache: impl Into<PathBuf>) -> Settings {
        Settings {
            folder: folder.into(),
            hub_endpoint: "https://huggingface.co".into(),
            hub_cache: hub_cache.into(),
            hub_token: None,
            offline: false,
            ollama_registry: "https://registry.ollama.ai".into(),
            ollama_models: None,
            connections: 4,
            piece: None,
            tries: 6,
            pause: Duration::from_millis(500),
        }
    }
}

fn token(hub_home: &Path) -> Option<String> {
    let file = environment::path("HF_TOKEN_PATH").unwrap_or_else(|| hub_home.join("token"));
    let text = environment::text("HF_TOKEN").or_else(|| std::fs::read_to_string(file).ok())?;
    // What is no header value cannot be a token, and must not become two headers.
    let text = text.trim();
    (!text.is_empty() && text.bytes().all(|b| b.is_ascii_graphic())).then(|| text.to_owned())
}
